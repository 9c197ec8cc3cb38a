"""The rows that lookups name: removed ones masked by their ids, dirty ones zeroed, all counted.

A removed row is a row of zeros, and stays one if no optimizer moves it. So whole rows are masked by
their ids alone. In sums on a CPU, ids of removed rows are dropped before the lookup: they are not
read and get no gradient. All others keep their order, so that sums and updates are the same, bit
for bit. Elsewhere these ids weigh nothing: on a device the host would wait in every forward for the
number of remaining ids; a mean counts all ids; a sequence has a place for each.

Of other blocks, a row is *dirty* from the backward that wrote it until its removed weights are
zeroed again. To clean a row, 16 to 64 bytes of its mask are read, and nothing of other rows. On
CUDA a kernel flags and cleans rows, without the host knowing which.

Ids come feature after feature, int32 or int64 ``(n,)``, as local row numbers. An id outside of its
table counts as row 0, which FBGEMM's bounds check makes of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.device import kernels_on
from dist_sparse.masking.masks import WORDS, BlockMask, Held, positions, prune, wide
from dist_sparse.sparsifiers.pieces import MOST_COUNTED
from dist_sparse.tables.modules import torchrec_port
from dist_sparse.tables.shards import sent

# Where the ids of each feature begin and, last, where they end: one more than there are features.
# On a device a tensor, so that the host does not wait for it.
Ends = Sequence[int] | Tensor

# One forward in so many is sampled, beginning with the first after a mask update.
EVERY = 16


def in_table(ids: Tensor, rows: int) -> Tensor:
    """Return ``ids``, at least one, as int64, with 0 for those outside ``[0, rows)``."""
    ids = ids.long()
    # Reading two numbers is quicker than three more passes, where that does not wait for a device.
    if ids.is_cpu:
        least, most = map(int, ids.aminmax())
        if 0 <= least <= most < rows:
            return ids
    return _outside_as_0(ids, rows)


def _outside_as_0(ids: Tensor, rows: int | Tensor) -> Tensor:
    """Return int64 ids with 0 for those outside ``[0, rows)``: of one table, or of each id's."""
    return torch.where((ids < 0) | (ids >= rows), 0, ids)


def rows_by_feature(
    tables: Mapping[int, Tensor], features: Sequence[int], ids: Tensor, ends: Ends
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the table of each feature, the rows that its ids name, int64 ``(n,)``, and which of
    them count, bool ``(n,)``.

    On a device, where slices would wait for ``ends``, all ids come with each feature, and count as
    none in row 0 if they belong to another one.

    Args:
        tables: something with an element for each row, by the number of the table; ids of other
            tables are left out.
        features: for each feature the number of its table.
    """
    if isinstance(ends, Tensor):
        feature_of_each = _feature_of_each(ids, ends)
        for feature, table in enumerate(features):
            if table in tables:
                mine = feature_of_each == feature
                yield table, in_table(ids, len(tables[table])).masked_fill(~mine, 0), mine
        return
    for table, at in ids_of_tables(tables, features, ends):
        found = in_table(ids[at], len(tables[table]))
        yield table, found, torch.ones((), dtype=torch.bool).expand(found.shape)


def ids_of_tables(
    tables: Container[int], features: Sequence[int], ends: Ends
) -> Iterator[tuple[int, slice]]:
    """Yield the table of each feature that has ids, if it is one of ``tables``, and where the ids
    of the feature are."""
    for table, (start, stop) in zip(features, pairwise(ends), strict=True):
        if table in tables and start != stop:
            yield table, slice(start, stop)


def _feature_of_each(ids: Tensor, ends: Tensor) -> Tensor:
    """Return the number of each id's feature, int64 ``(n,)``, without waiting for the device. Ids
    before the first feature get -1, those behind the last the number of features."""
    places = torch.arange(ids.numel(), device=ids.device)
    return torch.bucketize(places, ends.long().contiguous(), right=True) - 1


class KeptIds:
    """Finds the ids of kept rows in a kernel's features.

    Args:
        kept: kept rows, bool ``(rows,)``, by the number of the table. Other tables keep all ids.
        features: the number of each feature's table.
    """

    def __init__(self, kept: Mapping[int, Tensor], features: Sequence[int]) -> None:
        self._kept = kept
        self._features = features

    def __bool__(self) -> bool:
        """Whether the rows of any table are known."""
        return bool(self._kept)

    def flags(self, ids: Tensor, ends: Ends, strict: bool = False) -> Tensor:
        """Return which ids are kept, bool ``(n,)``.

        Raises:
            IndexError: an id is outside of its table, if ``strict``.
        """
        if not (ids.is_cpu or isinstance(ends, Tensor)):
            # Of features with batches of different sizes the host knows the ends.
            ends = sent(ends, ids.device)
        if isinstance(ends, Tensor):
            return self._flags_on_device(ids, ends)
        found = torch.ones(ids.numel(), dtype=torch.bool)
        for table, at in ids_of_tables(self._kept, self._features, ends):
            kept = self._kept[table]
            # index_select() checks the range of every id.
            rows = ids[at] if strict else in_table(ids[at], len(kept))
            torch.index_select(kept, 0, rows, out=found[at])
        return found

    def among(self, features: Any) -> Any:
        """Return a KeyedJaggedTensor of the kept ids in ``features`` and their weights, on a CPU.
        Gradients flow back to all weights, 0 to the weights of dropped ids.

        If an id is outside of its table, return ``features`` itself: FBGEMM raises an error, or
        warns and takes row 0.
        """
        try:
            chosen = self.flags(features.values(), features.offset_per_key(), strict=True)
        except IndexError:
            return features
        torchrec = torchrec_port()
        # It has made the features.
        assert torchrec is not None
        return torchrec.among(features, chosen)

    def _flags_on_device(self, ids: Tensor, ends: Tensor) -> Tensor:
        flags, starts, rows = self._flat
        # Ids before the first feature and behind the last one are of no table.
        feature = _feature_of_each(ids, ends) + 1
        places = starts[feature] + _outside_as_0(ids.long(), rows[feature])
        return flags.index_select(0, places)

    @cached_property
    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """The flags of all tables in one tensor, as on a device each read is a launch; and where
        the table of each feature begins in it, and how many rows it has."""
        kept = [*self._kept.values()]
        lengths = [*map(len, kept)]
        *starts, end = accumulate(lengths, initial=0)
        spans = dict(zip(self._kept, zip(starts, lengths, strict=True), strict=True))
        # The last flag is for the ids of all other tables, which so have one row.
        kept.append(kept[0].new_ones(1))
        other = end, 1
        # Of each feature, and of the ids before the first one and behind the last one.
        of = [other, *(spans.get(table, other) for table in self._features), other]
        first, rows = zip(*of, strict=True)
        return torch.cat(kept), sent(first, kept[0].device), sent(rows, kept[0].device)


class CountedLookups:
    """Counts the lookups of each row, for scores that ask for them.

    Args:
        features: for each feature the number of its table.
    """

    def __init__(self, features: Sequence[int]) -> None:
        self._features = features
        self._counts: Mapping[int, Tensor] = {}
        # Lookups until counts must be clamped, so that no integer overflows.
        self._room = 0

    def __bool__(self) -> bool:
        """Whether any table is counted."""
        return bool(self._counts)

    def use(self, held: Mapping[int, Held]) -> None:
        """Take the counts to add to, by the number of the table."""
        # New tensors, loaded or moved, may hold the largest count already.
        self._room = 0
        self._counts = {table: one.counts for table, one in held.items() if one.counts.numel()}

    def add(self, ids: Tensor, ends: Ends) -> None:
        """Count the lookups of one forward."""
        # No count grows by more than the number of ids: with room left, none can overflow. So
        # counts are clamped once in 2**30 lookups, not checked each time.
        self._room -= ids.numel()
        if self._room < 0:
            torch._foreach_clamp_max_([*self._counts.values()], MOST_COUNTED)
            self._room = MOST_COUNTED - 1 - ids.numel()
        for table, rows, mine in rows_by_feature(self._counts, self._features, ids, ends):
            count = self._counts[table]
            count.index_add_(0, rows, mine.to(count.dtype))


class SampledLookups:
    """Counts lookups of tables, and lookups of removed rows, in one training forward of
    :data:`EVERY`: next to nothing, for any score.

    The sums are stored with the masks (:attr:`~dist_sparse.masking.masks.Held.samples`) and start
    at 0 with new ones.

    Args:
        features: for each feature the number of its table.
    """

    def __init__(self, features: Sequence[int]) -> None:
        self._features = features
        self._held: Mapping[int, Held] = {}
        self._removed: dict[int, Tensor] = {}
        self._forwards = 0

    def use(self, held: Mapping[int, Held]) -> None:
        """Take masks and sums, by the number of the table."""
        if held != self._held:
            self._held = held
            self._removed = {}
            self._forwards = 0

    def due(self) -> bool:
        """Whether this forward is counted."""
        # Lookups of an evaluation are no traffic.
        if not torch.is_grad_enabled():
            return False
        counted = self._forwards % EVERY == 0
        self._forwards += 1
        return counted

    def add(self, ids: Tensor, ends: Ends) -> None:
        """Count one forward."""
        # Made once for each mask; an evaluation needs none.
        if not self._removed:
            self._removed = {table: one.mask.dead_rows() for table, one in self._held.items()}
        for table, rows, mine in rows_by_feature(self._removed, self._features, ids, ends):
            removed = self._removed[table].index_select(0, rows) & mine
            self._held[table].samples.add_(torch.stack([mine.sum(), removed.sum()]))


# Dirty rows.

# Elements gathered at a time: 1 MiB of float32 stays in the cache between the passes over it.
CHUNK = 1 << 18

# Rows whose flags are searched at a time.
TAKEN = 1 << 20

# A table is masked whole for a fifth as many ids as it has rows: for each of those rows, memory is
# read at random.
WHOLE = 5


class Slot(NamedTuple):
    """A live shard, ``(rect.rows, rect.cols)``, and its mask."""

    weight: Tensor
    mask: BlockMask

    @property
    def whole_rows(self) -> bool:
        """Whether a block spans all columns of the shard: a row is kept or removed as a whole."""
        return self.mask.grid.cols == 1


# The registered tables of a batch, by their number in it.
Slots = Mapping[int, Slot]


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
    table, word = wide(live), WORDS[live.element_size()]
    if mask.grid.cols == 1 and live.is_cpu:
        # Whole rows are written without being read. A device would have to tell how many.
        removed = mask.keeps(block_rows).logical_not_()
        table.index_fill_(0, rows.masked_select(removed), 0)
        return
    # Read, mask, write back: an AND with the mask's words keeps every bit of a kept weight.
    step = max(1, CHUNK // mask.rect.cols)
    for some, blocks in zip(torch.split(rows, step), torch.split(block_rows, step), strict=True):
        read = table.index_select(0, some)
        read.view(word).bitwise_and_(mask.words(blocks, word))
        table.index_copy_(0, some, read)


class RowFlags:
    """A set of rows of one table, one flag byte a row: it takes ids in any order, with repeats, at
    the cost of a write each. At first it is empty.

    Args:
        count: rows of the table.
        device: of the flags. Those of an accelerator are for kernels: the methods would wait.

    Attributes:
        flags: uint8 ``(count,)``.
    """

    def __init__(self, count: int, device: torch.device | None = None) -> None:
        self.count = count
        # Whole words, see parts().
        self._words = torch.zeros(-(-count // 8), dtype=torch.int64, device=device)
        self.flags = self._words.view(torch.uint8)[:count]

    def add(self, rows: Tensor) -> None:
        """Add these rows, int64 ``(n,)``."""
        self.flags.index_fill_(0, rows, 1)

    def add_all(self) -> RowFlags:
        """Add every row; return the set itself."""
        self.flags.fill_(1)
        return self

    def add_ids(self, ids: Tensor) -> None:
        """Add the rows that ids of a lookup name."""
        # More than needed may be flagged: that costs time, never a wrong weight.
        if ids.numel() >= self.count:
            self.add_all()
        else:
            self.add(in_table(ids, self.count))

    def rows(self) -> Tensor:
        """Return the rows, int64, ascending."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *self.parts()])

    def parts(self) -> Iterator[Tensor]:
        """Yield the rows, int64, ascending, in parts."""
        # Most words of 8 flags are 0: they are skipped 8 rows at a time.
        for first in range(0, self._words.numel(), TAKEN // 8):
            touched = self._words[first : first + TAKEN // 8].nonzero().flatten()
            if touched.numel():
                touched += first
                at = self._words.index_select(0, touched).view(torch.uint8).nonzero().view(-1)
                # Flag `at` of the touched words is byte at % 8 of word at // 8.
                yield touched.index_select(0, at >> 3).mul_(8).add_(at & 7)

    def among(self, ids: Tensor) -> Tensor:
        """Return the rows that ids of a lookup name, as far as they are in the set, int64, with
        repeats."""
        # With more ids than rows it is quicker to list the flags than to look each id up.
        if ids.numel() >= self.count:
            return self.flags.nonzero().flatten()
        rows = in_table(ids, self.count)
        return rows.masked_select(self.flags.view(torch.bool).index_select(0, rows))

    def clear(self) -> None:
        """Remove every row."""
        self._words.zero_()


def flag(flags: Mapping[int, RowFlags], features: Sequence[int], ids: Tensor, ends: Ends) -> None:
    """Add the rows that a lookup names to the sets of their tables.

    Args:
        flags: by the number of the table; ids of other tables are left out.
        features: for each feature the number of its table.
    """
    for table, at in ids_of_tables(flags, features, ends):
        flags[table].add_ids(ids[at])


def add_pruned(flags: Mapping[int, RowFlags], before: Slots, after: Slots) -> None:
    """Add the rows that a mask update has zeroed: those with blocks that the masks before kept and
    the masks after remove."""
    # Nothing to add for blocks that come back: their weights are still 0, and scored as 0.
    for table, rows in flags.items():
        old, new = before[table], after[table]
        was = old.weight.data_ptr(), old.mask.block
        now = new.weight.data_ptr(), new.mask.block
        # Bits are compared of the same blocks of the same shard, each within a row.
        if was != now or new.mask.block[0] != 1:
            rows.add_all()
        elif old.mask is not new.mask:
            blocks = positions(old.mask.bits & ~new.mask.bits)
            rows.add(blocks // new.mask.grid.cols)


class HostRowCleaner:
    """Flags and cleans rows as :class:`~dist_sparse.enforcer.row_kernels.TritonRowCleaner` does,
    where there is no such kernel: on a CPU. On a device without Triton, which CUDA builds of torch
    bring, the host waits for the ends.

    Args:
        slots: the tables that lose weights.
        flags: of their rows.
        features: for each feature the number of its table.
    """

    def __init__(
        self, slots: Slots, flags: Mapping[int, RowFlags], features: Sequence[int]
    ) -> None:
        self._slots, self._flags, self._features = slots, flags, features

    def flag(self, ids: Tensor, ends: Ends) -> None:
        """Flag the rows that a lookup names."""
        flag(self._flags, self._features, ids, ends)

    def clean_read(self, ids: Tensor, ends: Ends) -> None:
        """Clean the flagged rows among those that a lookup names."""
        for table, at in ids_of_tables(self._slots, self._features, ends):
            weight, mask = self._slots[table]
            if many(mask, ids[at].numel()):
                mask.apply_(weight)
            else:
                # They stay flagged: the rows that a training step reads are about to be written.
                zero_rows(weight, mask, self._flags[table].among(ids[at]))

    def clean(self) -> None:
        """Clean all flagged rows. They stay flagged."""
        for table, (weight, mask) in self._slots.items():
            for rows in self._flags[table].parts():
                zero_rows(weight, mask, rows)


class ZeroedRows:
    """The tables of one batch whose removed weights are zeroed again before a lookup reads them, or
    before weights are scored, saved or read.

    Args:
        features: for each feature the number of its table.
        device: of the tables.

    Attributes:
        removing: the registered tables that lose weights.
        any_dirty: rows were flagged since all were last cleaned.
        revived: removed weights of any row may be nonzero, after a write of unknown rows. Tables
            whose rows are not flagged have no other way to say so.
    """

    def __init__(self, features: Sequence[int], device: torch.device) -> None:
        self._features = features
        self._device = device
        self.removing: Slots = {}
        self._flags: dict[int, RowFlags] = {}
        self._cleaner: Any = None
        self.any_dirty = self.revived = False

    def use(self, slots: Slots, watched: Set[int]) -> None:
        """Take new masks.

        Args:
            slots: of all registered tables.
            watched: the tables whose rows are flagged and cleaned, if their masks remove anything.
                In all others removed rows stay zero by themselves.
        """
        self.removing = {table: slot for table, slot in slots.items() if slot.mask.removes}
        cleaned = {table: self.removing[table] for table in self.removing.keys() & watched}
        if self._flags.keys() != cleaned.keys():
            # The old flags are lost: any row may be dirty.
            self.revived |= self.any_dirty
            self.any_dirty = False
            self._flags = {
                table: RowFlags(len(slot.weight), self._device) for table, slot in cleaned.items()
            }
        if kernels_on(self._device) is None:
            self._cleaner = HostRowCleaner(cleaned, self._flags, self._features)
        else:
            # It imports Triton.
            from dist_sparse.enforcer.row_kernels import TritonRowCleaner

            found = {table: (*slot, self._flags[table].flags) for table, slot in cleaned.items()}
            self._cleaner = TritonRowCleaner([*map(found.get, self._features)])

    def clean_read(self, ids: Tensor, ends: Ends) -> None:
        """Clean the rows that a lookup is about to read."""
        self._cleaner.clean_read(ids, ends)

    def add(self, ids: Tensor, ends: Ends) -> None:
        """Flag the rows that a backward is about to write."""
        if self._flags:
            self.any_dirty = True
            self._cleaner.flag(ids, ends)

    def clean(self) -> None:
        """Zero removed weights in the dirty rows."""
        if self.revived:
            self.clean_all()
        elif self.any_dirty:
            self._cleaner.clean()
            self._forget()

    def clean_all(self) -> None:
        """Zero removed weights in every row, dirty or not."""
        prune((slot.mask, slot.weight, None) for slot in self.removing.values())
        self._forget()
        self.revived = False

    def _forget(self) -> None:
        if self.any_dirty:
            torch._foreach_zero_([rows.flags for rows in self._flags.values()])
        self.any_dirty = False
