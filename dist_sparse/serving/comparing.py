"""Writing a delta: rows are compared with the rows of an artifact and its deltas.

``export()`` passes the same tensors in the same order as for an artifact.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_sparse.checks import hex_of
from dist_sparse.masking.masks import places_of, positions
from dist_sparse.serving.artifact import (
    ArtifactWriter,
    all_kept,
    buffer_of,
    checksum,
    file_bytes,
    rows_of,
    sum_of_rows,
    words_of,
)
from dist_sparse.serving.chain import Chain, MappedTable
from dist_sparse.serving.encodings import Tensors, chunks
from dist_sparse.serving.manifest import Delta, Manifest, Table, TableDelta
from dist_sparse.serving.sources import ServedTables

# How many bytes of spooled rows are read at once.
_SPOOL_BYTES = 8 << 20


class ComparingWriter(ArtifactWriter):
    """Compares tables with a chain of artifact and deltas, and writes what differs: a delta.

    The header of the file has the number of changed rows, which is known at the end. Until then
    changed rows are in temporary files.

    Args:
        path: the final name.
        manifest: the manifest of the artifact after the delta, without checksums.
        chain: the artifact and the deltas that the delta follows.
        sources: the tables, by name. If writes to a table were recorded, only the chain's written
            rows are read. So rows are not verified, but bitmaps and ids are.
    """

    def __init__(self, path: Path, manifest: Manifest, chain: Chain, sources: ServedTables) -> None:
        for name, source in sources.items():
            chain.artifact.verify_table(name, rows=not source.is_noted)
            for delta in chain.deltas:
                delta.verify_table(name, rows=not source.is_noted)
        super().__init__(path)
        self._manifest, self._chain = manifest, chain
        self._tables: dict[str, _Changes] = {}

    def add(self, table: str, parts: Tensors, ids: Tensor | None = None) -> None:
        """Compare the next rows of a table. Its tensors that are not rows come first, without
        ``ids``."""
        if ids is not None:
            self._tables[table].add(ids, parts)
            return
        before, after = self._chain.table(table), self._manifest.tables[table]
        self._tables[table] = _Changes(before, after, parts, self.folder)

    def finish(self, manifest: Any) -> Any:
        """Write and publish the changes, and return the manifest of the delta.

        Args:
            manifest: the manifest of the artifact after the delta, without checksums.
        """
        tables = {name: changes.result() for name, changes in self._tables.items()}
        after = {name: table.after for name, table in tables.items()}
        artifact = replace(manifest, tables=after, bytes=file_bytes(after))
        self.begin(tables)
        for name, changes in self._tables.items():
            for key, part in changes.parts():
                self.append(f"{name}.{key}", part)
        base = self._chain.artifact.manifest.hash
        previous = self._chain.manifest.hash
        return super().finish(Delta(base=base, previous=previous, artifact=artifact, tables=tables))


class _Changes:
    """Finds the changes of a table, while its rows are streamed.

    Args:
        before: the table before the delta.
        after: the manifest's entry after the delta, without checksums.
        whole: the tensors after the delta that are not rows, including ``kept``.
        folder: where temporary files are written.
    """

    def __init__(self, before: MappedTable, after: Table, whole: Tensors, folder: Path) -> None:
        self._before, self._after, self._whole = before, after, whole
        words = whole.get("kept", all_kept(after.rows))
        self._removed = positions((before.index.words & ~words).view(torch.uint8))
        self._replaced = {
            key: whole[key]
            for key, tensor in before.whole.items()
            # torch.equal() would not see the sign of a zero.
            if checksum(whole[key]) != checksum(tensor)
        }
        self._added = 0
        # torch.cat() refuses an empty list.
        self._ids = [torch.empty(0, dtype=torch.int32)]
        self._spools, self._sums = {}, {}
        for key in before.gather(self._removed[:0]):
            # The file stays open until the delta is written. As long as it is small it is not a
            # file on disk yet, because there may be more tables than a process may open files.
            self._spools[key] = tempfile.SpooledTemporaryFile(1 << 16, dir=str(folder))  # noqa: SIM115
            self._sums[key] = int(before.entry.checksums[key], 16)
        # The checksum is a sum over rows, so unchanged rows need not be read: removed rows are
        # subtracted here; add() subtracts old values of changed rows, and adds the new ones. In
        # parts, because most of the table may be removed.
        for rows in chunks(len(self._removed), after.dim):
            ids = self._removed[rows]
            for key, part in before.gather(ids).items():
                self._sums[key] -= sum_of_rows(ids, part)

    def add(self, ids: Tensor, parts: Tensors) -> None:
        had_row = rows_of(self._before.index, ids) >= 0
        # By places: index_select() is 3x faster than indexing rows with flags.
        had = places_of(had_row)
        old, is_changed = self._before.gather(ids[had]), ~had_row
        for key, part in parts.items():
            differs = words_of(part.index_select(0, had)) != words_of(old[key])
            is_changed[had] |= differs.any(1)
        self._added += len(ids) - len(had)
        changed, replaced = places_of(is_changed), places_of(is_changed[had])
        self._ids.append(ids[changed].int())
        for key, part in parts.items():
            new = part.index_select(0, changed)
            old_sum = sum_of_rows(ids[had[replaced]], old[key].index_select(0, replaced))
            self._sums[key] = checksum(new, ids[changed], self._sums[key] - old_sum)
            self._spools[key].write(buffer_of(new))

    def result(self) -> TableDelta:
        sums = self._sums | {key: checksum(part) for key, part in self._whole.items()}
        checksums = {key: hex_of(sums[key] % 2**64) for key in self._after.layout()}
        return TableDelta(
            after=replace(self._after, checksums=checksums),
            rows=sum(map(len, self._ids)),
            came=self._added,
            gone=len(self._removed),
            whole=tuple(self._replaced),
        )

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the delta in parts; rows are bytes."""
        yield "ids", torch.cat(self._ids)
        yield "gone", self._removed.int()
        yield from self._replaced.items()
        for key, spool in self._spools.items():
            with spool:
                spool.seek(0)
                while raw := spool.read(_SPOOL_BYTES):
                    yield key, torch.frombuffer(bytearray(raw), dtype=torch.uint8)
