"""Score histograms of a run: one per table, chosen by :class:`Latest` for writer and reader alike.

A log of all of them would grow by 1 to 2 KiB per table and mask update, and most updates change
little.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dist_sparse.records import LEADING_SHIFT, MaskChange

__all__ = ["Latest", "Scored", "bucket_of", "edge_of", "much", "scored"]

_MUCH = 0.01
"""Share of blocks that a mask update must have pruned, blocks that scored 0 not counted, to be
shown."""

_LARGEST = 0x7F7FFFFF
"""Bits of the largest finite float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Histogram of the scores of a table's blocks before a mask update.

    Args:
        step: training step.
        name: of the table.
        threshold: largest score that was pruned.
        blocks: number of blocks of the mask.
        removed_blocks: how many of them are pruned after the update.
        zeros: number of blocks that scored 0.
        first: bucket of the smallest score above 0 (:func:`bucket_of`).
        counts: blocks in that bucket and the following ones, up to the last non-empty one; empty if
            all scored 0.
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
        """Rank by how much was pruned, blocks that scored 0 not counted: 2 for at least 1% of the
        blocks, 1 for any, 0 for none."""
        if self.removed_blocks - self.zeros >= much(self.blocks):
            return 2
        return 1 if self.threshold > 0 else 0

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values: ``first`` as ``low``, the smallest score of that bucket."""
        # `low` is a score: the log is readable without knowing the buckets.
        fields = {
            name: getattr(self, name)
            for name in ("step", "name", "threshold", "blocks", "removed_blocks")
        }
        return fields | {
            "zeros": self.zeros,
            "low": edge_of(self.first),
            "counts": list(self.counts),
        }


class Latest:
    """One histogram per table: of the last update that pruned at least 1% of its blocks, blocks
    that scored 0 not counted; else of the last that pruned any; else the last."""

    def __init__(self) -> None:
        self.of: dict[str, Scored] = {}
        """By table name."""

    def take(self, new: Scored) -> bool:
        """Keep ``new`` if it is worth showing; return whether it was kept."""
        known = self.of.get(new.name)
        # An update that prunes nothing new has scores that decided nothing.
        if known is not None and new.weight < known.weight:
            return False
        self.of[new.name] = new
        return True


def much(blocks: int) -> float:
    """Return the number of blocks that are worth a histogram when they are pruned at once."""
    return _MUCH * blocks


def scored(step: int, change: MaskChange, scores: Iterable[tuple[float, int]]) -> Scored | None:
    """Return the histogram of a mask change from its ``(smallest score of a bucket, blocks)``
    pairs; None without a threshold or without scores."""
    zeros, counts = 0, dict[int, int]()
    for edge, number in scores:
        if edge > 0:
            counts[bucket_of(edge)] = number
        else:
            zeros += number
    # No score decided: nothing or everything was pruned.
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
        # Dense: most buckets between the ends are not empty.
        counts=tuple(counts.get(i, 0) for i in range(first, max(counts, default=-1) + 1)),
    )


def bucket_of(score: float) -> int:
    """Return the leading bits of a score > 0 as float32: eight buckets per octave, ordered like the
    scores.

    Raises:
        ValueError: ``score`` is not positive and finite, or not in the range of float32.
    """
    if not 0 < score < math.inf:
        raise ValueError(f"{score!r} is not a positive score")
    # The bits of positive floats are ordered as the floats are.
    try:
        return int(struct.unpack("<i", struct.pack("<f", score))[0]) >> LEADING_SHIFT
    except OverflowError as error:
        raise ValueError(f"{score!r} is not in the range of float32") from error


def edge_of(bucket: int) -> float:
    """Return the smallest score of a bucket, clamped to positive finite float32, so that it has a
    logarithm."""
    # The ends: a bucket below the smallest float, or above the largest, has no score.
    bits = min(max(bucket << LEADING_SHIFT, 1), _LARGEST)
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
