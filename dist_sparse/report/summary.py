"""Numbers of a run: as JSON (:func:`numbers`), as a few lines of text, and as the tables of ``dist-sparse inspect``.

For a run without an end, tables are as the last logged mask update left them, and bytes are None.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_sparse.records import MaskChange, TableStats
from dist_sparse.report.comparison import HEAD, baseline, compare, delta_text, headline, row_cells
from dist_sparse.report.run import DueStep, Run
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
    size,
    table_lines,
)

__all__ = [
    "against",
    "bytes_of",
    "due_totals",
    "inspect_json",
    "inspect_text",
    "numbers",
    "status",
    "summary",
    "table_json",
    "target_text",
    "time_text",
]

_HEAD = (
    *("table", "shape", "dtype", "sharding", "block", "blocks", "target", "sparsity"),
    *("dead rows", "MiB", "kept MiB", "mask MiB"),
)


def numbers(run: Run) -> dict[str, Any]:
    """Return the numbers of a run as JSON-able values.

    Returns:
        ``folder``, ``name``, ``headline``, ``finished``, ``sessions``, ``world``, ``last_step``; ``sparsity`` and
        ``target`` (shares of all blocks), ``blocks``, ``removed_blocks``; ``bytes_dense`` and ``bytes_kept`` of all
        tables of the model, if ``RunLog`` was given it, else of the registered ones; ``bytes_masks``; ``dead_rows`` of
        all tables, None where one is unknown; ``last``, the last value of each series;
        ``seconds``: ``total``, ``masks``, ``enforcement``, and ``share``, the sum of these two over the first;
        ``due_steps`` (mask updates), ``collectives`` and ``bytes_sent`` of rank 0; ``tables``, the registered ones, and
        ``other_tables``, bytes of others by name; ``artifacts``; ``baseline``, the name of the run that others are
        compared with, and ``runs``, a row of each (:class:`~dist_sparse.report.comparison.Row`); ``compared``, the
        ``last`` of each compared run.

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
    tables = _tables(run)
    blocks, removed = sum(t["blocks"] for t in tables), sum(t["removed_blocks"] for t in tables)
    spent = run.spent
    sparsity_seconds = spent.masks + (spent.enforcement or 0.0)
    base = baseline(run)
    known = spent.total > 0 and bool(run.due) and (spent.enforcement is not None)
    return {
        "folder": str(run.folder),
        "name": run.name,
        "headline": headline(run),
        "finished": run.finished,
        "sessions": run.sessions,
        "world": run.world,
        "last_step": run.last_step,
        "sparsity": removed / blocks if blocks else None,
        "target": _target(tables),
        "blocks": blocks,
        "removed_blocks": removed,
        "bytes_dense": run.bytes_dense,
        "bytes_kept": run.bytes_kept,
        "bytes_masks": sum(t.mask_bytes for t in run.tables) if run.tables else None,
        "dead_rows": _sum([t["dead_rows"] for t in tables]),
        "last": _last(run),
        "seconds": {
            "total": spent.total,
            "masks": spent.masks,
            "enforcement": spent.enforcement,
            "share": sparsity_seconds / spent.total if known else None,
        },
        "due_steps": len(run.due),
        "collectives": sum(due.record.collectives for due in run.due),
        "bytes_sent": sum(due.record.bytes for due in run.due),
        "tables": tables,
        "other_tables": run.other_tables,
        "artifacts": [dataclasses.asdict(artifact) for artifact in run.artifacts],
        "baseline": None if base is None else base.name,
        "runs": [row.to_json() for row in compare(run)],
        "compared": {name: {"last": _last(other)} for name, other in run.compared.items()},
    }


def table_json(stats: TableStats) -> dict[str, Any]:
    """Return the fields of a table's statistics and its ``sparsity`` as JSON-able values."""
    return {**dataclasses.asdict(stats), "dtype": str(stats.dtype).removeprefix("torch."), "sparsity": stats.sparsity}


def due_totals(due: DueStep) -> dict[str, float | None]:
    """Return totals over all tables of a mask update.

    Returns:
        ``sparsity``, ``target``, ``churn``, ``regrown`` (shares of blocks) and ``dead_rows``; None where unknown.
    """
    tables = due.record.tables
    blocks = sum(t.blocks for t in tables)
    flipped = [(t.flipped_blocks, t.regrown_blocks or 0, t.blocks) for t in tables if t.flipped_blocks is not None]
    compared = sum(of for _, _, of in flipped)
    dead = [t.dead_rows for t in tables if t.dead_rows is not None]
    return {
        "sparsity": sum(t.removed_blocks for t in tables) / blocks if blocks else None,
        "target": _target([{"target": t.target, "blocks": t.blocks} for t in tables]),
        "churn": sum(f for f, _, _ in flipped) / compared if compared else None,
        "regrown": sum(r for _, r, _ in flipped) / compared if compared else None,
        "dead_rows": sum(dead) if dead else None,
    }


def status(run: Run) -> str:
    """Return a sentence about how far the run went."""
    where = "before its first line" if run.last_step is None else f"at step {count(run.last_step)}"
    resumed = "" if run.sessions == 1 else f" It was resumed: {run.sessions} sessions."
    if run.finished:
        return f"The run ended {where}.{resumed}"
    if not run.due:
        return f"The log stops {where}. It has no end and no mask update: nothing was pruned so far.{resumed}"
    return f"The log stops {where} without an end: the run failed or still runs. What is known is shown.{resumed}"


def against(run: Run, key: str) -> str:
    """Return the last value of a series less that of the baseline as text; "" without a baseline that has it."""
    base, value = baseline(run), run.last(key)
    other = None if base is None or base is run else base.last(key)
    if base is None or other is None or value is None:
        return ""
    return f"{delta_text(value - other)} against {base.name} ({amount(other)})"


def summary(run: Run, report: Path | None = None) -> str:
    """Return the numbers in a few lines of text, and where the report is."""
    found = numbers(run)
    rows: list[tuple[str, str]] = []
    if found["sparsity"] is not None:
        blocks = f"{percent(found['sparsity'])} of {count(found['blocks'])} blocks"
        rows.append(("sparsity", f"{blocks}, {target_text(found)}"))
    if found["bytes_dense"] and found["bytes_kept"] is not None:
        kept, dense = found["bytes_kept"], found["bytes_dense"]
        rows.append(("kept", f"{size(kept)} of {size(dense)} of {bytes_of(run)} ({percent(kept / dense)})"))
    for name, value in found["last"].items():
        rows.append((name, amount(value) + (f"  {delta}" if (delta := against(run, name)) else "")))
    if found["due_steps"]:
        share = found["seconds"]["share"]
        of_all = "" if share is None else f"; sparsity took {percent(share)}"
        rows.append(("time", f"{time_text(run, found)}{of_all}"))
    if report is not None:
        rows.append(("report", report.resolve().as_uri()))
    rows = [(printable(name), printable(text)) for name, text in rows]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [headline(run), status(run)] if headline(run) else [status(run)]
    lines = [*map(printable, lines), *(f"{name:<{width}}  {text}" for name, text in rows)]
    if run.compared:
        cells = [row_cells(row) for row in compare(run)]
        lines += ["", *table_lines(HEAD[:-1], [row[:-1] for row in cells], right=range(1, 7))]
        changed = [f"  {printable(name)}: {changes}" for name, *_, changes in cells if changes]
        lines += ["", "changed config:", *changed] if changed else []
    return "\n".join(lines)


def bytes_of(run: Run) -> str:
    """Return which tables the bytes of a run count."""
    tables = len(run.tables) + len(run.other_tables)
    return f"all {number_of(tables, 'table')}" if run.model_tables else number_of(tables, "registered table")


def target_text(found: Mapping[str, Any]) -> str:
    """Return the target level of :func:`numbers` as text."""
    return "no target" if found["target"] is None else f"target {percent(found['target'])}"


def time_text(run: Run, found: Mapping[str, Any]) -> str:
    """Return the seconds that sparsity took as text."""
    spent = run.spent
    masks = f"masks {duration(spent.masks)} in {number_of(found['due_steps'], 'mask update')}"
    if spent.enforcement is None:
        return f"{masks}; enforcement unknown; total {duration(spent.total)}"
    return f"{masks}; enforcement {duration(spent.enforcement)}; total {duration(spent.total)}"


def inspect_json(run: Run) -> dict[str, Any]:
    """Return :func:`numbers`, and ``started``, ``command``, ``world``, ``versions``, ``config``, as JSON-able
    values."""
    about = {
        "started": run.started,
        "command": run.command,
        "world": run.world,
        "versions": dict(run.versions),
        "config": dict(run.config),
    }
    return {**about, **numbers(run)}


def inspect_text(run: Run) -> str:
    """Return tables, totals and config of a run as text."""
    known = inspect_json(run)
    ranks = number_of(run.world, "rank")
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines = [f"{run.folder}: started {run.started} on {ranks}; {versions}", status(run), ""]
    if known["tables"]:
        rows = [[*_cells(table), *_sizes(table)] for table in known["tables"]]
        if known["other_tables"]:
            size = mib(sum(known["other_tables"].values()))
            others = f"{number_of(len(known['other_tables']), 'other')}, dense"
            rows.append([others, *[""] * (len(_HEAD) - 4), size, size, ""])
        total = ["all", "", "", "", "", *_sizes(known)]
        lines += [*table_lines(_HEAD, rows, right=range(5, len(_HEAD)), total=total), ""]
    last = ", ".join(f"{name} {value:.4g}" for name, value in known["last"].items())
    lines += [f"last: {last}"] if last else []
    lines.append(f"mask updates: {known['due_steps']}")
    lines.append(f"lookups of removed rows: {_lookups_text(run)}")
    lines += ["config:", *(f"  {key}: {json.dumps(value)}" for key, value in run.config.items())] if run.config else []
    return "\n".join(printable(line) for line in lines)


def _lookups_text(run: Run) -> str:
    """Return the share of all counted lookups: at the end of the run, or at the last mask update."""
    known = [(of.kept_lookups + of.removed_lookups, of.removed_lookups) for of in run.traffic.values()]
    if not known and run.due:
        known = [(t.lookups or 0, t.removed_lookups or 0) for t in run.due[-1].record.tables]
    lookups = sum(counted for counted, _ in known)
    return "not counted" if not lookups else percent(sum(removed for _, removed in known) / lookups)


def _tables(run: Run) -> list[dict[str, Any]]:
    """Return a row per table: what is known of its statistics and its last change."""
    last: dict[str, MaskChange] = {}
    for due in run.due:
        last.update((change.name, change) for change in due.record.tables)
    ended = {table.name: table for table in run.tables}
    rows = []
    for name in dict.fromkeys([*ended, *last]):
        now, change = ended.get(name), last.get(name)
        known = now if now is not None else last[name]
        rows.append(
            {
                "name": name,
                "shape": None if now is None else list(now.shape),
                "dtype": None if now is None else str(now.dtype).removeprefix("torch."),
                "sharding": None if now is None else now.sharding,
                "sparse_block_shape": None if now is None or not now.sparse_block_shape else [*now.sparse_block_shape],
                "target": known.target,
                "sparsity": known.sparsity,
                "blocks": known.blocks,
                "removed_blocks": known.removed_blocks,
                "bytes_dense": None if now is None else now.table_bytes,
                "bytes_kept": None if now is None else now.kept_bytes,
                "bytes_masks": None if now is None else now.mask_bytes,
                "threshold": None if change is None else change.threshold,
                "churn": None if change is None else change.churn,
                "dead_rows": run.dead_rows.get(name, None if change is None else change.dead_rows),
            }
        )
    return rows


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _target(tables: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the configured level of all blocks; None where a table has none."""
    blocks = sum(t["blocks"] for t in tables)
    if not blocks or any(t["target"] is None for t in tables):
        return None
    return float(sum(t["target"] * t["blocks"] for t in tables) / blocks)


def _last(run: Run) -> dict[str, float]:
    return {name: value for name in run.values if (value := run.last(name)) is not None}


def _cells(table: Mapping[str, Any]) -> list[str]:
    cells = [table["name"], shape_text(table["shape"]), table["dtype"] or "-", table["sharding"] or "-"]
    return [*cells, block_shape_text(table["sparse_block_shape"])]


def _sizes(known: Mapping[str, Any]) -> list[str]:
    """Return the cells of one table, or of all."""
    levels = ["-" if known[name] is None else f"{known[name]:.4f}" for name in ("target", "sparsity")]
    dead = "-" if known["dead_rows"] is None else count(known["dead_rows"])
    sizes = [known[f"bytes_{kind}"] for kind in ("dense", "kept", "masks")]
    return [count(known["blocks"]), *levels, dead, *("-" if size is None else mib(size) for size in sizes)]
