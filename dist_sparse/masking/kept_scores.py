"""Scores of a shard that are kept between mask updates, so that only rows written since are scored again.

For blocks one row high and at least 32 columns wide, of large shards of which every write is seen: 4 bytes a block, and
the histogram of the scores. The result is that of scoring every row, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from dist_sparse.masking.scores import Measure, block_sums, block_widths, to_scores
from dist_sparse.masking.segments import NOT_FINITE, first_histogram
from dist_sparse.tables.shards import Block, Rect, Shard, grid_of

__all__ = ["LARGE", "Keeping", "KeptScores", "RowMeasure", "Written"]

RowMeasure = Literal["L1", "L2"] | Callable[[Tensor, Tensor], Tensor]
"""How an element is scored. A callable takes some rows of a shard, ``(n, columns)``, and their numbers in it, int64
``(n,)``, and returns element scores, float64 of the same shape."""

LARGE = 1 << 22
"""Elements of a shard from which on scores are kept. To score all rows of a smaller one takes up to 2.5 ms in a mask
update, to note which rows were written up to 0.1 ms in each of the many backwards between two updates."""

_ROWS: Final = 1 << 12
"""Rows gathered at a time: with their scores they stay in the cache."""

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
        bits: float32 scores as int32, ``(rows, block columns)``; changed by :meth:`update` alone.
        histogram: of all of them, int64 ``(HISTOGRAM,)``.
        age: calls of :meth:`update` since every row was last scored.
    """

    def __init__(self, written: Written) -> None:
        self.bits = torch.empty(0, 0, dtype=torch.int32)
        self.histogram = torch.empty(0, dtype=torch.int64)
        self.age = 0
        self.written = written
        self._known: Any = None

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
        """Score the rows that were written; or every row, if it may be any, or if something else has changed.

        Args:
            shard: live.
            shape: of the whole table.
            block: one row high.
            keeping: of the table.
            score_all: returns the scores of all rows and their histogram. What it raises leaves nothing known.
        """
        known = shard.tensor.data_ptr(), shard.rect, shape, block, keeping.of[shard.rect]
        rows = self.written.rows() if known == self._known and self.age + 1 < keeping.full_every else None
        few = rows is not None and rows.numel() * _MANY < shard.rect.rows
        if few and self._score(shard, shape, block, keeping.measure[shard.rect], rows):
            self.age += 1
        else:
            self._known = None
            self.bits, self.histogram = score_all()
            self._known, self.age = known, 0
        self.written.clear()

    def _score(
        self, shard: Shard, shape: tuple[int, int], block: Block, measure: RowMeasure, rows: Tensor | None
    ) -> bool:
        """Score these rows. False, with nothing changed, if a score is negative or not finite."""
        if rows is None or not rows.numel():
            return True
        grid = grid_of(shard.rect, block)
        widths = block_widths(shape, block, torch.arange(grid.col, grid.col + grid.cols))
        found = []
        for some in torch.split(rows, _ROWS):
            data = shard.tensor.detach().index_select(0, some)
            how: Measure = measure if isinstance(measure, str) else "given"
            rect = Rect(0, shard.rect.col, len(some), shard.rect.cols)
            for _, sums in block_sums(data if isinstance(measure, str) else measure(data, some), rect, block, how):
                found.append(to_scores(sums, 0, widths, (len(sums), shape[1]), block))
        new = torch.cat(found).view(torch.int32)
        least, most = new.aminmax()  # negative floats are negative as integers too
        if int(least) < 0 or int(most) >= NOT_FINITE:
            return False
        self.histogram += first_histogram(new.view(-1)) - first_histogram(self.bits.index_select(0, rows).view(-1))
        self.bits.index_copy_(0, rows, new)
        return True


@dataclass(frozen=True)
class Keeping:
    """The kept scores of the shards of one table, and how rows that were written are scored.

    Args:
        scores: of those shards of which scores are kept.
        measure: of each of them, how its elements are scored.
        of: of each of them what else decides about a score: if it changes, every row is scored.
        full_every: every row is scored at least in one of so many updates.
    """

    scores: Mapping[Rect, KeptScores]
    measure: Mapping[Rect, RowMeasure]
    of: Mapping[Rect, object]
    full_every: int
