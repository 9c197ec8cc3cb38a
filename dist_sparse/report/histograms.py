"""Score histograms of a run: one per table, chosen by :func:`replaces` for writer and reader alike.

A log of all of them would grow by 1 to 3 KiB per table and mask update, and most updates change
little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Scored", "replaces"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Histogram of the scores of a table's blocks before a mask update.

    Args:
        step: training step.
        name: of the table.
        threshold: largest score that was pruned.
        blocks: number of blocks of the mask.
        removed_blocks: how many of them are pruned after the update.
        scores: ``(smallest score of a bucket, blocks)``, eight buckets per octave, ascending.
    """

    step: int
    name: str
    threshold: float
    blocks: int
    removed_blocks: int
    scores: Sequence[tuple[float, int]]

    @property
    def zeros(self) -> int:
        """Number of blocks that scored 0."""
        return sum(blocks for score, blocks in self.scores if not score)

    @property
    def pruned_much(self) -> bool:
        """Whether at least 1% of the blocks were pruned, blocks that scored 0 not counted."""
        return self.removed_blocks - self.zeros >= 0.01 * self.blocks


def replaces(new: Scored, known: Scored | None) -> bool:
    """Return whether ``new`` is shown instead of the table's histogram so far: the last one that
    pruned much, else the last."""
    # An update that prunes nothing new has scores that decided nothing.
    return known is None or new.pruned_much or not known.pruned_much
