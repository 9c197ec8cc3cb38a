"""The model: a user table and an item table under TorchRec's DistributedModelParallel, scored by
dot products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from two_tower.data import NEGATIVES

__all__ = ["INIT", "Towers", "build", "keyed", "rows_of"]

INIT = 0.05
"""Weights are drawn from [-INIT, INIT]."""

_ITEMS = tuple(f"item_{place}" for place in range(1 + NEGATIVES))
"""Features of the table of items: the interaction, then the negatives."""


class Towers(nn.Module):
    """A user table, an item table, and a bias for each item."""

    def __init__(self, users: int, items: int, dim: int) -> None:
        super().__init__()
        self.collection = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=dim,
                    num_embeddings=rows,
                    feature_names=list(features),
                    init_fn=_init,
                )
                for name, rows, features in (("user", users, ["user"]), ("item", items, _ITEMS))
            ]
        )
        self.bias = nn.Parameter(torch.zeros(items))

    def forward(self, ids: KeyedJaggedTensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores ``(b, items)`` of users with items, and half the sum of squares of the
        looked-up rows.

        Args:
            ids: from :func:`keyed`.
            items: (b, 1 + NEGATIVES), the items in them.
        """
        embedded = self.collection(ids).values().unflatten(1, (1 + len(_ITEMS), -1))
        user, item = embedded.split([1, len(_ITEMS)], dim=1)
        return (user * item).sum(2) + self.bias[items], embedded.square().sum() / 2


def _init(weight: Tensor) -> Tensor:
    return nn.init.uniform_(weight, -INIT, INIT)


def keyed(user: Tensor, items: Tensor) -> KeyedJaggedTensor:
    """Return users ``(b,)`` and items ``(b, 1 + NEGATIVES)`` in TorchRec's format, with one id per
    feature and example."""
    values = torch.cat([user[None], items.T]).flatten()
    return KeyedJaggedTensor.from_lengths_sync(
        ["user", *_ITEMS], values, torch.ones_like(values, dtype=torch.int32)
    )


def build(towers: Towers, world: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the model, its tables cut by rows over the default process group, and its optimizer.
    Collective.

    Towers must have the same weights on every rank. The learning rate is set before each step.
    """
    for bag in towers.collection.embedding_bags.values():
        apply_optimizer_in_backward(RowWiseAdagrad, bag.parameters(), {"lr": 0.0})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        towers.collection,
        {"user": row_wise(), "item": row_wise()},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        towers,
        device=torch.device("cpu"),
        plan=ShardingPlan({"collection": plan}),
        sharders=[sharder],
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    biases = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.0))
    return model, CombinedOptimizer([model.fused_optimizer, biases])


def rows_of(model: nn.Module, counts: Sequence[int], chunk: int = 4096) -> list[Tensor]:
    """Return the embeddings of all users and of all items, by looking them up. Collective: every
    rank gets all.

    Args:
        model: maps a KeyedJaggedTensor of :func:`keyed`'s features to their embeddings.
        counts: the number of users, and of items.
        chunk: ids at a time.
    """
    tables = []
    for place, count in enumerate(counts):
        parts = []
        for ids in torch.arange(count).split(chunk):
            lengths = torch.zeros(1 + len(_ITEMS), len(ids), dtype=torch.int32)
            lengths[place] = 1
            kjt = KeyedJaggedTensor.from_lengths_sync(["user", *_ITEMS], ids, lengths.flatten())
            with torch.no_grad():
                parts.append(model(kjt).values().unflatten(1, (1 + len(_ITEMS), -1))[:, place])
        tables.append(torch.cat(parts))
    return tables
