"""One case of the mask-update benchmark over many tables: prints its figures as one line of
JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.measure import best
from benchmarks.peers import by_hand
from dist_sparse import ROW, ImportanceSparsifier, MaskEnforcer

RISE = 0.01


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Time a mask update in which the level rises by 1% of the blocks, and in one process the same
    by hand."""
    block = (1, ROW) if case["block"] == "rows" else tuple(case["block"])
    model = _model(case["tables"], case["rows"], case["dim"])
    sparsifier = ImportanceSparsifier(
        sparsity_level=0.5, sparse_block_shape=block, score=case["score"]
    )  # type: ignore[arg-type]
    sparsifier.add_model(model)
    if case["score"] != "norm":
        MaskEnforcer(sparsifier).attach(_trained(model))
    sparsifier.step()

    def rise() -> None:
        for group in sparsifier.data_groups.values():
            group["sparsity_level"] += RISE
        _barrier()

    found = {**case, "growing_s": _slowest(best(sparsifier.step, 7, rise))}
    if case["ranks"] == 1:
        weights = [torch.randn(case["rows"], case["dim"]) for _ in range(case["tables"])]
        width = case["dim"] if case["block"] == "rows" else case["block"][1]
        found["by_hand_s"] = best(lambda: by_hand(weights, width, 0.5 + RISE), 7)
    return found


def _model(tables: int, rows: int, dim: int) -> nn.Module:
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                num_embeddings=rows, embedding_dim=dim, name=f"t{i}", feature_names=[f"f{i}"]
            )
            for i in range(tables)
        ],
        device=torch.device("cpu"),
    )
    if not dist.is_initialized():
        return collection
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    sharder, world = EmbeddingBagCollectionSharder(), dist.get_world_size()
    where = {f"t{i}": table_wise(rank=i % world) for i in range(tables)}
    plan = construct_module_sharding_plan(
        collection, where, sharder=sharder, local_size=world, device_type="cpu"
    )
    wrapper = nn.Module()
    wrapper.tables = collection
    return DistributedModelParallel(
        wrapper, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )


def _trained(model: nn.Module) -> torch.optim.Optimizer:
    """An Adagrad that has stepped all tables once."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _slowest(seconds: float) -> float:
    """Over ranks."""
    if not dist.is_initialized():
        return seconds
    most = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    figures = main(json.loads(sys.argv[1]))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    _barrier()
    os._exit(0)  # gloo aborts now and then when it is destroyed while a DDP module lives
