"""Charts of a run as data: sparsity, series, mask updates and time over steps, and AUC over bytes.

A chart is small however long the run: a line has at most 400 points (:mod:`dist_sparse.report.thinning`), and of more
than 30 tables a chart shows the distribution. Time is linear in the number of lines of the log. Charts without
anything to see are left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from dist_sparse.records import MaskChange
from dist_sparse.report.comparison import baseline, named, points
from dist_sparse.report.figures import Bar, BarChart, Chart, DotChart, Dots, Line, LineChart, Point
from dist_sparse.report.run import Run, Series
from dist_sparse.report.summary import due_totals
from dist_sparse.report.table_charts import MOST_TABLES, table_charts
from dist_sparse.report.thinning import smoothed, thinned
from dist_sparse.text import duration, number_of, percent

__all__ = ["charts"]

_MOST_OTHERS = 12
"""Series of other names."""

_PERCENTILES = {"10% of tables are below": 0.1, "median table": 0.5, "10% of tables are above": 0.9}

Totals = list[tuple[float, dict[str, float | None]]]
"""Step and totals of all tables, per mask update."""


def charts(run: Run) -> list[Chart]:
    """Return the charts for which the run has data, in the order of the page."""
    found: list[Chart] = []
    totals = _totals(run)
    if (dots := _auc_over_bytes(run)) is not None:
        found.append(dots)
    if run.due:
        found.append(_sparsity(run, totals))
    found += _values(run)
    found += table_charts(run)
    if run.due:
        found += _changes(run, totals)
    if (time := _time(run)) is not None:
        found.append(time)
    return _named_apart([chart for chart in found if not isinstance(chart, LineChart) or chart.lines])


def _numbers(run: Run) -> dict[str, int]:
    """Number the compared runs, once for the page.

    A chart that leaves a run out, or sorts them, keeps the colors of the others.
    """
    return {name: number for number, name in enumerate(run.compared)}


def _totals(run: Run) -> Totals:
    return [(float(due.step), due_totals(due)) for due in run.due]


def _auc_over_bytes(run: Run) -> DotChart | None:
    """Return the artifacts of all runs, or their weights; None of fewer than two."""
    found = points(run)
    if len(found) < 2:
        return None
    numbers = _numbers(run)
    runs = [
        Dots(
            name=name,
            role="main" if name == run.name else "other",
            number=numbers.get(name, 0),
            dots=tuple((point.name, point.bytes, point.auc) for point in of),
        )
        for name, of in named(found).items()
    ]
    base = baseline(run)
    note = (
        "Of artifacts, the bytes of their files; else of the kept weights of all tables. Up and to the left is better."
    )
    if base is not None and base is not run:
        note += f" Baseline: {base.name}."
    runs.sort(key=lambda dots: (dots.role != "main", dots.number))
    return DotChart(key="auc_bytes", title="AUC over bytes", note=note, runs=tuple(runs))


def _sparsity(run: Run, totals: Totals) -> LineChart:
    lines = [
        _held(run, run.name if run.compared else "all blocks", "main", _known(totals, "sparsity")),
        _held(run, "target", "target", _known(totals, "target")),
    ]
    for name, number in _numbers(run).items():
        other = run.compared[name]
        if other.due:
            line = _held(other, name, "other", _known(_totals(other), "sparsity"))
            lines.append(dataclasses.replace(line, number=number))
    lines += [_held(run, name, "table", points) for name, points in _per_table(run, lambda t: t.sparsity).items()]
    return LineChart(
        key="sparsity",
        title="Sparsity",
        note=f"Share of blocks pruned after each mask update. {_thin_lines(run)}",
        lines=_drawn(lines),
        end=_end(run),
        share=True,
    )


def _values(run: Run) -> list[Chart]:
    """Return charts of loss, AUC, NE and other series with more than one point, with those of the compared runs."""
    names = [name for name, series in run.values.items() if len(series) > 1]
    first = [name for name in ("loss", "auc", "ne") if name in names]
    titles = {"loss": "Loss", "auc": "AUC", "ne": "Normalized entropy (NE)"}
    notes = {
        "loss": "Of the logged steps.",
        "auc": "Area under the ROC curve of the predictions since the last point; higher is better.",
        "ne": "Log loss over that of predicting the mean label; lower is better, 1 is no better than the mean.",
    }
    found: list[Chart] = []
    for name in [*first, *sorted(set(names) - set(first))[:_MOST_OTHERS]]:
        lines = smoothed(run.name if run.compared else name, run.values[name], "main")
        for other, number in _numbers(run).items():
            series = run.compared[other].values.get(name, ())
            if len(series) > 1:
                *_, curve = smoothed(other, series, "other")  # the running mean if there is one
                lines.append(dataclasses.replace(curve, number=number))
        note, lost = notes.get(name, "As logged by the training script."), _not_finite(run.values[name])
        if any(line.role == "raw" for line in lines):
            note += " Thin: as logged. Thick: running mean."
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


def _changes(run: Run, totals: Totals) -> list[Chart]:
    churn = [
        Line(name="flipped", points=thinned(_known(totals, "churn"))),
        Line(name="regrown", role="other", points=thinned(_known(totals, "regrown"))),
    ]
    churn += [
        Line(name=name, role="table", points=thinned(points))
        for name, points in _per_table(run, lambda t: t.churn).items()
    ]
    dead = [_held(run, "all tables", "main", _known(totals, "dead_rows"))]
    dead += [_held(run, name, "table", points) for name, points in _per_table(run, lambda t: t.dead_rows).items()]
    cut = sorted({t.name for due in run.due for t in due.record.tables if t.dead_rows is None})
    unknown = f" Known at the end only for {number_of(len(cut), 'table')} cut by columns." if cut else ""
    found: list[Chart] = []
    if _seen(churn):
        note = f"Share of blocks that a mask update flipped, and of those that it regrew. {_thin_lines(run)}"
        found.append(LineChart(key="churn", title="Churn", note=note, lines=_drawn(churn), end=_end(run), share=True))
    if _seen(dead):
        note = f"Rows without a kept weight. {_thin_lines(run)}{unknown}"
        found.append(LineChart(key="dead_rows", title="Dead rows", note=note, lines=_drawn(dead), end=_end(run)))
    return found


def _time(run: Run) -> BarChart | None:
    spent = run.spent
    if not spent.total or not run.due:
        return None
    known = [("mask updates", spent.masks)]
    if spent.enforcement is not None:
        known.append(("keeping pruned weights at zero", spent.enforcement))
    rest = max(spent.total - sum(seconds for _, seconds in known), 0.0)
    known.append(("everything else", rest))
    whole = sum(seconds for _, seconds in known)
    note = f"Of {duration(spent.total)} on rank 0 while the log was open."
    if spent.enforcement is None:
        note += " The time of enforcement is unknown and part of everything else."
    bars = tuple(
        Bar(name=name, share=seconds / whole, text=f"{duration(seconds)}, {percent(seconds / whole)}")
        for name, seconds in known
    )
    return BarChart(key="time", title="Time", note=note, bars=bars, stacked=True)


def _seen(lines: Sequence[Line]) -> bool:
    """Return whether a line has a value other than 0: a chart without one shows nothing."""
    return any(y for line in lines for _, y in line.points)


def _held(run: Run, name: str, role: str, points: list[Point]) -> Line:
    """Return a line that stays constant between mask updates and after the last one."""
    end = float(_end(run))
    last = [(end, points[-1][1])] if points and points[-1][0] < end else []
    return Line(name=name, role=role, points=thinned([*points, *last]), steps=True)


def _end(run: Run) -> int:
    return max([run.last_step or 0, *(due.step for due in run.due[-1:])])


def _known(totals: Totals, name: str) -> list[Point]:
    return [(step, value) for step, of in totals if (value := of[name]) is not None]


def _per_table(run: Run, value: Callable[[MaskChange], float | None]) -> dict[str, list[Point]]:
    """Return the points of each table; of more than 30 their median, and what a tenth of them is below and above."""
    found: dict[str, list[Point]] = {}
    if len(_tables(run)) <= MOST_TABLES:
        for due in run.due:
            for change in due.record.tables:
                if (known := value(change)) is not None:
                    found.setdefault(change.name, []).append((float(due.step), known))
        return found
    for due in run.due:
        values = sorted(known for change in due.record.tables if (known := value(change)) is not None)
        for name, place in _PERCENTILES.items() if values else ():
            found.setdefault(name, []).append((float(due.step), values[round(place * (len(values) - 1))]))
    return found


def _tables(run: Run) -> set[str]:
    return {table.name for due in run.due for table in due.record.tables}


def _thin_lines(run: Run) -> str:
    tables = _tables(run)
    if len(tables) <= MOST_TABLES:
        return "Thin: each table."
    return f"Thin: of {len(tables):,} tables the median, and the values that a tenth of them are below and above."


def _drawn(lines: Sequence[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if any(y is not None for _, y in line.points))


def _not_finite(series: Series) -> str:
    lost = [step for step, value in series if value is None]
    return f" Not finite at {len(lost):,} of these steps, first at step {lost[0]:,}." if lost else ""


def _named_apart(found: list[Chart]) -> list[Chart]:
    """Number keys that differ only in case: they name files."""
    named: dict[str, Chart] = {}
    for chart in found:
        key, number = chart.key, 1
        while key.lower() in named:
            number += 1
            key = f"{chart.key}_{number}"
        named[key.lower()] = dataclasses.replace(chart, key=key)
    return list(named.values())


def _key(kind: str, name: str) -> str:
    """Return a key for file names and ids."""
    return f"{kind}_{re.sub(r'[^0-9A-Za-z_-]+', '_', name)[:40]}"
