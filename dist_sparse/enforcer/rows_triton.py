"""A Triton kernel that zeroes the removed weights of a few rows of many tables.

For :class:`dist_sparse.enforcer.rows.ZeroedRows` on CUDA. Nothing else imports this module, so
that the package works where Triton is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_sparse.masking.masks import BlockMask

_TILE = 1024
"""Elements that a program looks at together: 8 for each thread of its 4 warps."""

_COLS = 32
"""Columns of a tile at most, one for each lane of a warp: wider rows take several turns."""

_WORDS = {2: tl.int16, 4: tl.int32, 8: tl.int64}
"""By bytes of an element: zero has the same bits in every type of a size."""


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

    @classmethod
    def of(cls, weight: Tensor, bits: Tensor, mask: BlockMask) -> Feature:
        rect, grid = mask.rect, mask.grid
        row_offset, block_rows = _axis(rect.row, rect.rows, mask.block[0], grid.rows)
        col_offset, block_cols = _axis(rect.col, rect.cols, mask.block[1], grid.cols)
        return cls(
            weight.data_ptr(),
            bits.data_ptr(),
            weight.stride(0),
            rect.rows,
            rect.cols,
            row_offset,
            block_rows,
            col_offset,
            block_cols,
            grid.cols,
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
    """Cleans the rows that a lookup is about to read, in one launch for all features and tables,
    without a look at which rows are dirty.

    It holds the addresses of the weights and bits it was made with (and keeps those tensors alive):
    make a new one when a table's storage or mask is replaced.

    Args:
        slots: a live shard and its mask for each feature, in the order of the ids; None where
            nothing is masked. All weights have one device and one dtype, as the tables of a batch
            have.
    """

    def __init__(self, slots: Sequence[tuple[Tensor, BlockMask] | None]) -> None:
        self._alive: list[tuple[Tensor, Tensor]] = []
        features = []
        for slot in slots:
            if slot is None or not slot[1].removes:
                features.append(Feature())
                continue
            weight, mask = slot
            bits = mask.bits.contiguous()
            self._alive.append((weight, bits))
            features.append(Feature.of(weight, bits, mask))
        self._features = len(features)
        self.needed = bool(self._alive)
        if not self.needed:
            return
        # Division takes many more instructions than a shift, and blocks are nearly always powers of
        # two.
        self._shifts = all(feature.shifts for feature in features)
        if self._shifts:
            features = [feature.with_logarithms() for feature in features]
        weight = self._alive[0][0]
        self._table = torch.tensor(features, dtype=torch.int64).to(weight.device)
        self._word = _WORDS[weight.element_size()]
        widest = max(feature.cols for feature in features)
        self._cols = min(triton.next_power_of_2(widest), _COLS)

    def __call__(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Write the zeros, on the current stream.

        Args:
            ids: int32 or int64 ``(n,)``, feature after feature, local row numbers. Those outside
                the table are read as row 0, which FBGEMM's bounds check makes of them.
            ends: where the ids of each feature begin and, last, where they end: one more than there
                are features. As an integer tensor on the device of ``ids`` it is read in place,
                with any stride: ``offsets[::batch_size]`` of FBGEMM's offsets costs neither a copy
                nor a wait.
        """
        count = ids.numel()
        if not self.needed or count == 0:
            return
        if not isinstance(ends, Tensor):  # from pinned memory, or the host would wait for the copy
            ends = torch.tensor(ends, dtype=torch.int64, pin_memory=ids.is_cuda)
        ends, ids = ends.to(ids.device, non_blocking=True), ids.contiguous()
        per_program = _TILE // self._cols
        # Triton launches on the current device, wherever its arguments are.
        with torch.cuda.device(ids.get_device()):
            zero_removed[(-(-count // per_program),)](
                ids,
                count,
                ends,
                ends.stride(0),
                self._table,
                self._features,
                FIELDS=len(Feature._fields),
                STEPS=(self._features - 1).bit_length(),
                SHIFTS=self._shifts,
                WORD=self._word,
                IDS=per_program,
                COLS=self._cols,
                num_warps=4,
            )


def _axis(start: int, size: int, block: int, blocks: int) -> tuple[int, int]:
    """Return what is cut off the first block, and the size of a block. A lone block may have any
    size: it gets a power of two."""
    return (0, triton.next_power_of_2(size)) if blocks == 1 else (start % block, block)


# Counts change from batch to batch and from lookup to lookup: one kernel for all of them.
@triton.jit(do_not_specialize=["count", "stride", "features"])  # type: ignore[untyped-decorator]
def zero_removed(
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
) -> None:
    """Each program takes IDS ids, feature by feature, and reads their rows COLS columns at a time.

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
        row = tl.load(ids + at, mask=at < stop, other=0).to(tl.int64)
        row = tl.where((row >= 0) & (row < tl.load(info + 3)), row, 0)
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
            byte = tl.load(bits + (flag >> 3), mask=(at < stop) & (col < cols), other=0xFF).to(
                tl.int32
            )
            removed = ((byte >> (flag & 7)) & 1) == 0  # nothing outside: all bits are set there
            tl.store(weight + col, tl.zeros([IDS * COLS], dtype=WORD), mask=removed)
        # Larger, even if the ends do not ascend: the search saw that the next feature begins later.
        position = stop
