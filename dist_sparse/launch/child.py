"""Wrappers around torchrun and around the script of each rank, in the processes of a job.

This file is run by its path, outside of the package: the interpreter of a job need not have
`dist_sparse`. It uses the public API of torch alone. A rank that fails writes torchrun's error
file, by torch's `@record`.
"""

import contextlib
import io
import logging
import os
import re
import runpy
import signal
import sys
import time
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any

# torch's ProcessFailure by rank.
Failures = dict[int, Any]

_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


def torchrun(shown: str, words: list[str]) -> int:
    """Run torchrun in this process and return the exit code of the job.

    It is the code of the rank that failed first, or 128 + n if signal n killed that rank or was
    sent to this process. The last line on standard error names the rank, its exception and the line
    of the script.

    Args:
        shown: local ranks whose output is shown, as in `0,1`; empty for all. If another rank fails,
            its traceback is printed here.
        words: torchrun's arguments.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # With restarts, these notices are the only sign of why.
    if dict(pairwise(words)).get("--max-restarts", "0") == "0":
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_is_news)
    try:
        run.main(words)
    except ChildFailedError as error:
        number, failure = _first_failure(error.failures)
        text, trace = _describe(failure)
        hidden = shown and str(failure.local_rank) not in shown.split(",")
        # A script that exits has no traceback under `python` either.
        if hidden and " with SystemExit: " not in text:
            print(trace, end="", file=sys.stderr)
        # A negative exit code is a signal, which shells report as 128 + n.
        code: int = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        print(f"launch: rank {number} {text} (exit code {code})", file=sys.stderr)
        return code
    except SignalException as error:
        return 128 + error.sigval
    except ValueError as error:
        # An argument that only torch can check. Of `gpu` it says no more than that CUDA is missing.
        gpus = words[words.index("--nproc-per-node") + 1] == "gpu"
        hint = " `--nproc gpu` needs a GPU here." if gpus else ""
        print(f"launch: error: torchrun: {error}{hint}", file=sys.stderr)
        return 2
    return 0


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a notice of torchrun says more than the launcher's last line does."""
    return not str(record.msg).startswith(("Sending process", "failed (exitcode"))


def _first_failure(failures: Failures) -> tuple[int, Any]:
    """Return rank and failure of the rank that failed first. torch's own `get_first_failure`
    compares whole seconds."""

    def time_of(item: tuple[int, Any]) -> tuple[bool, float]:
        failure = item[1]
        # Last: torchrun ends the other ranks by SIGTERM, and lists them as failures too.
        ended = failure.exitcode == -signal.SIGTERM
        # A rank that was killed leaves no file.
        with contextlib.suppress(OSError):
            return ended, os.stat(failure.error_file).st_mtime
        # The timestamp is when torchrun noticed, in whole seconds. By then, others may have failed
        # because of this one: a second earlier puts it before them.
        return ended, failure.timestamp - 1

    return min(failures.items(), key=time_of)


def _describe(failure: Any) -> tuple[str, str]:
    """Return a line about a failure, and the traceback; it is empty if the rank left no error
    file."""
    # A dict by `@record`; a str by torchrun itself, for a rank that left no file.
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else "failed", ""
    trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
    what = str(message.get("message", "")).partition("\n")[0][:300]
    # The last traceback of a chain belongs to the exception that ended the rank. Its outermost
    # frames are in the script, and the last line in the script's own file is the most precise.
    last = trace.rpartition("Traceback (most recent call last)")[2]
    frames = [frame for frame in _FRAME.findall(last) if frame[0] not in _harness()]
    where = ""
    if frames:
        script, _ = frames[0]
        where = f" at {relative(script)}:{dict(frames)[script]}"
    return f"failed{where} with {what}", trace


def relative(file: str) -> str:
    """Return a path relative to the working directory; unchanged if that directory was removed."""
    try:
        return os.path.relpath(file)
    except OSError:
        return file


def rank(words: list[str]) -> None:
    """Run the script, or `-m` and the module, with its arguments, as `python` would.

    Output is flushed by line, because torchrun prefixes the result of each write.
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
    finally:
        # gloo's threads need the interpreter to release the tensors of the last collective. If they
        # get the GIL only while the interpreter exits, torch aborts the process
        # (pytorch/pytorch#190489).
        time.sleep(0.1)


def _run(words: list[str]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if words[0] == "-m":
        sys.argv = words[1:]
        folder = os.getcwd()
        start = partial(runpy.run_module, words[1], alter_sys=True)
    else:
        sys.argv = words
        folder = os.path.dirname(os.path.realpath(words[0]))
        # The absolute path becomes __file__, as in Python.
        start = partial(runpy.run_path, os.path.abspath(words[0]))
    if not sys.flags.safe_path:
        sys.path[0] = folder
    try:
        start(run_name="__main__")
    except BaseException as error:
        # When one rank has exited, torchrun sends SIGTERM to the others. A rank that has failed by
        # itself ignores it while it exits, and so keeps its exit code and its traceback: torchrun
        # can't read an error file that is half written. If the rank hangs, SIGKILL ends it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            # @record ignores SystemExit. The file is needed for the time of the failure.
            get_error_handler().record_exception(error)
        raise


def _harness() -> set[str]:
    """Return the files whose frames precede the script's frames in a traceback."""
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
