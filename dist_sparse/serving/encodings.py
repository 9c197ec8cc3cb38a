"""Rows as an artifact stores them: float32, float16, 8 and 4 bits. A removed weight decodes to
exactly 0.

8 and 4 bits are codes on a grid per row, in the format of FBGEMM's inference kernels:
``code * scale + bias`` with ``bias = -zero_point * scale``. The code ``zero_point`` decodes to
exactly 0, because scale and bias are float16, whose products are exact in float32. Two 4-bit codes
share a byte, the first in its lower half.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.serving.books import ENTRIES, LARGEST_HALF, decode_books

Dtype = Literal["fp32", "fp16", "int8", "int4", "codes"]
# The tensors of a table by name, as in Table.layout().
Tensors = Mapping[str, Tensor]


class Encoding(NamedTuple):
    """How rows of a dtype are stored.

    Args:
        bits: the bits of a weight; for ``"codes"``, the bits of a group of columns.
        stored: the dtype of the tensor of rows; two 4-bit codes share a byte.
        largest: the largest magnitude of a weight.
    """

    bits: int
    stored: torch.dtype
    largest: float


_LARGEST_FLOAT = torch.finfo(torch.float32).max
# Half the range of float16: beyond it a bias that is rounded away from 0 may overflow.
_LARGEST_ON_GRID = 2.0**15
ENCODINGS: dict[str, Encoding] = {
    "fp32": Encoding(32, torch.float32, _LARGEST_FLOAT),
    "fp16": Encoding(16, torch.float16, LARGEST_HALF),
    "int8": Encoding(8, torch.uint8, _LARGEST_ON_GRID),
    "int4": Encoding(4, torch.uint8, _LARGEST_ON_GRID),
    # Codes have no limit themselves: books are clamped to float16 when they are learned.
    "codes": Encoding(8, torch.uint8, _LARGEST_FLOAT),
}

# Dtypes in which each weight is stored by itself.
UNCODED = ("fp32", "fp16", "int8", "int4")

# The smallest float16 above 0.
LEAST_HALF = 2.0**-24

# Elements that are converted to float64 at once: 2 MiB, which fits in a cache.
_CHUNK = 1 << 18


def encode(weight: Tensor, dtype: str, scales: Tensor | None = None) -> Tensors:
    """Encode rows ``(n, columns)`` of any floating dtype. Codes of books are stored as they are.

    A 0 decodes to exactly 0, any other weight to the nearest value.

    Args:
        weight: the rows, with magnitudes up to the encoding's ``largest``.
        scales: float16 ``(columns,)``, for 4 bits on a grid per column instead of per row.

    Returns:
        ``rows``: float32 or float16 ``(n, columns)``; 8-bit codes, uint8 ``(n, columns)``; or 4-bit
        codes, uint8 ``(n, ceil(columns / 2))``. With a grid per row also ``scale_bias``, float16
        ``(n, 2)``; with a grid per column ``scales``.
    """
    bits, stored, _ = ENCODINGS[dtype]
    if dtype not in ("int8", "int4"):
        return {"rows": weight.to(stored)}
    if scales is not None:
        # The division is in float64: in float32 it could round to the next step.
        steps = torch.round(weight.double() / scales.double()).clamp_(_LEAST_STEP, _LAST_STEP)
        return {"rows": _pack_nibbles((steps.int() & 15).to(stored)), "scales": scales}
    scale_bias = half_grid(weight, bits)
    scale, bias = scale_bias.double().unsqueeze(-1).unbind(1)
    # The division is in float64 as above.
    exact = torch.round(weight.double() / scale - bias / scale)
    codes = exact.clamp_(0, 2**bits - 1).to(stored)
    return {"rows": _pack_nibbles(codes) if bits == 4 else codes, "scale_bias": scale_bias}


def decode(stored: Tensors, columns: int) -> Tensor:
    """Return the weights of encoded rows, float32 ``(n, columns)``, as FBGEMM's kernels read them.

    Args:
        stored: ``rows``, with their ``scale_bias``, or with the table's ``scales`` or ``books``.
    """
    rows = stored["rows"]
    if (books := books_of(stored)) is not None:
        return decode_books(rows, books, columns)
    if "scale_bias" not in stored:
        return rows.float()
    if rows.shape[1] < columns:
        rows = torch.stack([rows & 15, rows >> 4], 2).flatten(1)[:, :columns]
    # A single column of 4 bits was not unpacked above: its byte is the code, with 0 above it.
    scale, bias = stored["scale_bias"].float().unsqueeze(-1).unbind(1)
    return rows * scale + bias


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices that cover the rows of a table, each small enough to convert to float64."""
    size = max(1, _CHUNK // max(1, columns))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def half_grid(weight: Tensor, bits: int) -> Tensor:
    """Return scale and bias of each row's grid, which spans the row's values and 0: float16
    ``(rows, 2)``.

    The scale is ``(max(0, max) - min(0, min)) / (2**bits - 1)``, rounded up to ``11 - bits``
    significant bits and to a multiple of 2**-24, the smallest float16. Then
    ``bias = -zero_point * scale`` is exact in float16 too. A row of zeros has scale 1.

    Args:
        weight: any floating dtype, ``(rows, columns)``, of values of at most 2**15 in magnitude.
        bits: 8 or 4.
    """
    exact = weight.double()
    # The span includes 0, so that 0 is a point of the grid.
    low = exact.amin(dim=1).clamp_(max=0.0)
    span = exact.amax(dim=1).clamp_(min=0.0) - low
    # A zero point of ``bits`` bits times a scale of ``11 - bits`` bits has 11 bits, like float16.
    rounded = _round_up(span / (2**bits - 1), 11 - bits)
    scale = torch.where(span == 0, torch.ones_like(span), rounded)
    return torch.stack([scale, 0.0 - torch.round(-low / scale) * scale], 1).half()


def _round_up(values: Tensor, bits: int) -> Tensor:
    """Round positive float64 up to ``bits`` significant bits and to a multiple of 2**-24, so that
    float16 holds the result, and its products with integers of ``11 - bits`` bits, exactly."""
    power = torch.floor(torch.log2(values.clamp(min=LEAST_HALF)))
    unit = torch.exp2(power - (bits - 1)).clamp_(min=LEAST_HALF)
    return torch.ceil(values / unit) * unit


# 4-bit grids with one scale per column: half a byte per weight, and no header per row.
#
# A row of FBGEMM's 4-bit format has a scale and a bias, 4 bytes: a third of a row of 16 columns.
# Columns of a table differ more than its rows, so a symmetric grid per column serves better rows at
# the same bytes. A code is a step from -8 to 7 in two's complement, so the byte 0 holds two weights
# of exactly 0. Bytes are decoded by books, float16 `(groups, 256, 2)`: a byte of a row is a group
# of two columns, and its value selects their two weights.

_LEAST_STEP, _LAST_STEP = -8, 7
# Magnitudes are counted by their float32 bits without the lower 17: the exponent and 6 bits of the
# fraction, so bins are 1/64 apart.
_SHIFT, _BINS = 17, 1 << 14
# Scales that are tried for a column, 16 per halving: the largest one reaches the column's largest
# weight, the smallest to about 1/64 of it.
_TRIED, _PER_HALVING = 96, 16


class ColumnSpread:
    """Histograms of the magnitudes of each column, over all rows of a table.

    Counts are integers, so they depend neither on the order of the rows nor on their chunks.

    Args:
        columns: the number of columns of the table.

    Attributes:
        counts: int64 ``(columns, bins)``; may be summed over parts of a table.
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
        ``(columns,)``. A column of zeros has scale 1."""
        # The lower bits are 0 in the first magnitude of a bin, and 1 and zeros in its center.
        bits = (torch.arange(_BINS, dtype=torch.int32) << _SHIFT) + (1 << (_SHIFT - 1))
        centers = bits.view(torch.float32).double()
        return torch.stack([_best_scale(centers, counts) for counts in self.counts]).half()


def _best_scale(centers: Tensor, counts: Tensor) -> Tensor:
    # Smaller magnitudes are 0 in float16.
    used = (counts > 0) & (centers >= LEAST_HALF)
    values, weights = centers[used].unsqueeze(1), counts[used].double()
    if not len(values):
        return torch.tensor(1.0, dtype=torch.float64)
    tried = values[-1] / _LAST_STEP * torch.exp2(-torch.arange(_TRIED) / _PER_HALVING)
    # A step has 3 bits: its product with 8 bits is exact in float16.
    scales = _round_up(tried, 8)
    steps = torch.round(values / scales).clamp_(max=_LAST_STEP)
    errors = weights @ (values - steps * scales) ** 2
    return scales[errors.argmin()]


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Put two 4-bit codes, uint8 ``(n, columns)``, into each byte, the first in its lower half."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def books_of(stored: Tensors) -> Tensor | None:
    """Return the books that decode the bytes of rows, float16 ``(groups, 256, width)``: the
    ``books`` of codes, or books computed from the ``scales`` of columns. Other rows have none."""
    if "scales" not in stored:
        return stored.get("books")
    byte = torch.arange(ENTRIES, device=stored["scales"].device)
    nibbles = torch.stack([byte & 15, byte >> 4], 1)
    # A nibble is a step in two's complement.
    steps = torch.where(nibbles < 8, nibbles, nibbles - 16)
    # An odd last column has a byte of its own, and the other half of the byte is 0.
    scales = F.pad(stored["scales"], (0, len(stored["scales"]) % 2))
    return (steps * scales.double().view(-1, 1, 2)).half()
