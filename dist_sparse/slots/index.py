"""Which id holds each row of a following table.

The rows of a following table are *slots*. Its state is one number for each slot: the id that holds
it, :data:`VACANT`, or a reservation for an id that comes. A slot stays where it is stored, whoever
holds it. A lookup goes the other way: a bitmap of the ids that hold a slot tells the rank of an id
among them, and a list the slot of each rank. Both are made again, when they are next read, from the
state.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from dist_sparse.compaction.row_index import RowIndex

VACANT: Final = -1
"""In the place of an id: none holds the slot, or comes into it."""

MOST_IDS: Final = 2**31 - 3
"""A reservation for the largest id is the smallest int32."""


def _swapped(ids: Tensor) -> Tensor:
    """Return reservations for ids, or the ids of reservations: -2 for 0, -3 for 1, and so on."""
    return -2 - ids


class SlotIndex(nn.Module):
    """Which slot each id of one table holds.

    Args:
        rows: ids of the table, from 0.
        slots: rows that it stores.
        ids: of the first slots, ascending, int64; None for no id.

    Attributes:
        id_of_slot: int32 ``(slots,)``, the state: an id, :data:`VACANT`, or ``-2 - id`` where a
            slot is reserved. Loading other values into it is enough.
        rows, stored: ids of the table; its slots.

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
                f"Invalid number of ids, {rows}: a following table has from 1 to {MOST_IDS},"
                " because its index is a bitmap. Hash larger ids into that range."
            )
        self.rows, self.stored = rows, slots
        state = torch.full((slots,), VACANT, dtype=torch.int32)
        if ids is not None:
            state[: len(ids)] = ids
        self.register_buffer("id_of_slot", state)
        # In a list: the state holds all that a checkpoint needs.
        self._index = [RowIndex(torch.zeros(-(-rows // 32), dtype=torch.int32), rows)]
        self._slots = torch.zeros(slots, dtype=torch.int32)
        # The state that the two were made of. A load writes into it, moving it replaces it.
        self._made_of: tuple[Tensor | None, int] = (None, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of what lookups read."""
        [index] = self._index
        return self.id_of_slot.nbytes + index.nbytes + self._slots.nbytes

    @property
    def state(self) -> Tensor:
        """What changes when slots change hands."""
        return self.id_of_slot

    @property
    def num_kept(self) -> int:
        """How many ids hold a slot."""
        return self._current().num_kept

    def forward(self, ids: Tensor) -> Tensor:
        """Return the slots of ids: int32, in their shape; of an id without a slot
        :data:`~dist_sparse.compaction.row_index.REMOVED`, of one out of ``[0, rows)``
        :data:`~dist_sparse.compaction.row_index.UNKNOWN`.

        ``ids`` (int32 or int64, any shape) is not changed.
        """
        index = self._current()
        ranks = index(ids).int()
        slots = self._slots.index_select(0, ranks.clamp(min=0).view(-1)).view(ids.shape)
        return torch.where(ranks < 0, ranks, slots)

    def kept(self) -> Tensor:
        """Return which ids hold a slot: bool ``(rows,)``."""
        return self._current().kept()

    def holders(self) -> tuple[Tensor, Tensor]:
        """Return the ids that hold a slot, ascending, int64 ``(n,)``, and their slots, int64."""
        self._current()
        slots = self._slots[: self.num_kept].long()
        return self.id_of_slot[slots].long(), slots

    def hand_over(self, leaving: Tensor, coming: Tensor) -> None:
        """Free the slots of the ids ``leaving``, and reserve slots for the ids ``coming``: the
        smallest free slot for the smallest id, and so on. Both are int64 ``(n,)``, ascending."""
        self.id_of_slot[self(leaving).long()] = VACANT
        [free] = (self.id_of_slot == VACANT).nonzero(as_tuple=True)
        self.id_of_slot[free[: len(coming)]] = _swapped(coming).int()

    def admit(self) -> tuple[Tensor, Tensor]:
        """Let ids hold the slots that are reserved for them; return these ids and slots, both int64
        ``(n,)``."""
        [slots] = (self.id_of_slot < VACANT).nonzero(as_tuple=True)
        ids = _swapped(self.id_of_slot[slots])
        self.id_of_slot[slots] = ids
        return ids.long(), slots

    def _current(self) -> RowIndex:
        """Return the bitmap, after what lookups read has been made of the state as it is now."""
        state, [index] = self.id_of_slot, self._index
        made_of, version = self._made_of
        if made_of is state and version == state._version:
            return index
        index.to(state.device)
        [slots] = (state >= 0).nonzero(as_tuple=True)
        ids, order = state[slots].long().sort()
        index.keep(ids)
        self._slots = torch.zeros_like(state)
        self._slots[: len(slots)] = slots[order].int()
        self._made_of = (state, state._version)
        return index
