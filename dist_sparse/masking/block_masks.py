"""New masks of many tables over many ranks: score, select, mask.

:mod:`~dist_sparse.masking.block_scores` is the local half. :func:`new_masks` is the collective
half: score, select and mask are its three steps; what they call is below. Neither writes to weights
or to old masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dist_sparse.groups import Group, Rider
from dist_sparse.masking.block_scores import ScoredTable
from dist_sparse.masking.cuts import Decision, Owned, exchange_partials, return_decisions
from dist_sparse.masking.flat import FlatScores, Limit
from dist_sparse.masking.masks import BitWriter, BlockMask
from dist_sparse.masking.pools import Pool
from dist_sparse.masking.scores import element_scores, row_chunks, smallest_in_blocks
from dist_sparse.masking.segments import KEPT, REMOVED, JointScores, Segment
from dist_sparse.masking.selection import (
    Candidates,
    DirtyRule,
    NewMask,
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


def new_masks(
    scored: Sequence[ScoredTable], group: Group, rider: Rider | None = None, pooled: bool = False
) -> list[MadeMasks]:
    """Return the new masks of this rank's shards, per table in the order of its shards. Collective
    over ``group``.

    If ``pooled``, the bytes that the tables' ``k`` remove together are removed wherever scores are
    smallest.

    At most three all-reduces, two all-to-alls if a block is cut, and at most three more all-reduces
    if scores tie over ranks. The first all-reduce carries ``rider``.
    """
    # 1. Score: done by score_tables(), but for blocks that shard borders cut. Each of these has one
    # rank that owns it.
    owned = _score_cut_blocks(scored, group)

    # 2. Select: the exact threshold of every table.
    pool = _pool_of(scored) if pooled else None
    candidates = []
    for i, table in enumerate(scored):
        segments = [*table.segments.values()]
        if i in owned:
            segments += owned[i].segments
        goal = table.goal
        k = goal.k if pool is None else goal.most
        spread = spread_replicas(goal.data)
        candidates.append(
            Candidates(goal.data.name, k, goal.blocks, segments, spread, goal.only_zeros)
        )
    thresholds = select_smallest(candidates, group, rider, pool)

    # 3. Mask: the owners of cut blocks return their decisions; all else follows from scores and
    # threshold.
    decisions = _decide_cut_blocks(scored, owned, thresholds, group)
    joint = _masks_of_joint_tables(scored, thresholds)
    made = []
    for i, (table, threshold) in enumerate(zip(scored, thresholds, strict=True)):
        goal = table.goal
        if i in joint:
            masks = [joint[i]]
        else:
            decided = decisions.get(i, {})
            masks = [
                _new_mask(table, shard, threshold, decided.get(shard.rect))
                for shard in goal.data.shards
            ]
        if goal.by_element:
            made.append(MadeMasks(masks, (1, 1), threshold))
        else:
            removed = candidates[i].k if threshold.removed is None else threshold.removed
            made.append(MadeMasks(masks, goal.block, threshold, removed))
    return made


def _pool_of(scored: Sequence[ScoredTable]) -> Pool | None:
    """Return the pool of tables; None if nothing is to be removed."""
    need = sum(table.goal.k * table.goal.price for table in scored)
    prices = [table.goal.price for table in scored if table.goal.most]
    return Pool(need, prices) if need else None


def _device_of(scored: Sequence[ScoredTable]) -> torch.device:
    for table in scored:
        for shard in table.goal.data.shards:
            return shard.tensor.device
    return torch.device("cpu")


def _score_cut_blocks(scored: Sequence[ScoredTable], group: Group) -> dict[int, Owned]:
    """Return the cut blocks that this rank owns, by the place of their table. Collective over
    ``group`` if there are any."""
    # Metadata: the same tables on every rank.
    cut = {i: table.cuts for i, table in enumerate(scored) if table.cuts is not None}
    if not cut:
        return {}
    parts = [(cuts, scored[i].partials) for i, cuts in cut.items()]
    return dict(zip(cut, exchange_partials(parts, group, _device_of(scored)), strict=True))


def _decide_cut_blocks(
    scored: Sequence[ScoredTable],
    owned: dict[int, Owned],
    thresholds: Sequence[Threshold],
    group: Group,
) -> dict[int, dict[Rect, Decision]]:
    """Return the decisions on the cut blocks of this rank's shards, by the place of their table.
    Collective over ``group`` if there are any."""
    if not owned:
        return {}
    tables, decided = [], []
    for i, own in owned.items():
        cuts = scored[i].cuts
        assert cuts is not None
        tables.append(cuts)
        decided.append(_decide(scored[i], own, thresholds[i]))
    returned = return_decisions(tables, decided, group, _device_of(scored))
    return dict(zip(owned, returned, strict=True))


def _decide(table: ScoredTable, own: Owned, threshold: Threshold) -> Decision:
    """Return the removed flags of the cut blocks that this rank owns."""
    goal = table.goal
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


def _masks_of_joint_tables(
    scored: Sequence[ScoredTable], thresholds: Sequence[Threshold]
) -> dict[int, NewMask]:
    """Return the new masks of tables that were scored with others, by their place."""
    limits: dict[JointScores | FlatScores, dict[int, Limit]] = {}
    for table, threshold in zip(scored, thresholds, strict=True):
        for segment in table.segments.values():
            if segment.joint is not None:
                limit = Limit(threshold.bits, segment.places_upto(threshold.last))
                limits.setdefault(segment.joint.scores, {})[segment.joint.number] = limit
    flat = {scores: scores.masks(of_tables) for scores, of_tables in limits.items()}
    found: dict[int, NewMask] = {}
    for i, table in enumerate(scored):
        for rect, segment in table.segments.items():
            if segment.joint is not None:
                kept, dirty, removes = flat[segment.joint.scores][segment.joint.number]
                mask = BlockMask(rect, table.goal.block, kept)
                if removes is not None:
                    mask.learn_removes(removes)
                found[i] = NewMask(mask, dirty)
    return found


def _new_mask(
    table: ScoredTable, shard: Shard, threshold: Threshold, decision: Decision | None
) -> NewMask:
    """Return the new mask of one shard, from its scores and the decision on its cut blocks."""
    goal, segment = table.goal, table.segments[shard.rect]
    if decision is not None:
        _note_decision(table, shard, decision)
    if goal.by_element:
        return _mask_of_elements(table, shard, threshold, decision)
    rule = _dirty_rule(table, threshold)
    scores = table.kept_scores(shard.rect)
    if scores is not None:
        return scores.new_mask(shard.rect, goal.block, segment, threshold, rule)
    return mask_of_blocks(shard.rect, goal.block, segment, threshold, rule)


def _dirty_rule(table: ScoredTable, threshold: Threshold) -> DirtyRule | None:
    """Return how to find removed blocks that are not zero yet; None if there are none."""
    if _device_of([table]).type != "cpu":
        return None  # all that is removed is written there, in one pass
    if not table.goal.shows_zeros:
        return _any_removed
    # At a threshold of 0 all that is removed scores 0.
    return None if threshold.bits == 0 else _not_zero


def _any_removed(removed: Tensor, bits: Tensor) -> Tensor:
    return removed


def _not_zero(removed: Tensor, bits: Tensor) -> Tensor:
    return removed & bits.to(torch.bool)


def _note_decision(table: ScoredTable, shard: Shard, decision: Decision) -> None:
    """Put the decision on cut blocks in the place of their scores."""
    goal, known = table.goal, table.partials[shard.rect]
    segment = table.segments[shard.rect]
    # Cut columns. What this shard has of a block may be zero although others have more: as a score
    # of 0, which is always removed too.
    marks = torch.where(known.clean, 0, REMOVED).to(torch.int32)
    columns = torch.where(decision.columns, marks, KEPT)
    if known.cuts_all:
        segment.add(columns)
    for first, bits in segment.pieces():
        bits[:, known.cols] = columns[first : first + len(bits)]
        # Masks by element take the slabs as they are.
        for i, flags in () if goal.by_element else decision.slabs.items():
            at = i - known.grid.row - first
            if 0 <= at < len(bits):
                bits[at] = torch.where(flags, REMOVED, KEPT).to(torch.int32)


def _mask_of_elements(
    table: ScoredTable, shard: Shard, threshold: Threshold, decision: Decision | None
) -> NewMask:
    """Return the new mask of a shard whose blocks lose only their smallest elements."""
    goal, segment, rect = table.goal, table.segments[shard.rect], shard.rect
    height, grid = goal.block[0], grid_of(shard.rect, goal.block)
    slabs = {} if decision is None else decision.slabs
    kept = BitWriter(rect.numel, shard.tensor.device)
    for start, stop in row_chunks(rect, goal.block, shard.tensor.device):
        first = (rect.row + start) // height - grid.row
        bits = segment.rows(first, first - (start - stop) // height)
        chosen = threshold.removes(segment, first * grid.cols, bits.flatten()).view_as(bits)
        offset = rect.row + start, rect.col
        scores = element_scores(shard.tensor[start:stop], goal.measure, offset)
        gone = smallest_in_blocks(scores.to(torch.float32), chosen, goal.block, goal.zeros)
        for i, flags in slabs.items():
            # Cut block rows are chunks of their own: decided by the rank that owns them.
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
