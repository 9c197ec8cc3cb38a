"""Rows as an artifact stores them: float32, float16, 8 and 4 bits, and packed to the elements that are not pruned.

- 8 and 4 bits are on grids that hold zero exactly, in the format of FBGEMM's inference kernels: ``code * scale +
  bias``, both in float16 (:func:`dist_sparse.serving.grid.half_grid`). Two 4-bit codes share a byte, the first in
  its lower half.
- A packed row is a bit for each block of columns (not zero in any of its bits: stored), and the elements of the stored
  blocks one after the other. Rows begin at bytes: a row with an odd number of 4-bit codes ends with half a byte of 0.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.masks import pack, unpack
from dist_sparse.serving.grid import half_grid
from dist_sparse.serving.manifest import Dtype

__all__ = [
    "BITS",
    "LARGEST",
    "Rows",
    "decode",
    "encode",
    "out_of_range",
    "pack_rows",
    "packed_bytes",
    "starts",
    "unpack_rows",
]

LARGEST: Final[dict[Dtype, float]] = {
    "fp32": torch.finfo(torch.float32).max,
    "fp16": torch.finfo(torch.float16).max,
    "int8": 2.0**15,  # beyond half of what float16 holds the bias may overflow when it is rounded away from 0
    "int4": 2.0**15,
}
"""The largest magnitude of a weight that each dtype holds."""

BITS: Final[dict[Dtype, int]] = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}


class Rows(NamedTuple):
    """Encoded rows: what is stored for them, and of 8 and 4 bits their scales and biases, float16 ``(rows, 2)``."""

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
        float32 or float16 ``(n, columns)``; 8-bit codes, uint8 ``(n, columns)``; or 4-bit codes, uint8 ``(n,
        ceil(columns / 2))``. A 0 is stored as what decodes to exactly 0, others as what is nearest.
    """
    if dtype == "fp32" or dtype == "fp16":
        return Rows(weight.to(torch.float32 if dtype == "fp32" else torch.float16), None)
    tail = half_grid(weight, BITS[dtype])
    scale, bias = tail.double().unsqueeze(-1).unbind(1)
    codes = torch.round(weight.double() / scale - bias / scale).clamp_(0, 2 ** BITS[dtype] - 1).to(torch.uint8)
    return Rows(_halves(codes) if dtype == "int4" else codes, tail)


def decode(stored: Rows, columns: int) -> Tensor:
    """Return the weights of encoded rows, float32 ``(n, columns)``, as FBGEMM's kernels read them."""
    if stored.scale_bias is None:
        return stored.rows.float()
    # Of one column, a byte with a 4-bit code is the code.
    codes = stored.rows if stored.rows.shape[1] == columns else _whole(stored.rows)[:, :columns]
    scale, bias = stored.scale_bias.float().unsqueeze(-1).unbind(1)
    return codes * scale + bias


def packed_bytes(weight: Tensor, width: int, dtype: Dtype) -> int:
    """Return the bytes of the values of these rows, packed; without their bitmasks."""
    counts = _spread(_stored(weight, width), width, weight.shape[1]).sum(1)
    return int((-(-counts * BITS[dtype] // 8)).sum())


def pack_rows(weight: Tensor, stored: Rows, width: int) -> tuple[Tensor, Tensor]:
    """Pack encoded rows to their elements in blocks of columns that are not all zero.

    Args:
        weight: the rows, ``(n, columns)``.
        stored: what :func:`encode` made of them.
        width: columns of a block.

    Returns:
        The bitmasks, uint8 ``(n, ceil(blocks / 8))``, and the values, flat, of the dtype of ``stored.rows``.
    """
    columns = weight.shape[1]
    blocks = _stored(weight, width)
    taken = _spread(blocks, width, columns)
    padded = torch.nn.functional.pad(blocks, (0, -blocks.shape[1] % 8))
    mask = pack(padded.view(-1)).view(len(weight), padded.shape[1] // 8)
    if stored.rows.shape[1] == columns:
        return mask, stored.rows[taken]
    counts = taken.sum(1)
    ends = (counts + counts % 2).cumsum(0)
    codes = torch.zeros(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8, device=weight.device)
    places = (ends - counts - counts % 2).unsqueeze(1) + taken.cumsum(1) - 1
    codes[places[taken]] = _whole(stored.rows)[:, :columns][taken]
    return mask, _halves(codes.view(1, -1)).view(-1)


def starts(mask: Tensor, width: int, columns: int, dtype: Dtype) -> Tensor:
    """Return where the first value of each packed row is, counted in values: int64 ``(n + 1,)``, the last their number.

    Args:
        mask: bitmasks of all rows of a table, uint8 ``(n, ceil(blocks / 8))``.
    """
    counts = torch.cat([_taken(part, width, columns).sum(1) for part in torch.split(mask, _AT_ONCE)])
    if dtype == "int4":
        counts += counts % 2
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def unpack_rows(
    mask: Tensor, first: Tensor, values: Tensor, scale_bias: Tensor | None, width: int, columns: int, dtype: Dtype
) -> Rows:
    """Return some packed rows, as :func:`encode` stored them.

    Args:
        mask: their bitmasks, uint8 ``(n, ceil(blocks / 8))``.
        first: of :func:`starts`, int64 ``(n,)``.
        values: of the whole table.
        scale_bias: theirs, float16 ``(n, 2)``.
        width, columns, dtype: of the table.
    """
    taken = _taken(mask, width, columns)
    places = (first.unsqueeze(1) + taken.cumsum(1) - 1)[taken]
    if scale_bias is None:
        rows = torch.zeros(taken.shape, dtype=values.dtype, device=values.device)
    else:
        scale, bias = scale_bias.double().unbind(1)
        rows = (0.0 - bias / scale).round_().to(torch.uint8).unsqueeze(1).repeat(1, columns)
    if dtype == "int4":
        found = values[places >> 1]
        rows[taken] = torch.where(places % 2 == 0, found & 15, found >> 4)
        return Rows(_halves(rows), scale_bias)
    rows[taken] = values[places]
    return Rows(rows, scale_bias)


_AT_ONCE: Final = 1 << 16
"""Rows whose bits are expanded together."""


def _stored(weight: Tensor, width: int) -> Tensor:
    """Which blocks of columns have a bit that is not 0: bool ``(n, blocks)``. Not ``!= 0``: -0.0 is kept as it is."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    bits = weight.contiguous().view(word) != 0
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % width))
    return padded.view(len(padded), padded.shape[1] // width, width).any(2)


def _spread(blocks: Tensor, width: int, columns: int) -> Tensor:
    return blocks.repeat_interleave(width, 1)[:, :columns]


def _taken(mask: Tensor, width: int, columns: int) -> Tensor:
    """Which elements are stored: bool ``(n, columns)``."""
    bits = unpack(mask.reshape(-1), mask.numel() * 8).view(len(mask), 8 * mask.shape[1])
    return _spread(bits[:, : -(-columns // width)], width, columns)


def _halves(codes: Tensor) -> Tensor:
    """Put two 4-bit codes into each byte, the first in its lower half."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _whole(halves: Tensor) -> Tensor:
    """The 4-bit codes of bytes, one in each byte."""
    return torch.stack([halves & 15, halves >> 4], 2).flatten(1)
