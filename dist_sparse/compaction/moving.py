"""Weights and optimizer state of rows that move: what plain optimizers step, and from a sharded
collection to the one in its place.

One table at a time, its weights and then each of its states; a rank holds its shards and chunks of
a few MB.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse.compaction.kept_rows import move_rows
from dist_sparse.enforcer.dense import initial_state, leaves
from dist_sparse.groups import group_over
from dist_sparse.tables.modules import collection_of, torchrec_port
from dist_sparse.tables.protocols import Collection
from dist_sparse.tables.shards import Rect, ShardedData


class Stepped(NamedTuple):
    """A parameter that plain optimizers step, and the one that takes its place with its state."""

    old: nn.Parameter
    new: nn.Parameter
    states: Mapping[str, Tensor]


def listed(optimizers: Any) -> list[Any]:
    """Return the optimizers of an argument: one, several, or None."""
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]


class Steppers:
    """The optimizers of a training loop, wrapped ones too.

    Args:
        optimizers: as the training loop has them: one, several, or None.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.moving import Stepped, Steppers
        >>> old, new = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(3, 2))
        >>> optimizer = torch.optim.Adagrad([old])
        >>> steppers = Steppers([optimizer])
        >>> sums = steppers.states(old)["sum"]
        >>> steppers.replace(Stepped(old, new, {"sum": sums[1:]}))
        >>> optimizer.param_groups[0]["params"][0] is new, optimizer.state[new]["sum"].shape
        (True, torch.Size([3, 2]))
    """

    def __init__(self, optimizers: Any) -> None:
        self._given = listed(optimizers)
        self._leaves = [leaf for optimizer in self._given for leaf in leaves(optimizer)]

    @property
    def kinds(self) -> list[str]:
        """Return the names of the classes that step parameters."""
        return [type(leaf).__name__ for leaf in self._leaves]

    def states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state with the rows of a parameter: of its shape, ``(rows,)`` or
        ``(rows, 1)``.

        Raises:
            ValueError: several optimizers step it.
        """
        # None of them before the first step.
        found = [leaf.state[parameter] for leaf in self._leaves if parameter in leaf.state]
        if len(found) > 1:
            raise ValueError("Several optimizers step the same table; only one may.")
        rows = len(parameter)
        # Step counts and the like belong to no row: they stay with the parameter.
        shapes = {parameter.shape, (rows,), (rows, 1)}
        return {
            name: value
            for name, value in ChainMap(*found).items()
            if getattr(value, "shape", None) in shapes
        }

    def initial(self, parameter: nn.Parameter, name: str) -> float:
        """Return the value from which a state of a parameter starts."""
        for leaf in self._leaves:
            if parameter in leaf.state:
                return initial_state(leaf, parameter, name)
        return 0.0

    def replace(self, stepped: Stepped) -> None:
        """Have a parameter stepped in the place of another, with its options and remaining
        state."""
        old, new, states = stepped
        instead = {old: new}
        for leaf in self._leaves:
            for group in leaf.param_groups:
                group["params"] = [instead.get(each, each) for each in group["params"]]
            if old in leaf.state:
                leaf.state[new] = {**leaf.state.pop(old), **states}
        for optimizer in self._given:
            _rename(optimizer, old, new)


def _rename(optimizer: Any, old: nn.Parameter, new: nn.Parameter) -> None:
    """TorchRec's keyed optimizers hold their parameters a second time, by name."""
    torchrec = torchrec_port()
    inside = list((torchrec.combined(optimizer) if torchrec else None) or ())
    if hasattr(optimizer, "_optimizer"):
        inside.append(optimizer._optimizer)
    for part in inside:
        _rename(part, old, new)
    named = torchrec.named_parameters(optimizer) if torchrec else None
    if named is None:
        return
    for name, parameter in named.items():
        if parameter is old:
            named[name] = new


class _Fused(NamedTuple):
    """One shard of a table with a fused optimizer: its optimizer state, live, and the optimizer's
    hyperparameters."""

    states: Sequence[Tensor]
    hyperparameters: dict[str, float]


class _Kind(NamedTuple):
    """Of optimizer state: its dtype, whether it has one value per row, and its dimensions."""

    dtype: str
    rowwise: bool
    dims: int


@torch.no_grad()
def move_collection(
    old: nn.Module,
    new: nn.Module,
    kept: Mapping[str, Tensor],
    steppers: Steppers,
    placed: Mapping[str, Tensor] | None = None,
) -> list[Stepped]:
    """Fill a sharded collection with rows of another one. Collective over its ranks.

    Args:
        kept: by table, which rows of ``old`` move, in their order.
        steppers: the optimizers that step what is not fused. They are not changed.
        placed: by table, which rows of ``new`` take them; None: the first ones. The others are 0,
            with fresh optimizer state.

    Returns:
        What they step.

    Raises:
        ValueError: row-wise optimizer state of a table whose columns are cut otherwise in ``new``.
    """
    source, target = collection_of(old), collection_of(new)
    group = group_over(_located(source, next(iter(kept))).ranks)
    with group.agreeing("moving tables"):
        tables = {}
        for name, flags in kept.items():
            old_table, new_table = _located(source, name), _located(target, name)
            into = torch.arange(new_table.shape[0]) < flags.count_nonzero()
            if placed is not None:
                into = placed[name]
            tables[name] = _Table(old_table, new_table, flags, into)
        fused, fused_into = fused_shards(source), fused_shards(target)
        plain, plain_into = source.parameters(), target.parameters()
        mine = _held(fused, plain, steppers)
    # A rank without a shard of a table does not know its states, but takes part in moving them.
    hyperparameters: dict[str, Any] = {}
    states: dict[str, dict[str, _Kind]] = {}
    for held in group.all_gather_json(mine):
        hyperparameters = {**held["hyperparameters"], **hyperparameters}
        states = {**held["states"], **states}
    target.set_hyperparameters(hyperparameters)
    stepped = []
    # One table and one state after the other: only a chunk is held twice.
    for name, table in tables.items():
        table.fill(_tensors(table.source), _tensors(table.target), table.source.dtype, False)
        made: dict[str, Tensor] = {}
        if name in hyperparameters:
            _fill_fused(table, states[name], fused.get(name, ()), fused_into.get(name, ()))
        else:
            made = _fill_plain(table, states[name], steppers, plain[name], plain_into[name])
        # Of a fused table too: a rank without a shard has an empty parameter, which it may step.
        if name in plain:
            stepped.append(Stepped(plain[name], plain_into[name], made))
    return stepped


def _located(collection: Collection, table: str) -> ShardedData:
    return collection.locate(table, collection.fqn("", table), table)


def fused_shards(collection: Collection) -> dict[str, list[_Fused]]:
    """This rank's shards of tables with a fused optimizer, in the order of ``ShardedData.shards``:
    without empty ones."""
    found: dict[str, list[_Fused]] = {}
    for batch in collection.batches():
        values = batch.hyperparameters()
        for table, view, states in zip(batch.tables, batch.weights(), batch.states(), strict=True):
            if view.numel():
                found.setdefault(table, []).append(_Fused(states, values))
    return found


def _held(
    fused: Mapping[str, Sequence[_Fused]], plain: Mapping[str, nn.Parameter], steppers: Steppers
) -> dict[str, Any]:
    """This rank's optimizer states by table and name, and the fused optimizers' hyperparameters."""
    states: dict[str, dict[str, _Kind]] = {}
    for name, shards in fused.items():
        # FBGEMM's states have no names, and JSON has no integer keys.
        views = enumerate(shards[0].states)
        states[name] = {str(number): _kind(view, view.dim() == 1) for number, view in views}
    for name, parameter in plain.items():
        # An empty parameter says nothing of the shapes that its state has elsewhere.
        if parameter.numel():
            named = steppers.states(parameter).items()
            states[name] = {
                key: _kind(state, state.shape != parameter.shape) for key, state in named
            }
    hyperparameters = {name: shards[0].hyperparameters for name, shards in fused.items()}
    return {"hyperparameters": hyperparameters, "states": states}


def _kind(state: Tensor, rowwise: bool) -> _Kind:
    return _Kind(str(state.dtype).removeprefix("torch."), rowwise, state.dim())


def _tensors(data: ShardedData) -> list[Tensor]:
    return [shard.tensor for shard in data.shards]


def _fill_fused(
    table: _Table, kinds: Mapping[str, Any], old: Sequence[_Fused], new: Sequence[_Fused]
) -> None:
    """Fill the optimizer state of a fused table, which is allocated with its weights."""
    for key, (dtype, rowwise, _) in kinds.items():
        held = [shard.states[int(key)] for shard in old]
        into = [shard.states[int(key)] for shard in new]
        table.fill(held, into, getattr(torch, dtype), rowwise)


def _fill_plain(
    table: _Table,
    kinds: Mapping[str, Any],
    steppers: Steppers,
    old: nn.Parameter,
    new: nn.Parameter,
) -> dict[str, Tensor]:
    """Return new state of a plain optimizer, filled."""
    held = steppers.states(old)
    made: dict[str, Tensor] = {}
    for key, (dtype, rowwise, dims) in kinds.items():
        # Row-wise state is (rows,) or (rows, 1).
        columns = (1,) if rowwise else new.shape[1:]
        shape = (len(new), *columns)[:dims]
        state = made[key] = new.new_empty(shape, dtype=getattr(torch, dtype))
        old_shards, shards = _by_shard(held.get(key), table.source), _by_shard(state, table.target)
        fresh = steppers.initial(old, key)
        table.fill(old_shards, shards, state.dtype, rowwise, fresh)
    return made


def _by_shard(tensor: Tensor | None, data: ShardedData) -> list[Tensor]:
    """Optimizer state of a rank's shards, which TorchRec concatenates by rows, apart."""
    if tensor is None or not data.shards:
        return []
    return list(torch.split(tensor, [shard.rect.rows for shard in data.shards]))


@dataclass(frozen=True)
class _Table:
    """A table as it was and as it will be stored, which rows move and which rows take them. The new
    one may have fewer columns."""

    source: ShardedData
    target: ShardedData
    kept: Tensor
    placed: Tensor

    def fill(
        self,
        held: Sequence[Tensor],
        into: Sequence[Tensor],
        dtype: torch.dtype,
        rowwise: bool,
        fresh: float = 0.0,
    ) -> None:
        """Fill this rank's new shards ``into`` from the old ones ``held``: weights or optimizer
        state. Rows that take none are ``fresh``. Collective."""
        source, target = self.source, self.target
        for tensor in into:
            tensor.fill_(fresh)
        wanted = self._wanted(rowwise)
        places = [self._place(shard.rect) for shard in target.shards]
        for rect, part in move_rows(source, held, self.kept, wanted, dtype=dtype, rowwise=rowwise):
            for place, tensor in zip(places, into, strict=True):
                _write(rect, part, place, tensor)

    def _wanted(self, rowwise: bool) -> list[list[Rect]]:
        """The rectangles that each rank wants, in kept coordinates."""
        columns: dict[int, int] = {}
        if rowwise and self.target.shape[1] < self.source.shape[1]:
            # A shard that loses columns keeps the value of each row, sent under the old columns.
            columns = {rect.col: rect.cols for rect in self.source.rects}
        wanted = []
        for rects in self.target.tiling:
            inside = [self._moved(rect) for rect in rects]
            # Without shards that take no row.
            inside = [each for each in inside if each.numel]
            wanted.append([each._replace(cols=columns.get(each.col, each.cols)) for each in inside])
        return wanted

    def _moved(self, rect: Rect) -> Rect:
        """What moves to a rectangle of the new table, in kept coordinates."""
        before = int(self.placed[: rect.row].count_nonzero())
        count = int(self.placed[rect.row : rect.row_end].count_nonzero())
        return Rect(before, rect.col, count, rect.cols)

    def _place(self, rect: Rect) -> _Place:
        """Where a new shard stores the rows that move to it."""
        flags = self.placed[rect.row : rect.row_end]
        return _Place(self._moved(rect), flags.nonzero().view(-1))


class _Place(NamedTuple):
    """What moves to a shard, in kept coordinates, and the row of the shard that takes each."""

    moved: Rect
    rows: Tensor


def _write(rect: Rect, part: Tensor, place: _Place, tensor: Tensor) -> None:
    """Write what has arrived of ``rect``, in kept coordinates, if it is of this shard."""
    moved = place.moved
    # Row-wise state arrives under the old columns, of which the shard may have the first.
    here = rect._replace(cols=min(rect.cols, moved.cols))
    if rect.intersect(moved) == here:
        rows = place.rows[rect.row - moved.row : rect.row_end - moved.row]
        tensor[rows.to(tensor.device)] = part.view(len(rows), *tensor.shape[1:])
