"""The page of a report.

This module computes the content of the page, and ``page.html`` lays it out. The page loads nothing
(no network, font or image), and its only script sorts and filters tables. The template escapes
every text from a run, and control characters in it are made visible.
"""

import base64
import hashlib
import json
import shlex
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dist_sparse.extras.report import summary
from dist_sparse.extras.report.charts import MOST_TABLES, Chart
from dist_sparse.extras.report.drawing import svg_of
from dist_sparse.extras.report.run import Run
from dist_sparse.extras.report.summary import (
    Columns,
    described,
    numbers,
    recommended,
    table_rows,
)
from dist_sparse.extras.report.words import amount
from dist_sparse.text import (
    block_shape_text,
    count,
    duration,
    number_of,
    percent,
    printable,
    size,
)

_FOLDER = Path(__file__).parent

# Columns of a table of tables. A threshold is in the unit of its score, and tells a reader nothing.
_COLUMNS: Columns = {
    "table": ("name", str),
    "shape": ("shape", lambda shape: " x ".join(map(count, shape))),
    "sharding": ("sharding", str),
    "block": ("sparse_block_shape", block_shape_text),
    "target": ("target", percent),
    "sparsity": ("sparsity", percent),
    "blocks": ("blocks", count),
    "removed": ("removed_blocks", count),
    "bytes kept": ("bytes_kept", count),
    "bytes dense": ("bytes_dense", count),
    "mask bytes": ("bytes_masks", count),
    "dead rows": ("dead_rows", count),
}


def page(run: Run, figures: Sequence[Chart]) -> str:
    """Return the HTML of a run and its charts."""
    script = _part("page.js")
    # By the run whose tables they show.
    drawn = defaultdict(list)
    for chart in figures:
        text = svg_of(chart, titled=False)
        # Without the head of an XML file. Markup: matplotlib has escaped its texts.
        drawn[chart.of].append((chart, Markup(text[text.index("<svg") :])))
    # Each name once, in the order of the runs: a set would have no order.
    series = dict.fromkeys(chain(*(one.values for one in run.all_runs)))
    return _ENVIRONMENT.get_template("page.html").render(
        run=run,
        found=numbers(run),
        best=recommended(run),
        summary=summary,
        drawn=drawn,
        series=[*series],
        tables={one.name: _tables(one) for one in described(run)},
        most_tables=MOST_TABLES,
        style=_part("page.css"),
        script=script,
        # The page's policy allows this script and no other.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _tables(run: Run) -> tuple[Columns, list[dict[str, Any]]]:
    """Return the sparsified tables, the largest first, and the columns in which one has a value."""
    tables = table_rows(run)
    tables.sort(key=lambda table: (-(table["bytes_dense"] or table["blocks"]), table["name"]))
    columns = dict(_COLUMNS)
    for head, (key, _) in _COLUMNS.items():
        if all(table[key] is None for table in tables):
            del columns[head]
    # All that is removed are rows.
    if all(table["dead_rows"] == table["removed_blocks"] for table in tables):
        columns.pop("dead rows", None)
    return columns, tables


def _lines_of_json(value: Any) -> list[str]:
    return json.dumps(value, indent=2, ensure_ascii=False).split("\n")


def _part(name: str) -> Markup:
    """Return a file of this package as markup, which templates do not escape."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


def _escape_controls(value: Any) -> Any:
    """Escape control characters in text from a run."""
    # Not isinstance(): Markup is a str too. It is this package's own text, and has newlines.
    if type(value) is str:
        return printable(value)
    return value


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_escape_controls,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_FILTERS = (amount, count, duration, number_of, percent, size, shlex.quote, repr, _lines_of_json)
_ENVIRONMENT.filters |= {function.__name__.lstrip("_"): function for function in _FILTERS}
