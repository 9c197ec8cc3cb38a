"""A trained model for `dist-sparse plan` and `dist-sparse frontier`, in one process:

dist-sparse plan examples/dlrm/planned.py:trained_model --budget 10%
dist-sparse plan examples/dlrm/planned.py:trained_model --budget 10% \\
  --batches examples/dlrm/planned.py:test_lookups
dist-sparse frontier examples/dlrm/planned.py:measured
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

# So that this file can be named by its path, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor

from dlrm import interactions, movielens
from dlrm.batches import Dataset, batches
from dlrm.model import build, sharding_of
from dlrm.options import DIM
from dlrm.predictions import Predictions
from dlrm.process import quiet

_BATCH_SIZE = 128

Evaluate = Callable[[nn.Module], dict[str, float]]


def trained_model(data: Path | None = None) -> nn.Module:
    """Return the DLRM after one dense pass over the training part.

    Args:
        data: an interactions .npz instead of MovieLens-100K.

    Raises:
        DataError: the data can't be downloaded or read.
    """
    return _trained(_dataset(data))


def test_lookups(data: Path | None = None) -> list[KeyedJaggedTensor]:
    """Return the lookups of the test part, which is later than the training part.

    Args:
        data: as above.
    """
    dataset = _dataset(data)
    return [dataset.batch(index).sparse_features for index in dataset.test.split(4096)]


def measured(columns: float = 1.0, data: Path | None = None) -> tuple[nn.Module, Evaluate]:
    """Return the DLRM of :func:`trained_model`, and a function that measures it on the test part.

    Args:
        columns: fraction of the tables' columns.
        data: as above.
    """
    dataset = _dataset(data)
    test = [dataset.batch(index) for index in dataset.test.split(4096)]

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        model.eval()
        logits, labels = zip(*(model(batch)[1][1:] for batch in test), strict=True)
        found = Predictions(torch.cat(logits), torch.cat(labels))
        return {"auc": found.auc, "ne": found.ne}

    return _trained(dataset, round(columns * DIM)), evaluate


def _dataset(data: Path | None) -> Dataset:
    if not dist.is_initialized():
        quiet()
        # TorchRec wants a process group even for one process; an in-memory store needs no port.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return movielens.load(movielens.fetch()) if data is None else interactions.load(data, seed=0)


def _trained(dataset: Dataset, dim: int = DIM) -> nn.Module:
    sharding = sharding_of(
        {feature.name: feature.rows for feature in dataset.sparse}, "mixed", world=1
    )
    sharded = build(dataset, sharding=sharding, seed=0, world=1, dim=dim)
    sharded.model.train()
    # Not to stdout: that is for the plan.
    print("Training the DLRM for one epoch: a minute or two.", file=sys.stderr, flush=True)
    for batch in batches(
        dataset, dataset.train, batch_size=_BATCH_SIZE, rank=0, world=1, shuffle_seed=0
    ):
        loss, _ = sharded.model(batch)
        sharded.optimizer.zero_grad()
        torch.mean(loss).backward()
        sharded.optimizer.step()
    return sharded.model
