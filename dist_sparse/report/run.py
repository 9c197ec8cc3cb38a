"""Reads the folder of a run back as a :class:`Run`.

- Everything in it is checked here: names are strings, counts are not negative, numbers are finite or None.
- A run that crashed or still runs is read up to its last whole line.
- Where a resumed run repeats steps, the later ones count. Mask updates logged at one step of one session all count.
- A run in a folder inside the run's folder, such as a dense one, is a run to compare it with.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dist_sparse.report.folder import LINES, RUN, read_about, read_lines
from dist_sparse.report.histograms import LAST_BUCKET, Latest, Scored, bucket_of, scored
from dist_sparse.sparsifiers.recorder import MaskChange, StepRecord
from dist_sparse.sparsifiers.stats import TableStats
from dist_sparse.tables.shards import COL, ROW
from dist_sparse.text import shortened

__all__ = ["DueStep", "Run", "Series", "Spent", "read_run"]

_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What may be raised by reading something that no RunLog writes."""

_LARGEST = 1e15
"""Of seconds and levels, so that their sums and products with counts stay finite."""

Series = tuple[tuple[int, float | None], ...]
"""``(step, value)``, steps ascending; None where the value was not finite."""


@dataclass(frozen=True, kw_only=True)
class DueStep:
    """Mask update at training step ``step``."""

    step: int
    record: StepRecord


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of rank 0, over all sessions of the run.

    Args:
        total: while a log was open.
        masks: in mask updates; 0 without any.
        enforcement: in keeping pruned weights at zero; None without an enforcer, or if a session has no end.
    """

    total: float
    masks: float
    enforcement: float | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its folder describes it.

    Args:
        folder: where it was read from.
        started: as in ``run.json``.
        world: number of ranks.
        versions, config: as in ``run.json``.
        finished: the log was closed; False for a run that crashed or still runs.
        sessions: how often the run was started or resumed, as far as the log shows.
        last_step: last step with a line; None for an empty log.
        values: a series for each name passed to ``RunLog.step``.
        due: mask updates in ascending order; their ``scores`` are empty.
        scores: one histogram per table (:class:`~dist_sparse.report.histograms.Latest`).
        tables: statistics at the last end; empty before.
        dead_rows: rows without a kept element, of those tables whose end has them.
        spent: seconds.
        compared: other runs, by the name of their folder.
    """

    folder: Path
    started: str
    world: int
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    finished: bool
    sessions: int
    last_step: int | None
    values: Mapping[str, Series]
    due: tuple[DueStep, ...]
    tables: tuple[TableStats, ...]
    spent: Spent
    dead_rows: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, Scored] = field(default_factory=dict)
    compared: Mapping[str, Run] = field(default_factory=dict)

    def last(self, name: str) -> float | None:
        """Return the last finite value of a series; None if there is none."""
        return next((value for _, value in reversed(self.values.get(name, ())) if value is not None), None)


def read_run(folder: str | Path) -> Run:
    """Read a run and the runs to compare it with.

    Args:
        folder: that a :class:`~dist_sparse.RunLog` wrote.

    Raises:
        ValueError: there is no run, it has another format, or a line is not one that ``RunLog`` writes; names the file.

    Example::

        >>> import tempfile
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import read_run
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder) as log:
        ...     for step in range(3):
        ...         log.step(step, loss=1 / (1 + step))
        >>> run = read_run(folder)
        >>> run.finished, run.last_step, run.last("loss")
        (True, 2, 0.3333333333333333)
    """
    folder = Path(folder)
    run = _read(folder)
    compared = {file.parent.name: _read(file.parent) for file in sorted(folder.glob(f"*/{RUN}"))}
    return dataclasses.replace(run, compared=compared)


def _read(folder: Path) -> Run:
    file, lines = folder / RUN, folder / LINES
    for needed in (file, lines):
        if not needed.is_file():
            raise ValueError(f"{folder} holds no run: there is no {needed.name}, which RunLog writes.")
    about = read_about(file)
    reader = _Reader()
    for number, line in enumerate(read_lines(lines), start=1):
        try:
            reader.take(line)
        except _WRONG as error:
            raise ValueError(f"{lines}, line {number} is not one that RunLog writes: {_said(error)}.") from error
    try:
        return Run(
            folder=folder,
            started=_str(about["started"]),
            world=_int(about["world"]),
            versions={_str(name): _str(version) for name, version in about["versions"].items()},
            config=dict(about["config"]),
            **reader.read(),
        )
    except _WRONG as error:
        raise ValueError(f"{file} is not one that RunLog writes: {_said(error)}.") from error


class _Reader:
    """Collects the lines of a log one by one."""

    def __init__(self) -> None:
        self._series: dict[str, list[tuple[int, float | None]]] = {}
        self._due: list[tuple[int, DueStep]] = []
        """With their sessions."""
        self._scores: list[Scored] = []
        """All that still count: where a resumed run repeats the steps of newer ones, an older one is shown again."""
        self._tables: tuple[TableStats, ...] = ()
        self._dead: dict[str, int] = {}
        self._last: int | None = None
        self._ended = False
        self._ends = 0
        self._elapsed = self._before = self._masks = self._enforcement = 0.0
        self._sessions, self._enforced = 1, True

    def take(self, line: Mapping[str, Any]) -> None:
        kind = line["kind"]
        if kind == "resumed":
            self._begin_session()
            return
        step = _int(line["step"])
        if kind == "masks":
            # Written one update late, so its step says nothing about how far the run is.
            self._tell_session(None)
            due = DueStep(step=step, record=_record(line))
            known = len(self._due)
            while self._due and self._due[-1][0] < self._sessions and self._due[-1][1].step >= step:
                self._due.pop()  # repeated by a resumed run
            if len(self._due) < known:
                self._scores = [one for one in self._scores if one.step < step]
            self._due.append((self._sessions, due))
            for change, table in zip(due.record.tables, line["tables"], strict=True):
                if table.get("scores"):  # of older logs, before scores had lines of their own
                    self._take_scores(scored(step, change, _pairs(table["scores"])))
            self._masks += due.record.seconds
            return
        if kind == "scores":
            for table in line["tables"]:
                self._take_scores(_scored(table))
            return
        if kind == "values":
            self._tell_session(_seconds(line["seconds"]))
            for name, value in line["values"].items():
                self._put(self._series.setdefault(_str(name), []), step, _optional(_float, value))
        elif kind == "end":
            seconds = line["seconds"]
            self._tell_session(_seconds(seconds["total"]))
            # A session without a sparsifier has no tables.
            if line["tables"]:
                self._tables = tuple(_stats(table) for table in line["tables"])
                self._dead = {t["name"]: _count(t["dead_rows"]) for t in line["tables"] if "dead_rows" in t}
            self._enforcement += _seconds(seconds.get("enforcement", 0.0))
            self._enforced &= "enforcement" in seconds
            self._ended, self._ends = True, self._ends + 1
        else:
            raise ValueError(f"kind {shortened(kind)}")
        self._last = step if step >= 0 else self._last

    def _take_scores(self, new: Scored | None) -> None:
        if new is not None:
            self._scores.append(new)

    def _tell_session(self, elapsed: float | None) -> None:
        """Begin another session where time decreases or a line follows an end."""
        if self._ended or (elapsed is not None and elapsed < self._elapsed):
            self._begin_session()
        self._elapsed = self._elapsed if elapsed is None else elapsed

    def _begin_session(self) -> None:
        self._sessions += 1
        self._before, self._elapsed = self._before + self._elapsed, 0.0
        self._ended = False

    @staticmethod
    def _put(series: list[tuple[int, Any]], step: int, value: Any) -> None:
        while series and series[-1][0] >= step:
            series.pop()  # repeated by a resumed run
        series.append((step, value))

    def read(self) -> dict[str, Any]:
        scores = Latest()
        for one in self._scores:
            scores.take(one)
        enforced = self._enforced and self._ends == self._sessions
        return {
            "finished": self._ended,
            "sessions": self._sessions,
            "last_step": self._last,
            "values": {name: tuple(series) for name, series in self._series.items()},
            "due": tuple(due for _, due in self._due),
            "tables": self._tables,
            "dead_rows": self._dead,
            "scores": scores.of,
            "spent": Spent(
                total=self._before + self._elapsed,
                masks=self._masks,
                enforcement=self._enforcement if enforced else None,
            ),
        }


def _record(line: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        number=_count(line["number"]),
        seconds=_seconds(line["seconds"]),
        collectives=_count(line["collectives"]),
        bytes=_count(line["bytes"]),
        tables=tuple(_change(table) for table in line["tables"]),
    )


def _change(table: Mapping[str, Any]) -> MaskChange:
    return MaskChange(
        name=sys.intern(_str(table["name"])),
        target=_optional(_level, table["target"]),
        threshold=_optional(_float, table["threshold"]),
        scores=(),
        blocks=_count(table["blocks"]),
        removed_blocks=_count(table["removed_blocks"]),
        flipped_blocks=_optional(_count, table["flipped_blocks"]),
        regrown_blocks=_optional(_count, table["regrown_blocks"]),
        dead_rows=_optional(_count, table["dead_rows"]),
    )


def _pairs(scores: Any) -> list[tuple[float, int]]:
    return [(_float(edge), _count(blocks)) for edge, blocks in scores]


def _scored(table: Mapping[str, Any]) -> Scored:
    first, counts = bucket_of(_float(table["low"])), table["counts"]
    if first + len(counts) - 1 > LAST_BUCKET:
        raise ValueError(f"{len(counts)} buckets from {first} on are beyond float32")
    return Scored(
        step=_int(table["step"]),
        name=_str(table["name"]),
        threshold=_float(table["threshold"]),
        first=first,
        counts=array("q", [_count(blocks) for blocks in counts]),  # a long run has very many
        **{name: _count(table[name]) for name in ("blocks", "removed_blocks", "zeros")},
    )


def _stats(table: Mapping[str, Any]) -> TableStats:
    dtype = getattr(torch, _str(table["dtype"]))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {shortened(table['dtype'])}")
    rows, columns = table["shape"]
    block = table["sparse_block_shape"]
    return TableStats(
        name=_str(table["name"]),
        shape=(_count(rows), _count(columns)),
        dtype=dtype,
        sharding=_str(table["sharding"]),
        shards=_count(table["shards"]),
        sparse_block_shape=None if block is None else (_side(block[0], COL), _side(block[1], ROW)),
        target=_optional(_level, table["target"]),
        **{
            name: _count(table[name])
            for name in ("blocks", "removed_blocks", "mask_bytes", "table_bytes", "kept_bytes")
        },
    )


def _side(size: Any, whole: str) -> int | str:
    return whole if size == whole else _count(size)


def _optional(read: Any, value: Any) -> Any:
    return None if value is None else read(value)


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise TypeError(f"{shortened(value)} is not an int of 64 bits")
    return value


def _count(value: Any) -> int:
    if _int(value) < 0:
        raise ValueError(f"{value} is negative")
    return int(value)


def _float(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"{shortened(value)} is not a finite number")
    return float(value)


def _seconds(value: Any) -> float:
    if not 0 <= _float(value) < _LARGEST:
        raise ValueError(f"{value!r} is not a number of seconds in [0, {_LARGEST:g})")
    return float(value)


def _level(value: Any) -> float:
    if abs(_float(value)) >= _LARGEST:
        raise ValueError(f"{value!r} is not a level")
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shortened(value)} is not a string")
    return value


def _said(error: Exception) -> str:
    return shortened(error, most=200)
