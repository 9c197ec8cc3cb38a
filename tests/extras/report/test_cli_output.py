"""Failures of the output of `inspect` and `report`, and of what they read: one sentence each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist_sparse.cli.main import main
from dist_sparse.extras.report import RunLog
from tests.cli.test_cli_output import FULL, UNBUFFERED, needs_full, shell


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunLog(tmp_path / "run", config={"name \udc80 ü": 1}) as log:
        log.step(0, loss=2.0)
    return tmp_path


@needs_full
@pytest.mark.parametrize(
    ("words", "variables"),
    [("inspect run", {}), ("inspect run --json", {}), ("inspect run", UNBUFFERED)],
)
def test_a_full_disk(words: str, variables: dict[str, str], run: Path) -> None:
    done = shell(f"$D {words} > {FULL}", run, **variables)
    assert (done.returncode, done.stderr) == (
        1,
        "dist-sparse: can't write to standard output: No space left on device\n",
    )


@pytest.mark.parametrize("variables", [{}, UNBUFFERED], ids=["buffered", "unbuffered"])
def test_a_reader_that_has_enough(variables: dict[str, str], run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = "$D inspect run --json; echo $? >&2"
        assert shell(command, run, stdout=writer, **variables).stderr == "141\n"
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
