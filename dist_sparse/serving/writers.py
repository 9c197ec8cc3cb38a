"""The two things that `export()` writes from streamed tables: a whole artifact, and a delta.

Both get the same tensors in the same order, are sealed, compared with the model, and published.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.files import hex_of
from dist_sparse.serving.artifact import (
    ArtifactWriter,
    VerifiedArtifact,
    VerifiedDelta,
    bytes_of,
    memory_of,
)
from dist_sparse.serving.check import Chain, MappedTable, TableCheck, index_of
from dist_sparse.serving.codes import Rows
from dist_sparse.serving.delta import PER_ROW, Delta, TableDelta, hash_of
from dist_sparse.serving.manifest import Manifest, Table
from dist_sparse.serving.sources import ServedTable

_PIECE: Final = 8 << 20  # bytes of spooled rows that are read at once


class _Writer:
    """A context manager that deletes a folder that was not published."""

    _writer: ArtifactWriter

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.__exit__(kind, error, trace)


class WholeWriter(_Writer):
    """Writes an artifact; as a context manager it deletes one that was not published.

    Args:
        path: the final name.
        manifest: without CRC32s and checks.

    Raises:
        ValueError, OSError: as of :class:`ArtifactWriter`.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._writer = ArtifactWriter(path, manifest.tables)
        self._manifest = manifest

    def start(self, name: str, kept: Tensor) -> None:
        """Begin a table; ``kept`` is bool ``(rows,)``."""
        if "kept" in self._manifest.tables[name].layout():
            self.add_whole(name, "kept", RowIndex.of(kept).words)

    def add_whole(self, name: str, key: str, tensor: Tensor) -> None:
        """Write a tensor of a table that has no rows."""
        self._writer.append(f"{name}.{key}", tensor)

    def add_rows(self, name: str, rows: Rows) -> None:
        """Write the next kept rows of a table."""
        for key, part in _parts(rows).items():
            self._writer.append(f"{name}.{key}", part)

    def seal(self) -> None:
        """Bring the tables to disk."""
        self._manifest = self._writer.seal(self._manifest)
        self._artifact = VerifiedArtifact(self._writer.folder, self._manifest)

    def check(self, name: str, source: ServedTable) -> TableCheck:
        """Return the comparison of a sealed table with the model's."""
        return TableCheck(self._artifact, name, source.kept, source.rotation, source.books)

    def publish(self, checks: Mapping[str, Mapping[str, int | float]]) -> str:
        """Give the folder its name, and return the text of its manifest."""
        self._manifest = _checked(self._manifest, checks)
        self._writer.publish(self._manifest)
        return self._manifest.to_text()


class DeltaWriter(_Writer):
    """Writes what changed since a chain: the same methods as :class:`WholeWriter`.

    Changed rows wait in files without a name, beside the delta: the format begins with their
    number, which is known at the end.

    Args:
        path: the final name.
        manifest: of the whole artifact, without CRC32s and checks.
        chain: what the delta follows.
    """

    def __init__(self, path: Path, manifest: Manifest, chain: Chain) -> None:
        self._writer = ArtifactWriter(path)
        self._manifest, self._chain = manifest, chain
        self._tables: dict[str, _Changes] = {}

    def start(self, name: str, kept: Tensor) -> None:
        after = self._manifest.tables[name]
        self._tables[name] = _Changes(self._chain.table(name), after, kept, self._writer.folder)

    def add_whole(self, name: str, key: str, tensor: Tensor) -> None:
        self._tables[name].add_whole(key, tensor)

    def add_rows(self, name: str, rows: Rows) -> None:
        self._tables[name].add_rows(_parts(rows))

    def seal(self) -> None:
        found = {name: changes.result() for name, changes in self._tables.items()}
        self._manifest = replace(
            self._manifest,
            tables={name: table.after for name, table in found.items()},
            bytes=bytes_of(self._manifest.tables),
        )
        delta = Delta(
            base=hash_of(self._chain.artifact.manifest),
            previous=hash_of(self._chain.manifest),
            artifact=self._manifest,
            tables=found,
        )
        self._writer.begin(found)
        for name, changes in self._tables.items():
            for key, part in changes.parts():
                self._writer.append(f"{name}.{key}", part)
        self._delta = self._writer.seal(delta)
        self._deltas = [*self._chain.deltas, VerifiedDelta(self._writer.folder, self._delta)]

    def check(self, name: str, source: ServedTable) -> TableCheck:
        return TableCheck(
            self._chain.artifact,
            name,
            source.kept,
            source.rotation,
            source.books,
            deltas=self._deltas,
        )

    def publish(self, checks: Mapping[str, Mapping[str, int | float]]) -> str:
        manifest = _checked(self._manifest, checks)
        self._writer.publish(replace(self._delta, artifact=manifest))
        return replace(self._delta, artifact=manifest).to_text()


class _Changes:
    """What changed in a table, found as its rows go by.

    Args:
        before: the table that the delta follows.
        after: without CRC32s.
        kept: bool ``(rows,)``.
        folder: of files without a name.
    """

    def __init__(self, before: MappedTable, after: Table, kept: Tensor, folder: Path) -> None:
        self._before, self._after = before, after
        default = int(after.default_row)
        # The default row has the id behind the last, and was always there.
        self._ids = F.pad(kept.nonzero().int().flatten(), (0, default), value=after.rows)
        had = index_of(before.entry, before.index).kept()
        self._gone = (had & ~kept).nonzero().int().flatten()
        self._had = F.pad(had, (0, default), value=True)
        self._at = self._came = 0
        self._found: list[Tensor] = []
        self._whole: dict[str, Tensor] = {}
        # What the tensors of the whole artifact would be.
        self._crcs = dict.fromkeys(after.layout(), 0)
        keys = [key for key in PER_ROW if key in self._crcs]
        # Open until the delta is sealed.
        self._spools = {key: tempfile.TemporaryFile(dir=folder) for key in keys}  # noqa: SIM115
        if "kept" in self._crcs:
            self._count("kept", RowIndex.of(kept).words)

    def add_whole(self, key: str, tensor: Tensor) -> None:
        self._count(key, tensor)
        if not torch.equal(tensor, self._before.whole(key)):
            self._whole[key] = tensor

    def add_rows(self, parts: Mapping[str, Tensor]) -> None:
        ids = self._ids[self._at : self._at + len(parts["rows"])]
        self._at += len(ids)
        old = self._before.gather(ids)
        had = self._had[ids.long()]
        changed = ~had
        for key, part in parts.items():
            self._count(key, part)
            # Bytes are compared: -0.0 is not 0.0.
            changed |= (_bytes(part) != _bytes(old[key])).any(1)
        self._came += int((~had).count_nonzero())
        self._found.append(ids[changed])
        for key, part in parts.items():
            held = part[changed].contiguous()
            self._spools[key].write(memory_of(held))

    def result(self) -> TableDelta:
        crc32 = {key: hex_of(crc) for key, crc in self._crcs.items()}
        return TableDelta(
            after=replace(self._after, crc32=crc32),
            rows=sum(map(len, self._found)),
            came=self._came,
            gone=len(self._gone),
            whole=tuple(self._whole),
        )

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the delta, rows as bytes and a few at a time."""
        yield "ids", torch.cat([self._ids[:0], *self._found])
        yield "gone", self._gone
        yield from self._whole.items()
        for key, spool in self._spools.items():
            spool.seek(0)
            while raw := spool.read(_PIECE):
                yield key, torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            spool.close()

    def _count(self, key: str, tensor: Tensor) -> None:
        held = tensor.contiguous()
        self._crcs[key] = zlib.crc32(memory_of(held), self._crcs[key])


def _parts(rows: Rows) -> dict[str, Tensor]:
    parts = {"rows": rows.rows}
    if rows.scale_bias is not None:
        parts["scale_bias"] = rows.scale_bias
    return {key: part.cpu() for key, part in parts.items()}


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _checked(manifest: Manifest, checks: Mapping[str, Mapping[str, int | float]]) -> Manifest:
    tables = {
        # serve-check refuses an artifact that was never compared.
        name: replace(table, check=checks[name])
        for name, table in manifest.tables.items()
    }
    return replace(manifest, tables=tables)
