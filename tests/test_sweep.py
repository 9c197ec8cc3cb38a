"""The sweep runs from its command line, reports its cells correctly, and continues where it
stopped."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")
pytest.importorskip("matplotlib")

import benchmarks.sweep
from benchmarks.sweep import main
from benchmarks.sweep_cells import (
    COLUMNS,
    LEVELS,
    TRAINING_LEVELS,
    Cell,
    append,
    as_row,
    cells,
    left_to_do,
    read,
)
from benchmarks.sweep_plot import plot
from benchmarks.sweep_report import report
from dlrm import movielens
from dlrm.batches import DataError
from tests.warm import run_case

ROOT = Path(__file__).parents[1]
RUN = {
    "train_examples": 6400,
    "test_examples": 19_968,
    "forward_examples": 16_384,
    "batch_size": 128,
    "ranks": 2,
    "sharding": "mixed",
}


def row(cell: Cell, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {name: 1 for name in COLUMNS}
    return {**made, "zipped_bytes": 10**6, "mask_bytes": 10**5, **as_row(cell), **RUN, **more}


def of_mode(rows: Sequence[dict[str, Any]], mode: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["mode"] == mode]


class TestCells:
    def test_are_torch_aos_and_whole_rows(self) -> None:
        found = cells(
            LEVELS, ["1x1", "1x4", "1xROW"], ["L1", "L2"], TRAINING_LEVELS, ["1x4", "1xROW"], [0, 1]
        )
        assert (
            len(LEVELS) == 20
            and LEVELS[0] == 0.0
            and LEVELS[-1] == 1.0
            and 0.91 in LEVELS
            and 0.3 in LEVELS
        )
        assert [cell.mode for cell in found] == ["dense"] * 2 + ["post"] * 100 + [
            "training"
        ] * 2 * 12
        assert not [cell for cell in found if (cell.block, cell.norm) == ("1x1", "L2")]
        assert len(set(found)) == len(found)
        assert (found[2].shape, found[-1].shape) == ((1, 1), (1, "ROW"))
        assert found[-1].tables == "user_x_genre" and {
            cell.seed for cell in found if cell.mode == "post"
        } == {0}

    def test_a_cell_asked_for_twice_is_one(self) -> None:
        assert len(cells([0.5, 0.5], ["1x4", "1x4"], ["L2", "L2"], [], [], [0, 0])) == 2

    def test_the_csv_gives_back_what_was_written(self, tmp_path: Path) -> None:
        file = tmp_path / "sweep.csv"
        dense, post = (
            Cell(mode="dense"),
            Cell(mode="post", block="1xROW", norm="L2", level=0.1 + 0.2),
        )
        append(file, row(dense, step_ms=None, auc=2 / 3))
        append(file, row(post, mask_bytes=7))
        first, second = read(file)
        assert (first["auc"], first["step_ms"], first["block"]) == (2 / 3, None, "")
        assert (second["sparsity_level"], second["mask_bytes"], second["block"]) == (
            0.1 + 0.2,
            7,
            "1xROW",
        )
        assert type(second["mask_bytes"]) is int
        later = Cell(mode="post", block="1xROW", norm="L1", level=0.1 + 0.2)
        assert left_to_do(file, [dense, later, post], RUN) == [later]
        assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]

    def test_another_run_is_refused_by_what_differs(self, tmp_path: Path) -> None:
        file = tmp_path / "sweep.csv"
        append(file, row(Cell(mode="dense")))
        with pytest.raises(
            ValueError, match=r"of a run with train_examples 6400 \(asked for: 9\), ranks 2 \(asked"
        ):
            left_to_do(file, [], {**RUN, "train_examples": 9, "ranks": 4})
        file.write_text("mode,auc\ndense,0.5\n")
        with pytest.raises(ValueError, match=r"its columns are \['mode', 'auc'\], must be"):
            read(file)


def test_seeds_are_compared_with_their_own_dense_model() -> None:
    rows = []
    for seed, dense, trained in ((0, 0.70, 0.69), (1, 0.72, 0.70)):
        cell = Cell(
            mode="training", block="1xROW", norm="L2", level=0.95, tables="user_x_genre", seed=seed
        )
        rows += [
            row(Cell(mode="dense", seed=seed), auc=dense),
            row(cell, auc=trained, table_bytes_kept=1_000),
        ]
    text = report(rows)
    assert "seeds 0, 1; dense AUC 0.7100 ± 0.0100:" in text
    assert "| rows | user_x_genre | 95 % | 1,000 | 0.0150 ± 0.0050 |" in text
    assert "±" not in report(rows[:2])  # one seed has no spread


def test_one_block_without_all_removed_and_without_training_can_be_drawn(tmp_path: Path) -> None:
    post = [Cell(mode="post", block="2x8", norm="L1", level=level) for level in (0.0, 0.5, 0.999)]
    rows = [row(Cell(mode="dense")), *(row(cell) for cell in post)]
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "| post, 2x8, L1 | 0.0000 | 0.0000 |" in report(rows)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "--levels 1.1",
            "--levels: invalid value: '1.1' (must be in [0, 1], or a percentage such as 80%)",
        ),
        ("--blocks 4", "--blocks: Invalid block '4'"),
        ("--train-examples 100", "--train-examples: invalid value: 100 (must be at least 2560)"),
        ("--norms L3", "--norms: invalid choice: 'L3'"),
    ],
)
def test_wrong_options_are_refused_with_the_rule(
    arguments: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main([*arguments.split(), "--out", str(tmp_path)])
    assert refusal.value.code == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.network
def test_a_folder_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        movielens.fetch()
    except DataError as error:
        pytest.skip(f"OFFLINE, the sweep is not tested: {error}")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as refusal:
        main(["--out", str(tmp_path / "file")])
    assert refusal.value.code == 2
    assert "File exists" in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.network
def test_a_small_sweep_runs_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        movielens.fetch()
    except DataError as error:
        pytest.skip(f"OFFLINE, the sweep is not tested: {error}")
    monkeypatch.setattr(benchmarks.sweep, "REPEATS", 2)  # of what is timed
    monkeypatch.setattr(benchmarks.sweep, "fresh", run_case)
    small = [
        "--quick",
        "--train-examples",
        str(RUN["train_examples"]),
        "--blocks",
        "1,4",
        "--norms",
        "L2",
    ]
    small += ["--training-blocks", "1,4", "--seeds", "0", "--out", str(tmp_path)]
    assert main([*small, "--levels", "0", "0.8", "--training-levels"]) == 0
    (file,) = tmp_path.glob("*-sweep-quick.csv")
    with file.open() as stream:
        assert tuple(next(csv.reader(stream))) == COLUMNS
    before = read(file)
    assert (
        main([*small, "--levels", "0", "0.8", "0.99", "--training-levels", "0.8", "--resume"]) == 0
    )
    rows = read(file)
    assert rows[:3] == before  # times and all, so they were not measured again
    assert [row["mode"] for row in rows] == ["dense", "post", "post", "post", "training"]
    assert all(row[name] == value for row in rows for name, value in RUN.items())

    (dense,), (training,) = of_mode(rows, "dense"), of_mode(rows, "training")
    level_0, level_80, level_99 = of_mode(rows, "post")
    for name in (
        "auc",
        "ne",
        "accuracy",
        "precision",
        "recall",
        "f1",
        "log_loss_nats",
        "zipped_bytes",
    ):
        assert level_0[name] == dense[name], name
    assert level_0["auc"] > level_99["auc"] > 0.5  # after 50 steps the model has learned something
    assert 0 < dense["ne"] < level_99["ne"]
    assert level_0["zipped_bytes"] > 3 * level_80["zipped_bytes"] > 9 * level_99["zipped_bytes"]
    small_tables = 142 * 32 * 4  # age, gender, occupation, genres
    large_blocks = [height * 8 for height in (943, 1682, 795, 50_000)]
    for cell in (level_0, level_80, level_99, training):
        removed = sum(round(cell["sparsity_level"] * blocks) for blocks in large_blocks)
        assert cell["table_bytes_kept"] == small_tables + 16 * (sum(large_blocks) - removed)
        assert cell["removed_share_of_blocks"] == removed / sum(large_blocks)
        assert cell["mask_bytes"] == sum(large_blocks) / 8
        assert cell["saved_bytes"] == dense["saved_bytes"] > dense["table_bytes_kept"]
        assert cell["dense_zipped_bytes"] == dense["zipped_bytes"]
        assert cell["step_ms"] > 0 and cell["forward_ms"] > 0
    assert training["auc"] != level_80["auc"] and training["train_ms_per_step"] > 0
    assert level_80["train_ms_per_step"] is None

    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert json.loads(file.with_suffix(".json").read_text())["cases"] == rows
    assert f"![The sweep]({file.stem}.png)" in file.with_suffix(".md").read_text()
    with pytest.raises(SystemExit):
        main([*map(str, small), "--nproc", "1", "--resume"])
    assert "of a run with ranks 2 (asked for: 1)" in capsys.readouterr().err
    assert read(file) == rows
