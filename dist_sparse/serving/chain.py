"""An artifact and the deltas after it: read from mapped files, compared with the model at export,
checked without a model, merged, and applied to the rows of a running process.

A removed id must serve exactly 0. Kept weights must be bit-equal (float32, float16), within half
a step of their row's grid, or at the nearest step of their column's grid; zeros stay exactly 0.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.checks import hex_of
from dist_sparse.ids.row_index import RowIndex
from dist_sparse.serving.artifact import (
    SPAN,
    ArtifactWriter,
    Opened,
    StrPath,
    all_kept,
    check_new,
    checksum,
    ids_in,
    ids_of,
    manifest_text,
    open_artifact,
    rows_of,
)
from dist_sparse.serving.encodings import ENCODINGS, Tensors, chunks, decode, encode
from dist_sparse.serving.manifest import PER_ROW, Delta, Manifest, Table, refuse_changed

# encode() finds the nearest code in float64. Its rounding may move a weight that is halfway between
# two codes to the other one.
_ROUNDING = 1 + 2.0**-40


class MappedTable:
    """A table of an artifact and the deltas after it, read from the mapped files.

    Args:
        artifact: the base.
        name: the name of the table.
        deltas: the deltas in order; each follows the one before it.

    Attributes:
        entry: its entry in the manifest, after the last delta.
        index: the index of its rows, after the last delta.
        whole: its tensors that are neither rows nor ``kept``, after the last delta.
        base_rows: the rows of the artifact alone: ``rows``, and ``scale_bias`` for grids per row.

    Raises:
        ValueError: a delta does not fit the rows; names its folder.
    """

    def __init__(
        self, artifact: Opened[Manifest], name: str, deltas: Sequence[Opened[Delta]] = ()
    ) -> None:
        self.entry = artifact.manifest.tables[name]
        tensors = artifact.tensors(name)
        words = tensors.pop("kept", all_kept(self.entry.rows))
        self.index = self._base_index = RowIndex(words, self.entry.rows, self.entry.default_row)
        self.base_rows = {key: tensors.pop(key) for key in PER_ROW & tensors.keys()}
        self.whole = tensors
        # The tensors of each delta: ids, and rows by the names of base_rows.
        self._layers: list[Tensors] = []
        for delta in deltas:
            change = delta.manifest.tables[name]
            tensors = delta.tensors(name)
            self.index = index_after(delta, name, self.index)
            self.whole = self.whole | {key: tensors[key] for key in change.whole}
            self._layers.append(tensors)
            self.entry = change.after

    def gather(self, ids: Tensor) -> Tensors:
        """Return the rows of ids after the last delta, by the names of :attr:`base_rows`. Every id
        must have a row: int64 ``(n,)``."""
        out = {key: rows.new_empty(len(ids), rows.shape[1]) for key, rows in self.base_rows.items()}
        # The positions of ids whose rows are still to be found.
        left = torch.arange(len(ids))
        # Deltas are read from the last one back: the last one with a row has its current value.
        for layer in reversed(self._layers):
            wanted = ids[left].int()
            at = torch.searchsorted(layer["ids"], wanted)
            # searchsorted() returns the length for ids after the last one: the padding there
            # matches no id.
            is_here = F.pad(layer["ids"], (0, 1), value=-1)[at] == wanted
            _copy_rows(out, left[is_here], layer, at[is_here])
            left = left[~is_here]
        _copy_rows(out, left, self.base_rows, rows_of(self._base_index, ids[left]))
        return out

    def others(self) -> Tensors:
        """Return the tensors that are not rows, including ``kept``."""
        kept = {"kept": self.index.words} if self.entry.kept < self.entry.rows else {}
        return {**kept, **self.whole}

    def parts(self) -> Iterator[tuple[Tensor, Tensors]]:
        """Yield the ids and the rows after the last delta, a few at a time."""
        for ids in ids_of(self.index.words, self.entry.rows, self.entry.default_row):
            for part in chunks(len(ids), self.entry.dim):
                yield ids[part], self.gather(ids[part])


def _copy_rows(target: Tensors, places: Tensor, source: Tensors, at: Tensor) -> None:
    for key, tensor in target.items():
        tensor.index_copy_(0, places, source[key].index_select(0, at))


def index_after(delta: Opened[Delta], name: str, before: RowIndex) -> RowIndex:
    """Return the index of a table's rows after a delta.

    Raises:
        ValueError: removed ids have no row, added ids have one, or ids do not ascend or are out of
            range; names folder and table.
    """
    change = delta.manifest.tables[name]
    tensors = delta.tensors(name)
    ids = tensors["ids"].long()
    removed = tensors["gone"].long()
    after = change.after
    where = f"{delta.path} is refused: table {name!r}: its"
    for listed, end in ((ids, after.rows + after.default_row), (removed, after.rows)):
        # Bounds at both ends let one test find ids out of range as well.
        gaps = listed.diff(prepend=torch.tensor([-1]), append=torch.tensor([end]))
        if (gaps <= 0).any():
            raise ValueError(f"{where} ids do not ascend, or are not in [0, {end}).")
    added = ids[rows_of(before, ids) < 0]
    words = before.words.clone()
    # Setting a bit that is 0 is an addition, clearing a bit that is 1 a subtraction: neither
    # carries. index_add_ takes several bits of one word, unlike an indexed |=.
    words.index_add_(0, added >> 5, (1 << (added & 31)).int())
    words.index_add_(0, removed >> 5, (1 << (removed & 31)).int(), alpha=-1)
    index = RowIndex(words, before.rows, before.default_row)
    # Removed ids must have had a row, and ids of the delta must have one now. Otherwise the sums
    # above were wrong, and the index is refused.
    rows = torch.cat([rows_of(before, removed), rows_of(index, ids)])
    if (int((rows < 0).sum()), len(added), index.num_kept) != (0, change.came, after.kept):
        raise ValueError(f"{where} added and removed ids do not match its manifest.")
    return index


def compare_rows(name: str, first: int, weight: Tensor, stored: Tensors, entry: Table) -> None:
    """Compare encoded rows with the rows of the model.

    Args:
        name: the name of the table.
        first: the number of the first row among the kept ones.
        weight: rows of the model, ``(n, columns)``, or their codes.
        stored: the same rows as they are written, with the table's ``scales`` or ``books``.
        entry: the manifest's entry of the table.

    Raises:
        ValueError: a row serves other values; names table, row and values.
    """
    served = decode(stored, entry.dim)
    if "scale_bias" in stored:
        error = (served.double() - weight.double()).abs()
        half_step = stored["scale_bias"][:, :1].double() / 2
        is_wrong = (error > half_step * _ROUNDING) | ((weight == 0) & (served != 0))
    else:
        # A column's grid may be too short for its largest weights, so no distance bounds the error:
        # the rows are encoded once more instead.
        expected = decode(encode(weight, entry.dtype, stored.get("scales")), entry.dim)
        # Compare bits, because -0.0 == 0.0.
        is_wrong = served.view(torch.int32) != expected.view(torch.int32)
    places = is_wrong.nonzero()
    if len(places):
        row, column = places[0].tolist()
        raise ValueError(
            f"Table {name!r}: the kept row {first + row} serves {float(served[row, column])} in"
            f" column {column}, and the model has {float(weight[row, column])}."
        )


@dataclass(frozen=True)
class Chain:
    """An artifact and the deltas after it, in order."""

    artifact: Opened[Manifest]
    deltas: tuple[Opened[Delta], ...] = ()

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the artifact after the last delta."""
        return self.deltas[-1].manifest.artifact if self.deltas else self.artifact.manifest

    @property
    def path(self) -> Path:
        """Return the last folder."""
        folders: list[Opened[Any]] = [self.artifact, *self.deltas]
        return folders[-1].path

    def table(self, name: str) -> MappedTable:
        """Return a table after the last delta."""
        return MappedTable(self.artifact, name, self.deltas)


def refuse_unordered(opened: Opened[Delta], before: Manifest, base: str) -> None:
    """Refuse a delta that does not follow an artifact.

    Args:
        before: the manifest of that artifact.
        base: the hash of the artifact that the chain began with, for the message.

    Raises:
        ValueError: it is out of order, or of another base; names it.
    """
    path, delta = opened.path, opened.manifest
    if delta.previous != before.hash:
        kind = "out of order" if delta.base == base else "of another base"
        raise ValueError(
            f"{path} is refused: the delta is {kind}: it follows artifact {delta.previous[:12]} of"
            f" base {delta.base[:12]}, and this is artifact {before.hash[:12]} of base {base[:12]}."
        )


class Deltas:
    """Opens deltas for the collections of one load: the first one that applies a delta reads and
    verifies it, and the others get the same tensors.

    Each call reads which delta is in the folder. The last delta is kept in memory until each
    collection has got it, or another delta is opened.

    Args:
        collections: how many collections the load has.
    """

    def __init__(self, collections: int = 1) -> None:
        self._collections = collections
        self._lock = threading.Lock()
        # The last delta, the bytes of its manifest, and how many collections have not got it.
        self._last: Opened[Delta] | None = None
        self._text, self._left = b"", 0

    def __reduce__(self) -> tuple[type[Deltas], tuple[()]]:
        # Locks can't be copied or pickled. A copy of a collection applies its deltas alone.
        return Deltas, ()

    def open(self, path: Path, before: Manifest, base: str) -> Opened[Delta]:
        """Return a delta that follows an artifact, verified and read into memory: the file may be
        overwritten before its rows are moved.

        Args:
            path: the folder.
            before: the manifest of that artifact.
            base: as in :func:`refuse_unordered`.

        Raises:
            ValueError: it is damaged, out of order, or of another base; names it.
            OSError: a file can't be read.
        """
        with self._lock:
            text = manifest_text(path)
            opened = self._last
            # Equal manifests hold equal checksums of all tensors.
            if opened is None or text != self._text:
                opened = open_artifact(path, Delta, verify=False, text=text)
                refuse_unordered(opened, before, base)
                # export() has checked this too, but a crafted delta may name any hash.
                refuse_changed(before, opened.manifest.artifact)
                opened.read().verify()
                self._text, self._left = text, self._collections
            else:
                # The hash belongs to the artifact that the first collection compared.
                refuse_unordered(opened, before, base)
            self._left -= 1
            self._last = opened if self._left else None
            return opened


def open_chain(base: StrPath, *deltas: StrPath, verify: bool = True) -> Chain:
    """Open an artifact and the deltas after it, and verify their files and their order.

    Args:
        verify: as in :func:`open_artifact`; the order is always verified.

    Raises:
        ValueError: a folder is not an artifact or not a delta, is damaged, or of another version; a
            delta is out of order, or of another base. Names the file.
        OSError: a file can't be read.
    """
    chain = Chain(open_artifact(base, verify=verify))
    base_hash = chain.manifest.hash
    for path in deltas:
        delta = open_artifact(path, Delta, verify=verify)
        refuse_unordered(delta, chain.manifest, base_hash)
        refuse_changed(chain.manifest, delta.manifest.artifact)
        chain = Chain(chain.artifact, (*chain.deltas, delta))
    return chain


def check_artifact(path: StrPath, *deltas: StrPath) -> Chain:
    """Check an artifact and the deltas after it by their own files, and return them.

    The check covers checksums, sizes and bitmaps, that every weight is finite, that the grid of
    every row of 8 or 4 bits holds zero exactly, and that the deltas add up to the artifact that the
    last one describes.

    Raises:
        ValueError: names the file, or the table and the row.
        OSError: a file can't be read.
    """
    chain = open_chain(path, *deltas)
    where = chain.path
    for name, entry in chain.manifest.tables.items():
        table = chain.table(name)
        sums = dict.fromkeys(entry.layout(), 0)
        for key, tensor in table.others().items():
            sums[key] = checksum(tensor)
        for ids, parts in table.parts():
            for key, part in parts.items():
                sums[key] = checksum(part, ids, sums[key])
            places = _find_invalid_rows({**table.whole, **parts}, entry).nonzero()
            if len(places):
                id = int(ids[places[0]])
                raise ValueError(
                    f"{where}: the row of id {id} of table {name!r} has no valid weights."
                )
        if {key: hex_of(value) for key, value in sums.items()} != entry.checksums:
            raise ValueError(f"{where}: table {name!r} is not the one that the delta leads to.")
    return chain


def merge(base: StrPath, *deltas: StrPath, out: StrPath) -> Manifest:
    """Write an artifact and the deltas after it as one artifact, and return its manifest. It equals
    byte for byte a full export at the time of the last delta. Rows are streamed.

    Args:
        base: the folder of the artifact.
        deltas: their folders, in order.
        out: the new folder.

    Raises:
        ValueError: something is at ``out``, or as in :func:`open_chain`; nothing was written.
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
        # The last delta holds the checksums that a full export would have written.
        if writer.seal(manifest) != manifest:
            raise ValueError(f"{chain.path}: the deltas do not add up to what it leads to.")
        writer.publish(manifest)
    return manifest


def _find_invalid_rows(stored: Tensors, entry: Table) -> Tensor:
    """Return which rows have a weight that is not finite, or a grid that does not hold 0: bool
    ``(n,)``."""
    is_invalid = ~decode(stored, entry.dim).isfinite().all(1)
    if "scale_bias" in stored:
        scale, bias = stored["scale_bias"].double().unbind(1)
        # The code that decodes to 0 must be one of the codes.
        zero = -bias / scale
        most = 2 ** ENCODINGS[entry.dtype].bits - 1
        is_invalid |= (zero != zero.round()) | (zero < 0) | (zero > most)
    return is_invalid


# Rows are stored in the order of their ids, so all rows after an added or removed one move.


def apply_rows(stored: Tensors, before: RowIndex, after: RowIndex, new: Tensors) -> None:
    """Apply a delta to the rows of a running process, in place. Memory follows the delta's size.

    Args:
        stored: the rows, with capacity for the rows afterwards: ``(capacity, ...)`` each, any
            dtype.
        before: the index of the rows now.
        after: the index of the rows afterwards.
        new: the rows of the delta by the same names, and their ``ids``.
    """
    if not torch.equal(before.words, after.words):
        stay = before.words & after.words
        spans = [*range(0, before.rows, SPAN)]
        # As with memmove(), the direction of each pass keeps it from overwriting a row that is
        # still to be read: rows that move to lower places go first to last, the others last to
        # first. The order of the rows does not change, so the passes do not disturb each other.
        for first in spans:
            move_some(stored, before, after, ids_in(stay, before.rows, first), -1)
        if before.default_row:
            # The default row is the last one, so it moves between the two passes.
            last = torch.tensor([before.rows])
            move_some(stored, before, after, last, after.num_kept - before.num_kept)
        for first in reversed(spans):
            move_some(stored, before, after, ids_in(stay, before.rows, first), 1)
    at = rows_of(after, new["ids"].long())
    for key, rows in stored.items():
        rows.index_copy_(0, at.to(rows.device), new[key].view(rows.dtype).to(rows.device))


def move_some(
    stored: Tensors, before: RowIndex, after: RowIndex, ids: Tensor, direction: int
) -> None:
    """Move the rows of the ids that move to lower places if ``direction`` is negative, or else to
    higher ones."""
    source, target = rows_of(before, ids), rows_of(after, ids)
    moves = (target - source) * direction > 0
    source, target = source[moves], target[moves]
    for tensor in stored.values():
        # index_select() copies, so the rows of one call may overlap.
        rows = tensor.index_select(0, source.to(tensor.device))
        tensor.index_copy_(0, target.to(tensor.device), rows)
