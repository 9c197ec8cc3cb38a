"""Exact k-th smallest score over all ranks.

Scores are non-negative float32, kept as their int32 bit patterns, which order alike; equal scores
are ordered by global block index. The k-th smallest (score, index) is found by narrowing: a
histogram of the leading bits is summed over ranks, the bucket that holds the k-th is kept, and the
next bits are looked at among its members only. Three rounds find the 31 bits of a score, for all
tables side by side in one message each; up to three more find the index where scores tie at the
threshold over several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from dist_sparse.groups import Group, Rider
from dist_sparse.masking.pools import Pool
from dist_sparse.masking.segments import (
    HISTOGRAM,
    KEPT,
    LEADING_BUCKETS,
    NOT_FINITE,
    Index,
    JointScores,
    Segment,
    first_histogram,
)
from dist_sparse.records import LEADING_SHIFT

__all__ = ["Candidates", "Threshold", "select_smallest"]

_ROUNDS = ((LEADING_SHIFT, LEADING_BUCKETS), (10, 1024), (0, 1024))

_PRESENT = 1 << 44
"""Added to a bucket by each rank that has something in it: tells whether all ties are on one rank
(2**44 blocks, 2**19 ranks fit)."""

_CHUNK = 1 << 19


@dataclass
class Candidates:
    """The blocks of one table, of which the ``k`` with the smallest scores are removed.

    Args:
        name: of the table, for messages.
        k: how many blocks to remove.
        blocks: how many blocks the whole table has.
        segments: the scores that this rank knows; over all ranks every block is counted once.
        spread_replicas: some ranks hold replicas of only a part of the table, so a rank can't tell
            by itself whether it sees all ties.
    """

    name: str
    k: int
    blocks: int
    segments: list[Segment] = field(default_factory=list)
    spread_replicas: bool = False


@dataclass(frozen=True)
class Threshold:
    """A block is removed when its score is below ``bits``, or equal to it with a global index of at
    most ``last`` (None: any)."""

    bits: int
    last: int | None
    histogram: Tensor | None = field(default=None, compare=False, repr=False)
    """The scores of all ranks: int64 ``(HISTOGRAM,)``, zeros first, then by leading bits. None
    where nothing or everything is removed."""
    removed: int | None = field(default=None, compare=False)
    """How many blocks are removed; None where nothing or everything is."""

    @property
    def score(self) -> float | None:
        """The largest score that is removed; None where nothing or everything is."""
        if self in (_NOTHING, _EVERYTHING):
            return None
        return float(torch.tensor(self.bits, dtype=torch.int32).view(torch.float32))

    def removes(self, segment: Segment, start: int, bits: Tensor) -> Tensor:
        """Return removed flags, bool, of the chunk ``bits`` that starts at ``start`` of
        ``segment``."""
        if self.last is None:
            return bits <= self.bits
        removed = bits <= self.bits
        if segment.tied is None:
            where = (bits == self.bits).nonzero().flatten()
        else:
            ends = torch.tensor([start, start + bits.numel()], device=bits.device)
            first, end = torch.searchsorted(segment.tied, ends).tolist()
            where = segment.tied[first:end] - start
        removed[where[segment.ids(where + start) > self.last]] = False
        return removed

    def removes_at(self, segment: Segment, places: Tensor, bits: Tensor) -> Tensor:
        """As :meth:`removes`, of the scores ``bits`` at flat ``places`` of ``segment``."""
        removed = bits <= self.bits
        if self.last is not None:
            removed &= (bits < self.bits) | (segment.ids(places.long()) <= self.last)
        return removed


_NOTHING = Threshold(bits=0, last=-1)
_EVERYTHING = Threshold(bits=KEPT - 1, last=None)


def select_smallest(
    candidates: Sequence[Candidates],
    group: Group,
    rider: Rider | None = None,
    pool: Pool | None = None,
) -> list[Threshold]:
    """Return for every table the exact threshold of its ``k`` smallest blocks over all ranks.
    Collective over ``group``: every rank must call it. With a ``pool`` of the tables of which ``k``
    is not 0, ``k`` is the most.

    At most three all-reduces of 16, 8 and 8 KiB a table, and at most three more for tables whose
    threshold ties over ranks. None of the sizes depends on the number of scores. ``rider`` is
    carried by the first all-reduce, if any.

    Raises:
        ValueError: a score is not finite (on every rank; names the table).
    """
    answers = [_NOTHING if table.k <= 0 else _EVERYTHING for table in candidates]
    asked = [
        i for i, table in enumerate(candidates) if table.k > 0 and (pool or table.k < table.blocks)
    ]
    searches = {
        i: _Search(
            candidates[i].k,
            partial(_counted, candidates[i]),
            first=_first(candidates[i]),
            joint=_joint(candidates[i]),
            index=_index(candidates[i]),
        )
        for i in asked
    }
    if pool is not None:
        pool.join(list(searches.values()))
    reduce = partial(group.all_reduce, rider=rider)
    _narrow(list(searches.values()), _ROUNDS, reduce, [candidates[i].name for i in asked], pool)
    over_ranks: dict[int, _Search] = {}
    for i, search in searches.items():
        table, bits = candidates[i], search.last
        removed = search.below + search.left
        answers[i] = Threshold(bits=bits, last=None, histogram=search.first_counts, removed=removed)
        if search.left == search.inside:
            continue  # all that tie at the threshold are removed
        if search.left == 0:  # and here all stay: the pool has reached its bytes
            answers[i] = (
                replace(answers[i], bits=bits - 1) if bits else replace(answers[i], last=-1)
            )
            continue
        if search.inside <= _CHUNK:
            for segment in table.segments:
                segment.find_tied(bits)
        if search.holders > 1 or table.spread_replicas:
            over_ranks[i] = _Search(search.left, partial(_ties, table, bits, counted=True))
            continue
        # One rank owns all that tie. It, and any replica of it, sees them all and finds the order
        # alone; the others see none.
        ties = _Search(search.left, partial(_ties, table, bits, counted=False))
        _narrow([ties], _index_rounds(table.blocks), lambda counts: counts)
        answers[i] = replace(answers[i], last=ties.last)
    if over_ranks:
        _narrow(
            list(over_ranks.values()),
            _index_rounds(max(candidates[i].blocks for i in over_ranks)),
            group.all_reduce,
        )
        for i, ties in over_ranks.items():
            answers[i] = replace(answers[i], last=ties.last)
    return answers


class _Search:
    """The narrowing of one table: the leading bits found so far, and how many of those that share
    them are wanted.

    Args:
        k: how many keys are wanted.
        keys: makes an iterator over chunks of this rank's keys; called once per round until few
            enough are left to be kept.
        first: the first round's histogram with zeros apart, of keys whose histogram is known
            already.
        joint: where else the keys are, together with those of other tables, and the number of the
            table there.
        index: of the keys, if they are scores that have one.

    Attributes:
        last: the largest key that is removed, once found.
        left: how many are wanted of the ``inside`` keys of the last bucket, which are on
            ``holders`` ranks.
        below: how many are before it.
        done: all or nothing of what shares the prefix is wanted, or there are no more bits: no
            further round is needed.
    """

    def __init__(
        self,
        k: int,
        keys: Callable[[], Iterator[Tensor]],
        first: Tensor | None = None,
        joint: tuple[JointScores, int] | None = None,
        index: Index | None = None,
    ) -> None:
        self.left, self.last, self.inside, self.holders, self.below = k, 0, 0, 0, 0
        self.done = False
        self._keys, self._first = keys, first
        self._prefix = 0
        self._shift: int | None = None
        self._few: list[Tensor] | None = None
        self.first_counts: Tensor | None = None
        self.joint = joint
        self._index = index

    @property
    def prefix(self) -> tuple[int, int] | None:
        """The bits found so far, and how many are not; None before the first round."""
        return None if self._shift is None else (self._prefix, self._shift)

    def histogram(self, shift: int, buckets: int) -> Tensor:
        """How many of the keys that have the prefix fall into each bucket of the next bits, int64
        on the CPU: ``(buckets,)``, or one more in front for zeros if the first histogram was given
        with them apart."""
        if self._shift is None and self._first is not None:
            return self._first
        if self._index is not None and self._shift is not None:
            known = self._index.counts(self._prefix, self._shift, shift, buckets)
            if known is not None:
                return known
        counts = torch.zeros(buckets, dtype=torch.int64)
        few: list[Tensor] | None = [] if self._few is None else None
        seen = found = 0
        for chunk in self._few if self._few is not None else self._keys():
            inside = (
                chunk
                if self._shift is None
                else chunk[(chunk >> self._shift).eq_(self._prefix).to(torch.bool)]
            )
            if self._first is not None and self._prefix == 0:
                inside = inside[inside != 0]  # zeros have a bucket of their own
            if inside.numel():
                counts += torch.bincount((inside >> shift) & (buckets - 1), minlength=buckets).cpu()
            seen, found = seen + chunk.numel(), found + inside.numel()
            if few is not None:
                most = _CHUNK if self._shift is None else max(seen, _CHUNK)
                few = None if found * 8 > most else [*few, inside]
        if few is not None:
            self._few = few
        return counts

    def descend(
        self, shift: int, buckets: int, bucket: int, below: int, inside: int, holders: int
    ) -> None:
        """Keep one bucket: ``below`` keys are before it, ``inside`` in it, on ``holders`` ranks."""
        zeros_apart = self._shift is None and self._first is not None
        self.left, self.inside, self.holders, self._shift = (
            self.left - below,
            inside,
            holders,
            shift,
        )
        self.below += below
        if zeros_apart and bucket == 0:
            self.done = True
            return
        self._prefix = self._prefix * buckets + bucket - zeros_apart
        self.last = ((self._prefix + 1) << shift) - 1
        self.done = self.left == self.inside or shift == 0


def _narrow(
    searches: Sequence[_Search],
    rounds: Sequence[tuple[int, int]],
    reduce: Callable[[Tensor], Tensor],
    names: Sequence[str] | None = None,
    pool: Pool | None = None,
) -> None:
    """Run all searches side by side: one ``reduce`` of the stacked histograms
    ``(searches, buckets)`` a round, and one host sync. All ranks know which searches are done."""
    for shift, buckets in rounds:
        asked = [search for search in searches if not search.done]
        if not asked:
            return
        counts = _histograms(asked, shift, buckets)
        counts = reduce(counts.add_((counts > 0).to(torch.int64).mul_(_PRESENT)))
        holders = counts
        counts = counts & (_PRESENT - 1)
        if names is not None and asked[0].prefix is None:
            _refuse_not_finite(counts, names)
            for search, row_of in zip(asked, counts, strict=True):
                search.first_counts = row_of
        upto = counts.cumsum(1)
        wanted = torch.tensor([search.left for search in asked]).unsqueeze(1)
        bucket = (upto < wanted).sum(1, keepdim=True).clamp_(max=counts.shape[1] - 1)
        if pool is not None:
            pool.limit(asked, upto, bucket)
        inside, holders = (
            counts.gather(1, bucket),
            holders.gather(1, bucket) >> _PRESENT.bit_length() - 1,
        )
        table = torch.cat([bucket, upto.gather(1, bucket) - inside, inside, holders], 1).tolist()
        for search, row in zip(asked, table, strict=True):
            search.descend(shift, buckets, *row)
        if pool is not None:
            pool.share(last=shift == 0 or (counts.shape[1] == HISTOGRAM and pool.bucket == 0))


def _histograms(searches: Sequence[_Search], shift: int, buckets: int) -> Tensor:
    """:meth:`_Search.histogram` of all searches, ``(searches, buckets)``: those of small tables in
    one pass."""
    if searches[0].prefix is None:
        return torch.stack([search.histogram(shift, buckets) for search in searches])
    counts = torch.zeros(len(searches), buckets, dtype=torch.int64)
    joint: dict[JointScores, list[int]] = {}
    for i, search in enumerate(searches):
        if search.joint is None:
            counts[i] = search.histogram(shift, buckets)
        else:
            joint.setdefault(search.joint[0], []).append(i)
    for scores, rows in joint.items():
        numbers, prefixes, befores = [], [], set()
        for i in rows:
            where, found = searches[i].joint, searches[i].prefix
            assert where is not None and found is not None
            numbers.append(where[1])
            prefixes.append(found[0])
            befores.add(found[1])
        [before] = befores  # all are in the same round
        counts[rows] = scores.histograms(numbers, prefixes, before, shift, buckets).cpu()
    return counts


def _refuse_not_finite(counts: Tensor, names: Sequence[str]) -> None:
    bad = counts[:, 1 + (NOT_FINITE >> LEADING_SHIFT) :].sum(1).tolist()
    for name, number in zip(names, bad, strict=True):
        if number:
            raise ValueError(
                f"Table {name!r}: {number} block scores exceed float32 once their parts are added;"
                " must be finite."
            )


def _counted(table: Candidates) -> Iterator[Tensor]:
    for segment in table.segments:
        if segment.counts:
            for _, bits in segment.chunks():
                yield bits


def _joint(table: Candidates) -> tuple[JointScores, int] | None:
    counted = [segment for segment in table.segments if segment.counts]
    return counted[0].joint if len(counted) == 1 else None


def _index(table: Candidates) -> Index | None:
    counted = [segment for segment in table.segments if segment.counts]
    return counted[0].index if len(counted) == 1 else None


def _first(table: Candidates) -> Tensor:
    if (
        len(table.segments) == 1
        and table.segments[0].counts
        and table.segments[0].joint is not None
    ):
        assert table.segments[0].first_histogram is not None
        return table.segments[0].first_histogram
    counts = torch.zeros(HISTOGRAM, dtype=torch.int64)
    for segment in table.segments:
        if segment.counts:
            known = segment.first_histogram
            parts = (
                [known]
                if known is not None
                else (first_histogram(bits) for _, bits in segment.chunks())
            )
            for part in parts:
                counts += part.cpu()
    counts[1 + (KEPT >> LEADING_SHIFT)] = 0
    return counts


def _ties(table: Candidates, threshold: int, *, counted: bool) -> Iterator[Tensor]:
    """Global indices of the blocks that score exactly ``threshold``: those this rank owns, or all
    that it sees."""
    for segment in table.segments:
        if segment.tied is not None and (segment.counts or not counted):
            yield segment.ids(segment.tied)
        elif segment.counts or not counted:
            for start, bits in segment.chunks():
                yield segment.ids((bits == threshold).nonzero().flatten() + start)


def _index_rounds(blocks: int) -> list[tuple[int, int]]:
    """Shifts and bucket counts that find an index below ``blocks`` in the fewest rounds of 2048
    buckets, at most 3."""
    need = max(1, (blocks - 1).bit_length())
    rounds = min(3, -(-need // 11))
    width = -(-need // rounds)
    return [(width * turn, 1 << width) for turn in reversed(range(rounds))]
