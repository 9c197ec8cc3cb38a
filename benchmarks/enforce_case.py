"""One case of the enforcement benchmark, in a process of its own: prints its figures as one line of
JSON."""

from __future__ import annotations

import abc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from benchmarks.peers import ancestor
from dist_sparse import ROW, DataNormSparsifier, MaskEnforcer
from dist_sparse.tables.modules import ModelTables
from dlrm.batches import Batch, Dataset, SparseFeature
from dlrm.model import build, sharding_of

BATCH = 4096
DENSE = 3
LEVEL = 0.8
MAIN_JOB = {
    "user": 943,
    "movie": 1682,
    "age": 100,
    "gender": 2,
    "job": 21,
    "zip": 795,
    "genre": 19,
    "cross": 50_000,
}
"""Rows of the main job's tables."""

MIN_ROWS = 256
"""The main job leaves smaller tables dense."""


class Loop(abc.ABC):
    """A model, what a training loop does with it at a step, and which part of it is sparsified."""

    model: nn.Module
    optimizer: CombinedOptimizer
    names: list[str]

    @abc.abstractmethod
    def batch(self, step: int) -> Any:
        """A new batch for each step, made outside the clock."""

    def train(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(batch)[0]
        return loss


class Tables(Loop):
    """A DLRM with the main job's layers over some tables of one size, whose optimizer is a fused
    row-wise Adagrad."""

    def __init__(
        self, tables: int, rows: int, dim: int, ids: int, below: int, batch: int = BATCH
    ) -> None:
        self.tables, self.ids, self.below, self.size = tables, ids, below, batch
        self.names = [f"t{i}" for i in range(tables)]
        configs = [
            EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=[n])
            for n in self.names
        ]
        collection = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
        net = DLRMTrain(
            DLRM(
                embedding_bag_collection=collection,
                dense_in_features=DENSE,
                dense_arch_layer_sizes=[64, dim],
                over_arch_layer_sizes=[64, 32, 1],
            )
        )
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            collection,
            {n: row_wise() for n in self.names},
            sharder=sharder,
            local_size=1,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            net,
            device=torch.device("cpu"),
            plan=ShardingPlan({"model.sparse_arch.embedding_bag_collection": plan}),
            sharders=[sharder],
        )
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        rest = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, rest])

    def batch(self, step: int) -> Batch:
        made = torch.Generator().manual_seed(step)
        values = torch.randint(self.below, (self.tables * self.size * self.ids,), generator=made)
        lengths = torch.full((self.tables * self.size,), self.ids)
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=self.names, values=values, lengths=lengths
        )
        labels = torch.randint(0, 2, (self.size,), generator=made).float()
        return Batch(torch.rand(self.size, DENSE, generator=made), features, labels)


class MainJob(Loop):
    """The main job's model and table sizes, with drawn ids: small ones are frequent."""

    def __init__(self) -> None:
        examples, made = 40 * BATCH, torch.Generator().manual_seed(0)
        features = []
        for name, rows in MAIN_JOB.items():
            several = name in ("genre", "cross")  # a film has 1.7 genres in the mean
            lengths = (
                torch.randint(1, 3, (examples,), generator=made)
                if several
                else torch.ones(examples).long()
            )
            drawn = torch.rand(int(lengths.sum()), generator=made, dtype=torch.float64).pow_(3)
            offsets = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
            features.append(
                SparseFeature(
                    name=name,
                    rows=rows,
                    ids=(drawn * rows).long(),
                    offsets=offsets if several else None,
                )
            )
        self.data = Dataset(
            name="drawn",
            sparse=tuple(features),
            dense_names=("a", "b", "c"),
            dense=torch.rand(examples, 3, generator=made),
            labels=torch.randint(0, 2, (examples,), generator=made).float(),
            train=torch.arange(examples),
            test=torch.arange(0),
        )
        sharded = build(self.data, sharding=sharding_of(MAIN_JOB, "mixed", 1), seed=0, world=1)
        self.model, self.optimizer = sharded.model, sharded.optimizer
        self.names = [name for name, rows in MAIN_JOB.items() if rows >= MIN_ROWS]

    def batch(self, step: int) -> Batch:
        start = step * BATCH % len(self.data.train)
        return self.data.batch(torch.arange(start, start + BATCH))


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Times one loop in turns: plain, with everything on, and with the alternatives that the case
    names."""
    torch.manual_seed(0)
    block: Any = (1, ROW) if case["block"] == "rows" else tuple(case["block"])
    loop: Loop = MainJob() if case["model"] == "main job" else Tables(**case["tables"])
    sparsifier = DataNormSparsifier(sparsity_level=LEVEL, sparse_block_shape=block, norm="L2")
    sparsifier.add_model(loop.model, include=loop.names)
    sparsifier.step()
    ways = ("drop", "zero") if case["kind"] == "b" else ("drop",)
    enforcers = {way: MaskEnforcer(sparsifier) for way in ways}
    rounds, rise = case["rounds"], min(0.01, 0.05 / case["rounds"])
    steps = iter(range(10**9))
    plain, whole = [], []
    enforced: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in ways}
    for turn in range(rounds):
        plain.append(_timed(loop, steps, case["steps"], lambda: None))
        levels = LEVEL - rise * (rounds - turn), LEVEL - rise * (rounds - turn - 1)
        for way, enforcer in enforcers.items():
            # As a score does that needs the gradients of removed rows.
            sparsifier.trains_removed = way == "zero"
            enforced[way].append(_enforced(loop, steps, case, sparsifier, enforcer, levels))
        if "whole" in case["peers"]:
            whole.append(
                _timed(
                    loop, steps, case["peer_steps"], _whole_tables(loop.model, sparsifier, block)
                )
            )
    ours, enforcing, settling, moving = (
        min(figures) for figures in zip(*enforced["drop"], strict=True)
    )
    found = {**case, "plain_s": min(plain), "ours_s": ours, "enforce_s": enforcing}
    found |= {"settle_s": settling, "move_s": moving}
    if "zero" in ways:
        found |= {"zero_s": min(figures[0] for figures in enforced["zero"])}
    if whole:
        found["whole_s"] = min(whole)
    if "ancestor" in case["peers"]:
        found["ancestor_s"] = _ancestor(loop, sparsifier, block, case)
    return found


def _enforced(
    loop: Loop,
    steps: Iterator[int],
    case: dict[str, Any],
    sparsifier: DataNormSparsifier,
    enforcer: MaskEnforcer,
    levels: tuple[float, float],
) -> tuple[float, float, float, float]:
    """Seconds of a step with everything on; the part of them in hooks; seconds of a mask update to
    clean rows, and of the rest of it."""
    with enforcer.attach(loop.optimizer):
        for group in sparsifier.data_groups.values():
            group["sparsity_level"] = levels[0]
        # So that the step inside the clock removes more, as one of a schedule does.
        sparsifier.step()
        for group in sparsifier.data_groups.values():
            group["sparsity_level"] = levels[1]
        before, called = enforcer.seconds, iter(range(1, case["steps"] + 1))
        settling = moving = 0.0

        def after() -> None:
            nonlocal settling, moving
            if next(called) == case["steps"]:
                started = time.perf_counter()
                enforcer.settle()  # as the step would, to have a figure of its own
                settled = time.perf_counter()
                sparsifier.step()
                settling, moving = settled - started, time.perf_counter() - settled

        usual = _timed(loop, steps, case["steps"], after)
        enforcing = (enforcer.seconds - before - settling) / case["steps"]
    return usual + (settling + moving) / case["every"], enforcing, settling, moving


def _timed(loop: Loop, steps: Iterator[int], count: int, after: Callable[[], None]) -> float:
    """The median seconds of ``count`` steps on fresh batches: neither a noisy neighbour nor one due
    step moves it."""
    spent = []
    for _ in range(count):
        batch = loop.batch(next(steps))
        started = time.perf_counter()
        loop.train(batch)
        after()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def _whole_tables(
    model: nn.Module, sparsifier: DataNormSparsifier, block: Any
) -> Callable[[], None]:
    """What one would do without the library: every table times its mask, after every step."""
    pairs = []
    for data in ModelTables(model, include=list(sparsifier.data_groups)).locate():
        for shard, (_, mask) in zip(data.shards, sparsifier.local_masks(data.name), strict=True):
            pairs.append((shard.tensor, (mask[:, :1].clone() if block[1] == ROW else mask).float()))

    def apply() -> None:
        for weight, mask in pairs:
            weight.mul_(mask)

    return apply


def _ancestor(
    loop: Loop, sparsifier: DataNormSparsifier, block: Any, case: dict[str, Any]
) -> float:
    """torch.ao's way: the forward reads ``mask * weight`` of every table, the optimizer has a dense
    gradient. The mean seconds of a step; tables only, without the layers above them, so in
    torch.ao's favour."""
    assert isinstance(loop, Tables)
    weights = {name: sparsifier.get_data(name).clone().requires_grad_() for name in loop.names}
    width = next(iter(weights.values())).shape[1]
    theirs = ancestor(weights[loop.names[0]], (1, width) if block[1] == ROW else block, "L2")
    for name in loop.names[1:]:
        theirs.add_data(name, weights[name])
    registered = ["table", *loop.names[1:]]
    optimizer = torch.optim.SGD(weights.values(), lr=0.01)
    offsets = torch.arange(loop.size) * loop.ids
    spent, count = 0.0, case["ancestor_steps"]
    for step in range(count + 1):
        batch = loop.batch(step)
        started = time.perf_counter()
        optimizer.zero_grad()
        found = [
            functional.embedding_bag(
                batch.sparse_features[key].values(),
                theirs.get_data(name, False),
                offsets,
                mode="sum",
            )
            for key, name in zip(loop.names, registered, strict=True)
        ]
        torch.cat(found, dim=1).square().mean().backward()
        optimizer.step()
        spent += (time.perf_counter() - started) * (step > 0)
    return spent / count


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    figures = main(json.loads(sys.argv[1]))
    print(json.dumps(figures), flush=True)
    os._exit(0)
