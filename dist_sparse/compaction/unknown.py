"""Lookups of ids that are out of the range of their table: found, counted, and described.

The caller decides what becomes of such an id: an error, a line in the log, or nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["UnknownLookups"]


class UnknownLookups:
    """Counts, by table, the lookups of ids that are out of range.

    Args:
        rows: of each original table.
        features: for each feature, the name of its table.

    Attributes:
        counts: lookups so far by table, 0 of tables that had none.
    """

    def __init__(self, rows: Mapping[str, int], features: Sequence[str]) -> None:
        self._rows = dict(rows)
        self._features = list(features)
        self.counts = dict.fromkeys(rows, 0)

    def add(self, ids: Tensor, unknown: Tensor, lengths: Sequence[int]) -> dict[str, str]:
        """Count the lookups of a batch, and return a description of those of each table that has
        some: how many there are, and the first id.

        Args:
            ids: ``(n,)``, feature after feature.
            unknown: bool ``(n,)``, which of them are out of range.
            lengths: how many ids each feature has; they add up to n.
        """
        # A table may have several features.
        found: defaultdict[str, list[Tensor]] = defaultdict(list)
        sizes = list(lengths)
        parts = zip(
            self._features, torch.split(ids, sizes), torch.split(unknown, sizes), strict=True
        )
        for table, some, flags in parts:
            if bool(flags.any()):
                found[table].append(some[flags])
        described = {}
        for table, some_ids in found.items():
            ids = torch.cat(some_ids)
            self.counts[table] += len(ids)
            described[table] = (
                f"id {int(ids[0])} of table {table!r}, which has {self._rows[table]} rows"
                f" ({len(ids)} such lookups in this batch)"
            )
        return described
