"""Find the module that looks a table up, and its declared consumers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from typing import NamedTuple

from torch import Tensor, nn

from dist_sparse.rotation.outputs import has_basis
from dist_sparse.tables.modules import modules_by_path, torchrec_port
from dist_sparse.tables.shards import ShardedData

# What may be between tables that are rotated together and their dot products.
_HARMLESS = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)


class Lookup(NamedTuple):
    """The module that looks a table up.

    Args:
        root: the model without wrappers.
        outputs: of a collection, the table of each output; None for other modules.
    """

    root: nn.Module
    module: nn.Module
    outputs: dict[str, str] | None


def find_lookup(models: Sequence[nn.Module], data: ShardedData, turned: bool) -> Lookup:
    """Return the module that looks a table up, in one of ``models``.

    Args:
        turned: its output will be turned back; otherwise only dot products may read it.

    Raises:
        ValueError: there is nothing, its output is not a sum of rows, another module reads the
            weight too, or something else than dot products reads the output.
    """
    # A table is in one of them; the others have no module at its path.
    for modules in map(modules_by_path, models):
        module, outputs = _module_of(modules, data)
        if module is None:
            continue
        refusals = _refusals(modules, module, data)
        if not turned:
            refusals |= _refusals_to_meet_others(modules, module, data)
        for reason, holds in refusals.items():
            if holds:
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
    collection = torchrec.collection(module) if torchrec and module and path[1:] else None
    return (module, collection.outputs()) if collection else (modules.get(".".join(path)), None)


def _refusals(
    modules: Mapping[str, nn.Module], module: nn.Module, data: ShardedData
) -> dict[str, bool]:
    """Return why the output of a table may not be a sum of its rows, or not the only reader of the
    weight, and whether that is so."""
    # A processor holds the collection that holds the table.
    torchrec, around = torchrec_port(), modules.get(".".join(_path_of(data)[:-3]))
    processed = torchrec is not None and around is not None and torchrec.processes_features(around)
    holders = _holders(modules, data)
    return {
        f"{type(around).__name__} reads its collection without calling it": processed,
        "its rows are pooled by their maximum": getattr(module, "mode", "sum") == "max",
        "max_norm renormalizes its rows": getattr(module, "max_norm", None) is not None,
        f"the modules {holders} share its weight": len(holders) > 1,
    }


def _holders(modules: Mapping[str, nn.Module], data: ShardedData) -> list[str]:
    """Return the modules that hold the weight of a replicated table, by path."""
    if data.sharding != "replicated":
        return []
    # By address: a tied weight is one storage in two parameters, or one parameter.
    places = {shard.tensor.data_ptr() for shard in data.shards}
    found = []
    for path, module in modules.items():
        held = map(Tensor.data_ptr, module.parameters(recurse=False))
        if not places.isdisjoint(held):
            found.append(path or type(module).__name__)
    return found


def _refusals_to_meet_others(
    modules: Mapping[str, nn.Module], module: nn.Module, data: ShardedData
) -> dict[str, bool]:
    """Return which readers other than a dot product a table may have that is rotated together with
    others, and whether it has them."""
    reader = _reader(modules, module)
    return {
        'its output is rotated back, as rotate="table" does, so that dot products do not read its'
        " rows": has_basis(modules[""], data.name),
        f"{reader} reads it, but only dot products may read tables that are rotated together; use"
        ' rotate="table", which rotates outputs back': bool(reader),
    }


def _reader(modules: Mapping[str, nn.Module], table: nn.Module) -> str:
    """Return the layer or nonlinearity to which an ``nn.Sequential`` passes the output of
    ``table``; "" for none."""
    for path, module in modules.items():
        behind = dropwhile(lambda part: part[1] is not table, _parts(module, path))
        for name, part in islice(behind, 1, None):
            if not type(part).__module__.startswith("torch.nn."):
                break  # the user's own, which may be the dot products
            if not isinstance(part, _HARMLESS):
                return f"{type(part).__name__} {name!r}"
    return ""


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that an ``nn.Sequential`` calls in turn, and the parts of nested ones, by
    path; of another module itself."""
    if type(module) is not nn.Sequential:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _parts(child, f"{path}.{name}".lstrip("."))
