"""Run a job on this machine: one torchrun, to which signals are passed on.

torchrun starts in a session of its own, so that a signal from the terminal reaches it once, through
the launcher. It passes the signal on to the ranks, waits for the grace period and kills the ranks
that are left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from dist_sparse.launch.spec import LaunchSpec, additions, argv

_CHILD = str(Path(__file__).resolve().with_name("child.py"))
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(spec: LaunchSpec, *, ranks: Sequence[int] = ()) -> int:
    """Run this machine's part of the job and return its exit code, 128 + n if signal n ended it.

    Handles the signals SIGINT, SIGTERM, SIGHUP and SIGQUIT until it returns. A single process, or a
    single shown rank, writes to this process's standard output and error directly. Otherwise
    torchrun prints each line behind its rank.

    Args:
        ranks: local ranks whose output is shown; empty for all.

    Raises:
        ValueError: the script does not exist, several nodes have no endpoint or id, a rank is not
            in `spec`, or this is not the main thread.
        OSError: there is no such interpreter.
    """
    # Python sets handlers in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("run() must be called in the main thread: it handles signals.")
    _refuse_job(spec, ranks)
    # torchrun reads an option from PET_ wherever the argv lacks it.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    # Else a user would search for why an option has no effect.
    if dropped := sorted(os.environ.keys() - variables.keys()):
        _say(f"torchrun would take options from {', '.join(dropped)}: not passed on")
    variables |= additions(spec, os.environ)
    single = spec.processes == 1
    # One shown rank writes to the terminal itself, so that it can draw a progress bar in place.
    direct = single or len(ranks) == 1
    shown = ",".join(map(str, ranks))
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as logs:
        output = ["--log-dir", logs, "--redirects", "0", "--tee", "0" if direct else "3"]
        output += ["--local-ranks-filter", shown]
        program = ["-u", "-P", _CHILD, "torchrun", shown]
        words = argv(spec, program=program, output=output, before=[_CHILD, "rank"])
        # A torchrun or torchx around this job may have set where it looks for the error.
        variables.setdefault("TORCHELASTIC_ERROR_FILE", str(Path(logs, "error.json")))
        variables.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
        # torchrun writes to the same file.
        sys.stdout.flush()
        # Several ranks would each read a part of it.
        stdin = None if single else subprocess.DEVNULL
        process = subprocess.Popen(words, stdin=stdin, env=variables, start_new_session=True)
        return _wait(process, spec.grace)


def _refuse_job(spec: LaunchSpec, ranks: Sequence[int]) -> None:
    """Refuse a job that can't run on this machine."""
    if spec.script is not None and not Path(spec.script).is_file():
        raise ValueError(f"Invalid script={spec.script!r}: there is no such file.")
    rank = max(ranks, default=0)
    # 0 is a number that torchrun finds.
    if spec.processes and rank >= spec.processes:
        raise ValueError(f"Invalid {rank=}: must be a local rank, below {spec.processes}.")


def _wait(process: subprocess.Popen[bytes], grace: int) -> int:
    """Pass the first signal on to torchrun until it exits, and return the exit code."""
    passed: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if passed:
            return  # a second signal would break off torchrun's shutdown, and ranks would be left
        passed.append(number)
        process.send_signal(number)
        _say(f"{signal.Signals(number).name}: the ranks have {grace} s to exit")

    before = {
        number: signal.signal(number, forward)
        for number in _FORWARDED
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup sets it
    }
    try:
        code = process.wait()
    finally:
        # A caller in Python gets its own handlers back.
        for number, handler in before.items():
            signal.signal(number, handler)
    if code >= 0:
        return code
    _say(f"torchrun was killed by {signal.Signals(-code).name}")
    return 128 - code


def _say(text: str) -> None:
    os.write(2, f"launch: {text}\n".encode())  # whole: ranks and torchrun write there too
