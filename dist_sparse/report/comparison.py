"""Runs beside each other: which one is the baseline, what each kept, lost and took, and what was configured otherwise.

One denominator for bytes everywhere: all tables of the baseline, or of the run itself where none is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dist_sparse.report.run import Run
from dist_sparse.text import percent, printable, shortened, size

__all__ = [
    "Point",
    "Row",
    "baseline",
    "change_text",
    "compare",
    "delta_text",
    "headline",
    "points",
    "quality",
    "row_cells",
    "whole_bytes",
]

HEAD = ("run", "sparsity", "table bytes", "of all", "AUC", "delta", "ms a step", "changed")
_MOST_CHANGES = 12


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of a comparison; None where something is unknown.

    ``sparsity``: share of removed blocks. ``bytes``: of the kept weights of all tables, ``share``: of the baseline's
    dense ones. ``auc``: the last test AUC, else the last AUC; ``delta``: less the baseline's. ``ms_per_step``: as
    logged, else of rank 0 while the log was open. ``changed``: what its config has otherwise than the baseline's, by
    dotted keys; None where a key is missing.
    """

    name: str
    sparsity: float | None
    bytes: int | None
    share: float | None
    auc: float | None
    delta: float | None
    ms_per_step: float | None
    changed: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Bytes and AUC of an artifact, or of the weights of a run without artifacts."""

    run: str
    name: str
    bytes: int
    auc: float


def baseline(run: Run) -> Run | None:
    """Return the run that the others are compared with: of those without mask updates the one with the largest tables,
    else ``run`` itself. None without others."""
    if not run.compared:
        return None
    dense = [one for one in _all(run) if not one.due]
    return max(dense, key=lambda one: one.bytes_dense or 0, default=run)


def whole_bytes(run: Run) -> int | None:
    """Return the bytes of which those of ``run`` and its compared runs are a part."""
    base = baseline(run)
    known = None if base is None else base.bytes_dense
    return run.bytes_dense if known is None else known


def compare(run: Run) -> list[Row]:
    """Return ``run`` and its compared runs, in their order."""
    base, whole = baseline(run), whole_bytes(run)
    return [_row(one, base, whole) for one in _all(run)]


def quality(run: Run) -> tuple[str, float] | None:
    """Return ``("test_auc", value)`` of a run that has it, else ``("auc", value)``; None without an AUC in [0, 1]."""
    for key in ("test_auc", "auc"):
        if (value := run.last(key)) is not None and 0 <= value <= 1:
            return key, value
    return None


def points(run: Run) -> list[Point]:
    """Return the artifacts of all runs; of a run without any its kept weights, where both numbers are known."""
    found = []
    for one in _all(run):
        if one.artifacts:
            found += [Point(run=one.name, name=a.name, bytes=a.bytes, auc=a.auc) for a in one.artifacts]
            continue
        kept, auc = one.bytes_kept, quality(one)
        if kept and auc is not None:
            found.append(Point(run=one.name, name="weights", bytes=kept, auc=auc[1]))
    return [point for point in found if point.bytes and 0 <= point.auc <= 1]


def headline(run: Run) -> str:
    """Return a sentence about what the run kept, what that cost, and how long it took; "" where nothing is known."""
    blocks, removed = _blocks(run)
    kept, whole = run.bytes_kept, whole_bytes(run)
    if kept is not None and whole and (run.tables or kept != whole):
        said = f"Keeps {percent(kept / whole)} of table bytes ({size(kept)} of {size(whole)})"
    elif kept is not None and whole:
        said = f"Keeps all table bytes ({size(kept)})"
    elif blocks:
        said = f"Keeps {percent(1 - removed / blocks)} of blocks so far"
    else:
        return ""
    auc, base = quality(run), baseline(run)
    if auc is not None:
        called = "test AUC" if auc[0] == "test_auc" else "AUC"
        other = None if base is None or base is run else _same(base, auc[0])
        said += f" at {auc[1]:.4f} {called}" if other is None else f" at {delta_text(auc[1] - other)} {called}"
    spent = run.spent
    if run.due and spent.total > 0 and spent.enforcement is not None:
        said += f"; sparsity took {percent((spent.masks + spent.enforcement) / spent.total)} of the time"
    return f"{said}."


def delta_text(delta: float) -> str:
    """Return ``+0.0019``, ``-24.63``."""
    if abs(delta) < 5e-5:
        return "±0.0000"
    return f"{delta:+.4f}" if abs(delta) < 1 else f"{delta:+.4g}"


def row_cells(row: Row) -> list[str]:
    """Return the cells of a row as text, below :data:`HEAD`."""
    return [
        row.name,
        percent(row.sparsity),
        "-" if row.bytes is None else size(row.bytes),
        percent(row.share),
        "-" if row.auc is None else f"{row.auc:.4f}",
        "" if row.delta is None else delta_text(row.delta),
        "-" if row.ms_per_step is None else f"{row.ms_per_step:.1f}",
        change_text(row.changed),
    ]


def change_text(changed: Mapping[str, Any]) -> str:
    """Return ``lr=0.1, level=0.8``; a dash for a key that is missing."""
    shown = [f"{key}={_short(value)}" for key, value in list(changed.items())[:_MOST_CHANGES]]
    if len(changed) > _MOST_CHANGES:
        shown.append(f"and {len(changed) - _MOST_CHANGES} more")
    return printable(", ".join(shown))


def _short(value: Any) -> str:
    return "-" if value is None else shortened(value, most=40) if isinstance(value, str) else json.dumps(value)[:40]


def _all(run: Run) -> list[Run]:
    return [run, *run.compared.values()]


def _row(one: Run, base: Run | None, whole: int | None) -> Row:
    blocks, removed = _blocks(one)
    kept, auc = one.bytes_kept, quality(one)
    other = None if auc is None or base is None or base is one else _same(base, auc[0])
    ms = one.last("ms_per_step")
    if ms is None and one.last_step is not None and one.spent.total:
        ms = 1000 * one.spent.total / (one.last_step + 1)
    return Row(
        name=one.name,
        sparsity=removed / blocks if blocks else None,
        bytes=kept,
        share=kept / whole if kept is not None and whole else None,
        auc=None if auc is None else auc[1],
        delta=None if other is None or auc is None else auc[1] - other,
        ms_per_step=ms,
        changed={} if base is None or base is one else _changed(base.config, one.config),
    )


def _same(base: Run, key: str) -> float | None:
    """Return the baseline's AUC, if it is of the same kind."""
    found = quality(base)
    return found[1] if found is not None and found[0] == key else None


def _blocks(run: Run) -> tuple[int, int]:
    """Return the blocks of all registered tables, and how many of them are removed."""
    if run.tables:
        return sum(t.blocks for t in run.tables), sum(t.removed_blocks for t in run.tables)
    last = {change.name: change for due in run.due for change in due.record.tables}
    return sum(t.blocks for t in last.values()), sum(t.removed_blocks for t in last.values())


def _changed(base: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    old, new = _flat(base), _flat(config)
    return {key: new.get(key) for key in {**new, **old} if old.get(key) != new.get(key)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted keys; what is None is left out."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def named(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return points by run, the largest first within each."""
    found: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: -point.bytes):
        found.setdefault(point.run, []).append(point)
    return found
