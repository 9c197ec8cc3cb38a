"""Small tables, scored and masked together in fused passes.

A call of torch costs as much as the work on a table of a few kilobytes. So tables of one width, block and measure are
laid one below the other and scored, thresholded and packed as one; each gets the same bits as by itself, for blocks of
one row that no border cuts know nothing of their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.masks import BlockMask, pack
from dist_sparse.masking.scores import Measure, block_sums, block_widths, to_scores
from dist_sparse.masking.selection import KEPT, JointScores, Segment, Threshold
from dist_sparse.tables.shards import Block, Rect, Shard, ShardedData, grid_of

__all__ = ["Batch", "BatchedShard", "batches", "joint_masks"]

SMALL = 1 << 14
"""Elements of a shard that is batched."""

_BATCH = 1 << 20
"""Elements of a batch."""


def batches(shards: Sequence[tuple[ShardedData, Shard, Block, Measure]]) -> Iterator[list[int]]:
    """Group shards that can be scored together; yields their places in ``shards``. Others are in no group.

    The caller leaves out shards that a border cuts, and those that lose only some elements of a block.
    """
    groups: dict[Any, list[int]] = {}
    for i, (data, shard, block, measure) in enumerate(shards):
        rect = shard.rect
        if block[0] == 1 and block[1] > 1 and 0 < rect.numel <= SMALL and not callable(measure):
            key = (data.ranks, data.shape[1], rect.col, rect.cols, shard.tensor.device, data.dtype, block, measure)
            groups.setdefault(key, []).append(i)
    for group in groups.values():
        start = elements = 0
        for at, i in enumerate(group):
            elements += shards[i][1].rect.numel
            if elements > _BATCH:
                yield group[start:at]
                start, elements = at, shards[i][1].rect.numel
        yield group[start:]


@dataclass(eq=False)
class Batch:
    """Scores of several shards, one below the other.

    Args:
        scores: float32 ``(rows, block columns)``; rows between two shards are no block.
        starts: the first row of each shard; it fills whole bytes of flags.
        rows: how many rows each shard has.
        gaps: the rows between shards, int64.
    """

    scores: Tensor
    starts: list[int]
    rows: list[int]
    gaps: Tensor

    @staticmethod
    def of(shards: Sequence[Shard], width: int, block: Block, measure: Measure) -> Batch:
        """Score shards that :func:`batches` has put together, of tables of ``width`` columns."""
        first = shards[0]
        grid = grid_of(first.rect, block)
        whole_bytes = next(rows for rows in (1, 2, 4, 8) if rows * grid.cols % 8 == 0)
        filling = first.tensor.new_zeros(whole_bytes, first.rect.cols)
        parts: list[Tensor] = []
        starts: list[int] = []
        gaps: list[int] = []
        at = 0
        for shard in shards:
            rows, rest = shard.rect.rows, -shard.rect.rows % whole_bytes
            starts.append(at)
            parts.append(shard.tensor)
            if rest:
                parts.append(filling[:rest])
                gaps += range(at + rows, at + rows + rest)
            at += rows + rest
        everything = torch.cat(parts)
        rect = Rect(0, first.rect.col, at, first.rect.cols)
        device = everything.device
        widths = block_widths((at, width), block, torch.arange(grid.col, grid.col + grid.cols, device=device))
        scores = [
            to_scores(sums, start, widths, (at, width), block)
            for start, sums in block_sums(everything, rect, block, measure)
        ]
        together = scores[0] if len(scores) == 1 else torch.cat(scores)
        return Batch(
            together,
            starts,
            [shard.rect.rows for shard in shards],
            torch.tensor(gaps, dtype=torch.int64, device=device),
        )

    def part(self, i: int) -> Tensor:
        """The scores of one shard, a view ``(rows, block columns)``."""
        return self.scores[self.starts[i] : self.starts[i] + self.rows[i]]

    def fill(self, segments: Sequence[Segment]) -> None:
        """Hand the scores, which must be finite, to the segments of the shards, with their histograms."""
        bits = self.scores.view(torch.int32)
        bits.index_fill_(0, self.gaps, KEPT)
        ends = [*self.starts[1:], bits.shape[0]]
        sizes = [(end - start) * bits.shape[1] for start, end in zip(self.starts, ends, strict=True)]
        joint = JointScores(bits.view(-1), torch.tensor(sizes, device=bits.device))
        for i, (segment, histogram) in enumerate(zip(segments, joint.first_histograms().cpu(), strict=True)):
            segment.add(bits[self.starts[i] : self.starts[i] + self.rows[i]])
            segment.first_histogram = histogram
            segment.joint = (joint, i)


class BatchedShard(NamedTuple):
    """A shard that was scored together with others, and what decides about it."""

    rect: Rect
    block: Block
    segment: Segment
    threshold: Threshold


def joint_masks(joint: JointScores, shards: Sequence[BatchedShard]) -> list[tuple[BlockMask, Tensor]]:
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


def _number(shard: BatchedShard) -> int:
    assert shard.segment.joint is not None
    return shard.segment.joint[1]
