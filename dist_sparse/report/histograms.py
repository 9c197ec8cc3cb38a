"""Score histograms of a run: one per table, chosen by :func:`replaces` for writer and reader alike.

A log of all of them would grow by 1 to 3 KiB per table and mask update, and most updates change
little.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_sparse.records import MaskChange


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A mask update of one table at training step ``step``, with the ``scores`` of its blocks
    before the update and a ``threshold``."""

    step: int
    change: MaskChange

    @property
    def zeros(self) -> int:
        """Number of blocks that scored 0."""
        return sum(blocks for score, blocks in self.change.scores if not score)

    @property
    def pruned_much(self) -> bool:
        """Whether at least 1% of the blocks were pruned, blocks that scored 0 not counted."""
        return self.change.removed_blocks - self.zeros >= 0.01 * self.change.blocks


def replaces(new: Scored, known: Scored | None) -> bool:
    """Return whether ``new`` is shown instead of the table's histogram so far: the last one that
    pruned much, else the last."""
    # An update that prunes nothing new has scores that decided nothing.
    return known is None or new.pruned_much or not known.pruned_much
