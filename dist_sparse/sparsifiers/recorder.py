"""What mask updates change, and how many lookups the removed rows answer with zeros.

A :class:`Recorder` counts on each rank what a mask update changes there. The sums over ranks cost
one small all-reduce per process group in each mask update. Without a recorder nothing is counted.

Lookups are counted for scores that need them (``counts_lookups``), and sampled by an enforcer for
others. No rank sees whole rows of a table cut by columns: its removed rows are known only where
blocks are as wide as the table.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dist_sparse.groups import traffic
from dist_sparse.masking.block_masks import MadeMasks
from dist_sparse.masking.masks import count_bits
from dist_sparse.records import MaskChange, StepRecord
from dist_sparse.sparsifiers.packed_store import Held, PackedStore, TableMasks
from dist_sparse.sparsifiers.pieces import begun
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of


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
        self._changes: tuple[MaskChange, ...] = ()
        self._done: list[StepRecord] = []

    def take(self) -> list[StepRecord]:
        """Return the records since the last call, in order."""
        done, self._done = self._done, []
        return done

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a mask update and record it. If it fails there is no record."""
        started, before = time.perf_counter(), traffic()
        yield
        # Traffic counts all of this process: nothing else communicates within a mask update.
        self.count += 1
        after = traffic()
        self._done.append(
            StepRecord(
                number=self.count,
                seconds=time.perf_counter() - started,
                collectives=after.collectives - before.collectives,
                bytes=after.bytes - before.bytes,
                tables=self._changes,
            )
        )

    def note(
        self,
        packed: PackedStore,
        located: Mapping[str, ShardedData],
        made: Mapping[str, MadeMasks],
        configs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Count what changes, before the new masks take the place of the old. Collective: one
        all-reduce a group.

        Args:
            packed: the masks so far.
            located: the tables as they are stored now.
            made: their new masks.
            configs: name -> configuration.
        """
        counts = {
            name: _counts(packed.table(name), located[name], new) for name, new in made.items()
        }
        changes = []
        for name, sums in packed.summed(counts).items():
            same_blocks = packed.block(name) == made[name].block
            changes.append(_change(located[name], made[name], configs[name], sums, same_blocks))
        self._changes = tuple(changes)


def _counts(table: TableMasks, data: ShardedData, made: MadeMasks) -> list[int]:
    """Return removed, flipped and regrown blocks, dead rows, lookups and removed lookups of this
    rank's shards."""
    removed = flipped = regrown = dead = 0
    new = {mask.rect: mask for mask, _ in made.masks}
    for held in table.owned:
        mask = new[held.mask.rect]
        before, after = begun(held.mask), begun(mask)
        removed += after.blocks - count_bits(after.bits)
        # Bits of other blocks can't be compared.
        if before.block == after.block:
            flipped += count_bits(before.bits ^ after.bits)
            regrown += count_bits(after.bits & ~before.bits)
        if data.has_whole_rows:
            dead += int(mask.dead_rows().sum())
    # Of the old masks, which have answered these lookups.
    return [removed, flipped, regrown, dead, *(_lookups_here(table, data) or (0, 0))]


def _change(
    data: ShardedData,
    made: MadeMasks,
    config: Mapping[str, Any],
    sums: list[int],
    same_blocks: bool,
) -> MaskChange:
    removed, flipped, regrown, dead, lookups, removed_lookups = sums
    return MaskChange(
        name=data.name,
        target=configured_level(config),
        threshold=None if made.threshold is None else made.threshold.score,
        blocks=grid_of(Rect(0, 0, *data.shape), made.block).blocks,
        removed_blocks=removed,
        # Masks of different blocks can't be compared.
        flipped_blocks=flipped if same_blocks else None,
        regrown_blocks=regrown if same_blocks else None,
        # No rank sees the rows of a table cut by columns.
        dead_rows=dead if data.has_whole_rows else None,
        lookups=lookups or None,
        removed_lookups=removed_lookups if lookups else None,
    )


def configured_level(config: Mapping[str, Any]) -> float | None:
    """Return the configured sparsity_level, where there is one and a float can hold it."""
    level = config.get("sparsity_level")
    # Ints beyond float64 are refused by scores, but a user's own sparsifier may hold one.
    try:
        return float(level) if isinstance(level, numbers.Real) else None
    except OverflowError:
        return None


def knows_removed_rows(data: ShardedData, block: Block) -> bool:
    """Return whether the leftmost shards of a table tell which of its rows are removed."""
    return block[1] >= data.shape[1] or data.has_whole_rows


def counted_rows(packed: PackedStore, data: ShardedData) -> list[tuple[Tensor, Tensor]]:
    """Return for each shard that this rank counts which rows are removed, and the lookups of each:
    ``(bool (rows,), float64 (rows,))`` on the CPU; none if lookups are not counted. Local."""
    found = []
    for held in packed.table(data.name).leftmost:
        if held.counts is not None:
            found.append((held.mask.dead_rows().cpu(), held.counts.cpu().double()))
    return found


def _lookups_here(table: TableMasks, data: ShardedData) -> tuple[int, int] | None:
    """Return all lookups of this rank's part of a table and those of its removed rows: counted ones
    where its score needs counts, otherwise those that enforcers have sampled since the last mask
    update, 0 where they see no lookups. Local.

    Returns:
        None where they are not known, on every rank alike.
    """
    if not knows_removed_rows(data, table.block):
        return None
    sums = torch.zeros(2, dtype=torch.float64)
    for held in table.leftmost:
        sums += _looked_up(held).cpu()
    # Counts that decay have fractions; sums are rounded once.
    looked_up, removed = sums.round().long().tolist()
    return looked_up, removed


def _looked_up(held: Held) -> Tensor:
    """Return all lookups of a shard, and those of its removed rows."""
    if held.counts is None:
        # Where a score counts all lookups, nothing is sampled.
        return held.samples
    rows = held.counts.double()
    return torch.stack([rows.sum(), rows[held.mask.dead_rows()].sum()])


def removed_lookups(packed: PackedStore, action: str) -> dict[str, list[int]]:
    """Return all lookups and removed lookups of each table where they are known, by name.
    Collective: one all-reduce for each group.

    Args:
        packed: the registered tables.
        action: the public call, for messages.
    """
    known = {}
    for name, data in packed.current(action).items():
        # The same tables on every rank of a group.
        if (lookups := _lookups_here(packed.table(name), data)) is not None:
            known[name] = lookups
    return packed.summed(known)
