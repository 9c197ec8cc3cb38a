"""The tables of a model, on request its dense parameters too, and the paths of its modules.

:class:`ModelTables` walks a DistributedModelParallel, a DDP module or a plain module. Each
``locate()`` repeats the walk, so that its result is never stale. Nothing here communicates.

This module imports torch only: :func:`torchrec_port` is the package's only way to TorchRec.
"""

from __future__ import annotations

import fnmatch
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from dist_sparse.checks import name_list
from dist_sparse.groups import several
from dist_sparse.tables.protocols import TableBatch, TableCollection, TorchRecPort
from dist_sparse.tables.shards import (
    Rect,
    Shard,
    ShardedData,
    check_data,
    matrix_shape,
    not_empty,
    whole,
)

Patterns = str | Sequence[str] | None

# The attributes in which DMP, torch.compile, FSDP and activation checkpointing keep the user's
# module. Fully qualified names in a state_dict leave them out.
_WRAPPED = {
    "_dmp_wrapped_module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}

# The classes that keep it in the attribute "module", a name that users' own classes have too. The
# classes are given by name, because apex has such classes too.
_WRAPPERS = {"DataParallel", "DistributedDataParallel"}


def torchrec_port() -> TorchRecPort | None:
    """Return the package's interface to TorchRec. None until the program has imported torchrec, as
    it must have if a model contains TorchRec's modules.

    Raises:
        ImportError: the installed releases do not fit, or lack private names that are needed.
    """
    # Other models must not pay for the import, which takes seconds.
    if "torchrec" not in sys.modules:
        return None
    # Not above: the package needs torch alone.
    from dist_sparse.torchrec import port

    return port


def loaded_torchrec() -> TorchRecPort:
    """Return :func:`torchrec_port` where there is a TorchRec object: so the program has imported
    torchrec."""
    from dist_sparse.torchrec import port

    return port


def collection_of(module: nn.Module) -> TableCollection:
    """Return a TorchRec collection as it is now.

    Raises:
        TypeError: the module is not a collection.
    """
    found = _collection(module)
    if found is None:
        raise TypeError(f"{type(module).__name__} is not a TorchRec collection.")
    return found


def _collection(module: nn.Module) -> TableCollection | None:
    port = torchrec_port()
    return port.collection(module) if port else None


def check_module(model: object) -> None:
    """Refuse a model that is not a module.

    Raises:
        ValueError: it is not a module; names its type.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"Invalid model of type {type(model).__name__}: must be a torch.nn.Module."
        )


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules of ``model`` by their path from the user's own module, which is ``""``.

    A wrapper (DMP, DDP, FSDP, torch.compile, activation checkpointing) has the path of the module
    inside it, and the module inside replaces it here. A module that is reached twice has its first
    path.
    """
    return {at.path: at.module for at in _visits(model, set())}


def weight_name(module: nn.Module) -> str:
    """Return the name of the parameter with the rows of an embedding of torch's: ``weight``, or
    ``stored_weight`` of a compact one, whose rows are not ids."""
    return "stored_weight" if "stored_weight" in module._parameters else "weight"


class ModelTables:
    """The tables of a model, and on request its dense parameters, to be registered. The first
    :meth:`locate` selects them. Does not communicate.

    Args:
        model: a ``DistributedModelParallel``, a DDP module, or any module.
        include: globs over table names and fully qualified names; None is every table.
        exclude: globs of what to leave out, dense parameters too; a module that is refused can be
            left out by its path.
        dense: globs of other parameters to register, True for all: 2-D ones as they are, 1-D ones
            as (1, n).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        include: Patterns = None,
        exclude: Patterns = None,
        dense: bool | Patterns = None,
    ) -> None:
        check_module(model)
        self.model = model
        # None selects all.
        self._include = None if include is None else name_list("include", include)
        self._exclude = name_list("exclude", exclude)
        self._dense = None if dense is True else name_list("dense", dense or ())
        # Registered names by fully qualified name; None before the first locate().
        self._names: dict[str, str] | None = None
        # As found by the last walk, by registered name.
        self._entries: _ByName = {}

    def locate(self, names: Collection[str] | None = None) -> list[ShardedData]:
        """Return the selected tensors as they are stored now, in the order of the model. Walks the
        model; does not communicate. The first call selects; later calls return what the model
        still contains of the selection, under the same names.

        Args:
            names: which of them; None is all.

        Raises:
            ValueError: nothing is selected, a pattern matches nothing, or something selected can't
                be sparsified. The model may have changed since the selection.
        """
        is_first = self._names is None
        self._find_selected()
        wanted = self._entries.keys() if names is None else names
        # One reading of a collection serves all its tables. It has views of their weights, and must
        # not outlive this call: a reshard replaces them.
        read = cache(collection_of)
        located = [
            entry.locate(name, read) for name, entry in self._entries.items() if name in wanted
        ]
        # Once: with 1,000 ranks, comparing the rectangles takes long.
        if is_first:
            for data in located:
                check_data(data)
        return located

    def _find_selected(self) -> None:
        """Walk the model for the selected entries; the first time, select them."""
        walked = _Walk().entries_in(self.model)
        if self._names is None:
            self._names = {entry.fqn: name for name, entry in self._select(walked).items()}
        names = self._names
        self._entries = {names[entry.fqn]: entry for entry in walked if entry.fqn in names}

    def find(self, names: Collection[str]) -> list[ShardedData]:
        """Return tables that were located before, as they are stored now. Walks the model only if
        it has changed since.

        Raises:
            ValueError: the model no longer contains one.
        """
        # One reading of a collection serves all its tables; see locate().
        read = cache(collection_of)
        found = []
        for name in names:
            entry = self._entries.get(name)
            if entry is None or not entry.is_in(self.model):
                return self._found_again(names)
            found.append(entry.locate(name, read))
        return found

    def _found_again(self, names: Collection[str]) -> list[ShardedData]:
        located = self.locate(names)
        if missing := sorted({*names}.difference([data.name for data in located])):
            raise ValueError(f"The registered tables {missing} are no longer in the model.")
        return located

    def _select(self, walked: list[_Entry]) -> _ByName:
        """Return the entries that include, exclude and dense select."""
        tables: _ByName = {}
        parameters: _ByName = {}
        for name, entry in _by_unique_name(walked).items():
            kind = tables if entry.dense is None else parameters
            kind[name] = entry
        hint = " Dense parameters are selected by dense=."
        chosen = _matching("include", self._include, tables, "tables", hint)
        chosen = chosen | _matching("dense", self._dense, parameters, "parameters")
        # A pattern that excludes only parameters that were not selected is a mistake.
        for name in _matching("exclude", self._exclude, tables | chosen, "tables"):
            chosen.pop(name, None)
        if tables and not chosen:
            raise ValueError(f"include and exclude leave none of the tables {_list_names(tables)}.")
        if not chosen:
            raise ValueError(
                f"{type(self.model).__name__} holds no tables: no TorchRec collection,"
                " nn.Embedding(Bag). sparsify() takes other parameters, by Advanced(dense=)."
            )
        return chosen


class _Visit(NamedTuple):
    """Where a module is in a model.

    Args:
        module: the module.
        path: from the user's own module, without wrappers.
        trail: the attributes that lead to it from the model, wrappers included.
        inside: the attributes that lead to it from the innermost DDP around it.
        ddp: that DDP module.
    """

    module: nn.Module
    path: str = ""
    trail: str = ""
    inside: str = ""
    ddp: DistributedDataParallel | None = None

    def child(self, name: str, module: nn.Module) -> _Visit:
        path = self.path if _is_wrapped(self.module, name) else _join(self.path, name)
        trail = _join(self.trail, name)
        # The innermost DDP counts: its process group may be smaller than the one around it.
        if isinstance(self.module, DistributedDataParallel):
            return _Visit(module, path, trail, "", self.module)
        return _Visit(module, path, trail, _join(self.inside, name), self.ddp)

    def ranks(self, parameter: str) -> tuple[int, ...] | None:
        """Return the ranks that hold a copy of a parameter of the module; None is this one."""
        # TorchRec tells DDP to ignore sharded tables: other ranks hold other parts of them. Their
        # names are paths inside DDP.
        if self.ddp is None or _join(self.inside, parameter) in self.ddp.parameters_to_ignore:
            return None
        return several(dist.get_process_group_ranks(self.ddp.process_group))


def _visits(model: nn.Module, seen: set[int]) -> Iterator[_Visit]:
    """Yield the modules of a model, each once and before its children. Modules whose id the caller
    adds to ``seen`` are left out, and so are modules that only they contain."""
    waiting = [_Visit(model)]
    while waiting:
        at = waiting.pop()
        if id(at.module) in seen:
            continue
        seen.add(id(at.module))
        yield at
        children = [*itertools.starmap(at.child, at.module.named_children())]
        # A stack: reversed, so that modules come in the order of named_modules().
        waiting += reversed(children)


_Read = Callable[[nn.Module], TableCollection]


@dataclass(frozen=True)
class _Entry:
    """A table or dense parameter in a model, or a module that is refused if it is selected.

    Args:
        name: its own name, perhaps not unique.
        path: of the module in which the name is unique.
        fqn: fully qualified name.
        at: the module that holds it.
        locate: returns its data under a registered name, or raises; called with the name and a
            function that reads collections.
        dense: the parameter, if it is not an embedding table.
    """

    name: str
    path: str
    fqn: str
    at: _Visit
    locate: Callable[[str, _Read], ShardedData]
    dense: nn.Parameter | None = None

    def is_in(self, model: nn.Module) -> bool:
        """Whether the module that holds it is still in its place."""
        # get_submodule() needs the attributes of wrappers too, which a path leaves out.
        try:
            return model.get_submodule(self.at.trail) is self.at.module
        except AttributeError:
            return False


# Entries by unique name.
_ByName = dict[str, _Entry]


class _Walk:
    """One pass over a model. A weight that is reached twice counts once, under its first name."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        # By id. None counts as seen: a module without a bias has it there.
        self._seen_dense = {id(None)}
        self._table_weights: set[int] = set()
        # The padding rows of each weight; several embeddings may share one.
        self._padding: dict[int, list[int]] = defaultdict(list)
        self._port = torchrec_port()

    def entries_in(self, model: nn.Module) -> list[_Entry]:
        """Return all entries of a model, in its order."""
        entries: list[_Entry] = []
        for at in _visits(model, self._seen):
            entries += self._entries_at(at)
        # A weight that an embedding shares with another module is a table, whichever comes first.
        return [entry for entry in entries if id(entry.dense) not in self._table_weights]

    def _entries_at(self, at: _Visit) -> Iterator[_Entry]:
        module = at.module
        label = at.path.replace(".", "/")
        reason = self._refusal(module)
        if reason is not None:
            # Not refused yet: exclude= may leave it out.
            self._skip_below(module)
            kind = type(module).__name__
            refuse_it = partial(_refuse_entry, kind, at.path, reason)
            yield _Entry(label or kind, "", at.path, at, refuse_it)
            return
        collection = self._port.collection(module) if self._port else None
        if collection is not None:
            self._skip_below(module)
            embeddings = collection.embeddings()
            for table in collection.tables:
                if collection.is_sharded:
                    fqn = collection.fqn(at.path, table.name)
                    locate = partial(_sharded_table, at.module, table.name, fqn)
                    yield _Entry(table.name, at.path, fqn, at, locate)
                else:
                    # A place for each table: DDP may ignore some tables of a collection.
                    name = f"{collection.attribute}.{table.name}"
                    place = at.child(name, embeddings[table.name])
                    yield from self._table(
                        place, table.name, at.path, features=table.features, drawn=table.drawn
                    )
            return
        if self._add_table_weight(module):
            yield from self._table(at, label or "weight", "")
        yield from self._dense_parameters(at)

    def _skip_below(self, holder: nn.Module) -> None:
        """Leave out all modules below one."""
        for module in holder.modules():
            self._seen.add(id(module))
            self._add_table_weight(module)

    def _add_table_weight(self, module: nn.Module) -> bool:
        """Note that the weight of a torch embedding is not a dense parameter; return whether the
        module is an embedding."""
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding:
            # A parametrized embedding has no such parameter: any id without meaning will do.
            weight = id(module._parameters.get(weight_name(module), module))
            self._table_weights.add(weight)
            # An EmbeddingBag leaves padding out: its row is never read.
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                self._padding[weight].append(module.padding_idx)
        return is_embedding

    def _refusal(self, module: nn.Module) -> str | None:
        """Return why the tables of a module can't be sparsified; None if they can."""
        # By its method: FBGEMM may not be installed.
        if hasattr(module, "split_embedding_weights"):
            return (
                "a bare FBGEMM table batch has no table names; use TorchRec's collections, or"
                " add_data on its weights"
            )
        return self._port.refusal(module) if self._port else None

    def _table(self, at: _Visit, name: str, path: str, **more: Any) -> Iterator[_Entry]:
        """Yield the table of a torch embedding, unless its weight was yielded before.

        Args:
            more: further arguments of :class:`ShardedData`.
        """
        # Not .weight, which would compute a parametrized weight.
        attribute = weight_name(at.module)
        weight = at.module._parameters.get(attribute)
        if weight is None or id(weight) not in self._seen:
            self._seen.add(id(weight))
            fqn = _join(at.path, attribute)
            locate = partial(_replicated, at, attribute, fqn, more, self._padding[id(weight)])
            yield _Entry(name, path, fqn, at, locate)

    def _dense_parameters(self, at: _Visit) -> Iterator[_Entry]:
        """Yield the parameters of a module itself, each once in a model."""
        for name, parameter in at.module._parameters.items():
            if id(parameter) in self._seen_dense:
                continue
            # Not in _seen: a later embedding may share it, and then it is a table.
            self._seen_dense.add(id(parameter))
            fqn = _join(at.path, name)
            label = fqn.replace(".", "/")
            locate = partial(_replicated, at, name, fqn, {}, ())
            yield _Entry(label, "", fqn, at, locate, parameter)


def _sharded_table(module: nn.Module, table: str, fqn: str, name: str, read: _Read) -> ShardedData:
    return read(module).locate(table, fqn, name)


def _replicated(
    at: _Visit,
    attribute: str,
    fqn: str,
    more: Mapping[str, Any],
    padding: Sequence[int],
    name: str,
    _: _Read,
) -> ShardedData:
    """Return the data of a parameter that every rank of the DDP around it holds whole, or this rank
    alone."""
    parameter = at.module._parameters.get(attribute)
    ranks = at.ranks(attribute)
    # FSDP leaves a flat slice in place of a table.
    dims = (2,) if isinstance(at.module, nn.Embedding | nn.EmbeddingBag) else (0, 1, 2)
    if (reason := _reason_against(parameter, dims)) is not None:
        raise ValueError(f"Table {name!r}: {fqn} {reason}.")
    assert parameter is not None
    # Of .data: autograd must not see that masks are applied.
    view = parameter.data.view(matrix_shape(parameter.shape))
    return whole(name, view, ranks, fqn=fqn, padding=tuple(padding), **more)


def _reason_against(parameter: Any, dims: Sequence[int]) -> str | None:
    """Return why a parameter can't be masked; None if it can."""
    if parameter is None:
        return "is computed (parametrized, or flattened by FSDP); only parameters can be masked"
    if is_lazy(parameter):
        return "is not initialized yet; run a forward first"
    if type(parameter.data) is not Tensor:
        return f"is a {type(parameter.data).__name__}; register it by add_data"
    if parameter.ndim not in dims:
        return f"has the shape {tuple(parameter.shape)}; must have {dims} dimensions"
    return None


def _refuse_entry(kind: str, path: str, reason: str, name: str, _: _Read) -> ShardedData:
    if not path:
        # The model itself can't be left out.
        raise ValueError(f"The tables of {kind} can't be sparsified: {reason}.")
    raise ValueError(
        f"The tables of {kind} at {path!r} can't be sparsified: {reason}. It can be left out:"
        f" exclude=[{path!r}]."
    )


def _by_unique_name(walked: list[_Entry]) -> _ByName:
    """Return entries by a name that is unique in the model: their own, or module path and name
    where several have the same."""
    # Of all entries, not of the selected ones: state is saved by name, so that a name must not
    # depend on the selection.
    times = Counter(entry.name for entry in walked)
    by_name: _ByName = {}
    for entry in walked:
        name = entry.name
        if times[name] > 1:
            name = _join(entry.path, name).replace(".", "/")
        if name in by_name:
            fqns = f"{by_name[name].fqn}, {entry.fqn}"
            raise ValueError(f"Two tables would be called {name!r}: {fqns}. Rename one of them.")
        by_name[name] = entry
    return by_name


def _matching(
    option: str, patterns: Sequence[str] | None, named: _ByName, kind: str, hint: str = ""
) -> _ByName:
    """Return the entries that a pattern of an option matches, by name or fully qualified name. None
    matches all, even if there are none; a pattern must match something."""
    if patterns is None:
        return named
    matching: _ByName = {}
    for pattern in patterns:
        matches = {
            name: entry
            for name, entry in named.items()
            if fnmatch.filter([name, entry.fqn], pattern)
        }
        if not matches:
            raise ValueError(
                f"Invalid {option} pattern {pattern!r}: matches none of the {kind}"
                f" {_list_names(named)}.{hint}"
            )
        matching |= matches
    return matching


def _list_names(named: _ByName) -> str:
    names = [f"{name} ({entry.fqn})".removesuffix(f" ({name})") for name, entry in named.items()]
    if len(names) > 20:
        names[20:] = [f"and {len(names) - 20} more"]
    return ", ".join(names) or "(there are none)"


def _is_wrapped(module: nn.Module, name: str) -> bool:
    """Whether an attribute of a wrapper is the user's module."""
    if name == "module":
        return not _WRAPPERS.isdisjoint([kind.__name__ for kind in type(module).__mro__])
    return name in _WRAPPED


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ShardedTensors and DTensors: both know the rectangles of all ranks.


def is_sharded_tensor(data: object) -> bool:
    """Whether ``data`` is a ShardedTensor or a DTensor. By name, so that their modules are imported
    only by programs that use them."""
    # Compare the top package only: releases of torch have moved DTensor.
    kinds = {(kind.__name__, kind.__module__.partition(".")[0]) for kind in type(data).__mro__}
    return not kinds.isdisjoint({("ShardedTensor", "torch"), ("DTensor", "torch")})


class TensorSource:
    """One sharded tensor, registered under a name. A 1-D tensor is a matrix of one row: ``(1, n)``.

    Raises:
        ValueError: the tensor has more than two dimensions, this rank does not hold a part of it,
            or :func:`~dist_sparse.tables.shards.check_data` refuses it.
    """

    def __init__(self, name: str, data: Any) -> None:
        self._name, self.data = name, data
        check_data(self.locate()[0])

    def locate(self, names: Collection[str] | None = None) -> list[ShardedData]:
        """Return its one entry. Does not communicate; raises ValueError as the class says."""
        return [self._located()]

    def find(self, names: Collection[str]) -> list[ShardedData]:
        """Return its one entry."""
        return [self._located()]

    def _located(self) -> ShardedData:
        data = self.data
        if data.dim() not in (1, 2):
            raise ValueError(
                f"Data {self._name!r} of shape {tuple(data.shape)}: sharded data must have one or"
                " two dimensions."
            )
        if hasattr(data, "local_shards"):
            return _from_sharded_tensor(self._name, data)
        return _from_dtensor(self._name, data)


def _from_sharded_tensor(name: str, data: Any) -> ShardedData:
    # Placements have global ranks, whatever the process group.
    ranks = dist.get_process_group_ranks(data._process_group)
    held: dict[int, list[Rect]] = {rank: [] for rank in ranks}
    for shard in data.metadata().shards_metadata:
        held[shard.placement.rank()].append(_rect_of(shard))
    local = {_rect_of(shard.metadata): shard.tensor for shard in data.local_shards()}
    return _sharded_data(name, data, "sharded_tensor", held, local)


def _from_dtensor(name: str, data: Any) -> ShardedData:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import (
        _compute_local_shape_and_global_offset as local_shape_and_offset,
    )

    # Torch's public methods tell a rank only its own part. Their private function, called for each
    # position in the mesh, gives the parts of all ranks without communication.
    mesh = data.device_mesh.mesh
    if any(not isinstance(placement, (Shard, Replicate)) for placement in data.placements):
        raise ValueError(
            f"Data {name!r} has placements {data.placements}: only Shard and Replicate are"
            " supported."
        )
    held = {}
    for position in itertools.product(*map(range, mesh.shape)):
        sizes, offsets = local_shape_and_offset(
            data.shape, mesh.shape, list(position), data.placements
        )
        held[int(mesh[position])] = [_rect_of(ShardMetadata(list(offsets), list(sizes)))]
    local = dict.fromkeys(held.get(dist.get_rank(), ()), data.to_local())
    return _sharded_data(name, data, "dtensor", held, local)


def _sharded_data(
    name: str, data: Any, kind: str, held: dict[int, list[Rect]], local: dict[Rect, Tensor]
) -> ShardedData:
    """Return the data of a sharded tensor.

    Args:
        held: the rectangles of each rank.
        local: the tensors of this rank's rectangles.
    """
    # As in a process group; a mesh may have any order.
    ranks = tuple(sorted(held))
    if dist.get_rank() not in held:
        raise ValueError(
            f"Data {name!r} is stored on the ranks {ranks}, and this is rank {dist.get_rank()}."
        )
    tiling = tuple(not_empty(held[rank]) for rank in ranks)
    shards = []
    for rect in tiling[ranks.index(dist.get_rank())]:
        tensor = torch.as_tensor(local[rect]).detach()
        shards.append(Shard(rect, tensor.view(rect.rows, rect.cols)))
    return ShardedData(
        name=name,
        shape=matrix_shape(data.shape),
        dtype=data.dtype,
        sharding=kind,
        ranks=several(ranks),
        tiling=tiling,
        shards=tuple(shards),
    )


def _rect_of(shard: Any) -> Rect:
    """Return the rectangle in the metadata of a shard; a 1-D shard is one row, the first."""
    row, col = [0, *shard.shard_offsets][-2:]
    rows, cols = [1, *shard.shard_sizes][-2:]
    return Rect(int(row), int(col), int(rows), int(cols))


def collections_of(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the sharded collections among some modules, each once."""
    torchrec = torchrec_port()
    if torchrec is not None:
        yield from filter(torchrec.is_sharded, dict.fromkeys(modules))


def batches_of(collections: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, TableBatch]]:
    """Yield this rank's table batches with a fused optimizer, each with its collection."""
    for collection in collections:
        for batch in collection_of(collection).batches():
            yield collection, batch
