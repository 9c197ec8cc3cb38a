"""Which rows has a backward written since they were last made true to their masks?

One byte a row: a set that takes ids in any number and order, with repeats, at the cost of a write each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["UnsettledRows", "in_table"]

_CHUNK = 1 << 20


def in_table(ids: Tensor, rows: int) -> Tensor:
    """``ids`` as int64, with 0 for those outside ``[0, rows)``: FBGEMM's bounds check makes that of them."""
    ids = ids.long()
    if ids.is_cpu:  # reading two numbers is quicker than three more passes, where that does not wait for a device
        least, most = ids.aminmax()
        if int(least) >= 0 and int(most) < rows:
            return ids
    return torch.where((ids < 0) | (ids >= rows), 0, ids)


class UnsettledRows:
    """The unsettled rows of the tables of one kernel, at first none.

    Args:
        rows: of each table, on this rank.
        features: for each feature the number of its table.
        device: of the tables.
    """

    def __init__(self, rows: Sequence[int], features: Sequence[int], device: torch.device) -> None:
        self._rows, self._features = list(rows), list(features)
        self._starts = [0]
        for count in rows:
            self._starts.append(self._starts[-1] + -(-count // 8) * 8)  # whole words, see take()
        self._noted = torch.zeros(self._starts[-1] + 8, dtype=torch.uint8, device=device)  # the last is for nobody
        self._any = False
        self._removed: list[Tensor | None] = [None] * len(self._rows)
        self._of_features: tuple[Tensor, Tensor] | None = None

    def keep_to(self, table: int, removed: Tensor | None) -> None:
        """From now on notes only those rows of a table that are removed as a whole: uint8 ``(rows,)``, 1 = removed;
        None is any row. Nothing may be noted of the table when this changes."""
        self._removed[table] = removed

    def whole(self, feature: int) -> bool:
        """Whether the rows that are noted for a feature are removed as a whole."""
        return self._removed[self._features[feature]] is not None

    def __bool__(self) -> bool:
        """Whether any row may be unsettled. Does not wait for the device."""
        return self._any

    def add(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Notes the rows that a lookup has read and its backward is about to write; as
        :class:`~dist_sparse.enforcer.rows.Lookup`."""
        if not ids.numel():
            return
        self._any = True
        if isinstance(ends, Tensor):
            self._add_unseen(ids, ends)
            return
        for table, (start, stop) in zip(self._features, pairwise(ends), strict=True):
            removed = self._removed[table]
            if stop - start >= self._rows[table]:
                self.add_all(table)
            elif start < stop:
                rows = in_table(ids[start:stop], self._rows[table])
                if removed is None:
                    self._of(table).index_fill_(0, rows, 1)
                else:
                    self._of(table).index_copy_(0, rows, removed.index_select(0, rows))

    def add_all(self, table: int) -> None:
        """Notes every row of a table."""
        self._any = True
        removed = self._removed[table]
        if removed is None:
            self._of(table).fill_(1)
        else:
            self._of(table).copy_(removed)

    def take(self, table: int) -> Iterator[Tensor]:
        """The unsettled rows of a table, int64, ascending, in parts; they are settled afterwards."""
        noted = self._of(table)
        words = self._noted[self._starts[table] : self._starts[table + 1]].view(torch.int64)
        for first in range(0, words.numel(), _CHUNK // 8):
            touched = words[first : first + _CHUNK // 8].nonzero().flatten()
            if touched.numel():
                word, byte = words[first + touched].view(torch.uint8).view(-1, 8).nonzero().unbind(1)
                yield (first + touched[word]) * 8 + byte
        noted.zero_()

    def forget(self, table: int) -> None:
        """Takes every row of a table for settled."""
        self._of(table).zero_()

    def among(self, feature: int, ids: Tensor) -> Tensor:
        """Those of the ``ids`` of one feature whose rows are unsettled, int64, as often as they are there. They stay
        noted: what a training step reads it is about to write."""
        table = self._features[feature]
        noted = self._of(table)
        if ids.numel() >= self._rows[table]:
            return noted.nonzero().flatten()
        rows = in_table(ids, self._rows[table])
        return rows.masked_select(noted.view(torch.bool).index_select(0, rows))

    def none_left(self) -> None:
        """After every table was taken."""
        self._any = False

    def _of(self, table: int) -> Tensor:
        return self._noted[self._starts[table] : self._starts[table] + self._rows[table]]

    def _add_unseen(self, ids: Tensor, ends: Tensor) -> None:
        """As :meth:`add` where the ends are on the device, without waiting for it."""
        if self._of_features is None:
            starts = torch.tensor([self._starts[table] for table in self._features], device=ids.device)
            rows = torch.tensor([self._rows[table] for table in self._features], device=ids.device)
            self._of_features = starts, rows
        starts, rows = self._of_features
        places = torch.arange(ids.numel(), device=ids.device)
        feature = torch.bucketize(places, ends.long().contiguous(), right=True) - 1
        nobodys = (feature < 0) | (feature >= len(self._features))
        feature, ids = torch.where(nobodys, 0, feature), ids.long()
        noted = starts[feature] + torch.where((ids < 0) | (ids >= rows[feature]), 0, ids)
        self._noted.index_fill_(0, torch.where(nobodys, self._starts[-1], noted), 1)
