"""Rows that change hands: their weights become the initial ones of the id that comes, their
optimizer state that of a new row.

Each rank writes what it stores of them. No other row is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from dist_sparse.compaction.initial import initial_rows
from dist_sparse.enforcer.optimizers import leaves, state_of
from dist_sparse.tables.port import collection_of
from dist_sparse.tables.protocols import Collection
from dist_sparse.tables.shards import Rect

_ELEMENTS: Final = 1 << 20
"""Elements that are made together: each takes 24 bytes meanwhile."""


@dataclass(frozen=True)
class NewRows:
    """Ids that come into slots of one table.

    Args:
        table: its name, by which rows are generated.
        seed: of the generator.
        ids, slots: int64 ``(n,)``.
        bounds: of the uniform distribution that rows are drawn from.
    """

    table: str
    seed: int
    ids: Tensor
    slots: Tensor
    bounds: tuple[float, float]


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


def stored_parts(
    inner: nn.Module, tables: Sequence[str], optimizers: Sequence[Any]
) -> dict[str, list[Stored]]:
    """Return what this rank stores of some tables of a sharded collection, by table. Local.

    Args:
        optimizers: those that step tables without a fused optimizer.

    Raises:
        ValueError: it is not sharded, or the storage of a table is not supported.
    """
    collection = collection_of(inner)
    if not collection.is_sharded:
        raise ValueError(
            "The collection is not sharded yet: put the model under DistributedModelParallel first."
        )
    fused = _fused_states(collection)
    steppers = [leaf for optimizer in optimizers for leaf in leaves(optimizer)]
    parameters = collection.parameters()
    found = {}
    for table in tables:
        parts = []
        for shard in collection.locate(table, table, table).shards:
            states = fused.get(shard.tensor.data_ptr())
            if states is None:
                parameter = parameters[table]
                states = []
                for leaf in steppers:
                    states += state_of(leaf, parameter, shard.tensor).values()
            parts.append(Stored(shard.rect, shard.tensor, states))
        found[table] = parts
    return found


def _fused_states(collection: Collection) -> dict[int, list[tuple[Tensor, float]]]:
    """The state of fused optimizers, which begins at 0, by the address of the weights."""
    found = {}
    for batch in collection.batches():
        for view, states in zip(batch.weights(), batch.states(), strict=True):
            if view.numel():
                found[view.data_ptr()] = [(state, 0.0) for state in states]
    return found


@torch.no_grad()
def write_rows(parts: Sequence[Stored], new: NewRows) -> None:
    """Write what this rank stores of rows that change hands."""
    for part in parts:
        rect = part.rect
        inside = (new.slots >= rect.row) & (new.slots < rect.row_end)
        ids, places = new.ids[inside], new.slots[inside] - rect.row
        columns = range(rect.col, rect.col_end)
        for few_ids, few in _chunks(ids, places, max(1, _ELEMENTS // max(1, rect.cols))):
            rows = initial_rows(new.seed, new.table, few_ids, columns, new.bounds)
            at = few.to(part.weight.device)
            part.weight[at] = rows.to(part.weight)
            for state, initial in part.states:
                state[at] = initial


def _chunks(ids: Tensor, places: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(torch.split(ids, most), torch.split(places, most), strict=True)
