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
from benchmarks.structure import Crossed, crossed, walks

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


def measured(folder: Path, show: str = "") -> dict[str, Any]:
    """The figures, as this rank counts them. Collective; every rank names the same folder.

    Args:
        show: an operation whose calls are printed, by function.
    """
    found: dict[str, Any] = {}

    def calls(name: str, action: Callable[[], Any]) -> Crossed:
        seen = crossed(action)
        found[f"calls of {name}"] = sum(seen.calls.values())
        if name == show and dist.get_rank() == 0:
            for (module, function), times in sorted(seen.calls.items(), key=lambda item: -item[1]):
                print(f"{times:5} {module}.{function}")
        return seen

    def walked(name: str, action: Callable[[], Any]) -> None:
        found[f"walks of {name}"] = walks(model, action)

    model = _sharded()
    optimizer = torch.optim.Adagrad(model.module.over.parameters(), lr=0.1)
    made: list[dist_sparse.SparseTraining] = []

    def sparsified() -> None:
        made.append(dist_sparse.sparsify(model, optimizer, level=0.5, end=None, every=1))

    # Caches of the process are filled by the first.
    sparsified()
    made.pop().detach()
    calls("sparsify()", sparsified)
    made.pop().detach()
    walked("sparsify()", sparsified)
    sparse = made[0]
    sparsifier = sparse.sparsifier
    for _ in range(2):  # a second update has everything at hand that the first one looks up
        _train(model, optimizer)
        sparsifier.step()
    _train(model, optimizer)
    seen = calls("an update", sparsifier.step)
    found["modules crossed by an update"] = sorted(seen.modules)
    calls("forward and backward after an update", lambda: _forward(model))
    # One forward in 16 counts lookups of removed rows.
    for _ in range(16):
        _train(model, optimizer)
    calls("forward and backward", lambda: _forward(model))
    walked("an update", sparsifier.step)
    checkpoints = dist_sparse.Checkpoints(folder / "checkpoints")
    parts: Any = {"model": model, "optimizer": optimizer, "sparse": sparse}
    checkpoints.save(1, **parts)
    calls("save()", lambda: checkpoints.save(2, **parts))
    calls("resume_latest()", lambda: checkpoints.resume_latest(**parts))
    state = sparse.state_dict()
    calls("state_dict()", sparse.state_dict)
    calls("load_state_dict()", lambda: sparse.load_state_dict(state))
    walked("export()", lambda: dist_sparse.export(model, sparse, folder / "served"))
    calls("export()", lambda: dist_sparse.export(model, sparse, folder / "again"))
    served = dist_sparse.load_served(folder / "served")
    batch = _batch()
    served(batch)
    calls("a served lookup", lambda: served(batch))
    smaller: list[nn.Module] = []
    calls("compact()", lambda: smaller.append(dist_sparse.compact(model, sparse)))
    (compact,) = smaller
    compact(batch)
    calls("a forward of a compact model", lambda: compact(batch))
    return found


def _batch() -> KeyedJaggedTensor:
    ids = torch.randint(64, (16,))
    return KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=torch.full((8,), 2))


def _forward(model: nn.Module) -> None:
    model(_batch()).sum().backward()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    _forward(model)
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
    figures = measured(Path(names[0]), *sys.argv[1:])
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    sys.stdout.flush()
    os._exit(0)
