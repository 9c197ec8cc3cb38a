"""Folders of checkpoints: one a step, written once, whole from the moment it holds its marker.

``step-<step>/`` holds what DCP has written, ``values.json`` and, written last and by a rename,
``COMMITTED``: bytes and CRC32 of every other file, and of itself. A folder without it is what a
save has left that was killed or failed. No folder is renamed and none is written twice: object
stores know no rename of folders, and a mix of two saves would load.

Nothing here communicates: one rank prepares, commits and sweeps. Files are on any of DCP's file
systems.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import stat
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from dist_sparse.checks import hex_of, integer, sealed, sync_folder, unsealed

# Bytes of a file, and their CRC32.
Entry = tuple[int, int]

FORMAT: Final = "dist_sparse.checkpoint"
VERSION: Final = 1
MARKER: Final = "COMMITTED"
VALUES: Final = "values.json"

_STEP: Final = re.compile(r"step-(\d{8,})")
_BROKEN_ADDRESS: Final = re.compile(r"[a-z][a-z0-9+]+:/(?!/)")
_FILE: Final = re.compile(r"[A-Za-z0-9_.-]+")
_LONGEST: Final = 1 << 26  # bytes of JSON that are read: 64 MiB
_READ_AT_ONCE: Final = 1 << 19  # bytes, that stay in a core's cache for the checksum


@dataclass(frozen=True, kw_only=True)
class Marker:
    """The entries of ``COMMITTED``.

    Args:
        step: of the checkpoint.
        world: number of ranks that wrote it.
        files: bytes and CRC32 of each, by name.
    """

    step: int
    world: int
    files: Mapping[str, Entry]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by name."""
        return {name: length for name, (length, _) in self.files.items()}

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes.values())


class Folders:
    """The checkpoints in one folder.

    Args:
        root: the folder; a path, or an address that fsspec knows.

    Raises:
        ValueError: fsspec does not know the address, or it was passed as a Path.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        given = os.fspath(root)
        # Pathlib makes one slash of two: it would be a folder of this machine.
        if _BROKEN_ADDRESS.match(given):
            raise ValueError(f"Invalid root={given!r}: pass an address as a string, not as a Path.")
        self.local = "://" not in given
        self.root = os.path.abspath(given) if self.local else given.rstrip("/")
        self.files = _filesystem_of(self.root)

    def path(self, step: int) -> str:
        """Return the folder of a step."""
        return f"{self.root}/step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the committed steps in ascending order."""
        return [step for step in self._found() if self.files.exists(f"{self.path(step)}/{MARKER}")]

    def warn_of_unmarked(self, newest: int) -> None:
        """Warn of a folder that is newer than the newest checkpoint: a marker may have been
        lost."""
        if (last := self._found()[-1]) > newest:
            warnings.warn(
                f"{self.path(last)} is newer than step {newest}, the newest checkpoint, and has no"
                f" {MARKER}: it is of a save that was killed or failed, or the file was lost.",
                stacklevel=3,
            )

    def prepare(self, step: int) -> None:
        """Make way for a checkpoint: delete what an unfinished save of the same step has left.

        Raises:
            ValueError: the step or a later one is committed.
        """
        # The first save makes the folder.
        self.files.mkdir(self.root)
        if (last := max(self.steps(), default=-1)) >= step:
            raise ValueError(
                f"Invalid {step=}: {self.root} holds the checkpoint of step {last}, and steps must"
                " grow: resume from it, save to another folder, or delete it."
            )
        self.delete(step)

    def commit(self, marker: Marker, values: Mapping[str, Any]) -> None:
        """Write the values and then the marker, which lists them too, of a folder whose other files
        are on disk."""
        folder = self.path(marker.step)
        written = self._write(f"{folder}/{VALUES}", json.dumps(values, allow_nan=False))
        # The marker must not reach the disk before the files that it lists.
        self._sync(folder)
        entries = {
            name: {"bytes": length, "crc32": hex_of(crc)}
            for name, (length, crc) in sorted({**marker.files, VALUES: written}.items())
        }
        head = {"format": FORMAT, "version": VERSION, "step": marker.step, "world": marker.world}
        self._write(f"{folder}/{MARKER}", sealed({**head, "files": entries}))
        self._sync(folder)
        self._sync(self.root)

    def read(self, step: int) -> Marker:
        """Return the entries of the marker of a step.

        Raises:
            ValueError: it is damaged, of another version, or of another step; names the file.
        """
        path = f"{self.path(step)}/{MARKER}"
        text = self._read(path)
        with _refusing(path):
            marker = _marker(unsealed(text.decode(), FORMAT, VERSION))
            if marker.step != step:
                raise ValueError(f"it is of step {marker.step}")
        return marker

    def verify(self, marker: Marker, names: Iterable[str]) -> None:
        """Compare bytes and CRC32 of files with the marker.

        Raises:
            ValueError: one is missing, damaged or no regular file; names it.
        """
        for name in names:
            path, (wanted, crc) = f"{self.path(marker.step)}/{name}", marker.files[name]
            try:
                self._refuse_irregular(path)
                length, found = read_crc(self.files, path, most=wanted)
            except FileNotFoundError:
                raise ValueError(f"{path} is missing: {MARKER} lists it.") from None
            if length != wanted:
                has = "more" if length > wanted else str(length)
                raise ValueError(
                    f"{path} is damaged: {MARKER} lists {wanted} bytes, and it has {has}."
                )
            if found != crc:
                raise ValueError(f"{path} is damaged: its CRC32 is not the one in {MARKER}.")

    def values(self, step: int) -> dict[str, Any]:
        """Return the Python values of a checkpoint that has been verified: ``state`` and
        ``optimizer``, which are dicts, and ``extra``.

        Raises:
            ValueError: the file holds anything else; names it.
        """
        path = f"{self.path(step)}/{VALUES}"
        text = self._read(path)
        with _refusing(path):
            match json.loads(text):
                case {"state": dict(), "optimizer": dict(), "extra": _} as found:
                    return dict(found)
                case _:
                    raise ValueError("it holds no dicts 'state' and 'optimizer', or no 'extra'")

    def sweep(self, keep: int) -> None:
        """Delete all but the last ``keep`` checkpoints, and what unfinished saves have left."""
        # Folders without a marker are in none of the steps, so they are deleted too.
        kept = self.steps()[-keep:]
        for step in self._found():
            if step not in kept:
                self.delete(step)

    def delete(self, step: int) -> None:
        """Delete the folder of a step, its marker first, so that half of it is no checkpoint. None
        is no error."""
        folder = self.path(step)
        if not self.files.exists(folder):
            return
        names = [_name(found) for found in self.files.ls(folder)]
        if MARKER in names:
            names.remove(MARKER)
            # From here on it is no checkpoint, whenever the deletion is interrupted.
            self.files.rm_file(f"{folder}/{MARKER}")
        with ThreadPoolExecutor() as threads:  # one rank deletes what all have written
            list(threads.map(lambda name: self.files.rm_file(f"{folder}/{name}"), names))
        if self.local:
            os.rmdir(folder)

    def _found(self) -> list[int]:
        if not self.files.exists(self.root):
            return []
        names = [_STEP.fullmatch(_name(path)) for path in self.files.ls(self.root)]
        return sorted(int(name[1]) for name in names if name)

    def _read(self, path: str) -> bytes:
        self._refuse_irregular(path)
        with self.files.create_stream(path, "rb") as stream:
            # One byte more, to know whether there is more.
            found: bytes = stream.read(_LONGEST + 1)
        if len(found) > _LONGEST:
            raise ValueError(f"{path} is refused: it has more than {_LONGEST} bytes.")
        return found

    def _write(self, path: str, text: str) -> Entry:
        data, unfinished = text.encode(), f"{path}.tmp"
        with naming_errors(unfinished), self.files.create_stream(unfinished, "wb") as stream:
            stream.write(data)
            stream.flush()
            # A stream of another machine has no descriptor to sync.
            with contextlib.suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(stream.fileno())
        self.files.rename(unfinished, path)
        return len(data), zlib.crc32(data)

    def _refuse_irregular(self, path: str) -> None:
        # Before it is opened: a pipe would block, a device never end.
        if self.local and not stat.S_ISREG(os.lstat(path).st_mode):
            raise ValueError(
                f"{path} is refused: it must be a regular file, not a link, a folder, a pipe or a"
                " device."
            )

    def _sync(self, folder: str) -> None:
        if self.local:
            sync_folder(folder)


def read_crc(files: Any, path: Any, most: float = math.inf) -> Entry:
    """Return the bytes of a file and their CRC32. It is read no further than where it has more than
    ``most``."""
    length, crc = 0, 0
    part = memoryview(bytearray(_READ_AT_ONCE))
    with files.create_stream(path, "rb") as stream:
        while length <= most and (count := stream.readinto(part)):
            length, crc = length + count, zlib.crc32(part[:count], crc)
    return length, crc


@contextmanager
def naming_errors(path: Any) -> Iterator[None]:
    """Raise errors of a disk with the name of the file that was written.

    The OSError of a full disk has none, and torch.save() raises an error of its own after it.
    """
    try:
        yield
    except Exception as fault:
        error: BaseException | None = fault
        while error is not None and not isinstance(error, OSError):
            error = error.__context__
        if error is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from fault


def step_of(path: str | os.PathLike[str]) -> int | None:
    """Return the step in the name of a folder, None if there is none."""
    found = _STEP.fullmatch(_name(os.path.abspath(path)))
    return None if found is None else int(found[1])


def holds_steps(path: str | os.PathLike[str]) -> bool:
    """Return whether a local path is the folder of a step, or holds such folders."""
    names = os.listdir(path) if os.path.isdir(path) else []
    return step_of(path) is not None or any(map(_STEP.fullmatch, names))


def _filesystem_of(path: str) -> Any:
    """DCP's file system for a path: a local one, or fsspec's for ``"scheme://..."``."""
    if "://" not in path:
        from torch.distributed.checkpoint.filesystem import FileSystem

        return FileSystem()
    try:
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as Remote

        found: Any = Remote()
        found.init_path(path)
    except (ImportError, ValueError) as error:
        raise ValueError(f"Invalid root={path!r}: {error}.") from None
    return found


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _marker(entries: Mapping[str, Any]) -> Marker:
    files: dict[str, Entry] = {}
    try:
        for name, file in entries["files"].items():
            # Names become paths: none may lead out of the folder.
            if not _FILE.fullmatch(name) or name.startswith(".."):
                raise ValueError(f"{name!r} is no name of a file")
            files[name] = integer("bytes", file["bytes"], least=0), int(file["crc32"], 16)
        step = integer("step", entries["step"], least=0)
        world = integer("world", entries["world"], least=1)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"an entry is missing or of another type: {error!r}") from None
    return Marker(step=step, world=world, files=files)


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Raise what is wrong with the text of a file with its name."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is refused: {error}.") from None
