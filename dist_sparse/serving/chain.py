"""What an artifact serves, with the deltas after it: read where its files are mapped, compared with
the model before it gets its name, and checked on its own at any later time.

Every removed id must serve exactly 0. Kept weights must be bit-equal (float32, float16), within
half a step of their row's grid, or at the nearest step of their column's, where zeros are exactly
0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.checks import hex_of
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.serving.artifact import (
    SPAN,
    ArtifactWriter,
    Opened,
    StrPath,
    all_kept,
    check_new,
    ids_in,
    ids_of,
    open_artifact,
    rows_of,
    update_checksum,
)
from dist_sparse.serving.encodings import ENCODINGS, chunks, decode, encode
from dist_sparse.serving.manifest import PER_ROW, Delta, Manifest, Table, refuse_changed

# Slack for the rounding of the float64 arithmetic that finds the nearest code.
_ROUNDING = 1 + 2.0**-40


class MappedTable:
    """A table of an artifact, read where it is mapped, or of an artifact and the deltas after it.

    Args:
        artifact: and
        deltas: after it, in their order; each follows the one before it.
        name: of the table.

    Attributes:
        entry: of the manifest.
        index: of its rows.
        whole: its tensors that are no rows, and not ``kept``.

    Raises:
        ValueError: a delta does not fit the rows; names it.
    """

    def __init__(
        self, artifact: Opened[Manifest], name: str, deltas: Sequence[Opened[Delta]] = ()
    ) -> None:
        self.entry = artifact.manifest.tables[name]
        tensors = artifact.tensors(name)
        words = tensors.pop("kept", all_kept(self.entry.rows))
        self.index = self._mapped = RowIndex(words, self.entry.rows, self.entry.default_row)
        self._stored = {key: tensors.pop(key) for key in PER_ROW & tensors.keys()}
        self.whole = tensors
        # Ids, and their rows, of each delta.
        self._layers: list[tuple[Tensor, dict[str, Tensor]]] = []
        for delta in deltas:
            change = delta.manifest.tables[name]
            tensors = delta.tensors(name)
            self.index = index_after(delta, name, self.index)
            self.whole = self.whole | {key: tensors[key] for key in change.whole}
            self._layers.append((tensors["ids"], {key: tensors[key] for key in self._stored}))
            self.entry = change.after

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
        _put(found, left, self._stored, rows_of(self._mapped, ids[left]))
        return found

    def stored(self) -> dict[str, Tensor]:
        """Return all stored rows: of an artifact without deltas where they are mapped."""
        if not self._layers:
            return self._stored
        return self.gather(torch.cat([*self._ids()]))

    def others(self) -> dict[str, Tensor]:
        """Return the tensors that are no rows."""
        kept = {"kept": self.index.words} if self.entry.kept < self.entry.rows else {}
        return kept | self.whole

    def parts(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the rows of the artifact that base and deltas make, a few at a time: their ids, and
        their tensors."""
        for ids in self._ids():
            for part in chunks(len(ids), self.entry.dim):
                yield ids[part], self.gather(ids[part])

    def _ids(self) -> Iterator[Tensor]:
        return ids_of(self.index.words, self.entry.rows, self.entry.default_row)


def _put(
    found: Mapping[str, Tensor], places: Tensor, rows: Mapping[str, Tensor], at: Tensor
) -> None:
    for key, tensor in found.items():
        tensor.index_copy_(0, places, rows[key].index_select(0, at))


def index_after(delta: Opened[Delta], name: str, before: RowIndex) -> RowIndex:
    """Return the index of a table's rows after a delta.

    Raises:
        ValueError: ids that go have no row, ids that come have one, or ids do not ascend or are out
            of range; names folder and table.
    """
    change = delta.manifest.tables[name]
    tensors = delta.tensors(name)
    ids = tensors["ids"].long()
    gone = tensors["gone"].long()
    after = change.after
    where = f"{delta.path} is refused: table {name!r}: its ids"
    for some, end in ((ids, after.rows + after.default_row), (gone, after.rows)):
        # Between two more, an id out of range does not ascend.
        bounded = F.pad(some, (1, 0), value=-1)
        bounded = F.pad(bounded, (0, 1), value=end)
        if (bounded.diff() <= 0).any():
            raise ValueError(f"{where} do not ascend, or are not in [0, {end}).")
    came = ids[rows_of(before, ids) < 0]
    words = before.words.clone()
    # Bits that come are 0 and bits that go are 1, so that nothing is carried.
    words.index_add_(0, came >> 5, (1 << (came & 31)).int())
    words.index_add_(0, gone >> 5, (1 << (gone & 31)).int(), alpha=-1)
    found = RowIndex(words, before.rows, before.default_row)
    # Ids that go and had no row, and ids of rows that have none in the end.
    strange = int((rows_of(before, gone) < 0).sum()), int((rows_of(found, ids) < 0).sum())
    if (*strange, len(came), found.num_kept) != (0, 0, change.came, after.kept):
        raise ValueError(f"{where} do not come and go as it says.")
    return found


def compare_rows(
    name: str, first: int, weight: Tensor, stored: Mapping[str, Tensor], entry: Table
) -> None:
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
    found, weight = decode(stored, entry.dim), weight.cpu()
    if "scale_bias" in stored:
        error = (found.double() - weight.double()).abs()
        half = stored["scale_bias"][:, :1].double() / 2
        wrong = (error > half * _ROUNDING) | ((weight == 0) & (found != 0))
    else:
        # The grid of a column need not reach its largest weights: codes are compared. The codes of
        # books are the rows themselves.
        exact = decode(encode(weight, entry.dtype, stored.get("scales")), entry.dim)
        # Bits are compared: -0.0 is not 0.0.
        wrong = found.view(torch.int32) != exact.view(torch.int32)
    places = wrong.nonzero()
    if len(places):
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


def open_next(path: StrPath, before: Manifest, base: str, *, verify: bool = True) -> Opened[Delta]:
    """Open a delta, and verify it and that it follows an artifact.

    Args:
        path: the folder.
        before: of the artifact.
        base: the hash of the one that the chain began with.
        verify: as of :func:`open_artifact`.

    Raises:
        ValueError: it is damaged, out of order, or of another base; names it.
    """
    opened: Opened[Delta] = open_artifact(path, Delta, verify=verify)
    delta, found = opened.manifest, before.hash
    if delta.previous != found:
        kind = "out of order" if delta.base == base else "of another base"
        raise ValueError(
            f"{path} is refused: the delta is {kind}: it follows artifact {delta.previous[:12]} of"
            f" base {delta.base[:12]}, and this is artifact {found[:12]} of base {base[:12]}."
        )
    # Written by export(), the two differ in rows alone.
    refuse_changed(before, delta.artifact)
    return opened


def open_chain(base: StrPath, *deltas: StrPath, verify: bool = True) -> Chain:
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


def check_artifact(path: StrPath, *deltas: StrPath) -> Chain:
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
        sums = dict.fromkeys(entry.layout(), 0)
        for key, tensor in table.others().items():
            sums[key] = update_checksum(0, tensor)
        for ids, parts in table.parts():
            for key, part in parts.items():
                sums[key] = update_checksum(sums[key], part, ids)
            places = _invalid({**table.whole, **parts}, entry).nonzero()
            if len(places):
                id = int(ids[places[0]])
                raise ValueError(
                    f"{where}: the row of id {id} of table {name!r} has no valid weights."
                )
        if {key: hex_of(each) for key, each in sums.items()} != entry.checksums:
            raise ValueError(f"{where}: table {name!r} is not the one that the delta leads to.")
    return chain


def merge(
    base: StrPath,
    *deltas: StrPath,
    out: StrPath,
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
    with ArtifactWriter(out) as writer:
        writer.begin(manifest.tables)
        for name in manifest.tables:
            table = chain.table(name)
            writer.add(name, table.others())
            for ids, parts in table.parts():
                writer.add(name, parts, ids)
        # The last delta brought the checksum of each tensor that a full export had written.
        if writer.seal(manifest) != manifest:
            raise ValueError(f"{chain.paths[-1]}: the deltas do not add up to what it leads to.")
        writer.publish(manifest)
    return manifest


def _invalid(stored: Mapping[str, Tensor], entry: Table) -> Tensor:
    """Which rows have a weight that is not finite, or a grid that does not hold 0: bool
    ``(rows,)``."""
    wrong = ~decode(stored, entry.dim).isfinite().all(1)
    if "scale_bias" in stored:
        scale, bias = stored["scale_bias"].double().unbind(1)
        # The code of 0 must be one of the codes.
        zero = -bias / scale
        wrong |= (zero != zero.round()) | (zero < 0) | (zero > 2 ** ENCODINGS[entry.dtype].bits - 1)
    return wrong


# Rows of a running process that become those of the next artifact, where they are. Rows are stored
# in the order of their ids, so rows behind one that comes or goes move.


def move_rows(
    stored: Mapping[str, Tensor], before: RowIndex, after: RowIndex, new: Mapping[str, Tensor]
) -> None:
    """Make stored rows those of the next artifact, in place, in memory that follows the delta.

    Args:
        stored: what holds the rows so far and has room for those afterwards: ``(room, ...)`` each,
            of any dtype.
        before: index of the rows so far.
        after: of the rows afterwards.
        new: of the delta, the rows by the same names, and their ``ids``.
    """
    if not torch.equal(before.words, after.words):
        stay = before.words & after.words
        spans = [*range(0, before.rows, SPAN)]
        # Two passes, neither of which writes on a row that is still to be read: rows that move up
        # from the first to the last, rows that move down from the last to the first.
        for first in spans:
            _move(stored, before, after, ids_in(stay, before.rows, first), -1)
        if before.default_row:
            last = torch.tensor([before.rows])
            _move(stored, before, after, last, after.num_kept - before.num_kept)
        for first in reversed(spans):
            _move(stored, before, after, ids_in(stay, before.rows, first), 1)
    at = rows_of(after, new["ids"].long())
    for key, rows in stored.items():
        rows.index_copy_(0, at.to(rows.device), new[key].view(rows.dtype).to(rows.device))


def _move(
    stored: Mapping[str, Tensor], before: RowIndex, after: RowIndex, ids: Tensor, towards: int
) -> None:
    """Move the rows of ids that move to lower places, if ``towards`` is negative, or to higher
    ones."""
    source, target = rows_of(before, ids), rows_of(after, ids)
    moves = (target - source) * towards > 0
    source, target = source[moves], target[moves]
    for tensor in stored.values():
        # They are read before any of them is written.
        rows = tensor.index_select(0, source.to(tensor.device))
        tensor.index_copy_(0, target.to(tensor.device), rows)
