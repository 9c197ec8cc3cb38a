"""Score cache of one shard: a mask update scores only the rows written since the last one.

For blocks one row high and at least 32 columns wide, in large shards whose every write is tracked.
Holds 4 bytes per block, the histogram of the scores, and the places of the scores near the
threshold while it moves. Scores and masks are the same, bit for bit, as if every row were scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dist_sparse.masking.device import ON_CPU
from dist_sparse.masking.masks import BlockMask, positions
from dist_sparse.masking.scores import (
    Segment,
    block_sums,
    block_widths,
    bucket_counts,
    first_histogram,
    refused,
    to_scores,
    with_prefix,
)
from dist_sparse.masking.selection import Dirty, NewMask, Threshold, mask_of_blocks
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Rect, Shard, grid_of

# How an element is scored. A callable takes some rows of a shard, `(n, columns)`, and their
# numbers in it, int64 `(n,)`, and returns element scores, float64 of the same shape.
RowMeasure = Literal["L1", "L2"] | Callable[[Tensor, Tensor], Tensor]

# If one row in this many was written, scoring all rows is as fast. If one score in this many is
# near the threshold, reading all scores is as fast.
_MANY = 4

# Scores read at a time: 1 MiB, which stays in the cache.
_CHUNK = 1 << 18

# Size of the sample from which the range near the threshold is estimated.
_SAMPLE = 1 << 12

# On each side of the threshold, one score in this many counts as near it.
_MARGIN = 16


class Written(Protocol):
    """The rows of a shard that may have been written since :meth:`clear`."""

    def rows(self) -> Tensor | None:
        """Return their numbers, int64 ``(n,)``, ascending; None if any row may have been
        written."""
        ...

    def add(self, rows: Tensor) -> None:
        """Add some, int64 ``(n,)``."""
        ...

    def clear(self) -> None:
        """Forget them."""
        ...


class ScoreCache:
    """Scores of the blocks of one shard.

    Args:
        written: the rows of the shard written since the last update.

    Attributes:
        written: see above.
        scores: of all blocks; changed by :meth:`update` alone.
        age: calls of :meth:`update` since every row was last scored.
    """

    scores: IndexedScores

    def __init__(self, written: Written) -> None:
        self.age = 0
        self.written = written
        # What the scores were computed from besides weights: if it differs, all are out of date.
        self._scored_for: Any = None
        # The last new mask with its threshold, and the places that were scored since.
        self._last: tuple[BlockMask, Threshold] | None = None
        self._changed: list[Tensor] = []

    def update(
        self,
        shard: Shard,
        caching: Caching,
        score_all: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        """Score the rows that were written. Score every row if any may have been written, or if
        something else has changed.

        Args:
            shard: live.
            caching: of the shard.
            score_all: returns the scores of all rows and their histogram. If it raises, nothing is
                kept.
        """
        table = caching.shape, caching.block
        scored_for = shard.tensor.data_ptr(), shard.rect, table, caching.version
        rows: Tensor | None = None
        if scored_for == self._scored_for and self.age + 1 < caching.full_every:
            rows = self.written.rows()
        # Until all is done: an error on the way may leave scores and counts that do not fit, and
        # score_all() may raise.
        self._scored_for = None
        if self._score(shard, caching, rows):
            self.age += 1
        else:
            self._last = None
            self._changed = []
            self.scores = IndexedScores(*score_all())
            self.age = 0
        self._scored_for = scored_for
        # Last: rows that were not scored must count as written in the next update too.
        self.written.clear()

    def fill(self, segment: Segment) -> None:
        """Give the scores to a segment."""
        bits = self.scores.bits
        for piece in torch.split(bits, max(1, _CHUNK // bits.shape[1])):
            segment.add(piece)
        segment.histogram, segment.count = self.scores.histogram, self.scores.counts

    def new_mask(
        self,
        rect: Rect,
        block: Block,
        segment: Segment,
        threshold: Threshold,
        dirty_blocks: Dirty,
    ) -> NewMask:
        """Return the new mask of the shard: the last one with the bits that may have changed, or
        from all scores where that is as fast.

        Args:
            rect, block: of the mask.
            segment: the scores.
            threshold: of the table.
            dirty_blocks: the removed blocks that may not be zero already.
        """
        if self.age > 0:
            # Every row was scored under the enforcer, which has zeroed all writes to removed ones.
            dirty_blocks = None
        mask = self._changed_mask(segment, threshold) if dirty_blocks is None else None
        dirty: Tensor | None = None
        if mask is None:
            mask, dirty = mask_of_blocks(rect, block, segment, threshold, dirty_blocks)
        if dirty is not None:
            # The mask update is about to zero them, which no backward reports.
            self.written.add(positions(dirty) // mask.grid.cols)
        self._last = mask, threshold
        self._changed = []
        return NewMask(mask, dirty)

    def _changed_mask(self, segment: Segment, threshold: Threshold) -> BlockMask | None:
        """Return the last mask with the bits that may have changed; the same object if none has.
        None if there is no last mask, or if a pass over all scores is as fast."""
        if self._last is None:
            return None
        mask, before = self._last
        changed = [*self._changed]
        if threshold != before:
            # Only blocks with scores between the two thresholds may flip. Blocks at the lower score
            # flip only if an index limit splits them; else they are left out, since at a threshold
            # of 0 they are many.
            low = min(before.bits, threshold.bits)
            least = low + 1
            for limit in (before, threshold):
                if limit.bits == low and limit.last is not None:
                    least = low
            between = self.scores.within(least, max(before.bits, threshold.bits))
            if between is None:
                return None
            changed.append(between)
        for places in changed:
            removed = threshold.removes_at(segment, places, self.scores.at(places))
            mask = mask.changed(places, ~removed)
        return mask

    def _score(self, shard: Shard, caching: Caching, rows: Tensor | None) -> bool:
        """Score these rows, and return True. Return False, with nothing changed, if ``rows`` is
        None (any row may have been written), if there are many, or if a score is negative or not
        finite: scoring all rows then reports it."""
        if rows is None or rows.numel() * _MANY >= shard.rect.rows:
            return False
        mask = caching.masks[shard.rect]
        zeros = rows[:0]
        by_norm = isinstance(caching.measure, str)
        if by_norm and mask.grid.cols == 1 and mask.block == caching.block:
            # Removed rows were zeroed before scoring, so they score 0 without being read.
            kept = mask.keeps(rows)
            rows, zeros = rows.masked_select(kept), rows.masked_select(~kept)
        cols = grid_of(shard.rect, caching.block).cols
        scored = _scores_of_rows(shard, caching, rows)
        new = torch.cat([torch.zeros(len(zeros), cols), *scored]).view(torch.int32).view(-1)
        if refused(new).any():
            return False
        first = torch.cat([zeros, rows]) * cols
        places = (first.unsqueeze(1) + torch.arange(cols)).view(-1)
        self.scores.replace(places, new)
        self._changed.append(places)
        if sum(map(len, self._changed)) * _MANY > self.scores.bits.numel():
            # Many scores changed since the last new mask: a pass over all of them is as fast.
            self._last = None
            self._changed = []
        return True


def _scores_of_rows(shard: Shard, caching: Caching, rows: Tensor) -> Iterator[Tensor]:
    """Yield the scores of some rows of a shard, float32 ``(n, block columns)``."""
    shape, block, measure = caching.shape, caching.block, caching.measure
    grid = grid_of(shard.rect, block)
    widths = block_widths(shape, block, torch.arange(grid.col, grid.col_end))
    for some in torch.split(rows, max(1, ON_CPU.elements // shard.rect.cols)):
        read = shard.tensor.detach().index_select(0, some)
        rect = Rect(0, shard.rect.col, *read.shape)
        if isinstance(measure, str):
            parts = block_sums(read, rect, block, measure)
        else:
            parts = block_sums(measure(read, some), rect, block, "given")
        for _, sums in parts:
            yield to_scores(sums, 0, widths, (len(sums), shape[1]), block)


@dataclass(frozen=True)
class Caching:
    """The score cache of one shard, and how its written rows are scored.

    Args:
        cache: the scores of the last update.
        measure: how elements are scored.
        version: everything else that the scores depend on. If it changes, every row is scored.
        shape: of the whole table.
        block: one row high.
        masks: the current masks of the table's shards. Removed elements are zero.
        full_every: at least one in this many updates scores every row.
    """

    cache: ScoreCache
    measure: RowMeasure
    version: object
    shape: tuple[int, int]
    block: Block
    masks: Mapping[Rect, BlockMask]
    full_every: int


class IndexedScores:
    """Incrementally updated scores of one shard's blocks, on a CPU, indexed near the threshold.

    A selection has three rounds. The counts of the first two are corrected when scores change. The
    third round, and the blocks between two thresholds, need only the scores near the threshold,
    whose places are indexed. What is missing is found by a pass over all scores, and kept as long
    as each selection uses it.

    Args:
        bits: float32 scores as int32, ``(rows, block columns)``; only :meth:`replace` changes it.
        histogram: of all scores, int64 ``(HISTOGRAM,)``; likewise.
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
            # No selection has read the index since the last change: correcting it would cost more
            # than it saves.
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
        scores is as fast."""
        if before == LEADING_SHIFT:
            bucket = self._bucket
            if bucket is None or bucket[:3] != (prefix, shift, buckets):
                bucket = _Bucket(prefix, shift, buckets, torch.zeros(buckets, dtype=torch.int64))
                for part in torch.split(self.bits.view(-1), _CHUNK):
                    bucket.counts.add_(bucket.count_of(part))
            self._bucket, self._used = bucket, True
            return bucket.counts
        # Zeros have a bucket of their own in the first round.
        places = self.within(max(1, prefix << before), ((prefix + 1) << before) - 1)
        return None if places is None else bucket_counts(self.at(places), shift, buckets)

    def within(self, least: int, most: int) -> Tensor | None:
        """Return the flat places of the scores from ``least`` to ``most``, int32 or int64 ``(n,)``,
        in no order; None if there are so many that a pass over all scores is as fast."""
        near = self._near
        # ``near`` has the scores above its lower end, and up to its upper end.
        if near is None or least <= near.low or most > near.high:
            near = self._find_near(least, most)
        if near is None:
            return None
        self._near, self._used = near, True
        return near.places.masked_select(_within(self.at(near.places), least - 1, most))

    def _moved(self, near: _Near, places: Tensor, old: Tensor, new: Tensor) -> _Near | None:
        """Return ``near`` corrected for some changed scores; None if it has too many now."""
        low, high, before = near
        entering = _within(new, low, high) & ~_within(old, low, high)
        staying = before.masked_select(_within(self.at(before), low, high))
        after = torch.cat([staying, places.masked_select(entering).to(before.dtype)])
        return _Near(low, high, after) if self._is_few(after) else None

    def _find_near(self, least: int, most: int) -> _Near | None:
        """Return the places of the scores from ``least`` to ``most`` and of some on both sides, so
        that the next thresholds are within too; None if they are too many."""
        flat = self.bits.view(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].sort().values
        margin = len(sample) // _MARGIN
        ends = torch.tensor([least, most + 1], dtype=torch.int32)
        first, end = torch.searchsorted(sample, ends).tolist()
        if (end - first) * _MANY > len(sample):
            return None
        low = min(least - 1, int(sample[max(0, first - margin)]))
        high = max(most, int(sample[min(len(sample) - 1, end + margin)]))
        parts = []
        for i, part in enumerate(torch.split(flat, _CHUNK)):
            parts.append(_within(part, low, high).nonzero().view(-1).add_(i * _CHUNK))
        places = torch.cat(parts)
        if not self._is_few(places):
            return None
        # int32 where it holds every place: half the memory.
        return _Near(low, high, places.to(torch.int32) if flat.numel() < 1 << 31 else places)

    def _is_few(self, places: Tensor) -> bool:
        return places.numel() * _MANY < self.bits.numel()


class _Bucket(NamedTuple):
    """Counts of the second round: the scores in one bucket of the first round, by their next
    bits."""

    prefix: int
    shift: int
    buckets: int
    counts: Tensor

    def count_of(self, bits: Tensor) -> Tensor:
        """Return how many of ``bits`` are counted in each bucket."""
        inside = with_prefix(bits, self.prefix, LEADING_SHIFT)
        return bucket_counts(inside, self.shift, self.buckets)


class _Near(NamedTuple):
    """The flat places of the scores above ``low`` and up to ``high``, in no order."""

    low: int
    high: int
    places: Tensor


def _within(bits: Tensor, low: int, high: int) -> Tensor:
    return (bits > low).logical_and_(bits <= high)
