"""Rows that training has never touched: removing them changes no prediction on what was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.compaction.kept_rows import gather_rows
from dist_sparse.enforcer.dense import leaves, same_storage, stepped
from dist_sparse.enforcer.fused import fused_sums
from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.tables.shards import Rect, ShardedData

Sums = Mapping[int, tuple[Tensor, float]]
"""Adagrad's sums of squares for a shard, and their initial value, by the address of the shard."""


def untouched_rows(
    model: nn.Module, located: Sequence[ShardedData], optimizer: Any = None
) -> dict[str, int]:
    """Return how many rows no gradient has reached, by table, for tables that Adagrad steps.

    Collective over the world. Adagrad's sums of squares never shrink, so a sum with its initial
    value is a row that no batch has looked up. A table without any other row is left out: it was
    not trained, or its weights were loaded without the sums.

    Args:
        model: holds the tables, and the optimizers of fused ones.
        located: the tables.
        optimizer: the optimizer that steps the other tables, or a sequence of several.

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
    over_ranks: dict[str, int] = {}
    # A table's flags are on the first rank of its group alone.
    mine = {name: int((~flags).sum()) for name, flags in touched.items()}
    for theirs in world.all_gather_json(mine):
        over_ranks |= theirs
    counts = {}
    for data in located:
        untouched = over_ranks.get(data.name)
        if untouched is not None and untouched < data.shape[0]:
            counts[data.name] = untouched
    return counts


def _known_tables(located: Sequence[ShardedData], sums: Sums) -> list[ShardedData]:
    """Return the tables of this rank for all of whose shards every rank has the sums. Collective
    over the world."""
    missing = set()
    for data in located:
        for shard in data.shards:
            # An empty shard has no row that could be untouched.
            if shard.tensor.numel() and shard.tensor.data_ptr() not in sums:
                missing.add(data.name)
    unknown = set().union(*group_over(world_ranks()).all_gather_json(sorted(missing)))
    here = rank_in(world_ranks())
    # Only ranks of a table's group take part in its gather.
    mine = [data for data in located if data.ranks is None or here in data.ranks]
    return [data for data in mine if data.name not in unknown]


def _touched_rows(known: Sequence[ShardedData], sums: Sums) -> dict[str, Tensor]:
    """Return flags of the rows that a gradient has reached, by table, on the first rank of its
    group. One gather for each group."""
    by_ranks: dict[tuple[int, ...] | None, list[ShardedData]] = {}
    for data in known:
        by_ranks.setdefault(data.ranks, []).append(data)
    touched: dict[str, Tensor] = {}
    # In one order on all ranks, or groups that overlap would wait for each other.
    for ranks in sorted(by_ranks, key=lambda ranks: ranks or ()):
        flags = gather_rows(
            by_ranks[ranks], lambda data, rect: _touched(data, rect, sums), _reported_rects
        )
        touched |= flags
    return touched


def _stepped_sums(
    located: Sequence[ShardedData], optimizer: Any
) -> Iterator[tuple[Tensor, tuple[Tensor, float]]]:
    """Yield this rank's shards with the sums that the given optimizers have for them."""
    parameters = list(_parameters_of(optimizer))
    stepping = same_storage([parameter for _, parameter in parameters])
    for data in located:
        for shard in data.shards:
            for place in stepping(shard.tensor):
                state = stepped(data.name, *parameters[place], shard.tensor).sums
                if state is not None:
                    yield shard.tensor, state


def _parameters_of(optimizer: Any) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
    """Yield the parameters of an optimizer or a sequence of several, each with the optimizer inside
    it that steps the parameter."""
    if optimizer is None:
        return
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    for leaf in chain.from_iterable(map(leaves, optimizers)):
        for group in leaf.param_groups:
            for parameter in group["params"]:
                yield leaf, parameter


def _reported_rects(data: ShardedData, rank: int) -> Sequence[Rect]:
    """Return the rectangles that a rank reports. Copies that are trained apart see other batches;
    of other replicas one reports for all."""
    return data.tiling[rank] if data.copied else data.owned(rank)


def _touched(data: ShardedData, rect: Rect, sums: Sums) -> Tensor:
    """Return flags of the rows of a shard whose sum of squares has left its initial value: bool
    ``(rect.rows,)`` on the CPU."""
    if not rect.numel:
        return torch.zeros(rect.rows, dtype=torch.bool)
    weight = next(shard.tensor for shard in data.shards if shard.rect == rect)
    total, initial = sums[weight.data_ptr()]
    return (total.reshape(rect.rows, -1) != initial).any(1).cpu()
