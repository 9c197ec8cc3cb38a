"""Faults where they happen: ``inject(kill, rank=1, when_it_opens="*.distcp")``.

An audit hook of the interpreter sees every file that is opened, renamed or removed, before it is.
Nothing is replaced.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["full_disk", "inject", "io_error", "kill", "read_only"]

_armed: list[Callable[[str, tuple[Any, ...]], None]] = []


def kill() -> None:
    """SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def io_error() -> None:
    """The error of a disk that fails."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def inject(
    fault: Callable[[], object],
    *,
    rank: int,
    when_it_opens: str | None = None,
    when_it_renames: str | None = None,
    when_it_removes: str | None = None,
    for_the: int = 1,
) -> None:
    """Let ``fault`` happen once on a rank, when it is about to touch a file whose name matches for
    the n-th time."""
    wanted = {"open": when_it_opens, "os.rename": when_it_renames, "os.remove": when_it_removes}
    left = for_the
    if dist.get_rank() != rank:
        return

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        pattern = wanted.get(event)
        if pattern is not None and fnmatch.fnmatch(os.path.basename(str(arguments[0])), pattern):
            left -= 1
            if left == 0:
                _armed.remove(look)
                fault()

    if not _armed:
        sys.addaudithook(_look)
    _armed.append(look)


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.rename", "os.remove"):
        for look in list(_armed):
            look(event, arguments)


@contextmanager
def full_disk(*, rank: int, after: int) -> Iterator[None]:
    """No file of a rank grows beyond ``after`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody can write into a folder: root gives up its rights for as long."""
    dist.barrier()
    if dist.get_rank() == 0:
        folder.chmod(0o555)
    dist.barrier()
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        dist.barrier()
        if dist.get_rank() == 0:
            folder.chmod(0o755)
