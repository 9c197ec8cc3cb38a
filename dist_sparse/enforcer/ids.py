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

__all__ = ["KeptIds", "worth_dropping"]

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
