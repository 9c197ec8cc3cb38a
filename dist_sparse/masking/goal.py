"""What a mask update is to reach for one table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dist_sparse.masking import scores as scoring
from dist_sparse.masking.kept_scores import Caching
from dist_sparse.masking.scores import ByTotals
from dist_sparse.tables.shards import Block, Grid, Rect, ShardedData


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Target of a mask update for one table: its block shape, how many blocks to remove, and how to
    score them.

    Args:
        data: the table as it is stored now.
        block: the sparse block, in elements.
        k: number of blocks to prune; in a pool of tables, on average.
        max_blocks: in a pool, the maximum number of blocks to prune in this table.
        zeros_per_block: number of elements removed in a pruned block. If it equals the block's
            area, whole blocks are removed, including smaller ones at the edge.
        measure: how elements are scored.
        whole_columns: blocks are as high as the table.
        caches: by shard, the scores that are kept from one mask update to the next.
        only_zeros: do not prune any block that scores more than 0.
    """

    data: ShardedData
    block: Block
    k: int
    max_blocks: int
    zeros_per_block: int
    measure: scoring.Measure
    whole_columns: bool = False
    caches: Mapping[Rect, Caching] = field(default_factory=dict)
    only_zeros: bool = False

    @property
    def grid(self) -> Grid:
        """The blocks of the whole table."""
        return self.data.grid(self.block)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of weights that each pruned block removes."""
        return min(self.zeros_per_block, math.prod(self.block)) * self.data.dtype.itemsize

    @property
    def scores_show_zeros(self) -> bool:
        """Whether a block that was removed before and scores 0 is zero already. Newly removed
        blocks are always zeroed.

        A norm of 0 means that the block is zero, or that its squares underflow float32 (weights
        below 1e-22). Weighted squares underflow sooner, below 4e-8 in rows without gradients, but
        these scores need an enforcer, which zeroes every write to removed weights.
        """
        by_norm = isinstance(self.measure, str)
        return by_norm or (isinstance(self.measure, ByTotals) and self.measure.squares)

    @property
    def by_element(self) -> bool:
        """Whether the masks are not constant on blocks."""
        return self.zeros_per_block < math.prod(self.block)
