"""Blocks that shard borders cut: one rank scores each, and sends its decision to all holders.

Every block row of a table has an owner, rank ``block_row * world // block_rows``. The holders of a
cut block send the owner their parts (:class:`Partials`). The owner scores the block
(:class:`Owned`) and returns its :class:`Decision`: one all-to-all each way, for all tables. All
ranks know from metadata who holds what, so messages need no header.

- Blocks cut by a column border: float64 partial sums, which the owner adds in ascending column
  offset.
- Block rows cut by a row border: element scores, which the owner assembles into a *slab*, the whole
  block row, and scores as if it had never been cut.
- Whole columns: float64 partial sums, one of each shard, which the owner adds in ascending row
  offset. A slab would be the whole table.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking.device import flat_width, kernels_on, with_one_retry
from dist_sparse.masking.masks import pack, unpack
from dist_sparse.masking.scores import (
    KEPT,
    Measure,
    RowTotals,
    Segment,
    block_sums,
    block_widths,
    to_scores,
)
from dist_sparse.parcels import Parcels, Read
from dist_sparse.tables.shards import Block, Grid, Rect, Shard, ShardedData, grid_of, sent


@dataclass
class Partials:
    """A shard's part of its cut blocks.

    Args:
        grid: of the shard.
        rows: its cut block rows.
        cols: its cut block columns, counted from its first.
        sums: partial sums in cut columns, for every block row of the shard: float64
            ``(grid.rows, cut columns)``; released once they are sent.
        clean: whether each partial sum is 0, bool of the same shape; set once they are sent.
        elements: element scores of each cut block row, float64 ``(its rows in the shard,
            rect.cols)``.
    """

    grid: Grid
    rows: tuple[int, ...]
    cols: list[int]
    sums: Tensor
    clean: Tensor = field(init=False)
    elements: dict[int, Tensor] = field(default_factory=dict)

    @property
    def cuts_all(self) -> bool:
        """Whether all blocks of the shard are in cut columns."""
        return len(self.cols) == self.grid.cols

    def mark(self, bits: Tensor, first: int) -> None:
        """Replace the scores of cut blocks by KEPT, in the block rows from ``first`` on."""
        bits[:, self.cols] = KEPT
        first += self.grid.row
        for i in self.rows:
            if first <= i < first + len(bits):
                bits[i - first] = KEPT

    def note(self, first: int, sums: Tensor) -> None:
        """Store the sums of cut columns, from the sums ``(n, grid.cols)`` of all blocks, in the
        block rows from ``first`` on."""
        # A copy: the caller overwrites its sums.
        self.sums[first : first + len(sums)].copy_(sums[:, self.cols])

    def release(self) -> None:
        """Free what has been sent: the sums may take as much memory as the scores."""
        self.clean = self.sums == 0
        self.sums = self.sums.new_empty(0)
        self.elements = {}


@dataclass(eq=False)
class CutTable:
    """The cut blocks of one table in a mask update.

    Args:
        rows: cut block rows; all of their blocks are cut.
        cols: cut block columns, in the other block rows.
        by_element: masks are not constant on blocks.

    Attributes:
        partials: the parts in this rank's shards; released once they are sent.
        owned: the blocks that this rank decides about. :func:`exchange_partials` sets it.
        decision: on the owned blocks. The caller sets it before :func:`return_decisions`.
        decisions: on the blocks in this rank's shards. :func:`return_decisions` sets it.
    """

    # Metadata: the same on every rank.
    data: ShardedData
    block: Block
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    by_element: bool
    partials: dict[Rect, Partials] = field(init=False, default_factory=dict)
    owned: Owned = field(init=False)
    decision: Decision = field(init=False)
    decisions: dict[Rect, Decision] = field(init=False, default_factory=dict)

    @property
    def grid(self) -> Grid:
        return self.data.grid(self.block)

    def owned_rows(self, rank: int) -> range:
        """Return the block rows that a group rank decides about."""
        total, size = self.grid.rows, len(self.data.tiling)
        # Rounded up: the rows whose `row * size // total` is this rank.
        return range(-(-rank * total // size), -(-(rank + 1) * total // size))

    def rows_in(self, rows: range) -> tuple[int, ...]:
        """Return the cut block rows among ``rows``."""
        return self.rows[bisect_left(self.rows, rows.start) : bisect_left(self.rows, rows.stop)]

    def places(self, rect: Rect) -> slice:
        """Return which of ``cols`` a shard has blocks of."""
        grid = grid_of(rect, self.block)
        return slice(bisect_left(self.cols, grid.col), bisect_left(self.cols, grid.col_end))

    def cols_in(self, rect: Rect) -> tuple[int, ...]:
        """Return the cut block columns that a shard has blocks of."""
        return self.cols[self.places(rect)]

    def add_shard(self, rect: Rect, device: torch.device) -> Partials:
        """Return a shard's part of its cut blocks, for :meth:`Partials.note` or kernels to
        fill."""
        grid = grid_of(rect, self.block)
        cols = [j - grid.col for j in self.cols_in(rect)]
        rows = self.rows_in(range(grid.row, grid.row_end))
        sums = torch.empty(grid.rows, len(cols), dtype=torch.float64, device=device)
        partials = self.partials[rect] = Partials(grid, rows, cols, sums)
        return partials

    def is_parts_of_rows(self) -> bool:
        """Whether kernels sum this rank's shards: each has one part of each of its rows, which are
        all cut."""
        # Kernels read weights as float32, which is not exact for float64.
        return self.data.dtype != torch.float64 and all(
            grid_of(rect, self.block).cols == len(self.cols_in(rect)) == 1
            and flat_width(rect, self.block, tensor) is not None
            for rect, tensor in self.data.shards
        )

    def slab(self, row: int) -> Rect:
        """Return the elements of a whole block row."""
        top = row * self.block[0]
        return Rect(top, 0, min(self.block[0], self.data.shape[0] - top), self.data.shape[1])

    def inside(self, rect: Rect, row: int) -> Rect:
        """Return the elements of a cut block row that a shard holds."""
        inner = rect.intersect(self.slab(row))
        assert inner is not None
        return inner

    def part_of_slab(self, rect: Rect, row: int) -> tuple[slice, ...]:
        """Return which part of the decision on a slab the shard ``rect`` needs."""
        if not self.by_element:
            grid = grid_of(rect, self.block)
            return (slice(grid.col, grid.col_end),)
        inner = self.inside(rect, row)
        top = inner.row - row * self.block[0]
        return slice(top, top + inner.rows), slice(rect.col, rect.col_end)

    def parts(self, rects: Iterable[Rect], owner: int) -> Iterator[tuple[Rect, range, int | None]]:
        """Yield the parts of some shards that the group rank ``owner`` decides about, in the order
        of the messages both ways: the rectangle and its owned block rows, for cut columns; then the
        rectangle, each cut block row, and its number."""
        for rect in dict.fromkeys(rects):
            grid = grid_of(rect, self.block)
            owned = self.owned_rows(owner)
            first, last = max(grid.row, owned.start), min(grid.row_end, owned.stop)
            if first < last and self.cols_in(rect):
                yield rect, range(first, last), None
            for row in self.rows_in(range(first, last)):
                yield rect, range(row, row + 1), row


@dataclass
class Owned:
    """The cut blocks of one table that this rank decides about.

    Args:
        columns: scores of the blocks in cut block columns, over the owned block rows. Cut block
            rows hold KEPT, as their slab decides.
        slabs: by owned cut block row, its scores, and its element scores ``(rows, width)``.
    """

    columns: Segment
    slabs: dict[int, tuple[Segment, Tensor]]

    @property
    def segments(self) -> list[Segment]:
        """The scores of all owned blocks."""
        return [self.columns, *(segment for segment, _ in self.slabs.values())]


@dataclass
class Decision:
    """Which cut blocks are removed, among the cut blocks in one shard or the cut blocks that a rank
    owns.

    Args:
        columns: removed flags of the cut block columns, bool ``(block rows, cut columns)``;
            undefined in cut block rows.
        slabs: removed flags of each cut block row, bool ``(grid.cols,)`` by block, or
            ``(rows, columns)`` by element.
    """

    columns: Tensor
    slabs: dict[int, Tensor]


def cut_indices(borders: Iterable[int], size: int) -> tuple[int, ...]:
    """Return the indices of the blocks of a size that borders cut, ascending."""
    return tuple(sorted({border // size for border in borders if border % size}))


def cut_by_columns(data: ShardedData, block: Block, zeros_per_block: int) -> str:
    """Return the message for blocks that a column border cuts: the borders, and what fits."""
    borders = sorted({rect.col for rect in data.rects} - {0})
    common = math.gcd(*borders)
    # At most 64: nobody rescores a longer list.
    fits = [width for width in range(1, min(block[1], 64)) if common % width == 0]
    return (
        f"Table {data.name!r}: zeros_per_block={zeros_per_block} is smaller than the"
        f" block {block}, so a column border may not cut blocks, but borders are at columns"
        f" {borders}; block widths that fit: {fits}."
    )


def sum_parts(
    parts: Sequence[tuple[CutTable, Shard]], measure: Measure, totals: Sequence[RowTotals]
) -> list[Tensor]:
    """Have kernels compute :class:`Partials` of shards, in one launch for all of a width.

    Args:
        parts: shards of one dtype on one device; all have :meth:`CutTable.is_parts_of_rows`.
        measure: how elements are scored, the same in all.
        totals: of each shard, if the measure is by them.

    Returns:
        The largest scores of parts, int64 ``(1,)``; a negative one is a NaN.
    """
    alike: dict[tuple[int, bool], list[int]] = {}
    for number, (_, (rect, _)) in enumerate(parts):
        # A shard of one column has as many totals of elements as of rows.
        of_elements = bool(totals) and totals[number].of_elements
        alike.setdefault((rect.cols, of_elements), []).append(number)
    largest = []
    for numbers in alike.values():
        tables, shards = zip(*(parts[number] for number in numbers), strict=True)
        device = shards[0].tensor.device
        kernels = kernels_on(device)
        assert kernels is not None
        sums, widths = [], []
        for table, (rect, _) in zip(tables, shards, strict=True):
            sums.append(table.add_shard(rect, device).sums)
            [column] = table.cols_in(rect)
            widths.append(min(table.block[1], table.data.shape[1] - column * table.block[1]))
        of_these = [totals[number] for number in numbers if totals]
        blocks = [table.block for table in tables]
        scores = kernels.FlatScores(shards, blocks, measure, of_these, [])
        largest.append(scores.add_up(sums, widths))
    return largest


def exchange_partials(tables: Sequence[CutTable], group: Group, device: torch.device) -> None:
    """Bring the parts of every cut block to its owner. Collective over ``group``: one all-to-all.

    Args:
        tables: the same ones in the same order on every rank.
        device: of the owner's part.
    """
    parcels = Parcels(group)
    # All ranks loop over the same tables, ranks and rectangles, so parcels need no names.
    for table in tables:
        _send_partials(parcels, table, group)
    arrivals = [_expect_partials(parcels, table, group) for table in tables]
    parcels.exchange(device)
    for table, arriving in zip(tables, arrivals, strict=True):
        # Ascending column offset: sums are added in the same order, whichever rank sent them.
        arriving.sort(key=lambda part: (part[0].col, part[0].row))
        table.owned = _score_owned(table, arriving, group, device)


def return_decisions(tables: Sequence[CutTable], group: Group, device: torch.device) -> None:
    """Bring the owners' decisions to every holder, replicas included. Collective over ``group``;
    one all-to-all of packed bits."""
    parcels = Parcels(group)
    for table in tables:
        _send_decision(parcels, table, group)
    arriving: list[tuple[Tensor, Read]] = []
    for table in tables:
        arriving += _expect_decisions(parcels, table, group, device)
    parcels.exchange(device)
    with_one_retry(lambda: _fill(arriving))


def _fill(arriving: Iterable[tuple[Tensor, Read]]) -> None:
    for place, read in arriving:
        place.copy_(unpack(read(), place.numel()).view_as(place))


# A part of a shard as in CutTable.parts(), and a function that reads it once it has arrived:
# float64 sums or element scores.
_Arrival = tuple[Rect, range, int | None, Read]


def _send_partials(parcels: Parcels, table: CutTable, group: Group) -> None:
    for owner in range(group.size):
        for rect, rows, row in table.parts(table.data.owned(group.rank), owner):
            known = table.partials[rect]
            first = rows.start - known.grid.row
            sums = known.sums[first : first + len(rows)]
            parcels.send(owner, sums if row is None else known.elements[row])
    for known in table.partials.values():
        known.release()


def _expect_partials(parcels: Parcels, table: CutTable, group: Group) -> list[_Arrival]:
    arriving = []
    for sender in range(group.size):
        for rect, rows, row in table.parts(table.data.owned(sender), group.rank):
            if row is None:
                shape = len(rows), len(table.cols_in(rect))
            else:
                shape = table.inside(rect, row)[2:]
            arriving.append((rect, rows, row, parcels.expect(sender, shape, torch.float64)))
    return arriving


def _score_owned(
    table: CutTable, arriving: Sequence[_Arrival], group: Group, device: torch.device
) -> Owned:
    """Add up what the ranks sent of this rank's part of ``table``, in the order of ``arriving``,
    and score it."""
    owned = table.owned_rows(group.rank)
    sums = torch.zeros(len(owned), len(table.cols), dtype=torch.float64, device=device)
    slabs: dict[int, Tensor] = {}
    for i in table.rows_in(owned):
        slabs[i] = torch.zeros(table.slab(i)[2:], dtype=torch.float64, device=device)
    for rect, rows, row, read in arriving:
        # Partial sums are added. Element scores are copied to their place in the slab.
        if row is None:
            at = slice(rows.start - owned.start, rows.stop - owned.start)
            sums[at, table.places(rect)] += read()
        else:
            inner = table.inside(rect, row)
            top = inner.row - table.slab(row).row
            slabs[row][top : top + inner.rows, inner.col : inner.col_end] = read()
    scores = _scores(table, sums, owned.start, table.cols)
    # In cut block rows, slabs decide about cut columns too.
    scores[[i - owned.start for i in slabs]] = KEPT
    result = Owned(Segment(owned.start, table.cols, table.grid.cols, device), {})
    result.columns.add(scores)
    every = range(table.grid.cols)
    for i, slab_scores in slabs.items():
        # One block row is one chunk of block_sums(): summed as if it had never been cut.
        _, folded = next(block_sums(slab_scores, table.slab(i), table.block, "given"))
        segment = Segment(i, every, table.grid.cols, device)
        segment.add(_scores(table, folded, i, every))
        result.slabs[i] = segment, slab_scores
    return result


def _scores(table: CutTable, sums: Tensor, first: int, columns: Sequence[int]) -> Tensor:
    """Return the scores of blocks as int32, from their sums, which are overwritten."""
    at = sent(columns, sums.device)
    widths = block_widths(table.data.shape, table.block, at)
    return to_scores(sums, first, widths, table.data.shape, table.block).view(torch.int32)


def _send_decision(parcels: Parcels, table: CutTable, group: Group) -> None:
    owned = table.owned_rows(group.rank)
    decision = table.decision
    for holder in range(group.size):
        # Replicas too: each holder masks its own copy.
        for rect, rows, row in table.parts(table.data.tiling[holder], group.rank):
            if row is None:
                inner = slice(rows.start - owned.start, rows.stop - owned.start)
                flags = decision.columns[inner, table.places(rect)]
            else:
                flags = decision.slabs[row][table.part_of_slab(rect, row)]
            parcels.send(holder, pack(flags.flatten()))


def _expect_decisions(
    parcels: Parcels, table: CutTable, group: Group, device: torch.device
) -> Iterator[tuple[Tensor, Read]]:
    """Add empty decisions on this rank's shards. Yield each bool tensor to fill, and a function
    that reads its packed flags once they have arrived."""
    rects = table.data.tiling[group.rank]
    for rect in rects:
        shape = grid_of(rect, table.block).rows, len(table.cols_in(rect))
        columns = torch.zeros(shape, dtype=torch.bool, device=device)
        table.decisions[rect] = Decision(columns, {})
    for owner in range(group.size):
        for rect, rows, row in table.parts(rects, owner):
            decision = table.decisions[rect]
            first = rows.start - grid_of(rect, table.block).row
            # A view: what arrives is written through it.
            place = decision.columns[first : first + len(rows)]
            if row is not None:
                size = [part.stop - part.start for part in table.part_of_slab(rect, row)]
                place = decision.slabs[row] = torch.empty(size, dtype=torch.bool, device=device)
            yield place, parcels.expect(owner, (-(-place.numel() // 8),))
