"""A trained model for `dist-sparse plan`, in one process:

dist-sparse plan examples/dlrm/planned.py:trained_model --level 0.8 --exclude gender
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

# So that this file can be named by its path, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from dlrm import interactions, movielens
from dlrm.batches import Batch, batches
from dlrm.model import build, sharding_of

__all__ = ["trained_model"]

_BATCH_SIZE = 128


def trained_model(data: Path | None = None) -> tuple[nn.Module, Iterator[Batch]]:
    """Return the DLRM after one dense pass over the training part, and the batches of the test part.

    Args:
        data: an interactions .npz instead of MovieLens-100K.

    Raises:
        DataError: the data can't be downloaded or read.
    """
    # TorchRec wants a process group even for one process; an in-memory store needs no port.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dataset = movielens.load(movielens.fetch()) if data is None else interactions.load(data, seed=0)
    sharding = sharding_of({feature.name: feature.rows for feature in dataset.sparse}, "mixed", world=1)
    sharded = build(dataset, sharding=sharding, seed=0, world=1)
    sharded.model.train()
    for batch in batches(dataset, dataset.train, batch_size=_BATCH_SIZE, rank=0, world=1, shuffle_seed=0):
        loss, _ = sharded.model(batch)
        sharded.optimizer.zero_grad()
        torch.mean(loss).backward()
        sharded.optimizer.step()
    return sharded.model, batches(dataset, dataset.test, batch_size=_BATCH_SIZE, rank=0, world=1)
