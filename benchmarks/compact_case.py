"""One case of the benchmark of compact tables, in fresh processes: rank 0 prints its figures as one
line of JSON."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.enforce_case import DENSE, Tables
from benchmarks.measure import peak_extra_bytes
from dist_sparse import ROW, DataNormSparsifier, MaskEnforcer, compact
from dist_sparse.tables.modules import ModelTables
from dlrm.batches import Batch


class Loop(Tables):
    """Tables that keep the rows with the smaller ids. ``skew`` 1 draws all ids equally often, 3
    draws small ones more often (the first fifth of the rows then has 58% of the ids)."""

    def __init__(self, tables: dict[str, int], skew: int) -> None:
        super().__init__(**tables)
        self.skew = skew
        for data in ModelTables(self.model).locate():
            for shard in data.shards:
                shard.tensor.sub_(
                    torch.arange(shard.rect.row, shard.rect.row_end).view(-1, 1) * 1e-9
                )
                shard.tensor[max(0, round(tables["rows"] * (1 - LEVEL)) - shard.rect.row) :] *= 1e-3

    def batch(self, step: int) -> Batch:
        made = torch.Generator().manual_seed(2 * step + dist.get_rank())
        drawn = torch.rand(self.tables * self.size * self.ids, generator=made, dtype=torch.float64)
        lengths = torch.full((self.tables * self.size,), self.ids)
        values = (drawn.pow_(self.skew) * self.below).long()
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=self.names, values=values, lengths=lengths
        )
        labels = torch.randint(0, 2, (self.size,), generator=made).float()
        return Batch(torch.rand(self.size, DENSE, generator=made), features, labels)

    def remake_optimizer(self) -> None:
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        rest = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, rest])


LEVEL = 0.8


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Time the dense model, the masked one and the compact one, and weigh the last two."""
    torch.manual_seed(0)
    loop = Loop(case["tables"], case["skew"])
    steps = iter(range(10**9))
    loop.train(loop.batch(next(steps)))
    found = {**case, "dense_s": _timed(loop, steps, case["steps"])}
    sparsifier = DataNormSparsifier(sparsity_level=LEVEL, sparse_block_shape=(1, ROW), norm="L2")
    sparsifier.add_model(loop.model)
    sparsifier.step()
    MaskEnforcer(sparsifier).attach(loop.optimizer)
    found["masked_s"] = _timed(loop, steps, case["steps"])
    found["table_bytes"], before = _stored(loop), _resident()
    started = time.perf_counter()

    def make() -> None:
        loop.model = compact(loop.model, sparsifier)
        loop.remake_optimizer()

    found["peak_bytes"] = peak_extra_bytes(make)
    found["compact_s"] = time.perf_counter() - started
    gc.collect()
    found["compact_bytes"], found["freed_bytes"] = _stored(loop), before - _resident()
    found["compact_step_s"] = _timed(loop, steps, case["steps"])
    found["index_bytes"] = loop.model.module.model.sparse_arch.embedding_bag_collection.ids.nbytes
    return found


def _timed(loop: Loop, steps: Iterator[int], count: int) -> float:
    """The median seconds of ``count`` steps on fresh batches, on the slowest rank; the least of
    three rounds."""
    rounds = []
    for _ in range(3):
        spent = []
        for _ in range(count):
            batch = loop.batch(next(steps))
            started = time.perf_counter()
            loop.train(batch)
            spent.append(time.perf_counter() - started)
        slowest = torch.tensor(statistics.median(spent))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        rounds.append(float(slowest))
    return min(rounds)


def _stored(loop: Loop) -> int:
    """Bytes of this rank's tables and of their row-wise optimizer state."""
    shards: list[Tensor] = [
        shard.tensor for data in ModelTables(loop.model).locate() for shard in data.shards
    ]
    return sum(shard.numel() * shard.element_size() + 4 * len(shard) for shard in shards)


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        * 1024
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    figures = main(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.barrier()
    os._exit(0)
