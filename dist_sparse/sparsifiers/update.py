"""How do scores become masks, for many tables over many ranks at once?

Blocks cut by shard borders are completed by their owners, the exact thresholds are found over all ranks, verdicts on
cut blocks come back, and every rank turns its scores and the thresholds into new masks. Nothing is written to weights
or to old masks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dist_sparse.cuts import CutTable, Owned, Verdict, exchange_partials, return_verdicts
from dist_sparse.groups import Group
from dist_sparse.masks import BlockMask, pack
from dist_sparse.scores import element_scores, row_chunks
from dist_sparse.selection import (
    KEPT,
    REMOVED,
    REMOVED_CLEAN,
    Ballot,
    Segment,
    Threshold,
    select_smallest,
)
from dist_sparse.shards import Rect, Shard, ShardedData, grid_of
from dist_sparse.sparsifiers.scoring import ScoredTable
from dist_sparse.within import smallest_in_blocks

__all__ = ["NewMask", "new_masks"]


class NewMask(NamedTuple):
    """A shard's new mask, and which of the blocks that it removes are not zero yet, as bits (None: none but newly
    removed ones)."""

    mask: BlockMask
    dirty: Tensor | None


def new_masks(scored: Sequence[ScoredTable], group: Group) -> list[list[NewMask]]:
    """The new masks of this rank's shards, per table in the order of its shards. Collective over ``group``: every rank
    must call it.

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
        decisions = [
            _decide(table, own, thresholds[_index(scored, table)]) for table, own in zip(cut, owned, strict=True)
        ]
        returned = return_verdicts(decisions, group, [table.goal.by_element for table in cut])
        verdicts = {_index(scored, table): verdict for table, verdict in zip(cut, returned, strict=True)}
    return [
        [_mask(table, shard, thresholds[i], verdicts.get(i, {}).get(shard.rect)) for shard in table.goal.data.shards]
        for i, table in enumerate(scored)
    ]


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


def _mask(table: ScoredTable, shard: Shard, threshold: Threshold, verdict: Verdict | None) -> NewMask:
    """The new mask of one shard, from its scores and from the verdict on its cut blocks."""
    goal, segment = table.goal, table.segments[shard.rect]
    grid = grid_of(shard.rect, goal.block)
    writer, dirty = _BitWriter(), _BitWriter()
    # A norm of 0 says that the block is zero already, and at a threshold of 0 so is all that goes. Other scores say
    # nothing.
    norm = goal.measure in ("L1", "L2")
    if verdict is not None and segment.bits is not None and table.cuts is not None:
        bits = segment.bits.view(grid.rows, grid.cols)
        if verdict.columns.shape[1]:
            cols = [j - grid.col for j in table.cuts.cols_in(grid)]
            clean = norm & (table.partials[shard.rect].sums == 0)
            gone = torch.where(clean, REMOVED_CLEAN, REMOVED)
            bits[:, cols] = torch.where(verdict.columns.to(bits.device), gone, KEPT).to(torch.int32)
        for i, gone in verdict.slabs.items():
            bits[i - grid.row] = (
                KEPT if goal.by_element else torch.where(gone.to(bits.device), REMOVED, KEPT).to(torch.int32)
            )
    if not goal.by_element:
        settled = norm and threshold.bits == 0 and verdict is None
        for start, chunk in segment.chunks():
            gone = threshold.removes(segment, start, chunk)
            if not settled:
                stale = gone & (chunk != 0) if norm else gone
                dirty.add(stale if verdict is None else stale & (chunk != REMOVED_CLEAN))
            writer.add(gone.logical_not_())
        mask = BlockMask(shard.rect, goal.block, writer.close(shard.tensor.device))
        return NewMask(mask, None if settled else dirty.close(shard.tensor.device))
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
    mask = BlockMask(shard.rect, (1, 1), writer.close(shard.tensor.device))
    return NewMask(mask, ~mask.bits)


class _BitWriter:
    """Packs flags that come in pieces of any length."""

    def __init__(self) -> None:
        self._done: list[Tensor] = []
        self._rest: Tensor | None = None

    def add(self, flags: Tensor) -> None:
        flags = flags if self._rest is None else torch.cat([self._rest, flags])
        whole = flags.numel() // 8 * 8
        self._done.append(pack(flags[:whole]))
        self._rest = flags[whole:].clone() if whole < flags.numel() else None  # the caller may reuse flags

    def close(self, device: torch.device) -> Tensor:
        if self._rest is not None:
            self._done.append(pack(self._rest))
        return torch.cat(self._done) if self._done else torch.empty(0, dtype=torch.uint8, device=device)


def _spread(data: ShardedData) -> bool:
    """Whether there are replicas and some rank holds only a part of the table."""
    return data.replicated and any(set(held) != set(data.tiling[0]) for held in data.tiling)


def _index(scored: Sequence[ScoredTable], table: ScoredTable) -> int:
    return next(i for i, other in enumerate(scored) if other is table)
