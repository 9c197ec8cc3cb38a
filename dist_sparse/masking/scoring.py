"""What does a rank know of the scores of a table, before anyone has spoken?

Each local shard is read once, in chunks: scores of whole blocks with the histogram that opens the selection, partial
sums of blocks cut by a column border, element scores of block rows cut by a row border. Nothing communicates, so an
error found here stops all ranks before anything has moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dist_sparse.masking.cuts import CutTable, Partials, find_cuts
from dist_sparse.masking.scores import Measure, block_sums, block_widths, element_scores, to_scores
from dist_sparse.masking.segments import HISTOGRAM, KEPT, Segment, first_histogram
from dist_sparse.tables.shards import Block, Grid, Rect, Shard, ShardedData, grid_of

__all__ = ["Goal", "ScoredTable", "cuts_of", "score_table"]

_COUNTED = 1 << 18
"""Scores to check and count at a time: few enough to be in the cache still, enough to make the calls worth it."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is to be removed from one table.

    Args:
        data: the table as it lies now.
        block: the sparse block, in elements.
        k: number of blocks to hit.
        zeros: elements removed in a block that is hit; the block's area removes all of it, however small an edge block
            is.
        measure: how elements are scored.
    """

    data: ShardedData
    block: Block
    k: int
    zeros: int
    measure: Measure

    @property
    def grid(self) -> Grid:
        return grid_of(Rect(0, 0, *self.data.shape), self.block)

    @property
    def blocks(self) -> int:
        """Number of blocks in the whole table."""
        return self.grid.rows * self.grid.cols

    @property
    def by_element(self) -> bool:
        """Whether the masks are not constant on blocks."""
        return self.zeros < self.block[0] * self.block[1]


@dataclass
class ScoredTable:
    """One table between scoring and masks: scores by shard, and what is known of cut blocks."""

    goal: Goal
    cuts: CutTable | None
    segments: dict[Rect, Segment] = field(default_factory=dict)
    partials: dict[Rect, Partials] = field(default_factory=dict)


def cuts_of(goal: Goal) -> CutTable | None:
    """The goal's cut blocks, if any.

    Raises:
        ValueError: a column border cuts blocks that are to lose only some of their elements.
    """
    data, cuts = goal.data, find_cuts(goal.data, goal.block)
    if goal.by_element and cuts is not None and cuts.cols:
        borders = sorted({rect.col for rect in data.rects if rect.col})
        fits = [w for w in range(1, min(goal.block[1], 64)) if all(border % w == 0 for border in borders)]
        raise ValueError(
            f"Table {data.name!r}: zeros_per_block={goal.zeros} is smaller than the block {goal.block}, so a column "
            f"border may not cut blocks, but borders lie at columns {borders}; block widths that fit: {fits or [1]}."
        )
    return cuts


def score_table(goal: Goal, rank: int) -> ScoredTable:
    """Scores this rank's shards of one table. Local: sends nothing.

    Args:
        goal: the same on every rank, but for the live views in it.
        rank: this rank in the table's group.

    Raises:
        ValueError: a score is not finite or is negative, or a block that loses only some elements is cut by a column
            border.
    """
    data, cuts = goal.data, cuts_of(goal)
    table = ScoredTable(goal, cuts)
    mine = set(data.owned(rank))
    for shard in data.shards:
        if shard.rect in table.segments:
            continue
        grid = grid_of(shard.rect, goal.block)
        columns = torch.arange(grid.col, grid.col + grid.cols, device=shard.tensor.device)
        counts = shard.rect in mine
        if goal.block == (1, 1):
            segment = Segment(
                grid.row, columns, goal.grid.cols, read=partial(_element_bits, goal, shard), counts=counts
            )
            segment.first_histogram = _checked_histogram(goal, shard, segment)
        else:
            segment = Segment(grid.row, columns, goal.grid.cols, counts=counts)
            table.partials[shard.rect] = _score_blocks(goal, shard, cuts, segment)
        table.segments[shard.rect] = segment
    return table


def _score_blocks(goal: Goal, shard: Shard, cuts: CutTable | None, segment: Segment) -> Partials:
    """Fills ``segment`` with the scores of whole blocks, KEPT in the place of cut ones, and returns what is known of
    the cut ones. Where all are cut, the segment stays empty until the verdict."""
    rect, device = shard.rect, shard.tensor.device
    grid = grid_of(rect, goal.block)
    cut_cols = cuts.local_cols(grid) if cuts else []
    cut_rows = [i - grid.row for i in cuts.rows_in(grid.row, grid.row + grid.rows)] if cuts else []
    cut_count = len(cuts.cols_in(grid)) if cuts else 0
    widths = block_widths(goal.data.shape, goal.block, segment.col_ids)
    known = Partials(
        torch.zeros(grid.rows, cut_count, dtype=torch.float64, device=device),
        torch.zeros(grid.rows, cut_count, dtype=torch.bool, device=device),
        {},
    )
    histogram = torch.zeros(HISTOGRAM, dtype=torch.int64, device=device)
    waiting: list[Tensor] = []
    scratch = torch.empty(0, dtype=torch.int32, device=device)
    seen = 0  # block rows that are checked, counted and added
    for first, sums in block_sums(shard.tensor, rect, goal.block, goal.measure):
        last = first + sums.shape[0]
        if cut_count:
            known.sums[first:last] = sums[:, cut_cols]
            torch.eq(known.sums[first:last], 0, out=known.clean[first:last])
        waiting.append(to_scores(sums, grid.row + first, widths, goal.data.shape, goal.block))
        if (last - seen) * grid.cols < _COUNTED and last < grid.rows:
            continue
        piece = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
        _check(goal, shard, piece, grid.row + seen)
        if cut_count < grid.cols:
            bits = piece.view(torch.int32)
            bits[:, cut_cols] = KEPT
            bits[[i - seen for i in cut_rows if seen <= i < last]] = KEPT
            if scratch.numel() < bits.numel():
                scratch = torch.empty_like(bits).view(-1)
            histogram += first_histogram(bits.view(-1), scratch)
            segment.add(bits)
        waiting, seen = [], last
    for i in cut_rows:
        inner = Rect((grid.row + i) * goal.block[0], rect.col, goal.block[0], rect.cols).intersect(rect)
        assert inner is not None
        rows = shard.tensor[inner.row - rect.row : inner.row_end - rect.row]
        known.elements[grid.row + i] = element_scores(rows, goal.measure, (inner.row, inner.col))
    segment.first_histogram = histogram
    return known


def _element_bits(goal: Goal, shard: Shard) -> Iterator[tuple[int, Tensor]]:
    """Scores of single elements, made anew in each pass: to keep them would take as much memory as the weights."""
    for first, sums in block_sums(shard.tensor, shard.rect, (1, 1), goal.measure):
        yield first * shard.rect.cols, sums.to(torch.float32).view(torch.int32).flatten()


def _checked_histogram(goal: Goal, shard: Shard, segment: Segment) -> Tensor:
    histogram = torch.zeros(HISTOGRAM, dtype=torch.int64, device=shard.tensor.device)
    for start, bits in segment.chunks():
        scores = bits.view(torch.float32).view(-1, shard.rect.cols)
        _check(goal, shard, scores, shard.rect.row + start // shard.rect.cols)
        histogram += first_histogram(bits)
    return histogram


def _check(goal: Goal, shard: Shard, scores: Tensor, first_row: int) -> None:
    """Refuses scores that are not finite or negative; ``scores`` ``(block rows, block columns)`` from block row
    ``first_row``."""
    low, high = torch.aminmax(scores)  # NaN passes through to both
    if bool((low >= 0) & (high < torch.inf)):
        return
    i, j = (~((scores >= 0) & (scores < torch.inf))).nonzero()[0].tolist()
    row, col = (first_row + i) * goal.block[0], (grid_of(shard.rect, goal.block).col + j) * goal.block[1]
    raise ValueError(
        f"Table {goal.data.name!r}: the block at row {row}, column {col} scores {float(scores[i, j])}; "
        "scores must be finite and not negative, so no mask was moved."
    )
