"""Scores of the blocks of many tables, of this rank's shards.

The local half of a mask update: each shard is read once, in chunks, or only the rows written since
the last update, where scores are kept. Nothing is communicated or changed, so an error found here
stops all ranks in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dist_sparse.masking.cuts import CutTable, Partials, find_cuts
from dist_sparse.masking.kept_scores import Keeping
from dist_sparse.masking.scores import (
    Batch,
    Measure,
    WeightedSquares,
    batches,
    block_sums,
    block_widths,
    element_scores,
    to_scores,
)
from dist_sparse.masking.segments import HISTOGRAM, KEPT, JointScores, Segment, first_histogram
from dist_sparse.tables.shards import Block, Grid, Rect, Shard, ShardedData, grid_of

__all__ = ["Goal", "ScoredTable", "cuts_of", "score_table", "score_tables"]

_COUNTED = 1 << 18
"""Scores to check and count at a time: few enough to be in the cache still, enough to make the
calls worth it."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Target of a mask update for one table: its block shape, how many blocks to remove, and how to
    score them.

    Args:
        data: the table as it is stored now.
        block: the sparse block, in elements.
        k: number of blocks to prune; of a pool of tables, on average.
        most: of a pool, how many of this table's blocks may be pruned.
        zeros: elements removed in a pruned block; the block's area removes all of it, however small
            an edge block is.
        measure: how elements are scored.
        whole_columns: blocks are as high as the table, whatever its height.
        keeping: of shards whose scores are kept from one mask update to the next.
    """

    data: ShardedData
    block: Block
    k: int
    most: int
    zeros: int
    measure: Measure
    whole_columns: bool = False
    keeping: Keeping | None = None

    @property
    def grid(self) -> Grid:
        return grid_of(Rect(0, 0, *self.data.shape), self.block)

    @property
    def blocks(self) -> int:
        """Number of blocks in the whole table."""
        return self.grid.blocks

    @property
    def price(self) -> int:
        """Bytes of the weights that a pruned block loses."""
        return min(self.zeros, self.block[0] * self.block[1]) * self.data.dtype.itemsize

    @property
    def shows_zeros(self) -> bool:
        """Whether a block that scores 0 is zero already, if every write to removed weights has been
        masked.

        A norm of 0 means that the block is zero (or that its squares underflow float32: weights
        below 1e-22). Weighted squares underflow sooner, below 4e-8 in rows without gradients. Such
        a block is zero too if it was removed before, as these scores need an enforcer; and newly
        removed blocks are zeroed whatever they score.
        """
        return self.measure in ("L1", "L2") or isinstance(self.measure, WeightedSquares)

    @property
    def by_element(self) -> bool:
        """Whether the masks are not constant on blocks."""
        return self.zeros < self.block[0] * self.block[1]


@dataclass
class ScoredTable:
    """One table between scoring and masks: scores by shard, and what this rank knows of cut
    blocks."""

    goal: Goal
    cuts: CutTable | None
    segments: dict[Rect, Segment] = field(default_factory=dict)
    partials: dict[Rect, Partials] = field(default_factory=dict)


def score_tables(goals: Sequence[Goal], ranks: Sequence[int]) -> list[ScoredTable]:
    """:func:`score_table` of many tables, each with this rank in its group; small ones are scored
    together."""
    scored: list[ScoredTable | None] = [None] * len(goals)
    alike = []
    for i, goal in enumerate(goals):
        if not goal.by_element and len(goal.data.shards) == 1:
            alike.append((i, goal.data, goal.data.shards[0], goal.block, goal.measure))
    for places in batches([entry[1:] for entry in alike]):
        together = [alike[place][0] for place in places]
        together = [i for i in together if cuts_of(goals[i]) is None]
        if len(together) > 1:
            tables = _score_together([goals[i] for i in together], [ranks[i] for i in together])
            for i, table in zip(together, tables, strict=True):
                scored[i] = table
    return [
        known or score_table(goal, rank)
        for known, goal, rank in zip(scored, goals, ranks, strict=True)
    ]


def score_table(goal: Goal, rank: int) -> ScoredTable:
    """Score this rank's shards of one table. Local: sends nothing.

    Args:
        goal: the same on every rank, but for the live views in it.
        rank: this rank in the table's group.

    Raises:
        ValueError: a score is not finite or is negative, or a block that loses only some elements
            is cut by a column border.
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
                grid.row,
                columns,
                goal.grid.cols,
                read=partial(_element_bits, goal, shard),
                counts=counts,
            )
            segment.first_histogram = _checked_histogram(goal, shard, segment)
        elif goal.keeping is not None and cuts is None and shard.rect in goal.keeping.scores:
            segment = Segment(grid.row, columns, goal.grid.cols, counts=counts)
            kept = goal.keeping.scores[shard.rect]
            kept.update(
                shard, data.shape, goal.block, goal.keeping, partial(_score_all, goal, shard)
            )
            for piece in torch.split(kept.scores.bits, max(1, _COUNTED // grid.cols)):
                segment.add(piece)
            segment.first_histogram, segment.index = kept.scores.histogram, kept.scores
        else:
            segment = Segment(grid.row, columns, goal.grid.cols, counts=counts)
            table.partials[shard.rect] = _score_blocks(goal, shard, cuts, segment)
        table.segments[shard.rect] = segment
    return table


def cuts_of(goal: Goal) -> CutTable | None:
    """Return the goal's cut blocks, if any.

    Raises:
        ValueError: a column border cuts blocks that are to lose only some of their elements.
    """
    data, cuts = goal.data, find_cuts(goal.data, goal.block, goal.whole_columns)
    if goal.by_element and cuts is not None and cuts.cols:
        borders = sorted({rect.col for rect in data.rects if rect.col})
        fits = [
            w
            for w in range(1, min(goal.block[1], 64))
            if all(border % w == 0 for border in borders)
        ]
        raise ValueError(
            f"Table {data.name!r}: zeros_per_block={goal.zeros} is smaller than the block"
            f" {goal.block}, so a column border may not cut blocks, but borders are at columns"
            f" {borders}; block widths that fit: {fits or [1]}."
        )
    return cuts


def _score_together(goals: Sequence[Goal], ranks: Sequence[int]) -> list[ScoredTable]:
    shards = [goal.data.shards[0] for goal in goals]
    batch = Batch.of(
        shards, goals[0].data.shape[1], goals[0].block, [goal.measure for goal in goals]
    )
    if not _fine(batch.scores):
        for i, goal in enumerate(goals):
            _check(goal, shards[i], batch.part(i), shards[i].rect.row)
    tables = []
    grid = grid_of(shards[0].rect, goals[0].block)
    columns = torch.arange(grid.col, grid.col + grid.cols, device=shards[0].tensor.device)
    for goal, shard, rank in zip(goals, shards, ranks, strict=True):
        segment = Segment(
            shard.rect.row, columns, goal.grid.cols, counts=shard.rect in goal.data.owned(rank)
        )
        tables.append(ScoredTable(goal, None, {shard.rect: segment}))
    _fill([table.segments[shard.rect] for table, shard in zip(tables, shards, strict=True)], batch)
    return tables


def _fill(segments: Sequence[Segment], batch: Batch) -> None:
    """Give the segments of the shards their part of the scores, which must be finite, and their
    histograms."""
    bits = batch.scores.view(torch.int32)
    bits.index_fill_(0, batch.gaps, KEPT)
    ends = [*batch.starts[1:], bits.shape[0]]
    sizes = [(end - start) * bits.shape[1] for start, end in zip(batch.starts, ends, strict=True)]
    joint = JointScores(bits.view(-1), torch.tensor(sizes, device=bits.device))
    for i, (segment, histogram) in enumerate(
        zip(segments, joint.first_histograms().cpu(), strict=True)
    ):
        segment.add(bits[batch.starts[i] : batch.starts[i] + batch.rows[i]])
        segment.first_histogram = histogram
        segment.joint = (joint, i)


def _score_blocks(goal: Goal, shard: Shard, cuts: CutTable | None, segment: Segment) -> Partials:
    """Fill ``segment`` with the scores of whole blocks, KEPT in the place of cut ones, and return
    what is known of the cut ones. Where all are cut, the segment stays empty until the decision."""
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
        inner = Rect((grid.row + i) * goal.block[0], rect.col, goal.block[0], rect.cols).intersect(
            rect
        )
        assert inner is not None
        rows = shard.tensor[inner.row - rect.row : inner.row_end - rect.row]
        known.elements[grid.row + i] = element_scores(rows, goal.measure, (inner.row, inner.col))
    segment.first_histogram = histogram
    return known


def _score_all(goal: Goal, shard: Shard) -> tuple[Tensor, Tensor]:
    """The scores of a shard that no border cuts, in one piece, and their histogram."""
    grid = grid_of(shard.rect, goal.block)
    segment = Segment(grid.row, torch.arange(grid.col, grid.col + grid.cols), goal.grid.cols)
    _score_blocks(goal, shard, None, segment)
    assert segment.first_histogram is not None
    return torch.cat([bits for _, bits in segment.pieces()]), segment.first_histogram


def _element_bits(goal: Goal, shard: Shard) -> Iterator[tuple[int, Tensor]]:
    """Scores of single elements, computed again in each pass: to keep them would take as much
    memory as the weights."""
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
    """Refuse scores that are not finite or negative; ``scores`` ``(block rows, block columns)``
    from block row ``first_row``."""
    if _fine(scores):
        return
    i, j = (~((scores >= 0) & (scores < torch.inf))).nonzero()[0].tolist()
    row, col = (
        (first_row + i) * goal.block[0],
        (grid_of(shard.rect, goal.block).col + j) * goal.block[1],
    )
    raise ValueError(
        f"Table {goal.data.name!r}: the block at row {row}, column {col} scores"
        f" {float(scores[i, j])}; scores must be finite and not negative, so no mask was changed."
    )


def _fine(scores: Tensor) -> bool:
    low, high = torch.aminmax(scores)  # NaN passes through to both
    return bool((low >= 0) & (high < torch.inf))
