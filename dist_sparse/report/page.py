"""The report of a run: one HTML file, and each chart as an SVG file of its own.

This module decides what is on the page; ``page.html`` lays it out. The page needs no network, font
or image, and no script but to sort and filter its tables.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dist_sparse.report.charts import charts
from dist_sparse.report.comparison import HEAD, compare, headline, row_cells, whole_bytes
from dist_sparse.report.drawing import HEIGHT, WIDTH, is_wide, plot_of, svg_of
from dist_sparse.report.figures import BarChart, Chart, LineChart, ScoreChart
from dist_sparse.report.folder import write_whole
from dist_sparse.report.rendering import part, render
from dist_sparse.report.run import Run, read_run
from dist_sparse.report.summary import against, bytes_of, numbers, status, target_text, time_text
from dist_sparse.report.table_charts import MOST_TABLES
from dist_sparse.text import amount, block_shape_text, count, number_of, percent, shape_text, size

__all__ = ["page", "write_report"]

_REPORT: Final = "report.html"
_SECTIONS: Final = (
    "Quality and bytes",
    "Over steps",
    "Tables",
    "Mask updates",
    "Scores and thresholds",
    "Time",
)
_BY_KEY: Final = {
    "auc_bytes": "Quality and bytes",
    "churn": "Mask updates",
    "dead_rows": "Mask updates",
    "time": "Time",
}
_TABLE_HEAD: Final = (
    *("table", "shape", "sharding", "block", "target", "sparsity", "blocks", "pruned"),
    *("bytes kept", "bytes dense", "mask bytes", "threshold", "dead rows"),
)
_COUNTS: Final = (
    "blocks",
    "removed_blocks",
    "bytes_kept",
    "bytes_dense",
    "bytes_masks",
    "threshold",
    "dead_rows",
)
_UNKNOWN: Final = ("shape", "sharding", "sparse_block_shape", "target", "sparsity")


@dataclass(frozen=True, kw_only=True)
class Head:
    """Number at the top. ``value``: all digits, for programs that read the page."""

    key: str
    name: str
    value: str
    text: str
    more: str


@dataclass(frozen=True)
class Cell:
    """Cell of a table, and the key by which its column is sorted."""

    text: str
    value: str


@dataclass(frozen=True)
class Table:
    """Table of the page."""

    label: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sortable: bool


def write_report(
    run: Run | str | Path, out: str | Path | None = None, *, svg: str | Path | None = None
) -> Path:
    """Write the report of a run, readable by the user only (0600).

    A file that is there is replaced once the new one is whole; a symbolic link is replaced, not
    followed.

    Args:
        run: folder that a :class:`~dist_sparse.RunLog` wrote, or the
            :class:`~dist_sparse.report.Run` read from it.
        out: the HTML file; ``report.html`` in the folder by default.
        svg: folder, created if missing, in which each chart is written as ``<chart>.svg`` too.

    Returns:
        ``out``.

    Raises:
        ValueError: there is no such run, or it cannot be read, or ``out`` is not a regular file;
            names the file.
        ImportError: jinja2 is not installed. OSError: a file can't be written. The old one is as it
            was.

    Example::

        >>> import tempfile
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import write_report
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder) as log:
        ...     log.step(0, loss=0.5)
        >>> write_report(folder).name
        'report.html'
    """
    run = run if isinstance(run, Run) else read_run(run)
    out = run.folder / _REPORT if out is None else Path(out)
    figures = charts(run)
    contents = {out: page(run, figures).encode()}
    if svg is not None:
        contents |= {Path(svg) / f"{chart.key}.svg": svg_of(chart).encode() for chart in figures}
    for file, content in contents.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    return out


def page(run: Run, figures: Sequence[Chart]) -> str:
    """Return the HTML of a run and its charts.

    Raises:
        ImportError: jinja2 is not installed.
    """
    found, script = numbers(run), part("page.js")
    sections: dict[str, list[Any]] = {title: [] for title in _SECTIONS}
    for chart in figures:
        plot = None if isinstance(chart, BarChart) else plot_of(chart)
        sections[_section_of(chart)].append((chart, plot, is_wide(chart)))
    return render(
        "page.html",
        run=run,
        lead=headline(run),
        ranks=number_of(run.world, "rank"),
        status=status(run),
        heads=_heads(run, found),
        compared=_compared_runs(run),
        sections=sections,
        last=_last_values(run),
        tables=_all_tables(found),
        most_tables=MOST_TABLES,
        config=json.dumps(run.config, indent=2, ensure_ascii=False).split("\n")
        if run.config
        else [],
        style=part("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
    )


def _section_of(chart: Chart) -> str:
    if chart.key in _BY_KEY:
        return _BY_KEY[chart.key]
    if isinstance(chart, ScoreChart):
        return "Scores and thresholds"
    return "Over steps" if isinstance(chart, LineChart) else "Tables"


def _heads(run: Run, found: Mapping[str, Any]) -> list[Head]:
    heads = []
    if (sparsity := found["sparsity"]) is not None:
        heads.append(_head("sparsity", "Sparsity", sparsity, percent(sparsity), target_text(found)))
    whole, kept = whole_bytes(run), found["bytes_kept"]
    if whole and kept is not None:
        more = f"{percent(kept / whole)} of {size(whole)} in {bytes_of(run)}"
        if found["bytes_masks"]:
            more += f"; masks take {size(found['bytes_masks'])}"
        heads.append(_head("bytes", "Bytes kept", kept, size(kept), more))
    heads += _quality_heads(run, found["last"])
    if found["due_steps"]:
        heads.append(_time_head(run, found))
    return heads


def _quality_heads(run: Run, last: Mapping[str, float]) -> list[Head]:
    """Return AUC, NE and loss: of the test set where that was logged, else the last of training."""
    heads = []
    for key, name in (("auc", "AUC"), ("ne", "NE"), ("loss", "Loss")):
        tested = f"test_{key}"
        series, kind = (tested, "test") if tested in last else (key, "last")
        if series in last:
            heads.append(
                _head(
                    key, f"{name}, {kind}", last[series], amount(last[series]), against(run, series)
                )
            )
    return heads


def _time_head(run: Run, found: Mapping[str, Any]) -> Head:
    share = found["seconds"]["share"]
    if share is not None:
        return _head("time", "Time for sparsity", share, percent(share), time_text(run, found))
    # Without the time of enforcement the share of sparsity is unknown, and a program that reads the
    # page gets none.
    masks = percent(run.spent.masks / max(run.spent.total, 1e-9))
    return _head("time", "Time for masks", None, masks, time_text(run, found))


def _head(key: str, name: str, value: float | None, text: str, more: str) -> Head:
    return Head(key=key, name=name, value=_key(value), text=text, more=more)


def _compared_runs(run: Run) -> Table | None:
    """Return the runs beside each other; None for a run without others."""
    if not run.compared:
        return None
    rows = []
    for row in compare(run):
        name, *numbered, changed = row_cells(row)
        values = (row.sparsity, row.bytes, row.share, row.auc, row.delta, row.ms_per_step)
        cells = [Cell(text, _key(value)) for text, value in zip(numbered, values, strict=True)]
        rows.append([Cell(name, name), *cells, Cell(changed, changed)])
    return Table("Runs", HEAD, rows, sortable=True)


def _last_values(run: Run) -> Table | None:
    """Return the last value of every series, of the run and of the compared ones."""
    runs = {run.name: run, **run.compared}
    names = list(dict.fromkeys(name for one in runs.values() for name in one.values))
    rows = []
    for label, one in runs.items():
        rows.append([Cell(label, label), *map(_number, map(one.last, names))])
    return Table("Last values", ["run", *names], rows, sortable=False) if names else None


def _all_tables(found: Mapping[str, Any]) -> Table | None:
    """Return the registered tables and the others, the largest first."""
    tables = [*found["tables"]]  # numbers() keeps the two apart
    for name, taken in found["other_tables"].items():
        unknown = dict.fromkeys((*_UNKNOWN, *_COUNTS))
        tables.append({**unknown, "name": name, "bytes_kept": taken, "bytes_dense": taken})
    tables.sort(key=lambda table: (-(table["bytes_dense"] or table["blocks"] or 0), table["name"]))
    return (
        Table("All tables", _TABLE_HEAD, [_table_row(table) for table in tables], sortable=True)
        if tables
        else None
    )


def _table_row(table: Mapping[str, Any]) -> list[Cell]:
    shape, sharding, block = (
        table["shape"],
        table["sharding"],
        block_shape_text(table["sparse_block_shape"]),
    )
    return [
        Cell(table["name"], table["name"]),
        Cell("-", "")
        if shape is None
        else Cell(shape_text([count(n) for n in shape]), str(shape[0])),
        Cell(sharding or "-", sharding or ""),
        Cell(block, block.removeprefix("-")),
        Cell(percent(table["target"]), _key(table["target"])),
        Cell(percent(table["sparsity"]), _key(table["sparsity"])),
        *(_number(table[name]) for name in _COUNTS),
    ]


def _number(value: float | None) -> Cell:
    if value is None:
        return Cell("-", "")
    return Cell(count(value) if isinstance(value, int) else amount(value), _key(value))


def _key(value: float | None) -> str:
    return "" if value is None else repr(value)
