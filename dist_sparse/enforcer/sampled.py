"""Sample lookups, and lookups of removed rows, by table.

One forward in :data:`EVERY` is counted, in training only, so that counting costs next to nothing
for any score. The sums are stored with the masks
(:meth:`~dist_sparse.sparsifiers.packed_store.PackedStore.samples`) and start at 0 with new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from dist_sparse.enforcer.rows import Slot, ids_by_feature, in_table
from dist_sparse.masking.masks import BlockMask

EVERY: Final = 16
"""One forward in so many is counted, beginning with the first after a mask update."""


class SampledLookups:
    """Counts lookups of the tables of one batch, and lookups of removed rows.

    Args:
        features: for each feature the number of its table.
    """

    def __init__(self, features: Sequence[int]) -> None:
        self._features = list(features)
        self._slots: Mapping[int, Slot] = {}
        self._sums: Mapping[int, Tensor] = {}
        self._removed: dict[int, Tensor] = {}
        self._forwards = 0

    def begin(self, slots: Mapping[int, Slot], sums: Mapping[int, Tensor]) -> None:
        """Take new masks; both by the number of the table.

        Args:
            slots: of the registered tables.
            sums: int64 ``(2,)`` each, all lookups and those of removed rows, added to in place.
        """
        self._slots, self._sums = slots, sums
        self._removed.clear()
        self._forwards = 0

    def has(self, table: int, mask: BlockMask) -> bool:
        """Return whether this is the mask of a table since :meth:`begin`."""
        slot = self._slots.get(table)
        return slot is not None and slot.mask is mask

    def due(self) -> bool:
        """Whether this forward is counted."""
        counted = self._forwards % EVERY == 0
        self._forwards += 1
        return counted

    def add(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Count one forward; ``ids`` and ``ends`` as in
        :class:`~dist_sparse.enforcer.rows.RowCleaner`."""
        for table, (some, mine) in zip(self._features, ids_by_feature(ids, ends), strict=True):
            slot = self._slots.get(table)
            if slot is None or not some.numel():
                continue
            sums = self._sums[table]
            sums[0] += some.numel() if mine is None else mine.sum()
            if slot.mask.removes:
                rows = in_table(some, slot.mask.rect.rows)
                # Ids of other features may be outside of this table: they read row 0.
                rows = rows if mine is None else rows.masked_fill(~mine, 0)
                removed = self._flags(table, slot).index_select(0, rows)
                sums[1] += (removed if mine is None else removed & mine).sum()

    def _flags(self, table: int, slot: Slot) -> Tensor:
        """Which rows of a table are removed whole, bool ``(rows,)``; made once for each mask."""
        if table not in self._removed:
            self._removed[table] = slot.mask.dead_rows()
        return self._removed[table]
