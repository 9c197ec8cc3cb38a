"""Charts of a run as data: AUC over bytes; sparsity and series over steps; tables.

A chart is small however long the run: a line has at most 400 points, and of more than 30 tables a
chart shows the largest. Time is linear in the number of lines of the log. Charts
without anything to see are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

from dist_sparse.records import FATES, MaskChange
from dist_sparse.report.run import RowTraffic, Run, Series, share_of, target_of, total
from dist_sparse.report.summary import artifacts_of, baseline, fates_text
from dist_sparse.text import count, number_of, percent, size

# ------------------------------------------------------------------------------
# Charts as data: names, points, bars.
#
# :mod:`dist_sparse.report.charts` makes them of a run; :mod:`dist_sparse.report.page` turns them
# into shapes, without the run.

Point = tuple[float, float | None]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line. ``role``: ``main``, ``target``, ``other`` (of a compared run) or ``raw`` (under its
    means); ``number``: of the compared run, which has one color in all charts;
    ``steps``: constant from each point to the next."""

    name: str
    points: tuple[Point, ...]
    role: str = "main"
    number: int = 0
    steps: bool = False

    @property
    def steps_at(self) -> list[float]:
        """The steps of its points, ascending."""
        return [x for x, _ in self.points]

    @property
    def heights(self) -> list[float]:
        """The finite values."""
        return [y for _, y in self.points if y is not None]


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over steps 0 to ``end``, or further. ``share``: heights are shares, shown in percent;
    ``mark``: a step and a text, drawn as a vertical line."""

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    end: int
    share: bool = False
    mark: tuple[float, str] | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether there is more than zeros to see."""
        return any(any(line.heights) for line in self.lines)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: ``share`` of the full width is filled, in front of the ``whole``; both in [0, 1]."""

    name: str
    share: float
    text: str
    whole: float = 1.0


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Horizontal bars."""

    key: str
    title: str
    note: str
    bars: tuple[Bar, ...]

    @property
    def is_drawn(self) -> bool:
        """Whether there is a bar."""
        return bool(self.bars)


@dataclass(frozen=True, kw_only=True)
class Dots:
    """Dots of one run, joined: label, bytes > 0, height. ``role``, ``number``: as of a
    :class:`Line`."""

    name: str
    role: str
    number: int = 0
    dots: tuple[tuple[str, int, float], ...]


@dataclass(frozen=True, kw_only=True)
class DotChart:
    """AUC over bytes, on a logarithmic axis."""

    key: str
    title: str
    note: str
    runs: tuple[Dots, ...]

    @property
    def dots(self) -> tuple[tuple[str, int, float], ...]:
        """The dots of all runs."""
        return sum((run.dots for run in self.runs), ())

    @property
    def is_drawn(self) -> bool:
        """Whether there are dots to compare."""
        return len(self.dots) > 1


Chart = LineChart | BarChart | DotChart


MOST_TABLES = 30
"""Per chart."""

_MOST_TRAFFIC = 6
"""Charts of rows by traffic: of the largest tables."""

_MOST_OTHERS = 12
"""Charts of series without a title of their own: a script may log hundreds."""

_MOST_POINTS = 400

_SMOOTHED = 30
"""A line with more points is drawn faintly under at most twice as many means."""

T = TypeVar("T")

_TITLES = {"loss": "Loss", "auc": "AUC", "ne": "Normalized entropy (NE)"}
_NOTES = {
    "loss": "Of the logged steps.",
    "auc": "Area under the ROC curve of the predictions since the last point; higher is better.",
    "ne": (
        "Log loss over that of predicting the mean label; lower is better, 1 is no better than the"
        " mean."
    ),
}


def charts(run: Run) -> list[Chart]:
    """Return the charts for which the run has data, in the order of the page."""
    # The answer first, what led to it below.
    found: list[Chart] = [_auc_over_bytes(run), _sparsity(run), _fates(run), *_series_charts(run)]
    found += [_bytes_kept(run), *_traffic_charts(run)]
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


def _sparsity(run: Run) -> LineChart:
    note, mark, end, undone = "Share of blocks pruned after each mask update.", None, run.end, []
    if run.undone is not None:
        step, check = run.undone.step, run.undone.check
        metric = f"{check.metric:.4f}"
        note += f" The guard undid the last update: the metric was {metric}."
        mark, end, undone = (float(step), f"undone at {metric}"), step, [(step, check.sparsity)]
    lines = []
    # A run that has trained nothing has no line over steps.
    for one in [run, *filter(attrgetter("trained"), run.compared.values())]:
        name = one.name if run.compared else "all tables"
        more = undone if one is run else []
        lines.append(_held(one, name, _role(one, run), _sparsity_of, run.end, more))
    lines.insert(1, _held(run, "target", "target", target_of, end))
    return _line_chart(run, "sparsity", "Sparsity", note, lines, share=True, mark=mark)


def _sparsity_of(changes: Sequence[MaskChange]) -> float | None:
    return share_of(total(changes, "removed_blocks"), total(changes, "blocks"))


def _held(
    one: Run,
    name: str,
    role: str,
    value_of: Callable[[Sequence[MaskChange]], float | None],
    end: float,
    more: Sequence[Point] = (),
) -> Line:
    """Return a value after each mask update where it is known, and ``more``; constant between
    updates and after the last one up to ``end``."""
    values = [*more, *((due.step, value_of(due.record.tables)) for due in one.due)]
    # An update is logged one update late: the order of lines is not that of steps.
    values.sort(key=_place)
    # A gap in the line would look like a value that is not finite.
    points = [point for point in values if point[1] is not None]
    last = [(end, value) for _, value in points[-1:]]
    kept = thinned([*points, *last])
    return Line(name=name, role=role, number=one.number, points=kept, steps=True)


def _role(one: Run, run: Run) -> str:
    return "main" if one is run else "other"


def _series_charts(run: Run) -> list[LineChart]:
    """Return charts of loss, AUC, NE and other series with more than one point, with the same
    series of the compared runs."""
    # A line needs two points.
    names = [name for name, series in run.values.items() if len(series) > 1]
    found: list[LineChart] = []
    for name in filter(names.__contains__, _TITLES):
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
        note += " Thin: as logged. Thick: means."
    lost = [step for step, value in run.values[name] if value is None]
    if lost:
        note += f" Not finite at {len(lost):,} of these steps, first at step {lost[0]:,}."
    lines += [_curve(other, run, other.values.get(name, ())) for other in run.compared.values()]
    title = _TITLES.get(name, name)
    # Training examples are predicted before the model has learned from them, or with what it knows.
    if any(f"test_{name}" in one.values for one in run.all_runs):
        title += ", training"
    return _line_chart(run, key, title, note, lines)


def _curve(one: Run, run: Run, series: Series) -> Line:
    """Return the series of one of several runs: its means if there are some."""
    curve = smoothed(one.name, series)[-1]
    return replace(curve, role=_role(one, run), number=one.number)


def _difference_chart(run: Run, name: str) -> list[LineChart]:
    """Return a series less that of the baseline, at the steps that both logged: curves of runs that
    differ little lie on each other."""
    base = baseline(run)
    if base is None:
        return []
    lines = [_curve(one, run, _less(one, base, name)) for one in run.all_runs if one is not base]
    note = f"Less that of {base.name} at the same step; means."
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
    run: Run, key: str, title: str, note: str, lines: Sequence[Line], **options: Any
) -> LineChart:
    # A single point is no line; single values are in the table of last values.
    drawn = tuple(line for line in lines if len(line.heights) > 1)
    return LineChart(key=key, title=title, note=note, lines=drawn, end=run.end, **options)


def smoothed(name: str, series: Series) -> list[Line]:
    """Return a series as a line called ``name``; of more than 30 points as means of stretches, over
    the points as logged."""
    if len(series) <= _SMOOTHED:
        return [Line(name=name, points=series)]
    finite = [(step, value) for step, value in series if value is not None]
    means: list[Point] = []
    for part in _stretches(finite, 2 * _SMOOTHED):
        values = [value for _, value in part]
        # In the middle of its stretch; the last one at the end of the line.
        place = part[len(part) // 2] if part[-1] is not finite[-1] else part[-1]
        means.append((place[0], math.fsum(values) / len(values)))
    raw = Line(name="as logged", role="raw", points=thinned(series))
    return [raw, Line(name=name, points=tuple(means))]


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return at most 400 points: the smallest and the largest value of each stretch, which keeps
    peaks, and the last point."""
    if len(points) <= _MOST_POINTS:
        return tuple(points)
    kept: dict[Point, None] = {}
    for part in _stretches(points, _MOST_POINTS // 2 - 1):
        ends = [point for point in part if point[1] is not None] or part[:1]
        kept |= dict.fromkeys((min(ends, key=_height), max(ends, key=_height)))
    return tuple(sorted(kept | {points[-1]: None}, key=_place))


def _stretches(points: Sequence[T], most: int) -> list[Sequence[T]]:
    """Return the points in at most ``most`` parts of equal length."""
    length = max(1, math.ceil(len(points) / most))
    return [points[start : start + length] for start in range(0, len(points), length)]


def _place(point: Point) -> float:
    return point[0]


def _height(point: Point) -> float:
    return point[1] or 0.0


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
