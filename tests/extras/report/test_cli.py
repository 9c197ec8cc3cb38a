"""The commands `inspect` and `report`: arguments, failures, and runs that are read without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_sparse.checkpoint.storage import MARKER
from dist_sparse.cli.main import main
from dist_sparse.extras.report import RunLog
from dist_sparse.extras.report.folder import RUN
from dist_sparse.serving.artifact import MANIFEST
from tests.cli.test_cli import check_wrong, run_code, sentences
from tests.extras.report.test_run_log import train


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("inspec runs/latest", "argument COMMAND: invalid choice: 'inspec'"),
        ("report . --opne", "report: error: unrecognized arguments: --opne; did you mean --open?"),
        ("inspect nothere", "inspect: error: argument RUN: 'nothere' does not exist."),
        ("inspect step-00000001", "argument RUN: 'step-00000001' does not exist."),
        ("report . nothere", "argument RUN: 'nothere' does not exist."),
        ("report --bogus", "report: error: unrecognized arguments: --bogus\n"),
        ("report --opne", "report: error: unrecognized arguments: --opne; did you mean --open?"),
    ],
)
def test_what_is_wrong_is_named(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_wrong(words.split(), message, capsys)


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, config={"lr": 0.1}) as log:
        log.step(0, loss=2.0)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "last: loss 2" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == {"lr": 0.1}
    (tmp_path / RUN).write_text('{"format": 99}')
    assert main(["inspect", str(tmp_path)]) == 1
    [line] = sentences(capsys.readouterr().err)
    assert "has format 99; this release reads and writes 3" in line


def test_inspect_of_an_artifact_names_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / MANIFEST).touch()
    assert main(["inspect", str(tmp_path)]) == 1
    [line] = sentences(capsys.readouterr().err)
    assert line.endswith(
        "holds an artifact or a delta, and no run: dist-sparse serve-check shows it."
    )


def test_runs_are_read_without_torch(tmp_path: Path) -> None:
    """In a process in which it can't be imported; what is printed is the same."""
    train(tmp_path / "run")
    (tmp_path / "saved" / "step-00000001").mkdir(parents=True)
    (tmp_path / "saved" / "step-00000001" / MARKER).touch()
    code = (
        "import sys; sys.modules['torch'] = None; from dist_sparse.cli.main import main\n"
        "print([main(line.split()) for line in sys.stdin])"
    )
    lines = [
        "inspect run",
        "inspect run --json",
        "report run",
        "report run run --svg charts",
        "inspect saved",
    ]
    lines.append("serve-check run")
    done = run_code(code, tmp_path, "\n".join(lines))
    assert done.stdout.endswith("[0, 0, 0, 0, 1, 1]\n"), done.stderr
    assert "float32" in done.stdout and (tmp_path / "run" / "comparison.html").exists()
    assert run_code(
        code.replace("sys.modules['torch'] = None; ", ""), tmp_path, lines[0]
    ).stdout in (done.stdout.partition("{")[0] + "[0]\n")
    first, *others = sentences(done.stderr)
    assert first.startswith("dist-sparse inspect: ")
    why = "needs torch, which is not installed; dist-sparse doctor prints how to install it."
    assert others == [f"dist-sparse {command}: {why}" for command in ("serve-check",)]
