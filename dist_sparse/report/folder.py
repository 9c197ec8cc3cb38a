"""What lies in the folder of a run, and how is it written so that a crash leaves it readable?

``run.json`` comes into being whole, by a rename; ``log.jsonl`` grows line by line. A line is whole or, after a crash,
the last one and without its end: :func:`read_lines` skips that, and who resumes cuts it off before the next is written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

__all__ = ["FORMAT", "LINES", "RUN", "LogFile", "check_config", "check_log", "open_log", "read_about", "read_lines"]

FORMAT = 1
"""Of the folder; a reader refuses others."""

RUN, LINES = "run.json", "log.jsonl"

_CHUNK = 1 << 16


class LogFile:
    """An open log. Once a write has failed (a full disk) it says so, as a warning, and takes no more: training goes
    on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._held: IO[str] | None = file.open("a", buffering=1, encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """One line; numbers that are not finite become null."""
        if self._held is None:
            return
        try:
            text = json.dumps(line, allow_nan=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(_finite(line), allow_nan=False, separators=(",", ":"))
        try:
            self._held.write(text + "\n")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Once is enough; more do nothing."""
        held, self._held = self._held, None
        try:
            if held is not None:
                held.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        warnings.warn(f"{self._file} could not be written ({error}): the log ends here.", RuntimeWarning, stacklevel=2)
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(OSError):  # what is buffered does not fit either
                held.close()


def check_config(config: Mapping[str, Any]) -> Any:
    """As ``run.json`` has it; numbers that are not finite become None.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(json.dumps(dict(config)), parse_constant=lambda _: None)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Invalid config: {error}.") from error


def check_log(folder: Path, resume: bool) -> None:
    """Whether ``folder`` may be given to :func:`open_log`. Writes nothing.

    Raises:
        ValueError: there is a log and ``resume`` is False, or another format. OSError: it can't be read.
    """
    run = folder / RUN
    if run.exists():
        if not resume:
            raise ValueError(f"{folder} holds the log of a run: choose another folder, or resume=True.")
        read_about(run)


def open_log(folder: Path, config: Any) -> LogFile:
    """Opens the log in ``folder``, which is made if need be, and goes on with one that is there; the first time writes
    ``run.json`` too.

    Args:
        folder: that :func:`check_log` has seen.
        config: as :func:`check_config` gives it.

    Raises:
        OSError: it can't be written. Then no line was.
    """
    run, lines = folder / RUN, folder / LINES
    known = run.exists()
    if known and lines.exists():
        _cut(lines)
    folder.mkdir(parents=True, exist_ok=True)
    log = LogFile(lines)
    try:
        if not known:
            _write_whole(run, json.dumps(_about(config), indent=2) + "\n")
        elif lines.stat().st_size:
            log.write({"kind": "resumed", "started": _now()})
    except BaseException:
        log.close()
        raise
    return log


def read_about(file: Path) -> dict[str, Any]:
    """What ``run.json`` says.

    Raises:
        ValueError: it is no JSON, or of another format; names the file.
    """
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error
    found = about.get("format") if isinstance(about, dict) else None
    if found != FORMAT:
        raise ValueError(f"{file} has format {found!r}; this release reads and writes {FORMAT}.")
    return dict(about)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log, in order; a last one that a crash has cut off is left out.

    Raises:
        ValueError: another line is no JSON object; names file and line.
    """
    with file.open("rb") as held:
        for number, line in enumerate(held, start=1):
            try:
                read = json.loads(line.decode("utf-8"))
                if not isinstance(read, dict):
                    raise ValueError("no object")
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{file}, line {number}: {error}.") from error
            yield read


def _about(config: Any) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "started": _now(),
        "world": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)}
        | {name: str(sys.modules[name].__version__) for name in ("torchrec",) if name in sys.modules},
        "config": config,
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _write_whole(file: Path, text: str) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _cut(file: Path) -> None:
    """Takes off what comes behind the last end of a line."""
    with file.open("r+b") as held:
        end = held.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _CHUNK)
            held.seek(start)
            found = held.read(end - start).rfind(b"\n")
            if found >= 0:
                held.truncate(start + found + 1)
                return
            end = start
        held.truncate(0)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
