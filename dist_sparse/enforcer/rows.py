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
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.device import kernels_on
from dist_sparse.masking.masks import WORDS, BlockMask, positions, prune, wide
from dist_sparse.sparsifiers.pieces import MOST_COUNTED
from dist_sparse.tables.modules import torchrec_port
from dist_sparse.tables.shards import sent

Ends = Sequence[int] | Tensor
"""Where the ids of each feature begin and, last, where they end: one more than there are features.
On a device a tensor, so that the host does not wait for it."""

EVERY: Final = 16
"""One forward in so many is sampled, beginning with the first after a mask update."""


def in_table(ids: Tensor, rows: int | Tensor) -> Tensor:
    """Return ``ids`` as int64, with 0 for those outside ``[0, rows)``: of one table, or of the
    table of each id."""
    ids = ids.long()
    # Reading two numbers is quicker than three more passes, where that does not wait for a device.
    if isinstance(rows, int) and ids.is_cpu:
        least, most = ids.aminmax()
        if int(least) >= 0 and int(most) < rows:
            return ids
    return torch.where((ids < 0) | (ids >= rows), 0, ids)


def rows_by_feature(
    rows: Mapping[int, int], features: Sequence[int], ids: Tensor, ends: Ends
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the table of each feature, the rows that its ids name, int64 ``(n,)``, and which of
    them count, bool ``(n,)``.

    On a device, where slices would wait for ``ends``, all ids come with each feature, and count as
    none in row 0 if they belong to another one.

    Args:
        rows: of each table, by its number; ids of other tables are left out.
        features: for each feature the number of its table.
    """
    if isinstance(ends, Tensor):
        feature_of_each = _feature_of_each(ids, ends)
        for feature, table in enumerate(features):
            if table in rows:
                mine = feature_of_each == feature
                yield table, in_table(ids, rows[table]).masked_fill(~mine, 0), mine
        return
    for table, at in ids_of_tables(rows, features, ends):
        found = in_table(ids[at], rows[table])
        yield table, found, torch.ones((), dtype=torch.bool).expand(found.shape)


def ids_of_tables(
    tables: Container[int], features: Sequence[int], ends: Sequence[int]
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

    def flags(self, ids: Tensor, ends: Ends, strict: bool = False) -> Tensor:
        """Return which ids are kept, bool ``(n,)``.

        Raises:
            IndexError: an id is outside of its table, if ``strict``.
        """
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
        return flags.index_select(0, starts[feature] + in_table(ids, rows[feature]))

    @cached_property
    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """The flags of all tables in one tensor, as on a device each read is a launch; and where
        the table of each feature begins in it, and how many rows it has."""
        device = next(iter(self._kept.values())).device
        # The last flag is for the ids of all other tables, which so have one row.
        kept = [*self._kept.values(), torch.ones(1, dtype=torch.bool, device=device)]
        number = {table: i for i, table in enumerate(self._kept)}
        lengths = [*map(len, kept)]
        starts = [0, *accumulate(lengths)]
        # Of each feature, and of the ids before the first one and behind the last one.
        of = [number.get(table, len(kept) - 1) for table in (-1, *self._features, -1)]
        first, rows = [starts[i] for i in of], [lengths[i] for i in of]
        return torch.cat(kept), sent(first, device), sent(rows, device)


class LookupCounts:
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

    def use(self, counts: Mapping[int, Tensor]) -> None:
        """Take the counts to add to, live, int32 or float64 ``(rows,)``, by the number of the
        table."""
        # New tensors, loaded or moved, may hold the largest count already.
        self._room = 0
        self._counts = counts

    def add(self, ids: Tensor, ends: Ends) -> None:
        """Count the lookups of one forward."""
        # No count grows by more than the number of ids: with room left, none can overflow. So
        # counts are clamped once in 2**30 lookups, not checked each time.
        self._room -= ids.numel()
        if self._room < 0:
            for count in self._counts.values():
                count.clamp_(max=MOST_COUNTED)
            self._room = MOST_COUNTED - 1 - ids.numel()
        sizes = {table: count.numel() for table, count in self._counts.items()}
        for table, rows, mine in rows_by_feature(sizes, self._features, ids, ends):
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
        self._masks: Mapping[int, BlockMask] = {}
        self._sums: Mapping[int, Tensor] = {}
        self._removed: dict[int, Tensor] = {}
        self._forwards = 0

    def use(self, masks: Mapping[int, BlockMask], sums: Mapping[int, Tensor]) -> None:
        """Take new masks; both by the number of the table.

        Args:
            sums: int64 ``(2,)`` each, all lookups and those of removed rows, added to in place.
        """
        self._sums = sums
        if [*map(id, masks.values())] != [*map(id, self._masks.values())]:
            self._removed, self._forwards = {}, 0
        self._masks = masks

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
        sizes = {table: mask.rect.rows for table, mask in self._masks.items()}
        for table, rows, mine in rows_by_feature(sizes, self._features, ids, ends):
            sums, mask = self._sums[table], self._masks[table]
            sums[0] += mine.sum()
            if mask.removes:
                # Made once for each mask.
                if table not in self._removed:
                    self._removed[table] = mask.dead_rows()
                sums[1] += (self._removed[table].index_select(0, rows) & mine).sum()


# Dirty rows.

CHUNK = 1 << 18
"""Elements gathered at a time: 1 MiB of float32 stays in the cache between the passes over it."""

TAKEN = 1 << 20
"""Rows whose flags are searched at a time."""

WHOLE = 5
"""A table is masked whole for a fifth as many ids as it has rows: for each of those rows, memory is
read at random."""


class Slot(NamedTuple):
    """A live shard, ``(rect.rows, rect.cols)``, and its mask."""

    weight: Tensor
    mask: BlockMask

    @property
    def whole_rows(self) -> bool:
        """Whether a block spans all columns of the shard: a row is kept or removed as a whole."""
        return self.mask.grid.cols == 1


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

    def add_all(self) -> None:
        """Add every row."""
        self.flags.fill_(1)

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


def flag(
    flags: Mapping[int, RowFlags], features: Sequence[int], ids: Tensor, ends: Sequence[int]
) -> None:
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
        old, new = before.get(table), after.get(table)
        if old is None or new is None or not _comparable(old, new):
            rows.add_all()
        elif old.mask is not new.mask:
            blocks = positions(old.mask.bits & ~new.mask.bits)
            rows.add(blocks // new.mask.grid.cols)


def _comparable(old: Slot, new: Slot) -> bool:
    """Whether the bits of two masks mean the same blocks of the same shard, each within a row."""
    same_shard = old.weight.data_ptr() == new.weight.data_ptr()
    return same_shard and old.mask.block == new.mask.block and new.mask.block[0] == 1


Slots = Mapping[int, Slot]
"""The registered tables of a batch, by their number in it."""


class ZeroedRows:
    """The tables of one batch whose removed weights are zeroed again before a lookup reads them, or
    before weights are scored, saved or read.

    Args:
        features: for each feature the number of its table.
        device: of the tables.

    Attributes:
        revived: removed weights of any row may be nonzero, after a write of unknown rows. Tables
            that are not watched have no other way to say so.
    """

    def __init__(self, features: Sequence[int], device: torch.device) -> None:
        self._features = features
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._slots: Slots = {}
        self._watched: Set[int] = frozenset()
        self._removing: Slots = {}
        # Dirty rows.
        self._flags: dict[int, RowFlags] = {}
        self._any_dirty = False
        self._kernel: Any = None
        self.revived = False

    def use(self, slots: Slots, watched: Set[int]) -> None:
        """Take new masks.

        Args:
            slots: of all registered tables.
            watched: the tables whose rows are flagged and cleaned. In all others removed rows stay
                zero by themselves.
        """
        self._slots = slots
        if self._watched != watched:
            # The old flags are lost: any row may be dirty.
            self.revived |= self._any_dirty
            self._any_dirty = False
            self._watched = watched
            counts = {table: len(slots[table].weight) for table in watched}
            self._flags = {table: RowFlags(rows, self._device) for table, rows in counts.items()}
        self._removing = {table: slots[table] for table in watched if slots[table].mask.removes}
        if not self._on_cpu:
            self._kernel = self._new_kernel()

    @property
    def cleans_lookups(self) -> bool:
        """Whether :meth:`clean_read` has anything to do."""
        return bool(self._removing)

    def clean_read(self, ids: Tensor, ends: Ends) -> None:
        """Clean the rows that a lookup is about to read."""
        # Most evaluations, and the first forward after a clean-up, end here.
        if not self._any_dirty:
            return
        if isinstance(ends, Tensor) or self._kernel is not None:
            self._kernel.clean_read(ids, ends)
            return
        for table, at in ids_of_tables(self._removing, self._features, ends):
            slot = self._removing[table]
            if many(slot.mask, ids[at].numel()):
                slot.mask.apply_(slot.weight)
            else:
                # They stay flagged: the rows that a training step reads are about to be written.
                zero_rows(slot.weight, slot.mask, self._flags[table].among(ids[at]))

    def add(self, ids: Tensor, ends: Ends) -> None:
        """Flag the rows that a backward is about to write."""
        if not ids.numel() or not self._watched:
            return
        self._any_dirty = True
        if self._kernel is not None:
            self._kernel.flag(ids, ends)
        elif not isinstance(ends, Tensor):
            flag(self._flags, self._features, ids, ends)
        else:
            # A device without Triton: the next lookup cleans every row.
            self.revived = True

    def clean(self) -> None:
        """Zero removed weights in the dirty rows."""
        if self.revived:
            self.clean_all()
        elif self._any_dirty:
            if self._kernel is not None:
                self._kernel.clean()
            else:
                self._clean_flagged()
            self._forget()

    def _clean_flagged(self) -> None:
        for table, slot in self._removing.items():
            for rows in self._flags[table].parts():
                zero_rows(slot.weight, slot.mask, rows)

    def clean_all(self) -> None:
        """Zero removed weights in every row, dirty or not."""
        slots = self._slots.values()
        prune((slot.mask, slot.weight, None) for slot in slots if slot.mask.removes)
        self._forget()
        self.revived = False

    def _forget(self) -> None:
        if self._any_dirty:
            torch._foreach_zero_([rows.flags for rows in self._flags.values()])
        self._any_dirty = False

    def _new_kernel(self) -> Any:
        """Return the kernel that flags and cleans rows on CUDA, if Triton is installed (CUDA builds
        of torch bring it); None elsewhere."""
        if kernels_on(self._device) is None:
            return None
        # It imports Triton.
        from dist_sparse.enforcer.row_kernels import TritonRowCleaner

        slots: list[Any] = [None] * len(self._features)
        for i, table in enumerate(self._features):
            if table in self._removing:
                slots[i] = *self._removing[table], self._flags[table].flags
        return TritonRowCleaner(slots)
