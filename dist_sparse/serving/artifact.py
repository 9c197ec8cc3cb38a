"""The folder of served tables on disk: its manifest, a streaming writer and a verifying reader.

- ``manifest.json`` describes the tables and the collections that look them up;
  ``tables.safetensors`` holds only tensors. Nothing is unpickled, and no name in a manifest is used
  as a path.
- A folder appears complete or not at all: it is written under a temporary name beside its final
  one, and renamed once everything is on disk. The manifest is the last file, so a killed export
  leaves a folder that is not an artifact.
- Every byte is covered: the manifest and each tensor have checksums, and the header of
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
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_sparse.checks import hex_of, refusing, sync_folder
from dist_sparse.ids.row_index import REMOVED, RowIndex
from dist_sparse.masking.masks import count_bits, unpack
from dist_sparse.messages import names_text
from dist_sparse.serving.encodings import Tensors, chunks
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
# An artifact, or an artifact and the deltas after it.
Folders = StrPath | Iterable[StrPath]

MANIFEST = "manifest.json"
# The suffix of unfinished folders.
PARTIAL = ".partial"

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.int32: "I32", torch.uint8: "U8"}
# A manifest of some 100,000 tables. A larger file is refused before it is read into memory.
_MOST_BYTES = 1 << 26


AnyManifest = TypeVar("AnyManifest", Manifest, Delta)


class Opened(Generic[AnyManifest]):
    """The manifest and the mapped tensors of an artifact or a delta.

    The file of the tables has the size and the header that follow from the manifest. Whether
    a delta fits an artifact is for :func:`~dist_sparse.serving.chain.refuse_unordered` to check.

    Args:
        path: the folder.
        manifest: the manifest in it.

    Raises:
        ValueError: the file of the tables is missing, or does not fit the manifest.
        OSError: it can't be read.
    """

    def __init__(self, path: StrPath, manifest: AnyManifest) -> None:
        self.path = Path(path)
        self.manifest: AnyManifest = manifest
        self._tensors = _map_tensors(self.path / TABLES, manifest)

    def read(self) -> Opened[AnyManifest]:
        """Read all tensors into memory: later writes to the file do not reach them."""
        self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        return self

    def verify(self) -> Opened[AnyManifest]:
        """Verify every byte.

        Raises:
            ValueError: a tensor is not the one that the manifest describes; names file and tensor.
        """
        for name in self.manifest.tables:
            self.verify_table(name)
        return self

    def verify_table(self, name: str, *, rows: bool = True) -> None:
        """Verify every byte of a table, or with ``rows=False`` only of its tensors that are not
        rows."""
        file = self.path / TABLES
        table = self.manifest.tables[name]
        tensors = self.tensors(name)
        # layout() lists the bitmap first. It is verified before its ids are used for the rows.
        for key, tensor in tensors.items():
            if key in PER_ROW and not rows:
                continue
            if key in PER_ROW and isinstance(table, Table):
                found, first = 0, 0
                words = tensors.get("kept", all_kept(table.rows))
                for ids in ids_of(words, table.rows, table.default_row):
                    found = checksum(tensor[first : first + len(ids)], ids, found)
                    first += len(ids)
            else:
                found = checksum(tensor)
            if hex_of(found) != table.checksums.get(key):
                raise ValueError(
                    f"{file} is damaged: the checksum of {name + '.' + key!r} does not fit."
                )
            # Checksums protect against damage, not against a crafted artifact: a bitmap with more
            # bits than there are rows would make lookups read beyond them.
            if key == "kept" and not _is_bitmap_of(table, tensor):
                raise ValueError(
                    f"{file} is refused: {name + '.kept'!r} does not keep the table's rows."
                )

    def tensors(self, table: str) -> dict[str, Tensor]:
        """Return the tensors of a table, named as in its ``layout()``: views of the mapped file.
        Copy what must outlive this object, or what is written to."""
        names = self.manifest.tables[table].layout()
        return {name: self._tensors[f"{table}.{name}"] for name in names}


def open_artifact(
    path: StrPath, kind: Any = Manifest, *, verify: bool = True, text: bytes | None = None
) -> Opened[Any]:
    """Open the folder that :func:`dist_sparse.export` wrote.

    Args:
        path: the folder.
        kind: :class:`Manifest`, or :class:`Delta` for a folder of ``export(since=)``.
        verify: whether to verify all bytes, or only the manifest and the sizes.
        text: what :func:`manifest_text` has read there.

    Raises:
        ValueError: the folder is not an artifact (or delta), or is unfinished, damaged, or of
            another version; names the file.
        OSError: a file can't be read.
    """
    folder = Path(path)
    if text is None:
        text = manifest_text(folder)
    with refusing(folder / MANIFEST):
        manifest = kind.from_text(text.decode())
    opened: Opened[Any] = Opened(folder, manifest)
    return opened.verify() if verify else opened


def manifest_text(folder: Path) -> bytes:
    """Return the bytes of the manifest in a folder.

    Raises:
        ValueError: the folder is not an artifact or delta, or is unfinished, or the file is too
            large.
        OSError: it can't be read.
    """
    file = folder / MANIFEST
    if folder.name.endswith(PARTIAL):
        raise ValueError(f"{folder} is an unfinished export: delete it, and export again.")
    if not file.is_file():
        inside = sorted(found.parent.name for found in folder.glob(f"*/{MANIFEST}"))
        hint = f" Folders inside have one: {names_text(inside, 4)}." if inside else ""
        raise ValueError(f"{folder} is not the folder of an artifact: it has no {MANIFEST}.{hint}")
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{file} is refused: it has more than {_MOST_BYTES} bytes.")
    return file.read_bytes()


class ArtifactWriter(contextlib.AbstractContextManager[Any]):
    """Writes an artifact or a delta under a temporary name. On exit of its context, a folder that
    was not published is deleted.

    Args:
        path: the final name. Missing parent folders are created.

    Raises:
        ValueError: something is at ``path``.
        OSError: the folder can't be written: one of its parents is a file, for example.
    """

    def __init__(self, path: StrPath) -> None:
        self._path = check_new(path)
        _remove_leftovers(self._path)
        self.folder = self._path.with_name(f".{self._path.name}.{os.urandom(4).hex()}{PARTIAL}")
        try:
            self.folder.mkdir(parents=True)
            # The file stays open until the folder is published: its lock tells
            # _remove_leftovers() that this export is alive. Some file systems have no locks.
            self._file = open(self.folder / TABLES, "xb")  # noqa: SIM115
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX)
        except BaseException as error:
            if isinstance(error, OSError):
                # The user knows the final name alone.
                error.filename = str(self._path)
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def begin(self, tables: Mapping[str, Any]) -> None:
        """Write the header for the tables, by name. Their checksums are not needed yet."""
        layout = _file_layout(tables)
        self._checksums = dict.fromkeys(layout.spans, 0)
        # Rows arrive in chunks, with a chunk of each of the table's tensors. This is where the next
        # chunk of each tensor is written.
        self._positions = {name: span.start for name, span in layout.spans.items()}
        self._file.write(layout.header)

    def add(self, table: str, parts: Tensors, ids: Tensor | None = None) -> None:
        """Write the next rows of a table, or its tensors that are not rows: see :meth:`append`."""
        for key, part in parts.items():
            self.append(f"{table}.{key}", part, ids)

    def append(self, name: str, part: Tensor, ids: Tensor | None = None) -> None:
        """Write the next rows of the tensor ``name``, in the dtype of :meth:`Table.layout`.

        Args:
            ids: the ids of the rows of an artifact, int64 ``(n,)``: see :func:`checksum`.
        """
        # It needs a name: buffer_of() does not keep it alive.
        stored = part.detach().cpu().contiguous()
        self._file.seek(self._positions[name])
        self._positions[name] += self._file.write(buffer_of(stored))
        self._checksums[name] = checksum(stored, ids, self._checksums[name])

    def seal(self, manifest: AnyManifest) -> AnyManifest:
        """Sync the tables to disk, and return ``manifest`` with their size and checksums."""
        self._file.flush()
        os.fsync(self._file.fileno())
        tables = {}
        for name, table in manifest.tables.items():
            checksums = {key: hex_of(self._checksums[f"{name}.{key}"]) for key in table.layout()}
            tables[name] = replace(table, checksums=checksums)
        return replace(manifest, tables=tables, bytes=file_bytes(tables))

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
        # The manifest is written last: a folder without it is not an artifact.
        with open(self.folder / MANIFEST, "xb") as file:
            file.write(manifest.to_text().encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.folder)
        # Check again: rename() would replace an empty folder that another process created since.
        os.rename(self.folder, check_new(self._path))
        sync_folder(self._path.parent)

    def __exit__(self, *error: object) -> None:
        # close() flushes again, and fails again on a full disk.
        with contextlib.suppress(OSError):
            self._file.close()
        # A published folder no longer has this name.
        shutil.rmtree(self.folder, ignore_errors=True)


def folders_of(name: str, value: Any) -> list[Path]:
    """Return the absolute paths of an argument that is a path, or an iterable of the paths of an
    artifact and the deltas after it.

    Raises:
        ValueError: something in it is not a path; ``name`` is for the message.
    """
    is_one = isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Iterable)
    return [absolute_path(name, folder) for folder in ([value] if is_one else value)]


def absolute_path(name: str, value: Any) -> Path:
    """Return the absolute path of an argument: the working directory may change later.

    Raises:
        ValueError: it is not a path; ``name`` is for the message.
    """
    # abspath("") would be the working directory.
    if not isinstance(value, (str, os.PathLike)) or value == "":
        raise ValueError(f"Invalid {name}={value!r}: must be the path of a folder.")
    return Path(os.path.abspath(value))


def check_new(path: StrPath) -> Path:
    """Return the absolute path of an artifact that is to be written.

    Raises:
        ValueError: something is there, or the name is reserved for unfinished exports.
    """
    target = absolute_path("path", path)
    invalid = f"Invalid path={str(path)!r}"
    # lexists() is true for a broken link too.
    if os.path.lexists(target):
        raise ValueError(
            f"{invalid}: it exists already; an artifact is never overwritten. Choose another path."
        )
    if target.name.endswith(PARTIAL):
        raise ValueError(f"{invalid}: names of unfinished exports end in {PARTIAL!r}.")
    return target


def _remove_leftovers(path: Path) -> None:
    """Remove the folders of killed exports to the same path. A running export holds a lock."""
    name = f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}{PARTIAL}"
    for folder in path.parent.glob(name):
        file = folder / TABLES
        # Exports leave folders and regular files. A link is not followed, and opening a named pipe
        # would wait for its writer.
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(folder.lstat().st_mode) and stat.S_ISREG(file.lstat().st_mode):
                with open(file, "rb", opener=_open_itself) as opened:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)


def _open_itself(file: str, flags: int) -> int:
    """Open a file, but nothing that took its place since it was looked at."""
    return os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _map_tensors(file: Path, manifest: Manifest | Delta) -> dict[str, Tensor]:
    """Return the tensors of a file by name, or refuse a file whose size or header does not follow
    from the manifest."""
    if not file.is_file():
        raise ValueError(f"{file} is missing.")
    header, spans, expected = _file_layout(manifest.tables)
    size = file.stat().st_size
    if size != expected:
        raise ValueError(f"{file} is damaged: it has {size} bytes, and {MANIFEST} says {expected}.")
    with open(file, "rb") as opened:
        if opened.read(len(header)) != header:
            raise ValueError(
                f"{file} is damaged: its header does not list the tensors of {MANIFEST}."
            )
    # The mapping is private: writes to a tensor do not reach the file.
    raw = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    return {
        name: raw[spans[name]].view(dtype).view(shape)
        for name, (dtype, shape) in layout_of(manifest.tables).items()
    }


class _FileLayout(NamedTuple):
    """A safetensors file: its header, the bytes of each tensor, and its size."""

    header: bytes
    spans: dict[str, slice]
    size: int


def _file_layout(tables: Mapping[str, Any]) -> _FileLayout:
    entries: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in layout_of(tables).items():
        start = end
        end += size_of(dtype, shape)
        entries[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    # A safetensors file is 8 bytes of length, JSON and tensors. Spaces align the tensors.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    # Offsets in the header count from its end, spans from the beginning of the file.
    before = len(header)
    spans = {}
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        spans[name] = slice(before + start, before + end)
    return _FileLayout(header, spans, before + end)


def file_bytes(tables: Mapping[str, Any]) -> int:
    """Return the size of ``tables.safetensors``."""
    return _file_layout(tables).size


def _is_bitmap_of(table: Any, words: Tensor) -> bool:
    """Whether a bitmap has a bit for each kept row, and none after the last row."""
    beyond = words[-1] & ~_last_word(table.rows)
    return not bool(beyond) and bool(count_bits(words.view(torch.uint8)) == table.kept)


def checksum(part: Tensor, ids: Tensor | None = None, value: int = 0) -> int:
    """Return the checksum of a tensor up to the end of ``part``, as :func:`zlib.crc32` does.

    Rows of an artifact, which come with their ``ids``, have :func:`sum_of_rows`. All other tensors
    have a CRC32.

    Args:
        value: the checksum up to the beginning of ``part``.
    """
    if ids is None:
        contiguous = part.contiguous()
        return zlib.crc32(buffer_of(contiguous), value)
    return (value + sum_of_rows(ids, part)) % 2**64


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without keeping it alive."""
    # Tensor.numpy() would need NumPy.
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


# Functions that find rows by their ids. The cost of a delta follows its changes: the functions that
# it uses read only the rows that they are called with.

# How many ids are unpacked from a bitmap at once, and how many rows are moved at once.
SPAN = 1 << 16


def sum_of_rows(ids: Tensor, rows: Tensor) -> int:
    """Return a checksum of rows ``(n, columns)`` and their ids: the sum of their hashes, modulo
    2**64.

    Unlike a CRC, it does not depend on the order of the rows: a delta subtracts the hashes of old
    rows and adds the hashes of new ones, without reading the rest. A hash is the sum of the row's
    32-bit words times 64-bit factors (Lemire and Kaser, "Strongly universal string hashing is
    fast", 2014).
    """
    words, total = words_of(rows), 0
    factors = _factors(words.shape[1] + 1)
    for part in chunks(*words.shape):
        # Overflow is intended: int64 arithmetic is arithmetic modulo 2**64.
        hashes = torch.mv(words[part].long(), factors[1:]) + ids[part].long() * factors[0]
        total += int(mix64(hashes).sum())
    return total % 2**64


def words_of(rows: Tensor) -> Tensor:
    """Return the bytes of rows as int32, padded with zero bytes. Comparing words tells -0.0 from
    0.0."""
    raw = rows.contiguous().view(torch.uint8)
    # view() needs 4-byte alignment, which rows of a mapped file may not have.
    if raw.shape[1] % 4 or raw.storage_offset() % 4:
        raw = F.pad(raw, (0, -raw.shape[1] % 4)).clone()
    return raw.view(torch.int32)


@cache
def _factors(count: int) -> Tensor:
    # Factors are odd, so that multiplying modulo 2**64 is invertible and loses no bit of a word.
    return mix64(torch.arange(1, count + 1) * STEP) | 1


def all_kept(rows: int) -> Tensor:
    """Return the bitmap of a table that keeps all rows."""
    # 32 one bits are -1 as an int32.
    words = torch.full((max(1, -(-rows // 32)),), -1, dtype=torch.int32)
    words[-1] = _last_word(rows)
    return words


def _last_word(rows: int) -> Tensor:
    """Return the last word of a bitmap that keeps all rows. Its bits after the last row are 0."""
    first = 32 * max(0, (rows - 1) // 32)
    return torch.tensor((1 << rows - first) - 1).int()


def ids_in(words: Tensor, rows: int, first: int) -> Tensor:
    """Return the kept ids in ``[first, first + SPAN)``: int64, ascending."""
    packed = words[first // 32 : (first + SPAN) // 32].view(torch.uint8)
    return unpack(packed, min(SPAN, rows - first)).nonzero().flatten() + first


def ids_of(words: Tensor, rows: int, default_row: bool = False) -> Iterator[Tensor]:
    """Yield the ids of the stored rows, a few at a time: int64, ascending. The default row counts
    as the row of the id after the last one."""
    for first in range(0, rows, SPAN):
        yield ids_in(words, rows, first)
    if default_row:
        yield torch.tensor([rows])


def rows_of(index: RowIndex, ids: Tensor) -> Tensor:
    """Return the row of each id: int64. An id without its own row has :data:`REMOVED`, and the id
    after the last one has the default row, as in :func:`ids_of`."""
    rows: Tensor = index(ids)
    # The index returns the default row for removed ids.
    rows = torch.where(rows == index.num_kept, REMOVED, rows)
    return torch.where(ids == index.rows, index.num_kept, rows)
