"""The two things that `export()` writes from streamed tables: a whole artifact, and a delta.

Both get the same tensors in the same order, are read back, and published.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from dist_sparse.compaction.row_index import REMOVED, RowIndex
from dist_sparse.serving.artifact import ArtifactWriter, Verified, bytes_of, memory_of
from dist_sparse.serving.check import Chain, MappedTable
from dist_sparse.serving.delta import PER_ROW, Delta, TableDelta, hash_of
from dist_sparse.serving.in_place import rows_of
from dist_sparse.serving.manifest import Manifest, Table
from dist_sparse.serving.sources import ServedTable

_PIECE: Final = 8 << 20  # bytes of spooled rows that are read at once


class WholeWriter(ArtifactWriter):
    """Writes an artifact; as a context manager it deletes one that was not published.

    Args:
        path: the final name.
        manifest: without CRC32s.
        sources: the tables, by name.

    Raises:
        ValueError, OSError: as of :class:`ArtifactWriter`.
    """

    def __init__(self, path: Path, manifest: Manifest, sources: Mapping[str, ServedTable]) -> None:
        super().__init__(path, manifest.tables)
        self._manifest, self._sources = manifest, sources

    def start(self, name: str, whole: Mapping[str, Tensor]) -> None:
        """Begin a table with its tensors that are no rows."""
        if "kept" in self._manifest.tables[name].layout():
            self.append(f"{name}.kept", RowIndex.of(self._sources[name].kept).words)
        for key, tensor in whole.items():
            self.append(f"{name}.{key}", tensor)

    def add(self, name: str, ids: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Write the next rows of a table; ``ids`` as of :meth:`ServedTable.ids`."""
        for key, part in parts.items():
            self.append(f"{name}.{key}", part)

    def finish(self) -> Manifest:
        """Read the tables back, give the folder its name, and return its manifest."""
        manifest = self.seal(self._manifest)
        chain = Chain(Verified(self.folder, manifest))
        for name, source in self._sources.items():
            _refuse_other_ids(name, chain.table(name), source)
        self.publish(manifest)
        return manifest


class DeltaWriter(ArtifactWriter):
    """Writes what changed since a chain: the same methods as :class:`WholeWriter`.

    Changed rows wait in files without a name, beside the delta: the format begins with their
    number, which is known at the end.

    Args:
        path: the final name.
        manifest: of the whole artifact, without CRC32s.
        sources: the tables, by name.
        chain: what the delta follows.
    """

    def __init__(
        self, path: Path, manifest: Manifest, sources: Mapping[str, ServedTable], chain: Chain
    ) -> None:
        super().__init__(path)
        self._manifest, self._sources, self._chain = manifest, sources, chain
        self._tables: dict[str, _Changes] = {}

    def start(self, name: str, whole: Mapping[str, Tensor]) -> None:
        self._tables[name] = _Changes(
            self._chain.table(name),
            self._manifest.tables[name],
            self._sources[name].kept,
            whole,
            self.folder,
        )

    def add(self, name: str, ids: Tensor, parts: Mapping[str, Tensor]) -> None:
        self._tables[name].add(ids, parts)

    def finish(self) -> Delta:
        found = {name: changes.result() for name, changes in self._tables.items()}
        self.begin(found)
        for name, changes in self._tables.items():
            for key, part in changes.parts():
                self.append(f"{name}.{key}", part)
        delta = self.seal(
            Delta(
                base=hash_of(self._chain.artifact.manifest),
                previous=hash_of(self._chain.manifest),
                artifact=self._manifest,
                tables=found,
            )
        )
        # Base and deltas are read as they will be served: this gives the CRC32s of the artifact
        # that a whole export would write.
        chain = replace(self._chain, deltas=(*self._chain.deltas, Verified(self.folder, delta)))
        tables = {}
        for name, source in self._sources.items():
            table = chain.table(name)
            _refuse_other_ids(name, table, source)
            tables[name] = replace(table.entry, crc32=table.crc32())
        artifact = replace(self._manifest, tables=tables, bytes=bytes_of(tables))
        delta = replace(delta, artifact=artifact)
        self.publish(delta)
        return delta


class _Changes:
    """What changed in a table, found as its rows go by.

    Args:
        before: the table that the delta follows.
        after: without CRC32s.
        kept: bool ``(rows,)``.
        whole: tensors that are no rows.
        folder: of files without a name.
    """

    def __init__(
        self,
        before: MappedTable,
        after: Table,
        kept: Tensor,
        whole: Mapping[str, Tensor],
        folder: Path,
    ) -> None:
        self._before, self._after = before, after
        self._gone = (before.index.kept() & ~kept).nonzero().int().flatten()
        self._whole = {
            key: tensor
            for key, tensor in whole.items()
            if not torch.equal(tensor, before.whole[key])
        }
        self._came = 0
        self._found = [torch.empty(0, dtype=torch.int32)]
        keys = [key for key in PER_ROW if key in after.layout()]
        # Open until the delta is written.
        self._spools = {key: tempfile.TemporaryFile(dir=folder) for key in keys}  # noqa: SIM115

    def add(self, ids: Tensor, parts: Mapping[str, Tensor]) -> None:
        rows = rows_of(self._before.index, ids)
        is_new = rows == REMOVED
        changed = is_new.clone()
        if self._before.entry.stored:
            # Of ids without a row before it is any.
            old = self._before.gather(rows.clamp(min=0))
            for key, part in parts.items():
                changed |= (_words(part) != _words(old[key])).any(1)
        self._came += int(is_new.count_nonzero())
        self._found.append(ids[changed].int())
        for key, part in parts.items():
            held = part[changed]
            self._spools[key].write(memory_of(held))

    def result(self) -> TableDelta:
        return TableDelta(
            after=self._after,
            rows=sum(map(len, self._found)),
            came=self._came,
            gone=len(self._gone),
            whole=tuple(self._whole),
        )

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the delta, rows as bytes and a few at a time."""
        yield "ids", torch.cat(self._found)
        yield "gone", self._gone
        yield from self._whole.items()
        for key, spool in self._spools.items():
            with spool:
                spool.seek(0)
                while raw := spool.read(_PIECE):
                    yield key, torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _refuse_other_ids(name: str, table: MappedTable, source: ServedTable) -> None:
    """Refuse a written table that keeps other ids than the model."""
    if len(wrong := (table.index.kept() != source.kept).nonzero()):
        raise ValueError(f"Table {name!r}: not the kept ids were written: {wrong[:1].tolist()}.")


def _words(rows: Tensor) -> Tensor:
    """The bytes of rows as few integers: -0.0 is not 0.0."""
    raw = rows.contiguous().view(torch.uint8)
    for dtype in (torch.int64, torch.int32):
        if raw.shape[1] % dtype.itemsize == 0:
            return raw.view(dtype)
    return raw
