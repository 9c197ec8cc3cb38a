"""Exact k-th smallest score over all ranks.

Scores are non-negative float32, stored as their int32 bit patterns, which order alike; equal scores
are ordered by global block index. The k-th smallest (score, index) is found by narrowing: a
histogram of the leading bits is summed over ranks, the bucket that holds the k-th is kept, and the
next round counts its members only, by the next bits. Three rounds find the 31 bits of a score, for
all tables side by side in one message each; up to three more find the index where scores tie at the
threshold.

A :class:`Threshold` cuts exactly, however many scores tie, and makes the masks of its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking.device import NO_PLACE, count_within, on_host
from dist_sparse.masking.masks import BitWriter, BlockMask, pack, positions
from dist_sparse.masking.scores import (
    HISTOGRAM,
    KEPT,
    NOT_FINITE,
    Batch,
    Segment,
    bucket_counts,
    with_prefix,
)
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Rect, grid_of

# (shift, buckets) after the first round: 11 + 10 + 10 bits make the 31 of a score.
_ROUNDS = ((10, 1024), (0, 1024))

# An eighth of a segment's scores is few enough to copy; of a smaller segment, of so many.
_CHUNK = 1 << 19

# Bytes of flags of tied blocks whose indices are counted at a time.
_COUNTED = 1 << 15

# Which removed blocks may not be zero yet: those that do not score 0, or any; None is none.
Dirty = Literal["nonzero", "removed"] | None


@dataclass(frozen=True)
class Threshold:
    """Blocks that score less than ``bits`` are removed, and those that score the same up to the
    global index ``last``.

    Args:
        bits: the score, as int32.
        last: None is any index.
        removed: number of removed blocks over all ranks.
    """

    bits: int
    last: int | None
    removed: int = field(default=0, compare=False)

    @property
    def score(self) -> float | None:
        """The largest score that is removed; None where nothing or everything is."""
        if self in (NOTHING, EVERYTHING):
            return None
        return float(torch.tensor(self.bits, dtype=torch.int32).view(torch.float32))

    def removes(self, segment: Segment, start: int, bits: Tensor) -> Tensor:
        """Return removed flags, bool, of the chunk ``bits`` that starts at ``start`` of
        ``segment``."""
        ties = max(segment.places_upto(self.last) - start, 0)
        if ties >= bits.numel():
            return bits <= self.bits
        return torch.cat([bits[:ties] <= self.bits, bits[ties:] < self.bits])

    def removes_at(self, segment: Segment, places: Tensor, bits: Tensor) -> Tensor:
        """As :meth:`removes`, of the scores ``bits`` at flat ``places`` of ``segment``."""
        # As int64: a limit beyond int32 would wrap around.
        return bits < self.bits + (places.long() < segment.places_upto(self.last))


NOTHING = Threshold(bits=0, last=-1)
EVERYTHING = Threshold(bits=KEPT - 1, last=None)


class NewMask(NamedTuple):
    """The new mask of a shard, and as bits the removed blocks that may not be zero yet (None: only
    newly removed ones)."""

    mask: BlockMask
    dirty: Tensor | None


def mask_of_blocks(
    rect: Rect, block: Block, segment: Segment, threshold: Threshold, dirty: Dirty
) -> NewMask:
    """Return the new mask of the shard ``rect``, by a pass over its scores.

    Args:
        segment: the scores of all blocks of the shard.
    """
    count, device = grid_of(rect, block).blocks, segment.device
    kept, unclean = BitWriter(count, device), BitWriter(count, device)
    # Packed chunk by chunk: flags take eight times as much memory as the mask.
    for start, bits in segment.chunks():
        removed = threshold.removes(segment, start, bits)
        kept.add(~removed)
        if dirty is not None:
            unclean.add(removed if dirty == "removed" else removed & bits.to(torch.bool))
    mask = BlockMask(rect, block, kept.close())
    return NewMask(mask, None if dirty is None else unclean.close())


@dataclass
class Candidates:
    """The blocks of one table, the ``k`` smallest of which are removed.

    Args:
        name: of the table, for messages.
        k: number of blocks to remove.
        blocks: number of blocks of the whole table.
        segments: the scores that this rank knows; over all ranks every block is counted once.
        only_zeros: remove no block that scores more than 0, and none at all where all score 0.
    """

    name: str
    k: int
    blocks: int
    segments: list[Segment] = field(default_factory=list)
    only_zeros: bool = False


def select_smallest(
    candidates: Sequence[Candidates],
    group: Group,
    pool: Pool | None = None,
) -> list[Threshold]:
    """Return for every table the exact threshold of its ``k`` smallest blocks over all ranks.
    Collective over ``group``: every rank must call it. With a ``pool`` of the tables whose ``k``
    is not 0, ``k`` is the maximum.

    At most three all-reduces of 16, 8 and 8 KiB a table, and at most three more for tables that
    lose some of the blocks at the threshold, but not all. None of the sizes depends on the number
    of scores.

    Raises:
        ValueError: a score is not finite (on every rank; names the table).
    """
    thresholds = [NOTHING] * len(candidates)
    searches: dict[int, _ScoreSearch] = {}
    for i, table in enumerate(candidates):
        if table.k <= 0:
            continue
        # Only a pool can keep blocks of a table that it may remove as a whole.
        if pool or table.only_zeros or table.k < table.blocks:
            searches[i] = _ScoreSearch(table)
        else:
            thresholds[i] = replace(EVERYTHING, removed=table.k)
    if not searches:
        return thresholds
    _find_scores(list(searches.values()), group, pool)
    _split_ties([search for search in searches.values() if search.splits_ties], group)
    for i, search in searches.items():
        thresholds[i] = search.threshold()
    return thresholds


def _find_scores(searches: list[_ScoreSearch], group: Group, pool: Pool | None) -> None:
    """Find the score of every threshold. Collective."""
    counts = group.all_reduce(_first_histograms(searches))
    _refuse_not_finite(counts, searches)
    for search, zeros in zip(searches, counts[:, 0].tolist(), strict=True):
        if search.table.only_zeros:
            search.keep_others(zeros)
    if pool is not None:
        pool.searches = dict(zip(searches, pool.prices, strict=True))
    _descend(searches, counts, LEADING_SHIFT, pool)
    _narrow(searches, _ROUNDS, _next_histograms, group, pool)


def _split_ties(split: Sequence[_ScoreSearch], group: Group) -> None:
    """Find the last index removed at the threshold of tables that lose some of the tied blocks, but
    not all. Collective over ``group`` if there are any."""
    ties = [_TieSearch(search) for search in split]
    _find_ties(ties)
    most = max((search.table.blocks for search in split), default=1)
    _narrow(ties, _index_rounds(most), _histograms_of_ties, group)
    for search in ties:
        search.scores.last_index = search.last


def _narrow(
    searches: Sequence[_Search],
    rounds: Sequence[tuple[int, int]],
    count: Callable[[Any, int, int], Tensor],
    group: Group,
    pool: Pool | None = None,
) -> None:
    """Run rounds of all searches until all are done, which every rank knows."""
    for shift, buckets in rounds:
        if active := [search for search in searches if not search.done]:
            _descend(active, group.all_reduce(count(active, shift, buckets)), shift, pool)


class _Search:
    """Narrowing of one table: the leading bits of the k-th smallest key found so far, and how many
    of the keys that share them are wanted.

    Of scores, zeros have a bucket of their own in the first round: what was removed before scores
    0, so a threshold among them needs no further round.

    Args:
        left: number of keys wanted.

    Attributes:
        last: the largest key that is removed, once found.
        left: number of keys wanted of the ``inside`` keys of the last bucket.
        below: number of keys before them.
        done: all or nothing of what shares the prefix is wanted, or there are no more bits: no
            further round is needed.
        prefix: the bits found so far.
        shift: how many bits are not found yet.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self.last = self.inside = self.below = self.prefix = 0
        self.shift = 63
        self.done = False

    def descend(self, shift: int, buckets: int, bucket: int, below: int, inside: int) -> None:
        """Keep one bucket: ``below`` keys are before it, ``inside`` in it."""
        bucket -= buckets == HISTOGRAM  # whose first one is of zeros
        self.left -= below
        self.below += below
        self.inside, self.shift = inside, shift
        self.prefix = self.prefix * buckets + bucket
        # All bits below the prefix set: the whole bucket is removed, as far as is known.
        self.last = ((self.prefix + 1) << shift) - 1
        self.done = self.left == self.inside or shift == 0
        if self.prefix < 0:
            # The threshold is 0: there are no bits to find.
            self.prefix = 0
            self.last = 0
            self.done = True


class _ScoreSearch(_Search):
    """Search for the score of a table's threshold.

    Attributes:
        counted: the scores that this rank counts.
        last_index: the last index removed among the blocks that tie; None is all of them.
    """

    def __init__(self, table: Candidates) -> None:
        super().__init__(table.k)
        self.table = table
        self.counted = [segment for segment in table.segments if segment.counts]
        self.last_index: int | None = None
        # By segment, the scores that have the prefix, where they are few.
        self._few: dict[Segment, list[Tensor]] = {}

    def keep_others(self, zeros: int) -> None:
        """Remove none but ``zeros`` blocks that score 0."""
        # A table without any other score knows nothing: its record was lost, or never began.
        self.left = 0 if zeros == self.table.blocks else min(self.left, zeros)

    def histograms(self, segment: Segment, shift: int, buckets: int) -> Iterator[Tensor]:
        """Yield how many of a segment's scores that have the prefix fall into each bucket of the
        next bits, as parts to be added up: int64 ``(buckets,)``, on the device of the scores."""
        known = None
        if segment.count is not None:
            known = segment.count(self.prefix, self.shift, shift, buckets)
        if known is not None:
            yield known
        elif segment.on_cpu:
            yield self._count_on_cpu(segment, shift, buckets)
        else:
            low = self.prefix << self.shift
            for _, bits in segment.chunks():
                # Zeros have had a bucket of their own in the first round.
                scores = bits.masked_fill(bits == 0, -1) if low == 0 else bits
                yield count_within(scores, low, shift, buckets)

    def _count_on_cpu(self, segment: Segment, shift: int, buckets: int) -> Tensor:
        counts = torch.zeros(buckets, dtype=torch.int64)
        # Stored in the second round, unless that would take too much memory, and read in the third.
        stores = self.shift == LEADING_SHIFT and self._are_few(segment)
        stored = self._few.get(segment) or map(itemgetter(1), segment.chunks())
        self._few[segment] = []
        for bits in stored:
            inside = with_prefix(bits, self.prefix, self.shift)
            counts += bucket_counts(inside, shift, buckets)
            if stores:
                self._few[segment].append(inside)
        return counts

    def _are_few(self, segment: Segment) -> bool:
        """Whether a segment has few scores that share the leading bits found."""
        counts = segment.histogram
        return int(counts[1 + self.prefix]) * 8 <= max(int(counts.sum()), _CHUNK)

    @property
    def splits_ties(self) -> bool:
        """Whether some of the blocks at the threshold are removed, but not all."""
        return 0 < self.left < self.inside

    def threshold(self) -> Threshold:
        """Return the threshold, once it is found."""
        bits, last = self.last, self.last_index
        if self.left == 0 < self.inside:
            # The pool has reached its bytes below this score: all blocks that have it stay.
            bits, last = (bits - 1, None) if bits else (0, -1)
        return Threshold(bits, last, removed=self.below + self.left)


class _TieSearch(_Search):
    """Search for the last index that is removed, among the blocks that score exactly the threshold.

    Args:
        scores: the search that has found the threshold.

    Attributes:
        tied: where the ties of a segment are: a flat place, and flags of the blocks from there on.
        ids: the global indices of others.
    """

    def __init__(self, scores: _ScoreSearch) -> None:
        super().__init__(scores.left)
        self.scores = scores
        self.tied: list[tuple[Segment, int, Tensor]] = []
        self.ids: list[Tensor] = []

    def parts(self) -> Iterator[Tensor]:
        """Yield the global indices of the ties, int64 ``(n,)``."""
        yield from self.ids
        for segment, start, flags in self.tied:
            for part in torch.split(flags, _COUNTED):
                yield segment.ids(positions(part) + start)
                start += 8 * _COUNTED


def _find_ties(searches: Sequence[_TieSearch]) -> None:
    """Find the blocks that score exactly the thresholds. Waits once for those that kernels have
    listed, and once for others on a device."""
    segments = [(search, segment) for search in searches for segment in search.scores.counted]
    wanted: dict[Batch, dict[int, tuple[int, int]]] = {}
    for search, segment in segments:
        if segment.batch is not None:
            of_score = search.scores.last, search.scores.inside
            wanted.setdefault(segment.batch, {})[segment.number] = of_score
    listed: dict[tuple[object, int], Tensor] = {}
    for batch, ties in wanted.items():
        for number, places in batch.ties(ties).items():
            listed[batch, number] = places
    known = dict(zip(listed, on_host([*listed.values()]), strict=True))
    packed: list[tuple[_TieSearch, Segment, int, Tensor]] = []
    for search, segment in segments:
        if (found := known.get((segment.batch, segment.number))) is not None:
            search.ids.append(segment.ids(found[found < NO_PLACE].long()))
            continue
        # A bit for each block: any number of them may tie.
        for start, bits in segment.chunks():
            packed.append((search, segment, start, pack(bits == search.scores.last)))
    all_flags = on_host([flags for *_, flags in packed])
    for (search, segment, start, _), flags in zip(packed, all_flags, strict=True):
        search.tied.append((segment, start, flags))


def _histograms_of_ties(searches: Sequence[_TieSearch], shift: int, buckets: int) -> Tensor:
    """Return how many indices that have the prefix fall into each bucket of the next bits, int64
    ``(searches, buckets)``."""
    counts = torch.zeros(len(searches), buckets, dtype=torch.int64)
    for search, row in zip(searches, counts, strict=True):
        for ids in search.parts():
            row += bucket_counts(ids[(ids >> search.shift) == search.prefix], shift, buckets)
    return counts


def _first_histograms(searches: Sequence[_ScoreSearch]) -> Tensor:
    """Return the histograms of the first round, int64 ``(searches, HISTOGRAM)``."""
    parts: list[tuple[int, Tensor]] = []
    for row, search in enumerate(searches):
        parts += [(row, segment.histogram) for segment in search.counted]
    counts = _added(parts, len(searches), HISTOGRAM)
    # Something else decides about these blocks.
    counts[:, 1 + (KEPT >> LEADING_SHIFT)] = 0
    return counts


def _next_histograms(searches: Sequence[_ScoreSearch], shift: int, buckets: int) -> Tensor:
    """Return the histograms of a later round, int64 ``(searches, buckets)``: of scores that tables
    share in one pass."""
    parts: list[tuple[int, Tensor]] = []
    together: dict[Batch, dict[int, tuple[int, Segment]]] = {}
    for row, search in enumerate(searches):
        for segment in search.counted:
            if segment.batch is None:
                parts += [(row, part) for part in search.histograms(segment, shift, buckets)]
            else:
                together.setdefault(segment.batch, {})[segment.number] = row, segment
    before = searches[0].shift  # the same for all: they are in the same round
    for scores, counted in together.items():
        prefixes = {}
        for number, (row, segment) in counted.items():
            prefixes[number] = searches[row].prefix, segment.histogram
        found = scores.histograms(prefixes, before, shift, buckets)
        parts += zip((row for row, _ in counted.values()), found, strict=True)
    return _added(parts, len(searches), buckets)


def _added(parts: Sequence[tuple[int, Tensor]], searches: int, buckets: int) -> Tensor:
    """Return the sums of the parts of each search, by its number, int64 ``(searches, buckets)`` in
    CPU memory. One wait for all."""
    numbers = [number for number, _ in parts]
    read = on_host([part for _, part in parts])
    if numbers == [*range(searches)]:
        return torch.stack(read)
    total = torch.zeros(searches, buckets, dtype=torch.int64)
    for number, part in zip(numbers, read, strict=True):
        total[number] += part
    return total


def _descend(
    searches: Sequence[_Search], counts: Tensor, shift: int, pool: Pool | None = None
) -> None:
    """Keep one bucket of each search, by the histograms over all ranks. One host sync for all."""
    buckets = counts.shape[1]
    # The bucket of the k-th key: the first up to which there are at least as many as wanted.
    upto = counts.cumsum(1)
    wanted = torch.tensor([search.left for search in searches]).unsqueeze(1)
    bucket = (upto < wanted).sum(1, keepdim=True).clamp_(max=buckets - 1)
    if pool is not None:
        pool.limit(searches, upto, bucket)
    inside = counts.gather(1, bucket)
    chosen = torch.cat([bucket, upto.gather(1, bucket) - inside, inside], 1).tolist()
    for search, row in zip(searches, chosen, strict=True):
        search.descend(shift, buckets, *row)
    if pool is not None:
        # All scores of the first round's first bucket are 0.
        equal = shift == 0 or (buckets == HISTOGRAM and pool.bucket == 0)
        pool.share(last=equal)


def _refuse_not_finite(counts: Tensor, searches: Sequence[_ScoreSearch]) -> None:
    bad = counts[:, 1 + (NOT_FINITE >> LEADING_SHIFT) :].sum(1)
    for i in bad.nonzero().flatten().tolist():
        raise ValueError(
            f"Table {searches[i].table.name!r}: {int(bad[i])} block scores exceed float32 once"
            " their parts are added; must be finite."
        )


def _index_rounds(blocks: int) -> list[tuple[int, int]]:
    """Return shifts and bucket counts that find an index below ``blocks`` in the fewest rounds of
    2048 buckets, at most 3."""
    need = max(1, (blocks - 1).bit_length())
    rounds = min(3, -(-need // 11))
    width = -(-need // rounds)
    return [(width * turn, 1 << width) for turn in reversed(range(rounds))]


class Pool:
    """One selection over several tables: they lose ``need`` bytes together, wherever scores are
    smallest.

    Blocks are removed in the order of (score, table, global index) until the bytes are reached; a
    table at its own limit is passed over. Tables narrow their histograms side by side, and the pool
    finds in each round the bucket in which the bytes are reached, the same for all of its tables. A
    table that reaches its own limit before that bucket leaves the pool and goes on alone.

    Args:
        need: bytes to remove, at least 1; the last block may exceed it.
        prices: bytes of a block of each table.

    Attributes:
        searches: of the tables in the pool, with their prices.
        bucket: where the bytes were reached in the last round.
    """

    searches: dict[_Search, int]

    def __init__(self, need: int, prices: Sequence[int]) -> None:
        self._need, self.prices = need, prices
        self.bucket = 0

    def limit(self, asked: Sequence[_Search], upto: Tensor, buckets: Tensor) -> None:
        """Replace the buckets in which tables reach their own limits by the one in which the bytes
        are reached, if it comes first.

        Args:
            asked: the tables of this round, of the pool or not.
            upto: blocks up to and including each bucket, int64 ``(asked, buckets)``.
            buckets: int64 ``(asked, 1)``; changed in place.
        """
        rows = [row for row, search in enumerate(asked) if search in self.searches]
        if not rows:
            return
        prices = torch.tensor([self.searches[asked[row]] for row in rows]).unsqueeze(1)
        limits = torch.tensor([asked[row].left for row in rows]).unsqueeze(1)
        # Bytes removed up to and including each bucket; no table gives more than its limit.
        removed = (torch.minimum(upto[rows], limits) * prices).sum(0)
        # The last bucket if all tables together don't reach the bytes.
        self.bucket = min(int((removed < self._need).sum()), removed.numel() - 1)
        if self.bucket:
            self._need -= int(removed[self.bucket - 1])
        for row, bucket in zip(rows, buckets[rows].flatten().tolist(), strict=True):
            if bucket < self.bucket:
                del self.searches[asked[row]]
        buckets[rows] = buckets[rows].clamp(max=self.bucket)

    def share(self, last: bool) -> None:
        """Take what is still needed from the blocks inside the bucket, after each round: from all,
        or in the ``last`` round, when their scores are equal, from the first tables."""
        most = {search: min(search.left, search.inside) for search in self.searches}
        total = sum(blocks * self.searches[search] for search, blocks in most.items())
        if not last and total > self._need:
            # Another round must tell them apart, even for a table that loses all of its own.
            for search in self.searches:
                search.done = False
            return
        for search, price in self.searches.items():
            # Rounded up: the last block may exceed the bytes. Nothing once they are reached.
            search.left = max(min(most[search], -(-self._need // price)), 0)
            self._need -= search.left * price
            search.done = last or search.left == search.inside
        self.searches = {}
