"""Samples of the traffic: how many lookups of a kernel name rows that the masks remove.

One forward in :data:`EVERY` is counted, in training only, so that counting costs next to nothing
for any score. The sums are stored with the masks
(:meth:`~dist_sparse.sparsifiers.packed_store.PackedStore.samples`) and start at 0 with new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from dist_sparse.enforcer.rows import Slot, in_table
from dist_sparse.sparsifiers.stats import dead_flags

__all__ = ["EVERY", "SampledLookups"]

EVERY: Final = 16
"""Forwards of which one is counted, the first of them."""


class SampledLookups:
    """Counts lookups of the tables of one kernel, and those of removed rows.

    Args:
        features: for each feature the number of its table.
    """

    def __init__(self, features: Sequence[int]) -> None:
        self._features = list(features)
        self._slots: list[Slot | None] = []
        self._sums: list[Tensor | None] = []
        self._removed: dict[int, Tensor] = {}
        self._forwards = 0

    def begin(self, slots: Sequence[Slot | None], sums: Sequence[Tensor | None]) -> None:
        """Take new masks.

        Args:
            slots: of each table; None where nothing is registered.
            sums: for each table int64 ``(2,)``, its lookups and those of removed rows, added to in
                place.
        """
        self._slots, self._sums = list(slots), list(sums)
        self._removed.clear()

    def due(self) -> bool:
        """Whether this forward is counted."""
        counted = self._forwards % EVERY == 0
        self._forwards += 1
        return counted

    def add(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Count one forward; ``ids`` and ``ends`` as in
        :class:`~dist_sparse.enforcer.rows.Lookup`."""
        if isinstance(ends, Tensor):
            self._add_on_device(ids, ends)
            return
        for table, (start, stop) in zip(self._features, pairwise(ends), strict=True):
            slot, sums = self._slots[table], self._sums[table]
            if slot is None or sums is None or start == stop:
                continue
            sums[0] += stop - start
            if slot.mask.removes:
                rows = in_table(ids[start:stop], slot.mask.rect.rows)
                sums[1] += self._flags(table, slot).index_select(0, rows).sum()

    def _add_on_device(self, ids: Tensor, ends: Tensor) -> None:
        """:meth:`add` without waiting for the device: every feature looks at all ids, and masks
        those of others."""
        places = torch.arange(ids.numel(), device=ids.device)
        features = torch.bucketize(places, ends.long().contiguous(), right=True) - 1
        for number, table in enumerate(self._features):
            slot, sums = self._slots[table], self._sums[table]
            if slot is None or sums is None or not slot.mask.rect.rows:
                continue
            mine = features == number
            sums[0] += mine.sum()
            if slot.mask.removes:
                rows = in_table(ids, slot.mask.rect.rows).masked_fill(~mine, 0)
                sums[1] += (self._flags(table, slot).index_select(0, rows) & mine).sum()

    def _flags(self, table: int, slot: Slot) -> Tensor:
        """Which rows of a table are removed whole, bool ``(rows,)``; made once for each mask."""
        if table not in self._removed:
            self._removed[table] = dead_flags(slot.mask).to(slot.weight.device)
        return self._removed[table]
