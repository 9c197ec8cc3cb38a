"""Kept rows, and how they move between ranks with their optimizer state.

Kept rows are numbered in ascending order. *Kept coordinates* are rows in that numbering, and
columns. Rows move in chunks, so that no rank ever holds more of a table than its own shards and one
chunk for each rank that receives it. A collection moves table by table: weights first, then one
optimizer state after the other.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_sparse.groups import Group, group_over, world_group
from dist_sparse.masking.masks import pack, places_of, unpack
from dist_sparse.optimizers import initial_state, leaves
from dist_sparse.parcels import Parcels, Read
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.dense_store import as_matrix
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.modules import collection_of, torchrec_port, weight_name
from dist_sparse.tables.shards import Located, Rect, Shard, ShardedData, not_empty, whole

# Which rows are kept, and moving them

# Chunks begin and end at multiples of this many rows, whose kept rows are counted together.
_SPAN = 4096


def kept_rows(sparsifier: BaseDataSparsifier, located: Located) -> dict[str, Tensor]:
    """Return which rows of each registered table the masks keep any element of: bool ``(rows,)`` on
    the CPU, the same on every rank. Collective over the tables' groups: one all-gather each, of one
    bit per row.

    Args:
        located: the registered tables as they are stored now.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> from dist_sparse.compaction.moving import kept_rows
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.arange(8.0).view(4, 2))
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, "ROW"))
        >>> names = sparsifier.add_model(table)
        >>> sparsifier.step()
        >>> kept_rows(sparsifier, sparsifier.masks.tables.current())
        {'weight': tensor([False, False,  True,  True])}
    """
    packed, dense = sparsifier.masks.tables, sparsifier.masks.plain
    kept: dict[str, Tensor] = {}
    for names in packed.groups.values():
        kept |= gather_rows([located[name] for name in names], partial(_rows_kept_in, packed))
    for name in dense.names:
        kept[name] = (as_matrix(dense.mask(name)) != 0).any(1).cpu()
    return kept


def _rows_kept_in(store: PackedStore, data: ShardedData, rect: Rect) -> Tensor:
    """Return which rows of this rank's shard at ``rect`` its mask keeps: bool ``(rect.rows,)``."""
    masks = {mask.rect: mask for mask in store.masks(data.name)}
    return ~masks[rect].dead_rows().cpu()


def gather_rows(
    tables: Sequence[ShardedData],
    flags: Callable[[ShardedData, Rect], Tensor],
    held: Callable[[ShardedData, int], Sequence[Rect]] = ShardedData.owned,
) -> dict[str, Tensor]:
    """Return which rows of each table any shard flags: bool ``(rows,)`` on the CPU, the same on
    every rank. Collective over the ranks of the tables, which must be the same: one all-gather of
    one bit per row and shard.

    Args:
        flags: flags the rows of a shard of this rank: bool ``(rect.rows,)``.
        held: the shards that a group rank reports; by default, only the first replica reports.
    """
    group = group_over(tables[0].ranks)
    shards: list[list[tuple[ShardedData, Rect]]] = []
    rows: list[int] = []
    for rank in range(group.size):
        shards.append([(data, rect) for data in tables for rect in held(data, rank)])
        rows.append(sum(rect.rows for _, rect in shards[rank]))
    # All messages of an all-gather have one length.
    most = max(rows)
    with group.jointly("counting rows"):
        flagged = [flags(data, rect) for data, rect in shards[group.rank]]
        padding = torch.zeros(most - rows[group.rank], dtype=torch.bool)
        sent = pack(torch.cat([*flagged, padding]))
        found = {data.name: torch.zeros(data.shape[0], dtype=torch.bool) for data in tables}
        for received, of_rank in zip(group.all_gather(sent), shards, strict=True):
            rest = unpack(received, most)
            for data, rect in of_rank:
                # Other shards of the same rows have different columns: a row is flagged if any of
                # them flags it.
                found[data.name][rect.row : rect.row_end] |= rest[: rect.rows]
                rest = rest[rect.rows :]
    return found


def on_all_ranks(located: Located, flags: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return flags of the rows of tables, bool ``(rows,)`` on the CPU, on every rank, including
    tables of which it holds nothing. Collective over the world: one all-gather of one bit per row.

    Args:
        located: the tables. One that no group of ranks holds is another on each rank, as in models
            without a wrapper: each rank keeps its own flags.
        flags: for the tables that this rank holds, as :func:`gather_rows` returns them.
    """
    world = world_group()
    with world.agreeing("counting rows"):
        by_rank: list[list[str]] = [[] for _ in range(world.size)]
        for name, data in located.items():
            if data.ranks is not None:
                by_rank[data.ranks[0]].append(name)
        mine = [pack(flags[name]) for name in by_rank[world.rank]]
        packed = torch.cat([torch.empty(0, dtype=torch.uint8), *mine])
    found = {}
    for names, part in zip(by_rank, world.all_gather_parts(packed), strict=True):
        for name in names:
            rows = located[name].shape[0]
            found[name] = unpack(part, rows)
            part = part[-(-rows // 8) :]
    return {name: found[name] if name in found else flags[name] for name in located}


# Bytes of a chunk of kept rows, over the whole width of the table. A chunk is at least one row.
CHUNK_BYTES = 8 << 20


def move_rows(
    source: ShardedData,
    tensors: Sequence[Tensor],
    kept: Tensor,
    wanted: Sequence[Sequence[Rect]],
) -> Iterator[tuple[Rect, Tensor]]:
    """Yield the kept rows that this rank wants, chunk by chunk, bit for bit. Collective over the
    ranks of ``source``: one all-to-all per chunk, in each ``next()``, so all ranks must exhaust the
    iterator. Of several replicas the first sends.

    Args:
        source: the table as it is stored now, with the dtype of ``tensors``.
        tensors: one for each of this rank's ``source.shards``: the weights, or optimizer state of
            their shape.
        kept: bool ``(source.shape[0],)`` on the CPU, the same on every rank.
        wanted: the rectangles that each group rank wants, in kept coordinates.

    Yields:
        A rectangle in kept coordinates, within one that this rank wants and with all its columns;
        its rows as a tensor ``(rows, columns)``, which may be a view of a message. Rows ascend.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.moving import move_rows
        >>> from dist_sparse.tables.modules import ModelTables
        >>> from dist_sparse.tables.shards import Rect
        >>> table = torch.nn.EmbeddingBag.from_pretrained(torch.arange(8.0).view(4, 2))
        >>> [source] = ModelTables(table).locate()
        >>> kept, wanted = torch.tensor([False, True, False, True]), [[Rect(0, 1, 2, 1)]]
        >>> [
        ...     (str(rect), rows.tolist())
        ...     for rect, rows in move_rows(source, [table.weight.data], kept, wanted)
        ... ]
        [('rows [0, 2) x columns [1, 2)', [[3.0], [7.0]])]
    """
    group = group_over(source.ranks)
    held = dict(zip(source.tiling[group.rank], tensors, strict=True))
    row_bytes = max(1, source.shape[1] * source.dtype.itemsize)
    for chunk in _chunks(kept, max(1, CHUNK_BYTES // row_bytes)):
        parcels = Parcels(group)
        # Without the agreement, a rank that runs out of memory here leaves the others waiting.
        with group.agreeing(f"moving rows of {source.name!r}"):
            for part in _parts_in(source.owned(group.rank), kept, chunk):
                # A shard may be on a GPU; the flags are on the CPU.
                top = part.shard.row
                local = held[part.shard][part.rows.start - top : part.rows.stop - top]
                # 3x faster than indexing with flags, where few are kept.
                local = local.index_select(0, places_of(kept[part.rows]).to(local.device))
                _pack_wanted(parcels, part.kept, local.view(part.kept.rows, -1), wanted)
            arriving = _expect_pieces(parcels, source, kept, chunk, wanted[group.rank])
        parcels.exchange(group.device)
        # Read here, not above, so that one rectangle at a time is copied out of the messages.
        for want, pieces in arriving.items():
            yield _join_pieces(want, [(common, read()) for common, read in pieces])


def move_rowwise(
    source: ShardedData,
    tensors: Sequence[Tensor],
    kept: Tensor,
    wanted: Sequence[Sequence[Rect]],
) -> Iterator[tuple[Rect, Tensor]]:
    """Yield kept values as :func:`move_rows` yields rows, but as tensors ``(rows,)``. ``tensors``
    have one value per row and shard, ``(rows,)`` or ``(rows, 1)``. They move as a table with one
    column for each column span of the shards.

    Raises:
        ValueError: values are wanted for columns that are not the columns of a shard: they can't be
            derived from the values of other columns.
    """
    spans = sorted({(rect.col, rect.cols) for rect in source.rects})

    def as_column(rect: Rect) -> Rect:
        # An empty shard sends nothing, and its columns may be no span.
        if not rect.numel:
            return rect
        # ``wanted`` is the same on every rank, so all ranks raise.
        if (rect.col, rect.cols) not in spans:
            raise ValueError(
                f"Table {source.name!r}: row-wise optimizer state of {rect} can't be derived from"
                f" the state of the columns {spans} (first, count)."
            )
        return Rect(rect.row, spans.index((rect.col, rect.cols)), rect.rows, 1)

    tiling = tuple(tuple(map(as_column, rects)) for rects in source.tiling)
    table = replace(source, shape=(source.shape[0], len(spans)), tiling=tiling)
    columns = [list(map(as_column, rects)) for rects in wanted]
    for rect, values in move_rows(table, tensors, kept, columns):
        first, count = spans[rect.col]
        yield rect._replace(col=first, cols=count), values.view(-1)


def _pack_wanted(
    parcels: Parcels, here: Rect, local: Tensor, wanted: Sequence[Sequence[Rect]]
) -> None:
    """Pack the parts of ``local``, this rank's kept rows at ``here``, that each rank wants."""
    for receiver, rects in enumerate(wanted):
        for want in rects:
            common = here.intersect(want)
            if common is not None:
                rows = slice(common.row - here.row, common.row_end - here.row)
                columns = slice(common.col - here.col, common.col_end - here.col)
                parcels.send(receiver, local[rows, columns].contiguous())


def _expect_pieces(
    parcels: Parcels,
    source: ShardedData,
    kept: Tensor,
    chunk: _Chunk,
    wanted: Sequence[Rect],
) -> dict[Rect, list[tuple[Rect, Read]]]:
    """Return the pieces of a chunk that this rank receives: by wanted rectangle, where each piece
    is in kept coordinates, and a function that reads it."""
    arriving = defaultdict(list)
    # Messages have no headers: this is the order in which :func:`_pack_wanted` packs the pieces.
    for sender in range(len(source.tiling)):
        for part in _parts_in(source.owned(sender), kept, chunk):
            for want in wanted:
                common = part.kept.intersect(want)
                if common is not None:
                    read = parcels.expect(sender, (common.rows, common.cols), source.dtype)
                    arriving[want].append((common, read))
    return arriving


class _Chunk(NamedTuple):
    """Rows ``[first, last)`` of a table. Their kept ones are numbered from ``start``."""

    first: int
    last: int
    start: int


def _chunks(kept: Tensor, most: int) -> Iterator[_Chunk]:
    """Yield consecutive chunks of at most ``most`` kept rows each; none where nothing is kept."""
    span = min(_SPAN, most)
    # ``ends``: kept rows up to the end of each span. A chunk ends where the next one would not fit.
    flags = nn.functional.pad(kept, (0, -len(kept) % span)).view(torch.uint8)
    ends = flags.view(-1, span).sum(1, dtype=torch.int32).cumsum(0)
    at = start = 0
    while at < len(ends):
        # At least one span fits: a span has at most ``most`` rows.
        after = int(torch.searchsorted(ends, start + most, right=True))
        end = int(ends[after - 1])
        if end > start:
            yield _Chunk(at * span, min(after * span, len(kept)), start)
        at, start = after, end


class _Part(NamedTuple):
    """The part of a shard that is in a chunk: its rows in the table, and its kept rows in kept
    coordinates."""

    shard: Rect
    rows: slice
    kept: Rect


def _parts_in(rects: Iterable[Rect], kept: Tensor, chunk: _Chunk) -> Iterator[_Part]:
    """Yield the parts of shards that are in a chunk and have kept rows."""
    for rect in rects:
        top, bottom = max(rect.row, chunk.first), min(rect.row_end, chunk.last)
        # Outside the chunk the slice is empty: a count of 0.
        count = int(kept[top:bottom].count_nonzero())
        if count:
            # Other shards have the kept rows of the chunk above this one.
            row = chunk.start + int(kept[chunk.first : top].count_nonzero())
            yield _Part(rect, slice(top, bottom), Rect(row, rect.col, count, rect.cols))


def _join_pieces(want: Rect, pieces: Sequence[tuple[Rect, Tensor]]) -> tuple[Rect, Tensor]:
    """Return the rectangle that the pieces cover, with all columns of ``want``, and its rows."""
    # The usual case needs no copy.
    if len(pieces) == 1:
        return pieces[0]
    top = min(rect.row for rect, _ in pieces)
    bottom = max(rect.row_end for rect, _ in pieces)
    out = pieces[0][1].new_empty(bottom - top, want.cols)
    # With column-wise shards, each piece has some of the columns.
    for rect, piece in pieces:
        columns = slice(rect.col - want.col, rect.col_end - want.col)
        out[rect.row - top : rect.row_end - top, columns] = piece
    return Rect(top, want.col, bottom - top, want.cols), out


# Tables, with their optimizer state


class Swapped(NamedTuple):
    """A parameter that plain optimizers step, and the parameter that replaces it, with its
    state."""

    old: nn.Parameter
    new: nn.Parameter
    states: Mapping[str, Tensor]


class Steppers:
    """The optimizers of a training loop, wrapped ones too.

    Args:
        optimizers: one, a sequence of several, or None.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.moving import Swapped, Steppers
        >>> old, new = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(3, 2))
        >>> optimizer = torch.optim.Adagrad([old])
        >>> steppers = Steppers([optimizer])
        >>> sums = steppers.states(old)["sum"]
        >>> steppers.replace(Swapped(old, new, {"sum": sums[1:]}))
        >>> optimizer.param_groups[0]["params"][0] is new, optimizer.state[new]["sum"].shape
        (True, torch.Size([3, 2]))
    """

    def __init__(self, optimizers: Any) -> None:
        self._optimizers = list(filter(None, tree_leaves(optimizers)))
        # Wrappers, such as TorchRec's CombinedOptimizer, hold the optimizers that have the state.
        self._leaves = [*leaves(self._optimizers)]

    @property
    def kinds(self) -> list[str]:
        """Return the names of the classes that step parameters."""
        return [type(leaf).__name__ for leaf in self._leaves]

    def states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state that has a value for each element or row of a parameter: of its shape,
        ``(rows,)`` or ``(rows, 1)``.

        Raises:
            ValueError: several optimizers step it.
        """
        # No optimizer has state before its first step.
        found = [leaf.state[parameter] for leaf in self._leaves if parameter in leaf.state]
        if len(found) > 1:
            raise ValueError("Several optimizers step the same table; only one may.")
        rows = len(parameter)
        # Step counts and the like have no rows: replace() copies them.
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

    def replace(self, stepped: Swapped) -> None:
        """Step ``new`` instead of ``old``, in the same param groups, with ``states`` and the other
        state of ``old``."""
        old, new, states = stepped
        instead = {old: new}
        for leaf in self._leaves:
            for group in leaf.param_groups:
                group["params"] = [instead.get(each, each) for each in group["params"]]
            if old in leaf.state:
                leaf.state[new] = {**leaf.state.pop(old), **states}
        if (torchrec := torchrec_port()) is not None:
            for optimizer in self._optimizers:
                torchrec.replace_parameter(optimizer, old, new)


class StoredTables:
    """This rank's shards of the tables of a module, with their optimizer state.

    Args:
        module: a TorchRec collection, or a torch embedding, whose table is named ``""``.
        names: of tables.
        steppers: the optimizers of tables without a fused one.

    Attributes:
        located: the shards, by table.
        parameters: the parameters that plain optimizers step, by table.
        hyperparameters: of fused optimizers, by table; only tables with a shard on this rank.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], steppers: Steppers) -> None:
        self._steppers = steppers
        self._fused: dict[str, list[Sequence[Tensor]]] = {}
        self.hyperparameters: dict[str, dict[str, float]] = {}
        self.located: dict[str, ShardedData]
        self.parameters: Mapping[str, nn.Parameter]
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            weight = module.get_parameter(weight_name(module))
            data = whole("weight", weight.data)
            # A table that has lost all rows has a shard too, through which its state is found.
            shard = Shard(Rect(0, 0, *weight.shape), weight.data)
            self.located = {"": replace(data, tiling=((shard.rect,),), shards=(shard,))}
            self.parameters = {"": weight}
            return
        collection = collection_of(module)
        self.located = {name: collection.locate(name, name, name) for name in names}
        self.parameters = collection.parameters()
        for batch in collection.batches():
            values = batch.hyperparameters()
            shards = zip(batch.tables, batch.weights(), batch.states(), strict=True)
            for table, view, states in shards:
                if view.numel():
                    self.hyperparameters[table] = values
                    self._fused.setdefault(table, []).append(states)

    def weights(self, table: str) -> list[Tensor]:
        """Return this rank's shards of a table, live."""
        return [shard.tensor for shard in self.located[table].shards]

    def states(self, table: str) -> dict[str, list[Tensor]]:
        """Return the optimizer state of this rank's shards of a table, live, by name."""
        if table in self._fused:
            # FBGEMM's states have no names, and JSON has no integer keys.
            by_state = zip(*self._fused[table], strict=True)
            return {str(number): list(states) for number, states in enumerate(by_state)}
        # The state of an empty parameter does not tell row-wise state from full state.
        if not self.located[table].shards:
            return {}
        held = self._steppers.states(self.parameters[table])
        return {name: _by_shard(state, self.located[table]) for name, state in held.items()}

    def initial(self, table: str, name: str) -> float:
        """Return the value from which a state of a table starts."""
        if table in self._fused:
            return 0.0
        return self._steppers.initial(self.parameters[table], name)

    def layouts(self, table: str) -> dict[str, tuple[str, bool, int]]:
        """Return the dtype of each state of a table, whether it has one value per row, and its
        number of dimensions, by name; none on a rank without a shard. JSON carries them."""
        found = {}
        for name, (state, *_) in self.states(table).items():
            rowwise = state.shape != self.weights(table)[0].shape
            dtype = str(state.dtype).removeprefix("torch.")
            found[name] = dtype, rowwise, state.dim()
        return found


def _by_shard(tensor: Tensor, data: ShardedData) -> list[Tensor]:
    """Split the optimizer state of a rank by shard: TorchRec concatenates the rows of shards."""
    return list(torch.split(tensor, [shard.rect.rows for shard in data.shards]))


@torch.no_grad()
def move_tables(
    old: nn.Module,
    new: nn.Module,
    kept: Mapping[str, Tensor],
    placed: Mapping[str, Tensor],
    steppers: Steppers,
    world: Group,
) -> list[Swapped]:
    """Fill the tables of ``new`` with rows of ``old`` and their optimizer state. Collective over
    ``world``.

    Args:
        kept: by table, which rows of ``old`` move, in their order: bool ``(rows,)``.
        placed: by table, which rows of ``new`` receive them: bool; the first rows for a table that
            is missing here. Other rows are 0, with fresh optimizer state.
        steppers: the optimizers of tables without a fused one. They are not changed.

    Returns:
        The parameters that plain optimizers step, with their replacements.

    Raises:
        ValueError: a table has row-wise optimizer state, and its columns are cut at different
            places in ``new``.
    """
    with world.agreeing("moving tables"):
        source = StoredTables(old, kept, steppers)
        target = StoredTables(new, kept, steppers)
        layouts = {
            "hyperparameters": source.hyperparameters,
            "states": {name: source.layouts(name) for name in kept},
        }
    # A rank without a shard of a table does not know which states it has, but must take part in
    # the collectives that move them.
    hyperparameters: dict[str, Any] = {}
    kinds: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for held in world.all_gather_json(layouts):
        hyperparameters |= held["hyperparameters"]
        for name, states in held["states"].items():
            kinds[name] |= states
    if hyperparameters:
        collection_of(new).set_hyperparameters(hyperparameters)
    stepped = []
    # Table by table and state by state: only one chunk is in memory twice.
    for name, flags in kept.items():
        here, there = source.located[name], target.located[name]
        # Fused tables too: a rank without a shard has an empty parameter that a plain optimizer may
        # step.
        parameter = source.parameters.get(name)
        made = {}
        # Not by arange(), which takes 8 bytes per id.
        into = torch.zeros(there.shape[0], dtype=torch.bool)
        into[: flags.count_nonzero()] = True
        move = _Copy(here, there, flags, placed.get(name, into))
        move.fill(source.weights(name), target.weights(name))
        before, after = source.states(name), target.states(name)
        for key, (kind, rowwise, dims) in kinds[name].items():
            of_state = replace(move, source=replace(here, dtype=getattr(torch, kind)))
            fresh = 0.0
            if name not in hyperparameters:
                # A plain optimizer creates state in its first step only: create it here.
                weight = target.parameters[name]
                columns = (1,) if rowwise else weight.shape[1:]
                made[key] = weight.new_empty(
                    (len(weight), *columns)[:dims], dtype=of_state.source.dtype
                )
                after[key], fresh = _by_shard(made[key], there), source.initial(name, key)
            of_state.fill(before.get(key, []), after.get(key, []), rowwise, fresh)
        if parameter is not None:
            stepped.append(Swapped(parameter, target.parameters[name], made))
    return stepped


@dataclass(frozen=True)
class _Copy:
    """The move of one table: its old and new shards, which rows move, and which rows receive them.
    The new table may have fewer columns.

    Args:
        source, target: the table as it is stored now, and as it will be.
        kept, placed: as in :func:`move_tables`, for this table.
    """

    source: ShardedData
    target: ShardedData
    kept: Tensor
    placed: Tensor

    def fill(
        self,
        held: Sequence[Tensor],
        into: Sequence[Tensor],
        rowwise: bool = False,
        fresh: float = 0.0,
    ) -> None:
        """Fill this rank's new shards ``into`` from the old ones ``held``: weights or optimizer
        state of ``source.dtype``. Rows that receive nothing are ``fresh``. Collective."""
        places = []
        for shard, tensor in zip(self.target.shards, into, strict=True):
            tensor.fill_(fresh)
            rows = self.placed[shard.rect.row : shard.rect.row_end].nonzero().view(-1)
            places.append((self._moved(shard.rect), rows.to(tensor.device), tensor))
        move = move_rowwise if rowwise else move_rows
        for rect, part in move(self.source, held, self.kept, self._wanted(rowwise)):
            for moved, rows, tensor in places:
                # Row-wise state arrives with the columns of the old shard; the new one may have
                # the first of them only.
                here = rect._replace(cols=min(rect.cols, moved.cols))
                if rect.intersect(moved) == here:
                    taken = rows[rect.row - moved.row : rect.row_end - moved.row]
                    tensor[taken] = part.view(len(taken), *tensor.shape[1:]).to(tensor.device)

    def _wanted(self, rowwise: bool) -> list[list[Rect]]:
        """Return the rectangles that each rank wants, in kept coordinates."""
        columns: dict[int, int] = {}
        if rowwise and self.target.shape[1] < self.source.shape[1]:
            # One value per row and shard: ask for the old columns, which the value belongs to.
            columns = {rect.col: rect.cols for rect in self.source.rects}
        wanted = []
        for rects in self.target.tiling:
            moved = not_empty(map(self._moved, rects))
            wanted.append([want._replace(cols=columns.get(want.col, want.cols)) for want in moved])
        return wanted

    def _moved(self, rect: Rect) -> Rect:
        """Return the kept rows that a rectangle of the new table receives, in kept coordinates."""
        before = int(self.placed[: rect.row].count_nonzero())
        count = int(self.placed[rect.row : rect.row_end].count_nonzero())
        return Rect(before, rect.col, count, rect.cols)
