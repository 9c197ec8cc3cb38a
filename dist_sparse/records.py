"""Records of tables and mask updates, as plain values.

They need no torch: sparsifiers write them, and `dist-sparse inspect` and `report` read them on
machines without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["GuardCheck", "MaskChange", "StepRecord", "TableStats"]

# The bucket of a score: its bits as float32, shifted right by this. The sign, the exponent and
# three bits of the fraction remain: eight buckets an octave.
LEADING_SHIFT = 20

# Added to the total of a row before it is multiplied by squared weights. Rows that were never
# touched are then ordered by norm, above pruned rows, whose weights are 0.
TINY = 2.0**-100


# slots=True: a long run has millions of them.
@dataclass(frozen=True, kw_only=True, slots=True)
class MaskChange:
    """Changes of one table in one mask update, over all ranks.

    Args:
        name: of the table.
        target: the configured sparsity_level; None without one.
        threshold: the largest score of a removed block; None if no score decides (nothing or
            everything is pruned, or the masks are a user's own).
        blocks: number of sparse blocks, or of elements if the mask is not constant on blocks.
        removed_blocks: number of removed blocks after the update.
        flipped_blocks: number of blocks that were removed or regrown; None if the block shape has
            changed.
        regrown_blocks: number of removed blocks that are kept again.
        dead_rows: number of rows without a kept element; None for a table that is cut by columns,
            where no rank sees a whole row.
        lookups: with ``score="frequency"`` all counted so far, before the update's decay; otherwise
            a sample since the masks were last replaced, one training forward in 16; None if
            unknown, as before the table loses something.
        removed_lookups: number of these lookups that hit removed rows.
    """

    name: str
    target: float | None
    threshold: float | None
    blocks: int
    removed_blocks: int
    flipped_blocks: int | None
    regrown_blocks: int | None
    dead_rows: int | None
    lookups: int | None = None
    removed_lookups: int | None = None

    @property
    def sparsity(self) -> float:
        """Achieved: removed_blocks / blocks; 0 for an empty table."""
        return self.removed_blocks / max(1, self.blocks)

    @property
    def churn(self) -> float | None:
        """Fraction of blocks that flipped."""
        return None if self.flipped_blocks is None else self.flipped_blocks / max(self.blocks, 1)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One mask update.

    Args:
        number: of the mask update since recording began, from 1.
        seconds: duration on this rank.
        collectives: number of collectives that this rank took part in.
        bytes: sent by this rank in these collectives.
        tables: the changes of each table.
    """

    number: int
    seconds: float
    collectives: int
    bytes: int
    tables: tuple[MaskChange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardCheck:
    """One validation of a guarded training: see ``Advanced(guard=...)``.

    Args:
        step: of the schedule, counted from 0.
        metric: of this validation.
        best: the best metric of the validations that passed, this one included.
        holds: whether it passed: the metric is at most the tolerance below the best.
        undone: step of the mask update that this validation has undone; None if it undid none.
        sparsity: fraction of removed blocks after that, over all tables; None likewise.
    """

    step: int
    metric: float
    best: float
    holds: bool
    undone: int | None = None
    sparsity: float | None = None


@dataclass(frozen=True, kw_only=True)
class TableStats:
    """Sparsity and size of one table, over all ranks.

    Args:
        name: of the table.
        shape: global (rows, columns); for plain data, its shape as a matrix.
        dtype: of the weights; its name, such as ``"float32"``, in a run that was read back.
        sharding: TorchRec's sharding type, ``"replicated"``, ``"sharded_tensor"``, ``"dtensor"`` or
            ``"plain"``.
        shards: number of distinct pieces over all ranks.
        sparse_block_shape: as configured; None for a sparsifier without blocks.
        target: configured sparsity_level; None without one.
        blocks: number of sparse blocks, or of elements if the mask is not constant on blocks.
        removed_blocks: number of removed blocks.
        mask_bytes: bytes of masks over all ranks.
        table_bytes: bytes of the dense table, one replica.
        kept_bytes: bytes of its kept elements.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier
        >>> sparsifier = DataNormSparsifier(
        ...     sparsity_level=0.75, sparse_block_shape="row", norm="L2"
        ... )
        >>> names = sparsifier.add_model(torch.nn.EmbeddingBag(100, 16))
        >>> sparsifier.step()
        >>> [stats] = sparsifier.table_stats()
        >>> stats.name, stats.sparsity, stats.kept_bytes
        ('weight', 0.75, 1600)
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype | str
    sharding: str
    shards: int
    sparse_block_shape: tuple[int | str, int | str] | None
    target: float | None
    blocks: int
    removed_blocks: int
    mask_bytes: int
    table_bytes: int
    kept_bytes: int

    @property
    def sparsity(self) -> float:
        """Achieved: removed_blocks / blocks; 0 for an empty table."""
        return self.removed_blocks / max(1, self.blocks)


def removed_share(tables: Iterable[TableStats]) -> float:
    """Return the fraction of removed blocks, over all tables; 0 without blocks."""
    blocks = removed = 0
    for table in tables:
        blocks += table.blocks
        removed += table.removed_blocks
    return removed / max(blocks, 1)
