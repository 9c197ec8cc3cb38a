"""The folder of served tables on disk: its manifest, a streaming writer and a verifying reader.

- ``manifest.json`` describes the tables and the collections that look them up;
  ``tables.safetensors`` holds tensors and nothing else. Nothing is unpickled, and no name in a
  manifest is used as a path.
- A folder appears whole or not at all: it is written under a temporary name beside its final one,
  and renamed once everything is on disk. The manifest is the last file, so that a leftover of a
  killed export is no artifact.
- Every byte is covered: the manifest and each tensor by a CRC32, and the header of
  ``tables.safetensors`` follows from the manifest. All of it is verified before a tensor is
  returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from dist_sparse.files import hex_of, sync_folder
from dist_sparse.masking.masks import count_bits
from dist_sparse.serving.delta import Delta
from dist_sparse.serving.manifest import TABLES, Layout, Manifest, layout_of, size_of

MANIFEST: Final = "manifest.json"
# Suffix of folders that are being written.
PARTIAL: Final = ".partial"

_DTYPES: Final = {torch.float32: "F32", torch.float16: "F16", torch.int32: "I32", torch.uint8: "U8"}
_LONGEST: Final = 1 << 26  # bytes of a manifest that are read: 64 MiB, some 100,000 tables


Written = TypeVar("Written", Manifest, Delta)


class Verified(Generic[Written]):
    """The manifest and the tensors of an artifact or a delta, all verified. Whether a delta fits an
    artifact is not known yet: see :meth:`Delta.refuse_other`.

    Args:
        path: the folder.
        manifest: of it.

    Raises:
        ValueError: the file of the tables is not what the manifest describes; names file and
            tensor.
        OSError: it can't be read.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Written) -> None:
        self.path = Path(path)
        self.manifest: Written = manifest
        file = self.path / TABLES
        self._tensors = _mapped(file, manifest)
        for name, table in manifest.tables.items():
            for key, tensor in self.tensors(name).items():
                if hex_of(zlib.crc32(memory_of(tensor))) != table.crc32.get(key):
                    raise ValueError(
                        f"{file} is damaged: the CRC32 of {name + '.' + key!r} does not fit."
                    )
                # A crafted artifact has CRC32s that fit, and its lookups must stay in the table.
                if key == "kept" and not _fits(tensor, table):
                    raise ValueError(
                        f"{file} is refused: {name + '.kept'!r} does not keep the table's rows."
                    )

    def tensors(self, table: str) -> dict[str, Tensor]:
        """Return the tensors of a table, named as in its ``layout()``: views of the mapped file, to
        be copied by whatever outlives this object or writes."""
        names = self.manifest.tables[table].layout()
        return {name: self._tensors[f"{table}.{name}"] for name in names}


VerifiedArtifact: TypeAlias = Verified[Manifest]
VerifiedDelta: TypeAlias = Verified[Delta]


def open_artifact(path: str | os.PathLike[str]) -> VerifiedArtifact:
    """Open the folder that :func:`dist_sparse.export` wrote, and verify all of it.

    Raises:
        ValueError: it is no artifact, unfinished, damaged, or of another version; names the file.
        OSError: a file can't be read.
    """
    return Verified(path, _read(Path(path), Manifest))


def open_delta(path: str | os.PathLike[str]) -> VerifiedDelta:
    """Open the delta that ``export(since=)`` wrote, and verify all of it.

    Raises:
        ValueError: it is no delta, unfinished, damaged, or of another version; names the file.
        OSError: a file can't be read.
    """
    return Verified(path, _read(Path(path), Delta))


def _read(folder: Path, kind: type[Written]) -> Written:
    """The manifest of a folder."""
    file = folder / MANIFEST
    if folder.name.endswith(PARTIAL):
        raise ValueError(
            f"{folder} is what an unfinished export left: delete it, and export again."
        )
    if not file.is_file():
        raise ValueError(f"{folder} holds no artifact: there is no {MANIFEST}.")
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
        tables: by name; their CRC32 and checks are not known yet. None: :meth:`begin` gets them.

    Raises:
        ValueError: something is at ``path``.
        OSError: the folder can't be written: one of its parents is a file, for example.
    """

    def __init__(
        self, path: str | os.PathLike[str], tables: Mapping[str, Any] | None = None
    ) -> None:
        self._path = check_new(path)
        self.folder = self._path.with_name(f".{self._path.name}.{os.urandom(4).hex()}{PARTIAL}")
        try:
            self.folder.mkdir(parents=True)
            # Chunks of rows and of scales alternate, so it is written at several places.
            self._file = open(self.folder / TABLES, "xb")  # noqa: SIM115  (open until it is sealed)
            if tables is not None:
                self.begin(tables)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def begin(self, tables: Mapping[str, Any]) -> None:
        """Write the header of the tables."""
        layout = layout_of(tables)
        header = _header(layout)
        self._crcs = dict.fromkeys(layout, 0)
        # Tensors are written side by side: where the next rows of each belong, and where it ends.
        spans = _spans(layout)
        self._at = {name: len(header) + span.start for name, span in spans.items()}
        self._ends = {name: len(header) + span.stop for name, span in spans.items()}
        self._file.write(header)

    def append(self, name: str, part: Tensor) -> None:
        """Write the next rows of the tensor ``name``, in the dtype of :meth:`Table.layout`."""
        # The memory below belongs to this tensor, which must live until it is written.
        held = part.detach().cpu().contiguous()
        raw = memory_of(held)
        self._file.seek(self._at[name])
        self._file.write(raw)
        self._crcs[name] = zlib.crc32(raw, self._crcs[name])
        self._at[name] += len(raw)

    def seal(self, manifest: Written) -> Written:
        """Bring the tables to disk, and return ``manifest`` with their sizes and CRC32s."""
        assert self._at == self._ends, f"not written whole: {self._at}, {self._ends}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        tables = {}
        for name, table in manifest.tables.items():
            crc32 = {key: hex_of(self._crcs[f"{name}.{key}"]) for key in table.layout()}
            tables[name] = replace(table, crc32=crc32)
        return replace(manifest, tables=tables, bytes=bytes_of(tables))

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


def check_new(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of an artifact that is to be written.

    Raises:
        ValueError: something is there, or its name is one of unfinished exports.
    """
    found = Path(os.path.abspath(path))
    # A link to nothing is in the way too, which exists() does not see.
    if os.path.lexists(found):
        raise ValueError(
            f"Invalid path={str(path)!r}: it exists already; an artifact is never overwritten."
        )
    if found.name.endswith(PARTIAL):
        raise ValueError(
            f"Invalid path={str(path)!r}: names that end in {PARTIAL!r} are those of unfinished"
            " exports."
        )
    return found


def _mapped(file: Path, manifest: Manifest | Delta) -> dict[str, Tensor]:
    """The tensors of a file that has the size and the header that follow from the manifest."""
    if not file.is_file():
        raise ValueError(f"{file} is missing.")
    layout = layout_of(manifest.tables)
    header, expected = _header(layout), bytes_of(manifest.tables)
    if (size := file.stat().st_size) != expected:
        raise ValueError(f"{file} is damaged: it has {size} bytes, and {MANIFEST} says {expected}.")
    with open(file, "rb") as opened:
        if opened.read(len(header)) != header:
            raise ValueError(
                f"{file} is damaged: its header does not list the tensors of {MANIFEST}."
            )
    # Private: nothing that is written to a tensor reaches the file.
    raw = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    tensors, found = raw[len(header) :], {}
    for name, span in _spans(layout).items():
        dtype, shape = layout[name]
        found[name] = tensors[span].view(dtype).view(shape)
    return found


def _spans(layout: Layout) -> dict[str, slice]:
    """Where the bytes of each tensor are behind the header."""
    found, end = {}, 0
    for name, each in layout.items():
        start, end = end, end + size_of(*each)
        found[name] = slice(start, end)
    return found


def _header(layout: Layout) -> bytes:
    """Length and JSON of a safetensors file, padded with spaces to a multiple of 8 bytes."""
    entries = {}
    for name, span in _spans(layout).items():
        dtype, shape = layout[name]
        offsets = [span.start, span.stop]
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    # The tensors begin behind the header, and must be aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tables: Mapping[str, Any]) -> int:
    """Return the bytes of ``tables.safetensors``."""
    layout = layout_of(tables)
    return len(_header(layout)) + sum(size_of(*each) for each in layout.values())


def _fits(words: Tensor, table: Any) -> bool:
    """Whether a bitmap has a bit for each kept row, and none behind the last row."""
    beyond = table.rows % 32
    if beyond and int(words[-1]) >> beyond:
        return False
    return bool(count_bits(words.view(torch.uint8)) == table.kept)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which must outlive them."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    # Tensor.numpy() would need NumPy.
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
