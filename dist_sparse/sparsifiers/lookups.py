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
from dist_sparse.tables.shards import CACHED, Block, Rect, ShardedData

Lookups = tuple[int, int]
"""All lookups of a table, and lookups of its removed rows."""


FUSED: Final = ("fused", "fused_uvm", CACHED)
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
        block: of its masks.
        masks, counts: of this rank's shards; counts None where lookups are not counted.

    Returns:
        ``(bool (rows,), float64 (rows,))`` on the CPU; None where they are not known, on every rank
        alike.
    """
    if counts is None or not knows_removed_rows(data, block):
        return None
    mine = _counted_here(data)
    return [
        (mask.dead_rows().cpu(), rows.cpu().double())
        for mask, rows in zip(masks, counts, strict=True)
        if mask.rect in mine
    ]


def whole_rows(data: ShardedData) -> bool:
    """Return whether no row of a table is cut, so that some rank sees all of it."""
    return all(rect.cols == data.shape[1] for rect in data.rects)


def knows_removed_rows(data: ShardedData, block: Block) -> bool:
    """Return whether the leftmost shards of a table tell which of its rows are removed."""
    return block[1] >= data.shape[1] or whole_rows(data)


def _counted_here(data: ShardedData) -> set[Rect]:
    """Return the shards whose lookups this rank counts. Shards of the same rows have the same
    lookups: the leftmost counts."""
    owned = data.owned(group_over(data.ranks).rank)
    return {rect for rect in owned if rect.col == 0}


def lookups_here(packed: PackedStore, data: ShardedData) -> Lookups | None:
    """Return the lookups of this rank's part of a table: counted ones where its score needs counts,
    otherwise those that enforcers have sampled since the last mask update, 0 where they see no
    lookups. Local.

    Returns:
        None where they are not known, on every rank alike.
    """
    block, masks = packed.block(data.name), packed.masks(data.name)
    counts = packed.counts(data.name)
    if not knows_removed_rows(data, block):
        return None
    # Where a score counts all lookups, nothing is sampled.
    sampled = packed.samples(data.name) if counts is None else map(_looked_up, masks, counts)
    mine, sums = _counted_here(data), torch.zeros(2, dtype=torch.float64)
    for mask, lookups in zip(masks, sampled, strict=True):
        if mask.rect in mine:
            sums += lookups.cpu()
    # Counts that decay have fractions; sums are rounded once.
    looked_up, removed = sums.round().long().tolist()
    return looked_up, removed


def _looked_up(mask: BlockMask, counts: Tensor) -> Tensor:
    """Return all lookups of a shard, and those of its removed rows."""
    rows = counts.double()
    return torch.stack([rows.sum(), rows[mask.dead_rows()].sum()])


def removed_lookups(packed: PackedStore, action: str) -> dict[str, list[int]]:
    """Return all lookups and removed lookups of each table where they are known, by name.
    Collective: one all-reduce for each group.

    Args:
        packed: the registered tables.
        action: the public call, for messages.
    """
    located = packed.current(action)
    here = {name: lookups_here(packed, data) for name, data in located.items()}
    # The same tables on every rank of a group.
    known = {name: lookups for name, lookups in here.items() if lookups is not None}
    return packed.summed(known)
