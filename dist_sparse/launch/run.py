"""How does a job run on this machine until nothing of it is left?

torchrun runs in a session of its own, so that signals reach it through the launcher alone: once, and not beside it. It
passes them to the ranks, waits for the grace period and kills what is left. Whatever happens, the launcher leaves no
process of the job behind: those are the ones with the job's random mark in their environment (Linux). If the launcher
itself is killed, torchrun gets a SIGTERM from the kernel and ends the job as above; if torchrun is, so are the ranks.
A reader of the output that goes away ends the job; a disk that is full does not. What can't be written is waited for,
and once a signal has come, lost.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dist_sparse.launch.channels import Channels
from dist_sparse.launch.child import JOB, SOCKET
from dist_sparse.launch.command import argv, environment, target
from dist_sparse.launch.output import Display, Source, wants_colour
from dist_sparse.launch.spec import LaunchSpec

__all__ = ["refuse_closed", "run"]

_CHILD = str(Path(__file__).resolve().with_name("child.py"))
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MARGIN = 10.0
"""Seconds that torchrun has, beyond the ranks' grace, to kill them and go."""

_LAST_WORDS = 5.0
"""Seconds for output to come in after the last process has gone, and to be written after a signal."""


def run(spec: LaunchSpec, *, colour: str = "auto") -> int:
    """Runs this machine's part of the job; returns its exit code, 128 + n where signal n ended it.

    To be called in the main thread: it takes over the signals until it returns. Ranks have no standard input.

    Args:
        colour: "auto", "always" or "never": whether the ranks' labels are coloured.

    Raises:
        ValueError: `spec` says not where several nodes meet; there is no such script or interpreter here; this is not
            the main thread.
        OSError: standard output or standard error is closed.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("run() must be called in the main thread: it takes over the signals.")
    refuse_closed()
    if spec.script is not None and not Path(spec.script).is_file():
        raise ValueError(f"Invalid script={spec.script!r}: there is no such file.")
    if shutil.which(spec.python) is None:
        raise ValueError(f"Invalid python={spec.python!r}: there is no such program.")
    words, dropped = _words(spec), environment(spec, os.environ)[1]
    if dropped:
        print(f"launch: not passed on, torchrun would take options from: {', '.join(dropped)}", file=sys.stderr)
    sys.stdout.flush()
    return _Job(spec, words, colour).run()


def refuse_closed() -> None:
    """Files that are opened later would get the number of a closed output, and with it what is written there.

    Raises:
        OSError: standard output or standard error is closed.
    """
    for number, name in ((1, "output"), (2, "error")):
        try:
            os.fstat(number)
        except OSError as error:
            raise OSError(f"Standard {name} is closed: send it to a file, or to /dev/null.") from error


def _words(spec: LaunchSpec) -> list[str]:
    # torchrun's summary of a failure calls the job by the first word after the interpreter that is no option. With the
    # file that comes before a rank inside an option, that is the script, as without the launcher.
    before = f"-cimport runpy; runpy.run_path({_CHILD!r})['rank']()"
    place = "loopback" if spec.max_nodes == 1 else "network"
    return argv(
        spec,
        program=[spec.python, "-P", _CHILD, str(os.getpid()), place],
        ranks=[spec.python, "-I", "-S", before, *target(spec)],
    )


class _Job:
    def __init__(self, spec: LaunchSpec, words: list[str], colour: str) -> None:
        self._spec, self._words, self._colour = spec, words, colour
        self._mark = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._stopped_by: int | None = None
        self._deadline = float("inf")
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._displays: tuple[Display, ...] = ()
        self._told = False
        self._cut_by: int | None = None

    def run(self) -> int:
        with _caught(self._signals, self._selector) as wake:
            out, err = (_display(number, self._colour, wake) for number in (1, 2))
            self._displays = (out, out if _same_file(1, 2) else err)
            channels = Channels(self._selector, *self._displays, alive=self._alive)
            try:
                self._start(channels)
                self._watch(channels)
            finally:
                try:
                    self._kill_all()
                    self._hear_out(channels)
                finally:
                    channels.close()
                    self._finish_writing(channels)
                    self._selector.close()
        return self._status()

    def _start(self, channels: Channels) -> None:
        variables, _ = environment(self._spec, os.environ)
        # A launcher inside a job of another: what it starts is part of that one too.
        marks = [*filter(None, [os.environ.get(JOB)]), self._mark]
        variables |= {JOB: " ".join(marks), SOCKET: channels.path}
        files = channels.open(Source())
        try:
            self._torchrun = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=files[0],
                stderr=files[-1],
                env=variables,
                start_new_session=True,
            )
        finally:
            for file in files:
                os.close(file)

    def _watch(self, channels: Channels) -> None:
        while self._alive() and time.monotonic() < self._deadline:
            self._turn(channels, min(1.0, max(0.0, self._deadline - time.monotonic())))
            while self._signals:
                number = self._signals.pop(0)
                if number == signal.SIGWINCH:
                    channels.resize()
                else:
                    self._stop(number)
            self._look_at_faults()

    def _turn(self, channels: Channels, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()
        channels.balance()

    def _look_at_faults(self) -> None:
        broken = any(isinstance(display.writer.fault, BrokenPipeError) for display in self._displays)
        if broken and self._stopped_by is None:
            self._stop(signal.SIGPIPE)
        self._tell_faults()

    def _tell_faults(self) -> None:
        for display, name, other in zip(self._displays, ("output", "error"), reversed(self._displays), strict=True):
            fault = display.writer.fault
            if fault is not None and not isinstance(fault, BrokenPipeError) and not self._told:
                self._told = True  # where the other one is broken too, nobody can be told
                self._say(f"standard {name} can't be written ({fault.strerror}): the job goes on without it", other)

    def _hear_out(self, channels: Channels) -> None:
        """Takes in what is left in the files of processes that have ended; waits while the outputs are full."""
        until = time.monotonic() + _LAST_WORDS
        while not channels.idle and self._stays(until):
            if any(display.writer.full for display in self._displays):
                until = time.monotonic() + _LAST_WORDS
            self._turn(channels, 0.1)

    def _finish_writing(self, channels: Channels) -> None:
        until = time.monotonic() + _LAST_WORDS if self._stopped_by is not None else float("inf")
        while True:
            self._tell_faults()
            if not any(display.writer.busy for display in self._displays) or not self._stays(until):
                break
            self._turn(channels, 0.1)
        for display in self._displays:
            display.writer.close()

    def _stays(self, until: float) -> bool:
        """After the job: whether to go on. A first signal means no."""
        for number in self._signals:
            if self._stopped_by is None and number != signal.SIGWINCH:
                self._cut_by = number
        return self._cut_by is None and time.monotonic() < until

    def _alive(self) -> bool:
        return self._torchrun is not None and self._torchrun.poll() is None

    def _stop(self, number: int) -> None:
        """The first signal goes to torchrun, once: a second one would break off its way of ending the ranks."""
        if self._stopped_by is None:
            self._stopped_by = number
            for display in self._displays:
                display.writer.lose()
            self._deadline = time.monotonic() + self._spec.grace + _MARGIN
            assert self._torchrun is not None
            self._torchrun.send_signal(signal.SIGTERM if number == signal.SIGPIPE else number)
            if number != signal.SIGPIPE:
                again = " Ctrl-C again kills them." if number == signal.SIGINT else ""
                self._say(f"{signal.Signals(number).name}: the ranks have {self._spec.grace} s to end.{again}")
        elif number == self._stopped_by == signal.SIGINT:
            self._deadline = 0.0

    def _say(self, text: str, display: Display | None = None) -> None:
        (display or self._displays[1]).feed(Source(0, 1), f"launch: {text}\n".encode(), final=True)

    def _kill_all(self) -> None:
        if self._alive():
            assert self._torchrun is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._torchrun.pid, signal.SIGKILL)
            self._torchrun.wait()
        until = time.monotonic() + _LAST_WORDS
        while (left := list(_marked(self._mark))) and time.monotonic() < until:
            for process in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)

    def _status(self) -> int:
        assert self._torchrun is not None
        if self._stopped_by == signal.SIGPIPE:
            return 128 + signal.SIGPIPE
        status = self._torchrun.returncode
        if self._stopped_by is not None and status in (0, -signal.SIGKILL):
            # torchrun has not seen the signal, or had to be killed: the job ended by what stopped it.
            return 0 if status == 0 else 128 + self._stopped_by
        if self._cut_by is not None and status == 0:
            return 128 + self._cut_by
        return status if status >= 0 else 128 - status


def _marked(mark: str) -> Iterator[int]:
    """The processes of this user with `mark` among the jobs in the environment they were started with."""
    begin, wanted = f"{JOB}=".encode(), mark.encode()
    for entry in os.scandir("/proc") if sys.platform == "linux" else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                variables = Path(entry.path, "environ").read_bytes().split(b"\0")
                if any(each.startswith(begin) and wanted in each for each in variables):
                    yield int(entry.name)


def _display(number: int, colour: str, wake: Callable[[], None]) -> Display:
    terminal = os.isatty(number) and os.environ.get("TERM") != "dumb"  # which can't draw over a line
    return Display(number, terminal=terminal, colour=wants_colour(colour, terminal, dict(os.environ)), wake=wake)


def _same_file(*numbers: int) -> bool:
    found = [os.fstat(number) for number in numbers]
    return len({(stat.st_dev, stat.st_ino, stat.st_rdev) for stat in found}) == 1


@contextlib.contextmanager
def _caught(signals: list[int], selector: selectors.BaseSelector) -> Iterator[Callable[[], None]]:
    """Puts signals into a list and wakes the selector for each; ignored ones (nohup) stay ignored.

    Yields a function that wakes the selector, from any thread.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)

    def drain() -> None:
        with contextlib.suppress(BlockingIOError):
            reader.recv(1 << 12)

    def wake() -> None:
        with contextlib.suppress(OSError):  # it is awake already, or the job is over
            writer.send(b"\0")

    def caught(number: int, _: object) -> None:
        if number != signal.SIGCHLD:
            signals.append(number)

    selector.register(reader, selectors.EVENT_READ, drain)
    woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    numbers = [*_FORWARDED, signal.SIGCHLD, signal.SIGWINCH]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, caught)
        yield wake
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        reader.close()
        writer.close()
