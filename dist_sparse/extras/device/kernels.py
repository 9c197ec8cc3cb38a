"""Triton kernels of mask updates, for shards that are flat sequences of equal blocks.

Each call is one launch for all of its shards, with programs in proportion to their sizes. A program
processes tiles of one shard in turn. It adds its counts to the shard's counters once, at the end;
only histograms take an atomic addition for each block, so the kernel that reads all weights of
narrow blocks has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from dist_sparse.extras.device.score_kernels import block_sums, kernel, own_job, score_bits
from dist_sparse.masking.scores import NOT_FINITE
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
_NOT_FINITE = tl.constexpr(NOT_FINITE)

# Types by bytes of an element. Zero has the same bits in every type of one size.
WORDS = {2: tl.int16, 4: tl.int32, 8: tl.int64}

# Most programs of a launch, approximately: some ten rounds on the multiprocessors of an H200, so
# that the last round costs little. Small shards get one each beyond that.
PROGRAMS = 8192

# Most copies of the histograms of a launch, and the blocks that share one: atomic additions to one
# address wait for each other.
_COPIES = 256
_SHARED = 1 << 17

# Elements, or scores, in the tile of a program: 16 for each thread of its 4 warps. Tests set a
# larger tile, because Triton's interpreter takes as long for one of any size.
TILE = 2048


class Scoring(NamedTuple):
    """How blocks are scored, alike in all shards of a launch.

    Args:
        dtype: of the weights.
        width: elements of a block, all of one row; up to 16, a power of two or three times one. 0
            where scores are read instead of weights.
        absolute: whether absolute values of elements count, not their squares.
        weights: whether elements count at all; else only their totals do.
        totals: the type of totals, if they count.
        of_elements: whether each element has a total of its own, not each row.
        divides: whether several elements share a total.
        shifts: whether ``per_row`` of the jobs are binary logarithms: a division takes many more
            instructions.
    """

    dtype: torch.dtype
    width: int
    absolute: bool = False
    weights: bool = True
    totals: torch.dtype | None = None
    of_elements: bool = False
    divides: bool = False
    shifts: bool = False

    def constants(self) -> dict[str, Any]:
        """Return what a kernel that scores is compiled for. A type is None where weights, or
        totals, do not count."""
        return {
            "TYPE": _TYPES[self.dtype] if self.weights else None,
            "WIDTH": self.width,
            "ABSOLUTE": self.absolute,
            "OF_ELEMENTS": self.of_elements,
            "TOTAL_TYPE": _TYPES.get(self.totals),
            "DIVIDES": self.divides,
            "SHIFTS": self.shifts,
        }

    def vector(self, jobs: Sequence[Job]) -> int:
        """Return how many elements one load reads: 16 bytes of them if all addresses are multiples
        of 16, else one."""
        read = [job.source for job in jobs]
        sizes = [self.dtype.itemsize]
        if self.of_elements and self.totals is not None:
            read += [job.totals for job in jobs]
            sizes.append(self.totals.itemsize)
        return 16 // max(sizes) if all(address % 16 == 0 for address in read) else 1


# The tensor holds scores already, which are read.
SCORES = Scoring(torch.float32, 0)


class Job(NamedTuple):
    """What a launch does with one shard: a row of int64 in the table that the kernel reads. Kernels
    read fields by their position, so their order is fixed.

    Args:
        source: address of the weights or scores to read.
        blocks: number of blocks, or of scores, there; the size of a sample.
        low: blocks with a lower score are removed.
        high: scores from ``low`` to ``high`` are *within*: they are counted and listed.
        last: blocks within are removed up to this place.
        shift: scores that differ only below this bit share a bucket.
        scores: address to write scores to, of all blocks or of listed ones; or float64 sums to.
        places: address of the places of listed blocks, int32.
        lengths: address of the number of blocks that each program has listed, int32.
        capacity: number of blocks that a program may list.
        kept: address to write the bits of kept blocks to.
        dirty: address to write the bits of removed blocks that do not score 0 to.
        totals: address of the totals of rows or elements.
        per_row: number of blocks in a row, or its binary logarithm if the kernel shifts.
        initial, share, most: fields of :class:`~dist_sparse.masking.scores.RowTotals`, as the bits
            of float64.
        stride: blocks that one block of a sample stands for.
        ties: address to write the places of blocks within to, int32, in any order.
        tied: address of their number, int32.
        room: number of places there.
        first: number of the first program of the shard; set at the launch.
        programs: number of programs of the shard; set at the launch if 0.
        whole: number of elements of a whole block, of which the shard has a part.
    """

    source: int
    blocks: int
    low: int = 0
    high: int = 0
    last: int = -1
    shift: int = 0
    scores: int = 0
    places: int = 0
    lengths: int = 0
    capacity: int = 0
    kept: int = 0
    dirty: int = 0
    totals: int = 0
    per_row: int = 1
    initial: int = 0
    share: int = 0
    most: int = 0
    stride: int = 1
    ties: int = 0
    tied: int = 0
    room: int = 0
    first: int = 0
    programs: int = 0
    whole: int = 0


class Pruning(NamedTuple):
    """What :func:`prune` does with one shard, a row of int64 as :class:`Job`.

    Args:
        weights: address of the weights.
        blocks: number of blocks there.
        kept: address of the bits of kept blocks.
        before: address of the bits of blocks that were kept before.
        dirty: address of the bits of blocks that may not be zero.
        first, programs: as in :class:`Job`.
    """

    weights: int
    blocks: int
    kept: int
    before: int = 0
    dirty: int = 0
    first: int = 0
    programs: int = 0


class Swept(NamedTuple):
    """What a launch has counted, on the device.

    Args:
        counts: int64 ``(shards, 5)``: removed blocks, blocks that score 0, whether a score is
            refused (not 0), blocks within, and listed blocks for which there was no room. None if
            the launch does not count them.
        tally: integers ``(shards, 1 + buckets)``: blocks within that score 0, then the others by
            bucket. None without buckets.
    """

    counts: Tensor | None
    tally: Tensor | None


def programs_for(blocks: Sequence[int], width: int) -> list[int]:
    """Return how many programs each shard gets that has this many blocks: in proportion to them,
    at least one.

    Args:
        width: elements of a block.
    """
    tiles = [-(-each // _at_once(width)) for each in blocks]
    # Lists without room have no tiles.
    total = max(1, sum(tiles))
    return [max(1, min(each, each * PROGRAMS // total)) for each in tiles]


def copies_for(jobs: int, blocks: int) -> int:
    """Return how many copies a launch has of the histogram of each shard: a power of two. Triton
    compiles a kernel for each, and sizes of lists change in every mask update.

    Args:
        jobs: number of shards.
        blocks: of the largest one.
    """
    copies = max(1, min(_COPIES // jobs, blocks // _SHARED))
    return 1 << (copies.bit_length() - 1)


def sweep(
    jobs: Sequence[Job],
    scoring: Scoring,
    device: torch.device,
    buckets: int = 0,
    *,
    from_list: bool = False,
    **does: bool,
) -> Swept:
    """Compare scores with the limits of their shards, and return the counts.

    Args:
        from_list: the scores are of listed blocks.
        samples: read one block in each ``stride``, not all.
        holds: write all scores.
        lists: write scores and places of the blocks within: each program in a region of its own.
        ties: write the places of the blocks within, in one list.
        packs: write the bits of kept and of dirty blocks. Listed blocks have the bits of kept ones
            so far: only the bits of removed ones change.
        counts: count, without buckets.
    """
    copies = copies_for(len(jobs), max(job.blocks for job in jobs)) if buckets else 1
    size = (copies, 1 + buckets) if buckets else (5,)
    dtype = torch.int32 if buckets else torch.int64
    output = None
    if buckets or does.get("counts"):
        output = torch.zeros(len(jobs), *size, dtype=dtype, device=device)
    constants = {
        "BUCKETS": buckets,
        "COPIES": copies,
        "LISTED": from_list,
        "PLACED": from_list and not buckets,
        **{name.upper(): does.get(name, False) for name in _DOES},
        "VECTOR": scoring.vector(jobs),
        **scoring.constants(),
    }
    _launch(sweep_kernel, jobs, scoring.width, device, output, **constants)
    if output is None or not buckets:
        return Swept(output, None)
    return Swept(None, output.sum(1) if copies > 1 else output[:, 0])


def add_up(jobs: Sequence[Job], scoring: Scoring, device: torch.device) -> Tensor:
    """Write the sums of parts of blocks. Return the largest score of a part, int64 ``(1,)``: as if
    the rest of its block were 0. A negative one counts as NaN."""
    most = torch.zeros(1, dtype=torch.int64, device=device)
    constants = {"VECTOR": scoring.vector(jobs), **scoring.constants()}
    _launch(sums_kernel, jobs, scoring.width, device, most, **constants)
    return most


# What a sweep can do.
_DOES = ("samples", "holds", "lists", "ties", "packs", "counts")


def prune(jobs: Sequence[Pruning], width: int, size: int, device: torch.device) -> None:
    """Write zero to removed blocks: to all, or to those that were kept before or are dirty.

    Args:
        jobs: alike in the addresses that they use.
        width: elements of a block.
        size: bytes of an element.
    """
    aligned = all(job.weights % 16 == 0 for job in jobs)
    constants = {"WORD": WORDS[size], "WIDTH": width, "CHANGED": jobs[0].before != 0}
    _launch(prune_kernel, jobs, width, device, **constants, ALIGNED=aligned)


def _at_once(width: int) -> int:
    """Return how many blocks of a width a program looks at together."""
    # At least 8, so that no two programs write flags of one byte. At most 8 for each thread, which
    # keeps several registers for each.
    return max(8, TILE // max(2, lanes_for(width)))


def lanes_for(width: int) -> int:
    """Return how many elements of a block a program looks at together, a power of two."""
    return min(1 << (max(1, width) - 1).bit_length(), _LANES)


def _launch(
    launched: Any,
    jobs: Sequence[Any],
    width: int,
    device: torch.device,
    *outputs: Tensor | None,
    **constants: Any,
) -> None:
    """Launch a kernel on the current stream: one row of programs over all shards."""
    shares = programs_for([job.blocks for job in jobs], width)
    numbered, programs = [], 0
    for job, share in zip(jobs, shares, strict=True):
        # Readers of a list have the programs that wrote it.
        share = job.programs or share
        numbered.append(job._replace(first=programs, programs=share))
        programs += share
    constants |= {
        "FIELDS": len(jobs[0]),
        "STEPS": (len(jobs) - 1).bit_length(),
        "BLOCKS": _at_once(width),
        "LANES": lanes_for(width),
    }
    table = sent([*chain(*numbered)], device)
    # Triton launches on the current device, wherever its arguments are.
    with torch.cuda.device(device):
        # No fused multiply-adds: they would not round a product before it is added.
        launched[(programs,)](
            table, len(jobs), *outputs, **constants, num_warps=4, enable_fp_fusion=False
        )


@kernel
def _pack(
    job: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    kept: tl.tensor,
    dirty: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """Store the flags of ``left`` blocks, at most BLOCKS, from ``first`` on, a bit each."""
    # Both are added up in one sum: a byte of each.
    both = tl.reshape(kept.to(tl.int32) | (dirty.to(tl.int32) << 8), [BLOCKS // 8, 8])
    packed = tl.sum(both << tl.arange(0, 8)[None, :], 1)
    byte = tl.arange(0, BLOCKS // 8)
    for_kept = tl.load(job + 10).to(tl.pointer_type(tl.uint8)) + first // 8
    for_dirty = tl.load(job + 11).to(tl.pointer_type(tl.uint8)) + first // 8
    tl.store(for_kept + byte, packed.to(tl.uint8), mask=byte * 8 < left)
    tl.store(for_dirty + byte, (packed >> 8).to(tl.uint8), mask=byte * 8 < left)


@kernel
def _bytes(
    address: tl.tensor, first: tl.tensor, left: tl.tensor, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Return the packed bits of ``left`` blocks, at most BLOCKS, from ``first`` on, int32."""
    byte = tl.arange(0, BLOCKS // 8)
    bits = address.to(tl.pointer_type(tl.uint8)) + first // 8
    return tl.load(bits + byte, mask=byte * 8 < left, other=0).to(tl.int32)


@kernel
def _ints(field: tl.tensor) -> tl.tensor:
    """Return the pointer to int32 in a field of a job."""
    return tl.load(field).to(tl.pointer_type(tl.int32))


@kernel
def _left(blocks: tl.tensor, first: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Return how many blocks a tile has that begins with the block ``first``, int32."""
    return tl.minimum(blocks - first, BLOCKS).to(tl.int32)


@kernel
def _add(counter: tl.tensor, number: tl.tensor) -> None:
    """Add a number to a counter."""
    tl.atomic_add(counter, number.to(tl.int64), sem="relaxed")


@kernel
def _read(
    job: tl.tensor,
    first: tl.tensor,
    region: tl.tensor,
    left: tl.tensor,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
    DIVIDES: tl.constexpr,
    SHIFTS: tl.constexpr,
    SAMPLES: tl.constexpr,
    VECTOR: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the scores of a tile, int32: of weights, or as they are held or listed."""
    if WIDTH > 0:
        sums = block_sums(
            job,
            first,
            left,
            TYPE,
            WIDTH,
            BLOCKS,
            LANES,
            ABSOLUTE,
            OF_ELEMENTS,
            TOTAL_TYPE,
            DIVIDES,
            SHIFTS,
            SAMPLES,
            VECTOR,
        )
        # The same for a power of two, without a division.
        bits = score_bits(sums * (1.0 / WIDTH) if WIDTH & (WIDTH - 1) == 0 else sums / WIDTH)
    else:
        each = tl.arange(0, BLOCKS)
        scores = _ints(job) + first
        if LISTED:
            scores += region
        bits = tl.load(scores + each, mask=each < left, other=0)
    return bits


@kernel
def _list_ties(job: tl.tensor, within: tl.tensor, place: tl.tensor) -> None:
    """Add the places of the blocks within to the list that all programs of a shard share."""
    tied = within.to(tl.int32)
    number = tl.sum(tied)
    # One atomic operation reserves room for the tile: few tiles have ties.
    if number > 0:
        to = tl.atomic_add(_ints(job + 19), number, sem="relaxed") + tl.cumsum(tied, 0) - 1
        fits = within & (to < tl.load(job + 20).to(tl.int32))
        tl.store(_ints(job + 18) + to, place, mask=fits)


@kernel
def _write_bits(
    job: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    place: tl.tensor,
    removes: tl.tensor,
    inside: tl.tensor,
    bits: tl.tensor,
    BLOCKS: tl.constexpr,
    LISTED: tl.constexpr,
) -> None:
    """Write the bits of kept and of dirty blocks of a tile."""
    if LISTED:
        # Other programs write bits of the same byte: atomically, in words of 32 bits, as there is
        # no atomic operation on bytes. No listed block scores 0, so every removed one is dirty.
        bit = tl.full([BLOCKS], 1, dtype=tl.int32) << (place & 31)
        tl.atomic_and(_ints(job + 10) + (place >> 5), ~bit, mask=removes, sem="relaxed")
        tl.atomic_or(_ints(job + 11) + (place >> 5), bit, mask=removes, sem="relaxed")
    else:
        _pack(job, first, left, inside & ~removes, removes & (bits != 0), BLOCKS)


@kernel
def sweep_kernel(
    jobs: tl.tensor,
    count: tl.tensor,
    counts: tl.tensor,
    FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
    DIVIDES: tl.constexpr,
    SHIFTS: tl.constexpr,
    VECTOR: tl.constexpr,
    BUCKETS: tl.constexpr,
    COPIES: tl.constexpr,
    LISTED: tl.constexpr,
    PLACED: tl.constexpr,
    SAMPLES: tl.constexpr,
    HOLDS: tl.constexpr,
    LISTS: tl.constexpr,
    TIES: tl.constexpr,
    PACKS: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    """Compare the scores of one shard with its limits; see :func:`sweep`. The numbers added to
    ``job`` are the positions of fields of :class:`Job`."""
    number = own_job(jobs, count, FIELDS, 21, STEPS)
    job = jobs + number * FIELDS
    blocks = tl.load(job + 1)
    low, high = tl.load(job + 2).to(tl.int32), tl.load(job + 3).to(tl.int32)
    last = tl.load(job + 4).to(tl.int32)
    program, programs = tl.program_id(0) - tl.load(job + 21), tl.load(job + 22)
    start, stride = program * BLOCKS, programs * BLOCKS
    region = program * tl.load(job + 9)
    if LISTED:
        # The program reads what the same program has listed.
        start, stride = start * 0, stride * 0 + BLOCKS
        blocks = tl.load(_ints(job + 8) + program).to(tl.int64)
    # Sums of the tiles, in registers: to add up a tile would take a barrier.
    removed = tl.zeros([BLOCKS], dtype=tl.int32)
    zeros = tl.zeros([BLOCKS], dtype=tl.int32)
    most = tl.zeros([BLOCKS], dtype=tl.int32)
    found = tl.zeros([BLOCKS], dtype=tl.int32)
    length = tl.full([], 0, dtype=tl.int32)
    each = tl.arange(0, BLOCKS)
    for first in range(start, blocks, stride):
        left = _left(blocks, first, BLOCKS)
        inside = each < left
        # 1. Score, or read scores.
        bits = _read(
            job,
            first,
            region,
            left,
            TYPE,
            WIDTH,
            BLOCKS,
            LANES,
            ABSOLUTE,
            OF_ELEMENTS,
            TOTAL_TYPE,
            DIVIDES,
            SHIFTS,
            SAMPLES,
            VECTOR,
            LISTED,
        )
        place = (first + each).to(tl.int32)
        if PLACED:
            place = tl.load(_ints(job + 7) + (region + first) + each, mask=inside, other=0)
        if HOLDS:
            tl.store(_ints(job + 6) + first + each, bits, mask=inside)
        # 2. Compare and count.
        within = inside & (bits >= low) & (bits <= high)
        removes = inside & ((bits < low) | (within & (place <= last)))
        if BUCKETS:
            bucket = 1 + ((bits >> tl.load(job + 5).to(tl.int32)) & (BUCKETS - 1))
            own = counts + (number * COPIES + program % COPIES) * (1 + BUCKETS)
            at = tl.where(bits == 0, 0, bucket)
            tl.atomic_add(own + at, 1, mask=within, sem="relaxed")
        if COUNTS:
            removed += removes.to(tl.int32)
            zeros += (inside & (bits == 0)).to(tl.int32)
            most = tl.maximum(most, tl.where(inside, bits, 0))
            found += within.to(tl.int32)
        # 3. List blocks, and write the bits of kept and of dirty ones.
        if LISTS:
            listed = within.to(tl.int32)
            to = length + tl.cumsum(listed, 0) - 1
            length += tl.sum(listed)
            fits = within & (to < tl.load(job + 9).to(tl.int32))
            tl.store(_ints(job + 6) + region + to, bits, mask=fits)
            tl.store(_ints(job + 7) + region + to, place, mask=fits)
        if TIES:
            _list_ties(job, within, place)
        if PACKS:
            _write_bits(job, first, left, place, removes, inside, bits, BLOCKS, LISTED)
    # 4. Add the counts of all tiles: once, as additions to one address wait for each other.
    if COUNTS:
        own = counts + number * 5
        _add(own, tl.sum(removed))
        _add(own + 1, tl.sum(zeros))
        _add(own + 2, (tl.max(most) >= _NOT_FINITE).to(tl.int32))
        _add(own + 3, tl.sum(found))
    if LISTS:
        capacity = tl.load(job + 9).to(tl.int32)
        tl.store(_ints(job + 8) + program, tl.minimum(length, capacity))
        _add(counts + number * 5 + 4, tl.maximum(length - capacity, 0))


@kernel
def sums_kernel(
    jobs: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
    DIVIDES: tl.constexpr,
    SHIFTS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Write the sums of one shard; see :func:`add_up`. The numbers added to ``job`` are the
    positions of fields of :class:`Job`."""
    job = jobs + own_job(jobs, count, FIELDS, 21, STEPS) * FIELDS
    blocks = tl.load(job + 1)
    program, programs = tl.program_id(0) - tl.load(job + 21), tl.load(job + 22)
    to = tl.load(job + 6).to(tl.pointer_type(tl.float64))
    whole = tl.load(job + 23).to(tl.float64)
    each = tl.arange(0, BLOCKS)
    largest = tl.zeros([BLOCKS], dtype=tl.int32)
    for first in range(program * BLOCKS, blocks, programs * BLOCKS):
        left = _left(blocks, first, BLOCKS)
        sums = block_sums(
            job,
            first,
            left,
            TYPE,
            WIDTH,
            BLOCKS,
            LANES,
            ABSOLUTE,
            OF_ELEMENTS,
            TOTAL_TYPE,
            DIVIDES,
            SHIFTS,
            False,
            VECTOR,
        )
        tl.store(to + first + each, sums, mask=each < left)
        largest = tl.maximum(largest, tl.where(each < left, score_bits(sums / whole), 0))
    tl.atomic_max(most, tl.max(largest).to(tl.int64), sem="relaxed")


@kernel
def prune_kernel(
    jobs: tl.tensor,
    count: tl.tensor,
    FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    CHANGED: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Zero removed blocks of one shard. The numbers added to ``job`` are the positions of fields of
    :class:`Pruning`."""
    job = jobs + own_job(jobs, count, FIELDS, 5, STEPS) * FIELDS
    weights = tl.load(job).to(tl.pointer_type(WORD))
    if ALIGNED:
        weights = tl.multiple_of(weights, 16)
    blocks = tl.load(job + 1)
    program, programs = tl.program_id(0) - tl.load(job + 5), tl.load(job + 6)
    each = tl.arange(0, BLOCKS)
    for first in range(program * BLOCKS, blocks, programs * BLOCKS):
        left = _left(blocks, first, BLOCKS)
        removed = ~_bytes(tl.load(job + 2), first, left, BLOCKS) & 0xFF
        if CHANGED:
            before = _bytes(tl.load(job + 3), first, left, BLOCKS)
            removed &= before | _bytes(tl.load(job + 4), first, left, BLOCKS)
        # Most tiles of whole rows, and all in an update that moves nothing, have nothing to write.
        if tl.max(removed) > 0:
            bit = (removed[:, None] >> tl.arange(0, 8)[None, :]) & 1
            writes = (each < left) & (tl.reshape(bit, [BLOCKS]) != 0)
            own = weights + first * WIDTH + (each * WIDTH)[:, None] + tl.arange(0, LANES)[None, :]
            for column in range(0, WIDTH, LANES):
                zeros = tl.zeros([BLOCKS, LANES], dtype=WORD)
                mask = writes[:, None]
                if WIDTH % LANES:
                    mask &= (column + tl.arange(0, LANES) < WIDTH)[None, :]
                tl.store(own + column, zeros, mask=mask)
