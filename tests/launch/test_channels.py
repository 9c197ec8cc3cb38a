"""Do the files of a job stay in order where no more can be opened?"""

from __future__ import annotations

import os
import resource
import selectors

import pytest

from dist_sparse.launch.channels import Channels
from dist_sparse.launch.output import Display, Source


def test_files_that_can_not_all_be_opened_are_closed() -> None:
    """Else their reader would wait for a writer that nobody has."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    out, err = (Display(number, terminal=False, colour=False) for number in (1, 2))
    with selectors.DefaultSelector() as selector:
        channels = Channels(selector, out, err, alive=lambda: True)
        taken: list[int] = []
        try:
            room = max(map(int, os.listdir("/proc/self/fd"))) + 8
            resource.setrlimit(resource.RLIMIT_NOFILE, (room, limits[1]))
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(3):  # one pipe, and half of the next
                os.close(taken.pop())
            with pytest.raises(OSError, match="Too many open files"):
                channels.open(Source(0, 2))
            assert not channels.idle
            for key, _ in selector.select(0):
                key.data()
            assert channels.idle
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for file in taken:
                os.close(file)
            channels.close()
