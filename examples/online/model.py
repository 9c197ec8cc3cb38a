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

from dist_sparse.extras.following import following
from dlrm.batches import Dataset
from online.formula import scores

__all__ = ["CROSS", "DIM", "FOLLOWING", "Machine", "build"]

DIM = 16
FOLLOWING = {"user_id": 200, "movie_id": 800}
"""Rows of the following tables, for 943 users and 1,682 movies."""

CROSS = "user_x_genre"
"""The hashed table that is masked."""

_LR = 0.05


class Machine(nn.Module):
    """Two following tables, and one table with a row for each id."""

    def __init__(self, data: Dataset) -> None:
        super().__init__()
        configs = {
            feature.name: EmbeddingBagConfig(
                name=feature.name,
                embedding_dim=DIM,
                num_embeddings=feature.rows,
                feature_names=[feature.name],
                weight_init_min=-0.05,
                weight_init_max=0.05,
            )
            for feature in data.sparse
        }
        meta = torch.device("meta")
        self.live = following(
            EmbeddingBagCollection([configs[name] for name in FOLLOWING], device=meta), FOLLOWING
        )
        self.crosses = EmbeddingBagCollection([configs[CROSS]], device=meta)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return the logits ``(b,)``."""
        live, crosses = self.live(ids), self.crosses(ids)
        found = [*(live[name] for name in FOLLOWING), crosses[CROSS]]
        return scores(torch.stack(found, dim=1))


def build(data: Dataset, seed: int) -> DistributedModelParallel:
    """Shard the model's tables by rows over all ranks. Collective."""
    torch.manual_seed(seed + dist.get_rank())  # ranks draw different shards
    machine = Machine(data)
    apply_optimizer_in_backward(RowWiseAdagrad, machine.parameters(), {"lr": _LR})
    sharder = EmbeddingBagCollectionSharder()
    collections = {"live.inner": machine.live.inner, "crosses": machine.crosses}
    plans = {
        path: construct_module_sharding_plan(
            collection,
            {config.name: row_wise() for config in collection.embedding_bag_configs()},
            sharder=sharder,
            local_size=dist.get_world_size(),
            world_size=dist.get_world_size(),
            device_type="cpu",
        )
        for path, collection in collections.items()
    }
    return DistributedModelParallel(
        machine, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=[sharder]
    )
