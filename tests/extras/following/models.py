"""Sharded models with following tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse.extras.following import following
from tests.dist.harness import LOCAL

__all__ = ["IDS", "OWN", "SHARE", "SLOTS", "Net", "batch", "build", "kinds"]

IDS: Final = {"item": 50, "user": 33, "word": 10}
"""Ids of each table; `word` keeps a row for each."""

SLOTS: Final = {"item": 10, "user": 7}
SHARE: Final = 0.3
"""Of these rows in a nursery, where a test has one: 3 of 10, and 2 of 7."""

OWN: Final = {"item": 7, "user": 5}
"""Rows of single ids beside that nursery."""

DIM: Final = 8
FEATURES: Final = {"item": ("item_id", "last_id"), "user": ("user_id",), "word": ("query",)}


class Net(nn.Module):
    """Bags or sequences, and the sum of all that they give."""

    def __init__(self, bags: bool, mean: bool, dim: int, spread: int, nursery: float) -> None:
        super().__init__()
        meta = torch.device("meta")
        common = [
            {
                "name": name,
                "num_embeddings": ids * (spread if name in SLOTS else 1),
                "embedding_dim": dim,
                "feature_names": list(FEATURES[name]),
            }
            for name, ids in IDS.items()
        ]
        pooling = PoolingType.MEAN if mean else PoolingType.SUM
        whole: Any
        if bags:
            configs = [EmbeddingBagConfig(**each, pooling=pooling) for each in common]
            whole = EmbeddingBagCollection(configs, device=meta)
        else:
            whole = EmbeddingCollection([EmbeddingConfig(**each) for each in common], device=meta)
        self.tables = following(whole, SLOTS, nursery)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """The loss, and all outputs in the order of the keys."""
        found = self.tables(features)
        keys = [key for keys in FEATURES.values() for key in keys]
        if isinstance(found, dict):
            out = torch.cat([found[key].values() for key in keys])
        else:
            out = torch.cat([found[key] for key in keys], dim=1)
        out = out * self.factor
        return (out - 1).square().sum(), out.detach()


def kinds(world: int) -> dict[str, Any]:
    """The shardings of a world: what makes the plan of each table."""
    last, ranks = world - 1, list(range(world))
    found = {
        "table_wise": lambda: table_wise(rank=last),
        "row_wise": row_wise,
        "column_wise": lambda: column_wise(ranks=[0, last]),
        "data_parallel": data_parallel,
    }
    if world == 4:
        found["table_row_wise"] = lambda: table_row_wise(host_index=1)
        found["grid"] = lambda: grid_shard([0, 1])
        found["column_wise"] = lambda: column_wise(ranks=ranks[::2])
    return found


@dataclass
class Built:
    """A sharded model, and what steps the tables that have no fused optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer
    dim: int


def build(
    world: int,
    kind: str,
    *,
    bags: bool = True,
    mean: bool = False,
    spread: int = 1,
    nursery: float = 0,
    optimizer: Any = RowWiseAdagrad,
) -> Built:
    """Shard a model over all ranks; following tables have so many times the ids. Collective."""
    torch.manual_seed(0)
    # TorchRec cuts a grid into shards of at least 128 columns.
    dim = 256 if kind == "grid" else DIM
    net = Net(bags, mean, dim, spread, nursery)
    inner: Any = net.tables.inner
    tables = inner.embedding_bags if bags else inner.embeddings
    if kind != "data_parallel":
        apply_optimizer_in_backward(
            optimizer, [table.weight for table in tables.values()], {"lr": 0.1}
        )
    sharder: Any = EmbeddingBagCollectionSharder() if bags else EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        inner,
        {name: kinds(world)[kind]() for name in IDS},
        sharder=sharder,
        local_size=LOCAL[world],
        world_size=world,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        net,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables.inner": plan}),
        sharders=[sharder],
    )
    plain = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
    return Built(model, torch.optim.Adagrad(plain, lr=0.1), dim)


def batch(step: int, world: int, *, spread: int = 1) -> KeyedJaggedTensor:
    """This rank's part of a batch of 12 samples with 0 to 2 ids a feature; all ranks together have
    the same batch, whatever the world. Hot ids drift with the step; those of following tables are
    multiples of ``spread``."""
    generator = torch.Generator().manual_seed(step)
    mine = slice(dist.get_rank() * 12 // world, (dist.get_rank() + 1) * 12 // world)
    values, lengths = [], []
    for table, features in FEATURES.items():
        for _ in features:
            sizes = torch.randint(0, 3, (12,), generator=generator)
            drawn = torch.rand(int(sizes.sum()), generator=generator) ** 3 * IDS[table]
            ids = (drawn.long() + step) % IDS[table] * (spread if table in SLOTS else 1)
            parts = ids.split(sizes.tolist())
            values += parts[mine]
            lengths.append(sizes[mine])
    keys = [key for keys in FEATURES.values() for key in keys]
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))
