"""Rows as an artifact stores them: float32, float16, 8 and 4 bits. A removed weight is stored as
what decodes to 0.

8 and 4 bits are on grids that hold zero exactly, in the format of FBGEMM's inference kernels:
``code * scale + bias`` with ``bias = -zero_point * scale``. The code ``zero_point`` decodes to
exactly 0, because scale and bias are float16 and their products are exact in float32. Two 4-bit
codes share a byte, the first in its lower half.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.codes.books import decode_books
from dist_sparse.serving.column_grid import LEAST_HALF, books_of, encode_columns, in_halves
from dist_sparse.serving.manifest import Dtype

# The largest magnitude of a weight that each dtype holds.
LARGEST: Final[dict[Dtype, float]] = {
    "fp32": torch.finfo(torch.float32).max,
    "fp16": torch.finfo(torch.float16).max,
    # Half of what float16 holds: beyond it the bias may overflow when it is rounded away from 0.
    "int8": 2.0**15,
    "int4": 2.0**15,
    # Of the tables beside them; codes stand for entries of their books.
    "codes": torch.finfo(torch.float32).max,
}

BITS: Final[dict[Dtype, int]] = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}

_CHUNK: Final = 1 << 18  # elements of a table that are in float64 at once: 2 MiB, which caches hold


class Rows(NamedTuple):
    """Encoded rows: weights or codes; of 8 and 4 bits their scales and biases, float16
    ``(rows, 2)``, or the scales of the table's columns, float16 ``(columns,)``; of codes the books,
    float16 ``(groups, 256, columns of a group)``."""

    rows: Tensor
    scale_bias: Tensor | None = None
    scales: Tensor | None = None
    books: Tensor | None = None


def out_of_range(weight: Tensor, dtype: Dtype) -> float | None:
    """Return a value of ``weight`` that ``dtype`` can't hold (NaN if there is one), or None."""
    if not weight.numel():
        return None
    for value in map(float, torch.aminmax(weight)):
        # Not ``>``, which is false for NaN.
        if not abs(value) <= LARGEST[dtype]:
            return value
    return None


def encode(weight: Tensor, dtype: Dtype, scales: Tensor | None = None) -> Rows:
    """Encode rows ``(n, columns)`` of any floating dtype, whose values :func:`out_of_range` allows;
    codes are stored as they are.

    Args:
        scales: of the columns, for 4 bits on grids of columns in the place of rows.

    Returns:
        float32 or float16 ``(n, columns)``; 8-bit codes, uint8 ``(n, columns)``; or 4-bit codes,
        uint8 ``(n, ceil(columns / 2))``. A 0 is stored as what decodes to exactly 0, others as what
        is nearest.
    """
    if dtype == "codes":
        return Rows(weight)
    if dtype == "fp32" or dtype == "fp16":
        return Rows(weight.to(torch.float32 if dtype == "fp32" else torch.float16))
    if scales is not None:
        return Rows(encode_columns(weight, scales), scales=scales)
    tail = half_grid(weight, BITS[dtype])
    scale, bias = tail.double().unsqueeze(-1).unbind(1)
    # In float64: a float32 division could round to the next code.
    exact = torch.round(weight.double() / scale - bias / scale)
    codes = exact.clamp_(0, 2 ** BITS[dtype] - 1).to(torch.uint8)
    return Rows(in_halves(codes) if dtype == "int4" else codes, tail)


def decode(stored: Rows, columns: int) -> Tensor:
    """Return the weights of encoded rows, float32 ``(n, columns)``, as FBGEMM's kernels read
    them."""
    if stored.books is not None:
        return decode_books(stored.rows, stored.books, columns)
    if stored.scales is not None:
        return decode_books(stored.rows, books_of(stored.scales), columns)
    if stored.scale_bias is None:
        return stored.rows.float()
    # Of one column, a byte with a 4-bit code is the code.
    codes = stored.rows if stored.rows.shape[1] == columns else _whole(stored.rows)[:, :columns]
    scale, bias = stored.scale_bias.float().unsqueeze(-1).unbind(1)
    return codes * scale + bias


def _whole(halves: Tensor) -> Tensor:
    """The 4-bit codes of bytes, one in each byte."""
    return torch.stack([halves & 15, halves >> 4], 2).flatten(1)


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows that cover a table, each small enough to be taken to float64."""
    size = max(1, _CHUNK // max(1, columns))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def half_grid(weight: Tensor, bits: int) -> Tensor:
    """Return a scale and a bias for each row of ``weight``, over all of its values and 0: float16
    ``(rows, 2)``.

    The step is ``(max(0, max) - min(0, min)) / (2**bits - 1)``, rounded up to ``11 - bits``
    significant bits and to a multiple of 2**-24, the smallest float16, so that
    ``bias = -zero_point * scale`` is exact in float16 too. A row of zeros has scale 1.

    Args:
        weight: any floating dtype, ``(rows, columns)``, of values of at most 2**15 in magnitude.
        bits: 8 or 4.
    """
    exact = weight.double()
    # The grid reaches to 0 on both sides, so that 0 is one of its points.
    low = exact.amin(dim=1).clamp_(max=0.0)
    span = exact.amax(dim=1).clamp_(min=0.0) - low
    wanted = span / (2**bits - 1)
    power = torch.floor(torch.log2(wanted.clamp(min=LEAST_HALF)))
    # A zero point of ``bits`` bits times a scale of ``11 - bits`` ones has 11, as float16 has.
    unit = torch.exp2(power - (10 - bits)).clamp_(min=LEAST_HALF)
    scale = torch.where(span == 0, torch.ones_like(span), torch.ceil(wanted / unit) * unit)
    return torch.stack([scale, 0.0 - torch.round(-low / scale) * scale], 1).half()
