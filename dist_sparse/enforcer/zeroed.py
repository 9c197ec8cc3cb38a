"""Mask rows by zeroing: removed weights that a backward has revived are cleaned before a lookup
reads them, or before weights are scored, saved or read."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from dist_sparse.enforcer.rows import DirtyRows, RowCleaner, Slot, TorchRowCleaner, zero_rows
from dist_sparse.masking.flat import Pruned, prune
from dist_sparse.tables.shards import Shard


class ZeroedRows:
    """The rows of the tables of one batch, and which of them are dirty.

    Args:
        features: for each feature the number of its table.
        device: of the tables.

    Attributes:
        revived: removed weights of any row may be nonzero, after a write of unknown rows. Tables
            that are not watched have no other way to say so.
    """

    def __init__(self, features: Sequence[int], device: torch.device) -> None:
        self._features = list(features)
        self._device = device
        self._slots: Mapping[int, Slot] = {}
        self._dirty = DirtyRows({}, features, device)
        self._cleaner: RowCleaner = TorchRowCleaner([], self._dirty)
        self.revived = False

    def use(self, slots: Mapping[int, Slot], watched: Collection[int]) -> None:
        """Take new masks.

        Args:
            slots: of all registered tables, by the number of the table.
            watched: the tables whose rows are flagged and cleaned. In all others removed rows stay
                zero by themselves.
        """
        self._slots = slots
        if self._dirty.tables.keys() != set(watched):
            # The old flags are lost: any row may be dirty.
            self.revived |= bool(self._dirty)
            rows = {table: slots[table].mask.rect.rows for table in watched}
            self._dirty = DirtyRows(rows, self._features, self._device)
        of_features = [slots[table] if table in watched else None for table in self._features]
        self._cleaner = row_cleaner_on(self._device, of_features, self._dirty)

    @property
    def cleans_lookups(self) -> bool:
        """Whether :meth:`clean_read` has anything to do."""
        return self._cleaner.needed

    def clean_read(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Clean the rows that a lookup is about to read; ``ids`` and ``ends`` as in
        :class:`~dist_sparse.enforcer.rows.RowCleaner`."""
        self._cleaner(ids, ends)

    def add(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Flag the rows that a backward is about to write."""
        self._dirty.add(ids, ends)

    def clean(self) -> None:
        """Zero removed weights in the dirty rows."""
        # A device masks all rows faster than the host learns which ones are dirty.
        if self.revived or (self._dirty and self._device.type != "cpu"):
            self.clean_all()
            return
        if not self._dirty:
            return
        for table in self._dirty.tables:
            slot = self._slots[table]
            if slot.mask.removes:
                for rows in self._dirty.rows(table):
                    zero_rows(slot.weight, slot.mask, rows)
        self._dirty.clear()

    def clean_all(self) -> None:
        """Zero removed weights in every row, dirty or not."""
        slots = [slot for slot in self._slots.values() if slot.mask.removes]
        shards = [
            Pruned(Shard(slot.mask.rect, slot.weight), slot.mask.block, slot.mask.bits)
            for slot in slots
        ]
        # One launch, where there are kernels.
        for i in prune(shards):
            slots[i].mask.apply_(slots[i].weight)
        self._dirty.clear()
        self.revived = False


def row_cleaner_on(
    device: torch.device, slots: Sequence[Slot | None], dirty: DirtyRows
) -> RowCleaner:
    """Return the row cleaner for a device: on CUDA the one in Triton, if that is installed (CUDA
    builds of torch bring it)."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        triton_rows = importlib.import_module("dist_sparse.enforcer.rows_triton")
        # One launch for all ids costs less than finding the dirty rows.
        cleaner: RowCleaner = triton_rows.TritonRowCleaner(slots)
        return cleaner
    return TorchRowCleaner(slots, dirty)
