"""What mask updates change, summed over all ranks.

A :class:`Recorder` counts on each rank what a mask update changes there. The sums over ranks cost
one small all-reduce per process group in each mask update. Without a recorder nothing is counted.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dist_sparse.groups import group_over, traffic
from dist_sparse.masking.block_masks import MadeMasks
from dist_sparse.masking.masks import BlockMask, count_bits
from dist_sparse.records import MaskChange, StepRecord
from dist_sparse.sparsifiers.lookups import lookups_here, whole_rows
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.pieces import begun
from dist_sparse.tables.shards import Rect, ShardedData, grid_of


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
        counts = {name: _counts(packed, located[name], new) for name, new in made.items()}
        sums = packed.summed(counts)
        changes = []
        for name, new in made.items():
            same_blocks = packed.block(name) == new.block
            changes.append(_change(located[name], new, configs[name], sums[name], same_blocks))
        self._changes = tuple(changes)


def _counts(packed: PackedStore, data: ShardedData, new: MadeMasks) -> list[int]:
    """Return removed, flipped and regrown blocks, dead rows, lookups and removed lookups of this
    rank's shards."""
    owned = set(data.owned(group_over(data.ranks).rank))
    # Of the old masks, which have answered these lookups.
    counts = [0, 0, 0, 0, *(lookups_here(packed, data) or (0, 0))]
    for old, (mask, _) in zip(packed.masks(data.name), new.masks, strict=True):
        if mask.rect in owned and mask.blocks:
            # A rank may hold the same rectangle twice.
            owned.discard(mask.rect)
            for i, count in enumerate([*_flips(begun(old), begun(mask)), _dead_rows(data, mask)]):
                counts[i] += count
    return counts


def _flips(old: BlockMask, new: BlockMask) -> tuple[int, int, int]:
    """Return removed, flipped and regrown blocks, without unpacking bits."""
    removed = new.blocks - count_bits(new.bits)
    if old.block != new.block:
        # Their bits can't be compared.
        return removed, 0, 0
    return removed, count_bits(old.bits ^ new.bits), count_bits(new.bits & ~old.bits)


def _dead_rows(data: ShardedData, mask: BlockMask) -> int:
    if not whole_rows(data):
        return 0
    if mask.block[0] == 1 and mask.grid.cols == 1:
        # A block is a row.
        return mask.blocks - count_bits(mask.bits)
    return int(mask.dead_rows().sum())


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
        dead_rows=dead if whole_rows(data) else None,
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
