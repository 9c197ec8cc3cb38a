"""Does `inspect` show what is in the folder of a run, however far it went?"""

from __future__ import annotations

import json
from pathlib import Path

from dist_sparse.report.folder import LINES
from dist_sparse.report.inspect import inspect_json, inspect_text
from dist_sparse.report.run import read_run
from dist_sparse.report.run_log import RunLog
from tests.report.test_run_log import train


def cells(text: str, first: str) -> list[str]:
    """Of the line that begins with a word; a shape is three words."""
    return next(line.split() for line in text.splitlines() if line.startswith(first))


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    [stats] = train(tmp_path / "run", config={"lr": 0.1, "block": [1, "ROW"]}).table_stats()
    run = read_run(tmp_path / "run")
    text = inspect_text(run)
    assert f"{tmp_path / 'run'}: started {run.started} on 1 rank; python " in text
    assert "The run ended at step 8." in text
    row = [stats.name, "20", "x", "4", "float32", stats.sharding, "1", "x", "ROW", "20", "0.5000", "0.5000"]
    assert cells(text, stats.name) == [*row, "0.000", "0.000", "0.000"]
    assert cells(text, "all") == ["all", "20", "0.5000", "0.5000", "0.000", "0.000", "0.000"]
    assert "due steps: 3" in text and '  block: [1, "ROW"]' in text and "  lr: 0.1" in text
    said = json.loads(json.dumps(inspect_json(run)))
    assert said["config"] == {"lr": 0.1, "block": [1, "ROW"]} and said["world"] == 1
    [table] = said["tables"]
    assert (table["name"], table["shape"]) == (stats.name, [20, 4])
    assert [table[f"bytes_{kind}"] for kind in ("dense", "kept", "masks")] == [320, 160, 3]
    assert said["bytes_kept"] == stats.kept_bytes == 160


def test_a_run_that_has_crashed(tmp_path: Path) -> None:
    """The end is missing: the tables as the last due step left them, whose bytes nobody noted."""
    [stats] = train(tmp_path).table_stats()
    file = tmp_path / LINES
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:20])
    text = inspect_text(read_run(tmp_path))
    assert "The log stops at step 8 without an end" in text
    assert cells(text, stats.name) == [stats.name, "-", "-", "-", "-", "20", "0.5000", "0.5000", "-", "-", "-"]
    assert cells(text, "all") == ["all", "20", "0.5000", "0.5000", "-", "-", "-"]


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    RunLog(tmp_path)
    text = inspect_text(read_run(tmp_path))
    assert "before its first line" in text and "due steps: 0" in text
    assert "table" not in text and "config:" not in text
