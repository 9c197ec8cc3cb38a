"""Zero the removed weights of a few rows of a table, and remember which rows are dirty.

A row is *dirty* from the backward that wrote it until its removed weights are zeroed again. To
clean a row, 16 to 64 bytes of its mask are read, and nothing of other rows. This is the version for
CPUs and for devices without Triton; :mod:`dist_sparse.enforcer.rows_triton` is the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from dist_sparse.masking.masks import WORDS, BlockMask, spread, wide

CHUNK = 1 << 18
"""Elements gathered at a time: 1 MiB of float32 stays in the cache between the passes over it."""

TAKEN = 1 << 20
"""Rows whose flags are searched at a time."""

WHOLE = 5
"""A table is masked whole for a fifth as many ids as it has rows: for each of those rows, memory is
read at random."""


@dataclass(frozen=True)
class Slot:
    """A live shard, ``(rect.rows, rect.cols)``, and its mask."""

    weight: Tensor
    mask: BlockMask

    @property
    def whole_rows(self) -> bool:
        """Whether a block spans all columns of the shard: a row is kept or removed as a whole."""
        return self.mask.grid.cols == 1


class RowCleaner(Protocol):
    """Cleans the rows that one lookup is about to read."""

    needed: bool
    """Whether anything is removed."""

    def __init__(self, slots: Sequence[Slot | None]) -> None:
        """One slot for each feature, in the order of the ids; None where nothing is masked."""
        ...

    def __call__(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Zero what is removed in these rows.

        Args:
            ids: int32 or int64 ``(n,)``, feature after feature, local row numbers. Those outside
                the table are read as row 0, which FBGEMM's bounds check makes of them.
            ends: where the ids of each feature begin and, last, where they end: one more than there
                are features. On a device as a tensor, so that the host does not wait for it.
        """
        ...


class TorchRowCleaner:
    """A :class:`RowCleaner` in torch's own operations."""

    def __init__(self, slots: Sequence[Slot | None], dirty: DirtyRows) -> None:
        """Clean only the rows that are flagged in ``dirty``."""
        self._slots = [slot if slot is not None and slot.mask.removes else None for slot in slots]
        self._dirty = dirty
        self.needed = any(slot is not None for slot in self._slots)

    def __call__(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        if isinstance(ends, Tensor):
            ends = ends.tolist()
        # Most evaluations, and the first forward after a clean-up, end here.
        if not self._dirty:
            return
        spans = zip(self._slots, pairwise(ends), strict=True)
        for feature, (slot, (start, stop)) in enumerate(spans):
            if slot is None or start == stop:
                continue
            if many(slot.mask, stop - start):
                slot.mask.apply_(slot.weight)
                continue
            zero_rows(slot.weight, slot.mask, self._dirty.among(feature, ids[start:stop]))


def many(mask: BlockMask, rows: int) -> bool:
    """Whether to mask a whole shard is quicker than to mask so many of its rows, in any order, with
    repeats."""
    return mask.in_one_pass and rows * WHOLE >= mask.rect.rows


def zero_rows(weight: Tensor, mask: BlockMask, rows: Tensor) -> None:
    """Zero the removed elements of some rows of a live shard.

    Args:
        weight: the shard, ``(rect.rows, rect.cols)``; written through ``.data``, which autograd
            does not see.
        mask: of the shard.
        rows: int64 ``(n,)``, row numbers within the shard, possibly repeated.
    """
    live = weight.data
    block_rows = rows
    # Blocks count from the table's first row, rows from the shard's.
    if mask.block[0] != 1:
        block_rows = (rows + mask.rect.row) // mask.block[0] - mask.grid.row
    if mask.grid.cols == 1:
        # Bit r of the mask is row r of blocks: byte r // 8, bit r % 8.
        kept = mask.bits.index_select(0, block_rows >> 3) >> (block_rows & 7).to(torch.uint8)
        _zero_whole_rows(wide(live), rows, (kept & 1) == 0)
        return
    table, word = wide(live), WORDS[live.element_size()]
    # Read, mask, write back: an AND with the mask's words keeps every bit of a kept weight.
    step = max(1, CHUNK // mask.rect.cols)
    for some, blocks in zip(torch.split(rows, step), torch.split(block_rows, step), strict=True):
        read = table.index_select(0, some)
        read.view(word).bitwise_and_(
            _words(mask, blocks if mask.grid.rows > 1 else blocks[:1], word)
        )
        table.index_copy_(0, some, read)


def _zero_whole_rows(table: Tensor, rows: Tensor, removed: Tensor) -> None:
    """Zero those of some rows that are ``removed``, bool ``(n,)``."""
    if table.is_cpu:
        table.index_fill_(0, rows.masked_select(removed), 0)
    else:
        # The number of removed rows would have to come to the host: all are written instead, kept
        # ones as they were.
        read = table.index_select(0, rows).masked_fill_(removed.unsqueeze(1), 0)
        table.index_copy_(0, rows, read)


def _words(mask: BlockMask, block_rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask of some block rows, ``(n, rect.cols)`` words: all bits set where kept, none
    where removed."""
    width = mask.block[1]
    cols, rect = mask.grid.cols, mask.rect
    device = mask.bits.device
    if cols % 8 == 0 and rect.cols == cols * width:
        # Whole bytes: one look-up in a table expands each to the words of 8 blocks.
        per_row = cols // 8
        at = block_rows.unsqueeze(1) * per_row + torch.arange(per_row, device=device)
        bytes_ = mask.bits.index_select(0, at.flatten()).to(torch.int32)
        return spread(width, dtype, device).index_select(0, bytes_).view(-1, rect.cols)
    # Rows of bits do not begin at bytes, or the shard cuts a block: one bit at a time.
    columns = torch.arange(rect.col, rect.col_end, device=device) // width - mask.grid.col
    at = (block_rows.unsqueeze(1) * cols + torch.arange(cols, device=device)).flatten()
    kept = (mask.bits.index_select(0, at >> 3) >> (at & 7).to(torch.uint8)) & 1
    kept = kept.to(dtype).neg_().view(-1, cols)
    return kept if cols == rect.cols else kept.index_select(1, columns)


def in_table(ids: Tensor, rows: int) -> Tensor:
    """Return ``ids`` as int64, with 0 for those outside ``[0, rows)``, as FBGEMM's bounds check
    replaces them."""
    ids = ids.long()
    # Reading two numbers is quicker than three more passes, where that does not wait for a device.
    if ids.is_cpu:
        least, most = ids.aminmax()
        if int(least) >= 0 and int(most) < rows:
            return ids
    return torch.where((ids < 0) | (ids >= rows), 0, ids)


def feature_of_each(ids: Tensor, ends: Tensor) -> Tensor:
    """Return the number of each id's feature, int64 ``(n,)``, without waiting for the device. Ids
    before the first feature get -1, those behind the last the number of features."""
    places = torch.arange(ids.numel(), device=ids.device)
    return torch.bucketize(places, ends.long().contiguous(), right=True) - 1


def ids_by_feature(
    ids: Tensor, ends: Sequence[int] | Tensor
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the ids of each feature, and None; both arguments as in :class:`RowCleaner`.

    On a device, where slices would wait for ``ends``, yield all ids for each feature, and flags of
    its own, bool ``(n,)``.
    """
    if isinstance(ends, Tensor):
        feature = feature_of_each(ids, ends)
        yield from ((ids, feature == number) for number in range(len(ends) - 1))
    else:
        yield from ((ids[start:stop], None) for start, stop in pairwise(ends))


def count_lookups(
    counts: Mapping[int, Tensor],
    features: Sequence[int],
    ids: Tensor,
    ends: Sequence[int] | Tensor,
) -> None:
    """Add 1 to the count of a row for each time that ``ids`` name it; both as in
    :class:`RowCleaner`.

    Args:
        counts: by the number of the table, int32 or float64 ``(rows,)``.
        features: for each feature the number of its table.
    """
    for table, (some, mine) in zip(features, ids_by_feature(ids, ends), strict=True):
        count = counts.get(table)
        if count is None or not some.numel():
            continue
        rows = in_table(some, count.numel())
        if mine is None:
            one = torch.ones((), dtype=count.dtype, device=ids.device)
            count.index_add_(0, rows, one.expand(some.numel()))
        else:
            # Ids of other features add 0, to row 0: they may be outside of this table.
            count.index_add_(0, rows.masked_fill(~mine, 0), mine.to(count.dtype))


class FlatRows:
    """The rows of some tables of a kernel, numbered one table behind the other.

    Args:
        rows: how many there are on this rank, by the number of the table.
        features: for each feature the number of its table.
        device: of the tables.

    Attributes:
        starts: the number of each table's first row, a multiple of 8.
        total: the number that stands for ids of all other tables.
    """

    def __init__(
        self, rows: Mapping[int, int], features: Sequence[int], device: torch.device
    ) -> None:
        self.starts: dict[int, int] = {}
        self.total = 0
        for table, count in rows.items():
            self.starts[table] = self.total
            self.total += -(-count // 8) * 8
        # Ids before the first feature and behind the last one are of no table.
        tables = [-1, *features, -1]
        starts = [self.starts.get(table, self.total) for table in tables]
        self._starts = torch.tensor(starts, device=device)
        self._rows = torch.tensor([rows.get(table, 1) for table in tables], device=device)

    def of(self, ids: Tensor, ends: Tensor) -> Tensor:
        """Return the number of each id's row, int64 ``(n,)``, without waiting for the device. Both
        arguments as in :class:`RowCleaner`."""
        feature = feature_of_each(ids, ends) + 1
        ids = ids.long()
        outside = (ids < 0) | (ids >= self._rows[feature])
        # FBGEMM reads row 0 instead. A table that has no number here has a single row, `total`.
        return self._starts[feature] + torch.where(outside, 0, ids)


class DirtyRows:
    """The dirty rows of the tables of one kernel, one flag byte a row: a set that takes ids in any
    order, with repeats, at the cost of a write each. At first no row is dirty.

    Args:
        rows: how many there are on this rank, by the number of the table; ids of tables left out
            are ignored.
        features: for each feature the number of its table.
        device: of the tables.
    """

    def __init__(
        self, rows: Mapping[int, int], features: Sequence[int], device: torch.device
    ) -> None:
        self.tables, self._features = dict(rows), list(features)
        self._flat = FlatRows(rows, features, device)
        # Whole words, see rows(); the last one takes the flags of ids of other tables.
        self._flags = torch.zeros(self._flat.total + 8, dtype=torch.uint8, device=device)
        self._any = False

    def __bool__(self) -> bool:
        """Whether any row may be dirty. Does not wait for the device."""
        return self._any

    def add(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Flag the rows that a backward is about to write; ``ids`` and ``ends`` as in
        :class:`RowCleaner`."""
        if not ids.numel() or not self.tables:
            return
        self._any = True
        if isinstance(ends, Tensor):
            self._flags.index_fill_(0, self._flat.of(ids, ends), 1)
            return
        for table, (start, stop) in zip(self._features, pairwise(ends), strict=True):
            if table not in self.tables or start == stop:
                continue
            # More than needed may get dirty: that costs time, never a wrong weight.
            if stop - start >= self.tables[table]:
                self.add_all(table)
            else:
                self.add_rows(table, in_table(ids[start:stop], self.tables[table]))

    def add_all(self, table: int) -> None:
        """Flag every row of a table."""
        self._any = True
        self._of(table).fill_(1)

    def add_rows(self, table: int, rows: Tensor) -> None:
        """Flag these rows of a table, int64 ``(n,)``."""
        self._any = True
        self._of(table).index_fill_(0, rows, 1)

    def rows(self, table: int) -> Iterator[Tensor]:
        """Yield the dirty rows of a table, int64, ascending, in parts."""
        start = self._flat.starts[table]
        size = -(-self.tables[table] // 8) * 8
        # Most words of 8 flags are 0: they are skipped 8 rows at a time.
        words = self._flags[start : start + size].view(torch.int64)
        for first in range(0, words.numel(), TAKEN // 8):
            touched = words[first : first + TAKEN // 8].nonzero().flatten()
            if touched.numel():
                touched += first
                at = words.index_select(0, touched).view(torch.uint8).nonzero().view(-1)
                # Flag `at` of the touched words is byte at % 8 of word at // 8.
                yield touched.index_select(0, at >> 3).mul_(8).add_(at & 7)

    def clear_table(self, table: int) -> None:
        """Mark every row of one table as clean."""
        self._of(table).zero_()

    def clear(self) -> None:
        """Mark every row as clean."""
        if self._any:
            self._flags.zero_()
            self._any = False

    def among(self, feature: int, ids: Tensor) -> Tensor:
        """Return the ``ids`` of one feature whose rows are dirty, int64, with repeats. They stay
        flagged: the rows that a training step reads are about to be written."""
        table = self._features[feature]
        flags = self._of(table)
        # With more ids than rows it is quicker to list the flags than to look each id up.
        if ids.numel() >= self.tables[table]:
            return flags.nonzero().flatten()
        rows = in_table(ids, self.tables[table])
        return rows.masked_select(flags.view(torch.bool).index_select(0, rows))

    def _of(self, table: int) -> Tensor:
        """Return the live flags of a table, uint8 ``(rows,)``."""
        start = self._flat.starts[table]
        return self._flags[start : start + self.tables[table]]
