"""Draws charts as SVG, by matplotlib.

The same chart is the same text: the page holds no dates, and ids come from a fixed salt. Texts stay
texts, which can be searched and read aloud.
"""

import warnings
from collections.abc import Callable
from io import StringIO
from itertools import cycle
from math import ceil

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from dist_sparse.extras.report.charts import Chart, Line
from dist_sparse.extras.report.words import amount, short
from dist_sparse.text import percent, printable, size

# Colors of the first run, of compared ones, whose number selects theirs, and of the rest.
_MAIN = "#1d5fc4"
_OTHERS = (
    *("#b3500a", "#18794e", "#8a3fb5", "#b02a52", "#0b7285"),
    *("#6b6400", "#7a4a2b", "#a3158f", "#4a5568"),
)
_SOFT, _TRACK = "#515c6b", "#e3e8ef"

# Inches: about the width of a phone, on which the texts of a wider figure would be too small.
_WIDTH = 4.2

# The height of a figure: of the plot, and of each entry of the legend, or of each bar.
_HEIGHT, _ENTRY, _BAR = 2.5, 0.24, 0.4

# Shapes of dots by the names of artifacts, in turn.
_MARKERS = "osD^vPX*"

_STYLE = {
    "axes.edgecolor": _SOFT,
    "axes.grid": True,
    "axes.labelcolor": _SOFT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "grid.color": _TRACK,
    "legend.frameon": False,
    # Pixels: a line takes as many points as can be seen, however long the run.
    "path.simplify_threshold": 1.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "dist_sparse",
    # "$" in the name of a table is not a formula.
    "text.parse_math": False,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
}

# matplotlib would name itself and the date.
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


# An entry of a legend.
Entry = tuple[Artist, str]


def svg_of(chart: Chart, *, titled: bool = True) -> str:
    """Return a chart as a file that needs no other."""
    # "default": not what the user has set for figures of another kind.
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # About characters that its own font lacks; the reader's may have them.
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(layout="constrained")
        axes = figure.add_subplot()
        if titled:
            axes.set_title(_cut(chart.title, 45))
        legend: list[Entry] = []
        if chart.bars:
            _draw_bars(chart, axes)
        elif chart.dots:
            legend = _draw_dots(chart, axes)
        else:
            legend = _draw_lines(chart, axes)
        columns = 1
        # A single line needs no legend: the title of the chart names it.
        if len(legend) > 1:
            drawn, names = zip(*legend, strict=True)
            columns = 2 if max(map(len, names)) <= 16 else 1
            figure.legend(drawn, names, loc="outside lower left", ncols=columns)
        plot = _BAR * len(chart.bars) + 0.3 if chart.bars else _HEIGHT
        figure.set_size_inches(_WIDTH, plot + _ENTRY * ceil(len(legend) / columns))
        text = StringIO()
        figure.savefig(text, format="svg", metadata=_NO_METADATA)
    return text.getvalue()


def _draw_lines(chart: Chart, axes: Axes) -> list[Entry]:
    legend: list[Entry] = []
    text_of: Callable[[float], str] = percent if chart.share else amount
    for line in chart.lines:
        [drawn] = axes.plot(*zip(*line.points, strict=True), color=_color(line))
        if line.steps:
            drawn.set_drawstyle("steps-post")
        if line.role == "raw":
            drawn.set(linewidth=0.6, alpha=0.4)
            continue
        if line.role == "target":
            drawn.set_linestyle(":")
        if line.role != "other":
            # In front: the first run, and the target that it should meet.
            drawn.set_zorder(3.0)
        legend.append((drawn, f"{_cut(line.name, 24)}: {text_of(line.heights[-1])}"))
    if chart.share:
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda height, _: short(height)))
    if chart.mark is not None:
        step, text = chart.mark
        axes.axvline(step, color=_SOFT, linestyle="--")
        axes.annotate(text, (step, 1.0), xycoords=("data", "axes fraction"))
    axes.set_xlim(left=0.0)
    # There are no half steps.
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: short(step)))
    axes.set_xlabel("step")
    return legend


def _draw_dots(chart: Chart, axes: Axes) -> list[Entry]:
    axes.set_xscale("log", base=2)
    legend: list[Entry] = []
    # A shape for each name: labels of dots that are near each other would overlap.
    names = dict.fromkeys(name for line in chart.lines for name in line.labels)
    shapes = dict(zip(names, cycle(_MARKERS), strict=False))
    places: list[float] = []
    for line in chart.lines:
        taken, heights = zip(*line.points, strict=True)
        [drawn] = axes.plot(taken, heights, color=_color(line))
        legend.append((drawn, _cut(line.name, 32)))
        places += taken
        for name, point in zip(line.labels, zip(taken, heights, strict=True), strict=True):
            axes.plot(*point, color=_color(line), marker=shapes[name])
    if chart.band is not None:
        low, high, text = chart.band
        shade = axes.axhspan(low, high, color=_MAIN, alpha=0.12, linewidth=0)
        legend.append((shade, _cut(text, 32)))
    for name, shape in shapes.items():
        drawn = Line2D([], [], color=_SOFT, linestyle="", marker=shape)
        legend.append((drawn, _cut(name, 32)))
    # At least one power of two to show the bytes.
    axes.set_xlim(min(places) / 1.5, max(places) * 1.5)
    axes.margins(y=0.15)
    axes.xaxis.set_major_locator(LogLocator(2, numticks=4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda taken, _: size(taken)))
    axes.set_xlabel("bytes, logarithmic")
    axes.set_ylabel("AUC")
    return legend


def _draw_bars(chart: Chart, axes: Axes) -> None:
    rows = range(len(chart.bars))
    axes.barh(rows, [bar.whole for bar in chart.bars], 0.35, color=_TRACK)
    axes.barh(rows, [bar.share for bar in chart.bars], 0.35, color=_MAIN)
    for row, bar in enumerate(chart.bars):
        # Above its bar: beside it, a long name would leave no room for the bar.
        axes.annotate(f"{_cut(bar.name, 24)}: {bar.text}", (0.0, row - 0.28))
    # From the top.
    axes.set_ylim(len(chart.bars) - 0.7, -0.8)
    axes.set_xlim(0.0, 1.0)
    axes.set_axis_off()


def _color(line: Line) -> str:
    if line.role == "target":
        return _SOFT
    return _OTHERS[line.number % len(_OTHERS)] if line.role == "other" else _MAIN


def _cut(text: str, most: int) -> str:
    """Return a name from a log in at most ``most`` characters, none of which controls a program."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
