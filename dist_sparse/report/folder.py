"""Files of a run's folder: ``run.json`` describes the run, ``log.jsonl`` has one line per event.

- A crash leaves both readable. ``run.json`` appears whole, by a rename; of ``log.jsonl`` at most the last line is cut
  short, which :func:`read_lines` skips and a resumed run removes.
- One process at a time writes a log: :class:`LogFile` holds a lock on it, which ends with the process.
- Files are private to the user (0600), because a config may hold anything. No symbolic link is followed to write.
- In a folder called ``runs``, the link ``latest`` refers to the run that was started or resumed last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import stat
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import dist_sparse
from dist_sparse.text import shortened

__all__ = [
    "FORMAT",
    "LATEST",
    "LINES",
    "RUN",
    "LogFile",
    "check_config",
    "check_log",
    "open_log",
    "read_about",
    "read_lines",
    "replace_files",
]

FORMAT = 1
"""Version of the folder's layout; a reader refuses others."""

RUN, LINES = "run.json", "log.jsonl"

LATEST = "latest"
"""Beside the runs in a folder called ``runs``: a symbolic link to the one that was started or resumed last."""

_LONGEST = 1 << 26
"""Bytes of a line, and of run.json, that are read: 64 MiB, some 250,000 tables."""

_CHUNK = 1 << 16

_decode = json.JSONDecoder().decode  # json.loads() looks at seven options first, of each line of a long log


class LogFile:
    """An open, locked log. A write that fails (a full disk) is a warning and the end of the log; training continues.

    Args:
        file: created if missing.

    Raises:
        ValueError: another :class:`LogFile` has it open, in this process or another, or it is not a regular file.
        OSError: it can't be opened.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._held: FileIO | None = _open_locked(file)
        _OPEN.add(self)

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line; numbers that are not finite become null."""
        if self._held is None:
            return
        try:
            text = json.dumps(line, allow_nan=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(_finite(line), allow_nan=False, separators=(",", ":"))
        try:
            _write_all(self._held, f"{text}\n".encode())
        except OSError as error:
            message = f"{self._file} could not be written ({error}): the log ends here."
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            self.close()

    def cut(self) -> int:
        """Remove what follows the last end of a line; return the bytes that are left."""
        assert self._held is not None
        fd = self._held.fileno()
        end = os.fstat(fd).st_size
        while end:
            start = max(0, end - _CHUNK)
            found = os.pread(fd, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        os.ftruncate(fd, end)
        return end

    def close(self) -> None:
        """Close the file and release its lock. Further calls do nothing."""
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(OSError):  # nothing is buffered, so nothing is lost
                fcntl.flock(held, fcntl.LOCK_UN)
            held.close()

    def _leave_to_parent(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()  # the parent's lock stays


_OPEN: weakref.WeakSet[LogFile] = weakref.WeakSet()


def _after_fork() -> None:
    """Close logs in a forked child. A DataLoader's worker that outlives a killed rank would keep the lock."""
    for log in _OPEN:
        log._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def check_config(config: Mapping[str, Any]) -> Any:
    """Return ``config`` as ``run.json`` holds it; numbers that are not finite become None.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return _finite(json.loads(json.dumps(dict(config))))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Invalid config: {error}.") from error


def check_log(folder: Path, resume: bool) -> None:
    """Check that ``folder`` can be given to :func:`open_log`. Write nothing.

    Raises:
        ValueError: it has a log and ``resume`` is False, or another format. OSError: it can't be read.
    """
    run = folder / RUN
    if run.exists():
        if not resume:
            raise ValueError(f"{folder} holds the log of a run: choose another folder, or resume=True.")
        read_about(run)


def open_log(folder: Path, about: Mapping[str, Any], resume: bool) -> LogFile:
    """Open and lock the log in ``folder``, which is created if missing. Write ``run.json`` if it is not there yet.

    Args:
        folder: checked by :func:`check_log`.
        about: JSON-able values for ``run.json``, beside those that every run has: ``config``, as :func:`check_config`
            returns it.
        resume: continue a log that is there.

    Raises:
        ValueError: another process writes this log, or has written one since :func:`check_log`. OSError: it can't be
            written. In both cases no line was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = LogFile(folder / LINES)
    try:
        check_log(folder, resume)  # again: only now that the log is locked no other process can have started one
        run = folder / RUN
        if not run.exists():
            replace_files({run: (json.dumps(_about() | dict(about), indent=2) + "\n").encode()})
        elif log.cut():
            log.write({"kind": "resumed", "started": _now()})
    except BaseException:
        log.close()
        raise
    _link_latest(folder.absolute())
    return log


def _link_latest(folder: Path) -> None:
    """Have ``runs/latest`` refer to ``runs/<folder>``, unless the user keeps something else under that name."""
    link = folder.with_name(LATEST)
    if folder.parent.name != "runs" or folder == link or (link.exists() and not link.is_symlink()):
        return
    part = link.with_name(f".{os.urandom(8).hex()}.part")
    with contextlib.suppress(OSError):  # a file system without links: the run has its name
        part.symlink_to(folder.name)
        part.replace(link)


def replace_files(files: Mapping[Path, bytes]) -> None:
    """Write files whole and private to the user (0600), replacing what is there.

    All contents are written to temporary files beside them before the first one is renamed, so that a full disk leaves
    every old file as it was. A symbolic link is replaced, not followed.

    Raises:
        ValueError: a file exists and is not a regular file. OSError: a file can't be written; names it.
    """
    parts: dict[Path, Path] = {}
    file = Path()
    try:
        for file in files:
            _check_kind(file)
        for file, content in files.items():
            part = file.with_name(f".{os.urandom(8).hex()}.part")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with FileIO(os.open(part, flags, 0o600), "w") as held:
                parts[file] = part
                _write_all(held, content)
        for file, part in parts.items():
            part.replace(file)
    except OSError as error:  # that of a full disk names no file
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def read_about(file: Path) -> dict[str, Any]:
    """Return the contents of a ``run.json``; numbers that are not finite become None.

    Raises:
        ValueError: it is not JSON, or has another format; names the file.
    """
    with file.open("rb") as held:
        text = held.read(_LONGEST + 1)
    try:
        about = _finite(_parsed(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {_why(error)}.") from error
    found = about.get("format") if isinstance(about, dict) else None
    if found != FORMAT:
        raise ValueError(f"{file} has format {shortened(found)}; this release reads and writes {FORMAT}.")
    return dict(about)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log in order, without a last one that a crash has cut short.

    Raises:
        ValueError: another line is not a JSON object; names file and line.
    """
    with file.open("rb") as held:
        for number, line in enumerate(iter(partial(held.readline, _LONGEST + 1), b""), start=1):
            try:
                read = _parsed(line)
                if not isinstance(read, dict):
                    raise ValueError("not an object")
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n") and len(line) <= _LONGEST:
                    return
                raise ValueError(f"{file}, line {number}: {_why(error)}.") from error
            yield read


def _open_locked(file: Path) -> FileIO:
    _check_kind(file, follow=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    held = FileIO(os.open(file, flags, 0o600), "a+")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error: a file system without locks, such as Lustre mounted without them. Then none are checked.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            held.close()
            raise ValueError(
                f"{file} is being written by another RunLog, of a job that still runs or of this process: choose "
                "another folder, or end that one first."
            ) from error
    return held


def _check_kind(file: Path, follow: bool = False) -> None:
    """Refuse pipes, devices and folders; links too where writing would ``follow`` them."""
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode) and (follow or not stat.S_ISLNK(mode)):
        raise ValueError(f"{file} is not a regular file: nothing is written to it.")


def _write_all(held: FileIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[held.write(left) :]


def _parsed(text: bytes) -> Any:
    if len(text) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST >> 20} MiB")
    return _decode(text.decode("utf-8"))


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _about() -> dict[str, Any]:
    import shlex  # which `import dist_sparse` need not load

    import torch.distributed as dist  # a run is read without it

    return {
        "format": FORMAT,
        "started": _now(),
        "world": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        "command": shlex.join(sys.argv),
        "versions": {"dist_sparse": dist_sparse.__version__, "python": platform.python_version()}
        | {name: str(sys.modules[name].__version__) for name in ("torch", "torchrec") if name in sys.modules},
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
