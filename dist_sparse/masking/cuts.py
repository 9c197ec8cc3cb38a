"""Blocks that shard borders cut: each is scored by one rank, which sends its decision to all
holders.

Every block row of a table has an owner, rank ``block_row * world // block_rows``. The holders of a
cut block send the owner what they know of it (:class:`Partials`), the owner scores it
(:class:`Owned`) and returns its decision (:class:`Decision`): one all-to-all each way, for all
tables. Who holds what is known from metadata.

- Blocks cut by a column border: float64 partial sums, which the owner adds in ascending column
  offset.
- Block rows cut by a row border: the element scores of those few block rows; the owner puts the
  slab together and scores it as if it had never been cut.
- Whole columns: float64 partial sums too, one of each shard, which the owner adds in ascending row
  offset. The elements of their only block row would be the whole table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dist_sparse.groups import Group, Parcels
from dist_sparse.masking.masks import pack, unpack
from dist_sparse.masking.scores import block_sums, block_widths, to_scores
from dist_sparse.masking.segments import KEPT, Segment
from dist_sparse.tables.shards import Block, Grid, Rect, ShardedData, grid_of

__all__ = [
    "CutTable",
    "Decision",
    "Owned",
    "Partials",
    "exchange_partials",
    "find_cuts",
    "return_decisions",
]


@dataclass(frozen=True)
class CutTable:
    """The cut blocks of one table: all of block rows ``rows``, and of the other block rows those in
    block columns ``cols``."""

    data: ShardedData
    block: Block
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def grid(self) -> Grid:
        return grid_of(Rect(0, 0, *self.data.shape), self.block)

    def owned_rows(self, rank: int, size: int) -> range:
        """The block rows that group rank ``rank`` of ``size`` decides about."""
        total = self.grid.rows
        return range(-(-rank * total // size), -(-(rank + 1) * total // size))

    def rows_in(self, first: int, last: int) -> tuple[int, ...]:
        """The cut block rows within ``[first, last)``."""
        return self.rows[bisect_left(self.rows, first) : bisect_left(self.rows, last)]

    def places(self, grid: Grid) -> slice:
        """Which of ``cols`` are within a shard's grid."""
        return slice(bisect_left(self.cols, grid.col), bisect_left(self.cols, grid.col + grid.cols))

    def cols_in(self, grid: Grid) -> tuple[int, ...]:
        """The cut block columns within a shard's grid."""
        return self.cols[self.places(grid)]

    def local_cols(self, grid: Grid) -> slice | list[int]:
        """An index of the cut columns of a shard's grid, counted from its first: a slice where it
        can be, which is quicker."""
        cols = [j - grid.col for j in self.cols_in(grid)]
        together = bool(cols) and cols[-1] - cols[0] == len(cols) - 1
        return slice(cols[0], cols[-1] + 1) if together else cols

    def slab(self, row: int) -> Rect:
        """The elements of a whole block row."""
        top = row * self.block[0]
        return Rect(top, 0, min(self.block[0], self.data.shape[0] - top), self.data.shape[1])


@dataclass
class Partials:
    """What a shard knows of its cut blocks.

    Args:
        sums: float64 ``(grid.rows, len(cut columns))``: partial sums, for every block row of the
            shard; released once they are sent.
        clean: bool, of the same shape: which of them are 0.
        elements: for each cut block row of the shard, float64 element scores
            ``(its rows here, rect.cols)``.
    """

    sums: Tensor
    clean: Tensor
    elements: dict[int, Tensor]

    def release(self) -> None:
        """Drop what has been packed."""
        self.sums = self.sums.new_zeros(0)
        self.elements = {}


@dataclass
class Owned:
    """The cut blocks of one table that this rank decides about.

    Args:
        columns: scores of the blocks in cut block columns, over ``range`` of owned block rows (rows
            cut as well hold KEPT).
        slabs: for each owned cut block row its scores, and the element scores ``(rows, width)``
            they come from.
    """

    columns: Segment | None = None
    slabs: dict[int, tuple[Segment, Tensor]] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        return ([self.columns] if self.columns else []) + [
            segment for segment, _ in self.slabs.values()
        ]


@dataclass
class Decision:
    """The decision about the cut blocks of one shard, True = removed.

    Args:
        columns: bool ``(grid.rows, len(cut columns))``; undefined in block rows that are cut as
            well.
        slabs: for each cut block row bool ``(grid.cols,)`` by block, or ``(rows here, rect.cols)``
            by element.
    """

    columns: Tensor
    slabs: dict[int, Tensor]


def find_cuts(data: ShardedData, block: Block, whole_columns: bool = False) -> CutTable | None:
    """Return the cut blocks of a table, or None if every block is within one shard. Known from
    metadata: the same on every rank.

    Args:
        whole_columns: blocks are as high as the table and are exchanged as partial sums, however
            they are cut.
    """
    rows = {rect.row // block[0] for rect in data.rects if rect.row % block[0]}
    cols = {rect.col // block[1] for rect in data.rects if rect.col % block[1]}
    if whole_columns and rows:
        rows, cols = set(), set(range(-(-data.shape[1] // block[1])))
    return CutTable(data, block, tuple(sorted(rows)), tuple(sorted(cols))) if rows or cols else None


def exchange_partials(
    tables: Sequence[tuple[CutTable, dict[Rect, Partials]]], group: Group, device: torch.device
) -> list[Owned]:
    """Bring the parts of every cut block to its owner. Collective over ``group``: every rank must
    call it; one all-to-all.

    Args:
        tables: the cut tables, the same ones in the same order on every rank, with the partials of
            this rank's shards, whose sums and element scores are released.
        device: of the owner's part.
    """
    parcels = Parcels(group)
    arrivals: list[list[_Arrival]] = []
    for table, known in tables:
        for owner in range(group.size):
            for rect, rows in _sent(table, group.rank, owner, group.size):
                first = rows.start - grid_of(rect, table.block).row
                parcels.send(owner, known[rect].sums[first : first + len(rows)])
                for i in table.rows_in(rows.start, rows.stop):
                    parcels.send(owner, known[rect].elements[i])
        for partials in known.values():
            partials.release()
        arriving = []
        for sender in range(group.size):
            for rect, rows in _sent(table, sender, group.rank, group.size):
                shape = len(rows), len(table.cols_in(grid_of(rect, table.block)))
                sums = parcels.expect(sender, shape, torch.float64)
                elements = {
                    i: parcels.expect(sender, _common(rect, table.slab(i))[2:], torch.float64)
                    for i in table.rows_in(rows.start, rows.stop)
                }
                arriving.append(_Arrival(rect, rows, sums, elements))
        arrivals.append(arriving)
    parcels.exchange(device)
    return [
        _own(table, arriving, group, device)
        for (table, _), arriving in zip(tables, arrivals, strict=True)
    ]


def return_decisions(
    tables: Sequence[tuple[CutTable, dict[int, Tensor], Tensor | None]],
    group: Group,
    by_element: Sequence[bool],
    device: torch.device,
) -> list[dict[Rect, Decision]]:
    """Bring the owners' decisions to every holder, replicas included. Collective over ``group``;
    one all-to-all of packed bits.

    Args:
        tables: the cut tables, in the order of :func:`exchange_partials`; for each owned cut block
            row the removed flags (``(grid.cols,)`` by block or ``(rows, width)`` by element); the
            removed flags of the owned cut block columns, ``(owned rows, cut columns)``.
        by_element: for each table, whether the flags of its slabs are by element.
    """
    parcels, mine = Parcels(group), group.rank
    results: list[dict[Rect, Decision]] = []
    arriving: list[tuple[Tensor, Callable[[], Tensor]]] = []
    for (table, slabs, columns), fine in zip(tables, by_element, strict=True):
        owned = table.owned_rows(mine, group.size)
        for holder in range(group.size):
            for rect in dict.fromkeys(table.data.tiling[holder]):
                grid = grid_of(rect, table.block)
                rows = _overlap(grid, owned)
                if columns is not None and rows and table.cols_in(grid):
                    part = columns[
                        rows.start - owned.start : rows.stop - owned.start, table.places(grid)
                    ]
                    parcels.send(holder, pack(part.flatten()))
                for i in table.rows_in(rows.start, rows.stop):
                    parcels.send(
                        holder,
                        pack(_slab_part(slabs[i], table.slab(i), rect, grid, fine).flatten()),
                    )
        decided: dict[Rect, Decision] = {}
        for rect in dict.fromkeys(table.data.tiling[mine]):
            grid = grid_of(rect, table.block)
            flags = torch.zeros(
                grid.rows, len(table.cols_in(grid)), dtype=torch.bool, device=device
            )
            decided[rect] = Decision(flags, {})
            for owner in range(group.size):
                rows = _overlap(grid, table.owned_rows(owner, group.size))
                places = [flags[rows.start - grid.row : rows.stop - grid.row]]
                for i in table.rows_in(rows.start, rows.stop):
                    shape = _slab_shape(table.slab(i), rect, grid, fine)
                    decided[rect].slabs[i] = torch.empty(shape, dtype=torch.bool, device=device)
                    places.append(decided[rect].slabs[i])
                arriving += [
                    (p, parcels.expect(owner, (-(-p.numel() // 8),))) for p in places if p.numel()
                ]
        results.append(decided)
    parcels.exchange(device)
    for place, read in arriving:
        place.copy_(unpack(read(), place.numel()).view_as(place))
    return results


@dataclass
class _Arrival:
    """What one shard sends to the owner of the block rows ``rows``: functions that read it once it
    has arrived.

    Args:
        sums: float64 ``(len(rows), its cut columns)``.
        elements: for each cut block row among ``rows``, float64 element scores.
    """

    rect: Rect
    rows: range
    sums: Callable[[], Tensor]
    elements: dict[int, Callable[[], Tensor]]


def _own(table: CutTable, arriving: list[_Arrival], group: Group, device: torch.device) -> Owned:
    """Read this rank's part of ``table`` from what the ranks sent, add it up in ascending column
    offset, and score it."""
    owned, whole = table.owned_rows(group.rank, group.size), table.grid
    sums = torch.zeros(len(owned), len(table.cols), dtype=torch.float64, device=device)
    slabs = {
        i: torch.zeros(*table.slab(i)[2:], dtype=torch.float64, device=device)
        for i in table.rows_in(owned.start, owned.stop)
    }
    for part in sorted(arriving, key=lambda part: (part.rect.col, part.rect.row)):
        for i, read in part.elements.items():
            inner = _common(part.rect, table.slab(i))
            top = inner.row - table.slab(i).row
            slabs[i][top : top + inner.rows, inner.col : inner.col_end] = read()
        rows = slice(part.rows.start - owned.start, part.rows.stop - owned.start)
        sums[rows, table.places(grid_of(part.rect, table.block))] += part.sums()
    result = Owned()
    if table.cols and len(owned):
        chosen = torch.tensor(table.cols, device=device)
        widths = block_widths(table.data.shape, table.block, chosen)
        scores = to_scores(sums, owned.start, widths, table.data.shape, table.block).view(
            torch.int32
        )
        scores[[i - owned.start for i in slabs]] = KEPT
        result.columns = Segment(owned.start, chosen, whole.cols)
        result.columns.add(scores)
    for i, slab in slabs.items():
        rect = table.slab(i)
        every = torch.arange(whole.cols, device=device)
        _, folded = next(block_sums(slab, rect, table.block, "given"))
        scores = to_scores(
            folded,
            i,
            block_widths(table.data.shape, table.block, every),
            table.data.shape,
            table.block,
        )
        segment = Segment(i, every, whole.cols)
        segment.add(scores.view(torch.int32))
        result.slabs[i] = segment, slab
    return result


def _sent(table: CutTable, sender: int, owner: int, size: int) -> Iterator[tuple[Rect, range]]:
    """What ``sender`` owns in the block rows of ``owner``: its rectangles and the common block
    rows."""
    for rect in table.data.owned(sender):
        rows = _overlap(grid_of(rect, table.block), table.owned_rows(owner, size))
        if rows:
            yield rect, rows


def _overlap(grid: Grid, owned: range) -> range:
    first, last = max(grid.row, owned.start), min(grid.row + grid.rows, owned.stop)
    return range(first, max(first, last))


def _common(rect: Rect, slab: Rect) -> Rect:
    inner = rect.intersect(slab)
    assert inner is not None
    return inner


def _slab_shape(slab: Rect, rect: Rect, grid: Grid, fine: bool) -> torch.Size:
    return torch.Size((_common(rect, slab).rows, rect.cols) if fine else (grid.cols,))


def _slab_part(flags: Tensor, slab: Rect, rect: Rect, grid: Grid, fine: bool) -> Tensor:
    """The part of a slab's removed flags that concerns a shard."""
    if not fine:
        return flags[grid.col : grid.col + grid.cols]
    inner = _common(rect, slab)
    return flags[inner.row - slab.row : inner.row_end - slab.row, inner.col : inner.col_end]
