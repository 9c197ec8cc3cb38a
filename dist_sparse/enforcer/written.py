"""Rows that were written since a mask update scored them: the next one scores no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dist_sparse.enforcer.rows import DirtyRows, Slot
from dist_sparse.masking.masks import positions


class WrittenRows:
    """The rows that may have been written, by backwards, by mask updates, or in a way that is not
    known: at first all.

    Args:
        rows: how many there are on this rank, by the number of the table.
        features: for each feature the number of its table.

    Attributes:
        tables: the rows by the number of the table.
    """

    def __init__(self, rows: Mapping[int, int], features: Sequence[int]) -> None:
        self._rows = DirtyRows(rows, features, torch.device("cpu"))
        self.tables = {table: _OfTable(self._rows, table) for table in rows}
        self.add_all()

    def add_all(self) -> None:
        """Add every row."""
        for table in self.tables:
            self._rows.add_all(table)

    def add(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Add what a backward is about to write; ``ids`` and ``ends`` as in
        :class:`~dist_sparse.enforcer.rows.RowCleaner`."""
        self._rows.add(ids, ends)

    def add_removed(self, before: Mapping[int, Slot], after: Mapping[int, Slot]) -> None:
        """Add the rows zeroed by a mask update: those with blocks that the masks before kept and
        the masks after remove."""
        # Nothing to add for blocks that come back: their weights are still 0, and scored as 0.
        for table in self.tables:
            old, new = before.get(table), after.get(table)
            if old is None or new is None or not _comparable(old, new):
                self._rows.add_all(table)
            elif old.mask is not new.mask:
                blocks = positions(old.mask.bits & ~new.mask.bits)
                rows = blocks if new.whole_rows else blocks // new.mask.grid.cols
                self._rows.add_rows(table, rows)


def _comparable(old: Slot, new: Slot) -> bool:
    """Whether the bits of two masks mean the same blocks of the same shard, each within a row."""
    same_shard = old.weight.data_ptr() == new.weight.data_ptr()
    return same_shard and old.mask.block == new.mask.block and new.mask.block[0] == 1


class _OfTable:
    """The rows of one table; see :class:`~dist_sparse.masking.cached.kept_scores.Written`."""

    def __init__(self, rows: DirtyRows, table: int) -> None:
        self._rows, self._table = rows, table

    def rows(self) -> Tensor:
        return torch.cat([torch.empty(0, dtype=torch.int64), *self._rows.rows(self._table)])

    def add(self, rows: Tensor) -> None:
        self._rows.add_rows(self._table, rows)

    def clear(self) -> None:
        self._rows.clear_table(self._table)
