"""Stored rows by the ids that they belong to: checksums, bitmaps of kept ids, and places.

A delta costs what it changes: nothing here that it needs reads rows that it does not name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.compaction.row_index import REMOVED, RowIndex
from dist_sparse.masking.masks import unpack
from dist_sparse.serving.codes import chunks

PER_ROW: Final[tuple[str, ...]] = ("rows", "scale_bias")
"""Tensors with an entry for each stored row. Others are carried whole if they have changed."""

_SPAN: Final = 1 << 18  # ids that are taken from a bitmap at once


def sum_of_rows(ids: Tensor, rows: Tensor) -> int:
    """Return a checksum of rows ``(n, columns)`` and their ids: the sum of a hash of each, modulo
    2**64.

    Whatever is stored beside a row or before it, its share is the same: a delta takes the shares of
    old rows out and puts the ones of new rows in. A row is hashed by its words of 32 bits times
    factors of 64 (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
    """
    words, total = words_of(rows), 0
    factors = _factors(words.shape[1] + 1)
    for some in chunks(*words.shape):
        # Overflow is meant: sums and products are those of integers modulo 2**64.
        hashes = torch.mv(words[some].long(), factors[1:]) + ids[some].long() * factors[0]
        total += int(_mixed(hashes).sum())
    return total % 2**64


def words_of(rows: Tensor) -> Tensor:
    """Return the bytes of rows as int32, the last ones with zeros behind: -0.0 is not 0.0."""
    raw = rows.contiguous().view(torch.uint8)
    # Rows of a mapped file need not begin at a word.
    if raw.shape[1] % 4 or raw.storage_offset() % 4:
        raw = F.pad(raw, (0, -raw.shape[1] % 4)).clone()
    return raw.view(torch.int32)


@cache
def _factors(count: int) -> Tensor:
    # SplitMix64's numbers, and odd ones: no bit of a word is lost.
    return _mixed(torch.arange(1, count + 1) * -0x61C8864680B583EB) | 1


def _mixed(values: Tensor) -> Tensor:
    """SplitMix64's last steps: each bit of an int64 changes about half of the result's."""
    values = (values ^ ((values >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    values = (values ^ ((values >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return values ^ ((values >> 31) & (2**33 - 1))


def all_kept(rows: int) -> Tensor:
    """Return the bitmap of a table that keeps all rows, as of
    :class:`~dist_sparse.compaction.row_index.RowIndex`."""
    words = torch.full((max(1, -(-rows // 32)),), -1, dtype=torch.int32)
    if rows % 32:
        words[-1] = (1 << rows % 32) - 1
    return words


def ids_of(words: Tensor, rows: int, default_row: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """Yield the stored rows of a bitmap, a few at a time: their numbers, and their ids, int64,
    ascending; the default row has the id behind the last."""
    last = 0
    for first in range(0, rows, _SPAN):
        some = words[first // 32 : (first + _SPAN) // 32].view(torch.uint8)
        ids = unpack(some, min(_SPAN, rows - first)).nonzero().flatten() + first
        yield slice(last, last := last + len(ids)), ids
    if default_row:
        yield slice(last, last + 1), torch.tensor([rows])


def has_row(words: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Return which ids have a row in a bitmap of ``rows`` ids; the id behind the last has the
    default row: bool."""
    inside = ids.clamp(max=rows - 1)
    bits = words.index_select(0, inside >> 5) >> (inside & 31).int()
    return (bits & 1).bool() | (ids == rows)


def changed_words(words: Tensor, kept: int, change: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the bitmap of the ids that are kept after a delta.

    Args:
        words: before it.
        kept: how many.
        change: of the table, a :class:`~dist_sparse.serving.delta.TableDelta`.
        tensors: of the delta.

    Raises:
        ValueError: ids that go have no row, ids that come have one, or ids do not ascend or are out
            of range.
    """
    ids, gone, after = tensors["ids"].long(), tensors["gone"].long(), change.after
    _refuse_ids(ids, after.rows + after.default_row)
    _refuse_ids(gone, after.rows)
    came = ids[~has_row(words, ids, after.rows)]
    if len(came) != change.came or not bool(has_row(words, gone, after.rows).all()):
        raise ValueError("its ids that come have rows already, or its ids that go have none")
    found = words.clone()
    # Bits that come are 0 and bits that go are 1, so that nothing is carried.
    found.index_add_(0, came >> 5, _bits(came))
    found.index_add_(0, gone >> 5, _bits(gone), alpha=-1)
    is_counted = kept + len(came) - len(gone) == after.kept
    if not is_counted or not bool(has_row(found, ids, after.rows).all()):
        raise ValueError("its ids do not lead to the rows that it says")
    return found


def _refuse_ids(ids: Tensor, end: int) -> None:
    if not len(ids):
        return
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= end:
        raise ValueError(f"its ids do not ascend, or are not in [0, {end})")


def _bits(ids: Tensor) -> Tensor:
    return torch.ones_like(ids, dtype=torch.int32) << (ids & 31).int()


def rows_of(index: RowIndex, ids: Tensor) -> Tensor:
    """Return the row of each id, the default row for the id behind the last, and :data:`REMOVED`
    where an id has no row of its own: int64."""
    found: Tensor = index(ids)
    found = torch.where(found == index.num_kept, REMOVED, found)
    return torch.where(ids == index.rows, index.num_kept, found)
