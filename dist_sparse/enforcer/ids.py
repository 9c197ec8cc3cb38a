"""Removed rows, dealt with by their ids alone: the rows are neither zeroed nor watched.

A row that is removed whole is a row of zeros, and stays one if no optimizer moves it. Where rows
are added up on a CPU, its ids are dropped before the lookup: they are not read and get no gradient,
and all others keep their order, so that sums and updates are the same, bit for bit. Elsewhere its
ids weigh nothing: on a device the host would have to wait, in every forward, for the number of
remaining ids; a mean counts them; a sequence has a place for each.
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

_WORTH: Final = 4
"""A mask that also removes parts of rows needs zeroing anyway: ids are dropped only if it removes
at least one row in so many whole."""


def worth_dropping(kept: Tensor) -> bool:
    """Return whether a mask that removes parts of rows removes enough rows as a whole for their ids
    to be dropped. ``kept``, bool ``(rows,)``, are those of which something is left."""
    return (len(kept) - int(kept.sum())) * _WORTH >= len(kept)


class KeptIds:
    """Which ids of a kernel's features name a row that is not removed.

    Args:
        kept: by the number of the table, which of its rows are not removed: bool ``(rows,)``. All
            ids of the other tables are kept.
        features: for each feature the number of its table.
        device: of the tables.
    """

    def __init__(
        self, kept: Mapping[int, Tensor], features: Sequence[int], device: torch.device
    ) -> None:
        self._kept, self._features, self._device = kept, list(features), device

    @cached_property
    def _at_once(self) -> tuple[FlatRows, Tensor]:
        """The flags of all tables in one tensor: on a device each read is a launch."""
        rows = {table: len(kept) for table, kept in self._kept.items()}
        flat = FlatRows(rows, self._features, self._device)
        flags = torch.ones(flat.total + 1, dtype=torch.bool, device=self._device)
        for table, start in flat.starts.items():
            flags[start : start + rows[table]] = self._kept[table]
        return flat, flags

    def flags(self, ids: Tensor, ends: Sequence[int] | Tensor) -> Tensor:
        """Return which ids are kept, bool ``(n,)``, with row 0 for ids outside of their table;
        both arguments as in :class:`~dist_sparse.enforcer.rows.RowCleaner`."""
        if isinstance(ends, Tensor):
            flat, flags = self._at_once
            return flags.index_select(0, flat.of(ids, ends))
        found = torch.ones(ids.numel(), dtype=torch.bool)
        for table, (start, stop) in zip(self._features, pairwise(ends), strict=True):
            kept = self._kept.get(table)
            if kept is not None and start != stop:
                rows = in_table(ids[start:stop], len(kept))
                torch.index_select(kept, 0, rows, out=found[start:stop])
        return found

    def among(self, features: Any) -> Any:
        """Return a KeyedJaggedTensor like ``features`` with the ids that are kept, and their
        weights; itself if an id is outside of its table: FBGEMM decides what that means (an error,
        or a warning and row 0). Gradients flow back to the weights, 0 to those of dropped ids."""
        chosen = self._chosen(features.values(), features.length_per_key())
        if chosen is None:
            return features
        torchrec = torchrec_port()
        assert torchrec is not None  # it has made the features
        return torchrec.among(features, chosen)

    def _chosen(self, ids: Tensor, counts: list[int]) -> Tensor | None:
        """Return which ids to pass on, bool ``(n,)``; None if one is outside of its table."""
        chosen = []
        try:
            for table, part in zip(self._features, torch.split(ids, counts), strict=True):
                kept = self._kept.get(table)
                if kept is None:
                    chosen.append(torch.ones(part.shape, dtype=torch.bool))
                else:
                    # index_select checks the range of every id: no pass of its own has to.
                    chosen.append(kept.index_select(0, part))
        except IndexError:
            return None
        return torch.cat(chosen)
