"""Mask updates between training steps that touch few rows of a table: prints their figures as one
line of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from benchmarks.enforce_case import Tables
from benchmarks.measure import best
from benchmarks.peers import ancestor
from dist_sparse import ROW, DataNormSparsifier, MaskEnforcer
from dlrm import movielens
from dlrm.batches import Batch

LEVEL, REPEATS = 0.5, 5


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Times ``step()`` after each training step, with kept scores and with ``full_every=1``, and
    torch.ao's.

    - growing: the level rises by 1% of the rows. steady: it stays.
    """
    ids = {"every row": _uniform, "uniform": _uniform, "zipf": _zipf, **_real(case)}
    found = {
        name: _timed(case, make, 1 if name == "every row" else 1000) for name, make in ids.items()
    }
    theirs = ancestor(torch.randn(case["rows"], case["dim"]), (1, case["dim"]), "L2")
    return {**case, "ids": found, "ancestor_s": best(theirs.step, 2)}


def _timed(
    case: dict[str, Any], make: Callable[[int], Iterator[Tensor]], full_every: int
) -> dict[str, Any]:
    """The figures of a new table under these ids."""
    rows, touched = case["rows"], case["touched"]
    loop = Tables(1, rows, case["dim"], ids=1, below=rows)
    sparsifier = DataNormSparsifier(sparsity_level=LEVEL, sparse_block_shape=(1, ROW), norm="L2")
    sparsifier.full_every = full_every
    sparsifier.add_model(loop.model)
    group = sparsifier.data_groups["t0"]
    enforcer = MaskEnforcer(sparsifier).attach(loop.optimizer)
    drawn = _steps(make, rows, touched)

    def train() -> None:
        loop.train(_batch(next(drawn)))

    def rise() -> None:
        train()
        group["sparsity_level"] += 0.01

    for _ in range(3):  # the masks settle, and scores are kept
        train()
        sparsifier.step()
    growing = best(sparsifier.step, REPEATS, rise)
    train()
    sparsifier.step()
    steady = best(sparsifier.step, REPEATS, train)
    enforcer.detach()
    return {"growing_s": growing, "steady_s": steady, "touched": len(next(drawn).unique())}


def _batch(ids: Tensor) -> Batch:
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["t0"], values=ids, lengths=torch.ones_like(ids)
    )
    return Batch(torch.rand(len(ids), 3), features, (ids % 2).float())


def _steps(make: Callable[[int], Iterator[Tensor]], rows: int, touched: int) -> Iterator[Tensor]:
    """The ids of training steps: as many consecutive ones as name ``touched`` rows, 50,000 at
    most."""
    ids = torch.empty(0, dtype=torch.int64)
    for more in make(rows):
        ids = torch.cat([ids, more])
        if len(ids.unique()) >= touched or len(ids) >= 50_000:
            yield ids
            ids = ids[:0]


def _uniform(rows: int) -> Iterator[Tensor]:
    while True:
        yield torch.randint(rows, (1000,))


def _zipf(rows: int) -> Iterator[Tensor]:
    """The n-th most frequent row is looked up in proportion to ``1 / n``; frequent ones are
    anywhere in the table."""
    chance, where = (
        (1 / torch.arange(1, rows + 1, dtype=torch.float64)).cumsum(0),
        torch.randperm(rows),
    )
    while True:
        yield where[
            torch.searchsorted(chance, torch.rand(1000, dtype=torch.float64) * chance[-1]).clamp_(
                max=rows - 1
            )
        ]


def _real(case: dict[str, Any]) -> dict[str, Callable[[int], Iterator[Tensor]]]:
    """User x genre of MovieLens-100K, and items of an interactions .npz; frequent ones are anywhere
    in the table."""
    found: dict[str, Tensor] = {}
    try:
        data = movielens.load(movielens.fetch())
        found["MovieLens-100K"] = next(
            feature.ids for feature in data.sparse if feature.name == "user_x_genre"
        )
    except (ValueError, OSError) as error:
        print(f"No ids of MovieLens-100K: {error}", file=sys.stderr)
    if case["data"]:
        with np.load(case["data"]) as file:
            items = torch.from_numpy(file["train_item"]).long()
        found[Path(case["data"]).stem] = items[torch.randperm(len(items))]
    else:
        print("No ids of interactions: --data names none", file=sys.stderr)
    return {name: _repeated(ids * 7_919) for name, ids in found.items()}


def _repeated(ids: Tensor) -> Callable[[int], Iterator[Tensor]]:
    def make(rows: int) -> Iterator[Tensor]:
        while True:
            yield from torch.split(ids % rows, 1000)

    return make


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # gloo aborts now and then when it is destroyed while a DDP module lives
