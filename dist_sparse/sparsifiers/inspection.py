"""What can be read of a sparsifier's masks: the inspection methods of every data sparsifier.

None of them changes a mask or a weight. Those that are collective first check that all ranks make
the same call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_sparse.records import TableStats
from dist_sparse.sparsifiers import stats
from dist_sparse.sparsifiers.dense_store import DenseStore
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.sparsifiers.recorder import Recorder

__all__ = ["Inspection"]


class Inspection:
    """The part of :class:`~dist_sparse.BaseDataSparsifier` that reads masks. Its attributes are
    documented there."""

    data_groups: dict[str, dict[str, Any]]
    dense_store: DenseStore
    packed_store: PackedStore
    recorder: Recorder | None
    enforcer: stats.Settles | None

    def get_mask(self, name: str) -> Tensor:
        """Return the mask, 1 = kept, 0 = removed.

        Of plain data it is the live object, whose in-place edits count; of a sharded table this
        rank's only shard, unpacked (int8); inside :meth:`update_mask` the one being updated.

        Raises:
            ValueError: unknown, or a table with several shards or none on this rank, or with shards
                that have moved since the last step.
        """
        return self._store(name).mask(name)

    def local_masks(self, name: str) -> list[tuple[tuple[int, int], Tensor]]:
        """Return this rank's pieces of a mask: ``((row, column) offset, int8 mask)`` of each shard,
        in their order.

        Raises:
            ValueError: unknown name, or the shards have moved since the last step.
        """
        return self._store(name).local_masks(name)

    def full_mask(self, name: str, max_bytes: int = 1 << 30) -> Tensor:
        """Return the global mask, int8 ``(rows, columns)``. Collective over the ranks of a sharded
        table. For tests and inspection.

        Raises:
            ValueError: unknown name, the mask would take more than ``max_bytes``, or another rank
                asks for another.
        """
        if name in self.packed_store:
            return stats.full_mask(self.packed_store, name, max_bytes)
        return self.get_mask(name).to(torch.int8)

    def table_stats(self) -> list[TableStats]:
        """Return counts of every registered name, the same on every rank. Collective if sharded
        tables are registered: one all-reduce after an exchange of status."""
        return stats.table_stats(self)

    def dead_rows(self) -> dict[str, int]:
        """Return the number of rows with nothing left, by name, the same on every rank. Exact for
        tables cut by columns too. Collective as :meth:`table_stats`, with an all-to-all more where
        tables are cut by columns."""
        return stats.dead_rows(self)

    def count_revived(self) -> dict[str, int]:
        """Return how many removed weights are not zero, by name, all replicas counted; squashed
        names are left out. Collective as :meth:`table_stats`.

        Weights are read as they are stored. With an enforcer attached, what optimizers have revived
        since the last forward is zeroed before the next; ``enforcer.settle()`` zeroes it now.
        """
        return stats.count_revived(self)

    def fingerprint(self) -> dict[str, str]:
        """Return a hash of every global mask. It depends on shape and mask alone, not on sharding,
        blocks or ranks. Collective as :meth:`table_stats`."""
        return stats.fingerprints(self, "fingerprint()")

    def audit(self) -> dict[str, str]:
        """Return :meth:`fingerprint`, after comparing the masks of all holders (replicas, and the
        bits of blocks that a shard border cuts) and masks with weights. Collective as
        :meth:`table_stats`; reads all weights once, in chunks.

        Without an enforcer, optimizers revive removed weights: a UserWarning says how many are not
        zero, plain data left out. With one, what has been revived since the last forward is zeroed
        first.

        Raises:
            ValueError: on every rank; names table, place and ranks that differ; or, with an
                enforcer attached, how many removed weights of which table are not zero: they were
                written through ``.data`` or by other code whose writes torch does not count.

        Example::

            >>> import torch
            >>> from dist_sparse import DataNormSparsifier
            >>> table = torch.nn.EmbeddingBag(10, 4)
            >>> sparsifier = DataNormSparsifier(
            ...     sparsity_level=0.5, sparse_block_shape="row", norm="L2"
            ... )
            >>> names = sparsifier.add_model(table)
            >>> sparsifier.step()
            >>> list(sparsifier.audit())
            ['weight']
        """
        return stats.audit(self)

    def record(self) -> Recorder:
        """Return a recorder of what mask updates change in sharded tables, from now on: one a
        sparsifier, made at the first call. Every rank must call it, or none; does not
        communicate."""
        self.recorder = self.recorder or Recorder()
        return self.recorder

    def stop_recording(self) -> None:
        """Forget :meth:`record`'s recorder. Every rank must call it, or none; does not
        communicate."""
        self.recorder = None

    def _store(self, name: str) -> DenseStore | PackedStore:
        if name not in self.data_groups:
            raise ValueError(
                f"data with specified name does not exist: {name!r}; known are"
                f" {list(self.data_groups)}"
            )
        return self.packed_store if name in self.packed_store else self.dense_store
