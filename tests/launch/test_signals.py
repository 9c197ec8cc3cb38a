"""Every end of a job ends all of it: signals, ranks that ignore them, a killed launcher, a killed torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from .jobs import Job, alive, finish, job, script, wait_for

# Ranks that save on SIGTERM, and say so on an output; ranks that ignore all signals, each with a child in a session of
# its own that ignores them too.
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
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
say(f"ready{rank}")
time.sleep(300)
"""
LIMIT = 120.0  # seconds; ranks of these tests end by themselves only after twice as many
PLAIN = "print('up')\nsay(f'ready{rank}')\ntime.sleep(300)\n"
TALKATIVE = "say(f'ready{rank}')\nwhile True:\n    print('x' * 1000)\n    time.sleep(PAUSE)\n"


def words(folder: Path, text: str, grace: str = "1") -> list[str]:
    return ["--nproc", "2", "--grace", grace, script(folder, text)]


def torchrun_of(running: Job) -> int:
    """The launcher's one child."""
    pid = running.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


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
        assert len(alive(running.mark)) == 6  # launcher, torchrun, two ranks, two children of theirs
        running.process.send_signal(signal.SIGTERM)
        assert finish(running, seconds=LIMIT)[0] == 143


def test_a_second_ctrl_c_does_not_wait_and_a_job_inside_ends_too(tmp_path: Path) -> None:
    """The outer launcher kills the inner one, and with it what the inner one would have waited for."""
    inner = f"""
import subprocess
words = [sys.executable, "-m", "launch", "--nproc", "2", "--grace", "600", {str(tmp_path / "inner.py")!r}]
subprocess.run(words)
"""
    Path(script(tmp_path, STUBBORN)).rename(tmp_path / "inner.py")
    with job(tmp_path, ["--grace", "600", script(tmp_path, inner)]) as running:
        running.wait_until("ready0", "ready1")
        running.process.send_signal(signal.SIGINT)
        stderr = running.process.stderr
        assert stderr is not None
        assert any("launch: SIGINT" in line for line in stderr)
        running.process.send_signal(signal.SIGINT)
        assert finish(running, seconds=LIMIT)[0] == 130


def test_ranks_have_their_grace_when_the_launcher_is_killed(tmp_path: Path) -> None:
    """And can print in it: their outputs don't end with the launcher."""
    with job(tmp_path, words(tmp_path, POLITE, grace="30")) as running:
        running.wait_until("ready0", "ready1")
        running.process.kill()
        wait_for(lambda: not alive(running.mark), seconds=LIMIT)
        assert running.said("saved0") and running.said("saved1")


def test_nothing_survives_a_killed_launcher(tmp_path: Path) -> None:
    """The kernel sends torchrun a SIGTERM; torchrun gives the ranks their grace and kills them."""
    with job(tmp_path, words(tmp_path, STUBBORN.replace("start_new_session=True", ""))) as running:
        running.wait_until("ready0", "ready1")
        running.process.kill()
        wait_for(lambda: not alive(running.mark), seconds=LIMIT)


def test_ranks_do_not_survive_launcher_and_torchrun(tmp_path: Path) -> None:
    with job(tmp_path, words(tmp_path, PLAIN)) as running:
        running.wait_until("ready0", "ready1")
        torchrun = torchrun_of(running)
        running.process.kill()
        os.kill(torchrun, signal.SIGKILL)
        wait_for(lambda: not alive(running.mark), seconds=LIMIT)


def test_nothing_survives_a_killed_torchrun(tmp_path: Path) -> None:
    with job(tmp_path, words(tmp_path, STUBBORN)) as running:
        running.wait_until("ready0", "ready1")
        os.kill(torchrun_of(running), signal.SIGKILL)
        status, _, err = finish(running)
    assert (status, err.splitlines()[-1]) == (137, "launch: torchrun was killed by SIGKILL")


def test_a_reader_that_goes_away_ends_the_job(tmp_path: Path) -> None:
    with job(tmp_path, words(tmp_path, TALKATIVE.replace("PAUSE", "0.01"))) as running:
        running.wait_until("ready0", "ready1")
        assert running.process.stdout is not None
        running.process.stdout.close()
        wait_for(lambda: running.process.poll() is not None)
        assert running.process.returncode == 128 + signal.SIGPIPE
        assert alive(running.mark) == []


def test_a_signal_ends_a_job_whose_output_is_not_read(tmp_path: Path) -> None:
    script(tmp_path, TALKATIVE.replace("PAUSE", "0"))
    with job(
        tmp_path, [f"exec {sys.executable} -m launch --nproc 2 --grace 1 job.py 2>&1"], command=("sh", "-c")
    ) as running:
        running.wait_until("ready0", "ready1")
        time.sleep(1)  # the pipe is full by then
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: running.process.poll() is not None, seconds=LIMIT)
        assert running.process.returncode == 143
        assert alive(running.mark) == []
