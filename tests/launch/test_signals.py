"""Does every end of a job end all of it: signals, ranks that ignore them, a killed launcher, a killed torchrun?"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .jobs import Job, alive, finish, job, script, wait_for

# Ranks that handle SIGTERM; ranks that ignore it, each with a child in a session of its own that ignores it too.
POLITE = """
def stop(number, frame):
    say(f"stopped{rank}")
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
PLAIN = "say(f'ready{rank}')\ntime.sleep(300)\n"


def words(folder: Path, text: str, grace: str = "1") -> list[str]:
    return ["--nproc", "2", "--grace", grace, script(folder, text)]


def torchrun_of(running: Job) -> int:
    """The launcher's one child."""
    pid = running.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (1, 143)])
def test_sigterm_reaches_the_ranks_and_the_code_they_choose_comes_back(
    tmp_path: Path, code: int, expected: int
) -> None:
    """1 is not chosen: it is what any exception ends with."""
    with job(tmp_path, words(tmp_path, POLITE.replace("75", str(code)), grace="30")) as running:
        running.wait_until("ready0", "ready1")
        running.process.send_signal(signal.SIGTERM)
        status, _, err = finish(running)
    assert status == expected
    assert running.said("stopped0") and running.said("stopped1")
    assert "launch: SIGTERM: the ranks have 30 s to end." in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_end_ranks_as_they_are_sent(tmp_path: Path, number: signal.Signals) -> None:
    with job(tmp_path, words(tmp_path, PLAIN, grace="30")) as running:
        running.wait_until("ready0", "ready1")
        running.process.send_signal(number)
        status, _, err = finish(running)
    assert status == 128 + number
    assert ("[0] KeyboardInterrupt" in err) == (number == signal.SIGINT)


def test_ranks_that_ignore_signals_are_killed_with_their_children(tmp_path: Path) -> None:
    with job(tmp_path, words(tmp_path, STUBBORN)) as running:
        running.wait_until("ready0", "ready1")
        assert len(alive(running.mark)) == 6  # launcher, torchrun, two ranks, two children of theirs
        running.process.send_signal(signal.SIGTERM)
        assert finish(running, seconds=LIMIT)[0] == 143


def test_a_job_inside_a_job_ends_with_it(tmp_path: Path) -> None:
    """The outer launcher kills the inner one, and with it what the inner one would have waited for."""
    inner = f"""
import subprocess
words = [sys.executable, "-m", "launch", "--nproc", "2", "--grace", "60", {str(tmp_path / "inner.py")!r}]
subprocess.run(words)
"""
    Path(script(tmp_path, STUBBORN)).rename(tmp_path / "inner.py")
    with job(tmp_path, ["--grace", "1", script(tmp_path, inner)]) as running:
        running.wait_until("ready0", "ready1")
        running.process.send_signal(signal.SIGTERM)
        assert finish(running, seconds=LIMIT)[0] == 143


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with job(tmp_path, words(tmp_path, STUBBORN, grace="600")) as running:
        running.wait_until("ready0", "ready1")
        running.process.send_signal(signal.SIGINT)
        stderr = running.process.stderr
        assert stderr is not None
        assert any("launch: SIGINT" in line for line in stderr)
        running.process.send_signal(signal.SIGINT)
        assert finish(running, seconds=LIMIT)[0] == 130


def test_nothing_survives_a_killed_launcher(tmp_path: Path) -> None:
    """torchrun gets SIGTERM from the kernel, gives the ranks their grace and kills them."""
    with job(tmp_path, words(tmp_path, STUBBORN.replace("start_new_session=True", ""))) as running:
        running.wait_until("ready0", "ready1")
        running.process.kill()
        wait_for(lambda: not alive(running.mark), seconds=LIMIT)


def test_ranks_do_not_survive_launcher_and_torchrun(tmp_path: Path) -> None:
    """With nobody left to kill them, the kernel does."""
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
        assert finish(running)[0] == 137


def test_a_reader_that_goes_away_ends_the_job(tmp_path: Path) -> None:
    text = "say(f'ready{rank}')\nwhile True:\n    print('x' * 1000)\n    time.sleep(0.01)\n"
    with job(tmp_path, words(tmp_path, text)) as running:
        running.wait_until("ready0", "ready1")
        assert running.process.stdout is not None
        running.process.stdout.close()
        wait_for(lambda: running.process.poll() is not None)
        assert running.process.returncode == 128 + signal.SIGPIPE
        assert alive(running.mark) == []
