"""How is a run read back?

:func:`read_run` makes a :class:`Run` of a folder that :class:`~dist_sparse.report.run_log.RunLog` wrote. Whatever the
log says was checked here: names are strings, numbers are finite or None, so nobody after this has to ask again. A run
that has crashed or is still going is read as far as it went. Where a resumed run has done steps again, the later ones
count; due steps noted at one step of one session are all kept. A folder inside the run's that holds a run too is a run
to compare it with, such as the dense one.
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
from dist_sparse.report.histograms import Latest, Scored, bucket_of, scored
from dist_sparse.sparsifiers.inspection import TableStats
from dist_sparse.sparsifiers.recorder import MaskChange, StepRecord
from dist_sparse.tables.shards import ROW

__all__ = ["DueStep", "Run", "Series", "Spent", "read_run"]

_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading something else than a RunLog writes may raise."""

Series = tuple[tuple[int, float | None], ...]
"""``(step, value)``, steps ascending; None where the value was not finite."""


@dataclass(frozen=True, kw_only=True)
class DueStep:
    """What the due step at ``step`` of the training did."""

    step: int
    record: StepRecord


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Where the seconds of rank 0 went, over all sessions of the run.

    Args:
        total: while a log was open.
        masks: in due steps; 0 if none was noted.
        enforcement: keeping removed weights at zero; None if no enforcer was noted, or a session has no end.
    """

    total: float
    masks: float
    enforcement: float | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Args:
        folder: it was read from.
        started: as ``run.json`` has it.
        world: number of ranks.
        versions, config: as ``run.json`` has them.
        finished: the log was closed; False for a crash, for a run that is still going, and without a sparsifier, whose
            end is not noted.
        sessions: times that the run was started or resumed, as far as the log shows.
        last_step: the last one with a line; None for an empty log.
        values: a series for each name that ``RunLog.step`` was given.
        due: due steps, ascending; without ``scores``.
        scores: of each table the histogram that is worth showing.
        tables: how they stood at the last end; empty before.
        dead_rows: of those tables, where the end says it.
        spent: where the time went.
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
        """The last finite value of a series; None if there is none."""
        return next((value for _, value in reversed(self.values.get(name, ())) if value is not None), None)


def read_run(folder: str | Path) -> Run:
    """Reads a run and those to compare it with.

    Raises:
        ValueError: there is no run, or one of another format, or a line that no ``RunLog`` writes; names the file.
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
            raise ValueError(f"{lines}, line {number} is none that RunLog writes: {error!r}.") from error
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
        raise ValueError(f"{file} is none that RunLog writes: {error!r}.") from error


class _Reader:
    """Takes the lines of a log one by one."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[int, float | None]]] = {}
        self._due: list[tuple[int, DueStep]] = []
        """With the sessions that they belong to."""
        self._scores: list[Scored] = []
        """All that still count: where a resumed run does the steps of newer ones again, an older one shows."""
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
            # Its step is that of the due step before, so it says nothing of how far the run is.
            self._tell_session(None)
            due = DueStep(step=step, record=_record(line))
            known = len(self._due)
            while self._due and self._due[-1][0] < self._sessions and self._due[-1][1].step >= step:
                self._due.pop()  # a resumed run does these again
            if len(self._due) < known:
                self._scores = [one for one in self._scores if one.step < step]
            self._due.append((self._sessions, due))
            for change, table in zip(due.record.tables, line["tables"], strict=True):
                if table.get("scores"):  # as logs had them before there were lines for them
                    self._take_scores(scored(step, change, _pairs(table["scores"])))
            self._masks += _float(line["seconds"])
            return
        if kind == "scores":
            for table in line["tables"]:
                self._take_scores(_scored(table))
            return
        if kind == "values":
            self._tell_session(_float(line["seconds"]))
            for name, value in line["values"].items():
                self._put(self._values.setdefault(_str(name), []), step, _optional(_float, value))
        elif kind == "end":
            seconds = line["seconds"]
            self._tell_session(_float(seconds["total"]))
            # A session without a sparsifier says nothing of tables.
            if line["tables"]:
                self._tables = tuple(_stats(table) for table in line["tables"])
                self._dead = {t["name"]: _int(t["dead_rows"]) for t in line["tables"] if "dead_rows" in t}
            self._enforcement += _float(seconds.get("enforcement", 0.0))
            self._enforced &= "enforcement" in seconds
            self._ended, self._ends = True, self._ends + 1
        else:
            raise ValueError(f"kind {kind!r}")
        self._last = step if step >= 0 else self._last

    def _take_scores(self, new: Scored | None) -> None:
        if new is not None:
            self._scores.append(new)

    def _tell_session(self, elapsed: float | None) -> None:
        """A clock that goes back, or a line after an end, is the first of another session, whatever the log says."""
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
            series.pop()  # a resumed run does these again
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
            "values": {name: tuple(series) for name, series in self._values.items()},
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
        number=_int(line["number"]),
        seconds=_float(line["seconds"]),
        collectives=_int(line["collectives"]),
        bytes=_int(line["bytes"]),
        tables=tuple(_change(table) for table in line["tables"]),
    )


def _change(table: Mapping[str, Any]) -> MaskChange:
    return MaskChange(
        name=sys.intern(_str(table["name"])),
        target=_optional(_float, table["target"]),
        threshold=_optional(_float, table["threshold"]),
        scores=(),
        blocks=_int(table["blocks"]),
        removed_blocks=_int(table["removed_blocks"]),
        flipped_blocks=_optional(_int, table["flipped_blocks"]),
        regrown_blocks=_optional(_int, table["regrown_blocks"]),
        dead_rows=_optional(_int, table["dead_rows"]),
    )


def _pairs(scores: Any) -> list[tuple[float, int]]:
    return [(_float(edge), _int(count)) for edge, count in scores]


def _scored(table: Mapping[str, Any]) -> Scored:
    return Scored(
        name=_str(table["name"]),
        threshold=_float(table["threshold"]),
        first=bucket_of(_float(table["low"])),
        counts=array("q", [_int(count) for count in table["counts"]]),  # a long run has very many
        **{name: _int(table[name]) for name in ("step", "blocks", "removed_blocks", "zeros")},
    )


def _stats(table: Mapping[str, Any]) -> TableStats:
    dtype = getattr(torch, _str(table["dtype"]))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {table['dtype']!r}")
    rows, columns = table["shape"]
    block = table["sparse_block_shape"]
    return TableStats(
        name=_str(table["name"]),
        shape=(_int(rows), _int(columns)),
        dtype=dtype,
        sharding=_str(table["sharding"]),
        shards=_int(table["shards"]),
        sparse_block_shape=None if block is None else (_int(block[0]), _int(block[1]) if block[1] != ROW else ROW),
        target=_optional(_float, table["target"]),
        **{name: _int(table[name]) for name in ("blocks", "removed_blocks", "mask_bytes", "table_bytes", "kept_bytes")},
    )


def _optional(read: Any, value: Any) -> Any:
    return None if value is None else read(value)


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise TypeError(f"{value!r} is not an int of 64 bits")
    return value


def _float(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a finite number")
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
