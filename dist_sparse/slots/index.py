"""Which id holds each row of a following table.

The rows of a following table are *slots*. Its state is one number for each slot: the id that holds
it, :data:`VACANT`, or a reservation for an id that comes. A slot stays where it is stored, whoever
holds it. A lookup goes the other way, by a hash table in which the ids of a bucket are stored one
after the other. It takes memory for slots alone, however many ids there are, and is made again,
when it is next read, from the state.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse.compaction.row_index import REMOVED, UNKNOWN

VACANT: Final = -1
"""In the place of an id: none holds the slot, or comes into it."""

MOST_COUNTED: Final = 2**31 - 3
"""A table of so many ids counts each of them. The reservation for the largest is the smallest
int32."""

MOST_IDS: Final = 2**62

_MULTIPLIER: Final = 0x9E3779B97F4A7C15 - 2**64
"""Of Fibonacci hashing (Knuth, The Art of Computer Programming, volume 3): the high bits of the
product are the bucket."""


def _swapped(ids: Tensor) -> Tensor:
    """Return reservations for ids, or the ids of reservations: -2 for 0, -3 for 1, and so on."""
    return -2 - ids


class _Buckets(NamedTuple):
    """The ids that hold slots, by bucket.

    Args:
        starts: where each bucket begins, int32 ``(2**bits,)``.
        ids: bucket after bucket, and as many places behind them as a bucket has at most.
        slots: of the ids, int32; behind them :data:`~dist_sparse.compaction.row_index.REMOVED`.
        longest: ids of the fullest bucket, at least 1.
    """

    starts: Tensor
    ids: Tensor
    slots: Tensor
    longest: int


class SlotIndex(nn.Module):
    """Which slot each id of one table holds.

    Args:
        rows: ids of the table, from 0.
        slots: rows that it stores.
        ids: of the first slots, int64; None for no id.

    Attributes:
        id_of_slot: int32 ``(slots,)``, or int64 above :data:`MOST_COUNTED` ids, the state: an id,
            :data:`VACANT`, or ``-2 - id`` where a slot is reserved. Loading other values into it is
            enough.
        rows, stored: ids of the table; its slots.
        hashed: whether there are too many ids to count each.

    Example::

        >>> import torch
        >>> from dist_sparse.slots.index import SlotIndex
        >>> index = SlotIndex(rows=10, slots=3, ids=torch.tensor([2, 5, 9]))
        >>> index.hand_over(leaving=torch.tensor([5]), coming=torch.tensor([0]))
        >>> index(torch.tensor([0, 2, 5, 9, 10]))  # 0 comes, 5 has left, 10 is out of range
        tensor([-1,  0, -1,  2, -2], dtype=torch.int32)
        >>> index.admit()
        (tensor([0]), tensor([1]))
        >>> index(torch.tensor([0, 2, 5, 9]))
        tensor([ 1,  0, -1,  2], dtype=torch.int32)
    """

    id_of_slot: Tensor

    def __init__(self, rows: int, slots: int, ids: Tensor | None = None) -> None:
        super().__init__()
        if not 1 <= rows <= MOST_IDS:
            raise ValueError(
                f"Invalid number of ids, {rows}: a following table has from 1 to {MOST_IDS}."
            )
        self.rows, self.stored, self.hashed = rows, slots, rows > MOST_COUNTED
        dtype = torch.int64 if self.hashed else torch.int32
        state = torch.full((slots,), VACANT, dtype=dtype)
        if ids is not None:
            state[: len(ids)] = ids
        self.register_buffer("id_of_slot", state)
        # From half an id a bucket to one, if all slots are held.
        self._bits = max(1, (slots - 1).bit_length())
        # The state that the buckets were made of. A load writes into it, moving it replaces it.
        self._made_of: tuple[Tensor | None, int] = (None, -1)
        self._buckets: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # The version of a copied tensor begins anew: buckets of the old one would seem to be its.
        return {**self.__dict__, "_made_of": (None, -1), "_buckets": None}

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of what lookups read."""
        starts, ids, slots, _ = self._current()
        return self.id_of_slot.nbytes + starts.nbytes + ids.nbytes + slots.nbytes

    @property
    def num_kept(self) -> int:
        """How many ids hold a slot."""
        return int((self.id_of_slot >= 0).count_nonzero())

    def forward(self, ids: Tensor) -> Tensor:
        """Return the slots of ids: int32, in their shape; of an id without a slot
        :data:`~dist_sparse.compaction.row_index.REMOVED`, of one out of ``[0, rows)``
        :data:`~dist_sparse.compaction.row_index.UNKNOWN`.

        ``ids`` (int32 or int64, any shape) is not changed.
        """
        buckets = self._current()
        given = ids.reshape(-1).long()
        # Cut to int32, an id out of range could be another one.
        inside = given.clamp(0, self.rows - 1)
        wanted = inside.to(buckets.ids.dtype)
        found = place = buckets.starts.index_select(0, self._bucket(inside))
        # At most one place has the id: all of a bucket are compared, and no branch is needed.
        for _ in range(1, buckets.longest):
            place = place + 1
            found = torch.where(buckets.ids.index_select(0, place) == wanted, place, found)
        slots = buckets.slots.index_select(0, found)
        slots = torch.where(buckets.ids.index_select(0, found) == wanted, slots, REMOVED)
        return torch.where(inside == given, slots, UNKNOWN).view(ids.shape)

    def held(self) -> Tensor:
        """Return the ids that hold a slot, in the order of the slots: int64 ``(n,)``."""
        return self.id_of_slot[self.id_of_slot >= 0].long()

    def holders(self) -> tuple[Tensor, Tensor]:
        """Return the ids that hold a slot, ascending, int64 ``(n,)``, and their slots, int64."""
        [slots] = (self.id_of_slot >= 0).nonzero(as_tuple=True)
        ids, order = self.id_of_slot[slots].long().sort()
        return ids, slots[order]

    def hand_over(self, leaving: Tensor, coming: Tensor) -> None:
        """Free the slots of the ids ``leaving``, and reserve slots for the ids ``coming``: the
        smallest free slot for the smallest id, and so on. Both are int64 ``(n,)``, ascending."""
        self.id_of_slot[self(leaving).long()] = VACANT
        [free] = (self.id_of_slot == VACANT).nonzero(as_tuple=True)
        self.id_of_slot[free[: len(coming)]] = _swapped(coming).to(self.id_of_slot.dtype)

    def admit(self) -> tuple[Tensor, Tensor]:
        """Let ids hold the slots that are reserved for them; return these ids and slots, both int64
        ``(n,)``."""
        [slots] = (self.id_of_slot < VACANT).nonzero(as_tuple=True)
        ids = _swapped(self.id_of_slot[slots])
        self.id_of_slot[slots] = ids
        return ids.long(), slots

    def _bucket(self, ids: Tensor) -> Tensor:
        """Return the bucket of ids, int64."""
        # The sign is shifted in, and masked away.
        last = (1 << self._bits) - 1
        return (ids * _MULTIPLIER).bitwise_right_shift_(64 - self._bits).bitwise_and_(last)

    def _current(self) -> _Buckets:
        """Return the buckets, made of the state as it is now."""
        state = self.id_of_slot
        made_of, version = self._made_of
        if made_of is state and version == state._version:
            found: _Buckets = self._buckets
            return found
        [slots] = (state >= 0).nonzero(as_tuple=True)
        bucket = self._bucket(state[slots].long())
        sizes = torch.bincount(bucket, minlength=1 << self._bits)
        slots = slots[bucket.int().argsort()]
        longest = max(1, int(sizes.max()))
        behind = state.new_full((longest,), VACANT)
        self._buckets = made = _Buckets(
            (sizes.cumsum(0) - sizes).int(),
            torch.cat([state[slots], behind]),
            torch.cat([slots.int(), behind.int()]),
            longest,
        )
        self._made_of = (state, state._version)
        return made
