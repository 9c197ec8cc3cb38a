"""Charts of a run as data: names, points, bins.

:mod:`dist_sparse.report.drawing` draws them as HTML, :mod:`dist_sparse.report.png` as PNG, without the run. A chart is
small however long the run: a line has at most 400 points, a chart the lines of at most 30 tables, the largest. Time is
linear in the number of lines of the log.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dist_sparse.report.histograms import Scored, edge_of, much
from dist_sparse.report.run import Run, Series
from dist_sparse.report.summary import due_totals, numbers
from dist_sparse.sparsifiers.recorder import MaskChange
from dist_sparse.text import amount, count, duration, number_of, percent, size

__all__ = ["BarChart", "Bin", "Chart", "Line", "LineChart", "ScoreChart", "charts"]

_MOST_TABLES = 30
"""Per chart: the largest."""

_MOST_SCORES, _MOST_BINS = 6, 64
"""Histograms of scores, of the tables with the most blocks, and the bins of each."""

_MOST_POINTS, _MOST_OTHERS = 400, 12
_HUGE = 1e300
"""Larger values are drawn as this, so that differences and sums stay finite."""

_SMOOTHED = 30
"""A line with more points is drawn faintly under its running mean."""

Point = tuple[float, float | None]
Totals = list[tuple[float, dict[str, float | None]]]
"""Step and totals of all tables, per mask update."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line. ``role``: ``main``, ``target``, ``other`` (of a compared run), ``raw`` (under its running mean) or
    ``table``; ``steps``: constant from each point to the next."""

    name: str
    points: tuple[Point, ...]
    role: str = "main"
    steps: bool = False


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over steps 0 to ``end``, or further. ``share``: heights are shares, shown in percent."""

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    end: int
    share: bool = False


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Horizontal bars: name, share of the full width in [0, 1], text. ``whole``: the shares add up to one bar, of which
    the last is the rest."""

    key: str
    title: str
    note: str
    bars: tuple[tuple[str, float, str], ...]
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Blocks with scores in [low, high). ``density``: blocks per octave, so that a bar's area counts blocks: buckets
    differ in width on a logarithmic axis."""

    low: float
    high: float
    blocks: int
    density: float

    def kind(self, threshold: float) -> str:
        """Return whether its blocks are ``gone`` (pruned), ``kept``, or ``both``: some of each."""
        return "gone" if self.high <= threshold else "kept" if self.low > threshold else "both"


@dataclass(frozen=True, kw_only=True)
class ScoreChart:
    """Histogram of one table. ``zeros``: share of the blocks that scored 0, which a logarithmic axis can't show."""

    key: str
    title: str
    note: str
    bins: tuple[Bin, ...]
    zeros: float
    threshold: float


Chart = LineChart | BarChart | ScoreChart


def charts(run: Run) -> list[Chart]:
    """Return the charts for which the run has data, in the order of the page."""
    found: list[Chart] = []
    totals: Totals = [(float(due.step), due_totals(due)) for due in run.due]
    if run.due:
        found.append(_sparsity(run, totals))
    found += _values(run)
    if (bars := _bytes(run)) is not None:
        found.append(bars)
    found += _score_charts(run)
    if run.due:
        found += _changes(run, totals)
    if (time := _time(run)) is not None:
        found.append(time)
    return _named_apart([chart for chart in found if not isinstance(chart, LineChart) or chart.lines])


def _shown_tables(run: Run) -> list[str]:
    """Return the tables with the most blocks, at most 30."""
    blocks = {table.name: table.blocks for due in run.due for table in due.record.tables}
    return sorted(blocks, key=lambda name: (-blocks[name], name))[:_MOST_TABLES]


def _sparsity(run: Run, totals: Totals) -> LineChart:
    lines = [
        _held(run, "all blocks", "main", _known(totals, "sparsity")),
        _held(run, "target", "target", _known(totals, "target")),
    ]
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
        lines = _smoothed(name, run.values[name], "main", bool(run.compared))
        for other, of in run.compared.items():
            if len(of.values.get(name, ())) > 1:
                lines += [line for line in _smoothed(other, of.values[name], "other", True) if line.role != "raw"]
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


def _bytes(run: Run) -> BarChart | None:
    """Return bytes kept per table for a run with an end, else blocks kept."""
    bars: list[tuple[str, float, str]]
    if run.tables:
        tables = sorted(run.tables, key=lambda table: (-table.table_bytes, table.name))
        bars = [
            (t.name, share, f"{size(t.kept_bytes)} of {size(t.table_bytes)}, {percent(share)}")
            for t in tables
            for share in [t.kept_bytes / t.table_bytes if t.table_bytes else 0.0]
        ]
        title, note = "Bytes kept", "Per registered table, largest first."
    elif run.due:
        rows = {row["name"]: row for row in numbers(run)["tables"]}
        bars = [
            (name, kept, f"{percent(kept)} of {rows[name]['blocks']:,} blocks")
            for name in sorted(rows, key=lambda name: (-rows[name]["blocks"], name))
            for kept in [1 - rows[name]["sparsity"]]
        ]
        title, note = "Blocks kept", "Per table, most blocks first. Bytes are logged at the end of a run."
    else:
        return None
    if len(bars) > _MOST_TABLES:
        note += f" The first {_MOST_TABLES} of {len(bars):,}; the table below has all."
    return BarChart(key="bytes", title=title, note=note, bars=tuple(bars[:_MOST_TABLES]))


def _score_charts(run: Run) -> list[ScoreChart]:
    """Return the histograms of the tables with the most blocks."""
    shown = [one for one in run.scores.values() if one.zeros + sum(one.counts) > 0]
    shown = sorted(shown, key=lambda one: (-one.blocks, one.name))[:_MOST_SCORES]
    later: dict[str, list[MaskChange]] = {one.name: [] for one in shown}
    steps = {one.name: one.step for one in shown}
    for due in run.due:
        for change in due.record.tables:
            if change.name in steps and due.step > steps[change.name]:
                later[change.name].append(change)
    return [_score_chart(f"scores_{place}", one, later[one.name]) for place, one in enumerate(shown, start=1)]


def _score_chart(key: str, one: Scored, later: list[MaskChange]) -> ScoreChart:
    blocks = one.zeros + sum(one.counts)
    note = f"{count(blocks)} blocks before the mask update at step {count(one.step)}; {percent(one.zeros / blocks)}"
    note += f" scored 0. Threshold: {amount(one.threshold)}; blocks not above it are pruned."
    if any(much((change.flipped_blocks or 0) - (change.regrown_blocks or 0), change.blocks) for change in later):
        note += " The histograms of later mask updates were not written."
    elif later:
        note += " Later mask updates pruned less than 1% more each."
    return ScoreChart(
        key=key,
        title=f"Block scores of {one.name}",
        note=note,
        bins=_bins(one),
        zeros=one.zeros / blocks,
        threshold=one.threshold,
    )


def _bins(one: Scored) -> tuple[Bin, ...]:
    """Merge buckets into at most 65 bins: 2, 4 or 8 to a bin, then whole octaves."""
    numbers = range(one.first, one.first + len(one.counts))
    together = 1
    while numbers and (numbers[-1] - numbers[0]) // together >= _MOST_BINS:
        together *= 2
    summed: dict[int, int] = {}
    for number, blocks in zip(numbers, one.counts, strict=True):
        if blocks:
            summed[number // together] = summed.get(number // together, 0) + blocks
    bins = []
    for number, blocks in summed.items():
        low, high = edge_of(number * together), edge_of((number + 1) * together)
        bins.append(Bin(low=low, high=high, blocks=blocks, density=blocks / math.log2(high / low)))
    return tuple(bins)


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
    unknown = f" Known at the end only for {number_of(len(cut), 'table')} cut by columns." if cut else ""
    found: list[Chart] = []
    if any(line.points for line in churn):
        note = f"Share of blocks that a mask update flipped, and of those that it regrew. {_thin_lines(run)}"
        found.append(LineChart(key="churn", title="Churn", note=note, lines=_drawn(churn), end=_end(run), share=True))
    if any(line.points for line in dead):
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
    bars = tuple((name, seconds / whole, f"{duration(seconds)}, {percent(seconds / whole)}") for name, seconds in known)
    return BarChart(key="time", title="Time", note=note, bars=bars, whole=True)


def _held(run: Run, name: str, role: str, points: list[Point]) -> Line:
    """Return a line that stays constant between mask updates and after the last one."""
    end = float(_end(run))
    last = [(end, points[-1][1])] if points and points[-1][0] < end else []
    return Line(name=name, role=role, points=_thinned([*points, *last]), steps=True)


def _end(run: Run) -> int:
    return max([run.last_step or 0, *(due.step for due in run.due[-1:])])


def _known(totals: Totals, name: str) -> list[Point]:
    return [(step, value) for step, of in totals if (value := of[name]) is not None]


def _per_table(run: Run, value: Callable[[MaskChange], float | None]) -> dict[str, list[Point]]:
    """Return the points of each table that is shown."""
    points: dict[str, list[Point]] = {name: [] for name in _shown_tables(run)}
    for due in run.due:
        for change in due.record.tables:
            if change.name in points and (known := value(change)) is not None:
                points[change.name].append((float(due.step), known))
    return points


def _thin_lines(run: Run) -> str:
    tables = len({table.name for due in run.due for table in due.record.tables})
    return "Thin: each table." if tables <= _MOST_TABLES else f"Thin: the {_MOST_TABLES} largest of {tables:,} tables."


def _smoothed(name: str, series: Series, role: str, named: bool) -> list[Line]:
    points: list[Point] = [(float(s), None if y is None else min(max(y, -_HUGE), _HUGE)) for s, y in series]
    called = name if role == "other" or not named else "this run"
    if len(points) <= _SMOOTHED:
        return [Line(name=called, role=role, points=_thinned(points))]
    return [
        Line(name="as logged", role="raw", points=_thinned(points)),
        Line(name=called, role=role, points=_means(points)),
    ]


def _means(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return a running mean over a fifteenth of the finite points, at 400 of them at most.

    Only the means that are drawn are computed, each from its own window, which is linear in the points. Differences of
    prefix sums would be, too, but one value of 1e20 would cost all later means their digits.
    """
    finite = [(x, y) for x, y in points if y is not None]
    values = [y for _, y in finite]
    half = max(2, len(finite) // 30)
    every = max(1, -(-(len(finite) - 1) // (_MOST_POINTS - 1)))
    places = [*range(0, len(finite) - 1, every), len(finite) - 1] if finite else []
    windows = ((finite[i][0], values[max(0, i - half) : i + half + 1]) for i in places)
    return tuple((x, math.fsum(window) / len(window)) for x, window in windows)


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return at most 400 points: the smallest and the largest value of each stretch, which keeps peaks, and the last
    point."""
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
