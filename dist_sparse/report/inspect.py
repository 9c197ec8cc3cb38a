"""What is in the folder of a run, for a person to read in a terminal?

Tables as they stood at the end, or as the last noted due step left them; sums; what the run was started with. Numbers
are those of :mod:`dist_sparse.report.summary`, which the report shows too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dist_sparse.report.run import Run
from dist_sparse.report.summary import numbers, status
from dist_sparse.report.words import number_of
from dist_sparse.text import mib, printable, shape_text, table_lines

__all__ = ["inspect_json", "inspect_text"]

_HEAD = (
    *("table", "shape", "dtype", "sharding", "block", "blocks", "target", "sparsity"),
    *("dead rows", "MiB", "kept MiB", "mask MiB"),
)


def inspect_json(run: Run) -> dict[str, Any]:
    """What is known of a run, JSON-able: :func:`~dist_sparse.report.summary.numbers`, and ``started``, ``world``,
    ``versions``, ``config``."""
    about = {"started": run.started, "world": run.world, "versions": dict(run.versions), "config": dict(run.config)}
    return {**about, **numbers(run)}


def inspect_text(run: Run) -> str:
    """The same for people."""
    known = inspect_json(run)
    ranks = number_of(run.world, "rank")
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines = [f"{run.folder}: started {run.started} on {ranks}; {versions}", status(run), ""]
    if known["tables"]:
        rows = [_row(table) for table in known["tables"]]
        lines += [*table_lines(_HEAD, rows, right=range(5, len(_HEAD)), total=_total(known)), ""]
    last = ", ".join(f"{name} {value:.4g}" for name, value in known["last"].items() if value is not None)
    lines += [f"last: {last}"] if last else []
    lines.append(f"due steps: {known['due_steps']}")
    lines += ["config:", *(f"  {key}: {json.dumps(value)}" for key, value in run.config.items())] if run.config else []
    return "\n".join(printable(line) for line in lines)


def _row(table: Mapping[str, Any]) -> list[str]:
    cells = [table["name"], shape_text(table["shape"]), table["dtype"] or "-", table["sharding"] or "-"]
    cells += [shape_text(table["sparse_block_shape"]), f"{table['blocks']:,}"]
    cells += [_level(table["target"]), _level(table["sparsity"]), _count(table["dead_rows"])]
    return cells + [_mib(table[f"bytes_{kind}"]) for kind in ("dense", "kept", "masks")]


def _total(known: Mapping[str, Any]) -> list[str]:
    cells = ["all", "", "", "", "", f"{known['blocks']:,}", _level(known["target"]), _level(known["sparsity"])]
    cells.append(_count(known["dead_rows"]))
    return cells + [_mib(known[f"bytes_{kind}"]) for kind in ("dense", "kept", "masks")]


def _level(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _mib(value: int | None) -> str:
    return "-" if value is None else mib(value)
