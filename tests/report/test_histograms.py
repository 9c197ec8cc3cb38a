"""Histograms that a run keeps: few in the log, one per table in memory and in the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import DataNormSparsifier, RunLog
from dist_sparse.report.charts import charts
from dist_sparse.report.figures import ScoreChart
from dist_sparse.report.folder import LINES, read_lines
from dist_sparse.report.histograms import Latest, Scored, bucket_of, edge_of
from dist_sparse.report.run import read_run
from tests.report.folders import write_many
from tests.report.test_run_log import train


def one(step: int, removed: int, zeros: int = 0, name: str = "t", threshold: float = 1.0) -> Scored:
    counts = (100 - zeros,)
    return Scored(
        step=step,
        name=name,
        threshold=threshold,
        blocks=100,
        removed_blocks=removed,
        zeros=zeros,
        first=0,
        counts=counts,
    )


def scores_of(folder: Path) -> list[dict[str, Any]]:
    return [
        table
        for _, line in read_lines(folder / LINES)
        if line["kind"] == "scores"
        for table in line["tables"]
    ]


def steps_at(folder: Path, levels: list[float], **options: Any) -> list[dict[str, Any]]:
    """Update the masks of untrained weights at each level; return the histograms that are
    written."""
    torch.manual_seed(0)
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=(1, 4), norm="L1")
    sparsifier.add_model(nn.EmbeddingBag(200, 8))
    with RunLog(folder, sparsifier, **options) as log:
        for step, level in enumerate(levels):
            for config in sparsifier.data_groups.values():
                config["sparsity_level"] = level
            sparsifier.step()
            log.step(step)
    return scores_of(folder)


def test_the_last_that_removed_much_is_kept() -> None:
    latest = Latest()
    assert latest.take(one(1, removed=50)) and latest.take(one(2, removed=60, zeros=50))
    assert not latest.take(one(3, removed=60, zeros=60)) and not latest.take(
        one(4, removed=0, threshold=0.0)
    )
    assert latest.of["t"].step == 2
    assert latest.take(one(5, removed=61, zeros=60))


@pytest.mark.parametrize("score", [3e-45, 1e-38, 0.1, 1.0, 3.0e38])
def test_a_bucket_and_its_edge(score: float) -> None:
    bucket = bucket_of(score)
    assert bucket_of(edge_of(bucket)) == bucket and edge_of(bucket) <= score <= edge_of(bucket + 1)
    for bad in (0.0, -1.0, math.inf, math.nan, 1e300):
        with pytest.raises(ValueError, match="is not"):
            bucket_of(bad)


def test_not_every_due_step_is_written(tmp_path: Path) -> None:
    rising = [0.01 * step for step in range(1, 26)]
    assert [table["step"] for table in steps_at(tmp_path / "ten", rising)] == [0, 10, 20, 24]
    assert [table["step"] for table in steps_at(tmp_path / "one", rising[:4], scores_every=1)] == [
        0,
        1,
        2,
        3,
    ]
    still = steps_at(tmp_path / "still", [0.5] * 40)
    assert [table["step"] for table in still] == [0], "later due steps move nothing"
    lines = [line for _, line in read_lines(tmp_path / "still" / LINES) if line["kind"] == "masks"]
    assert len(lines) == 40 and all(
        "scores" not in table for line in lines for table in line["tables"]
    )


def test_what_is_read_is_what_was_counted(tmp_path: Path) -> None:
    [written] = steps_at(tmp_path, [0.5])
    torch.manual_seed(0)
    weight = nn.EmbeddingBag(200, 8).weight.detach()
    scores = weight.view(200, 2, 4).abs().mean(-1).flatten()
    [read] = read_run(tmp_path).scores.values()
    assert read.zeros + sum(read.counts) == 400 and written["low"] == edge_of(read.first)
    for place, number in enumerate(read.counts):
        low, high = edge_of(read.first + place), edge_of(read.first + place + 1)
        assert number == int(((scores >= low) & (scores < high)).sum())
    assert int((scores <= read.threshold).sum()) == 200
    [chart] = [one for one in charts(read_run(tmp_path)) if isinstance(one, ScoreChart)]
    assert sum(piece.blocks for piece in chart.bins) == 400 and chart.zeros == 0


def test_a_run_that_fails_keeps_its_last_scores(tmp_path: Path) -> None:
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=(1, 4), norm="L1")
    sparsifier.add_model(nn.EmbeddingBag(200, 8))
    with pytest.raises(KeyError), RunLog(tmp_path, sparsifier) as log:
        for step in range(4):
            sparsifier.data_groups["weight"]["sparsity_level"] = 0.1 * (step + 1)
            sparsifier.step()
            log.step(step)
        raise KeyError
    assert [table["step"] for table in scores_of(tmp_path)] == [0, 3]


def test_a_log_that_has_scores_at_every_due_step(tmp_path: Path) -> None:
    """The oldest format of logs."""
    write_many(tmp_path / "run", tables=3, due=4, steps=100)
    run = read_run(tmp_path / "run")
    assert {name: (table.step, table.zeros) for name, table in run.scores.items()} == {
        f"table_{i}": (80, 100) for i in range(3)
    }
    assert all(sum(table.counts) == table.blocks - 100 for table in run.scores.values())
    assert all(
        edge_of(table.first) == 0.5 and len(table.counts) == 9 for table in run.scores.values()
    )
    assert len([one for one in charts(run) if isinstance(one, ScoreChart)]) == 3


def test_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    """Histograms of repeated steps are dropped; an older one that pruned more is shown again."""
    write_many(tmp_path / "run", tables=2, due=4, steps=100, ends=False)
    log = tmp_path / "run" / LINES
    again = json.loads(next(line for line in log.read_text().splitlines() if '"masks"' in line))
    log.write_text(log.read_text() + json.dumps({"kind": "resumed"}) + "\n")
    for table in again["tables"]:
        table["scores"] = []
    with log.open("a") as held:
        held.write(json.dumps(again | {"step": 70}) + "\n")
    shown = {name: one.step for name, one in read_run(tmp_path / "run").scores.items()}
    assert shown == {"table_0": 60, "table_1": 60}, "step 80 is done again"
    table = read_run(tmp_path / "run").due[-1].record.tables[0]
    said = {"step": 70, "name": table.name, "threshold": 0.5, "blocks": 1000, "removed_blocks": 500}
    with log.open("a") as held:
        held.write(json.dumps({"kind": "scores", "step": 70, "tables": [said | _COUNTS]}) + "\n")
    run = read_run(tmp_path / "run")
    assert run.scores["table_0"].step == 70 and run.sessions == 2


def test_an_older_histogram_when_newer_steps_are_done_again(tmp_path: Path) -> None:
    """The level is constant after the crash, so the second session has no histogram to show."""
    weight = nn.EmbeddingBag(200, 8).weight.detach()

    def session(levels: dict[int, float], **options: Any) -> None:
        model = nn.EmbeddingBag(200, 8, _weight=weight.clone())
        sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=(1, 4), norm="L1")
        sparsifier.add_model(model)
        with (
            pytest.raises(KeyError),
            RunLog(tmp_path, sparsifier, scores_every=1, **options) as log,
        ):
            for step, level in levels.items():
                for config in sparsifier.data_groups.values():
                    config["sparsity_level"] = level
                sparsifier.step()
                log.step(step, loss=1.0)
                if step == 10:
                    weight.copy_(model.weight)  # a checkpoint
            raise KeyError

    session({0: 0.3, 10: 0.5, 20: 0.6})
    assert [one.step for one in read_run(tmp_path).scores.values()] == [20]
    session({20: 0.5, 30: 0.5}, resume=True)
    assert [table["step"] for table in scores_of(tmp_path)] == [0, 10, 20, 20, 30]
    run = read_run(tmp_path)
    assert [due.step for due in run.due] == [0, 10, 20, 30] and run.sessions == 2
    [shown] = run.scores.values()
    assert (shown.step, shown.removed_blocks) == (10, 200)


def test_what_a_note_says_of_later_due_steps(tmp_path: Path) -> None:
    """A run that is killed loses the histograms since the last writing; constant masks have none to
    show."""
    lost, little = (
        " The histograms of later mask updates were not written.",
        " Later mask updates pruned less than 1% more each.",
    )
    steps_at(tmp_path / "rising", [0.02 * step for step in range(1, 26)])
    [chart] = [one for one in charts(read_run(tmp_path / "rising")) if isinstance(one, ScoreChart)]
    assert "at step 24;" in chart.note and chart.note.endswith("are pruned.")
    lines = (tmp_path / "rising" / LINES).read_text().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if '"scores"' in line)
    (tmp_path / "rising" / LINES).write_text("".join(lines[:last]))
    [chart] = [one for one in charts(read_run(tmp_path / "rising")) if isinstance(one, ScoreChart)]
    assert "at step 20;" in chart.note and chart.note.endswith(lost)
    steps_at(tmp_path / "still", [0.5] * 12)
    [chart] = [one for one in charts(read_run(tmp_path / "still")) if isinstance(one, ScoreChart)]
    assert "at step 0;" in chart.note and chart.note.endswith(little)


_COUNTS: dict[str, Any] = {"zeros": 0, "low": 0.25, "counts": [500, 500]}


@pytest.mark.parametrize("wrong", [{"low": 0}, {"low": 1e300}, {"counts": [1.5]}])
def test_scores_that_no_run_log_writes(tmp_path: Path, wrong: dict[str, Any]) -> None:
    train(tmp_path)
    said = (
        {"step": 6, "name": "weight", "threshold": 0.5, "blocks": 1000, "removed_blocks": 500}
        | _COUNTS
        | wrong
    )
    with (tmp_path / LINES).open("a") as held:
        held.write(json.dumps({"kind": "scores", "step": 6, "tables": [said]}) + "\n")
    with pytest.raises(ValueError, match=r"line \d+ is not one that RunLog writes"):
        read_run(tmp_path)


@pytest.mark.parametrize("every", [0, -1, 2.0, True, None, "10"])
def test_scores_every_is_a_number_of_steps(tmp_path: Path, every: Any) -> None:
    with pytest.raises(ValueError, match="Invalid scores_every="):
        RunLog(tmp_path / "run", scores_every=every)
    assert not (tmp_path / "run").exists()
