"""How are flags kept eight to a byte?

Flag ``n`` is bit ``n % 8`` of byte ``n // 8``; the bits behind the last flag are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["count_bits", "pack", "positions", "unpack"]

_GATHER = 0x0102040810204080
"""Multiplying eight bytes of 0 or 1 by this brings the lowest bit of each into the highest byte, in order."""

_CHUNK = 1 << 20


def pack(flags: Tensor) -> Tensor:
    """Bools ``(n,)`` to bytes ``(ceil(n / 8),)``, uint8; the bits behind the last are 0."""
    rest = -flags.numel() % 8
    if rest:
        flags = torch.cat([flags, flags.new_zeros(rest)])
    flags = flags.contiguous() if flags.storage_offset() % 8 == 0 else flags.clone()  # a view as words must be aligned
    words = flags.view(torch.int64)
    return ((words * _GATHER) >> 56).to(torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """Bytes ``(ceil(count / 8),)`` to bools ``(count,)``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).view(-1)[:count].to(torch.bool)


def count_bits(packed: Tensor) -> int:
    """How many bits of ``packed`` (uint8, any length) are 1."""
    total = 0
    for part in torch.split(packed, _CHUNK):
        pairs = part - ((part >> 1) & 0x55)
        fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
        total += int(((fours + (fours >> 4)) & 0x0F).sum())
    return total


def positions(packed: Tensor) -> Tensor:
    """Which bits of ``packed`` (uint8) are 1: int64, ascending. Quick when few are: it looks at bytes first."""
    touched = packed.nonzero().flatten()
    byte, bit = unpack(packed[touched], touched.numel() * 8).view(-1, 8).nonzero().unbind(1)
    return touched[byte] * 8 + bit
