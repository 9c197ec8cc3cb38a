"""Exact k-th smallest score over all ranks.

Scores are non-negative float32. Their int32 bit patterns sort in the same order, and are what this
module compares. Equal scores are ordered by global block index.

The k-th smallest (score, index) is found by a radix search. A histogram of the leading bits is
summed over ranks, the bucket that holds the k-th score is kept, and the next round counts only the
scores in that bucket, by their next bits. Three rounds find the 31 bits of a score. Up to three
more find the block index where scores tie at the threshold. Each round is one message for all
tables.

Where counting takes a pass over all weights, the first histogram is of a sample of the scores. It
tells the bucket that probably holds the k-th score, and one more message has the exact counts below
it and in it. If the sample has misled, the next bucket follows, and then the exact histogram.

A :class:`Threshold` is exact, however many scores tie, and makes the masks of its table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking.device import NO_PLACE, count_within, on_host, with_one_retry
from dist_sparse.masking.masks import BitWriter, BlockMask, pack, positions
from dist_sparse.masking.pool import Limited, Pool
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

# Scores in the threshold's bucket are copied, to spare the third round a pass over all scores, if
# they are at most an eighth of the segment, or an eighth of this many.
_CHUNK = 1 << 19

# Bytes of packed tie flags that are expanded to int64 indices at a time: 64 bytes of indices for
# each byte of flags.
_EXPANDED = 1 << 15

# Which removed blocks may hold weights other than zero: the blocks with a score above 0, or any.
# None: none of the blocks removed before.
Dirty = Literal["nonzero", "removed"] | None


@dataclass(frozen=True)
class Threshold:
    """The largest (score, global block index) that is removed.

    Args:
        bits: the score, as int32. Blocks with a smaller score are removed.
        last: among blocks with this score, the last global index that is removed; None removes all
            of them.
        removed: number of removed blocks over all ranks.
    """

    bits: int
    last: int | None
    removed: int = field(default=0, compare=False)

    @property
    def score(self) -> float | None:
        """The largest score that is removed; None if nothing or everything is removed."""
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
        """Like :meth:`removes`, for the scores ``bits`` at flat ``places`` of ``segment``."""
        # Adding the flag makes `<` a `<=` for places before the limit. Places as int64, because
        # places_upto() may return more than int32 holds.
        return bits < self.bits + (places.long() < segment.places_upto(self.last))


NOTHING = Threshold(bits=0, last=-1)
EVERYTHING = Threshold(bits=KEPT - 1, last=None)


class NewMask(NamedTuple):
    """The new mask of a shard.

    Args:
        mask: its bits, 1 = kept.
        dirty: packed like the mask, the removed blocks that may hold weights other than zero
            besides the newly removed ones; None if there are no others.
    """

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
    # Packed chunk by chunk: the flags take eight times the memory of the mask.
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
        k: number of blocks to remove; in a pool, the maximum.
        blocks: number of blocks of the whole table.
        segments: this rank's scores. Over all ranks, every block is counted once.
        only_zeros: do not remove any block that scores more than 0, and none at all if all score 0.
        price: bytes that the table loses with each block, for a pool.
    """

    name: str
    k: int
    blocks: int
    segments: list[Segment] = field(default_factory=list)
    only_zeros: bool = False
    price: int = 0


def select_smallest(
    candidates: Sequence[Candidates], group: Group, pooled_bytes: int = 0
) -> list[Threshold]:
    """Return for every table the exact threshold of its ``k`` smallest blocks over all ranks.
    Collective over ``group``: every rank must call it.

    With ``pooled_bytes``, the tables whose ``k`` is not 0 form a pool: together they lose this many
    bytes, wherever scores are smallest.

    At most three all-reduces of 16, 8 and 8 KiB per table; one more of 16 KiB if tables are
    sampled, and up to two more if a sample has misled; and at most three more for tables that lose
    some of the blocks at the threshold, but not all. No size depends on the number of scores.

    Raises:
        ValueError: a score is not finite (on every rank; names the table).
    """
    thresholds = [NOTHING] * len(candidates)
    searches: dict[int, _ScoreSearch] = {}
    for i, table in enumerate(candidates):
        if table.k <= 0:
            continue
        # The whole table is removed without a search, except where ``k`` is only a maximum.
        if pooled_bytes or table.only_zeros or table.k < table.blocks:
            searches[i] = _ScoreSearch(table)
        else:
            thresholds[i] = replace(EVERYTHING, removed=table.k)
    if not searches:
        return thresholds
    _find_scores(list(searches.values()), group, pooled_bytes)
    _split_ties(searches.values(), group)
    for i, search in searches.items():
        thresholds[i] = search.threshold()
    return thresholds


def _find_scores(searches: list[_ScoreSearch], group: Group, pooled_bytes: int) -> None:
    """Find the score of every threshold. Collective over ``group``."""
    pool = Pool(pooled_bytes)
    if pooled_bytes:
        pool.prices = {search: search.table.price for search in searches}
    first = group.all_reduce(_first_histograms(searches))
    # The last column counts the blocks that samples stand for.
    counts, sampled = first[:, :HISTOGRAM], first[:, HISTOGRAM]
    if sampled.any():
        counts = _count_around(searches, counts, sampled, pool, group)
    if wrong := with_one_retry(lambda: _with_refused(searches, counts)):
        _refuse(wrong[0], group)
    for search, zeros in zip(searches, counts[:, 0].tolist(), strict=True):
        if search.table.only_zeros:
            search.want_only_zeros(zeros)
    _descend(searches, counts, LEADING_SHIFT, pool)
    _narrow(searches, _ROUNDS, _next_histograms, group, pool)


def _count_around(
    searches: Sequence[_ScoreSearch], counts: Tensor, sampled: Tensor, pool: Pool, group: Group
) -> Tensor:
    """Return histograms over all ranks that are exact where the thresholds are. Collective over
    ``group``.

    Args:
        counts: the first histograms over all ranks, int64 ``(searches, HISTOGRAM)``.
        sampled: how many blocks a sample stands for, int64 ``(searches,)``; 0 for exact histograms.
    """
    samples = counts
    guesses = with_one_retry(lambda: guessed_buckets(searches, counts, sampled, pool))
    exact = group.all_reduce(_histograms_around(searches, guesses))
    counts = torch.where(sampled.view(-1, 1) > 0, exact, counts)
    missed = with_one_retry(lambda: _missed(searches, counts, guesses, pool))
    if missed:
        # By chance, if the threshold is near the border of two buckets.
        nearer = {row: _next_sampled(samples[row], guesses[row], up) for row, up in missed.items()}
        found = group.all_reduce(_histograms_around(searches, nearer))
        counts[[*nearer]] = found[[*nearer]]
        guesses |= nearer
        missed = with_one_retry(lambda: _missed(searches, counts, guesses, pool))
    if missed:
        # In a pool, each table's bucket depends on the counts of the others.
        rows = [*guesses] if pool.prices else [*missed]
        counts[rows] = group.all_reduce(_exact_histograms([searches[row] for row in rows]))
    return counts


def guessed_buckets(
    searches: Sequence[_ScoreSearch], counts: Tensor, sampled: Tensor, pool: Pool
) -> dict[int, int]:
    """Return by the number of each sampled search the bucket that probably has its threshold."""
    scales = torch.where(sampled > 0, sampled.double() / counts.sum(1).clamp(min=1), 1.0)
    # As if the counts were exact. All ranks round the same numbers.
    estimates = (counts * scales.view(-1, 1)).round().long()
    buckets, _ = _next_buckets(searches, estimates, pool)
    found = {}
    for row in sampled.nonzero().flatten().tolist():
        # Bucket 0 has the zeros.
        found[row] = 0 if searches[row].table.only_zeros else buckets[row][0]
    return found


def _missed(
    searches: Sequence[_ScoreSearch], counts: Tensor, guesses: Mapping[int, int], pool: Pool
) -> dict[int, bool]:
    """Return the sampled searches whose thresholds are neither in the bucket that was guessed nor
    among the zeros, and whether they are above. Changes nothing."""
    buckets, _ = _next_buckets(searches, counts, pool)
    missed = {}
    for row, guess in guesses.items():
        known = searches[row].table.only_zeros or buckets[row][0] in (0, guess)
        if not known:
            missed[row] = buckets[row][0] > guess
    return missed


def _next_sampled(sample: Tensor, bucket: int, up: bool) -> int:
    """Return the next bucket above or below one of which a sample has scores, except zeros; the
    bucket next to it if there is none."""
    places = sample.nonzero().flatten().tolist()
    above = [place for place in places if place > bucket]
    below = [place for place in places if 0 < place < bucket]
    if up:
        return above[0] if above else bucket + 1
    return below[-1] if below else max(1, bucket - 1)


def _histograms_around(searches: Sequence[_ScoreSearch], guesses: Mapping[int, int]) -> Tensor:
    """Return :meth:`~dist_sparse.masking.scores.Batch.around` the buckets of ``guesses`` for these
    searches, int64 ``(searches, HISTOGRAM)``."""
    parts: list[tuple[int, Tensor]] = []
    rows_of: dict[Batch, list[int]] = {}
    segments: dict[Batch, list[Segment]] = {}
    buckets: dict[Batch, dict[int, int]] = {}
    for row, bucket in guesses.items():
        for segment in searches[row].counted:
            if segment.batch is None or not segment.sampled:
                parts.append((row, segment.histogram))
                continue
            rows_of.setdefault(segment.batch, []).append(row)
            segments.setdefault(segment.batch, []).append(segment)
            buckets.setdefault(segment.batch, {})[segment.number] = bucket
            if segment.sample is None:
                segment.sample = segment.histogram
    for batch, rows in rows_of.items():
        samples = {one.number: one.sample for one in segments[batch] if one.sample is not None}
        found = batch.around(buckets[batch], samples)
        parts += zip(rows, found, strict=True)
        for segment, counts in zip(segments[batch], found, strict=True):
            segment.histogram = counts
    return _summed(parts, len(searches), HISTOGRAM)


def _exact_histograms(searches: Sequence[_ScoreSearch]) -> Tensor:
    """Return the exact first histograms of sampled searches, int64 ``(searches, HISTOGRAM)``."""
    parts: list[tuple[int, Segment]] = []
    segments: dict[Batch, list[Segment]] = {}
    for row, search in enumerate(searches):
        for segment in search.counted:
            parts.append((row, segment))
            if segment.batch is not None and segment.sampled:
                segments.setdefault(segment.batch, []).append(segment)
    for batch, of_batch in segments.items():
        found = batch.exact_histograms([segment.number for segment in of_batch])
        for segment, counts in zip(of_batch, on_host([found])[0], strict=True):
            segment.histogram = counts
    found_parts = [(row, segment.histogram) for row, segment in parts]
    return _summed(found_parts, len(searches), HISTOGRAM)


def _with_refused(
    searches: Sequence[_ScoreSearch], counts: Tensor
) -> list[tuple[_ScoreSearch, int]]:
    """Return the searches with scores that are not finite, and how many."""
    sums = counts[:, 1 + (NOT_FINITE >> LEADING_SHIFT) :].sum(1).tolist()
    refused = []
    for search, count in zip(searches, sums, strict=True):
        if count:
            refused.append((search, count))
    return refused


def _refuse(wrong: tuple[_ScoreSearch, int], group: Group) -> None:
    """Raise a ValueError for a table with scores that are not finite. Collective over ``group``."""
    search, count = wrong
    with group.agreeing("step()"):
        # All scores of a sampled table are read only now. The rank that has the score names it.
        for segment in search.counted:
            if segment.find_refused is not None:
                segment.find_refused()
    raise ValueError(
        f"Table {search.table.name!r}: {count} block scores exceed float32 once their parts are"
        " added; must be finite."
    )


def _split_ties(searches: Collection[_ScoreSearch], group: Group) -> None:
    """Find the last index removed at the threshold of tables that lose some of the tied blocks, but
    not all. Collective over ``group`` if there are such tables, which every rank knows."""
    ties = [_TieSearch(search) for search in searches if 0 < search.left < search.inside]
    if not ties:
        return
    _find_ties(ties)
    most = max((search.scores.table.blocks for search in ties), default=1)
    _narrow(ties, _index_rounds(most), _histograms_of_ties, group, Pool(0))
    for search in ties:
        search.scores.last_index = search.last


def _narrow(
    searches: Sequence[_Search],
    rounds: Sequence[tuple[int, int]],
    count: Callable[[Any, int, int], Tensor],
    group: Group,
    pool: Pool,
) -> None:
    """Run rounds until all searches are done. Collective over ``group``."""
    for shift, buckets in rounds:
        # The same on every rank: all see the same sums, so none waits for a round of the others.
        if active := [search for search in searches if not search.done]:
            _descend(active, group.all_reduce(count(active, shift, buckets)), shift, pool)


class _Search:
    """Radix search of one table: the leading bits of the k-th smallest key found so far, and how
    many of the keys with these bits are removed. Keys are scores, or indices of tied blocks.

    In the first round of scores, zeros have their own bucket. Blocks that were removed before score
    0, so a threshold among them is common, and needs no further round.

    Args:
        left: number of keys to remove.

    Attributes:
        last: the largest key that is removed, once found.
        left: number of keys to remove of the ``inside`` keys in the last bucket.
        below: number of keys in smaller buckets, which are all removed.
        done: no further round is needed: all keys in the bucket are removed, or none, or there are
            no more bits.
        prefix: the bits found so far.
        shift: number of bits not found yet.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self.last = self.inside = self.below = self.prefix = 0
        self.shift = 63
        self.done = False

    def descend(self, shift: int, buckets: int, bucket: int, below: int, inside: int) -> None:
        """Continue in one bucket: ``below`` keys are in smaller ones, ``inside`` in it."""
        # The first bucket of a score histogram holds the zeros; the others count from 0.
        if buckets == HISTOGRAM:
            bucket -= 1
        self.left -= below
        self.below += below
        self.inside, self.shift = inside, shift
        self.prefix = self.prefix * buckets + bucket
        # The largest key of the bucket. If all of the bucket is removed, it is the threshold.
        self.last = ((self.prefix + 1) << shift) - 1
        self.done = self.left == self.inside or shift == 0
        if self.prefix < 0:
            # The bucket of zeros: the threshold is 0, and there are no bits to find.
            self.prefix = 0
            self.last = 0
            self.done = True


class _ScoreSearch(_Search):
    """Search for the score of a table's threshold.

    Attributes:
        counted: the segments that this rank counts; replicas are counted by another.
        last_index: the last index removed among the blocks that tie; None is all of them.
    """

    def __init__(self, table: Candidates) -> None:
        super().__init__(table.k)
        self.table = table
        self.counted = [segment for segment in table.segments if segment.counts]
        self.last_index: int | None = None
        # Copies of the scores in the bucket, by segment, if they are few.
        self._copied: dict[Segment, list[Tensor]] = {}

    def want_only_zeros(self, zeros: int) -> None:
        """Remove at most the ``zeros`` blocks that score 0."""
        # If all blocks score 0, nothing was recorded (a lost or new optimizer state). Removing the
        # whole table would be wrong.
        self.left = 0 if zeros == self.table.blocks else min(self.left, zeros)

    def histograms(self, segment: Segment, shift: int, buckets: int) -> Iterator[Tensor]:
        """Yield how many of a segment's scores that have the prefix fall into each bucket of the
        next bits, as parts to be added up: int64 ``(buckets,)``, on the device of the scores."""
        indexed = segment.count(self.prefix, self.shift, shift, buckets)
        if indexed is not None:
            yield indexed
        elif segment.on_cpu:
            yield self._count_on_cpu(segment, shift, buckets)
        else:
            low = self.prefix << self.shift
            for _, bits in segment.chunks():
                # Zeros were counted in their own bucket: -1 is not in any.
                scores = bits.masked_fill(bits == 0, -1) if low == 0 else bits
                yield count_within(scores, low, shift, buckets)

    def _count_on_cpu(self, segment: Segment, shift: int, buckets: int) -> Tensor:
        counts = torch.zeros(buckets, dtype=torch.int64)
        # The second round copies the scores in its bucket, if they are few; the third reads these.
        copies = False
        if self.shift == LEADING_SHIFT:
            sizes = segment.histogram
            copies = int(sizes[1 + self.prefix]) * 8 <= max(int(sizes.sum()), _CHUNK)
        pieces = self._copied.pop(segment, None) or (bits for _, bits in segment.chunks())
        for bits in pieces:
            inside = with_prefix(bits, self.prefix, self.shift)
            counts += bucket_counts(inside, shift, buckets)
            if copies:
                self._copied.setdefault(segment, []).append(inside)
        return counts

    def threshold(self) -> Threshold:
        """Return the threshold, once it is found."""
        bits, last = self.last, self.last_index
        if self.left == 0 and self.inside > 0:
            # The pool reaches its bytes without this score: every block with it stays. Below the
            # score 0 there is none, so last=-1 removes nothing.
            bits, last = (bits - 1, None) if bits else (0, -1)
        return Threshold(bits, last, removed=self.below + self.left)


class _TieSearch(_Search):
    """Search for the last index that is removed, among the blocks that score exactly the threshold.

    Args:
        scores: the search that has found the threshold.

    Attributes:
        ids: global indices of tied blocks, int64.
        flags: tied blocks that are flagged instead: a segment, a flat place, and a packed flag of
            each block from this place on.
    """

    def __init__(self, scores: _ScoreSearch) -> None:
        super().__init__(scores.left)
        self.scores = scores
        self.ids: list[Tensor] = []
        self.flags: list[tuple[Segment, int, Tensor]] = []

    def parts(self) -> Iterator[Tensor]:
        """Yield the global indices of the ties, int64 ``(n,)``."""
        yield from self.ids
        for segment, start, flags in self.flags:
            for part in torch.split(flags, _EXPANDED):
                yield segment.ids(positions(part) + start)
                start += 8 * _EXPANDED


def _find_ties(searches: Sequence[_TieSearch]) -> None:
    """Find the blocks that score exactly the thresholds. Waits for a device at most twice: for the
    blocks that kernels list, and for the flags of others."""
    listed = _listed_ties(searches)
    flagged: list[tuple[_TieSearch, Segment, int]] = []
    flags: list[Tensor] = []
    for search in searches:
        for segment in search.scores.counted:
            if segment in listed:
                places = listed[segment]
                search.ids.append(segment.ids(places[places < NO_PLACE].long()))
                continue
            # A bit for each block: any number of them may tie.
            for start, bits in segment.chunks():
                flagged.append((search, segment, start))
                flags.append(pack(bits == search.scores.last))
    for (search, segment, start), packed in zip(flagged, on_host(flags), strict=True):
        search.flags.append((segment, start, packed))


def _listed_ties(searches: Sequence[_TieSearch]) -> dict[Segment, Tensor]:
    """Return the flat places of tied blocks that a batch lists, in CPU memory, by segment. Places
    may be NO_PLACE."""
    found: dict[Segment, Tensor] = {}
    wanted: dict[Batch, dict[int, tuple[int, int]]] = {}
    segments: dict[tuple[Batch, int], Segment] = {}
    for search in searches:
        for segment in search.scores.counted:
            if segment.batch is not None:
                segments[segment.batch, segment.number] = segment
                ties = wanted.setdefault(segment.batch, {})
                ties[segment.number] = search.scores.last, search.scores.inside
    for batch, ties in wanted.items():
        for number, places in batch.ties(ties).items():
            found[segments[batch, number]] = places
    return dict(zip(found, on_host([*found.values()]), strict=True))


def _histograms_of_ties(searches: Sequence[_TieSearch], shift: int, buckets: int) -> Tensor:
    """Return how many indices that have the prefix fall into each bucket of the next bits, int64
    ``(searches, buckets)``."""
    counts = torch.zeros(len(searches), buckets, dtype=torch.int64)
    for search, row in zip(searches, counts, strict=True):
        for ids in search.parts():
            row += bucket_counts(ids[(ids >> search.shift) == search.prefix], shift, buckets)
    return counts


def _first_histograms(searches: Sequence[_ScoreSearch]) -> Tensor:
    """Return the histograms of the first round, and how many blocks a sample stands for: int64
    ``(searches, HISTOGRAM + 1)``."""
    parts: list[tuple[int, Tensor]] = []
    for row, search in enumerate(searches):
        parts += [(row, segment.histogram) for segment in search.counted]
    counts = _summed(parts, len(searches), HISTOGRAM)
    # Cut blocks, which count with the scores of their owner.
    counts[:, 1 + (KEPT >> LEADING_SHIFT)] = 0
    sampled = torch.zeros(len(searches), 1, dtype=torch.int64)
    for row, search in enumerate(searches):
        for segment in search.counted:
            sampled[row] += segment.sampled
    return torch.cat([counts, sampled], 1)


def _next_histograms(searches: Sequence[_ScoreSearch], shift: int, buckets: int) -> Tensor:
    """Return the histograms of a later round, int64 ``(searches, buckets)``. The tables of a batch
    are counted together."""
    parts: list[tuple[int, Tensor]] = []
    rows_of: dict[Batch, list[int]] = {}
    prefixes: dict[Batch, dict[int, tuple[int, Tensor]]] = {}
    for row, search in enumerate(searches):
        for segment in search.counted:
            if segment.batch is None:
                parts += [(row, part) for part in search.histograms(segment, shift, buckets)]
                continue
            rows_of.setdefault(segment.batch, []).append(row)
            of_batch = prefixes.setdefault(segment.batch, {})
            of_batch[segment.number] = search.prefix, segment.histogram
    # All searches are in the same round, so they have found equally many bits.
    before = searches[0].shift
    for batch, rows in rows_of.items():
        found = batch.histograms(prefixes[batch], before, shift, buckets)
        parts += zip(rows, found, strict=True)
    return _summed(parts, len(searches), buckets)


def _summed(parts: Sequence[tuple[int, Tensor]], searches: int, buckets: int) -> Tensor:
    """Return the sums of the parts of each search, by its number, int64 ``(searches, buckets)`` in
    CPU memory. Waits once for a device."""
    read = on_host([part for _, part in parts])
    total = torch.zeros(searches, buckets, dtype=torch.int64)
    for (number, _), part in zip(parts, read, strict=True):
        total[number] += part
    return total


def _descend(searches: Sequence[_Search], counts: Tensor, shift: int, pool: Pool) -> None:
    """Continue each search in one bucket, by the histograms ``(searches, buckets)`` over all
    ranks."""
    buckets = counts.shape[1]
    # The last round may be behind: only these searches know.
    chosen, limited = with_one_retry(lambda: _next_buckets(searches, counts, pool))
    pool.leave_at(limited)
    for search, row in zip(searches, chosen, strict=True):
        search.descend(shift, buckets, *row)
    # All scores in a bucket are equal after the last round, and in the bucket of zeros.
    equal = shift == 0 or (buckets == HISTOGRAM and pool.bucket == 0)
    pool.share(last=equal)


def _next_buckets(
    searches: Sequence[_Search], counts: Tensor, pool: Pool
) -> tuple[list[list[int]], Limited]:
    """Return for each search its bucket, the keys below it and in it; and the limit of the pool.
    Changes nothing."""
    buckets = counts.shape[1]
    # The bucket of the k-th key: the first one up to which there are at least as many as wanted.
    upto = counts.cumsum(1)
    wanted = torch.tensor([search.left for search in searches]).unsqueeze(1)
    bucket = (upto < wanted).sum(1, keepdim=True).clamp_(max=buckets - 1)
    limited = pool.limit(searches, upto, bucket)
    inside = counts.gather(1, bucket)
    return torch.cat([bucket, upto.gather(1, bucket) - inside, inside], 1).tolist(), limited


def _index_rounds(blocks: int) -> list[tuple[int, int]]:
    """Return shifts and bucket counts that find an index below ``blocks`` in the fewest rounds of
    2048 buckets, at most 3."""
    need = max(1, (blocks - 1).bit_length())
    rounds = min(3, -(-need // 11))
    width = -(-need // rounds)
    return [(width * turn, 1 << width) for turn in reversed(range(rounds))]
