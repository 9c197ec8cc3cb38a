"""Triton kernels of mask updates, for shards that are flat sequences of equal blocks.

Each call is one launch for all of its shards. A program processes tiles of one shard in turn, and
adds its counts to the shard's counters once, at the end.

Scores equal the CPU's bit for bit. Squares of elements of up to 32 bits are exact in float64. Other
products are rounded before they are added (no fused multiply-add). Sums are in the order of
:func:`~dist_sparse.masking.scores.block_sums`.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_sparse.records import TINY
from dist_sparse.tables.shards import sent

# Wider blocks are summed in this many partial sums, as torch.sum does with AVX2.
_LANES = 16

# Triton's types of weights and totals.
_TYPES: dict[torch.dtype | None, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
}

# Kernels can read a global only if it is a constexpr.
_TINY = tl.constexpr(TINY)

# Types by bytes of an element. Zero has the same bits in every type of one size.
WORDS = {2: tl.int16, 4: tl.int32, 8: tl.int64}

# Most programs of a launch, approximately: 8 for each multiprocessor of an H200.
_PROGRAMS = 1024

# Elements, or scores, in the tile of a program: 16 for each thread of its 4 warps. Tests set a
# larger tile, because Triton's interpreter takes as long for one of any size.
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
        """Return what a kernel that scores is compiled for. A type is None where weights, or
        totals, do not count."""
        return {
            "TYPE": _TYPES[self.dtype] if self.weights else None,
            "WIDTH": self.width,
            "ABSOLUTE": self.absolute,
            "OF_ELEMENTS": self.of_elements,
            "TOTAL_TYPE": _TYPES.get(self.totals),
        }


# The tensor holds scores already, which are read.
SCORES = Scoring(torch.float32, 0)


class Job(NamedTuple):
    """What a launch does with one shard: a row of int64 in the table that the kernel reads. Kernels
    read fields by their position, so their order is fixed.

    Args:
        source: address of the weights or scores to read.
        blocks: number of blocks, or of scores, there.
        low: blocks with a lower score are removed.
        high: scores from ``low`` to ``high`` are *within*: they are counted and listed.
        last: blocks within are removed up to this place.
        shift: scores that differ only below this bit share a bucket.
        scores: address to write scores to: of all blocks, or of listed ones.
        places: address to write the places of listed blocks to, int32.
        length: address of the number of blocks listed so far, int32.
        kept: address to write the bits of kept blocks to.
        dirty: address to write the bits of removed blocks that do not score 0 to.
        listed: address of the places of the scores at ``source``, int32, if these are a list.
        totals: address of the totals of rows or elements.
        per_row: number of blocks in a row.
        initial, share, most: fields of :class:`~dist_sparse.masking.scores.RowTotals`, as the bits
            of float64.
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
    """What :func:`prune` does with one shard, a row of int64 as :class:`Job`.

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
    """Compare scores with the limits of their shards. Return for each shard the number of removed
    blocks, then the number of blocks within for each bucket: int64 ``(shards, 1 + buckets)``.

    Args:
        from_list: the scores are of listed blocks.
        holds: write all scores.
        lists: write scores and places of the blocks within, in any order.
        packs: write the bits of kept and of dirty blocks. Listed blocks have the bits of kept ones
            so far: only the bits of removed ones change.
    """
    counts = torch.zeros(len(jobs), 1 + buckets, dtype=torch.int64, device=device)
    # A launch that only counts needs no places.
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
    """Launch a kernel on the current stream, with as many programs for each shard as for the
    largest."""
    lanes = min(max(1, width), _LANES)
    # At least 8, so that no two programs write flags of one byte.
    at_once = max(8, TILE // lanes)
    constants |= {"FIELDS": len(jobs[0]), "BLOCKS": at_once, "LANES": lanes}
    tiles = -(-max(job.blocks for job in jobs) // at_once)
    programs = min(tiles, -(-_PROGRAMS // len(jobs)))
    table = sent([*chain(*jobs)], device)
    # Triton launches on the current device, wherever its arguments are.
    with torch.cuda.device(device):
        # No fused multiply-adds: they would not round a product before it is added.
        kernel[(programs, len(jobs))](
            table, *outputs, **constants, num_warps=4, enable_fp_fusion=False
        )


def _kernel(function: Callable[..., Any]) -> Any:
    """Return a function compiled by :func:`triton.jit`, typed for mypy."""
    return triton.jit(function)


@_kernel
def _in_turn(parts: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Return the sums of COUNT groups of four neighbours, each added from first to last."""
    # tl.split() takes a last dimension of 2: (0, 1, 2, 3) is split as ((0, 1), (2, 3)).
    even, odd = tl.split(tl.reshape(parts, [COUNT, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return ((first + second) + third) + fourth


@_kernel
def _value(job: tl.tensor, at: tl.tensor, inside: tl.tensor, TOTAL_TYPE: tl.constexpr) -> tl.tensor:
    """Return the value of an element by the totals at some places, float64: as
    :meth:`~dist_sparse.masking.scores.RowTotals.of_rows`."""
    total = tl.load(tl.load(job + 12).to(tl.pointer_type(TOTAL_TYPE)) + at, mask=inside, other=0)
    total = total.to(tl.float64)
    most = tl.load(job + 16).to(tl.float64, bitcast=True)
    # tl.minimum() may drop a NaN, which must be refused.
    total = tl.where(total > most, most, total)
    initial = tl.load(job + 14).to(tl.float64, bitcast=True)
    return (total - initial) / tl.load(job + 15).to(tl.float64, bitcast=True)


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
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
) -> tl.tensor:
    """Return the scores of BLOCKS blocks from ``first`` on, as int32."""
    lane = tl.arange(0, BLOCKS * LANES)
    at = first + lane // LANES
    inside = at < blocks
    value = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
    if TOTAL_TYPE is not None and not OF_ELEMENTS:
        # Loaded once for each block, and copied to its lanes.
        block = first + tl.arange(0, BLOCKS)
        of_blocks = _value(job, block // tl.load(job + 13), block < blocks, TOTAL_TYPE)
        spread = tl.broadcast_to(of_blocks[:, None], [BLOCKS, LANES])
        value = tl.reshape(spread, [BLOCKS * LANES])
    at = at * WIDTH + lane % LANES
    # Wide blocks in the order of torch.sum with AVX2: each of 16 lanes adds 16 elements in turn,
    # and then adds the sum of the next 16. A lane of a narrow block has one element.
    total = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
    for group in range(0, WIDTH, 256):
        part = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
        for column in range(group, min(group + 256, WIDTH), 16):
            if OF_ELEMENTS:
                value = _value(job, at + column, inside, TOTAL_TYPE)
            score = value
            if TYPE is not None:
                weights = tl.load(job).to(tl.pointer_type(TYPE)) + at + column
                # Through float32: Triton does not convert bfloat16 to float64.
                score = tl.load(weights, mask=inside, other=0).to(tl.float32).to(tl.float64)
                score = tl.abs(score) if ABSOLUTE else score * score
                if TOTAL_TYPE is not None:
                    score *= value + _TINY
            part += score
        total += part
    if WIDTH <= 16:
        # Neighbours in pairs: 16, 8, 4, 2 sums become 8, 4, 2, 1. Unrolled, as shapes change.
        sums = total
        for level in tl.static_range(4):
            if (8 >> level) < WIDTH:
                left, right = tl.split(tl.reshape(sums, [BLOCKS * (8 >> level), 2]))
                sums = left + right
    else:
        # The lanes are four accumulators of four, added in turn.
        parts = tl.permute(tl.reshape(total, [BLOCKS, 4, 4]), [0, 2, 1])
        sums = _in_turn(_in_turn(parts, BLOCKS * 4), BLOCKS)
    bits = (sums / WIDTH).to(tl.float32).to(tl.int32, bitcast=True)
    # Negative scores, and NaN with either sign, become a NaN that the histogram counts as refused.
    return tl.where(bits < 0, 0x7FFFFFFF, bits)


@_kernel
def _pack(
    address: tl.tensor,
    first: tl.tensor,
    blocks: tl.tensor,
    flags: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """Store the flags of BLOCKS blocks from ``first`` on, a bit each."""
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
    """Return the pointer to int32 in a field of a job."""
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
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
    BUCKETS: tl.constexpr,
    LISTED: tl.constexpr,
    HOLDS: tl.constexpr,
    LISTS: tl.constexpr,
    PACKS: tl.constexpr,
) -> None:
    """Compare the scores of one shard with its limits; see :func:`sweep`. The numbers added to
    ``job`` are the positions of fields of :class:`Job`."""
    job = jobs + tl.program_id(1) * FIELDS
    blocks = tl.load(job + 1)
    low, high, last = tl.load(job + 2), tl.load(job + 3), tl.load(job + 4)
    shift = tl.load(job + 5).to(tl.int32)
    removed = tl.full([], 0, dtype=tl.int64)
    tally = tl.zeros([BUCKETS if BUCKETS else 1], dtype=tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    for first in range(start, blocks, tl.num_programs(0) * BLOCKS):
        # 1. Score, or read scores.
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
                OF_ELEMENTS,
                TOTAL_TYPE,
            )
        place = at
        if LISTED:
            place = tl.load(_ints(job + 11) + at, mask=inside, other=0).to(tl.int64)
        if HOLDS:
            tl.store(_ints(job + 6) + at, bits, mask=inside)
        # 2. Compare and count.
        within = inside & (bits >= low) & (bits <= high)
        removes = inside & ((bits < low) | (within & (place <= last)))
        removed += tl.sum(removes.to(tl.int32))
        if BUCKETS:
            # Other blocks count in the first bucket, and are subtracted again: tl.histogram()
            # takes a mask only in newer releases of Triton.
            buckets = tl.where(within, (bits >> shift) & (BUCKETS - 1), 0)
            others = BLOCKS - tl.sum(within.to(tl.int32))
            tally += tl.histogram(buckets, BUCKETS)
            tally -= tl.where(tl.arange(0, BUCKETS) == 0, others, 0)
        if LISTS:
            # One atomic operation reserves room for the tile. So the order of tiles varies, but
            # readers of a list need only counts, places and bits.
            found = tl.sum(within.to(tl.int32))
            to = tl.atomic_add(_ints(job + 8), found) + tl.cumsum(within.to(tl.int32), 0) - 1
            tl.store(_ints(job + 6) + to, bits, mask=within)
            tl.store(_ints(job + 7) + to, place.to(tl.int32), mask=within)
        if PACKS:
            # 3. Write the bits of kept and of dirty blocks.
            if LISTED:
                # Other programs write bits of the same byte: atomically, in words of 32 bits, as
                # there is no atomic operation on bytes. No listed block scores 0, so every removed
                # one is dirty.
                bit = tl.full([BLOCKS], 1, dtype=tl.int32) << (place & 31).to(tl.int32)
                tl.atomic_and(_ints(job + 9) + (place >> 5), ~bit, mask=removes)
                tl.atomic_or(_ints(job + 10) + (place >> 5), bit, mask=removes)
            else:
                _pack(tl.load(job + 9), first, blocks, inside & ~removes, BLOCKS)
                _pack(tl.load(job + 10), first, blocks, removes & (bits != 0), BLOCKS)
    # 4. Add the counts of all tiles: once, as additions to one address wait for each other.
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
    """Zero removed blocks of one shard. The numbers added to ``job`` are the positions of fields of
    :class:`Pruning`."""
    job = jobs + tl.program_id(1) * FIELDS
    weights = tl.load(job).to(tl.pointer_type(WORD))
    blocks = tl.load(job + 1)
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    for first in range(start, blocks, tl.num_programs(0) * BLOCKS):
        place = first + tl.arange(0, BLOCKS)
        removed = (place < blocks) & (_unpacked(tl.load(job + 2), first, blocks, BLOCKS) == 0)
        if CHANGED:
            before = _unpacked(tl.load(job + 3), first, blocks, BLOCKS)
            removed &= (before | _unpacked(tl.load(job + 4), first, blocks, BLOCKS)) != 0
        block = (weights + place * WIDTH)[:, None]
        for column in range(0, WIDTH, LANES):
            words = block + column + tl.arange(0, LANES)[None, :]
            tl.store(words, tl.zeros([BLOCKS, LANES], dtype=WORD), mask=removed[:, None])
