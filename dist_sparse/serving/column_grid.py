"""4-bit grids with one scale per column: half a byte per weight, and no header per row.

A row of FBGEMM's 4-bit format carries a scale and a bias, 4 bytes: a third of a row of 16 columns.
Columns of one table differ more than rows do, so one symmetric grid per column and table serves
better rows at the same bytes. A code is a step of -8 to 7 in two's complement, so that the byte 0
stands for two weights of exactly 0.

Bytes are decoded by books: float16 ``(groups, 256, 2)``, for each byte of a row the two weights
that each of its 256 values stands for.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.codes.books import ENTRIES

# Steps of a grid: from -8 to 7.
_LEAST_STEP, _LAST_STEP = -8, 7
# A float32 without its sign, cut after 6 bits of its fraction: bins 1/64 apart.
_SHIFT, _BINS = 17, 1 << 14
# Scales that are tried for a column, 16 for each halving of the largest: its grid reaches the
# column's largest weight.
_TRIED, _PER_HALVING = 96, 16
LEAST_HALF: Final = 2.0**-24
"""The smallest float16 above 0."""


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
        found = [_best_scale(centers, counts) for counts in self.counts]
        return torch.stack(found).half() if found else torch.zeros(0, dtype=torch.float16)


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


def encode_columns(rows: Tensor, scales: Tensor) -> Tensor:
    """Return the bytes of rows ``(n, columns)``: uint8 ``(n, ceil(columns / 2))``, the first of two
    columns in the lower half. Each weight is stored as the nearest step of its column's grid."""
    # In float64: a float32 division could round to the next step.
    steps = torch.round(rows.double() / scales.double()).clamp_(_LEAST_STEP, _LAST_STEP)
    return in_halves((steps.to(torch.int32) & 15).to(torch.uint8))


def in_halves(codes: Tensor) -> Tensor:
    """Put two 4-bit codes, uint8 ``(n, columns)``, into each byte, the first in its lower half."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def books_of(scales: Tensor) -> Tensor:
    """Return the books of grids: float16 ``(ceil(columns / 2), 256, 2)``."""
    byte = torch.arange(ENTRIES)
    halves = torch.stack([byte & 15, byte >> 4], 1)
    # Two's complement of 4 bits.
    steps = torch.where(halves < 8, halves, halves - 16)
    # The half byte behind an odd last column is always 0.
    pairs = F.pad(scales, (0, len(scales) % 2)).double().view(-1, 1, 2)
    return (steps * pairs).half()
