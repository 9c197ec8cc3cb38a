"""Rows that training has never touched: removing them changes no prediction on what was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.enforcer.fused import fused_sums
from dist_sparse.enforcer.optimizers import leaves, same_storage, summed
from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.serving.kept_rows import gather_rows
from dist_sparse.tables.shards import Rect, ShardedData

__all__ = ["untouched_rows"]

Sums = Mapping[int, tuple[Tensor, float]]
"""What Adagrad has summed for a shard, and the value that it began with, by the address of the shard."""


def untouched_rows(model: nn.Module, located: Sequence[ShardedData], optimizer: Any = None) -> dict[str, int]:
    """Return how many rows of a table no gradient has reached, for tables that Adagrad steps: its sums of squares never
    shrink, so that a sum of zero is a row that no batch has looked up. Of a table whose sums are all zero nothing is
    known: it has not been trained, or its weights were loaded without them. Collective: every rank of the world must
    call it.

    Args:
        model: the one that holds the tables; of fused ones it knows the optimizer.
        located: the tables.
        optimizer: the one that steps the other tables, or a sequence of several.

    Raises:
        ValueError: something in ``optimizer`` is no optimizer.
    """
    world, here = group_over(world_ranks()), rank_in(world_ranks())
    with world.agreeing("plan()"):
        sums = _sums(model, located, optimizer)
    shards = [(data.name, shard.tensor) for data in located for shard in data.shards]
    unknown = {name for name, weight in shards if weight.numel() and weight.data_ptr() not in sums}
    unknown = {name for names in world.all_gather_json(sorted(unknown)) for name in names}
    known = [data for data in located if data.name not in unknown and here in (data.ranks or (here,))]
    touched: dict[str, Tensor] = {}
    for ranks in sorted({data.ranks for data in known}, key=lambda ranks: ranks or ()):
        tables = [data for data in known if data.ranks == ranks]
        touched |= gather_rows(tables, lambda data, rect: _touched(data, rect, sums), _asked)
    counts = {name: int((~flags).sum()) for name, flags in touched.items()}
    found = {name: number for each in world.all_gather_json(counts) for name, number in each.items()}
    return {d.name: found[d.name] for d in located if d.name in found and found[d.name] < d.shape[0]}


def _sums(model: nn.Module, located: Sequence[ShardedData], optimizer: Any) -> Sums:
    """What Adagrad has summed for this rank's shards."""
    found = fused_sums([model])
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    stepped = [
        (leaf, p) for each in optimizers for leaf in leaves(each) for g in leaf.param_groups for p in g["params"]
    ]
    stepping = same_storage([parameter for _, parameter in stepped])
    for weight in (shard.tensor for data in located for shard in data.shards):
        for leaf, parameter in (stepped[i] for i in stepping(weight)):
            if (state := summed(leaf, parameter, weight)) is not None:
                found.setdefault(weight.data_ptr(), state)  # an optimizer may list fused tables that it never steps
    return found


def _asked(data: ShardedData, rank: int) -> Sequence[Rect]:
    """Copies that are trained apart see other batches; of other replicas one knows what all know."""
    return data.tiling[rank] if data.copied else data.owned(rank)


def _touched(data: ShardedData, rect: Rect, sums: Sums) -> Tensor:
    """Which rows of a shard have a sum of squares other than at first: bool ``(rect.rows,)`` on the CPU."""
    if not rect.numel:
        return torch.zeros(rect.rows, dtype=torch.bool)
    weight = next(shard.tensor for shard in data.shards if shard.rect == rect)
    total, initial = sums[weight.data_ptr()]
    return (total.reshape(rect.rows, -1) != initial).any(1).cpu()
