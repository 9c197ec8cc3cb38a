"""The small sharded models that ``dist-sparse selftest`` trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel, train_pipeline
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

# Rows and columns by table.
Shapes = Mapping[str, tuple[int, int]]

_BAGS = 64
_IDS = 8


@dataclass(frozen=True)
class TrialTables:
    """A model to try, and its batches.

    Args:
        shapes: of the tables.
        optimizer: FBGEMM's name of the fused optimizer.
        kernel: TorchRec's compute kernel.
        data_type: TorchRec's name of the type of weights.
        rounds: whether FBGEMM rounds 16-bit weights stochastically on CUDA.
        sharding: ``"row_wise"``, ``"column_wise"`` (two shards of each table on each rank),
            ``"table_wise"`` (all tables on rank 0) or ``"data_parallel"``.
        pooling: ``"SUM"``, ``"MEAN"``, or ``"NONE"`` for an EmbeddingCollection.
        weighted: whether ids have weights.
        ids: the dtype of ids.
        varying: whether features have different batch sizes.
    """

    shapes: Shapes
    optimizer: str = "EXACT_SGD"
    kernel: str = "fused"
    data_type: str = "FP32"
    rounds: bool = True
    sharding: str = "row_wise"
    pooling: str = "SUM"
    weighted: bool = False
    ids: torch.dtype = torch.int64
    varying: bool = False


class TrialModel(nn.Module):
    """Tables and a linear layer, in a forward that TorchRec's pipelines can trace.

    Args:
        trial: what to build.
        tables: the collection of the tables.
    """

    def __init__(self, trial: TrialTables, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.is_sequence = trial.pooling == "NONE"
        self.names = [f"{name}_ids" for name in trial.shapes]
        self.over = nn.Linear(sum(cols for _, cols in trial.shapes.values()), 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and one number per sample."""
        found = self.tables(features)
        if self.is_sequence:
            # The first id of bag i of every table, then the second: any fixed pairing would do.
            found = torch.cat([found[name].values() for name in self.names], dim=1)
        else:
            found = found.values()
        out = self.over(found.float().view(-1, self.over.in_features)).squeeze(1)
        return out.square().mean(), out.detach()


def trial_model(trial: TrialTables, device: torch.device) -> DistributedModelParallel:
    """Return a model over all ranks, whose layers are equal on them. Collective.

    Args:
        trial: what to build.
        device: of this rank.
    """
    torch.manual_seed(0)
    tables, sharder = _collection(trial)
    net = TrialModel(trial, tables)
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        tables,
        dict.fromkeys(trial.shapes, _sharding(trial, world)),
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type=device.type,
    )
    return DistributedModelParallel(
        net, device=device, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )


def _collection(trial: TrialTables) -> tuple[nn.Module, Any]:
    """Return the unsharded collection, and its sharder."""
    fused: dict[str, Any] = {"optimizer": EmbOptimType[trial.optimizer], "learning_rate": 0.1}
    if trial.kernel == "fused_uvm_caching":
        fused["cache_load_factor"] = 0.2
    if not trial.rounds:
        fused["stochastic_rounding"] = False
    given = [
        {
            "name": name,
            "num_embeddings": rows,
            "embedding_dim": cols,
            "feature_names": [f"{name}_ids"],
            "data_type": DataType[trial.data_type],
        }
        for name, (rows, cols) in trial.shapes.items()
    ]
    # On the meta device: DistributedModelParallel allocates each rank's shards.
    meta = torch.device("meta")
    if trial.pooling == "NONE":
        configs = [EmbeddingConfig(**one) for one in given]
        return EmbeddingCollection(configs, meta), EmbeddingCollectionSharder(fused_params=fused)
    pooling = PoolingType[trial.pooling]
    bags = [EmbeddingBagConfig(**one, pooling=pooling) for one in given]
    collection = EmbeddingBagCollection(bags, is_weighted=trial.weighted, device=meta)
    return collection, EmbeddingBagCollectionSharder(fused_params=fused)


def _sharding(trial: TrialTables, world: int) -> Any:
    if trial.sharding == "column_wise":
        return column_wise(ranks=[*range(world)] * 2)
    if trial.sharding == "table_wise":
        return table_wise(rank=0, compute_kernel=trial.kernel)
    if trial.sharding == "data_parallel":
        return data_parallel()
    return row_wise(compute_kernel=trial.kernel)


def layers_optimizer(model: nn.Module) -> KeyedOptimizerWrapper:
    """Return the optimizer of the parameters that no fused optimizer steps."""
    layers = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(layers, lambda params: torch.optim.SGD(params, lr=0.01))


def trial_batch(trial: TrialTables, seed: int) -> KeyedJaggedTensor:
    """Return a batch in CPU memory: 64 bags of 8 ids for each table, drawn by ``seed``. If batch
    sizes vary, every second table has 32 bags, each of which two samples share."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [_BAGS // (1 + table % 2 * trial.varying) for table in range(len(trial.shapes))]
    ids = [
        torch.randint(rows, (size * _IDS,), generator=generator)
        for size, (rows, _) in zip(sizes, trial.shapes.values(), strict=True)
    ]
    values = torch.cat(ids).to(trial.ids)
    given: dict[str, Any] = {"lengths": torch.full((sum(sizes),), _IDS, dtype=trial.ids)}
    if trial.weighted:
        given["weights"] = torch.rand(len(values), generator=generator)
    keys = [f"{name}_ids" for name in trial.shapes]
    if trial.varying:
        given["stride_per_key_per_rank"] = [[size] for size in sizes]
        samples = [torch.arange(_BAGS) % size for size in sizes]
        given["inverse_indices"] = keys, torch.stack(samples)
    return KeyedJaggedTensor(keys, values, **given)


def pipeline_of(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Any:
    """Return one of TorchRec's pipelines, by the name of its class."""
    return getattr(train_pipeline, kind)(model, optimizer, device)
