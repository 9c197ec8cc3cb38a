"""Reads the folder of a run back as a :class:`Run`.

- The format is checked, not each value: a log is the user's own file. A page escapes all of it.
- A run that crashed or still runs is read up to its last whole line.
- A session is what one ``RunLog`` writes. Where a session repeats steps of the one before, the
  later ones count. Mask updates logged at one step of one session all count.
- A run in a folder inside the run's folder, such as a dense one, is a run to compare it with.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter, itemgetter, mul
from pathlib import Path
from typing import Any

from dist_sparse import checks
from dist_sparse.records import (
    GuardCheck,
    MaskChange,
    SlotChange,
    SlotUpdate,
    StepRecord,
    TableStats,
)
from dist_sparse.report.folder import LATEST, LINES, RUN, read_about, read_lines, write_whole
from dist_sparse.text import shortened

# ------------------------------------------------------------------------------
# Artifacts of a run, their bytes and quality, in ``artifacts.json``.
#
# They are added after training, from any process: the log of the run need not be open.

_FILE = "artifacts.json"


@dataclass(frozen=True, kw_only=True)
class ArtifactBytes:
    """A served form of a run's model: its name, the bytes of its files, and the AUC with which it
    serves."""

    name: str
    bytes: int
    auc: float


def add_artifact(
    run: str | os.PathLike[str],
    artifact: str | os.PathLike[str],
    *,
    auc: float,
    name: str | None = None,
) -> ArtifactBytes:
    """Add an artifact to a run, for the chart of AUC over bytes in its report. Local: for one rank,
    or any process.

    One of the same name is replaced.

    Args:
        run: folder that a :class:`~dist_sparse.RunLog` wrote.
        artifact: the file or folder that is served; its bytes are read here. It need not be kept.
        auc: with which it serves.
        name: in the report; that of the file or folder by default.

    Raises:
        ValueError: there is no such run or artifact, or an argument is invalid.
        OSError: it can't be written.

    Example::

        >>> import tempfile
        >>> from pathlib import Path
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import add_artifact
        >>> folder = Path(tempfile.mkdtemp())
        >>> with RunLog(folder) as log:
        ...     log.step(0, test_auc=0.75)
        >>> _ = (folder / "int8").write_bytes(bytes(1000))
        >>> add_artifact(folder, folder / "int8", auc=0.749)
        ArtifactBytes(name='int8', bytes=1000, auc=0.749)
    """
    run, artifact = Path(run), Path(artifact)
    _refuse_no_run(run, RUN)
    files = [*filter(Path.is_file, (artifact, *artifact.rglob("*")))]
    if not files:
        raise ValueError(
            f"Invalid artifact={str(artifact)!r}: there is no such file, nor a folder with files."
        )
    new = ArtifactBytes(
        name=artifact.name if name is None else name,
        bytes=sum(file.stat().st_size for file in files),
        auc=checks.number("auc", auc, least=0, most=1),
    )
    # A run is exported again after more training: the newest counts.
    named = {old.name: old for old in read_artifacts(run)} | {new.name: new}
    text = json.dumps([*map(asdict, named.values())], indent=2, allow_nan=False)
    write_whole(run / _FILE, f"{text}\n".encode())
    return new


def read_artifacts(run: Path) -> tuple[ArtifactBytes, ...]:
    """Return the artifacts of a run, in the order in which they were added.

    Raises:
        ValueError: the file is not one that :func:`add_artifact` writes; names it.
    """
    file = run / _FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else "[]"
    try:
        return tuple(ArtifactBytes(**entry) for entry in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is not one that add_artifact() writes: {shortened(error, most=200)}."
        ) from error


# `(step, value)`, steps ascending; None where the value was not finite.
Series = tuple[tuple[int, float | None], ...]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of rank 0, over all sessions of the run.

    Args:
        total: while a log was open.
        masks: in mask updates; 0 without any.
        enforcement: in keeping pruned weights at zero; None without an enforcer, or if a session
            has no end.
    """

    total: float
    masks: float
    enforcement: float | None


@dataclass(frozen=True, kw_only=True)
class RowTraffic:
    """Rows of a table by their lookups: of none, of 1, of 2 and 3, of 4 to 7 and so on; and the
    lookups of all of them.

    ``kept``: rows with a kept weight; ``removed``: all others.
    """

    kept: Sequence[int]
    removed: Sequence[int]
    kept_lookups: int
    removed_lookups: int

    @property
    def share(self) -> float | None:
        """Share of the lookups that kept rows had; None without lookups."""
        return share_of(self.kept_lookups, self.kept_lookups + self.removed_lookups)


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
        due: mask updates in ascending order, each with its training step.
        validations: of the guard, each with the training step before it.
        slots: updates of following tables in ascending order, each with its training step.
        tables: statistics at the last end; empty before.
        dead_rows: rows without a kept element, at the last end.
        model_tables: bytes of all tables of the model, where ``RunLog`` was given it.
        traffic: rows by their lookups at the last end, of the tables that count them.
        lookups: at the last end, of each table all that are known, and those of removed rows.
        artifacts: served forms of its model (:func:`~dist_sparse.report.add_artifact`).
        spent: seconds.
        compared: other runs, by their names.
        number: place of its method among those compared: it gives a run its color in all charts.
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
    due: tuple[tuple[int, StepRecord], ...]
    tables: tuple[TableStats, ...]
    spent: Spent
    dead_rows: Mapping[str, int] = field(default_factory=dict)
    validations: tuple[tuple[int, GuardCheck], ...] = ()
    slots: tuple[tuple[int, SlotUpdate], ...] = ()
    model_tables: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, RowTraffic] = field(default_factory=dict)
    lookups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    artifacts: tuple[ArtifactBytes, ...] = ()
    compared: Mapping[str, Run] = field(default_factory=dict)
    number: int = 0

    @property
    def method(self) -> str:
        """The config without its seeds, as text: equal for runs that differ by chance alone. The
        name of a run whose config has no seed."""
        config = flat(self.config)
        unseeded = {key: value for key, value in config.items() if not key.endswith("seed")}
        if len(unseeded) == len(config):
            return self.name
        return json.dumps(unseeded, sort_keys=True)

    @property
    def all_runs(self) -> list[Run]:
        """The run and the ones to compare it with."""
        return [self, *self.compared.values()]

    @property
    def end(self) -> int:
        """The last step: a mask update may be logged after the last one with values."""
        steps: list[int] = [self.last_step or 0, *map(itemgetter(0), self.due[-1:])]
        return max(steps)

    @property
    def undone(self) -> tuple[int, GuardCheck] | None:
        """The validation that undid a mask update, at most one in a run, and its step."""
        return next((one for one in self.validations if one[1].undone is not None), None)

    @property
    def last_changes(self) -> dict[str, MaskChange]:
        """The last change of each table."""
        return {change.name: change for _, record in self.due for change in record.tables}

    @property
    def states(self) -> tuple[MaskChange | TableStats, ...]:
        """The registered tables at the end, in the order of the model; before it, as the last mask
        updates left them."""
        return self.tables or tuple(self.last_changes.values())

    @property
    def other_tables(self) -> dict[str, int]:
        """Bytes of the model's tables that are not registered with a sparsifier."""
        # `tables` is empty before the end of a run: until then its mask updates name them.
        registered = {*self.last_changes, *map(attrgetter("name"), self.tables)}
        return {name: size for name, size in self.model_tables.items() if name not in registered}

    @property
    def bytes_dense(self) -> int | None:
        """Bytes of all tables without sparsity: of the model's, else of the registered ones; None
        if unknown."""
        # Both name registered tables: their bytes at the end count.
        registered = {table.name: table.table_bytes for table in self.tables}
        sizes = {**self.model_tables, **registered}
        return sum(sizes.values()) if sizes else None

    @property
    def bytes_kept(self) -> int | None:
        """Bytes of the kept weights of those tables, masks not counted; None before the end of a
        run that prunes."""
        dense = self.bytes_dense
        # Bytes of tables are logged at the end; mask updates have none.
        if dense is None or self.states != self.tables:
            return None
        return dense - sum(table.table_bytes - table.kept_bytes for table in self.tables)

    @property
    def trained(self) -> bool:
        """Whether it has more than one step: of a single one, time is no time of a step, and the
        weights are those of another run."""
        return bool(self.last_step)

    @property
    def ms_per_step(self) -> float | None:
        """Milliseconds of a training step: as logged, else the mean of rank 0 while the log was
        open."""
        logged = self.last("ms_per_step")
        if logged is not None or not self.trained:
            return logged
        return self.ms_of(self.spent.total)

    @property
    def sparsity_share(self) -> float | None:
        """Share of a step's time that mask updates and enforcement took; None without updates, or
        where it is unknown."""
        if not self.due or self.spent.enforcement is None:
            return None
        return share_of(self.ms_of(self.spent.masks + self.spent.enforcement), self.ms_per_step)

    def ms_of(self, seconds: float) -> float:
        """Return seconds of the whole run as milliseconds of a step."""
        return 1000 * seconds / ((self.last_step or 0) + 1)

    def last(self, name: str) -> float | None:
        """Return the last finite value of a series; None if there is none."""
        finite = (x for _, x in reversed(self.values.get(name, ())) if x is not None)
        return next(finite, None)


def total(tables: Iterable[object], field: str) -> int:
    """Return the sum of a field over tables."""
    return sum(map(attrgetter(field), tables))


def target_of(tables: Sequence[MaskChange | TableStats]) -> float | None:
    """Return the configured level of all blocks; None where a table has no level."""
    targets: list[Any] = [*map(attrgetter("target"), tables)]
    if None in targets:
        return None
    # Weighted by blocks, so that it compares with the sparsity of all blocks.
    weighted = sum(map(mul, targets, map(attrgetter("blocks"), tables)))
    return share_of(weighted, total(tables, "blocks"))


def sparsity_of(tables: Sequence[MaskChange | TableStats]) -> float | None:
    """Return the share of removed blocks; None without a block."""
    return share_of(total(tables, "removed_blocks"), total(tables, "blocks"))


def share_of(part: float | None, whole: float | None) -> float | None:
    """Return ``part / whole``; None where one is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        # Leaf by leaf: a nested config that differs in one key shows that key.
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def read_run(folder: str | Path, *others: str | Path) -> Run:
    """Read a run and the runs to compare it with: ``others``, or without any, the runs inside its
    folder.

    A folder that is given twice, such as ``runs/latest`` among ``runs/*``, counts once.

    Args:
        folder, others: that a :class:`~dist_sparse.RunLog` wrote.

    Raises:
        ValueError: there is no run, it has another format, or a line is not one that ``RunLog``
            writes; names the file.

    Example::

        >>> import tempfile
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import read_run
        >>> folders = [tempfile.mkdtemp(), tempfile.mkdtemp()]
        >>> for name, folder in zip(["rows", "columns"], folders):
        ...     with RunLog(folder, name=name) as log:
        ...         for step in range(3):
        ...             log.step(step, loss=1 / (1 + step))
        >>> run = read_run(*folders)
        >>> run.finished, run.last_step, run.last("loss"), list(run.compared)
        (True, 2, 0.3333333333333333, ['columns'])
    """
    # One level: runs inside those runs are their own comparison.
    others = others or tuple(file.parent for file in sorted(Path(folder).glob(f"*/{RUN}")))
    different: dict[str, Path] = {}
    for each in (folder, *others):
        # runs/latest is one of runs/*, under another name.
        different.setdefault(os.path.realpath(each), Path(each))
    first, *compared = map(_read, different.values())
    return dataclasses.replace(first, compared=_by_name(compared, taken=first.name))


def _by_name(runs: Sequence[Run], taken: str) -> dict[str, Run]:
    """Return runs by name and in order; a name that occurs again gets its folder."""
    named: dict[str, Run] = {}
    numbers: dict[str, int] = {}
    for run in runs:
        # Runs of one script have one name.
        name = f"{run.name} ({run.folder})" if run.name in (taken, *named) else run.name
        run = dataclasses.replace(run, name=name)
        # Seeds of one method share a color, so that their spread is seen.
        number = numbers.setdefault(run.method, len(numbers))
        named[name] = dataclasses.replace(run, number=number)
    return named


# What reading a line raises that no RunLog wrote.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def _read(folder: Path) -> Run:
    file, lines = folder / RUN, folder / LINES
    # Checked first, for a message that names the missing file.
    _refuse_no_run(folder, RUN, LINES)
    about = read_about(file)
    reader = _Reader()
    for number, line in read_lines(lines):
        try:
            reader.take(line)
        except _UNREADABLE as error:
            why = shortened(error, most=200)
            raise ValueError(
                f"{lines}, line {number} is not one that RunLog writes: {why}."
            ) from error
    try:
        return Run(
            folder=folder,
            name=about["name"] or folder.resolve().name,
            model_tables=about["tables"],
            artifacts=read_artifacts(folder),
            command=about["command"],
            started=about["started"],
            world=about["world"],
            versions=about["versions"],
            config=about["config"],
            **reader.read(),
        )
    except KeyError as error:
        raise ValueError(f"{file} is not one that RunLog writes: it has no {error}.") from error


def _refuse_no_run(folder: Path, *needed: str) -> None:
    # A link that leads nowhere exists: it gets the error below.
    if not os.path.lexists(folder):
        raise ValueError(f"{folder} does not exist.")
    latest = folder / LATEST
    newest = f" The newest of the runs inside is {latest}." if (latest / RUN).is_file() else ""
    for name in needed:
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} holds no run: there is no {name}, which RunLog writes.{newest}"
            )


class _Reader:
    """Collects the lines of a log one by one."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._series: dict[str, list[tuple[int, float | None]]] = {}
        # By kind, each with its step.
        self._events: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        # Kinds of events that a resumed session has not read yet.
        self._repeats: set[str] = set()
        # Seconds of each session by cause; but for the total they are logged at its end.
        self._seconds: list[dict[str, float]] = [{}]
        self._mask_seconds = 0.0
        self._finished = False
        self._at_end: dict[str, Any] = {"tables": ()}

    def take(self, line: Mapping[str, Any]) -> None:
        kinds = {
            **dict.fromkeys(_EVENTS, self._take_event),
            "values": self._take_values,
            "resumed": self._begin_session,
            "end": self._take_end,
        }
        kinds[line["kind"]](line)

    def read(self) -> dict[str, Any]:
        """Return the arguments of a Run that the log holds."""
        whole = sum(map(Counter, self._seconds), Counter[str]())
        # Of a session that crashed it is unknown: the sum would be too small.
        known = all("enforcement" in seconds for seconds in self._seconds)
        spent = Spent(
            total=whole["total"],
            masks=self._mask_seconds,
            enforcement=whole["enforcement"] if known else None,
        )
        return {
            "finished": self._finished,
            "sessions": len(self._seconds),
            "last_step": self._last,
            "values": dict(zip(self._series, map(tuple, self._series.values()), strict=True)),
            "due": tuple(self._events["masks"]),
            "validations": tuple(self._events["validation"]),
            "slots": tuple(self._events["slots"]),
            "spent": spent,
            **self._at_end,
        }

    def _begin_session(self, line: Mapping[str, Any]) -> None:
        self._seconds.append({})
        self._repeats, self._finished = {*_EVENTS}, False

    def _take_values(self, line: Mapping[str, Any]) -> None:
        self._seconds[-1]["total"] = line["seconds"]
        self._last = step = line["step"]
        for name, value in line["values"].items():
            series = self._series.setdefault(name, [])
            # Steps ascend within a session, so only those of earlier ones are dropped.
            _drop_from(step, series)
            series.append((step, value))

    def _take_event(self, line: Mapping[str, Any]) -> None:
        kind, step = line["kind"], line["step"]
        event = _EVENTS[kind](line)
        # Only the first: events of one session may share a step, and all of them count. A mask
        # update is written one update late, so its step says nothing about how far the run is.
        if kind in self._repeats:
            _drop_from(step, self._events[kind])
            self._repeats.discard(kind)
        self._events[kind].append((step, event))
        if kind == "masks":
            self._mask_seconds += event.seconds

    def _take_end(self, line: Mapping[str, Any]) -> None:
        self._seconds[-1], self._finished = line["seconds"], True
        if line["step"] >= 0:  # -1: the log has no step
            self._last = line["step"]
        if line["tables"]:  # a session without a sparsifier has none
            self._at_end = _end_of_tables(line["tables"])


def _end_of_tables(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments of a Run that are known at its end."""
    dead, traffic, lookups = {}, {}, {}
    for table in tables:
        name, counted = table["name"], table["traffic"]
        if counted:
            traffic[name] = RowTraffic(**counted)
        dead[name] = table["dead_rows"]
        lookups[name] = table["lookups"], table["removed_lookups"]
    stats = tuple(map(_table_stats, tables))
    return {"tables": stats, "dead_rows": dead, "traffic": traffic, "lookups": lookups}


def _drop_from(step: int, events: list[tuple[int, Any]]) -> None:
    """Drop what a resumed run repeats."""
    del events[bisect_left(events, step, key=itemgetter(0)) :]


def _mask_update(line: Mapping[str, Any]) -> StepRecord:
    # A long run has millions of them: one string per name.
    tables = [MaskChange(**table | {"name": sys.intern(table["name"])}) for table in line["tables"]]
    return StepRecord(
        number=line["number"],
        seconds=line["seconds"],
        collectives=line["collectives"],
        bytes=line["bytes"],
        tables=tuple(tables),
    )


def _slot_update(line: Mapping[str, Any]) -> SlotUpdate:
    tables = tuple(SlotChange(**table) for table in line["tables"])
    return SlotUpdate(seconds=line["seconds"], tables=tables)


# How events are read, by the kind of their lines. All events of a session count.
_EVENTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "masks": _mask_update,
    "slots": _slot_update,
    "validation": lambda line: GuardCheck(**line["check"]),
}


def _table_stats(table: Mapping[str, Any]) -> TableStats:
    known = {one.name: table[one.name] for one in dataclasses.fields(TableStats)}
    # JSON has lists: a TableStats that is read equals the one that was written.
    block = known["sparse_block_shape"]
    return TableStats(
        **known | {"shape": tuple(known["shape"]), "sparse_block_shape": block and tuple(block)}
    )
