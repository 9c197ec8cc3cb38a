"""Counted lookups of removed rows: how much of the traffic the masks answer with zeros.

Lookups are counted for scores that need them (``counts_lookups``). Of a table cut by columns no rank sees whole rows,
so that its removed rows are known only where blocks are as wide as the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dist_sparse.groups import group_over
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.stats import dead_flags
from dist_sparse.tables.shards import Block, ShardedData

__all__ = ["Lookups", "counted_rows", "removed_lookups", "sum_lookups"]

Lookups = tuple[int, int]
"""All lookups of a table, and those of its removed rows."""


class Counting(Protocol):
    """The attributes of a sparsifier that its lookups need."""

    packed_store: PackedStore
    counts_lookups: bool


def counted_rows(
    data: ShardedData,
    block: Block,
    masks: Sequence[BlockMask],
    counts: Sequence[Tensor] | None,
) -> list[tuple[Tensor, Tensor]] | None:
    """Return for each shard that this rank counts which rows are removed, and the lookups of each. Local.

    Args:
        data: the table as it is stored now.
        block: what one bit of its masks stands for.
        masks, counts: of this rank's shards; counts None where lookups are not counted.

    Returns:
        ``(bool (rows,), float64 (rows,))`` on the CPU; None where that is not known, on every rank alike.
    """
    whole_rows = all(rect.cols == data.shape[1] for rect in data.rects) or block[1] >= data.shape[1]
    if counts is None or not whole_rows:
        return None
    owned = set(data.owned(group_over(data.ranks).rank))
    found = []
    for mask, rows in zip(masks, counts, strict=True):
        # Shards of the same rows have the same counts: the leftmost is read.
        if mask.rect.col == 0 and mask.rect in owned:
            found.append((dead_flags(mask), rows.cpu().double()))
    return found


def sum_lookups(rows: Sequence[tuple[Tensor, Tensor]]) -> Lookups:
    """Return the sums over this rank's part of a table, from :func:`counted_rows`, rounded."""
    counted, removed = 0.0, 0.0
    for dead, counts in rows:
        counted += float(counts.sum())
        removed += float(counts[dead].sum())
    return round(counted), round(removed)


def removed_lookups(sparsifier: Counting, action: str) -> dict[str, Lookups]:
    """Return the lookups of each table of which they are known, by name. Collective: one all-reduce for each group.

    Args:
        sparsifier: whose tables; without ``counts_lookups`` nothing is known, and nothing is sent.
        action: the public call, for messages.
    """
    packed = sparsifier.packed_store
    if not sparsifier.counts_lookups:
        return {}
    located = packed.current(action)
    found: dict[str, Lookups] = {}
    for ranks, names in packed.groups.items():
        known = {}
        for name in names:
            rows = counted_rows(located[name], packed.block(name), packed.masks(name), packed.counts(name))
            if rows is not None:
                known[name] = sum_lookups(rows)
        if known:
            sums = group_over(ranks).all_reduce(torch.tensor(list(known.values()))).tolist()
            found |= {name: (counted, removed) for name, (counted, removed) in zip(known, sums, strict=True)}
    return {name: found[name] for name in packed.names if name in found}
