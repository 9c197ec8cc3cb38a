"""The model: TorchRec's DLRM under DistributedModelParallel, with a handwritten sharding plan.

The plan is handwritten because TorchRec's planner does not offer row-wise sharding on CPU. Sharded
tables have a fused RowWiseAdagrad that updates them inside ``backward``. Data-parallel tables are
dense parameters to TorchRec, and get a separate optimizer of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm.batches import Dataset
from dlrm.options import DIM, SHARDINGS

_TABLE_LR = 0.05
_DENSE_LR = 1e-3
_SMALL_ROWS = 256
"""In the mixed plan, tables with fewer rows are replicated: sharding them would cost messages and
save little memory."""


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """A model ready for TrainPipelineSparseDist.

    Args:
        model: returns ``(loss, (loss, logits, labels))`` for a batch.
        optimizer: steps everything that is not updated inside ``backward``.
        tables: name to (rows, dim), of all tables.
        sharding: name to TorchRec's sharding type.
    """

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    tables: dict[str, tuple[int, int]]
    sharding: dict[str, str]

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables over all ranks; a replicated table counts once."""
        return sum(rows * dim * torch.float32.itemsize for rows, dim in self.tables.values())


def build(
    dataset: Dataset, *, sharding: Mapping[str, str], seed: int, world: int, dim: int = DIM
) -> ShardedModel:
    """Return the DLRM for a data set, sharded over the default process group. Collective: every
    rank must call it.

    Weights depend on ``seed`` alone: all ranks make the whole model from it and keep their part.

    Args:
        dataset: names the tables and their rows.
        sharding: every table's sharding type, from :func:`sharding_of`.
        seed: of the weights.
        world: number of processes.
        dim: of every table.
    """
    torch.manual_seed(seed)
    device = torch.device("cpu")
    collection = EmbeddingBagCollection(
        device=device,
        tables=[
            EmbeddingBagConfig(
                name=f.name, embedding_dim=dim, num_embeddings=f.rows, feature_names=[f.name]
            )
            for f in dataset.sparse
        ],
    )
    dlrm = DLRM(
        embedding_bag_collection=collection,
        dense_in_features=len(dataset.dense_names),
        dense_arch_layer_sizes=[64, dim],
        over_arch_layer_sizes=[64, 32, 1],
        dense_device=device,
    )
    tables = {
        config.name: (config.num_embeddings, config.embedding_dim)
        for config in collection.embedding_bag_configs()
    }
    for name, bag in collection.embedding_bags.items():
        if sharding[name] != ShardingType.DATA_PARALLEL.value:
            apply_optimizer_in_backward(RowWiseAdagrad, bag.parameters(), {"lr": _TABLE_LR})

    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        collection,
        {name: _placed(sharding[name], place, world) for place, name in enumerate(tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        DLRMTrain(dlrm),
        device=device,
        plan=ShardingPlan({"model.sparse_arch.embedding_bag_collection": plan}),
        sharders=[sharder],
    )
    return ShardedModel(
        model=model, optimizer=_optimizer(model, sharding), tables=tables, sharding=dict(sharding)
    )


def sharding_of(rows: Mapping[str, int], sharding: str, world: int) -> dict[str, str]:
    """Return the sharding type of every table.

    ``mixed`` replicates the small tables; of the others the largest is cut by rows, the next by
    columns, the next stays whole on a rank, and so on in turns.

    Args:
        rows: of every table.
        sharding: one of :data:`~dlrm.options.SHARDINGS`.
        world: number of processes.

    Raises:
        ValueError: the type is unknown, or the columns do not divide by the number of ranks.
    """
    if sharding not in SHARDINGS:
        raise ValueError(f"Invalid {sharding=}: must be one of {', '.join(SHARDINGS)}.")
    if sharding == "mixed":
        large = sorted(
            (name for name in rows if rows[name] >= _SMALL_ROWS), key=lambda name: -rows[name]
        )
        turns = (ShardingType.ROW_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_WISE)
        turn = {name: turns[place % len(turns)].value for place, name in enumerate(large)}
        kinds = {name: turn.get(name, ShardingType.DATA_PARALLEL.value) for name in rows}
    else:
        kinds = dict.fromkeys(rows, sharding)
    if ShardingType.COLUMN_WISE.value in kinds.values() and DIM % world:
        raise ValueError(
            f"Invalid {sharding=}: {DIM} columns can't be cut evenly over {world} processes."
        )
    return kinds


def _placed(kind: str, place: int, world: int) -> ParameterShardingGenerator:
    """Return the sharding of the ``place``-th table. Whole tables take turns over the ranks; a
    single rank has columns in two shards."""
    match ShardingType(kind):
        case ShardingType.ROW_WISE:
            return row_wise()
        case ShardingType.COLUMN_WISE:
            return column_wise(ranks=list(range(world)) if world > 1 else [0, 0])
        case ShardingType.TABLE_WISE:
            return table_wise(rank=place % world)
        case _:
            return data_parallel()


def _optimizer(model: DistributedModelParallel, sharding: Mapping[str, str]) -> CombinedOptimizer:
    """Return the fused optimizer, one for data-parallel tables and one for the layers, combined.

    TorchRec leaves data-parallel tables among the dense parameters. Under the layers' Adam
    they would train differently from all other tables, and every row would move at every step,
    looked up or not.
    """
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    replicated: dict[str, nn.Parameter] = {}
    for name, kind in sharding.items():
        if kind == ShardingType.DATA_PARALLEL.value:
            fqn = f"model.sparse_arch.embedding_bag_collection.embedding_bags.{name}.weight"
            replicated[fqn] = dense.pop(fqn)
    parts = [
        model.fused_optimizer,
        KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=_DENSE_LR)),
    ]
    if replicated:
        parts.append(
            KeyedOptimizerWrapper(replicated, lambda params: RowWiseAdagrad(params, lr=_TABLE_LR))
        )
    return CombinedOptimizer(parts)
