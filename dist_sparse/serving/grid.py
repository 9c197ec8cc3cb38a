"""Grids of 8 and 4 bits that hold zero exactly.

A weight is ``code * scale + bias`` with ``bias = -zero_point * scale``: the code ``zero_point``
decodes to exactly 0, because scale and bias are float16, as FBGEMM reads them, and their products
are exact in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

__all__ = ["chunks", "half_grid"]

_CHUNK: Final = 1 << 18  # elements of a table that are in float64 at once: 2 MiB, which caches hold
_LEAST_HALF: Final = 2.0**-24


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
    low = exact.amin(dim=1).clamp_(max=0.0)
    span = exact.amax(dim=1).clamp_(min=0.0) - low
    wanted = span / (2**bits - 1)
    unit = torch.exp2(torch.floor(torch.log2(wanted.clamp(min=_LEAST_HALF))) - (10 - bits)).clamp_(
        min=_LEAST_HALF
    )
    scale = torch.where(span == 0, torch.ones_like(span), torch.ceil(wanted / unit) * unit)
    return torch.stack([scale, 0.0 - torch.round(-low / scale) * scale], 1).half()
