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

from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.serving.delta import Step

_SPAN: Final = 1 << 16  # rows that are moved at once


class Gate:
    """Lets any number of lookups through, or one change: a change waits for the lookups that have
    begun, and lookups that come then wait for it.

    A lookup that looks up in its own thread again would wait for itself when a change waits: none
    does.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._preparing = threading.Lock()
        self._inside, self._is_changing = 0, False

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        # A copy of a module gets a gate of its own; locks can't be copied.
        return Gate, ()

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Hold changes back."""
        with self._condition:
            while self._is_changing:
                self._condition.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                if not self._inside:
                    self._condition.notify_all()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Hold other changes back, while lookups go on."""
        with self._preparing:
            yield

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold lookups back, within :meth:`preparing`."""
        with self._condition:
            # From here no lookup begins: a stream of lookups would keep changes out for good.
            self._is_changing = True
            while self._inside:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._is_changing = False
                self._condition.notify_all()


class Move:
    """What a delta does to the stored rows of one table, in memory that follows the delta.

    Args:
        before: index of the rows so far.
        step: from :func:`~dist_sparse.serving.delta.step_of`.
        tensors: of the delta.
    """

    def __init__(self, before: RowIndex, step: Step, tensors: Mapping[str, Tensor]) -> None:
        self.index, self._tensors = step.index, tensors
        self._stored, self._gone = before.stored, step.gone
        behind = step.ids >= before.rows
        self._at = torch.where(behind, step.index.num_kept, step.index(step.ids))
        self._events, self._shifts = self._shifted(before, step)

    def _shifted(self, before: RowIndex, step: Step) -> tuple[Tensor, Tensor]:
        """Rows so far at which the distance that rows move by changes, and the distance from each
        on; a first one of 0."""
        came = self._at[step.came]
        # Where each row that comes goes in among the rows so far: less the ones that come before
        # it, and with the ones that go.
        gone_ids = self._tensors["gone"].long()
        gone_before = torch.searchsorted(gone_ids, step.ids[step.came])
        places = came - torch.arange(len(came)) + gone_before
        # The row behind one that goes is the first that moves.
        events = torch.cat([places, self._gone + 1])
        by = torch.cat([torch.ones_like(places), -torch.ones_like(self._gone)])
        events, order = events.sort()
        return events, torch.cat([by[:0].new_zeros(1), by[order].cumsum(0)])

    def run(self, stored: Mapping[str, Tensor]) -> None:
        """Move and write rows.

        Args:
            stored: by the names of the delta's tensors, what holds the rows so far and has room for
                those afterwards: ``(room, ...)`` each, of any dtype.
        """
        if len(self._events):
            spans = list(range(int(self._events[0]), self._stored, _SPAN))
            for first in spans:
                self._move(stored, first, up=True)
            for first in reversed(spans):
                self._move(stored, first, up=False)
        for key, rows in stored.items():
            rows.index_copy_(0, self._at.to(rows.device), self._new(key, rows))

    def _new(self, key: str, like: Tensor) -> Tensor:
        return self._tensors[key].view(like.dtype).to(like.device)

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
