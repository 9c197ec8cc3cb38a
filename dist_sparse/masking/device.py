"""What differs between CPUs and accelerators in a mask update: sizes of pieces, counting, copies.

A CPU works on pieces that stay in its caches, and reads a value for free. On an accelerator each
operation is a launch, and each value that the host reads is a wait. So pieces are large there, and
the counts of all tables stay on the device until one copy. The counts are the same on both.
"""

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dist_sparse.doors import offered
from dist_sparse.tables.shards import Block, Rect, grid_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Pieces:
    """Sizes of the pieces that a mask update works on.

    Args:
        elements: most elements scored at a time, as float64.
        least: fewest elements scored at a time, unless the shard has fewer.
        chunks: chunks in which a shard is scored, within the two limits above.
        scores: fewest scores checked and counted at a time, unless the shard has fewer.
        flags: flags of a mask expanded at a time.
        hashed: bytes hashed at a time.
    """

    elements: int
    least: int
    chunks: int
    scores: int
    flags: int
    hashed: int


# 8 MiB of float64 is about one core's share of the last-level cache. The first chunk writes to
# fresh memory, and mapping its pages takes longer than scoring: hence several chunks, which reuse
# it. 1 MiB of scores is still in the cache when they are counted, and outweighs the calls.
ON_CPU = Pieces(
    elements=1 << 20, least=1 << 18, chunks=8, scores=1 << 18, flags=1 << 20, hashed=1 << 22
)

# Large chunks are bound by memory, not by launches. With 64 chunks a shard, the float64 elements of
# one take at most 3% of the memory of a float32 table.
ON_ACCELERATOR = Pieces(
    elements=1 << 26, least=1 << 21, chunks=64, scores=1 << 22, flags=1 << 23, hashed=1 << 26
)

# Copies of each counter: atomic additions to one address wait for each other.
_LANES = 256


def pieces_on(device: torch.device) -> Pieces:
    """Return the sizes for a device."""
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def count_each(at: Tensor, buckets: int) -> Tensor:
    """Return how often each number below ``buckets`` occurs in ``at``, int64 ``(buckets,)``. Does
    not wait for the device, unlike torch.bincount, which reads the largest number.

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
    # Keys outside are counted in one more bucket at either end. Filtering them out would need their
    # number, and so wait for the device.
    at = at.clamp_(-1, buckets).add_(1).to(torch.int32)
    return count_each(at, buckets + 2)[1:-1]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one dtype in CPU memory. All tensors of an accelerator are copied together,
    with one wait."""
    found = list(tensors)
    away: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if not tensor.is_cpu:
            away.setdefault(tensor.device, []).append(i)
    for places in away.values():
        flat = [tensors[i].flatten() for i in places]
        copied = (torch.cat(flat) if len(flat) > 1 else flat[0]).cpu()
        parts = torch.split(copied, [tensors[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            found[i] = part.view(tensors[i].shape)
    return found


# Places in a list are int32, and a kernel computes some past the end of its last tile.
_MOST = (1 << 31) - (1 << 20)

# Larger than every place in a list, and than every score.
NO_PLACE = (1 << 31) - 1

# Block widths that kernels sum in the CPU's order: up to 16 in pairs of neighbours, then in 16
# partial sums. Beyond 4096, torch sums parts first.
_WIDTHS = range(1, 4097)


class Kernels(NamedTuple):
    """What an extra offers on CUDA in place of torch's operations.

    Args:
        FlatScores: scores of shards that are flat sequences of equal blocks: a
            :class:`~dist_sparse.masking.scores.Batch`.
        Pruning: a shard that ``prune`` writes zeros to.
        prune: zeroes removed blocks of many shards in one launch.
        TritonRowCleaner: flags and cleans dirty rows, as
            :class:`~dist_sparse.enforcer.rows.HostRowCleaner`.
        TritonLookups: flags and weights of the ids of a lookup, as
            :class:`~dist_sparse.enforcer.rows.KeptIds`, and samples of lookups, in one launch for
            all features.
        TritonCounts: counts the lookups of each row, in one launch for all features.
        assign_codes: assigns the entries of books to the rows of a shard, in one launch.
        sum_by_code: sums the rows of each entry, in one launch.
        decode_lookups: looks decoded rows up, in one launch for all features.
    """

    FlatScores: Any
    Pruning: Any
    prune: Any
    TritonRowCleaner: Any
    TritonLookups: Any
    TritonCounts: Any
    assign_codes: Any
    sum_by_code: Any
    decode_lookups: Any


def kernels_on(device: torch.device) -> Kernels | None:
    """Return the kernels that an extra offers for a device; None where torch's operations run."""
    return _offered_kernels() if device.type == "cuda" else None


@cache
def _offered_kernels() -> Kernels | None:
    """Return the kernels of the first extra that can run its own here, or None."""
    found = [kernels() for kernels in offered("kernels")]
    return next(filter(None, found), None)


def row_block_width(rect: Rect, block: Block) -> int | None:
    """Return the width of the shard's blocks if each is part of one row and no border cuts any,
    else None."""
    grid = grid_of(rect, block)
    width = rect.cols if grid.cols == 1 else block[1]
    # A cut block would make the blocks that touch the shard wider than the shard.
    return width if block[0] == 1 and rect.cols == grid.cols * width else None


def flat_width(rect: Rect, block: Block, tensor: Tensor) -> int | None:
    """Return the width of the shard's blocks if kernels can take the shard, else None."""
    if kernels_on(tensor.device) is None:
        return None
    width = row_block_width(rect, block)
    fits = width in _WIDTHS and 0 < grid_of(rect, block).blocks < _MOST
    return width if fits and tensor.is_contiguous() else None


@cache
def warn_of_torch(table: str, reason: str) -> None:
    """Warn, once, that no kernel takes a table."""
    warnings.warn(
        f"Table {table!r}: its mask updates run hundreds of torch operations on the device, which"
        f" read the table many times: {reason}.",
        stacklevel=2,
    )


def too_large(nbytes: int, weights: int) -> bool:
    """Return whether this many bytes are too many to hold in addition to the ``weights`` bytes of a
    shard on an accelerator, where tables fill the memory: 5% is the limit."""
    return nbytes * 20 > weights


def with_one_retry(work: Callable[[], Result]) -> Result:
    """Do local work that may follow the last message of a mask update; if it fails, try once more.

    Other ranks go on with the new masks then, and an agreement would be one more message. So a rank
    that runs out of memory frees what it can, and follows them.

    Args:
        work: may be done twice.
    """
    try:
        return work()
    except (MemoryError, RuntimeError):
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        return work()
