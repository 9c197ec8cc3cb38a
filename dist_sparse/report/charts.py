"""Charts of a run as data: AUC over bytes; sparsity and series over steps; tables.

A chart is small however long the run: a line has at most 400 points, and of more than 30 tables a
chart shows the largest. Time is linear in the number of lines of the log. Charts
without anything to see are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from dist_sparse.records import FATES, MaskChange
from dist_sparse.report.run import RowTraffic, Run, Series, share_of, sparsity_of, target_of
from dist_sparse.report.summary import artifacts_of, baseline, fate_share, fates_text
from dist_sparse.text import count, number_of, percent, size

Point = tuple[float, float | None]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line, or the dots of one run, joined.

    Args:
        points: step and value, or bytes > 0 and AUC.
        role: ``main``, ``target``, ``other`` (of a compared run) or ``raw`` (under its means).
        number: of the compared run, which has one color in all charts.
        steps: constant from each point to the next.
        labels: of dots.
    """

    name: str
    points: tuple[Point, ...]
    role: str = "main"
    number: int = 0
    steps: bool = False
    labels: tuple[str, ...] = ()

    @property
    def places(self) -> list[float]:
        """Where its points are from left to right: steps, ascending, or bytes."""
        return [x for x, _ in self.points]

    @property
    def heights(self) -> list[float]:
        """The finite values."""
        return [y for _, y in finite(self.points)]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: ``share`` of the full width is filled, in front of the ``whole``; both in [0, 1]."""

    name: str
    share: float
    text: str
    whole: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Horizontal bars; lines over steps; or dots over bytes, on a logarithmic axis.

    Args:
        end: lines go from step 0 to this one, or further.
        share: heights are shares, shown in percent.
        mark: a step and a text, drawn as a vertical line.
        dots: whether lines are dots.
    """

    key: str
    title: str
    note: str
    bars: Sequence[Bar] = ()
    lines: Sequence[Line] = ()
    end: int = 0
    share: bool = False
    mark: tuple[float, str] | None = None
    dots: bool = False

    @property
    def places(self) -> list[float]:
        """Where the points of all lines are."""
        return [*chain.from_iterable(map(attrgetter("places"), self.lines))]

    @property
    def heights(self) -> list[float]:
        """The finite values of all lines."""
        return [*chain.from_iterable(map(attrgetter("heights"), self.lines))]

    @property
    def is_drawn(self) -> bool:
        """Whether there is more to see than zeros, or a dot that compares with nothing."""
        return bool(self.bars) or (len(self.heights) > 1 and any(self.heights))


# Tables in a chart, at most.
MOST_TABLES = 30

# Charts of rows by traffic: of the largest tables.
_MOST_TRAFFIC = 6

# Charts of series without a title of their own: a script may log hundreds.
_MOST_OTHERS = 12

_MOST_POINTS = 400

# A line with more points is drawn faintly under at most twice as many means.
_SMOOTHED = 30

T = TypeVar("T")
X = TypeVar("X", int, float)

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
    found = [_auc_over_bytes(run), _sparsity(run), _fates(run), *_series_charts(run)]
    found += [_bytes_kept(run), *_traffic_charts(run)]
    return [*filter(attrgetter("is_drawn"), found)]


def _auc_over_bytes(run: Run) -> Chart:
    """Return the artifacts of all runs, or their weights."""
    lines = []
    # In the order of the command line, as in the legend of every chart.
    for one in run.all_runs:
        # A logarithmic axis has no place for 0 bytes.
        found = sorted(filter(attrgetter("bytes"), artifacts_of(one)), key=lambda x: -x.bytes)
        dots = tuple(map(attrgetter("bytes", "auc"), found))
        lines.append(_line(one, run, points=dots, labels=tuple(map(attrgetter("name"), found))))
    note = (
        "Of artifacts, the bytes of their files; else of the kept weights of all tables. Up and to"
        " the left is better."
    )
    drawn = filter(attrgetter("points"), lines)
    return Chart(key="auc_bytes", title="AUC over bytes", note=note, lines=[*drawn], dots=True)


def _line(one: Run, run: Run, **options: Any) -> Line:
    """Return a line of one of several runs."""
    role = "main" if one is run else "other"
    return Line(name=one.name, role=role, number=one.number, **options)


def _fates(run: Run) -> Chart:
    """Return what became of the lookups of following tables before each update."""
    lines = []
    # Lookups that found a row have the color of the run.
    roles = dict.fromkeys(FATES, "other") | {"kept": "main"}
    for number, (fate, name) in enumerate(FATES.items()):
        points = thinned([(step, fate_share(update, fate)) for step, update in run.slots])
        lines.append(Line(name=name, role=roles[fate], number=number, points=points))
    return _line_chart(run, "fates", "Lookups by fate", fates_text(run), lines, share=True)


def _sparsity(run: Run) -> Chart:
    note = "Share of blocks pruned after each mask update."
    options = {}
    end = run.end
    undone = []
    if run.undone is not None:
        end, check = run.undone
        metric = f"{check.metric:.4f}"
        undone = [(end, check.sparsity)]
        note += f" The guard undid the last update: the metric was {metric}."
        options = {"mark": (float(end), f"undone at {metric}")}
    lines = [
        _line(run, run, steps=True, points=_held(run, sparsity_of, run.end, undone)),
        Line(name="target", role="target", steps=True, points=_held(run, target_of, end)),
    ]
    # A run that has trained nothing has no line over steps.
    for one in filter(attrgetter("trained"), run.compared.values()):
        lines.append(_line(one, run, steps=True, points=_held(one, sparsity_of, run.end)))
    return _line_chart(run, "sparsity", "Sparsity", note, lines, share=True, **options)


def _held(
    one: Run,
    value_of: Callable[[Sequence[MaskChange]], float | None],
    end: float,
    more: Sequence[Point] = (),
) -> tuple[Point, ...]:
    """Return a value after each mask update where it is known, and ``more``; and the last one again
    at ``end``."""
    values = [*more, *((step, value_of(record.tables)) for step, record in one.due)]
    # An update is logged one update late: the order of lines is not that of steps.
    values.sort(key=itemgetter(0))
    # A gap in the line would look like a value that is not finite.
    points = finite(values)
    return thinned([*points, *((end, value) for _, value in points[-1:])])


def _series_charts(run: Run) -> list[Chart]:
    """Return charts of loss, AUC, NE and other series with more than one point, with the same
    series of the compared runs."""
    # A line needs two points.
    names = {name for name, series in run.values.items() if len(series) > 1}
    found = []
    for name in filter(names.__contains__, _TITLES):
        found += [_series_chart(run, name, f"value_{name}"), _difference_chart(run, name)]
    # The table of last values has them all.
    for number, name in enumerate(sorted(names - {*_TITLES})[:_MOST_OTHERS], start=1):
        # The key becomes a file name and an id; the number keeps "a/b" and "a b" apart.
        key = f"value_{number}_{re.sub(r'[^0-9A-Za-z_-]+', '_', name)[:40]}"
        found.append(_series_chart(run, name, key))
    return found


def _series_chart(run: Run, name: str, key: str) -> Chart:
    note = _NOTES.get(name, "As logged by the training script.")
    lines = [_curve(one, run, one.values.get(name, ())) for one in run.all_runs]
    if len(run.values[name]) > _SMOOTHED:
        note += " Thin: as logged. Thick: means."
        lines.insert(0, Line(name="as logged", role="raw", points=thinned(run.values[name])))
    lost = sorted(set(run.values[name]) - set(finite(run.values[name])))
    if lost:
        note += f" Not finite at {len(lost):,} of these steps, first at step {lost[0][0]:,}."
    title = _TITLES.get(name, name)
    # Training examples are predicted before the model has learned from them, or with what it knows.
    if any(f"test_{name}" in one.values for one in run.all_runs):
        title += ", training"
    return _line_chart(run, key, title, note, lines)


def _difference_chart(run: Run, name: str) -> Chart:
    """Return a series less that of the baseline, at the steps that both logged: curves of runs that
    differ little lie on each other."""
    base, lines = baseline(run), []
    for one in run.all_runs:
        if one is not base:
            lines.append(_curve(one, run, _less(one, base, name)))
    note = f"Less that of {base.name} at the same step; means."
    title = f"{_TITLES[name]} against {base.name}"
    return _line_chart(run, f"value_{name}_less", title, note, lines)


def _less(one: Run, base: Run, name: str) -> Series:
    # Logged by one of the two alone, or not finite: there is no difference.
    known = dict(finite(base.values.get(name, ())))
    mine = finite(one.values.get(name, ()))
    return tuple((step, value - known[step]) for step, value in mine if step in known)


def _line_chart(
    run: Run, key: str, title: str, note: str, lines: Sequence[Line], **options: Any
) -> Chart:
    # A single point is no line; single values are in the table of last values.
    drawn = [line for line in lines if len(line.heights) > 1]
    return Chart(key=key, title=title, note=note, lines=drawn, end=run.end, **options)


def _curve(one: Run, run: Run, series: Series) -> Line:
    """Return a series as the line of a run; of more than 30 points as means of stretches."""
    known = finite(series)
    if len(known) <= _SMOOTHED:
        return _line(one, run, points=series)
    means = []
    for part in _stretches(known, 2 * _SMOOTHED):
        steps, values = zip(*part, strict=True)
        means.append((steps[len(steps) // 2], math.fsum(values) / len(values)))
    # In the middle of its stretch; the last one at the end of the line.
    means[-1] = known[-1][0], means[-1][1]
    return _line(one, run, points=tuple(means))


def finite(points: Iterable[tuple[X, float | None]]) -> list[tuple[X, float]]:
    """Return the points whose value is finite."""
    return [(x, value) for x, value in points if value is not None]


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return at most 400 points: the smallest and the largest value of each stretch, which keeps
    peaks, and the last point."""
    if len(points) <= _MOST_POINTS:
        return tuple(points)
    kept: dict[Point, None] = {}
    for part in _stretches(points, _MOST_POINTS // 2 - 1):
        known = finite(part)
        ends = part[:1]
        if known:
            ends = [min(known, key=itemgetter(1)), max(known, key=itemgetter(1))]
        kept |= dict.fromkeys(ends)
    return tuple(sorted(kept | {points[-1]: None}, key=itemgetter(0)))


def _stretches(points: Sequence[T], most: int) -> list[Sequence[T]]:
    """Return the points in at most ``most`` parts of equal length."""
    length = max(1, math.ceil(len(points) / most))
    return [points[start : start + length] for start in range(0, len(points), length)]


def _bytes_kept(run: Run) -> Chart:
    """Return bytes kept per table; known at the end of a run that prunes."""
    tables = [(table.name, table.kept_bytes, table.table_bytes) for table in run.tables]
    if run.bytes_kept is not None:
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
    return Chart(key="bytes", title="Bytes kept", note=note, bars=bars)


def _traffic_charts(run: Run) -> list[Chart]:
    """Return the rows by their lookups of the largest tables that are known."""
    sizes = {table.name: table.table_bytes for table in run.tables}
    found: list[Chart] = []
    # Large tables decide what serving takes.
    for name, of in sorted(run.traffic.items(), key=lambda each: (-sizes[each[0]], each[0])):
        # A table that keeps all rows has nothing to show.
        if any(of.removed):
            found.append(_traffic_chart(1 + len(found), name, of))
    return found[:_MOST_TRAFFIC]


def _traffic_chart(number: int, name: str, of: RowTraffic) -> Chart:
    rows = sum(of.kept) + sum(of.removed)
    note = (
        f"Rows by how often training looked them up; full: kept. {percent(sum(of.kept) / rows)} of"
        f" {count(rows)} rows are kept, which had {percent(of.share)} of the lookups."
    )
    bars = []
    for octave, (kept, removed) in enumerate(zip(of.kept, of.removed, strict=True)):
        rows_here = kept + removed
        if rows_here:
            share = kept / rows_here
            text = f"{count(kept)} of {number_of(rows_here, 'row')}, {percent(share)}"
            bars.append(Bar(name=_lookups(octave), share=share, text=text))
    title = f"Kept rows of {name} by traffic"
    return Chart(key=f"traffic_{number}", title=title, note=note, bars=bars)


def _lookups(octave: int) -> str:
    """Return ``no lookup``, ``1 lookup``, ``2 to 3 lookups``, ..."""
    least, most = (1 << octave) >> 1, (1 << octave) - 1
    few = {0: "no lookup", 1: "1 lookup"}
    return few.get(most, f"{count(least)} to {count(most)} lookups")
