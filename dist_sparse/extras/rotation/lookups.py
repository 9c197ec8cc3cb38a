"""How a model looks a table up, and what reads its output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from typing import Any, NamedTuple

from torch import nn

from dist_sparse.tables.bases import BASIS
from dist_sparse.tables.memory import local, same_storage
from dist_sparse.tables.modules import modules_by_path, torchrec_port
from dist_sparse.tables.shards import ShardedData

# Modules that may be between tables that are rotated together and their dot products.
_HARMLESS = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)


class TableLookup(NamedTuple):
    """How a model looks a table up.

    Args:
        modules: all modules of the model by path, without wrappers.
        module: the module that looks the table up.
        outputs: the outputs of a collection that belong to the table; None is the only output of
            any other module.
    """

    modules: Mapping[str, nn.Module]
    module: nn.Module
    outputs: list[str | None]

    @property
    def root(self) -> nn.Module:
        """The model without wrappers."""
        return self.modules[""]


def find_lookup(models: Sequence[nn.Module], data: ShardedData) -> TableLookup:
    """Return how one of ``models`` looks a table up.

    Raises:
        ValueError: no model looks it up, its output is not a sum of rows, or another module reads
            the weight too.
    """
    path = str(data.fqn).rpartition(".")[0]
    # One model has the table; the others have no module at its path.
    for modules in map(modules_by_path, models):
        module, outputs, is_processed = _module_at(modules, path)
        if module is not None:
            holders = _modules_with_weight(modules, data)
            if is_processed:
                raise _refusal(data, "a feature processor reads its collection without calling it")
            if getattr(module, "mode", "sum") == "max":
                raise _refusal(data, "its rows are pooled by their maximum")
            if getattr(module, "max_norm", None) is not None:
                raise _refusal(data, "max_norm renormalizes its rows")
            if len(holders) > 1:
                raise _refusal(data, f"the modules {holders} share its weight")
            return TableLookup(modules, module, outputs)
    raise _refusal(data, "it is in no model given to add_model()")


def find_lookup_for_dots(models: Sequence[nn.Module], data: ShardedData) -> None:
    """Refuse a table that can't be rotated together with others: only dot products may read it.

    Raises:
        ValueError: as :func:`find_lookup`; or anything but dot products reads its output.
    """
    lookup = find_lookup(models, data)
    reader = _reading_layer(lookup.modules, lookup.module)
    if BASIS + data.name in lookup.root._buffers:
        raise _refusal(
            data,
            'its output is rotated back, as rotate="table" does, so that dot products do not read'
            " its rows",
        )
    if reader:
        raise _refusal(
            data,
            f"{reader} reads it, but only dot products may read tables that are rotated together;"
            ' use rotate="table", which rotates outputs back',
        )


def _refusal(data: ShardedData, reason: str) -> ValueError:
    return ValueError(f"Table {data.name!r} can't be rotated: {reason}.")


def _module_at(
    modules: Mapping[str, nn.Module], path: str
) -> tuple[nn.Module | None, list[str | None], bool]:
    """Return the module that looks up the table at ``path``, None if the model has no such table;
    the outputs that belong to the table; and whether a feature processor contains the module."""
    # In TorchRec's collections, <path of the collection>.embedding_bags.<table>.
    collection_path, _, table = path.rpartition(".")
    collection_path = collection_path.rpartition(".")[0]
    module: Any = modules.get(collection_path)
    outer: Any = modules.get(collection_path.rpartition(".")[0])
    torchrec = torchrec_port()
    if torchrec and (collection := torchrec.collection(module)):
        outputs = [output for output, name in collection.outputs().items() if name == table]
        return module, [*outputs], torchrec.processes_features(outer)
    return modules.get(path), [None], False


def _modules_with_weight(modules: Mapping[str, nn.Module], data: ShardedData) -> list[str]:
    """Return the paths of the modules that hold the weight of a replicated table."""
    if data.sharding != "replicated":
        return []
    # By memory: tied weights may be two parameters over one storage.
    find = same_storage([shard.tensor for shard in data.shards])
    paths = []
    for path, module in modules.items():
        if any(find(local(parameter)) for parameter in module.parameters(recurse=False)):
            paths.append(path or type(module).__name__)
    return paths


def _reading_layer(modules: Mapping[str, nn.Module], table: nn.Module) -> str:
    """Return the layer or nonlinearity to which an ``nn.Sequential`` passes the output of
    ``table``; "" for none."""
    for path, module in modules.items():
        # The parts after the table; none if the table is not among them.
        from_table = dropwhile(lambda part: part[1] is not table, _called_in_turn(module, path))
        for name, part in islice(from_table, 1, None):
            # A module of the user's may compute the dot products.
            if not type(part).__module__.startswith("torch.nn."):
                break
            if not isinstance(part, _HARMLESS):
                return f"{type(part).__name__} {name!r}"
    return ""


def _called_in_turn(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that an ``nn.Sequential`` calls in turn, nested ones included, with their
    paths; for another module, the module itself."""
    if type(module) is not nn.Sequential:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _called_in_turn(child, f"{path}.{name}".lstrip("."))
