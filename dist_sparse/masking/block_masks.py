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

from dist_sparse.groups import Group, Rider
from dist_sparse.masking.bits import pack
from dist_sparse.masking.cuts import CutTable, Owned, Verdict
from dist_sparse.masking.exchange import exchange_partials, return_verdicts
from dist_sparse.masking.masks import BlockMask
from dist_sparse.masking.scores import element_scores, row_chunks
from dist_sparse.masking.scoring import ScoredTable
from dist_sparse.masking.segments import KEPT, REMOVED, REMOVED_CLEAN, Segment
from dist_sparse.masking.selection import Ballot, Threshold, select_smallest
from dist_sparse.masking.within import smallest_in_blocks
from dist_sparse.tables.shards import Block, Rect, Shard, ShardedData, grid_of

__all__ = ["MadeMasks", "NewMask", "new_masks"]


class NewMask(NamedTuple):
    """A shard's new mask, and which of the blocks that it removes are not zero yet, as bits (None: none but newly
    removed ones)."""

    mask: BlockMask
    dirty: Tensor | None


class MadeMasks(NamedTuple):
    """The new masks of a table: those of this rank's shards, the block that one of their bits stands for, and what
    has decided, where scores do."""

    masks: list[NewMask]
    block: Block
    threshold: Threshold | None


def new_masks(scored: Sequence[ScoredTable], group: Group, rider: Rider | None = None) -> list[MadeMasks]:
    """The new masks of this rank's shards, per table in the order of its shards. Collective over ``group``: every rank
    must call it.

    At most three all-reduces, two all-to-alls if a block is cut, and at most three more all-reduces if scores tie over
    ranks, the first of which carries ``rider``.
    """
    ballots = [
        Ballot(
            table.goal.data.name, table.goal.k, table.goal.blocks, [*table.segments.values()], _spread(table.goal.data)
        )
        for table in scored
    ]
    cut = [(i, table, table.cuts) for i, table in enumerate(scored) if table.cuts is not None]
    owned: list[Owned] = []
    device = next((shard.tensor.device for table in scored for shard in table.goal.data.shards), torch.device("cpu"))
    if cut:
        owned = exchange_partials([(cuts, table.partials) for _, table, cuts in cut], group, device)
        for (i, _, _), own in zip(cut, owned, strict=True):
            ballots[i].segments += own.segments
    thresholds = select_smallest(ballots, group, rider)
    verdicts: list[dict[Rect, Verdict]] = [{} for _ in scored]
    if cut:
        decisions = [_decide(table, own, thresholds[i]) for (i, table, _), own in zip(cut, owned, strict=True)]
        returned = return_verdicts(decisions, group, [table.goal.by_element for _, table, _ in cut], device)
        for (i, _, _), verdict in zip(cut, returned, strict=True):
            verdicts[i] = verdict
    return [
        MadeMasks(
            [_new_mask(table, shard, threshold, verdict.get(shard.rect)) for shard in table.goal.data.shards],
            (1, 1) if table.goal.by_element else table.goal.block,
            threshold,
        )
        for table, threshold, verdict in zip(scored, thresholds, verdicts, strict=True)
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


def _new_mask(table: ScoredTable, shard: Shard, threshold: Threshold, verdict: Verdict | None) -> NewMask:
    """The new mask of one shard, from its scores and from the verdict on its cut blocks."""
    if verdict is not None:
        _note_verdict(table, shard, verdict)
    if table.goal.by_element:
        return _mask_of_elements(table, shard, threshold, verdict)
    segment, device = table.segments[shard.rect], shard.tensor.device
    grid = grid_of(shard.rect, table.goal.block)
    # A norm of 0 says that the block is zero already (or that its squares underflow float32: weights below 1e-22), and
    # at a threshold of 0 so is all that goes. Other scores say nothing.
    norm = table.goal.measure in ("L1", "L2")
    settled = norm and threshold.bits == 0 and verdict is None
    blocks = grid.rows * grid.cols
    kept, dirty = _BitWriter(blocks, device), None if settled else _BitWriter(blocks, device)
    for start, bits in segment.chunks():
        gone = threshold.removes(segment, start, bits)
        if dirty is not None:
            stale = gone & (bits != 0) if norm else gone
            dirty.add(stale if verdict is None else stale & (bits != REMOVED_CLEAN))
        kept.add(~gone)
    mask = BlockMask(shard.rect, table.goal.block, kept.close())
    return NewMask(mask, None if dirty is None else dirty.close())


def _note_verdict(table: ScoredTable, shard: Shard, verdict: Verdict) -> None:
    """Puts what was decided about cut blocks in the place of their scores."""
    goal, cuts = table.goal, table.cuts
    assert cuts is not None
    grid = grid_of(shard.rect, goal.block)
    norm = goal.measure in ("L1", "L2")
    segment, clean = table.segments[shard.rect], table.partials[shard.rect].clean

    def decided(first: int, last: int) -> Tensor:
        gone = torch.where(clean[first:last], REMOVED_CLEAN, REMOVED) if norm else REMOVED
        return torch.where(verdict.columns[first:last], gone, KEPT).to(torch.int32)

    some_cut, all_cut = len(cuts.cols_in(grid)) > 0, len(cuts.cols_in(grid)) == grid.cols
    if all_cut:
        segment.add(decided(0, grid.rows))
    for first, bits in segment.pieces():
        last = first + bits.shape[0]
        if some_cut and not all_cut:
            bits[:, cuts.local_cols(grid)] = decided(first, last)
        for i, flags in verdict.slabs.items():
            if first <= i - grid.row < last and not goal.by_element:
                bits[i - grid.row - first] = torch.where(flags, REMOVED, KEPT).to(torch.int32)


def _mask_of_elements(table: ScoredTable, shard: Shard, threshold: Threshold, verdict: Verdict | None) -> NewMask:
    """The new mask of a shard whose blocks lose only their smallest elements."""
    goal, segment, device = table.goal, table.segments[shard.rect], shard.tensor.device
    grid = grid_of(shard.rect, goal.block)
    kept = _BitWriter(shard.rect.numel, device)
    for start, stop in row_chunks(shard.rect, goal.block):
        first = (shard.rect.row + start) // goal.block[0] - grid.row
        bits = segment.rows(first, first - (start - stop) // goal.block[0])
        chosen = threshold.removes(segment, first * grid.cols, bits.flatten()).view_as(bits)
        scores = element_scores(shard.tensor[start:stop], goal.measure, (shard.rect.row + start, shard.rect.col))
        gone = smallest_in_blocks(scores.to(torch.float32), chosen, goal.block, goal.zeros)
        for i, flags in verdict.slabs.items() if verdict is not None else ():
            top = max(i * goal.block[0], shard.rect.row) - shard.rect.row - start
            if 0 <= top < stop - start:
                gone[top : top + flags.shape[0]] = flags
        kept.add(~gone.flatten())
    mask = BlockMask(shard.rect, (1, 1), kept.close())
    return NewMask(mask, ~mask.bits)


class _BitWriter:
    """Packs ``count`` flags that come in pieces of any length, at once into their place: small tensors that outlive the
    large ones they are made from would leave holes in the heap."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._bits = torch.empty(-(-count // 8), dtype=torch.uint8, device=device)
        self._at = 0
        self._rest: Tensor | None = None

    def add(self, flags: Tensor) -> None:
        flags = flags if self._rest is None else torch.cat([self._rest, flags])
        whole = flags.numel() // 8 * 8
        self._write(flags[:whole])
        self._rest = flags[whole:].clone() if whole < flags.numel() else None  # the caller may reuse flags

    def close(self) -> Tensor:
        if self._rest is not None:
            self._write(self._rest)
        assert self._at == self._bits.numel()
        return self._bits

    def _write(self, flags: Tensor) -> None:
        packed = pack(flags)
        self._bits[self._at : self._at + packed.numel()] = packed
        self._at += packed.numel()


def _spread(data: ShardedData) -> bool:
    """Whether there are replicas and some rank holds only a part of the table."""
    return data.replicated and any(set(held) != set(data.tiling[0]) for held in data.tiling)
