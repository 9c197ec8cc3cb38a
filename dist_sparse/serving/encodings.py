"""Rows as an artifact stores them: float32, float16, 8 and 4 bits. A removed weight is stored as
what decodes to 0.

8 and 4 bits are on grids that hold zero exactly, in the format of FBGEMM's inference kernels:
``code * scale + bias`` with ``bias = -zero_point * scale``. The code ``zero_point`` decodes to
exactly 0, because scale and bias are float16 and their products are exact in float32. Two 4-bit
codes share a byte, the first in its lower half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.codes.books import ENTRIES, LARGEST_HALF, decode_books

Dtype = Literal["fp32", "fp16", "int8", "int4", "codes"]


class Encoding(NamedTuple):
    """How rows of a dtype are stored.

    Args:
        bits: of a weight; of codes a byte is a group of columns.
        stored: the dtype of their tensor; two 4-bit codes share a byte.
        largest: the largest magnitude of a weight.
    """

    bits: int
    stored: torch.dtype
    largest: float


_FLOAT = torch.finfo(torch.float32).max
# Half of what float16 holds: beyond it the bias may overflow when it is rounded away from 0.
_GRID = 2.0**15
ENCODINGS: dict[str, Encoding] = {
    "fp32": Encoding(32, torch.float32, _FLOAT),
    "fp16": Encoding(16, torch.float16, LARGEST_HALF),
    "int8": Encoding(8, torch.uint8, _GRID),
    "int4": Encoding(4, torch.uint8, _GRID),
    # The range is that of the tables beside them: codes stand for entries of their books.
    "codes": Encoding(8, torch.uint8, _FLOAT),
}

# Bits of a weight, by dtype.
BITS = {name: ENCODINGS[name].bits for name in ("fp32", "fp16", "int8", "int4")}

# The smallest float16 above 0.
LEAST_HALF = 2.0**-24

# Elements of a table that are in float64 at once: 2 MiB, which caches hold.
_CHUNK = 1 << 18


def encode(weight: Tensor, dtype: str, scales: Tensor | None = None) -> dict[str, Tensor]:
    """Encode rows ``(n, columns)`` of any floating dtype, of magnitudes that the dtype holds;
    codes are stored as they are.

    Args:
        scales: of the columns, float16, for 4 bits on grids of columns in the place of rows.

    Returns:
        ``rows``: float32 or float16 ``(n, columns)``; 8-bit codes, uint8 ``(n, columns)``; or 4-bit
        codes, uint8 ``(n, ceil(columns / 2))``. ``scale_bias`` of grids of rows, float16
        ``(n, 2)``, or ``scales``. A 0 is stored as what decodes to exactly 0, others as what is
        nearest.
    """
    bits, stored, _ = ENCODINGS[dtype]
    if dtype not in ("int8", "int4"):
        return {"rows": weight.to(stored)}
    if scales is not None:
        # In float64: a float32 division could round to the next step.
        steps = torch.round(weight.double() / scales.double()).clamp_(_LEAST_STEP, _LAST_STEP)
        return {"rows": _in_halves((steps.int() & 15).to(stored)), "scales": scales}
    tail = half_grid(weight, bits)
    scale, bias = tail.double().unsqueeze(-1).unbind(1)
    # In float64 as above.
    exact = torch.round(weight.double() / scale - bias / scale)
    codes = exact.clamp_(0, 2**bits - 1).to(stored)
    return {"rows": _in_halves(codes) if bits == 4 else codes, "scale_bias": tail}


def decode(stored: Mapping[str, Tensor], columns: int) -> Tensor:
    """Return the weights of encoded rows, float32 ``(n, columns)``, as FBGEMM's kernels read them.

    Args:
        stored: ``rows`` with their ``scale_bias``, or the table's ``scales`` or ``books``.
    """
    rows = stored["rows"]
    if (books := books_of(stored)) is not None:
        return decode_books(rows, books, columns)
    if "scale_bias" not in stored:
        return rows.float()
    if rows.shape[1] < columns:
        rows = torch.stack([rows & 15, rows >> 4], 2).flatten(1)[:, :columns]
    # Of one column, a byte with a 4-bit code is the code.
    scale, bias = stored["scale_bias"].float().unsqueeze(-1).unbind(1)
    return rows * scale + bias


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of rows that cover a table, each small enough to be taken to float64."""
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


# 4-bit grids with one scale per column: half a byte per weight, and no header per row.
#
# A row of FBGEMM's 4-bit format carries a scale and a bias, 4 bytes: a third of a row of 16
# columns. Columns of one table differ more than rows do, so one symmetric grid per column and table
# serves better rows at the same bytes. A code is a step of -8 to 7 in two's complement, so that the
# byte 0 stands for two weights of exactly 0. Bytes are decoded by books: float16 `(groups, 256,
# 2)`, for each byte of a row the two weights that each of its 256 values stands for.

# Steps of a grid: from -8 to 7.
_LEAST_STEP, _LAST_STEP = -8, 7
# A float32 without its sign, cut after 6 bits of its fraction: bins 1/64 apart.
_SHIFT, _BINS = 17, 1 << 14
# Scales that are tried for a column, 16 for each halving of the largest: its grid reaches the
# column's largest weight.
_TRIED, _PER_HALVING = 96, 16


class ColumnSpread:
    """Counts how large the weights of each column are, over all rows of a table.

    Counts are integers, so they depend neither on the order of the rows nor on their chunks.

    Args:
        columns: of the table.

    Attributes:
        counts: int64 ``(columns, bins)``; the sum over parts of a table is that of the table.
    """

    def __init__(self, columns: int) -> None:
        self.counts = torch.zeros(columns, _BINS, dtype=torch.int64)

    def add(self, rows: Tensor) -> None:
        """Count rows ``(n, columns)`` of any floating dtype."""
        columns = len(self.counts)
        bins = rows.detach().cpu().float().abs().contiguous().view(torch.int32) >> _SHIFT
        places = (bins + _BINS * torch.arange(columns)).flatten()
        self.counts.view(-1).index_add_(0, places, torch.ones_like(places))

    def scales(self) -> Tensor:
        """Return the scale of each column with the smallest sum of squared errors: float16
        ``(columns,)``, 1 for columns of zeros.

        A scale has at most 8 significant bits, so that each of its steps is exact in float16.
        """
        magnitudes = (torch.arange(_BINS, dtype=torch.int32) << _SHIFT) + (1 << (_SHIFT - 1))
        centers = magnitudes.view(torch.float32).double()
        return torch.stack([_best_scale(centers, counts) for counts in self.counts]).half()


def _best_scale(centers: Tensor, counts: Tensor) -> Tensor:
    # The first bin holds what float16 can't tell from 0.
    used = (counts > 0) & (centers >= LEAST_HALF)
    values, weights = centers[used].unsqueeze(1), counts[used].double()
    if not len(values):
        return torch.tensor(1.0, dtype=torch.float64)
    tried = values[-1] / _LAST_STEP * torch.exp2(-torch.arange(_TRIED) / _PER_HALVING)
    power = torch.floor(torch.log2(tried.clamp(min=LEAST_HALF)))
    unit = torch.exp2(power - 7).clamp_(min=LEAST_HALF)
    scales = torch.ceil(tried / unit) * unit
    steps = torch.round(values / scales).clamp_(max=_LAST_STEP)
    errors = weights @ (values - steps * scales) ** 2
    return scales[errors.argmin()]


def _in_halves(codes: Tensor) -> Tensor:
    """Put two 4-bit codes, uint8 ``(n, columns)``, into each byte, the first in its lower half."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def books_of(stored: Mapping[str, Tensor]) -> Tensor | None:
    """Return what the bytes of rows stand for, float16 ``(groups, 256, columns of a group)``: the
    ``books`` of codes, or those of grids of columns, made of their ``scales``; None of others."""
    if "scales" not in stored:
        return stored.get("books")
    byte = torch.arange(ENTRIES, device=stored["scales"].device)
    halves = torch.stack([byte & 15, byte >> 4], 1)
    # Two's complement of 4 bits.
    steps = torch.where(halves < 8, halves, halves - 16)
    # The half byte behind an odd last column is always 0.
    scales = F.pad(stored["scales"], (0, len(stored["scales"]) % 2))
    return (steps * scales.double().view(-1, 1, 2)).half()
