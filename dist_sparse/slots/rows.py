"""Rows that change hands: their weights become the initial ones of the id that comes, their
optimizer state that of a new row.

Each rank writes what it stores of them. No other row is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.compaction.initial import draw_rows
from dist_sparse.compaction.moving import fused_shards
from dist_sparse.enforcer.dense import leaves, state_of
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.shards import Rect


@dataclass(frozen=True)
class Stored:
    """A part of a table on this rank.

    Args:
        rect: which rows and columns it has.
        weight: live, ``(rect.rows, rect.cols)``.
        states: of the optimizer, each live, of the weight's shape or one value per row, with the
            value that it begins with.
    """

    rect: Rect
    weight: Tensor
    states: Sequence[tuple[Tensor, float]]


def stored_parts(inner: nn.Module, table: str, optimizers: Sequence[Any]) -> list[Stored]:
    """Return what this rank stores of a table of a sharded collection. Local.

    Args:
        optimizers: those that step tables without a fused optimizer.

    Raises:
        ValueError: it is not sharded, or the storage of the table is not supported.
    """
    collection = collection_of(inner)
    if not collection.is_sharded:
        raise ValueError(
            "The collection is not sharded yet: put the model under DistributedModelParallel first."
        )
    shards = collection.locate(table, table, table).shards
    fused = fused_shards(collection).get(table)
    if fused is not None:
        # The state of fused optimizers begins at 0.
        states = [list(zip(each.states, repeat(0.0), strict=False)) for each in fused]
    else:
        states = [
            _stepped(optimizers, collection.parameters()[table], each.tensor) for each in shards
        ]
    pairs = zip(shards, states, strict=True)
    return [Stored(shard.rect, shard.tensor, held) for shard, held in pairs]


def _stepped(
    optimizers: Sequence[Any], parameter: Tensor, weight: Tensor
) -> list[tuple[Tensor, float]]:
    """Return the state of a part of a parameter that plain optimizers step."""
    found: list[tuple[Tensor, float]] = []
    for optimizer in optimizers:
        for leaf in leaves(optimizer):
            found += state_of(leaf, parameter, weight).values()
    return found


@torch.no_grad()
def write_rows(
    parts: Sequence[Stored],
    ids: Tensor,
    slots: Tensor,
    seed: int,
    table: str,
    bounds: tuple[float, float],
) -> None:
    """Write what this rank stores of rows that change hands.

    Args:
        ids, slots: which ids come into which slots, int64 ``(n,)``.
        seed, table, bounds: as of :func:`~dist_sparse.compaction.initial.initial_rows`.
    """
    for part in parts:
        rect = part.rect
        inside = (slots >= rect.row) & (slots < rect.row_end)
        places = slots[inside] - rect.row
        draw_rows(part.weight, rect, places, ids[inside], seed, table, bounds)
        for state, initial in part.states:
            state[places.to(state.device)] = initial
