"""Rows that training has never touched: removing them changes no prediction on what was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.compaction.kept_rows import gather_rows
from dist_sparse.enforcer.fused import fused_sums
from dist_sparse.enforcer.optimizers import leaves, same_storage, summed
from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.tables.shards import Rect, ShardedData

__all__ = ["untouched_rows"]

Sums = Mapping[int, tuple[Tensor, float]]
"""What Adagrad has summed for a shard, and the value that it began with, by the address of the
shard."""


def untouched_rows(
    model: nn.Module, located: Sequence[ShardedData], optimizer: Any = None
) -> dict[str, int]:
    """Return how many rows no gradient has reached, by table, for tables that Adagrad steps.

    Collective over the world.
    Adagrad's sums of squares never shrink, so a sum that is as at first is a row that no batch has
    looked up. A table whose rows are all like that is left out: it was not trained, or its weights
    were loaded without the sums.

    Args:
        model: the one that holds the tables; of fused ones it knows the optimizer.
        located: the tables.
        optimizer: the one that steps the other tables, or a sequence of several.

    Raises:
        ValueError: something in ``optimizer`` is no optimizer.
    """
    world = group_over(world_ranks())
    with world.agreeing("plan()"):
        sums = fused_sums([model])
        for weight, state in _stepped_sums(located, optimizer):
            # An optimizer may list fused tables that it never steps.
            sums.setdefault(weight.data_ptr(), state)
    touched = _touched_rows(_known_tables(located, sums), sums)
    counts = {name: int((~flags).sum()) for name, flags in touched.items()}
    over_ranks: dict[str, int] = {}
    for each in world.all_gather_json(counts):
        over_ranks |= each
    return {
        data.name: over_ranks[data.name]
        for data in located
        if over_ranks.get(data.name, data.shape[0]) < data.shape[0]
    }


def _known_tables(located: Sequence[ShardedData], sums: Sums) -> list[ShardedData]:
    """The tables of this rank of whose shards every rank knows the sums. Collective over the
    world."""
    missing = set()
    for data in located:
        for shard in data.shards:
            if shard.tensor.numel() and shard.tensor.data_ptr() not in sums:
                missing.add(data.name)
    unknown: set[str] = set()
    for names in group_over(world_ranks()).all_gather_json(sorted(missing)):
        unknown.update(names)
    here = rank_in(world_ranks())
    known = [data for data in located if data.name not in unknown]
    return [data for data in known if here in (data.ranks or (here,))]


def _touched_rows(known: Sequence[ShardedData], sums: Sums) -> dict[str, Tensor]:
    """Which rows of each table a gradient has reached, on the first rank of its group; one gather
    for each group."""
    by_ranks: dict[tuple[int, ...] | None, list[ShardedData]] = {}
    for data in known:
        by_ranks.setdefault(data.ranks, []).append(data)
    touched: dict[str, Tensor] = {}
    for ranks in sorted(by_ranks, key=lambda ranks: ranks or ()):
        tables = by_ranks[ranks]
        touched |= gather_rows(tables, lambda data, rect: _touched(data, rect, sums), _asked)
    return touched


def _stepped_sums(
    located: Sequence[ShardedData], optimizer: Any
) -> Iterator[tuple[Tensor, tuple[Tensor, float]]]:
    """What the given optimizers have summed for this rank's shards."""
    if optimizer is None:
        return
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    stepped = []
    for leaf in chain.from_iterable(map(leaves, optimizers)):
        for group in leaf.param_groups:
            stepped += [(leaf, parameter) for parameter in group["params"]]
    stepping = same_storage([parameter for _, parameter in stepped])
    for data in located:
        for weight in (shard.tensor for shard in data.shards):
            for leaf, parameter in map(stepped.__getitem__, stepping(weight)):
                if (state := summed(leaf, parameter, weight)) is not None:
                    yield weight, state


def _asked(data: ShardedData, rank: int) -> Sequence[Rect]:
    """Copies that are trained apart see other batches; of other replicas one knows what all
    know."""
    return data.tiling[rank] if data.copied else data.owned(rank)


def _touched(data: ShardedData, rect: Rect, sums: Sums) -> Tensor:
    """Which rows of a shard have a sum of squares other than at first: bool ``(rect.rows,)`` on the
    CPU."""
    if not rect.numel:
        return torch.zeros(rect.rows, dtype=torch.bool)
    weight = next(shard.tensor for shard in data.shards if shard.rect == rect)
    total, initial = sums[weight.data_ptr()]
    return (total.reshape(rect.rows, -1) != initial).any(1).cpu()
