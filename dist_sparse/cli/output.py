"""Output of `dist-sparse`: text on stdout, one line per failure on stderr, and the exit status of either.

What the encoding can't represent is escaped. A full disk is a failure; a reader that closed the pipe ends the command
as it ends other programs.
"""

from __future__ import annotations

import os
import signal
import sys

from dist_sparse.text import printable

__all__ = ["fail", "flush", "show"]


def fail(command: str, why: Exception | str) -> int:
    lines = str(why).split("\n")  # which may hold names of a model or a log
    print(f"dist-sparse {command}: " + "\n".join(map(printable, lines)), file=sys.stderr)
    return 1


def show(text: str) -> int:
    """Print, escaping what the encoding can't represent; return the exit status."""
    if sys.stdout is None:
        print("dist-sparse: can't write: standard output is closed", file=sys.stderr)
        return 1
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding))
    except OSError as error:
        return _unwritten(error)
    return flush()


def flush() -> int:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return _unwritten(error)
    return 0


def _unwritten(error: OSError) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try again when it exits
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE  # as other programs do when their reader closes the pipe
    print(f"dist-sparse: can't write to standard output: {error.strerror}", file=sys.stderr)
    return 1
