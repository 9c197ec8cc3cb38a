"""Triton kernels of mask updates: of shards that are flat sequences of equal blocks.

:mod:`dist_sparse.masking.device` imports this module where Triton can run, nothing else does: the
package works where Triton is missing. Each call is one launch for all shards that it is given. In
a mask update, a program takes tiles of one shard in turn, and adds what it has counted to the
shard's counters once.

Scores equal the CPU's bit for bit. Squares of elements of up to 32 bits are exact in float64, other
products are rounded before they are added (no fused multiply-add), and sums are taken in the order
of :func:`~dist_sparse.masking.scores.block_sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_sparse.records import TINY
from dist_sparse.tables.shards import sent

# Sums of wider blocks are taken in so many parts, as torch.sum takes them with AVX2.
_LANES = 16

# Triton's types of weights and totals.
_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
}

# A kernel reads no other globals than constexprs.
_TINY = tl.constexpr(TINY)

# Types by bytes of an element: zero has the same bits in every type of a size.
WORDS = {2: tl.int16, 4: tl.int32, 8: tl.int64}

# Programs of a launch, about so many at most: 8 for each multiprocessor of an H200.
_PROGRAMS = 1024

# Elements, or scores, that a program looks at together: 16 for each thread of its 4 warps. Larger
# in tests: the interpreter takes as long for a tile of any size.
TILE = 2048


class Scoring(NamedTuple):
    """How blocks are scored, alike in all shards of a launch.

    Args:
        dtype: of the weights.
        width: elements of a block, all of one row: a power of two up to 16, or a multiple of 16. 0
            where scores are read instead of weights.
        absolute: whether absolute values of elements count, not their squares.
        weights: whether elements count at all; else only their totals do.
        totals: the type of totals, if they count.
        of_elements: whether each element has a total of its own, not each row.
    """

    dtype: torch.dtype
    width: int
    absolute: bool = False
    weights: bool = True
    totals: torch.dtype | None = None
    of_elements: bool = False

    def constants(self) -> dict[str, Any]:
        """Return what a kernel that scores is compiled for."""
        return {
            "TYPE": _TYPES[self.dtype],
            "WIDTH": self.width,
            "ABSOLUTE": self.absolute,
            "WEIGHTS": self.weights,
            "TOTALS": self.totals is not None,
            "OF_ELEMENTS": self.of_elements,
            "TOTAL_TYPE": _TYPES[self.totals or torch.float32],
        }


# The tensor holds scores already, which are read.
SCORES = Scoring(torch.float32, 0)


class Job(NamedTuple):
    """What a launch does with one shard.

    Args:
        source: address of weights or of scores.
        blocks: number of blocks, or of scores, there.
        low: lower scores are removed.
        high: scores from ``low`` to it are *within*: they are counted and listed.
        last: blocks within are removed up to this place.
        shift: scores equal above this bit share a bucket.
        scores: address for scores: of all blocks, or of listed ones.
        places: address for the places of listed blocks, int32.
        length: address of the number of blocks listed so far, int32.
        kept: address for the bits of kept blocks.
        dirty: address for the bits of removed blocks that do not score 0.
        listed: address of the places of the scores at ``source``, int32, if they are a list.
        totals: address of the totals of rows or elements.
        per_row: blocks of a row.
        initial, share, most: of the totals, as the bits of float64.
    """

    source: int
    blocks: int
    low: int = 0
    high: int = 0
    last: int = -1
    shift: int = 0
    scores: int = 0
    places: int = 0
    length: int = 0
    kept: int = 0
    dirty: int = 0
    listed: int = 0
    totals: int = 0
    per_row: int = 1
    initial: int = 0
    share: int = 0
    most: int = 0


class Pruning(NamedTuple):
    """What :func:`prune` does with one shard.

    Args:
        weights: address of the weights.
        blocks: number of blocks there.
        kept: address of the bits of kept blocks.
        before: address of the bits of blocks that were kept before.
        dirty: address of the bits of blocks that may not be zero.
    """

    weights: int
    blocks: int
    kept: int
    before: int = 0
    dirty: int = 0


def sweep(
    jobs: Sequence[Job],
    scoring: Scoring,
    device: torch.device,
    buckets: int = 0,
    *,
    from_list: bool = False,
    **does: bool,
) -> Tensor:
    """Compare scores with the limits of their shards. Return for each shard how many blocks are
    removed, and then how many of those within are in each bucket: int64 ``(shards, 1 + buckets)``.

    Args:
        from_list: whether the scores are of listed blocks.
        holds: whether all scores are written.
        lists: whether scores and places of the blocks within are written, in any order.
        packs: whether the bits of kept and of dirty blocks are written; of listed blocks, those of
            removed ones, in the place of bits that say that they are kept.
    """
    counts = torch.zeros(len(jobs), 1 + buckets, dtype=torch.int64, device=device)
    # Counts need no places.
    listed = from_list and any(does.values())
    constants = {
        "BUCKETS": buckets,
        "LISTED": listed,
        "HOLDS": does.get("holds", False),
        "LISTS": does.get("lists", False),
        "PACKS": does.get("packs", False),
        **scoring.constants(),
    }
    _launch(sweep_kernel, jobs, scoring.width, device, counts, **constants)
    return counts


def prune(jobs: Sequence[Pruning], width: int, size: int, device: torch.device) -> None:
    """Write zero to removed blocks: to all, or to those that were kept before or are dirty.

    Args:
        jobs: alike in the addresses that they use.
        width: elements of a block.
        size: bytes of an element.
    """
    constants = {"WORD": WORDS[size], "WIDTH": width, "CHANGED": jobs[0].before != 0}
    _launch(prune_kernel, jobs, width, device, **constants)


def _launch(
    kernel: Any,
    jobs: Sequence[Job] | Sequence[Pruning],
    width: int,
    device: torch.device,
    *outputs: Tensor,
    **constants: Any,
) -> None:
    """Launch a kernel on the current stream: as many programs for each shard as for the largest."""
    lanes = min(max(1, width), _LANES)
    # A byte of bits is of one program.
    at_once = max(8, TILE // lanes)
    constants |= {"FIELDS": len(jobs[0]), "BLOCKS": at_once, "LANES": lanes}
    tiles = -(-max(job.blocks for job in jobs) // at_once)
    programs = min(tiles, -(-_PROGRAMS // len(jobs)))
    table = sent([field for job in jobs for field in job], device)
    # Triton launches on the current device, wherever its arguments are.
    with torch.cuda.device(device):
        # Without fused multiply-adds, which would not round a product before it is added.
        kernel[(programs, len(jobs))](
            table, *outputs, **constants, num_warps=4, enable_fp_fusion=False
        )


def _kernel(function: Callable[..., Any]) -> Any:
    """:func:`triton.jit`, with a type."""
    return triton.jit(function)


@_kernel
def _in_turn(parts: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Return the sums of COUNT neighbouring fours, each first to last."""
    # (0, 1, 2, 3) as ((0, 1), (2, 3)): the last dimension is split twice.
    even, odd = tl.split(tl.reshape(parts, [COUNT, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return ((first + second) + third) + fourth


@_kernel
def _value(job: tl.tensor, at: tl.tensor, inside: tl.tensor, TOTAL_TYPE: tl.constexpr) -> tl.tensor:
    """Return what the totals at some places count for an element, float64."""
    total = tl.load(tl.load(job + 12).to(tl.pointer_type(TOTAL_TYPE)) + at, mask=inside, other=0)
    total = total.to(tl.float64)
    most = tl.load(job + 16).to(tl.float64, bitcast=True)
    # NaN stays.
    total = tl.where(total > most, most, total)
    initial = tl.load(job + 14).to(tl.float64, bitcast=True)
    return (total - initial) / tl.load(job + 15).to(tl.float64, bitcast=True)


@_kernel
def _element(
    job: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    value: tl.tensor,
    TYPE: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    TOTALS: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
) -> tl.tensor:
    """Return scores of elements, float64. ``value`` is what the totals of their rows count."""
    if OF_ELEMENTS:
        value = _value(job, at, inside, TOTAL_TYPE)
    if WEIGHTS:
        weights = tl.load(job).to(tl.pointer_type(TYPE))
        # bfloat16 has no way to float64 of its own.
        score = tl.load(weights + at, mask=inside, other=0).to(tl.float32).to(tl.float64)
        score = tl.abs(score) if ABSOLUTE else score * score
        if TOTALS:
            score *= value + _TINY
    else:
        score = value
    return score


@_kernel
def _scores(
    job: tl.tensor,
    first: tl.tensor,
    blocks: tl.tensor,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    TOTALS: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
) -> tl.tensor:
    """Return the scores of BLOCKS blocks from ``first`` on, as int32."""
    lane = tl.arange(0, BLOCKS * LANES)
    at = first + lane // LANES
    inside = at < blocks
    value = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
    if TOTALS and not OF_ELEMENTS:
        # Once for a block, and then for each of its lanes.
        block = first + tl.arange(0, BLOCKS)
        of_blocks = _value(job, block // tl.load(job + 13), block < blocks, TOTAL_TYPE)
        spread = tl.broadcast_to(of_blocks[:, None], [BLOCKS, LANES])
        value = tl.reshape(spread, [BLOCKS * LANES])
    at = at * WIDTH + lane % LANES
    if WIDTH <= 16:
        # Neighbours in pairs.
        parts = _element(
            job, at, inside, value, TYPE, ABSOLUTE, WEIGHTS, TOTALS, OF_ELEMENTS, TOTAL_TYPE
        )
        if WIDTH >= 16:
            left, right = tl.split(tl.reshape(parts, [BLOCKS * 8, 2]))
            parts = left + right
        if WIDTH >= 8:
            left, right = tl.split(tl.reshape(parts, [BLOCKS * 4, 2]))
            parts = left + right
        if WIDTH >= 4:
            left, right = tl.split(tl.reshape(parts, [BLOCKS * 2, 2]))
            parts = left + right
        if WIDTH >= 2:
            left, right = tl.split(tl.reshape(parts, [BLOCKS, 2]))
            parts = left + right
        sums = parts
    else:
        # As torch.sum with AVX2: each of 16 lanes adds 16 elements in turn, and then the next 16
        # to these; lanes are four accumulators of four, added in turn.
        total = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
        for group in range(0, WIDTH, 256):
            part = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
            for column in range(group, min(group + 256, WIDTH), 16):
                part += _element(
                    job,
                    at + column,
                    inside,
                    value,
                    TYPE,
                    ABSOLUTE,
                    WEIGHTS,
                    TOTALS,
                    OF_ELEMENTS,
                    TOTAL_TYPE,
                )
            total += part
        parts = tl.permute(tl.reshape(total, [BLOCKS, 4, 4]), [0, 2, 1])
        sums = _in_turn(_in_turn(parts, BLOCKS * 4), BLOCKS)
    bits = (sums / WIDTH).to(tl.float32).to(tl.int32, bitcast=True)
    # Negative scores are refused, as NaN is, whatever its sign.
    return tl.where(bits < 0, 0x7FFFFFFF, bits)


@_kernel
def _tally(
    buckets: tl.tensor, counted: tl.tensor, BUCKETS: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Return how many of the ``counted`` blocks are in each bucket, int32 ``(BUCKETS,)``."""
    # In the first bucket and taken out again: older histograms take no mask.
    tally = tl.histogram(tl.where(counted, buckets, 0), BUCKETS)
    missing = BLOCKS - tl.sum(counted.to(tl.int32))
    return tally - tl.where(tl.arange(0, BUCKETS) == 0, missing, 0)


@_kernel
def _pack(
    address: tl.tensor,
    first: tl.tensor,
    blocks: tl.tensor,
    flags: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """Store flags as bits, from that of the block ``first`` on."""
    weighted = tl.reshape(flags.to(tl.int32), [BLOCKS // 8, 8]) << tl.arange(0, 8)[None, :]
    byte = first // 8 + tl.arange(0, BLOCKS // 8)
    packed = tl.sum(weighted, 1).to(tl.uint8)
    tl.store(address.to(tl.pointer_type(tl.uint8)) + byte, packed, mask=byte * 8 < blocks)


@_kernel
def _unpacked(
    address: tl.tensor, first: tl.tensor, blocks: tl.tensor, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Return the bits of BLOCKS blocks from ``first`` on, int32."""
    byte = first // 8 + tl.arange(0, BLOCKS // 8)
    read = tl.load(address.to(tl.pointer_type(tl.uint8)) + byte, mask=byte * 8 < blocks, other=0)
    return tl.reshape((read.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1, [BLOCKS])


@_kernel
def _ints(field: tl.tensor) -> tl.tensor:
    """Return the address in a field of a job, of int32."""
    return tl.load(field).to(tl.pointer_type(tl.int32))


@_kernel
def sweep_kernel(
    jobs: tl.tensor,
    counts: tl.tensor,
    FIELDS: tl.constexpr,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    TOTALS: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
    BUCKETS: tl.constexpr,
    LISTED: tl.constexpr,
    HOLDS: tl.constexpr,
    LISTS: tl.constexpr,
    PACKS: tl.constexpr,
) -> None:
    """Compare the scores of one shard with its limits. The numbers added to ``job`` are the places
    of the fields of :class:`Job`."""
    job = jobs + tl.program_id(1) * FIELDS
    blocks = tl.load(job + 1)
    low, high, last = tl.load(job + 2), tl.load(job + 3), tl.load(job + 4)
    shift = tl.load(job + 5).to(tl.int32)
    removed = tl.full([], 0, dtype=tl.int64)
    tally = tl.zeros([BUCKETS if BUCKETS else 1], dtype=tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    for first in range(start, blocks, tl.num_programs(0) * BLOCKS):
        at = first + tl.arange(0, BLOCKS)
        inside = at < blocks
        if WIDTH == 0:
            bits = tl.load(_ints(job) + at, mask=inside, other=0)
        else:
            bits = _scores(
                job,
                first,
                blocks,
                TYPE,
                WIDTH,
                BLOCKS,
                LANES,
                ABSOLUTE,
                WEIGHTS,
                TOTALS,
                OF_ELEMENTS,
                TOTAL_TYPE,
            )
        place = at
        if LISTED:
            place = tl.load(_ints(job + 11) + at, mask=inside, other=0).to(tl.int64)
        if HOLDS:
            tl.store(_ints(job + 6) + at, bits, mask=inside)
        within = inside & (bits >= low) & (bits <= high)
        gone = inside & ((bits < low) | (within & (place <= last)))
        removed += tl.sum(gone.to(tl.int32))
        if BUCKETS:
            tally += _tally((bits >> shift) & (BUCKETS - 1), within, BUCKETS, BLOCKS)
        if LISTS:
            found = tl.sum(within.to(tl.int32))
            # In no order: all that is read from a list is counts, places and bits.
            to = tl.atomic_add(_ints(job + 8), found) + tl.cumsum(within.to(tl.int32), 0) - 1
            tl.store(_ints(job + 6) + to, bits, mask=within)
            tl.store(_ints(job + 7) + to, place.to(tl.int32), mask=within)
        if PACKS and LISTED:
            # Words of 32 bits: there is no atomic operation on bytes.
            bit = tl.full([BLOCKS], 1, dtype=tl.int32) << (place & 31).to(tl.int32)
            tl.atomic_and(_ints(job + 9) + (place >> 5), ~bit, mask=gone)
            tl.atomic_or(_ints(job + 10) + (place >> 5), bit, mask=gone)
        elif PACKS:
            _pack(tl.load(job + 9), first, blocks, inside & ~gone, BLOCKS)
            _pack(tl.load(job + 10), first, blocks, gone & (bits != 0), BLOCKS)
    counts += tl.program_id(1) * (1 + BUCKETS)
    tl.atomic_add(counts, removed)
    if BUCKETS:
        bucket = tl.arange(0, BUCKETS)
        tl.atomic_add(counts + 1 + bucket, tally.to(tl.int64), mask=tally > 0)


@_kernel
def prune_kernel(
    jobs: tl.tensor,
    FIELDS: tl.constexpr,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    CHANGED: tl.constexpr,
) -> None:
    """Zero removed blocks of one shard. The numbers added to ``job`` are the places of the fields
    of :class:`Pruning`."""
    job = jobs + tl.program_id(1) * FIELDS
    weights = tl.load(job).to(tl.pointer_type(WORD))
    blocks = tl.load(job + 1)
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    for first in range(start, blocks, tl.num_programs(0) * BLOCKS):
        place = first + tl.arange(0, BLOCKS)
        gone = (place < blocks) & (_unpacked(tl.load(job + 2), first, blocks, BLOCKS) == 0)
        if CHANGED:
            before = _unpacked(tl.load(job + 3), first, blocks, BLOCKS)
            gone &= (before | _unpacked(tl.load(job + 4), first, blocks, BLOCKS)) != 0
        block = (weights + place * WIDTH)[:, None]
        for column in range(0, WIDTH, LANES):
            words = block + column + tl.arange(0, LANES)[None, :]
            tl.store(words, tl.zeros([BLOCKS, LANES], dtype=WORD), mask=gone[:, None])
