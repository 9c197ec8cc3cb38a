"""Runs beside each other: which one is the baseline, what each kept, lost and took, and what was
configured otherwise.

One denominator for bytes everywhere: all tables of the baseline, or of the run itself where none is
known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dist_sparse.records import MaskChange, TableStats
from dist_sparse.report.run import Run, share_of, total
from dist_sparse.text import percent, printable, shortened, size

__all__ = [
    "Point",
    "Row",
    "baseline",
    "blocks_of",
    "change_text",
    "compare",
    "delta_text",
    "headline",
    "known_text",
    "named",
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

    ``sparsity``: share of removed blocks. ``bytes``: of the kept weights of all tables, ``share``:
    of the baseline's dense ones. ``auc``: the last test AUC, else the last AUC; ``delta``: less the
    baseline's. ``ms_per_step``: as logged, else of rank 0 while the log was open. ``changed``: what
    its config has otherwise than the baseline's, by dotted keys; None where a key is missing.
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
    """Return the run that the others are compared with: of those without mask updates the one with
    the largest tables, else ``run`` itself. None without others."""
    if not run.compared:
        return None
    # A narrow or hashed model has no mask updates either: the baseline is the one with the largest
    # tables.
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
    """Return ``("test_auc", value)`` of a run that has it, else ``("auc", value)``; None without an
    AUC in [0, 1]."""
    for key in ("test_auc", "auc"):
        if (value := run.last(key)) is not None and 0 <= value <= 1:
            return key, value
    return None


def points(run: Run) -> list[Point]:
    """Return the artifacts of all runs; of a run without any its kept weights, where both numbers
    are known."""
    found = []
    for one in _all(run):
        found += [Point(run=one.name, **asdict(artifact)) for artifact in one.artifacts]
        # Of a run that serves nothing yet, the weights that it keeps stand for an artifact.
        kept, auc = one.bytes_kept, quality(one)
        if not one.artifacts and kept and auc is not None:
            found.append(Point(run=one.name, name="weights", bytes=kept, auc=auc[1]))
    return [point for point in found if point.bytes]


def named(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return points by run, the largest first within each."""
    found: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: -point.bytes):
        found.setdefault(point.run, []).append(point)
    return found


def blocks_of(run: Run) -> tuple[int, int]:
    """Return the blocks of all registered tables, and how many of them are removed."""
    tables: Sequence[TableStats | MaskChange] = run.tables or [*run.last_changes.values()]
    return total(tables, "blocks"), total(tables, "removed_blocks")


def headline(run: Run) -> str:
    """Return a sentence about what the run kept, what that cost, and how long it took; "" where
    nothing is known."""
    said = _kept_text(run)
    if not said:
        return ""
    auc, delta = quality(run), _delta(run, baseline(run))
    if auc is not None:
        called = "test AUC" if auc[0] == "test_auc" else "AUC"
        said += (
            f" at {auc[1]:.4f} {called}" if delta is None else f" at {delta_text(delta)} {called}"
        )
    if (share := run.sparsity_share) is not None:
        said += f"; sparsity took {percent(share)} of the time"
    return f"{said}."


def _kept_text(run: Run) -> str:
    kept, whole = run.bytes_kept, whole_bytes(run)
    if kept is None or not whole:
        blocks, removed = blocks_of(run)
        return f"Keeps {percent(1 - removed / blocks)} of blocks so far" if blocks else ""
    if kept == whole and not run.tables:
        return f"Keeps all table bytes ({size(kept)})"
    return f"Keeps {percent(kept / whole)} of table bytes ({size(kept)} of {size(whole)})"


def delta_text(delta: float) -> str:
    """Return ``+0.0019``, ``-24.63``."""
    if abs(delta) < 5e-5:  # rounds to 0, and +0.0000 would look like a gain
        return "±0.0000"
    return f"{delta:+.4f}" if abs(delta) < 1 else f"{delta:+.4g}"


def known_text(value: float | None, text: Callable[[Any], str], unknown: str = "-") -> str:
    """Return a number as text, a dash for None."""
    return unknown if value is None else text(value)


def row_cells(row: Row) -> list[str]:
    """Return the cells of a row as text, below :data:`HEAD`."""
    return [
        row.name,
        percent(row.sparsity),
        known_text(row.bytes, size),
        percent(row.share),
        known_text(row.auc, "{:.4f}".format),
        known_text(row.delta, delta_text, unknown=""),
        known_text(row.ms_per_step, "{:.1f}".format),
        change_text(row.changed),
    ]


def change_text(changed: Mapping[str, Any]) -> str:
    """Return ``lr=0.1, level=0.8``; a dash for a key that is missing."""
    shown = [f"{key}={_short(value)}" for key, value in list(changed.items())[:_MOST_CHANGES]]
    if len(changed) > _MOST_CHANGES:
        shown.append(f"and {len(changed) - _MOST_CHANGES} more")
    return printable(", ".join(shown))


def _short(value: Any) -> str:
    if isinstance(value, str):
        return shortened(value, most=40)
    return "-" if value is None else json.dumps(value)[:40]


def _all(run: Run) -> list[Run]:
    return [run, *run.compared.values()]


def _row(one: Run, base: Run | None, whole: int | None) -> Row:
    blocks, removed = blocks_of(one)
    auc = quality(one)
    return Row(
        name=one.name,
        sparsity=share_of(removed, blocks),
        bytes=one.bytes_kept,
        share=share_of(one.bytes_kept, whole),
        auc=None if auc is None else auc[1],
        delta=_delta(one, base),
        ms_per_step=_ms_per_step(one),
        changed={} if base is None else _changed(base.config, one.config),
    )


def _delta(one: Run, base: Run | None) -> float | None:
    """Return the AUC less the baseline's; None for the baseline itself, or where they are not of
    the same kind."""
    if base is None or base is one:
        return None
    auc, other = quality(one), quality(base)
    # AUC while training is of other examples than AUC of the test set.
    if auc is None or other is None or auc[0] != other[0]:
        return None
    return auc[1] - other[1]


def _ms_per_step(one: Run) -> float | None:
    """Return what was logged, else the mean of rank 0 while the log was open."""
    logged = one.last("ms_per_step")
    if logged is not None or one.last_step is None or not one.spent.total:
        return logged
    return 1000 * one.spent.total / (one.last_step + 1)


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
