"""What happened in a run, written down while it trains?

A :class:`RunLog` writes lines of JSON into a folder, on rank 0; other ranks only take part in what is collective. What
is counted over ranks travels with the due steps' own messages (:mod:`dist_sparse.sparsifiers.recorder`), so the line of
a due step is written one due step later, and the last one by :meth:`RunLog.close`.

``run.json`` says what the run is; every line of ``log.jsonl`` has a ``kind``:

- ``values``: ``step``, ``seconds`` since the start, and ``values``, what :meth:`RunLog.step` was given;
- ``masks``: what the due step at ``step`` did: its ``number``, ``seconds``, ``collectives``, ``bytes`` (of rank 0), and
  for each of ``tables`` the fields of :class:`~dist_sparse.sparsifiers.recorder.MaskChange` but ``scores``, and
  ``sparsity`` and ``churn``;
- ``scores``: the histograms of those ``tables`` where a newer one is worth showing than what was written before
  (:mod:`dist_sparse.report.histograms`); ``counts`` are of blocks, eight buckets an octave from the score ``low`` up;
- ``resumed``: the first line of another session, when it ``started``;
- ``end``: ``tables``, as :class:`~dist_sparse.TableStats` has them and with their ``dead_rows``, and where the
  ``seconds`` went.

Nothing that goes wrong while writing (a full disk, a sink) stops a rank: the others would wait for it. It is a warning,
once, and that output ends there. :mod:`dist_sparse.report.folder` writes and reads the files.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from dist_sparse.checks import integer
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.report.folder import RUN, check_config, check_log, open_log
from dist_sparse.report.histograms import Latest, scored
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.inspection import TableStats
from dist_sparse.sparsifiers.recorder import MaskChange, Recorder, StepRecord

__all__ = ["RUN", "RunLog", "Sink", "table_json"]

_NOTED = (*(one.name for one in dataclasses.fields(MaskChange) if one.name != "scores"), "sparsity", "churn")
_SHOWN = {name: name for name in ("sparsity", "target", "churn", "dead_rows")} | {"regrown": "regrown_blocks"}
"""What sinks get of it, and by which name."""

_T = TypeVar("_T")


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
        sparsifier: whose due steps are noted, from now on; a recorder is attached to it until the log is closed. One
            log at a time.
        enforcer: whose time is noted at the end.
        config: what is worth knowing of the run, JSON-able; kept in ``run.json``.
        sinks: take every number too, on rank 0 (:mod:`dist_sparse.report.sinks`).
        resume: goes on with the log that is in the folder.
        scores_every: due steps from one writing of score histograms to the next, >= 1. Of each table the last one that
            is worth showing is written, also when the log is closed.

    Raises:
        ValueError: the folder has a log and ``resume`` is False, or another format; ``config`` is not JSON; an argument
            is of another type, or ``scores_every`` no such number; on every rank, and nothing is written. OSError: rank
            0 can't write there; a ValueError on several ranks. Collective: 32 bytes, twice.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sparsifier: BaseDataSparsifier | None = None,
        *,
        enforcer: MaskEnforcer | None = None,
        config: Mapping[str, Any] | None = None,
        sinks: Iterable[Sink] = (),
        resume: bool = False,
        scores_every: int = 10,
    ) -> None:
        speaks = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0

        def checked() -> tuple[Path, Any, tuple[Sink, ...], int]:
            _check_kinds(sparsifier, enforcer, config, resume)
            path, listed = _path(folder), _listed(sinks)
            if speaks:
                check_log(path, resume)
            return path, check_config(config or {}), listed, integer("scores_every", scores_every, least=1)

        self.folder, known, listed, self._scores_every = _on_all(checked)
        # Only now, when no rank refuses its arguments, may rank 0 write.
        self._file = _on_all(lambda: open_log(self.folder, known) if speaks else None)
        self._speaks, self._sinks = speaks, listed if speaks else ()
        self._sparsifier, self._enforcer = sparsifier, enforcer
        self._scores, self._unwritten, self._scores_from = Latest(), dict[str, None](), 0
        self._recorder: Recorder | None = None
        self._attached = False
        self._started = time.perf_counter()
        if sparsifier is not None:
            self._attached = sparsifier._recorder is None
            self._recorder = sparsifier.record()
        self._before = self._seen = 0 if self._recorder is None else self._recorder.count
        self._steps_of: dict[int, int] = {}
        self._masks_seconds = 0.0
        self._last, self._closed = -1, False

    def step(self, step: int, **values: float | Tensor | None) -> None:
        """Notes the values of one training step, after ``sparsifier.step()``. Local.

        What happened in due steps since the last call is noted at this step.

        Args:
            step: counts up, from call to call.
            **values: numbers or tensors of one (reading one of a GPU waits for it), such as ``loss=``; None is left
                out. Those of rank 0 are written.

        Raises:
            ValueError: ``step`` is no int, or not larger than the last one; a value is not a number; the log is closed.
        """
        if self._closed:
            raise ValueError(f"The log in {self.folder} is closed: it takes no step {step!r}.")
        step = _step(step, self._last)
        given = {name: value for name, value in values.items() if value is not None}
        for name, value in given.items():  # on every rank: an error on rank 0 alone would leave the others waiting
            _check(name, value)
        self._last = step
        if self._recorder is not None:
            self._steps_of |= dict.fromkeys(range(self._seen + 1, self._recorder.count + 1), step)
            self._seen = self._recorder.count
            self._write_masks(self._recorder.take())
        if self._speaks and given:
            known = {name: _float(value) for name, value in given.items()}
            self._write({"kind": "values", "step": step, "seconds": self._elapsed(), "values": known})
            self._tell(step, known)

    def close(self) -> None:
        """Writes what is left, and how the tables stand in the end, and detaches its recorder; more calls do nothing.
        Collective, like ``table_stats()`` and ``dead_rows()``."""
        try:
            self._write_end()
        finally:
            self._shut()

    def _write_end(self) -> None:
        seconds, tables = {}, []
        if self._recorder is not None and self._sparsifier is not None:
            self._recorder.complete()
            self._write_masks(self._recorder.take())
            self._write_scores()
            stats, dead = self._sparsifier.table_stats(), self._sparsifier.dead_rows()
            tables = [table_json(table) | {"dead_rows": dead[table.name]} for table in stats]
            seconds["masks"] = self._masks_seconds
        if self._enforcer is not None:
            seconds["enforcement"] = self._enforcer.seconds
        seconds["total"] = self._elapsed()
        self._write({"kind": "end", "step": self._last, "seconds": seconds, "tables": tables})

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
        self._closed = True
        if self._attached and self._sparsifier is not None:
            self._sparsifier.stop_recording()  # nobody would take what it goes on counting
        self._attached, self._recorder = False, None
        self._write_scores()
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)
        self._sinks = ()

    def _elapsed(self) -> float:
        return round(time.perf_counter() - self._started, 6)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(line)

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            try:
                sink.scalars(step, values)
            except Exception as error:
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks = tuple(other for other in self._sinks if other is not sink)
        said = f"{type(sink).__name__} failed ({type(error).__name__}: {error}): it gets no more."
        warnings.warn(said, RuntimeWarning, stacklevel=2)

    def _write_masks(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            if record.number <= self._before:
                continue  # of a log before this one, or of nobody's
            step = self._steps_of.pop(record.number, self._last)
            self._masks_seconds += record.seconds
            if not self._speaks:
                continue
            tables = [{name: getattr(change, name) for name in _NOTED} for change in record.tables]
            line = {name: getattr(record, name) for name in ("number", "seconds", "collectives", "bytes")}
            self._write({"kind": "masks", "step": step, **line, "tables": tables})
            for change in record.tables:
                new = scored(step, change, change.scores)
                if new is not None and self._scores.take(new):
                    self._unwritten[new.name] = None
            if self._unwritten and record.number >= self._scores_from:
                self._write_scores()
                self._scores_from = record.number + self._scores_every
            if self._sinks:
                shown = [(f"{name}/{change['name']}", change[of]) for change in tables for name, of in _SHOWN.items()]
                self._tell(step, {name: float(value) for name, value in shown if value is not None})

    def _write_scores(self) -> None:
        tables = [self._scores.of[name].to_json() for name in self._unwritten]
        self._unwritten.clear()
        if tables:
            self._write({"kind": "scores", "step": self._last, "tables": tables})


def _on_all(do: Callable[[], _T]) -> _T:
    """What ``do`` gives on this rank; an error on one rank is one on all. Collective."""
    done: list[_T] = []
    error: Exception | None = None
    try:
        done.append(do())
    except Exception as fault:
        error = fault
    group_over(world_ranks()).agree("RunLog()", {}, error)
    return done[0]


def _step(step: int, last: int) -> int:
    known = integer("step", step, least=0, most=2**63 - 1)
    if not known > last:
        raise ValueError(f"Invalid {step=}: the last one was {last}.")
    return known


def _check_kinds(sparsifier: object, enforcer: object, config: object, resume: object) -> None:
    kinds: dict[str, tuple[object, type]] = {
        "config": (config, Mapping),
        "sparsifier": (sparsifier, BaseDataSparsifier),
    }
    kinds |= {"enforcer": (enforcer, MaskEnforcer)}
    for name, (given, kind) in kinds.items():
        if not isinstance(given, kind) and given is not None:
            raise ValueError(f"Invalid {name} of type {type(given).__name__}: must be a {kind.__name__}.")
    if not isinstance(resume, bool):
        raise ValueError(f"Invalid {resume=}: must be a bool.")


def _path(folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"Invalid folder of type {type(folder).__name__}: must be a str or a Path.")
    return Path(folder)


def _listed(sinks: object) -> tuple[Sink, ...]:
    if not isinstance(sinks, Iterable):
        raise ValueError(f"Invalid sinks of type {type(sinks).__name__}: must be an iterable of sinks.")
    listed = tuple(sinks)
    for sink in listed:
        if not all(callable(getattr(sink, name, None)) for name in ("scalars", "close")):
            raise ValueError(f"Invalid sink of type {type(sink).__name__}: must have scalars() and close().")
    return listed


def _check(name: str, value: object) -> None:
    """Refuses what is no number, without reading a tensor."""
    if isinstance(value, Tensor):
        fits = value.numel() == 1 and not value.is_complex() and not value.is_meta
    else:  # those of NumPy too
        fits = not isinstance(value, bool) and isinstance(value, numbers.Real) and _is_float(value)
    if not fits:
        raise ValueError(f"Invalid {name}={value!r}: must be a number or a tensor of one.")


def _float(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _is_float(value: numbers.Real) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def table_json(stats: TableStats) -> dict[str, Any]:
    """The counts of one table as JSON-able values: its fields and ``sparsity``."""
    return {**dataclasses.asdict(stats), "dtype": str(stats.dtype).removeprefix("torch."), "sparsity": stats.sparsity}
