"""Incrementally updated scores, indexed near the threshold.

Of the three rounds of a selection, the counts of the first two are corrected for the scores that
change; the third, ties and the blocks between two thresholds need only the scores near the
threshold, whose places are known. What is not known is found by a pass over all scores, and kept
while it is used.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.segments import bucket_counts, first_histogram
from dist_sparse.records import LEADING_SHIFT

# Scores read at a time: they stay in the cache.
_CHUNK: Final = 1 << 18

# Scores from which the range of those near the threshold is estimated.
_SAMPLE: Final = 1 << 12

# To each side of the threshold, one score in so many is near it.
_MARGIN: Final = 16

# If one score in so many is near the threshold, a pass over all of them is as quick.
_MANY: Final = 4


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
            # No selection has asked since the last change: to update them costs more than it saves.
            self._bucket = self._near = None
        self._used = False
        if self._bucket is not None:
            self._bucket.counts.add_(self._bucket.count_of(new)).sub_(self._bucket.count_of(old))
        if self._near is not None:
            self._near = self._moved(self._near, places, old, new)

    def at(self, places: Tensor) -> Tensor:
        """Return the scores at flat ``places``, int32 ``(n,)``."""
        return self.bits.view(-1).index_select(0, places)

    def counts(self, prefix: int, before: int, shift: int, buckets: int) -> Tensor | None:
        """Return how many of the scores other than 0 that have the prefix (all bits from ``before``
        on) fall into each bucket of the next bits, int64 ``(buckets,)``; None if a pass over all
        scores is as quick."""
        if before == LEADING_SHIFT:
            return self._second_round(prefix, shift, buckets)
        # Zeros have a bucket of their own in the first round.
        places = self.within(max(1, prefix << before), ((prefix + 1) << before) - 1)
        return None if places is None else bucket_counts(self.at(places), shift, buckets)

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

    def _second_round(self, prefix: int, shift: int, buckets: int) -> Tensor:
        bucket = self._bucket
        if bucket is None or bucket[:3] != (prefix, shift, buckets):
            bucket = _Bucket(prefix, shift, buckets, torch.zeros(buckets, dtype=torch.int64))
            for part in torch.split(self.bits.view(-1), _CHUNK):
                bucket.counts.add_(bucket.count_of(part))
        self._bucket, self._used = bucket, True
        return bucket.counts

    def _moved(self, near: _Near, places: Tensor, old: Tensor, new: Tensor) -> _Near | None:
        """Return ``near`` once some scores have changed; None if it holds too many now."""
        low, high, known = near
        entering = _within(new, low, high) & ~_within(old, low, high)
        staying = known.masked_select(_within(self.at(known), low, high))
        found = torch.cat([staying, places.masked_select(entering).to(known.dtype)])
        return _Near(low, high, found) if self._is_few(found) else None

    def _find_near(self, least: int, most: int) -> _Near | None:
        """Return the scores from ``least`` to ``most`` and some around them; None for too many."""
        flat = self.bits.view(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].sort().values
        margin = len(sample) // _MARGIN
        ends = torch.tensor([least, most + 1], dtype=torch.int32)
        first, end = torch.searchsorted(sample, ends).tolist()
        if (end - first) * _MANY > len(sample):
            return None
        low = min(least - 1, int(sample[max(0, first - margin)]))
        high = max(most, int(sample[min(len(sample) - 1, end + margin)]))
        found = []
        for i, part in enumerate(torch.split(flat, _CHUNK)):
            found.append(_within(part, low, high).nonzero().view(-1).add_(i * _CHUNK))
        places = torch.cat(found)
        if not self._is_few(places):
            return None
        return _Near(low, high, places.to(torch.int32) if flat.numel() < 1 << 31 else places)

    def _is_few(self, places: Tensor) -> bool:
        return places.numel() * _MANY < self.bits.numel()


class _Bucket(NamedTuple):
    """The second round: how many scores of one bucket of the first fall into each bucket of the
    next bits."""

    prefix: int
    shift: int
    buckets: int
    counts: Tensor

    def count_of(self, bits: Tensor) -> Tensor:
        """Return how many of some scores are counted in each bucket."""
        inside = bits[(bits >> LEADING_SHIFT).eq_(self.prefix).to(torch.bool)]
        if self.prefix == 0:
            inside = inside[inside != 0]  # zeros have a bucket of their own
        return bucket_counts(inside, self.shift, self.buckets)


class _Near(NamedTuple):
    """The flat places of the scores above ``low`` and up to ``high``, in no order."""

    low: int
    high: int
    places: Tensor


def _within(bits: Tensor, low: int, high: int) -> Tensor:
    return (bits > low).logical_and_(bits <= high)
