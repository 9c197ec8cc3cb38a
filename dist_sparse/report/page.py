"""The report of a run: one HTML file, and each chart as an SVG file of its own.

The page needs no network, font or image, and no script but to sort a table. Its content security policy allows its own
style (``page.css``) and script (``page.js``) only; everything from the log is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dist_sparse.report.charts import charts
from dist_sparse.report.comparison import HEAD, compare, headline, row_cells, whole_bytes
from dist_sparse.report.drawing import figure_of, svg_of
from dist_sparse.report.figures import Chart, LineChart, ScoreChart
from dist_sparse.report.folder import replace_files
from dist_sparse.report.rendering import color_style
from dist_sparse.report.run import Run, read_run
from dist_sparse.report.summary import against, bytes_of, numbers, status, target_text, time_text
from dist_sparse.report.table_charts import MOST_TABLES
from dist_sparse.text import amount, block_shape_text, count, number_of, percent, printable, shape_text, size

__all__ = ["page", "write_report"]

_REPORT = "report.html"


def write_report(run: Run | str | Path, out: str | Path | None = None, *, svg: str | Path | None = None) -> Path:
    """Write the report of a run, readable by the user only (0600).

    Files that are there are replaced once all new ones are whole; a symbolic link is replaced, not followed.

    Args:
        run: folder that a :class:`~dist_sparse.RunLog` wrote, or the :class:`~dist_sparse.report.Run` read from it.
        out: the HTML file; ``report.html`` in the folder by default.
        svg: folder, created if missing, in which each chart is written as ``<chart>.svg`` too.

    Returns:
        ``out``.

    Raises:
        ValueError: there is no such run, or it cannot be read, or ``out`` is not a regular file; names the file.
        ImportError: jinja2 is not installed. OSError: a file can't be written. In each case old files are as they were.

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
    for file in contents:
        file.parent.mkdir(parents=True, exist_ok=True)
    replace_files(contents)
    return out


def page(run: Run, figures: Sequence[Chart]) -> str:
    """Return the HTML of a run and its charts."""
    found = numbers(run)
    style, script = _part("page.css"), _part("page.js")
    over_steps = [figure_of(c) for c in figures if isinstance(c, LineChart) and c.key not in ("churn", "dead_rows")]
    masks = [figure_of(c) for c in figures if c.key in ("churn", "dead_rows")]
    scores = [figure_of(c) for c in figures if isinstance(c, ScoreChart)]
    tables = [figure_of(c) for c in figures if c.key.startswith(("bytes", "traffic"))]
    ranks = number_of(run.world, "rank")
    versions = "".join(f", {name} {version}" for name, version in run.versions.items())
    state = f'<p class="{"soft" if run.finished else "warn"}">{escape(status(run))}</p>'
    body = [
        f'<header><p class="soft">dist_sparse, report of a run</p><h1>{escape(run.name)}</h1>{_lead(run)}',
        f'<p class="soft">Started {escape(run.started)} on {ranks}{escape(versions)}.</p>{_command(run)}',
        f"{state}{_heads(run, found)}</header><main>",
        _comparison(run),
        _section("Quality and bytes", [figure_of(c) for c in figures if c.key == "auc_bytes"]),
        _section("Over steps", over_steps),
        _section("Tables", tables),
        _section("Mask updates", masks),
        _section("Scores and thresholds", scores),
        _section("Time", [figure_of(c) for c in figures if c.key == "time"]),
        _runs_table(run),
        _all_tables(found),
        _config(run),
        "</main><footer><p>Written by dist_sparse. Bytes kept count kept weights: the tables in memory stay as "
        "large as they were.</p></footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}: report of dist_sparse</title><style>{color_style()}{style}</style></head>\n<body>"
        + "\n".join(body)
        + f"<script>{script}</script></body></html>\n"
    )


def escape(text: str) -> str:
    return html.escape(printable(text))


def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'; base-uri 'none'; form-action 'none'"
    )


def _heads(run: Run, found: dict[str, Any]) -> str:
    """Return the numbers at the top; ``data-value`` has all digits, for programs that read the page."""
    heads: list[str] = []

    def add(key: str, name: str, value: float | None, text: str, more: str) -> None:
        held = "" if value is None else repr(value)
        heads.append(
            f'<div class="head"><dt>{escape(name)}</dt><dd><div class="big" id="head-{key}" data-value="{held}">'
            f'{escape(text)}</div><div class="more">{escape(more)}</div></dd></div>'
        )

    if found["sparsity"] is not None:
        add("sparsity", "Sparsity", found["sparsity"], percent(found["sparsity"]), target_text(found))
    whole = whole_bytes(run)
    if whole and found["bytes_kept"] is not None:
        more = f"{percent(found['bytes_kept'] / whole)} of {size(whole)} in {bytes_of(run)}"
        more += f"; masks take {size(found['bytes_masks'])}" if found["bytes_masks"] else ""
        add("bytes", "Bytes kept", found["bytes_kept"], size(found["bytes_kept"]), more)
    for key, name in (("auc", "AUC"), ("ne", "NE"), ("loss", "Loss")):
        tested = f"test_{key}"
        noted = tested if tested in found["last"] else key
        if noted in found["last"]:
            value = found["last"][noted]
            called = f"{name}, test" if noted == tested else f"{name}, last"
            add(key, called, value, amount(value), against(run, noted))
    if found["due_steps"]:
        share = found["seconds"]["share"]
        text = percent(share) if share is not None else percent(run.spent.masks / max(run.spent.total, 1e-9))
        add("time", "Time for sparsity" if share is not None else "Time for masks", share, text, time_text(run, found))
    return f'<dl class="heads">{"".join(heads)}</dl>' if heads else ""


def _lead(run: Run) -> str:
    said = headline(run)
    return f'<p class="lead">{escape(said)}</p>' if said else ""


def _command(run: Run) -> str:
    return f'<p class="soft command">{escape(run.command)}</p>' if run.command else ""


def _comparison(run: Run) -> str:
    """Return the runs beside each other; nothing for a run without others."""
    if not run.compared:
        return ""
    rows = []
    for row in compare(run):
        values = (row.sparsity, row.bytes, row.share, row.auc, row.delta, row.ms_per_step)
        name, *numbered, changed = row_cells(row)
        cells = [(text, _value(value)) for text, value in zip(numbered, values, strict=True)]
        rows.append([(name, name), *cells, (changed, changed)])
    return "<h2>Runs</h2>" + _table("Runs", HEAD, rows, sortable=True)


def _section(title: str, figures: Sequence[str]) -> str:
    return f'<h2>{title}</h2><div class="grid">{"".join(figures)}</div>' if figures else ""


def _runs_table(run: Run) -> str:
    """Return the last value of every series, of the run and of the compared ones."""
    runs = {run.name: run, **run.compared}
    names = list(dict.fromkeys(name for one in runs.values() for name in one.values))
    if not names:
        return ""
    rows = [[(label, label), *(_cell(one.last(name)) for name in names)] for label, one in runs.items()]
    return "<h2>Last values</h2>" + _table("Last values", ["run", *names], rows, sortable=False)


def _all_tables(found: dict[str, Any]) -> str:
    tables = [*found["tables"], *(_other_table(name, taken) for name, taken in found["other_tables"].items())]
    if not tables:
        return ""
    heads = [
        "table",
        "shape",
        "sharding",
        "block",
        "target",
        "sparsity",
        "blocks",
        "pruned",
        "bytes kept",
        "bytes dense",
    ]
    heads += ["mask bytes", "threshold", "dead rows"]
    rows = []
    for t in sorted(tables, key=lambda t: (-(t["bytes_dense"] or t["blocks"] or 0), t["name"])):
        block = "" if t["sparse_block_shape"] is None else block_shape_text(t["sparse_block_shape"])
        rows.append(
            [
                (t["name"], t["name"]),
                ("-", "") if t["shape"] is None else (shape_text([count(n) for n in t["shape"]]), str(t["shape"][0])),
                (t["sharding"] or "-", t["sharding"] or ""),
                (block or "-", block),
                (percent(t["target"]), _value(t["target"])),
                (percent(t["sparsity"]), _value(t["sparsity"])),
                *(_cell(t[name]) for name in ("blocks", "removed_blocks", "bytes_kept", "bytes_dense", "bytes_masks")),
                _cell(t["threshold"]),
                _cell(t["dead_rows"]),
            ]
        )
    title = "The one table" if len(rows) == 1 else f"All {count(len(rows))} tables"
    box = f'<p data-filter="Filter {count(len(rows))} tables by name"></p>' if len(rows) > MOST_TABLES else ""
    return f"<h2>{title}</h2><div>{box}" + _table("All tables", heads, rows, sortable=True) + "</div>"


def _other_table(name: str, taken: int) -> dict[str, Any]:
    """Return the row of a table that no sparsifier prunes."""
    unknown = ("shape", "sharding", "sparse_block_shape", "target", "sparsity", "removed_blocks", "bytes_masks")
    known = {
        "name": name,
        "blocks": None,
        "bytes_kept": taken,
        "bytes_dense": taken,
        "threshold": None,
        "dead_rows": None,
    }
    return known | dict.fromkeys(unknown)


def _cell(value: float | None) -> tuple[str, str]:
    if value is None:
        return "-", ""
    return (count(value) if isinstance(value, int) else amount(value)), _value(value)


def _value(value: float | None) -> str:
    return "" if value is None else repr(value)


def _table(label: str, heads: Iterable[str], rows: Iterable[Sequence[tuple[str, str]]], *, sortable: bool) -> str:
    """Return a table from rows of (text, sort key)."""
    key = ' data-key="1"' if sortable else ""
    top = "".join(f'<th scope="col"{key}>{escape(head)}</th>' for head in heads)
    lines = "".join(
        "<tr>" + "".join(f'<td data-value="{escape(value)}">{escape(text)}</td>' for text, value in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="card scroll" tabindex="0" role="region" aria-label="{label}"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _config(run: Run) -> str:
    if not run.config:
        return ""
    text = "\n".join(map(escape, json.dumps(run.config, indent=2, ensure_ascii=False).split("\n")))
    region = 'class="card scroll" tabindex="0" role="region" aria-label="Configuration"'
    return f"<h2>Configuration</h2><div {region}><pre>{text}</pre></div>"
