"""What a sharded model's mask update, ``sparsify()`` and ``export()`` run through: two ranks of
DistributedModelParallel, fused row-wise Adagrad, an enforcer attached."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dist_sparse
from benchmarks.structure import crossed, walks

__all__ = ["measured"]

FEATURES = ["user", "item"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(num_embeddings=64, embedding_dim=8, name=name, feature_names=[name])
            for name in FEATURES
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.over = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.over(self.tables(features).values())
        return out


def measured(folder: Path) -> dict[str, Any]:
    """The figures, as this rank counts them. Collective; every rank names the same folder."""
    found: dict[str, Any] = {}

    def counted(name: str, action: Callable[[], Any]) -> None:
        found[f"walks of {name}"] = walks(model, action)

    model = _sharded()
    optimizer = torch.optim.Adagrad(model.module.over.parameters(), lr=0.1)
    made: list[dist_sparse.SparseTraining] = []
    counted(
        "sparsify()",
        lambda: made.append(dist_sparse.sparsify(model, optimizer, level=0.5, end=None, every=1)),
    )
    sparse = made[0]
    sparsifier = sparse.sparsifier
    for _ in range(2):  # a second update has everything at hand that the first one looks up
        _train(model, optimizer)
        sparsifier.step()
    _train(model, optimizer)
    seen = crossed(sparsifier.step)
    found["modules crossed by an update"] = sorted(seen.modules)
    found["calls of an update"] = sum(seen.calls.values())
    counted("an update", sparsifier.step)
    counted("export()", lambda: dist_sparse.export(model, sparse, folder / "served"))
    return found


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.randint(64, (16,))
    batch = KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=torch.full((8,), 2))
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()


def _sharded() -> DistributedModelParallel:
    """One table cut by rows, one by columns."""
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.tables,
        {"user": row_wise(), "item": column_wise(ranks=[0, 1])},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    figures = measured(Path(names[0]))
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    sys.stdout.flush()
    os._exit(0)
