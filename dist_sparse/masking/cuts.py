"""Which blocks does a shard border cut, and who decides about them?

Every block row of a table has an owner, rank ``block_row * world // block_rows``. The holders of a cut block tell the
owner what they know of it (:class:`Partials`), the owner scores it (:class:`Owned`) and sends what was decided back
(:class:`Verdict`). Who holds what is known from metadata, so nothing but values goes over the wire;
:mod:`dist_sparse.masking.exchange` does the sending.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dist_sparse.masking.segments import Segment
from dist_sparse.tables.shards import Block, Grid, Rect, ShardedData, grid_of

__all__ = ["CutTable", "Owned", "Partials", "Verdict", "find_cuts"]


@dataclass(frozen=True)
class CutTable:
    """The cut blocks of one table: all of block rows ``rows``, and of the other block rows those in block columns
    ``cols``."""

    data: ShardedData
    block: Block
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def grid(self) -> Grid:
        return grid_of(Rect(0, 0, *self.data.shape), self.block)

    def owned_rows(self, rank: int, size: int) -> range:
        """The block rows that group rank ``rank`` of ``size`` decides about."""
        total = self.grid.rows
        return range(-(-rank * total // size), -(-(rank + 1) * total // size))

    def rows_in(self, first: int, last: int) -> list[int]:
        """The cut block rows within ``[first, last)``."""
        return [i for i in self.rows if first <= i < last]

    def cols_in(self, grid: Grid) -> list[int]:
        """The cut block columns within a shard's grid."""
        return [j for j in self.cols if grid.col <= j < grid.col + grid.cols]

    def local_cols(self, grid: Grid) -> slice | list[int]:
        """An index of the cut columns of a shard's grid, counted from its first: a slice where it can be, which is
        quicker."""
        cols = [j - grid.col for j in self.cols_in(grid)]
        together = bool(cols) and cols[-1] - cols[0] == len(cols) - 1
        return slice(cols[0], cols[-1] + 1) if together else cols

    def slab(self, row: int) -> Rect:
        """The elements of a whole block row."""
        top = row * self.block[0]
        return Rect(top, 0, min(self.block[0], self.data.shape[0] - top), self.data.shape[1])


@dataclass
class Partials:
    """What a shard knows of its cut blocks.

    Args:
        sums: float64 ``(grid.rows, len(cut columns))``: partial sums, for every block row of the shard; let go of once
            they are sent.
        clean: bool, of the same shape: which of them are 0.
        elements: for each cut block row of the shard, float64 element scores ``(its rows here, rect.cols)``.
    """

    sums: Tensor
    clean: Tensor
    elements: dict[int, Tensor]

    def let_go(self) -> None:
        """Forgets what has been sent."""
        self.sums = self.sums.new_zeros(0)
        self.elements = {}


@dataclass
class Owned:
    """The cut blocks of one table that this rank decides about.

    Args:
        columns: scores of the blocks in cut block columns, over ``range`` of owned block rows (rows cut as well hold
            KEPT).
        slabs: for each owned cut block row its scores, and the element scores ``(rows, width)`` they come from.
    """

    columns: Segment | None = None
    slabs: dict[int, tuple[Segment, Tensor]] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        return ([self.columns] if self.columns else []) + [segment for segment, _ in self.slabs.values()]


@dataclass
class Verdict:
    """What was decided about the cut blocks of one shard, True = removed.

    Args:
        columns: bool ``(grid.rows, len(cut columns))``; undefined in block rows that are cut as well.
        slabs: for each cut block row bool ``(grid.cols,)`` by block, or ``(rows here, rect.cols)`` by element.
    """

    columns: Tensor
    slabs: dict[int, Tensor]


def find_cuts(data: ShardedData, block: Block) -> CutTable | None:
    """The cut blocks of a table, or None when every block lies within one shard. Known from metadata: the same on every
    rank."""
    rows = {rect.row // block[0] for rect in data.rects if rect.row % block[0]}
    cols = {rect.col // block[1] for rect in data.rects if rect.col % block[1]}
    return CutTable(data, block, tuple(sorted(rows)), tuple(sorted(cols))) if rows or cols else None
