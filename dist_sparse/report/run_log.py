"""What happened in a run, written down while it trains?

A :class:`RunLog` writes lines of JSON into a folder, on rank 0; other ranks only take part in what is collective. What
is counted over ranks travels with the due steps' own messages (:mod:`dist_sparse.sparsifiers.record`), so the line of a
due step is written one due step later, and the last one by :meth:`RunLog.close`.

``run.json`` says what the run is; every line of ``log.jsonl`` has a ``kind``:

- ``values``: ``step``, ``seconds`` since the start, and ``values``, what :meth:`RunLog.step` was given;
- ``masks``: what the due step at ``step`` did: its ``number``, ``seconds``, ``collectives``, ``bytes`` (of rank 0), and
  for each of ``tables`` the fields of :class:`~dist_sparse.sparsifiers.record.MaskChange`, ``sparsity`` and ``churn``;
- ``end``: ``tables``, as :class:`~dist_sparse.TableStats` has them, and where the ``seconds`` went.

Numbers that are not finite are null. A line is whole or, after a crash, missing its end: :func:`read_lines` skips that.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse.groups import group_over, world_ranks
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.inspection import TableStats
from dist_sparse.sparsifiers.record import StepRecord
from dist_sparse.training.enforce import MaskEnforcer

__all__ = ["FORMAT", "LINES", "RUN", "RunLog", "Sink", "read_lines", "table_json"]

FORMAT = 1
"""Of the folder; a reader refuses others."""

RUN, LINES = "run.json", "log.jsonl"


class Sink(Protocol):
    """Where else numbers go."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of one step, by name."""
        ...

    def close(self) -> None:
        """No more come."""
        ...


class RunLog:
    """The log of one run. Collective where it says so: every rank must make one, with the same sparsifier or none.

    Args:
        folder: made if need be.
        sparsifier: whose due steps are noted; a recorder is attached to it.
        enforcer: whose time is noted at the end.
        config: what is worth knowing of the run, JSON-able; kept in ``run.json``.
        sinks: take every number too, on rank 0 (:mod:`dist_sparse.report.sinks`).
        resume: goes on with the log that is in the folder.

    Raises:
        ValueError: the folder has a log and ``resume`` is False, or another format; ``config`` is not JSON; on every
            rank, and nothing is written. Collective.
    """

    def __init__(
        self,
        folder: str | Path,
        sparsifier: BaseDataSparsifier | None = None,
        *,
        enforcer: MaskEnforcer | None = None,
        config: Mapping[str, Any] | None = None,
        sinks: Sequence[Sink] = (),
        resume: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self._sparsifier, self._enforcer = sparsifier, enforcer
        self._speaks = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        self._sinks = tuple(sinks) if self._speaks else ()
        self._lines: IO[str] | None = None
        error: Exception | None = None
        if self._speaks:
            try:
                self._open(dict(config or {}), resume)
            except Exception as fault:
                error = fault
        try:
            group_over(world_ranks()).agree("RunLog()", {}, error)
        except BaseException:
            self._shut()
            raise
        self._started = time.perf_counter()
        self._recorder = None if sparsifier is None else sparsifier.record()
        self._seen = 0 if self._recorder is None else self._recorder.count
        self._steps_of: dict[int, int] = {}
        self._masks_seconds = 0.0
        self._last = -1

    def _open(self, config: dict[str, Any], resume: bool) -> None:
        try:
            said = json.dumps(config)
        except TypeError as error:
            raise ValueError(f"Invalid config: {error}.") from error
        run, lines = self.folder / RUN, self.folder / LINES
        if run.exists():
            if not resume:
                raise ValueError(f"{self.folder} holds the log of a run: choose another folder, or resume=True.")
            check_format(json.loads(run.read_text()), run)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not run.exists():
            about = {
                "format": FORMAT,
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "world": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
                "versions": {"python": platform.python_version(), "torch": str(torch.__version__)}
                | {name: str(sys.modules[name].__version__) for name in ("torchrec",) if name in sys.modules},
                "config": json.loads(said),
            }
            run.write_text(json.dumps(about, indent=2) + "\n")
        self._lines = lines.open("a", buffering=1)

    def step(self, step: int, **values: float | Tensor | None) -> None:
        """Notes the values of one training step, after ``sparsifier.step()``. Local.

        Args:
            step: counts up.
            **values: numbers or tensors of one (reading one of a GPU waits for it), such as ``loss=``; None is left
                out.

        Raises:
            ValueError: ``step`` is not larger than the last one, or a value is not a number.
        """
        if not step > self._last:
            raise ValueError(f"Invalid {step=}: the last one was {self._last}.")
        self._last = step
        if self._recorder is not None and self._recorder.count > self._seen:
            self._seen = self._recorder.count
            self._steps_of[self._seen] = step
        if self._recorder is not None:
            self._write_masks(self._recorder.take())
        if not self._speaks:
            return
        known = {name: _number(name, value) for name, value in values.items() if value is not None}
        if known:
            self._write({"kind": "values", "step": step, "seconds": self._elapsed(), "values": known})
            self._tell(step, known)

    def close(self) -> None:
        """Writes what is left, and how the tables stand in the end. Collective, like ``table_stats()``."""
        seconds, tables = {}, []
        if self._recorder is not None and self._sparsifier is not None:
            self._recorder.complete()
            self._write_masks(self._recorder.take())
            tables = [table_json(table) for table in self._sparsifier.table_stats()]
            seconds["masks"] = self._masks_seconds
        if self._enforcer is not None:
            seconds["enforcement"] = self._enforcer.seconds
        seconds["total"] = self._elapsed()
        self._write({"kind": "end", "step": self._last, "seconds": seconds, "tables": tables})
        self._shut()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; after an exception without what is collective, since other ranks may not come."""
        if error is None:
            self.close()
        else:
            self._shut()

    def _shut(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        for sink in self._sinks:
            sink.close()
        self._sinks = ()

    def _elapsed(self) -> float:
        return round(time.perf_counter() - self._started, 6)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps(_finite(line), allow_nan=False) + "\n")

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.scalars(step, values)

    def _write_masks(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            step = self._steps_of.pop(record.number, self._last)
            self._masks_seconds += record.seconds
            tables = [
                dataclasses.asdict(change) | {"sparsity": change.sparsity, "churn": change.churn}
                for change in record.tables
            ]
            line = {name: getattr(record, name) for name in ("number", "seconds", "collectives", "bytes")}
            self._write({"kind": "masks", "step": step, **line, "tables": tables})
            for change in record.tables:
                shown = {"sparsity": change.sparsity, "target": change.target, "churn": change.churn}
                shown |= {"regrown": change.regrown_blocks, "dead_rows": change.dead_rows}
                known = {f"{name}/{change.name}": float(v) for name, v in shown.items() if v is not None}
                self._tell(step, known)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log, in order; a last one that a crash has cut off is left out.

    Raises:
        ValueError: another line is no JSON object; names file and line.
    """
    lines = file.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            read = json.loads(line)
            if not isinstance(read, dict):
                raise ValueError("no object")
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise ValueError(f"{file}, line {number}: {error}.") from error
        yield read


def check_format(run: Any, file: Path) -> None:
    """Refuses the folder of another format.

    Raises:
        ValueError: names the file.
    """
    found = run.get("format") if isinstance(run, dict) else None
    if found != FORMAT:
        raise ValueError(f"{file} has format {found!r}; this release reads and writes {FORMAT}.")


def _number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"Invalid {name}={value!r}: must be a number or a tensor of one.")


def table_json(stats: TableStats) -> dict[str, Any]:
    """The counts of one table as JSON-able values: its fields and ``sparsity``."""
    return {**dataclasses.asdict(stats), "dtype": str(stats.dtype).removeprefix("torch."), "sparsity": stats.sparsity}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
