"""Does a job survive a full disk, end on a signal though nobody reads, and lose nothing to a slow reader?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_sparse.launch.writer import ROOM, Writer

from .jobs import LAUNCH, ROOT, finish, job, script, wait_for

TALKATIVE = "say(f'ready{rank}')\nwhile True:\n    print('x' * 1000)\n"
FULL = Path("/dev/full")
LIMIT = 120.0
LINES = 4000

needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_job_whose_output_nobody_reads(tmp_path: Path, number: signal.Signals) -> None:
    with job(tmp_path, ["--nproc", "2", "--grace", "1", script(tmp_path, TALKATIVE)]) as running:
        running.wait_until("ready0", "ready1")
        time.sleep(2)  # the pipe and what the launcher holds back are full by then
        running.process.send_signal(number)
        wait_for(lambda: running.process.poll() is not None, seconds=LIMIT)
        assert running.process.returncode == 128 + number
        finish(running)


def test_a_slow_reader_gets_everything(tmp_path: Path) -> None:
    """Far more than the launcher holds, of ranks that end long before it is read."""
    text = f"for line in range({LINES}):\n    print(line, 'x' * 1000)\n"
    with job(tmp_path, ["--nproc", "2", script(tmp_path, text)]) as running:
        time.sleep(8)  # longer than the launcher waits for the files of ranks that have gone
        status, out, _ = finish(running)
    assert status == 0
    for rank in (0, 1):
        found = [line.split()[1] for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert found == [str(line) for line in range(LINES)]


@needs_full
def test_a_full_disk_does_not_end_the_job(tmp_path: Path) -> None:
    text = "for _ in range(100):\n    print('x' * 1000)\n    time.sleep(0.01)\nsay(f'end{rank}')\n"
    command = f"exec {sys.executable} -m launch --nproc 2 {script(tmp_path, text)} > {FULL}"
    with job(tmp_path, [command], command=("sh", "-c")) as running:
        status, _, err = finish(running)
    assert status == 0
    assert running.said("end0") and running.said("end1")
    message = "launch: standard output can't be written (No space left on device): the job goes on without it"
    assert err.splitlines().count(message) == 1


@needs_full
@pytest.mark.parametrize(
    ("words", "outputs", "message"),
    [
        ("--print a.py", "> /dev/full", "No space left on device"),
        ("sbatch a.py", "> /dev/full", "No space left on device"),
        ("sbatch --output /dev/full a.py", "", "No space left on device"),
        ("sbatch a.py", ">&-", "Standard output is closed"),
        ("-m this", ">&-", "Standard output is closed"),
    ],
)
def test_what_cannot_be_written_is_one_line_and_1(words: str, outputs: str, message: str) -> None:
    command = f"{' '.join(LAUNCH)} {words} {outputs}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("python -m launch: ") and message in line


def test_a_reader_that_has_enough_is_141_and_silent() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = f"{' '.join(LAUNCH)} sbatch a.py; echo $? >&2"
    try:
        done = subprocess.run(
            ["sh", "-c", command], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    finally:
        os.close(writer)
    assert done.stderr == "141\n"


def test_what_waits_is_bounded_or_lost() -> None:
    reader, fd = os.pipe()
    woken: list[None] = []
    writer = Writer(fd, lambda: woken.append(None))
    writer.put(b"a" * ROOM)
    writer.put(b"b" * ROOM)
    assert writer.full and writer.busy
    writer.lose()
    assert not writer.full
    writer.put(b"c" * 10)
    found = bytearray()
    while len(found) < 2 * ROOM:
        found += os.read(reader, 1 << 16)
    wait_for(lambda: not writer.busy and bool(woken))
    assert found == b"a" * ROOM + b"b" * ROOM
    os.close(reader)
    writer.put(b"d")
    wait_for(lambda: isinstance(writer.fault, BrokenPipeError))
    writer.put(b"e")
    assert not writer.busy
    writer.close()
    os.close(fd)
