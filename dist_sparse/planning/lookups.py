"""Ids that batches look up, counted by table: their own form, TorchRec's containers or mappings, does not matter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dist_sparse.tables.shards import ShardedData

__all__ = ["TableIds", "read_ids"]

_PENDING = 1 << 20
"""Ids to collect before they are counted."""


class TableIds:
    """Ids for one table of ``rows`` rows, and how often each occurs."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._ids = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.int64)
        self._waiting: list[Tensor] = []

    def add(self, ids: Tensor) -> None:
        """Count ``ids``, integers of any shape."""
        self._waiting.append(ids.detach().flatten().to("cpu", torch.int64, copy=True))
        if sum(part.numel() for part in self._waiting) >= _PENDING:
            self._merge()

    def counted(self) -> tuple[Tensor, Tensor]:
        """Return the distinct ids, ascending, and how often each occurs; int64."""
        self._merge()
        return self._ids, self._counts

    def _merge(self) -> None:
        if not self._waiting:
            return
        new, times = torch.unique(torch.cat(self._waiting), return_counts=True)
        self._waiting = []
        self._ids, place = torch.unique(torch.cat([self._ids, new]), return_inverse=True)
        counts = torch.cat([self._counts, times])
        self._counts = torch.zeros(self._ids.numel(), dtype=torch.int64).index_add_(0, place, counts)


def read_ids(batches: Iterable[Any], located: Mapping[str, ShardedData]) -> tuple[int, dict[str, TableIds]]:
    """Return the number of batches and their ids by table. Local.

    Args:
        batches: as for :func:`~dist_sparse.planning.dry_run.dry_run`.
        located: the tables, with the features that look them up; a table without features has its own name as one.

    Raises:
        ValueError: a batch has no ids for any of the tables, or a feature twice, or ids that are not integers or not in
            their table.
    """
    tables = {name: TableIds(data.shape[0]) for name, data in located.items()}
    of: dict[str, list[str]] = {}
    for name, data in located.items():
        for feature in data.features:
            of.setdefault(feature, []).append(name)
    of = {name: [name] for name in located} | of
    number = 0
    for number, batch in enumerate(batches, start=1):
        seen: set[str] = set()
        for key, ids in _ids_in(batch):
            if key not in of:
                continue
            if key in seen:
                raise ValueError(
                    f"Batch {number} has ids of {key!r} twice: use a mapping from table names to ids instead."
                )
            seen.add(key)
            for name in of[key]:
                _check_ids(number, key, ids, name, tables[name].rows)
                tables[name].add(ids)
        if not seen:
            raise ValueError(
                f"Batch {number}, of type {type(batch).__name__}, has no ids for any of the tables: must hold "
                f"KeyedJaggedTensors or mappings with some of the keys {sorted(of)}."
            )
    return number, tables


def _check_ids(number: int, key: str, ids: Tensor, name: str, rows: int) -> None:
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"Batch {number}: {key!r} has ids of type {ids.dtype}; they must be integers.")
    if ids.numel():
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= rows:
            raise ValueError(
                f"Batch {number}: {key!r} has ids from {int(low)} to {int(high)}; must be in [0, {rows}), "
                f"the rows of table {name!r}."
            )


def _ids_in(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield keys and ids of the KeyedJaggedTensors and mappings in a batch."""
    if _is_keyed(batch) or isinstance(batch, Mapping):
        yield from _keyed(batch)
        return
    parts = batch if isinstance(batch, (tuple, list)) else vars(batch).values() if hasattr(batch, "__dict__") else ()
    for part in parts:
        if _is_keyed(part) or isinstance(part, Mapping):
            yield from _keyed(part)


def _is_keyed(thing: Any) -> bool:
    """Return whether it has the interface of a KeyedJaggedTensor: torchrec may not be installed."""
    return hasattr(thing, "offset_per_key") and hasattr(thing, "keys") and hasattr(thing, "values")


def _keyed(holder: Any) -> Iterator[tuple[str, Tensor]]:
    if _is_keyed(holder):
        ends, values = holder.offset_per_key(), holder.values()
        for place, key in enumerate(holder.keys()):
            yield key, values[ends[place] : ends[place + 1]]
        return
    for key, ids in holder.items():
        if isinstance(ids, Tensor):
            yield key, ids
        elif callable(getattr(ids, "values", None)) and isinstance(ids.values(), Tensor):
            yield key, ids.values()
