"""Does `dist-sparse` say what it can do, and hand the words of `launch` over as they are?"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from dist_sparse.cli import main

ROOT = Path(__file__).resolve().parents[1]


def test_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    assert "launch" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["--no-such-option"]], ids=str)
def test_a_wrong_command_line_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert "usage: dist-sparse" in capsys.readouterr().err


def test_words_of_launch_are_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Options included: here with the launcher of the clone under the name that it has once installed."""
    import launch
    import launch.cli

    monkeypatch.setitem(sys.modules, "dist_sparse.launch", launch)
    monkeypatch.setitem(sys.modules, "dist_sparse.launch.cli", launch.cli)
    assert main(["launch", "--print", "--nproc", "2", "train.py", "--", "-h", "--", "--print"]) == 0
    assert capsys.readouterr().out.endswith("--tee 0 -- train.py -h -- --print\n")
    with pytest.raises(SystemExit) as leaving:
        main(["launch", "--help"])
    assert leaving.value.code == 0
    assert "dist-sparse launch --nproc 2" in capsys.readouterr().out


def test_without_the_launchers_it_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a clone on PYTHONPATH, where nothing maps the name to the folder."""

    class Hidden:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "dist_sparse.launch":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    for name in [name for name in sys.modules if name.startswith("dist_sparse.launch")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["launch", "train.py"]) == 2
    assert "python -m launch" in capsys.readouterr().err


def test_only_a_subcommand_imports_the_launchers() -> None:
    importers = []
    for file in (ROOT / "dist_sparse").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any("launch" in name.split(".") for name in names):
                assert isinstance(node, ast.ImportFrom) and node.col_offset > 0
                importers.append(file.name)
    assert importers == ["cli.py"]
