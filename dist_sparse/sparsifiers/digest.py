"""When are two masks, or two replicas of a weight, the same?

A mask's hash is the sum, modulo 2**64, of ``a(row) * b(column)`` over its removed elements, with pseudo-random ``a``
and ``b``. Sums can be taken over any pieces in any order, and over a whole block at once, so the hash depends on
neither the sharding nor the blocks and costs one pass over the bits. It tells accidents apart, not attacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_sparse.masking.masks import BlockMask

__all__ = ["element_counts", "hash_tensor", "mask_hash", "shape_hash"]

_ROWS, _COLS = 0x51, 0xC3
_STEP = 1 << 16
_MIX = 0x1E3779B97F4A7C15
_HASHED = 1 << 22


def mask_hash(mask: BlockMask) -> int:
    """The hash of one shard's part of a mask, by its global rows and columns."""
    rect = mask.rect
    rows = _mix(torch.arange(rect.row, rect.row_end, device=mask.bits.device), _ROWS)
    cols = _mix(torch.arange(rect.col, rect.col_end, device=mask.bits.device), _COLS)
    return _weighted(mask, rows, cols)


def element_counts(mask: BlockMask) -> int:
    """Number of removed elements of one shard."""
    device = mask.bits.device
    ones = torch.ones(max(mask.rect.rows, mask.rect.cols), dtype=torch.int64, device=device)
    return _weighted(mask, ones[: mask.rect.rows], ones[: mask.rect.cols])


def hash_tensor(tensor: Tensor) -> int:
    """A 64-bit hash of the bytes of ``tensor``, in row-major order.

    Each word is mixed with its position by steps that can be undone, so a change of one word always changes the sum;
    and not linearly, so that changes which cancel as numbers do not cancel here.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = raw.numel()
    for start in range(0, raw.numel(), _HASHED):
        part = raw[start : start + _HASHED]
        if rest := -part.numel() % 8:
            part = torch.cat([part, part.new_zeros(rest)])
        words = part.view(torch.int64) if part.storage_offset() % 8 == 0 else part.clone().view(torch.int64)
        mixed = torch.arange(start // 8, start // 8 + words.numel(), device=words.device).mul_(_MIX).bitwise_xor_(words)
        for shift in (32, 29):
            mixed.bitwise_xor_((mixed >> shift) & ((1 << (64 - shift)) - 1)).mul_(_MIX)
        total += int((mixed ^ ((mixed >> 32) & 0xFFFFFFFF)).sum())
    return total % (1 << 64)


def shape_hash(shape: tuple[int, int]) -> int:
    """A number that tells shapes apart."""
    return int(_mix(torch.tensor([shape[0]]), _ROWS ^ 0xFF) * 3 + _mix(torch.tensor([shape[1]]), _COLS ^ 0xFF))


def _weighted(mask: BlockMask, rows: Tensor, cols: Tensor) -> int:
    """The sum of ``rows[r] * cols[c]`` over removed elements: per block, the product of the sums over its rows and its
    columns."""
    if mask.blocks == 0:
        return 0
    down = _by_block(rows, mask.rect.row, mask.block[0], mask.grid.row, mask.grid.rows)
    across = _by_block(cols, mask.rect.col, mask.block[1], mask.grid.col, mask.grid.cols)
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    step = max(8, _STEP // mask.grid.cols // 8 * 8)
    for first in range(0, mask.grid.rows, step):
        last = min(first + step, mask.grid.rows)
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
