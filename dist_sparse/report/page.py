"""The report of a run: one HTML file, and each chart as an SVG file of its own.

This module decides what is on the page; ``page.html`` lays it out. The page needs no network, font
or image, and no script but to sort and filter its tables. Everything that a template prints from a
run is escaped, and control characters in it are made visible.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dist_sparse.report import comparison, summary
from dist_sparse.report.charts import MOST_TABLES, charts
from dist_sparse.report.drawing import HEIGHT, WIDTH, plot_of
from dist_sparse.report.figures import Chart
from dist_sparse.report.folder import write_whole
from dist_sparse.report.run import Run, read_run
from dist_sparse.report.summary import TABLE_FIELDS, numbers
from dist_sparse.text import (
    amount,
    block_shape_text,
    count,
    duration,
    number_of,
    percent,
    printable,
    size,
)

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER: Final = Path(__file__).parent
_REPORT: Final = "report.html"
_SECTIONS: Final = {
    "auc": "Quality and bytes",
    "sparsity": "Over steps",
    "fates": "Over steps",
    "value": "Over steps",
    "bytes": "Tables",
    "traffic": "Tables",
}
"""The heading of each chart, by the first word of its key, in the order of the page."""

_WIDE: Final = ("auc", "bytes")
"""Charts as wide as the page."""

_TABLE_HEAD: Final = (
    *("table", "shape", "sharding", "block", "target", "sparsity", "blocks", "pruned"),
    *("bytes kept", "bytes dense", "mask bytes", "threshold", "dead rows"),
)
_COUNTS: Final = (
    *("blocks", "removed_blocks", "bytes_kept", "bytes_dense", "bytes_masks"),
    *("threshold", "dead_rows"),
)
"""The last columns of the table of all tables."""


def write_report(
    run: Run | str | Path, out: str | Path | None = None, *, svg: str | Path | None = None
) -> Path:
    """Write the report of a run, with the config and the command of its script.

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
    # All of them before the first is written: a failure leaves the old ones.
    contents = {out: page(run, figures).encode()}
    if svg is not None:
        contents |= {Path(svg) / f"{chart.key}.svg": svg_of(chart).encode() for chart in figures}
    for file, content in contents.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        # A report exists to be shown; the log beside it stays private.
        write_whole(file, content, shared=True)
    return out


def page(run: Run, figures: Sequence[Chart]) -> str:
    """Return the HTML of a run and its charts.

    Raises:
        ImportError: jinja2 is not installed.
    """
    found, script = numbers(run), part("page.js")
    sections: dict[str, list[Any]] = {title: [] for title in _SECTIONS.values()}
    for chart in figures:
        word = chart.key.partition("_")[0]
        sections[_SECTIONS[word]].append((chart, plot_of(chart), word in _WIDE))
    series: dict[str, Any] = {}
    # Names of all runs, in the order of the first that has them.
    for one in run.all_runs:
        series |= one.values
    config = json.dumps(run.config, indent=2, ensure_ascii=False).split("\n")
    return render(
        "page.html",
        run=run,
        found=found,
        summary=summary,
        comparison=comparison,
        sections=sections,
        series=[*series],
        tables=_all_tables(found),
        table_head=_TABLE_HEAD,
        counts=_COUNTS,
        most_tables=MOST_TABLES,
        config=config if run.config else [],
        style=part("page.css"),
        script=script,
        # The page's policy allows this script and no other.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
    )


def _all_tables(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the registered tables and the others, the largest first."""
    tables = [*found["tables"]]  # numbers() keeps the two apart
    # Of these only the bytes are known, and all of them are kept.
    for name, taken in found["other_tables"].items():
        unknown = dict.fromkeys(TABLE_FIELDS)
        tables.append({**unknown, "name": name, "bytes_kept": taken, "bytes_dense": taken})
    tables.sort(key=lambda table: (-(table["bytes_dense"] or table["blocks"] or 0), table["name"]))
    return tables


def svg_of(chart: Chart) -> str:
    """Return a chart as a file of its own: axes, text and style within, light and dark.

    Raises:
        ImportError: jinja2 is not installed.
    """
    return render("chart.svg", chart=chart, plot=plot_of(chart), WIDTH=WIDTH, HEIGHT=HEIGHT)


def render(template: str, **values: Any) -> str:
    """Return a template filled with values, all escaped.

    Raises:
        ImportError: jinja2 is not installed.
    """
    return environment().get_template(template).render(values)


def part(name: str) -> str:
    """Return a file of the page, which Jinja2 takes for markup: never text from a run."""
    from markupsafe import Markup  # jinja2 needs it

    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    # torch brings it, but runs are read without torch.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,  # by name it would leave .svg out
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,  # a file ends with one
    )
    texts = (amount, block_shape_text, count, duration, number_of, percent, size)
    environment.filters |= {text.__name__: text for text in texts}
    environment.filters |= {"short": _short, "known": lambda text: "" if text == "-" else text}
    return environment


def _visible(value: Any) -> Any:
    """Return text from a run without control characters; the project's own markup has line ends."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return value


def _short(text: str, most: int) -> str:
    """Return text that fits a place of fixed width."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
