"""What a row starts from when its id gets one during training.

A counter-based generator: each element is a hash of the seed, the table's name, the id and the
column, and of nothing else. So a row is the same on every sharding and number of ranks, in whatever
order rows come.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dist_sparse.tables.shards import Rect

# Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014); int64 wraps as uint64.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)

_DIGITS = 52
"""Random bits of an element: all of them, and the half that is added, are exact in float64."""


_DRAWN = 1 << 20
"""Elements that are drawn at once, 24 MB."""


def initial_rows(
    seed: int,
    table: str,
    ids: Tensor,
    columns: Iterable[int],
    bounds: tuple[float, float] | None = None,
) -> Tensor:
    """Return initial weights of some columns of a table's rows: float32 ``(len(ids),
    len(columns))``, on the device of ``ids``. It takes 24 bytes per element.

    Args:
        seed: any integer.
        table: the table's name; tables of other names get other weights.
        ids: int64 ``(n,)``.
        columns: column numbers in the whole table.
        bounds: ``(low, high)`` of a uniform distribution, as TorchRec draws; None for the standard
            normal distribution, as ``nn.Embedding`` draws.

    Example::

        >>> import torch
        >>> from dist_sparse.compaction.initial import initial_rows
        >>> whole = initial_rows(0, "item", torch.arange(1_000), range(8), bounds=(-0.1, 0.1))
        >>> part = initial_rows(0, "item", torch.tensor([7, 3]), range(4, 8), bounds=(-0.1, 0.1))
        >>> bool((part == whole[[7, 3], 4:]).all()), whole.shape
        (True, torch.Size([1000, 8]))
    """
    digest = hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    column = torch.tensor(list(columns), dtype=torch.int64, device=ids.device)
    # Two rounds, so that neighbours in both directions are unrelated.
    mixed = _mix(_mix(ids.long() + key)[:, None] + column * _STEP)
    # In (0, 1), neither end included: the normal distribution is infinite there.
    drawn = (_logical_shift(mixed, 64 - _DIGITS).double() + 0.5) / 2**_DIGITS
    if bounds is not None:
        low, high = bounds
        uniform: Tensor = (low + (high - low) * drawn).float()
        return uniform
    # In float64: what devices round differently there is the same float32.
    normal: Tensor = (math.sqrt(2) * torch.erfinv(2 * drawn - 1)).float()
    return normal


def draw_rows(
    weight: Tensor,
    rect: Rect,
    places: Tensor,
    ids: Tensor,
    seed: int,
    table: str,
    bounds: tuple[float, float] | None,
) -> None:
    """Write initial weights into some rows of a part of a table, in place.

    Args:
        weight: ``(rect.rows, rect.cols)``.
        rect: which rows and columns of the table it has.
        places: rows of ``weight``, int64 ``(n,)``.
        ids: whose initial weights they get, int64 ``(n,)``.
        seed, table, bounds: as of :func:`initial_rows`.
    """
    most, device = max(1, _DRAWN // max(1, rect.cols)), weight.device
    columns = range(rect.col, rect.col_end)
    for some, at in zip(torch.split(ids, most), torch.split(places, most), strict=True):
        drawn = initial_rows(seed, table, some.to(device), columns, bounds)
        weight[at.to(device)] = drawn.to(weight.dtype)


def _mix(value: Tensor) -> Tensor:
    """The finalizer of SplitMix64."""
    first, second = _MULTIPLIERS
    value = value + _STEP
    value = (value ^ _logical_shift(value, 30)) * first
    value = (value ^ _logical_shift(value, 27)) * second
    mixed: Tensor = value ^ _logical_shift(value, 31)
    return mixed


def _logical_shift(value: Tensor, bits: int) -> Tensor:
    """Shift to the right without copies of the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
