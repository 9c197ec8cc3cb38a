"""Scores of which few change at a time, indexed so that a selection does not pass over all of them.

Of the three rounds of a selection, the counts of the first two are corrected for the scores that
change; the third, ties and the blocks between two thresholds need only the scores near the
threshold, whose places are known. What is not known is found by a pass over all scores, and kept
while it is used.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.segments import first_histogram
from dist_sparse.records import LEADING_SHIFT

__all__ = ["IndexedScores"]

_CHUNK: Final = 1 << 18
"""Scores looked at together: they stay in the cache."""

_SAMPLE: Final = 1 << 12
"""Scores from which the range of those near the threshold is estimated."""

_MARGIN: Final = 16
"""To each side of the threshold, one score in so many is near it."""

_MANY: Final = 4
"""If one score in so many is near the threshold, a pass over all of them is as quick."""


class IndexedScores:
    """Scores of the blocks of one shard, on a CPU.

    Args:
        bits: float32 scores as int32, ``(rows, block columns)``; changed by :meth:`replace` alone.
        histogram: of all of them, int64 ``(HISTOGRAM,)``; likewise.
    """

    def __init__(self, bits: Tensor, histogram: Tensor) -> None:
        self.bits, self.histogram = bits, histogram
        self._bucket: _Bucket | None = None
        self._near: _Near | None = None
        self._used = False

    def replace(self, places: Tensor, new: Tensor) -> None:
        """Set some scores.

        Args:
            places: flat, int64 ``(n,)``, each once.
            new: int32 ``(n,)``.
        """
        old = self.at(places)
        self.histogram += first_histogram(new) - first_histogram(old)
        self.bits.view(-1).index_copy_(0, places, new)
        if not self._used:
            self._bucket = self._near = None
        if self._bucket is not None:
            self._bucket.counts.add_(_next_counts(new, self._bucket)).sub_(
                _next_counts(old, self._bucket)
            )
        if self._near is not None:
            low, high, near = self._near
            entering = _within(new, low, high) & ~_within(old, low, high)
            near = near.masked_select(_within(self.at(near), low, high))
            near = torch.cat([near, places.masked_select(entering).to(near.dtype)])
            self._near = (
                _Near(low, high, near) if near.numel() * _MANY < self.bits.numel() else None
            )
        self._used = False

    def at(self, places: Tensor) -> Tensor:
        """Return the scores at flat ``places``, int32 ``(n,)``."""
        return self.bits.view(-1).index_select(0, places)

    def counts(self, prefix: int, before: int, shift: int, buckets: int) -> Tensor | None:
        """Return how many of the scores other than 0 that have the prefix (all bits from ``before``
        on) fall into each bucket of the next bits, int64 ``(buckets,)``; None if a pass over all
        scores is as quick."""
        if before == LEADING_SHIFT:
            if self._bucket is None or self._bucket[:3] != (prefix, shift, buckets):
                self._bucket = _Bucket(
                    prefix, shift, buckets, torch.zeros(buckets, dtype=torch.int64)
                )
                for part in torch.split(self.bits.view(-1), _CHUNK):
                    self._bucket.counts.add_(_next_counts(part, self._bucket))
            self._used = True
            return self._bucket.counts
        places = self.within(max(1, prefix << before), ((prefix + 1) << before) - 1)
        return (
            None
            if places is None
            else torch.bincount((self.at(places) >> shift) & (buckets - 1), minlength=buckets)
        )

    def within(self, least: int, most: int) -> Tensor | None:
        """Return the flat places of the scores from ``least`` to ``most``, int32 or int64 ``(n,)``,
        in no order; None if there are so many that a pass over all scores is as quick."""
        near = self._near
        if near is None or least <= near.low or most > near.high:
            near = self._find_near(least, most)
            if near is None:
                return None
        self._near, self._used = near, True
        return near.places.masked_select(_within(self.at(near.places), least - 1, most))

    def _find_near(self, least: int, most: int) -> _Near | None:
        flat = self.bits.view(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].sort().values
        margin = len(sample) // _MARGIN
        first, end = torch.searchsorted(
            sample, torch.tensor([least, most + 1], dtype=torch.int32)
        ).tolist()
        if (end - first) * _MANY > len(sample):
            return None
        low = min(least - 1, int(sample[max(0, first - margin)]))
        high = max(most, int(sample[min(len(sample) - 1, end + margin)]))
        found = [
            _within(part, low, high).nonzero().view(-1).add_(i * _CHUNK)
            for i, part in enumerate(torch.split(flat, _CHUNK))
        ]
        places = torch.cat(found)
        if places.numel() * _MANY >= flat.numel():
            return None
        return _Near(low, high, places.to(torch.int32) if flat.numel() < 1 << 31 else places)


class _Bucket(NamedTuple):
    """The second round: how many scores of one bucket of the first fall into each bucket of the
    next bits."""

    prefix: int
    shift: int
    buckets: int
    counts: Tensor


class _Near(NamedTuple):
    """The flat places of the scores above ``low`` and up to ``high``, in no order."""

    low: int
    high: int
    places: Tensor


def _next_counts(bits: Tensor, bucket: _Bucket) -> Tensor:
    inside = bits[(bits >> LEADING_SHIFT).eq_(bucket.prefix).to(torch.bool)]
    if bucket.prefix == 0:
        inside = inside[inside != 0]  # zeros have a bucket of their own
    return torch.bincount((inside >> bucket.shift) & (bucket.buckets - 1), minlength=bucket.buckets)


def _within(bits: Tensor, low: int, high: int) -> Tensor:
    return (bits > low).logical_and_(bits <= high)
