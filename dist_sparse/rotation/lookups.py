"""What looks a table up that is to be rotated, and what reads it as far as a model declares that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from dist_sparse.rotation.outputs import has_basis
from dist_sparse.tables.modules import modules_by_path
from dist_sparse.tables.shards import ShardedData

__all__ = ["Lookup", "find_lookup"]

_HARMLESS = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)
"""What may be between tables that are rotated together and their dot products."""


class Lookup(NamedTuple):
    """The model without wrappers, the module in it that looks a table up, the table of each output of a collection."""

    root: nn.Module
    module: nn.Module
    outputs: dict[str, str] | None


def find_lookup(models: Sequence[nn.Module], data: ShardedData, turned: bool) -> Lookup:
    """Return what looks a table up, in one of ``models``.

    Args:
        turned: its output will be turned back; otherwise only dot products may read it.

    Raises:
        ValueError: there is nothing, its output is not a sum of rows, another module reads the weight too, or something
            else than dot products reads the output.
    """
    path = (data.fqn or "").removesuffix("weight").removesuffix(".").split(".")
    for modules in map(modules_by_path, models):
        outputs, module = None, modules.get(".".join(path))
        if len(path) > 1 and "torchrec" in sys.modules:  # <path of the collection>.embedding_bags.<table>
            collection = modules.get(".".join(path[:-2]))
            outputs = importlib.import_module("dist_sparse.tables.torchrec").outputs_of(collection)
            module = module if outputs is None else collection
        if module is None:
            continue
        around = type(modules.get(".".join(path[:-3]))).__name__
        reason = _tied(modules, data)
        if outputs is not None and "FeatureProcessed" in around:
            reason = f"{around} reads its collection without calling it"
        elif getattr(module, "mode", "sum") == "max":
            reason = "its rows are pooled by their maximum"
        elif getattr(module, "max_norm", None) is not None:
            reason = "max_norm renormalizes its rows"
        elif not turned and has_basis(modules[""], data.name):
            reason = 'its output is rotated back, as rotate="table" does, so that dot products do not read its rows'
        elif not turned and (reader := _reader(modules, module)):
            reason = (
                f"{reader} reads it, but only dot products may read tables that are rotated together; use "
                'rotate="table", which rotates outputs back'
            )
        if reason:
            raise ValueError(f"Table {data.name!r} can't be rotated: {reason}.")
        return Lookup(modules[""], module, outputs)
    raise ValueError(f"Table {data.name!r} can't be rotated: it is in no model given to add_model().")


def _reader(modules: Mapping[str, nn.Module], table: nn.Module) -> str:
    """The layer or nonlinearity to which an ``nn.Sequential`` passes what ``table`` has looked up, if so."""
    for path, module in modules.items():
        parts = list(_parts(module, path)) if _computed_by(module) is nn.Sequential else []
        for place in (i for i, (_, part) in enumerate(parts) if part is table):
            for name, part in parts[place + 1 :]:
                if not _computed_by(part).__module__.startswith("torch.nn."):
                    break  # the user's own, which may be the dot products
                if not isinstance(part, _HARMLESS):
                    return f"{type(part).__name__} {name!r}"
    return ""


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield what an ``nn.Sequential`` calls in turn, without wrappers, by path; of nested ones their parts."""
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
    """Why a weight that several modules hold can't be rotated, if so: the others would read it rotated."""
    places = {shard.tensor.data_ptr() for shard in data.shards if data.sharding == "replicated"}
    holders = [
        path or type(module).__name__
        for path, module in modules.items()
        if any(p is not None and p.data_ptr() in places for p in module._parameters.values())
    ]
    return f"the modules {holders} share its weight" if len(holders) > 1 else ""
