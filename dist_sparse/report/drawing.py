"""Charts as shapes, and as files: the page and the SVG files draw the same :class:`Plot`.

A plot is WIDTH by HEIGHT units large. Text around it is placed in percent, so that on the page
lines stretch with the window while text keeps its size. Colors and widths belong to the template,
by the name of a shape's look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from dist_sparse.report.figures import (
    BarChart,
    Bin,
    Chart,
    DotChart,
    Dots,
    Line,
    LineChart,
    ScoreChart,
)
from dist_sparse.report.rendering import render
from dist_sparse.text import amount, count, percent, size

__all__ = ["HEIGHT", "WIDTH", "Plot", "Spot", "Tip", "log_ticks", "plot_of", "svg_of", "ticks"]

WIDTH, HEIGHT = 1000, 400

_COLORS = 9
"""Of compared runs, then they repeat."""
_MOST_TIPS = 64
_TIP_LINES = 7
_LABEL = 60
"""Of WIDTH and of HEIGHT: dots so near to each other have labels that may overlap."""

_KINDS = (("gone", "pruned"), ("kept", "kept"), ("both", "both"))
_NAMED = ("main", "target", "other")
_LAYERS = ("table", "raw", "other", "main", "target")
_SIZES = [n * 1024.0**p for p in range(6) for n in (1, 2, 5, 10, 20, 50, 100, 200, 500)]

Place = Callable[[float], float]
Pair = tuple[float, float]
Label = tuple[float, str]
Shape = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Tip:
    """Text for a vertical strip of the plot, shown under a pointer. Places in percent; ``line``:
    within the strip."""

    left: float
    width: float
    text: tuple[str, ...]
    line: float | None = None

    @property
    def side(self) -> str:
        """On which the text has room."""
        return "l" if self.left + self.width / 2 < 50 else "r"


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Label of a dot, and text under a pointer. Places in percent; ``said``: to a screen reader;
    ``under``: the label is below the dot."""

    left: float
    top: float
    label: str
    text: tuple[str, ...]
    said: str
    under: bool

    @property
    def side(self) -> str:
        """On which the text has room."""
        return "l" if self.left < 50 else "r"


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Shapes with axes.

    Args:
        caption: says the same to a screen reader.
        shapes: look and path of each, the last on top.
        marks, below: numbers beside the axes, in percent from the top and from the left.
        label: of the horizontal axis.
        legend: look and name.
        tips, spots: text in the plot.
        threshold: place and text of a vertical line.
        zeros: share of what a logarithmic axis can't show, and its look.
    """

    caption: str
    shapes: tuple[Shape, ...]
    marks: tuple[Label, ...]
    below: tuple[Label, ...]
    label: str
    legend: tuple[tuple[str, str], ...] = ()
    tips: tuple[Tip, ...] = ()
    spots: tuple[Spot, ...] = ()
    threshold: Label | None = None
    zeros: tuple[float, str] | None = None

    @property
    def widest(self) -> str:
        """The longest number beside the plot, which decides how much room there is."""
        return max((text for _, text in self.marks), key=len, default="")


def plot_of(chart: LineChart | ScoreChart | DotChart) -> Plot:
    """Return a chart as shapes."""
    if isinstance(chart, LineChart):
        return _line_plot(chart)
    return _score_plot(chart) if isinstance(chart, ScoreChart) else _dot_plot(chart)


def svg_of(chart: Chart) -> str:
    """Return a chart as a file of its own: axes, text and style within, light and dark.

    Raises:
        ImportError: jinja2 is not installed.
    """
    plot = None if isinstance(chart, BarChart) else plot_of(chart)
    return render("chart.svg", chart=chart, plot=plot, WIDTH=WIDTH, HEIGHT=HEIGHT)


def is_wide(chart: Chart) -> bool:
    """Return whether a chart is as wide as the page."""
    return isinstance(chart, (BarChart, DotChart)) and not chart.key.startswith("traffic")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in [low, high], 1, 2, 2.5 or 5 times a power of ten apart, at most
    ``most + 1``."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    # 1e-9: a rough step that is round but for a rounding error is taken as it is.
    step = next(
        power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * (1 - 1e-9)
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def log_ticks(left: float, right: float, most: int = 6) -> list[float]:
    """Return round numbers from ``10**left`` to ``10**right``: powers of ten, with 2 and 5 times
    those where there is room; those of :func:`ticks` where that gives fewer than three."""
    powers = range(math.floor(left), math.ceil(right) + 1)
    found: list[float] = []
    for times in ((1, 2, 5), (1, 3), (1,)):
        numbers = [(n, p) for p in powers for n in times]
        found = [
            float(f"{n}e{p}")
            for n, p in numbers
            if left - 1e-9 <= math.log10(n) + p <= right + 1e-9
        ]
        if len(found) <= most:
            return found if len(found) > 2 else ticks(10**left, 10**right, 4)
    return found[:: -(-len(found) // most)]


def _across(left: float, right: float) -> Place:
    return lambda x: round(WIDTH * (x - left) / (right - left), 1)


def _up(low: float, high: float) -> Place:
    return lambda y: round(HEIGHT * (1 - (y - low) / (high - low)), 1)


def _beside(
    levels: Sequence[float], y_of: Place, text_of: Callable[[float], str]
) -> tuple[Label, ...]:
    return tuple((100 * y_of(y) / HEIGHT, text_of(y)) for y in levels)


def _below(
    values: Sequence[float], x_of: Place, text_of: Callable[[float], str]
) -> tuple[Label, ...]:
    return tuple((100 * x_of(x) / WIDTH, text_of(x)) for x in values)


def _grid(marks: Sequence[Label]) -> list[Shape]:
    return [("grid", f"M0 {y * HEIGHT / 100:.1f}H{WIDTH}") for y, _ in marks]


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """Where values are in a plot, and the round numbers beside it."""

    x_of: Place
    y_of: Place
    below: Sequence[float]
    levels: Sequence[float]


def _line_plot(chart: LineChart) -> Plot:
    axes = _line_axes(chart)
    text_of = percent if chart.share else amount
    named = [line for line in chart.lines if line.role in _NAMED]
    marks = _beside(axes.levels, axes.y_of, _percent_tick if chart.share else _tick)
    shapes = _grid(marks)
    for line in sorted(chart.lines, key=lambda line: _LAYERS.index(line.role)):
        shapes.append((_look(line), _path(line, axes.x_of, axes.y_of)))
    return Plot(
        caption=f"{chart.title} over steps: {_ends(named, text_of)}.",
        shapes=tuple(shapes),
        marks=marks,
        below=_below(axes.below, axes.x_of, _short),
        label="step",
        legend=_legend(named) if len(named) > 1 else (),
        tips=_tips(chart, axes.x_of, text_of),
    )


def _line_axes(chart: LineChart) -> _Axes:
    # A compared run may have gone further than the run itself.
    places = [0.0, max(float(chart.end), 1.0), *(x for line in chart.lines for x, _ in line.points)]
    left, right = min(places), max(places)
    low, high = _range([y for line in chart.lines for y in _finite(line)], chart.share)
    return _Axes(
        x_of=_across(left, right),
        y_of=_up(low, high),
        below=[x for x in ticks(left, right, 4) if x.is_integer()],
        levels=ticks(low, high, 4),
    )


def _legend(lines: Sequence[Line | Dots]) -> tuple[Shape, ...]:
    return tuple((_look(line), line.name) for line in lines)


def _ends(named: Sequence[Line], text_of: Callable[[float], str]) -> str:
    """Return the last value of each line."""
    return "; ".join(
        f"{line.name} ends at {text_of(_finite(line)[-1])}" for line in named if _finite(line)
    )


def _score_plot(chart: ScoreChart) -> Plot:
    edges = [edge for piece in chart.bins for edge in (piece.low, piece.high)]
    # At 0, nothing but blocks that scored 0 is pruned: the logarithmic axis has no place for the
    # line.
    pruned = chart.threshold > 0
    if pruned:
        edges.append(chart.threshold)
    left, right = math.log10(min(edges)), math.log10(max(edges))
    tallest = max(piece.density for piece in chart.bins) or 1.0
    across, y_of = _across(left, right), _up(0, tallest)

    def x_of(score: float) -> float:
        return across(math.log10(score))

    def shape_of(piece: Bin) -> Shape:
        x, height = x_of(piece.low), HEIGHT * piece.density / tallest
        path = f"M{x} {HEIGHT}v{-height:.1f}h{x_of(piece.high) - x:.1f}v{height:.1f}z"
        return f"bin {piece.kind(chart.threshold)}", path

    def tip_of(piece: Bin) -> Tip:
        text = f"{count(piece.blocks)} blocks of score {amount(piece.low)} to {amount(piece.high)}"
        x = x_of(piece.low)
        return Tip(left=x / 10, width=(x_of(piece.high) - x) / 10, text=(text,))

    marks = _beside(ticks(0, tallest, 3), y_of, _short)
    shapes = [*_grid(marks), *map(shape_of, chart.bins)]
    threshold = None
    if pruned:
        at = x_of(chart.threshold)
        shapes.append(("threshold", f"M{at} 0V{HEIGHT}"))
        threshold = at / 10, f"threshold {amount(chart.threshold)}"
    return Plot(
        caption=f"{chart.title}: {chart.note}",
        shapes=tuple(shapes),
        marks=marks,
        below=_below(log_ticks(left, right), x_of, lambda x: f"{x:g}"),
        label="score; area = blocks",
        legend=_KINDS,
        tips=tuple(map(tip_of, chart.bins)),
        threshold=threshold,
        zeros=(chart.zeros, "gone" if pruned else "both"),
    )


def _dot_plot(chart: DotChart) -> Plot:
    axes = _dot_axes(chart)
    decimals = max(len(f"{y:.4g}".partition(".")[2]) for y in axes.levels)
    marks = _beside(axes.levels, axes.y_of, lambda y: f"{y:.{decimals}f}")
    shapes, legend = _grid(marks), _legend(chart.runs)
    if chart.level is not None:
        name, height = chart.level
        shapes.append(("target", f"M0 {axes.y_of(height)}H{WIDTH}"))
        legend = (*legend, ("target", name))
    places = [_places(run, axes) for run in chart.runs]
    spots: list[Spot] = []
    for run, own in zip(chart.runs, places, strict=True):
        shapes.append((f"{_look(run)} joined", "M" + "L".join(f"{x} {y}" for x, y in own)))
        shapes += [(f"{_look(run)} dot", f"M{x} {y}h0") for x, y in own]
        spots += _spots(run, own, [*chain(*places)], chart.metric)
    return Plot(
        caption=f"{chart.title}: {'; '.join(spot.said for spot in spots)}",
        shapes=tuple(shapes),
        marks=marks,
        below=_below(
            axes.below, axes.x_of, lambda taken: size(taken).replace(".00", "").replace(".0", "")
        ),
        label="bytes, logarithmic",
        legend=legend,
        spots=tuple(spots),
    )


def _places(run: Dots, axes: _Axes) -> list[Pair]:
    return [(axes.x_of(taken), axes.y_of(height)) for _, taken, height in run.dots]


def _dot_axes(chart: DotChart) -> _Axes:
    dots = [dot for run in chart.runs for dot in run.dots]
    logs, heights = [math.log10(taken) for _, taken, _ in dots], [height for *_, height in dots]
    if chart.level is not None:
        heights.append(chart.level[1])
    room = 0.06 * (max(logs) - min(logs)) + 0.02
    left, right = min(logs) - room, max(logs) + room
    low, high = _range(heights, share=False)
    low, high = low - 0.08 * (high - low), high + 0.12 * (high - low)  # room for the labels
    visible = [each for each in _SIZES if left <= math.log10(each) <= right]
    across = _across(left, right)
    return _Axes(
        x_of=lambda taken: across(math.log10(taken)),
        y_of=_up(low, high),
        below=visible[:: max(1, -(-len(visible) // 5))],
        levels=ticks(low, high, 4),
    )


def _spots(
    run: Dots, places: Sequence[Pair], everywhere: Sequence[Pair], metric: str
) -> list[Spot]:
    spots = []
    for number, ((x, y), (label, taken, height)) in enumerate(zip(places, run.dots, strict=True)):
        name = f"{run.name}, {label}" if label else run.name
        spot = Spot(
            left=100 * x / WIDTH,
            top=100 * y / HEIGHT,
            label=label,
            text=(name, f"{size(taken)}, {metric} {height:.4f}"),
            said=f"{name}: {size(taken)}, {height:.4f}",
            under=_is_under(x, y, everywhere, number),
        )
        spots.append(spot)
    return spots


def _is_under(x: float, y: float, everywhere: Sequence[Pair], number: int) -> bool:
    """Return whether a dot's label is below it: away from the dots nearby, else below every other
    dot."""
    # Neighbors on the same height don't count: their labels are beside each other.
    near = [
        y - other
        for at, other in everywhere
        if abs(x - at) < _LABEL and 0 < abs(y - other) < _LABEL
    ]
    return all(up > 0 for up in near) if near else number % 2 == 1


def _tips(chart: LineChart, x_of: Place, text_of: Callable[[float], str]) -> tuple[Tip, ...]:
    """Return the values at each step: one strip per point, halfway to its neighbors on both
    sides."""
    lines = [line for line in chart.lines if line.role != "raw"]
    at = sorted({x for line in lines for x, _ in line.points})
    # Each strip is an element of the page: a line of 400 points has strips of several steps.
    at = at[:: -(-len(at) // _MOST_TIPS)]
    edges = [0.0, *((x_of(a) + x_of(b)) / 20 for a, b in pairwise(at)), 100.0]
    tips = []
    for x, (left, right) in zip(at, pairwise(edges), strict=True):
        # Lines are thinned differently: one without a point at this step shows the one before it.
        values = [(line.name, _value_at(line, x)) for line in lines[:_TIP_LINES]]
        text = [f"{name}: {text_of(y)}" for name, y in values if y is not None]
        place = 100 * (x_of(x) / 10 - left) / max(right - left, 1e-9)
        tips.append(
            Tip(left=left, width=right - left, text=(f"step {count(round(x))}", *text), line=place)
        )
    return tuple(tips)


def _value_at(line: Line, x: float) -> float | None:
    return next((y for place, y in reversed(line.points) if place <= x), None)


def _path(line: Line, x_of: Place, y_of: Place) -> str:
    """Return the path of a line: gaps where a value is not finite, a dot (a line of no length) for
    a single point."""
    path, begun = "", False
    for x, y in line.points:
        if y is None:
            begun = False
        elif not begun:
            # H0: with round ends, a point alone is a dot.
            path, begun = (
                f"{path}M{x_of(x)} {y_of(y)}h0",
                True,
            )
        elif line.steps:
            path += f"H{x_of(x)}V{y_of(y)}"
        else:
            path += f"L{x_of(x)} {y_of(y)}"
    return path


def _look(one: Line | Dots) -> str:
    """Return the classes of a line: a compared run has its own color, the same in all charts."""
    return f"other other{one.number % _COLORS}" if one.role == "other" else one.role


def _finite(line: Line) -> list[float]:
    return [y for _, y in line.points if y is not None]


def _range(values: Sequence[float], share: bool) -> tuple[float, float]:
    low, high = (0.0 if share else min(values)), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # only rounding errors
        low, high = low - 0.05 * (abs(low) or 1.0), high + 0.05 * (abs(high) or 1.0)
    room = 0.05 * (high - low)
    return (low if low == 0 else low - room), high + room


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) < 1e6 and float(value).is_integer() else f"{value:.4g}"


def _percent_tick(value: float) -> str:
    return f"{100 * value:.4g}%"


def _short(value: float) -> str:
    """Return ``625``, ``1.5M``."""
    for prefix, least, unit in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if abs(value) >= least:
            return f"{value / unit:g}{prefix}"
    return f"{value:g}"
