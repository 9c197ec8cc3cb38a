"""A factorization machine on MovieLens: everything that it learns is in its tables."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm.batches import Dataset
from online.formula import scores

__all__ = ["CROSS", "DIM", "IDS", "Machine", "build"]

DIM = 16
IDS = ("user_id", "movie_id")
"""The tables that stay whole."""

CROSS = "user_x_genre"
"""The hashed table that is masked."""

_LR = 0.05


class Machine(nn.Module):
    """A table of users, one of movies, and a hashed one of their crosses."""

    def __init__(self, data: Dataset) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=feature.name,
                embedding_dim=DIM,
                num_embeddings=feature.rows,
                feature_names=[feature.name],
                weight_init_min=-0.05,
                weight_init_max=0.05,
            )
            for feature in data.sparse
        ]
        self.tables = EmbeddingBagCollection(configs, device=torch.device("meta"))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return the logits ``(b,)``."""
        found = self.tables(ids)
        return scores(torch.stack([found[name] for name in (*IDS, CROSS)], dim=1))


def build(data: Dataset, seed: int) -> DistributedModelParallel:
    """Shard the model's tables by rows over all ranks. Collective."""
    torch.manual_seed(seed + dist.get_rank())  # ranks draw different shards
    machine = Machine(data)
    apply_optimizer_in_backward(RowWiseAdagrad, machine.parameters(), {"lr": _LR})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        machine.tables,
        {feature.name: row_wise() for feature in data.sparse},
        sharder=sharder,
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    return DistributedModelParallel(
        machine,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )
