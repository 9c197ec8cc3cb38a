"""Sums and scores of blocks of weights, for Triton kernels: what a program computes of one tile.

Scores equal the CPU's bit for bit. Squares of elements of up to 32 bits are exact in float64. Other
products are rounded before they are added (no fused multiply-add). Sums are in the order of
:func:`~dist_sparse.masking.scores.block_sums`.

The numbers added to ``job`` are the positions of fields of
:class:`~dist_sparse.extras.device.kernels.Job`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from dist_sparse.records import TINY

# Kernels can read a global only if it is a constexpr.
_TINY = tl.constexpr(TINY)


def kernel(function: Callable[..., Any]) -> Any:
    """Return a function compiled by :func:`triton.jit`, typed for mypy."""
    # The number of shards changes from call to call: Triton would compile a kernel for some.
    return triton.jit(function, do_not_specialize=["count"])


@kernel
def _in_turn(start: tl.tensor, parts: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Return the sums of COUNT groups of four neighbours, each added from first to last to
    ``start``."""
    # tl.split() takes a last dimension of 2: (0, 1, 2, 3) is split as ((0, 1), (2, 3)).
    even, odd = tl.split(tl.reshape(parts, [COUNT, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return (((start + first) + second) + third) + fourth


@kernel
def own_job(
    jobs: tl.tensor,
    count: tl.tensor,
    FIELDS: tl.constexpr,
    FIRST: tl.constexpr,
    STEPS: tl.constexpr,
) -> tl.tensor:
    """Return the number of the shard that this program belongs to: by binary search, the last whose
    first program comes no later. FIRST is the position of that field."""
    number = tl.full([], 0, dtype=tl.int64)
    for step in tl.static_range(STEPS):
        later = number + (1 << (STEPS - 1 - step))
        first = tl.load(jobs + later * FIELDS + FIRST, mask=later < count, other=0)
        number = tl.where((later < count) & (first <= tl.program_id(0)), later, number)
    return number


@kernel
def _value(
    job: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    TOTAL_TYPE: tl.constexpr,
    DIVIDES: tl.constexpr,
) -> tl.tensor:
    """Return the value of an element by the totals at some places, float64: as
    :meth:`~dist_sparse.masking.scores.RowTotals.of_rows`."""
    totals = tl.load(job + 12).to(tl.pointer_type(TOTAL_TYPE))
    total = tl.load(totals + at, mask=inside, other=0).to(tl.float64)
    most = tl.load(job + 16).to(tl.float64, bitcast=True)
    # tl.minimum() may drop a NaN, which must be refused.
    total = tl.where(total > most, most, total)
    total -= tl.load(job + 14).to(tl.float64, bitcast=True)
    return total / tl.load(job + 15).to(tl.float64, bitcast=True) if DIVIDES else total


@kernel
def _of_rows(
    job: tl.tensor,
    first: tl.tensor,
    block: tl.tensor,
    inside: tl.tensor,
    TOTAL_TYPE: tl.constexpr,
    DIVIDES: tl.constexpr,
    SHIFTS: tl.constexpr,
    SAMPLES: tl.constexpr,
) -> tl.tensor:
    """Return the values by the totals of the rows of blocks, float64. ``block`` counts from
    ``first``."""
    per_row = tl.load(job + 13)
    if SHIFTS:
        row = (first + block) >> per_row
    elif SAMPLES:
        row = (first + block) // per_row
    else:
        # One division of 64 bits for all blocks, and one of 32 bits for each.
        above = first // per_row
        row = above + (block + (first - above * per_row).to(tl.int32)) // per_row.to(tl.int32)
    return _value(job, row, inside, TOTAL_TYPE, DIVIDES)


@kernel
def _sampled(job: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Return the places of blocks of a sample, int64: one of each ``stride`` blocks, somewhere
    among them, as tables may repeat at any distance."""
    stride = tl.load(job + 17)
    number = number.to(tl.int64)
    return number * stride + ((number * 0x9E3779B1) >> 16) % stride


@kernel
def _elements(
    job: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    value: tl.tensor,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
    DIVIDES: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Return the scores of elements, float64. ``at`` counts from the first element of the block
    ``first``; ``value`` is by the totals of the elements' rows."""
    if OF_ELEMENTS:
        value = _value(job, first * WIDTH + at, inside, TOTAL_TYPE, DIVIDES)
    score = value
    if TYPE is not None:
        weights = tl.load(job).to(tl.pointer_type(TYPE))
        if VECTOR > 1:
            weights = tl.multiple_of(weights, 16)
        # Through float32: Triton does not convert bfloat16 to float64.
        read = tl.load(weights + first * WIDTH + at, mask=inside, other=0)
        score = read.to(tl.float32).to(tl.float64)
        score = tl.abs(score) if ABSOLUTE else score * score
        if TOTAL_TYPE is not None:
            score *= value + _TINY
    return score


@kernel
def _wide_sums(
    job: tl.tensor,
    first: tl.tensor,
    block: tl.tensor,
    known: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    value: tl.tensor,
    of_blocks: tl.tensor,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
    DIVIDES: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Return the sums of blocks that are wider than their lanes, float64.

    Args:
        block, known: the blocks from ``first`` on, and whether they exist.
        at, inside: the first element of each lane, and whether its block exists.
        value, of_blocks: the totals of rows, for each lane and for each block.
    """
    lane = tl.arange(0, BLOCKS * LANES)
    total = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
    # In the order of torch.sum with AVX2: each of 16 lanes adds 16 elements in turn, and then
    # adds the sum of the next 16.
    for group in range(0, WIDTH // 16 * 16, 256):
        part = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
        for column in range(group, min(group + 256, WIDTH // 16 * 16), 16):
            part += _elements(
                job,
                first,
                at + column,
                inside,
                value,
                TYPE,
                WIDTH,
                ABSOLUTE,
                OF_ELEMENTS,
                TOTAL_TYPE,
                DIVIDES,
                VECTOR,
            )
        total += part
    # Whole vectors of four that are left over: the first four lanes add these.
    for column in range(WIDTH // 16 * 16, WIDTH // 4 * 4, 4):
        own = lane % LANES < 4
        scores = _elements(
            job,
            first,
            at + column,
            inside & own,
            value,
            TYPE,
            WIDTH,
            ABSOLUTE,
            OF_ELEMENTS,
            TOTAL_TYPE,
            DIVIDES,
            VECTOR,
        )
        total += tl.where(own, scores, 0.0)
    # The last elements, one by one, and then the lanes.
    last = tl.zeros([BLOCKS], dtype=tl.float64)
    for column in range(WIDTH // 4 * 4, WIDTH):
        last += _elements(
            job,
            first,
            block * WIDTH + column,
            known,
            of_blocks,
            TYPE,
            WIDTH,
            ABSOLUTE,
            OF_ELEMENTS,
            TOTAL_TYPE,
            DIVIDES,
            VECTOR,
        )
    # The lanes are four accumulators of four.
    parts = tl.permute(tl.reshape(total, [BLOCKS, 4, 4]), [0, 2, 1])
    none = tl.zeros([BLOCKS * 4], dtype=tl.float64)
    return _in_turn(last, _in_turn(none, parts, BLOCKS * 4), BLOCKS)


@kernel
def _narrow_sums(
    job: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    value: tl.tensor,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
    DIVIDES: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Return the sums of blocks of at most 16 elements, float64, in pairs of neighbours; arguments
    as of :func:`_wide_sums`."""
    # A lane has one element; those beyond the block add 0, which changes no sum.
    own = tl.arange(0, BLOCKS * LANES) % LANES < WIDTH
    scores = _elements(
        job,
        first,
        at,
        inside & own if WIDTH < LANES else inside,
        value,
        TYPE,
        WIDTH,
        ABSOLUTE,
        OF_ELEMENTS,
        TOTAL_TYPE,
        DIVIDES,
        VECTOR,
    )
    sums = tl.where(own, scores, 0.0) if WIDTH < LANES else scores
    # 16, 8, 4, 2 sums become 8, 4, 2, 1. Unrolled, as shapes change.
    for level in tl.static_range(4):
        if (8 >> level) < LANES:
            left_sums, right_sums = tl.split(tl.reshape(sums, [BLOCKS * (8 >> level), 2]))
            sums = left_sums + right_sums
    return sums


@kernel
def _odd_sums(
    job: tl.tensor,
    first: tl.tensor,
    block: tl.tensor,
    known: tl.tensor,
    of_blocks: tl.tensor,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    OF_ELEMENTS: tl.constexpr,
    TOTAL_TYPE: tl.constexpr,
    DIVIDES: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Return the sums of blocks of 5, 7, 9, 10, 11, 13, 14 or 15 elements, float64: of neighbours
    in pairs if their number is even, and then one by one; arguments as of :func:`_wide_sums`."""
    sums = tl.zeros([BLOCKS], dtype=tl.float64)
    for column in tl.static_range(0, WIDTH, 2 - WIDTH % 2):
        pair = tl.zeros([BLOCKS], dtype=tl.float64)
        for part in tl.static_range(2 - WIDTH % 2):
            pair += _elements(
                job,
                first,
                block * WIDTH + column + part,
                known,
                of_blocks,
                TYPE,
                WIDTH,
                ABSOLUTE,
                OF_ELEMENTS,
                TOTAL_TYPE,
                DIVIDES,
                VECTOR,
            )
        sums += pair
    return sums


@kernel
def block_sums(
    job: tl.tensor,
    first: tl.tensor,
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
) -> tl.tensor:
    """Return the sums of ``left`` blocks, at most BLOCKS, from ``first`` on, float64. Sums of other
    blocks are any numbers."""
    lane = tl.arange(0, BLOCKS * LANES)
    inside = lane // LANES < left
    known = tl.arange(0, BLOCKS) < left
    if SAMPLES:
        block = _sampled(job, first + tl.arange(0, BLOCKS))
        at = _sampled(job, first + lane // LANES) * WIDTH + lane % LANES
        # From here on, blocks count from the shard's first.
        first = first * 0
    else:
        block = tl.arange(0, BLOCKS)
        at = lane // LANES * WIDTH + lane % LANES
        if LANES < VECTOR and WIDTH == LANES:
            # As many whole vectors as hold the last element, or each element would be a load of its
            # own. What is read beyond it is in the same aligned vector, and counts nowhere.
            inside = lane < (left * LANES + VECTOR - 1) // VECTOR * VECTOR
    value = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
    of_blocks = tl.zeros([BLOCKS], dtype=tl.float64)
    if TOTAL_TYPE is not None and not OF_ELEMENTS:
        # Loaded once for each block, and copied to its lanes.
        of_blocks = _of_rows(job, first, block, known, TOTAL_TYPE, DIVIDES, SHIFTS, SAMPLES)
        spread = tl.broadcast_to(of_blocks[:, None], [BLOCKS, LANES])
        value = tl.reshape(spread, [BLOCKS * LANES])
    if WIDTH > 16:
        sums = _wide_sums(
            job,
            first,
            block,
            known,
            at,
            inside,
            value,
            of_blocks,
            TYPE,
            WIDTH,
            BLOCKS,
            LANES,
            ABSOLUTE,
            OF_ELEMENTS,
            TOTAL_TYPE,
            DIVIDES,
            VECTOR,
        )
    elif WIDTH % 4 == 0 or WIDTH < 4 or WIDTH == 6:
        sums = _narrow_sums(
            job,
            first,
            at,
            inside,
            value,
            TYPE,
            WIDTH,
            BLOCKS,
            LANES,
            ABSOLUTE,
            OF_ELEMENTS,
            TOTAL_TYPE,
            DIVIDES,
            VECTOR,
        )
    else:
        sums = _odd_sums(
            job,
            first,
            block,
            known,
            of_blocks,
            TYPE,
            WIDTH,
            BLOCKS,
            ABSOLUTE,
            OF_ELEMENTS,
            TOTAL_TYPE,
            DIVIDES,
            VECTOR,
        )
    return sums


@kernel
def score_bits(mean: tl.tensor) -> tl.tensor:
    """Return the scores of blocks as int32, by the means of their elements."""
    bits = mean.to(tl.float32).to(tl.int32, bitcast=True)
    # Negative scores, and NaN with either sign, become a NaN that is counted as refused.
    return tl.where(bits < 0, 0x7FFFFFFF, bits)
