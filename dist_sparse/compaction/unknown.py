"""Lookups of ids that are out of the range of their table: found, counted, and described.

The caller decides what becomes of such an id: an error, a line in the log, or nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Unknown", "UnknownLookups"]


@dataclass(frozen=True)
class Unknown:
    """Lookups of a table in one batch by ids that it does not have.

    Args:
        table, rows: the table, and how many rows it had originally.
        id: the first of the ids.
        lookups: how many there are.
    """

    table: str
    rows: int
    id: int
    lookups: int

    def __str__(self) -> str:
        return (
            f"id {self.id} of table {self.table!r}, which has {self.rows} rows"
            f" ({self.lookups} such lookups in this batch)"
        )


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

    def add(self, ids: Tensor, unknown: Tensor, lengths: Sequence[int]) -> list[Unknown]:
        """Count the lookups of a batch, and return those of each table that has some.

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
        batch = []
        for table, some_ids in found.items():
            ids = torch.cat(some_ids)
            self.counts[table] += len(ids)
            batch.append(Unknown(table, self._rows[table], int(ids[0]), len(ids)))
        return batch
