"""Which rows of the tables of a kernel have been written, so that a mask update scores only those
again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_sparse.enforcer.rows import DirtyRows, Slot
from dist_sparse.masking.masks import positions

__all__ = ["WrittenRows"]


class WrittenRows:
    """The rows that may have been written, by backwards, by mask updates, or in a way that is not
    known: at first all.

    Args:
        rows: of each table, on this rank; None for one of which nothing is noted.
        features: for each feature the number of its table.

    Attributes:
        noted: the numbers of the tables of which rows are noted.
        tables: their rows, in the same order.
    """

    def __init__(self, rows: Sequence[int | None], features: Sequence[int]) -> None:
        self.noted = [table for table, count in enumerate(rows) if count is not None]
        self._rows = DirtyRows([count or 0 for count in rows], features, torch.device("cpu"))
        self.tables = [_OfTable(self._rows, table) for table in self.noted]
        self.add_all()

    def add_all(self) -> None:
        """Add every row."""
        for table in self.noted:
            self._rows.add_all(table)

    def add(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Add what a backward is about to write; ``ids`` and ``ends`` as in
        :class:`~dist_sparse.enforcer.rows.Lookup`."""
        self._rows.add(ids, ends)

    def add_removed(self, before: Sequence[Slot | None], after: Sequence[Slot | None]) -> None:
        """Add what a mask update has zeroed: what the masks before kept and those after remove."""
        for table in self.noted:
            old, new = before[table], after[table]
            if old is None or new is None or old.weight.data_ptr() != new.weight.data_ptr():
                self._rows.add_all(table)
            elif old.mask is not new.mask:
                if old.mask.block != new.mask.block or new.mask.block[0] != 1:
                    self._rows.add_all(table)
                    continue
                blocks = positions(old.mask.bits & ~new.mask.bits)
                self._rows.add_rows(
                    table, blocks if new.mask.grid.cols == 1 else blocks // new.mask.grid.cols
                )


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
