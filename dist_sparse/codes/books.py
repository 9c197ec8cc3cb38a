"""Books of a table: the vectors that the bytes of a row stand for, learned from the rows.

The columns of a table are cut into groups of equal width. A book holds 256 vectors of that width
for one group, and a row is a byte per group: product quantization (Jégou et al., 2011). Books are
one tensor, float16 ``(groups, 256, width)``. Entry 0 of every book is zeros, so that a row of
zeros, such as a removed one, has codes 0 and decodes to exactly 0.

Every sharding and number of ranks learns the same bytes. Weights are taken to integers on a grid
that the entries of their group set, and float64 and int64 add and multiply such integers without
rounding. Of replicas, the first holder counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from dist_sparse.groups import Group
    from dist_sparse.tables.shards import ShardedData

# Entries of a book: a byte has as many values.
ENTRIES = 256

# The largest magnitude of an entry.
LARGEST_HALF = torch.finfo(torch.float16).max

# An entry as one number: gathered in a third of the time that a row of halves takes.
_WHOLE = {1: torch.int16, 2: torch.int32, 4: torch.int64, 8: torch.complex128}
# Bits of an integer that float64 holds exactly.
_EXACT_BITS = 53
# Weights are cut at 8 times the power of two above the largest entry of their group.
_HEADROOM_BITS = 3
# Rows whose distances are computed together: 1 MiB of float64, which caches hold.
_CHUNK = 512
# Rows of a table that the first books are learned from, 40 for each entry, and rounds of k-means.
_SAMPLED = 10_240
_ROUNDS = 8


def decode_books(codes: Tensor, books: Tensor, columns: int) -> Tensor:
    """Return the weights of rows of bytes, float32 ``(n, columns)``.

    Args:
        codes: uint8 ``(n, groups)``.
        books: float16 ``(groups, 256, columns of a group)``.
        columns: of the table; the last group may have more.
    """
    starts = ENTRIES * torch.arange(len(books), device=codes.device, dtype=torch.int32)
    return entries_at(codes + starts, books.flatten(0, 1))[:, :columns].float()


def entries_at(places: Tensor, entries: Tensor) -> Tensor:
    """Return the entries at ``places`` side by side: float16 ``(n, groups * width)``.

    Args:
        places: of any integer dtype, ``(n, groups)``.
        entries: float16 ``(entries, width)``, contiguous.
    """
    groups, width = places.shape[1], entries.shape[1]
    kind = _WHOLE.get(width)
    if kind is None:
        found = F.embedding(places, entries)
    else:
        whole = entries.view(kind).view(-1)
        found = whole.index_select(0, places.flatten()).view(torch.float16)
    return found.view(-1, groups * width)


def scales_of(books: Tensor) -> Tensor:
    """Return the units of each group's grid in a weight of 1: powers of two, float64
    ``(groups, 1)``."""
    largest = books.float().abs().amax((1, 2)).tolist()
    bits = _bits(books.shape[2])
    found = [2.0 ** (bits - math.frexp(each)[1]) for each in largest]
    return torch.tensor(found, dtype=torch.float64, device=books.device).unsqueeze(1)


def integers(values: Tensor, scales: Tensor) -> Tensor:
    """Return values of any floating dtype, ``(..., groups, width)``, on the grids of their groups:
    whole numbers, float64."""
    most = 2.0 ** (_bits(values.shape[-1]) + _HEADROOM_BITS)
    # The scale is a power of two: this rounding is the only one.
    return (values.double() * scales).round_().clamp_(-most, most)


def _bits(width: int) -> int:
    """Return the bits of an entry on its grid, so that a distance, times 256, plus the number of an
    entry is below 2**53."""
    # For each column the square of an entry, and twice its product with a weight.
    of_sum = math.ceil(math.log2(width)) + 2 + _HEADROOM_BITS
    return (_EXACT_BITS - 8 - of_sum) // 2


def assign(rows: Tensor, books: Tensor, out: Tensor) -> None:
    """Write the nearest entry of each group to ``out``, uint8 ``(n, groups)``: the first of several
    that are as near.

    Args:
        rows: of any floating dtype, ``(n, columns)``.
        books: of these columns.
    """
    groups, _, width = books.shape
    scales = scales_of(books).to(rows.device)
    entries = integers(books.to(rows.device).transpose(0, 1), scales).transpose(0, 1)
    numbers = torch.arange(ENTRIES, dtype=torch.float64, device=rows.device)
    # A distance without the square of the row itself, which all entries share; times 256, plus the
    # entry's number. Its minimum is the nearest entry, and the first one of equals, at an eighth of
    # the time of argmin().
    constant = entries.square().sum(2) * ENTRIES + numbers
    linear = entries.transpose(1, 2) * (-2 * ENTRIES)
    for some, codes in zip(torch.split(rows, _CHUNK), torch.split(out, _CHUNK), strict=True):
        whole = integers(some.view(-1, groups, width), scales)
        for group in range(groups):
            nearest = torch.addmm(constant[group], whole[:, group], linear[group]).amin(1)
            codes[:, group] = nearest.long().bitwise_and_(ENTRIES - 1).to(torch.uint8)


def learned(rows: Tensor, groups: int) -> Tensor:
    """Return books of some rows ``(n, columns)`` by k-means. Local."""
    parts = rows.view(len(rows), groups, -1).unbind(1)
    books = torch.stack([_spread(part) for part in parts])
    codes = torch.empty(len(rows), groups, dtype=torch.uint8)
    for _ in range(_ROUNDS):
        assign(rows, books, codes)
        books = _means(books, _sums(rows, codes, books))
    return books


def refit(data: ShardedData, group: Group, books: Tensor, coded: ShardedData) -> Tensor:
    """Return books of the means of all rows that share an entry, one round of Lloyd's. Collective
    over the table's ``group``: an all-reduce of sums and counts.

    Args:
        coded: the codes of its shards.
    """
    groups, entries, width = books.shape
    sums = torch.zeros(groups, entries, width + 1, dtype=torch.int64)
    owned = data.owned(group.rank)
    for (rect, rows), (_, codes) in zip(data.shards, coded.shards, strict=True):
        if rect in owned:
            mine = slice(rect.col // width, rect.col_end // width)
            sums[mine] += _sums(rows, codes, books[mine])
    return _means(books, group.all_reduce(sums))


def sampled(data: ShardedData, group: Group) -> Tensor:
    """Return rows of a table at even distances, float32. Collective over its ``group``."""
    total, columns = data.shape
    number = min(total, _SAMPLED)
    ids = torch.arange(number) * total // number
    rows = torch.zeros(number, columns)
    held = dict(data.shards)
    for rect in data.owned(group.rank):
        here = ((ids >= rect.row) & (ids < rect.row_end)).nonzero().flatten()
        found = held[rect][(ids[here] - rect.row).to(held[rect].device)]
        rows[here, rect.col : rect.col_end] = found.float().cpu()
    return group.all_reduce(rows)


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


def _sums(rows: Tensor, codes: Tensor, books: Tensor) -> Tensor:
    """Return the sums of the rows of each entry, int64 ``(groups, 256, width + 1)`` on the CPU: of
    integers, so that their order does not matter. The last place is the number of rows."""
    groups, entries, width = books.shape
    sums = torch.zeros(groups * entries, width + 1, dtype=torch.int64, device=rows.device)
    starts = torch.arange(groups, device=rows.device) * entries
    scales = scales_of(books).to(rows.device)
    for some, chosen in zip(torch.split(rows, _CHUNK), torch.split(codes, _CHUNK), strict=True):
        whole = integers(some.view(-1, groups, width), scales).long()
        counted = F.pad(whole, (0, 1), value=1).flatten(0, 1)
        sums.index_add_(0, (chosen + starts).flatten(), counted)
    return sums.view(groups, entries, -1).cpu()


def _means(books: Tensor, sums: Tensor) -> Tensor:
    """Return books of means. An entry without rows stays as it is, and entry 0 stays zeros,
    whichever rows have it."""
    counts = sums[:, :, -1:]
    means = sums[:, :, :-1].double() / counts.clamp(min=1) / scales_of(books).unsqueeze(1)
    entries = torch.where(counts > 0, means, books.double())
    entries[:, 0] = 0
    return entries.clamp_(-LARGEST_HALF, LARGEST_HALF).half()
