"""Which rows of a table can still hold their initial values, as a proof that they were never
trained: :func:`refuse_trained`.

TorchRec draws the initial values of a table uniformly between two bounds. Such a draw can return
only 2**24 numbers, on a grid, and float32 has many more between the bounds. A gradient moves a
weight off the grid, however small it is. So a trained row of 16 columns is recognized with a
probability of 99.99999%, and one of 8 columns with 99.97%, even where its values are within the
bounds. Weights that were stored as bfloat16 or float16 may be on the grid, but their last bits give
them away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dist_sparse.messages import names_text
from dist_sparse.tables.shards import ShardedData

__all__ = [
    "ALL_LOOKUPS",
    "IF_COVERED",
    "Unread",
    "doubt_about",
    "refuse_trained",
    "trained_rows",
    "trained_text",
]

# Elements looked at together: 15 MB of temporaries, which a cache holds in part.
_CHUNK = 1 << 18

# Random bits of a draw of torch's CPU generator.
_BITS = 24

# CUDA's draws are on a finer grid, which recognizes 91% of the trained rows of 8 columns. It is
# used for this many rows or more, and where fewer than a third of them are on the CPU's grid. If
# the table was drawn on a CPU, most of these rows were then trained: at least one is recognized.
_LEAST_ROWS, _FEW_ON_GRID = 32, 1 / 3


# A table's values prove too little if a trained row stays on the grid with a higher probability.
# With symmetric bounds, rows of 4 columns stay below it.
_MOST_MISSED = 0.02

# The probability that a trained weight is not recognized on the grid of CUDA: it takes 13 columns.
_MISSED_ON_CUDA = 0.74

# The last bits of a float32. They are 0 in all weights of a row that was stored as bfloat16 or
# float16, but hardly ever in all weights of a drawn row. The grid alone would not tell: between
# bounds such as 1/32, the bounds of a table of 1024 rows, it has most 16-bit floats.
_COARSE_BITS = 0xFFF


class Unread(NamedTuple):
    """The rows of a shard that a record of lookups has not seen.

    Args:
        data: the table.
        weights: of the shard, ``(rows, columns)``.
        flags: which rows were not seen, bool ``(rows,)``.
        record: what the record is.
    """

    data: ShardedData
    weights: Tensor
    flags: Tensor
    record: str


ALL_LOOKUPS = "the lookups of all training data: record=dist_sparse.count_lookups(batches, model)"

IF_COVERED = (
    "If it does, pass trust_record=True: the rows are removed unchecked. If weights were loaded"
    f" without their optimizer state, load that too, or pass {ALL_LOOKUPS}."
)


def refuse_trained(shards: Iterable[Unread], remedy: str = IF_COVERED) -> None:
    """Refuse to call rows "never read" if they may have been trained before the record began.
    Local.

    Args:
        shards: the rows that no record has seen.
        remedy: what the user may do, in sentences.

    Raises:
        ValueError: names the tables, and says why for the first: the messages of several ranks are
            joined, and a long one would be cut.
    """
    reasons = {}
    for unread in shards:
        name = unread.data.name
        if name not in reasons and bool(unread.flags.any()):
            reason = doubt_about(unread.data) or trained_text(unread)
            if reason:
                reasons[name] = f"table {name!r} ({reason}; the record: {unread.record})"
    if reasons:
        first, *others = reasons
        names = names_text([reasons[first], *map(repr, others)], 4)
        raise ValueError(f"Nothing shows that the record covers the training of {names}. {remedy}")


def doubt_about(data: ShardedData) -> str | None:
    """Return why no values of a table's rows can prove that they were never trained; None if they
    can."""
    if data.drawn is None:
        return "the initial values are not known to be uniform"
    if data.dtype != torch.float32:
        return f"{data.dtype} is too coarse to compare rows with their initial values"
    low, high = data.drawn
    columns = data.shape[1]
    if _share_on_grid(low, high) ** columns > _MOST_MISSED:
        return f"{columns} columns of numbers in [{low:g}, {high:g}) are too few to prove it"
    return None


def _share_on_grid(low: float, high: float) -> float:
    """Return the probability that a float32 between the bounds is on the grid of a CPU's draws."""
    start, span = _rounded(low, high)
    if span == 0:
        # All draws are the same number.
        return 0.0
    middles = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096 * span + start
    _, exponent = torch.frexp(middles)
    # Where floats are farther apart than the grid, each of them is on it.
    shares = torch.exp2((exponent - 24).double()) / (span * 2.0**-_BITS)
    return float(shares.clamp(max=1).mean())


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Return the lower bound and the distance between the bounds in float32, as torch draws with
    them."""
    first, last = torch.tensor([low, high], dtype=torch.float32)
    return float(first), float(last - first)


def trained_text(unread: Unread) -> str | None:
    """Return how many rows were trained although they were not seen; None if none was, or if the
    values prove nothing (:func:`doubt_about`)."""
    if doubt_about(unread.data):
        return None
    low, high = unread.data.drawn or (0.0, 0.0)
    columns = unread.data.shape[1]
    trained, on_cuda = _compare(unread.weights, low, high, unread.flags)
    number = int(trained.count_nonzero())
    if not number and on_cuda and _MISSED_ON_CUDA**columns > _MOST_MISSED:
        return f"{columns} columns of numbers that CUDA has drawn are too few to prove it"
    if not number:
        return None
    # The ranks of a table count the rows of their own shards.
    where = "on this rank, " if len(unread.data.holders) > 1 else ""
    unread_rows = int(unread.flags.count_nonzero())
    return (
        f"{where}{number:,} of the {unread_rows:,} rows that the record calls never read hold"
        f" values that its initializer, uniform in [{low:g}, {high:g}), does not draw: they were"
        " trained, or initialized in another way"
    )


def trained_rows(weights: Tensor, low: float, high: float, among: Tensor | None = None) -> Tensor:
    """Return which rows hold a value that ``torch.nn.init.uniform_(low, high)`` can't have drawn,
    on a CPU or on CUDA: bool ``(rows,)``. Rows of zeros are not among them; rows of 16-bit floats
    and rows with NaN are.

    CUDA's draws are recognized between bounds like -0.1 and 0.1. Between other bounds, and for
    fewer than 32 rows, they are taken for trained rows. Not run on CUDA.

    Args:
        weights: float32 ``(rows, columns)``.
        low: the lower bound.
        high: the upper bound.
        among: the rows to look at, bool ``(rows,)``; the result has only these. None is all.

    Example::

        >>> import torch
        >>> from dist_sparse.tables.initial import trained_rows
        >>> weights = torch.empty(4, 32).uniform_(-0.1, 0.1)
        >>> weights[1] -= 1e-6 * torch.rand(32)  # a tiny step
        >>> weights[2] = 0.0
        >>> trained_rows(weights, -0.1, 0.1)
        tensor([False,  True, False, False])
    """
    return _compare(weights, low, high, among)[0]


def _compare(weights: Tensor, low: float, high: float, among: Tensor | None) -> tuple[Tensor, bool]:
    """Return :func:`trained_rows`, and whether the others look as if CUDA had drawn them."""
    start, span = _rounded(low, high)
    # For each row: is it off the CPU's grid, off CUDA's grid, all zeros?
    parts = [_off_grids(part.double(), start, span) for part in _chunks(weights, among)]
    if not parts:
        return torch.zeros(len(weights), dtype=torch.bool, device=weights.device), False
    flags: tuple[Tensor, ...] = torch.cat(parts, dim=1).unbind()
    off_cpu, off_cuda, zeros = flags
    rows = int((~zeros).count_nonzero())
    on_grid = rows - int(off_cpu.count_nonzero())
    is_symmetric = abs(low + high) < span / 8
    if is_symmetric and rows >= _LEAST_ROWS and on_grid < _FEW_ON_GRID * rows:
        return off_cuda, True
    return off_cpu, False


def _chunks(weights: Tensor, among: Tensor | None) -> Iterator[Tensor]:
    """Yield some rows at a time: most rows of a shard may be unread, too many to copy at once."""
    if not weights.numel():
        return
    rows = max(1, _CHUNK // weights.shape[1])
    for first in range(0, len(weights), rows):
        part = weights[first : first + rows]
        yield part if among is None else part[among[first : first + rows]]


def _off_grids(values: Tensor, low: float, span: float) -> Tensor:
    """Return which rows a CPU can't have drawn, which rows CUDA can't have drawn, and which are
    zeros: bool ``(3, rows)``.

    Args:
        values: float32 values as float64, ``(rows, columns)``.
    """
    distance = values - low
    # A draw is rounded once, to the nearest float32: by half a unit in its last place, which is
    # 2**-24 of the next power of two. The last term is the rounding of float64 here.
    _, exponent = torch.frexp(values)
    half_unit = torch.exp2((exponent - 25).double()) + span * 2.0**-48
    # In this form NaN is outside: a row that diverged was trained.
    outside = ~((distance >= -half_unit) & (distance <= span + half_unit))
    if span:
        outside |= _is_coarse(values)
    cpu = (outside | _off_grid(distance, span * 2.0**-_BITS, half_unit)).any(1)
    cuda = torch.zeros_like(cpu)
    # CUDA's grid has all numbers of the CPU's: only the other rows can be off it.
    if cpu.any():
        rows = distance[cpu]
        # CUDA draws floats in (0, 1]: from a quarter on they are multiples of 2**-25. The product
        # with the span is rounded to float32 before the sum, or is not: then the distance is a
        # float32.
        off = _off_grid(rows, span * 2.0 ** -(_BITS + 1), half_unit[cpu])
        off &= (rows >= span / 4) & (rows != rows.float().double())
        cuda[cpu] = (outside[cpu] | off).any(1)
    zeros = (values == 0).all(1)
    return torch.stack([cpu & ~zeros, cuda & ~zeros, zeros])


def _is_coarse(values: Tensor) -> Tensor:
    """Return which rows have only numbers of 16-bit floats, as weights that were stored in such a
    dtype have: bool ``(rows, 1)``."""
    last_bits = values.float().view(torch.int32) & _COARSE_BITS
    return (last_bits == 0).all(1, keepdim=True)


def _off_grid(distance: Tensor, step: float, tolerance: Tensor) -> Tensor:
    """Return which distances are not a multiple of ``step``."""
    return (distance - (distance / step).round() * step).abs() > tolerance
