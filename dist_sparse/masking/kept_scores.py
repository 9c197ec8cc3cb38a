"""Scores of a shard that are kept between mask updates, so that only rows written since are scored
again.

For blocks one row high and at least 32 columns wide, of large shards of which every write is seen:
4 bytes a block, the histogram of the scores, and the places of those near the threshold while it
moves. Scores and masks are those of scoring every row, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from dist_sparse.masking.indexed import IndexedScores
from dist_sparse.masking.masks import BlockMask
from dist_sparse.masking.scores import CHUNK_ELEMENTS, block_sums, block_widths, to_scores
from dist_sparse.masking.segments import NOT_FINITE, Segment
from dist_sparse.masking.selection import Threshold
from dist_sparse.tables.shards import Block, Rect, Shard, grid_of

__all__ = ["LARGE", "Keeping", "KeptScores", "RowMeasure", "Written"]

RowMeasure = Literal["L1", "L2"] | Callable[[Tensor, Tensor], Tensor]
"""How an element is scored. A callable takes some rows of a shard, ``(n, columns)``, and their
numbers in it, int64 ``(n,)``, and returns element scores, float64 of the same shape."""

LARGE = 1 << 22
"""Elements of a shard from which on scores are kept. To score all rows of a smaller one takes up to
2.5 ms in a mask update, to note which rows were written up to 0.1 ms in each of the many backwards
between two updates."""

_MANY: Final = 4
"""If one row in so many was written, one pass over all rows is as quick."""


class Written(Protocol):
    """The rows of a shard that may have been written since :meth:`clear`."""

    def rows(self) -> Tensor | None:
        """Return their numbers, int64 ``(n,)``, ascending; None if it may be any."""
        ...

    def add(self, rows: Tensor) -> None:
        """Add some, int64 ``(n,)``."""
        ...

    def clear(self) -> None:
        """Forget them."""
        ...


class KeptScores:
    """Scores of the blocks of one shard.

    Args:
        written: of the shard.

    Attributes:
        written: see above.
        scores: of all blocks; changed by :meth:`update` alone.
        age: calls of :meth:`update` since every row was last scored.
    """

    def __init__(self, written: Written) -> None:
        self.scores = IndexedScores(
            torch.empty(0, 0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
        )
        self.age = 0
        self.written = written
        self._known: Any = None
        self._made: tuple[BlockMask, Threshold] | None = None
        self._since: list[Tensor] = []

    @staticmethod
    def fits(rect: Rect, block: Block) -> bool:
        """Whether scores of such a shard are worth keeping."""
        return block[0] == 1 and min(block[1], rect.cols) >= 32 and rect.numel >= LARGE

    def update(
        self,
        shard: Shard,
        shape: tuple[int, int],
        block: Block,
        keeping: Keeping,
        score_all: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        """Score the rows that were written; or every row, if it may be any, or if something else
        has changed.

        Args:
            shard: live.
            shape: of the whole table.
            block: one row high.
            keeping: of the table.
            score_all: returns the scores of all rows and their histogram. What it raises leaves
                nothing known.
        """
        known = shard.tensor.data_ptr(), shard.rect, shape, block, keeping.of[shard.rect]
        rows = (
            self.written.rows()
            if known == self._known and self.age + 1 < keeping.full_every
            else None
        )
        if (
            rows is not None
            and rows.numel() * _MANY < shard.rect.rows
            and self._score(shard, shape, block, keeping, rows)
        ):
            self.age += 1
        else:
            self._known = self._made = None
            self._since = []
            self.scores = IndexedScores(*score_all())
            self._known, self.age = known, 0
        self.written.clear()

    def new_mask(self, segment: Segment, threshold: Threshold) -> BlockMask | None:
        """Return the mask of the scores, made from the last one and what may have changed since:
        itself, if nothing has. None if there is none, or if a pass over all scores is as quick:
        :meth:`note_mask` is called then.

        Args:
            segment: of the scores.
            threshold: of the table.
        """
        if self._made is None:
            return None
        mask, before = self._made
        changed = [*self._since]
        if threshold != before:
            first, last = sorted((before, threshold), key=lambda each: each.bits)
            ties = any(
                each.last is not None for each in (before, threshold) if each.bits == first.bits
            )
            between = self.scores.within(first.bits if ties else first.bits + 1, last.bits)
            if between is None:
                return None
            changed.append(between)
        for places in changed:
            mask = mask.changed(
                places, ~threshold.removes_at(segment, places, self.scores.at(places))
            )
        self.note_mask(mask, threshold)
        return mask

    def note_mask(self, mask: BlockMask, threshold: Threshold) -> None:
        """Note the mask that the scores have at a threshold."""
        self._made, self._since = (mask, threshold), []

    def _score(
        self, shard: Shard, shape: tuple[int, int], block: Block, keeping: Keeping, rows: Tensor
    ) -> bool:
        """Score these rows. False, with nothing changed, if a score is negative or not finite."""
        measure, mask, zeros = keeping.measure[shard.rect], keeping.masks[shard.rect], rows[:0]
        if isinstance(measure, str) and mask.grid.cols == 1 and mask.block == block:
            # What the mask removes was zeroed before weights are scored, whatever has written it.
            kept = mask.keeps(rows)
            if not bool(kept.all()):
                rows, zeros = rows.masked_select(kept), rows.masked_select(~kept)
        grid = grid_of(shard.rect, block)
        widths = block_widths(shape, block, torch.arange(grid.col, grid.col + grid.cols))
        found = [torch.zeros(len(zeros), grid.cols)]
        weights = shard.tensor.detach()
        for some in torch.split(rows, max(1, CHUNK_ELEMENTS // shard.rect.cols)):
            rect = Rect(0, shard.rect.col, len(some), shard.rect.cols)
            if isinstance(measure, str):
                parts = block_sums(weights, rect, block, measure, of=some)
            else:
                parts = block_sums(
                    measure(weights.index_select(0, some), some), rect, block, "given"
                )
            found += [to_scores(sums, 0, widths, (len(sums), shape[1]), block) for _, sums in parts]
        new, places = torch.cat(found).view(torch.int32).view(-1), torch.cat([zeros, rows])
        if not len(places):
            return True
        least, most = new.aminmax()  # negative floats are negative as integers too
        if int(least) < 0 or int(most) >= NOT_FINITE:
            return False
        if grid.cols > 1:
            places = (places.unsqueeze(1) * grid.cols + torch.arange(grid.cols)).view(-1)
        self.scores.replace(places, new)
        self._since.append(places)
        # Scored often, and no masks were made.
        if sum(map(len, self._since)) * _MANY > self.scores.bits.numel():
            self._made, self._since = None, []
        return True


@dataclass(frozen=True)
class Keeping:
    """The kept scores of the shards of one table, and how rows that were written are scored.

    Args:
        scores: of those shards of which scores are kept.
        measure: of each of them, how its elements are scored.
        of: of each of them what else decides about a score: if it changes, every row is scored.
        masks: of each of them, the present one: what it removes is zero.
        full_every: every row is scored at least in one of so many updates.
    """

    scores: Mapping[Rect, KeptScores]
    measure: Mapping[Rect, RowMeasure]
    of: Mapping[Rect, object]
    masks: Mapping[Rect, BlockMask]
    full_every: int
