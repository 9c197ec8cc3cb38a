"""Reads the folder of a run back as a :class:`Run`.

- The format and the types of all values are checked: an editor or another program may have changed
  them. The page escapes all text.
- A run that crashed or still runs is read up to its last complete line.
- A session is the part of a log that one ``RunLog`` wrote. A resumed session may repeat steps: what
  earlier sessions logged from its first step on is dropped, whether it is logged again or not. All
  mask updates that one session logged at a step count.
- Runs in folders inside the run's folder, such as a dense one, are compared with it.
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
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

from dist_sparse import checks
from dist_sparse.extras.report.folder import (
    LATEST,
    LINES,
    RUN,
    check_config,
    check_run_name,
    locked,
    read_about,
    read_lines,
)
from dist_sparse.extras.report.typed import Kind, kinds_of, refuse_wrong, refusing_values
from dist_sparse.extras.report.words import shortened
from dist_sparse.records import (
    GuardCheck,
    MaskChange,
    StepRecord,
    TableStats,
)

# ------------------------------------------------------------------------------
# Artifacts of a run, their bytes and quality, in ``artifacts.json``.
#
# They are added after training, from any process: the log of the run need not be open.

_FILE, _LOCK = "artifacts.json", "artifacts.lock"


@dataclass(frozen=True, kw_only=True)
class ArtifactBytes:
    """An artifact of a run: its name, the bytes of its files, the AUC that it serves, and its path,
    relative to the run's folder if it is inside."""

    name: str
    bytes: int
    auc: float
    path: str | None = None


def add_artifact(
    run: str | os.PathLike[str],
    artifact: str | os.PathLike[str],
    *,
    auc: float,
    name: str | None = None,
) -> ArtifactBytes:
    """Add an artifact to the chart of AUC over bytes in a run's report. Local: call it on one rank,
    or in any process.

    An artifact of the same name is replaced.

    Args:
        run: folder that a :class:`~dist_sparse.extras.report.RunLog` wrote.
        artifact: the served file or folder. Its size is read now, so it may be deleted later.
        auc: measured on what the artifact serves.
        name: the name in the report; by default the name of the file or folder.

    Raises:
        ValueError: there is no such run or artifact, or an argument is invalid.
        OSError: it can't be written.

    Example::

        >>> import tempfile
        >>> from pathlib import Path
        >>> from dist_sparse.extras.report import RunLog
        >>> from dist_sparse.extras.report import add_artifact
        >>> folder = Path(tempfile.mkdtemp())
        >>> with RunLog(folder) as log:
        ...     log.step(0, test_auc=0.75)
        >>> _ = (folder / "int8").write_bytes(bytes(1000))
        >>> add_artifact(folder, folder / "int8", auc=0.749)
        ArtifactBytes(name='int8', bytes=1000, auc=0.749, path='int8')
    """
    check_run_name(name)
    run, artifact = Path(run), Path(artifact)
    _refuse_no_run(run, RUN)
    files = filter(Path.is_file, (artifact, *artifact.rglob("*")))
    sizes = [file.stat().st_size for file in files]
    if not sizes:
        raise ValueError(
            f"Invalid artifact={str(artifact)!r}: there is no such file, nor a folder with files."
        )
    place, home = artifact.resolve(), run.resolve()
    new = ArtifactBytes(
        # Of the real path: "." has no name.
        name=place.name if name is None else name,
        bytes=sum(sizes),
        auc=checks.number("auc", auc, least=0, most=1),
        # A run's folder is moved with what is inside.
        path=str(place.relative_to(home) if place.is_relative_to(home) else place),
    )
    # Jobs that export one model each add to the same run.
    with locked(run / _LOCK):
        # A run is exported again after more training: the newest artifact of a name counts.
        by_name = {old.name: asdict(old) for old in read_artifacts(run)} | {new.name: asdict(new)}
        text = json.dumps([*by_name.values()], indent=2, allow_nan=False)
        checks.write_whole(run / _FILE, f"{text}\n".encode())
    return new


def read_artifacts(run: Path) -> tuple[ArtifactBytes, ...]:
    """Return the artifacts of a run, in the order in which they were added.

    Raises:
        ValueError: the file is not one that :func:`add_artifact` writes; names it.
    """
    file = run / _FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else "[]"
    artifacts = []
    with refusing_values(file, "add_artifact()"):
        for entry in json.loads(text):
            refuse_wrong(entry, _ARTIFACT)
            artifacts.append(ArtifactBytes(**entry))
    return tuple(artifacts)


_ARTIFACT = kinds_of(get_type_hints(ArtifactBytes))

# `(step, value)` with ascending steps. A value that was not finite is None.
Series = tuple[tuple[int, float | None], ...]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of rank 0, over all sessions of the run.

    Args:
        total: while a log was open.
        masks: the time of mask updates.
        enforcement: the time to keep removed weights at zero. None without an enforcer, or if a
            session crashed, because it is logged at the end.
    """

    total: float
    masks: float
    enforcement: float | None


@dataclass(frozen=True, kw_only=True)
class RowTraffic:
    """Histogram of the rows of a table by their lookups: with 0, 1, 2 to 3, 4 to 7 lookups etc.

    ``kept`` counts rows with a kept weight, ``removed`` all others. The sums of their lookups are
    beside the histogram.
    """

    kept: Sequence[int]
    removed: Sequence[int]
    kept_lookups: int
    removed_lookups: int

    @property
    def share(self) -> float | None:
        """Fraction of the lookups that kept rows had; None without lookups."""
        return fraction(self.kept_lookups, self.kept_lookups + self.removed_lookups)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that was read from its folder. Mappings are by the name of a table unless stated
    otherwise.

    Args:
        folder: the folder of the run.
        name: the name given to ``RunLog``, by default the name of the folder.
        started: time, as in ``run.json``.
        command: command line of the script; empty if unknown.
        world: number of ranks.
        versions, config: as in ``run.json``.
        finished: whether the log was closed; False for a run that crashed or still runs.
        sessions: how often the run was started or resumed.
        last_step: last logged step; None for an empty log.
        values: series by the names passed to ``RunLog.step``.
        due: mask updates, each with the step at which it was logged.
        validations: the guard's checks, each with the step at which it was logged.
        tables: statistics at the end; empty before.
        dead_rows: number of rows without a kept element, at the end.
        model_tables: bytes of all tables of the model; empty if ``RunLog`` was not given the model.
        traffic: rows by their lookups at the end, for tables that count lookups.
        lookups: at the end, the known lookups and how many of them hit removed rows.
        artifacts: added by :func:`~dist_sparse.extras.report.add_artifact`.
        spent: seconds.
        compared: other runs, by their names.
        number: the number of the run's method among the compared runs. It selects the color in all
            charts.
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
    model_tables: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, RowTraffic] = field(default_factory=dict)
    lookups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    artifacts: tuple[ArtifactBytes, ...] = ()
    compared: Mapping[str, Run] = field(default_factory=dict)
    number: int = 0

    @property
    def seeds(self) -> dict[str, Any]:
        """The entries of the config that end with ``seed``, by dotted keys."""
        return {key: value for key, value in flat(self.config).items() if key.endswith("seed")}

    @property
    def seed(self) -> str:
        """The seeds as text, which is equal for equal seeds."""
        return json.dumps(self.seeds, sort_keys=True)

    @property
    def method(self) -> str:
        """The config without its seeds, what was removed, and bytes, as text, which is equal for
        runs that differ by chance alone; the name of a run whose config has no seed."""
        if not self.seeds:
            return self.name
        config = flat(self.config) | dict.fromkeys(self.seeds)
        # A model before and after its rows were removed may share a config and its seed; the level
        # "untouched" has no target.
        pruned = [self.trained, bool(self.states), target_of(self.states), self.bytes_dense]
        return json.dumps([config, *pruned], sort_keys=True)

    @property
    def all_runs(self) -> list[Run]:
        """The run and the ones to compare it with."""
        return [self, *self.compared.values()]

    @property
    def end(self) -> int:
        """The last step of the charts: a mask update may be logged after the last values."""
        steps = [step for step, _ in self.due[-1:]]
        return max([self.last_step or 0, *steps])

    @property
    def undone(self) -> tuple[int, GuardCheck] | None:
        """Step and validation that undid a mask update. A guard undoes at most one in a run."""
        return next((entry for entry in self.validations if entry[1].undone is not None), None)

    @property
    def last_changes(self) -> dict[str, MaskChange]:
        """The last change of each table."""
        return {change.name: change for _, record in self.due for change in record.tables}

    @property
    def states(self) -> tuple[MaskChange | TableStats, ...]:
        """The registered tables at the end, in the order of the model; before the end, their last
        mask updates."""
        return self.tables or tuple(self.last_changes.values())

    @property
    def other_tables(self) -> dict[str, int]:
        """Bytes of the model's tables that are not registered with a sparsifier."""
        # `tables` is empty before the end of a run: until then its mask updates name them.
        registered = {*self.last_changes, *(table.name for table in self.tables)}
        return {name: size for name, size in self.model_tables.items() if name not in registered}

    @property
    def bytes_dense(self) -> int | None:
        """Dense bytes of all tables of the model, or of the registered ones if the model is not
        known; None if unknown."""
        # Registered tables are in both: their statistics at the end take precedence.
        sizes = dict(self.model_tables)
        sizes |= {table.name: table.table_bytes for table in self.tables}
        return sum(sizes.values()) if sizes else None

    @property
    def bytes_kept(self) -> int | None:
        """Bytes of the kept weights of these tables, without masks; None before the end of a run
        that prunes."""
        dense = self.bytes_dense
        # States are mask updates before the end, and these have no bytes.
        if dense is None or self.states != self.tables:
            return None
        return dense - sum(table.table_bytes - table.kept_bytes for table in self.tables)

    @property
    def trained(self) -> bool:
        """Whether the run has more than one step. A log of a single step describes the weights of
        another run, and its time is not the time of a step."""
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
        """Fraction of a step's time that mask updates and enforcement took; None if unknown, or
        without mask updates."""
        if not self.due or self.spent.enforcement is None:
            return None
        return fraction(self.ms_of(self.spent.masks + self.spent.enforcement), self.ms_per_step)

    def ms_of(self, seconds: float) -> float:
        """Convert seconds of the whole run to milliseconds per step."""
        return 1000 * seconds / ((self.last_step or 0) + 1)

    def last(self, name: str) -> float | None:
        """Return the last finite value of a series; None if there is none."""
        for _, value in reversed(self.values.get(name, ())):
            if value is not None:
                return value
        return None


def total(tables: Iterable[object], field: str) -> int:
    """Return the sum of a field over tables."""
    return sum(getattr(table, field) for table in tables)


def target_of(tables: Sequence[MaskChange | TableStats]) -> float | None:
    """Return the configured level over all blocks; None if a table has no level."""
    # Weighted by blocks, like the sparsity that it is compared with.
    weighted = 0.0
    for table in tables:
        if table.target is None:
            return None
        weighted += table.target * table.blocks
    return fraction(weighted, total(tables, "blocks"))


def sparsity_of(tables: Sequence[MaskChange | TableStats]) -> float | None:
    """Return the fraction of removed blocks; None without a block."""
    return fraction(total(tables, "removed_blocks"), total(tables, "blocks"))


def fraction(part: float | None, whole: float | None) -> float | None:
    """Return ``part / whole``; None if one is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def read_run(folder: str | Path, *others: str | Path) -> Run:
    """Read a run and the runs to compare it with: ``others``, or without any, the runs inside its
    folder.

    A folder that is given twice, such as ``runs/latest`` among ``runs/*``, counts once.

    Args:
        folder, others: that a :class:`~dist_sparse.extras.report.RunLog` wrote.

    Raises:
        ValueError: there is no run, its format is another one, or it has a line that ``RunLog``
            does not write; names the file.

    Example::

        >>> import tempfile
        >>> from dist_sparse.extras.report import RunLog
        >>> from dist_sparse.extras.report import read_run
        >>> folders = [tempfile.mkdtemp(), tempfile.mkdtemp()]
        >>> for name, folder in zip(["rows", "columns"], folders):
        ...     with RunLog(folder, name=name) as log:
        ...         for step in range(3):
        ...             log.step(step, loss=1 / (1 + step))
        >>> run = read_run(*folders)
        >>> run.finished, run.last_step, run.last("loss"), list(run.compared)
        (True, 2, 0.3333333333333333, ['columns'])
    """
    # One level deep: a run inside an inner run is compared with that one only.
    others = others or tuple(file.parent for file in sorted(Path(folder).glob(f"*/{RUN}")))
    # The real path identifies a run, because runs/latest is a link to one of runs/*.
    folders: dict[str, Path] = {}
    for given in (folder, *others):
        folders.setdefault(os.path.realpath(given), Path(given))
    first, *compared = map(_read, folders.values())
    return dataclasses.replace(first, compared=_by_name(compared, taken=first.name))


def _by_name(runs: Sequence[Run], taken: str) -> dict[str, Run]:
    """Return runs by unique names, in order, each with the number of its method. A name that is
    taken gets the folder as a suffix."""
    named: dict[str, Run] = {}
    numbers: dict[str, int] = {}
    for run in runs:
        # One script gives all its runs the same name.
        name = f"{run.name} ({run.folder})" if run.name in (taken, *named) else run.name
        run = dataclasses.replace(run, name=name)
        # Runs that differ in their seed share a color: together they show the spread.
        number = numbers.setdefault(run.method, len(numbers))
        named[name] = dataclasses.replace(run, number=number)
    return named


def _read(folder: Path) -> Run:
    file, lines = folder / RUN, folder / LINES
    # First, for an error that names the missing file.
    _refuse_no_run(folder, RUN, LINES)
    about = read_about(file)
    reader = _Events()
    for number, line in read_lines(lines):
        with refusing_values(f"{lines}, line {number}", "RunLog"):
            reader.add(line)
    artifacts = read_artifacts(folder)
    with refusing_values(file, "RunLog"):
        refuse_wrong(about, _ABOUT)
        return Run(
            folder=folder,
            name=about["name"] or folder.resolve().name,
            model_tables=about["tables"],
            artifacts=artifacts,
            command=about["command"],
            started=about["started"],
            world=about["world"],
            versions=about["versions"],
            # Numbers that are not finite become text, as in a config that RunLog has written.
            config=check_config(about["config"]),
            **reader.fields(),
        )


def _refuse_no_run(folder: Path, *needed: str) -> None:
    # A link that leads nowhere exists: it gets the error below.
    if not os.path.lexists(folder):
        raise ValueError(f"{folder} does not exist.")
    latest = folder / LATEST
    hint = f" The newest of the runs inside is {latest}." if (latest / RUN).is_file() else ""
    for name in needed:
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} holds no run: there is no {name}, which RunLog writes.{hint}"
            )


class _Events:
    """Collects the lines of a log one by one."""

    def __init__(self) -> None:
        self._last_step: int | None = None
        self._series: dict[str, list[tuple[int, float | None]]] = {}
        # Events by kind, each with its step.
        self._events: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        # Whether the first step of a resumed session is still to come.
        self._resumes = False
        # Seconds of each session by cause. A session that crashed has only its total.
        self._seconds: list[dict[str, float]] = [{}]
        self._mask_seconds = 0.0
        self._finished = False
        self._at_end: dict[str, Any] = {"tables": ()}
        self._adders: dict[str, Callable[[Mapping[str, Any]], None]] = {
            **dict.fromkeys(_EVENTS, self._add_event),
            "values": self._add_values,
            "resumed": self._begin_session,
            "end": self._add_end,
        }

    def add(self, line: Mapping[str, Any]) -> None:
        kind = line["kind"]
        # A value of another type need not be hashable.
        if not isinstance(kind, str) or kind not in self._adders:
            raise ValueError(f"kind is {shortened(kind)}; must be one of {', '.join(_LINES)}")
        refuse_wrong(line, _LINES[kind])
        # A session without a step drops nothing: its lines have -1, and `resumed` has none.
        if self._resumes and line.get("step", -1) >= 0:
            self._drop_repeated(line["step"])
        self._adders[kind](line)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a Run that the log holds."""
        # Sums by cause.
        seconds = sum(map(Counter, self._seconds), Counter[str]())
        # The sum over some of the sessions would be too small.
        is_known = all("enforcement" in session for session in self._seconds)
        spent = Spent(
            total=seconds["total"],
            masks=self._mask_seconds,
            enforcement=seconds["enforcement"] if is_known else None,
        )
        return {
            "finished": self._finished,
            "sessions": len(self._seconds),
            "last_step": self._last_step,
            "values": {name: tuple(series) for name, series in self._series.items() if series},
            "due": tuple(self._events["masks"]),
            "validations": tuple(self._events["validation"]),
            "spent": spent,
            **self._at_end,
        }

    def _begin_session(self, line: Mapping[str, Any]) -> None:
        self._seconds.append({})
        self._resumes = True
        self._finished = False

    def _drop_repeated(self, step: int) -> None:
        """Drop what earlier sessions logged from the first step of a resumed one on."""
        for logged in (*self._series.values(), *self._events.values()):
            _drop_from(step, logged)
        self._last_step = step
        self._resumes = False

    def _add_values(self, line: Mapping[str, Any]) -> None:
        self._seconds[-1]["total"] = line["seconds"]
        self._last_step = step = line["step"]
        for name, value in line["values"].items():
            series = self._series.setdefault(name, [])
            # Steps ascend, unless an editor has changed them.
            _drop_from(step, series)
            series.append((step, value))

    def _add_event(self, line: Mapping[str, Any]) -> None:
        kind, events = line["kind"], self._events[line["kind"]]
        event = _EVENTS[kind](line)
        # An event of a resumed session without a step is shown at the step of the last one before.
        step = max(line["step"], events[-1][0]) if events else line["step"]
        events.append((step, event))
        if kind == "masks":
            self._mask_seconds += event.seconds

    def _add_end(self, line: Mapping[str, Any]) -> None:
        self._seconds[-1] = line["seconds"]
        self._finished = True
        # -1: no step was logged.
        if line["step"] >= 0:
            self._last_step = line["step"]
        # A session without a sparsifier has no tables; the tables of an earlier session stay.
        if line["tables"]:
            self._at_end = _end_of_tables(line["tables"])


def _end_of_tables(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a Run that are logged at its end."""
    dead, traffic, lookups = {}, {}, {}
    for table in tables:
        refuse_wrong(table, _TABLE)
        name, counted = table["name"], table["traffic"]
        if counted:
            refuse_wrong(counted, _TRAFFIC)
            if len(counted["kept"]) != len(counted["removed"]):
                raise ValueError(f"kept and removed in the traffic of {name!r} differ in length")
            traffic[name] = RowTraffic(**counted)
        dead[name] = table["dead_rows"]
        lookups[name] = table["lookups"], table["removed_lookups"]
    stats = tuple(map(_table_stats, tables))
    return {"tables": stats, "dead_rows": dead, "traffic": traffic, "lookups": lookups}


def _drop_from(step: int, events: list[tuple[int, Any]]) -> None:
    """Drop the events from this step on."""
    del events[bisect_left(events, step, key=itemgetter(0)) :]


def _mask_update(line: Mapping[str, Any]) -> StepRecord:
    tables = []
    for table in line["tables"]:
        refuse_wrong(table, _MASK_CHANGE)
        # Names are interned: a long run has millions of changes, and each line its own string.
        tables.append(MaskChange(**table | {"name": sys.intern(table["name"])}))
    return StepRecord(
        number=line["number"],
        seconds=line["seconds"],
        collectives=line["collectives"],
        bytes=line["bytes"],
        tables=tuple(tables),
    )


def _guard_check(line: Mapping[str, Any]) -> GuardCheck:
    refuse_wrong(line["check"], _GUARD_CHECK)
    return GuardCheck(**line["check"])


# Readers of events by the kind of their lines.
_EVENTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "masks": _mask_update,
    "validation": _guard_check,
}


def _table_stats(table: Mapping[str, Any]) -> TableStats:
    stats = {one.name: table[one.name] for one in dataclasses.fields(TableStats)}
    # JSON has lists: with tuples, the TableStats equals the one that was written.
    block = stats["sparse_block_shape"]
    return TableStats(
        **stats | {"shape": tuple(stats["shape"]), "sparse_block_shape": block and tuple(block)}
    )


# Kinds of values: of run.json, of the lines of a log by their kind, and of what is inside them.
_ABOUT = kinds_of(
    {
        "name": str | None,
        "tables": Mapping[str, int],
        "command": str,
        "started": str,
        "world": int,
        "versions": Mapping[str, str],
        "config": Mapping[str, Any],
    }
)
_STEP = kinds_of({"step": int})
_LINES: Mapping[str, Mapping[str, Kind]] = {
    "values": _STEP | kinds_of({"seconds": float, "values": Mapping[str, float | None]}),
    "masks": _STEP | kinds_of(get_type_hints(StepRecord)),
    "validation": _STEP | kinds_of({"check": Mapping[str, Any]}),
    "resumed": kinds_of({"started": str}),
    "end": _STEP
    | kinds_of({"seconds": Mapping[str, float], "tables": Sequence[Mapping[str, Any]]}),
}
_MASK_CHANGE = kinds_of(get_type_hints(MaskChange))
_GUARD_CHECK = kinds_of(get_type_hints(GuardCheck))
_TRAFFIC = kinds_of(get_type_hints(RowTraffic))
# A log has the name of a dtype. torch may be missing here.
_TABLE = kinds_of(get_type_hints(TableStats, localns={"torch": SimpleNamespace(dtype=str)}))
_TABLE |= kinds_of({"dead_rows": int | None, "lookups": int, "removed_lookups": int})
_TABLE |= kinds_of({"traffic": Mapping[str, Any] | None})
