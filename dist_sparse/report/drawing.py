"""Charts as HTML: a ``<figure>`` around an SVG that stretches. Colors come from the page's style, by class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from dist_sparse.report.axes import HEIGHT, WIDTH, escape, frame, log_ticks, short, ticks, tip
from dist_sparse.report.figures import BarChart, Chart, DotChart, Dots, Line, LineChart, ScoreChart
from dist_sparse.text import amount, count, percent, size

__all__ = ["drawn"]

_MOST_TIPS = 64
_TIP_LINES = 7
_LABEL = 60
"""Of WIDTH and of HEIGHT: dots so near to each other have labels that may overlap."""

Place = Callable[[float], float]


def drawn(chart: Chart) -> str:
    """Return the ``<figure>`` of a chart; its caption says the same to a screen reader."""
    if isinstance(chart, LineChart):
        inside = _lines(chart)
    elif isinstance(chart, ScoreChart):
        inside = _scores(chart)
    elif isinstance(chart, DotChart):
        inside = _dots(chart)
    else:
        inside = _bars(chart)
    wide = isinstance(chart, (BarChart, DotChart)) and not chart.key.startswith("traffic")
    kind = " wide" if wide else ""
    return (
        f'<figure class="card{kind}" id="{escape(chart.key)}"><figcaption><h3>{escape(chart.title)}</h3>'
        f"<p>{escape(chart.note)}</p></figcaption>{inside}</figure>"
    )


def _lines(chart: LineChart) -> str:
    values = [y for line in chart.lines for _, y in line.points if y is not None]
    places = [x for line in chart.lines for x, _ in line.points]
    left, right = min(0.0, *places), max(float(chart.end), 1.0, *places)
    low, high = _range(values, chart.share)

    def x_of(x: float) -> float:
        return round(WIDTH * (x - left) / (right - left), 1)

    def y_of(y: float) -> float:
        return round(HEIGHT * (1 - (y - low) / (high - low)), 1)

    order = ("table", "raw", "other", "main", "target")
    paths = "".join(
        f'<path class="{_class_of(line)}" d="{_path(line, x_of, y_of)}"/>'
        for line in sorted(chart.lines, key=lambda line: order.index(line.role))
    )
    named = [line for line in chart.lines if line.role in ("main", "target", "other")]
    legend = "".join(f'<li class="{_class_of(line)}">{escape(line.name)}</li>' for line in named)

    def text_of(y: float) -> str:
        return percent(y) if chart.share else amount(y)

    marks = [(100 * y_of(y) / HEIGHT, _tick(y, chart.share)) for y in ticks(low, high, 4)]
    below = [(x_of(x) / 10, short(x)) for x in ticks(left, right, 4) if x.is_integer()]
    ends = "; ".join(f"{line.name} ends at {text_of(y)}" for line in named if (y := _last(line)) is not None)
    tips = _tips(chart, x_of, text_of)
    legend = f'<ul class="legend">{legend}</ul>' if len(named) > 1 else ""
    return legend + frame(f"{chart.title} over steps: {ends}.", paths, marks, below, "step", tips)


def _scores(chart: ScoreChart) -> str:
    gone = "gone" if chart.threshold > 0 else "both"
    zero = f'<div class="zeros"><i class="{gone}" style="height:{100 * chart.zeros:.2f}%"></i></div>'
    if not chart.bins:
        return f'<p class="none">All scores are 0.</p>{zero}'
    logs = [math.log10(edge) for piece in chart.bins for edge in (piece.low, piece.high)]
    logs += [math.log10(chart.threshold)] if chart.threshold > 0 else []
    left, right = min(logs), max(logs)
    tallest = max(piece.density for piece in chart.bins) or 1.0

    def x_of(score: float) -> float:
        return round(WIDTH * (math.log10(score) - left) / (right - left), 1)

    shapes, tips = "", ""
    for piece in chart.bins:
        x, wide, height = x_of(piece.low), x_of(piece.high) - x_of(piece.low), HEIGHT * piece.density / tallest
        kind = piece.kind(chart.threshold)
        shapes += f'<rect class="{kind}" x="{x}" y="{HEIGHT - height:.1f}" width="{wide:.1f}" height="{height:.1f}"/>'
        text = f"{count(piece.blocks)} blocks of score {amount(piece.low)} to {amount(piece.high)}"
        tips += tip(x / 10, wide / 10, [text])
    at = ""
    if chart.threshold > 0:
        x = x_of(chart.threshold)
        shapes += f'<path class="threshold" d="M{x} 0V{HEIGHT}"/>'
        side = "left" if x < WIDTH / 2 else "right"
        place = x / 10 if side == "left" else 100 - x / 10
        at = f'<span class="at" style="{side}:{place:.1f}%">threshold {amount(chart.threshold)}</span>'
    below = [(100 * (math.log10(x) - left) / (right - left), f"{x:g}") for x in log_ticks(left, right)]
    marks = [(100 * (1 - y / tallest), short(y)) for y in ticks(0, tallest, 3)]
    framed = frame(f"{chart.title}: {chart.note}", shapes, marks, below, "score; area = blocks", tips + at)
    kinds = (("gone", "pruned"), ("kept", "kept"), ("both", "both"))
    legend = f'<ul class="legend">{"".join(f"<li class={kind!r}>{name}</li>" for kind, name in kinds)}</ul>'
    share = percent(chart.zeros)
    return f'{legend}<div class="beside"><div class="zero"><span>{share}</span>{zero}<span>0</span></div>{framed}</div>'


def _dots(chart: DotChart) -> str:
    dots = [dot for run in chart.runs for dot in run.dots]
    left, right = (f(math.log10(taken) for _, taken, _ in dots) for f in (min, max))
    left, right = left - 0.06 * (right - left) - 0.02, right + 0.06 * (right - left) + 0.02
    low, high = _range([auc for *_, auc in dots], share=False)
    low, high = low - 0.08 * (high - low), high + 0.12 * (high - low)  # room for the labels

    def x_of(taken: float) -> float:
        return round(WIDTH * (math.log10(taken) - left) / (right - left), 1)

    def y_of(auc: float) -> float:
        return round(HEIGHT * (1 - (auc - low) / (high - low)), 1)

    everywhere = [(x_of(taken), y_of(auc)) for _, taken, auc in dots]

    def is_under(x: float, y: float, place: int) -> bool:
        """Whether the label of a dot is below it, so that neighbors' labels stay apart: not where another dot is."""
        near = [y - other for at, other in everywhere if abs(x - at) < _LABEL and 0 < abs(y - other) < _LABEL]
        return all(up > 0 for up in near) and (bool(near) or place % 2 == 1)

    shapes, over, legend = "", "", ""
    for run in chart.runs:
        kind = _class_of(run)
        legend += f'<li class="{kind}">{escape(run.name)}</li>'
        places = [(x_of(taken), y_of(auc)) for _, taken, auc in run.dots]
        shapes += f'<path class="{kind} joined" d="M{"L".join(f"{x} {y}" for x, y in places)}"/>'
        for place, ((x, y), (name, taken, auc)) in enumerate(zip(places, run.dots, strict=True)):
            shapes += f'<path class="{kind} dot" d="M{x} {y}h0"/>'
            at = f"left:{x / 10:.2f}%;top:{100 * y / HEIGHT:.2f}%"
            text = f"{escape(run.name)}, {escape(name)}<br>{size(taken)}, AUC {auc:.4f}"
            side = ("l" if x < WIDTH / 2 else "r") + (" under" if is_under(x, y, place) else "")
            over += f'<div class="spot {side}" style="{at}"><b>{escape(name)}</b><span>{text}</span></div>'
    levels = ticks(low, high, 4)
    decimals = max(len(f"{y:.4g}".partition(".")[2]) for y in levels)
    marks = [(100 * y_of(y) / HEIGHT, f"{y:.{decimals}f}") for y in levels]
    sizes = [n * 1024.0**p for p in range(6) for n in (1, 2, 5, 10, 20, 50, 100, 200, 500)]
    inside = [taken for taken in sizes if left <= math.log10(taken) <= right]
    inside = inside[:: max(1, -(-len(inside) // 5))]
    below = [(x_of(taken) / 10, size(taken).replace(".00", "").replace(".0", "")) for taken in inside]
    said = "; ".join(
        f"{run.name}, {name}: {size(taken)}, {auc:.4f}" for run in chart.runs for name, taken, auc in run.dots
    )
    framed = frame(f"{chart.title}: {said}", shapes, marks, below, "bytes, logarithmic", over)
    return f'<ul class="legend">{legend}</ul>{framed}'


def _bars(chart: BarChart) -> str:
    if chart.stacked:
        kinds = [*(f"part{i}" for i in range(len(chart.bars) - 1)), "rest"]
        named = list(zip(kinds, chart.bars, strict=True))
        parts = "".join(f'<i class="{kind}" style="width:{100 * bar.share:.3f}%"></i>' for kind, bar in named)
        legend = "".join(f'<li class="{kind}"><b>{escape(bar.name)}</b> {escape(bar.text)}</li>' for kind, bar in named)
        return f'<div class="stack" aria-hidden="true">{parts}</div><ul class="legend parts">{legend}</ul>'
    rows = "".join(
        f'<li><span class="name">{escape(bar.name)}</span><span class="bar" aria-hidden="true">'
        f'<b style="width:{100 * bar.whole:.2f}%"></b>'
        f'<i class="{"some" if bar.share else "none"}" style="width:{100 * bar.share:.2f}%"></i></span>'
        f'<span class="text">{escape(bar.text)}</span></li>'
        for bar in chart.bars
    )
    return f'<ol class="bars">{rows}</ol>'


def _tips(chart: LineChart, x_of: Place, text_of: Callable[[float], str]) -> str:
    """Return tooltips with the values at a step: one strip per point, halfway to its neighbors on both sides."""
    at = sorted({x for line in chart.lines if line.role != "raw" for x, _ in line.points})
    every = -(-len(at) // _MOST_TIPS)
    at = at[::every]
    edges = [0.0, *((x_of(a) + x_of(b)) / 20 for a, b in pairwise(at)), 100.0]
    shown = [line for line in chart.lines if line.role != "raw"][:_TIP_LINES]
    # Lines are thinned differently, so a line without a point at this step shows the one before it.
    tips = ""
    for i, x in enumerate(at):
        found = [(line.name, _at(line, x)) for line in shown]
        text = [f"step {count(round(x))}", *(f"{name}: {text_of(y)}" for name, y in found if y is not None)]
        tips += tip(edges[i], edges[i + 1] - edges[i], text, x_of(x) / 10)
    return tips


def _at(line: Line, x: float) -> float | None:
    return next((y for place, y in reversed(line.points) if place <= x), None)


def _path(line: Line, x_of: Place, y_of: Place) -> str:
    """Return the path of a line: gaps where a value is not finite, a dot (a line of no length) for a single point."""
    path, begun = "", False
    for x, y in line.points:
        if y is None:
            begun = False
        elif not begun:
            path, begun = f"{path}M{x_of(x)} {y_of(y)}h0", True
        else:
            path += f"H{x_of(x)}V{y_of(y)}" if line.steps else f"L{x_of(x)} {y_of(y)}"
    return path


def _class_of(one: Line | Dots) -> str:
    """Return the class that the page's style colors: that of a compared run is its own in all charts."""
    return f"other other{one.number % 4}" if one.role == "other" else one.role


def _last(line: Line) -> float | None:
    return next((y for _, y in reversed(line.points) if y is not None), None)


def _range(values: Sequence[float], share: bool) -> tuple[float, float]:
    low, high = (0.0 if share else min(values)), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # only rounding errors
        low, high = low - 0.05 * (abs(low) or 1.0), high + 0.05 * (abs(high) or 1.0)
    room = 0.05 * (high - low)
    return (low if low == 0 else low - room), high + room


def _tick(value: float, share: bool) -> str:
    if not share:
        return f"{value:,.0f}" if abs(value) < 1e6 and float(value).is_integer() else f"{value:.4g}"
    return f"{100 * value:.4g}%"
