"""Charts of a run as data: sparsity, series, mask updates and time over steps, and AUC over bytes.

A chart is small however long the run: a line has at most 400 points
(:mod:`dist_sparse.report.thinning`), and of more than 30 tables a chart shows all together.
Time is linear in the number of lines of the log. Charts without anything to see are left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from dist_sparse.records import MaskChange
from dist_sparse.report.comparison import artifacts_of, baseline
from dist_sparse.report.figures import Bar, BarChart, Chart, DotChart, Dots, Line, LineChart, Point
from dist_sparse.report.run import DueStep, Run, Series, share_of, total
from dist_sparse.report.summary import target_of
from dist_sparse.report.table_charts import MOST_TABLES, table_charts
from dist_sparse.report.thinning import smoothed, thinned
from dist_sparse.text import duration, number_of, percent

_MOST_OTHERS = 12
"""Charts of series without a title of their own: a script may log hundreds."""

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
    found: list[Chart] = [*_auc_over_bytes(run)]
    if run.due:
        found.append(_sparsity(run))
    found += [*_series_charts(run), *table_charts(run)]
    if run.due:
        found += [_churn(run), _dead_rows(run), *_time(run)]
    return [chart for chart in found if _shows_something(chart)]


def _shows_something(chart: Chart) -> bool:
    # Masks that never change, and tables without a dead row, have nothing but zeros to draw.
    if chart.key in ("churn", "dead_rows") and isinstance(chart, LineChart):
        return any(any(line.heights) for line in chart.lines)
    return not isinstance(chart, LineChart) or bool(chart.lines)


def _auc_over_bytes(run: Run) -> list[DotChart]:
    """Return the artifacts of all runs, or their weights; nothing of fewer than two."""
    runs = []
    # In the order of the command line, as in the legend of every chart.
    for one in run.all_runs:
        largest_first = sorted(artifacts_of(one), key=lambda each: -each.bytes)
        # A logarithmic axis has no place for 0 bytes.
        dots = tuple((each.name, each.bytes, each.auc) for each in largest_first if each.bytes)
        role = "main" if one is run else "other"
        if dots:
            runs.append(Dots(name=one.name, role=role, number=one.number, dots=dots))
    if sum(len(one.dots) for one in runs) < 2:
        return []
    base = baseline(run)
    note = (
        "Of artifacts, the bytes of their files; else of the kept weights of all tables. Up and to"
        " the left is better."
    )
    if base is not None and base is not run:
        note += f" Baseline: {base.name}."
    return [DotChart(key="auc_bytes", title="AUC over bytes", note=note, runs=tuple(runs))]


def _sparsity(run: Run) -> LineChart:
    name = run.name if run.compared else "all blocks"
    lines = [
        _held(run, name, "main", _points(run, _sparsity_of)),
        _held(run, "target", "target", _points(run, _target_of)),
    ]
    for other in run.compared.values():
        lines.append(_held(other, other.name, "other", _points(other, _sparsity_of)))
    lines += _table_lines(run, lambda change: change.sparsity)
    note = f"Share of blocks pruned after each mask update. {_thin_lines(run)}"
    return _line_chart(run, "sparsity", "Sparsity", note, lines, share=True)


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
    thin = " Thin: as logged. Thick: running mean." if len(lines) > 1 else ""
    for other in run.compared.values():
        series = other.values.get(name, ())
        if len(series) > 1:  # a single value is in the table of last values
            curve = smoothed(other.name, series)[-1]  # the running mean if there is one
            lines.append(dataclasses.replace(curve, role="other", number=other.number))
    note = _NOTES.get(name, "As logged by the training script.") + thin
    title = _TITLES.get(name, name)
    # Training examples are predicted before the model has learned from them, or with what it knows.
    if any(f"test_{name}" in one.values for one in run.all_runs):
        title += ", training"
    return _line_chart(run, key, title, note + _not_finite(run.values[name]), lines)


def _difference_chart(run: Run, name: str) -> list[LineChart]:
    """Return a series less that of the baseline, at the steps that both logged: curves of runs that
    differ little lie on each other."""
    base = baseline(run)
    if base is None or name not in base.values:
        return []
    known = dict(base.values[name])
    lines = []
    for one in run.all_runs:
        if one is not base:
            curve = smoothed(one.name, _less(one.values.get(name, ()), known))[-1]
            role = "main" if one is run else "other"
            lines.append(dataclasses.replace(curve, role=role, number=one.number))
    if not any(len(line.points) > 1 for line in lines):
        return []
    note = f"Less that of {base.name} at the same step; running mean."
    title = f"{_TITLES[name]} against {base.name}"
    return [_line_chart(run, f"value_{name}_less", title, note, lines)]


def _less(series: Series, known: Mapping[int, float | None]) -> Series:
    found = []
    for step, value in series:
        other = known.get(step)
        # Logged by one of the two alone, or not finite: there is no difference.
        if value is not None and other is not None:
            found.append((step, value - other))
    return tuple(found)


def _churn(run: Run) -> LineChart:
    lines = [Line(name="all tables", points=thinned(_points(run, _churn_of)))]
    for name, shares in _per_table(run, lambda change: change.churn).items():
        lines.append(Line(name=name, role="table", points=thinned(shares)))
    note = f"Share of blocks that a mask update flipped. {_thin_lines(run)}"
    return _line_chart(run, "churn", "Churn", note, lines, share=True)


def _dead_rows(run: Run) -> LineChart:
    lines = [_held(run, "all tables", "main", _points(run, _dead_rows_of))]
    lines += _table_lines(run, lambda change: change.dead_rows)
    note = f"Rows without a kept weight. {_thin_lines(run)}"
    # No rank sees a whole row of a table that is cut by columns, so a mask update can't count its
    # dead rows.
    cut = {change.name for change in run.changes if change.dead_rows is None}
    if cut:
        note += f" Known at the end only for {number_of(len(cut), 'table')} cut by columns."
    return _line_chart(run, "dead_rows", "Dead rows", note, lines)


def _time(run: Run) -> list[BarChart]:
    spent = run.spent
    if not spent.total:
        return []
    known = {"mask updates": spent.masks}
    note = f"Of {duration(spent.total)} on rank 0 while the log was open."
    if spent.enforcement is None:
        note += " The time of enforcement is unknown and part of everything else."
    else:
        known["keeping pruned weights at zero"] = spent.enforcement
    # Times are rounded, and each has its own clock.
    known["everything else"] = max(spent.total - sum(known.values()), 0.0)
    whole = sum(known.values())
    bars = []
    for name, seconds in known.items():
        text = f"{duration(seconds)}, {percent(seconds / whole)}"
        bars.append(Bar(name=name, share=seconds / whole, text=text))
    return [BarChart(key="time", title="Time", note=note, bars=tuple(bars))]


def _line_chart(
    run: Run, key: str, title: str, note: str, lines: list[Line], share: bool = False
) -> LineChart:
    drawn = tuple(line for line in lines if line.heights)
    return LineChart(key=key, title=title, note=note, lines=drawn, end=_end(run), share=share)


def _sparsity_of(due: DueStep) -> float | None:
    return _share(due.record.tables, "removed_blocks")


def _target_of(due: DueStep) -> float | None:
    return target_of([(change.target, change.blocks) for change in due.record.tables])


def _churn_of(due: DueStep) -> float | None:
    # Unknown where the shape of the blocks has changed.
    known = [change for change in due.record.tables if change.flipped_blocks is not None]
    return _share(known, "flipped_blocks")


def _share(changes: Sequence[MaskChange], part: str) -> float | None:
    return share_of(total(changes, part), total(changes, "blocks"))


def _dead_rows_of(due: DueStep) -> float | None:
    known = [change.dead_rows for change in due.record.tables if change.dead_rows is not None]
    return sum(known) if known else None


def _points(run: Run, value_of: Callable[[DueStep], float | None]) -> list[Point]:
    """Return a total over all tables, per mask update where it is known."""
    # A gap in the line would look like a value that is not finite.
    return [(due.step, value) for due in run.due if (value := value_of(due)) is not None]


def _per_table(run: Run, value_of: Callable[[MaskChange], float | None]) -> dict[str, list[Point]]:
    """Return the points of each table; none of more than 30, which could not be told apart."""
    found: dict[str, list[Point]] = {}
    if len(run.last_changes) > MOST_TABLES:
        return found
    for due in run.due:
        for change in due.record.tables:
            # Unknown where the block shape has changed, or where rows are cut by columns.
            if (value := value_of(change)) is not None:
                found.setdefault(change.name, []).append((due.step, value))
    return found


def _table_lines(run: Run, value_of: Callable[[MaskChange], float | None]) -> list[Line]:
    return [_held(run, name, "table", points) for name, points in _per_table(run, value_of).items()]


def _held(run: Run, name: str, role: str, points: list[Point]) -> Line:
    """Return a line that stays constant between mask updates and after the last one."""
    end = _end(run)
    # Masks stay as they are until the run ends.
    if points and points[-1][0] < end:
        points = [*points, (end, points[-1][1])]
    return Line(name=name, role=role, number=run.number, points=thinned(points), steps=True)


def _end(run: Run) -> int:
    # An update may be logged after the last step with values.
    return max([run.last_step or 0, *(due.step for due in run.due[-1:])])


def _thin_lines(run: Run) -> str:
    return "Thin: each table." if len(run.last_changes) <= MOST_TABLES else "Of all tables."


def _not_finite(series: Series) -> str:
    lost = [step for step, value in series if value is None]
    if not lost:
        return ""
    return f" Not finite at {len(lost):,} of these steps, first at step {lost[0]:,}."
