"""Failures of the output of `dist-sparse`, and of what it reads: one sentence each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # then a write fails at once, and not a flush after it

needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def shell(
    command: str, folder: Path, *, stdout: int = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which ``$D`` is `dist-sparse`."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environ |= {"PYTHONPATH": str(ROOT), "D": f"{sys.executable} -m dist_sparse", **variables}
    return subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environ,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )


@needs_full
@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("--help", {}),
        ("plan --help", {}),
        ("--version", {}),
        ("--version", UNBUFFERED),
    ],
)
def test_a_full_disk(words: str, variables: dict[str, str], tmp_path: Path) -> None:
    done = shell(f"$D {words} > {FULL}", tmp_path, **variables)
    assert (done.returncode, done.stderr) == (
        1,
        "dist-sparse: can't write to standard output: No space left on device\n",
    )


@pytest.mark.parametrize("variables", [{}, UNBUFFERED], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", ["help", "--version"])
def test_a_reader_that_has_enough(words: str, variables: dict[str, str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert (
            shell(f"$D {words}; echo $? >&2", tmp_path, stdout=writer, **variables).stderr
            == "141\n"
        )
    finally:
        os.close(writer)
