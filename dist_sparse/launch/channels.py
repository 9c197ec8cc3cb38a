"""Through which files do processes of the job write to the launcher?

A rank asks for them on a Unix socket in a folder of this user's alone, and gets them through it: pseudo-terminals where
the launcher writes to a terminal (so that bars are drawn as without it), pipes elsewhere. Every process has its own, so
that the end of a file is the end of the process and of all it started. Where both outputs of the launcher are the same
file, both of a process are too: what it writes stays in order. While an output of the launcher is full, nothing is read
for it: ranks wait, as they would without the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import socket
import struct
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_sparse.launch.output import Display, Source

__all__ = ["Channels"]

_SOCKET_PATH_LIMIT = 100  # bytes; the system's is 104 to 108


class Channels:
    """The files between a job and the launcher. `close` when done.

    Args:
        selector: where the readers are registered; each key's data is a function to call when its file is ready.
        out, err: where the job's standard output and error go; the same object where they are the same file.
        alive: whether the job still runs; ranks that ask later get nothing.
    """

    def __init__(self, selector: selectors.BaseSelector, out: Display, err: Display, alive: Callable[[], bool]) -> None:
        self._selector, self._alive = selector, alive
        self._displays = [out] if out is err else [out, err]
        self._readers: dict[int, tuple[Source, Display]] = {}
        self._waiting: set[int] = set()  # readers that are not registered, because their display is full
        folder = tempfile.mkdtemp(prefix="launch-")
        if len(os.fsencode(folder)) > _SOCKET_PATH_LIMIT - 2:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="launch-", dir="/tmp")
        self._folder = folder
        self.path = str(Path(folder, "s"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen(1024)
        selector.register(self._server, selectors.EVENT_READ, self._accept)

    def open(self, source: Source) -> list[int]:
        """Files for a process to write to: one for both of its outputs, or two. The caller closes them.

        Raises:
            OSError: too many files are open; none stays so.
        """
        files: list[int] = []
        try:
            for display in self._displays:
                # Sources differ by output: each keeps the line that it has not finished there.
                own = source if display is self._displays[0] else source.twin()
                reader, writer = os.openpty() if display.terminal else os.pipe()
                if display.terminal:
                    _plain(writer)
                files.append(writer)
                self._readers[reader] = (own, display)
                self._listen(reader)
        except OSError:
            for file in files:
                os.close(file)
            raise
        self.resize()
        return files

    @property
    def idle(self) -> bool:
        """Whether every process that had files has closed them."""
        return not self._readers

    def balance(self) -> None:
        """Reads on where there is room again, and no more where there is none. To be called after each turn."""
        for reader, (_, display) in self._readers.items():
            if display.writer.full != (reader in self._waiting):
                if display.writer.full:
                    self._selector.unregister(reader)
                    self._waiting.add(reader)
                else:
                    self._waiting.remove(reader)
                    self._listen(reader)

    def resize(self) -> None:
        """Gives all pseudo-terminals the width that is left behind the labels."""
        for reader, (source, display) in self._readers.items():
            if display.terminal:
                columns = max(20, display.columns() - len(source.label) - 1)
                fcntl.ioctl(reader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def close(self) -> None:
        """Ends all files and removes the socket."""
        for reader in list(self._readers):
            self._end(reader)
        self._selector.unregister(self._server)
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        rank, _ = self._server.accept()
        with rank, contextlib.suppress(OSError, ValueError):
            rank.settimeout(5)  # a rank says who it is in its first line, at once
            hello: dict[str, Any] = json.loads(rank.makefile("rb").readline(1000))
            if not self._alive():
                return
            files = self.open(Source(int(hello["rank"]), int(hello["world"])))
            try:
                socket.send_fds(rank, [b"."], files)
            finally:
                for file in files:
                    os.close(file)

    def _listen(self, reader: int) -> None:
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._read(reader))

    def _read(self, reader: int) -> None:
        try:
            data = os.read(reader, 1 << 16)
        except OSError:  # how Linux says that nobody has a pseudo-terminal open any more
            data = b""
        if data:
            source, display = self._readers[reader]
            display.feed(source, data)
        else:
            self._end(reader)

    def _end(self, reader: int) -> None:
        source, display = self._readers.pop(reader)
        if reader in self._waiting:
            self._waiting.remove(reader)
        else:
            self._selector.unregister(reader)
        os.close(reader)
        display.feed(source, b"", final=True)


def _plain(terminal: int) -> None:
    """No echo, and newlines as they are."""
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
