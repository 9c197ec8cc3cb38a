"""Numbers and sentences about a run and the runs that are compared with it.

As JSON (:func:`numbers`), as sentences (:func:`verdict`, :func:`headline`, :func:`status`), and as
the text of ``dist-sparse report`` and ``dist-sparse inspect``.

- Before the end of a run, tables are as the last logged mask update left them; bytes are None.
- All shares of bytes have one denominator: the tables of the baseline, or of the run itself if the
  baseline's are unknown.
"""

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from dist_sparse.extras.report.run import (
    ArtifactBytes,
    Run,
    flat,
    fraction,
    sparsity_of,
    target_of,
    total,
)
from dist_sparse.extras.report.words import shortened
from dist_sparse.records import TableStats
from dist_sparse.text import (
    block_shape_text,
    count,
    number_of,
    percent,
    printable,
    shape_text,
    size,
    table_lines,
    wrapped,
)

# `verdict` accepts a loss of AUC up to this. It is not the noise, which one seed does not show.
TOLERANCE = 0.002

# Fields of a table in `numbers`.
TABLE_FIELDS = (
    *("name", "shape", "dtype", "sharding", "sparse_block_shape", "target", "sparsity", "blocks"),
    *("removed_blocks", "bytes_dense", "bytes_kept", "bytes_masks"),
    *("threshold", "churn", "dead_rows"),
)

# Attributes of a Run that `numbers` copies.
_RUN_FIELDS = (
    *("name", "started", "command", "world", "versions", "config"),
    *("finished", "sessions", "last_step", "bytes_dense", "bytes_kept"),
)


def delta_text(delta: float) -> str:
    """Return ``+0.0019``, ``-24.63``."""
    # It rounds to 0: a sign would claim a gain or a loss.
    if abs(delta) < 5e-5:
        return "±0.0000"
    return f"{delta:+.4f}" if abs(delta) < 1 else f"{delta:+.4g}"


def _config_text(changed: Mapping[str, Any]) -> str:
    texts = [f"{key}={shortened(value, most=40)}" for key, value in changed.items()]
    return printable(", ".join(texts))


# Columns of a table by their heads: the key of a value in a row, and the value as text.
Columns = Mapping[str, tuple[str, Callable[[Any], str]]]

# Columns of a comparison, whose rows come from `compare`.
_COLUMNS: Columns = {
    "run": ("name", str),
    "kept": ("share", percent),
    "AUC": ("auc", "{:.4f}".format),
    "delta": ("delta", delta_text),
    "reads zeros": ("reads_zeros", percent),
    "kept bytes": ("bytes", size),
    "sparsity": ("sparsity", percent),
    "ms a step": ("ms_per_step", "{:.1f}".format),
    "changed": ("changed", _config_text),
}

_TABLE_COLUMNS: Columns = {
    "table": ("name", str),
    "shape": ("shape", shape_text),
    "block": ("sparse_block_shape", block_shape_text),
    "target": ("target", percent),
    "sparsity": ("sparsity", percent),
    "dead rows": ("dead_rows", count),
    "bytes": ("bytes_dense", size),
    "kept": ("bytes_kept", size),
}


# A missing value is a dash, except for the delta of the baseline, which has none by definition.
_MISSING = {"delta": ""}


# Columns of a comparison that are left out if no run has a value.
_OPTIONAL = ("reads zeros", "sparsity", "ms a step")


def columns_of(run: Run) -> Columns:
    """Return the columns of a comparison."""
    columns = dict(_COLUMNS)
    rows = compare(run)
    for head in _OPTIONAL:
        if all(row[columns[head][0]] is None for row in rows):
            del columns[head]
    return columns


def cells_of(row: Mapping[str, Any], columns: Columns) -> list[str]:
    """Return the cells of a row as text."""
    return [
        _MISSING.get(key, "-") if row[key] is None else text_of(row[key])
        for key, text_of in columns.values()
    ]


def baseline(run: Run) -> Run:
    """Return the run that the others are compared with: the one with the largest tables among the
    runs without mask updates, or ``run`` itself if there are none."""
    # Narrow and hashed models have no mask updates either: the dense one has the largest tables.
    dense = [one for one in run.all_runs if not one.due]
    return max(dense, key=lambda one: one.bytes_dense or 0, default=run)


def base_of(one: Run, run: Run) -> Run:
    """Return the run that ``one`` of the runs is compared with: the baseline of the same seed, or
    the baseline itself if none has it."""
    base = baseline(run)
    return _by_seed(run).get((base.method, one.seed), base)


def _by_seed(run: Run) -> dict[tuple[str, str], Run]:
    """Return one run for each method and seed: the first that was measured, else the first.

    A run may have been started again after a crash, or copied: the same seed twice says nothing
    about chance.
    """
    chosen: dict[tuple[str, str], Run] = {}
    for one in run.all_runs:
        first = chosen.setdefault((one.method, one.seed), one)
        if auc_of(first, run) is None and auc_of(one, run) is not None:
            chosen[one.method, one.seed] = one
    return chosen


def whole_bytes(run: Run) -> int | None:
    """Return the dense bytes: all sizes are shares of them."""
    # A baseline that was logged without `model=` and without a sparsifier has no bytes.
    return baseline(run).bytes_dense or run.bytes_dense


def compare(run: Run) -> list[dict[str, Any]]:
    """Return a row for ``run`` and each compared run, in their order. Unknown values are None.

    ``sparsity``: share of removed blocks. ``bytes``: of the kept weights of all tables; ``share``:
    of the baseline's dense bytes. ``auc``: the last test AUC, or, if no run has one, the last AUC;
    ``delta``: minus the AUC of the baseline, of the same seed if there is one. ``reads_zeros``: the
    share of that AUC's examples that read removed rows. ``ms_per_step``: as logged,
    else of rank 0 while the log was open. ``changed``: entries of its config that differ
    from the baseline's, by dotted keys; a missing key is None.
    """
    base = baseline(run)
    whole = whole_bytes(run)
    rows = []
    series = measure(run)
    old = flat(base.config)
    for one in run.all_runs:
        new = flat(one.config)
        row = {
            "name": one.name,
            "sparsity": sparsity_of(one.states),
            "bytes": one.bytes_kept,
            "share": fraction(one.bytes_kept, whole),
            "auc": auc_of(one, run),
            # Both runs need the same series: training AUC and test AUC are of different examples.
            "delta": difference(one, base_of(one, run), series),
            "reads_zeros": zeros_of(one, run),
            "ms_per_step": one.ms_per_step,
            "changed": {key: new.get(key) for key in new | old if old.get(key) != new.get(key)},
        }
        rows.append(row)
    return rows


# For seeds of one method, the means of these are shown.
_MEANS = ("share", "auc", "delta", "reads_zeros", "bytes", "sparsity", "ms_per_step")


def method_rows(run: Run) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the rows of :func:`compare` and their cells, but one row for all seeds of a method:
    their means, and half the range of their AUC. A delta below the range of a method is noise."""
    rows = dict(zip(map(attrgetter("name"), run.all_runs), compare(run), strict=True))
    noise, _ = seed_spread(run)
    shown = []
    columns = columns_of(run)
    for group in _methods(run).values():
        seeds = [rows[one.name] for one in group]
        # Named after the first seed, whose config differs least from the baseline's.
        row = seeds[0] | {key: _mean([*map(itemgetter(key), seeds)]) for key in _MEANS}
        cells = dict(zip(columns, cells_of(row, columns), strict=True))
        aucs = _known_aucs(group, run)
        if len(group) > 1:
            cells["run"] += f", {len(group)} seeds"
        if len(aucs) > 1:
            cells["AUC"] += f" ±{_range(aucs) / 2:.4f}"
        if row["delta"] is not None and abs(row["delta"]) < noise:
            cells["delta"] += ", noise"
        shown.append((row, [*cells.values()]))
    return shown


def _methods(run: Run) -> dict[str, list[Run]]:
    """Return the runs by method, in order: the seeds of a method are together. A run that repeats a
    seed is listed by its name."""
    by_method: dict[str, list[Run]] = defaultdict(list)
    by_seed = _by_seed(run)
    for one in run.all_runs:
        repeats = by_seed[one.method, one.seed] is not one
        by_method[one.name if repeats else one.method].append(one)
    return by_method


def _mean(values: list[Any]) -> float | None:
    """Return the mean of the known values; None without one."""
    known = len(values) - values.count(None)
    # Without None and 0, which add nothing.
    return sum(filter(None, values)) / known if known else None


def _range(values: Sequence[float]) -> float:
    return max(values, default=0.0) - min(values, default=0.0)


def measure(run: Run) -> str:
    """Return the series by which a run and its compared runs are measured: ``test_auc`` if one of
    them has it, else ``auc``."""
    # The same of all runs: the AUC of training and of a test are of different examples.
    has_test = any("test_auc" in one.values for one in run.all_runs)
    return "test_auc" if has_test else "auc"


def auc_of(one: Run, run: Run) -> float | None:
    """Return the last AUC of ``one`` of the runs, by their common measure; None if unknown."""
    return one.last(measure(run))


def zeros_of(one: Run, run: Run) -> float | None:
    """Return the share of the examples of :func:`auc_of` that read removed rows; None if it was not
    logged."""
    return one.last(measure(run).replace("auc", "reads_zeros"))


def _mean_zeros(group: Sequence[Run], run: Run) -> float | None:
    return _mean([zeros_of(one, run) for one in group])


def _zeros_text(group: Sequence[Run], run: Run) -> str:
    """Return the mean :func:`zeros_of` some runs as the end of a sentence; "" if it is unknown."""
    mean = _mean_zeros(group, run)
    return "" if mean is None else f", {percent(mean)} of its examples read zeros"


def difference(run: Run, base: Run, series: str) -> float | None:
    """Return the last value of a series minus the baseline's; None for the baseline itself, or if
    one of the two is unknown."""
    value: Any = run.last(series)
    other: Any = base.last(series)
    return None if base is run or None in (value, other) else value - other


def artifacts_of(one: Run, run: Run) -> Sequence[ArtifactBytes]:
    """Return the artifacts of ``one`` of the runs, or its kept weights as one artifact if it has
    none."""
    kept: Any = one.bytes_kept
    auc: Any = auc_of(one, run)
    if one.artifacts or None in (kept, auc):
        return one.artifacts
    return [ArtifactBytes(name="weights", bytes=kept, auc=auc)]


def headline(run: Run) -> str:
    """Return a sentence: the bytes that the run kept, its AUC, and the time that sparsity took; ""
    before the end of the run, where its bytes are unknown."""
    row = compare(run)[0]
    if row["share"] is None:
        return ""
    whole: Any = whole_bytes(run)
    kept = f"{size(row['bytes'])} of {size(whole)}"
    text = f"{run.name} keeps {percent(row['share'])} of table bytes ({kept})"
    if row["auc"] is not None:
        # The baseline has no delta.
        value = f"{row['auc']:.4f}" if row["delta"] is None else delta_text(row["delta"])
        text += f" at {value} {measure(run).replace('_', ' ').replace('auc', 'AUC')}"
        text += _zeros_text([run], run)
    if run.sparsity_share is not None:
        text += f"; sparsity took {percent(run.sparsity_share)} of a step's time"
    return f"{text}."


def verdict(run: Run) -> str:
    """Return sentences: which artifact to serve, how far seeds alone move the AUC, and which runs
    do not count.

    The choice is the smallest artifact of all runs at the baseline's AUC that needs no second
    training; a smaller one that needs it comes second. There is none if the baseline has no AUC,
    and "" without a compared run.
    """
    base = baseline(run)
    wanted = base_aucs(run)
    if not run.compared:
        return ""
    if not wanted:
        return _left_out(run)
    goal = f"within {TOLERANCE} of {base.name}'s AUC ({_mean_text(wanted)})"
    if len(wanted) > 1:
        goal = f"within {TOLERANCE} of the baseline with the same seeds (AUC {_mean_text(wanted)})"
    advice = f"Nothing is {goal}."
    if good := _good_artifacts(run):
        smallest, served = min(good), _preferred(good)
        advice = f"Serve {served.text}, the smallest {goal}."
        if served != smallest:
            advice = (
                f"{advice[:-1]} without a second training. Smaller, with a second training:"
                f" {smallest.text}."
            )
    noise = _noise_text(run)
    return " ".join(filter(None, [advice, noise, _left_out(run)]))


def _left_out(run: Run) -> str:
    """Return sentences about runs that repeat the seed of another, and about runs without the AUC
    that measures the others; "" if there are none."""
    by_seed = _by_seed(run)
    sentences = []
    for one in run.all_runs:
        first = by_seed[one.method, one.seed]
        if first is not one:
            sentences.append(
                f"{one.name} has the config and the seed of {first.name}: counts once."
            )
    untested = [one.name for one in run.all_runs if auc_of(one, run) is None and one.last("auc")]
    if untested:
        sentences.append(f"Without test_auc, and left out: {', '.join(untested)}.")
    return " ".join(sentences)


def _known_aucs(group: Sequence[Run], run: Run) -> list[float]:
    return [auc for one in group if (auc := auc_of(one, run)) is not None]


def _mean_text(aucs: Sequence[float]) -> str:
    """Return the AUC of one run, or the mean and range over several seeds."""
    mean = f"{sum(aucs) / len(aucs):.4f}"
    if len(aucs) == 1:
        return mean
    return f"{mean}, mean of {len(aucs)} seeds from {min(aucs):.4f} to {max(aucs):.4f}"


class Good(NamedTuple):
    """An artifact at the AUC of the baseline. Of several seeds, the means of the AUC and of its
    difference to the baseline's, the share of examples that read zeros, and the first one's run.

    Args:
        at_once: whether it needs no second training.
        path: where its files are; None if unknown.
    """

    bytes: int
    text: str
    at_once: bool
    auc: float
    delta: float
    zeros: float | None
    run: Run
    name: str
    path: Path | None


def _good_artifacts(run: Run) -> list[Good]:
    """Return the artifacts at the AUC of the baseline: of its runs of the same seeds, or the mean
    of all of them where these have none. None without a compared run, or an AUC of the baseline."""
    wanted = base_aucs(run)
    if not wanted:
        return []
    mean = sum(wanted) / len(wanted)
    good = []
    for group in _methods(run).values():
        by_name: dict[str, list[tuple[Run, ArtifactBytes]]] = defaultdict(list)
        for one in group:
            for artifact in artifacts_of(one, run):
                by_name[artifact.name].append((one, artifact))
        for seeds in by_name.values():
            goals = [_goal(one, run, mean) for one, _ in seeds]
            if sum(artifact.auc for _, artifact in seeds) >= sum(goals):
                good.append(_good(seeds, goals, run))
    return good


def _good(seeds: Sequence[tuple[Run, ArtifactBytes]], goals: Sequence[float], run: Run) -> Good:
    """Return the artifacts of one name from the seeds of a method as one."""
    runs, artifacts = zip(*seeds, strict=True)
    one, artifact = seeds[0]
    aucs = [*map(attrgetter("auc"), artifacts)]
    auc, goal = sum(aucs) / len(aucs), sum(goals) / len(goals)
    # Seeds of untouched rows differ in their bytes.
    taken = max(map(attrgetter("bytes"), artifacts))
    facts = f"{size(taken)}, {percent(fraction(taken, whole_bytes(run)))} of dense"
    facts += f", AUC {_mean_text(aucs)}{_zeros_text(runs, run)}"
    # A run of one step has trained nothing: its weights are the baseline's, with rows removed.
    of_baseline = one.method == baseline(run).method
    return Good(
        bytes=taken,
        text=f"{one.name}, {artifact.name} ({facts})",
        at_once=bool(one.artifacts) and (of_baseline or not one.trained),
        auc=auc,
        delta=auc - goal - TOLERANCE,
        zeros=_mean_zeros(runs, run),
        run=one,
        name=artifact.name,
        path=_lasting(one.folder) / artifact.path if artifact.path else None,
    )


def _lasting(folder: Path) -> Path:
    """Return the folder without links such as runs/latest, which the next run moves."""
    real = folder.resolve()
    return real if folder.is_absolute() else Path(os.path.relpath(real))


def _preferred(good: Collection[Good]) -> Good:
    """Return the smallest artifact that needs no second training; the smallest if all do."""
    # Tuples are ordered by their bytes first.
    return min(filter(attrgetter("at_once"), good), default=min(good))


def recommended(run: Run) -> Good | None:
    """Return the artifact that :func:`verdict` says to serve; None if there is none."""
    good = _good_artifacts(run)
    return _preferred(good) if good else None


def described(run: Run) -> list[Run]:
    """Return the runs that a report shows in detail: the recommended one and the first."""
    best = recommended(run)
    return [run] if best is None or best.run is run else [best.run, run]


def _goal(one: Run, run: Run, mean: float) -> float:
    """Return the least AUC of an artifact of ``one`` that is as good as the baseline of its seed;
    as good as ``mean`` if that seed has no baseline."""
    base = base_of(one, run)
    auc = auc_of(base, run) if base.seed == one.seed else None
    return (mean if auc is None else auc) - TOLERANCE


def _noise_text(run: Run) -> str:
    """Return a sentence about the spread of AUC over runs that differ in their seed alone."""
    spread, seeds = seed_spread(run)
    if seeds < 2:
        return "One seed each: the difference may be chance."
    return (
        f"Seeds alone move AUC by up to {spread:.4f} ({seeds} runs): smaller deltas are within"
        " noise."
    )


def seed_spread(run: Run) -> tuple[float, int]:
    """Return the range of AUC over the seeds of the method whose seeds differ most, and their
    number: a smaller difference may be chance for any method."""
    groups = _methods(run).values()
    widest = max((_known_aucs(group, run) for group in groups), key=_range)
    return _range(widest), len(widest)


def base_aucs(run: Run) -> list[float]:
    """Return the AUCs of the baseline, one for each seed; none without a compared run."""
    return _known_aucs(_methods(run)[baseline(run).method], run) if run.compared else []


def numbers(run: Run) -> dict[str, Any]:
    """Return the numbers of a run as JSON-able values.

    Returns:
        ``name``, ``started``, ``command``, ``world``, ``versions``, ``config`` as in ``run.json``;
        ``folder``, ``headline``, ``verdict``, ``finished``, ``sessions``, ``last_step``;
        ``sparsity`` and ``target`` (shares of all blocks), ``blocks``, ``removed_blocks``;
        ``bytes_dense`` and ``bytes_kept`` of all tables of the model, if ``RunLog`` was given it,
        else of the registered ones; ``bytes_masks``; ``dead_rows`` of all tables, None where one is
        unknown; ``last``, the last value of each series; ``seconds``: ``total``, ``masks``,
        ``enforcement``, and ``share``, the fraction of a step's time in the latter two;
        ``due_steps`` (mask updates), ``collectives`` and ``bytes_sent`` of rank 0; ``tables``, the
        registered ones, and ``other_tables``, bytes of others by name; ``artifacts``; ``baseline``,
        the name of the run that others are compared with, and ``runs``, a row of each
        (:func:`~dist_sparse.extras.report.summary.compare`); ``compared``, the ``last`` of each
        compared run.

    Example::

        >>> import tempfile
        >>> from dist_sparse.extras.report import RunLog
        >>> from dist_sparse.extras.report import numbers, read_run
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder) as log:
        ...     log.step(0, loss=0.5, auc=0.75)
        >>> numbers(read_run(folder))["last"]
        {'loss': 0.5, 'auc': 0.75}
    """
    # Users' programs read these keys: keys are added, never renamed or removed.
    tables = table_rows(run)
    updates = [update for _, update in run.due]
    blocks = _sum_known(tables, "blocks")
    removed = _sum_known(tables, "removed_blocks")
    return {
        **{name: getattr(run, name) for name in _RUN_FIELDS},
        "folder": str(run.folder),
        "headline": headline(run),
        "verdict": verdict(run),
        "sparsity": fraction(removed, blocks),
        "target": target_of(run.states),
        "blocks": blocks,
        "removed_blocks": removed,
        "bytes_masks": _sum_known(tables, "bytes_masks"),
        "dead_rows": _sum_known(tables, "dead_rows"),
        "last": _last_values(run),
        "seconds": {**dataclasses.asdict(run.spent), "share": run.sparsity_share},
        "due_steps": len(updates),
        "collectives": total(updates, "collectives"),
        "bytes_sent": total(updates, "bytes"),
        "tables": tables,
        "other_tables": run.other_tables,
        "artifacts": [*map(dataclasses.asdict, run.artifacts)],
        "baseline": baseline(run).name if run.compared else None,
        "runs": compare(run),
        "compared": {name: {"last": _last_values(one)} for name, one in run.compared.items()},
    }


def table_json(stats: TableStats) -> dict[str, Any]:
    """Return the fields of a table's statistics and its ``sparsity`` as JSON-able values."""
    dtype = str(stats.dtype).removeprefix("torch.")
    fields = dataclasses.asdict(stats) | {"dtype": dtype, "sparsity": stats.sparsity}
    # Tuples become lists, as in a log that was read back.
    return dict(json.loads(json.dumps(fields)))


def status(run: Run) -> str:
    """Return a sentence about how far the run went."""
    where = "before its first line" if run.last_step is None else f"at step {run.last_step:,}"
    text = f"The run ended {where}."
    if not run.finished:
        text = f"The log stops {where} without an end: the run failed or still runs."
    return text if run.sessions == 1 else f"{text} It was resumed: {run.sessions} sessions."


def summary(run: Run, report: Path) -> str:
    """Return the sentences on top of a report, the compared runs and the report's address."""
    lines = wrapped_lines([verdict(run), headline(run), status(run)])
    if run.compared:
        rows, changes = [], []
        # The changes of a config can be longer than a line: they follow below the table.
        for _, (*cells, changed) in method_rows(run):
            rows.append(cells)
            if changed:
                changes.append(f"{cells[0]}, changed: {changed}")
        head = [*columns_of(run)][:-1]
        lines += table_lines(head, rows, right=range(1, len(head)))
        lines += wrapped_lines(changes, "  ")
    return "\n".join([*lines, *wrapped_lines([f"report: {report.as_uri()}"], "  ")])


def wrapped_lines(texts: Sequence[str], indent: str = "") -> list[str]:
    """Return texts in lines that fit the terminal, each text from a line of its own, its further
    lines indented. Control characters are escaped: names come from logs."""
    lines = []
    for text in texts:
        lines += wrapped(printable(text), indent)
    return lines


def inspect_text(run: Run) -> str:
    """Return tables, totals and config of a run as text that fits the terminal."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    where = f"on {number_of(run.world, 'rank')}; {versions}"
    texts = [f"{run.folder}: started {run.started}", where, status(run)]
    lines = [*wrapped_lines(texts, "  "), "", *_table_text(run)]
    last = _last_values(run).items()
    facts = {"last": ", ".join(f"{name} {value:.4g}" for name, value in last)}
    # The sums over all tables; (0, 0) where none has been looked up.
    looked_up, removed = map(sum, zip((0, 0), *run.lookups.values(), strict=True))
    share = percent(removed / looked_up) if looked_up else ""
    facts |= {"mask updates": str(len(run.due)), "lookups of removed rows": share}
    lines += wrapped_lines([f"{name}: {text}" for name, text in facts.items() if text], "  ")
    if run.config:
        config = [f"  {key}: {json.dumps(value)}" for key, value in run.config.items()]
        lines += ["config:", *wrapped_lines(config, "    ")]
    return "\n".join(lines)


def _table_text(run: Run) -> list[str]:
    """Return a line for each sparsified table, one for all dense tables, and the sums."""
    known = numbers(run)
    rows = [cells_of(table, _TABLE_COLUMNS) for table in known["tables"]]
    # Tables without a sparsifier have known bytes only.
    if run.other_tables:
        taken = size(sum(run.other_tables.values()))
        name = f"{number_of(len(run.other_tables), 'other')}, dense"
        rows.append([name, "", "", "", "", "", taken, taken])
    sums = cells_of(
        known | {"name": "all", "shape": None, "sparse_block_shape": None}, _TABLE_COLUMNS
    )
    lines = table_lines([*_TABLE_COLUMNS], rows, right=range(3, len(sums)), totals=[sums])
    return [*lines, ""] if known["tables"] else []


def table_rows(run: Run) -> list[dict[str, Any]]:
    """Return a row per table: its last mask update, overridden by its statistics at the end."""
    # Read once: the property walks over all mask updates.
    changes = run.last_changes
    rows = []
    for table in run.states:
        change = changes.get(table.name)
        row = {name: getattr(change, name, None) for name in TABLE_FIELDS}
        if isinstance(table, TableStats):
            stats = table_json(table) | {"dead_rows": run.dead_rows[table.name]}
            row |= {name: stats[name] for name in row.keys() & stats}
            row["bytes_dense"] = table.table_bytes
            row["bytes_kept"] = table.kept_bytes
            row["bytes_masks"] = table.mask_bytes
        rows.append(row)
    return rows


def _sum_known(tables: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """Return the sum over all tables; None if the value of one is unknown."""
    counts = [table[name] for table in tables]
    return None if None in counts else sum(counts)


def _last_values(run: Run) -> dict[str, float]:
    return {name: value for name in run.values if (value := run.last(name)) is not None}
