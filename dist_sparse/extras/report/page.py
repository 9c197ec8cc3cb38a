"""The page of a report.

This module computes the content of the page, and ``page.html`` lays it out. The page loads nothing
(no network, font or image), and its only script sorts and filters tables. The template escapes
every text from a run, and control characters in it are made visible.
"""

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dist_sparse.extras.report import summary
from dist_sparse.extras.report.charts import MOST_TABLES, Chart
from dist_sparse.extras.report.drawing import svg_of
from dist_sparse.extras.report.run import Run
from dist_sparse.extras.report.summary import TABLE_FIELDS, numbers
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

_FOLDER = Path(__file__).parent

# The heading above a chart, by the first word of its key.
_SECTIONS = {
    "auc": "Quality and bytes",
    **dict.fromkeys(("sparsity", "fates", "value"), "Over steps"),
    **dict.fromkeys(("bytes", "traffic"), "Tables"),
}


def page(run: Run, figures: Sequence[Chart]) -> str:
    """Return the HTML of a run and its charts."""
    found, script = numbers(run), _part("page.js")
    tables = _all_tables(found)
    sections = defaultdict(list)
    for chart in figures:
        section = _SECTIONS[chart.key.partition("_")[0]]
        drawn = svg_of(chart, titled=False)
        # Without the head of an XML file. Markup: matplotlib has escaped its texts.
        sections[section].append((chart, Markup(drawn[drawn.index("<svg") :])))
    # Each name once, in the order of the runs: a set would have no order.
    series = dict.fromkeys(chain(*(one.values for one in run.all_runs)))
    return _ENVIRONMENT.get_template("page.html").render(
        run=run,
        found=found,
        summary=summary,
        sections=sections,
        series=[*series],
        tables=tables,
        hidden=_hidden_columns(tables),
        most_tables=MOST_TABLES,
        config=json.dumps(run.config, indent=2, ensure_ascii=False).split("\n"),
        style=_part("page.css"),
        script=script,
        # The page's policy allows this script and no other.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _all_tables(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sparsified tables and the others, the largest first."""
    tables = [*found["tables"]]
    # Tables without a sparsifier have known bytes only, and keep all of them.
    for name, taken in found["other_tables"].items():
        sizes = dict.fromkeys(("bytes_kept", "bytes_dense"), taken)
        tables.append(dict.fromkeys(TABLE_FIELDS) | sizes | {"name": name})
    tables.sort(key=lambda table: (-(table["bytes_dense"] or table["blocks"] or 0), table["name"]))
    return tables


def _hidden_columns(tables: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the heads of columns that tell nothing: without a level, as for rows that were never
    read, tables have no target; a threshold of 0 only says that such rows score 0; and all that is
    pruned are dead rows."""
    if any(table["target"] is not None for table in tables):
        return set()
    hidden = {"target"}
    if not any(table["threshold"] for table in tables):
        hidden.add("threshold")
    if all(table["dead_rows"] == table["removed_blocks"] for table in tables):
        hidden.add("dead rows")
    return hidden


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
_FILTERS = (amount, block_shape_text, count, duration, number_of, percent, size)
_ENVIRONMENT.filters |= {function.__name__: function for function in _FILTERS}
_ENVIRONMENT.filters |= {"known": lambda text: "" if text == "-" else text}
