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
from dist_sparse.serving.check import Chain
from dist_sparse.serving.delta import hash_of
from dist_sparse.serving.manifest import Manifest, Table
from dist_sparse.serving.sources import ServedTable
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
    manifest: Manifest,
    chain: Chain | None,
    world: Group,
) -> dict[str, ServedTable]:
    """Return the tables with the rows that may differ from the artifact of ``chain``, which rank 0
    alone has opened. Collective."""
    note = _NOTES.get(sparsifier, _Note("", {}))
    previous = None if chain is None else hash_of(chain.manifest)
    records = _records(sparsifier)
    each = world.all_gather_json([previous, None if records is None else note.artifact])
    found = dict(tables)
    if records is None or {noted for _, noted in each} != {each[0][0]}:
        return found
    noted = {name for name, table in tables.items() if _has_notes(table, manifest.tables[name])}
    for names in sparsifier.masks.tables.groups.values():
        fit = [registered[name] for name in names if name in noted]
        written = gather_rows(fit, partial(_flags, records)) if fit else {}
        for name, rows in written.items():
            found[name] = replace(tables[name], changed=rows | ~note.kept[name])
    return found


def _has_notes(table: ServedTable, entry: Table) -> bool:
    """Whether rows that were not written are stored as they were. A rotation, new codes and new
    scales of columns change others, and rows of a compact table are not its ids."""
    as_they_are = entry.scale == "row" and table.codes is None and table.rotation is None
    return as_they_are and table.kept is table.stored


def note_delta(
    artifact: Manifest, tables: Mapping[str, ServedTable], sparsifier: BaseDataSparsifier
) -> None:
    """From now on note what training writes; ``artifact`` is the one that has just been made.
    Local."""
    records = _records(sparsifier)
    if records is not None:
        for record in records.values():
            record.clear()
        kept = {name: table.kept for name, table in tables.items()}
        _NOTES[sparsifier] = _Note(hash_of(artifact), kept)


def _records(sparsifier: BaseDataSparsifier) -> Mapping[int, Written] | None:
    """The rows written by the address of the weights; None if nothing is noted."""
    enforcer = sparsifier.masks.enforcer
    # A rotation writes rows that no lookup names.
    if enforcer is None or sparsifier.masks.rotation is not None:
        return None
    return enforcer.written(_READER)


def _flags(records: Mapping[int, Written], data: ShardedData, rect: Rect) -> Tensor:
    [shard, *_] = [shard for shard in data.shards if shard.rect == rect]
    record = records.get(shard.tensor.data_ptr())
    rows = None if record is None else record.rows()
    # Where nothing is noted, any row may have been written.
    flags = torch.full((rect.rows,), rows is None)
    if rows is not None:
        flags[rows] = True
    return flags
