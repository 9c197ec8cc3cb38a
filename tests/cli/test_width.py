"""Everything that `dist-sparse` prints fits a terminal of 80 columns, whatever the names."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dist_sparse import DataNormSparsifier, describe, export, sparsify
from dist_sparse.cli import doctor
from dist_sparse.cli.main import main
from dist_sparse.text import table_lines

LONG = "user_by_genre_by_hour_of_the_day"
MODEL = f"""
import torch

def measured():
    model = torch.nn.ModuleDict({{
        "{LONG}": torch.nn.EmbeddingBag(100_000, 8), "item": torch.nn.EmbeddingBag(50, 8),
    }})
    return model, lambda model: {{"auc": 0.7, "ne": 0.9, "recall_at_20": 0.1, "ndcg_at_20": 0.1}}
"""


def tables() -> nn.Module:
    return nn.ModuleDict({LONG: nn.EmbeddingBag(100_000, 8), "item": nn.EmbeddingBag(50, 8)})


def check(printed: str, width: int = 80) -> None:
    """A longer line is one word: a path or an address, which is not cut."""
    for line in printed.splitlines():
        assert len(line) <= width or " " not in line.strip(), line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an artifact, and a file with a model."""
    place = tmp_path_factory.mktemp("width")
    (place / "model.py").write_text(MODEL)
    model = tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sparsify(model, optimizer, level=0.9, end=0) as sparse:
        sparse.step()
        export(model, sparse, place / "served", dtype="int8")
    return place


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        *(f"{name} --help" for name in ("launch", "plan")),
        *(f"{name} --help" for name in ("serve-check", "merge", "doctor", "selftest")),
        "serve-check served",
        "serve-check served --jsn",
        "serve-check model.py",
        "plan model.py:measured --budget 30%",
        "plan model.py:measured --budget 30% --rotate item,no_such_table",
        "plan model.py:no_such_function --budget 30%",
        "launch no_such_script_in_this_folder.py",
        "launch -m no-such-module",
        "no-such-command",
    ],
)
def test_a_command(
    words: str,
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_command(words, place, capfd, monkeypatch)


def check_command(
    words: str,
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with contextlib.suppress(SystemExit):
        main(words.split())
    out, err = capfd.readouterr()
    assert out + err
    check(out)
    check(err)


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda code: ("failed: " + 20 * "word ", ""))
    here = {"torch": "2.12.0", "torchrec": "1.6.0", "fbgemm-gpu-cpu": "1.7.0"}
    monkeypatch.setattr(doctor, "installed", lambda: here)
    found = doctor.examine(lambda what: None)
    for line in found.text(verbose=True).splitlines():
        # Commands are pasted: a break would end them.
        assert len(line) <= 80 or "pip install" in line, line


def test_tables_of_python() -> None:
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, "ROW"))
    sparsifier.add_model(tables())
    check(describe(sparsifier))
    model = tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sparsify(model, optimizer, level=0.5, end=0) as sparse:
        sparse.step()
        check(sparse.summary())
        assert describe(sparse) == describe(sparse.sparsifier)


@pytest.mark.parametrize("width", [30, 80, 200])
def test_no_cell_is_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    head = ("name", "what it is", "rows (here)", *(f"metric {i}" for i in range(8)))
    rows = [(f"{LONG}_{i}", "a text of a few words", "1,000", *8 * ["0.1234"]) for i in range(3)]
    lines = table_lines(head, rows, right=range(2, 11), totals=rows[:1])
    check("\n".join(lines), width)
    text = " ".join(" ".join(lines).split())
    assert text.count("1,000") == 4 and text.count("0.1234") == 32
    for i in range(3):
        assert f"{LONG}_{i}" in text
    one_line = [line for line in lines if line.startswith(LONG)]
    assert len(one_line) == 4 and (width < 200 or all("0.1234" in line for line in one_line))
