"""Triton kernels of codes: one assigns the entries of books to rows, one sums the rows of each
entry, one looks decoded rows up. The first two are one launch for a shard, whatever its rows and
groups of columns; the third is one for all features of a lookup.

The first two compute with integers in float64 or int64, as
:mod:`dist_sparse.extras.codes.learning` makes them: neither the order of additions nor a fused
multiply-add changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_sparse.extras.device.score_kernels import kernel
from dist_sparse.serving.books import ENTRIES
from dist_sparse.tables.shards import sent

# Rows whose distances a program computes together, one for each lane of a warp: a thread of its 4
# warps has the distances of one row to 64 entries.
_ROWS = 32

# Elements of a tile where rows are summed, 4 for each thread, and where they are looked up: there,
# addresses take more registers. The most columns of a tile, one for each lane of a warp.
_SUMMED = 512
_LOOKED_UP = 256
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
            sum_kernel[(-(-count // (_SUMMED // cols)),)](
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
                ROWS=_SUMMED // cols,
                COLS=cols,
                num_warps=4,
            )


class FeatureCodes(NamedTuple):
    """The codes that a feature looks up.

    Args:
        codes: uint8 ``(rows, groups)``, contiguous.
        entries: float32 ``(groups * 256, width)``, contiguous.
        rows: ids from here on read row 0, as ids below 0 do. Row 0 exists, even if this is 0.
    """

    codes: Tensor
    entries: Tensor
    rows: int


def decode_lookups(
    features: Sequence[tuple[FeatureCodes | None, int]],
    ids: Tensor,
    offsets: Tensor,
    bags: int,
    weights: Tensor | None,
    pooling: str,
    out: Tensor,
) -> None:
    """Write the sums, means or sequences of decoded rows that ids name, added up in their order.

    Args:
        features: for each feature, in the order of the ids, its codes and columns; without codes,
            its part of ``out`` stays as it is.
        ids: int32 or int64 ``(n,)``.
        offsets: where each bag begins, and where the last one ends, ``(features * bags + 1,)``.
        weights: a factor for each id, or None. A mean divides by the number of ids; sequences read
            no weights.
        pooling: ``"sum"``, ``"mean"`` or ``"none"``.
        out: ``(bags, columns of all features)``, or ``(n, columns)`` for sequences.
    """
    is_pooled = pooling != "none"
    is_weighted = is_pooled and weights is not None
    fields: list[int] = []
    start = 0
    for coded, columns in features:
        if coded is None:
            # Without columns: the kernel writes nothing.
            fields += (0, 0, 0, 1, 1, 0, 0)
        else:
            codes, entries, rows = coded
            width = entries.shape[1]
            fields += (codes.data_ptr(), entries.data_ptr(), rows, columns // width, width)
            fields += (columns, start)
        start += columns if is_pooled else 0
    widest = max(columns for _, columns in features)
    cols = min(triton.next_power_of_2(widest), _COLS)
    count = len(features) * bags if is_pooled else len(ids)
    if count:
        with torch.cuda.device(ids.get_device()):
            decode_kernel[(-(-count // (_LOOKED_UP // cols)),)](
                ids.contiguous(),
                count,
                offsets,
                bags,
                ids if weights is None else weights.contiguous(),
                sent(fields, ids.device),
                len(features),
                widest,
                out,
                out.stride(0),
                STEPS=(len(features) - 1).bit_length(),
                POOLED=is_pooled,
                MEAN=pooling == "mean",
                WEIGHTED=is_weighted,
                BAGS=_LOOKED_UP // cols,
                COLS=cols,
                num_warps=4,
                enable_fp_fusion=False,
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


# These numbers change from batch to batch: Triton would compile a kernel for each.
@triton.jit(do_not_specialize=["count", "bags", "features", "widest"])  # type: ignore[untyped-decorator]
def decode_kernel(
    ids: tl.tensor,
    count: tl.tensor,
    offsets: tl.tensor,
    bags: tl.tensor,
    weights: tl.tensor,
    table: tl.tensor,
    features: tl.tensor,
    widest: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    STEPS: tl.constexpr,
    POOLED: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BAGS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Look up BAGS bags of all features, or of sequences, BAGS ids; COLS columns at a time. The
    numbers added to ``info`` are the positions of the fields that :func:`decode_lookups` sends."""
    element = tl.arange(0, BAGS * COLS)
    bag = tl.program_id(0).to(tl.int64) * BAGS + element // COLS
    here = bag < count
    if POOLED:
        feature = bag // bags
        first = tl.load(offsets + bag, mask=here, other=0).to(tl.int64)
        last = tl.load(offsets + bag + 1, mask=here, other=0).to(tl.int64)
        out += (bag - feature * bags) * out_stride
    else:
        # By binary search, the last feature that begins here or before.
        feature = tl.zeros([BAGS * COLS], dtype=tl.int64)
        for step in tl.static_range(STEPS):
            later = feature + (1 << (STEPS - 1 - step))
            start = tl.load(offsets + later * bags, mask=later < features, other=0)
            feature = tl.where((later < features) & (start <= bag), later, feature)
        first = bag
        last = tl.where(here, bag + 1, bag)
        out += bag * out_stride
    info = table + feature * 7
    codes = tl.load(info, mask=here, other=0).to(tl.pointer_type(tl.uint8))
    entries = tl.load(info + 1, mask=here, other=0).to(tl.pointer_type(tl.float32))
    rows = tl.load(info + 2, mask=here, other=0)
    groups = tl.load(info + 3, mask=here, other=1)
    width = tl.load(info + 4, mask=here, other=1).to(tl.int32)
    columns = tl.load(info + 5, mask=here, other=0)
    out += tl.load(info + 6, mask=here, other=0)
    longest = tl.max(last - first, 0)
    for left in range(0, widest, COLS):
        col = left + element % COLS
        inside = here & (col < columns)
        group = col // width
        total = tl.zeros([BAGS * COLS], dtype=tl.float32)
        for number in range(longest):
            known = inside & (first + number < last)
            row = tl.load(ids + first + number, mask=known, other=0).to(tl.int64)
            row = tl.where((row >= 0) & (row < rows), row, 0)
            code = tl.load(codes + row * groups + group, mask=known, other=0).to(tl.int32)
            place = (group * _ENTRIES + code) * width + (col - group * width)
            value = tl.load(entries + place, mask=known, other=0)
            if WEIGHTED:
                weight = tl.load(weights + first + number, mask=known, other=0).to(tl.float32)
                # As on a CPU: a sum adds products that are not rounded, a mean rounded ones.
                total = total + value * weight if MEAN else tl.fma(value, weight, total)
            else:
                total += value
        if MEAN:
            # `/` would divide approximately.
            total = tl.div_rn(total, tl.maximum(last - first, 1).to(tl.float32))
        tl.store(out + col, total, mask=inside)
