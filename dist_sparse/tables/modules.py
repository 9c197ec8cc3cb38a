"""The tables of a model, on request its dense parameters too, and the paths of its modules.

:class:`ModelTables` walks a DistributedModelParallel, a DDP module or a plain module. It imports
torch only: TorchRec's modules are handled behind :func:`torchrec_port`, the one way from the rest
of the package to TorchRec. Each ``locate()`` repeats the walk, so that its result is never stale.
Nothing here communicates.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from dist_sparse.checks import name_list, refuse
from dist_sparse.groups import several
from dist_sparse.tables.protocols import Collection as TableCollection
from dist_sparse.tables.protocols import TorchRecPort
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

# Where wrappers keep the user's module: DMP, torch.compile, FSDP, activation checkpointing. These
# attributes are no part of the fully qualified names in a state_dict.
_WRAPPED = {
    "_dmp_wrapped_module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    # Many a user's attribute is called "module". By name of the class, for those of other packages
    # (apex) too.
    "DataParallel.module",
    "DistributedDataParallel.module",
}


def torchrec_port() -> TorchRecPort | None:
    """Return what the package needs of TorchRec; None until the program has imported torchrec, as
    it has if a model holds modules of TorchRec.

    Raises:
        ImportError: the installed releases do not fit, or lack private names that are needed.
    """
    # A model without modules of TorchRec's must not pay for the import, which takes seconds.
    if "torchrec" not in sys.modules:
        return None
    # Not above: the package needs torch alone.
    from dist_sparse.torchrec import port

    return port


def collection_of(module: nn.Module) -> TableCollection:
    """Return a collection of TorchRec's as it is now.

    Raises:
        TypeError: the module is none.
    """
    found = _collection(module)
    if found is None:
        raise TypeError(f"{type(module).__name__} is no collection of TorchRec's.")
    return found


def _collection(module: nn.Module) -> TableCollection | None:
    port = torchrec_port()
    return port.collection(module) if port else None


def check_module(model: object) -> None:
    """Refuse a model that is no module.

    Raises:
        ValueError: it is none; names its type.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"Invalid model of type {type(model).__name__}: must be a torch.nn.Module."
        )


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules of ``model`` by their path from the user's own module, which is ``""``.

    Wrappers (DMP, DDP, FSDP, torch.compile, activation checkpointing) add nothing to a path, which
    is that of the module inside them. A module that is reached twice has its first path.
    """
    return {at.path: at.module for at in _places(model, set())}


class ModelTables:
    """The tables of a model, and on request its dense parameters, to be registered. Selected by the
    first :meth:`locate`. Does not communicate.

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
        slots: bool = False,
    ) -> None:
        check_module(model)
        self.model = model
        # None is all.
        self._include = None if include is None else name_list("include", include)
        self._exclude = name_list("exclude", exclude)
        self._dense = None if dense is True else name_list("dense", dense or ())
        self._slots = slots
        self._names: dict[str, str] | None = None
        self._found: dict[str, _Found] = {}

    def locate(self, names: Collection[str] | None = None) -> list[ShardedData]:
        """Return the selected tensors as they are stored now, in the order of the model. Walks it;
        does not communicate. The first call selects; later ones return what is left of its
        selection, under the same names.

        Args:
            names: which of them; None is all.

        Raises:
            ValueError: nothing is selected, a pattern matches nothing, or something selected can't
                be sparsified; the model may have changed since.
        """
        walked = _Walk(slots=self._slots).found_in(self.model)
        # Checked once: of 1,000 ranks the rectangles take long to compare.
        first = self._names is None
        if self._names is None:
            self._names = {found.fqn: name for name, found in self._select(walked).items()}
        known = self._names
        self._found = {known[found.fqn]: found for found in walked if found.fqn in known}
        wanted = self._found.keys() if names is None else names
        # One reading of a collection serves all its tables. It has views of their weights, and must
        # not outlive this call: a reshard replaces them.
        read = cache(collection_of)
        located = []
        for name, found in self._found.items():
            if name in wanted:
                located.append(found.locate(name, read))
        if first:
            for data in located:
                check_data(data)
        return located

    def find(self, name: str) -> ShardedData:
        """Return one table that was located before, as it is stored now. Does not walk the model.

        Raises:
            ValueError: it is no longer where it was.
        """
        # Found in the last walk. A model that has changed since is walked again.
        found = self._found.get(name)
        if found is not None and found.present(self.model):
            return found.locate(name, collection_of)
        for data in self.locate([name]):
            return data
        raise ValueError(f"The registered table {name!r} is no longer in the model.")

    def _select(self, walked: list[_Found]) -> _Named:
        tables: _Named = {}
        parameters: _Named = {}
        for name, found in _named(walked).items():
            kind = tables if found.dense is None else parameters
            kind[name] = found
        hint = " Dense parameters are selected by dense=."
        chosen = _matching("include", self._include, tables, "tables", hint)
        chosen = chosen | _matching("dense", self._dense, parameters, "parameters")
        # Parameters that were not selected are no candidates: a pattern for them is a mistake.
        for name in _matching("exclude", self._exclude, tables | chosen, "tables"):
            chosen.pop(name, None)
        refuse(
            {
                f"include and exclude leave none of the tables {_listed(tables)}.": (
                    tables and not chosen
                ),
                f"{type(self.model).__name__} holds no tables: no TorchRec collection,"
                " nn.Embedding(Bag). Other parameters are selected by dense=.": not chosen,
            }
        )
        return chosen


class _Place(NamedTuple):
    """A module, its path, the attributes that lead to it from the model, and its own path inside
    the innermost DDP around it."""

    module: nn.Module
    path: str = ""
    trail: str = ""
    inside: str = ""
    ddp: DistributedDataParallel | None = None

    def child(self, name: str, module: nn.Module) -> _Place:
        kinds = type(self.module).__mro__
        spelled = {name, *(f"{kind.__name__}.{name}" for kind in kinds)}
        path = self.path if _WRAPPED & spelled else _join(self.path, name)
        trail = _join(self.trail, name)
        # The innermost DDP counts: its process group may be smaller than the one around it.
        if isinstance(self.module, DistributedDataParallel):
            return _Place(module, path, trail, "", self.module)
        return _Place(module, path, trail, _join(self.inside, name), self.ddp)

    def ranks(self, parameter: str) -> tuple[int, ...] | None:
        """Return the ranks that hold a copy of a parameter of the module; None is this one."""
        # What TorchRec's wrapper told DDP to leave out: other ranks hold other parts of it. Its
        # names are paths inside DDP.
        ignored = getattr(self.ddp, "parameters_to_ignore", ())
        if self.ddp is None or _join(self.inside, parameter) in ignored:
            return None
        return several(dist.get_process_group_ranks(self.ddp.process_group))


def _places(model: nn.Module, seen: set[int]) -> Iterator[_Place]:
    """Yield the modules of a model, each once, before those below it; not those that the caller
    has added to ``seen``, by id, nor what is below them only."""
    waiting = [_Place(model)]
    while waiting:
        at = waiting.pop()
        if id(at.module) in seen:
            continue
        seen.add(id(at.module))
        yield at
        # Only now: the caller may have added what is below.
        children = [at.child(*each) for each in at.module.named_children()]
        # A stack: reversed, so that the first child is taken next, in the order of named_modules().
        waiting += reversed(children)


_Read = Callable[[nn.Module], TableCollection]


@dataclass(frozen=True)
class _Found:
    """Something in the model.

    Args:
        name: its own.
        path: of the module that gave it its name.
        fqn: fully qualified name.
        at: the module that holds it.
        locate: looks it up under a registered name, with a function that reads collections.
        dense: the parameter, if it is no embedding table.
    """

    name: str
    path: str
    fqn: str
    at: _Place
    locate: Callable[[str, _Read], ShardedData]
    dense: nn.Parameter | None = None

    def present(self, model: nn.Module) -> bool:
        """Whether the module that holds it is still where it was."""
        # By attributes: a path leaves wrappers out, and get_submodule() knows nothing of them.
        try:
            return model.get_submodule(self.at.trail) is self.at.module
        except AttributeError:
            return False


# What is in a model, by unique name.
_Named = dict[str, _Found]


class _Walk:
    """One pass over a model. What is reached twice counts once, under the name that comes first."""

    def __init__(self, *, slots: bool) -> None:
        self._seen: set[int] = set()
        # A module without a bias has None in its place.
        self._seen_dense = {id(None)}
        self._table_weights: set[int] = set()
        self._slots = slots

    def found_in(self, model: nn.Module) -> list[_Found]:
        """Return everything in a model, in its order."""
        found: list[_Found] = []
        for at in _places(model, self._seen):
            found += self._held_by(at)
        # A weight that an embedding shares with another module is a table, whichever comes first.
        return [each for each in found if id(each.dense) not in self._table_weights]

    def _held_by(self, at: _Place) -> Iterator[_Found]:
        module, label = at.module, at.path.replace(".", "/")
        reason = self._refusal(module)
        if reason is not None:
            # Whether it is selected, and so refused, is not known yet.
            self._take_whole(module)
            kind = type(module).__name__
            yield _Found(label or kind, "", at.path, at, partial(_refused, kind, at.path, reason))
            return
        collection = _collection(module)
        if collection is not None:
            self._take_whole(module)
            yield from (self._sharded if collection.is_sharded else self._unsharded)(collection, at)
            return
        if self._note_weight(module):
            yield from self._table(at, label or "weight", "")
        yield from self._dense_parameters(at)

    def _take_whole(self, holder: nn.Module) -> None:
        """Leave out what is below a module that is taken as a whole."""
        # By id, as these sets hold tensors too, whose == compares elements.
        for module in holder.modules():
            self._seen.add(id(module))
            self._note_weight(module)

    def _note_weight(self, module: nn.Module) -> bool:
        """Note the weight of an embedding of torch's, which is no dense parameter; return whether
        the module is one."""
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding:
            # A parametrized one has no weight of its own: then the module stands for it.
            self._table_weights.add(id(module._parameters.get("weight", module)))
        return is_embedding

    def _refusal(self, module: nn.Module) -> str | None:
        # Collections of this package whose rows are slots.
        reason: str | None = getattr(module, "refused", None)
        if reason is not None and not self._slots:
            return reason
        # By its method, as FBGEMM may not be installed.
        if hasattr(module, "split_embedding_weights"):
            return (
                "a bare FBGEMM table batch has no table names; use TorchRec's collections, or"
                " add_data on its weights"
            )
        port = torchrec_port()
        return port.refusal(module) if port else None

    def _sharded(self, collection: TableCollection, at: _Place) -> Iterator[_Found]:
        for table in collection.tables:
            fqn = collection.fqn(at.path, table.name)
            locate = partial(_sharded, at.module, table.name, fqn)
            yield _Found(table.name, at.path, fqn, at, locate)

    def _unsharded(self, collection: TableCollection, at: _Place) -> Iterator[_Found]:
        # Each embedding is a place of its own: DDP may ignore some tables of a collection.
        embeddings = collection.embeddings()
        for table in collection.tables:
            place = at.child(f"{collection.attribute}.{table.name}", embeddings[table.name])
            yield from self._table(place, table.name, at.path, table.features)

    def _table(
        self, at: _Place, name: str, path: str, features: tuple[str, ...] = ()
    ) -> Iterator[_Found]:
        """An embedding module of torch's: one replica per rank of the DDP around it, or all of it
        here."""
        # Not .weight, which would compute a parametrized one.
        weight = at.module._parameters.get("weight")
        if weight is None or id(weight) not in self._seen:
            self._seen.add(id(weight))
            fqn = _join(at.path, "weight")
            locate = partial(_replica, at, "weight", fqn, features)
            yield _Found(name, path, fqn, at, locate)

    def _dense_parameters(self, at: _Place) -> Iterator[_Found]:
        """The parameters that a module holds itself and that are no table."""
        for name, parameter in at.module._parameters.items():
            if id(parameter) in self._seen_dense:
                continue
            # Not in _seen: an embedding that comes later may share it, and is a table.
            self._seen_dense.add(id(parameter))
            fqn = _join(at.path, name)
            label = fqn.replace(".", "/")
            locate = partial(_replica, at, name, fqn, ())
            yield _Found(label, "", fqn, at, locate, parameter)


def _sharded(module: nn.Module, table: str, fqn: str, name: str, read: _Read) -> ShardedData:
    return read(module).locate(table, fqn, name)


def _replica(
    at: _Place, attribute: str, fqn: str, features: tuple[str, ...], name: str, _: _Read
) -> ShardedData:
    """A parameter that every rank of the DDP around it holds whole."""
    parameter = at.module._parameters.get(attribute)
    ranks = at.ranks(attribute)
    if (reason := _no_matrix(parameter)) is not None:
        raise ValueError(f"Table {name!r}: {fqn} {reason}.")
    assert parameter is not None
    # Of .data: autograd must not see the masks being applied.
    view = parameter.data.view(matrix_shape(parameter.shape))
    return whole(name, view, ranks, fqn=fqn, features=features)


def _no_matrix(parameter: Any) -> str | None:
    """Return why a parameter can't be masked; None if it can."""
    if parameter is None:
        return "is computed (parametrized, or flattened by FSDP); only parameters can be masked"
    if is_lazy(parameter):
        return "is not initialized yet; run a forward first"
    if type(parameter.data) is not Tensor:
        return f"is a {type(parameter.data).__name__}; register it by add_data"
    if parameter.ndim > 2:
        return f"has the shape {tuple(parameter.shape)}; only 1-D and 2-D ones can be registered"
    return None


def _refused(kind: str, path: str, reason: str, name: str, _: _Read) -> ShardedData:
    if not path:
        # The model itself has no path by which it could be left out.
        raise ValueError(f"The tables of {kind} can't be sparsified: {reason}.")
    raise ValueError(
        f"The tables of {kind} at {path!r} can't be sparsified: {reason}. It can be left out:"
        f" exclude=[{path!r}]."
    )


def _named(walked: list[_Found]) -> _Named:
    """Names that are unique in the model: a table's own name, or module path and name where several
    things have it."""
    # State is saved by name, so that a name must not depend on what is selected.
    times = Counter(each.name for each in walked)
    named: _Named = {}
    for each in walked:
        name = each.name
        if times[name] > 1:
            name = _join(each.path, name, "/").replace(".", "/")
        if name in named:
            fqns = f"{named[name].fqn}, {each.fqn}"
            raise ValueError(f"Two tables would be called {name!r}: {fqns}. Rename one of them.")
        named[name] = each
    return named


def _matching(
    option: str, patterns: Sequence[str] | None, named: _Named, kind: str, hint: str = ""
) -> _Named:
    """Return what one of the patterns of an option matches, by name or fully qualified name; None
    matches all, and may match nothing."""
    if patterns is None:
        return named
    matching: _Named = {}
    for pattern in patterns:
        here = {
            name: found
            for name, found in named.items()
            if fnmatch.filter([name, found.fqn], pattern)
        }
        if not here:
            raise ValueError(
                f"Invalid {option} pattern {pattern!r}: matches none of the {kind}"
                f" {_listed(named)}.{hint}"
            )
        matching |= here
    return matching


def _listed(named: _Named) -> str:
    names = [f"{name} ({found.fqn})".removesuffix(f" ({name})") for name, found in named.items()]
    if len(names) > 20:
        names[20:] = [f"and {len(names) - 20} more"]
    return ", ".join(names) or "(there are none)"


def _join(path: str, name: str, separator: str = ".") -> str:
    return f"{path}{separator}{name}" if path else name


# ShardedTensors and DTensors. Both carry the rectangles of all ranks in their metadata.


def is_sharded(data: object) -> bool:
    """Whether ``data`` is a ShardedTensor or a DTensor. By name, so that their modules are imported
    only by programs that use them."""
    # Torch moved DTensor out of torch.distributed._tensor: the package alone is compared.
    kinds = {(kind.__name__, kind.__module__.partition(".")[0]) for kind in type(data).__mro__}
    return not kinds.isdisjoint({("ShardedTensor", "torch"), ("DTensor", "torch")})


class TensorSource:
    """One sharded tensor, registered under a name. A 1-D tensor is a matrix of one column per
    element: ``(1, n)``.

    Raises:
        ValueError: the tensor has more than two dimensions, this rank is not among those that hold
            it, or :func:`~dist_sparse.tables.shards.check_data` refuses it.
    """

    def __init__(self, name: str, data: Any) -> None:
        self._name, self.data = name, data
        check_data(self.locate()[0])

    def locate(self, names: Collection[str] | None = None) -> list[ShardedData]:
        """Return its one entry. Does not communicate; raises ValueError as the class says."""
        return [self.find(self._name)]

    def find(self, name: str) -> ShardedData:
        """Return its one entry."""
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
        held[shard.placement.rank()].append(_rect(shard))
    local = {_rect(shard.metadata): shard.tensor for shard in data.local_shards()}
    return _located(name, data, "sharded_tensor", held, local)


def _from_dtensor(name: str, data: Any) -> ShardedData:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import (
        _compute_local_shape_and_global_offset as local_shape_and_offset,
    )

    # Torch tells a rank its own part alone: what its own function computes for each place of the
    # mesh gives the parts of all, without communication.
    mesh = data.device_mesh.mesh
    if any(not isinstance(placement, (Shard, Replicate)) for placement in data.placements):
        raise ValueError(
            f"Data {name!r} has placements {data.placements}: only Shard and Replicate are"
            " supported."
        )
    held: dict[int, list[Rect]] = {}
    for position in itertools.product(*map(range, mesh.shape)):
        sizes, offsets = local_shape_and_offset(
            data.shape, mesh.shape, list(position), data.placements
        )
        held[int(mesh[position])] = [_rect(ShardMetadata(list(offsets), list(sizes)))]
    local = dict.fromkeys(held.get(dist.get_rank(), ()), data.to_local())
    return _located(name, data, "dtensor", held, local)


def _located(
    name: str, data: Any, kind: str, held: dict[int, list[Rect]], local: dict[Rect, Tensor]
) -> ShardedData:
    """Data of the rectangles that each rank holds, and the tensors of this one's."""
    ranks = tuple(sorted(held))  # as process groups have them, whatever the order of a mesh
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


def _rect(shard: Any) -> Rect:
    """Return the rectangle in the metadata of a shard; of one dimension it is a row."""
    # sum() and prod() of nothing are 0 and 1: the first row, and one row.
    *row, col = shard.shard_offsets
    *rows, cols = shard.shard_sizes
    return Rect(int(sum(row)), int(col), int(math.prod(rows)), int(cols))
