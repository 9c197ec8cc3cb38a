"""A Triton kernel that zeroes the removed weights of a few rows of many tables.

The form of :class:`dist_sparse.enforcer.rows.Lookup` for CUDA. Nothing else imports this module, so
that the package works where Triton is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_sparse.enforcer.rows import Slot

__all__ = ["NOTHING", "TritonLookup", "zero_removed"]

_TILE = 1024
"""Elements that a program looks at together: 8 for each thread of its 4 warps."""

_COLS = 32
"""Columns of a tile at most, one for each lane of a warp: wider rows take several turns."""

_WORDS = {2: tl.int16, 4: tl.int32, 8: tl.int64}
"""By bytes of an element: zero has the same bits in every type of a size."""

NOTHING = [0, 0, 0, 0, 0, 0, 1, 0, 1, 0]
"""What the kernel knows of a feature of which nothing is removed: no columns, and blocks that it
can divide by."""


class TritonLookup:
    """A :class:`~dist_sparse.enforcer.rows.Lookup` that is one launch for all features and tables.

    It holds the addresses of the weights and bits it was made with (and keeps those tensors alive):
    make a new one when a table's storage or mask is replaced.

    Args:
        slots: one for each feature, in the order of the ids; None where nothing is masked. All
            weights have one device and one dtype.

    Raises:
        ValueError: weights of several devices or types, or of a layout that the kernel cannot
            address.
    """

    def __init__(self, slots: Sequence[Slot | None]) -> None:
        _check(slots)
        masked = [slot if slot is not None and slot.mask.removes else None for slot in slots]
        self._features = len(masked)
        self._alive: list[tuple[Tensor, Tensor]] = []  # whose addresses the table holds
        self._table: Tensor | None = None
        sizes = []
        for slot in masked:
            if slot is not None:
                self._alive.append((slot.weight, slot.mask.bits.contiguous()))
            sizes.append(
                NOTHING[:]
                if slot is None
                else [t.data_ptr() for t in self._alive[-1]] + _sizes(slot)
            )
        self.needed = bool(self._alive)
        if not self.needed:
            return
        # Division takes many more instructions than a shift, and blocks are nearly always powers of
        # two.
        self._shifts = all(size & (size - 1) == 0 for row in sizes for size in (row[6], row[8]))
        if self._shifts:
            for row in sizes:
                row[6], row[8] = row[6].bit_length() - 1, row[8].bit_length() - 1
        self._table = torch.tensor(sizes, dtype=torch.int64).to(self._alive[0][0].device)
        self._word = _WORDS[self._alive[0][0].element_size()]
        self._cols = min(triton.next_power_of_2(max(row[4] for row in sizes)), _COLS)

    def __call__(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Writes the zeros, on the current stream.

        Args:
            ids: int32 or int64 ``(n,)``, feature after feature, local row numbers. Those outside
                the table are read as row 0, which FBGEMM's bounds check makes of them.
            ends: where the ids of each feature begin and, last, where they end: one more than there
                are features. As an integer tensor on the device of ``ids`` it is read in place,
                with any stride: ``offsets[::batch_size]`` of FBGEMM's offsets costs neither a copy
                nor a wait.
        """
        if len(ends) != self._features + 1:
            raise ValueError(
                f"{self._features} features need {self._features + 1} ends, got {len(ends)}."
            )
        count = ids.numel()
        if self._table is None or count == 0:
            return
        if ids.device != self._table.device:
            raise ValueError(f"The ids are on {ids.device}, the tables on {self._table.device}.")
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
                FIELDS=len(NOTHING),
                STEPS=(self._features - 1).bit_length(),
                SHIFTS=self._shifts,
                WORD=self._word,
                IDS=per_program,
                COLS=self._cols,
                num_warps=4,
            )


def _check(slots: Sequence[Slot | None]) -> None:
    """Refuses what one kernel cannot address."""
    present = [(feature, slot) for feature, slot in enumerate(slots) if slot is not None]
    for feature, slot in present:
        weight, rect, first = slot.weight, slot.mask.rect, present[0][1].weight
        for kind, one, other in (
            ("device", weight.device, first.device),
            ("dtype", weight.dtype, first.dtype),
            ("mask's device", slot.mask.bits.device, first.device),
        ):
            if one != other:
                raise ValueError(
                    f"Feature {feature}: the {kind} is {one}, where the lookup's is {other}."
                )
        if weight.element_size() not in _WORDS:
            raise ValueError(
                f"Feature {feature}: weights of type {weight.dtype} are not supported."
            )
        if tuple(weight.shape) != (rect.rows, rect.cols):
            raise ValueError(
                f"Feature {feature}: weights of shape {tuple(weight.shape)} have a mask of {rect}."
            )
        if weight.stride(1) != 1 and rect.cols > 1:
            raise ValueError(
                f"Feature {feature}: the weights' rows must be contiguous, got strides"
                f" {weight.stride()}."
            )


def _sizes(slot: Slot) -> list[int]:
    """What the kernel knows of a feature behind the addresses of weights and bits: row stride,
    rows, columns; rows that are cut off the first block and rows in a block; the same of columns;
    blocks in a row."""
    rect, block, grid = slot.mask.rect, slot.mask.block, slot.mask.grid
    high = _axis(rect.row, rect.rows, block[0], grid.rows)
    wide = _axis(rect.col, rect.cols, block[1], grid.cols)
    return [slot.weight.stride(0), rect.rows, rect.cols, *high, *wide, grid.cols]


def _axis(start: int, size: int, block: int, blocks: int) -> tuple[int, int]:
    """(what is cut off the first block, size of a block). A lone block may have any size: it gets a
    handy one."""
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
    matrix of addresses that it knows nothing about by columns.
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
