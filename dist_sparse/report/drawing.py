"""Charts as HTML: a ``<figure>`` around an SVG that stretches.

Lines keep their width (``non-scaling-stroke``) and text its size at every width of the page. Colors come from the
page's style, by class. Tooltips need no script. Everything from the log passes through :func:`escape`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from dist_sparse.report.charts import BarChart, Chart, Line, LineChart, ScoreChart
from dist_sparse.text import amount, count, percent, printable

__all__ = ["drawn", "escape", "log_ticks", "ticks"]

_WIDTH, _HEIGHT = 1000, 400
_MOST_TIPS = 64
_TIP_LINES = 7

Place = Callable[[float], float]


def escape(text: str) -> str:
    """Return text for HTML, attributes included: no markup, no control characters."""
    return html.escape(printable(text))


def drawn(chart: Chart) -> str:
    """Return the ``<figure>`` of a chart; its caption says the same to a screen reader."""
    if isinstance(chart, LineChart):
        inside = _lines(chart)
    elif isinstance(chart, ScoreChart):
        inside = _scores(chart)
    else:
        inside = _bars(chart)
    kind = " wide" if isinstance(chart, BarChart) else ""
    return (
        f'<figure class="card{kind}" id="{escape(chart.key)}"><figcaption><h3>{escape(chart.title)}</h3>'
        f"<p>{escape(chart.note)}</p></figcaption>{inside}</figure>"
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in [low, high], 1, 2, 2.5 or 5 times a power of ten apart, at most ``most + 1``."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def log_ticks(left: float, right: float, most: int = 6) -> list[float]:
    """Return round numbers from ``10**left`` to ``10**right``: powers of ten, with 2 and 5 times those where there is
    room; those of :func:`ticks` where that gives fewer than three."""
    powers = range(math.floor(left), math.ceil(right) + 1)
    for times in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{n}e{p}") for p in powers for n in times if left - 1e-9 <= math.log10(n) + p <= right + 1e-9]
        if len(found) <= most:
            return found if len(found) > 2 else ticks(10**left, 10**right, 4)
    return found[:: -(-len(found) // most)]


def _lines(chart: LineChart) -> str:
    values = [y for line in chart.lines for _, y in line.points if y is not None]
    places = [x for line in chart.lines for x, _ in line.points]
    left, right = min(0.0, *places), max(float(chart.end), 1.0, *places)
    low, high = _range(values, chart.share)

    def x_of(x: float) -> float:
        return round(_WIDTH * (x - left) / (right - left), 1)

    def y_of(y: float) -> float:
        return round(_HEIGHT * (1 - (y - low) / (high - low)), 1)

    order = ("table", "raw", "other", "main", "target")
    classes = _classes(chart.lines)
    paths = "".join(
        f'<path class="{classes[id(line)]}" d="{_path(line, x_of, y_of)}"/>'
        for line in sorted(chart.lines, key=lambda line: order.index(line.role))
    )
    named = [line for line in chart.lines if line.role in ("main", "target", "other")]
    legend = "".join(f'<li class="{classes[id(line)]}">{escape(line.name)}</li>' for line in named)

    def text_of(y: float) -> str:
        return percent(y) if chart.share else amount(y)

    marks = [(100 * y_of(y) / _HEIGHT, _tick(y, chart.share)) for y in ticks(low, high, 4)]
    below = [(x_of(x) / 10, _short(x)) for x in ticks(left, right, 4) if x.is_integer()]
    ends = "; ".join(f"{line.name} ends at {text_of(y)}" for line in named if (y := _last(line)) is not None)
    tips = _tips(chart, x_of, text_of)
    legend = f'<ul class="legend">{legend}</ul>' if len(named) > 1 else ""
    return legend + _frame(f"{chart.title} over steps: {ends}.", paths, marks, below, "step", tips)


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
        return round(_WIDTH * (math.log10(score) - left) / (right - left), 1)

    shapes, tips = "", ""
    for piece in chart.bins:
        x, wide, height = x_of(piece.low), x_of(piece.high) - x_of(piece.low), _HEIGHT * piece.density / tallest
        kind = piece.kind(chart.threshold)
        shapes += f'<rect class="{kind}" x="{x}" y="{_HEIGHT - height:.1f}" width="{wide:.1f}" height="{height:.1f}"/>'
        text = f"{count(piece.blocks)} blocks of score {amount(piece.low)} to {amount(piece.high)}"
        tips += _tip(x / 10, wide / 10, [text])
    at = ""
    if chart.threshold > 0:
        x = x_of(chart.threshold)
        shapes += f'<path class="threshold" d="M{x} 0V{_HEIGHT}"/>'
        side = "left" if x < _WIDTH / 2 else "right"
        place = x / 10 if side == "left" else 100 - x / 10
        at = f'<span class="at" style="{side}:{place:.1f}%">threshold {amount(chart.threshold)}</span>'
    below = [(100 * (math.log10(x) - left) / (right - left), f"{x:g}") for x in log_ticks(left, right)]
    marks = [(100 * (1 - y / tallest), _short(y)) for y in ticks(0, tallest, 3)]
    frame = _frame(f"{chart.title}: {chart.note}", shapes, marks, below, "score; area = blocks", tips + at)
    kinds = (("gone", "pruned"), ("kept", "kept"), ("both", "both"))
    legend = f'<ul class="legend">{"".join(f"<li class={kind!r}>{name}</li>" for kind, name in kinds)}</ul>'
    share = percent(chart.zeros)
    return f'{legend}<div class="beside"><div class="zero"><span>{share}</span>{zero}<span>0</span></div>{frame}</div>'


def _bars(chart: BarChart) -> str:
    if chart.whole:
        kinds = [*(f"part{i}" for i in range(len(chart.bars) - 1)), "rest"]
        named = list(zip(kinds, chart.bars, strict=True))
        parts = "".join(f'<i class="{kind}" style="width:{100 * share:.3f}%"></i>' for kind, (_, share, _) in named)
        legend = "".join(
            f'<li class="{kind}"><b>{escape(name)}</b> {escape(text)}</li>' for kind, (name, _, text) in named
        )
        return f'<div class="stack" aria-hidden="true">{parts}</div><ul class="legend parts">{legend}</ul>'
    rows = "".join(
        f'<li><span class="name">{escape(name)}</span><span class="bar" aria-hidden="true">'
        f'<i style="width:{100 * share:.2f}%"></i></span><span class="text">{escape(text)}</span></li>'
        for name, share, text in chart.bars
    )
    return f'<ol class="bars">{rows}</ol>'


def _frame(
    caption: str,
    shapes: str,
    marks: Sequence[tuple[float, str]],
    below: Sequence[tuple[float, str]],
    label: str,
    over: str,
) -> str:
    """Return shapes with axes. ``marks`` and ``below``: positions in percent, and their labels."""
    grid = "".join(f'<path class="grid" d="M0 {y * _HEIGHT / 100:.1f}H{_WIDTH}"/>' for y, _ in marks)
    widest = max((text for _, text in marks), key=len, default="")
    left = "".join(f'<span style="top:{y:.2f}%">{escape(text)}</span>' for y, text in marks)
    under = "".join(f'<span style="left:{x:.2f}%">{escape(text)}</span>' for x, text in below)
    return (
        f'<div class="plot" role="img" aria-label="{escape(caption)}"><div class="y" aria-hidden="true"><b>{widest}</b>'
        f'{left}</div><div class="area" aria-hidden="true">'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{grid}{shapes}</svg>{over}</div>'
        f'<div class="x" aria-hidden="true">{under}</div>'
        f'<div class="label" aria-hidden="true">{label}</div></div>'
    )


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
        tips += _tip(edges[i], edges[i + 1] - edges[i], text, x_of(x) / 10)
    return tips


def _tip(left: float, wide: float, text: Sequence[str], at: float | None = None) -> str:
    line = "" if at is None else f'<u style="left:{100 * (at - left) / max(wide, 1e-9):.1f}%"></u>'
    side = "l" if left + wide / 2 < 50 else "r"
    inside = "<br>".join(escape(part) for part in text)
    return f'<div class="tip {side}" style="left:{left:.2f}%;width:{wide:.2f}%">{line}<span>{inside}</span></div>'


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


def _classes(lines: Sequence[Line]) -> dict[int, str]:
    """Return a class per line; compared runs are numbered."""
    classes, others = {}, 0
    for line in lines:
        classes[id(line)] = line.role
        if line.role == "other":
            classes[id(line)] = f"other other{others % 4}"
            others += 1
    return classes


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


def _short(value: float) -> str:
    """Return ``625``, ``1.5M``."""
    for prefix, unit in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= unit:
            return f"{value / (1e3 if prefix == 'k' else unit):g}{prefix}"
    return f"{value:g}"
