"""Lookup counts of the ids of a table, and the selection of the hottest ids.

Each rank owns one contiguous range of the ids and counts their lookups. :class:`LookupCounts` has a
count for every id of the range. :class:`CandidateCounts` has counts for the hottest ids only, for
tables with too many ids to count each.

A count is one byte. Its low 4 bits are the lookups, at most 15, halved once per half-life. Its high
4 bits are the age: the updates since the last lookup, at most 15. An id ranks by lookups divided by
age + 1. Both are small integers, so all scores are listed in :data:`_SCORES`, and ids are compared
by a score's place in this list: no rounding decides.

Selection is exact over all ranks. Each rank contributes the owned ids that hold a slot, and those
that were looked up since the last update: no other id may win one. They are ordered by score, then
holders before others, then smaller ids first. So a slot does not change its holder for a tie, and
the result does not depend on the number of ranks.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.extras.following.slot_index import VACANT
from dist_sparse.groups import Group
from dist_sparse.parcels import Parcels
from dist_sparse.tables.chunked import ChunkedTensor

# Counts

# Lookups, and updates since the last one, saturate here: 4 bits each.
MOST = 15

# How many counts are processed at a time: two copies of them fit a core's cache.
_SPAN = 1 << 19

# Eight counts are processed as one int64. 1 in the low bit of each age:
_ONE_YEAR = 0x1010101010101010
_AGES = 0xF0F0F0F0F0F0F0F0 - (1 << 64)


def lookups_of(counts: Tensor) -> Tensor:
    """Return the lookups in counts: uint8 ``(n,)``."""
    return counts.bitwise_and(MOST)


def plus(counts: Tensor, times: Tensor) -> Tensor:
    """Return counts, uint8 ``(n,)``, after more lookups, int64 ``(n,)``: they have age 0."""
    # Clamp first: a sum of many lookups would wrap.
    return (lookups_of(counts) + times.clamp(max=MOST)).clamp_(max=MOST).to(torch.uint8)


def pass_update(words: Tensor, halvings: int) -> None:
    """Age counts by one update, then halve their lookups, rounding down. In place.

    Args:
        words: eight counts each, int64 ``(n,)``.
        halvings: how often to halve.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.selection import pass_update
        >>> counts = torch.tensor([0x0F, 0x13, 0xF8, 0, 0, 0, 0, 0], dtype=torch.uint8)
        >>> pass_update(counts.view(torch.int64), halvings=1)
        >>> [hex(count) for count in counts[:3].tolist()]
        ['0x17', '0x21', '0xf4']
    """
    # The bits of lookups that are left after the shift, in each byte.
    left = (MOST >> halvings) * 0x0101010101010101
    for part in torch.split(words, _SPAN // 8):
        # The low bit of an age is 1 here if all of its bits are: it has saturated.
        full = part & (part >> 1)
        full &= full >> 2
        part += full.bitwise_not_().bitwise_and_(_ONE_YEAR)
        if halvings:
            lookups = (part >> halvings).bitwise_and_(left)
            part.bitwise_and_(_AGES).bitwise_or_(lookups)


class LookupCounts:
    """Counts of the ids ``[first, last)`` of a table, on the rank that owns them.

    Args:
        first, last: the owned ids.

    Attributes:
        counts: uint8 ``(last - first,)``.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.selection import LookupCounts
        >>> owned = LookupCounts(10, 20)
        >>> owned.add(torch.tensor([11, 15]), torch.tensor([3, 1]))
        >>> owned.looked_up(least=1), owned.looked_up(least=2)
        (tensor([11, 15]), tensor([11]))
        >>> owned.pass_update(halvings=1)
        >>> owned.looked_up(least=1), owned.of(torch.tensor([11]))  # age 1, one lookup
        (tensor([], dtype=torch.int64), tensor([17], dtype=torch.uint8))
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._words = torch.zeros(-(-(last - first) // 8), dtype=torch.int64)
        self.counts = self._words.view(torch.uint8)[: last - first]
        # The places of the ids looked up since the last update. None after a load: their counts
        # have age 0, which takes a pass over all of them to find.
        self._touched: list[Tensor] | None = []

    def add(self, ids: Tensor, times: Tensor) -> None:
        """Add lookups.

        Args:
            ids: distinct owned ids, ascending, int ``(n,)``.
            times: lookups of each, int64 ``(n,)``.
        """
        places = ids.long() - self.first
        self.counts[places] = plus(self.counts[places], times)
        if self._touched is not None:
            self._touched.append(places.int())

    def of(self, ids: Tensor) -> Tensor:
        """Return the counts of owned ids: uint8 ``(n,)``."""
        return self.counts[ids - self.first]

    def looked_up(self, least: int) -> Tensor:
        """Return the ids looked up since the last update that have at least ``least`` lookups:
        ascending, int64 ``(n,)``."""
        if self._touched is not None:
            touched = torch.cat([torch.empty(0, dtype=torch.int32), *self._touched])
            places = touched[self.counts[touched] >= least]
            # Ids that were added at once are distinct, and ascend.
            if len(self._touched) > 1:
                places = torch.unique(places)
            return places.long() + self.first
        found = [torch.empty(0, dtype=torch.int64)]
        for number, part in enumerate(torch.split(self.counts, _SPAN)):
            places = _places_of_age_0(part, least)
            found.append(places + (self.first + number * _SPAN))
        return torch.cat(found)

    def num_seen(self) -> int:
        """Return how many owned ids have lookups."""
        parts = torch.split(self.counts, _SPAN)
        return sum(int(lookups_of(part).count_nonzero()) for part in parts)

    def pass_update(self, halvings: int) -> None:
        """Begin the interval after an update, as :func:`pass_update` says."""
        pass_update(self._words, halvings)
        self._touched = []

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
        fits = found.shape == self.counts.shape and found.dtype == torch.uint8
        _refuse_unless(fits, self, table)
        return [found]

    def load(self, counts: Tensor) -> None:
        """Replace the counts."""
        self.counts.copy_(counts)
        self._touched = None


class CandidateCounts:
    """Counts of some of the ids ``[first, last)``, on the rank that owns them; others count 0.

    Args:
        first, last: the owned ids.

    Attributes:
        ids: the ids that have a count, int64 ``(n,)``, ascending.
        counts: uint8 ``(n,)``.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.selection import CandidateCounts
        >>> owned = CandidateCounts(0, 2**40)
        >>> owned.add(torch.tensor([7, 2**39]), torch.tensor([3, 1]))
        >>> owned.add(torch.tensor([7, 8]), torch.tensor([1, 1]))
        >>> owned.keep(torch.tensor([True, False, True]))
        >>> owned.of(torch.tensor([7, 8, 2**39]))
        tensor([4, 0, 1], dtype=torch.uint8)
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.counts = torch.empty(0, dtype=torch.uint8)
        self.ids = torch.empty(0, dtype=torch.int64)

    def add(self, ids: Tensor, times: Tensor) -> None:
        """Add lookups, as :meth:`LookupCounts.add` does. New ids get a count."""
        both, places = torch.unique(torch.cat([self.ids, ids.long()]), return_inverse=True)
        counts = torch.zeros(len(both), dtype=torch.uint8)
        old, new = places.tensor_split([len(self.ids)])
        counts[old] = self.counts
        counts[new] = plus(counts[new], times)
        self.load(counts, both)

    def of(self, ids: Tensor) -> Tensor:
        """Return the counts of owned ids: uint8 ``(n,)``."""
        places = torch.searchsorted(self.ids, ids.long())
        # An id above all candidates is placed after the last one, where no id is.
        candidates = nn.functional.pad(self.ids, (0, 1), value=VACANT)
        counts = nn.functional.pad(self.counts, (0, 1))
        return torch.where(candidates[places] == ids, counts[places], 0)

    def looked_up(self, least: int) -> Tensor:
        """Return ids as :meth:`LookupCounts.looked_up` does."""
        return self.ids[_places_of_age_0(self.counts, least)]

    def num_seen(self) -> int:
        """Return how many owned ids have lookups."""
        return int(lookups_of(self.counts).count_nonzero())

    def pass_update(self, halvings: int) -> None:
        """Begin the interval after an update, as :func:`pass_update` says."""
        words = nn.functional.pad(self.counts, (0, -len(self.counts) % 8)).view(torch.int64)
        pass_update(words, halvings)
        self.counts = words.view(torch.uint8)[: len(self.counts)]

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
        ids, counts = all_ids[owned], all_counts[owned]
        fits &= bool((all_ids >= VACANT).all() & (ids.diff() > 0).all())
        # uint8 would wrap a larger count into the valid ones.
        fits &= bool(((counts >= 0) & (counts < 256)).all())
        _refuse_unless(fits, self, table)
        return [counts.to(torch.uint8), ids]

    def load(self, counts: Tensor, ids: Tensor) -> None:
        """Replace the counts and their ids, which ascend."""
        self.counts = counts
        self.ids = ids

    def keep(self, flags: Tensor) -> None:
        """Drop the counts of all ids that are not flagged: bool ``(n,)``."""
        self.load(self.counts[flags], self.ids[flags])


def _places_of_age_0(counts: Tensor, least: int) -> Tensor:
    """Return where counts of age 0 have at least ``least`` lookups, int64 ``(n,)``."""
    [places] = ((counts >= least) & (counts <= MOST)).nonzero(as_tuple=True)
    return places


def _refuse_unless(fits: bool, owner: LookupCounts | CandidateCounts, table: str) -> None:
    """Refuse counts from a state that do not belong to the owned ids."""
    if not fits:
        raise ValueError(
            f"Table {table!r}: the state has no valid counts of the ids [{owner.first},"
            f" {owner.last}). Load a state of other ranks by torch.distributed.checkpoint."
        )


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

# All scores of counts, ascending: lookups / (age + 1).
_SCORES = sorted({Fraction(count % 16, count // 16 + 1) for count in range(256)})

# The ranking key of each count without a slot. It is even: a holder's is the next one.
_KEYS = torch.tensor([2 * _SCORES.index(Fraction(c % 16, c // 16 + 1)) for c in range(256)])

# The ranking key of protected ids. It is above the key of any count.
PROTECTED = 2 * len(_SCORES)


def ranking_keys(counts: Tensor) -> Tensor:
    """Return the keys that order counts, uint8 ``(n,)``, by their scores: even, int64 ``(n,)``.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.selection import ranking_keys
        >>> counts = torch.tensor([0x02, 0x14, 0x15], dtype=torch.uint8)  # 2/1, 4/2, 5/2
        >>> a, b, c = ranking_keys(counts).tolist()
        >>> a == b < c
        True
    """
    return _KEYS.index_select(0, counts.int())


def admission_counts(slots: Sequence[int], keys: Sequence[Tensor], group: Group) -> list[int]:
    """Return for each table how many lookups an id without a slot needs at least to win one.
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
    # While a slot is free, any count wins it: 0. Otherwise a key above the coldest holder's is
    # needed. An id that may win one has age 0, so its count is its number of lookups.
    is_full = holders.sum(0) == torch.tensor(slots)
    too_few = (_KEYS[: MOST + 1] <= coldest.amin(0)[:, None]).sum(1)
    return (is_full * too_few).tolist()


def select_winners(
    slots: Sequence[int], keys: Sequence[Tensor], ids: Sequence[Tensor], group: Group
) -> list[Tensor]:
    """Return for each table which of the owned ids hold a slot from now on: bool ``(n,)``.
    Collective over ``group``: an all-reduce of 2.5 KiB a table, and an all-gather.

    Args:
        slots: number of slots of each table, over all ranks.
        keys: for each table, the ranking keys of the owned ids that may hold a slot, int64
            ``(n,)``: the larger key wins, then the smaller id.
        ids: for each table, these ids, int64 ``(n,)``, in any order.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.selection import select_winners
        >>> from dist_sparse.groups import group_over
        >>> keys, ids = torch.tensor([6, 2, 6, 6]), torch.tensor([9, 1, 4, 7])
        >>> select_winners([2], [keys], [ids], group_over(None))
        [tensor([False, False,  True,  True])]
    """
    here = [torch.bincount(table_keys, minlength=PROTECTED + 1) for table_keys in keys]
    counts = group.all_reduce(torch.stack(here))
    # How many ids have a key or a larger one. The numbers descend along the keys.
    from_here = counts.flip(1).cumsum(1).flip(1)
    # If there are fewer ids than slots, all win, and the smallest key is the last winning one.
    left = torch.minimum(torch.tensor(slots, dtype=torch.int64), from_here[:, 0])
    lasts = ((from_here >= left[:, None]).sum(1) - 1).clamp(min=0)
    # Slots that remain for the ids with the last winning key.
    left -= (from_here - counts).gather(1, lasts[:, None]).squeeze(1)
    tied = [table_keys == last for table_keys, last in zip(keys, lasts, strict=True)]
    num_tied = torch.stack([flags.sum() for flags in tied])
    # Smaller ids win a tie, and lower ranks own smaller ids.
    left -= group.all_gather(num_tied)[: group.rank].sum(0)
    winners = []
    for number, flags in enumerate(tied):
        wins = keys[number] > lasts[number]
        some = min(int(left[number]), int(flags.sum()))
        if some > 0:
            last_id = ids[number][flags].kthvalue(some).values
            wins |= flags & (ids[number] <= last_id)
        winners.append(wins)
    return winners
