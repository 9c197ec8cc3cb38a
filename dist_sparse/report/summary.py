"""Numbers of a run: as JSON (:func:`numbers`), as a few lines of text, and as the tables of
``dist-sparse inspect``. Runs beside each other: which one is the baseline, what each kept, lost and
took, and how their configs differ.

For a run without an end, tables are as the last logged mask update left them, and bytes are None.
Bytes have one denominator everywhere: all tables of the baseline, or of the run itself where the
baseline's are unknown.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from dist_sparse.records import FATES, SlotUpdate, TableStats
from dist_sparse.report.run import ArtifactBytes, Run, flat, share_of, sparsity_of, target_of, total
from dist_sparse.text import (
    block_shape_text,
    count,
    mib,
    number_of,
    percent,
    printable,
    shape_text,
    shortened,
    size,
    table_lines,
    wrapped,
)

# Loss of AUC up to which `verdict` takes a smaller run for as good.
TOLERANCE = 0.002

# Fields of a table in `numbers`.
TABLE_FIELDS = (
    *("name", "shape", "dtype", "sharding", "sparse_block_shape", "target", "sparsity", "blocks"),
    *("removed_blocks", "bytes_dense", "bytes_kept", "bytes_masks"),
    *("threshold", "churn", "dead_rows"),
)

_SHOWN = (
    *("name", "started", "command", "world", "versions", "config"),
    *("finished", "sessions", "last_step", "bytes_dense", "bytes_kept"),
)


def delta_text(delta: float) -> str:
    """Return ``+0.0019``, ``-24.63``."""
    if abs(delta) < 5e-5:  # rounds to 0, and +0.0000 would look like a gain
        return "±0.0000"
    return f"{delta:+.4f}" if abs(delta) < 1 else f"{delta:+.4g}"


def _changes(changed: Mapping[str, Any]) -> str:
    texts = [f"{key}={shortened(value, most=40)}" for key, value in changed.items()]
    return printable(", ".join(texts))


# Columns of a comparison: name and text of a row's entries.
COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "run": ("name", str),
    "of dense": ("share", percent),
    "AUC": ("auc", "{:.4f}".format),
    "delta": ("delta", delta_text),
    "table bytes": ("bytes", size),
    "sparsity": ("sparsity", percent),
    "ms a step": ("ms_per_step", "{:.1f}".format),
    "changed": ("changed", _changes),
}

_TABLE_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "table": ("name", str),
    "shape": ("shape", shape_text),
    "block": ("sparse_block_shape", block_shape_text),
    "target": ("target", percent),
    "sparsity": ("sparsity", percent),
    "dead rows": ("dead_rows", count),
    "MiB": ("bytes_dense", mib),
    "kept MiB": ("bytes_kept", mib),
}


# The baseline differs from nothing: a dash would read as unknown.
_UNKNOWN = {"delta": ""}


def cells_of(row: Mapping[str, Any], columns: Mapping[str, Any] = COLUMNS) -> list[str]:
    """Return the cells of a row as text, a dash where something is unknown."""
    cells = []
    for name, text in columns.values():
        cells.append(_UNKNOWN.get(name, "-") if row[name] is None else text(row[name]))
    return cells


def baseline(run: Run) -> Run:
    """Return the run that the others are compared with: of those without mask updates the one with
    the largest tables, else ``run`` itself."""
    # A narrow or hashed model has no mask updates either, but smaller tables.
    dense = [one for one in run.all_runs if not one.due]
    return max(dense, key=lambda one: one.bytes_dense or 0, default=run)


def whole_bytes(run: Run) -> int | None:
    """Return the dense size that all runs are compared with."""
    # A baseline that was logged without `model=` and without masks has none.
    return baseline(run).bytes_dense or run.bytes_dense


def compare(run: Run) -> list[dict[str, Any]]:
    """Return a row for ``run`` and each compared run, in their order; None where something is
    unknown.

    ``sparsity``: share of removed blocks. ``bytes``: of the kept weights of all tables, ``share``:
    of the baseline's dense ones. ``auc``: the last test AUC, else the last AUC; ``delta``: less the
    baseline's. ``ms_per_step``: as logged, else of rank 0 while the log was open. ``changed``: what
    its config has otherwise than the baseline's, by dotted keys; None where a key is missing.
    """
    base = baseline(run)
    whole = whole_bytes(run)
    rows = []
    old = flat(base.config)
    for one in run.all_runs:
        (key, auc), new = quality(one), flat(one.config)
        row = {
            "name": one.name,
            "sparsity": sparsity_of(one.states),
            "bytes": one.bytes_kept,
            "share": share_of(one.bytes_kept, whole),
            "auc": auc,
            # AUC during training is of other examples than AUC of the test set.
            "delta": difference(one, base, key),
            "ms_per_step": one.ms_per_step,
            "changed": {key: new.get(key) for key in new | old if old.get(key) != new.get(key)},
        }
        rows.append(row)
    return rows


def quality(run: Run) -> tuple[str, float | None]:
    """Return ``test_auc`` and its last value for a run that has it, else ``auc``; None where it is
    unknown."""
    # Of examples that training has not seen, where there are any.
    key = "test_auc" if "test_auc" in run.values else "auc"
    return key, run.last(key)


def difference(run: Run, base: Run, key: str) -> float | None:
    """Return the last value of a series less that of the baseline; None for the baseline itself, or
    where one of the two is unknown."""
    value: Any = run.last(key)
    other: Any = base.last(key)
    return None if base is run or None in (value, other) else value - other


def artifacts_of(run: Run) -> Sequence[ArtifactBytes]:
    """Return the artifacts of a run. The kept weights stand for those of a run that has none."""
    kept: Any = run.bytes_kept
    auc: Any = quality(run)[1]
    if run.artifacts or None in (kept, auc):
        return run.artifacts
    return [ArtifactBytes(name="weights", bytes=kept, auc=auc)]


def headline(run: Run) -> str:
    """Return a sentence about what the run kept, what that cost, and how long it took; "" where
    nothing is known."""
    row = compare(run)[0]
    # Bytes are logged at the end.
    if row["share"] is None:
        return ""
    whole: Any = whole_bytes(run)
    kept = f"{size(row['bytes'])} of {size(whole)}"
    text = f"{run.name} keeps {percent(row['share'])} of table bytes ({kept})"
    if row["auc"] is not None:
        # The delta where there is a baseline, else the value itself.
        value = cells_of(row)[3] or cells_of(row)[2]
        text += f" at {value} {quality(run)[0].replace('_', ' ').replace('auc', 'AUC')}"
    if run.sparsity_share is not None:
        text += f"; sparsity took {percent(run.sparsity_share)} of a step's time"
    return f"{text}."


def verdict(run: Run) -> str:
    """Return sentences about what to serve: the smallest at the baseline's AUC, over all runs and
    artifacts, first what needs no second training. And about how far seeds alone move an AUC. ""
    without a baseline that has an AUC."""
    base = baseline(run)
    wanted = quality(base)[1]
    if not run.compared or wanted is None:
        return ""
    goal = f"within {TOLERANCE} of {base.name}'s AUC ({wanted:.4f})"
    close, at_once = _served_at(run, base, wanted - TOLERANCE)
    # The smallest of each.
    if not close:
        said = f"Nothing is {goal}."
    elif not at_once or at_once[0] == close[0]:
        said = f"Serve {close[0]}, the smallest {goal}."
    else:
        said = f"Serve {at_once[0]}, the smallest {goal} without a second training."
        said += f" Smaller, with a second training: {close[0]}."
    return f"{said} {_noise(run)}"


def _served_at(run: Run, base: Run, least: float) -> tuple[list[str], list[str]]:
    """Return all artifacts with at least that AUC, the smallest first, and the ones among them that
    need no second training."""
    found = []
    for one in run.all_runs:
        # Made of the baseline's own weights: its artifacts, and of runs that trained nothing.
        at_once = bool(one.artifacts) and (one is base or not one.trained)
        for each in artifacts_of(one):
            found.append((each.bytes, each.auc, f"{one.name}, {each.name}", at_once))
    texts, made = list[str](), list[str]()
    for taken, auc, name, at_once in sorted(found):
        if auc >= least:
            share = percent(share_of(taken, whole_bytes(run)))
            texts.append(f"{name} ({size(taken)}, {share} of dense, AUC {auc:.4f})")
            if at_once:
                made.append(texts[-1])
    return texts, made


def _noise(run: Run) -> str:
    """Return a sentence about the AUCs of runs that differ in their seed alone."""
    # Of two runs with one seed, such as a model before and after, the last counts.
    seeds: dict[str, dict[str, float]] = defaultdict(dict)
    for one in run.all_runs:
        auc = quality(one)[1]
        if auc is not None:
            seeds[one.method][str(one.config)] = auc
    spreads = []
    for by_seed in seeds.values():
        aucs = sorted(by_seed.values())
        spreads.append((aucs[-1] - aucs[0], len(aucs)))
    # The method that moves most: a smaller difference may be chance for any of them.
    widest, runs = max(spreads)
    if runs < 2:
        return "One seed each: the difference may be chance."
    return f"Seeds alone move AUC by up to {widest:.4f} ({runs} runs): smaller deltas are noise."


def fates_text(run: Run) -> str:
    """Return a sentence about the lookups of following tables before their last update; empty
    without one."""
    if not run.slots:
        return ""
    _, update = run.slots[-1]
    lookups = total(update.tables, "lookups")
    came, went = total(update.tables, "came"), total(update.tables, "went")
    shares = [f"{percent(fate_share(update, fate))} {text}" for fate, text in FATES.items()]
    return (
        f"Of {number_of(lookups, 'lookup')} before the last update {', '.join(shares)};"
        f" {number_of(came, 'row')} came, {count(went)} went."
    )


def fate_share(update: SlotUpdate, fate: str) -> float | None:
    """Return the share of the lookups before an update that had a fate."""
    return share_of(total(update.tables, fate), total(update.tables, "lookups"))


def numbers(run: Run) -> dict[str, Any]:
    """Return the numbers of a run as JSON-able values.

    Returns:
        ``name``, ``started``, ``command``, ``world``, ``versions``, ``config`` as in ``run.json``;
        ``folder``, ``headline``, ``verdict``, ``finished``, ``sessions``, ``last_step``;
        ``sparsity`` and ``target`` (shares of all blocks), ``blocks``, ``removed_blocks``;
        ``bytes_dense`` and ``bytes_kept`` of all tables of the model, if ``RunLog`` was given it,
        else of the registered ones; ``bytes_masks``; ``dead_rows`` of all tables, None where one is
        unknown; ``last``, the last value of each series; ``seconds``: ``total``, ``masks``,
        ``enforcement``, and ``share``, of a step's time in the latter two; ``due_steps`` (mask
        updates), ``collectives`` and ``bytes_sent`` of rank 0; ``tables``, the registered ones, and
        ``other_tables``, bytes of others by name; ``artifacts``; ``baseline``, the name of the run
        that others are compared with, and ``runs``, a row of each
        (:func:`~dist_sparse.report.summary.compare`); ``compared``, the ``last`` of each
        compared run.

    Example::

        >>> import tempfile
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import numbers, read_run
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder) as log:
        ...     log.step(0, loss=0.5, auc=0.75)
        >>> numbers(read_run(folder))["last"]
        {'loss': 0.5, 'auc': 0.75}
    """
    # Public: keys are only added.
    tables = _tables(run)
    records = [*map(itemgetter(1), run.due)]
    blocks, removed = _sum(tables, "blocks"), _sum(tables, "removed_blocks")
    return {
        **dict(zip(_SHOWN, attrgetter(*_SHOWN)(run), strict=True)),
        "folder": str(run.folder),
        "headline": headline(run),
        "verdict": verdict(run),
        "sparsity": share_of(removed, blocks),
        "target": target_of(run.states),
        "blocks": blocks,
        "removed_blocks": removed,
        "bytes_masks": _sum(tables, "bytes_masks"),
        "dead_rows": _sum(tables, "dead_rows"),
        "last": _last(run),
        "seconds": {**dataclasses.asdict(run.spent), "share": run.sparsity_share},
        "due_steps": len(records),
        "collectives": total(records, "collectives"),
        "bytes_sent": total(records, "bytes"),
        "tables": tables,
        "other_tables": run.other_tables,
        "artifacts": [*map(dataclasses.asdict, run.artifacts)],
        "baseline": baseline(run).name if run.compared else None,
        "runs": compare(run),
        "compared": {name: {"last": _last(other)} for name, other in run.compared.items()},
    }


def table_json(stats: TableStats) -> dict[str, Any]:
    """Return the fields of a table's statistics and its ``sparsity`` as JSON-able values."""
    dtype = str(stats.dtype).removeprefix("torch.")
    known = dataclasses.asdict(stats) | {"dtype": dtype, "sparsity": stats.sparsity}
    # There and back: tuples become lists.
    return dict(json.loads(json.dumps(known)))


def status(run: Run) -> str:
    """Return a sentence about how far the run went."""
    where = "before its first line" if run.last_step is None else f"at step {run.last_step:,}"
    text = f"The run ended {where}."
    if not run.finished:
        text = (
            f"The log stops {where} without an end: the run failed or still runs. What is known is"
            " shown."
        )
    return text if run.sessions == 1 else f"{text} It was resumed: {run.sessions} sessions."


def summary(run: Run, report: Path) -> str:
    """Return the sentences on top of a report, the compared runs and the report's address."""
    lines = _wrapped([verdict(run), headline(run), status(run)])
    if run.compared:
        rows, changes = [], []
        for *shown, changed in map(cells_of, compare(run)):
            rows.append(shown)
            if changed:
                changes.append(f"{shown[0]}, changed: {changed}")
        head = [*COLUMNS][:-1]
        lines += table_lines(head, rows, right=range(1, len(head)))
        # Below the table: a config can be longer than a line.
        lines += _wrapped(changes)
    return "\n".join([*lines, *_wrapped([f"report: {report.as_uri()}"])])


def _wrapped(texts: Sequence[str], indent: str = "  ") -> list[str]:
    return [*chain.from_iterable(wrapped(printable(text), indent) for text in texts)]


def inspect_text(run: Run) -> str:
    """Return tables, totals and config of a run as text that fits the terminal."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    where = f"on {number_of(run.world, 'rank')}; {versions}"
    lines = [*_wrapped([f"{run.folder}: started {run.started}", where, status(run)]), ""]
    lines += _table_text(run)
    values = ", ".join(f"{name} {value:.4g}" for name, value in _last(run).items())
    facts = {"last": values}
    # A run that only follows its traffic has no masks.
    if run.states or not run.slots:
        looked_up = removed = 0
        for of_table, of_removed in run.lookups.values():
            looked_up += of_table
            removed += of_removed
        share = percent(removed / looked_up) if looked_up else "not known"
        facts |= {"mask updates": str(len(run.due)), "lookups of removed rows": share}
    facts["following tables"] = fates_text(run)
    lines += _wrapped([f"{name}: {text}" for name, text in facts.items() if text])
    if run.config:
        config = [f"  {key}: {json.dumps(value)}" for key, value in run.config.items()]
        lines += ["config:", *_wrapped(config, indent="    ")]
    return "\n".join(lines)


def _table_text(run: Run) -> list[str]:
    """Return the lines of all tables, of those without a sparsifier together, and their sum."""
    known = numbers(run)
    rows = [cells_of(table, _TABLE_COLUMNS) for table in known["tables"]]
    # Tables without a sparsifier have nothing to show but their bytes: one line for all.
    if run.other_tables:
        taken = mib(sum(run.other_tables.values()))
        name = f"{number_of(len(run.other_tables), 'other')}, dense"
        rows.append([name, "", "", "", "", "", taken, taken])
    everything = known | {"name": "all", "shape": None, "sparse_block_shape": None}
    sums = cells_of(everything, _TABLE_COLUMNS)
    lines = table_lines([*_TABLE_COLUMNS], rows, right=range(3, len(sums)), totals=[sums])
    return [*lines, ""] if known["tables"] else []


def _tables(run: Run) -> list[dict[str, Any]]:
    """Return a row per table: its last change, and what the end of the run knows of it."""
    changes, rows = run.last_changes, []
    for one in run.states:
        row = {name: getattr(changes.get(one.name), name, None) for name in TABLE_FIELDS}
        if isinstance(one, TableStats):
            known = table_json(one)
            known["bytes_dense"], known["bytes_kept"] = one.table_bytes, one.kept_bytes
            known["bytes_masks"], known["dead_rows"] = one.mask_bytes, run.dead_rows[one.name]
            # Newer than the last mask update.
            row |= {name: known[name] for name in row.keys() & known}
        rows.append(row)
    return rows


def _sum(tables: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """Return the sum over tables; None where one is unknown."""
    # A sum without one of the tables would pass for the whole.
    counts = [table[name] for table in tables]
    return None if None in counts else sum(counts)


def _last(run: Run) -> dict[str, float]:
    return {name: value for name in run.values if (value := run.last(name)) is not None}
