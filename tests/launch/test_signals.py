"""A signal ends the whole job: ranks that save, ranks that ignore it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dist_sparse.launch.run import run
from dist_sparse.launch.spec import LaunchSpec

from .jobs import alive, finish, job, script

pytestmark = pytest.mark.slow

# Ranks that save on SIGTERM, and say so on an output; ranks that ignore all signals, each with a
# child that does too.
POLITE = """
def stop(number, frame):
    print("saving")
    say(f"saved{rank}")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
say(f"ready{rank}")
time.sleep(300)
"""
STUBBORN = """
import subprocess
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
say(f"ready{rank}")
time.sleep(300)
"""
LIMIT = 120.0  # seconds; ranks of these tests end by themselves only after twice as many
PLAIN = "print('up')\nsay(f'ready{rank}')\ntime.sleep(300)\n"


def words(folder: Path, text: str, grace: str = "1") -> list[str]:
    return ["--nproc", "2", "--grace", grace, script(folder, text)]


def test_sigterm_reaches_the_ranks(tmp_path: Path) -> None:
    with job(tmp_path, words(tmp_path, POLITE, grace="30")) as running:
        running.wait_until("ready0", "ready1")
        running.process.send_signal(signal.SIGTERM)
        status, out, err = finish(running)
    assert status == 143
    assert running.said("saved0") and running.said("saved1")
    assert sorted(out.splitlines()) == ["[0] saving", "[1] saving"]
    assert "launch: SIGTERM: the ranks have 30 s to exit" in err.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_end_ranks_as_they_are_sent(tmp_path: Path, number: signal.Signals) -> None:
    with job(tmp_path, words(tmp_path, PLAIN, grace="30")) as running:
        out = running.process.stdout
        assert out is not None
        assert sorted([out.readline(), out.readline()]) == ["[0] up\n", "[1] up\n"]
        running.process.send_signal(number)
        status, _, err = finish(running)
    assert status == 128 + number
    assert ("[0] KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert "child.py" not in err


def test_ranks_that_ignore_signals_are_killed_with_their_children(tmp_path: Path) -> None:
    with job(tmp_path, words(tmp_path, STUBBORN)) as running:
        running.wait_until("ready0", "ready1")
        # Launcher, torchrun, two ranks, two children of theirs.
        assert len(alive(running.mark)) == 6
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        running.process.send_signal(signal.SIGTERM)  # a second one does not break off the shutdown
        assert finish(running, seconds=LIMIT)[0] == 143


def test_a_killed_torchrun_is_named(tmp_path: Path) -> None:
    with job(tmp_path, words(tmp_path, PLAIN)) as running:
        running.wait_until("ready0", "ready1")
        pid = running.process.pid
        (torchrun,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(torchrun), signal.SIGKILL)
        running.process.wait(LIMIT)
        assert running.process.returncode == 137
        for left in alive(running.mark):
            os.kill(left, signal.SIGKILL)
        assert running.process.stderr is not None
        assert (
            running.process.stderr.read().splitlines()[-1]
            == "launch: torchrun was killed by SIGKILL"
        )


def test_a_signal_while_torchrun_starts_is_forwarded() -> None:
    """In a session of its own, it would go on without a parent."""

    popen = subprocess.Popen

    def start(*_: Any, **options: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGTERM)
        return popen(["sleep", "300"])

    with mock.patch.object(subprocess, "Popen", start):
        assert run(LaunchSpec(script=__file__)) == 128 + signal.SIGTERM
