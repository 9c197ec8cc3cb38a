"""What an artifact serves, with the deltas after it: read where its files are mapped, compared with
the model before it gets its name, and checked on its own at any later time.

Every removed id must serve exactly 0. Kept weights must be bit-equal (float32, float16), within
half a step of their row's grid, or at the nearest step of their column's, where zeros are exactly
0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.checks import hex_of
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.serving.artifact import (
    ArtifactWriter,
    Opened,
    added,
    check_new,
    open_artifact,
)
from dist_sparse.serving.codes import BITS, Rows, chunks, decode, encode
from dist_sparse.serving.delta import Delta
from dist_sparse.serving.in_place import Move
from dist_sparse.serving.manifest import Manifest, Table
from dist_sparse.serving.rows import PER_ROW, all_kept, changed_words, ids_of, rows_of

# Of the float64 arithmetic that finds the nearest code.
_ROUNDING = 1 + 2.0**-40


class MappedTable:
    """A table of an artifact, read where it is mapped, or of an artifact and the deltas after it.

    Args:
        artifact: and
        deltas: after it, in their order; each follows the one before it.
        name: of the table.

    Attributes:
        entry: of the manifest.
        words: the bitmap of its kept ids.
        whole: its tensors that are no rows, and not ``kept``.

    Raises:
        ValueError: a delta does not fit the rows; names it.
    """

    def __init__(
        self, artifact: Opened[Manifest], name: str, deltas: Sequence[Opened[Delta]] = ()
    ) -> None:
        self.entry = artifact.manifest.tables[name]
        tensors = artifact.tensors(name)
        self.words = tensors.pop("kept", all_kept(self.entry.rows))
        self._stored = {key: tensors.pop(key) for key in PER_ROW if key in tensors}
        self._index = RowIndex(self.words, self.entry.rows, self.entry.default_row)
        self.whole = tensors
        # Ids, and their rows, of each delta.
        self._layers: list[tuple[Tensor, dict[str, Tensor]]] = []
        for delta in deltas:
            self._follow(delta, name)

    def _follow(self, delta: Opened[Delta], name: str) -> None:
        change, tensors = delta.manifest.tables[name], delta.tensors(name)
        with _refusing(delta, name):
            self.words = changed_words(self.words, self.entry.kept, change, tensors)
        self.whole = self.whole | {key: tensors[key] for key in change.whole}
        self._layers.append((tensors["ids"], {key: tensors[key] for key in self._stored}))
        self.entry = change.after

    def index(self) -> RowIndex:
        """Return the index of its rows."""
        return RowIndex(self.words, self.entry.rows, self.entry.default_row)

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the stored rows of ids that have one, int64 ``(n,)``: ``rows``, and ``scale_bias``
        of grids of rows."""
        found = {key: rows.new_empty(len(ids), rows.shape[1]) for key, rows in self._stored.items()}
        left = torch.arange(len(ids))
        # The last delta that brought a row has what it is now.
        for theirs, rows in reversed(self._layers):
            wanted = ids[left].int()
            at = torch.searchsorted(theirs, wanted)
            here = F.pad(theirs, (0, 1), value=-1)[at] == wanted
            _put(found, left[here], rows, at[here])
            left = left[~here]
        _put(found, left, self._stored, rows_of(self._index, ids[left]))
        return found

    def chunks(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the ids of stored rows, ascending, and the rows, a few at a time."""
        entry = self.entry
        for some, ids in ids_of(self.words, entry.rows, entry.default_row):
            for part in chunks(len(ids), entry.dim):
                first = some.start
                if self._layers:
                    yield ids[part], self.gather(ids[part])
                else:
                    numbers = slice(first + part.start, first + part.stop)
                    yield ids[part], {key: rows[numbers] for key, rows in self._stored.items()}

    def stored(self) -> dict[str, Tensor]:
        """Return all stored rows: of an artifact without deltas where they are mapped."""
        if not self._layers:
            return self._stored
        every = [ids for _, ids in ids_of(self.words, self.entry.rows, self.entry.default_row)]
        return self.gather(torch.cat(every))

    def rows(self, parts: Mapping[str, Tensor]) -> Rows:
        """Return stored rows with what decodes them."""
        return Rows(**parts, scales=self.whole.get("scales"), books=self.whole.get("books"))

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield every tensor of the artifact that base and deltas make, rows a few at a time and
        with their ids."""
        if self.entry.kept < self.entry.rows:
            yield "kept", self.words, None
        for key, tensor in self.whole.items():
            yield key, tensor, None
        for ids, rows in self.chunks():
            for key, part in rows.items():
                yield key, part, ids

    def checksums(self) -> dict[str, str]:
        """Return the checksum of each tensor of that artifact."""
        sums = dict.fromkeys(self.entry.layout(), 0)
        for key, part, ids in self.parts():
            sums[key] = added(sums[key], part, ids)
        return {key: hex_of(each) for key, each in sums.items()}


def _put(
    found: Mapping[str, Tensor], places: Tensor, rows: Mapping[str, Tensor], at: Tensor
) -> None:
    for key, tensor in found.items():
        tensor.index_copy_(0, places, rows[key].index_select(0, at))


@contextmanager
def _refusing(delta: Opened[Delta], name: str) -> Iterator[None]:
    """Name the folder and the table of what is raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{delta.path} is refused: table {name!r}: {error}.") from None


def move_of(delta: Opened[Delta], name: str, before: RowIndex) -> Move:
    """Return what a delta does to the rows of a table.

    Raises:
        ValueError: it does not fit them; names its folder and the table.
    """
    with _refusing(delta, name):
        return Move(before, delta.manifest.tables[name], delta.tensors(name))


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
    """An artifact and the deltas after it, in order."""

    artifact: Opened[Manifest]
    deltas: tuple[Opened[Delta], ...] = ()

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

    def verify(self, tables: Iterable[str] | None = None) -> None:
        """Verify every byte of these tables; None of all."""
        names = None if tables is None else list(tables)
        self.artifact.verify(names)
        for delta in self.deltas:
            delta.verify(names)


def open_next(
    path: str | os.PathLike[str], before: Manifest, base: str, *, verify: bool = True
) -> Opened[Delta]:
    """Open a delta, and verify it and that it follows an artifact.

    Args:
        path: the folder.
        before: of the artifact.
        base: the hash of the one that the chain began with.
        verify: as of :func:`open_artifact`.

    Raises:
        ValueError: it is damaged, out of order, or of another base; names it.
    """
    delta = open_artifact(path, Delta, verify=verify)
    try:
        delta.manifest.refuse_other(before, base)
    except ValueError as error:
        raise ValueError(f"{path} is refused: {error}.") from None
    return delta


def open_chain(
    base: str | os.PathLike[str], *deltas: str | os.PathLike[str], verify: bool = True
) -> Chain:
    """Open an artifact and the deltas after it, and verify all of their files and their order.

    Args:
        verify: as of :func:`open_artifact`; the order is verified in any case.

    Raises:
        ValueError: a folder is no artifact or no delta, is damaged, or of another version; a delta
            is out of order, or of another base. Names the file.
        OSError: a file can't be read.
    """
    chain = Chain(open_artifact(base, verify=verify))
    root = chain.manifest.hash
    for path in deltas:
        delta = open_next(path, chain.manifest, root, verify=verify)
        chain = Chain(chain.artifact, (*chain.deltas, delta))
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
        if deltas and table.checksums() != entry.checksums:
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
            for key, part, ids in chain.table(name).parts():
                writer.append(f"{name}.{key}", part, ids)
        # The last delta brought the checksum of each tensor that a full export had written.
        if writer.seal(manifest) != manifest:
            raise ValueError(f"{chain.paths[-1]}: the deltas do not add up to what it leads to.")
        writer.publish(manifest)
    return manifest


def _check_table(table: MappedTable, name: str, where: Path) -> None:
    for ids, rows in table.chunks():
        wrong = _invalid(table.rows(rows), table.entry)
        if len(places := wrong.nonzero()):
            id = int(ids[places[0]])
            raise ValueError(f"{where}: the row of id {id} of table {name!r} has no valid weights.")


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
