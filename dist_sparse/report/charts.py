"""Which charts does a report have, and what is drawn in each?

A chart is data: names, points, bins. :mod:`dist_sparse.report.drawing` draws it as HTML,
:mod:`dist_sparse.report.png` as PNG; neither looks at the run again. However long a run and however many its tables,
a chart stays small: a line has at most 400 points, a chart the lines of at most 30 tables, the largest.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dist_sparse.report.run import Run, Series
from dist_sparse.report.scores import ScoreChart, score_charts
from dist_sparse.report.summary import due_totals, numbers
from dist_sparse.report.words import duration, number_of, percent, size
from dist_sparse.sparsifiers.recorder import MaskChange

__all__ = ["MOST_TABLES", "BarChart", "Chart", "Line", "LineChart", "charts", "shown_tables"]

MOST_TABLES = 30
"""In one chart: the largest."""

_MOST_POINTS, _MOST_OTHERS = 400, 12
_HUGE = 1e300
"""Larger values are drawn as this, so that differences and sums are finite."""

_SMOOTHED = 30
"""A line with more points is drawn faintly, below a running mean."""

Point = tuple[float, float | None]
Totals = list[tuple[float, dict[str, float | None]]]
"""Of each due step, of all tables."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line. ``role``: ``main``, ``target``, ``other`` (of a compared run), ``raw`` (a main line that another
    smooths) or ``table``; ``steps``: it stays at a point's height until the next point."""

    name: str
    points: tuple[Point, ...]
    role: str = "main"
    steps: bool = False


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over steps, from 0 to ``end`` at least. ``share``: heights are shares, shown in percent."""

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    end: int
    share: bool = False


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Horizontal bars: name, its part in [0, 1] of the full width, and what is written beside it. ``whole``: the parts
    make up one bar, the last is what is left."""

    key: str
    title: str
    note: str
    bars: tuple[tuple[str, float, str], ...]
    whole: bool = False


Chart = LineChart | BarChart | ScoreChart


def charts(run: Run) -> list[Chart]:
    """All charts for which the run has something to show, in the order of the page."""
    found: list[Chart] = []
    totals: Totals = [(float(due.step), due_totals(due)) for due in run.due]
    if run.due:
        found.append(_sparsity(run, totals))
    found += _values(run)
    if (bars := _bytes(run)) is not None:
        found.append(bars)
    found += score_charts(run)
    if run.due:
        found += _changes(run, totals)
    if (time := _time(run)) is not None:
        found.append(time)
    return _named_apart([chart for chart in found if not isinstance(chart, LineChart) or chart.lines])


def shown_tables(run: Run) -> list[str]:
    """The tables with the most blocks, at most 30."""
    blocks = {table.name: table.blocks for due in run.due for table in due.record.tables}
    return sorted(blocks, key=lambda name: (-blocks[name], name))[:MOST_TABLES]


def _sparsity(run: Run, totals: Totals) -> LineChart:
    lines = [
        _held(run, "all blocks", "main", _known(totals, "sparsity")),
        _held(run, "target", "target", _known(totals, "target")),
    ]
    lines += [_held(run, name, "table", points) for name, points in _per_table(run, lambda t: t.sparsity).items()]
    return LineChart(
        key="sparsity",
        title="Sparsity",
        note=f"Share of blocks removed, from one due step to the next. {_thin_lines(run)}",
        lines=_drawn(lines),
        end=_end(run),
        share=True,
    )


def _values(run: Run) -> list[Chart]:
    """Loss, AUC and NE, then whatever else has more than one point; the compared runs' with them."""
    names = [name for name, series in run.values.items() if len(series) > 1]
    first = [name for name in ("loss", "auc", "ne") if name in names]
    titles = {"loss": "Loss", "auc": "AUC", "ne": "Normalized entropy (NE)"}
    notes = {
        "loss": "Of the steps that were noted.",
        "auc": "Area under the ROC curve of what was predicted since the last point; higher is better.",
        "ne": "Log loss over that of predicting the mean label; lower is better, 1 is no better than the mean.",
    }
    found: list[Chart] = []
    for name in [*first, *sorted(set(names) - set(first))[:_MOST_OTHERS]]:
        lines = _smoothed(name, run.values[name], "main", bool(run.compared))
        for other, of in run.compared.items():
            if len(of.values.get(name, ())) > 1:
                lines += [line for line in _smoothed(other, of.values[name], "other", True) if line.role != "raw"]
        note, lost = notes.get(name, "As noted by the training script."), _not_finite(run.values[name])
        if any(line.role == "raw" for line in lines):
            note += " Thin: as noted. Thick: a running mean."
        found.append(
            LineChart(
                key=_key("value", name),
                title=titles.get(name, name),
                note=note + lost,
                lines=_drawn(lines),
                end=_end(run),
            )
        )
    return found


def _bytes(run: Run) -> BarChart | None:
    """Of each table: bytes once the run has ended, blocks before."""
    bars: list[tuple[str, float, str]]
    if run.tables:
        tables = sorted(run.tables, key=lambda table: (-table.table_bytes, table.name))
        bars = [
            (t.name, share, f"{size(t.kept_bytes)} of {size(t.table_bytes)}, {percent(share)}")
            for t in tables
            for share in [t.kept_bytes / t.table_bytes if t.table_bytes else 0.0]
        ]
        title, note = "Bytes kept", "Of each registered table, largest first."
    elif run.due:
        rows = {row["name"]: row for row in numbers(run)["tables"]}
        bars = [
            (name, kept, f"{percent(kept)} of {rows[name]['blocks']:,} blocks")
            for name in sorted(rows, key=lambda name: (-rows[name]["blocks"], name))
            for kept in [1 - rows[name]["sparsity"]]
        ]
        title, note = "Blocks kept", "Of each table, most blocks first. Bytes are noted when a run ends."
    else:
        return None
    if len(bars) > MOST_TABLES:
        note += f" The first {MOST_TABLES} of {len(bars):,}; the table below has all."
    return BarChart(key="bytes", title=title, note=note, bars=tuple(bars[:MOST_TABLES]))


def _changes(run: Run, totals: Totals) -> list[Chart]:
    churn = [
        Line(name="flipped", points=_thinned(_known(totals, "churn"))),
        Line(name="regrown", role="other", points=_thinned(_known(totals, "regrown"))),
    ]
    churn += [
        Line(name=name, role="table", points=_thinned(points))
        for name, points in _per_table(run, lambda t: t.churn).items()
    ]
    dead = [_held(run, "all tables", "main", _known(totals, "dead_rows"))]
    dead += [_held(run, name, "table", points) for name, points in _per_table(run, lambda t: t.dead_rows).items()]
    cut = sorted({t.name for due in run.due for t in due.record.tables if t.dead_rows is None})
    unknown = f" Of {number_of(len(cut), 'table')} cut by columns, known in the end only." if cut else ""
    found: list[Chart] = []
    if any(line.points for line in churn):
        note = f"Share of blocks that a due step removed or brought back, and of those brought back. {_thin_lines(run)}"
        found.append(LineChart(key="churn", title="Churn", note=note, lines=_drawn(churn), end=_end(run), share=True))
    if any(line.points for line in dead):
        note = f"Rows with nothing left. {_thin_lines(run)}{unknown}"
        found.append(LineChart(key="dead_rows", title="Dead rows", note=note, lines=_drawn(dead), end=_end(run)))
    return found


def _time(run: Run) -> BarChart | None:
    spent = run.spent
    if not spent.total or not run.due:
        return None
    known = [("moving masks", spent.masks)]
    if spent.enforcement is not None:
        known.append(("keeping removed weights at zero", spent.enforcement))
    rest = max(spent.total - sum(seconds for _, seconds in known), 0.0)
    known.append(("everything else", rest))
    whole = sum(seconds for _, seconds in known)
    note = f"Of {duration(spent.total)} on rank 0 while the log was open."
    if spent.enforcement is None:
        note += " What enforcement took is not noted, and is in everything else."
    bars = tuple((name, seconds / whole, f"{duration(seconds)}, {percent(seconds / whole)}") for name, seconds in known)
    return BarChart(key="time", title="Where the time went", note=note, bars=bars, whole=True)


def _held(run: Run, name: str, role: str, points: list[Point]) -> Line:
    """What due steps set stays until the next one, and after the last one until the end."""
    end = float(_end(run))
    last = [(end, points[-1][1])] if points and points[-1][0] < end else []
    return Line(name=name, role=role, points=_thinned([*points, *last]), steps=True)


def _end(run: Run) -> int:
    return max([run.last_step or 0, *(due.step for due in run.due[-1:])])


def _known(totals: Totals, name: str) -> list[Point]:
    return [(step, value) for step, of in totals if (value := of[name]) is not None]


def _per_table(run: Run, value: Callable[[MaskChange], float | None]) -> dict[str, list[Point]]:
    """Of each table that is shown."""
    points: dict[str, list[Point]] = {name: [] for name in shown_tables(run)}
    for due in run.due:
        for change in due.record.tables:
            if change.name in points and (known := value(change)) is not None:
                points[change.name].append((float(due.step), known))
    return points


def _thin_lines(run: Run) -> str:
    tables = len({table.name for due in run.due for table in due.record.tables})
    return "Thin: each table." if tables <= MOST_TABLES else f"Thin: the {MOST_TABLES} largest of {tables:,} tables."


def _smoothed(name: str, series: Series, role: str, named: bool) -> list[Line]:
    points: list[Point] = [(float(s), None if y is None else min(max(y, -_HUGE), _HUGE)) for s, y in series]
    called = name if role == "other" or not named else "this run"
    if len(points) <= _SMOOTHED:
        return [Line(name=called, role=role, points=_thinned(points))]
    finite = [(x, y) for x, y in points if y is not None]
    half = max(2, len(finite) // 30)
    means: list[Point] = [
        (x, statistics.fmean(y for _, y in finite[max(0, i - half) : i + half + 1])) for i, (x, _) in enumerate(finite)
    ]
    return [
        Line(name="as noted", role="raw", points=_thinned(points)),
        Line(name=called, role=role, points=_thinned(means)),
    ]


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most 400 points: of each stretch the smallest and the largest value, so that peaks stay; the last point
    too."""
    if len(points) <= _MOST_POINTS:
        return tuple(points)
    stretch = -(-2 * len(points) // (_MOST_POINTS - 2))
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = [(y, i) for i, (_, y) in enumerate(points[start : start + stretch]) if y is not None]
        kept += [points[start + i] for i in sorted({min(part)[1], max(part)[1]})] if part else [points[start]]
    return (*kept, points[-1]) if kept[-1] != points[-1] else tuple(kept)


def _drawn(lines: Sequence[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if any(y is not None for _, y in line.points))


def _not_finite(series: Series) -> str:
    lost = [step for step, value in series if value is None]
    return f" Not finite at {len(lost):,} of these steps, first at step {lost[0]:,}." if lost else ""


def _named_apart(found: list[Chart]) -> list[Chart]:
    """Keys name files: two that differ in punctuation or case only would be one."""
    named: dict[str, Chart] = {}
    for chart in found:
        key, number = chart.key, 1
        while key.lower() in named:
            number += 1
            key = f"{chart.key}_{number}"
        named[key.lower()] = dataclasses.replace(chart, key=key)
    return list(named.values())


def _key(kind: str, name: str) -> str:
    """For file names and ids."""
    return f"{kind}_{re.sub(r'[^0-9A-Za-z_-]+', '_', name)[:40]}"
