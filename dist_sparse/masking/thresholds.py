"""Threshold of a table, and the masks that it makes of scores.

Blocks are ordered by (score, global index), so a threshold cuts exactly, however many scores tie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.masks import BitWriter, BlockMask
from dist_sparse.masking.segments import KEPT, Segment
from dist_sparse.tables.shards import Block, Rect, grid_of

__all__ = ["EVERYTHING", "NOTHING", "DirtyRule", "NewMask", "Threshold", "mask_of_blocks"]

# Takes removed flags, bool `(n,)`, and scores, int32 `(n,)`; returns which of the removed blocks
# are not zero yet.
DirtyRule = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Threshold:
    """Blocks that score less than ``bits`` are removed, and those that score the same up to the
    global index ``last``.

    Args:
        bits: the score, as int32.
        last: None is any index.
        histogram: the scores of all ranks, int64 ``(HISTOGRAM,)``: zeros first, then by leading
            bits. None where nothing or everything is removed.
        removed: number of removed blocks; None where nothing or everything is removed.
    """

    bits: int
    last: int | None
    histogram: Tensor | None = field(default=None, compare=False, repr=False)
    removed: int | None = field(default=None, compare=False)

    @property
    def score(self) -> float | None:
        """The largest score that is removed; None where nothing or everything is."""
        if self in (NOTHING, EVERYTHING):
            return None
        return float(torch.tensor(self.bits, dtype=torch.int32).view(torch.float32))

    def removes(self, segment: Segment, start: int, bits: Tensor) -> Tensor:
        """Return removed flags, bool, of the chunk ``bits`` that starts at ``start`` of
        ``segment``."""
        if not segment.on_cpu and self.last is not None:
            # To look for ties would wait for the device.
            ids = segment.ids_from(start, bits.numel())
            return (bits < self.bits) | ((bits == self.bits) & (ids <= self.last))
        removed = bits <= self.bits
        if self.last is not None:
            # Few blocks tie, so only their indices are compared.
            tied = segment.tied_within(start, bits, self.bits)
            removed[tied[segment.ids(tied + start) > self.last]] = False
        return removed

    def removes_at(self, segment: Segment, places: Tensor, bits: Tensor) -> Tensor:
        """As :meth:`removes`, of the scores ``bits`` at flat ``places`` of ``segment``."""
        removed = bits <= self.bits
        if self.last is not None:
            removed &= (bits < self.bits) | (segment.ids(places.long()) <= self.last)
        return removed


NOTHING: Final = Threshold(bits=0, last=-1)
EVERYTHING: Final = Threshold(bits=KEPT - 1, last=None)


class NewMask(NamedTuple):
    """The new mask of a shard, and as bits the removed blocks that may not be zero yet (None: only
    newly removed ones)."""

    mask: BlockMask
    dirty: Tensor | None


def mask_of_blocks(
    rect: Rect, block: Block, segment: Segment, threshold: Threshold, dirty: DirtyRule | None
) -> NewMask:
    """Return the new mask of the shard ``rect``, by a pass over its scores.

    Args:
        segment: the scores of all blocks of the shard.
        dirty: None if the shard has no dirty blocks.
    """
    count, device = grid_of(rect, block).blocks, segment.col_ids.device
    kept, unclean = BitWriter(count, device), BitWriter(count, device)
    # Packed chunk by chunk: flags take eight times as much memory as the mask.
    for start, bits in segment.chunks():
        removed = threshold.removes(segment, start, bits)
        kept.add(~removed)
        if dirty is not None:
            unclean.add(dirty(removed, bits))
    mask = BlockMask(rect, block, kept.close())
    return NewMask(mask, None if dirty is None else unclean.close())
