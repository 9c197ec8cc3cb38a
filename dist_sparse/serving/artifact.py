"""The folder of served tables on disk: its manifest, a streaming writer and a verifying reader.

- ``manifest.json`` describes the tables and the collections that look them up;
  ``tables.safetensors`` holds tensors and nothing else. Nothing is unpickled, and no name in a
  manifest is used as a path.
- A folder appears whole or not at all: it is written under a temporary name beside its final one,
  and renamed once everything is on disk. The manifest is the last file, so that a leftover of a
  killed export is no artifact.
- Every byte is covered: the manifest and each tensor by a checksum, and the header of
  ``tables.safetensors`` follows from the manifest. All of it is verified before it is served.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.checks import hex_of, refuse, sync_folder
from dist_sparse.compaction.row_index import REMOVED, RowIndex
from dist_sparse.masking.masks import count_bits, unpack
from dist_sparse.serving.encodings import chunks
from dist_sparse.serving.manifest import (
    PER_ROW,
    TABLES,
    Delta,
    Manifest,
    Table,
    layout_of,
    size_of,
)
from dist_sparse.tables.hashing import STEP, mix64

StrPath = str | os.PathLike[str]

MANIFEST = "manifest.json"
# Suffix of folders that are being written.
PARTIAL = ".partial"

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.int32: "I32", torch.uint8: "U8"}
_LONGEST = 1 << 26  # bytes of a manifest that are read: 64 MiB, some 100,000 tables


AnyManifest = TypeVar("AnyManifest", Manifest, Delta)


class Opened(Generic[AnyManifest]):
    """The manifest and the mapped tensors of an artifact or a delta, in a file of the size and
    with the header that follow from the manifest. Whether a delta fits an artifact is not known
    yet.

    Args:
        path: the folder.
        manifest: of it.

    Raises:
        ValueError: the file of the tables is missing, or another one.
        OSError: it can't be read.
    """

    def __init__(self, path: StrPath, manifest: AnyManifest) -> None:
        self.path = Path(path)
        self.manifest: AnyManifest = manifest
        self._tensors = _mapped(self.path / TABLES, manifest)

    def verify(self) -> Opened[AnyManifest]:
        """Verify every byte.

        Raises:
            ValueError: they are not what the manifest describes; names file and tensor.
        """
        for name in self.manifest.tables:
            self.verify_table(name)
        return self

    def verify_table(self, name: str, *, rows: bool = True) -> None:
        """Verify every byte of a table, or of its tensors that are no rows."""
        file = self.path / TABLES
        table = self.manifest.tables[name]
        tensors = self.tensors(name)
        # The bitmap comes first, and says which ids the rows belong to.
        for key, tensor in tensors.items():
            if key in PER_ROW and not rows:
                continue
            if key in PER_ROW and isinstance(table, Table):
                found, first = 0, 0
                words = tensors.get("kept", all_kept(table.rows))
                for ids in ids_of(words, table.rows, table.default_row):
                    found = added(found, tensor[first : first + len(ids)], ids)
                    first += len(ids)
            else:
                found = added(0, tensor, None)
            if hex_of(found) != table.checksums.get(key):
                raise ValueError(
                    f"{file} is damaged: the checksum of {name + '.' + key!r} does not fit."
                )
            # A crafted artifact has checksums that fit, and its lookups must stay in the table.
            if key == "kept" and not _fits(tensor, table):
                raise ValueError(
                    f"{file} is refused: {name + '.kept'!r} does not keep the table's rows."
                )

    def tensors(self, table: str) -> dict[str, Tensor]:
        """Return the tensors of a table, named as in its ``layout()``: views of the mapped file, to
        be copied by whatever outlives this object or writes."""
        names = self.manifest.tables[table].layout()
        return {name: self._tensors[f"{table}.{name}"] for name in names}


def open_artifact(path: StrPath, kind: Any = Manifest, *, verify: bool = True) -> Opened[Any]:
    """Open the folder that :func:`dist_sparse.export` wrote.

    Args:
        path: of it.
        kind: :class:`Manifest`, or :class:`Delta` of what ``export(since=)`` wrote.
        verify: all of its bytes; otherwise its manifest and sizes alone.

    Raises:
        ValueError: it is no such folder, unfinished, damaged, or of another version; names the
            file.
        OSError: a file can't be read.
    """
    opened = Opened(path, _read(Path(path), kind))
    return opened.verify() if verify else opened


def _read(folder: Path, kind: type[AnyManifest]) -> AnyManifest:
    """Return the manifest of a folder."""
    file = folder / MANIFEST
    unfinished = f"{folder} is what an unfinished export left: delete it, and export again."
    missing = f"{folder} holds no artifact: there is no {MANIFEST}."
    refuse({unfinished: folder.name.endswith(PARTIAL), missing: not file.is_file()})
    # Before the file is read: it may be anything that has this name.
    if file.stat().st_size > _LONGEST:
        raise ValueError(f"{file} is refused: it has more than {_LONGEST} bytes.")
    try:
        return kind.from_text(file.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"{file} is refused: {error}.") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is refused: an entry is missing or of another type: {error!r}."
        ) from None


class ArtifactWriter(contextlib.AbstractContextManager[Any]):
    """An artifact or a delta that is being written, under a temporary name; as a context manager it
    deletes one that was not published.

    Args:
        path: the final name. Missing parent folders are made.

    Raises:
        ValueError: something is at ``path``.
        OSError: the folder can't be written: one of its parents is a file, for example.
    """

    def __init__(self, path: StrPath) -> None:
        self._path = check_new(path)
        _remove_left(self._path)
        self.folder = self._path.with_name(f".{self._path.name}.{os.urandom(4).hex()}{PARTIAL}")
        try:
            self.folder.mkdir(parents=True)
            # Chunks of rows and of scales alternate, so it is written at several places.
            self._file = open(self.folder / TABLES, "xb")  # noqa: SIM115  (locked until published)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_EX)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def begin(self, tables: Mapping[str, Any]) -> None:
        """Write the header of the tables, by name; their checksums are not known yet."""
        placed = _placed(tables)
        self._checksums = dict.fromkeys(placed.spans, 0)
        # Tensors are written side by side: where the next rows of each belong.
        self._at = {name: span.start for name, span in placed.spans.items()}
        self._file.write(placed.header)

    def add(self, table: str, parts: Mapping[str, Tensor], ids: Tensor | None = None) -> None:
        """Write the next rows of a table, or its tensors that are no rows; as of :meth:`append`."""
        for key, part in parts.items():
            self.append(f"{table}.{key}", part, ids)

    def append(self, name: str, part: Tensor, ids: Tensor | None = None) -> None:
        """Write the next rows of the tensor ``name``, in the dtype of :meth:`Table.layout`.

        Args:
            ids: of the rows of an artifact, int64 ``(n,)``; its other tensors, and the ones of a
                delta, have a CRC32.
        """
        # The memory below belongs to this tensor, which must live until it is written.
        held = part.detach().cpu().contiguous()
        raw = memory_of(held)
        self._file.seek(self._at[name])
        self._file.write(raw)
        self._at[name] += len(raw)
        self._checksums[name] = added(self._checksums[name], held, ids)

    def seal(self, manifest: AnyManifest) -> AnyManifest:
        """Bring the tables to disk, and return ``manifest`` with their sizes and checksums."""
        self._file.flush()
        os.fsync(self._file.fileno())
        tables = {}
        for name, table in manifest.tables.items():
            found = {key: hex_of(self._checksums[f"{name}.{key}"]) for key in table.layout()}
            tables[name] = replace(table, checksums=found)
        return replace(manifest, tables=tables, bytes=bytes_of(tables))

    def finish(self, manifest: AnyManifest) -> AnyManifest:
        """Read the tables back, give the folder its name, and return ``manifest`` as written."""
        sealed = self.seal(manifest)
        Opened(self.folder, sealed).verify()
        self.publish(sealed)
        return sealed

    def publish(self, manifest: Manifest | Delta) -> None:
        """Write the manifest, and give the folder its final name.

        Raises:
            ValueError: something is at that name by now.
        """
        # Written last: a folder without it is no artifact, whatever a kill has left.
        with open(self.folder / MANIFEST, "xb") as file:
            file.write(manifest.to_text().encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.folder)
        # Checked again, as a rename replaces an empty folder that another process has made since.
        os.rename(self.folder, check_new(self._path))
        sync_folder(self._path.parent)

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # a full disk, which has been raised already
            self._file.close()
        # Once published, it is no longer there.
        shutil.rmtree(self.folder, ignore_errors=True)


def folders_of(path: StrPath | Sequence[StrPath]) -> list[Any]:
    """Return a folder, or an artifact and the deltas after it, as a list."""
    return [path] if isinstance(path, (str, os.PathLike)) else [*path]


def check_new(path: StrPath) -> Path:
    """Return the absolute path of an artifact that is to be written.

    Raises:
        ValueError: something is there, or its name is one of unfinished exports.
    """
    found = Path(os.path.abspath(path))
    # A link to nothing is in the way too, which exists() does not see.
    taken = f"Invalid path={str(path)!r}: it exists already; an artifact is never overwritten."
    partial = f"Invalid path={str(path)!r}: names of unfinished exports end in {PARTIAL!r}."
    refuse({taken: os.path.lexists(found), partial: found.name.endswith(PARTIAL)})
    return found


def _remove_left(path: Path) -> None:
    """Remove what killed exports to the same path have left: one that lives holds a lock."""
    name = f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}{PARTIAL}"
    for left in path.parent.glob(name):
        with contextlib.suppress(OSError), open(left / TABLES, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)


def _mapped(file: Path, manifest: Manifest | Delta) -> dict[str, Tensor]:
    """Return the tensors of a file that has the size and the header that follow from the
    manifest."""
    if not file.is_file():
        raise ValueError(f"{file} is missing.")
    header, spans, expected = _placed(manifest.tables)
    size = file.stat().st_size
    if size != expected:
        raise ValueError(f"{file} is damaged: it has {size} bytes, and {MANIFEST} says {expected}.")
    with open(file, "rb") as opened:
        if opened.read(len(header)) != header:
            raise ValueError(
                f"{file} is damaged: its header does not list the tensors of {MANIFEST}."
            )
    # Private: nothing that is written to a tensor reaches the file.
    raw = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    found = {}
    for name, (dtype, shape) in layout_of(manifest.tables).items():
        found[name] = raw[spans[name]].view(dtype).view(shape)
    return found


class _Placed(NamedTuple):
    """A safetensors file: its header, where its tensors are in the file, and its bytes."""

    header: bytes
    spans: dict[str, slice]
    size: int


def _placed(tables: Mapping[str, Any]) -> _Placed:
    """Return the file of some tables."""
    entries, sizes = {}, {}
    end = 0
    for name, (dtype, shape) in layout_of(tables).items():
        sizes[name] = size_of(dtype, shape)
        offsets = [end, end + sizes[name]]
        end += sizes[name]
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    # Spaces at its end: the tensors begin behind it, and must be aligned.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    # Offsets in the header count from its end.
    end, spans = len(header), {}
    for name, size in sizes.items():
        spans[name] = slice(end, end + size)
        end += size
    return _Placed(header, spans, end)


def bytes_of(tables: Mapping[str, Any]) -> int:
    """Return the bytes of ``tables.safetensors``."""
    return _placed(tables).size


def _fits(words: Tensor, table: Any) -> bool:
    """Whether a bitmap has a bit for each kept row, and none behind the last row."""
    beyond = words[-1] & ~_last_word(table.rows)
    return not bool(beyond) and bool(count_bits(words.view(torch.uint8)) == table.kept)


def added(checksum: int, part: Tensor, ids: Tensor | None) -> int:
    """Return the checksum of a tensor up to ``part`` from the one before it. ``ids``: of the rows
    of an artifact; the other tensors have a CRC32."""
    if ids is None:
        held = part.contiguous()
        return zlib.crc32(memory_of(held), checksum)
    return (checksum + sum_of_rows(ids, part)) % 2**64


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which must outlive them."""
    # Tensor.numpy() would need NumPy.
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


# Rows by the ids that they belong to. A delta costs what it changes: nothing here that it needs
# reads rows that it does not name.

# Ids that are taken from a bitmap, and rows that are moved, at once.
SPAN = 1 << 16


def sum_of_rows(ids: Tensor, rows: Tensor) -> int:
    """Return a checksum of rows ``(n, columns)`` and their ids: the sum of a hash of each, modulo
    2**64.

    Whatever is stored beside a row or before it, its share is the same: a delta takes the shares of
    old rows out and puts the ones of new rows in. A row is hashed by its words of 32 bits times
    factors of 64 (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
    """
    words, total = words_of(rows), 0
    factors = _factors(words.shape[1] + 1)
    for some in chunks(*words.shape):
        # Overflow is meant: sums and products are those of integers modulo 2**64.
        hashes = torch.mv(words[some].long(), factors[1:]) + ids[some].long() * factors[0]
        total += int(mix64(hashes).sum())
    return total % 2**64


def words_of(rows: Tensor) -> Tensor:
    """Return the bytes of rows as int32, the last ones with zeros behind: -0.0 is not 0.0."""
    raw = rows.contiguous().view(torch.uint8)
    # Rows of a mapped file need not begin at a word.
    if raw.shape[1] % 4 or raw.storage_offset() % 4:
        raw = F.pad(raw, (0, -raw.shape[1] % 4)).clone()
    return raw.view(torch.int32)


@cache
def _factors(count: int) -> Tensor:
    # SplitMix64's numbers, and odd ones: no bit of a word is lost.
    return mix64(torch.arange(1, count + 1) * STEP) | 1


def all_kept(rows: int) -> Tensor:
    """Return the bitmap of a table that keeps all rows."""
    # As an int32, 32 ones are -1.
    words = torch.full((max(1, -(-rows // 32)),), -1, dtype=torch.int32)
    words[-1] = _last_word(rows)
    return words


def _last_word(rows: int) -> Tensor:
    """Return the last word of a bitmap that keeps all rows: bits behind the last row are 0."""
    before = 32 * max(0, (rows - 1) // 32)
    return torch.tensor((1 << rows - before) - 1).int()


def ids_in(words: Tensor, rows: int, first: int) -> Tensor:
    """Return the ids of a span that a bitmap keeps, int64, ascending."""
    some = words[first // 32 : (first + SPAN) // 32].view(torch.uint8)
    return unpack(some, min(SPAN, rows - first)).nonzero().flatten() + first


def ids_of(words: Tensor, rows: int, default_row: bool = False) -> Iterator[Tensor]:
    """Yield the ids of the stored rows of a bitmap, a few at a time: int64, ascending; the default
    row has the id behind the last."""
    for first in range(0, rows, SPAN):
        yield ids_in(words, rows, first)
    if default_row:
        yield torch.tensor([rows])


def rows_of(index: RowIndex, ids: Tensor) -> Tensor:
    """Return the row of each id, the default row for the id behind the last, and :data:`REMOVED`
    where an id has no row of its own: int64."""
    found: Tensor = index(ids)
    found = torch.where(found == index.num_kept, REMOVED, found)
    return torch.where(ids == index.rows, index.num_kept, found)
