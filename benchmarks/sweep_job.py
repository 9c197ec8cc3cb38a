"""Some cells of the sweep, under torchrun.

Rank 0 adds a row to the CSV for each cell that is done, and prints how many there were as one line
of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from benchmarks.sweep_cells import Cell, Row, append, as_row
from benchmarks.sweep_model import (
    check_zeros,
    forward_ms,
    live_tables,
    most,
    quality,
    saved,
    sizes,
    slowest_ms,
)
from dist_sparse import DataNormSparsifier
from dlrm import movielens
from dlrm.batches import Batch, Dataset, batches, steps_per_pass
from dlrm.model import ShardedModel, build, sharding_of
from dlrm.train import Settings, Sparsification, Sparsity, epochs, large_tables, train_steps

EVERY = 20
"""Steps between two mask updates in training, the main job's default; fewer if the run is short."""


class Timed(Sparsification):
    """Keep the seconds of each mask update."""

    def __init__(self, sharded: ShardedModel, sparsity: Sparsity, steps: int) -> None:
        super().__init__(sharded, sparsity, steps)
        self.due_seconds: list[float] = []

    def step(self) -> None:
        due, before = self.sparsifier.enable_mask_update, self.masks_seconds
        super().step()
        if due:
            self.due_seconds.append(self.masks_seconds - before)


class Job:
    """The data, the settings, and the measurements of a trained model. Collective."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, run = case, case["run"]
        dataset = movielens.load(movielens.fetch())
        self.dataset: Dataset = replace(dataset, train=dataset.train[: run["train_examples"]])
        rows = {feature.name: feature.rows for feature in dataset.sparse}
        self.settings = Settings(
            sharding=sharding_of(rows, run["sharding"], run["ranks"]),
            batch_size=run["batch_size"],
            epochs=1,
            seed=case["seed"],
            rank=dist.get_rank(),
            world=dist.get_world_size(),
        )
        self.steps = self.settings.epochs * steps_per_pass(
            len(self.dataset.train), self.settings.batch_size
        )
        self.test = self._batch(run["test_examples"])
        self.large = self._batch(run["forward_examples"])
        self.dense_zipped_bytes = case["dense_zipped_bytes"]

    def train(self, sparsity: Sparsity | None = None) -> tuple[ShardedModel, Timed | None, float]:
        """A model of the main job's, trained as there; its sparsification, which is still attached,
        and milliseconds of a training step."""
        settings = self.settings
        sharded = build(
            self.dataset, sharding=settings.sharding, seed=settings.seed, world=settings.world
        )
        timed = None if sparsity is None else Timed(sharded, sparsity, self.steps)
        pipeline = TrainPipelineSparseDist(sharded.model, sharded.optimizer, torch.device("cpu"))
        sharded.model.train()
        ms = train_steps(
            "", pipeline, epochs(self.dataset, settings), self.steps, settings.rank, timed
        )
        pipeline.detach()  # so that the model takes batches again
        sharded.model.eval()
        return sharded, timed, most(ms)

    def measure(
        self, cell: Cell, sharded: ShardedModel, sparsifier: DataNormSparsifier | None, **more: Any
    ) -> Row:
        """The row of a cell; what is removed must be 0."""
        whole = saved(sharded)
        masks, kept = 0, sharded.table_bytes
        removed = blocks = 0
        if sparsifier is not None:
            check_zeros(sparsifier, whole, cell.level)
            for table in sparsifier.table_stats():
                masks, kept = masks + table.mask_bytes, kept - table.table_bytes + table.kept_bytes
                removed, blocks = removed + table.removed_blocks, blocks + table.blocks
        size = sizes(whole) if dist.get_rank() == 0 else {}
        if cell.mode == "dense":
            self.dense_zipped_bytes = size.get("zipped_bytes")
        return {
            **as_row(cell),
            "removed_share_of_blocks": removed / max(1, blocks),
            **quality(sharded, self.test),
            "table_bytes_kept": kept,
            "mask_bytes": masks,
            **size,
            "dense_zipped_bytes": self.dense_zipped_bytes,
            "forward_ms": round(forward_ms(sharded, self.large, self.case["repeats"]), 3),
            **more,
            **self.case["run"],
        }

    def _batch(self, examples: int) -> Batch:
        """This rank's part of the first test examples."""
        here = self.settings
        return next(
            batches(
                self.dataset,
                self.dataset.test,
                batch_size=examples,
                rank=here.rank,
                world=here.world,
            )
        )


def dense_and_post(job: Job, cells: list[Cell]) -> Iterator[Row]:
    """Train the dense model once; each cell sparsifies a fresh copy of its tables, without more
    training.

    Raises:
        RuntimeError: the dense model differs from that of the CSV.
    """
    sharded, _, train_ms = job.train()
    dense = Cell(mode="dense", seed=job.settings.seed)
    row = job.measure(dense, sharded, None, train_ms_per_step=round(train_ms, 3))
    if dense in cells:
        yield row
    known = job.case["dense_auc"]
    if known is not None and known != row["auc"]:
        raise RuntimeError(
            f"The dense model came out at AUC {row['auc']}, the one of the CSV at {known}."
        )
    trained = [weight.clone() for weight in live_tables(sharded)]
    for cell in (cell for cell in cells if cell.mode == "post"):
        sparsifier = DataNormSparsifier(
            sparsity_level=0.0, sparse_block_shape=cell.shape, norm=cell.norm
        )
        sparsifier.add_model(sharded.model, include=large_tables(sharded))

        def dense_again(
            sparsifier: DataNormSparsifier = sparsifier, level: float = cell.level
        ) -> None:
            for group in sparsifier.data_groups.values():
                group["sparsity_level"] = 0.0
            sparsifier.step()
            with torch.no_grad():
                for live, copy in zip(live_tables(sharded), trained, strict=True):
                    live.copy_(copy)
            for group in sparsifier.data_groups.values():
                group["sparsity_level"] = level

        step_ms = slowest_ms(sparsifier.step, job.case["repeats"], dense_again)
        yield job.measure(cell, sharded, sparsifier, step_ms=round(step_ms, 3))


def training(job: Job, cells: list[Cell]) -> Iterator[Row]:
    """Trains a model for each cell, sparsified on the way as in the main job."""
    for cell in cells:
        every = max(1, min(EVERY, job.steps // 20))
        level = {cell.tables: cell.level} if cell.tables else cell.level
        sparsity = Sparsity(block=cell.shape, norm=cell.norm, level=level, every=every)
        sharded, timed, train_ms = job.train(sparsity)
        assert timed is not None
        timed.enforcer.detach()  # settles: what is removed is 0 in memory from here on
        # The first ones have next to nothing to remove.
        later = timed.due_seconds[len(timed.due_seconds) // 2 :]
        step_ms = 1e3 * most(min(later))
        yield job.measure(
            cell,
            sharded,
            timed.sparsifier,
            step_ms=round(step_ms, 3),
            train_ms_per_step=round(train_ms, 3),
        )


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Measures the cells of the case, which are of one job: ``dense`` and ``post``, or
    ``training``."""
    started = time.perf_counter()
    job, cells = Job(case), [Cell(**cell) for cell in case["cells"]]
    done = 0
    for row in (training if cells[0].mode == "training" else dense_and_post)(job, cells):
        if dist.get_rank() == 0:
            append(Path(case["csv"]), row)
        done += 1
    return {"cells": done, "seconds": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    figures = main(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.barrier()
    os._exit(0)  # gloo aborts now and then when it is destroyed while a DDP module lives
