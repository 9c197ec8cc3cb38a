"""Books of sharded tables: what ranks know of their rows, put together in whole numbers.

Every function sends one all-reduce for all tables of a group of ranks. Of replicas, the first
holder counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from dist_sparse.codes.books import Books, add_sums, exponent_of, first_books, refitted, zero_sums
from dist_sparse.groups import Group
from dist_sparse.tables.shards import Shard, ShardedData

_SAMPLED: Final = 10_240
"""Rows of a table that the first books are learned from: 40 for each entry."""

# Powers of two from 2**-23 to 2**129, the largest of float32 and beyond.
_LEAST_EXPONENT, _EXPONENTS = -23, 160


def exponents_of(tables: Sequence[ShardedData], group: Group) -> dict[str, int]:
    """Return the power of two above the largest magnitude of each table. Collective over
    ``group``."""
    summed = group.all_reduce(torch.stack([_exponents(data) for data in tables]))
    return {data.name: _largest(row) for data, row in zip(tables, summed, strict=True)}


def fit(tables: Sequence[ShardedData], group: Group, groups: Mapping[str, int]) -> dict[str, Books]:
    """Return the first books of tables, from evenly spaced rows of each. Collective over ``group``.

    Args:
        groups: of each table's columns.
    """
    samples = [_sample(data, group.rank) for data in tables]
    sent = group.all_reduce(torch.cat([sample.flatten() for sample in samples]))
    parts = torch.split(sent, [sample.numel() for sample in samples])
    found = {}
    for data, part in zip(tables, parts, strict=True):
        # The same on every rank: nothing has to be sent.
        found[data.name] = first_books(part.view(-1, data.shape[1]), groups[data.name])
    return found


def refit(
    tables: Sequence[ShardedData],
    group: Group,
    books: Mapping[str, Books],
    codes: Mapping[str, Sequence[Tensor]],
) -> dict[str, Books]:
    """Return books of the means of all rows that share an entry. Collective over ``group``.

    Args:
        codes: of each of this rank's shards, by table.
    """
    parts = []
    for data in tables:
        # A rank without a shard of the table adds nothing.
        sums = _sums(data, group.rank, books[data.name], codes.get(data.name, ()))
        # What the next grid needs travels in the same message.
        parts += [sums.flatten(), _exponents(data)]
    sent = group.all_reduce(torch.cat(parts))
    summed = torch.split(sent, [part.numel() for part in parts])
    found = {}
    for data, sums, exponents in zip(tables, summed[0::2], summed[1::2], strict=True):
        old = books[data.name]
        columns = old.entries.shape[2]
        found[data.name] = refitted(old, sums.view(-1, columns + 1), _largest(exponents))
    return found


def _owned(data: ShardedData, rank: int) -> list[tuple[int, Shard]]:
    """Return the shards that a rank owns, each once, with their numbers."""
    left = set(data.owned(rank))
    found = []
    for number, shard in enumerate(data.shards):
        if shard.rect in left:
            left.remove(shard.rect)
            found.append((number, shard))
    return found


def _exponents(data: ShardedData) -> Tensor:
    """Return zeros and, at this rank's exponent, a one: int64. Sums over ranks have the largest
    exponent as their last nonzero place."""
    flags = torch.zeros(_EXPONENTS, dtype=torch.int64)
    for shard in data.shards:
        largest = float(torch.stack(torch.aminmax(shard.tensor)).abs().max())
        flags[exponent_of(largest) - _LEAST_EXPONENT] = 1
    return flags


def _largest(flags: Tensor) -> int:
    return int(flags.nonzero().max()) + _LEAST_EXPONENT


def _sample(data: ShardedData, rank: int) -> Tensor:
    """Return the sampled rows as far as a rank owns them, zeros elsewhere: float32."""
    total = data.shape[0]
    sampled = min(total, _SAMPLED)
    ids = torch.arange(sampled) * total // sampled
    rows = torch.zeros(sampled, data.shape[1])
    for _, (rect, weight) in _owned(data, rank):
        here = ((ids >= rect.row) & (ids < rect.row_end)).nonzero().flatten()
        found = weight[(ids[here] - rect.row).to(weight.device)]
        rows[here, rect.col : rect.col_end] = found.float().cpu()
    return rows


def _sums(data: ShardedData, rank: int, books: Books, codes: Sequence[Tensor]) -> Tensor:
    """Return the sums over the rows that a rank owns; see
    :func:`~dist_sparse.codes.books.add_sums`."""
    sums = zero_sums(books)
    groups, entries, width = books.entries.shape
    of_groups = sums.view(groups, entries, width + 1)
    for number, (rect, weight) in _owned(data, rank):
        first, last = rect.col // width, rect.col_end // width
        part = of_groups[first:last].flatten(0, 1)
        on_device = part.to(weight.device)
        add_sums(on_device, weight, codes[number], books.part(first, last))
        part.copy_(on_device)
    return sums
