"""Lookup counts of the ids of a table, which are cut into one range a rank: that rank counts them.

:class:`LookupCounts` has a count for each id of its range, :class:`CandidateCounts` for some: of a
table with too many ids, the most looked-up ones have a count, and the others none.

A count is an int32. With a decay, old lookups weigh less: rather than multiply all counts at every
update, a new lookup weighs more. When its weight has grown :data:`_GROWTH`-fold, all counts are
divided once. So an update reads only what was looked up since the update before.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

MOST: Final = 1 << 30
"""Counts stop there: that of more lookups than any other id needs no order."""

_UNIT: Final = 16
"""Weight of a lookup at first, where counts decay: shares of a lookup are counted."""

_GROWTH: Final = 16
"""Counts are divided when a lookup weighs so many times as much as at first."""

_SPAN: Final = 1 << 22
"""Counts that are read together: temporaries take several times their memory."""


class Weight:
    """What a lookup adds to a count.

    Args:
        decay: what a lookup is worth after each update, in (0, 1].
        age: updates since counts were divided.

    Example::

        >>> from dist_sparse.slots.counts import Weight
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
        >>> from dist_sparse.slots.counts import LookupCounts
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
        for start in range(0, len(self.counts), _SPAN):
            [places] = (self.counts[start : start + _SPAN] >= least).nonzero(as_tuple=True)
            found.append(places + (self.first + start))
        return torch.cat(found)

    def seen_all(self) -> None:
        """Begin to note which ids are looked up: an update has compared all before."""
        self._touched = []

    def load(self, counts: Tensor) -> None:
        """Take other counts, of which no update has seen any."""
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
        >>> from dist_sparse.slots.counts import CandidateCounts
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

    def load(self, counts: Tensor, ids: Tensor) -> None:
        """Take other counts, of ids in ascending order."""
        self.counts, self.ids = counts, ids

    def keep(self, flags: Tensor) -> None:
        """Forget the counts of all ids but some: bool ``(n,)``."""
        self.load(self.counts[flags], self.ids[flags])

    def divide(self, weight: int) -> None:
        """Bring counts down after lookups have weighed ``weight``, rounding down."""
        self.counts = (self.counts.long() * _UNIT // weight).int()
