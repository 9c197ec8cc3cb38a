"""What differs between CPUs and accelerators in a mask update: sizes of pieces, counting, copies.

A CPU works on pieces that stay in its caches, and reads a value for free. On an accelerator each
operation on a piece is a launch, and each value that the host reads is a wait: pieces are large,
and counts stay on the device until one copy brings those of all tables. The integers are the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_sparse.tables.shards import Block, Rect, grid_of


@dataclass(frozen=True)
class Pieces:
    """How much a mask update does at a time on a device.

    Args:
        elements: most elements scored at a time, as float64.
        least: fewest elements scored at a time, unless the shard has fewer.
        chunks: a shard is scored in so many chunks, within the two limits above.
        scores: fewest scores to check and count at a time, unless the shard has fewer.
        flags: flags of a mask expanded at a time.
        hashed: bytes hashed at a time.
    """

    elements: int
    least: int
    chunks: int
    scores: int
    flags: int
    hashed: int


# 8 MiB of float64 is about what the last-level cache of one core keeps. The first of several chunks
# writes into fresh memory, whose pages are mapped in while it does, which takes longer than
# scoring. Scores are few enough to be in the cache still, and enough to make the calls worth it.
ON_CPU = Pieces(
    elements=1 << 20, least=1 << 18, chunks=8, scores=1 << 18, flags=1 << 20, hashed=1 << 22
)

# Large chunks take the time of their memory, not that of their launches; with 64 of a shard,
# the float64 elements of one take at most 3% of a float32 table. (C4)
ON_ACCELERATOR = Pieces(
    elements=1 << 26, least=1 << 21, chunks=64, scores=1 << 22, flags=1 << 23, hashed=1 << 26
)

# Copies of each counter: additions to one address wait for each other.
_LANES = 256


def pieces_on(device: torch.device) -> Pieces:
    """Return the sizes for a device."""
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def count_each(at: Tensor, buckets: int) -> Tensor:
    """Return how often each number below ``buckets`` is in ``at``, int64 ``(buckets,)``, without
    waiting for the device, as torch.bincount does to learn the largest number.

    Args:
        at: int32 ``(n,)``, contiguous; overwritten.
    """
    whole = at.numel() // _LANES * _LANES
    lanes = torch.arange(_LANES, dtype=torch.int32, device=at.device).mul_(buckets)
    at[:whole].view(-1, _LANES).add_(lanes)
    one = torch.ones(1, dtype=torch.int32, device=at.device)
    # Integers: their sum does not depend on the order of the additions.
    counts = torch.zeros(_LANES * buckets, dtype=torch.int32, device=at.device)
    return counts.index_add_(0, at, one.expand(at.numel())).view(_LANES, buckets).sum(0)


def count_within(keys: Tensor, low: int, shift: int, buckets: int) -> Tensor:
    """Return how many of ``keys`` ``(n,)`` fall into each of the buckets of ``2**shift`` numbers
    from ``low`` on, int64 ``(buckets,)``, as :func:`count_each`."""
    at = (keys - low).bitwise_right_shift_(shift)
    # What is outside has a bucket at either end: to leave it out would wait for the device.
    at = at.clamp_(-1, buckets).add_(1).to(torch.int32)
    return count_each(at, buckets + 2)[1:-1]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one dtype in CPU memory; those of an accelerator are copied at once, with
    one wait."""
    found = list(tensors)
    away: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if not tensor.is_cpu:
            away.setdefault(tensor.device, []).append(i)
    for places in away.values():
        copied = torch.cat([tensors[i].flatten() for i in places]).cpu()
        parts = torch.split(copied, [tensors[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            found[i] = part.view(tensors[i].shape)
    return found


# Places in a list are int32, and a program looks at some behind the last.
_MOST = (1 << 31) - (1 << 20)

# Behind all places in a list, and above all scores.
NO_PLACE = (1 << 31) - 1

# Elements of a block that kernels add up in torch's order.
_WIDTHS = {1, 2, 4, 8, *range(16, 4097, 16)}


def kernels_on(device: torch.device) -> Any:
    """Return :mod:`~dist_sparse.masking.kernels` for a device that can run it, else None."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("dist_sparse.masking.kernels")


def flat_width(rect: Rect, block: Block, tensor: Tensor) -> int | None:
    """Return the elements of a block of the shard ``rect`` if the kernels can take it, else
    None."""
    if kernels_on(tensor.device) is None:
        return None
    grid = grid_of(rect, block)
    width = rect.cols if grid.cols == 1 else block[1]
    equal = block[0] == 1 and rect.cols == grid.cols * width
    uncut = grid.cols == 1 or rect.col % width == 0
    if not (equal and uncut and tensor.is_contiguous() and 0 < grid.blocks < _MOST):
        return None
    # Neighbours are added in pairs, or 16 sums are taken beside each other. Of wider blocks torch
    # adds up parts first.
    return width if width in _WIDTHS else None


def too_large(nbytes: int, weights: int) -> bool:
    """Whether so many bytes may not be held beside ``weights`` bytes of a shard on an accelerator,
    where tables fill the memory."""
    return nbytes * 20 > weights
