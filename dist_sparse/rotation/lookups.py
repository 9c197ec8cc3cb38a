"""Find the module that looks a table up, and its declared consumers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from dist_sparse.rotation.outputs import has_basis
from dist_sparse.tables.modules import modules_by_path
from dist_sparse.tables.port import torchrec_port
from dist_sparse.tables.shards import ShardedData

__all__ = ["Lookup", "find_lookup"]

_HARMLESS = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)
"""What may be between tables that are rotated together and their dot products."""


class Lookup(NamedTuple):
    """The model without wrappers, the module in it that looks a table up, the table of each output
    of a collection."""

    root: nn.Module
    module: nn.Module
    outputs: dict[str, str] | None


def find_lookup(models: Sequence[nn.Module], data: ShardedData, turned: bool) -> Lookup:
    """Return what looks a table up, in one of ``models``.

    Args:
        turned: its output will be turned back; otherwise only dot products may read it.

    Raises:
        ValueError: there is nothing, its output is not a sum of rows, another module reads the
            weight too, or something else than dot products reads the output.
    """
    for modules in map(modules_by_path, models):
        module, outputs = _module_of(modules, data)
        if module is None:
            continue
        reason = _refusal(modules, module, data, in_collection=outputs is not None)
        if not reason and not turned:
            reason = _refusal_to_meet_others(modules, module, data)
        if reason:
            raise ValueError(f"Table {data.name!r} can't be rotated: {reason}.")
        return Lookup(modules[""], module, outputs)
    raise ValueError(
        f"Table {data.name!r} can't be rotated: it is in no model given to add_model()."
    )


def _path_of(data: ShardedData) -> list[str]:
    """The path of the module that holds the weight."""
    return (data.fqn or "").removesuffix("weight").removesuffix(".").split(".")


def _module_of(
    modules: Mapping[str, nn.Module], data: ShardedData
) -> tuple[nn.Module | None, dict[str, str] | None]:
    """The module that looks a table up, if it is here, and the table of each output if it is a
    collection."""
    path = _path_of(data)
    # Of TorchRec's: <path of the collection>.embedding_bags.<table>
    torchrec, module = torchrec_port(), modules.get(".".join(path[:-2]))
    if torchrec is not None and module is not None and len(path) > 1:
        collection = torchrec.collection(module)
        if collection is not None:
            return module, collection.outputs()
    return modules.get(".".join(path)), None


def _refusal(
    modules: Mapping[str, nn.Module], module: nn.Module, data: ShardedData, in_collection: bool
) -> str:
    """Why the output of a table is not a sum of its rows, or not the only reader of the weight; ""
    if neither."""
    torchrec, around = torchrec_port(), modules.get(".".join(_path_of(data)[:-3]))
    if in_collection and torchrec and around and torchrec.processes_features(around):
        return f"{type(around).__name__} reads its collection without calling it"
    if getattr(module, "mode", "sum") == "max":
        return "its rows are pooled by their maximum"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm renormalizes its rows"
    return _tied(modules, data)


def _refusal_to_meet_others(
    modules: Mapping[str, nn.Module], module: nn.Module, data: ShardedData
) -> str:
    """Why something else than a dot product reads a table that is rotated together with others; ""
    if nothing does."""
    if has_basis(modules[""], data.name):
        return (
            'its output is rotated back, as rotate="table" does, so that dot products do not read'
            " its rows"
        )
    reader = _reader(modules, module)
    if reader:
        return (
            f"{reader} reads it, but only dot products may read tables that are rotated together;"
            ' use rotate="table", which rotates outputs back'
        )
    return ""


def _reader(modules: Mapping[str, nn.Module], table: nn.Module) -> str:
    """The layer or nonlinearity to which an ``nn.Sequential`` passes what ``table`` has looked up,
    if so."""
    for path, module in modules.items():
        if _computed_by(module) is not nn.Sequential:
            continue
        parts = list(_parts(module, path))
        for place, (_, part) in enumerate(parts):
            reader = _first_layer(parts[place + 1 :]) if part is table else ""
            if reader:
                return reader
    return ""


def _first_layer(parts: Sequence[tuple[str, nn.Module]]) -> str:
    """The first of the parts that are called in turn that a dot product does not commute with, if
    so."""
    for name, part in parts:
        if not _computed_by(part).__module__.startswith("torch.nn."):
            return ""  # the user's own, which may be the dot products
        if not isinstance(part, _HARMLESS):
            return f"{type(part).__name__} {name!r}"
    return ""


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield what an ``nn.Sequential`` calls in turn, without wrappers, by path; of nested ones
    their parts."""
    inner = modules_by_path(module)[""]
    if _computed_by(inner) is not nn.Sequential:
        yield path, inner
        return
    for name, child in inner._modules.items():
        if child is not None:
            yield from _parts(child, f"{path}.{name}".lstrip("."))


def _computed_by(module: nn.Module) -> type:
    """The class whose ``forward()`` a module runs."""
    return next(kind for kind in type(module).__mro__ if "forward" in vars(kind))


def _tied(modules: Mapping[str, nn.Module], data: ShardedData) -> str:
    """Why a weight that several modules hold can't be rotated, if so: the others would read it
    rotated."""
    places = {shard.tensor.data_ptr() for shard in data.shards if data.sharding == "replicated"}
    holders = [
        path or type(module).__name__
        for path, module in modules.items()
        if any(p is not None and p.data_ptr() in places for p in module._parameters.values())
    ]
    return f"the modules {holders} share its weight" if len(holders) > 1 else ""
