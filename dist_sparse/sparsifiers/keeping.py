"""Which scores a sparsifier keeps between mask updates: those of shards of which an enforcer sees every write."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dist_sparse.masking.block_scores import ScoredTable
from dist_sparse.masking.kept_scores import Keeping, KeptScores, RowMeasure, Written
from dist_sparse.tables.shards import Block, Rect, Shard, ShardedData

__all__ = ["Keeper", "Scored", "check_kept"]

Scored = tuple[RowMeasure, object]
"""How elements of a shard are scored, and what else decides about their scores, for comparison with the last time."""


class Keeper:
    """The kept scores of one sparsifier."""

    def __init__(self) -> None:
        self._scores: dict[tuple[str, Rect], KeptScores] = {}

    def of(
        self,
        data: ShardedData,
        block: Block,
        written: Mapping[int, Written],
        measure: Callable[[Shard], Scored | None],
        full_every: int,
    ) -> Keeping | None:
        """Return what is kept of a table; None if nothing is.

        Args:
            data: the table as it is stored now.
            block: of its masks.
            written: the rows that were written, by the address of the weights, of shards of which that is known.
            measure: how a shard is scored; None if only whole shards can be.
            full_every: as in :class:`~dist_sparse.masking.kept_scores.Keeping`.
        """
        scores, measures, of = {}, {}, {}
        for shard in () if data.replicated else data.shards:
            seen = written.get(shard.tensor.data_ptr()) if KeptScores.fits(shard.rect, block) else None
            known = None if seen is None else measure(shard)
            if seen is None or known is None:
                self._scores.pop((data.name, shard.rect), None)
                continue
            kept = self._scores.get((data.name, shard.rect))
            if kept is None or kept.written is not seen:
                kept = self._scores[data.name, shard.rect] = KeptScores(seen)
            scores[shard.rect] = kept
            measures[shard.rect], of[shard.rect] = known
        return Keeping(scores, measures, of, full_every) if scores else None

    def keep_to(self, located: Mapping[str, ShardedData]) -> None:
        """Forget the scores of all other shards."""
        there = {(data.name, shard.rect) for data in located.values() for shard in data.shards}
        self._scores = {place: kept for place, kept in self._scores.items() if place in there}


def check_kept(table: ScoredTable, fresh: ScoredTable) -> None:
    """Compare kept scores of a table with those of all rows.

    Raises:
        ValueError: they differ; names table and row.
    """
    keeping = table.goal.keeping if table.cuts is None else None  # of cut blocks no scores are kept
    for rect, kept in () if keeping is None else keeping.scores.items():
        wrong = (kept.bits.view(-1) != torch.cat([bits for _, bits in fresh.segments[rect].chunks()])).nonzero()
        if len(wrong):
            row = rect.row + int(wrong[0]) // kept.bits.shape[1]
            raise ValueError(
                f"Table {table.goal.data.name!r}: {len(wrong)} kept scores differ from those of the weights, the first "
                f"in row {row}: weights were written in a way that torch does not count. With full_every=1 no scores "
                "are kept."
            )
