"""Files of a run's folder: ``run.json`` describes the run, ``log.jsonl`` has one line per event.

- A crash leaves both readable. ``run.json`` appears whole, by a rename. ``log.jsonl`` is only
  appended to: at most its last line is cut short, which readers skip, also after a resumed run has
  gone on below it.
- One process at a time writes a log. It locks ``log.lock``; the lock ends with the process, however
  that ends. Where a file system has no locks, or does not share them between hosts, two writers are
  not noticed.
- Files are private to the user (0600), because a config may hold anything. No symbolic link is
  followed to write.
- In a folder called ``runs``, the link ``latest`` refers to the run that was started or resumed
  last.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import dist_sparse
from dist_sparse.checks import refuse
from dist_sparse.text import shortened

# Version of the folder's layout; a reader refuses others.
FORMAT = 3

RUN, LINES, LOCK = "run.json", "log.jsonl", "log.lock"

# Beside the runs in a folder called `runs`: a symbolic link to the one that was started or resumed
# last.
LATEST = "latest"

_RESUMED = "resumed"


class LogFile:
    """An open, locked log. A write that fails (a full disk) is a warning and the end of the log;
    training continues.

    Args:
        folder: exists; files are created if missing.

    Raises:
        ValueError: another :class:`LogFile` has it open, in this process or another, or a file is
            not a regular one.
        OSError: it can't be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / LINES
        self._place = os.path.realpath(folder)
        # Before anything is opened: a pipe would block, a link would lead elsewhere.
        _refuse_special(self._file, stat.S_IFREG)
        _refuse_special(folder / LOCK, stat.S_IFREG)
        # A process's locks don't exclude itself, and they end when it closes the locked file
        # anywhere: hence both the table of open logs and a file of its own to lock, which nothing
        # else opens.
        if self._place in _OPEN:
            raise _taken(self._file)
        self._lock = FileIO(folder / LOCK, "a", opener=_private)
        try:
            # Unlike flock(), lockf() isn't inherited: a DataLoader's worker that outlives a killed
            # rank has no lock.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._lock.close()
            raise _taken(self._file) from error
        except OSError:
            pass  # a file system without locks, such as Lustre mounted without them
        # Unbuffered: what write() returned is in the file, whatever becomes of the process.
        self._held: FileIO | None = FileIO(self._file, "a", opener=_private)
        # Last: a log that failed to open is not taken.
        _OPEN[self._place] = self

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line of finite numbers."""
        text = json.dumps(line, allow_nan=False, separators=(",", ":"))
        self._append(f"{text}\n".encode())

    def begin_session(self) -> None:
        """Write the first line of a resumed run. An empty log stays empty."""
        if self._file.stat().st_size:
            # A crash may have cut the last line short. It stays: a log is only appended to, and
            # readers skip what is no line of JSON before a resumed session.
            self._append(b"\n")
            self.write({"kind": _RESUMED, "started": _now()})

    def close(self) -> None:
        """Close the file and release its lock. Further calls do nothing."""
        # The lock goes last: no other writer may begin before the file is closed.
        if self._held is not None:
            self._held.close()
            self._held = None
            self._lock.close()
            _OPEN.pop(self._place, None)

    def _append(self, content: bytes) -> None:
        if self._held is None:
            return
        left = memoryview(content)
        try:
            # A disk that is almost full takes a part of it.
            while left:
                left = left[self._held.write(left) :]
        except OSError as error:
            message = f"{self._file} could not be written ({error}): the log ends here."
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            self.close()


_private = partial(os.open, mode=0o600)
_readable = partial(os.open, mode=0o644)

# Logs that this process writes, by the real path of their folders.
_OPEN: WeakValueDictionary[str, LogFile] = WeakValueDictionary()


def check_config(config: Mapping[str, Any]) -> Any:
    """Return ``config`` as ``run.json`` holds it; numbers that are not finite become text.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        # There and back: tuples become lists here, as they are when the run is read.
        return json.loads(json.dumps(dict(config)), parse_constant=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Invalid config: {error}.") from error


def check_log(folder: Path, resume: bool) -> None:
    """Check that ``folder`` can be given to :func:`open_log`. Write nothing.

    Raises:
        ValueError: it is a file; it has a log and ``resume`` is False, or another format.
        OSError: it can't be read.
    """
    run = folder / RUN
    refuse(
        {
            f"Invalid folder={str(folder)!r}: it is a file; must be a folder, which is created if"
            " missing.": folder.exists() and not folder.is_dir(),
            f"{folder} holds the log of a run: choose another folder, or resume=True.": (
                run.exists() and not resume
            ),
        }
    )
    if run.exists():
        read_about(run)


def open_log(folder: Path, about: Mapping[str, Any], resume: bool) -> LogFile:
    """Open and lock the log in ``folder``, which is created if missing. Write ``run.json`` if it is
    not there yet.

    Args:
        folder: checked by :func:`check_log`.
        about: JSON-able values for ``run.json``, beside those that are known here: ``config``, as
            :func:`check_config` returns it, ``name``, ``tables`` and ``world``.
        resume: continue a log that is there.

    Raises:
        ValueError: another process writes this log, or has written one since :func:`check_log`.
            OSError: it can't be written. In both cases no line was.
    """
    # Not before the checks of all ranks: a refused log leaves no folder.
    folder.mkdir(parents=True, exist_ok=True)
    log = LogFile(folder)
    try:
        # Again: only now that the log is locked no other process can have started one.
        check_log(folder, resume)
        run = folder / RUN
        if run.exists():
            log.begin_session()
        else:
            write_whole(run, (json.dumps(_about() | dict(about), indent=2) + "\n").encode())
    except BaseException:
        log.close()
        raise
    _link_latest(folder.absolute())
    return log


def _link_latest(folder: Path) -> None:
    """Have ``runs/latest`` refer to ``runs/<folder>``, unless the user keeps something else under
    that name."""
    link = folder.with_name(LATEST)
    if folder.parent.name != "runs" or folder == link or (link.exists() and not link.is_symlink()):
        return
    # A rename replaces the link at once: no reader finds it missing.
    part = _part_of(link)
    with contextlib.suppress(OSError):  # a file system without links: the run has its name
        part.symlink_to(folder.name)
        part.replace(link)


def write_whole(file: Path, content: bytes, *, shared: bool = False) -> None:
    """Write a file whole, replacing the one that is there; a link is not followed. It is private to
    the user (0600), or, ``shared``, readable by all (0644, less the umask).

    Raises:
        ValueError: it exists and is not a regular file.
        OSError: it can't be written; names it. The old one is whole.
    """
    # A rename replaces a link.
    _refuse_special(file, stat.S_IFREG, stat.S_IFLNK)
    # Readers see the old file or the new one, never a part.
    part = _part_of(file)
    try:
        with open(part, "xb", opener=_readable if shared else _private) as held:
            held.write(content)
        part.replace(file)
    except OSError as error:  # that of a full disk names no file
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        part.unlink(missing_ok=True)


def read_about(file: Path) -> dict[str, Any]:
    """Return the contents of a ``run.json``.

    Raises:
        ValueError: it is not JSON, or has another format; names the file.
    """
    try:
        about = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    found = about.get("format") if isinstance(about, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{file} has format {shortened(found)}; this release reads and writes {FORMAT}."
        )
    return dict(about)


def read_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and content of the lines of a log, without those that a crash has cut short.

    Raises:
        ValueError: another line is not a JSON object; names file and line.
    """
    broken: ValueError | None = None
    with file.open("rb") as held:
        # An empty file has no line that was cut short.
        text = b"\n"
        for number, text in enumerate(held, start=1):
            try:
                line = _decode(text.decode())
            except (ValueError, RecursionError) as error:
                broken = ValueError(f"{file}, line {number}: {error}.")
                continue
            # A crash cuts the last line short; after it, only another session can have gone on.
            if broken is not None and line.get("kind") != _RESUMED:
                raise broken
            broken = None
            yield number, line
        if broken is not None and text.endswith(b"\n"):
            raise broken


# json.loads() looks at seven options first, of each line of a long log.
_decode = json.JSONDecoder().decode


def _refuse_special(file: Path, *allowed: int) -> None:
    """Refuse a file of another kind: pipes, which would block, devices, folders, and links where
    writing would follow them."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_IFMT(file.lstat().st_mode) not in allowed:
            raise ValueError(f"{file} is not a regular file: nothing is written to it.")


def _taken(file: Path) -> ValueError:
    return ValueError(
        f"{file} is being written by another RunLog, of a job that still runs or of this process:"
        " choose another folder, or end that one first."
    )


def _part_of(file: Path) -> Path:
    """Return a new name beside ``file``, for what is renamed to it once it is whole."""
    return file.with_name(f".{os.urandom(8).hex()}.part")


def _about() -> dict[str, Any]:
    import shlex  # which names of dist_sparse need not load

    versions = {"dist_sparse": dist_sparse.__version__, "python": platform.python_version()}
    # Importing torchrec for its version would take seconds.
    for name in sorted({"torch", "torchrec"} & sys.modules.keys()):
        versions[name] = str(sys.modules[name].__version__)
    return {
        "format": FORMAT,
        "started": _now(),
        "command": shlex.join(sys.argv),
        "versions": versions | _commit(),
    }


def _commit() -> dict[str, str]:
    """Return the git commit of the script's folder, ``-dirty`` if files differ from it; empty where
    there is none."""
    folder = Path(sys.argv[0]).resolve().parent
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    # A machine without git, a folder outside of a repository, a slow file system: the run goes on.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True)
        return {"commit": done.stdout.strip()}
    return {}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
