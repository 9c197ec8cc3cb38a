"""Score cache for shards whose writes the enforcer tracks."""

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
"""How elements of a shard are scored, and anything else that decides about their scores: if it
differs from the last time, kept scores are out of date."""


class Keeper:
    """The scores that one sparsifier keeps between mask updates."""

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
            written: the rows that were written, by the address of the weights; only of shards whose
                every write is seen.
            measure: how a shard of a table is scored; None if only whole shards can be.
            masks: of the shards of a table, with which the weights have been masked.
            full_every: as in :class:`~dist_sparse.masking.cached.kept_scores.Keeping`.
        """
        # Scores of shards that are not found below are forgotten.
        before, self._scores = self._scores, {}
        found = dict(goals)
        for name, goal in goals.items():
            if goal.by_element or goal.whole_columns or goal.data.replicated:
                # A written row would change scores of other rows, or of another rank.
                continue
            kept: dict[Rect, KeptScores] = {}
            measures: dict[Rect, RowMeasure] = {}
            of: dict[Rect, object] = {}
            present: dict[Rect, BlockMask] = {}
            for shard, mask in zip(goal.data.shards, masks(name), strict=True):
                seen, rect = written.get(shard.tensor.data_ptr()), shard.rect
                if seen is None or not KeptScores.fits(rect, goal.block):
                    continue
                if (how := measure(name, shard)) is None:
                    continue
                scores = before.get((name, rect))
                if scores is None or scores.written is not seen:
                    # Rows written before ``seen`` began are unknown: nothing that was kept counts.
                    scores = KeptScores(seen)
                self._scores[name, rect] = kept[rect] = scores
                measures[rect], of[rect] = how
                present[rect] = mask
            if kept:
                keeping = Keeping(kept, measures, of, present, full_every)
                found[name] = replace(goal, keeping=keeping)
        return found


def check_kept(table: ScoredTable, fresh: ScoredTable) -> None:
    """Compare kept scores of a table with fresh scores of all rows.

    Raises:
        ValueError: they differ; names table and row.
    """
    keeping = table.goal.keeping
    if keeping is None or table.cuts is not None:
        # No scores of cut blocks are kept.
        return
    for rect, kept in keeping.scores.items():
        # Bit for bit: scores are float32 as int32.
        expected = torch.cat([bits for _, bits in fresh.segments[rect].chunks()])
        wrong = (kept.scores.bits.view(-1) != expected).nonzero()
        if len(wrong):
            row = rect.row + int(wrong[0]) // kept.scores.bits.shape[1]
            raise ValueError(
                f"Table {table.goal.data.name!r}: {len(wrong)} kept scores differ from those of the"
                f" weights, the first in row {row}: weights were written in a way that torch does"
                " not count. After apply_masks() every row is scored again; with full_every=1 no"
                " scores are kept."
            )
