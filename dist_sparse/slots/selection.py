"""Lookup counts of the ids of a table, and the hottest ids, which hold its slots.

Ids are cut into one range a rank: that rank counts them. :class:`LookupCounts` has a count for each
id of its range, :class:`CandidateCounts` for some: of a table with too many ids, the most looked-up
ones have a count, and the others none.

A count is an int32. With a decay, old lookups weigh less: rather than multiply all counts at every
update, a new lookup weighs more. When its weight has grown :data:`_GROWTH`-fold, all counts are
divided once. So an update reads only what was looked up since the update before.

Selection is exact over all ranks: each brings the ids of its range that hold a slot, and those that
may win one. A key orders them: the lookup count, then whether an id holds a slot already, then the
smaller id. So a row does not change hands for a tie, and the result does not depend on the number
of ranks. It is enough to compare the holders and the ids looked up since the last update: any other
id lost to all holders of that update, whose counts have not fallen since against its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.groups import Group, Parcels
from dist_sparse.slots.collections import VACANT
from dist_sparse.tables.chunked import ChunkedTensor

# Counts

# Counts stop here: ids that are looked up more often are among the hottest in any order.
MOST = 1 << 30

# Weight of a lookup at first, where counts decay: shares of a lookup are counted.
_UNIT = 16

# Counts are divided when a lookup weighs so many times as much as at first.
_GROWTH = 16

# Counts that are read together: temporaries take several times their memory.
_SPAN = 1 << 22


class Weight:
    """What a lookup adds to a count.

    Args:
        decay: what a lookup is worth after each update, in (0, 1].
        age: updates since counts were divided.

    Example::

        >>> from dist_sparse.slots.selection import Weight
        >>> weight = Weight(decay=0.5)
        >>> [(weight.now, weight.next()) for _ in range(5)]
        [(16, None), (32, None), (64, None), (128, None), (256, 256)]
        >>> weight.now  # all counts were divided by 16
        32
    """

    def __init__(self, decay: float, age: int = 0) -> None:
        self.decay, self.age = decay, age

    @property
    def now(self) -> int:
        """The weight of a lookup until the next update."""
        return 1 if self.decay == 1 else round(_UNIT * self.decay**-self.age)

    def next(self) -> int | None:
        """Begin the time after an update. Return the weight from which counts must be brought down
        to the first one; None where they stay."""
        before = self.now
        divides = before >= _UNIT * _GROWTH
        # The lookups of the time that begins weigh one decay more than those before.
        self.age = 1 if divides else self.age + 1
        return before if divides else None


class LookupCounts:
    """Counts of the ids ``[first, last)`` of a table, on the rank that owns them.

    Args:
        first, last: the range.

    Attributes:
        counts: int32 ``(last - first,)``.

    Example::

        >>> import torch
        >>> from dist_sparse.slots.selection import LookupCounts
        >>> owned = LookupCounts(10, 20)
        >>> owned.seen_all()
        >>> owned.add(torch.tensor([11, 15]), torch.tensor([3, 1]), weight=1)
        >>> owned.looked_up(least=1), owned.looked_up(least=2)
        (tensor([11, 15]), tensor([11]))
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.counts = torch.zeros(last - first, dtype=torch.int32)
        # Ids since the last update; None where any may be new to it.
        self._touched: list[Tensor] | None = None

    def add(self, ids: Tensor, times: Tensor, weight: int) -> None:
        """Add lookups: of each of ``ids``, int ``(n,)``, which are distinct and in the range, so
        many ``times``."""
        places = ids.long() - self.first
        added = times.long().mul_(weight).add_(self.counts[places])
        self.counts[places] = added.clamp_(max=MOST).int()
        if self._touched is not None:
            self._touched.append(places.int())

    def of(self, ids: Tensor) -> Tensor:
        """Return the counts of ids of the range: int64 ``(n,)``."""
        return self.counts[ids - self.first].long()

    def looked_up(self, least: int) -> Tensor:
        """Return the ids whose count is at least ``least``, of those with a lookup since the last
        update: ascending, int64 ``(n,)``."""
        if self._touched is not None:
            touched = torch.cat([torch.empty(0, dtype=torch.int32), *self._touched])
            places: Tensor = torch.unique(touched[self.counts[touched] >= least])
            return places.long() + self.first
        found = [torch.empty(0, dtype=torch.int64)]
        for number, part in enumerate(torch.split(self.counts, _SPAN)):
            found.append((part >= least).nonzero().view(-1) + (self.first + number * _SPAN))
        return torch.cat(found)

    def seen_all(self) -> None:
        """Begin to note which ids are looked up: an update has compared all before."""
        self._touched = []

    def saved(self, ids: int, group: Group) -> ChunkedTensor:
        """Return the counts as a state holds them: of all ``ids`` of the table, a part a rank."""
        size = len(self.counts)
        # A rank behind the last id has nothing to write.
        writes = [((self.first,), self.counts)] if size else []
        wants = [((self.first,), (size,))] if size else []
        return ChunkedTensor((ids,), self.counts.dtype, writes, wants)

    def part(self, table: str, saved: Any) -> list[Tensor]:
        """Return the counts of this range from a state, for :meth:`load`.

        Raises:
            ValueError: it has none.
        """
        pieces = [self.counts[:0]]
        if isinstance(saved, ChunkedTensor):
            own = [piece for (first,), piece in saved.writes if first == self.first]
            pieces += saved.loaded or own
        found = torch.cat(pieces)
        _check_part(self, table, found, found.shape == self.counts.shape)
        return [found]

    def load(self, counts: Tensor) -> None:
        """Take other counts; updates have seen none of them."""
        self.counts.copy_(counts)
        self._touched = None

    def divide(self, weight: int) -> None:
        """Bring counts down after lookups have weighed ``weight``, rounding down."""
        for part in torch.split(self.counts, _SPAN):
            part.copy_(part.long().mul_(_UNIT).floor_divide_(weight))


class CandidateCounts:
    """Counts of some ids of a range, on the rank that owns it; all others count 0.

    Args:
        first, last: the range.

    Attributes:
        ids: that have a count, int64 ``(n,)``, ascending.
        counts: int32 ``(n,)``.

    Example::

        >>> import torch
        >>> from dist_sparse.slots.selection import CandidateCounts
        >>> owned = CandidateCounts(0, 2**40)
        >>> owned.add(torch.tensor([7, 2**39]), torch.tensor([3, 1]), weight=1)
        >>> owned.add(torch.tensor([7, 8]), torch.tensor([1, 1]), weight=1)
        >>> owned.keep(torch.tensor([True, False, True]))
        >>> owned.of(torch.tensor([7, 8, 2**39]))
        tensor([4, 0, 1])
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.load(torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64))

    def add(self, ids: Tensor, times: Tensor, weight: int) -> None:
        """Add lookups; as of :class:`LookupCounts`. New ids get a count."""
        both, places = torch.unique(torch.cat([self.ids, ids.long()]), return_inverse=True)
        added = torch.cat([self.counts.long(), times.long() * weight])
        counts = torch.zeros(len(both), dtype=torch.int64).index_add_(0, places, added)
        self.load(counts.clamp_(max=MOST).int(), both)

    def of(self, ids: Tensor) -> Tensor:
        """Return the counts of ids of the range: int64 ``(n,)``."""
        if not len(self.ids):
            return torch.zeros(ids.shape, dtype=torch.int64)
        places = torch.searchsorted(self.ids, ids.long()).clamp_(max=len(self.ids) - 1)
        return torch.where(self.ids[places] == ids, self.counts[places].long(), 0)

    def looked_up(self, least: int) -> Tensor:
        """Return the ids whose count is at least ``least``: ascending, int64 ``(n,)``."""
        return self.ids[self.counts >= least]

    def seen_all(self) -> None:
        """Do nothing: all candidates are compared in each update."""

    def saved(self, ids: int, group: Group) -> Tensor:
        """Return the counts as a state holds them: ``ids`` of all ranks and their counts, int64
        ``(2, ids)``. Collective."""
        both = torch.stack(gathered([self.ids, self.counts.long()], group))
        # A size that does not depend on the counts, which a checkpoint loads into.
        return nn.functional.pad(both, (0, ids - both.shape[1]), value=VACANT)

    def part(self, table: str, saved: Any) -> list[Tensor]:
        """Return the counts of this range from a state, and their ids, for :meth:`load`.

        Raises:
            ValueError: it has none.
        """
        ids, counts = saved
        mine = (ids >= self.first) & (ids < self.last)
        _check_part(self, table, counts[mine].int(), bool((ids[mine].diff() > 0).all()))
        return [counts[mine].int(), ids[mine]]

    def load(self, counts: Tensor, ids: Tensor) -> None:
        """Take other counts, of ids in ascending order."""
        self.counts, self.ids = counts, ids

    def keep(self, flags: Tensor) -> None:
        """Forget the counts of all ids but some: bool ``(n,)``."""
        self.load(self.counts[flags], self.ids[flags])

    def divide(self, weight: int) -> None:
        """Bring counts down after lookups have weighed ``weight``, rounding down."""
        self.counts = (self.counts.long() * _UNIT // weight).int()


def _check_part(
    counts: LookupCounts | CandidateCounts, table: str, part: Tensor, fits: bool
) -> None:
    """Refuse counts from a state that are not of this range."""
    if not fits or part.dtype != torch.int32:
        raise ValueError(
            f"Table {table!r}: the state has no counts of the ids [{counts.first}, {counts.last})."
            " Of other ranks, it must be loaded by torch.distributed.checkpoint."
        )
    if bool((part < 0).any()):
        raise ValueError(f"Table {table!r}: the state has counts below 0.")


# Communication


def exchanged(outgoing: Sequence[Sequence[Tensor]], group: Group) -> list[list[Tensor]]:
    """Send each rank as many tensors, int64 ``(n,)``; return those of each rank. Collective."""
    sizes = torch.tensor([list(map(len, parts)) for parts in outgoing])
    arriving = group.all_gather(sizes)[:, group.rank].tolist()
    parcels = Parcels(group)
    for receiver, parts in enumerate(outgoing):
        parcels.send(receiver, torch.cat([*parts]))
    reads = [
        parcels.expect(sender, (sum(lengths),), torch.int64)
        for sender, lengths in enumerate(arriving)
    ]
    parcels.exchange(torch.device("cpu"))
    return [[*torch.split(read(), lengths)] for read, lengths in zip(reads, arriving, strict=True)]


def gathered(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return what all ranks have of each part, one after the other: int64 ``(n,)``. Collective."""
    arrived = exchanged([parts] * group.size, group)
    return [torch.cat(pieces) for pieces in zip(*arrived, strict=True)]


# Selection

# The key of protected ids: above all counts.
PROTECTED = 2 * MOST + 2

# Bits of a key that a round finds; three rounds find all.
_BITS = 11

_BUCKETS = 1 << _BITS


def bars(slots: Sequence[int], keys: Sequence[Tensor], group: Group) -> list[int]:
    """Return for each table the least count with which an id without a slot may win one.
    Collective: one all-gather.

    Args:
        slots: of each table.
        keys: of this rank's ids that hold one: int64 ``(n,)``.
    """
    least = torch.tensor([PROTECTED])
    mine = [torch.stack([torch.tensor(len(each)), torch.cat([each, least]).min()]) for each in keys]
    number, coldest = group.all_gather(torch.stack(mine)).unbind(2)
    # A free slot costs nothing. In a tie the holder keeps its slot.
    is_full = number.sum(0) == torch.tensor(slots)
    return (is_full * (coldest.amin(0) // 2 + 1)).tolist()


def winners(slots: Sequence[int], keys: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return for each table which of this rank's ids hold a slot from now on: bool ``(n,)``.
    Collective over ``group``: three all-reduces of 16 KiB a table, and an all-gather.

    Args:
        slots: of each table, over all ranks.
        keys: what orders the ids of each table that this rank owns and that may hold a slot, int64
            ``(n,)``: larger wins, then the smaller id. Ids ascend, and their ranges with the ranks.

    Example::

        >>> import torch
        >>> from dist_sparse.slots.selection import winners
        >>> from dist_sparse.groups import group_over
        >>> winners([2], [torch.tensor([6, 2, 6, 6])], group_over(None))
        [tensor([ True, False,  True, False])]
    """
    left = torch.tensor(slots, dtype=torch.int64)
    # The bits found so far of the last key that wins, of each table.
    prefix = torch.zeros(len(keys), dtype=torch.int64)
    all_win = torch.zeros(len(keys), dtype=torch.bool)
    for shift in (2 * _BITS, _BITS, 0):
        parts = [
            _histogram(each, shift, int(bits)) for each, bits in zip(keys, prefix, strict=True)
        ]
        counts = group.all_reduce(torch.stack(parts))
        # Keys in this bucket and above: they fall from the first bucket to the last.
        from_here = counts.flip(1).cumsum(1).flip(1)
        if shift == 2 * _BITS:
            all_win = from_here[:, 0] <= left
        bucket = ((from_here >= left[:, None]).sum(1) - 1).clamp(min=0)
        above = (from_here - counts).gather(1, bucket[:, None]).squeeze(1)
        left -= above
        prefix = prefix * _BUCKETS + bucket
    # So many ids with the last key win.
    tied = [each == last for each, last in zip(keys, prefix, strict=True)]
    mine = torch.tensor([int(flags.sum()) for flags in tied], dtype=torch.int64)
    # Lower ranks own smaller ids, which win first.
    left -= group.all_gather(mine)[: group.rank].sum(0)
    found = []
    for number, flags in enumerate(tied):
        first = flags & (flags.cumsum(0) <= left[number])
        found.append((keys[number] > prefix[number]) | first | all_win[number])
    return found


def _histogram(keys: Tensor, shift: int, prefix: int) -> Tensor:
    """Return how many keys that begin with ``prefix`` are in each bucket of the next bits."""
    inside = keys[(keys >> (shift + _BITS)) == prefix]
    return torch.bincount((inside >> shift) & (_BUCKETS - 1), minlength=_BUCKETS)
