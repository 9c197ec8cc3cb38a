"""Numbers of a run: as JSON (:func:`numbers`), as a few lines of text, and as the tables of
``dist-sparse inspect``.

For a run without an end, tables are as the last logged mask update left them, and bytes are None.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from dist_sparse.records import TableStats
from dist_sparse.report.comparison import (
    HEAD,
    baseline,
    compare,
    fates_text,
    headline,
    known_text,
    row_cells,
    verdict,
)
from dist_sparse.report.run import Run, share_of, target_of, total
from dist_sparse.text import (
    block_shape_text,
    count,
    mib,
    number_of,
    percent,
    printable,
    shape_text,
    table_lines,
    wrapped,
)

_HEAD = ("table", "shape", "block", "target", "sparsity", "dead rows", "MiB", "kept MiB")
_SIZES = {"dense": "table_bytes", "kept": "kept_bytes", "masks": "mask_bytes"}

TABLE_FIELDS = (
    *("name", "shape", "dtype", "sharding", "sparse_block_shape", "target", "sparsity", "blocks"),
    *("removed_blocks", "bytes_dense", "bytes_kept", "bytes_masks"),
    *("threshold", "churn", "dead_rows"),
)
"""Fields of a table in :func:`numbers`."""


_SHOWN = (
    *("name", "started", "command", "world", "versions", "config"),
    *("finished", "sessions", "last_step", "bytes_dense", "bytes_kept"),
)


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
        **{name: getattr(run, name) for name in _SHOWN},
        "folder": str(run.folder),
        "headline": headline(run),
        "verdict": verdict(run),
        "sparsity": share_of(removed, blocks),
        "target": target_of(run.tables or run.last_changes.values()),
        "blocks": blocks or 0,
        "removed_blocks": removed or 0,
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
        "baseline": base and base.name,
        "runs": [*map(dataclasses.asdict, compare(run))],
        "compared": {name: {"last": _last(other)} for name, other in run.compared.items()},
    }


def table_json(stats: TableStats) -> dict[str, Any]:
    """Return the fields of a table's statistics and its ``sparsity`` as JSON-able values."""
    dtype = str(stats.dtype).removeprefix("torch.")
    # Lists, as JSON has them.
    block = stats.sparse_block_shape and list(stats.sparse_block_shape)
    known = dataclasses.asdict(stats) | {"shape": list(stats.shape), "sparse_block_shape": block}
    return known | {"dtype": dtype, "sparsity": stats.sparsity}


def status(run: Run) -> str:
    """Return a sentence about how far the run went."""
    where = known_text(run.last_step, "at step {:,}".format, unknown="before its first line")
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
    lines += [*_comparison_lines(run), *_wrapped([f"report: {report.as_uri()}"])]
    return "\n".join(lines)


def _comparison_lines(run: Run) -> list[str]:
    if not run.compared:
        return []
    cells = [*map(row_cells, compare(run))]
    # Below the table: a config can be longer than a line.
    changed = [f"{name}, changed: {changes}" for name, *_, changes in cells if changes]
    table = table_lines(HEAD[:-1], [row[:-1] for row in cells], right=range(1, 7))
    return [*table, *_wrapped(changed)]


def _wrapped(texts: Sequence[str], indent: str = "  ") -> list[str]:
    """Return the lines of texts, without empty ones."""
    return [*chain(*(wrapped(printable(text), indent) for text in texts if text))]


def inspect_text(run: Run) -> str:
    """Return tables, totals and config of a run as text that fits the terminal."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    where = f"on {number_of(run.world, 'rank')}; {versions}"
    head = _wrapped([f"{run.folder}: started {run.started}", where, status(run)])
    values = ", ".join(f"{name} {value:.4g}" for name, value in _last(run).items())
    facts = [
        f"last: {values}" if values else "",
        f"mask updates: {len(run.due)}",
        f"lookups of removed rows: {_lookups_text(run)}",
        f"following tables: {fates_text(run)}" if run.slots else "",
        "config:" if run.config else "",
    ]
    config = [f"  {key}: {json.dumps(value)}" for key, value in run.config.items()]
    lines = [*head, "", *_table_text(run), *_wrapped(facts), *_wrapped(config, indent="    ")]
    return "\n".join(lines)


def _table_text(run: Run) -> list[str]:
    """Return the lines of all tables, of those without a sparsifier together, and their sum."""
    known = numbers(run)
    if not known["tables"]:
        return []
    rows = [_cells(table) for table in known["tables"]]
    # Tables without a sparsifier have nothing to show but their bytes: one line for all.
    if run.other_tables:
        taken = mib(sum(run.other_tables.values()))
        name = f"{number_of(len(run.other_tables), 'other')}, dense"
        rows.append([name, "", "", "", "", "", taken, taken])
    sums = _cells(known | {"name": "all", "shape": None, "sparse_block_shape": None})
    return [*table_lines(_HEAD, rows, right=range(3, len(_HEAD)), total=sums), ""]


def _cells(table: Mapping[str, Any]) -> list[str]:
    """Return the cells of one table, or of all, below :data:`_HEAD`."""
    return [
        table["name"],
        shape_text(table["shape"]),
        block_shape_text(table["sparse_block_shape"]),
        percent(table["target"]),
        percent(table["sparsity"]),
        known_text(table["dead_rows"], count),
        known_text(table["bytes_dense"], mib),
        known_text(table["bytes_kept"], mib),
    ]


def _lookups_text(run: Run) -> str:
    """Return the share of the lookups that hit removed rows, known at the end of a run."""
    lookups = sum(counted for counted, _ in run.lookups.values())
    removed = sum(of_removed for _, of_removed in run.lookups.values())
    return percent(removed / lookups) if lookups else "not known"


def _tables(run: Run) -> list[dict[str, Any]]:
    """Return a row per table: its last change, and what the end of the run knows of it."""
    changes, rows = run.last_changes, []
    # The end knows all tables, in the order of the model; before it, mask updates name them.
    for one in run.tables or changes.values():
        change = changes.get(one.name)
        row = {name: getattr(change, name, None) for name in TABLE_FIELDS}
        if isinstance(one, TableStats):
            # Newer than the last mask update.
            known = table_json(one)
            row |= {name: known[name] for name in TABLE_FIELDS if name in known}
            row |= {f"bytes_{kind}": known[name] for kind, name in _SIZES.items()}
            row["dead_rows"] = run.dead_rows[one.name]
        rows.append(row)
    return rows


def _sum(tables: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """Return the sum over tables; None where one is unknown, or without any."""
    # A sum without one of the tables would pass for the whole.
    counts = [table[name] for table in tables]
    return sum(counts) if counts and None not in counts else None


def _last(run: Run) -> dict[str, float]:
    return {name: value for name in run.values if (value := run.last(name)) is not None}
