"""Sharded collections with removed rows, and what a batch gives in them by hand."""

from __future__ import annotations

from typing import Any

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
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import Advanced, compact, sparsify
from tests.dist.cells import set_weights
from tests.dist.harness import LOCAL

ROWS = {"user": 40, "item": 33}
FEATURES = {"user": ["buyer", "both"], "item": ["bought", "both"]}
OUTPUTS = {"buyer": "user", "both@user": "user", "bought": "item", "both@item": "item"}
"""The table of each output: two features of a table, and a feature of two tables."""

COLUMNS = 8


class Lookups(nn.Module):
    """The collection, in a model."""

    def __init__(self, pooling: str | None, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind: Any = EmbeddingBagConfig if pooling else EmbeddingConfig
        how = {"pooling": PoolingType[pooling.upper()]} if pooling else {}
        tables = [
            kind(
                name=name,
                num_embeddings=rows,
                embedding_dim=COLUMNS,
                feature_names=FEATURES[name][: 1 + shared],
                **how,
            )
            for name, rows in ROWS.items()
        ]
        self.tables: Any = (EmbeddingBagCollection if pooling else EmbeddingCollection)(tables)

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        return self.tables(ids)


def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, COLUMNS, generator=draw) for name, rows in ROWS.items()}


def model(
    sharding: str, pooling: str | None, dedup: bool = False, shared: bool = True
) -> DistributedModelParallel:
    """The model, sharded, with :func:`weights`. Collective.

    Args:
        sharding: TorchRec's type.
        pooling: ``"sum"`` or ``"mean"``; None for sequences.
        dedup: of the sharder of sequences.
        shared: whether the tables have a feature in common.
    """
    net = Lookups(pooling, shared)
    world = dist.get_world_size()
    made: dict[str, Any] = {
        "table_wise": lambda rank: table_wise(rank=rank % world),
        "row_wise": lambda _: row_wise(),
        "column_wise": lambda _: column_wise(ranks=[0, world - 1]),
        "table_row_wise": lambda _: table_row_wise(host_index=0),
        "data_parallel": lambda _: data_parallel(),
    }
    tables = net.tables.embedding_bags if pooling else net.tables.embeddings
    if sharding != "data_parallel":
        fused = [table.weight for table in tables.values()]
        apply_optimizer_in_backward(RowWiseAdagrad, fused, {"lr": 0.1})
    sharder: Any = (
        EmbeddingBagCollectionSharder()
        if pooling
        else EmbeddingCollectionSharder(use_index_dedup=dedup)
    )
    plan = construct_module_sharding_plan(
        net.tables,
        {name: made[sharding](rank) for rank, name in enumerate(ROWS)},
        sharder=sharder,
        local_size=LOCAL[world],
        world_size=world,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        net,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )
    set_weights(sharded, weights())
    return sharded


def pruned(
    sharding: str, pooling: str | None, how: str, dedup: bool = False, shared: bool = True
) -> Any:
    """Return :func:`model` with 60% of its rows removed, and its masks' owner. Collective.

    Args:
        how: ``"plain"``: rows are zero, and nothing else is left of the masks; ``"masked"`` or
            ``"compact"``.
    """
    made: Any = model(sharding, pooling, dedup, shared)
    dense = [p for p in made.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = torch.optim.SGD(dense or [nn.Parameter(torch.ones(1))], lr=0.1)
    sparse = sparsify(made, optimizer, level=0.6, block="row", end=0, advanced=Advanced(min_rows=0))
    sparse.step()
    if how == "plain":
        sparse.detach()
    if how == "compact":
        made = compact(made, sparse, optimizer=optimizer)
    return made, sparse


def kept() -> dict[str, Tensor]:
    """Which rows are kept, by the masks of :func:`pruned`, in one process."""
    flags = {}
    for name, whole in weights().items():
        norms = whole.double().square().sum(1)
        removed = norms.argsort()[: round(0.6 * len(whole))]
        flags[name] = torch.ones(len(whole), dtype=torch.bool).index_fill_(0, removed, False)
    return flags


def by_hand(batch: KeyedJaggedTensor, pooling: str | None, by_weight: bool) -> dict[str, Tensor]:
    """Return each output in float64; an id out of range has no row.

    Args:
        by_weight: means divide by the sum of the weights, instead of the number of ids.
    """
    found = {}
    rows = {name: whole.double() for name, whole in weights().items()}
    for name, flags in kept().items():
        rows[name][~flags] = 0
    lengths = batch.lengths().view(len(batch.keys()), -1)
    starts = lengths.flatten().cumsum(0).view_as(lengths) - lengths
    ids, given = batch.values().long(), batch.weights_or_none()
    for output, name in OUTPUTS.items():
        table = rows[name]
        key = batch.keys().index(output.partition("@")[0])
        bags = []
        for start, length in zip(starts[key].tolist(), lengths[key].tolist(), strict=True):
            some = ids[start : start + length]
            inside = (some >= 0) & (some < len(table))
            vectors = torch.where(inside[:, None], table[some.where(inside, 0)], 0)
            if pooling is None:
                bags.append(vectors)
                continue
            factors = torch.ones(length, dtype=torch.float64)
            if given is not None:
                factors = given[start : start + length].float().double()
            total = (vectors * factors[:, None]).sum(0, keepdim=True)
            if pooling == "mean" and length:
                # TorchRec adds 1e-6, against a division by 0.
                total = total / (factors.sum() + 1e-6 if by_weight else length)
            bags.append(total)
        found[output] = torch.cat(bags) if bags else torch.empty(0, COLUMNS).double()
    return found


def outputs_of(found: Any) -> dict[str, Tensor]:
    """The values of each output of a collection of either kind."""
    found = found.wait() if hasattr(found, "wait") else found
    if not isinstance(found, dict):
        found = found.to_dict()
    return {
        name: (value if isinstance(value, Tensor) else value.values()).detach()
        for name, value in found.items()
    }
