"""Triton kernels: mask updates of shards that are flat sequences of equal blocks, and dirty rows.

:mod:`dist_sparse.masking.device` imports this module where Triton can run, nothing else does: the
package works where Triton is missing. Each call is one launch for all shards that it is given. In
a mask update, a program takes tiles of one shard in turn, and adds what it has counted to the
shard's counters once.

Scores equal the CPU's bit for bit. Squares of elements of up to 32 bits are exact in float64, other
products are rounded before they are added (no fused multiply-add), and sums are taken in the order
of :func:`~dist_sparse.masking.scores.block_sums`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_sparse.masking.totals import TINY, RowTotals
from dist_sparse.tables.shards import sent

# Sums of wider blocks are taken in so many parts, as torch.sum takes them with AVX2.
_LANES: Final = 16

# Of weights and of totals.
_TYPES: Final = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
}

# Values of the kernels' constant TOTALS: how many there are.
_NONE: Final = 0
_OF_ROWS: Final = 1
_OF_ELEMENTS: Final = 2

# A constant of the kernels.
_TINY: Final = tl.constexpr(TINY)

# By bytes of an element: zero has the same bits in every type of a size.
_WORDS: Final = {2: tl.int16, 4: tl.int32, 8: tl.int64}

# Of a launch, about so many at most: 8 for each multiprocessor of an H200.
_PROGRAMS: Final = 1024

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
        totals: the totals of one of the shards, if they count.
    """

    dtype: torch.dtype
    width: int
    absolute: bool = False
    weights: bool = True
    totals: RowTotals | None = None

    def constants(self) -> dict[str, Any]:
        """Return what a kernel that scores is compiled for."""
        known, total_type = _NONE, torch.float32
        if self.totals is not None:
            known = _OF_ELEMENTS if self.totals.of_elements else _OF_ROWS
            total_type = self.totals.total.dtype
        return {
            "TYPE": _TYPES[self.dtype],
            "WIDTH": self.width,
            "ABSOLUTE": self.absolute,
            "WEIGHTS": self.weights,
            "TOTALS": known,
            "TOTAL_TYPE": _TYPES[total_type],
        }


# Scores are read.
SCORES: Final = Scoring(torch.float32, 0)


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

    def with_totals(self, known: RowTotals, per_row: int) -> Job:
        """Return the job with the totals of its shard, which has ``per_row`` blocks a row."""
        numbers = struct.pack("ddd", known.initial, known.share, known.most)
        initial, share, most = struct.unpack("qqq", numbers)
        return self._replace(
            totals=known.total.data_ptr(),
            per_row=per_row,
            initial=initial,
            share=share,
            most=most,
        )


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
    constants = {"WORD": _WORDS[size], "WIDTH": width, "CHANGED": jobs[0].before != 0}
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
    TOTAL_TYPE: tl.constexpr,
) -> tl.tensor:
    """Return scores of elements, float64. ``value`` is what the totals of their rows count."""
    if TOTALS == 2:
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
    TOTAL_TYPE: tl.constexpr,
) -> tl.tensor:
    """Return the scores of BLOCKS blocks from ``first`` on, as int32."""
    lane = tl.arange(0, BLOCKS * LANES)
    at = first + lane // LANES
    inside = at < blocks
    value = tl.zeros([BLOCKS * LANES], dtype=tl.float64)
    if TOTALS == 1:
        # Once for a block, and then for each of its lanes.
        block = first + tl.arange(0, BLOCKS)
        of_blocks = _value(job, block // tl.load(job + 13), block < blocks, TOTAL_TYPE)
        spread = tl.broadcast_to(of_blocks[:, None], [BLOCKS, LANES])
        value = tl.reshape(spread, [BLOCKS * LANES])
    at = at * WIDTH + lane % LANES
    if WIDTH <= 16:
        # Neighbours in pairs.
        parts = _element(job, at, inside, value, TYPE, ABSOLUTE, WEIGHTS, TOTALS, TOTAL_TYPE)
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
                    job, at + column, inside, value, TYPE, ABSOLUTE, WEIGHTS, TOTALS, TOTAL_TYPE
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


# Dirty rows: flagged before a backward writes them, their removed weights zeroed.

_TILE = 1024
"""Elements that a program looks at together: 8 for each thread of its 4 warps."""

_COLS = 32
"""Columns of a tile at most, one for each lane of a warp: wider rows take several turns."""


class Feature(NamedTuple):
    """The kernel's parameters of one feature, in the order in which it reads them. The defaults are
    those of an unmasked feature: no columns, and blocks that it can divide by."""

    weights: int = 0
    """Address; that of the packed bits follows."""
    bits: int = 0
    row_stride: int = 0
    rows: int = 0
    cols: int = 0
    row_offset: int = 0
    """Rows of the first block that are stored in another shard."""
    block_rows: int = 1
    """Or its binary logarithm, where the kernel shifts."""
    col_offset: int = 0
    block_cols: int = 1
    blocks_per_row: int = 0
    flags: int = 0
    """Address of the flags of the rows."""

    @classmethod
    def of(cls, weight: Tensor, mask: Any, flags: Tensor) -> Feature:
        rect, grid = mask.rect, mask.grid
        row_offset, block_rows = _axis(rect.row, rect.rows, mask.block[0], grid.rows)
        col_offset, block_cols = _axis(rect.col, rect.cols, mask.block[1], grid.cols)
        return cls(
            weight.data_ptr(),
            mask.bits.data_ptr(),
            weight.stride(0),
            rect.rows,
            rect.cols,
            row_offset,
            block_rows,
            col_offset,
            block_cols,
            grid.cols,
            flags.data_ptr(),
        )

    @property
    def shifts(self) -> bool:
        """Whether the sizes of its blocks are powers of two."""
        return self.block_rows.bit_count() == self.block_cols.bit_count() == 1

    def with_logarithms(self) -> Feature:
        """Return the feature with logarithms of its block sizes, by which the kernel shifts."""
        return self._replace(
            block_rows=self.block_rows.bit_length() - 1, block_cols=self.block_cols.bit_length() - 1
        )


class TritonRowCleaner:
    """Flags the rows that a backward is about to write, and cleans flagged rows, each in one launch
    for all features and tables.

    It holds the addresses of the weights, bits and flags it was made with (and keeps those tensors
    alive): make a new one when a table's storage or mask is replaced.

    Args:
        slots: a live shard, its mask and the flags of its rows, uint8 ``(rows,)``, for each
            feature, in the order of the ids; None where nothing is removed. All weights have one
            device and one dtype, as the tables of a batch have.
    """

    def __init__(self, slots: Sequence[tuple[Tensor, Any, Tensor] | None]) -> None:
        self._alive = list(filter(None, slots))
        self.needed, self._cols = bool(self._alive), 1
        if not self.needed:
            return
        features, self._shifts = _features(slots)
        # Several features may read one table.
        tables = [table for table in dict.fromkeys(features) if table.rows]
        ends = [0, *accumulate(table.rows for table in tables)]
        self._rows = ends[-1]
        weight = self._alive[0][0]
        known = sent([*chain(*features, *tables), *ends], weight.device)
        sizes = [len(Feature._fields) * len(each) for each in (features, tables)]
        self._features, self._tables, self._ends = torch.split(known, [*sizes, len(ends)])
        self._word = _WORDS[weight.element_size()]
        widest = max(table.cols for table in tables)
        self._cols = min(triton.next_power_of_2(widest), _COLS)

    def flag(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Flag the rows that a lookup names; arguments as in :meth:`clean_read`."""
        # One flag a row: a tile is of ids alone.
        self._on_ids(ids, ends, cols=1, marks=True)

    def clean_read(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Clean the flagged rows among those that a lookup names, on the current stream.

        Args:
            ids: int32 or int64 ``(n,)``, feature after feature, local row numbers. Those outside
                the table are read as row 0, which FBGEMM's bounds check makes of them.
            ends: where the ids of each feature begin and, last, where they end: one more than there
                are features. As an integer tensor on the device of ``ids`` it is read in place,
                with any stride: ``offsets[::batch_size]`` of FBGEMM's offsets costs neither a copy
                nor a wait.
        """
        self._on_ids(ids, ends, cols=self._cols, marks=False)

    def clean(self) -> None:
        """Clean all flagged rows. They stay flagged."""
        if self.needed:
            # Each row once, as if a lookup named all of them.
            self._launch(self._ends, self._rows, self._ends, self._tables, self._cols, by_id=False)

    def _on_ids(self, ids: Tensor, ends: Sequence[int] | Tensor, *, cols: int, marks: bool) -> None:
        count = ids.numel()
        if not self.needed or count == 0:
            return
        ends = ends if isinstance(ends, Tensor) else sent(ends, ids.device)
        ends = ends.to(ids.device, non_blocking=True)
        self._launch(ids.contiguous(), count, ends, self._features, cols, marks=marks)

    def _launch(
        self,
        ids: Tensor,
        count: int,
        ends: Tensor,
        table: Tensor,
        cols: int,
        *,
        marks: bool = False,
        by_id: bool = True,
    ) -> None:
        per_program = _TILE // cols
        features = table.numel() // len(Feature._fields)
        # Triton launches on the current device, wherever its arguments are.
        with torch.cuda.device(ids.get_device()):
            visit_rows[(-(-count // per_program),)](
                ids,
                count,
                ends,
                ends.stride(0),
                table,
                features,
                FIELDS=len(Feature._fields),
                STEPS=(features - 1).bit_length(),
                SHIFTS=self._shifts,
                WORD=self._word,
                IDS=per_program,
                COLS=cols,
                MARKS=marks,
                BY_ID=by_id,
                num_warps=4,
            )


def _features(
    slots: Sequence[tuple[Tensor, Any, Tensor] | None],
) -> tuple[list[Feature], bool]:
    """Return the parameters of all features, and whether the kernel shifts."""
    features = [Feature() if slot is None else Feature.of(*slot) for slot in slots]
    # Division takes many more instructions than a shift, and blocks are nearly always powers of
    # two.
    if all(feature.shifts for feature in features):
        return [feature.with_logarithms() for feature in features], True
    return features, False


def _axis(start: int, size: int, block: int, blocks: int) -> tuple[int, int]:
    """Return what is cut off the first block, and the size of a block. A lone block may have any
    size: it gets a power of two."""
    return (0, triton.next_power_of_2(size)) if blocks == 1 else (start % block, block)


# Counts change from batch to batch and from lookup to lookup: one kernel for all of them.
@triton.jit(do_not_specialize=["count", "stride", "features"])  # type: ignore[untyped-decorator]
def visit_rows(
    ids: tl.tensor,
    count: tl.tensor,
    ends: tl.tensor,
    stride: tl.tensor,
    table: tl.tensor,
    features: tl.tensor,
    FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    SHIFTS: tl.constexpr,
    WORD: tl.constexpr,
    IDS: tl.constexpr,
    COLS: tl.constexpr,
    MARKS: tl.constexpr,
    BY_ID: tl.constexpr,
) -> None:
    """Each program takes IDS ids, feature by feature, and flags their rows (MARKS), or zeroes what
    is removed of those that are flagged, COLS columns at a time. Without BY_ID, it takes all rows
    of the tables, in the place of ids.

    A tile is flat, so that the neighbours of a warp are neighbours in a row; Triton would lay out a
    matrix of addresses that it knows nothing about by columns. The numbers added to ``info`` are
    the places of the fields of :class:`Feature`.
    """
    element = tl.arange(0, IDS * COLS)
    position = tl.program_id(0).to(tl.int64) * IDS
    last = tl.minimum(
        tl.minimum(position + IDS, count),
        tl.load(ends + features.to(tl.int64) * stride).to(tl.int64),
    )
    position = tl.maximum(position, tl.load(ends).to(tl.int64))
    while position < last:
        # The last feature that begins here or before: of several that begin at one place, all but
        # that are empty.
        feature = tl.full([], 0, dtype=tl.int64)
        for step in tl.static_range(STEPS):
            later = feature + (1 << (STEPS - 1 - step))
            start = tl.load(ends + later * stride, mask=later < features, other=0)
            feature = tl.where((later < features) & (start <= position), later, feature)
        stop = tl.minimum(tl.load(ends + (feature + 1) * stride).to(tl.int64), last)

        info = table + feature * FIELDS
        weight = tl.load(info).to(tl.pointer_type(WORD))
        bits = tl.load(info + 1).to(tl.pointer_type(tl.uint8))
        cols = tl.load(info + 4).to(tl.int32)  # 0 where nothing is removed: then no turn is taken
        height, cut, width = (
            tl.load(info + 6),
            tl.load(info + 7).to(tl.int32),
            tl.load(info + 8).to(tl.int32),
        )

        # What grows with the table is 64 bits wide, once for each row; within a row 32 bits do.
        at = position + element // COLS
        # Nothing of features whose table is not masked.
        inside = at < tl.where(cols > 0, stop, 0)
        flags = tl.load(info + 10).to(tl.pointer_type(tl.uint8))
        if BY_ID:
            row = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
            row = tl.where((row >= 0) & (row < tl.load(info + 3)), row, 0)
        else:
            first_row = tl.load(ends + feature * stride)
            row = at - first_row
            # Most rows are clean: their flags are all that is read of them.
            here = position + tl.arange(0, IDS)
            dirty = tl.load(flags + (here - first_row), mask=here < stop, other=0).to(tl.int32)
            cols = tl.where(tl.max(dirty) > 0, cols, 0)
            inside = at < tl.where(cols > 0, stop, 0)
        if MARKS:
            tl.store(flags + row, tl.full([IDS * COLS], 1, dtype=tl.uint8), mask=inside)
        else:
            inside = tl.load(flags + row, mask=inside, other=0) != 0
            block_row = row + tl.load(info + 5)
            block_row = block_row >> height if SHIFTS else block_row // height
            bit = block_row * tl.load(info + 9)
            weight += row * tl.load(info + 2)
            bits += bit >> 3
            before = (bit & 7).to(tl.int32)
            for first in range(0, cols, COLS):
                col = first + element % COLS
                block = (col + cut) >> width if SHIFTS else (col + cut) // width
                flag = before + block
                # Nothing is removed outside: all bits are set there.
                byte = tl.load(bits + (flag >> 3), mask=inside & (col < cols), other=0xFF)
                removed = ((byte.to(tl.int32) >> (flag & 7)) & 1) == 0
                tl.store(weight + col, tl.zeros([IDS * COLS], dtype=WORD), mask=removed)
        # Larger, even if the ends do not ascend: the search saw that the next feature begins later.
        position = stop
