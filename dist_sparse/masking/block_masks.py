"""New masks of many tables over many ranks: score, select, mask.

:mod:`~dist_sparse.masking.block_scores` is the local half. :func:`new_masks` is the collective
half: score, select and mask are its three steps; what they call is below. Neither writes to weights
or to old masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking.block_scores import Goal, ScoredTable
from dist_sparse.masking.cuts import (
    CutTable,
    Decision,
    Owned,
    exchange_partials,
    return_decisions,
)
from dist_sparse.masking.flat import Limit
from dist_sparse.masking.masks import BitWriter, BlockMask
from dist_sparse.masking.scores import element_scores, row_chunks, smallest_in_blocks
from dist_sparse.masking.segments import KEPT, REMOVED, Segment
from dist_sparse.masking.selection import (
    Candidates,
    DirtyRule,
    NewMask,
    Pool,
    Threshold,
    mask_of_blocks,
    select_smallest,
)
from dist_sparse.tables.shards import Block, Rect, Shard, ShardedData, grid_of


class MadeMasks(NamedTuple):
    """The new masks of a table.

    Args:
        masks: of this rank's shards, in their order.
        block: what one of their bits stands for.
        threshold: None where no scores decide.
        removed: number of removed blocks over all ranks; None if it is not known.
    """

    masks: list[NewMask]
    block: Block
    threshold: Threshold | None
    removed: int | None = None


def new_masks(scored: Sequence[ScoredTable], group: Group, pooled: bool = False) -> list[MadeMasks]:
    """Return the new masks of this rank's shards, per table in the order of its shards. Collective
    over ``group``.

    If ``pooled``, the bytes that the tables' ``k`` remove together are removed wherever scores are
    smallest.

    At most three all-reduces, two all-to-alls if a block is cut, and at most three more all-reduces
    if scores tie over ranks.
    """
    # 1. Score: done by score_tables(), but for blocks that shard borders cut. Each of these has one
    # rank that owns it.
    cut = [table.cuts for table in scored if table.cuts is not None]
    device = _device_of(scored)
    exchange_partials(cut, group, device)

    # 2. Select: the exact threshold of every table.
    pool = _pool_of(scored) if pooled else None
    candidates = [_candidates(table, pooled=pool is not None) for table in scored]
    thresholds = select_smallest(candidates, group, pool)
    for table, threshold in zip(scored, thresholds, strict=True):
        table.threshold = threshold

    # 3. Mask: the owners of cut blocks return their decisions; all else follows from scores and
    # threshold.
    for table in scored:
        _set_limits(table)
    return_decisions(cut, group, device)
    made = []
    for table in scored:
        goal, threshold = table.goal, table.threshold
        masks = [_new_mask(table, shard) for shard in goal.data.shards]
        removed = None if goal.by_element else threshold.removed
        made.append(MadeMasks(masks, goal.mask_block, threshold, removed))
    return made


def _pool_of(scored: Sequence[ScoredTable]) -> Pool | None:
    """Return the pool of tables; None if nothing is to be removed."""
    need = sum(table.goal.k * table.goal.price for table in scored)
    prices = [table.goal.price for table in scored if table.goal.most]
    return Pool(need, prices) if need else None


def _candidates(table: ScoredTable, pooled: bool) -> Candidates:
    goal, segments = table.goal, [*table.segments.values()]
    if table.cuts is not None:
        segments += table.cuts.owned.segments
    k = goal.most if pooled else goal.k
    spread = spread_replicas(goal.data)
    return Candidates(goal.data.name, k, goal.blocks, segments, spread, goal.only_zeros)


def _device_of(scored: Sequence[ScoredTable]) -> torch.device:
    devices = (shard.tensor.device for table in scored for shard in table.goal.data.shards)
    return next(devices, torch.device("cpu"))


def _decide(goal: Goal, threshold: Threshold, own: Owned) -> Decision:
    """Return the removed flags of the cut blocks that this rank owns."""
    slabs: dict[int, Tensor] = {}
    for i, (segment, elements) in own.slabs.items():
        gone = _removed(threshold, segment)
        if goal.by_element:
            slabs[i] = smallest_in_blocks(elements.to(torch.float32), gone, goal.block, goal.zeros)
        else:
            slabs[i] = gone.flatten()
    return Decision(_removed(threshold, own.columns), slabs)


def _removed(threshold: Threshold, segment: Segment) -> Tensor:
    """Return the removed flags of a segment of one piece, bool ``(rows, cols)``."""
    [(_, bits)] = segment.pieces()
    return threshold.removes(segment, 0, bits.view(-1)).view_as(bits)


def _set_limits(table: ScoredTable) -> None:
    """Decide about blocks whose scores are not in this table's own segments alone."""
    threshold = table.threshold
    if table.cuts is not None:
        table.cuts.decision = _decide(table.goal, threshold, table.cuts.owned)
    for segment in table.segments.values():
        if segment.joint is not None:
            limit = Limit(threshold.bits, segment.places_upto(threshold.last))
            segment.joint.scores.limits[segment.joint.number] = limit


def _new_mask(table: ScoredTable, shard: Shard) -> NewMask:
    """Return the new mask of one shard, from its scores and the decision on its cut blocks."""
    goal, rect, threshold = table.goal, shard.rect, table.threshold
    segment = table.segments[rect]
    if segment.joint is not None:
        kept, dirty, removes = segment.joint.scores.masks[segment.joint.number]
        mask = BlockMask(rect, goal.block, kept)
        if removes is not None:
            mask.learn_removes(removes)
        return NewMask(mask, dirty)
    slabs: dict[int, Tensor] = {}
    if table.cuts is not None:
        slabs = table.cuts.decisions[rect].slabs
        _note_decision(table.cuts, segment, rect)
    if goal.by_element:
        return _mask_of_elements(table, shard, slabs)
    rule = _dirty_rule(table, shard.tensor)
    scores = table.kept_scores(rect)
    if scores is not None:
        return scores.new_mask(rect, goal.block, segment, threshold, rule)
    return mask_of_blocks(rect, goal.block, segment, threshold, rule)


def _dirty_rule(table: ScoredTable, live: Tensor) -> DirtyRule | None:
    """Return how to find removed blocks that are not zero yet; None if there are none."""
    if not live.is_cpu:
        return None  # all that is removed is written there, in one pass
    if not table.goal.shows_zeros:
        return _any_removed
    # At a threshold of 0 all that is removed scores 0.
    return None if table.threshold.bits == 0 else _not_zero


def _any_removed(removed: Tensor, bits: Tensor) -> Tensor:
    return removed


def _not_zero(removed: Tensor, bits: Tensor) -> Tensor:
    return removed & bits.to(torch.bool)


def _note_decision(cuts: CutTable, segment: Segment, rect: Rect) -> None:
    """Put the decision on cut blocks in the place of their scores."""
    known, decision = cuts.partials[rect], cuts.decisions[rect]
    # Cut columns. What this shard has of a block may be zero although others have more: as a score
    # of 0, which is always removed too.
    marks = torch.where(known.clean, 0, REMOVED).to(torch.int32)
    columns = torch.where(decision.columns, marks, KEPT)
    if known.cuts_all:
        segment.add(columns)
    for first, bits in segment.pieces():
        bits[:, known.cols] = columns[first : first + len(bits)]
        # Masks by element take the slabs as they are.
        for i, flags in () if cuts.by_element else decision.slabs.items():
            at = i - known.grid.row - first
            if 0 <= at < len(bits):
                bits[at] = torch.where(flags, REMOVED, KEPT).to(torch.int32)


def _mask_of_elements(table: ScoredTable, shard: Shard, slabs: Mapping[int, Tensor]) -> NewMask:
    """Return the new mask of a shard whose blocks lose only their smallest elements.

    Args:
        slabs: removed flags in cut block rows, decided by the ranks that own them.
    """
    goal, segment, rect = table.goal, table.segments[shard.rect], shard.rect
    height, grid = goal.block[0], grid_of(shard.rect, goal.block)
    kept = BitWriter(rect.numel, shard.tensor.device)
    for start, stop in row_chunks(rect, goal.block, shard.tensor.device):
        first = (rect.row + start) // height - grid.row
        bits = segment.rows(first, first - (start - stop) // height)
        chosen = table.threshold.removes(segment, first * grid.cols, bits.flatten()).view_as(bits)
        offset = rect.row + start, rect.col
        scores = element_scores(shard.tensor[start:stop], goal.measure, offset)
        gone = smallest_in_blocks(scores.to(torch.float32), chosen, goal.block, goal.zeros)
        for i, flags in slabs.items():
            top = max(i * height, rect.row) - rect.row - start
            if 0 <= top < stop - start:
                gone[top : top + flags.shape[0]] = flags
        kept.add(~gone.flatten())
    mask = BlockMask(rect, (1, 1), kept.close())
    # Scores are of blocks: nothing tells which of the removed elements are zero.
    return NewMask(mask, ~mask.bits)


def spread_replicas(data: ShardedData) -> bool:
    """Return whether there are replicas and some rank holds only a part of the table."""
    return data.replicated and any(set(held) != set(data.tiling[0]) for held in data.tiling)
