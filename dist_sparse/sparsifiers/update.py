"""How do the masks of many tables move in one due step?

1. Every rank scores the blocks of its own shards (:func:`score_table`: local, so an error found here stops all ranks before anything moved).
2. Blocks cut by shard borders are completed by their owners; the exact thresholds are found over all ranks; verdicts on cut blocks come back.
3. Every rank turns scores and thresholds into new masks (:func:`new_masks`). Nothing is written to weights or to old masks here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dist_sparse.cuts import CutTable, Owned, Partials, Verdict, exchange_partials, find_cuts, return_verdicts
from dist_sparse.groups import Group
from dist_sparse.masks import BlockMask, pack
from dist_sparse.scores import Measure, block_sizes, block_sums, element_scores, row_chunks, to_scores
from dist_sparse.selection import KEPT, REMOVED, Ballot, Segment, Threshold, first_histogram, select_smallest
from dist_sparse.shards import Block, Grid, Rect, Shard, ShardedData, grid_of
from dist_sparse.within import smallest_in_blocks

__all__ = ["Goal", "ScoredTable", "new_masks", "score_table"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is to be removed from one table.

    Args:
        data: the table as it lies now.
        block: the sparse block, in elements.
        k: number of blocks to hit.
        zeros: elements removed in a block that is hit; the block's area removes all of it, however small an edge block is.
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


def new_masks(scored: Sequence[ScoredTable], group: Group) -> list[list[BlockMask]]:
    """The new masks of this rank's shards, per table in the order of its shards. Collective over ``group``: every rank must call it.

    Three all-reduces, two all-to-alls if a block is cut, at most three more all-reduces if scores tie over ranks.
    """
    cut = [table for table in scored if table.cuts is not None]
    owned: list[Owned] = []
    if cut:
        owned = exchange_partials([(table.cuts, table.partials) for table in cut if table.cuts is not None], group)
    ballots = []
    for table in scored:
        goal = table.goal
        ballot = Ballot(goal.data.name, goal.k, goal.grid.rows * goal.grid.cols, list(table.segments.values()))
        ballot.spread_replicas = _spread(goal.data)
        ballots.append(ballot)
    for table, own in zip(cut, owned, strict=True):
        ballots[_index(scored, table)].segments += own.segments
    thresholds = select_smallest(ballots, group)
    verdicts: dict[int, dict[Rect, Verdict]] = {}
    if cut:
        decisions = [_decide(table, own, thresholds[_index(scored, table)]) for table, own in zip(cut, owned, strict=True)]
        returned = return_verdicts(decisions, group, [table.goal.by_element for table in cut])
        verdicts = {_index(scored, table): verdict for table, verdict in zip(cut, returned, strict=True)}
    return [
        [_mask(table, shard, thresholds[i], verdicts.get(i, {}).get(shard.rect)) for shard in table.goal.data.shards]
        for i, table in enumerate(scored)
    ]


def score_table(goal: Goal, rank: int) -> ScoredTable:
    """Scores this rank's shards of one table. Local: sends nothing.

    Args:
        goal: the same on every rank, but for the live views in it.
        rank: this rank in the table's group.

    Raises:
        ValueError: a score is not finite or is negative, or a block that loses only some elements is cut by a column border.
    """
    data, cuts = goal.data, find_cuts(goal.data, goal.block)
    if goal.by_element and cuts is not None and cuts.cols:
        borders = sorted({rect.col for rect in data.rects if rect.col})
        fits = [w for w in range(1, min(goal.block[1], 64)) if all(border % w == 0 for border in borders)]
        raise ValueError(
            f"Table {data.name!r}: zeros_per_block={goal.zeros} is smaller than the block {goal.block}, so a column border may not cut "
            f"blocks, but borders lie at columns {borders}; block widths that fit: {fits or [1]}."
        )
    table = ScoredTable(goal, cuts)
    mine = set(data.owned(rank))
    for shard in data.shards:
        if shard.rect in table.segments:
            continue
        grid = grid_of(shard.rect, goal.block)
        device = shard.tensor.device
        ids = torch.arange(grid.row, grid.row + grid.rows, device=device), torch.arange(grid.col, grid.col + grid.cols, device=device)
        counts = shard.rect in mine
        if goal.block == (1, 1):
            segment = Segment(*ids, goal.grid.cols, read=lambda shard=shard: _element_bits(goal, shard), counts=counts)
            segment.first_histogram = _checked_histogram(goal, shard, segment)
        else:
            segment = Segment(*ids, goal.grid.cols, counts=counts)
            table.partials[shard.rect] = _score_blocks(goal, shard, cuts, segment)
        table.segments[shard.rect] = segment
    return table


def _score_blocks(goal: Goal, shard: Shard, cuts: CutTable | None, segment: Segment) -> Partials:
    """Fills ``segment`` with the scores of whole blocks, KEPT in the place of cut ones, and returns what is known of the cut ones."""
    rect, device = shard.rect, shard.tensor.device
    grid = grid_of(rect, goal.block)
    cut_cols = [j - grid.col for j in cuts.cols_in(grid)] if cuts else []
    cut_rows = [i - grid.row for i in cuts.rows_in(grid.row, grid.row + grid.rows)] if cuts else []
    heights, widths = block_sizes(goal.data.shape, grid, goal.block, device)
    known = Partials(torch.zeros(grid.rows, len(cut_cols), dtype=torch.float64, device=device), {})
    bits = torch.empty(grid.rows, grid.cols, dtype=torch.int32, device=device)
    histogram = torch.zeros(2048, dtype=torch.int64, device=device)
    for first, sums in block_sums(shard.tensor, rect, goal.block, goal.measure):
        last = first + sums.shape[0]
        if cut_cols:
            known.sums[first:last] = sums[:, cut_cols]
        scores = to_scores(sums, (heights[first:last], widths))
        _check(goal, shard, scores, grid.row + first)
        chunk = bits[first:last]
        chunk.copy_(scores.view(torch.int32))
        if cut_cols:
            chunk[:, cut_cols] = KEPT
        for i in (i for i in cut_rows if first <= i < last):
            chunk[i - first] = KEPT
        if len(cut_cols) < grid.cols:
            histogram += first_histogram(chunk.flatten())
    for i in cut_rows:
        inner = Rect((grid.row + i) * goal.block[0], rect.col, goal.block[0], rect.cols).intersect(rect)
        assert inner is not None
        rows = shard.tensor[inner.row - rect.row : inner.row_end - rect.row]
        known.elements[grid.row + i] = element_scores(rows, goal.measure, (inner.row, inner.col))
    segment.bits, segment.first_histogram = bits.view(-1), histogram
    return known


def _element_bits(goal: Goal, shard: Shard) -> Iterator[tuple[int, Tensor]]:
    """Scores of single elements, made anew in each pass: to keep them would take as much memory as the weights."""
    for first, sums in block_sums(shard.tensor, shard.rect, (1, 1), goal.measure):
        yield first * shard.rect.cols, sums.to(torch.float32).view(torch.int32).flatten()


def _checked_histogram(goal: Goal, shard: Shard, segment: Segment) -> Tensor:
    histogram = torch.zeros(2048, dtype=torch.int64, device=shard.tensor.device)
    for start, bits in segment.chunks():
        scores = bits.view(torch.float32).view(-1, shard.rect.cols)
        _check(goal, shard, scores, shard.rect.row + start // shard.rect.cols)
        histogram += first_histogram(bits)
    return histogram


def _check(goal: Goal, shard: Shard, scores: Tensor, first_row: int) -> None:
    """Refuses scores that are not finite or negative; ``scores`` ``(block rows, block columns)`` from block row ``first_row``."""
    low, high = torch.aminmax(scores)  # NaN passes through to both
    if bool((low >= 0) & (high < torch.inf)):
        return
    i, j = (~((scores >= 0) & (scores < torch.inf))).nonzero()[0].tolist()
    row, col = (first_row + i) * goal.block[0], (grid_of(shard.rect, goal.block).col + j) * goal.block[1]
    raise ValueError(
        f"Table {goal.data.name!r}: the block at row {row}, column {col} scores {float(scores[i, j])}; "
        "scores must be finite and not negative, so no mask was moved."
    )


def _decide(table: ScoredTable, own: Owned, threshold: Threshold) -> tuple[CutTable, dict[int, Tensor], Tensor | None]:
    """The removed flags of the cut blocks that this rank owns."""
    goal, cuts = table.goal, table.cuts
    assert cuts is not None
    columns = _removed(threshold, own.columns).view(-1, len(cuts.cols)) if own.columns is not None else None
    slabs: dict[int, Tensor] = {}
    for i, (segment, elements) in own.slabs.items():
        gone = _removed(threshold, segment)
        if goal.by_element:
            gone = smallest_in_blocks(elements.to(torch.float32), gone.unsqueeze(0), goal.block, goal.zeros)
        slabs[i] = gone
    return cuts, slabs, columns


def _removed(threshold: Threshold, segment: Segment) -> Tensor:
    parts = [threshold.removes(segment, start, bits) for start, bits in segment.chunks()]
    return torch.cat(parts) if parts else segment.row_ids.new_zeros(0, dtype=torch.bool)


def _mask(table: ScoredTable, shard: Shard, threshold: Threshold, verdict: Verdict | None) -> BlockMask:
    """The new mask of one shard, from its scores and from the verdict on its cut blocks."""
    goal, segment = table.goal, table.segments[shard.rect]
    grid = grid_of(shard.rect, goal.block)
    writer = _BitWriter()
    if verdict is not None and segment.bits is not None and table.cuts is not None:
        bits = segment.bits.view(grid.rows, grid.cols)
        if verdict.columns.shape[1]:
            cols = [j - grid.col for j in table.cuts.cols_in(grid)]
            bits[:, cols] = torch.where(verdict.columns.to(bits.device), REMOVED, KEPT).to(torch.int32)
        for i, gone in verdict.slabs.items():
            bits[i - grid.row] = KEPT if goal.by_element else torch.where(gone.to(bits.device), REMOVED, KEPT).to(torch.int32)
    if not goal.by_element:
        for start, chunk in segment.chunks():
            writer.add(~threshold.removes(segment, start, chunk))
        return BlockMask(shard.rect, goal.block, writer.close(shard.tensor.device))
    assert segment.bits is not None
    for start, stop in row_chunks(shard.rect, goal.block):
        first = (shard.rect.row + start) // goal.block[0] - grid.row
        if verdict is not None and first + grid.row in verdict.slabs:
            writer.add(~verdict.slabs[first + grid.row].to(shard.tensor.device).flatten())
            continue
        last = first - (start - stop) // goal.block[0]
        at = first * grid.cols
        chosen = threshold.removes(segment, at, segment.bits[at : last * grid.cols]).view(-1, grid.cols)
        scores = element_scores(shard.tensor[start:stop], goal.measure, (shard.rect.row + start, shard.rect.col))
        writer.add(~smallest_in_blocks(scores.to(torch.float32), chosen, goal.block, goal.zeros).flatten())
    return BlockMask(shard.rect, (1, 1), writer.close(shard.tensor.device))


class _BitWriter:
    """Packs flags that come in pieces of any length."""

    def __init__(self) -> None:
        self._done: list[Tensor] = []
        self._rest: Tensor | None = None

    def add(self, flags: Tensor) -> None:
        flags = flags if self._rest is None else torch.cat([self._rest, flags])
        whole = flags.numel() // 8 * 8
        self._done.append(pack(flags[:whole]))
        self._rest = flags[whole:] if whole < flags.numel() else None

    def close(self, device: torch.device) -> Tensor:
        if self._rest is not None:
            self._done.append(pack(self._rest))
        return torch.cat(self._done) if self._done else torch.empty(0, dtype=torch.uint8, device=device)


def _spread(data: ShardedData) -> bool:
    """Whether there are replicas and some rank holds only a part of the table."""
    return data.replicated and any(set(held) != set(data.tiling[0]) for held in data.tiling)


def _index(scored: Sequence[ScoredTable], table: ScoredTable) -> int:
    return next(i for i, other in enumerate(scored) if other is table)
