"""How do the parts of cut blocks reach their owners, and the verdicts their holders?

One all-to-all each way, for all tables.

- Blocks cut by a column border: float64 partial sums, which the owner adds in ascending column offset.
- Block rows cut by a row border: the element scores of those few block rows; the owner puts the slab together and
  scores it as if it had never been cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking.bits import pack, unpack
from dist_sparse.masking.cuts import CutTable, Owned, Partials, Verdict
from dist_sparse.masking.scores import block_sums, block_widths, to_scores
from dist_sparse.masking.segments import KEPT, Segment
from dist_sparse.tables.shards import Grid, Rect, grid_of

__all__ = ["exchange_partials", "return_verdicts"]


def exchange_partials(
    tables: Sequence[tuple[CutTable, dict[Rect, Partials]]], group: Group, device: torch.device
) -> list[Owned]:
    """Brings the parts of every cut block to its owner. Collective over ``group``: every rank must call it; one
    all-to-all.

    Args:
        tables: the cut tables, the same ones in the same order on every rank, with the partials of this rank's shards,
            whose sums and element scores are let go of.
        device: where the owner's part is to be.
    """
    pieces: list[list[Tensor]] = [[] for _ in range(group.size)]
    sizes = [0] * group.size
    for table, known in tables:
        for owner in range(group.size):
            for rect, rows in _sent(table, group.rank, owner, group.size):
                grid = grid_of(rect, table.block)
                pieces[owner].append(known[rect].sums[rows.start - grid.row : rows.stop - grid.row])
                pieces[owner] += [known[rect].elements[i] for i in table.rows_in(rows.start, rows.stop)]
        for partials in known.values():
            partials.let_go()
        for sender in range(group.size):
            for rect, rows in _sent(table, sender, group.rank, group.size):
                grid = grid_of(rect, table.block)
                numel = len(rows) * len(table.cols_in(grid))
                numel += sum(_common(rect, table.slab(i)).numel for i in table.rows_in(rows.start, rows.stop))
                sizes[sender] += numel * 8
    streams = [_Stream(raw) for raw in group.all_to_all(pieces, sizes, device)]
    return [_own(table, streams, group) for table, _ in tables]


def return_verdicts(
    tables: Sequence[tuple[CutTable, dict[int, Tensor], Tensor | None]],
    group: Group,
    by_element: Sequence[bool],
    device: torch.device,
) -> list[dict[Rect, Verdict]]:
    """Brings the owners' decisions to every holder, replicas included. Collective over ``group``; one all-to-all of
    packed bits.

    Args:
        tables: the cut tables, in the order of :func:`exchange_partials`; for each owned cut block row the removed
            flags (``(grid.cols,)`` by block or ``(rows, width)`` by element); the removed flags of the owned cut block
            columns, ``(owned rows, cut columns)``.
        by_element: for each table, whether the flags of its slabs are by element.
    """
    pieces: list[list[Tensor]] = [[] for _ in range(group.size)]
    sizes = [0] * group.size
    mine = group.rank
    for (table, slabs, columns), fine in zip(tables, by_element, strict=True):
        owned = table.owned_rows(mine, group.size)
        for holder in range(group.size):
            for rect in dict.fromkeys(table.data.tiling[holder]):
                grid = grid_of(rect, table.block)
                rows = _overlap(grid, owned)
                cols = [table.cols.index(j) for j in table.cols_in(grid)]
                if columns is not None and rows and cols:
                    part = columns[rows.start - owned.start : rows.stop - owned.start, cols[0] : cols[-1] + 1]
                    pieces[holder].append(pack(part.flatten()))
                for i in table.rows_in(rows.start, rows.stop):
                    pieces[holder].append(pack(_slab_part(slabs[i], table.slab(i), rect, grid, fine).flatten()))
        for owner in range(group.size):
            for rect in dict.fromkeys(table.data.tiling[mine]):
                grid = grid_of(rect, table.block)
                rows = _overlap(grid, table.owned_rows(owner, group.size))
                sizes[owner] += -(-len(rows) * len(table.cols_in(grid)) // 8)
                for i in table.rows_in(rows.start, rows.stop):
                    sizes[owner] += -(-_slab_shape(table.slab(i), rect, grid, fine).numel() // 8)
    streams = [_Stream(raw) for raw in group.all_to_all(pieces, sizes, device)]
    verdicts = []
    for (table, _, _), fine in zip(tables, by_element, strict=True):
        decided: dict[Rect, Verdict] = {}
        for rect in dict.fromkeys(table.data.tiling[mine]):
            grid = grid_of(rect, table.block)
            width = len(table.cols_in(grid))
            decided[rect] = Verdict(torch.zeros(grid.rows, width, dtype=torch.bool, device=streams[0].raw.device), {})
        for owner in range(group.size):
            for rect, verdict in decided.items():
                grid = grid_of(rect, table.block)
                rows = _overlap(grid, table.owned_rows(owner, group.size))
                width = verdict.columns.shape[1]
                flags = streams[owner].flags(len(rows) * width).view(len(rows), width)
                verdict.columns[rows.start - grid.row : rows.stop - grid.row] = flags
                for i in table.rows_in(rows.start, rows.stop):
                    shape = _slab_shape(table.slab(i), rect, grid, fine)
                    verdict.slabs[i] = streams[owner].flags(shape.numel()).view(shape)
        verdicts.append(decided)
    return verdicts


def _own(table: CutTable, streams: list[_Stream], group: Group) -> Owned:
    """Reads this rank's part of ``table`` from what the ranks sent, adds it up in ascending column offset, and scores
    it."""
    owned, whole = table.owned_rows(group.rank, group.size), table.grid
    device = streams[0].raw.device
    sums = torch.zeros(len(owned), len(table.cols), dtype=torch.float64, device=device)
    slabs = {
        i: torch.zeros(*table.slab(i)[2:], dtype=torch.float64, device=device)
        for i in table.rows_in(owned.start, owned.stop)
    }
    parts: list[tuple[Rect, range, Tensor]] = []
    for sender in range(group.size):
        for rect, rows in _sent(table, sender, group.rank, group.size):
            width = len(table.cols_in(grid_of(rect, table.block)))
            parts.append((rect, rows, streams[sender].doubles(len(rows) * width).view(len(rows), width)))
            for i in table.rows_in(rows.start, rows.stop):
                inner = _common(rect, table.slab(i))
                top = inner.row - table.slab(i).row
                piece = streams[sender].doubles(inner.numel).view(inner.rows, inner.cols)
                slabs[i][top : top + inner.rows, inner.col : inner.col_end] = piece
    for rect, rows, part in sorted(parts, key=lambda known: (known[0].col, known[0].row)):
        cols = [table.cols.index(j) for j in table.cols_in(grid_of(rect, table.block))]
        if cols:
            sums[rows.start - owned.start : rows.stop - owned.start, cols[0] : cols[-1] + 1] += part
    result = Owned()
    if table.cols and len(owned):
        chosen = torch.tensor(table.cols, device=device)
        widths = block_widths(table.data.shape, table.block, chosen)
        scores = to_scores(sums, owned.start, widths, table.data.shape, table.block).view(torch.int32)
        scores[[i - owned.start for i in slabs]] = KEPT
        result.columns = Segment(owned.start, chosen, whole.cols)
        result.columns.add(scores)
    for i, slab in slabs.items():
        rect = table.slab(i)
        every = torch.arange(whole.cols, device=device)
        _, folded = next(block_sums(slab, rect, table.block, "given"))
        scores = to_scores(folded, i, block_widths(table.data.shape, table.block, every), table.data.shape, table.block)
        segment = Segment(i, every, whole.cols)
        segment.add(scores.view(torch.int32))
        result.slabs[i] = segment, slab
    return result


def _sent(table: CutTable, sender: int, owner: int, size: int) -> Iterator[tuple[Rect, range]]:
    """What ``sender`` speaks for of the block rows of ``owner``: its rectangles and the common block rows."""
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


class _Stream:
    """Reads one rank's bytes in the order in which it wrote them."""

    def __init__(self, raw: Tensor) -> None:
        self.raw, self._at = raw, 0

    def doubles(self, count: int) -> Tensor:
        start, self._at = self._at, self._at + count * 8
        part = self.raw[start : self._at]
        return (part if start % 8 == 0 and part.storage_offset() % 8 == 0 else part.clone()).view(torch.float64)

    def flags(self, count: int) -> Tensor:
        start, self._at = self._at, self._at + -(-count // 8)
        return unpack(self.raw[start : self._at], count)
