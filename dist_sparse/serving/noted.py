"""Rows that training has written since the last delta, where an attached enforcer notes them.

The next delta streams these rows alone. Nothing is noted of tables without a fused optimizer, on an
accelerator, rotated, or made compact: all of their rows are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dist_sparse.compaction.kept_rows import gather_rows
from dist_sparse.masking.kept_scores import Written
from dist_sparse.serving.sources import ServedTable
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.shards import Rect, ShardedData

_READER: Final = "deltas"


@dataclass(frozen=True)
class _Note:
    """The last delta and the folders before it, the hash of the artifact that it led to, and the
    rows that it keeps of each table."""

    folders: tuple[Path, ...]
    artifact: str
    kept: Mapping[str, Tensor]


_NOTES: Final[WeakKeyDictionary[BaseDataSparsifier, _Note]] = WeakKeyDictionary()


def with_changes(
    tables: dict[str, ServedTable],
    sparsifier: BaseDataSparsifier,
    registered: Mapping[str, ShardedData],
    before: tuple[Path, ...],
) -> dict[str, ServedTable]:
    """Return the tables with the rows that may have changed since the last delta, if it is the last
    of the folders ``before``. Collective."""
    note, records = _NOTES.get(sparsifier), _records(sparsifier)
    if note is None or records is None or note.folders != before:
        return tables
    found = dict(tables)
    for names in sparsifier.masks.tables.groups.values():
        # A rotation changes rows that no lookup names, and rows of a compact table are not ids.
        fit = [registered[name] for name in names if name in tables and tables[name].is_plain]
        written = gather_rows(fit, partial(_flags, records)) if fit else {}
        for name, rows in written.items():
            rows |= ~note.kept[name]
            if int(rows.count_nonzero()) < len(rows):
                found[name] = replace(tables[name], changed=rows)
    return found


def refuse_replaced(
    sparsifier: BaseDataSparsifier, before: tuple[Path, ...], artifact: str
) -> None:
    """Refuse folders that hold another artifact than the last delta led to. Local."""
    note = _NOTES.get(sparsifier)
    if note is not None and note.folders == before and note.artifact != artifact:
        raise ValueError(f"{before[-1]} is refused: it was replaced since this process wrote it.")


def note_delta(
    folders: tuple[Path, ...],
    artifact: str,
    tables: Mapping[str, ServedTable],
    sparsifier: BaseDataSparsifier,
) -> None:
    """From now on note what training writes. Local.

    Args:
        folders: the delta that has just been written, last, and the ones before it.
        artifact: the hash of the artifact that it leads to.
    """
    records = _records(sparsifier) or {}
    for record in records.values():
        record.clear()
    kept = {name: table.kept for name, table in tables.items()}
    _NOTES[sparsifier] = _Note(folders, artifact, kept)


def _records(sparsifier: BaseDataSparsifier) -> Mapping[int, Written] | None:
    """The rows written by the address of the weights; None without an enforcer."""
    enforcer = sparsifier.masks.enforcer
    return None if enforcer is None else enforcer.written(_READER)


def _flags(records: Mapping[int, Written], data: ShardedData, rect: Rect) -> Tensor:
    [shard, *_] = [shard for shard in data.shards if shard.rect == rect]
    record = records.get(shard.tensor.data_ptr())
    rows = None if record is None else record.rows()
    # Where nothing is noted, any row may have been written.
    flags = torch.full((rect.rows,), rows is None)
    if rows is not None:
        flags[rows] = True
    return flags
