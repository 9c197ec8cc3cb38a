"""Text and JSON of `inspect`, for finished, crashed and new runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from torch import nn

from dist_sparse import ROW, DataNormSparsifier, describe
from dist_sparse.cli.main import main
from dist_sparse.extras.report.folder import LINES
from dist_sparse.extras.report.run import read_run
from dist_sparse.extras.report.run_log import RunLog
from dist_sparse.extras.report.summary import inspect_text, numbers
from tests.checkpoint.models import Job
from tests.extras.report.folders import DRIVING, edit
from tests.extras.report.test_run_log import train


def cells(text: str, first: str) -> list[str]:
    """Return the cells of the line that starts with ``first``."""
    line = next(line for line in text.splitlines() if line.startswith(first))
    return re.split("  +", line)


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    [stats] = train(tmp_path / "run", config={"lr": 0.1, "block": [1, "ROW"]}).table_stats()
    run = read_run(tmp_path / "run")
    text = inspect_text(run)
    # The length of the path decides where the line is wrapped.
    head = f"{tmp_path / 'run'}: started {run.started} on 1 rank; dist_sparse "
    assert head in " ".join(text.split())
    assert "The run ended at step 8." in text
    known = ["50.0%", "50.0%", "10", "320 B", "160 B"]
    assert cells(text, stats.name) == [stats.name, "20 x 4", "row", *known]
    assert cells(text, "all") == ["all", "-", "-", *known]
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert "mask updates: 3\nlookups of removed rows: 50.0%\n" in text
    assert '  block: [1, "ROW"]' in text and "  lr: 0.1" in text
    said = json.loads(json.dumps(numbers(run)))
    assert said["config"] == {"lr": 0.1, "block": [1, "ROW"]} and said["world"] == 1
    [table] = said["tables"]
    assert (table["name"], table["shape"]) == (stats.name, [20, 4])
    assert [table[f"bytes_{kind}"] for kind in ("dense", "kept", "masks")] == [320, 160, 3]
    assert said["bytes_kept"] == stats.kept_bytes == 160


def test_a_run_that_has_crashed(tmp_path: Path) -> None:
    """Without an end, tables are as the last mask update left them, and bytes are unknown."""
    [stats] = train(tmp_path).table_stats()
    file = tmp_path / LINES
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:20])
    text = inspect_text(read_run(tmp_path))
    assert "The log stops at step 8 without an end" in text
    known = ["-", "-", "50.0%", "50.0%", "10", "-", "-"]
    assert cells(text, stats.name) == [stats.name, *known]
    assert cells(text, "all") == ["all", *known]


def test_names_do_not_drive_the_terminal(tmp_path: Path) -> None:
    model = nn.Module()
    model.add_module(DRIVING, nn.EmbeddingBag(20, 4))
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    sparsifier.add_model(model)
    with RunLog(tmp_path, sparsifier, config={DRIVING: DRIVING}) as log:
        sparsifier.step()
        log.step(0, **{DRIVING: 1.0})
    run = read_run(tmp_path)
    for text in (inspect_text(run), describe(sparsifier)):
        assert all(
            line.isprintable() for line in text.split("\n")
        ) and "fake row" not in text.split("\n")
        assert text.encode()
        assert r"表अ\x1b]0;title\x07\x1b[2J\nfake row\x9b31m\u202etxt\u2028\ud800" in text


def test_a_table_as_it_stood_in_the_end(tmp_path: Path) -> None:
    """Dead rows that mask updates do not have are those of the end."""
    train(tmp_path)
    edit(
        tmp_path,
        lambda line: (
            line | {"tables": [t | {"dead_rows": None} for t in line["tables"]]}
            if line["kind"] in ("masks", "end")
            else line
        ),
    )
    lines = (tmp_path / LINES).read_text().splitlines(keepends=True)
    end = json.loads(lines[-1])
    end["tables"][0]["dead_rows"] = 7
    (tmp_path / LINES).write_text("".join(lines[:-1]) + json.dumps(end) + "\n")
    run = read_run(tmp_path)
    [stats] = run.tables
    assert cells(inspect_text(run), stats.name)[-3] == "7" and numbers(run)["dead_rows"] == 7
    (tmp_path / LINES).write_text("".join(lines[:-1]))
    run = read_run(tmp_path)
    assert cells(inspect_text(run), stats.name)[-3] == "-" and numbers(run)["dead_rows"] is None


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    RunLog(tmp_path)
    text = inspect_text(read_run(tmp_path))
    assert "before its first line" in text and "mask updates: 0" in text
    assert "table" not in text and "config:" not in text


def test_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of a folder, or one; a run with checkpoints in it is inspected as a run."""
    job = Job(tmp_path)
    job.train(0, 2, save=True)
    assert main(["inspect", str(tmp_path)]) == 0
    steps = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert steps == [["1", "1"], ["2", "1"]]
    assert main(["inspect", str(tmp_path / "step-00000002")]) == 0
    assert "step 2, saved by 1 rank" in capsys.readouterr().out
    (tmp_path / "step-00000002" / "values.json").write_text("{}")
    assert main(["inspect", str(tmp_path / "step-00000002")]) == 1
    assert "values.json is damaged" in " ".join(capsys.readouterr().err.split())
    with RunLog(tmp_path) as log:
        log.step(0, loss=0.5)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "loss" in capsys.readouterr().out
