"""Start the launcher in a test, and find what it leaves behind.

Every process of a test's job has the test's own mark in its environment, so that survivors are
found through /proc, whatever session or parent they have. Jobs end by themselves in five minutes at
most, also if the launcher is broken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["LAUNCH", "ROOT", "Job", "alive", "finish", "job", "script", "wait_for"]

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (sys.executable, "-m", "launch")
TIMEOUT = 300.0


class Job(NamedTuple):
    """A started launcher, the mark of all its processes, and a folder for the files of its
    ranks."""

    process: subprocess.Popen[str]
    mark: str
    folder: Path

    def said(self, name: str) -> bool:
        """Whether a rank has written the file `name`."""
        return (self.folder / name).exists()

    def wait_until(self, *names: str) -> None:
        """Waits for ranks to write these files."""
        wait_for(lambda: all(self.said(name) for name in names), self.process)


def script(folder: Path, text: str) -> str:
    """A script of a rank: it knows `rank`, `say(name)` writes a file, and it does not outlive five
    minutes."""
    head = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "rank = int(os.environ['RANK'])\n"
        "def say(name, text=''):\n"
        "    part = Path(os.environ['FOLDER'], name + '.part')\n"
        "    part.write_text(text)\n"
        "    part.rename(part.with_suffix(''))\n"
        "signal.alarm(300)\n"
    )
    path = folder / "job.py"
    path.write_text(head + text)
    return str(path)


@contextlib.contextmanager
def job(
    folder: Path, words: Sequence[str], *, command: Sequence[str] = LAUNCH, **variables: str
) -> Iterator[Job]:
    """Starts the launcher with these words; kills whatever is left of it in the end."""
    mark = f"LAUNCH_TEST={uuid.uuid4()}"
    environ = {
        key: value
        for key, value in os.environ.items()
        if key not in ("OMP_NUM_THREADS", "PYTHONHASHSEED")
    }
    environ |= {"FOLDER": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    environ |= dict([mark.split("=", 1)]) | variables
    # Pytest in the background; the launcher would leave it so.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # pytest under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = subprocess.Popen(
        [*command, *words],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Job(process, mark, folder)
    finally:
        for pid in alive(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def finish(running: Job, *, seconds: float = TIMEOUT) -> tuple[int, str, str]:
    """Waits for the end: exit status, output, errors. Nothing of the job must be left then."""
    out, err = running.process.communicate(timeout=seconds)
    assert alive(running.mark) == [], "processes of the job outlive the launcher"
    return running.process.returncode, out, err


def alive(mark: str) -> list[int]:
    """The processes with this `KEY=VALUE` in their environment. Zombies have none."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def wait_for(
    happened: Callable[[], bool],
    process: subprocess.Popen[str] | None = None,
    *,
    seconds: float = TIMEOUT,
) -> None:
    """Waits until it has happened; fails if `process` ends before, or after a time."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen in time"
        if process is not None and process.poll() is not None and not happened():
            raise AssertionError(
                f"the launcher ended with {process.returncode}:"
                f" {process.stderr and process.stderr.read()}"
            )
        time.sleep(0.02)
