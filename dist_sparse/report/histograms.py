"""Which histograms of scores does a run keep, and how are they written?

Of each table one: a log that held all of them would grow by a kilobyte or two a table and due step, and most due steps
move hardly anything. :class:`Latest` chooses, for the writer and the reader alike.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dist_sparse.masking.selection import LEADING_SHIFT
from dist_sparse.sparsifiers.recorder import MaskChange

__all__ = ["Latest", "Scored", "bucket_of", "edge_of", "much", "scored"]

_MUCH = 0.01
"""The share of blocks that a due step must have removed, which had a score until then, to be worth looking at."""

_LARGEST = 0x7F7FFFFF
"""The bits of the largest finite float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """How the scores of a table's blocks lay before a due step moved its mask.

    Args:
        step: of the training.
        name: of the table.
        threshold: the largest score that was removed.
        blocks: of the mask.
        removed_blocks: after the due step.
        zeros: how many blocks scored 0.
        first: bucket of the smallest score above 0, see :func:`bucket_of`.
        counts: blocks in that bucket and the following ones, up to the last that has any; empty if all scored 0.
    """

    step: int
    name: str
    threshold: float
    blocks: int
    removed_blocks: int
    zeros: int
    first: int
    counts: Sequence[int]

    @property
    def weight(self) -> int:
        """How much the due step removed: 2 for at least 1 % of the blocks, those that scored 0 anyway not counted; 1
        for any such block; 0 for none."""
        if much(self.removed_blocks - self.zeros, self.blocks):
            return 2
        return 1 if self.threshold > 0 else 0

    def to_json(self) -> dict[str, Any]:
        """As it is written: ``first`` as ``low``, the smallest score of that bucket."""
        said = {name: getattr(self, name) for name in ("step", "name", "threshold", "blocks", "removed_blocks")}
        return said | {"zeros": self.zeros, "low": edge_of(self.first), "counts": list(self.counts)}


class Latest:
    """Of each table the last due step that removed at least 1 % of its blocks, those that scored 0 anyway not counted;
    else the last that removed any such; else the last."""

    def __init__(self) -> None:
        self.of: dict[str, Scored] = {}
        """By table."""

    def take(self, new: Scored) -> bool:
        """Whether ``new`` takes the place of what was known of its table."""
        known = self.of.get(new.name)
        if known is not None and new.weight < known.weight:
            return False
        self.of[new.name] = new
        return True


def much(removed: int, blocks: int) -> bool:
    """Whether a due step that removed so many of so many blocks is worth looking at: at least 1 %."""
    return removed >= _MUCH * blocks


def scored(step: int, change: MaskChange, scores: Iterable[tuple[float, int]]) -> Scored | None:
    """A change with a histogram as :class:`~dist_sparse.sparsifiers.recorder.MaskChange` has it; None where there is no
    threshold, or no score."""
    zeros, counts = 0, dict[int, int]()
    for edge, number in scores:
        if edge > 0:
            counts[bucket_of(edge)] = number
        else:
            zeros += number
    if change.threshold is None or not (zeros or counts):
        return None
    first = min(counts, default=0)
    return Scored(
        step=step,
        name=change.name,
        threshold=change.threshold,
        blocks=change.blocks,
        removed_blocks=change.removed_blocks,
        zeros=zeros,
        first=first,
        counts=tuple(counts.get(i, 0) for i in range(first, max(counts, default=-1) + 1)),
    )


def bucket_of(score: float) -> int:
    """The leading bits of a score > 0, as float32: eight buckets an octave, in the order of the scores.

    Raises:
        ValueError: it is not in float32's range.
    """
    if not 0 < score < math.inf:
        raise ValueError(f"{score!r} is no score")
    try:
        return int(struct.unpack("<i", struct.pack("<f", score))[0]) >> LEADING_SHIFT
    except OverflowError as error:
        raise ValueError(f"{score!r} is no float32") from error


def edge_of(bucket: int) -> float:
    """The smallest score of a bucket; neither 0 nor infinite, so that it has a logarithm."""
    bits = min(max(bucket << LEADING_SHIFT, 1), _LARGEST)
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
