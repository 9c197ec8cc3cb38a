"""Reads the folder of a run back as a :class:`Run`.

- Everything in it is checked here: names are strings, counts are not negative, numbers are finite or None.
- A run that crashed or still runs is read up to its last whole line.
- Where a resumed run repeats steps, the later ones count. Mask updates logged at one step of one session all count.
- A run in a folder inside the run's folder, such as a dense one, is a run to compare it with.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_sparse.records import StepRecord, TableStats
from dist_sparse.report.artifacts import Artifact, read_artifacts
from dist_sparse.report.folder import LATEST, LINES, RUN, read_about, read_lines
from dist_sparse.report.histograms import Latest, Scored, scored
from dist_sparse.report.lines import (
    WRONG,
    count,
    histogram,
    integer,
    mask_update,
    number,
    optional,
    pairs,
    seconds,
    string,
    table_stats,
)
from dist_sparse.report.traffic import Traffic, read_traffic
from dist_sparse.text import shortened

__all__ = ["DueStep", "Run", "Series", "Spent", "read_run", "read_runs"]

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
        name: as given to ``RunLog``, else that of the folder.
        started: as in ``run.json``.
        command: the words by which it was started; empty if unknown.
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
        model_tables: bytes of all tables of the model, where ``RunLog`` was given it.
        traffic: rows by their lookups, of those tables whose end has them.
        artifacts: what was written for serving (:func:`~dist_sparse.report.add_artifact`).
        spent: seconds.
        compared: other runs, by their names.
    """

    folder: Path
    name: str
    started: str
    command: str
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
    model_tables: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    compared: Mapping[str, Run] = field(default_factory=dict)

    @property
    def other_tables(self) -> dict[str, int]:
        """Bytes of the model's tables that are not registered with a sparsifier."""
        registered = {table.name for table in self.tables}
        registered |= {change.name for due in self.due[-1:] for change in due.record.tables}
        return {name: size for name, size in self.model_tables.items() if name not in registered}

    @property
    def bytes_dense(self) -> int | None:
        """Bytes of all tables without sparsity: of the model's, else of the registered ones; None if unknown."""
        if not self.tables and not self.model_tables:
            return None
        registered = {table.name: table.table_bytes for table in self.tables}
        return sum({**self.model_tables, **registered}.values())

    @property
    def bytes_kept(self) -> int | None:
        """Bytes of the kept weights of those tables, masks not counted; None before the end of a run that prunes."""
        if self.due and not self.tables:
            return None
        dense = self.bytes_dense
        return None if dense is None else dense - sum(t.table_bytes - t.kept_bytes for t in self.tables)

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
    nested = [_read(file.parent) for file in sorted(folder.glob(f"*/{RUN}"))]
    return dataclasses.replace(_read(folder), compared=_by_name(nested))


def read_runs(folders: Sequence[str | Path]) -> Run:
    """Read several runs: the first, compared with the others. Of one alone the runs inside its folder are compared.

    A folder that is given twice, such as ``runs/latest`` among ``runs/*``, counts once.

    Raises:
        ValueError: as :func:`read_run`.

    Example::

        >>> import tempfile
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import read_runs
        >>> folders = [tempfile.mkdtemp(), tempfile.mkdtemp()]
        >>> for name, folder in zip(["rows", "columns"], folders):
        ...     RunLog(folder, name=name).close()
        >>> runs = read_runs(folders)
        >>> runs.name, list(runs.compared)
        ('rows', ['columns'])
    """
    different: dict[str, Path] = {}
    for folder in folders:
        different.setdefault(os.path.realpath(folder), Path(folder))
    if len(different) == 1:
        return read_run(folders[0])
    first, *others = map(_read, different.values())
    return dataclasses.replace(first, compared=_by_name(others, first))


def _by_name(runs: Sequence[Run], first: Run | None = None) -> dict[str, Run]:
    """Tell names that occur more than once apart, by folder, or number them."""
    named: dict[str, Run] = {}
    taken = {first.name} if first is not None else set()
    for run in runs:
        name, times = run.name, 1
        if name in named or name in taken:
            name = f"{run.name} ({run.folder.resolve().name})"
        while name in named or name in taken:
            times += 1
            name = f"{run.name} ({times})"
        named[name] = dataclasses.replace(run, name=name)
    return named


def _read(folder: Path) -> Run:
    file, lines = folder / RUN, folder / LINES
    for needed in (file, lines):
        if not needed.is_file():
            why = f"there is no {needed.name}, which RunLog writes" if folder.is_dir() else "there is no such folder"
            if folder.is_symlink() and not folder.exists():
                why = f"it links to {folder.readlink()}, which is gone"
            latest = folder / LATEST
            newest = f" The newest of the runs inside is {latest}." if (latest / RUN).is_file() else ""
            raise ValueError(f"{folder} holds no run: {why}.{newest}")
    about = read_about(file)
    reader = _Reader()
    for place, line in enumerate(read_lines(lines), start=1):
        try:
            reader.take(line)
        except WRONG as error:
            why = shortened(error, most=200)
            raise ValueError(f"{lines}, line {place} is not one that RunLog writes: {why}.") from error
    try:
        return Run(
            folder=folder,
            name=optional(string, about.get("name")) or folder.resolve().name,
            command=string(about.get("command", "")),
            model_tables={string(name): count(size) for name, size in about.get("tables", {}).items()},
            artifacts=read_artifacts(folder),
            started=string(about["started"]),
            world=integer(about["world"]),
            versions={string(name): string(version) for name, version in about["versions"].items()},
            config=dict(about["config"]),
            **reader.read(),
        )
    except WRONG as error:
        raise ValueError(f"{file} is not one that RunLog writes: {shortened(error, most=200)}.") from error


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
        self._traffic: dict[str, Traffic] = {}
        self._last: int | None = None
        self._ended = False
        self._ends = 0
        self._elapsed = self._before = self._masks = self._enforcement = 0.0
        self._sessions, self._enforced = 1, True

    def take(self, line: Mapping[str, Any]) -> None:
        kind = line["kind"]
        if kind == "values":
            self._take_values(integer(line["step"]), line)
            return
        if kind == "resumed":
            self._begin_session()
            return
        step = integer(line["step"])
        if kind == "masks":
            # Written one update late, so its step says nothing about how far the run is.
            self._tell_session(None)
            due = DueStep(step=step, record=mask_update(line))
            known = len(self._due)
            while self._due and self._due[-1][0] < self._sessions and self._due[-1][1].step >= step:
                self._due.pop()  # repeated by a resumed run
            if len(self._due) < known:
                self._scores = [one for one in self._scores if one.step < step]
            self._due.append((self._sessions, due))
            for change, table in zip(due.record.tables, line["tables"], strict=True):
                if table.get("scores"):  # of older logs, before scores had lines of their own
                    self._take_scores(scored(step, change, pairs(table["scores"])))
            self._masks += due.record.seconds
            return
        if kind == "scores":
            for table in line["tables"]:
                self._take_scores(histogram(table))
            return
        if kind == "end":
            spent = line["seconds"]
            self._tell_session(seconds(spent["total"]))
            # A session without a sparsifier has no tables.
            if line["tables"]:
                self._tables = tuple(table_stats(table) for table in line["tables"])
                self._dead = {t["name"]: count(t["dead_rows"]) for t in line["tables"] if "dead_rows" in t}
                self._traffic = {t["name"]: read_traffic(t["traffic"]) for t in line["tables"] if "traffic" in t}
            self._enforcement += seconds(spent.get("enforcement", 0.0))
            self._enforced &= "enforcement" in spent
            self._ended, self._ends = True, self._ends + 1
        else:
            raise ValueError(f"kind {shortened(kind)}")
        self._last = step if step >= 0 else self._last

    def _take_values(self, step: int, line: Mapping[str, Any]) -> None:
        self._tell_session(seconds(line["seconds"]))
        for name, value in line["values"].items():
            series = self._series.setdefault(name, [])  # a key of JSON is a string
            while series and series[-1][0] >= step:
                series.pop()  # repeated by a resumed run
            series.append((step, None if value is None else number(value)))
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
            "traffic": self._traffic,
            "scores": scores.of,
            "spent": Spent(
                total=self._before + self._elapsed,
                masks=self._masks,
                enforcement=self._enforcement if enforced else None,
            ),
        }
