"""New masks of many tables over many ranks: score, select, mask.

:func:`score_tables` is the local half: each shard is read once, in chunks. It communicates nothing, so an error found
there stops all ranks before anything has changed. :func:`new_masks` is the collective half. Neither writes to weights
or to old masks. Score, select and mask are the three steps in :func:`new_masks`; what they call is below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dist_sparse.groups import Group, Rider
from dist_sparse.masking.cuts import CutTable, Decision, Owned, Partials, exchange_partials, find_cuts, return_decisions
from dist_sparse.masking.masks import BitWriter, BlockMask, pack
from dist_sparse.masking.pools import Pool
from dist_sparse.masking.scores import (
    Batch,
    Measure,
    batches,
    block_sums,
    block_widths,
    element_scores,
    row_chunks,
    smallest_in_blocks,
    to_scores,
)
from dist_sparse.masking.selection import (
    HISTOGRAM,
    KEPT,
    REMOVED,
    REMOVED_CLEAN,
    Candidates,
    JointScores,
    Segment,
    Threshold,
    first_histogram,
    select_smallest,
)
from dist_sparse.tables.shards import Block, Grid, Rect, Shard, ShardedData, grid_of

__all__ = ["Goal", "MadeMasks", "NewMask", "ScoredTable", "cuts_of", "new_masks", "score_table", "spread_replicas"]

_COUNTED = 1 << 18
"""Scores to check and count at a time: few enough to be in the cache still, enough to make the calls worth it."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Target of a mask update for one table: its block shape, how many blocks to remove, and how to score them.

    Args:
        data: the table as it is stored now.
        block: the sparse block, in elements.
        k: number of blocks to prune; of a pool of tables, on average.
        most: of a pool, how many of this table's blocks may be pruned.
        zeros: elements removed in a pruned block; the block's area removes all of it, however small an edge block is.
        measure: how elements are scored.
        whole_columns: blocks are as high as the table, whatever its height.
    """

    data: ShardedData
    block: Block
    k: int
    most: int
    zeros: int
    measure: Measure
    whole_columns: bool = False

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
    def by_element(self) -> bool:
        """Whether the masks are not constant on blocks."""
        return self.zeros < self.block[0] * self.block[1]


@dataclass
class ScoredTable:
    """One table between scoring and masks: scores by shard, and what this rank knows of cut blocks.

    Of ``held`` blocks beside the goal's ``k`` it is decided that they are removed: in ``held_blocks``, scores and which
    of them, KEPT until the others are selected.
    """

    goal: Goal
    cuts: CutTable | None
    segments: dict[Rect, Segment] = field(default_factory=dict)
    partials: dict[Rect, Partials] = field(default_factory=dict)
    held: int = 0
    held_blocks: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class NewMask(NamedTuple):
    """A shard's new mask, and which of the blocks that it removes are not zero yet, as bits (None: none but newly
    removed ones)."""

    mask: BlockMask
    dirty: Tensor | None


class MadeMasks(NamedTuple):
    """The new masks of a table: those of this rank's shards, the block that one of their bits stands for, the
    threshold, where scores decide, and how many blocks they remove over all ranks, where that is known."""

    masks: list[NewMask]
    block: Block
    threshold: Threshold | None
    removed: int | None = None


def new_masks(
    scored: Sequence[ScoredTable], group: Group, rider: Rider | None = None, pooled: bool = False
) -> list[MadeMasks]:
    """Return the new masks of this rank's shards, per table in the order of its shards. Collective over ``group``.

    If ``pooled``, the bytes that the tables' ``k`` remove together are removed wherever scores are smallest.

    At most three all-reduces, two all-to-alls if a block is cut, and at most three more all-reduces if scores tie over
    ranks. The first all-reduce carries ``rider``.
    """
    device = next((shard.tensor.device for table in scored for shard in table.goal.data.shards), torch.device("cpu"))
    need = sum(table.goal.k * table.goal.price for table in scored) if pooled else 0
    candidates = [
        Candidates(
            goal.data.name, goal.most if need else goal.k, goal.blocks, [*segments.values()], spread_replicas(goal.data)
        )
        for goal, segments in ((table.goal, table.segments) for table in scored)
    ]
    pool = Pool(need, [table.goal.price for table in scored if table.goal.most]) if need else None

    # 1. Score: done by score_tables(), but for blocks that shard borders cut. Each of these has one rank that owns it.
    cut = {i: table.cuts for i, table in enumerate(scored) if table.cuts is not None}
    owned = exchange_partials([(cuts, scored[i].partials) for i, cuts in cut.items()], group, device) if cut else []
    for i, own in zip(cut, owned, strict=True):
        candidates[i].segments += own.segments

    # 2. Select: the exact threshold of every table.
    thresholds = select_smallest(candidates, group, rider, pool)
    for bits, held in (entry for table in scored for entry in table.held_blocks):
        bits[held] = REMOVED

    # 3. Mask: the owners of cut blocks return their decisions; all else follows from scores and threshold.
    decisions: dict[int, dict[Rect, Decision]] = {}
    if cut:
        removed = [_decide(scored[i], own, thresholds[i]) for i, own in zip(cut, owned, strict=True)]
        by_element = [scored[i].goal.by_element for i in cut]
        decisions = dict(zip(cut, return_decisions(removed, group, by_element, device), strict=True))
    small = _small_masks(scored, thresholds)
    made = []
    for i, (table, threshold) in enumerate(zip(scored, thresholds, strict=True)):
        goal, masks = table.goal, [small[i]] if i in small else []
        for shard in goal.data.shards[len(masks) :]:
            masks.append(_new_mask(table, shard, threshold, decisions.get(i, {}).get(shard.rect)))
        known = (candidates[i].k if threshold.removed is None else threshold.removed) + table.held
        block, k = ((1, 1), None) if goal.by_element else (goal.block, known)
        made.append(MadeMasks(masks, block, threshold, k))
    return made


def score_tables(goals: Sequence[Goal], ranks: Sequence[int]) -> list[ScoredTable]:
    """:func:`score_table` of many tables, each with this rank in its group; small ones are scored together."""
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
    return [known or score_table(goal, rank) for known, goal, rank in zip(scored, goals, ranks, strict=True)]


def score_table(goal: Goal, rank: int) -> ScoredTable:
    """Score this rank's shards of one table. Local: sends nothing.

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


def cuts_of(goal: Goal) -> CutTable | None:
    """Return the goal's cut blocks, if any.

    Raises:
        ValueError: a column border cuts blocks that are to lose only some of their elements.
    """
    data, cuts = goal.data, find_cuts(goal.data, goal.block, goal.whole_columns)
    if goal.by_element and cuts is not None and cuts.cols:
        borders = sorted({rect.col for rect in data.rects if rect.col})
        fits = [w for w in range(1, min(goal.block[1], 64)) if all(border % w == 0 for border in borders)]
        raise ValueError(
            f"Table {data.name!r}: zeros_per_block={goal.zeros} is smaller than the block {goal.block}, so a column "
            f"border may not cut blocks, but borders are at columns {borders}; block widths that fit: {fits or [1]}."
        )
    return cuts


def _score_together(goals: Sequence[Goal], ranks: Sequence[int]) -> list[ScoredTable]:
    shards = [goal.data.shards[0] for goal in goals]
    batch = Batch.of(shards, goals[0].data.shape[1], goals[0].block, goals[0].measure)
    if not _fine(batch.scores):
        for i, goal in enumerate(goals):
            _check(goal, shards[i], batch.part(i), shards[i].rect.row)
    tables = []
    grid = grid_of(shards[0].rect, goals[0].block)
    columns = torch.arange(grid.col, grid.col + grid.cols, device=shards[0].tensor.device)
    for goal, shard, rank in zip(goals, shards, ranks, strict=True):
        segment = Segment(shard.rect.row, columns, goal.grid.cols, counts=shard.rect in goal.data.owned(rank))
        tables.append(ScoredTable(goal, None, {shard.rect: segment}))
    _fill([table.segments[shard.rect] for table, shard in zip(tables, shards, strict=True)], batch)
    return tables


def _fill(segments: Sequence[Segment], batch: Batch) -> None:
    """Give the segments of the shards their part of the scores, which must be finite, and their histograms."""
    bits = batch.scores.view(torch.int32)
    bits.index_fill_(0, batch.gaps, KEPT)
    ends = [*batch.starts[1:], bits.shape[0]]
    sizes = [(end - start) * bits.shape[1] for start, end in zip(batch.starts, ends, strict=True)]
    joint = JointScores(bits.view(-1), torch.tensor(sizes, device=bits.device))
    for i, (segment, histogram) in enumerate(zip(segments, joint.first_histograms().cpu(), strict=True)):
        segment.add(bits[batch.starts[i] : batch.starts[i] + batch.rows[i]])
        segment.first_histogram = histogram
        segment.joint = (joint, i)


def _score_blocks(goal: Goal, shard: Shard, cuts: CutTable | None, segment: Segment) -> Partials:
    """Fill ``segment`` with the scores of whole blocks, KEPT in the place of cut ones, and return what is known of
    the cut ones. Where all are cut, the segment stays empty until the decision."""
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
    """Scores of single elements, computed again in each pass: to keep them would take as much memory as the weights."""
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
    """Refuse scores that are not finite or negative; ``scores`` ``(block rows, block columns)`` from block row
    ``first_row``."""
    if _fine(scores):
        return
    i, j = (~((scores >= 0) & (scores < torch.inf))).nonzero()[0].tolist()
    row, col = (first_row + i) * goal.block[0], (grid_of(shard.rect, goal.block).col + j) * goal.block[1]
    raise ValueError(
        f"Table {goal.data.name!r}: the block at row {row}, column {col} scores {float(scores[i, j])}; "
        "scores must be finite and not negative, so no mask was changed."
    )


def _fine(scores: Tensor) -> bool:
    low, high = torch.aminmax(scores)  # NaN passes through to both
    return bool((low >= 0) & (high < torch.inf))


def _small_masks(scored: Sequence[ScoredTable], thresholds: Sequence[Threshold]) -> dict[int, NewMask]:
    """The new masks of shards that were scored together, by the place of their table."""
    joints: dict[JointScores, list[int]] = {}
    for i, table in enumerate(scored):
        segment = next(iter(table.segments.values()), None)
        if segment is not None and segment.joint is not None:
            joints.setdefault(segment.joint[0], []).append(i)
    found: dict[int, NewMask] = {}
    for joint, places in joints.items():
        parts = []
        for i in places:
            [(rect, segment)] = scored[i].segments.items()
            parts.append(_BatchedShard(rect, scored[i].goal.block, segment, thresholds[i]))
        masks = _joint_masks(joint, parts)
        found.update((i, NewMask(mask, dirty)) for i, (mask, dirty) in zip(places, masks, strict=True))
    return found


class _BatchedShard(NamedTuple):
    """A shard that was scored together with others, and what decides about it."""

    rect: Rect
    block: Block
    segment: Segment
    threshold: Threshold


def _joint_masks(joint: JointScores, shards: Sequence[_BatchedShard]) -> list[tuple[BlockMask, Tensor]]:
    """The new masks of shards that were scored together by a norm, and which of the blocks that they remove are not
    zero yet, as bits."""
    limits = torch.full((joint.sizes.numel(),), -1, dtype=torch.int32)
    numbers = [_number(shard) for shard in shards]
    limits[numbers] = torch.tensor(
        [-1 if shard.threshold.last == -1 else shard.threshold.bits for shard in shards], dtype=torch.int32
    )
    gone = joint.bits <= limits.to(joint.bits.device)[joint.tables()]
    starts = (joint.sizes.cumsum(0) - joint.sizes).tolist()
    counts = [shard.segment.blocks for shard in shards]
    for number, count, (_, _, segment, threshold) in zip(numbers, counts, shards, strict=True):
        if threshold.last is not None and threshold.last >= 0:  # the order of ties at the threshold matters
            [(_, bits)] = segment.chunks()
            gone[starts[number] : starts[number] + count] = threshold.removes(segment, 0, bits)
    kept, dirty = pack(~gone & (joint.bits != KEPT)), pack(gone & (joint.bits != 0))
    made = []
    for number, count, (rect, block, _, _) in zip(numbers, counts, shards, strict=True):
        first = starts[number] // 8
        place = slice(first, first - (-count // 8))
        made.append((BlockMask(rect, block, kept[place].clone()), dirty[place]))
    return made


def _number(shard: _BatchedShard) -> int:
    assert shard.segment.joint is not None
    return shard.segment.joint[1]


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
    return torch.cat(parts) if parts else segment.col_ids.new_zeros(0, dtype=torch.bool)


def _new_mask(table: ScoredTable, shard: Shard, threshold: Threshold, decision: Decision | None) -> NewMask:
    """The new mask of one shard, from its scores and from the decision on its cut blocks."""
    if decision is not None:
        _note_decision(table, shard, decision)
    if table.goal.by_element:
        return _mask_of_elements(table, shard, threshold, decision)
    segment, device = table.segments[shard.rect], shard.tensor.device
    grid = grid_of(shard.rect, table.goal.block)
    # A norm of 0 means that the block is zero already (or that its squares underflow float32: weights below 1e-22). At
    # a threshold of 0 that holds for all that is removed. Other scores imply nothing.
    norm = table.goal.measure in ("L1", "L2")
    clean = norm and threshold.bits == 0 and decision is None
    kept, dirty = BitWriter(grid.blocks, device), None if clean else BitWriter(grid.blocks, device)
    for start, bits in segment.chunks():
        gone = threshold.removes(segment, start, bits)
        if dirty is not None:
            stale = gone & (bits != 0) if norm else gone
            dirty.add(stale if decision is None else stale & (bits != REMOVED_CLEAN))
        kept.add(~gone)
    mask = BlockMask(shard.rect, table.goal.block, kept.close())
    return NewMask(mask, None if dirty is None else dirty.close())


def _note_decision(table: ScoredTable, shard: Shard, decision: Decision) -> None:
    """Put what was decided about cut blocks in the place of their scores."""
    goal, cuts = table.goal, table.cuts
    assert cuts is not None
    grid = grid_of(shard.rect, goal.block)
    norm = goal.measure in ("L1", "L2")
    segment, clean = table.segments[shard.rect], table.partials[shard.rect].clean

    def decided(first: int, last: int) -> Tensor:
        gone = torch.where(clean[first:last], REMOVED_CLEAN, REMOVED) if norm else REMOVED
        return torch.where(decision.columns[first:last], gone, KEPT).to(torch.int32)

    some_cut, all_cut = len(cuts.cols_in(grid)) > 0, len(cuts.cols_in(grid)) == grid.cols
    if all_cut:
        segment.add(decided(0, grid.rows))
    for first, bits in segment.pieces():
        last = first + bits.shape[0]
        if some_cut and not all_cut:
            bits[:, cuts.local_cols(grid)] = decided(first, last)
        for i, flags in decision.slabs.items():
            if first <= i - grid.row < last and not goal.by_element:
                bits[i - grid.row - first] = torch.where(flags, REMOVED, KEPT).to(torch.int32)


def _mask_of_elements(table: ScoredTable, shard: Shard, threshold: Threshold, decision: Decision | None) -> NewMask:
    """The new mask of a shard whose blocks lose only their smallest elements."""
    goal, segment, device = table.goal, table.segments[shard.rect], shard.tensor.device
    grid = grid_of(shard.rect, goal.block)
    kept = BitWriter(shard.rect.numel, device)
    for start, stop in row_chunks(shard.rect, goal.block):
        first = (shard.rect.row + start) // goal.block[0] - grid.row
        bits = segment.rows(first, first - (start - stop) // goal.block[0])
        chosen = threshold.removes(segment, first * grid.cols, bits.flatten()).view_as(bits)
        scores = element_scores(shard.tensor[start:stop], goal.measure, (shard.rect.row + start, shard.rect.col))
        gone = smallest_in_blocks(scores.to(torch.float32), chosen, goal.block, goal.zeros)
        for i, flags in decision.slabs.items() if decision is not None else ():
            top = max(i * goal.block[0], shard.rect.row) - shard.rect.row - start
            if 0 <= top < stop - start:
                gone[top : top + flags.shape[0]] = flags
        kept.add(~gone.flatten())
    mask = BlockMask(shard.rect, (1, 1), kept.close())
    return NewMask(mask, ~mask.bits)


def spread_replicas(data: ShardedData) -> bool:
    """Return whether there are replicas and some rank holds only a part of the table."""
    return data.replicated and any(set(held) != set(data.tiling[0]) for held in data.tiling)
