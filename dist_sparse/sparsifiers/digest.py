"""Hashes of masks and weights, for comparing ranks.

The hash of a mask is the sum, modulo 2**64, of ``a(row) * b(column)`` over its removed elements,
with pseudo-random ``a`` and ``b``. Sums can be taken over any pieces in any order, and over a whole
block at once, so the hash depends on neither the sharding nor the blocks and costs one pass over
the bits. It detects accidents, not attacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dist_sparse.groups import Replica
from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of

__all__ = [
    "element_counts",
    "hash_tensor",
    "mask_hash",
    "shape_hash",
    "shared_bits",
    "shared_weights",
]

_ROWS, _COLS = 0x51, 0xC3
_STEP = 1 << 16
_MIX = 0x1E3779B97F4A7C15
_HASHED = 1 << 22


def mask_hash(mask: BlockMask) -> int:
    """Return the hash of one shard's part of a mask, by its global rows and columns."""
    rect = mask.rect
    rows = _mix(torch.arange(rect.row, rect.row_end, device=mask.bits.device), _ROWS)
    cols = _mix(torch.arange(rect.col, rect.col_end, device=mask.bits.device), _COLS)
    return _weighted(mask, rows, cols)


def element_counts(mask: BlockMask) -> int:
    """Return the number of removed elements of one shard."""
    device = mask.bits.device
    ones = torch.ones(max(mask.rect.rows, mask.rect.cols), dtype=torch.int64, device=device)
    return _weighted(mask, ones[: mask.rect.rows], ones[: mask.rect.cols])


def hash_tensor(tensor: Tensor) -> int:
    """Return a 64-bit hash of the bytes of ``tensor``, in row-major order.

    Each word is mixed with its position by steps that can be undone, so a change of one word always
    changes the sum; and not linearly, so that changes which cancel as numbers do not cancel here.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = raw.numel()
    for start in range(0, raw.numel(), _HASHED):
        part = raw[start : start + _HASHED]
        if rest := -part.numel() % 8:
            part = torch.cat([part, part.new_zeros(rest)])
        words = (
            part.view(torch.int64)
            if part.storage_offset() % 8 == 0
            else part.clone().view(torch.int64)
        )
        mixed = (
            torch.arange(start // 8, start // 8 + words.numel(), device=words.device)
            .mul_(_MIX)
            .bitwise_xor_(words)
        )
        for shift in (32, 29):
            mixed.bitwise_xor_((mixed >> shift) & ((1 << (64 - shift)) - 1)).mul_(_MIX)
        total += int((mixed ^ ((mixed >> 32) & 0xFFFFFFFF)).sum())
    return total % (1 << 64)


def shape_hash(shape: tuple[int, int]) -> int:
    """Return a number that tells shapes apart."""
    return int(
        _mix(torch.tensor([shape[0]]), _ROWS ^ 0xFF) * 3
        + _mix(torch.tensor([shape[1]]), _COLS ^ 0xFF)
    )


def shared_weights(data: ShardedData, rank: int) -> dict[str, Replica]:
    """Return hashes of the weights that group rank ``rank`` holds in common with others, by place;
    local."""
    found = {}
    for shard in data.shards:
        holders = [r for r, held in enumerate(data.tiling) if shard.rect in held]
        if len(holders) > 1:
            found[place_of(data.name, shard.rect)] = Replica(
                hash_tensor(shard.tensor), holders[0] == rank, len(holders)
            )
    return found


def place_of(name: str, rect: Rect) -> str:
    """Return the name of a shard in messages."""
    return f"{name} {rect}"


def shared_bits(
    data: ShardedData, block: Block, masks: Sequence[BlockMask], rank: int
) -> dict[str, Replica]:
    """Return hashes of the mask bits that group rank ``rank`` holds in common with others, by
    place; local.

    Common are the bits of replicas, and those of blocks that a shard border cuts.

    Raises:
        ValueError: two shards of this rank differ in such a bit.
    """
    rects = data.rects
    cut_rows = frozenset(r.row // block[0] for r in rects if r.row % block[0])
    cut_cols = frozenset(r.col // block[1] for r in rects if r.col % block[1])
    if not (cut_rows or cut_cols or data.replicated):
        return {}
    holders: dict[str, list[int]] = {}
    for r, held in enumerate(data.tiling):
        for place, _ in (
            found for rect in held for found in _places(data.name, rect, block, cut_rows, cut_cols)
        ):
            holders.setdefault(place, []).append(r)
    found: dict[str, Replica] = {}
    for mask in masks:
        for place, index in _places(data.name, mask.rect, block, cut_rows, cut_cols):
            if len(holders[place]) < 2:
                continue
            value = hash_tensor(mask.bits if index is None else mask.flags()[index])
            if place in found and found[place].hash != value:
                raise ValueError(
                    f"Masks differ between their holders. {place}: two shards of rank {rank}"
                    " differ."
                )
            ranks = sorted(set(holders[place]))
            found[place] = Replica(value, ranks[0] == rank, len(ranks))
    return {place: replica for place, replica in found.items() if replica.holders > 1}


def _places(
    name: str, rect: Rect, block: Block, cut_rows: frozenset[int], cut_cols: frozenset[int]
) -> Iterator[tuple[str, tuple[slice | int, ...] | None]]:
    """What a shard may share: all of it (None), and its block rows and columns that some border
    cuts, each with an index into its flags."""
    grid = grid_of(rect, block)
    yield f"table {name!r}, shard {rect}", None
    for i in sorted(cut_rows & set(range(grid.row, grid.row + grid.rows))):
        yield (
            f"table {name!r}, block row {i}, {grid.cols} block columns from {grid.col} on",
            (i - grid.row,),
        )
    for j in sorted(cut_cols & set(range(grid.col, grid.col + grid.cols))):
        yield (
            f"table {name!r}, block column {j}, {grid.rows} block rows from {grid.row} on",
            (slice(None), j - grid.col),
        )


def _weighted(mask: BlockMask, rows: Tensor, cols: Tensor) -> int:
    """The sum of ``rows[r] * cols[c]`` over removed elements: per block, the product of the sums
    over its rows and its columns."""
    if mask.blocks == 0:
        return 0
    down = _by_block(rows, mask.rect.row, mask.block[0], mask.grid.row, mask.grid.rows)
    across = _by_block(cols, mask.rect.col, mask.block[1], mask.grid.col, mask.grid.cols)
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for first, last in mask.row_chunks(_STEP):
        removed = ~mask.flags(first, last)
        total += ((removed * across).sum(1) * down[first:last]).sum()
    return int(total)


def _by_block(values: Tensor, start: int, size: int, first: int, count: int) -> Tensor:
    where = (torch.arange(start, start + values.numel(), device=values.device) // size) - first
    return values.new_zeros(count).index_add_(0, where, values)


def _mix(values: Tensor, seed: int) -> Tensor:
    """Pseudo-random odd int64 from int64 (the finalizer of splitmix64, Steele et al. 2014)."""
    z = (values + seed) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1
