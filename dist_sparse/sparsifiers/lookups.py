"""Lookups of removed rows: how much of the traffic the masks answer with zeros.

Lookups are counted for scores that need them (``counts_lookups``), and sampled by an enforcer for
others. No rank sees whole rows of a table cut by columns: its removed rows are known only where
blocks are as wide as the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from dist_sparse.groups import group_over
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.stats import dead_flags
from dist_sparse.tables.shards import Block, ShardedData

__all__ = ["FUSED", "Lookups", "counted_rows", "lookups_here", "removed_lookups"]

Lookups = tuple[int, int]
"""All lookups of a table, and those of its removed rows."""


FUSED: Final = ("fused", "fused_uvm")
"""TorchRec's compute kernels whose lookups an enforcer sees."""


def counted_rows(
    data: ShardedData,
    block: Block,
    masks: Sequence[BlockMask],
    counts: Sequence[Tensor] | None,
) -> list[tuple[Tensor, Tensor]] | None:
    """Return for each shard that this rank counts which rows are removed, and the lookups of each.
    Local.

    Args:
        data: the table as it is stored now.
        block: what one bit of its masks stands for.
        masks, counts: of this rank's shards; counts None where lookups are not counted.

    Returns:
        ``(bool (rows,), float64 (rows,))`` on the CPU; None where that is not known, on every rank
        alike.
    """
    if counts is None or not _has_whole_rows(data, block):
        return None
    owned = set(data.owned(group_over(data.ranks).rank))
    found = []
    for mask, rows in zip(masks, counts, strict=True):
        # Shards of the same rows have the same counts: the leftmost is read.
        if mask.rect.col == 0 and mask.rect in owned:
            found.append((dead_flags(mask), rows.cpu().double()))
    return found


def _has_whole_rows(data: ShardedData, block: Block) -> bool:
    return block[1] >= data.shape[1] or all(rect.cols == data.shape[1] for rect in data.rects)


def _sum_lookups(rows: Sequence[tuple[Tensor, Tensor]]) -> Lookups:
    """Return the sums over this rank's part of a table, from :func:`counted_rows`, rounded."""
    counted, removed = 0.0, 0.0
    for dead, counts in rows:
        counted += float(counts.sum())
        removed += float(counts[dead].sum())
    return round(counted), round(removed)


def lookups_here(packed: PackedStore, data: ShardedData) -> Lookups | None:
    """Return the lookups of this rank's part of a table: counted ones where its score needs counts,
    otherwise what enforcers have sampled since the last mask update. Local.

    Returns:
        None where that is not known, on every rank alike.
    """
    block, masks, counts = (
        packed.block(data.name),
        packed.masks(data.name),
        packed.counts(data.name),
    )
    if counts is not None:
        rows = counted_rows(data, block, masks, counts)
        return None if rows is None else _sum_lookups(rows)
    if data.kernel not in FUSED or not _has_whole_rows(data, block):
        return None
    owned = set(data.owned(group_over(data.ranks).rank))
    sums = torch.zeros(2, dtype=torch.int64)
    for mask, sampled in zip(masks, packed.samples(data.name), strict=True):
        # Shards of the same rows have the same lookups.
        if mask.rect.col == 0 and mask.rect in owned:
            sums += sampled.cpu()
    looked_up, removed = sums.tolist()
    return looked_up, removed


def removed_lookups(packed: PackedStore, action: str) -> dict[str, Lookups]:
    """Return the lookups of each table of which they are known, by name. Collective: one all-reduce
    for each group.

    Args:
        packed: the registered tables.
        action: the public call, for messages.
    """
    located = packed.current(action)
    found: dict[str, Lookups] = {}
    for ranks, names in packed.groups.items():
        here = {name: lookups_here(packed, located[name]) for name in names}
        known = {name: sums for name, sums in here.items() if sums is not None}
        if known:
            sums = group_over(ranks).all_reduce(torch.tensor(list(known.values()))).tolist()
            found |= {
                name: (counted, removed)
                for name, (counted, removed) in zip(known, sums, strict=True)
            }
    return {name: found[name] for name in packed.names if name in found}
