"""Models of `benchmarks.tables`: TorchRec's DLRM and DeepFM, in one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm.batches import Dataset

__all__ = ["NETWORKS", "Model", "collection_of"]

_DENSE_LR = 3e-3

_CPU = torch.device("cpu")


def collection_of(rows: Mapping[str, int], dim: int) -> EmbeddingBagCollection:
    """Return tables with these rows, each read by the feature of its name."""
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=count, embedding_dim=dim, feature_names=[name])
        for name, count in rows.items()
    ]
    return EmbeddingBagCollection(tables=configs, device=_CPU)


def _dlrm(tables: Any, dense: int, dim: int) -> nn.Module:
    return DLRM(
        embedding_bag_collection=tables,
        dense_in_features=dense,
        dense_arch_layer_sizes=[64, dim],
        over_arch_layer_sizes=[64, 32, 1],
        dense_device=_CPU,
    )


def _deepfm(tables: Any, dense: int, dim: int) -> nn.Module:
    network = SimpleDeepFMNN(
        num_dense_features=dense,
        embedding_bag_collection=tables,
        hidden_layer_size=64,
        deep_fm_dimension=64,
    )
    # Its sigmoid is in the loss, as it is for DLRM.
    network.over_arch.model[1] = nn.Identity()
    return network


NETWORKS = {"DLRM": _dlrm, "DeepFM": _deepfm}


class _Managed(nn.Module):
    """TorchRec's managed collisions in the place of a collection: they return ids beside bags."""

    def __init__(
        self, rows: Mapping[str, int], ids: Mapping[str, int], dim: int, interval: int
    ) -> None:
        super().__init__()
        tables = collection_of(rows, dim)
        self.configs = tables.embedding_bag_configs()
        modules = {
            name: MCHManagedCollisionModule(
                zch_size=count,
                device=_CPU,
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=interval,
                input_hash_size=ids[name],
            )
            for name, count in rows.items()
        }
        managed = ManagedCollisionCollection(modules, self.configs)
        self.managed = ManagedCollisionEmbeddingBagCollection(tables, managed)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self.managed(features)[0]


def _reset_state(
    tables: Any,
    pruned_indices: Tensor,
    pruned_indices_offsets: Tensor,
    logical_table_ids: Tensor,
    **_: Any,
) -> None:
    """Reset the optimizer's state of evicted rows, as FBGEMM does on CUDA alone."""
    states = tables.split_optimizer_states()
    begins = pruned_indices_offsets.tolist()
    for number, table in enumerate(logical_table_ids.tolist()):
        rows = pruned_indices[begins[number] : begins[number + 1]]
        states[table][0].view(-1)[rows] = 0


class Model:
    """A network over tables with fused row-wise Adagrad; Adam trains the layers.

    Args:
        network: one of :data:`NETWORKS`.
        data: names the dense features.
        rows: of each table.
        dim: columns of all tables.
        lr: learning rate of the tables.
        seed: draws the weights.
        managed: the number of ids of each table, whose rows TorchRec's managed collisions give out.
        interval: batches between two updates of managed collisions.
    """

    def __init__(
        self,
        network: str,
        data: Dataset,
        rows: Mapping[str, int],
        *,
        dim: int,
        lr: float,
        seed: int,
        managed: Mapping[str, int] | None = None,
        interval: int = 1,
    ) -> None:
        torch.manual_seed(seed)
        tables: Any = collection_of(rows, dim)
        stored, sharder, path = tables, EmbeddingBagCollectionSharder(), ""
        if managed is not None:
            SplitTableBatchedEmbeddingBagsCodegen.reset_embedding_weight_momentum = _reset_state
            tables, path = _Managed(rows, managed, dim, interval), ".managed"
            stored, sharder = tables.managed, ManagedCollisionEmbeddingBagCollectionSharder()
        made = NETWORKS[network](tables, len(data.dense_names), dim)
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": lr})
        plan = construct_module_sharding_plan(
            stored,
            {name: row_wise() for name in rows},
            sharder=sharder,
            local_size=1,
            world_size=1,
            device_type="cpu",
        )
        place = f"sparse_arch.embedding_bag_collection{path}"
        self.module = DistributedModelParallel(
            made, device=_CPU, plan=ShardingPlan({place: plan}), sharders=[sharder]
        )
        self.optimizer = torch.optim.Adam(
            [each for name, each in self.module.named_parameters() if "embedding_bags" not in name],
            lr=_DENSE_LR,
        )
        self.tables: dict[str, Tensor] = {
            key.split(".")[-2]: value.local_shards()[0].tensor
            for key, value in self.module.state_dict().items()
            if isinstance(value, ShardedTensor) and key.endswith(".weight")
        }

    @property
    def optimizers(self) -> list[Any]:
        """All of them, as sparsify() takes them."""
        return [self.optimizer, self.module.fused_optimizer]

    def step(self, data: Dataset, index: Tensor) -> None:
        """Train on a batch."""
        batch = data.batch(index)
        self.optimizer.zero_grad()
        logits = self.module(batch.dense_features, batch.sparse_features).squeeze(1)
        binary_cross_entropy_with_logits(logits, batch.labels).backward()
        self.optimizer.step()

    @torch.no_grad()
    def logits(self, data: Dataset, index: Tensor) -> Tensor:
        """Return the logits of examples."""
        self.module.eval()
        batches = (data.batch(each) for each in index.split(16384))
        found = [self.module(each.dense_features, each.sparse_features) for each in batches]
        return torch.cat(found).squeeze(1)
