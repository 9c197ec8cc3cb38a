"""Learn the books of a table from its rows, and assign codes to them: exact k-means.

Books have the same bytes for every sharding and number of ranks: weights are rounded to integers on
a grid per group, and float64 and int64 add and multiply these integers exactly, in any order. Each
replicated row counts once, at its first holder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.masking.device import kernels_on
from dist_sparse.serving.books import ENTRIES, LARGEST_HALF

if TYPE_CHECKING:
    from dist_sparse.groups import Group
    from dist_sparse.tables.shards import ShardedData

# float64 holds integers of this many bits exactly.
_EXACT_BITS = 53
# Weights are clamped at 8 times the power of two above the largest entry of their group.
_HEADROOM_BITS = 3
# How many rows' distances torch computes at once. On a CPU, 512 x 256 float64 are 1 MiB, which fits
# in a cache. On a device without kernels, each chunk takes some launches: 512 MiB.
_CHUNK_ON_CPU = 512
_CHUNK_ON_DEVICE = 1 << 18
# The first books are learned from a sample of 40 rows per entry, in 8 rounds of k-means.
_SAMPLED = 10_240
_ROUNDS = 8


def grid_scales(books: Tensor) -> Tensor:
    """Return the grid points per unit of weight for each group: powers of two, float64
    ``(groups, 1)``."""
    largest = books.float().abs().amax((1, 2)).tolist()
    bits = _entry_bits(books.shape[2])
    # frexp() returns the power of two above the largest entry, which gets the highest bit.
    scales = [2.0 ** (bits - math.frexp(weight)[1]) for weight in largest]
    return torch.tensor(scales, dtype=torch.float64, device=books.device).unsqueeze(1)


def round_to_grid(values: Tensor, scales: Tensor) -> Tensor:
    """Return values of any floating dtype, ``(..., groups, width)``, as integers on the grids of
    their groups: float64."""
    most = _grid_limit(values.shape[-1])
    # A power of two scales exactly, so only round_() rounds.
    return (values.double() * scales).round_().clamp_(-most, most)


def _grid_limit(width: int) -> float:
    """Return the largest integer on the grid of a group of ``width`` columns."""
    return 2.0 ** (_entry_bits(width) + _HEADROOM_BITS)


def _entry_bits(width: int) -> int:
    """Return the bits of an entry on its grid, such that ``256 * distance + number of the entry``
    stays below 2**53: see :func:`assign`."""
    # Per column, a distance sums the square of an entry and twice its product with a weight, which
    # has the headroom on top: 2 * bits + 2 + headroom, plus log2(width) for the sum.
    sum_bits = math.ceil(math.log2(width)) + 2 + _HEADROOM_BITS
    return (_EXACT_BITS - 8 - sum_bits) // 2


def assign(rows: Tensor, books: Tensor, out: Tensor) -> None:
    """Write the number of the nearest entry of each group to ``out``, uint8 ``(n, groups)``. Ties
    go to the smaller number.

    Args:
        rows: any floating dtype, ``(n, columns)``.
        books: the books of these columns.
    """
    groups, _, width = books.shape
    scales = grid_scales(books).to(rows.device)
    entries = round_to_grid(books.to(rows.device).transpose(0, 1), scales).transpose(0, 1)
    numbers = torch.arange(ENTRIES, dtype=torch.float64, device=rows.device)
    # |row - entry|^2 without |row|^2, which all entries share, is |entry|^2 - 2 row.entry. Times
    # 256, plus the entry's number: the low 8 bits of the minimum are the nearest entry, and the
    # first of several. amin() takes an eighth of the time of argmin().
    constant = entries.square().sum(2) * ENTRIES + numbers
    linear = entries.transpose(1, 2) * (-2 * ENTRIES)
    kernels = kernels_on(rows.device)
    if kernels is not None:
        kernels.assign_codes(rows, scales, _grid_limit(width), constant, linear, out)
        return
    for chunk, codes in _chunks(rows, out):
        weights = round_to_grid(chunk.view(-1, groups, width), scales)
        nearest = [
            torch.addmm(constant[group], weights[:, group], linear[group]).amin(1)
            for group in range(groups)
        ]
        codes.copy_(torch.stack(nearest, 1).long().bitwise_and_(ENTRIES - 1))


def _chunks(rows: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some rows at a time, with their codes."""
    size = _CHUNK_ON_CPU if rows.is_cpu else _CHUNK_ON_DEVICE
    yield from zip(torch.split(rows, size), torch.split(codes, size), strict=True)


def learn_books(rows: Tensor, groups: int) -> Tensor:
    """Return the books of some rows ``(n, columns)``, by k-means. Local."""
    parts = rows.view(len(rows), groups, -1).unbind(1)
    books = torch.stack([_initial_book(part) for part in parts])
    codes = torch.empty(len(rows), groups, dtype=torch.uint8)
    for _ in range(_ROUNDS):
        assign(rows, books, codes)
        books = _mean_books(books, _sum_by_entry(rows, codes, books))
    return books


def refit_books(data: ShardedData, group: Group, books: Tensor, coded: ShardedData) -> Tensor:
    """Return books whose entries are the means of the rows that have their codes: one round of
    Lloyd's algorithm. Collective over the table's ``group``: an all-reduce of sums and counts.

    Args:
        coded: the codes of the table, sharded like ``data``.
    """
    groups, entries, width = books.shape
    sums = torch.zeros(groups, entries, width + 1, dtype=torch.int64)
    owned = data.owned(group.rank)
    for (rect, rows), (_, codes) in zip(data.shards, coded.shards, strict=True):
        if rect in owned:
            span = slice(rect.col // width, rect.col_end // width)
            sums[span] += _sum_by_entry(rows, codes, books[span])
    return _mean_books(books, group.all_reduce(sums))


def sample_rows(data: ShardedData, group: Group) -> Tensor:
    """Return evenly spaced rows of a table, float32 ``(n, columns)``, the same on every rank.
    Collective over its ``group``."""
    total, columns = data.shape
    number = min(total, _SAMPLED)
    ids = torch.arange(number) * total // number
    rows = torch.zeros(number, columns)
    shards = dict(data.shards)
    for rect in data.owned(group.rank):
        inside = ((ids >= rect.row) & (ids < rect.row_end)).nonzero().flatten()
        weights = shards[rect][(ids[inside] - rect.row).to(shards[rect].device)]
        rows[inside, rect.col : rect.col_end] = weights.float().cpu()
    # Every element has one owner and is 0 on all other ranks: the sum is exact.
    return group.all_reduce(rows)


def _initial_book(vectors: Tensor) -> Tensor:
    """Return zeros, and 255 of the vectors ``(n, width)``, evenly spaced when sorted by largest
    magnitude: float16 ``(256, width)``."""
    book = torch.zeros(ENTRIES, vectors.shape[1], dtype=torch.float16)
    # Removed rows are zeros, which entry 0 holds already.
    vectors = vectors[vectors.any(1)]
    if len(vectors):
        # The rounding of a norm would depend on the machine.
        order = vectors.abs().amax(1).argsort(stable=True)
        places = torch.arange(1, ENTRIES) * len(vectors) // ENTRIES
        book[1:] = vectors[order[places]].clamp(-LARGEST_HALF, LARGEST_HALF).half()
    return book


def _sum_by_entry(rows: Tensor, codes: Tensor, books: Tensor) -> Tensor:
    """Return the sum of the rows of each entry on the grid, int64 ``(groups, 256, width + 1)`` on
    the CPU. The last column counts the rows. Entries 0, whose sums :func:`_mean_books` does not
    read, may be left out."""
    groups, entries, width = books.shape
    sums = torch.zeros(groups * entries, width + 1, dtype=torch.int64, device=rows.device)
    scales = grid_scales(books).to(rows.device)
    kernels = kernels_on(rows.device)
    if kernels is not None:
        kernels.sum_by_code(rows, codes, scales, _grid_limit(width), sums)
        return sums.view(groups, entries, -1).cpu()
    starts = torch.arange(groups, device=rows.device) * entries
    for chunk, chosen in _chunks(rows, codes):
        weights = round_to_grid(chunk.view(-1, groups, width), scales).long()
        # Append a column of ones, whose sum counts the rows.
        counted = F.pad(weights, (0, 1), value=1).flatten(0, 1)
        sums.index_add_(0, (chosen + starts).flatten(), counted)
    return sums.view(groups, entries, -1).cpu()


def _mean_books(books: Tensor, sums: Tensor) -> Tensor:
    """Return books of the mean row of each entry, from :func:`_sum_by_entry`. An entry without rows
    stays as it is."""
    counts = sums[:, :, -1:]
    means = sums[:, :, :-1].double() / counts.clamp(min=1) / grid_scales(books).unsqueeze(1)
    entries = torch.where(counts > 0, means, books.double())
    # Small rows have code 0 too; their mean must not replace the zeros of removed rows.
    entries[:, 0] = 0
    return entries.clamp_(-LARGEST_HALF, LARGEST_HALF).half()
