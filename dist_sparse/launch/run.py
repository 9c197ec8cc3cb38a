"""Run a job on this machine until nothing of it is left.

The launcher starts torchrun in a session of its own, so that a signal reaches it once, through the launcher. torchrun
passes it on to the ranks, waits for the grace period and kills what is left. In the end the launcher kills every
process that has the job's random mark in its environment (Linux). If the launcher itself is killed, the kernel sends a
SIGTERM to torchrun; if torchrun is killed, the kernel kills the ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from dist_sparse.launch.command import argv, environment
from dist_sparse.launch.spec import LaunchSpec

__all__ = ["run"]

_CHILD = str(Path(__file__).resolve().with_name("child.py"))
_JOB = "DIST_SPARSE_LAUNCH_JOB"  # the job's mark, behind the marks of the jobs that it runs in
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MARGIN = 5.0  # seconds that torchrun has, beyond the ranks' grace, to kill them and exit
_POLL = 0.5  # seconds


def run(spec: LaunchSpec, *, ranks: Sequence[int] = ()) -> int:
    """Run this machine's part of the job and return its exit code, 128 + n if signal n ended it.

    Handles the signals SIGINT, SIGTERM, SIGHUP and SIGQUIT until it returns. A single process, or a single shown rank,
    writes to this process's standard output and error directly. Otherwise torchrun prints each line behind its rank.

    Args:
        ranks: local ranks whose output is shown; empty for all.

    Raises:
        ValueError: the script or the interpreter does not exist, several nodes have no endpoint or id, a rank is not in
            `spec`, or this is not the main thread.
        OSError: standard output or error is closed.
    """
    if sys.stdout is None or sys.stderr is None:
        raise OSError("Standard output or error is closed: send it to a file, or to /dev/null.")
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("run() must be called in the main thread: it handles signals.")
    if spec.script is not None and not Path(spec.script).is_file():
        raise ValueError(f"Invalid script={spec.script!r}: there is no such file.")
    if shutil.which(spec.python) is None:
        raise ValueError(f"Invalid python={spec.python!r}: there is no such program.")
    for rank in ranks:
        if rank < 0 or (isinstance(spec.nproc_per_node, int) and rank >= spec.nproc_per_node):
            raise ValueError(f"Invalid {rank=}: must be a local rank, from 0 to nproc_per_node - 1.")
    variables, dropped = environment(spec, os.environ)
    if dropped:
        print(f"launch: torchrun would take options from {', '.join(dropped)}: not passed on", file=sys.stderr)
    single, direct = spec.nproc_per_node == 1, spec.nproc_per_node == 1 or len(ranks) == 1
    shown = ",".join(map(str, ranks))
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as logs:
        output = ["--log-dir", logs, "--redirects", "0", "--tee", "0" if direct else "3"]
        output += ["--local-ranks-filter", shown] if shown else []
        program = [spec.python, "-u", "-P", _CHILD, "torchrun", str(os.getpid()), shown]
        words = argv(spec, program=program, output=output, before=[_CHILD, "rank"])
        mark = secrets.token_hex(16)
        variables[_JOB] = " ".join([*filter(None, [os.environ.get(_JOB)]), mark])
        # A torchrun or torchx around this job may have set where it looks for the error.
        variables.setdefault("TORCHELASTIC_ERROR_FILE", str(Path(logs, "error.json")))
        variables.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
        sys.stdout.flush()
        stdin = None if single else subprocess.DEVNULL
        process = subprocess.Popen(words, stdin=stdin, env=variables, start_new_session=True)
        return _Job(process, mark, spec.grace).wait()


class _Job:
    def __init__(self, process: subprocess.Popen[bytes], mark: str, grace: int) -> None:
        self._process, self._mark, self._grace = process, mark, grace
        self._stopped_by: int | None = None
        self._deadline = float("inf")

    def wait(self) -> int:
        """Pass signals on to torchrun until it exits, kill what is left, and return the exit code."""
        before = {number: signal.getsignal(number) for number in _FORWARDED}
        try:
            for number, handler in before.items():
                if handler is not signal.SIG_IGN:  # as nohup sets it
                    signal.signal(number, self._stop)
            while self._process.poll() is None and time.monotonic() < self._deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_POLL)
                if self._stopped_by is None and _reader_is_gone():
                    self._stop(signal.SIGPIPE)
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        code = self._process.returncode
        if self._stopped_by == signal.SIGPIPE or (self._stopped_by is not None and code < 0):
            return 128 + self._stopped_by
        if code < 0:
            _say(f"torchrun was killed by {signal.Signals(-code).name}")
        return code if code >= 0 else 128 - code

    def _stop(self, number: int, _: FrameType | None = None) -> None:
        """Pass the first signal on; a second one would break off torchrun's shutdown. A second Ctrl-C kills all."""
        if self._stopped_by is None:
            self._stopped_by = number
            self._deadline = time.monotonic() + self._grace + _MARGIN
            self._process.send_signal(signal.SIGTERM if number == signal.SIGPIPE else number)
            again = "; Ctrl-C again kills them now" if number == signal.SIGINT else ""
            _say(f"{signal.Signals(number).name}: the ranks have {self._grace} s to exit{again}")
        elif number == self._stopped_by == signal.SIGINT:
            self._deadline = 0.0

    def _kill(self) -> None:
        """Kill torchrun, and then every process of the job."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        until = time.monotonic() + _MARGIN
        while (left := list(_marked(self._mark))) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _say(text: str) -> None:
    """Print a line on standard error, unless it is full or closed: a launcher that waits there could not end a job."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"launch: {text}\n".encode())  # at once: ranks and torchrun write there too


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that no process reads any more, as after `| head`."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _marked(mark: str) -> Iterator[int]:
    """Processes of this user that were started with `mark` in their environment, whatever session they are in."""
    for entry in os.scandir("/proc") if sys.platform == "linux" else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark.encode() in Path(entry.path, "environ").read_bytes():
                    yield int(entry.name)
