"""Charts of a run as data: AUC over bytes; sparsity, series and churn over steps; tables.

A chart is small however long the run: a line has at most 400 points, and of more than 30 tables a
chart shows all together, or the largest. Time is linear in the number of lines of the log. Charts
without anything to see are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from dist_sparse.records import FATES, MaskChange
from dist_sparse.report.comparison import artifacts_of, baseline, fates_text
from dist_sparse.report.figures import Bar, BarChart, Chart, DotChart, Dots, Line, LineChart, Point
from dist_sparse.report.run import RowTraffic, Run, Series, share_of, target_of, total
from dist_sparse.text import count, number_of, percent, size

MOST_TABLES = 30
"""Per chart."""

_MOST_TRAFFIC = 6
"""Charts of rows by traffic: of the largest tables."""

_MOST_OTHERS = 12
"""Charts of series without a title of their own: a script may log hundreds."""

_MOST_POINTS = 400

_SMOOTHED = 30
"""A line with more points is drawn faintly under its running mean."""

_TITLES = {"loss": "Loss", "auc": "AUC", "ne": "Normalized entropy (NE)"}
_NOTES = {
    "loss": "Of the logged steps.",
    "auc": "Area under the ROC curve of the predictions since the last point; higher is better.",
    "ne": (
        "Log loss over that of predicting the mean label; lower is better, 1 is no better than the"
        " mean."
    ),
}

ValueOf = Callable[[Sequence[MaskChange]], float | None]
"""A value of one table, or of all together, after a mask update; None where it is unknown."""


def charts(run: Run) -> list[Chart]:
    """Return the charts for which the run has data, in the order of the page."""
    # The answer first, what led to it below.
    found: list[Chart] = [_auc_over_bytes(run), *_sparsity(run), _fates(run), *_series_charts(run)]
    found += [_bytes_kept(run), *_traffic_charts(run), *_churn(run)]
    return [chart for chart in found if chart.is_drawn]


def _auc_over_bytes(run: Run) -> DotChart:
    """Return the artifacts of all runs, or their weights."""
    runs = []
    # In the order of the command line, as in the legend of every chart.
    for one in run.all_runs:
        largest_first = sorted(artifacts_of(one), key=lambda each: -each.bytes)
        # A logarithmic axis has no place for 0 bytes.
        dots = tuple((each.name, each.bytes, each.auc) for each in largest_first if each.bytes)
        runs.append(Dots(name=one.name, role=_role(one, run), number=one.number, dots=dots))
    note = (
        "Of artifacts, the bytes of their files; else of the kept weights of all tables. Up and to"
        " the left is better."
    )
    drawn = tuple(one for one in runs if one.dots)
    return DotChart(key="auc_bytes", title="AUC over bytes", note=note, runs=drawn)


def _sparsity(run: Run) -> list[LineChart]:
    if not run.due:
        return []
    note = "Share of blocks pruned after each mask update."
    chart = _over_updates(run, "sparsity", "Sparsity", note, _sparsity_of)
    main, *others = chart.lines
    target = _held(run, "target", "target", _points(run, target_of))
    undone = run.undone
    if undone is not None:
        metric = f"{undone.check.metric:.4f}"
        note = f"{chart.note} The guard undid the last update: the metric was {metric}."
        chart = replace(chart, note=note, mark=(float(undone.step), f"undone at {metric}"))
        # An update is logged one update late, so that the order of lines is not that of steps.
        points = [*_points(run, _sparsity_of), (undone.step, undone.check.sparsity)]
        main = _held(run, main.name, "main", sorted(points, key=_place))
    return [replace(chart, lines=(main, target, *others))]


def _fates(run: Run) -> LineChart:
    """Return what became of the lookups of following tables before each update."""
    lines = []
    for number, (fate, name) in enumerate(FATES.items()):
        points: list[Point] = []
        for one in run.slots:
            share = share_of(total(one.update.tables, fate), total(one.update.tables, "lookups"))
            points.append((one.step, share))
        role = "main" if fate == "kept" else "other"
        lines.append(Line(name=name, role=role, number=number, points=thinned(points)))
    return _line_chart(run, "fates", "Lookups by fate", fates_text(run), lines, share=True)


def _churn(run: Run) -> list[LineChart]:
    if not run.due:
        return []
    note = "Share of blocks that a mask update flipped."
    return [_over_updates(run, "churn", "Churn", note, _churn_of)]


def _over_updates(run: Run, key: str, title: str, note: str, value_of: ValueOf) -> LineChart:
    """Return a chart of shares after each mask update: all tables of each run, and each table."""
    lines = []
    for one in run.all_runs:
        name = one.name if run.compared else "all tables"
        lines.append(_held(run, name, _role(one, run), _points(one, value_of), one.number))
    names = [*run.last_changes]
    if len(names) > MOST_TABLES:
        # They could not be told apart.
        return _line_chart(run, key, title, f"{note} Of all tables.", lines, share=True)
    for name in names:
        lines.append(_held(run, name, "table", _points(run, value_of, name)))
    return _line_chart(run, key, title, f"{note} Thin: each table.", lines, share=True)


def _points(run: Run, value_of: ValueOf, name: str | None = None) -> list[Point]:
    """Return a value of the table ``name``, or of all, after each mask update where it is known."""
    points: list[Point] = []
    for due in run.due:
        changes = [change for change in due.record.tables if name in (None, change.name)]
        value = value_of(changes)
        # A gap in the line would look like a value that is not finite.
        if value is not None:
            points.append((due.step, value))
    return points


def _sparsity_of(changes: Sequence[MaskChange]) -> float | None:
    return share_of(total(changes, "removed_blocks"), total(changes, "blocks"))


def _churn_of(changes: Sequence[MaskChange]) -> float | None:
    # Unknown where the shape of the blocks has changed.
    known = [change for change in changes if change.flipped_blocks is not None]
    return share_of(total(known, "flipped_blocks"), total(known, "blocks"))


def _held(run: Run, name: str, role: str, points: Sequence[Point], number: int = 0) -> Line:
    """Return a line that stays constant between mask updates and after the last one."""
    # Masks stay as they are until the run ends, or the guard undoes the last update.
    end = run.end
    if run.undone is not None and role in ("target", "table"):
        end = run.undone.step
    last = [(end, value) for _, value in points[-1:]]
    return Line(name=name, role=role, number=number, points=thinned([*points, *last]), steps=True)


def _role(one: Run, run: Run) -> str:
    return "main" if one is run else "other"


def _series_charts(run: Run) -> list[LineChart]:
    """Return charts of loss, AUC, NE and other series with more than one point, with the same
    series of the compared runs."""
    # A line needs two points.
    names = [name for name, series in run.values.items() if len(series) > 1]
    found: list[LineChart] = []
    for name in _TITLES:
        if name in names:
            found += [_series_chart(run, name, f"value_{name}"), *_difference_chart(run, name)]
    # The table of last values has them all.
    others = sorted(set(names) - set(_TITLES))[:_MOST_OTHERS]
    for number, name in enumerate(others, start=1):
        # The key becomes a file name and an id; the number keeps "a/b" and "a b" apart.
        key = f"value_{number}_{re.sub(r'[^0-9A-Za-z_-]+', '_', name)[:40]}"
        found.append(_series_chart(run, name, key))
    return found


def _series_chart(run: Run, name: str, key: str) -> LineChart:
    lines = smoothed(run.name if run.compared else name, run.values[name])
    note = _NOTES.get(name, "As logged by the training script.")
    if len(lines) > 1:
        note += " Thin: as logged. Thick: running mean."
    lost = [step for step, value in run.values[name] if value is None]
    if lost:
        note += f" Not finite at {len(lost):,} of these steps, first at step {lost[0]:,}."
    for other in run.compared.values():
        lines.append(_curve(other, run, other.values.get(name, ())))
    title = _TITLES.get(name, name)
    # Training examples are predicted before the model has learned from them, or with what it knows.
    if any(f"test_{name}" in one.values for one in run.all_runs):
        title += ", training"
    return _line_chart(run, key, title, note, lines)


def _curve(one: Run, run: Run, series: Series) -> Line:
    """Return the series of one of several runs: the running mean if there is one."""
    curve = smoothed(one.name, series)[-1]
    return replace(curve, role=_role(one, run), number=one.number)


def _difference_chart(run: Run, name: str) -> list[LineChart]:
    """Return a series less that of the baseline, at the steps that both logged: curves of runs that
    differ little lie on each other."""
    base = baseline(run)
    if base is None:
        return []
    lines = []
    for one in run.all_runs:
        if one is not base:
            lines.append(_curve(one, run, _less(one, base, name)))
    note = f"Less that of {base.name} at the same step; running mean."
    title = f"{_TITLES[name]} against {base.name}"
    return [_line_chart(run, f"value_{name}_less", title, note, lines)]


def _less(one: Run, base: Run, name: str) -> Series:
    known = dict(base.values.get(name, ()))
    found = []
    for step, value in one.values.get(name, ()):
        other = known.get(step)
        # Logged by one of the two alone, or not finite: there is no difference.
        if value is not None and other is not None:
            found.append((step, value - other))
    return tuple(found)


def _line_chart(
    run: Run, key: str, title: str, note: str, lines: Sequence[Line], share: bool = False
) -> LineChart:
    # A single point is no line; single values are in the table of last values.
    drawn = tuple(line for line in lines if len(line.heights) > 1)
    return LineChart(key=key, title=title, note=note, lines=drawn, end=run.end, share=share)


def smoothed(name: str, series: Series) -> list[Line]:
    """Return a series as a line called ``name``; of more than 30 points as their running mean, over
    those as logged."""
    if len(series) <= _SMOOTHED:
        return [Line(name=name, points=thinned(series))]
    return [
        Line(name="as logged", role="raw", points=thinned(series)),
        Line(name=name, points=_means(series)),
    ]


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return at most 400 points: the smallest and the largest value of each stretch, which keeps
    peaks, and the last point."""
    if len(points) <= _MOST_POINTS:
        return tuple(points)
    # Two points of each stretch are kept, and the last one.
    stretch = math.ceil(2 * len(points) / (_MOST_POINTS - 2))
    kept: dict[Point, None] = {}
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        finite = [point for point in part if point[1] is not None]
        ends = finite or part[:1]
        kept |= dict.fromkeys((min(ends, key=_height), max(ends, key=_height)))
    return tuple(sorted(kept | {points[-1]: None}, key=_place))


def _place(point: Point) -> float:
    return point[0]


def _height(point: Point) -> float:
    return point[1] or 0.0


def _means(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return a running mean over a fifteenth of the finite points, at 400 of them at most.

    Only the means that are drawn are computed, each from its own window, which is linear in the
    points.
    """
    finite = [(x, y) for x, y in points if y is not None]
    # A fifteenth in all: half on each side.
    half = max(2, len(finite) // 30)
    every = max(1, math.ceil(len(finite) / (_MOST_POINTS - 1)))
    means: list[Point] = []
    # The last mean is always drawn: it is the value at the end.
    for place in sorted({*range(0, len(finite), every), len(finite) - 1}):
        # Differences of prefix sums would be linear too, but one value of 1e20 would cost all later
        # means their digits.
        window = finite[max(0, place - half) : place + half + 1]
        mean = math.fsum(y for _, y in window) / max(len(window), 1)
        means += [(x, mean) for x, _ in finite[place : place + 1]]
    return tuple(means)


def _bytes_kept(run: Run) -> BarChart:
    """Return bytes kept per table; known at the end of a run that prunes."""
    tables = [(table.name, table.kept_bytes, table.table_bytes) for table in run.tables]
    if run.finished or tables:
        # Tables without a sparsifier are kept whole.
        tables += [(name, taken, taken) for name, taken in run.other_tables.items()]
    # Bars are on the scale of the largest.
    tables.sort(key=lambda table: (-table[2], table[0]))
    bars = []
    for name, kept, whole in tables[:MOST_TABLES]:
        largest = max(tables[0][2], 1)
        text = f"{size(kept)} of {size(whole)}, {percent(share_of(kept, whole))}"
        bars.append(Bar(name=name, share=kept / largest, whole=whole / largest, text=text))
    note = "Per table, as long as its bytes; full: what is kept."
    if len(tables) > MOST_TABLES:
        note += f" The first {MOST_TABLES} of {count(len(tables))}; the table below has all."
    return BarChart(key="bytes", title="Bytes kept", note=note, bars=tuple(bars))


def _traffic_charts(run: Run) -> list[BarChart]:
    """Return the rows by their lookups of the largest tables that are known."""
    found: list[BarChart] = []
    # Large tables decide what serving takes.
    for table in sorted(run.tables, key=lambda table: (-table.table_bytes, table.name)):
        of = run.traffic.get(table.name)
        # A table without a lookup, or that keeps all rows, has nothing to show.
        if of is not None and of.share is not None and any(of.removed):
            found.append(_traffic_chart(f"traffic_{len(found) + 1}", table.name, of))
    return found[:_MOST_TRAFFIC]


def _traffic_chart(key: str, name: str, of: RowTraffic) -> BarChart:
    rows = sum(of.kept) + sum(of.removed)
    note = (
        f"Rows by how often training looked them up; full: kept. {percent(sum(of.kept) / rows)} of"
        f" {count(rows)} rows are kept, which had {percent(of.share)} of the lookups."
    )
    bars = []
    for octave, (kept, removed) in enumerate(zip(of.kept, of.removed, strict=True)):
        share = share_of(kept, kept + removed)
        if share is not None:
            text = f"{count(kept)} of {number_of(kept + removed, 'row')}, {percent(share)}"
            bars.append(Bar(name=_lookups(octave), share=share, text=text))
    return BarChart(key=key, title=f"Kept rows of {name} by traffic", note=note, bars=tuple(bars))


def _lookups(octave: int) -> str:
    """Return ``no lookup``, ``1 lookup``, ``2 to 3 lookups``, ..."""
    least, most = (1 << octave) >> 1, (1 << octave) - 1
    few = {0: "no lookup", 1: "1 lookup"}
    return few.get(most, f"{count(least)} to {count(most)} lookups")
