"""Files of a run's folder: ``run.json`` describes the run, ``log.jsonl`` has one line per event.

- A crash leaves both readable. ``run.json`` is written by a rename. ``log.jsonl`` is only appended
  to: a crash cuts at most its last line short. Readers skip that line, even if a resumed run has
  appended more.
- One process at a time writes a log. It locks ``log.lock``, and the lock ends with the process. Two
  writers are not noticed on file systems that have no locks, or do not share them between hosts.
- Files are private to the user (0600), because a config may hold secrets. Writing follows no
  symbolic link.
- In a folder called ``runs``, the link ``latest`` refers to the run that was started or resumed
  last.
"""

import contextlib
import fcntl
import json
import os
import platform
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
from dist_sparse.checks import part_of, refuse_special, write_whole
from dist_sparse.extras.report.words import shortened

# Version of the folder's layout; a reader refuses others.
FORMAT = 3

RUN, LINES, LOCK = "run.json", "log.jsonl", "log.lock"

# Beside the runs in a folder called `runs`: a symbolic link to the one that was started or resumed
# last.
LATEST = "latest"

_RESUMED = "resumed"


class LogFile:
    """An open, locked log. A write that fails (a full disk) warns and closes the log; training
    continues.

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
        refuse_special(self._file)
        refuse_special(folder / LOCK)
        # POSIX locks do not exclude the process that holds them: hence the table _OPEN. And they
        # end when the process closes any descriptor of the file: hence a lock file of its own,
        # which nothing else opens.
        if self._place in _OPEN:
            raise _taken(self._file)
        self._lock = FileIO(folder / LOCK, "a", opener=_private)
        try:
            # Not flock(), which child processes inherit: a DataLoader's worker that outlives a
            # killed rank would keep the log locked.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._lock.close()
            raise _taken(self._file) from error
        except OSError:
            # A file system without locks, such as Lustre mounted without them.
            pass
        # Unbuffered: a line that was written survives the process.
        self._log: FileIO | None = FileIO(self._file, "a", opener=_private)
        # Last: a log that failed to open is not taken.
        _OPEN[self._place] = self

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line of finite numbers."""
        self._append(_encoded(line))

    def begin_session(self) -> None:
        """Write the first line of a resumed run. An empty log stays empty."""
        if self._file.stat().st_size:
            # The newline ends a line that a crash has cut short. Readers skip a broken line before
            # a resumed session. In one write, so that a crash leaves both or none.
            self._append(b"\n" + _encoded({"kind": _RESUMED, "started": _now()}))

    def close(self) -> None:
        """Close the file and release its lock. Further calls do nothing."""
        # The lock is released last: no other writer may begin before the file is closed.
        if self._log is not None:
            self._log.close()
            self._log = None
            self._lock.close()
            _OPEN.pop(self._place, None)

    def _append(self, content: bytes) -> None:
        if self._log is None:
            return
        left = memoryview(content)
        try:
            # write() of an unbuffered file may write a part, as on a disk that is almost full.
            while left:
                left = left[self._log.write(left) :]
        except OSError as error:
            self.close()
            message = f"{self._file} could not be written ({error}): the log ends here."
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def _encoded(line: Mapping[str, Any]) -> bytes:
    text = json.dumps(line, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode()


# Opener for FileIO, which sets the mode of a new file.
_private = partial(os.open, mode=0o600)

# Logs that this process has open, by the real path of their folders.
_OPEN: WeakValueDictionary[str, LogFile] = WeakValueDictionary()


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Exclude other threads and processes that lock the same file, which is created if missing.

    Raises:
        ValueError: it is not a regular file.
        OSError: it can't be opened.
    """
    refuse_special(file)
    with FileIO(file, "a", opener=_private) as stream:
        # A file system without locks, as for a log.
        with contextlib.suppress(OSError):
            # Not lockf(), which does not exclude threads of one process.
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def check_config(config: Mapping[str, Any]) -> Any:
    """Return ``config`` as JSON-able values. Numbers that are not finite become text.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        # Through text and back: tuples become lists, as in a run that is read back.
        return json.loads(json.dumps(dict(config)), parse_constant=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Invalid config: {error}.") from error


def check_run_name(name: object) -> None:
    """Refuse a name that is not text, which no reader takes.

    Raises:
        ValueError: it is neither text nor None, for a default.
    """
    if not isinstance(name, str | None):
        raise ValueError(f"Invalid name={shortened(name)}: must be text.")


def check_log(folder: Path, resume: bool) -> None:
    """Check that ``folder`` can be passed to :func:`open_log`. Write nothing.

    Raises:
        ValueError: it is a file; or it has a log, which has another format or ``resume`` is False;
            or ``run.json`` is not a regular file.
        OSError: it can't be read.
    """
    run = folder / RUN
    # It is read below, and a pipe would block.
    refuse_special(run, link=True)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"Invalid folder={str(folder)!r}: it is a file; must be a folder, which is created if"
            " missing."
        )
    if run.exists() and not resume:
        raise ValueError(f"{folder} holds the log of a run: choose another folder, or resume=True.")
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
        OSError: it can't be written.
    """
    # Only now, after the checks of all ranks: a refused log leaves no folder.
    folder.mkdir(parents=True, exist_ok=True)
    log = LogFile(folder)
    try:
        # Again, under the lock: another process may have started a log since the first check.
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
    """Link ``runs/latest`` to ``runs/<folder>``, unless ``latest`` is a file or folder of the
    user."""
    link = folder.with_name(LATEST)
    if folder.parent.name != "runs" or folder == link or (link.exists() and not link.is_symlink()):
        return
    # A rename is atomic: no reader finds the link missing.
    part = part_of(link)
    # A file system without links has no `latest`, nor a folder where replacing a link is denied.
    with contextlib.suppress(OSError):
        try:
            part.symlink_to(folder.name)
            part.replace(link)
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
    """Yield number and content of the lines of a log; skip blank lines, and lines that a crash has
    cut short.

    Raises:
        ValueError: another line is not a JSON object; names file and line.
    """
    # The error of the line before, which is raised if that line was not cut short.
    broken: ValueError | None = None
    with file.open("rb") as stream:
        # An empty file runs no iteration.
        text = b"\n"
        for number, text in enumerate(stream, start=1):
            # A resumed session begins with a newline, whether a line was cut short or not.
            if text.isspace():
                continue
            try:
                line = _decode(text.decode())
            except (ValueError, RecursionError) as error:
                broken = ValueError(f"{file}, line {number}: {error}.")
                continue
            # A crash cuts a line short. The only line that may follow begins a resumed session.
            if broken is not None and line.get("kind") != _RESUMED:
                raise broken
            broken = None
            yield number, line
        # The last line is cut short if it has no newline.
        if broken is not None and text.endswith(b"\n"):
            raise broken


# json.loads() would check its seven options for each line of a long log.
_decode = json.JSONDecoder().decode


def _taken(file: Path) -> ValueError:
    return ValueError(
        f"{file} is being written by another RunLog, of a job that still runs or of this process:"
        " choose another folder, or end that one first."
    )


def _about() -> dict[str, Any]:
    # Imported here: readers of runs do not need it.
    import shlex

    versions = {"dist_sparse": dist_sparse.__version__, "python": platform.python_version()}
    # Packages that are not imported are left out: importing torchrec takes seconds.
    for name in sorted({"torch", "torchrec"} & sys.modules.keys()):
        versions[name] = str(sys.modules[name].__version__)
    return {
        "format": FORMAT,
        "started": _now(),
        "command": shlex.join(sys.argv),
        "versions": versions | _commit(),
    }


def _commit() -> dict[str, str]:
    """Return the git commit of the script's folder; empty outside of a repository.

    Not whether files differ from it: git would run programs that the configuration of that
    repository names (``core.fsmonitor``, filters), and the folder may be another user's.
    """
    folder = Path(sys.argv[0]).resolve().parent
    # `rev-parse` reads refs alone.
    words = ["git", "--no-pager", "-C", str(folder), "rev-parse", "--verify", "--quiet", "HEAD"]
    # No git, no repository, a slow file system: none of them may end the run.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True)
        return {"commit": done.stdout.strip()}
    return {}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
