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

from dist_sparse.checks import hex_of
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.serving.artifact import ArtifactWriter, Opened, added, bytes_of, memory_of
from dist_sparse.serving.check import Chain, MappedTable
from dist_sparse.serving.delta import Delta, TableDelta
from dist_sparse.serving.manifest import Manifest, Table
from dist_sparse.serving.rows import PER_ROW, has_row, ids_of, sum_of_rows, words_of
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
            self.append(f"{name}.{key}", part, ids)

    def finish(self) -> Manifest:
        """Read the tables back, give the folder its name, and return its manifest."""
        manifest = self.seal(self._manifest)
        Opened(self.folder, manifest).verify()
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
        chain: what the delta follows. It is verified but for the tables whose changes are noted:
            of these no row is read that was not written.
    """

    def __init__(
        self, path: Path, manifest: Manifest, sources: Mapping[str, ServedTable], chain: Chain
    ) -> None:
        chain.verify(name for name, source in sources.items() if source.changed is None)
        super().__init__(path)
        self._manifest, self._sources, self._chain = manifest, sources, chain
        self._tables: dict[str, _Changes] = {}

    def start(self, name: str, whole: Mapping[str, Tensor]) -> None:
        self._tables[name] = _Changes(
            self._chain.table(name),
            self._manifest.tables[name],
            RowIndex.of(self._sources[name].kept).words,
            whole,
            self.folder,
        )

    def add(self, name: str, ids: Tensor, parts: Mapping[str, Tensor]) -> None:
        self._tables[name].add(ids, parts)

    def finish(self) -> Delta:
        found = {name: changes.result() for name, changes in self._tables.items()}
        after = {name: change.after for name, change in found.items()}
        artifact = replace(self._manifest, tables=after, bytes=bytes_of(after))
        self.begin(found)
        for name, changes in self._tables.items():
            for key, part in changes.parts():
                self.append(f"{name}.{key}", part)
        base, previous = self._chain.artifact.manifest.hash, self._chain.manifest.hash
        delta = self.seal(Delta(base=base, previous=previous, artifact=artifact, tables=found))
        Opened(self.folder, delta).verify()
        self.publish(delta)
        return delta


class _Changes:
    """What changed in a table, found as its rows go by.

    Args:
        before: the table that the delta follows.
        after: without checksums.
        words: the bitmap of the ids that are kept now.
        whole: tensors that are no rows.
        folder: of files without a name.
    """

    def __init__(
        self,
        before: MappedTable,
        after: Table,
        words: Tensor,
        whole: Mapping[str, Tensor],
        folder: Path,
    ) -> None:
        self._before, self._after, self._words = before, after, words
        self._gone = torch.cat([ids for _, ids in ids_of(before.words & ~words, after.rows)])
        self._now = dict(whole)
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
        # Of the rows that stay, come and go: the rows of the artifact before are not read for it.
        self._sums = {key: int(before.entry.checksums[key], 16) for key in keys}
        self._take_out(self._gone, before.gather(self._gone))

    def _take_out(self, ids: Tensor, parts: Mapping[str, Tensor]) -> None:
        for key, part in parts.items():
            self._sums[key] -= sum_of_rows(ids, part)

    def add(self, ids: Tensor, parts: Mapping[str, Tensor]) -> None:
        had_one = has_row(self._before.words, ids, self._after.rows)
        old, changed = self._before.gather(ids[had_one]), ~had_one
        for key, part in parts.items():
            differs = words_of(part[had_one]) != words_of(old[key])
            changed[had_one] |= differs.any(1)
        still = changed[had_one]
        self._take_out(ids[had_one & changed], {key: part[still] for key, part in old.items()})
        self._came += len(ids) - int(had_one.count_nonzero())
        self._found.append(ids[changed].int())
        for key, part in parts.items():
            held = part[changed]
            self._sums[key] = added(self._sums[key], held, ids[changed])
            self._spools[key].write(memory_of(held))

    def result(self) -> TableDelta:
        sums = {key: each % 2**64 for key, each in self._sums.items()}
        for key, tensor in {"kept": self._words, **self._now}.items():
            sums[key] = added(0, tensor, None)
        checksums = {key: hex_of(sums[key]) for key in self._after.layout()}
        return TableDelta(
            after=replace(self._after, checksums=checksums),
            rows=sum(map(len, self._found)),
            came=self._came,
            gone=len(self._gone),
            whole=tuple(self._whole),
        )

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the delta, rows as bytes and a few at a time."""
        yield "ids", torch.cat(self._found)
        yield "gone", self._gone.int()
        yield from self._whole.items()
        for key, spool in self._spools.items():
            with spool:
                spool.seek(0)
                while raw := spool.read(_PIECE):
                    yield key, torch.frombuffer(bytearray(raw), dtype=torch.uint8)
