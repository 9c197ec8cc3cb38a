"""What mask updates change, summed over all ranks.

A :class:`Recorder` counts on each rank what a mask update changes there. The sums over ranks travel
with the first all-reduce of the next mask update, so a record is complete one update later, or
after :meth:`Recorder.complete`. An update without an all-reduce of its own (nothing or everything
is pruned; a user's own ``update_mask``) sends them in one. Without a recorder nothing is counted.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dist_sparse.groups import Group, Rider, group_over, traffic
from dist_sparse.masking.block_masks import MadeMasks
from dist_sparse.masking.masks import BlockMask, count_bits
from dist_sparse.records import MaskChange, StepRecord
from dist_sparse.sparsifiers.lookups import Lookups
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of

Ranks = tuple[int, ...] | None


@dataclass
class _Counts:
    """Counts of one table in one mask update, in the order of :func:`_change`.

    Attributes:
        ranks: that hold the table.
        values: of this rank's shards until ``summed``, then of all.
        change: makes a record of them.
    """

    ranks: Ranks
    values: list[int]
    summed: bool
    change: Callable[[list[int]], MaskChange]


@dataclass
class _Update:
    """A mask update, with counts by table, some of which wait for a message to be summed."""

    number: int
    seconds: float = 0.0
    collectives: int = 0
    bytes: int = 0
    tables: dict[str, _Counts] = field(default_factory=dict)

    def waiting(self, ranks: Ranks) -> list[str]:
        """Return the tables whose counts wait for a message over these ranks."""
        return sorted(name for name, counts in self.unsummed.items() if counts.ranks == ranks)

    @property
    def unsummed(self) -> dict[str, _Counts]:
        return {name: counts for name, counts in self.tables.items() if not counts.summed}


class Recorder:
    """Records the mask updates of one sparsifier over sharded tables; plain data is not recorded.
    Every rank must have one, or none: a mask update checks it.

    Attributes:
        count: mask updates so far.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="row", norm="L2")
        >>> names = sparsifier.add_model(torch.nn.EmbeddingBag(10, 4))
        >>> recorder = sparsifier.record()
        >>> sparsifier.step()
        >>> [update] = recorder.take()
        >>> update.tables[0].removed_blocks, update.tables[0].churn
        (5, 0.5)
    """

    def __init__(self) -> None:
        self.count = 0
        self._updates: list[_Update] = []
        self._done: list[StepRecord] = []

    def take(self) -> list[StepRecord]:
        """Return the records that have become complete since the last call, in order."""
        done, self._done = self._done, []
        return done

    def complete(self) -> None:
        """Sum the counts that wait for the next mask update. Collective over the tables' groups:
        every rank must call it."""
        groups: set[Ranks] = set()
        for update in self._updates:
            groups |= {counts.ranks for counts in update.unsummed.values()}
        # Smaller groups first, in an order that all ranks share.
        for ranks in sorted(groups, key=lambda ranks: (len(ranks or ()), ranks or ())):
            rider = self.rider(ranks)
            # These groups have counts that wait.
            assert rider is not None
            self.arrived(ranks, rider, group_over(ranks))
        self._sort_out()

    def waiting_for(self, ranks: Ranks) -> list[list[str]]:
        """Return the tables whose counts wait for a message over these ranks, by mask update. Ranks
        that differ in it, as after an error of one rank alone, can't sum them."""
        return [names for update in self._updates if (names := update.waiting(ranks))]

    def forget(self, ranks: Ranks) -> None:
        """Drop the counts that wait for a message over these ranks, which have found that they wait
        for different ones."""
        for update in self._updates:
            for name in update.waiting(ranks):
                del update.tables[name]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a mask update, and begin its record. If it fails there is none."""
        started, before = time.perf_counter(), traffic()
        update = _Update(number=self.count + 1)
        self._updates.append(update)
        try:
            yield
        except BaseException:
            # Earlier updates stay, with sums that have arrived in this one.
            self._updates.pop()
            raise
        # Traffic counts all of this process: nothing else communicates within a mask update.
        self.count += 1
        after = traffic()
        update.seconds = time.perf_counter() - started
        update.collectives = after.collectives - before.collectives
        update.bytes = after.bytes - before.bytes
        self._sort_out()

    def rider(self, ranks: Ranks) -> Rider | None:
        """Return the counts that wait for a message over these ranks,
        ``(mask updates and tables, 6)``, of squashed tables too; None without any."""
        values = [counts.values for counts in self._waiting(ranks)]
        # All ranks of a group have the same tables waiting: make_masks() has compared them.
        return Rider(torch.tensor(values, dtype=torch.int64)) if values else None

    def arrived(self, ranks: Ranks, rider: Rider, group: Group) -> None:
        """Take the sums of :meth:`rider`. Collective over ``group``: one all-reduce, if nothing has
        carried it."""
        summed = group.all_reduce(rider.values) if rider.summed is None else rider.summed
        for counts, values in zip(self._waiting(ranks), summed.tolist(), strict=True):
            counts.values, counts.summed = values, True

    def _waiting(self, ranks: Ranks) -> list[_Counts]:
        """Return the counts that wait for a message over these ranks, in an order that they
        share."""
        waiting = []
        for update in self._updates:
            waiting += [update.tables[name] for name in update.waiting(ranks)]
        return waiting

    def note(
        self,
        data: ShardedData,
        before: list[BlockMask],
        block: Block,
        made: MadeMasks,
        config: Mapping[str, Any],
        lookups: Lookups | None = None,
    ) -> None:
        """Count what changes in one table, before its new masks take the place of the old.

        Args:
            data: the table as it is stored now.
            before: this rank's masks so far.
            block: of these masks; known on ranks without a shard too.
            made: the new masks.
            config: the table's configuration.
            lookups: of this rank's part of the table, all and of removed rows; None where they are
                not known.
        """
        group = group_over(data.ranks)
        owned = set(data.owned(group.rank))
        whole_rows = all(rect.cols == data.shape[1] for rect in data.rects)
        totals = torch.zeros(4, dtype=torch.int64)
        for old, (new, _) in zip(before, made.masks, strict=True):
            if new.rect in owned and new.blocks:
                # A rank may hold the same rectangle twice.
                owned.discard(new.rect)
                totals += torch.tensor(_changes(old, new, whole_rows))
        grid = grid_of(Rect(0, 0, *data.shape), made.block)
        change = partial(
            _change,
            name=data.name,
            target=configured_level(config),
            threshold=None if made.threshold is None else made.threshold.score,
            blocks=grid.blocks,
            same_blocks=block == made.block,
            whole_rows=whole_rows,
        )
        values = [*totals.tolist(), *(lookups or (0, 0))]
        self._updates[-1].tables[data.name] = _Counts(data.ranks, values, group.size == 1, change)

    def _sort_out(self) -> None:
        """Make records of the mask updates that have all their sums."""
        # In order: a later update is not done before an earlier one.
        while self._updates and not self._updates[0].unsummed:
            update = self._updates.pop(0)
            self._done.append(
                StepRecord(
                    number=update.number,
                    seconds=update.seconds,
                    collectives=update.collectives,
                    bytes=update.bytes,
                    tables=tuple(counts.change(counts.values) for counts in update.tables.values()),
                )
            )


def _change(values: list[int], *, same_blocks: bool, whole_rows: bool, **known: Any) -> MaskChange:
    removed, flipped, regrown, dead, lookups, removed_lookups = values
    return MaskChange(
        removed_blocks=removed,
        # Masks of different blocks can't be compared.
        flipped_blocks=flipped if same_blocks else None,
        regrown_blocks=regrown if same_blocks else None,
        # No rank sees the rows of a table cut by columns.
        dead_rows=dead if whole_rows else None,
        lookups=lookups or None,
        removed_lookups=removed_lookups if lookups else None,
        **known,
    )


def _changes(old: BlockMask, new: BlockMask, whole_rows: bool) -> list[int]:
    """Return removed, flipped and regrown blocks and dead rows of one shard; a block cut by a
    border counts where it begins."""
    top, left = new.rect.row % new.block[0] > 0, new.rect.col % new.block[1] > 0
    counts = _cut_changes(old, new, top, left) if top or left else _whole_changes(old, new)
    if not whole_rows:
        return [*counts, 0]
    if new.block[0] == 1 and new.grid.cols == 1:
        # A block is a row.
        return [*counts, counts[0]]
    return [*counts, int(new.dead_rows().sum())]


def _whole_changes(old: BlockMask, new: BlockMask) -> list[int]:
    """Count a shard that begins with whole blocks, without unpacking its bits."""
    removed = new.blocks - count_bits(new.bits)
    if old.block != new.block:
        # Their bits can't be compared.
        return [removed, 0, 0]
    return [removed, count_bits(old.bits ^ new.bits), count_bits(new.bits & ~old.bits)]


def _cut_changes(old: BlockMask, new: BlockMask, top: bool, left: bool) -> list[int]:
    """Count a shard whose first row or column of blocks (``top``, ``left``) begins in another
    shard."""
    counts = [0, 0, 0]
    for first, last in new.row_chunks():
        # Only the first chunk has the row of blocks that begins in another shard.
        inside = (slice(int(top and first == 0), None), slice(int(left), None))
        kept = new.flags(first, last)[inside]
        counts[0] += int((~kept).sum())
        if old.block == new.block:
            before = old.flags(first, last)[inside]
            counts[1] += int((before ^ kept).sum())
            counts[2] += int((kept & ~before).sum())
    return counts


def configured_level(config: Mapping[str, Any]) -> float | None:
    """Return the configured sparsity_level, where there is one and a float can hold it."""
    level = config.get("sparsity_level")
    # Ints beyond float64 are refused by scores, but a user's own sparsifier may hold one.
    try:
        return float(level) if isinstance(level, numbers.Real) else None
    except OverflowError:
        return None
