"""Lookup counts of the ids of a table, and the selection of the hottest ids.

Each rank owns one contiguous range of the ids and counts their lookups. :class:`LookupCounts` has a
count for every id of the range. :class:`CandidateCounts` has counts for the hottest ids only, for
tables with too many ids to count each.

A count is an int32. With a decay, old lookups weigh less. Instead of multiplying all counts at
every update, a new lookup weighs more; once its weight has grown :data:`_GROWTH`-fold, all counts
are divided. So an update reads the counts of the holders, and of the ids that were looked up since
the last one.

Selection is exact over all ranks. Each rank contributes the owned ids that hold a slot, and those
that may win one. They are ordered by lookup count, then holders before others, then smaller ids
first. So a slot does not change its holder for a tie, and the result does not depend on the number
of ranks. Only holders and the ids looked up since the last update need to be compared: any other id
lost to all holders of that update, and decay scales its count as it scales theirs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.extras.following.slotted import VACANT
from dist_sparse.groups import Group
from dist_sparse.parcels import Parcels
from dist_sparse.tables.chunked import ChunkedTensor

# Counts

# Counts saturate here, so that a key, 2 * count + 1, is below :data:`PROTECTED` and fits 33 bits.
MOST = 1 << 30

# The weight of a lookup right after a division, with decay: counts have 4 fractional bits.
_UNIT = 16

# Counts are divided once a lookup weighs this many times :data:`_UNIT`.
_GROWTH = 16

# How many counts are processed at a time: 16 MiB, and their int64 copies take twice that.
_SPAN = 1 << 22


class Weight:
    """The number that a lookup adds to a count.

    Args:
        decay: factor on the weight of earlier lookups at each update, in (0, 1].
        age: updates since counts were divided.

    Example::

        >>> from dist_sparse.extras.following.selection import Weight
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
        """Begin the interval after an update. Return the weight by which to divide counts now, or
        None."""
        before = self.now
        divides = before >= _UNIT * _GROWTH
        # After a division age 0 is the interval that ended, so the new one has age 1.
        self.age = 1 if divides else self.age + 1
        return before if divides else None


class LookupCounts:
    """Counts of the ids ``[first, last)`` of a table, on the rank that owns them.

    Args:
        first, last: the owned ids.

    Attributes:
        counts: int32 ``(last - first,)``.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.selection import LookupCounts
        >>> owned = LookupCounts(10, 20)
        >>> owned.begin_interval()
        >>> owned.add(torch.tensor([11, 15]), torch.tensor([3, 1]), weight=1)
        >>> owned.looked_up(least=1), owned.looked_up(least=2)
        (tensor([11, 15]), tensor([11]))
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.counts = torch.zeros(last - first, dtype=torch.int32)
        # The places of the ids looked up since the last update. It is None before the first update
        # and after a load: then any id may win a slot.
        self._touched: list[Tensor] | None = None

    def add(self, ids: Tensor, times: Tensor, weight: int) -> None:
        """Add lookups.

        Args:
            ids: distinct owned ids, int ``(n,)``.
            times: lookups of each, int ``(n,)``.
            weight: the number that one lookup adds to a count.
        """
        places = ids.long() - self.first
        added = times.long().mul(weight).add_(self.counts[places])
        self.counts[places] = added.clamp_(max=MOST).int()
        if self._touched is not None:
            self._touched.append(places.int())

    def of(self, ids: Tensor) -> Tensor:
        """Return the counts of owned ids: int64 ``(n,)``."""
        return self.counts[ids - self.first].long()

    def looked_up(self, least: int) -> Tensor:
        """Return the ids looked up since the last update whose count is at least ``least``:
        ascending, int64 ``(n,)``."""
        if self._touched is not None:
            touched = torch.cat([torch.empty(0, dtype=torch.int32), *self._touched])
            places: Tensor = torch.unique(touched[self.counts[touched] >= least])
            return places.long() + self.first
        found = [torch.empty(0, dtype=torch.int64)]
        for number, part in enumerate(torch.split(self.counts, _SPAN)):
            found.append((part >= least).nonzero().view(-1) + (self.first + number * _SPAN))
        return torch.cat(found)

    def begin_interval(self) -> None:
        """Record which ids are looked up from now on: an update has compared all others."""
        self._touched = []

    def compare_all(self) -> None:
        """Let :meth:`looked_up` return ids that were looked up before the last update too."""
        self._touched = None

    def saved(self, ids: int, group: Group) -> ChunkedTensor:
        """Return the counts for a state: one tensor for all ``ids`` of the table; each rank writes
        a part of it."""
        counts = self.counts
        # If there are fewer ids than ranks, the last ranks own none and write nothing.
        if not len(counts):
            return ChunkedTensor((ids,), counts.dtype, [], [])
        start = (self.first,)
        return ChunkedTensor((ids,), counts.dtype, [(start, counts)], [(start, counts.shape)])

    def part(self, table: str, saved: Any) -> list[Tensor]:
        """Return the counts of the owned ids from a state, for :meth:`load`.

        Raises:
            ValueError: the state does not have them.
        """
        pieces = [self.counts[:0]]
        if isinstance(saved, ChunkedTensor):
            # A state of this rank that no checkpoint has loaded has its own counts only.
            own = [piece for (first,), piece in saved.writes if first == self.first]
            pieces += saved.loaded or own
        found = torch.cat(pieces)
        _check_counts(self, table, found, found.shape == self.counts.shape)
        return [found]

    def load(self, counts: Tensor) -> None:
        """Replace the counts; the next update compares all ids."""
        self.counts.copy_(counts)
        self.compare_all()

    def divide(self, weight: int) -> None:
        """Scale counts from lookups of ``weight`` to lookups of :data:`_UNIT`, rounding down."""
        for part in torch.split(self.counts, _SPAN):
            part.copy_(part.long().mul_(_UNIT).floor_divide_(weight))


class CandidateCounts:
    """Counts of some of the ids ``[first, last)``, on the rank that owns them; others count 0.

    Args:
        first, last: the owned ids.

    Attributes:
        ids: the ids that have a count, int64 ``(n,)``, ascending.
        counts: int32 ``(n,)``.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.selection import CandidateCounts
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
        """Add lookups, as :meth:`LookupCounts.add` does. New ids get a count."""
        both, places = torch.unique(torch.cat([self.ids, ids.long()]), return_inverse=True)
        added = torch.cat([self.counts.long(), times.long() * weight])
        counts = torch.zeros(len(both), dtype=torch.int64).index_add_(0, places, added)
        self.load(counts.clamp_(max=MOST).int(), both)

    def of(self, ids: Tensor) -> Tensor:
        """Return the counts of owned ids: int64 ``(n,)``."""
        places = torch.searchsorted(self.ids, ids.long())
        # An id above all candidates is placed after the last one, where no id is.
        candidates = nn.functional.pad(self.ids, (0, 1), value=VACANT)
        counts = nn.functional.pad(self.counts, (0, 1)).long()
        return torch.where(candidates[places] == ids, counts[places], 0)

    def looked_up(self, least: int) -> Tensor:
        """Return the ids whose count is at least ``least``: ascending, int64 ``(n,)``."""
        return self.ids[self.counts >= least]

    def begin_interval(self) -> None:
        """Do nothing: each update compares all candidates."""

    def compare_all(self) -> None:
        """Do nothing."""

    def saved(self, ids: int, group: Group) -> Tensor:
        """Return the counts for a state: the candidates of all ranks and their counts, int64
        ``(2, ids)``. Collective."""
        both = torch.stack(gather_parts([self.ids, self.counts.long()], group))
        # The size is fixed: a checkpoint loads in place, into a tensor of the saved shape.
        return nn.functional.pad(both, (0, ids - both.shape[1]), value=VACANT)

    def part(self, table: str, saved: Any) -> list[Tensor]:
        """Return the counts of the owned ids from a state, and these ids, for :meth:`load`.

        Raises:
            ValueError: the state does not have them.
        """
        fits = isinstance(saved, Tensor) and saved.dtype == torch.int64 and saved.shape[:-1] == (2,)
        all_ids, all_counts = saved if fits else torch.empty(2, 0)
        owned = (all_ids >= self.first) & (all_ids < self.last)
        ids = all_ids[owned]
        # int() would wrap a larger count into the valid ones.
        counts = all_counts[owned].clamp(-1, MOST + 1).int()
        fits &= bool((all_ids >= VACANT).all() & (ids.diff() > 0).all())
        _check_counts(self, table, counts, fits)
        return [counts, ids]

    def load(self, counts: Tensor, ids: Tensor) -> None:
        """Replace the counts and their ids, which ascend."""
        self.counts = counts
        self.ids = ids

    def keep(self, flags: Tensor) -> None:
        """Drop the counts of all ids that are not flagged: bool ``(n,)``."""
        self.load(self.counts[flags], self.ids[flags])

    def divide(self, weight: int) -> None:
        """Scale counts from lookups of ``weight`` to lookups of :data:`_UNIT`, rounding down."""
        self.counts = (self.counts.long() * _UNIT // weight).int()


def _check_counts(
    owner: LookupCounts | CandidateCounts, table: str, part: Tensor, fits: bool
) -> None:
    """Refuse counts from a state that do not belong to the owned ids."""
    lacks = f"Table {table!r}: the state has no counts of the ids [{owner.first}, {owner.last})."
    fits = fits and part.dtype == torch.int32
    if not fits:
        raise ValueError(f"{lacks} Load a state of other ranks by torch.distributed.checkpoint.")
    if ((part < 0) | (part > MOST)).any():
        raise ValueError(f"Table {table!r}: the state has invalid counts.")


# Communication


def exchange(outgoing: Sequence[Sequence[Tensor]], group: Group) -> list[list[Tensor]]:
    """Send tensors, int64 ``(n,)``, to each rank; return the tensors from each rank. Collective.

    Args:
        outgoing: the tensors for each rank; all ranks get equally many, of any lengths.
    """
    sizes = torch.tensor([list(map(len, parts)) for parts in outgoing])
    # Rows are senders, columns are receivers.
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


def gather_parts(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Concatenate each part over all ranks, in their order: int64 ``(n,)``. Collective."""
    arrived = exchange([parts] * group.size, group)
    return [torch.cat(pieces) for pieces in zip(*arrived, strict=True)]


# Selection

# The ranking key of protected ids. It is above the key of any count.
PROTECTED = 2 * MOST + 2

# Bits of a key that a round determines. Three rounds determine 33: all keys up to PROTECTED.
_BITS = 11

_BUCKETS = 1 << _BITS


def admission_counts(slots: Sequence[int], keys: Sequence[Tensor], group: Group) -> list[int]:
    """Return for each table the smallest count with which an id without a slot may win one.
    Collective: one all-gather.

    Args:
        slots: number of slots of each table.
        keys: for each table, the ranking keys of the owned ids that hold a slot, int64 ``(n,)``.
    """
    # A rank that owns no holder has no minimum: PROTECTED stands for it.
    padding = torch.tensor([PROTECTED])
    here = []
    for table_keys in keys:
        here.append([len(table_keys), int(torch.cat([table_keys, padding]).min())])
    holders, coldest = group.all_gather(torch.tensor(here)).unbind(2)
    # While a slot is free, any count wins it: 0. Otherwise more than the coldest holder's count is
    # needed, which is half its key: in a tie the holder keeps its slot.
    is_full = holders.sum(0) == torch.tensor(slots)
    return (is_full * (coldest.amin(0) // 2 + 1)).tolist()


def select_winners(slots: Sequence[int], keys: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return for each table which of the owned ids hold a slot from now on: bool ``(n,)``.
    Collective over ``group``: three all-reduces of 16 KiB a table, and an all-gather.

    The k-th largest key is found by radix selection: each round sums a histogram of the next
    :data:`_BITS` bits over all ranks, and continues in the bucket that the key falls into.

    Args:
        slots: number of slots of each table, over all ranks.
        keys: for each table, the ranking keys of the owned ids that may hold a slot, int64
            ``(n,)``, in the order of the ids: the larger key wins, then the smaller id.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.selection import select_winners
        >>> from dist_sparse.groups import group_over
        >>> select_winners([2], [torch.tensor([6, 2, 6, 6])], group_over(None))
        [tensor([ True, False,  True, False])]
    """
    # Slots left for ids whose key begins with the prefix.
    left = torch.tensor(slots, dtype=torch.int64)
    # The known bits of each table's last winning key.
    prefix = torch.zeros(len(keys), dtype=torch.int64)
    for shift in (2 * _BITS, _BITS, 0):
        histograms = [
            _histogram(table_keys, shift, int(bits))
            for table_keys, bits in zip(keys, prefix, strict=True)
        ]
        counts = group.all_reduce(torch.stack(histograms))
        # How many keys are in each bucket or above it. The numbers descend along the buckets.
        from_here = counts.flip(1).cumsum(1).flip(1)
        # If there are fewer ids than slots, all win, and the smallest key is the last winning one.
        left = torch.minimum(left, from_here[:, 0])
        bucket = ((from_here >= left[:, None]).sum(1) - 1).clamp(min=0)
        above = (from_here - counts).gather(1, bucket[:, None]).squeeze(1)
        left -= above
        prefix = prefix * _BUCKETS + bucket
    # Now the prefix is the last winning key, and ``left`` slots remain for the ids that have it.
    tied = [table_keys == last for table_keys, last in zip(keys, prefix, strict=True)]
    num_tied = torch.stack([flags.sum() for flags in tied])
    # Smaller ids win a tie, and lower ranks own smaller ids.
    left -= group.all_gather(num_tied)[: group.rank].sum(0)
    winners = []
    for number, flags in enumerate(tied):
        first = flags & (flags.cumsum(0) <= left[number])
        winners.append((keys[number] > prefix[number]) | first)
    return winners


def _histogram(keys: Tensor, shift: int, prefix: int) -> Tensor:
    """Return how many keys that begin with ``prefix`` are in each bucket of the next bits."""
    inside = keys[(keys >> (shift + _BITS)) == prefix]
    return torch.bincount((inside >> shift) & (_BUCKETS - 1), minlength=_BUCKETS)
