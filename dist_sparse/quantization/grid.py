"""Grids of 8 and 4 bits that hold zero exactly, in FBGEMM's rows.

In memory, a row is one of FBGEMM's fused 8-bit rows: a byte for each weight, zeros up to a multiple of four (its CUDA
kernels want that), then ``scale`` and ``bias`` as float32. A weight is ``code * scale + bias``, with ``bias =
-zero_point * scale``. ``scale`` has at most 16 significant bits and codes have 8, so that every product and every sum
of that formula is exact in float32: what a kernel reads is ``(code - zero_point) * scale`` on every device, with or
without fused multiply-add, and exactly 0 where the code is ``zero_point``. In artifacts, :func:`half_grid` does the
same for 8 and 4 bits with a scale and a bias in float16, which FBGEMM's inference kernels read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["chunks", "decode", "empty_rows", "encode_", "fbgemm", "fit_", "half_grid", "not_finite"]

_LEVELS: Final = 255
_TAIL: Final = 8  # bytes of scale and bias
_CHUNK: Final = 1 << 18  # elements of a table that are in float64 at once: 2 MiB, which caches hold
_LEAST_HALF: Final = 2.0**-24
_SPARE_BITS: Final = 0xFF  # of the 24 significant bits of a float32 scale, the 8 that are zero


def fbgemm() -> Any:
    """``torch.ops.fbgemm``, loaded.

    Raises:
        ImportError: FBGEMM is not installed; says how to install it.
    """
    try:
        import fbgemm_gpu  # noqa: F401  (it registers the kernels)
    except ImportError as fault:
        raise ImportError(
            "Tables in 8 bits need FBGEMM's kernels, and fbgemm_gpu can't be imported: install fbgemm-gpu, "
            "or fbgemm-gpu-cpu where there is no CUDA, in the version that fits your torch."
        ) from fault
    return torch.ops.fbgemm


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows that cover a table, each small enough to be taken to float64."""
    size = max(1, _CHUNK // max(1, columns))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def empty_rows(rows: int, columns: int, device: torch.device) -> Tensor:
    """Storage for packed rows: uint8 ``(rows, columns rounded up to 4, + 8)``, every byte 0."""
    return torch.zeros(rows, -(-columns // 4) * 4 + _TAIL, dtype=torch.uint8, device=device)


def not_finite(weight: Tensor) -> int:
    """How many rows of a matrix hold values that are NaN, infinite or beyond float32."""
    finite = weight.amin(dim=1).float().isfinite() & weight.amax(dim=1).float().isfinite()  # both pass NaN on
    return int((~finite).sum())


def fit_(packed: Tensor, weight: Tensor, dtype: torch.dtype) -> int:
    """Writes a scale and a bias for each row of ``weight``, over all of its values and 0.

    The step is ``(max(0, max) - min(0, min)) / 255``, rounded up to 16 significant bits, and no less than the smallest
    normal float32, so that nothing depends on how a device treats denormals. A row of zeros has scale 1.

    Args:
        packed: rows of :func:`empty_rows`.
        weight: any floating dtype, ``(rows, columns)``.
        dtype: what lookups return: both ends of the grid must be finite in it.

    Returns:
        How many rows have no such grid: a weight is NaN or infinite, or the range is too wide for the dtype or float32.
        What they were given means nothing.
    """
    low, span = _range(weight)
    wanted = (span / _LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
    bits = wanted.float().view(torch.int32)
    scale = ((bits + _SPARE_BITS) & ~_SPARE_BITS).view(torch.float32).double()
    scale = torch.where(span == 0, torch.ones_like(scale), scale)
    zero_point = torch.round(-low / scale)
    _write(packed, scale, zero_point)
    ends = torch.maximum(zero_point, _LEVELS - zero_point) * scale
    finite = span.isfinite() & (scale * _LEVELS).float().isfinite() & ends.to(dtype).isfinite()
    return int((~finite).sum())


def half_grid(weight: Tensor, bits: int) -> Tensor:
    """Return a scale and a bias for each row of ``weight``, over all of its values and 0: float16 ``(rows, 2)``.

    The step is ``(max(0, max) - min(0, min)) / (2**bits - 1)``, rounded up to ``11 - bits`` significant bits and to a
    multiple of 2**-24, the smallest float16, so that ``bias = -zero_point * scale`` is exact in float16 too. A row of
    zeros has scale 1.

    Args:
        weight: any floating dtype, ``(rows, columns)``, of values of at most 2**15 in magnitude.
        bits: 8 or 4.
    """
    low, span = _range(weight)
    wanted = span / (2**bits - 1)
    unit = torch.exp2(torch.floor(torch.log2(wanted.clamp(min=_LEAST_HALF))) - (10 - bits)).clamp_(min=_LEAST_HALF)
    scale = torch.where(span == 0, torch.ones_like(span), torch.ceil(wanted / unit) * unit)
    return torch.stack([scale, 0.0 - torch.round(-low / scale) * scale], 1).half()


def encode_(packed: Tensor, weight: Tensor) -> int:
    """Writes the codes nearest to ``weight`` on the grids that ``packed`` has; a 0 becomes the zero point's code.

    No weight in the range of its row's grid is off by more than half a scale; others become the end of the grid.

    Args:
        packed: rows with a scale and a bias.
        weight: any floating dtype, ``(rows, columns)``.

    Returns:
        How many rows hold NaN, or values that are infinite or beyond float32; their codes mean nothing.
    """
    scale, bias = _tail(packed).double().unsqueeze(-1).unbind(dim=1)
    codes = weight.double().div_(scale) if weight.dtype != torch.float64 else weight / scale
    wrong = not_finite(weight)
    packed[:, : weight.shape[1]] = codes.round_().sub_(bias / scale).clamp_(0, _LEVELS).to(torch.uint8)
    return wrong


def decode(packed: Tensor, columns: int) -> Tensor:
    """The weights behind packed rows, float32 ``(rows, columns)``, by FBGEMM's kernel."""
    weights: Tensor = fbgemm().Fused8BitRowwiseQuantizedToFloat(packed)
    return weights[:, :columns]


def _range(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest value of each row, or 0, and how far the highest, or 0, is from it: float64."""
    exact = weight.double()
    low = exact.amin(dim=1).clamp_(max=0.0)
    return low, exact.amax(dim=1).clamp_(min=0.0) - low


def _tail(packed: Tensor) -> Tensor:
    """A live view of scale and bias, float32 ``(rows, 2)``."""
    return packed[:, -_TAIL:].view(torch.float32)


def _write(packed: Tensor, scale: Tensor, zero_point: Tensor) -> None:
    tail = _tail(packed)
    tail[:, 0] = scale
    tail[:, 1] = 0.0 - zero_point * scale
