"""Triton kernels of codes: one assigns the entries of books to rows, one sums the rows of each
entry. Each is one launch for a shard, whatever its rows and groups of columns.

All numbers are integers in float64 or int64, as :mod:`dist_sparse.extras.codes.learning` makes
them: neither the order of additions nor a fused multiply-add changes a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_sparse.extras.device.score_kernels import kernel
from dist_sparse.serving.books import ENTRIES

# Rows whose distances a program computes together, one for each lane of a warp: a thread of its 4
# warps has the distances of one row to 64 entries.
_ROWS = 32

# Elements of a tile where rows are summed, 4 for each thread, and its most columns, one for each
# lane of a warp.
_TILE = 512
_COLS = 32

# Kernels can read a global only if it is a constexpr.
_ENTRIES = tl.constexpr(ENTRIES)

# Adding it to a float64 below 2**51 leaves no bits for a fraction: the sum is rounded to an
# integer, half to even, as torch.round() rounds.
_ROUNDS = tl.constexpr(1.5 * 2.0**52)


def assign_codes(
    rows: Tensor, scales: Tensor, most: float, constant: Tensor, linear: Tensor, out: Tensor
) -> None:
    """Write the number of the entry whose distance is least, for each row and group of columns.

    Args:
        rows: of any floating dtype, ``(n, columns)``.
        scales: grid points per unit of weight, float64 ``(groups, 1)``.
        most: the largest integer on a grid.
        constant, linear: a distance is the constant of its entry and the products of the row's
            integers with its linear factors, float64 ``(groups, 256)`` and ``(groups, width,
            256)``. The low 8 bits of a distance are the number of the entry.
        out: uint8 ``(n, groups)``.
    """
    count, columns = rows.shape
    groups = len(constant)
    if count:
        # Triton launches on the current device, wherever its arguments are.
        with torch.cuda.device(rows.get_device()):
            assign_kernel[(-(-count // _ROWS),)](
                rows,
                count,
                *rows.stride(),
                groups,
                columns // groups,
                scales,
                constant.contiguous(),
                linear.contiguous(),
                out,
                out.stride(0),
                MOST=most,
                ROWS=_ROWS,
                num_warps=4,
            )


def sum_by_code(rows: Tensor, codes: Tensor, scales: Tensor, most: float, sums: Tensor) -> None:
    """Add the integers of rows to the sums of their entries, and 1 for each row in the last column.
    Entries 0 are left out.

    Args:
        rows, scales, most: as in :func:`assign_codes`.
        codes: the numbers of the entries, uint8 ``(n, groups)``.
        sums: int64 ``(groups * 256, width + 1)``, contiguous.
    """
    count, columns = rows.shape
    if count:
        cols = min(triton.next_power_of_2(columns), _COLS)
        with torch.cuda.device(rows.get_device()):
            sum_kernel[(-(-count // (_TILE // cols)),)](
                rows,
                count,
                *rows.stride(),
                columns,
                sums.shape[1] - 1,
                scales,
                codes,
                codes.stride(0),
                sums,
                MOST=most,
                ROWS=_TILE // cols,
                COLS=cols,
                num_warps=4,
            )


@kernel
def _on_grid(weight: tl.tensor, scale: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    """Return weights as integers on a grid, float64: as
    :func:`~dist_sparse.extras.codes.learning.round_to_grid`."""
    scaled = tl.minimum(tl.maximum(weight.to(tl.float64) * scale, -MOST), MOST)
    return (scaled + _ROUNDS) - _ROUNDS


@kernel
def assign_kernel(
    rows: tl.tensor,
    count: tl.tensor,
    row_stride: tl.tensor,
    col_stride: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    scales: tl.tensor,
    constant: tl.tensor,
    linear: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Assign the entries of all groups to ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    entry = tl.arange(0, _ENTRIES)
    rows += row * row_stride
    out += row * out_stride
    for group in range(groups):
        scale = tl.load(scales + group)
        first = tl.load(constant + group * _ENTRIES + entry)
        distances = tl.broadcast_to(first[:, None], [_ENTRIES, ROWS])
        for column in range(group * width, (group + 1) * width):
            weight = tl.load(rows + column * col_stride, mask=inside, other=0)
            factor = tl.load(linear + column * _ENTRIES + entry)
            distances = tl.fma(factor[:, None], _on_grid(weight, scale, MOST)[None, :], distances)
        nearest = tl.min(distances, 0).to(tl.int64) & (_ENTRIES - 1)
        tl.store(out + group, nearest.to(tl.uint8), mask=inside)


@kernel
def sum_kernel(
    rows: tl.tensor,
    count: tl.tensor,
    row_stride: tl.tensor,
    col_stride: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    code_stride: tl.tensor,
    sums: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Add ROWS rows to the sums of their entries, COLS columns at a time. Tiles are flat, so that
    the lanes of a warp read neighbours in a row."""
    element = tl.arange(0, ROWS * COLS)
    row = tl.program_id(0).to(tl.int64) * ROWS + element // COLS
    inside = row < count
    rows += row * row_stride
    codes += row * code_stride
    one = tl.full([ROWS * COLS], 1, dtype=tl.int64)
    for first in range(0, columns, COLS):
        col = first + element % COLS
        group = col // width
        code = tl.load(codes + group, mask=inside & (col < columns), other=0).to(tl.int32)
        # Most removed rows have code 0: without atomic additions to one entry, which would wait for
        # each other.
        chosen = code > 0
        weight = tl.load(rows + col * col_stride, mask=chosen, other=0)
        scale = tl.load(scales + group, mask=chosen, other=0)
        place = sums + (group * _ENTRIES + code) * (width + 1)
        within = col - group * width
        number = _on_grid(weight, scale, MOST).to(tl.int64)
        tl.atomic_add(place + within, number, mask=chosen, sem="relaxed")
        tl.atomic_add(place + width, one, mask=chosen & (within == 0), sem="relaxed")
