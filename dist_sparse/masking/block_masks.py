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
from dist_sparse.masking.cuts import CutTable, Decision, Owned, exchange_partials, return_decisions
from dist_sparse.masking.masks import BitWriter, BlockMask, pack
from dist_sparse.masking.pools import Pool
from dist_sparse.masking.scores import element_scores, row_chunks, smallest_in_blocks
from dist_sparse.masking.segments import KEPT, REMOVED, REMOVED_CLEAN, JointScores, Segment
from dist_sparse.masking.selection import Candidates, Threshold, select_smallest
from dist_sparse.tables.shards import Block, Rect, Shard, ShardedData, grid_of

__all__ = ["MadeMasks", "NewMask", "new_masks", "spread_replicas"]


class NewMask(NamedTuple):
    """A shard's new mask, and which of the blocks that it removes are not zero yet, as bits (None:
    none but newly removed ones)."""

    mask: BlockMask
    dirty: Tensor | None


class MadeMasks(NamedTuple):
    """The new masks of a table: those of this rank's shards, the block that one of their bits
    stands for, the threshold, where scores decide, and how many blocks they remove over all ranks,
    where that is known."""

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
    device = next(
        (shard.tensor.device for table in scored for shard in table.goal.data.shards),
        torch.device("cpu"),
    )
    need = sum(table.goal.k * table.goal.price for table in scored) if pooled else 0
    candidates = [
        Candidates(
            goal.data.name,
            goal.most if need else goal.k,
            goal.blocks,
            [*segments.values()],
            spread_replicas(goal.data),
        )
        for goal, segments in ((table.goal, table.segments) for table in scored)
    ]
    pool = Pool(need, [table.goal.price for table in scored if table.goal.most]) if need else None

    # 1. Score: done by score_tables(), but for blocks that shard borders cut. Each of these has one
    # rank that owns it.
    cut = {i: table.cuts for i, table in enumerate(scored) if table.cuts is not None}
    owned = (
        exchange_partials([(cuts, scored[i].partials) for i, cuts in cut.items()], group, device)
        if cut
        else []
    )
    for i, own in zip(cut, owned, strict=True):
        candidates[i].segments += own.segments

    # 2. Select: the exact threshold of every table.
    thresholds = select_smallest(candidates, group, rider, pool)

    # 3. Mask: the owners of cut blocks return their decisions; all else follows from scores and
    # threshold.
    decisions: dict[int, dict[Rect, Decision]] = {}
    if cut:
        removed = [
            _decide(scored[i], own, thresholds[i]) for i, own in zip(cut, owned, strict=True)
        ]
        by_element = [scored[i].goal.by_element for i in cut]
        decisions = dict(
            zip(cut, return_decisions(removed, group, by_element, device), strict=True)
        )
    small = _small_masks(scored, thresholds)
    made = []
    for i, (table, threshold) in enumerate(zip(scored, thresholds, strict=True)):
        goal, masks = table.goal, [small[i]] if i in small else []
        for shard in goal.data.shards[len(masks) :]:
            masks.append(_new_mask(table, shard, threshold, decisions.get(i, {}).get(shard.rect)))
        known = candidates[i].k if threshold.removed is None else threshold.removed
        block, k = ((1, 1), None) if goal.by_element else (goal.block, known)
        made.append(MadeMasks(masks, block, threshold, k))
    return made


def _small_masks(
    scored: Sequence[ScoredTable], thresholds: Sequence[Threshold]
) -> dict[int, NewMask]:
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
        found.update(
            (i, NewMask(mask, dirty)) for i, (mask, dirty) in zip(places, masks, strict=True)
        )
    return found


class _BatchedShard(NamedTuple):
    """A shard that was scored together with others, and what decides about it."""

    rect: Rect
    block: Block
    segment: Segment
    threshold: Threshold


def _joint_masks(
    joint: JointScores, shards: Sequence[_BatchedShard]
) -> list[tuple[BlockMask, Tensor]]:
    """The new masks of shards that were scored together by a norm, and which of the blocks that
    they remove are not zero yet, as bits."""
    limits = torch.full((joint.sizes.numel(),), -1, dtype=torch.int32)
    numbers = [_number(shard) for shard in shards]
    limits[numbers] = torch.tensor(
        [-1 if shard.threshold.last == -1 else shard.threshold.bits for shard in shards],
        dtype=torch.int32,
    )
    gone = joint.bits <= limits.to(joint.bits.device)[joint.tables()]
    starts = (joint.sizes.cumsum(0) - joint.sizes).tolist()
    counts = [shard.segment.blocks for shard in shards]
    for number, count, (_, _, segment, threshold) in zip(numbers, counts, shards, strict=True):
        # The order of ties at the threshold matters.
        if threshold.last is not None and threshold.last >= 0:
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


def _decide(
    table: ScoredTable, own: Owned, threshold: Threshold
) -> tuple[CutTable, dict[int, Tensor], Tensor | None]:
    """The removed flags of the cut blocks that this rank owns."""
    goal, cuts = table.goal, table.cuts
    assert cuts is not None
    columns = (
        _removed(threshold, own.columns).view(-1, len(cuts.cols))
        if own.columns is not None
        else None
    )
    slabs: dict[int, Tensor] = {}
    for i, (segment, elements) in own.slabs.items():
        gone = _removed(threshold, segment)
        if goal.by_element:
            gone = smallest_in_blocks(
                elements.to(torch.float32), gone.unsqueeze(0), goal.block, goal.zeros
            )
        slabs[i] = gone
    return cuts, slabs, columns


def _removed(threshold: Threshold, segment: Segment) -> Tensor:
    parts = [threshold.removes(segment, start, bits) for start, bits in segment.chunks()]
    return torch.cat(parts) if parts else segment.col_ids.new_zeros(0, dtype=torch.bool)


def _new_mask(
    table: ScoredTable, shard: Shard, threshold: Threshold, decision: Decision | None
) -> NewMask:
    """The new mask of one shard, from its scores and from the decision on its cut blocks."""
    if decision is not None:
        _note_decision(table, shard, decision)
    if table.goal.by_element:
        return _mask_of_elements(table, shard, threshold, decision)
    segment, device = table.segments[shard.rect], shard.tensor.device
    grid = grid_of(shard.rect, table.goal.block)
    # At a threshold of 0 all that is removed scores 0.
    norm = table.goal.shows_zeros
    clean = norm and threshold.bits == 0 and decision is None
    scores = (
        None
        if table.goal.keeping is None or decision is not None
        else table.goal.keeping.scores.get(shard.rect)
    )
    # What was removed before is zero: whoever sees all writes has zeroed it again.
    clean = clean or (scores is not None and scores.age > 0)
    if (
        clean
        and scores is not None
        and (changed := scores.new_mask(segment, threshold)) is not None
    ):
        return NewMask(changed, None)
    kept, dirty = BitWriter(grid.blocks, device), None if clean else BitWriter(grid.blocks, device)
    for start, bits in segment.chunks():
        gone = threshold.removes(segment, start, bits)
        if dirty is not None:
            stale = gone & bits.to(torch.bool) if norm else gone
            dirty.add(stale if decision is None else stale & (bits != REMOVED_CLEAN))
            # They are about to be zeroed, whether the masks before removed them or not.
            if scores is not None:
                scores.written.add((start + (gone & (bits != 0)).nonzero().flatten()) // grid.cols)
        kept.add(~gone)
    mask = BlockMask(shard.rect, table.goal.block, kept.close())
    if scores is not None:
        scores.note_mask(mask, threshold)
    return NewMask(mask, None if dirty is None else dirty.close())


def _note_decision(table: ScoredTable, shard: Shard, decision: Decision) -> None:
    """Put what was decided about cut blocks in the place of their scores."""
    goal, cuts = table.goal, table.cuts
    assert cuts is not None
    grid = grid_of(shard.rect, goal.block)
    norm = goal.shows_zeros
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


def _mask_of_elements(
    table: ScoredTable, shard: Shard, threshold: Threshold, decision: Decision | None
) -> NewMask:
    """The new mask of a shard whose blocks lose only their smallest elements."""
    goal, segment, device = table.goal, table.segments[shard.rect], shard.tensor.device
    grid = grid_of(shard.rect, goal.block)
    kept = BitWriter(shard.rect.numel, device)
    for start, stop in row_chunks(shard.rect, goal.block):
        first = (shard.rect.row + start) // goal.block[0] - grid.row
        bits = segment.rows(first, first - (start - stop) // goal.block[0])
        chosen = threshold.removes(segment, first * grid.cols, bits.flatten()).view_as(bits)
        scores = element_scores(
            shard.tensor[start:stop], goal.measure, (shard.rect.row + start, shard.rect.col)
        )
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
