"""How many rows of each table have nothing left, over all ranks?

Exact for tables that are cut by columns too, where no rank sees a whole row: one bit a row and column shard goes to the
rank that counts the row, an equal share of a table's rows each, so that no rank ever has them all. Between due steps
only; the masks are only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dist_sparse.groups import Group, group_over
from dist_sparse.masking.masks import BlockMask, pack, unpack
from dist_sparse.tables.shards import Rect, ShardedData

__all__ = ["count_dead_rows", "dead_flags"]

_CHUNK = 1 << 20

Ranks = tuple[int, ...] | None
Part = tuple[Rect, int, int]
"""A shard, and the rows ``[first, last)`` of the table that it shares with some range."""


def count_dead_rows(
    located: Mapping[str, ShardedData], masks: Mapping[str, Sequence[BlockMask]], groups: Mapping[Ranks, list[str]]
) -> dict[str, int]:
    """Dead rows of sharded tables, the same on every rank. Collective over the tables' groups: an all-reduce each, and
    an all-to-all of a bit a row and column shard where tables are cut by columns.

    Args:
        located: the tables as they lie now.
        masks: this rank's, of each table in the order of its shards.
        groups: the tables' names by the ranks that hold them, in the same order on every rank.
    """
    dead: dict[str, int] = {}
    for ranks, names in groups.items():
        group = group_over(ranks)
        counts = dict.fromkeys(names, 0)
        cut = [name for name in names if any(rect.cols != located[name].shape[1] for rect in located[name].rects)]
        flags = {name: _owned_flags(located[name], masks[name], group.rank) for name in cut}
        for name in set(names) - set(cut):
            counts[name] = sum(
                int(part.sum()) for part in _owned_flags(located[name], masks[name], group.rank).values()
            )
        if cut:
            counts |= _counted_by_owners([located[name] for name in cut], flags, group)
        summed = group.all_reduce(torch.tensor([counts[name] for name in names], dtype=torch.int64))
        dead.update(zip(names, summed.tolist(), strict=True))
    return dead


def dead_flags(mask: BlockMask) -> Tensor:
    """Which rows of a shard have nothing left in it: bool ``(mask.rect.rows,)``, on the CPU."""
    grid, height = mask.grid, mask.block[0]
    if not mask.blocks:
        return torch.ones(mask.rect.rows, dtype=torch.bool)
    if grid.cols % 8 == 0:  # block rows begin at bytes, which need not be unpacked
        size = grid.cols // 8
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
        dead = (mask.bits.view(word) if word is not None else mask.bits.view(-1, size).amax(1)) == 0
    else:
        step = max(8, _CHUNK // grid.cols // 8 * 8)
        dead = torch.cat([~mask.flags(i, min(i + step, grid.rows)).any(1) for i in range(0, grid.rows, step)])
    if height == 1:
        return dead.cpu()
    edges = (torch.arange(grid.row, grid.row + grid.rows + 1) * height).clamp(mask.rect.row, mask.rect.row_end)
    return dead.cpu().repeat_interleave(edges.diff())


def _owned_flags(data: ShardedData, masks: Sequence[BlockMask], rank: int) -> dict[Rect, Tensor]:
    held = dict(zip(data.tiling[rank], masks, strict=True))
    return {rect: dead_flags(held[rect]) for rect in data.owned(rank) if rect.numel}


def _counted_by_owners(
    tables: Sequence[ShardedData], flags: Mapping[str, Mapping[Rect, Tensor]], group: Group
) -> dict[str, int]:
    """Of each table the dead rows among those that this rank counts. Collective."""
    pieces: list[list[Tensor]] = []
    for reader in range(group.size):
        parts = [(data.name, part) for data in tables for part in _parts(data, group.rank, reader, group.size)]
        pieces.append([pack(flags[name][rect][i - rect.row : j - rect.row]) for name, (rect, i, j) in parts])
    sizes = [
        sum(-(-(j - i) // 8) for data in tables for _, i, j in _parts(data, rank, group.rank, group.size))
        for rank in range(group.size)
    ]
    received = group.all_to_all(pieces, sizes, torch.device("cpu"))
    first = {data.name: _share(data, group.rank, group.size) for data in tables}
    dead = {name: torch.ones(end - start, dtype=torch.bool) for name, (start, end) in first.items()}
    for rank, packed in enumerate(received):
        at = 0
        for data in tables:
            start = first[data.name][0]
            for _, i, j in _parts(data, rank, group.rank, group.size):
                size = -(-(j - i) // 8)
                dead[data.name][i - start : j - start] &= unpack(packed[at : at + size], j - i)
                at += size
    return {name: int(rows.sum()) for name, rows in dead.items()}


def _share(data: ShardedData, rank: int, size: int) -> tuple[int, int]:
    """The rows that a rank counts."""
    rows = data.shape[0]
    return rows * rank // size, rows * (rank + 1) // size


def _parts(data: ShardedData, writer: int, reader: int, size: int) -> list[Part]:
    """What one rank's shards have of the rows that another counts; from metadata, the same on every rank."""
    start, end = _share(data, reader, size)
    cuts = [(rect, max(rect.row, start), min(rect.row_end, end)) for rect in data.owned(writer) if rect.numel]
    return [(rect, i, j) for rect, i, j in cuts if i < j]
