"""What is known of tables and of mask updates, as plain values.

Needs no torch: sparsifiers measure them where it is, and `dist-sparse inspect` and `report` read
them where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A score's bits as float32, shifted right by this, are its bucket: eight buckets an octave.
LEADING_SHIFT = 20

# Added to a row's total before it is multiplied by squares, so that rows that were never touched
# are ordered by norm, and after those that are removed already.
TINY = 2.0**-100


@dataclass(frozen=True, kw_only=True, slots=True)  # a long run has millions
class MaskChange:
    """What one mask update changed in one table, over all ranks.

    Args:
        name: of the table.
        target: the configured sparsity_level; None without one.
        threshold: the largest score that was removed; None where none decides (nothing or
            everything is pruned, or the masks are a user's own).
        blocks: what the mask counts: sparse blocks, or elements where it is not constant on blocks.
        removed_blocks: how many of them are removed now.
        flipped_blocks: how many are no longer what they were; None if the block shape has changed.
        regrown_blocks: how many of those were removed before.
        dead_rows: rows with nothing left; None for a table that is cut by columns, where no rank
            sees a whole row.
        lookups: with ``score="frequency"`` all counted so far, before the update's decay; otherwise
            a sample since the masks were last replaced, one training forward in 16; None where none
            are known.
        removed_lookups: how many of them are of rows that were removed until now.
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
        return self.removed_blocks / self.blocks if self.blocks else 0.0

    @property
    def churn(self) -> float | None:
        """The share of blocks that flipped."""
        return None if self.flipped_blocks is None else self.flipped_blocks / max(self.blocks, 1)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One mask update.

    Args:
        number: of the mask update since recording began, from 1.
        seconds: that it took on this rank.
        collectives, bytes: that this rank took part in, and handed to them.
        tables: what changed in each.
    """

    number: int
    seconds: float
    collectives: int
    bytes: int
    tables: tuple[MaskChange, ...]


# What becomes of a lookup of a following table: counts of SlotChange.
FATES = {
    "kept": "found a row",
    "removed": "hit removed rows",
    "unseen": "were of ids never seen",
    "out_of_range": "were out of range",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotChange:
    """Lookups of a following table since the update before, by what became of their ids, and the
    rows that change hands; over all ranks.

    Args:
        name: of the table.
        lookups: in training batches.
        removed: of ids without a row that were looked up before.
        unseen: of ids without a row that never were, or so long ago that their count is gone.
        out_of_range: of ids that the table does not have.
        came, went: ids that get a row in this update, and ids that lose theirs.
    """

    name: str
    lookups: int
    removed: int
    unseen: int
    out_of_range: int
    came: int
    went: int

    @property
    def kept(self) -> int:
        """Lookups of ids with a row."""
        return self.lookups - self.removed - self.unseen - self.out_of_range


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotUpdate:
    """One update of following tables, in ``seconds`` on this rank."""

    seconds: float
    tables: tuple[SlotChange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardCheck:
    """One validation by :meth:`~dist_sparse.SparseTraining.guard`.

    Args:
        step: of the schedule, counted from 0.
        metric: of this validation.
        best: the best metric of validations that held, this one included.
        holds: the metric is not below it by more than the tolerance.
        undone: the step of the mask update that this validation has undone.
        sparsity: the fraction of blocks that is removed after that, over all tables; None if
            nothing was undone.
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
        shape: global (rows, columns); of plain data as a matrix.
        dtype: of the weights; in a run that was read, its name, such as ``"float32"``.
        sharding: TorchRec's sharding type, ``"replicated"``, ``"sharded_tensor"``, ``"dtensor"`` or
            ``"plain"``.
        shards: number of distinct pieces over all ranks.
        sparse_block_shape: as configured; None for a sparsifier without blocks.
        target: configured sparsity_level; None without one.
        blocks: what the mask counts: sparse blocks, or elements where it is not constant on blocks.
        removed_blocks: how many of them are removed.
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
        return self.removed_blocks / self.blocks if self.blocks else 0.0
