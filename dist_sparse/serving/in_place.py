"""Rows of a running process that become those of the next artifact, where they are.

Rows are stored in the order of their ids, so rows behind one that comes or goes move. Moving is
done in two passes over the rows, neither of which writes on a row that is still to be read: rows
that move up from the first to the last, rows that move down from the last to the first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.compaction.row_index import REMOVED, RowIndex
from dist_sparse.serving.delta import TableDelta
from dist_sparse.serving.rows import changed_words, rows_of

_SPAN: Final = 1 << 16  # rows that are moved at once


class Gate:
    """Lets any number of lookups through, or one change: a change waits for the lookups that have
    begun, and lookups that come then wait for it.

    Attributes:
        preparing: a lock that holds other changes back, while lookups go on.

    A lookup that looks up in its own thread again would wait for itself when a change waits: none
    does.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.preparing = threading.Lock()
        self._inside, self._is_changing = 0, False

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        # A copy of a module gets a gate of its own; locks can't be copied.
        return Gate, ()

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Hold changes back."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_changing)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold lookups back, within :attr:`preparing`."""
        with self._condition:
            # From here no lookup begins: a stream of lookups would keep changes out for good.
            self._is_changing = True
            self._condition.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._condition:
                self._is_changing = False
                self._condition.notify_all()


class Move:
    """What a delta does to the stored rows of one table, in memory that follows the delta, beside
    the new index.

    Args:
        before: index of the rows so far.
        change: of the table.
        tensors: of the delta.

    Attributes:
        index: afterwards.

    Raises:
        ValueError: ids that go have no row, or ids do not ascend or are out of range.
    """

    def __init__(self, before: RowIndex, change: TableDelta, tensors: Mapping[str, Tensor]) -> None:
        ids, gone_ids = tensors["ids"].long(), tensors["gone"].long()
        words = changed_words(before.words, before.num_kept, change, tensors)
        self.index = RowIndex(words, before.rows, before.default_row)
        self._stored, self._gone = before.stored, rows_of(before, gone_ids)
        is_new = rows_of(before, ids) == REMOVED
        came_ids, self._at = ids[is_new], rows_of(self.index, ids)
        # Where each row that comes goes in among the rows so far: less the ones that come before
        # it, and with the ones that go.
        places = self._at[is_new] - torch.arange(len(came_ids))
        places += torch.searchsorted(gone_ids, came_ids)
        # Rows at which the distance that rows move by changes, and the distance from each on: the
        # row behind one that goes is the first that moves.
        events = torch.cat([places, self._gone + 1])
        by = torch.cat([torch.ones_like(places), -torch.ones_like(self._gone)])
        self._events, order = events.sort()
        self._shifts = F.pad(by[order].cumsum(0), (1, 0))

    def run(self, stored: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
        """Move and write rows.

        Args:
            stored: what holds the rows so far and has room for those afterwards: ``(room, ...)``
                each, of any dtype.
            new: by the same names, the rows that the delta brings.
        """
        if len(self._events):
            spans = list(range(int(self._events[0]), self._stored, _SPAN))
            for first in spans:
                self._move(stored, first, up=True)
            for first in reversed(spans):
                self._move(stored, first, up=False)
        for key, rows in stored.items():
            part = new[key].view(rows.dtype).to(rows.device)
            rows.index_copy_(0, self._at.to(rows.device), part)

    def _move(self, stored: Mapping[str, Tensor], first: int, *, up: bool) -> None:
        """Move the rows of a span that move in one direction."""
        rows = torch.arange(first, min(first + _SPAN, self._stored))
        shift = self._shifts[torch.searchsorted(self._events, rows, right=True)]
        moves = shift < 0 if up else shift > 0
        low, high = torch.searchsorted(self._gone, torch.tensor([first, first + len(rows)]))
        moves[self._gone[low:high] - first] = False
        if not bool(moves.any()):
            return
        rows, shift = rows[moves], shift[moves]
        for tensor in stored.values():
            source, target = rows.to(tensor.device), (rows + shift).to(tensor.device)
            # The span is read before any of it is written.
            tensor.index_copy_(0, target, tensor.index_select(0, source))
