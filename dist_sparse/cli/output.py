"""Output of `dist-sparse`: text on stdout, one line per failure on stderr, and the exit status of
either.

A full disk is a failure; a reader that closed the pipe ends the command as it ends other programs.
"""

from __future__ import annotations

import os
import signal
import sys

from dist_sparse.text import printable


def fail(command: str, why: Exception | str) -> int:
    lines = str(why).split("\n")  # which may hold names of a model or a log
    print(f"dist-sparse {command}: " + "\n".join(map(printable, lines)), file=sys.stderr)
    return 1


def interrupted() -> int:
    print("dist-sparse: interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def progress(what: str) -> None:
    """Say on a terminal what is checked, in one line that the next call replaces; nothing
    elsewhere."""
    if sys.stderr.isatty():
        text = f"checking {what} ..." if what else ""
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def show(text: str) -> int:
    """Print; return the exit status."""
    try:
        print(text)
    except OSError as error:
        return _unwritten(error)
    # Now: at exit, Python would report a full disk with a traceback.
    return flush()


def flush() -> int:
    try:
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
