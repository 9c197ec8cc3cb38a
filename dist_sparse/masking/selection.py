"""Which are the k smallest scores over all ranks?

Scores are non-negative float32, whose bit patterns order as integers; equal scores are ordered by global block index.
So the k-th smallest (score, index) is found exactly by narrowing: a histogram of the leading bits is summed over ranks,
the bucket that holds the k-th is kept, and the next bits are looked at among its members only. Three rounds settle the
31 bits of a score, for all tables side by side in one message each; up to three more settle the index where scores tie
at the threshold over several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from dist_sparse.groups import Group, Rider
from dist_sparse.masking.segments import (
    HISTOGRAM,
    KEPT,
    LEADING_BUCKETS,
    LEADING_SHIFT,
    NOT_FINITE,
    Segment,
    first_histogram,
)

__all__ = ["Ballot", "Threshold", "select_smallest"]

_SHIFTS = (LEADING_SHIFT, 10, 0)
_BUCKETS = (LEADING_BUCKETS, 1024, 1024)

_PRESENT = 1 << 44
"""Added to a bucket by each rank that has something in it: tells whether ties lie on one rank (2**44 blocks, 2**19
ranks fit)."""

_CHUNK = 1 << 19


@dataclass
class Ballot:
    """One table's question: which ``k`` of its ``blocks`` blocks score least?

    Args:
        name: of the table, for messages.
        k: how many blocks to remove.
        blocks: how many blocks the whole table has.
        segments: the scores that this rank knows; over all ranks every block is counted once.
        spread_replicas: some ranks hold replicas of only a part of the table, so a rank can't tell by itself whether it
            sees all ties.
    """

    name: str
    k: int
    blocks: int
    segments: list[Segment] = field(default_factory=list)
    spread_replicas: bool = False


@dataclass(frozen=True)
class Threshold:
    """A block is removed when its score is below ``bits``, or equal to it with a global index of at most ``last``
    (None: any)."""

    bits: int
    last: int | None
    histogram: Tensor | None = field(default=None, compare=False, repr=False)
    """How the scores of all ranks lie: int64 ``(HISTOGRAM,)``, zeros first, then by leading bits. None where nothing or
    everything goes."""

    @property
    def score(self) -> float | None:
        """The largest score that goes; None where nothing or everything does."""
        if self in (_NOTHING, _EVERYTHING):
            return None
        return float(torch.tensor(self.bits, dtype=torch.int32).view(torch.float32))

    def removes(self, segment: Segment, start: int, bits: Tensor) -> Tensor:
        """Removed flags, bool, of the chunk ``bits`` that starts at ``start`` of ``segment``."""
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


_NOTHING = Threshold(bits=0, last=-1)
_EVERYTHING = Threshold(bits=KEPT - 1, last=None)


def select_smallest(ballots: Sequence[Ballot], group: Group, rider: Rider | None = None) -> list[Threshold]:
    """For every ballot the exact threshold of its ``k`` smallest blocks over all ranks. Collective over ``group``:
    every rank must call it.

    At most three all-reduces of 16, 8 and 8 KiB a table, and at most three more for tables whose threshold ties over
    ranks. None of the sizes depends on the number of scores. ``rider`` is carried by the first all-reduce, if any.

    Raises:
        ValueError: a score is not finite (on every rank; names the table).
    """
    answers = [_NOTHING if ballot.k <= 0 else _EVERYTHING for ballot in ballots]
    asked = [i for i, ballot in enumerate(ballots) if 0 < ballot.k < ballot.blocks]
    searches = {i: _Search(ballots[i].k, partial(_counted, ballots[i]), first=_first(ballots[i])) for i in asked}
    rounds = list(zip(_SHIFTS, _BUCKETS, strict=True))
    _narrow(
        list(searches.values()), rounds, partial(group.all_reduce, rider=rider), names=[ballots[i].name for i in asked]
    )
    over_ranks: dict[int, _Search] = {}
    for i, search in searches.items():
        ballot, bits = ballots[i], search.last
        answers[i] = Threshold(bits=bits, last=None, histogram=search.first_counts)
        if search.left == search.inside:
            continue  # all that tie at the threshold go
        if search.inside <= _CHUNK:
            for segment in ballot.segments:
                segment.find_tied(bits)
        if search.holders > 1 or ballot.spread_replicas:
            over_ranks[i] = _Search(search.left, partial(_ties, ballot, bits, counted=True))
            continue
        # One rank speaks for all that tie. It, and any replica of it, sees them all and settles the order alone; the
        # others see none.
        ties = _Search(search.left, partial(_ties, ballot, bits, counted=False))
        _narrow([ties], _index_rounds(ballot.blocks), lambda counts: counts)
        answers[i] = replace(answers[i], last=ties.last)
    if over_ranks:
        _narrow(list(over_ranks.values()), _index_rounds(max(ballots[i].blocks for i in over_ranks)), group.all_reduce)
        for i, ties in over_ranks.items():
            answers[i] = replace(answers[i], last=ties.last)
    return answers


class _Search:
    """The narrowing of one table: the leading bits found so far, and how many of those that share them are wanted.

    Args:
        k: how many keys are wanted.
        keys: makes an iterator over chunks of this rank's keys; called once per round until few enough are left to be
            kept.
        first: the first round's histogram with zeros apart, of keys whose histogram is known already.

    Attributes:
        last: the largest key that may go, once settled.
        left: how many are wanted of the ``inside`` keys of the last bucket, which lie on ``holders`` ranks.
        settled: all or nothing of what shares the prefix is wanted, or there are no more bits: no further round is
            needed.
    """

    def __init__(self, k: int, keys: Callable[[], Iterator[Tensor]], first: Tensor | None = None) -> None:
        self.left, self.last, self.inside, self.holders = k, 0, 0, 0
        self.settled = False
        self._keys, self._first = keys, first
        self._prefix = 0
        self._shift: int | None = None
        self._few: list[Tensor] | None = None
        self.first_counts: Tensor | None = None

    def histogram(self, shift: int, buckets: int) -> Tensor:
        """How many of the keys that have the prefix fall into each bucket of the next bits, int64 on the CPU:
        ``(buckets,)``, or one more in front for zeros if the first histogram was given with them apart."""
        if self._shift is None and self._first is not None:
            return self._first
        counts = torch.zeros(buckets, dtype=torch.int64)
        few: list[Tensor] | None = [] if self._few is None else None
        seen = found = 0
        for chunk in self._few if self._few is not None else self._keys():
            inside = chunk if self._shift is None else chunk[(chunk >> self._shift) == self._prefix]
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

    def descend(self, shift: int, buckets: int, bucket: int, below: int, inside: int, holders: int) -> None:
        """Keeps one bucket: ``below`` keys lie before it, ``inside`` in it, on ``holders`` ranks."""
        zeros_apart = self._shift is None and self._first is not None
        self.left, self.inside, self.holders, self._shift = self.left - below, inside, holders, shift
        if zeros_apart and bucket == 0:
            self.settled = True
            return
        self._prefix = self._prefix * buckets + bucket - zeros_apart
        self.last = ((self._prefix + 1) << shift) - 1
        self.settled = self.left == self.inside or shift == 0


def _narrow(
    searches: Sequence[_Search],
    rounds: Sequence[tuple[int, int]],
    reduce: Callable[[Tensor], Tensor],
    names: Sequence[str] | None = None,
) -> None:
    """Runs all searches side by side: one ``reduce`` of the stacked histograms ``(searches, buckets)`` a round, and one
    host sync. Which searches are settled is known to all ranks."""
    for shift, buckets in rounds:
        asked = [search for search in searches if not search.settled]
        if not asked:
            return
        counts = torch.stack([search.histogram(shift, buckets) for search in asked])
        counts = reduce(counts + (counts > 0) * _PRESENT)
        holders, counts = counts >> _PRESENT.bit_length() - 1, counts & (_PRESENT - 1)
        if names is not None and asked[0]._shift is None:
            _refuse_not_finite(counts, names)
            for search, row_of in zip(asked, counts, strict=True):
                search.first_counts = row_of
        upto = counts.cumsum(1)
        wanted = torch.tensor([search.left for search in asked]).unsqueeze(1)
        bucket = (upto < wanted).sum(1, keepdim=True).clamp_(max=counts.shape[1] - 1)
        inside = counts.gather(1, bucket)
        table = torch.cat([bucket, upto.gather(1, bucket) - inside, inside, holders.gather(1, bucket)], 1).tolist()
        for search, row in zip(asked, table, strict=True):
            search.descend(shift, buckets, *row)


def _refuse_not_finite(counts: Tensor, names: Sequence[str]) -> None:
    bad = counts[:, 1 + (NOT_FINITE >> LEADING_SHIFT) :].sum(1).tolist()
    for name, number in zip(names, bad, strict=True):
        if number:
            raise ValueError(
                f"Table {name!r}: {number} block scores exceed float32 once their parts are added; must be finite."
            )


def _counted(ballot: Ballot) -> Iterator[Tensor]:
    for segment in ballot.segments:
        if segment.counts:
            for _, bits in segment.chunks():
                yield bits


def _first(ballot: Ballot) -> Tensor:
    counts = torch.zeros(HISTOGRAM, dtype=torch.int64)
    for segment in ballot.segments:
        if segment.counts:
            known = segment.first_histogram
            parts = [known] if known is not None else (first_histogram(bits) for _, bits in segment.chunks())
            for part in parts:
                counts += part.cpu()
    counts[1 + (KEPT >> LEADING_SHIFT)] = 0
    return counts


def _ties(ballot: Ballot, threshold: int, *, counted: bool) -> Iterator[Tensor]:
    """Global indices of the blocks that score exactly ``threshold``: those this rank speaks for, or all that it
    sees."""
    for segment in ballot.segments:
        if segment.tied is not None and (segment.counts or not counted):
            yield segment.ids(segment.tied)
        elif segment.counts or not counted:
            for start, bits in segment.chunks():
                yield segment.ids((bits == threshold).nonzero().flatten() + start)


def _index_rounds(blocks: int) -> list[tuple[int, int]]:
    """Shifts and bucket counts that settle an index below ``blocks`` in as few rounds as 2048 buckets allow, three at
    most."""
    need = max(1, (blocks - 1).bit_length())
    rounds = min(3, -(-need // 11))
    width = -(-need // rounds)
    return [(width * turn, 1 << width) for turn in reversed(range(rounds))]
