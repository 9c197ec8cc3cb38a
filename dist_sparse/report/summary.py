"""Numbers of a run: as JSON (:func:`numbers`), as a few lines of text, and as the tables of
``dist-sparse inspect``.

For a run without an end, tables are as the last logged mask update left them, and bytes are None.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_sparse.records import TableStats
from dist_sparse.report.comparison import (
    HEAD,
    baseline,
    compare,
    delta_text,
    headline,
    known_text,
    row_cells,
    verdict,
)
from dist_sparse.report.run import Run, share_of, total
from dist_sparse.text import (
    amount,
    block_shape_text,
    count,
    duration,
    mib,
    number_of,
    percent,
    printable,
    shape_text,
    table_lines,
)

_HEAD = (
    *("table", "shape", "dtype", "sharding", "block", "blocks", "target", "sparsity"),
    *("dead rows", "MiB", "kept MiB", "mask MiB"),
)
_CHANGING = ("target", "sparsity", "blocks", "removed_blocks")
"""Fields of a table that a mask update and the end of a run both have."""

TABLE_FIELDS = (
    *("name", "shape", "dtype", "sharding", "sparse_block_shape", *_CHANGING),
    *("bytes_dense", "bytes_kept", "bytes_masks", "threshold", "churn", "dead_rows"),
)
"""Fields of a table in :func:`numbers`."""


def numbers(run: Run) -> dict[str, Any]:
    """Return the numbers of a run as JSON-able values.

    Returns:
        ``name``, ``started``, ``command``, ``world``, ``versions``, ``config`` as in ``run.json``;
        ``folder``, ``headline``, ``verdict``, ``finished``, ``sessions``, ``last_step``;
        ``sparsity`` and ``target`` (shares of all blocks), ``blocks``, ``removed_blocks``;
        ``bytes_dense`` and ``bytes_kept`` of all tables of the model, if ``RunLog`` was given it,
        else of the registered ones; ``bytes_masks``; ``dead_rows`` of all tables, None where one is
        unknown; ``last``, the last value of each series; ``seconds``: ``total``, ``masks``,
        ``enforcement``, and ``share``, the sum of these two over the first; ``due_steps`` (mask
        updates), ``collectives`` and ``bytes_sent`` of rank 0; ``tables``, the registered ones, and
        ``other_tables``, bytes of others by name; ``artifacts``; ``baseline``, the name of the run
        that others are compared with, and ``runs``, a row of each
        (:class:`~dist_sparse.report.comparison.RunRow`); ``compared``, the ``last`` of each
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
    tables, base = _tables(run), baseline(run)
    records = [due.record for due in run.due]
    blocks, removed = _sum(tables, "blocks"), _sum(tables, "removed_blocks")
    return {
        **_fields(run, "name", "started", "command", "world", "versions", "config"),
        **_fields(run, "finished", "sessions", "last_step", "bytes_dense", "bytes_kept"),
        "folder": str(run.folder),
        "headline": headline(run),
        "verdict": verdict(run),
        "sparsity": share_of(removed, blocks),
        "target": target_of([(table["target"], table["blocks"]) for table in tables]),
        "blocks": blocks or 0,
        "removed_blocks": removed or 0,
        "bytes_masks": _sum(tables, "bytes_masks") if run.tables else None,
        "dead_rows": _sum(tables, "dead_rows"),
        "last": _last(run),
        "seconds": {**dataclasses.asdict(run.spent), "share": run.sparsity_share},
        "due_steps": len(records),
        "collectives": total(records, "collectives"),
        "bytes_sent": total(records, "bytes"),
        "tables": tables,
        "other_tables": run.other_tables,
        "artifacts": [*map(dataclasses.asdict, run.artifacts)],
        "baseline": base and base.name,
        "runs": [*map(dataclasses.asdict, compare(run))],
        "compared": {name: {"last": _last(other)} for name, other in run.compared.items()},
    }


def table_json(stats: TableStats) -> dict[str, Any]:
    """Return the fields of a table's statistics and its ``sparsity`` as JSON-able values."""
    return {**dataclasses.asdict(stats), "dtype": _dtype(stats), "sparsity": stats.sparsity}


def target_of(tables: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the configured level of all blocks, from the level and the blocks of each table; None
    where a table has no level."""
    weighted, whole = 0.0, 0
    for target, blocks in tables:
        if target is None:
            return None
        # Weighted by blocks, so that it compares with the sparsity of all blocks.
        weighted += target * blocks
        whole += blocks
    return share_of(weighted, whole)


def status(run: Run) -> str:
    """Return a sentence about how far the run went."""
    where = "before its first line" if run.last_step is None else f"at step {count(run.last_step)}"
    text = f"The run ended {where}."
    if not run.finished:
        text = f"The log stops {where} without an end: the run failed or still runs. What is known"
        text += " is shown."
    return text if run.sessions == 1 else f"{text} It was resumed: {run.sessions} sessions."


def against(run: Run, key: str) -> str:
    """Return the last value of a series less that of the baseline as text; "" without a baseline
    that has it."""
    base = baseline(run)
    if base is None or base is run:
        return ""
    # A series that one of the two lacks has no difference.
    value, other = run.last(key), base.last(key)
    if value is None or other is None:
        return ""
    return f"{delta_text(value - other)} against {base.name} ({amount(other)})"


def summary(run: Run, report: Path) -> str:
    """Return the sentence on top of a report, the compared runs and where the report is as text."""
    lines = [
        headline(run),
        verdict(run),
        status(run),
        *_comparison_lines(run),
        f"report: {report.as_uri()}",
    ]
    return "\n".join(printable(line) for line in lines if line)


def _comparison_lines(run: Run) -> list[str]:
    if not run.compared:
        return []
    cells = [row_cells(row) for row in compare(run)]
    # Below the table: a config can be longer than a line.
    changed = [f"{name}, changed: {changes}" for name, *_, changes in cells if changes]
    return [*table_lines(HEAD[:-1], [row[:-1] for row in cells], right=range(1, 7)), *changed]


def bytes_of(run: Run) -> str:
    """Return which tables the bytes of a run count."""
    tables = len(run.tables) + len(run.other_tables)
    if run.model_tables:
        return f"all {number_of(tables, 'table')}"
    return number_of(tables, "registered table")


def target_text(found: Mapping[str, Any]) -> str:
    """Return the target level of :func:`numbers` as text."""
    return known_text(found["target"], lambda level: f"target {percent(level)}", "no target")


def time_text(run: Run, found: Mapping[str, Any]) -> str:
    """Return the seconds that sparsity took as text."""
    spent = run.spent
    masks = f"masks {duration(spent.masks)} in {number_of(found['due_steps'], 'mask update')}"
    enforcement = known_text(spent.enforcement, duration, "unknown")
    return f"{masks}; enforcement {enforcement}; total {duration(spent.total)}"


def inspect_text(run: Run) -> str:
    """Return tables, totals and config of a run as text."""
    known = numbers(run)
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    about = f"{run.folder}: started {run.started} on {number_of(run.world, 'rank')}; {versions}"
    lines = [about, status(run), "", *_table_text(known)]
    if known["last"]:
        values = [f"{name} {value:.4g}" for name, value in known["last"].items()]
        lines.append(f"last: {', '.join(values)}")
    lines.append(f"mask updates: {known['due_steps']}")
    lines.append(f"lookups of removed rows: {_lookups_text(run)}")
    if run.config:
        lines.append("config:")
        lines += [f"  {key}: {json.dumps(value)}" for key, value in run.config.items()]
    return "\n".join(map(printable, lines))


def _table_text(known: Mapping[str, Any]) -> list[str]:
    """Return the lines of all tables, of those without a sparsifier together, and their sum."""
    if not known["tables"]:
        return []
    rows = [[*_cells(table), *_sizes(table)] for table in known["tables"]]
    # Tables without a sparsifier have nothing to show but their bytes: one line for all.
    others = known["other_tables"]
    if others:
        taken, unknown = mib(sum(others.values())), [""] * (len(_HEAD) - 4)
        rows.append([f"{number_of(len(others), 'other')}, dense", *unknown, taken, taken, ""])
    sums = ["all", "", "", "", "", *_sizes(known)]
    return [*table_lines(_HEAD, rows, right=range(5, len(_HEAD)), total=sums), ""]


def _lookups_text(run: Run) -> str:
    """Return the share of the lookups that hit removed rows, known at the end of a run."""
    lookups = sum(counted for counted, _ in run.lookups.values())
    removed = sum(of_removed for _, of_removed in run.lookups.values())
    return percent(removed / lookups) if lookups else "not known"


def _tables(run: Run) -> list[dict[str, Any]]:
    """Return a row per table: its statistics and its last change, as far as they are known."""
    ended, last = {table.name: table for table in run.tables}, run.last_changes
    rows = []
    for name in dict.fromkeys([*ended, *last]):
        row = dict.fromkeys(TABLE_FIELDS) | {"name": name}
        if name in last:
            row |= _fields(last[name], *_CHANGING, "threshold", "churn", "dead_rows")
        # The end is newer than the last mask update, and knows more.
        if name in ended:
            row |= _ended_fields(ended[name])
        if name in run.dead_rows:
            row["dead_rows"] = run.dead_rows[name]
        rows.append(row)
    return rows


def _ended_fields(table: TableStats) -> dict[str, Any]:
    """Return the state of a table at the end of a run."""
    block = table.sparse_block_shape
    return _fields(table, "sharding", *_CHANGING) | {
        # Lists, as JSON has them.
        "shape": list(table.shape),
        "dtype": _dtype(table),
        "sparse_block_shape": list(block) if block else None,
        "bytes_dense": table.table_bytes,
        "bytes_kept": table.kept_bytes,
        "bytes_masks": table.mask_bytes,
    }


def _fields(one: object, *names: str) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names}


def _dtype(table: TableStats) -> str:
    return str(table.dtype).removeprefix("torch.")


def _sum(tables: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """Return the sum over tables; None where one is unknown, or without any."""
    # A sum without one of the tables would pass for the whole.
    counts = [table[name] for table in tables]
    return sum(counts) if counts and None not in counts else None


def _last(run: Run) -> dict[str, float]:
    return {name: value for name in run.values if (value := run.last(name)) is not None}


def _cells(table: Mapping[str, Any]) -> list[str]:
    block = block_shape_text(table["sparse_block_shape"])
    kinds = [table["dtype"] or "-", table["sharding"] or "-"]
    return [table["name"], shape_text(table["shape"]), *kinds, block]


def _sizes(known: Mapping[str, Any]) -> list[str]:
    """Return the cells of one table, or of all."""
    levels = [known_text(known[name], "{:.4f}".format) for name in ("target", "sparsity")]
    sizes = [known_text(known[f"bytes_{kind}"], mib) for kind in ("dense", "kept", "masks")]
    return [count(known["blocks"]), *levels, known_text(known["dead_rows"], count), *sizes]
