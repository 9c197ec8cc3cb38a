"""The slot that each id of a following table holds, and the nursery row that it reads without one.

The state is a tensor of ids by slot. Lookups search a hash table that is rebuilt when it changes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse import checks
from dist_sparse.compaction.row_index import REMOVED, UNKNOWN

# Marks a slot that no id holds, and that is reserved for none.
VACANT = -1

# Tables of at most this many ids count each id. The reservation of the largest id, -2 - id, is then
# the smallest int32.
MOST_COUNTED = 2**31 - 3

# The bound keeps all sums and differences of ids within int64.
MOST_IDS = 2**62

# 2**64 / golden ratio, as a signed int64: Fibonacci hashing (Knuth, The Art of Computer
# Programming, volume 3, section 6.4). The high bits of the product are the bucket.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64

# The first multiplier of MurmurHash3's finalizer, as a signed int64.
_MIXER = 0xFF51AFD7ED558CCD - 2**64


def hashed_row(ids: Tensor, rows: int) -> Tensor:
    """Return which of ``rows`` rows ids share, int64 in the shape of ``ids``, int64.

    The high half of a product is mixed into its low half and multiplied again: a product alone
    leaves most rows empty for some numbers of rows and ids.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.slot_index import hashed_row
        >>> hashed_row(torch.arange(6), 3)
        tensor([0, 1, 0, 2, 0, 1])
    """
    mixed = ids * _MULTIPLIER
    mixed ^= (mixed >> 32) & 0xFFFFFFFF
    mixed *= _MIXER
    # The top 31 bits, a number below 1 with 31 binary places, times the rows.
    return ((mixed >> 33) & 0x7FFFFFFF).mul_(rows).bitwise_right_shift_(31)


class _Buckets(NamedTuple):
    """A hash table of the held slots, keyed by the ids that hold them.

    It stores no ids: ``SlotIndex.id_of_slot`` has them. Every rank has the whole table, so 4 bytes
    a slot here are 4 bytes a slot and rank.

    Args:
        state, version: the ``id_of_slot`` that it was built from, and its version then.
        starts: the first place of each bucket in ``slots``, int32 ``(2**bits,)``.
        slots: bucket after bucket, int32, padded with ``longest`` zeros so that a lookup may read
            ``longest`` places from any start.
        longest: slots in the fullest bucket, at least 1.
    """

    state: Tensor
    version: int
    starts: Tensor
    slots: Tensor
    longest: int


class SlotIndex(nn.Module):
    """The slot that each id of one table holds.

    Args:
        rows: number of ids; they begin at 0.
        slots: number of slots, the first rows that the table stores.
        ids: the holders of the first slots, int64.
        nursery: number of rows after the slots, which the ids without a slot share.

    Attributes:
        id_of_slot: int32 ``(slots,)``, or int64 above :data:`MOST_COUNTED` ids, the whole state: an
            id, :data:`VACANT`, or ``-2 - id`` where a slot is reserved. It may be overwritten in
            place or replaced: lookups rebuild their hash table.
        table: its name, for messages; its collection sets it.
        rows, slots, nursery, stored: number of ids, of slots, of nursery rows, and of both kinds of
            rows.
        nursery_scale: what a lookup multiplies a nursery row by. While it is 0, ids without a slot
            read zeros, and train nothing.
        hashed: whether the table has too many ids to count each.

    Example::

        >>> import torch
        >>> from dist_sparse.extras.following.slot_index import SlotIndex
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

    def __init__(
        self, rows: int, slots: int, ids: Tensor | Sequence[int] = (), nursery: int = 0
    ) -> None:
        super().__init__()
        self.table = ""
        self.rows = checks.integer("num_embeddings", rows, least=1, most=MOST_IDS)
        self.slots, self.nursery, self.stored = slots, nursery, slots + nursery
        self.nursery_scale = 0.0
        self.hashed = rows > MOST_COUNTED
        dtype = torch.int64 if self.hashed else torch.int32
        state = torch.full((slots,), VACANT, dtype=dtype)
        state[: len(ids)] = torch.as_tensor(ids)
        self.register_buffer("id_of_slot", state)
        # If all slots are held, a bucket has between half a slot and one on average.
        self._bits = max(1, (slots - 1).bit_length())
        self._buckets: _Buckets | None = None

    def refuse_invalid(self, state: Tensor) -> None:
        """Raise ValueError if a tensor can't be :attr:`id_of_slot`: it is damaged, or of another
        table."""
        taken = state[state != VACANT]
        # Reserved ids too: see admit().
        ids = torch.where(taken < 0, -2 - taken, taken)
        own = self.id_of_slot
        fits = (state.dtype, state.shape) == (own.dtype, own.shape)
        if not fits or (ids >= self.rows).any() or len(torch.unique(ids)) < len(ids):
            raise ValueError(
                f"Invalid id_of_slot of table {self.table!r}: must be distinct ids in"
                f" [0, {self.rows}), {own.dtype} {tuple(own.shape)}."
            )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # If the key is missing, torch raises.
        self.refuse_invalid(state_dict.get(f"{prefix}id_of_slot", self.id_of_slot))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        # The version of a copied tensor starts at 0 again, so stale buckets could pass as current.
        return {**self.__dict__, "_buckets": None}

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of the hash table, on this rank."""
        buckets = self._current_buckets()
        return self.id_of_slot.nbytes + buckets.starts.nbytes + buckets.slots.nbytes

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows that ids read: their slots, or their nursery rows. Like
        :meth:`slots_of` in all else."""
        slots = self.slots_of(ids)
        if not (self.nursery and self.nursery_scale):
            return slots
        return torch.where(slots == REMOVED, self.nursery_rows(ids.long()).int(), slots)

    def nursery_rows(self, ids: Tensor) -> Tensor:
        """Return the nursery rows of ids, which a hash chooses: int64 in the shape of ``ids``,
        int64."""
        return hashed_row(ids, self.nursery).add_(self.slots)

    def slots_of(self, ids: Tensor) -> Tensor:
        """Return the slots of ids, int32 in the shape of ``ids``:
        :data:`~dist_sparse.compaction.row_index.REMOVED` for an id without a slot,
        :data:`~dist_sparse.compaction.row_index.UNKNOWN` for an id outside ``[0, rows)``.

        ``ids`` (int32 or int64, any shape) is not changed.
        """
        state, _, starts, slots, longest = self._current_buckets()
        flat = ids.reshape(-1).long()
        # Clamp before the cast: an id out of range, cut to int32, could equal another id.
        inside = flat.clamp(0, self.rows - 1)
        wanted = inside.to(state.dtype)
        place = starts.index_select(0, self._bucket(inside))
        found = slots.index_select(0, place)
        # Every lookup compares as many places as the fullest bucket has. Reading into the next
        # bucket or the padding is harmless: a slot counts only if this id holds it, and an id holds
        # at most one.
        for _ in range(1, longest):
            place = place + 1
            slot = slots.index_select(0, place)
            found = torch.where(state.index_select(0, slot) == wanted, slot, found)
        found = torch.where(state.index_select(0, found) == wanted, found, REMOVED)
        return torch.where(inside == flat, found, UNKNOWN).view(ids.shape)

    def holders(self) -> tuple[Tensor, Tensor]:
        """Return the ids that hold a slot, ascending, int64 ``(n,)``, and their slots, int64."""
        [slots] = (self.id_of_slot >= 0).nonzero(as_tuple=True)
        ids, order = self.id_of_slot[slots].long().sort()
        return ids, slots[order]

    def hand_over(self, leaving: Tensor, coming: Tensor) -> None:
        """Free the slots of the ids ``leaving``, and reserve slots for the ids ``coming``: the
        smallest free slot for the smallest id, and so on. Both are int64 ``(n,)``, ascending.

        A reserved slot belongs to no id yet: lookups of ``coming`` find none before
        :meth:`admit`."""
        state, buckets = self.id_of_slot, self._current_buckets()
        state[self.slots_of(leaving).long()] = VACANT
        [free] = (state == VACANT).nonzero(as_tuple=True)
        state[free[: len(coming)]] = (-2 - coming).to(state.dtype)
        # The hash table stays valid: a lookup compares the holder, and these slots have none.
        self._buckets = buckets._replace(version=state._version)

    def reserved(self) -> tuple[Tensor, Tensor]:
        """Return the ids that slots are reserved for, and these slots, both int64 ``(n,)``."""
        [slots] = (self.id_of_slot < VACANT).nonzero(as_tuple=True)
        # A reservation is -2 - id, which is its own inverse.
        return -2 - self.id_of_slot[slots].long(), slots

    def admit(self) -> tuple[Tensor, Tensor]:
        """Turn reservations into holders; return the new holders and their slots, both int64
        ``(n,)``."""
        ids, slots = self.reserved()
        if len(slots):
            self.id_of_slot[slots] = ids.to(self.id_of_slot.dtype)
            # Now, in step(): otherwise the next forward would build it.
            self._current_buckets()
        return ids, slots

    def _bucket(self, ids: Tensor) -> Tensor:
        """Return the bucket of ids, int64."""
        # Right shifts of int64 copy the sign: the mask removes it.
        last = (1 << self._bits) - 1
        return (ids * _MULTIPLIER).bitwise_right_shift_(64 - self._bits).bitwise_and_(last)

    def _current_buckets(self) -> _Buckets:
        """Return the hash table of the current state, rebuilt if the state has changed."""
        state = self.id_of_slot
        buckets = self._buckets
        # A load writes into the tensor, and moving the module replaces it.
        if not buckets or buckets.state is not state or buckets.version != state._version:
            [slots] = (state >= 0).nonzero(as_tuple=True)
            bucket = self._bucket(state[slots].long())
            sizes = torch.bincount(bucket, minlength=1 << self._bits)
            longest = max(1, int(sizes.max()))
            starts = (sizes.cumsum(0) - sizes).int()
            slots = nn.functional.pad(slots[bucket.int().argsort(stable=True)], (0, longest)).int()
            self._buckets = buckets = _Buckets(state, state._version, starts, slots, longest)
        return buckets
