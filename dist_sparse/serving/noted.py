"""Rows that training has written since the last delta, where an attached enforcer notes them.

The next delta streams these rows alone. Nothing is noted of tables without a fused optimizer, on an
accelerator, rotated, or made compact: all of their rows are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dist_sparse.compaction.kept_rows import gather_rows
from dist_sparse.groups import Group
from dist_sparse.masking.cached.kept_scores import Written
from dist_sparse.serving.sources import Lookups, ServedTable
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.shards import Rect, ShardedData

_READER: Final = "deltas"


@dataclass(frozen=True)
class _Note:
    """The artifact that the last delta led to, and the rows that it keeps of each table."""

    artifact: str
    kept: Mapping[str, Tensor]


_NOTES: Final[WeakKeyDictionary[BaseDataSparsifier, _Note]] = WeakKeyDictionary()


def with_changes(
    tables: Mapping[str, ServedTable],
    sparsifier: BaseDataSparsifier,
    registered: Mapping[str, ShardedData],
    lookups: Lookups,
    previous: str | None,
    world: Group,
) -> dict[str, ServedTable]:
    """Return the tables with the rows that may differ from an artifact. Collective.

    Args:
        previous: the hash of the artifact, on rank 0.
    """
    note = _NOTES.get(sparsifier)
    each = world.all_gather_json([previous, note and note.artifact])
    # Rank 0 alone has read the artifact.
    is_noted = all(noted == each[0][0] for _, noted in each)
    if note is None or not is_noted or sparsifier.masks.rotation is not None:
        return dict(tables)
    records = _records(sparsifier)
    found = dict(tables)
    for names in sparsifier.masks.tables.groups.values():
        # Rows of a compact table are not its ids.
        fit = [registered[name] for name in names if name in tables and name not in lookups.indexes]
        written = gather_rows(fit, partial(_flags, records)) if fit else {}
        for name, rows in written.items():
            found[name] = replace(tables[name], changed=rows | ~note.kept[name])
    return found


def note_delta(
    artifact: str, tables: Mapping[str, ServedTable], sparsifier: BaseDataSparsifier
) -> None:
    """From now on note what training writes; ``artifact`` is the hash of the one that has just been
    made. Local."""
    for record in _records(sparsifier).values():
        record.clear()
    kept = {name: table.kept for name, table in tables.items()}
    _NOTES[sparsifier] = _Note(artifact, kept)


def _records(sparsifier: BaseDataSparsifier) -> Mapping[int, Written]:
    enforcer = sparsifier.masks.enforcer
    return {} if enforcer is None else enforcer.written(_READER)


def _flags(records: Mapping[int, Written], data: ShardedData, rect: Rect) -> Tensor:
    [shard, *_] = [shard for shard in data.shards if shard.rect == rect]
    record = records.get(shard.tensor.data_ptr())
    rows = None if record is None else record.rows()
    # Where nothing is noted, any row may have been written.
    flags = torch.full((rect.rows,), rows is None)
    if rows is not None:
        flags[rows] = True
    return flags
