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
from dist_sparse.records import MaskChange
from dist_sparse.report.charts import charts
from dist_sparse.report.figures import ScoreChart
from dist_sparse.report.folder import LINES, read_lines
from dist_sparse.report.histograms import Scored, replaces
from dist_sparse.report.run import read_run
from tests.report.folders import write_many


def one(removed: int, zeros: int = 0) -> Scored:
    change = MaskChange(
        name="t",
        target=None,
        threshold=1.0,
        scores=((0.0, zeros), (0.5, 100 - zeros)),
        blocks=100,
        removed_blocks=removed,
        flipped_blocks=None,
        regrown_blocks=None,
        dead_rows=None,
    )
    return Scored(step=0, change=change)


def scores_of(folder: Path) -> list[dict[str, Any]]:
    return [
        table
        for _, line in read_lines(folder / LINES)
        if line["kind"] == "scores"
        for table in line["tables"]
    ]


def steps_at(folder: Path, levels: list[float]) -> list[dict[str, Any]]:
    """Update the masks of untrained weights at each level; return the histograms that are
    written."""
    torch.manual_seed(0)
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=(1, 4), norm="L1")
    sparsifier.add_model(nn.EmbeddingBag(200, 8))
    with RunLog(folder, sparsifier) as log:
        for step, level in enumerate(levels):
            for config in sparsifier.data_groups.values():
                config["sparsity_level"] = level
            sparsifier.step()
            log.step(step)
    return scores_of(folder)


def test_the_last_that_removed_much_is_kept() -> None:
    much, little = one(removed=60, zeros=50), one(removed=60, zeros=60)
    assert replaces(little, None) and replaces(little, little)
    assert replaces(much, much) and replaces(much, little) and not replaces(little, much)


def test_not_every_due_step_is_written(tmp_path: Path) -> None:
    rising = [0.01 * step for step in range(1, 26)]
    assert [table["step"] for table in steps_at(tmp_path / "ten", rising)] == [0, 10, 20, 24]
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
    assert read.zeros == 0 and written["change"]["scores"] == read.change.scores
    edges = [low for low, _ in read.change.scores]
    assert edges == sorted(edges) and sum(number for _, number in read.change.scores) == 400
    for (low, number), high in zip(read.change.scores, [*edges[1:], math.inf], strict=True):
        assert number == int(((scores >= low) & (scores < high)).sum())
    assert int((scores <= read.change.threshold).sum()) == 200
    [chart] = [one for one in charts(read_run(tmp_path)) if isinstance(one, ScoreChart)]
    assert sum(piece.blocks for piece in chart.bins) == 400
    assert [piece.low for piece in chart.bins] == edges
    assert all(1 < piece.high / piece.low <= 1.125 for piece in chart.bins)


def test_many_buckets_are_drawn_as_octaves(tmp_path: Path) -> None:
    write_many(tmp_path / "run", tables=1, due=1, steps=10)
    log = tmp_path / "run" / LINES
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "scores":
            line["tables"][0]["change"]["scores"] = [
                [(1 + n % 8 / 8) * 2.0 ** (n // 8), 1] for n in range(80)
            ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [chart] = [one for one in charts(read_run(tmp_path / "run")) if isinstance(one, ScoreChart)]
    assert [(piece.low, piece.high, piece.blocks) for piece in chart.bins] == [
        (2.0**n, 2.0 ** (n + 1), 8) for n in range(10)
    ]


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
