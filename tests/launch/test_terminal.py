"""Does a job look on a terminal as a script does there, with a bar that is drawn in place and fits?"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path

from .jobs import LAUNCH, ROOT, script

BAR = """
from tqdm import tqdm
for step in tqdm(range(20), desc="train", disable=None if rank == 0 else True, mininterval=0):
    time.sleep(0.02)
    if rank == 1 and step % 5 == 0:
        print("line", step)
print("width", os.get_terminal_size(1).columns)
"""
COLUMNS = 100


def on_terminal(words: list[str], **variables: str) -> tuple[int, str]:
    """Runs a command on a pseudo-terminal; returns its status and all that was drawn."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(words[0], words, {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **variables})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    drawn = b""
    while True:
        try:
            drawn += os.read(terminal, 1 << 16)
        except OSError:
            break
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), drawn.decode()


def visible(drawn: str) -> list[str]:
    """What a reader sees in the end: the terminal's lines, of which the last state counts."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    return [re.split(r"\r\x1b\[K", line.rstrip("\r"))[-1] for line in plain.split("\n")]


def test_a_bar_is_drawn_in_place(tmp_path: Path) -> None:
    status, drawn = on_terminal([*LAUNCH, "--nproc", "2", script(tmp_path, BAR)], FOLDER=str(tmp_path))
    assert status == 0
    lines = visible(drawn)
    bars = [line for line in lines if "train:" in line]
    assert len(bars) == 1 and "100%" in bars[0] and "20/20" in bars[0]
    assert drawn.count("\r\x1b[K") > 10  # it was drawn, many times
    assert all(len(line) <= COLUMNS for line in lines)
    assert len(bars[0]) > COLUMNS - 10
    assert [line for line in lines if "line" in line] == [f"[1] line {step}" for step in (0, 5, 10, 15)]
    assert lines.count(f"[0] width {COLUMNS - 5}") == lines.count(f"[1] width {COLUMNS - 5}") == 1
    assert "\x1b[36m[0]\x1b[0m" in drawn


def test_a_terminal_that_can_not_draw_gets_lines(tmp_path: Path) -> None:
    """As in an editor's shell: a bar comes once, in its last state."""
    text = BAR.rpartition("print(")[0]  # what is no terminal has no width
    words = [*LAUNCH, "--nproc", "2", script(tmp_path, text)]
    status, drawn = on_terminal(words, FOLDER=str(tmp_path), TERM="dumb")
    assert status == 0
    assert "\x1b" not in drawn
    assert [line for line in drawn.splitlines() if "line" in line] == [f"[1] line {step}" for step in (0, 5, 10, 15)]
