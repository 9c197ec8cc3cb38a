"""Rows as an artifact stores them: float32, float16, 8 and 4 bits. A removed weight is stored as
what decodes to 0.

8 and 4 bits are on grids that hold zero exactly, in the format of FBGEMM's inference kernels:
``code * scale + bias``, both in float16 (:func:`dist_sparse.serving.grid.half_grid`). Two 4-bit
codes share a byte, the first in its lower half.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.serving.grid import half_grid
from dist_sparse.serving.manifest import Dtype

__all__ = ["BITS", "LARGEST", "Rows", "decode", "encode", "out_of_range"]

LARGEST: Final[dict[Dtype, float]] = {
    "fp32": torch.finfo(torch.float32).max,
    "fp16": torch.finfo(torch.float16).max,
    "int8": 2.0
    ** 15,  # beyond half of what float16 holds the bias may overflow when it is rounded away from 0
    "int4": 2.0**15,
}
"""The largest magnitude of a weight that each dtype holds."""

BITS: Final[dict[Dtype, int]] = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}


class Rows(NamedTuple):
    """Encoded rows: what is stored for them, and of 8 and 4 bits their scales and biases, float16
    ``(rows, 2)``."""

    rows: Tensor
    scale_bias: Tensor | None


def out_of_range(weight: Tensor, dtype: Dtype) -> float | None:
    """Return a value of ``weight`` that ``dtype`` can't hold (NaN if there is one), or None."""
    if not weight.numel():
        return None
    for value in map(float, torch.aminmax(weight)):
        if not abs(value) <= LARGEST[dtype]:
            return value
    return None


def encode(weight: Tensor, dtype: Dtype) -> Rows:
    """Encode rows ``(n, columns)`` of any floating dtype, whose values :func:`out_of_range` allows.

    Returns:
        float32 or float16 ``(n, columns)``; 8-bit codes, uint8 ``(n, columns)``; or 4-bit codes,
        uint8 ``(n, ceil(columns / 2))``. A 0 is stored as what decodes to exactly 0, others as what
        is nearest.
    """
    if dtype == "fp32" or dtype == "fp16":
        return Rows(weight.to(torch.float32 if dtype == "fp32" else torch.float16), None)
    tail = half_grid(weight, BITS[dtype])
    scale, bias = tail.double().unsqueeze(-1).unbind(1)
    codes = (
        torch.round(weight.double() / scale - bias / scale)
        .clamp_(0, 2 ** BITS[dtype] - 1)
        .to(torch.uint8)
    )
    return Rows(_halves(codes) if dtype == "int4" else codes, tail)


def decode(stored: Rows, columns: int) -> Tensor:
    """Return the weights of encoded rows, float32 ``(n, columns)``, as FBGEMM's kernels read
    them."""
    if stored.scale_bias is None:
        return stored.rows.float()
    # Of one column, a byte with a 4-bit code is the code.
    codes = stored.rows if stored.rows.shape[1] == columns else _whole(stored.rows)[:, :columns]
    scale, bias = stored.scale_bias.float().unsqueeze(-1).unbind(1)
    return codes * scale + bias


def _halves(codes: Tensor) -> Tensor:
    """Put two 4-bit codes into each byte, the first in its lower half."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _whole(halves: Tensor) -> Tensor:
    """The 4-bit codes of bytes, one in each byte."""
    return torch.stack([halves & 15, halves >> 4], 2).flatten(1)
