"""Failures of the output of `dist-sparse`, and of what it reads: one sentence each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_sparse import RunLog
from dist_sparse.cli.main import main

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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunLog(tmp_path / "run", config={"name \udc80 ü": 1}) as log:
        log.step(0, loss=2.0)
    return tmp_path


@needs_full
@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("inspect run", {}),
        ("inspect run --json", {}),
        ("--help", {}),
        ("inspect --help", {}),
        ("--version", {}),
        ("inspect run", UNBUFFERED),
        ("--version", UNBUFFERED),
    ],
)
def test_a_full_disk(words: str, variables: dict[str, str], run: Path) -> None:
    done = shell(f"$D {words} > {FULL}", run, **variables)
    assert (done.returncode, done.stderr) == (
        1,
        "dist-sparse: can't write to standard output: No space left on device\n",
    )


@pytest.mark.parametrize("variables", [{}, UNBUFFERED], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", ["inspect run --json", "--version"])
def test_a_reader_that_has_enough(words: str, variables: dict[str, str], run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert shell(f"$D {words}; echo $? >&2", run, stdout=writer, **variables).stderr == "141\n"
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("encoding", "name"), [("utf-8", "name \\udc80 ü"), ("ascii", "name \\udc80 \\xfc")]
)
def test_what_the_output_has_no_place_for_is_escaped(encoding: str, name: str, run: Path) -> None:
    done = shell("$D inspect run", run, PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and f"  {name}: 1\n" in done.stdout


@pytest.mark.parametrize("command", ["inspect", "report"])
@pytest.mark.parametrize("name", ["run.json", "log.jsonl"])
def test_json_that_is_nested_too_deeply(
    command: str, name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "run" / name).write_text("[" * 100_000 + "]" * 100_000 + "\n")
    assert main([command, str(run / "run")]) == 1
    said = capsys.readouterr()
    text = said.err.replace("\n  ", " ")
    assert text.startswith(f"dist-sparse {command}: ") and len(text) < 300 and not said.out
