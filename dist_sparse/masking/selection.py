"""Exact k-th smallest score over all ranks.

Scores are non-negative float32, stored as their int32 bit patterns, which order alike; equal scores
are ordered by global block index. The k-th smallest (score, index) is found by narrowing: a
histogram of the leading bits is summed over ranks, the bucket that holds the k-th is kept, and the
next round counts its members only, by the next bits. Three rounds find the 31 bits of a score, for
all tables side by side in one message each; up to three more find the index where scores tie at the
threshold over several ranks.

A :class:`Threshold` cuts exactly, however many scores tie, and makes the masks of its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.groups import Group, Rider
from dist_sparse.masking.device import count_within, on_host
from dist_sparse.masking.flat import FlatScores
from dist_sparse.masking.masks import BitWriter, BlockMask
from dist_sparse.masking.pools import Pool
from dist_sparse.masking.segments import (
    HISTOGRAM,
    KEPT,
    LEADING_BUCKETS,
    NOT_FINITE,
    Index,
    JointPart,
    JointScores,
    Segment,
    bucket_counts,
)
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Rect, grid_of

# (shift, buckets): 11 + 10 + 10 bits make the 31 of a score.
_ROUNDS = ((LEADING_SHIFT, LEADING_BUCKETS), (10, 1024), (0, 1024))

# Added to a bucket by each rank that has something in it: tells whether all ties are on one rank
# (2**44 blocks, 2**19 ranks fit).
_PRESENT = 1 << 44

# Up to so many tied scores are stored by their places.
_CHUNK = 1 << 19

Reduce = Callable[[Tensor], Tensor]

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


@dataclass
class Candidates:
    """The blocks of one table, the ``k`` smallest of which are removed.

    Args:
        name: of the table, for messages.
        k: number of blocks to remove.
        blocks: number of blocks of the whole table.
        segments: the scores that this rank knows; over all ranks every block is counted once.
        spread_replicas: some ranks hold replicas of only a part of the table, so a rank can't tell
            by itself whether it sees all ties.
        only_zeros: remove no block that scores more than 0, and none at all where all score 0.
    """

    name: str
    k: int
    blocks: int
    segments: list[Segment] = field(default_factory=list)
    spread_replicas: bool = False
    only_zeros: bool = False


def select_smallest(
    candidates: Sequence[Candidates],
    group: Group,
    rider: Rider | None = None,
    pool: Pool | None = None,
) -> list[Threshold]:
    """Return for every table the exact threshold of its ``k`` smallest blocks over all ranks.
    Collective over ``group``: every rank must call it. With a ``pool`` of the tables whose ``k``
    is not 0, ``k`` is the maximum.

    At most three all-reduces of 16, 8 and 8 KiB a table, and at most three more for tables whose
    threshold ties over ranks. None of the sizes depends on the number of scores. ``rider`` is
    carried by the first all-reduce, if any.

    Raises:
        ValueError: a score is not finite (on every rank; names the table).
    """
    thresholds: list[Threshold] = []
    searches: dict[int, _ScoreSearch] = {}
    for i, table in enumerate(candidates):
        thresholds.append(NOTHING if table.k <= 0 else EVERYTHING)
        # Only a pool can keep blocks of a table that it may remove as a whole.
        if table.k > 0 and (pool or table.only_zeros or table.k < table.blocks):
            searches[i] = _ScoreSearch(table)
    if not searches:
        return thresholds
    _find_scores(list(searches.values()), partial(group.all_reduce, rider=rider), pool)
    _split_ties([search for search in searches.values() if search.splits_ties], group)
    for i, search in searches.items():
        thresholds[i] = search.threshold()
    return thresholds


def _find_scores(searches: list[_ScoreSearch], reduce: Reduce, pool: Pool | None) -> None:
    """Find the score of every threshold. Collective."""
    if pool is not None:
        pool.join(searches)
    first, *others = _ROUNDS
    counts = _run_round(searches, *first, reduce, pool)
    _refuse_not_finite(counts, searches)
    for search, row in zip(searches, counts, strict=True):
        search.first_counts = row
    _narrow(searches, others, reduce, pool)


def _split_ties(split: Sequence[_ScoreSearch], group: Group) -> None:
    """Find the last index removed at the threshold of tables that lose some of the tied blocks, but
    not all. Collective over ``group`` where ties are on several ranks."""
    _find_ties_by_kernels(split)
    alone: list[_TieSearch] = []
    over_ranks: list[_TieSearch] = []
    for search in split:
        table, bits = search.table, search.last
        if search.inside <= _CHUNK:
            # Once, for up to three rounds and for the masks.
            for segment in table.segments:
                if segment.on_cpu:
                    segment.find_tied(bits)
        if search.holders > 1 or table.spread_replicas:
            counted = [segment for segment in table.segments if segment.counts]
            over_ranks.append(_TieSearch(search, counted))
        else:
            # One rank owns all that tie. It, and any replica of it, sees them all and finds the
            # order alone; the others see none, and remove none.
            alone.append(_TieSearch(search, table.segments))
    for searches, reduce in ((alone, _of_this_rank), (over_ranks, group.all_reduce)):
        most = max((ties.scores.table.blocks for ties in searches), default=1)
        _narrow(searches, _index_rounds(most), reduce)
    for ties in [*alone, *over_ranks]:
        ties.scores.last_index = ties.last


def _find_ties_by_kernels(split: Sequence[_ScoreSearch]) -> None:
    """Set the ``tied_ids`` of segments whose ties kernels can find."""
    places: dict[FlatScores, dict[int, int]] = {}
    found: dict[tuple[FlatScores, int], Segment] = {}
    for search in split:
        for segment in search.table.segments:
            joint = segment.joint
            if joint is None or not isinstance(joint.scores, FlatScores) or search.inside > _CHUNK:
                continue
            places.setdefault(joint.scores, {})[joint.number] = search.last
            found[joint.scores, joint.number] = segment
    most = max((search.inside for search in split if search.inside <= _CHUNK), default=0)
    for scores, thresholds in places.items():
        for number, ids in scores.ties(thresholds, most).items():
            found[scores, number].tied_ids = ids


def _of_this_rank(counts: Tensor) -> Tensor:
    return counts


class _Search:
    """Narrowing of one table: the leading bits of the k-th smallest key found so far, and how many
    of the keys that share them are wanted.

    Args:
        wanted: number of keys wanted.
        segments: where this rank's keys are.

    Attributes:
        last: the largest key that is removed, once found.
        left: number of keys wanted of the ``inside`` keys of the last bucket, which are on
            ``holders`` ranks.
        below: number of keys before them.
        done: all or nothing of what shares the prefix is wanted, or there are no more bits: no
            further round is needed.
        prefix: the bits found so far.
        shift: how many bits are not found yet; None before the first round.
        joint: where the keys are stored if they share a tensor with those of other tables.
    """

    def __init__(self, wanted: int, segments: Sequence[Segment]) -> None:
        self.left, self.last, self.inside, self.holders, self.below = wanted, 0, 0, 0, 0
        self._segments = segments
        self.done = False
        self.prefix = 0
        self.shift: int | None = None
        self.joint: JointPart | None = None
        self._few: list[Tensor] | None = None

    def keys(self, segment: Segment) -> Iterator[Tensor]:
        """Yield the keys in a segment on a CPU, in chunks; called once per round until few enough
        are left to be stored."""
        raise NotImplementedError

    def keys_on_device(self, segment: Segment) -> Iterator[Tensor]:
        """Yield numbers in a segment on an accelerator, in chunks, negative where they are no key:
        to leave these out would wait for the device."""
        raise NotImplementedError

    def histogram(self, shift: int, buckets: int) -> list[Tensor]:
        """Return how many keys that have the prefix fall into each bucket of the next bits, as
        parts to be added up: int64 ``(buckets,)``, each on the device of its keys."""
        parts = [self._count_on_cpu(shift, buckets)]
        for segment in self._segments:
            if not self.is_on_cpu(segment):
                parts += self._count_on_device(segment, shift, buckets)
        return parts

    def is_on_cpu(self, segment: Segment) -> bool:
        """Whether the host reads the keys in a segment without waiting for a device."""
        return segment.on_cpu

    def _count_on_device(self, segment: Segment, shift: int, buckets: int) -> Iterator[Tensor]:
        low = 0 if self.shift is None else self.prefix << self.shift
        total: Tensor | None = None
        for keys in self.keys_on_device(segment):
            counts = count_within(keys, low, shift, buckets)
            total = counts if total is None else total.add_(counts)
        if total is not None:
            yield total

    def _keys_on_cpu(self) -> Iterator[Tensor]:
        for segment in self._segments:
            if self.is_on_cpu(segment):
                yield from self.keys(segment)

    def _count_on_cpu(self, shift: int, buckets: int) -> Tensor:
        counts = torch.zeros(buckets, dtype=torch.int64)
        few: list[Tensor] | None = None if self._few else []
        seen = found = 0
        for chunk in self._few or self._keys_on_cpu():
            inside = self._with_prefix(chunk)
            counts += bucket_counts(inside, shift, buckets)
            seen, found = seen + chunk.numel(), found + inside.numel()
            if found * 8 > max(seen, _CHUNK):
                few = None  # storing them would take too much memory
            if few is not None:
                few.append(inside)
        self._few = few or self._few
        return counts

    def _with_prefix(self, keys: Tensor) -> Tensor:
        if self.shift is None:
            return keys
        # In place: the shifted keys are the only temporary of their size.
        return keys[(keys >> self.shift).eq_(self.prefix).to(torch.bool)]

    def limit(self, counts: Tensor) -> None:
        """Want fewer keys, by the counts of a round over all ranks. Here it does nothing."""

    def descend(
        self, shift: int, buckets: int, bucket: int, below: int, inside: int, holders: int
    ) -> None:
        """Keep one bucket: ``below`` keys are before it, ``inside`` in it, on ``holders`` ranks."""
        self.left -= below
        self.below += below
        self.inside, self.holders, self.shift = inside, holders, shift
        self.prefix = self.prefix * buckets + bucket
        # All bits below the prefix set: the whole bucket is removed, as far as is known.
        self.last = ((self.prefix + 1) << shift) - 1
        self.done = self.left == self.inside or shift == 0


class _ScoreSearch(_Search):
    """Search for the score of a table's threshold.

    Zeros have a bucket of their own in the first round: what was removed before scores 0, so a
    threshold among them needs no further round.

    Attributes:
        first_counts: the histogram of the first round over all ranks.
        last_index: the last index removed among the blocks that tie; None is all of them.
    """

    def __init__(self, table: Candidates) -> None:
        self.counted = [segment for segment in table.segments if segment.counts]
        super().__init__(table.k, self.counted)
        self.table = table
        self.last_index: int | None = None
        self.first_counts: Tensor | None = None
        self._index: Index | None = None
        # Of several segments the counts must be added up: they are read in chunks.
        if len(self.counted) == 1:
            self.joint, self._index = self.counted[0].joint, self.counted[0].index

    def keys(self, segment: Segment) -> Iterator[Tensor]:
        for _, bits in segment.chunks():
            yield bits

    def keys_on_device(self, segment: Segment) -> Iterator[Tensor]:
        for _, bits in segment.chunks():
            # Zeros have had a bucket of their own in the first round.
            yield bits.masked_fill(bits == 0, -1) if self.prefix == 0 else bits

    def histogram(self, shift: int, buckets: int) -> list[Tensor]:
        """As :meth:`_Search.histogram`; in the first round with one more bucket in front, for
        zeros."""
        if self.shift is None:
            return self._first_histogram()
        if self._index is not None:
            known = self._index.counts(self.prefix, self.shift, shift, buckets)
            if known is not None:
                return [known]
        return super().histogram(shift, buckets)

    def _first_histogram(self) -> list[Tensor]:
        if self.joint is not None:
            return [self.counted[0].histogram()]  # leaves KEPT out already
        parts = [torch.zeros(HISTOGRAM, dtype=torch.int64)]
        for segment in self.counted:
            counts = segment.histogram()
            if counts.is_cpu:
                parts[0] += counts
            else:
                parts.append(counts)
        for counts in parts:
            # Something else decides about these blocks.
            counts[1 + (KEPT >> LEADING_SHIFT)] = 0
        return parts

    def limit(self, counts: Tensor) -> None:
        if not self.table.only_zeros or self.shift is not None:
            return
        # In the first round zeros have a bucket of their own.
        zeros = int(counts[0])
        # A table without any other score knows nothing: its record was lost, or never began.
        self.left = 0 if zeros == self.table.blocks else min(self.left, zeros)

    def _with_prefix(self, keys: Tensor) -> Tensor:
        inside = super()._with_prefix(keys)
        return inside[inside != 0] if self.prefix == 0 else inside

    def descend(
        self, shift: int, buckets: int, bucket: int, below: int, inside: int, holders: int
    ) -> None:
        first = self.shift is None
        # Without the bucket for zeros, the others are numbered by their bits.
        super().descend(shift, buckets, bucket - first, below, inside, holders)
        if first and bucket == 0:
            # The threshold is 0: there are no bits to find.
            self.prefix = self.last = 0
            self.done = True

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
        return Threshold(bits, last, histogram=self.first_counts, removed=self.below + self.left)


class _TieSearch(_Search):
    """Search for the last index that is removed, among the blocks that score exactly the threshold.

    Args:
        scores: the search that has found the threshold.
        segments: where to look for ties.
    """

    def __init__(self, scores: _ScoreSearch, segments: Sequence[Segment]) -> None:
        super().__init__(scores.left, segments)
        self.scores = scores

    def is_on_cpu(self, segment: Segment) -> bool:
        return segment.on_cpu or segment.tied_ids is not None

    def keys(self, segment: Segment) -> Iterator[Tensor]:
        """Yield the global indices of the tied blocks."""
        if segment.tied_ids is not None:
            yield segment.tied_ids
            return
        if segment.tied is not None:
            yield segment.ids(segment.tied)
            return
        for start, bits in segment.chunks():
            yield segment.ids((bits == self.scores.last).nonzero().flatten() + start)

    def keys_on_device(self, segment: Segment) -> Iterator[Tensor]:
        for start, bits in segment.chunks():
            ids = segment.ids_from(start, bits.numel())
            yield ids.masked_fill_(bits != self.scores.last, -1)


def _narrow(
    searches: Sequence[_Search],
    rounds: Iterable[tuple[int, int]],
    reduce: Reduce,
    pool: Pool | None = None,
) -> None:
    """Run rounds of all searches until all are done, which every rank knows."""
    for shift, buckets in rounds:
        active = [search for search in searches if not search.done]
        if not active:
            return
        _run_round(active, shift, buckets, reduce, pool)


def _run_round(
    searches: Sequence[_Search], shift: int, buckets: int, reduce: Reduce, pool: Pool | None
) -> Tensor:
    """Run one round of all searches: one ``reduce`` of their histograms, and one host sync.

    Returns:
        The histograms over all ranks, int64 ``(searches, buckets)``.
    """
    own = _histograms(searches, shift, buckets)
    # The low 44 bits count blocks, the high ones the ranks that have some.
    marked = reduce(own.add_((own > 0).to(torch.int64).mul_(_PRESENT)))
    counts = marked & (_PRESENT - 1)
    for search, row in zip(searches, counts, strict=True):
        search.limit(row)
    # The bucket of the k-th key: the first up to which there are at least as many as wanted.
    upto = counts.cumsum(1)
    wanted = torch.tensor([search.left for search in searches]).unsqueeze(1)
    bucket = (upto < wanted).sum(1, keepdim=True).clamp_(max=counts.shape[1] - 1)
    if pool is not None:
        pool.limit(searches, upto, bucket)
    # One copy to the host for all searches.
    inside = counts.gather(1, bucket)
    holders = marked.gather(1, bucket) >> _PRESENT.bit_length() - 1
    chosen = torch.cat([bucket, upto.gather(1, bucket) - inside, inside, holders], 1).tolist()
    for search, row in zip(searches, chosen, strict=True):
        search.descend(shift, buckets, *row)
    if pool is not None:
        # All scores of the first round's first bucket are 0.
        equal = shift == 0 or (counts.shape[1] == HISTOGRAM and pool.bucket == 0)
        pool.share(last=equal)
    return counts


def _histograms(searches: Sequence[_Search], shift: int, buckets: int) -> Tensor:
    """:meth:`_Search.histogram` of all searches, ``(searches, buckets)``: of small tables in one
    pass."""
    before = searches[0].shift  # the same for all: they are in the same round
    joint: dict[JointScores | FlatScores, dict[int, int]] = {}
    places: list[int] = []
    parts: list[Tensor] = []
    for i, search in enumerate(searches):
        if search.joint is None or before is None:
            found = search.histogram(shift, buckets)
            places += [i] * len(found)
            parts += found
        else:
            joint.setdefault(search.joint.scores, {})[i] = search.joint.number
    # One pass over the scores of many small tables.
    for scores, numbers in joint.items():
        assert before is not None
        prefixes = [searches[i].prefix for i in numbers]
        places += numbers
        parts += scores.histograms([*numbers.values()], prefixes, before, shift, buckets)
    rows: dict[int, Tensor] = {}
    for i, part in zip(places, on_host(parts), strict=True):
        rows[i] = rows[i] + part if i in rows else part
    return torch.stack([rows[i] for i in range(len(searches))])


def _refuse_not_finite(counts: Tensor, searches: Sequence[_ScoreSearch]) -> None:
    bad = counts[:, 1 + (NOT_FINITE >> LEADING_SHIFT) :].sum(1).tolist()
    for search, number in zip(searches, bad, strict=True):
        if number:
            raise ValueError(
                f"Table {search.table.name!r}: {number} block scores exceed float32 once their"
                " parts are added; must be finite."
            )


def _index_rounds(blocks: int) -> list[tuple[int, int]]:
    """Return shifts and bucket counts that find an index below ``blocks`` in the fewest rounds of
    2048 buckets, at most 3."""
    need = max(1, (blocks - 1).bit_length())
    rounds = min(3, -(-need // 11))
    width = -(-need // rounds)
    return [(width * turn, 1 << width) for turn in reversed(range(rounds))]
