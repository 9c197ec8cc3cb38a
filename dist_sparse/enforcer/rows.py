"""The rows that ids name: removed rows masked by their ids, dirty rows zeroed, lookups counted.

A removed row is a row of zeros, and stays one if no optimizer moves it. So whole rows are masked by
their ids alone. Where a CPU sums rows, ids of removed rows are dropped before the lookup: these
rows are not read and get no gradient. The other ids keep their order, so that sums and updates stay
the same, bit for bit. Elsewhere the ids stay, with the weight 0: on a device the host would wait in
every forward for the number of remaining ids; a mean divides by the number of all ids; a sequence
has a row for each id.

With finer masks, a row is *dirty* from the backward that wrote it until its removed weights are
zeroed again. Cleaning a row reads 16 to 64 bytes of its mask, and nothing of other rows. On CUDA a
kernel flags and cleans rows, without the host knowing which.

Ids are local row numbers, int32 or int64 ``(n,)``, feature after feature. An id out of range counts
as row 0, as FBGEMM's bounds check replaces it by 0.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.device import Kernels, kernels_on
from dist_sparse.masking.masks import (
    WORDS,
    BlockMask,
    Held,
    ShardChange,
    places_of,
    positions,
    prune,
    wide,
)
from dist_sparse.sparsifiers.pieces import MOST_COUNTED
from dist_sparse.tables.modules import loaded_torchrec
from dist_sparse.tables.shards import sent

# Offsets of the features in the ids, ``features + 1`` numbers. On a device a tensor, so that the
# host does not wait for it.
Ends = Sequence[int] | Tensor

# One forward in this many is sampled, beginning with the first after a mask update.
EVERY = 16


def in_table(ids: Tensor, rows: int) -> Tensor:
    """Return ``ids``, at least one, as int64, with 0 for ids outside ``[0, rows)``."""
    ids = ids.long()
    # On a CPU, finding the smallest and the largest id is quicker than the three passes below. On a
    # device, the host would have to wait.
    if ids.is_cpu:
        least, most = map(int, ids.aminmax())
        if 0 <= least <= most < rows:
            return ids
    return outside_as_0(ids, rows)


def outside_as_0(ids: Tensor, rows: int | Tensor) -> Tensor:
    """Return int64 ids with 0 for ids outside ``[0, rows)``; ``rows`` may differ from id to id."""
    return torch.where((ids < 0) | (ids >= rows), 0, ids)


def rows_by_feature(
    tables: Mapping[int, Tensor], features: Sequence[int], ids: Tensor, ends: Ends
) -> Iterator[tuple[int, Tensor]]:
    """Yield for each feature with ids its table and the rows that they name, int64 ``(n,)``. On a
    device, the host waits for the ends: kernels do not.

    Args:
        tables: something with an element for each row, by the number of the table; features of
            other tables are left out.
        features: for each feature the number of its table.
    """
    for table, span in ids_of_tables(tables, features, ends):
        yield table, in_table(ids[span], len(tables[table]))


def ids_of_tables(
    tables: Container[int], features: Sequence[int], ends: Ends
) -> Iterator[tuple[int, slice]]:
    """Yield, for each feature with ids whose table is in ``tables``, the table and the slice of the
    feature's ids."""
    for table, (start, stop) in zip(features, pairwise(ends), strict=True):
        if table in tables and start != stop:
            yield table, slice(start, stop)


def _feature_of_each(ids: Tensor, ends: Tensor) -> Tensor:
    """Return the feature of each id, int64 ``(n,)``, without waiting for the device: -1 for ids
    before the first feature, the number of features for ids after the last."""
    positions = torch.arange(ids.numel(), device=ids.device)
    return torch.bucketize(positions, ends.long().contiguous(), right=True) - 1


@dataclass(frozen=True, eq=False)
class KeptIds:
    """The ids of kept rows among the ids of a lookup: on a CPU, and on a device without kernels.

    Args:
        kept: which rows are kept, bool ``(rows,)``, by the number of the table. Other tables keep
            all ids.
        features: for each feature the number of its table.
    """

    kept: Mapping[int, Tensor]
    features: Sequence[int]

    def flags(self, ids: Tensor, ends: Ends, strict: bool = False) -> Tensor:
        """Return which ids are kept, bool ``(n,)``.

        Raises:
            IndexError: an id is outside of its table, if ``strict``.
        """
        if not (ids.is_cpu or isinstance(ends, Tensor)):
            # If batch sizes differ between features, the host knows the ends.
            ends = sent(ends, ids.device)
        if isinstance(ends, Tensor):
            concatenated, starts, rows = self._concatenated
            # The first entry is for ids before the first feature.
            feature = _feature_of_each(ids, ends) + 1
            places = starts[feature] + outside_as_0(ids.long(), rows[feature])
            return concatenated.index_select(0, places)
        flags = torch.ones(ids.numel(), dtype=torch.bool)
        for table, span in ids_of_tables(self.kept, self.features, ends):
            kept = self.kept[table]
            # index_select() checks the range of every id.
            rows = ids[span] if strict else in_table(ids[span], len(kept))
            torch.index_select(kept, 0, rows, out=flags[span])
        return flags

    def weights(self, ids: Tensor, ends: Ends, given: Tensor | None) -> Tensor:
        """Return the weights of the ids, 0 for removed rows; gradients flow back to ``given``.

        Args:
            given: the weights so far, ``(n,)``; None for 1 in float32.
        """
        flags = self.flags(ids, ends)
        return flags.float() if given is None else torch.where(flags, given, 0)

    def select(self, features: Any) -> Any:
        """Return a KeyedJaggedTensor of the kept ids in ``features`` and their weights, on a CPU.
        Gradients flow back to all weights, 0 to the weights of dropped ids.

        If an id is out of range, return ``features`` itself: what happens then is FBGEMM's choice,
        an error, or a warning and row 0.
        """
        try:
            chosen = self.flags(features.values(), features.offset_per_key(), strict=True)
        except IndexError:
            return features
        return loaded_torchrec().select_ids(features, chosen)

    @cached_property
    def _concatenated(self) -> tuple[Tensor, Tensor, Tensor]:
        """The flags of all tables in one tensor: on a device, each read is a launch. For each
        feature, the start of its table in that tensor, and the number of its rows; with one more
        entry at either end, for ids of no feature."""
        flags = []
        spans = {}
        start = 0
        for table, kept in self.kept.items():
            spans[table] = start, len(kept)
            start += len(kept)
            flags.append(kept)
        # All other ids are kept: they read one flag after the others, like a table of one row.
        flags.append(flags[0].new_ones(1))
        other = start, 1
        of_features = [other, *(spans.get(table, other) for table in self.features), other]
        starts, rows = zip(*of_features, strict=True)
        device = flags[0].device
        return torch.cat(flags), sent(starts, device), sent(rows, device)


class CountedLookups:
    """Counts of the lookups of each row, for scores that use them.

    Args:
        counts: to add to, by the number of the table; the others are not counted.
        features: for each feature the number of its table.
    """

    def __init__(self, counts: Mapping[int, Tensor], features: Sequence[int]) -> None:
        self._counts, self._features = counts, features
        # Lookups that can be counted before a count might overflow: counts that were loaded or
        # moved may be the largest already.
        self._room = 0
        # None too where some counts are int32 and others float64.
        self._kernel: Any = None
        kinds = {(each.device, each.dtype) for each in counts.values()}
        if len(kinds) == 1:
            [(device, _)] = kinds
            kernels = kernels_on(device)
            if kernels is not None:
                self._kernel = kernels.TritonCounts([counts.get(table) for table in features])

    def add(self, ids: Tensor, ends: Ends) -> None:
        """Count the lookups of one forward."""
        # No count grows by more than the number of ids. So counts are clamped once in 2**30
        # lookups, not each time.
        self._room -= ids.numel()
        if self._room < 0:
            torch._foreach_clamp_max_([*self._counts.values()], MOST_COUNTED)
            self._room = MOST_COUNTED - 1 - ids.numel()
        if self._kernel is not None:
            self._kernel.add(ids, ends)
            return
        for table, rows in rows_by_feature(self._counts, self._features, ids, ends):
            count = self._counts[table]
            count.index_add_(0, rows, count.new_ones(()).expand(rows.shape))


class SampledLookups:
    """Counts of the lookups of each table, and of its removed rows, in one training forward of
    :data:`EVERY`. The sample costs next to nothing, so it is taken with any score that does not
    count lookups.

    The sums are stored with the masks (:attr:`~dist_sparse.masking.masks.Held.samples`); new masks
    start at 0.

    Args:
        features: for each feature the number of its table.
    """

    def __init__(self, features: Sequence[int]) -> None:
        self._features = features
        self._held: Mapping[int, Held] = {}
        self._weighed: Set[int] = frozenset()
        self._removed: dict[int, Tensor] = {}
        self._kernel: Any = None
        self._forwards = 0

    def use(self, held: Mapping[int, Held], weighed: Set[int] = frozenset()) -> None:
        """Take masks and sums.

        Args:
            held: by the number of the table.
            weighed: the tables whose ids of removed rows get the weight 0.
        """
        if (held, weighed) != (self._held, self._weighed):
            self._held = held
            self._weighed = weighed
            self._removed = {}
            self._kernel = None
            self._forwards = 0

    def counts_forward(self) -> bool:
        """Count this forward, and return whether its lookups are to be added."""
        # Lookups of an evaluation do not count as traffic.
        if not self._held or not torch.is_grad_enabled():
            return False
        counted = self._forwards % EVERY == 0
        self._forwards += 1
        return counted

    def add(self, ids: Tensor, ends: Ends) -> None:
        """Count one forward, where no kernel does."""
        # Once for each mask, and not in use(): an evaluation must not pay for it.
        if not self._removed:
            self._removed = {table: shard.mask.dead_rows() for table, shard in self._held.items()}
        for table, rows in rows_by_feature(self._removed, self._features, ids, ends):
            lookups, of_removed = self._held[table].samples.unbind()
            lookups += len(rows)
            of_removed += self._removed[table].index_select(0, rows).sum()

    def kernel_of(self, kernels: Any) -> Any:
        """Return the one of a device's kernels that counts, and weighs ids too."""
        # Once for each mask, as in add().
        if self._kernel is None:
            sampled = {
                table: (held.mask, held.samples, table in self._weighed)
                for table, held in self._held.items()
            }
            self._kernel = kernels.TritonLookups(list(map(sampled.get, self._features)))
        return self._kernel


# Dirty rows.

# Elements gathered at a time: 1 MiB of float32 stays in the cache between the passes over it.
CHUNK = 1 << 18

# Rows whose flags are searched at a time: 1 MiB.
FLAGS_AT_A_TIME = 1 << 20

# Masking a single row costs as much as 5 rows of one pass over the shard: memory is read at random.
ROW_COST = 5


class MaskedShard(NamedTuple):
    """A live shard, ``(rect.rows, rect.cols)``, and its mask."""

    weight: Tensor
    mask: BlockMask

    @property
    def whole_rows(self) -> bool:
        """Whether a block spans all columns of the shard: a row is kept or removed as a whole."""
        return self.mask.grid.cols == 1


# The registered tables of a batch, by their number in it.
MaskedShards = Mapping[int, MaskedShard]


def one_pass_is_quicker(mask: BlockMask, rows: int) -> bool:
    """Whether masking the whole shard is quicker than masking this many rows, in any order, with
    repeats."""
    return mask.in_one_pass and rows * ROW_COST >= mask.rect.rows


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
    # The grid of blocks begins at the table's first row, `rows` count from the shard's.
    if mask.block[0] != 1:
        block_rows = (rows + mask.rect.row) // mask.block[0] - mask.grid.row
    table, word = wide(live), WORDS[live.element_size()]
    if mask.grid.cols == 1 and live.is_cpu:
        # Whole rows are written without being read. On a device, masked_select() would have the
        # host wait for the number of rows.
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
    """A set of rows of one table, at first empty: one flag byte per row. Adding costs one write per
    id, in any order, with repeats.

    Args:
        count: rows of the table.
        device: of the flags. On an accelerator, kernels use the flags: the methods would wait.

    Attributes:
        flags: uint8 ``(count,)``.
    """

    def __init__(self, count: int, device: torch.device | None = None) -> None:
        self.count = count
        # Whole words of 8 flags, which places_of() searches.
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
        """Add the rows that ids of a lookup name; perhaps more."""
        # An extra row costs time, but never makes a weight wrong.
        if ids.numel() >= self.count:
            self.add_all()
        else:
            self.add(in_table(ids, self.count))

    def rows(self) -> Tensor:
        """Return the rows, int64, ascending."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *self.parts()])

    def parts(self) -> Iterator[Tensor]:
        """Yield the rows, int64, ascending, in parts."""
        for first in range(0, self.count, FLAGS_AT_A_TIME):
            rows = places_of(self.flags[first : first + FLAGS_AT_A_TIME])
            if rows.numel():
                yield rows.add_(first)

    def among(self, ids: Tensor) -> Tensor:
        """Return the rows of the set that ids of a lookup name, int64, with repeats; perhaps
        more."""
        # With more ids than rows, all rows of the set are found more quickly.
        if ids.numel() >= self.count:
            return self.flags.nonzero().flatten()
        rows = in_table(ids, self.count)
        return rows.masked_select(self.flags.view(torch.bool).index_select(0, rows))

    def clear(self) -> None:
        """Remove every row."""
        self._words.zero_()


def flag_rows(
    flags: Mapping[int, RowFlags], features: Sequence[int], ids: Tensor, ends: Ends
) -> None:
    """Add the rows that a lookup names to the sets of their tables.

    Args:
        flags: by the number of the table; ids of other tables are left out.
        features: for each feature the number of its table.
    """
    for table, span in ids_of_tables(flags, features, ends):
        flags[table].add_ids(ids[span])


def add_pruned(flags: Mapping[int, RowFlags], before: MaskedShards, after: MaskedShards) -> None:
    """Add the rows that a mask update has zeroed: rows with blocks that the masks before keep and
    the masks after remove."""
    # Nothing is added for blocks that come back: their weights are still 0, and scored as 0.
    # Unregistered tables have flags and no masks. New ones had none: they are cleaned as a whole.
    for table in flags.keys() & after.keys() & before.keys():
        rows, old, new = flags[table], before[table], after[table]
        was = old.weight.data_ptr(), old.mask.block
        now = new.weight.data_ptr(), new.mask.block
        # Bits can be compared if they stand for the same blocks of the same shard, each within a
        # row.
        if was != now or new.mask.block[0] != 1:
            rows.add_all()
        elif old.mask is not new.mask:
            blocks = positions(old.mask.bits & ~new.mask.bits)
            rows.add(blocks // new.mask.grid.cols)


@dataclass(frozen=True, eq=False)
class HostRowCleaner:
    """The row cleaner in torch: on a CPU, and on a device without kernels, where the host waits for
    the ends.

    Args:
        masked: the tables that lose weights.
        flags: the dirty rows of each of these tables.
        features: for each feature the number of its table.
    """

    masked: MaskedShards
    flags: Mapping[int, RowFlags]
    features: Sequence[int]

    def flag(self, ids: Tensor, ends: Ends) -> None:
        """Flag the rows that a lookup names."""
        flag_rows(self.flags, self.features, ids, ends)

    def clean_read(self, ids: Tensor, ends: Ends, sampled: None = None) -> None:
        """Clean the flagged rows that a lookup names. Only a kernel takes samples with it."""
        for table, span in ids_of_tables(self.masked, self.features, ends):
            weight, mask = self.masked[table]
            if one_pass_is_quicker(mask, ids[span].numel()):
                mask.apply_(weight)
            else:
                # The flags stay: in training, the backward is about to write the same rows.
                zero_rows(weight, mask, self.flags[table].among(ids[span]))

    def clean(self) -> None:
        """Clean all flagged rows. They stay flagged."""
        for table, (weight, mask) in self.masked.items():
            for rows in self.flags[table].parts():
                zero_rows(weight, mask, rows)


class ZeroedRows:
    """The tables of one batch whose removed weights are zeroed again before a lookup reads them, or
    before weights are scored, saved or read.

    Args:
        features: for each feature the number of its table.
        device: of the tables.

    Attributes:
        removing: the registered tables whose masks remove something.
        kernels: of the device, None where torch's operations run.
        any_dirty: rows were flagged since all were last cleaned.
        revived: a write of unknown rows may have made any removed weight nonzero. Tables whose rows
            are not flagged have no other sign of such a write.
    """

    def __init__(self, features: Sequence[int], device: torch.device) -> None:
        self._features = features
        self._device = device
        self.removing: MaskedShards = {}
        self._flags: dict[int, RowFlags] = {}
        self.kernels: Kernels | None = None
        self._cleaner: Any = None
        self.any_dirty = self.revived = False

    def use(self, masked: MaskedShards, watched: Set[int]) -> None:
        """Take new masks.

        Args:
            masked: of all registered tables.
            watched: the tables whose rows are flagged and cleaned, if their masks remove anything.
                In all other tables removed rows stay zero by themselves.
        """
        self.removing = {table: shard for table, shard in masked.items() if shard.mask.removes}
        cleaned = {table: self.removing[table] for table in self.removing.keys() & watched}
        if self._flags.keys() != cleaned.keys():
            # The old flags are dropped: any row may be dirty.
            self.revived |= self.any_dirty
            self.any_dirty = False
            self._flags = {
                table: RowFlags(len(shard.weight), self._device) for table, shard in cleaned.items()
            }
        self.kernels = kernels_on(self._device)
        if self.kernels is None:
            self._cleaner = HostRowCleaner(cleaned, self._flags, self._features)
        else:
            found = {table: (*shard, self._flags[table].flags) for table, shard in cleaned.items()}
            self._cleaner = self.kernels.TritonRowCleaner(list(map(found.get, self._features)))

    def clean_read(self, ids: Tensor, ends: Ends, sampled: Any = None) -> None:
        """Clean the rows that a lookup is about to read. ``sampled`` is a kernel of
        :class:`SampledLookups` that adds the lookup in the same launch; None for no sample."""
        self._cleaner.clean_read(ids, ends, sampled)

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
            self._clear_flags()

    def clean_all(self) -> None:
        """Zero removed weights in every row, dirty or not."""
        prune(ShardChange(mask, weight, mask, None) for weight, mask in self.removing.values())
        self._clear_flags()
        self.revived = False

    def _clear_flags(self) -> None:
        if self.any_dirty:
            torch._foreach_zero_([rows.flags for rows in self._flags.values()])
        self.any_dirty = False
