"""The command `frontier`: arguments, failures, and output that fits a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_sparse.cli.main import main
from tests.cli.test_cli import check_wrong, check_wrong_function, sentences
from tests.cli.test_cli import model as model
from tests.cli.test_width import MODEL, check_command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--budget 5", "argument --budget: No table fits in 5 bytes. Did you mean 5%?"),
        ("--tolerance x", "argument --tolerance: Invalid 'x': must be a number such as 0.002, at"),
        ("--tolerance=-1", "argument --tolerance: Invalid '-1'"),
        ("--method rotatd", "; did you mean rotated?"),
    ],
)
def test_what_is_wrong_is_named(
    words: str, message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_wrong(["frontier", f"{model}:f", *words.split()], message, capsys)


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [
        ("three", 2, "has no function 'three'."),
        ("an_int", 2, "must return (model, evaluate), where evaluate is a function."),
        ("needing", 2, "missing a required argument: 'data'; must take no arguments."),
        ("failing", 1, "it failed at model_of_test_cli.py:14 with ZeroDivisionError: division by"),
    ],
)
def test_a_wrong_function_is_named(
    function: str,
    status: int,
    message: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(model).parent)
    check_wrong_function(
        ["frontier", f"{model}:{function}", "--budget", "10%"], message, status, capsys
    )


def test_a_wrong_table_is_one_sentence(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", f"{model}:evaluated", "--rotate", "x,y"]) == 1
    [line] = sentences(capsys.readouterr().err)
    assert line.startswith("dist-sparse frontier: Invalid --rotate=[['x', 'y']]: ")


@pytest.mark.parametrize(
    "words", ["frontier --help", "frontier model.py:measured --budget 30% --budget 20%"]
)
def test_the_output_fits(
    words: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    check_command(words, tmp_path, capfd, monkeypatch)
