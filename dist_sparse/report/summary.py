"""What are the numbers of a run?

:func:`numbers` is all that the report says first, as JSON; :func:`summary` the same for people. Where the run has not
ended, its tables stand as the last noted due step left them, and bytes are None.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_sparse.report.run import DueStep, Run
from dist_sparse.report.words import amount, count, duration, number_of, percent, size
from dist_sparse.sparsifiers.recorder import MaskChange
from dist_sparse.text import printable

__all__ = ["numbers", "standing", "status", "summary"]


def numbers(run: Run) -> dict[str, Any]:
    """The numbers of a run, JSON-able: ``folder``, ``finished``, ``sessions``, ``world``, ``last_step``; ``sparsity``,
    ``target`` (shares of all blocks), ``blocks``, ``removed_blocks``; ``bytes_dense``, ``bytes_kept``, ``bytes_masks``
    of the registered tables; ``dead_rows`` of all, None where one is not known; ``last``, the last value of each
    series; ``seconds`` (``total``, ``masks``, ``enforcement``, ``share``: these two over the first); ``due_steps``,
    ``collectives``, ``bytes_sent`` of rank 0; ``tables``; ``compared``, the ``last`` of each.
    """
    tables = standing(run)
    blocks, removed = sum(t["blocks"] for t in tables), sum(t["removed_blocks"] for t in tables)
    spent = run.spent
    sparsity_seconds = spent.masks + (spent.enforcement or 0.0)
    known = spent.total > 0 and bool(run.due) and (spent.enforcement is not None)
    return {
        "folder": str(run.folder),
        "finished": run.finished,
        "sessions": run.sessions,
        "world": run.world,
        "last_step": run.last_step,
        "sparsity": removed / blocks if blocks else None,
        "target": _target(tables),
        "blocks": blocks,
        "removed_blocks": removed,
        "bytes_dense": sum(t.table_bytes for t in run.tables) if run.tables else None,
        "bytes_kept": sum(t.kept_bytes for t in run.tables) if run.tables else None,
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
        "compared": {name: {"last": _last(other)} for name, other in run.compared.items()},
    }


def standing(run: Run) -> list[dict[str, Any]]:
    """How each table stands: the fields of its TableStats that are known, and of its last change."""
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


def status(run: Run) -> str:
    """How far the run went, in a sentence."""
    where = "before its first line" if run.last_step is None else f"at step {count(run.last_step)}"
    resumed = "" if run.sessions == 1 else f" It was resumed: {run.sessions} sessions."
    if run.finished:
        return f"The run ended {where}.{resumed}"
    if not run.due:
        return f"The log stops {where}. It has no end and no due step: nothing was sparsified so far.{resumed}"
    return (
        f"The log stops {where} without an end: the run has failed, or is still going. What is known is shown.{resumed}"
    )


def summary(run: Run, report: Path | None = None) -> str:
    """The numbers in a few lines of text, and where the report is."""
    found = numbers(run)
    rows: list[tuple[str, str]] = []
    if found["sparsity"] is not None:
        blocks = f"{percent(found['sparsity'])} of {count(found['blocks'])} blocks"
        rows.append(("sparsity", f"{blocks}, {target_text(found)}"))
    if found["bytes_dense"]:
        kept, dense = found["bytes_kept"], found["bytes_dense"]
        rows.append(("kept", f"{size(kept)} of {size(dense)} of the registered tables ({percent(kept / dense)})"))
    for name, value in found["last"].items():
        others = [
            f"{other} {amount(of['last'][name])}" for other, of in found["compared"].items() if name in of["last"]
        ]
        rows.append((name, amount(value) + (f"  ({', '.join(others)})" if others else "")))
    if found["due_steps"]:
        share = found["seconds"]["share"]
        of_all = "" if share is None else f"; sparsity took {percent(share)}"
        rows.append(("time", f"{time_text(run, found)}{of_all}"))
    if report is not None:
        rows.append(("report", str(report)))
    rows = [(printable(name), printable(text)) for name, text in rows]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([printable(status(run)), *(f"{name:<{width}}  {text}" for name, text in rows)])


def target_text(found: Mapping[str, Any]) -> str:
    """What was asked for."""
    return "no target" if found["target"] is None else f"target {percent(found['target'])}"


def time_text(run: Run, found: Mapping[str, Any]) -> str:
    """What sparsity took of the time."""
    spent = run.spent
    masks = f"masks {duration(spent.masks)} in {number_of(found['due_steps'], 'due step')}"
    if spent.enforcement is None:
        return f"{masks}; enforcement not noted; all {duration(spent.total)}"
    return f"{masks}; enforcement {duration(spent.enforcement)}; all {duration(spent.total)}"


def due_totals(due: DueStep) -> dict[str, float | None]:
    """Of all tables of a due step: ``sparsity``, ``target``, ``churn``, ``regrown`` (shares of blocks), ``dead_rows``;
    None where no table knows it."""
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


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _target(tables: list[dict[str, Any]]) -> float | None:
    """The configured level of all blocks; None where a table has none."""
    blocks = sum(t["blocks"] for t in tables)
    if not blocks or any(t["target"] is None for t in tables):
        return None
    return float(sum(t["target"] * t["blocks"] for t in tables) / blocks)


def _last(run: Run) -> dict[str, float]:
    return {name: value for name in run.values if (value := run.last(name)) is not None}
