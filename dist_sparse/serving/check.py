"""What an artifact serves, compared with the model before it gets its name, and checked on its own
at any later time.

Every removed id must serve exactly 0. Kept weights must be bit-equal (float32, float16), within
half a step of their row's grid, or at the nearest step of their column's, where zeros are exactly
0. Lookups read the mapped
file in pure torch: no table is loaded.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.files import hex_of
from dist_sparse.serving.artifact import (
    ArtifactWriter,
    VerifiedArtifact,
    VerifiedDelta,
    check_new,
    memory_of,
    open_artifact,
    open_delta,
)
from dist_sparse.serving.codes import BITS, Rows, chunks, decode, encode
from dist_sparse.serving.delta import PER_ROW, hash_of, step_of
from dist_sparse.serving.manifest import Manifest, Table

# Ids that are looked up together.
_SPAN = 1 << 18

# Of the float64 arithmetic that finds the nearest code.
_ROUNDING = 1 + 2.0**-40


class MappedTable:
    """A table of an artifact, read where it is mapped, or of an artifact and the deltas after it.

    With deltas it takes 4 bytes for each kept row, beside its index.

    Args:
        artifact: verified.
        name: of the table.
        deltas: verified, in their order; each follows the one before it.

    Raises:
        ValueError: a delta does not fit the rows; names it.
    """

    def __init__(
        self, artifact: VerifiedArtifact, name: str, deltas: Sequence[VerifiedDelta] = ()
    ) -> None:
        self.entry = artifact.manifest.tables[name]
        tensors = artifact.tensors(name)
        self.index = RowIndex(tensors["kept"], self.entry.rows) if "kept" in tensors else None
        self._stored_before, self._index_before = tensors, self.index
        self._keys: list[str] = [key for key in PER_ROW if key in tensors]
        # The newest first: it is asked first for a row.
        self._layers = [delta.tensors(name) for delta in reversed(deltas)]
        for delta in deltas:
            self._follow(delta, name)
        for layer in reversed(self._layers):
            tensors = tensors | layer
        self._newest = tensors
        self.rotation = tensors.get("rotation")
        self.scales, self.books = tensors.get("scales"), tensors.get("books")
        if self._layers:
            assert self.index is not None
            ids = self.index.kept().nonzero().int().flatten()
            # The default row has the id behind the last.
            self._ids = F.pad(ids, (0, int(self.entry.default_row)), value=self.entry.rows)

    def _follow(self, delta: VerifiedDelta, name: str) -> None:
        before = index_of(self.entry, self.index)
        change = delta.manifest.tables[name]
        try:
            after = step_of(before, change, delta.tensors(name)).index
        except ValueError as error:
            raise ValueError(f"{delta.path} is refused: table {name!r}: {error}.") from None
        self.index = RowIndex(after.words, after.rows)
        self.entry = change.after

    def rows(self, first: int, last: int) -> Rows:
        """Return the stored rows ``[first, last)`` as they are stored."""
        if self._layers:
            found = self.gather(self._ids[first:last])
        else:
            found = {key: self._stored_before[key][first:last] for key in self._keys}
        return Rows(found["rows"], found.get("scale_bias"), self.scales, self.books)

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the stored rows of kept ids ``(n,)``, the id behind the last for the default row:
        ``rows``, and ``scale_bias`` of grids of rows. Of ids that have none the row is any."""
        keys = self._keys
        found = {key: _empty(self._stored_before[key], len(ids)) for key in keys}
        todo = torch.arange(len(ids))
        for layer in self._layers:
            if not len(layer["ids"]):
                continue
            left = ids[todo]
            at = torch.searchsorted(layer["ids"], left).clamp(max=len(layer["ids"]) - 1)
            hit = layer["ids"][at] == left
            for key in keys:
                found[key][todo[hit]] = layer[key][at[hit]]
            todo = todo[~hit]
        at = self._rows_before(ids[todo])
        for key in keys if len(self._stored_before["rows"]) else ():
            found[key][todo] = self._stored_before[key][at]
        return found

    def _rows_before(self, ids: Tensor) -> Tensor:
        """Where rows are in the artifact; 0 of ids that it does not keep."""
        if self._index_before is None:
            return ids
        default = ids == self.entry.rows
        at = torch.where(default, self._index_before.num_kept, self._index_before(ids))
        return at.clamp(min=0)

    def whole(self, key: str) -> Tensor:
        """Return a tensor that is no rows, and not ``kept``."""
        return self._newest[key]

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the artifact that base and deltas make, rows a few at a time."""
        layout = self.entry.layout()
        if "kept" in layout:
            yield "kept", index_of(self.entry, self.index).words
        for key in layout:
            if key not in ("kept", *PER_ROW):
                yield key, self.whole(key)
        for some in chunks(self.entry.stored, self.entry.dim):
            rows = self.rows(some.start, some.stop)
            yield "rows", rows.rows
            if rows.scale_bias is not None:
                yield "scale_bias", rows.scale_bias


def index_of(entry: Table, index: RowIndex | None) -> RowIndex:
    """Return the index of a table with its default row, also where all rows are kept."""
    if index is None:
        return RowIndex.of(torch.ones(entry.rows, dtype=torch.bool), entry.default_row)
    if index.default_row == entry.default_row:
        return index
    return RowIndex(index.words, entry.rows, entry.default_row)


def _empty(like: Tensor, rows: int) -> Tensor:
    return like.new_empty(rows, *like.shape[1:])


class TableCheck:
    """The check of one table: its kept rows come in order, chunk by chunk.

    Args:
        artifact: before it has its name.
        name: of the table.
        kept: of the model: bool ``(rows,)``.
        rotation: what the model's outputs are turned back by.
        books: of the model; rows are codes then.
        deltas: after the artifact, the last before it has its name.

    Raises:
        ValueError: the bitmap keeps other rows, or rotation or books are others; names table and
            id.
    """

    def __init__(
        self,
        artifact: VerifiedArtifact,
        name: str,
        kept: Tensor,
        rotation: Tensor | None = None,
        books: Tensor | None = None,
        deltas: Sequence[VerifiedDelta] = (),
    ) -> None:
        self._name = name
        self._table = MappedTable(artifact, name, deltas)
        self._at = 0
        self._error = self._step = 0.0
        self._kept = int(kept.count_nonzero())
        self._removed = len(kept) - self._kept
        if not _is_same(self._table.rotation, rotation):
            raise ValueError(
                f"Table {name!r}: its outputs are turned back by another matrix than the model's."
            )
        if not _is_same(self._table.books, books):
            raise ValueError(f"Table {name!r}: its codes have other books than the model's.")
        self._compare_ids(kept)

    def _compare_ids(self, kept: Tensor) -> None:
        """Compare the row that serves each id with the number of kept ids before it."""
        before = 0
        for start, part in zip(range(0, len(kept), _SPAN), torch.split(kept, _SPAN), strict=True):
            ids = torch.arange(start, start + len(part))
            found = ids if self._table.index is None else self._table.index(ids)
            expected = torch.where(part, part.cumsum(0) + (before - 1), -1)
            if len(wrong := (found != expected).nonzero()):
                at = int(wrong[0])
                raise ValueError(
                    f"Table {self._name!r}: id {start + at} is served by row {int(found[at])}, and"
                    f" should be by {int(expected[at])} (-1: none)."
                )
            before += int(part.count_nonzero())

    def add(self, weight: Tensor) -> None:
        """Compare the next kept rows of the model with the stored ones.

        Raises:
            ValueError: names table, row and values.
        """
        # Rows come in the order in which they are stored.
        first, self._at = self._at, self._at + len(weight)
        stored = self._table.rows(first, self._at)
        dim, dtype = self._table.entry.dim, self._table.entry.dtype
        if stored.books is not None:
            self._compare_codes(first, stored.rows, weight.cpu())
            return
        found, weight = decode(stored, dim), weight.cpu()
        error = (found.double() - weight.double()).abs()
        if stored.scale_bias is not None:
            step = stored.scale_bias[:, :1].double()
            wrong = (error > step / 2 * _ROUNDING) | ((weight == 0) & (found != 0))
            self._note(error, step)
        elif stored.scales is not None:
            # The grid of a column need not reach its largest weights: codes are compared.
            exact = decode(encode(weight, dtype, stored.scales), dim)
            wrong = found != exact
            self._note(error, stored.scales)
        else:
            # Bytes are compared: -0.0 is not 0.0.
            bits = encode(weight, dtype).rows
            wrong = stored.rows.view(torch.uint8) != bits.view(torch.uint8)
            wrong = wrong.view(len(weight), dim, bits.element_size()).any(2)
        if len(places := wrong.nonzero()):
            row, column = places[0].tolist()
            raise ValueError(
                f"Table {self._name!r}: the kept row {first + row} serves"
                f" {float(found[row, column])} in column {column}, and the model has"
                f" {float(weight[row, column])}."
            )

    def _compare_codes(self, first: int, stored: Tensor, codes: Tensor) -> None:
        if len(places := (stored != codes).nonzero()):
            row, group = places[0].tolist()
            raise ValueError(
                f"Table {self._name!r}: the kept row {first + row} has the code"
                f" {int(stored[row, group])} in group {group}, and lookups of the model"
                f" {int(codes[row, group])}."
            )

    def _note(self, error: Tensor, step: Tensor) -> None:
        self._error = max(self._error, float(error.max()))
        self._step = max(self._step, float(step.max()))

    def result(self) -> dict[str, int | float]:
        """Return how many rows were compared and how many ids serve 0; of 8 and 4 bits the largest
        error and step.

        Raises:
            ValueError: not all kept rows came.
        """
        stored = self._table.entry.stored
        if self._at != stored:
            raise ValueError(
                f"Table {self._name!r}: {self._at} rows were compared, and {stored} are stored."
            )
        return {
            "kept": self._kept,
            "removed": self._removed,
            "largest_error": self._error,
            "largest_step": self._step,
        }


def _is_same(stored: Tensor | None, expected: Tensor | None) -> bool:
    if stored is None or expected is None:
        return stored is expected
    return torch.equal(stored, expected)


@dataclass(frozen=True)
class Chain:
    """An artifact and the deltas after it, verified, in order."""

    artifact: VerifiedArtifact
    deltas: tuple[VerifiedDelta, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the artifact that they make."""
        return self.deltas[-1].manifest.artifact if self.deltas else self.artifact.manifest

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return their folders."""
        return (self.artifact.path, *(delta.path for delta in self.deltas))

    def table(self, name: str) -> MappedTable:
        """Return a table of the artifact that they make."""
        return MappedTable(self.artifact, name, self.deltas)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a table: views of the mapped file, or with deltas copies."""
        if not self.deltas:
            return self.artifact.tensors(name)
        table = self.table(name)
        layout = table.entry.layout()
        found = {key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in layout.items()}
        ends = dict.fromkeys(layout, 0)
        for key, part in table.parts():
            found[key][ends[key] : ends[key] + len(part)] = part
            ends[key] += len(part)
        return found

    def then(self, path: str | os.PathLike[str]) -> Chain:
        """Return this chain and the delta at ``path``.

        Raises:
            ValueError: it is damaged, out of order, or of another base; names it.
        """
        delta = open_delta(path)
        try:
            delta.manifest.refuse_other(self.manifest, hash_of(self.artifact.manifest))
        except ValueError as error:
            raise ValueError(f"{path} is refused: {error}.") from None
        return Chain(self.artifact, (*self.deltas, delta))


def open_chain(base: str | os.PathLike[str], *deltas: str | os.PathLike[str]) -> Chain:
    """Open an artifact and the deltas after it, and verify all of their files and their order.

    Raises:
        ValueError: a folder is no artifact or no delta, is damaged, or of another version; a delta
            is out of order, or of another base. Names the file.
        OSError: a file can't be read.
        ImportError: safetensors is not installed.
    """
    chain = Chain(open_artifact(base))
    for path in deltas:
        chain = chain.then(path)
    return chain


def check_artifact(path: str | os.PathLike[str], *deltas: str | os.PathLike[str]) -> Chain:
    """Check an artifact, and the deltas after it, with nothing but their own files, and return
    them: CRC32s, sizes and bitmaps, that every weight is finite, that the grid of every row of 8 or
    4 bits holds zero exactly, and that deltas add up to what the last one says.

    Raises:
        ValueError: names the file, or the table and the row.
        OSError: a file can't be read.
        ImportError: safetensors is not installed.
    """
    chain = open_chain(path, *deltas)
    where = chain.paths[-1]
    for name, entry in chain.manifest.tables.items():
        table = chain.table(name)
        _check_table(table, name, where)
        if deltas and _crc32(table) != entry.crc32:
            raise ValueError(f"{where}: table {name!r} is not the one that the delta leads to.")
    return chain


def merge(
    base: str | os.PathLike[str],
    *deltas: str | os.PathLike[str],
    out: str | os.PathLike[str],
) -> Manifest:
    """Write an artifact and the deltas after it as one artifact, equal byte for byte to the full
    export of the moment of the last delta, and return its manifest. Rows are streamed.

    Args:
        base: the folder of the artifact.
        deltas: their folders, in order.
        out: the new folder.

    Raises:
        ValueError: something is at ``out``, or as of :func:`open_chain`; nothing was written.
        OSError: a file can't be read or written.
        ImportError: safetensors is not installed.
    """
    check_new(out)
    chain = open_chain(base, *deltas)
    manifest = chain.manifest
    with ArtifactWriter(out, manifest.tables) as writer:
        for name in manifest.tables:
            for key, part in chain.table(name).parts():
                writer.append(f"{name}.{key}", part)
        # The last delta brought the CRC32 of each tensor that a full export had written.
        if writer.seal(manifest) != manifest:
            raise ValueError(f"{chain.paths[-1]}: the deltas do not add up to what it leads to.")
        writer.publish(manifest)
    return manifest


def _crc32(table: MappedTable) -> dict[str, str]:
    sums = dict.fromkeys(table.entry.layout(), 0)
    for key, part in table.parts():
        held = part.contiguous()
        sums[key] = zlib.crc32(memory_of(held), sums[key])
    return {key: hex_of(crc) for key, crc in sums.items()}


def _check_table(table: MappedTable, name: str, where: Path) -> None:
    entry = table.entry
    compared = entry.check.get("kept"), entry.check.get("removed")
    if compared != (entry.kept, entry.rows - entry.kept):
        raise ValueError(f"{where}: table {name!r} was not compared with its model.")
    if table.rotation is not None and not bool(table.rotation.isfinite().all()):
        raise ValueError(f"{where}: the rotation of table {name!r} is not finite.")
    if table.scales is not None and not bool((table.scales.isfinite() & (table.scales > 0)).all()):
        raise ValueError(f"{where}: a scale of table {name!r} is not positive.")
    if table.books is not None and bool(table.books[:, 0].any()):
        raise ValueError(f"{where}: a book of table {name!r} has other entries 0 than zeros.")
    for some in chunks(entry.stored, entry.dim):
        wrong = _invalid(table.rows(some.start, some.stop), entry)
        if len(places := wrong.nonzero()):
            row = some.start + int(places[0])
            raise ValueError(f"{where}: the kept row {row} of table {name!r} has no valid weights.")


def _invalid(stored: Rows, entry: Table) -> Tensor:
    """Which rows have a weight that is not finite, or a grid that does not hold 0: bool
    ``(rows,)``."""
    wrong = ~decode(stored, entry.dim).isfinite().all(1)
    if stored.scale_bias is not None:
        scale, bias = stored.scale_bias.double().unbind(1)
        # The code of 0 must be one of the codes.
        zero = -bias / scale
        wrong |= (zero != zero.round()) | (zero < 0) | (zero > 2 ** BITS[entry.dtype] - 1)
    return wrong
