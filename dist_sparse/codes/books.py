"""Books of a table: the vectors that the bytes of a row stand for, learned from the rows.

The columns of a table are cut into groups of equal width. A book holds 256 vectors of that width
for one group, and a row is a byte per group: product quantization (Jégou et al., 2011). Entry 0 of
every book is zeros, so that a row of zeros, such as a removed one, has codes 0 and decodes to
exactly 0.

Every sharding and number of ranks learns the same bytes. Weights are taken to integers on the grid
of their table, and float64 and int64 add and multiply such integers without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

ENTRIES: Final = 256
"""Entries of a book: a byte has as many values."""

LARGEST_HALF: Final = torch.finfo(torch.float16).max
"""The largest magnitude of an entry."""

# Bits of an integer that float64 holds exactly.
_EXACT_BITS: Final = 53
# Weights may grow to this multiple of the magnitude that the grid was made for, until they are cut.
_HEADROOM_BITS: Final = 2
# Rows whose distances are computed together: 1 MiB of float64, which caches hold.
_CHUNK: Final = 512
_ROUNDS: Final = 8


@dataclass(frozen=True)
class Books:
    """The books of one table.

    Args:
        entries: float16 ``(groups, 256, columns of a group)``.
        exponent: the table's magnitudes were below ``2 ** exponent`` when they were fitted.
    """

    entries: Tensor
    exponent: int

    @property
    def bits(self) -> int:
        """Bits of a weight on the grid, so that a distance and an entry's number fit in float64."""
        # A distance has three products of two weights for each column, and 8 bits for the number.
        columns = self.entries.shape[2]
        room = _EXACT_BITS - 8 - math.ceil(math.log2(3 * columns))
        return room // 2 - _HEADROOM_BITS

    def integers(self, values: Tensor) -> Tensor:
        """Return values of any floating dtype on the table's grid: whole numbers, float64."""
        most = 2.0 ** (self.bits + _HEADROOM_BITS)
        scaled = values.double() * 2.0 ** (self.bits - self.exponent)
        return scaled.round_().clamp_(-most, most)

    def part(self, first: int, last: int) -> Books:
        """Return the books of the groups ``[first, last)``, on the same grid."""
        return Books(self.entries[first:last], self.exponent)


def decode_books(codes: Tensor, books: Tensor, columns: int) -> Tensor:
    """Return the weights of rows of bytes, float32 ``(n, columns)``.

    Args:
        codes: uint8 ``(n, groups)``.
        books: float16 ``(groups, 256, columns of a group)``.
        columns: of the table; the last group may have more.
    """
    starts = ENTRIES * torch.arange(len(books), device=codes.device, dtype=torch.int32)
    found = F.embedding(codes + starts, books.flatten(0, 1))
    return found.flatten(1)[:, :columns].float()


def exponent_of(largest: float) -> int:
    """Return the power of two above a magnitude; of 0 the least one that float16 has."""
    return max(math.frexp(largest)[1], -23)


def assign(rows: Tensor, books: Books, out: Tensor) -> None:
    """Write the nearest entry of each group to ``out``, uint8 ``(n, groups)``: the first of several
    that are as near.

    Args:
        rows: of any floating dtype, ``(n, columns)``.
    """
    groups, _, width = books.entries.shape
    entries = books.integers(books.entries.to(rows.device))
    numbers = torch.arange(ENTRIES, dtype=torch.float64, device=rows.device)
    # A distance without the square of the row itself, which all entries share; times 256, plus the
    # entry's number. Its minimum is the nearest entry, and the first one of equals, at an eighth of
    # the time of argmin().
    constant = entries.square().sum(2) * ENTRIES + numbers
    linear = entries.transpose(1, 2) * (-2 * ENTRIES)
    for some in _chunks(len(rows)):
        parts = torch.split(books.integers(rows[some]), width, 1)
        for group in range(groups):
            nearest = torch.addmm(constant[group], parts[group], linear[group]).amin(1)
            out[some, group] = nearest.long().bitwise_and_(ENTRIES - 1).to(torch.uint8)


def zero_sums(books: Books) -> Tensor:
    """Return sums over no row: int64 ``(groups * 256, columns of a group + 1)``, the number of rows
    behind the sums of the columns."""
    groups, _, width = books.entries.shape
    return torch.zeros(groups * ENTRIES, width + 1, dtype=torch.int64, device=books.entries.device)


def add_sums(sums: Tensor, rows: Tensor, codes: Tensor, books: Books) -> None:
    """Add rows ``(n, columns)`` to the sums of their entries; integers, so that their order does
    not matter.

    Args:
        sums: as of :func:`zero_sums`.
        codes: of the rows, uint8 ``(n, groups)``.
        books: of the same groups.
    """
    groups, _, width = books.entries.shape
    starts = torch.arange(groups, device=rows.device) * ENTRIES
    for some in _chunks(len(rows)):
        whole = books.integers(rows[some]).long().view(-1, width)
        counted = F.pad(whole, (0, 1), value=1)
        sums.index_add_(0, (codes[some] + starts).flatten(), counted)


def refitted(books: Books, sums: Tensor, exponent: int) -> Books:
    """Return books of the means of their rows: one round of Lloyd's. An entry without rows stays as
    it is, and entry 0 stays zeros, whichever rows have it.

    Args:
        sums: over all ranks.
        exponent: of the table's magnitudes now.
    """
    groups, _, width = books.entries.shape
    counts = sums[:, width:]
    scale = 2.0 ** (books.exponent - books.bits)
    means = sums[:, :width].double() / counts.clamp(min=1) * scale
    entries = torch.where(counts > 0, means, books.entries.flatten(0, 1).double())
    entries = entries.clamp_(-LARGEST_HALF, LARGEST_HALF).half().view(groups, ENTRIES, width)
    entries[:, 0] = 0
    return Books(entries, exponent)


def first_books(rows: Tensor, groups: int) -> Books:
    """Return books learned from sampled rows alone: k-means that starts from some of them.

    Args:
        rows: at least one, ``(n, columns)`` on the CPU, the same on every rank.
        groups: a divisor of the columns.
    """
    exponent = exponent_of(float(rows.abs().max()))
    parts = rows.view(len(rows), groups, -1).unbind(1)
    entries = torch.stack([_spread(part) for part in parts])
    books = Books(entries, exponent)
    codes = torch.empty(len(rows), groups, dtype=torch.uint8)
    for _ in range(_ROUNDS):
        assign(rows, books, codes)
        sums = zero_sums(books)
        add_sums(sums, rows, codes, books)
        books = refitted(books, sums, exponent)
    return books


def _spread(vectors: Tensor) -> Tensor:
    """Return zeros and 255 of some vectors ``(n, width)``, evenly spaced by their largest
    magnitude: float16 ``(256, width)``."""
    chosen = torch.zeros(ENTRIES, vectors.shape[1], dtype=torch.float16)
    # Entry 0 has the zeros of removed rows.
    vectors = vectors[vectors.any(1)]
    if len(vectors):
        # Not the norm, whose rounding depends on the machine.
        order = vectors.abs().amax(1).argsort(stable=True)
        places = torch.arange(1, ENTRIES) * len(vectors) // ENTRIES
        chosen[1:] = vectors[order[places]].clamp(-LARGEST_HALF, LARGEST_HALF).half()
    return chosen


def _chunks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, _CHUNK):
        yield slice(start, min(start + _CHUNK, rows))
