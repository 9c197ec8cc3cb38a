"""What runs in a job's processes before torchrun and before the script of each rank.

This file is run by its path, outside the package: the interpreter of a job need not have
`dist_sparse`. Of torch, only the public API is used. A rank that fails leaves torchrun's error
file, by torch's `@record`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import sys
import time
from functools import partial
from types import TracebackType
from typing import Any

# ProcessFailure of torch, by the local rank that failed.
Failures = dict[int, Any]

_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


def torchrun(shown: str, words: list[str]) -> int:
    """Run torchrun in this process and return the exit code of the job.

    That is the code of the rank that failed first, or 128 + n if signal n killed it or was sent to
    this process. The last line on standard error names the rank, its exception and the line of the
    script.

    Args:
        shown: local ranks whose output is shown, as in `0,1`; empty for all. The traceback of any
            other is printed.
        words: torchrun's arguments.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(words)
    except ChildFailedError as error:
        number, failure = _first(error.failures)
        text, trace = _describe(failure)
        if shown and str(failure.local_rank) not in shown.split(","):
            print(trace, end="", file=sys.stderr)
        # As a shell reports a signal.
        code: int = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        print(f"launch: rank {number} {text} (exit code {code})", file=sys.stderr)
        return code
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _first(failures: Failures) -> tuple[int, Any]:
    """Return the rank that failed first. torch's own `get_first_failure` compares whole seconds."""

    def time_of(item: tuple[int, Any]) -> tuple[bool, float]:
        failure = item[1]
        # torchrun ends the other ranks by SIGTERM, and then lists them too.
        ended = failure.exitcode == -signal.SIGTERM
        # A rank that was killed leaves no file.
        with contextlib.suppress(OSError):
            return ended, os.stat(failure.error_file).st_mtime
        # The second in which torchrun saw it; by then, others may have failed because of it.
        return ended, failure.timestamp - 1

    return min(failures.items(), key=time_of)


def _describe(failure: Any) -> tuple[str, str]:
    """Return how a rank failed, in one line, and its traceback; the traceback is empty where the
    rank left no error file."""
    # A str where torchrun itself wrote it, for a rank that left none.
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else "failed", ""
    trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
    what = str(message.get("message", "")).partition("\n")[0][:300]
    # A chain of exceptions ends with the one that was raised. Its outermost frame is the script's
    # own.
    last = trace.rpartition("Traceback (most recent call last)")[2]
    frames = [frame for frame in _FRAME.findall(last) if frame[0] not in _harness()]
    where = ""
    if frames:
        script, _ = frames[0]
        where = f" at {os.path.relpath(script)}:{dict(frames)[script]}"
    return f"failed{where} with {what}", trace


def rank(words: list[str]) -> None:
    """Run the script, or `-m` and the module, with its arguments, as `python` would.

    Lines are written whole: torchrun puts a prefix before whatever one write holds.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.excepthook = lambda kind, error, trace: sys.__excepthook__(
        kind, error.with_traceback(_of_script(trace)), None
    )
    try:
        record(_run)(words)
    except BaseException:
        # torchrun ends the other ranks once one has exited: one that failed by itself, and is about
        # to exit, keeps its exit code and its traceback. A rank that hangs here gets a SIGKILL.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    finally:
        # gloo's threads need the interpreter to release the tensors of the last collective. Where
        # they get to it only while the interpreter exits, torch aborts the process
        # (pytorch/pytorch#190489).
        time.sleep(0.1)


def _run(words: list[str]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if words[0] == "-m":
        sys.argv, folder = words[1:], os.getcwd()
        start = partial(runpy.run_module, words[1], alter_sys=True)
    else:
        sys.argv = words
        folder = os.path.dirname(os.path.realpath(words[0]))
        start = partial(runpy.run_path, os.path.abspath(words[0]))  # as Python sets __file__
    if not sys.flags.safe_path:
        sys.path[0] = folder
    try:
        start(run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            # @record leaves it out, and with it when the rank failed.
            get_error_handler().record_exception(error)
        raise


def _harness() -> set[str]:
    """Files whose frames stand before those of a script."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return {__file__, runpy.run_path.__code__.co_filename, record.__code__.co_filename}


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames before the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _harness():
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(sys.argv[2:])
    else:
        sys.exit(torchrun(sys.argv[2], sys.argv[3:]))
