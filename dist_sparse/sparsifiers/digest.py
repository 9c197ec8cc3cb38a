"""Hashes of masks and weights, for comparing ranks.

The hash of a mask is the sum, modulo 2**64, of ``a(row) * b(column)`` over its removed elements,
with pseudo-random ``a`` and ``b``. Sums can be taken over any pieces in any order, so the hash
depends on neither the sharding nor the blocks. It detects accidents, not attacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_sparse.groups import Replica
from dist_sparse.masking.device import on_host, pieces_on
from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.shards import Rect, ShardedData

_ROWS, _COLS = 0x51, 0xC3
# Odd, so that multiplying by it can be undone. Saved states hold hashes made with it.
_MIX = 0x1E3779B97F4A7C15


def mask_hash(mask: BlockMask) -> int:
    """Return the hash of one shard's part of a mask, by its global rows and columns."""
    rect, device = mask.rect, mask.bits.device
    rows = _mix(torch.arange(rect.row, rect.row_end, device=device), _ROWS)
    cols = _mix(torch.arange(rect.col, rect.col_end, device=device), _COLS)
    # Int64 wraps around: sums are modulo 2**64.
    total = torch.zeros((), dtype=torch.int64, device=device)
    for here, kept in mask.element_chunks(only_removing=True):
        total += ((~kept * cols).sum(1) * rows[here]).sum()
    return int(total)


def hash_tensor(tensor: Tensor) -> int:
    """Return a 64-bit hash of the bytes of ``tensor``, in row-major order."""
    return int(_hashed(tensor)) % (1 << 64)


def _hashed(tensor: Tensor) -> Tensor:
    """Return :func:`hash_tensor` modulo 2**64, an int64 scalar on the device of ``tensor``.

    Each word is mixed with its position by steps that can be undone, so a change of one word always
    changes the sum; and not linearly, so that changes which cancel as numbers do not cancel here.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    # The length counts: zeros at the end would change nothing else.
    total = torch.full((), raw.numel(), dtype=torch.int64, device=raw.device)
    step = pieces_on(raw.device).hashed
    for start in range(0, raw.numel(), step):
        part = raw[start : start + step]
        if rest := -part.numel() % 8:
            part = torch.cat([part, part.new_zeros(rest)])
        if part.storage_offset() % 8:
            # A view as int64 must begin at a word.
            part = part.clone()
        # Mixed with their position, so that swapped words are noticed.
        words = part.view(torch.int64)
        mixed = torch.arange(start // 8, start // 8 + words.numel(), device=words.device)
        mixed.mul_(_MIX).bitwise_xor_(words)
        for shift in (32, 29):
            # Torch shifts int64 with its sign: the bits shifted in are cleared.
            mixed.bitwise_xor_((mixed >> shift) & ((1 << (64 - shift)) - 1)).mul_(_MIX)
        # Int64 wraps around: sums are modulo 2**64.
        total += (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)).sum()
    return total


def shape_hash(shape: tuple[int, int]) -> int:
    """Return a number that tells shapes apart."""
    rows, cols = (torch.tensor([size]) for size in shape)
    return int(_mix(rows, _ROWS ^ 0xFF) * 3 + _mix(cols, _COLS ^ 0xFF))


def shared_weights(tables: Sequence[ShardedData], rank: int) -> dict[str, Replica]:
    """Return hashes of the weights that group rank ``rank`` holds in common with others, by place;
    local."""
    held = [(data, shard.rect, shard.tensor) for data in tables for shard in data.shards]
    return shared_tensors(held, rank)


def shared_tensors(
    held: Sequence[tuple[ShardedData, Rect, Tensor]], rank: int, what: str = ""
) -> dict[str, Replica]:
    """Return hashes of the tensors of shards that group rank ``rank`` holds in common with others,
    by place; local."""
    hashes: dict[str, Tensor] = {}
    holders_of: dict[str, list[int]] = {}
    for data, rect, tensor in held:
        # Rectangles of other ranks are known from metadata: equal ones are replicas.
        holders = [r for r, rects in enumerate(data.tiling) if rect in rects]
        if len(holders) > 1:
            place = f"{what}{data.name} {rect}"
            hashes[place], holders_of[place] = _hashed(tensor), holders
    found = {}
    # One wait for all of them.
    for place, value in zip(hashes, on_host([*hashes.values()]), strict=True):
        holders = holders_of[place]
        found[place] = Replica(int(value) % (1 << 64), holders[0] == rank, len(holders))
    return found


def _mix(values: Tensor, seed: int) -> Tensor:
    """Pseudo-random odd int64 from int64 (the finalizer of splitmix64, Steele et al. 2014)."""
    # Constants of splitmix64 as int64; masked shifts, as torch shifts with the sign.
    z = (values + seed) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1
