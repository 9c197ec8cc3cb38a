"""The kept rows of a table as a bitmap, and the place of each among the stored rows.

The index has one bit per row and, for each word of 32 rows, the number of kept rows before it: 0.25
byte per row of the original table. Row ``r`` is bit ``r % 32`` of word ``r // 32``, the lowest bit
first; bits after the last row are 0. Removed ids have no row, or share the *default row*, which is
stored after the kept ones. Ids out of range never have a row; the caller handles them. A lookup
reads one word and one count, in int32 arithmetic and pure torch: it runs in eager mode and under
``torch.export``, on any device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.checks import integer
from dist_sparse.masking.masks import pack, unpack

# Instead of a row: the id was removed.
REMOVED = -1

# Instead of a row: the id is out of the range of its table.
UNKNOWN = -2

# Rows are counted in int32.
_MOST_ROWS = 2**31 - 1


def _num_words(rows: int) -> int:
    """Return the number of words of a bitmap: at least one, which lookups clamped into an empty
    table can read."""
    return max(1, -(-rows // 32))


def _bits_in(words: Tensor) -> Tensor:
    """Return how many bits of each word are 1: int32."""
    # The popcount of _rank(): sums of pairs, of fours, of bytes. Masks remove copies of the sign.
    pairs = words - ((words >> 1) & 0x55555555)
    fours = ((pairs >> 2) & 0x33333333).add_(pairs.bitwise_and_(0x33333333))
    return fours.add_(fours >> 4).bitwise_and_(0x0F0F0F0F).mul_(0x01010101).bitwise_right_shift_(24)


def _constants() -> Tensor:
    """Return the operands of :func:`_rank` as a tensor. Torch converts a Python number to a tensor
    in each operation, which doubled the time of short lookups."""
    return torch.tensor(
        [1, 2, 4, 5, 24, 31, 0x55555555, 0x33333333, 0x0F0F0F0F, 0x01010101], dtype=torch.int32
    )


def _rank(
    words: Tensor, counts: Tensor, row: Tensor, start: Tensor | None, constants: Tensor
) -> Tensor:
    """Return the number of kept rows before the rows ``(n,)`` of a bitmap, -1 where removed: all
    int32.

    ``start``: the first word of each row's table, if the bitmap is for several tables; None for
        0."""
    one, two, four, five, top, last, pairs, fours, bytes_, ones = constants.unbind()
    word = row >> five
    if start is not None:
        word.add_(start)
    # Shift the row's own bit up to the sign: the bits of later rows fall off.
    found = words.index_select(0, word).bitwise_left_shift_(row.bitwise_not().bitwise_and_(last))
    # An arithmetic shift copies the sign to all bits: -1 if the row is kept, else 0.
    kept = found >> last
    # Popcount: sums of 2, 4 and 8 bits; the product adds all four bytes in the highest one
    # (Warren, Hacker's Delight, 5-1).
    found.sub_((found >> one).bitwise_and_(pairs))
    upper = (found >> two).bitwise_and_(fours)
    found.bitwise_and_(fours).add_(upper)
    found.add_(found >> four).bitwise_and_(bytes_).mul_(ones).bitwise_right_shift_(top)
    return found.add_(counts.index_select(0, word)).bitwise_and_(kept).sub_(one)


class RowIndex(nn.Module):
    """The kept rows of one table, and where each is stored.

    Args:
        words: int32 ``(max(1, ceil(rows / 32)),)``, the bitmap.
        rows: of the original table.
        default_row: whether removed ids share a row, number ``num_kept``.

    Attributes:
        words: the bitmap.
        counts: int32, same shape: kept rows before each word.
        rows: of the original table.
        num_kept: number of kept rows.
        stored: number of stored rows: kept ones, and the default row.
        removed_row: the result for a removed id: the default row or :data:`REMOVED`.
        nbytes: of ``words`` and ``counts``.

    Example::

        >>> import torch
        >>> from dist_sparse.ids.row_index import RowIndex
        >>> index = RowIndex.of(torch.tensor([False, True, False, True, True]))
        >>> index(torch.tensor([0, 1, 4, 99]))  # 0 is removed, 99 is out of range
        tensor([-1,  0,  2, -2])
        >>> index.num_kept, index.nbytes
        (3, 8)
    """

    words: Tensor
    counts: Tensor
    constants: Tensor

    def __init__(self, words: Tensor, rows: int, default_row: bool = False) -> None:
        super().__init__()
        integer("rows", rows, least=0, most=_MOST_ROWS)
        self.register_buffer("words", words)
        self.register_buffer("counts", torch.empty_like(words))
        self.register_buffer("constants", _constants(), persistent=False)
        self.rows, self.default_row = rows, default_row
        self.nbytes = 2 * words.nbytes
        self._count()

    def _count(self) -> None:
        """Count the kept rows before each word."""
        # Bits after the last row would be counted. They are 0: artifacts are verified on opening.
        in_word = _bits_in(self.words)
        until = in_word.cumsum(0, dtype=torch.int32)
        self.num_kept = int(until[-1])
        self.stored = self.num_kept + self.default_row
        self.removed_row = self.num_kept if self.default_row else REMOVED
        self.counts.copy_(until.sub_(in_word))

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._count()

    @classmethod
    def of(cls, kept: Tensor, default_row: bool = False) -> RowIndex:
        """Return the index of a table from flags of its kept rows: bool ``(rows,)``."""
        padded = nn.functional.pad(kept, (0, 32 * _num_words(len(kept)) - len(kept)))
        return cls(pack(padded).view(torch.int32), len(kept), default_row)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the stored row of each id: int64, in the shape of ``ids``. For removed ids it is
        the default row or :data:`REMOVED`, for ids outside ``[0, rows)`` :data:`UNKNOWN`.

        ``ids`` (int32 or int64, any shape) is not changed.
        """
        # Clamped ids read inside the bitmap; the ids that clamping changed are marked at the end.
        inside = ids.clamp(0, max(self.rows - 1, 0))
        row = inside.int().reshape(-1)
        found = _rank(self.words, self.counts, row, None, self.constants).long().view(ids.shape)
        if self.default_row:
            found = torch.where(found < 0, self.num_kept, found)
        return torch.where(inside == ids, found, UNKNOWN)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a part of RowIndexes would have all of its memory.
        state = self.__dict__.copy()
        state["_buffers"] = dict(self.named_buffers(remove_duplicate=False))
        for name in ("words", "counts"):
            state["_buffers"][name] = state["_buffers"][name].clone()
        return state

    def kept(self) -> Tensor:
        """Return flags of the kept rows: bool ``(rows,)``."""
        return unpack(self.words.view(torch.uint8), self.rows)

    def compose(self, inner: RowIndex) -> RowIndex:
        """Return the index of a table that was compacted twice: ``inner`` indexes the kept rows of
        this one. Neither may have a default row: ids that share it can't be told apart."""
        assert inner.rows == self.num_kept
        assert not (self.default_row or inner.default_row)
        # The set flags are replaced by the flags of the inner index.
        kept = self.kept()
        kept[kept.clone()] = inner.kept()
        return RowIndex.of(kept)

    def extra_repr(self) -> str:
        """Return the arguments shown by ``repr``."""
        return f"rows={self.rows}, num_kept={self.num_kept}"


class RowIndexes(nn.Module):
    """Indexes of several tables, for ids of several features in one pass.

    Args:
        tables: an index each, or None for a table that keeps all of its rows; copied into one
            bitmap.
        rows: of each original table.
        features: for each feature, the position of its table.

    Example::

        >>> import torch
        >>> from dist_sparse.ids.row_index import RowIndex, RowIndexes
        >>> first = RowIndex.of(torch.tensor([False, True, True]))
        >>> index = RowIndexes([first, None], rows=[3, 9], features=[0, 1, 0])
        >>> ids, lengths = torch.tensor([1, 2, 1, 0, 9]), torch.tensor([2, 1, 2])
        >>> rows, known = index(ids, lengths)
        >>> rows[known], known
        (tensor([ 0,  1,  1, -1], dtype=torch.int32), tensor([ True,  True,  True,  True, False]))
    """

    words: Tensor
    counts: Tensor
    constants: Tensor
    removed: Tensor
    of_features: Tensor

    def __init__(
        self, tables: Sequence[RowIndex | None], rows: Sequence[int], features: Sequence[int]
    ) -> None:
        super().__init__()
        # For tables with an index, by position: original rows, and whether it has a default row.
        self._indexed: dict[int, tuple[int, bool]] = {}
        self.any_default = False
        words = []
        counts = []
        start = 0
        # For each table: its last row, its first word, and the row of removed ids.
        of_tables = []
        for number, (table, count) in enumerate(zip(tables, rows, strict=True)):
            integer("rows", count, least=0, most=_MOST_ROWS)
            last = max(count - 1, 0)
            if table is None:
                # All rows are kept: -1, for no word to read, and no removed id.
                of_tables.append((last, -1, REMOVED))
                continue
            self._indexed[number] = (count, table.default_row)
            self.any_default |= table.default_row
            of_tables.append((last, start, table.removed_row))
            words.append(table.words)
            counts.append(table.counts)
            start += len(table.words)
        self.any_removed = bool(words)
        self.any_dense = len(words) < len(of_tables)
        if not words:
            # torch.cat refuses an empty list. No lookup reads this word.
            words = counts = [torch.zeros(1, dtype=torch.int32)]
        self.register_buffer("words", torch.cat(words))
        self.register_buffer("counts", torch.cat(counts))
        self.register_buffer("constants", _constants(), persistent=False)
        # REMOVED as a tensor, for the same reason as the constants.
        self.register_buffer("removed", torch.tensor(REMOVED, dtype=torch.int32), persistent=False)
        # With a single feature and table, its last row is a constant: no gather by feature.
        self.only_last = of_tables[0][0] if len(features) == len(tables) == 1 else -1
        self._removed_rows = [of_tables[table][2] for table in features]
        of_features = torch.tensor([of_tables[table] for table in features]).view(-1, 3)
        self.register_buffer("of_features", of_features.T.contiguous())

    def share_with(self, tables: Sequence[RowIndex | None]) -> None:
        """Let the tables that this was built of keep their bits and counts in the memory of this
        one."""
        start = 0
        for table in tables:
            if table is not None:
                stop = start + len(table.words)
                table.words, table.counts = self.words[start:stop], self.counts[start:stop]
                start = stop

    def tables(self) -> dict[int, RowIndex]:
        """Return a copy of each table's index, by the table's position; none for tables that keep
        all rows."""
        found, start = {}, 0
        for number, (rows, default_row) in self._indexed.items():
            stop = start + _num_words(rows)
            found[number] = RowIndex(self.words[start:stop].clone(), rows, default_row)
            start = stop
        return found

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each id in the storage of its table, int32 ``(n,)``, and whether the id
        is in the range of its table. For removed ids the row is the table's default row or
        :data:`REMOVED`; for ids out of range it is the row of the nearest id.

        Args:
            ids: int32 or int64 ``(n,)``, feature after feature; not changed.
            lengths: int32 or int64 ``(features,)``, how many ids each feature has; they add up to
                n.
        """
        if self.only_last >= 0:
            inside = ids.clamp(0, self.only_last)
            found = inside.int()
            if self.any_removed:
                found = _rank(self.words, self.counts, found, None, self.constants)
            if self.any_default:
                found = torch.where(found < 0, self.of_features[2].int(), found)
        else:
            feature = torch.repeat_interleave(lengths, output_size=ids.size(0))
            inside = torch.minimum(ids.clamp(min=0), self.of_features[0].index_select(0, feature))
            found = inside.int()
            if self.any_removed:
                found = self._ranks(found, feature)
            if self.any_default:
                removed = self.of_features[2].int().index_select(0, feature)
                found = torch.where(found < 0, removed, found)
        return found, inside == ids

    def _ranks(self, row: Tensor, feature: Tensor) -> Tensor:
        """Return the number of kept rows before each row in the table of its feature,
        :data:`REMOVED` where the row is removed."""
        start = self.of_features[1].int().index_select(0, feature)
        if not self.any_dense:
            return _rank(self.words, self.counts, row, start, self.constants)
        # Ids of a table that keeps all rows read the first word; the result is discarded.
        dense = start < 0
        inside, first = row.masked_fill(dense, 0), start.clamp(min=0)
        found = _rank(self.words, self.counts, inside, first, self.constants)
        return torch.where(dense, row, found)

    def count_removed(self, rows: Tensor, sizes: list[int]) -> list[int]:
        """Return how many ids of each feature were removed, where any is (:attr:`any_removed`).

        Args:
            rows: ``(n,)``, as :meth:`forward` returned them, and :data:`UNKNOWN` for ids out of
                range.
            sizes: how many ids each feature has; they add up to n.
        """
        flags: list[Tensor] = []
        if self.any_default:
            parts = rows.split_with_sizes(sizes)
            for part, removed_row in zip(parts, self._removed_rows, strict=True):
                flags.append(part == removed_row)
        elif len(sizes) == 1:
            flags.append(rows == self.removed)
        else:
            flags += (rows == self.removed).split_with_sizes(sizes)
        # Short lookups notice each call: item() and split_with_sizes() take half the time of
        # int() and split().
        return [int(part.count_nonzero().item()) for part in flags]


class Tally:
    """Numbers by name, to which any number of threads add.

    Example::

        >>> from dist_sparse.ids.row_index import Tally
        >>> lookups = Tally({"user": 0, "item": 0})
        >>> lookups.add(["user", "item", "user"], [3, 1, 2])
        >>> lookups.counts
        {'user': 5, 'item': 1}
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)
        # An addition reads and writes: without a lock, another thread's addition in between is
        # lost.
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Tally], tuple[dict[str, int]]]:
        # Locks can't be copied or pickled: a copy gets its own.
        return Tally, (self.counts,)

    def add(self, names: Sequence[str], numbers: Sequence[int]) -> None:
        """Add a number to each name; names may repeat."""
        with self._lock:
            for name, number in zip(names, numbers, strict=True):
                self._counts[name] += number

    @property
    def counts(self) -> dict[str, int]:
        """A copy of the numbers."""
        with self._lock:
            return dict(self._counts)


class UnknownLookups:
    """Counts, by table, the lookups of ids that are out of range.

    Args:
        rows: of each original table.
        features: for each feature, the name of its table.

    Attributes:
        tally: lookups so far by table, 0 for tables that had none.
    """

    def __init__(self, rows: Mapping[str, int], features: Sequence[str]) -> None:
        self._rows = dict(rows)
        self._features = list(features)
        self.tally = Tally(dict.fromkeys(rows, 0))

    def add(self, ids: Tensor, unknown: Tensor, lengths: Sequence[int]) -> dict[str, str]:
        """Count the lookups of a batch. Return a description by table, for tables that have some:
        the first id, and the number of lookups.

        Args:
            ids: ``(n,)``, feature after feature.
            unknown: bool ``(n,)``, which of them are out of range.
            lengths: how many ids each feature has; they add up to n.
        """
        # A table may have several features.
        found: defaultdict[str, list[Tensor]] = defaultdict(list)
        [at] = unknown.nonzero(as_tuple=True)
        # In one copy: the host would wait for a device at each feature.
        places, bad = torch.stack((at, ids.index_select(0, at))).cpu()
        ends = torch.tensor(list(accumulate(lengths)))
        stops = torch.searchsorted(places, ends)
        for table, some in zip(self._features, bad.tensor_split(stops[:-1]), strict=True):
            if len(some):
                found[table].append(some)
        described = {}
        for table, some_ids in found.items():
            ids = torch.cat(some_ids)
            self.tally.add([table], [len(ids)])
            described[table] = (
                f"id {int(ids[0])} of table {table!r}, which has {self._rows[table]} rows"
                f" ({len(ids)} such lookups in this batch)"
            )
        return described
