"""Files of a checkpoint on any of DCP's file systems: written with a CRC32, and errors that name
the file."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

__all__ = ["Counted", "Entry", "check_kind", "filesystem_of", "read_crc"]

Entry = tuple[int, int]
"""Bytes of a file, and their CRC32."""

_READ_AT_ONCE: Final = 1 << 19  # bytes, that stay in a core's cache for the checksum


def filesystem_of(path: str) -> Any:
    """Return DCP's file system for a path: a local one, or fsspec's for ``"scheme://..."``.

    Raises:
        ValueError: fsspec is not installed, or does not know the scheme.
    """
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


def check_kind(path: str) -> None:
    """Refuse what is no regular file. A local path, before it is opened: a pipe would block, a
    device never end.

    Raises:
        ValueError: it is a link, a folder, a pipe or a device; names it.
        FileNotFoundError: there is nothing.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise ValueError(
            f"{path} is refused: it must be a regular file, not a link, a folder, a pipe or a"
            " device."
        )


def read_crc(files: Any, path: Any, most: int) -> Entry:
    """Return the bytes of a file and their CRC32. It is read no further than where it has more than
    ``most``."""
    size, crc = 0, 0
    part = memoryview(bytearray(_READ_AT_ONCE))
    with files.create_stream(path, "rb") as stream:
        while size <= most and (count := stream.readinto(part)):
            size, crc = size + count, zlib.crc32(part[:count], crc)
    return size, crc


class Counted:
    """A file system that notes bytes and CRC32 of what is written, and names the file in errors.

    Args:
        files: the file system.
        written: is filled, by name of the file.
    """

    def __init__(self, files: Any, written: dict[str, Entry]) -> None:
        self._files, self._written = files, written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        counted = None
        try:
            with self._files.create_stream(path, mode) as stream:
                counted = _Stream(stream)
                yield counted
        except Exception as fault:
            # torch.save() raises an error of its own while it handles the one of a full disk, which
            # names no file.
            error = (
                fault if isinstance(fault, OSError) else None if counted is None else counted.error
            )
            if error is None or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from fault
        self._written[_name(path)] = (counted.size, counted.crc)

    def rename(self, path: Any, new_path: Any) -> None:
        self._files.rename(path, new_path)
        self._written[_name(new_path)] = self._written.pop(_name(path))


class _Stream:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.size, self.crc = 0, 0
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        try:
            return self._stream.write(data)
        except OSError as error:
            self.error = error
            raise


def _name(path: Any) -> str:
    return str(path).rpartition("/")[2]
