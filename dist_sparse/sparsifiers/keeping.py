"""Which scores a sparsifier keeps between mask updates: those of shards of which an enforcer sees
every write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from dist_sparse.masking.block_scores import Goal, ScoredTable
from dist_sparse.masking.cached.kept_scores import Keeping, KeptScores, RowMeasure, Written
from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.shards import Rect, Shard

__all__ = ["Keeper", "Scored", "check_kept"]

Scored = tuple[RowMeasure, object]
"""How elements of a shard are scored, and what else decides about their scores, for comparison with
the last time."""


class Keeper:
    """The kept scores of one sparsifier."""

    def __init__(self) -> None:
        self._scores: dict[tuple[str, Rect], KeptScores] = {}

    def goals(
        self,
        goals: Mapping[str, Goal],
        written: Mapping[int, Written],
        measure: Callable[[str, Shard], Scored | None],
        masks: Callable[[str], Sequence[BlockMask]],
        full_every: int,
    ) -> dict[str, Goal]:
        """Return the goals of a mask update, with the scores that are kept.

        Args:
            goals: by the name of the table.
            written: the rows that were written, by the address of the weights, of shards of which
                that is known.
            measure: how a shard of a table is scored; None if only whole shards can be.
            masks: of the shards of a table, with which the weights have been masked.
            full_every: as in :class:`~dist_sparse.masking.cached.kept_scores.Keeping`.
        """
        before, self._scores = self._scores, {}
        found = dict(goals)
        for name, goal in goals.items():
            if goal.by_element or goal.whole_columns or goal.data.replicated:
                continue
            kept: dict[Rect, KeptScores] = {}
            known: dict[Rect, Scored] = {}
            present: dict[Rect, BlockMask] = {}
            for shard, mask in zip(goal.data.shards, masks(name), strict=True):
                seen = (
                    written.get(shard.tensor.data_ptr())
                    if KeptScores.fits(shard.rect, goal.block)
                    else None
                )
                how = None if seen is None else measure(name, shard)
                if seen is not None and how is not None:
                    scores = before.get((name, shard.rect))
                    scores = (
                        KeptScores(seen) if scores is None or scores.written is not seen else scores
                    )
                    kept[shard.rect] = self._scores[name, shard.rect] = scores
                    known[shard.rect], present[shard.rect] = how, mask
            if kept:
                measures = {rect: how for rect, (how, _) in known.items()}
                of = {rect: what for rect, (_, what) in known.items()}
                found[name] = replace(
                    goal, keeping=Keeping(kept, measures, of, present, full_every)
                )
        return found


def check_kept(table: ScoredTable, fresh: ScoredTable) -> None:
    """Compare kept scores of a table with those of all rows.

    Raises:
        ValueError: they differ; names table and row.
    """
    keeping = table.goal.keeping if table.cuts is None else None  # of cut blocks no scores are kept
    for rect, kept in () if keeping is None else keeping.scores.items():
        wrong = (
            kept.scores.bits.view(-1)
            != torch.cat([bits for _, bits in fresh.segments[rect].chunks()])
        ).nonzero()
        if len(wrong):
            row = rect.row + int(wrong[0]) // kept.scores.bits.shape[1]
            raise ValueError(
                f"Table {table.goal.data.name!r}: {len(wrong)} kept scores differ from those of the"
                f" weights, the first in row {row}: weights were written in a way that torch does"
                " not count. After apply_masks() every row is scored again; with full_every=1 no"
                " scores are kept."
            )
