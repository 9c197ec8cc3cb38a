"""How does an output that nobody reads, or that is full, not hold up the launcher?

A thread of its own writes, so that the launcher serves signals while a write blocks. (The file can't be made
non-blocking: its flags are shared with the shell and with whoever else has it open.) What waits to be written is
bounded: whoever puts something looks at `full` first. After the first error nothing is written any more.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["ROOM", "Writer"]

ROOM = 1 << 20
"""Bytes that may wait before `full`."""


class Writer:
    """Writes to the file `fd` what is put, in order. `close` when done; a write that blocks dies with the process.

    Args:
        wake: called in the thread when there is room again, when all is written, and when a write has failed.
    """

    def __init__(self, fd: int, wake: Callable[[], None]) -> None:
        self._fd, self._wake = fd, wake
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._lossy = self._closed = False
        self._thread: threading.Thread | None = None
        self.fault: OSError | None = None
        """Why nothing is written any more."""

    @property
    def full(self) -> bool:
        """Whether to wait before more is put."""
        return self._size >= ROOM and not self._lossy

    @property
    def busy(self) -> bool:
        """Whether something is not written yet."""
        return self._size > 0

    def put(self, data: bytes) -> None:
        """Writes `data` when what came before it is written. Does not wait."""
        with self._changed:
            if not data or self._closed or self.fault is not None or (self._lossy and self._size >= ROOM):
                return
            self._waiting.append(data)
            self._size += len(data)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"writer of file {self._fd}", daemon=True)
            self._thread.start()

    def lose(self) -> None:
        """From now on what comes while there is no room is lost, instead of `full`."""
        self._lossy = True

    def close(self) -> None:
        """Takes nothing more, and ends the thread once it is not in a write."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
            try:
                while data:
                    written = os.write(self._fd, data)
                    data = data[written:]
                    self._wrote(written)
            except OSError as error:
                self._fail(error)

    def _wrote(self, count: int) -> None:
        with self._changed:
            before, self._size = self._size, self._size - count
            news = self._size == 0 or self._size < ROOM <= before
        if news:
            self._wake()

    def _fail(self, error: OSError) -> None:
        with self._changed:
            self.fault = error
            self._waiting.clear()
            self._size = 0
        self._wake()
