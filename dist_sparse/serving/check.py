"""What an artifact serves, with the deltas after it: read where its files are mapped, compared with
the model before it gets its name, and checked on its own at any later time.

Every removed id must serve exactly 0. Kept weights must be bit-equal (float32, float16), within
half a step of their row's grid, or at the nearest step of their column's, where zeros are exactly
0.
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
from dist_sparse.serving.delta import PER_ROW, hash_of
from dist_sparse.serving.in_place import Move
from dist_sparse.serving.manifest import Manifest, Table

# Of the float64 arithmetic that finds the nearest code.
_ROUNDING = 1 + 2.0**-40


class MappedTable:
    """A table of an artifact, read where it is mapped, or of an artifact and the deltas after it.

    With deltas it takes 8 bytes for each kept row, beside its index.

    Args:
        artifact: verified.
        name: of the table.
        deltas: verified, in their order; each follows the one before it.

    Attributes:
        entry: of the manifest.
        index: of the rows.
        whole: its tensors that are no rows, and not ``kept``.

    Raises:
        ValueError: a delta does not fit the rows; names it.
    """

    def __init__(
        self, artifact: VerifiedArtifact, name: str, deltas: Sequence[VerifiedDelta] = ()
    ) -> None:
        self.entry = artifact.manifest.tables[name]
        tensors = artifact.tensors(name)
        self.index = index_of(self.entry, tensors.pop("kept", None))
        # Rows of the artifact, and of each delta after it.
        self._layers = [{key: tensors.pop(key) for key in PER_ROW if key in tensors}]
        self.whole = tensors
        # Where each row is in the layers, one behind the other; None: in the artifact, in order.
        self._places: Tensor | None = None
        for delta in deltas:
            self._follow(delta, name)

    def _follow(self, delta: VerifiedDelta, name: str) -> None:
        change, tensors = delta.manifest.tables[name], delta.tensors(name)
        move = move_of(delta, name, self.index)
        places = torch.arange(self.entry.stored) if self._places is None else self._places
        first = sum(len(layer["rows"]) for layer in self._layers)
        # Places move as rows do.
        places = F.pad(places, (0, max(0, change.after.stored - len(places))))
        move.run({"place": places}, {"place": torch.arange(first, first + change.rows)})
        self._places = places[: change.after.stored]
        self._layers.append({key: tensors[key] for key in self._layers[0]})
        self.whole = self.whole | {key: tensors[key] for key in change.whole}
        self.index, self.entry = move.index, change.after

    def rows(self, first: int, last: int) -> Rows:
        """Return the stored rows ``[first, last)``, and what decodes them."""
        scales, books = self.whole.get("scales"), self.whole.get("books")
        return Rows(**self.stored(first, last), scales=scales, books=books)

    def stored(self, first: int, last: int) -> dict[str, Tensor]:
        """Return the stored rows ``[first, last)``: ``rows``, and ``scale_bias`` of grids of
        rows."""
        if self._places is None:
            return {key: rows[first:last] for key, rows in self._layers[0].items()}
        return self._at(self._places[first:last])

    def gather(self, rows: Tensor) -> dict[str, Tensor]:
        """Return stored rows by their numbers, int64 ``(n,)``, as :meth:`stored` does."""
        return self._at(rows if self._places is None else self._places[rows])

    def _at(self, places: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        start = 0
        for layer in self._layers:
            end = start + len(layer["rows"])
            here = ((places >= start) & (places < end)).nonzero().flatten()
            for key, rows in layer.items():
                part = rows.index_select(0, places[here] - start)
                if key not in found and len(here) == len(places):
                    found[key] = part
                else:
                    found.setdefault(key, part.new_empty(len(places), *part.shape[1:]))
                    found[key].index_copy_(0, here, part)
            start = end
        return found

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the artifact that base and deltas make, rows a few at a time."""
        if self.entry.kept < self.entry.rows:
            yield "kept", self.index.words
        yield from self.whole.items()
        for some in chunks(self.entry.stored, self.entry.dim):
            yield from self.stored(some.start, some.stop).items()

    def crc32(self) -> dict[str, str]:
        """Return the CRC32 of each tensor of that artifact."""
        sums = dict.fromkeys(self.entry.layout(), 0)
        for key, part in self.parts():
            sums[key] = zlib.crc32(memory_of(part), sums[key])
        return {key: hex_of(crc) for key, crc in sums.items()}


def index_of(entry: Table, words: Tensor | None) -> RowIndex:
    """Return the index of a table; ``words`` are its bitmap, None where all rows are kept."""
    if words is None:
        return RowIndex.of(torch.ones(entry.rows, dtype=torch.bool), entry.default_row)
    return RowIndex(words, entry.rows, entry.default_row)


def move_of(delta: VerifiedDelta, name: str, before: RowIndex) -> Move:
    """Return what a delta does to the rows of a table.

    Raises:
        ValueError: it does not fit them; names its folder and the table.
    """
    try:
        return Move(before, delta.manifest.tables[name], delta.tensors(name))
    except ValueError as error:
        raise ValueError(f"{delta.path} is refused: table {name!r}: {error}.") from None


def compare_rows(name: str, first: int, weight: Tensor, stored: Rows, entry: Table) -> None:
    """Compare encoded rows with the rows of the model.

    Args:
        name: of the table.
        first: the number of the first row among the kept ones.
        weight: of the model.
        stored: the same rows, as they are written.
        entry: of the table.

    Raises:
        ValueError: names table, row and values.
    """
    if entry.dtype == "codes":
        # Codes are written as they are, and the CRC32 of the file covers them.
        return
    found, weight = decode(stored, entry.dim), weight.cpu()
    if stored.scale_bias is not None:
        error = (found.double() - weight.double()).abs()
        half = stored.scale_bias[:, :1].double() / 2
        wrong = (error > half * _ROUNDING) | ((weight == 0) & (found != 0))
    else:
        # The grid of a column need not reach its largest weights: codes are compared.
        exact = decode(encode(weight, entry.dtype, stored.scales), entry.dim)
        # Bits are compared: -0.0 is not 0.0.
        wrong = found.view(torch.int32) != exact.view(torch.int32)
    if len(places := wrong.nonzero()):
        row, column = places[0].tolist()
        raise ValueError(
            f"Table {name!r}: the kept row {first + row} serves {float(found[row, column])} in"
            f" column {column}, and the model has {float(weight[row, column])}."
        )


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

    def then(self, path: str | os.PathLike[str]) -> Chain:
        """Return this chain and the delta at ``path``.

        Raises:
            ValueError: it is damaged, out of order, or of another base; names it.
        """
        delta = open_next(path, self.manifest, hash_of(self.artifact.manifest))
        return Chain(self.artifact, (*self.deltas, delta))


def open_next(path: str | os.PathLike[str], before: Manifest, base: str) -> VerifiedDelta:
    """Open a delta, and verify it and that it follows an artifact.

    Args:
        path: the folder.
        before: of the artifact.
        base: the hash of the one that the chain began with.

    Raises:
        ValueError: it is damaged, out of order, or of another base; names it.
    """
    delta = open_delta(path)
    try:
        delta.manifest.refuse_other(before, base)
    except ValueError as error:
        raise ValueError(f"{path} is refused: {error}.") from None
    return delta


def open_chain(base: str | os.PathLike[str], *deltas: str | os.PathLike[str]) -> Chain:
    """Open an artifact and the deltas after it, and verify all of their files and their order.

    Raises:
        ValueError: a folder is no artifact or no delta, is damaged, or of another version; a delta
            is out of order, or of another base. Names the file.
        OSError: a file can't be read.
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
    """
    chain = open_chain(path, *deltas)
    where = chain.paths[-1]
    for name, entry in chain.manifest.tables.items():
        table = chain.table(name)
        _check_table(table, name, where)
        if deltas and table.crc32() != entry.crc32:
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


def _check_table(table: MappedTable, name: str, where: Path) -> None:
    entry = table.entry
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
