"""What mask updates change, summed over all ranks.

A :class:`Recorder` counts on each rank what a mask update changes there. The sums over ranks travel
with the first all-reduce of the next mask update, so a record is complete one update later, or
after :meth:`Recorder.complete`. An update without an all-reduce of its own (nothing or everything
is pruned; a user's own ``update_mask``) sends them in one. Without a recorder nothing is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dist_sparse.groups import Group, Rider, group_over, traffic
from dist_sparse.masking.block_masks import MadeMasks
from dist_sparse.masking.masks import BlockMask, count_bits
from dist_sparse.masking.thresholds import Threshold
from dist_sparse.records import LEADING_SHIFT, MaskChange, StepRecord
from dist_sparse.sparsifiers.lookups import Lookups
from dist_sparse.sparsifiers.stats import dead_flags, target_of
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of

__all__ = ["Recorder"]

Ranks = tuple[int, ...] | None

_COUNTS = 6
"""Removed blocks, flipped ones, regrown ones, dead rows; lookups, and those of removed rows."""


@dataclass
class _Waiting:
    """A mask update whose counts have not been summed over some of its groups (``mine``)."""

    number: int
    seconds: float = 0.0
    collectives: int = 0
    bytes: int = 0
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    mine: dict[str, list[int]] = field(default_factory=dict)
    known: dict[str, list[int]] = field(default_factory=dict)


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
        self._waiting: list[_Waiting] = []
        self._done: list[StepRecord] = []

    def take(self) -> list[StepRecord]:
        """Return the records that have become complete since the last call, in order."""
        done, self._done = self._done, []
        return done

    def complete(self) -> None:
        """Sum up what waits for the next mask update. Collective over the tables' groups: every
        rank must call it."""
        all_ranks: set[Ranks] = {
            step.facts[name]["ranks"] for step in self._waiting for name in step.mine
        }
        for ranks in sorted(all_ranks, key=lambda ranks: (len(ranks or ()), ranks or ())):
            rider = self.rider(ranks)
            assert rider is not None
            self.arrived(ranks, rider, group_over(ranks))
        self._sort_out()

    def waiting_for(self, ranks: Ranks) -> list[list[str]]:
        """Return the tables whose counts wait for a message over these ranks, by mask update. Ranks
        that differ in it, as after an error of one rank alone, can't sum them."""
        return [names for _, names in self._waiting_of(ranks)]

    def forget(self, ranks: Ranks) -> None:
        """Drop what waits for a message over these ranks, which have found that they wait for
        different counts."""
        for step, names in self._waiting_of(ranks):
            for name in names:
                del step.mine[name], step.facts[name]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a mask update, and begin its record. If it fails there is none."""
        started, before = time.perf_counter(), traffic()
        self._waiting.append(_Waiting(number=self.count + 1))
        try:
            yield
        except BaseException:
            self._waiting.pop()
            raise
        self.count += 1
        after, step = traffic(), self._waiting[-1]
        step.seconds = time.perf_counter() - started
        step.collectives, step.bytes = (
            after.collectives - before.collectives,
            after.bytes - before.bytes,
        )
        self._sort_out()

    def rider(self, ranks: Ranks) -> Rider | None:
        """Return the counts that wait for a message over these ranks,
        ``(mask updates and tables, 6)``, also those of tables that have been squashed since; None
        if none do."""
        counts = [step.mine[name] for step, names in self._waiting_of(ranks) for name in names]
        return Rider(torch.tensor(counts, dtype=torch.int64)) if counts else None

    def arrived(self, ranks: Ranks, rider: Rider, group: Group) -> None:
        """Take the sums of :meth:`rider`. Collective over ``group``: one all-reduce, if nothing has
        carried it."""
        summed = group.all_reduce(rider.values) if rider.summed is None else rider.summed
        rows = iter(summed.tolist())
        for step, names in self._waiting_of(ranks):
            for name in names:
                del step.mine[name]
                step.known[name] = next(rows)

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
            block: what one of their bits stands for; known on ranks without a shard too.
            made: the new masks.
            config: the table's configuration.
            lookups: of this rank's part of the table, and those of removed rows; None where that is
                not known.
        """
        step = self._waiting[-1]
        group = group_over(data.ranks)
        owned = set(data.owned(group.rank))
        counts = [0] * (_COUNTS - 2)
        whole_rows = all(rect.cols == data.shape[1] for rect in data.rects)
        for old, (new, _) in zip(before, made.masks, strict=True):
            if new.rect in owned and new.blocks:
                owned.discard(new.rect)
                counts = [
                    a + b for a, b in zip(counts, _changes(old, new, whole_rows), strict=True)
                ]
        counts += lookups or (0, 0)
        grid = grid_of(Rect(0, 0, *data.shape), made.block)
        step.facts[data.name] = {
            "ranks": data.ranks,
            "target": target_of(config),
            "threshold": None if made.threshold is None else made.threshold.score,
            "scores": _scores(made.threshold),
            "blocks": grid.rows * grid.cols,
            "comparable": block == made.block,
            "whole_rows": whole_rows,
        }
        (step.known if group.size == 1 else step.mine)[data.name] = counts

    def _waiting_of(self, ranks: Ranks) -> list[tuple[_Waiting, list[str]]]:
        """The mask updates, and their tables, whose counts wait for a message over these ranks."""
        found = [
            (step, [name for name in step.mine if step.facts[name]["ranks"] == ranks])
            for step in self._waiting
        ]
        return [(step, sorted(names)) for step, names in found if names]

    def _sort_out(self) -> None:
        """Make records of the mask updates that have all their sums."""
        while self._waiting and not self._waiting[0].mine:
            step = self._waiting.pop(0)
            tables = tuple(
                _change(name, facts, step.known[name]) for name, facts in step.facts.items()
            )
            self._done.append(
                StepRecord(
                    number=step.number,
                    seconds=step.seconds,
                    collectives=step.collectives,
                    bytes=step.bytes,
                    tables=tables,
                )
            )


def _change(name: str, facts: Mapping[str, Any], counts: list[int]) -> MaskChange:
    removed, flipped, regrown, dead, lookups, removed_lookups = counts
    return MaskChange(
        name=name,
        target=facts["target"],
        threshold=facts["threshold"],
        scores=facts["scores"],
        blocks=facts["blocks"],
        removed_blocks=removed,
        flipped_blocks=flipped if facts["comparable"] else None,
        regrown_blocks=regrown if facts["comparable"] else None,
        dead_rows=dead if facts["whole_rows"] else None,
        lookups=lookups or None,
        removed_lookups=removed_lookups if lookups else None,
    )


def _scores(threshold: Threshold | None) -> tuple[tuple[float, int], ...]:
    if threshold is None or threshold.histogram is None:
        return ()
    filled = threshold.histogram.nonzero().flatten()
    edges = ((filled - 1).clamp(min=0) << LEADING_SHIFT).to(torch.int32).view(torch.float32)
    return tuple(zip(edges.tolist(), threshold.histogram[filled].tolist(), strict=True))


def _changes(old: BlockMask, new: BlockMask, whole_rows: bool) -> list[int]:
    """The counts of one shard; a block cut by a border counts where it begins."""
    top, left = new.rect.row % new.block[0] > 0, new.rect.col % new.block[1] > 0
    removed, flipped, regrown = (
        _cut_changes(old, new, top, left) if top or left else _whole_changes(old, new)
    )
    if not whole_rows:
        return [removed, flipped, regrown, 0]
    if new.block[0] == 1 and new.grid.cols == 1:
        return [removed, flipped, regrown, removed]
    return [removed, flipped, regrown, int(dead_flags(new).sum())]


def _whole_changes(old: BlockMask, new: BlockMask) -> list[int]:
    """Removed, flipped and regrown blocks of a shard that begins with whole blocks."""
    removed = new.blocks - count_bits(new.bits)
    if old.block != new.block:
        return [removed, 0, 0]
    return [removed, count_bits(old.bits ^ new.bits), count_bits(new.bits & ~old.bits)]


def _cut_changes(old: BlockMask, new: BlockMask, top: bool, left: bool) -> list[int]:
    """The same of a shard whose first row or column of blocks (``top``, ``left``) begins in another
    shard."""
    counts = [0, 0, 0]
    for first, last in new.row_chunks():
        inside = (slice(int(top and first == 0), None), slice(int(left), None))
        kept = new.flags(first, last)[inside]
        counts[0] += int((~kept).sum())
        if old.block == new.block:
            before = old.flags(first, last)[inside]
            counts[1] += int((before ^ kept).sum())
            counts[2] += int((kept & ~before).sum())
    return counts
