"""Mask whole rows by their ids alone, without zeroing or watching the rows.

A removed row is a row of zeros, and stays one if no optimizer moves it. In sums on a CPU its ids
are dropped before the lookup: they are not read and get no gradient. All others keep their order,
so that sums and updates are the same, bit for bit. Elsewhere its ids weigh nothing: on a device the
host would wait in every forward for the number of remaining ids; a mean counts all ids; a sequence
has a place for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from dist_sparse.enforcer.rows import FlatRows, in_table
from dist_sparse.tables.port import torchrec_port
from dist_sparse.tables.protocols import TableBatch

_LEAST_REMOVED: Final = 1 / 4
"""A mask that also removes parts of rows needs zeroing anyway: ids are dropped only if it removes
at least this share of the rows whole."""


def worth_dropping(kept: Tensor) -> bool:
    """Return whether a mask that removes parts of rows also removes enough whole rows to drop their
    ids. ``kept``, bool ``(rows,)``, are the rows with any weight left."""
    removed = len(kept) - int(kept.sum())
    return removed >= len(kept) * _LEAST_REMOVED


class KeptIds:
    """Finds the ids of kept rows in a kernel's features.

    Args:
        kept: kept rows, bool ``(rows,)``, by the number of the table. Other tables keep all ids.
        features: the number of each feature's table.
        device: of the tables.
    """

    def __init__(
        self, kept: Mapping[int, Tensor], features: Sequence[int], device: torch.device
    ) -> None:
        self._kept = kept
        self._features = list(features)
        self._device = device

    def flags(self, ids: Tensor, ends: Sequence[int] | Tensor) -> Tensor:
        """Return which ids are kept, bool ``(n,)``. An id outside of its table counts as row 0.
        Both arguments are as in :class:`~dist_sparse.enforcer.rows.RowCleaner`."""
        if isinstance(ends, Tensor):
            flat, flags = self._flat_flags
            return flags.index_select(0, flat.of(ids, ends))
        found = torch.ones(ids.numel(), dtype=torch.bool)
        for table, (start, stop) in zip(self._features, pairwise(ends), strict=True):
            kept = self._kept.get(table)
            if kept is not None and start != stop:
                rows = in_table(ids[start:stop], len(kept))
                torch.index_select(kept, 0, rows, out=found[start:stop])
        return found

    def among(self, features: Any) -> Any:
        """Return a KeyedJaggedTensor of the kept ids in ``features`` and their weights. Gradients
        flow back to all weights, 0 to the weights of dropped ids.

        If an id is outside of its table, return ``features`` itself: FBGEMM raises an error, or
        warns and takes row 0.
        """
        chosen = self._chosen(features.values(), features.length_per_key())
        if chosen is None:
            return features
        torchrec = torchrec_port()
        # It has made the features.
        assert torchrec is not None
        return torchrec.among(features, chosen)

    @cached_property
    def _flat_flags(self) -> tuple[FlatRows, Tensor]:
        """The flags of all tables in one tensor: on a device each read is a launch."""
        rows = {table: len(kept) for table, kept in self._kept.items()}
        flat = FlatRows(rows, self._features, self._device)
        # The last flag is for the ids of all other tables.
        flags = torch.ones(flat.total + 1, dtype=torch.bool, device=self._device)
        for table, start in flat.starts.items():
            flags[start : start + rows[table]] = self._kept[table]
        return flat, flags

    def _chosen(self, ids: Tensor, counts: list[int]) -> Tensor | None:
        """Return which ids to pass on, bool ``(n,)``; None if one is outside of its table."""
        chosen = []
        try:
            for table, part in zip(self._features, torch.split(ids, counts), strict=True):
                kept = self._kept.get(table)
                if kept is None:
                    chosen.append(torch.ones(part.shape, dtype=torch.bool))
                else:
                    # index_select() also checks the range of every id.
                    chosen.append(kept.index_select(0, part))
        except IndexError:
            return None
        return torch.cat(chosen)


class MaskedIds:
    """Masks the lookups of one batch by their ids: those of removed rows are dropped, or weigh
    nothing.

    Args:
        batch: FBGEMM's batch.
        device: of its tables.

    Attributes:
        weighed: whether ids of removed rows weighed nothing in the last lookup.
    """

    def __init__(self, batch: TableBatch, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        # The kept ids of tables masked by their ids.
        self._kept: KeptIds | None = None
        # The kept ids of tables whose other ids are dropped before the kernel.
        self._passed: KeptIds | None = None
        self._to_weigh = False
        self.weighed = False

    @property
    def any_removed(self) -> bool:
        """Whether a table masked by its ids has removed rows."""
        return self._kept is not None

    def use(self, kept: Mapping[int, Tensor], passed: Mapping[int, Tensor]) -> None:
        """Take new masks, each bool ``(rows,)``, by the number of the table.

        Args:
            kept: the kept rows of tables masked by their ids.
            passed: the rows whose ids reach the kernel.
        """
        features = self._batch.features
        self._kept = KeptIds(kept, features, self._device) if kept else None
        self._passed = KeptIds(passed, features, self._device) if passed else None

    def pass_on(self, requested: Any) -> Any:
        """Return the features of a lookup without the dropped ids."""
        passed = requested if self._passed is None else self._passed.among(requested)
        # Weight 0 keeps gradients from removed rows. A forward alone may read their zeros.
        self._to_weigh = passed is requested and torch.is_grad_enabled()
        self.weighed = False
        return passed

    def before_kernel(self, kernel: Any, args: Any, call: dict[str, Any]) -> Any:
        """Forward pre-hook of FBGEMM's module: let ids of removed rows weigh nothing, unless they
        were dropped."""
        self.weighed = self._to_weigh
        if self._kept is None or not self._to_weigh:
            return None
        changed = self._batch.weighed(call, self._kept.flags)
        return None if changed is None else (args, changed)

    def after_kernel(self, kernel: Any, args: Any, output: Any) -> None:
        """Forward hook of FBGEMM's module."""
        self._batch.restore_pooling()

    def without_removed(
        self, grad: Tensor, ids: Tensor, ends: Sequence[int] | Tensor
    ) -> Tensor | None:
        """Return the gradient of a sequence with zeros for removed rows; None for no change."""
        if self._kept is None or self._batch.pooling != "none":
            return None
        removed = self._kept.flags(ids, ends).logical_not_()
        if not grad.is_cpu:
            return grad.masked_fill(removed.unsqueeze(1), 0)
        # Takes half the time of masked_fill(), but the host would wait for a device.
        copied = grad.clone(memory_format=torch.contiguous_format)
        return copied.index_fill_(0, removed.nonzero().view(-1), 0)
