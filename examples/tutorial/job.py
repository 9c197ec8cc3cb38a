"""What training and publishing share: the ratings, the model and its checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from dist_sparse import Checkpoints
from dlrm.batches import Batch, Dataset, batches
from dlrm.model import ShardedModel, build, sharding_of
from dlrm.movielens import fetch, load

__all__ = ["BATCH_SIZE", "TESTED", "batches_of", "checkpoints_of", "parser_of", "start"]

BATCH_SIZE = 200
"""Ratings of a step, over all ranks."""

TESTED = 19_800
"""The last ratings, which no model here trains on."""


def start() -> tuple[Dataset, ShardedModel]:
    """Return MovieLens-100K in order of time, and the DLRM, sharded over all ranks. Collective."""
    if dist.get_rank() == 0:
        fetch()
    dist.barrier()
    data, world = load(fetch()), dist.get_world_size()
    rows = {feature.name: feature.rows for feature in data.sparse}
    # By rows, by columns, whole and data parallel: a table of each.
    return data, build(data, sharding=sharding_of(rows, "mixed", world), seed=0, world=world)


def batches_of(data: Dataset, index: Tensor, shuffle_seed: int | None = None) -> Iterator[Batch]:
    """Yield this rank's part of each batch of the ratings ``index``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return batches(
        data, index, batch_size=BATCH_SIZE, rank=rank, world=world, shuffle_seed=shuffle_seed
    )


def checkpoints_of(folder: Path) -> Checkpoints:
    """Return the checkpoints of a job."""
    return Checkpoints(folder / "checkpoints", keep=2)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the folder of a job, which all ranks must see."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the job's folder, seen by all ranks")
    return parser
