"""Run a job on this machine: start one torchrun and forward signals to it.

torchrun runs in a session of its own, so that a signal from the terminal reaches it once, through
the launcher. It forwards the signal to the ranks, waits for the grace period and kills the ranks
that are left.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from dist_sparse.launch.spec import LaunchSpec, additions, argv

_CHILD = str(Path(__file__).resolve().with_name("child.py"))
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

# For how long a job waits for the name of the host where nodes meet: a cluster may add it to its
# DNS only when that host starts.
NAME_SECONDS = 30.0


def run(spec: LaunchSpec, *, ranks: Sequence[int] = ()) -> int:
    """Run this machine's part of the job and return its exit code, 128 + n if signal n ended it.

    Until it returns, it handles SIGINT, SIGTERM, SIGHUP and SIGQUIT. A single process, or a single
    shown rank, writes to this process's standard output and error directly. Otherwise torchrun
    prints the rank before each line.

    Args:
        ranks: local ranks whose output is shown; empty for all.

    Raises:
        ValueError: the script does not exist, several nodes have no endpoint or id, a rank is not
            in `spec`, or this is not the main thread. On several nodes also: `local_addr`, or
            the host name of this node, does not resolve, or the name in `rdzv_endpoint` does not
            within 30 s.
        OSError: there is no such interpreter.
    """
    # signal.signal() works in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("run() must be called in the main thread: it handles signals.")
    _refuse_job(spec, ranks)
    # torchrun takes options that its argv lacks from PET_ variables.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    # Without this line, a user would search for why such an option has no effect.
    if dropped := sorted(os.environ.keys() - variables.keys()):
        _log(f"torchrun would take options from {', '.join(dropped)}: not passed on")
    variables |= additions(spec, os.environ)
    single = spec.processes == 1
    # One shown rank writes to the terminal itself, without prefixes: progress bars are redrawn in
    # place.
    direct = single or len(ranks) == 1
    shown = ",".join(map(str, ranks))
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as logs:
        output = ["--log-dir", logs, "--redirects", "0", "--tee", "0" if direct else "3"]
        output += ["--local-ranks-filter", shown]
        program = ["-u", "-P", _CHILD, "torchrun", shown]
        words = argv(spec, program=program, output=output, before=[_CHILD, "rank"])
        if spec.max_nodes > 1:
            _await_names(spec)
        # setdefault(): an outer torchrun or torchx reads errors from the file that it has set.
        variables.setdefault("TORCHELASTIC_ERROR_FILE", str(Path(logs, "error.json")))
        variables.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
        # torchrun writes to the same file: what this process has buffered comes first.
        sys.stdout.flush()
        # Several ranks would each read a part of stdin.
        stdin = None if single else subprocess.DEVNULL
        start = partial(subprocess.Popen, words, stdin=stdin, env=variables, start_new_session=True)
        return _wait(start, spec.grace)


def _refuse_job(spec: LaunchSpec, ranks: Sequence[int]) -> None:
    """Refuse a job that can't run on this machine."""
    if spec.script is not None and not Path(spec.script).is_file():
        raise ValueError(f"Invalid script={spec.script!r}: there is no such file.")
    for rank in ranks:
        # processes is 0 if only torchrun knows the number.
        if rank < 0 or (spec.processes and rank >= spec.processes):
            below = f", below {spec.processes}" if spec.processes else ""
            raise ValueError(f"Invalid {rank=}: must be a local rank{below}.")


def _await_names(spec: LaunchSpec) -> None:
    """Refuse a job on several nodes whose addresses are names that do not resolve here.

    torchrun and the ranks would try to connect for a minute or more, and then not name the address.
    """
    # As torchrun does, which passes it to the other nodes.
    own = spec.local_addr or socket.getfqdn()
    if not _resolves(own):
        raise ValueError(
            f"Invalid local_addr={spec.local_addr!r}: the name {own!r} of this node does not"
            " resolve; must be the address at which the other nodes reach it."
        )
    host = str(spec.rdzv_endpoint).rpartition(":")[0].strip("[]")
    if _resolves(host):
        return
    _log(f"the name {host!r} in the rendezvous endpoint does not resolve; waits {NAME_SECONDS:g} s")
    end = time.monotonic() + NAME_SECONDS
    while time.monotonic() < end:
        time.sleep(0.5)
        if _resolves(host):
            return
    raise ValueError(
        f"Invalid rdzv_endpoint={spec.rdzv_endpoint!r}: the name {host!r} does not resolve on this"
        f" node, within {NAME_SECONDS:g} s; must be a name or an address that every node reaches."
    )


def _resolves(name: str) -> bool:
    # UnicodeError: a label of the name is empty or too long.
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(name, None))
    return False


def _wait(start: Callable[[], subprocess.Popen[Any]], grace: int) -> int:
    """Start torchrun and wait until it exits, forward the first signal to it, and return the exit
    code."""
    process: subprocess.Popen[Any] | None = None
    received: list[int] = []
    sent: list[int] = []

    def send() -> None:
        # A second signal would interrupt torchrun's shutdown, and leave ranks running.
        if process is not None and received and not sent:
            sent.append(received[0])
            process.send_signal(received[0])

    def forward(number: int, _: FrameType | None) -> None:
        if not received:
            received.append(number)
            send()
            _log(f"{signal.Signals(number).name}: the ranks have {grace} s to exit")

    # Before the start: a signal in between would leave torchrun running, in a session of its own.
    handlers = {}
    for number in _FORWARDED:
        # nohup ignores SIGHUP: it stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, forward)
    try:
        process = start()
        send()
        code = process.wait()
    finally:
        # The caller may have handlers of its own.
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if code >= 0:
        return code
    _log(f"torchrun was killed by {signal.Signals(-code).name}")
    return 128 - code


def _log(text: str) -> None:
    # One write keeps the line whole: torchrun and the ranks write to the same file.
    os.write(2, f"launch: {text}\n".encode())
