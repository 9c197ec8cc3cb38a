"""Charts of a run as data: AUC over bytes; sparsity and series over steps; tables.

:mod:`~dist_sparse.extras.report.drawing` draws them. If there are more than 30 tables, a chart
shows the largest. Time is linear in the lines of the log. Charts with nothing to see are left out.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

from dist_sparse.extras.report.run import RowTraffic, Run, Series, fraction, sparsity_of, target_of
from dist_sparse.extras.report.summary import (
    TOLERANCE,
    artifacts_of,
    base_aucs,
    baseline,
    described,
    seed_spread,
)
from dist_sparse.extras.report.words import short
from dist_sparse.records import MaskChange
from dist_sparse.text import count, number_of, percent, size

Point = tuple[float, float | None]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line, or the joined dots of one run.

    Args:
        points: step and value, or bytes > 0 and AUC. A value of None is a gap.
        role: ``main``, ``target``, ``other`` (a compared run) or ``raw`` (logged values, drawn
            behind their means).
        number: the number of the compared run, which has one color in all charts.
        steps: constant from each point to the next.
        labels: the labels of dots.
    """

    name: str
    points: tuple[Point, ...]
    role: str = "main"
    number: int = 0
    steps: bool = False
    labels: tuple[str, ...] = ()

    @property
    def heights(self) -> list[float]:
        """y of each point that has a finite value."""
        return [y for _, y in finite(self.points)]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: the filled ``share`` in front of the ``whole``, both fractions of the full width."""

    name: str
    share: float
    text: str
    whole: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Horizontal bars; lines over steps; or dots over bytes, on a logarithmic axis.

    Args:
        share: heights are shares, shown in percent.
        mark: a step and a text, drawn as a vertical line.
        band: two heights and a text, drawn as a shade between them.
        dots: whether lines are dots.
        of: the run whose tables it shows; None in charts of all runs.
    """

    key: str
    title: str
    note: str
    bars: Sequence[Bar] = ()
    lines: Sequence[Line] = ()
    share: bool = False
    mark: tuple[float, str] | None = None
    band: tuple[float, float, str] | None = None
    dots: bool = False
    of: str | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether it shows more than zeros, or than a single dot."""
        heights = [y for line in self.lines for y in line.heights]
        return bool(self.bars) or (len(heights) > 1 and any(heights))


# Limits. Each bounds the size of the page, whatever the run has logged.

# Tables in a chart.
MOST_TABLES = 30

# Charts of rows by traffic: one for each of the largest tables.
_MOST_TRAFFIC = 6

# Charts of series other than loss, AUC and NE: a script may log hundreds.
_MOST_OTHERS = 12

# A line with more points is drawn faintly behind at most twice as many means.
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
    # The result first, the course of the training below it, the tables last.
    all_charts = [_auc_over_bytes(run), _sparsity(run), *_series_charts(run)]
    for one in described(run):
        # Keys are names of files: those of the first run are the same without a recommendation.
        prefix = "" if one is run else "served_"
        suffix = f", {one.name}" if run.compared else ""
        for chart in (_bytes_kept(one), *_traffic_charts(one)):
            title = chart.title + suffix
            all_charts.append(replace(chart, key=prefix + chart.key, title=title, of=one.name))
    return [chart for chart in all_charts if chart.is_drawn]


def _auc_over_bytes(run: Run) -> Chart:
    """Return one dot for each artifact of each run, or for the weights of a run without any."""
    lines = []
    # Runs keep the order of the command line, as in the legend of every chart.
    for one in run.all_runs:
        dots, labels = list[Point](), list[str]()
        for artifact in sorted(artifacts_of(one, run), key=lambda artifact: -artifact.bytes):
            # A logarithmic axis has no place for 0 bytes.
            if artifact.bytes:
                dots.append((artifact.bytes, artifact.auc))
                labels.append(artifact.name)
        if dots:
            lines.append(_line(one, run, points=tuple(dots), labels=tuple(labels)))
    note = (
        "Of artifacts, the bytes of their files; else of the kept weights of all tables. Up and to"
        " the left is better."
    )
    facts: Any = {"key": "auc_bytes", "title": "AUC over bytes", "lines": lines, "dots": True}
    known = base_aucs(run)
    if not known:
        return Chart(note=note, **facts)
    reach, seeds = seed_spread(run)
    text = f" Shaded: as near to {baseline(run).name} as two seeds of one method may be."
    if seeds < 2:
        reach = TOLERANCE
        text = (
            f" Shaded: within {TOLERANCE} of {baseline(run).name}, which counts as good. With one"
            " seed each, larger differences may be chance too."
        )
    mean = sum(known) / len(known)
    band = mean - reach, mean + reach, f"{baseline(run).name} ±{reach:.4f}"
    return Chart(note=note + text, band=band, **facts)


def _line(one: Run, run: Run, **options: Any) -> Line:
    """Return a line of ``one``, which is ``run`` itself or one of the runs compared with it."""
    # Seeds of the first run have its color.
    role = "main" if one.method == run.method else "other"
    return Line(name=one.name, role=role, number=one.number, **options)


def _sparsity(run: Run) -> Chart:
    """Return the removed share of the blocks of all tables, and its target."""
    note = "Share of blocks removed after each mask update."
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
        _line(run, run, steps=True, points=_steps_of(run, sparsity_of, run.end, undone)),
        Line(name="target", role="target", steps=True, points=_steps_of(run, target_of, end)),
    ]
    for one in run.compared.values():
        # A run of one step has no line over steps.
        if one.trained:
            lines.append(_line(one, run, steps=True, points=_steps_of(one, sparsity_of, run.end)))
    return _line_chart("sparsity", "Sparsity", note, lines, share=True, **options)


def _steps_of(
    one: Run,
    value_of: Callable[[Sequence[MaskChange]], float | None],
    end: float,
    more: Sequence[Point] = (),
) -> tuple[Point, ...]:
    """Return the points of a step function: a value after each mask update, and ``more``. The last
    value is repeated at ``end``."""
    values = [*more]
    for step, record in one.due:
        values.append((step, value_of(record.tables)))
    # An update is logged at the next one: its step may be before or after that of `more`.
    values.sort(key=itemgetter(0))
    # Unknown values are left out: a gap in the line means a value that is not finite.
    points = finite(values)
    if points:
        # A compared run may be longer than the first one.
        points.append((max(end, points[-1][0]), points[-1][1]))
    return tuple(points)


def _series_charts(run: Run) -> list[Chart]:
    """Return charts of loss, AUC, NE and other series with more than one point, with the same
    series of the compared runs."""
    # A line needs two points.
    names = {name for name, series in run.values.items() if len(series) > 1}
    series_charts = []
    for name in _TITLES:
        if name in names:
            series_charts.append(_series_chart(run, name, f"value_{name}"))
            series_charts.append(_difference_chart(run, name))
    # Series beyond the limit are only in the table of last values.
    for number, name in enumerate(sorted(names - {*_TITLES})[:_MOST_OTHERS], start=1):
        # The key becomes a file name and an id; the number keeps "a/b" and "a b" apart.
        key = f"value_{number}_{re.sub(r'[^0-9A-Za-z_-]+', '_', name)[:40]}"
        series_charts.append(_series_chart(run, name, key))
    return series_charts


def _series_chart(run: Run, name: str, key: str) -> Chart:
    note = _NOTES.get(name, "As logged by the training script.")
    lines = [_curve(one, run, one.values.get(name, ())) for one in run.all_runs]
    if len(run.values[name]) > _SMOOTHED:
        note += " Thin: as logged. Thick: means."
        lines.insert(0, Line(name="as logged", role="raw", points=run.values[name]))
    lost = sorted({*run.values[name]} - {*finite(run.values[name])})
    if lost:
        note += f" Not finite at {len(lost):,} of these steps, first at step {lost[0][0]:,}."
    title = _TITLES.get(name, name)
    # AUC on training examples must not be read as the test AUC, which has a chart of its own.
    if any(f"test_{name}" in one.values for one in run.all_runs):
        title += ", training"
    return _line_chart(key, title, note, lines)


def _difference_chart(run: Run, name: str) -> Chart:
    """Return a series minus the baseline's, at the steps that both logged. The curves of similar
    runs cover each other; their differences do not."""
    base = baseline(run)
    # Steps of the baseline with a finite value.
    known = dict(finite(base.values.get(name, ())))
    lines = []
    for one in run.all_runs:
        if one is not base:
            values = finite(one.values.get(name, ()))
            delta = tuple((step, value - known[step]) for step, value in values if step in known)
            lines.append(_curve(one, run, delta))
    note = f"Minus the value of {base.name} at the same step; means."
    title = f"{_TITLES[name]} against {base.name}"
    return _line_chart(f"value_{name}_less", title, note, lines)


def _line_chart(key: str, title: str, note: str, lines: Sequence[Line], **options: Any) -> Chart:
    # A line needs two points; single values are in the table of last values.
    lines = [line for line in lines if len(line.heights) > 1]
    return Chart(key=key, title=title, note=note, lines=lines, **options)


def _curve(one: Run, run: Run, series: Series) -> Line:
    """Return a series as the line of a run; with more than 30 points, as means over intervals."""
    valid = finite(series)
    if len(valid) <= _SMOOTHED:
        return _line(one, run, points=series)
    means = []
    for interval in _intervals(valid, 2 * _SMOOTHED):
        steps, values = zip(*interval, strict=True)
        means.append((steps[len(steps) // 2], math.fsum(values) / len(values)))
    # A mean is drawn in the middle of its interval, the last one at the last step.
    means[-1] = valid[-1][0], means[-1][1]
    return _line(one, run, points=tuple(means))


def finite(points: Iterable[tuple[X, float | None]]) -> list[tuple[X, float]]:
    """Return the points whose value is finite."""
    return [(x, value) for x, value in points if value is not None]


def _intervals(points: Sequence[T], most: int) -> list[Sequence[T]]:
    """Cut the points into at most ``most`` intervals of equal length."""
    length = max(1, math.ceil(len(points) / most))
    return [points[start : start + length] for start in range(0, len(points), length)]


def _bytes_kept(run: Run) -> Chart:
    """Return the bytes kept of each table. They are logged at the end of a run that prunes."""
    tables = [(table.name, table.kept_bytes, table.table_bytes) for table in run.tables]
    if run.bytes_kept is not None:
        # Tables without a sparsifier are kept whole.
        tables += [(name, taken, taken) for name, taken in run.other_tables.items()]
    # The largest first: all bars are drawn to its scale.
    tables.sort(key=lambda table: (-table[2], table[0]))
    bars = []
    for name, kept, whole in tables[:MOST_TABLES]:
        largest = max(tables[0][2], 1)
        text = f"{percent(fraction(kept, whole))} of {size(whole)}"
        bars.append(Bar(name=name, share=kept / largest, whole=whole / largest, text=text))
    note = "Per table, as long as its bytes; full: what is kept."
    if len(tables) > MOST_TABLES:
        note += f" The first {MOST_TABLES} of {count(len(tables))}."
    return Chart(key="bytes", title="Bytes kept", note=note, bars=bars)


def _traffic_charts(run: Run) -> list[Chart]:
    """Return one chart for each of the largest tables whose lookups were counted."""
    sizes = {table.name: table.table_bytes for table in run.tables}
    traffic_charts: list[Chart] = []
    for name in sorted(run.traffic, key=lambda name: (-sizes[name], name)):
        # A table that keeps all rows has nothing to show.
        if any(run.traffic[name].removed):
            number = 1 + len(traffic_charts)
            traffic_charts.append(_traffic_chart(number, name, run.traffic[name]))
    return traffic_charts[:_MOST_TRAFFIC]


def _traffic_chart(number: int, name: str, traffic: RowTraffic) -> Chart:
    kept_rows = sum(traffic.kept)
    rows = kept_rows + sum(traffic.removed)
    note = (
        f"Rows by how often training looked them up; full: kept. {percent(kept_rows / rows)} of"
        f" {count(rows)} rows are kept, which had {percent(traffic.share)} of the lookups."
    )
    bars = []
    for octave, (kept, removed) in enumerate(zip(traffic.kept, traffic.removed, strict=True)):
        rows_here = kept + removed
        if rows_here:
            share = kept / rows_here
            text = f"{percent(share)} of {number_of(rows_here, 'row')}"
            bars.append(Bar(name=_lookups(octave), share=share, text=text))
    title = f"Kept rows of {name} by traffic"
    return Chart(key=f"traffic_{number}", title=title, note=note, bars=bars)


def _lookups(octave: int) -> str:
    """Return ``no lookup``, ``1 lookup``, ``2 to 3 lookups``, ...: octave n holds the counts of n
    bits."""
    least, most = (1 << octave) >> 1, (1 << octave) - 1
    few = {0: "no lookup", 1: "1 lookup"}
    return few.get(most, f"{short(least)} to {short(most)} lookups")
