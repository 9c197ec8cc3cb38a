"""The report of a run: one HTML file, and each chart as an SVG file of its own.

This module computes the content of the page, and ``page.html`` lays it out. The page loads nothing
(no network, font or image), and its only script sorts and filters tables. Templates escape every
text from a run, and control characters in it are made visible.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_sparse.report import summary
from dist_sparse.report.charts import MOST_TABLES, Chart, Line, charts, finite
from dist_sparse.report.folder import write_whole
from dist_sparse.report.run import Run, read_run
from dist_sparse.report.summary import TABLE_FIELDS, numbers
from dist_sparse.text import (
    amount,
    block_shape_text,
    count,
    duration,
    number_of,
    percent,
    printable,
    short,
    size,
)

if TYPE_CHECKING:
    from jinja2 import Environment


# ------------------------------------------------------------------------------
# Charts as shapes, and as files: the page and the SVG files draw the same :class:`Plot`.
#
# A plot is WIDTH by HEIGHT units large. Text around it is placed in percent, so that on the page
# lines stretch with the window while text keeps its size. A shape has a CSS class; the template
# holds its color and width.

WIDTH, HEIGHT = 1000, 400

# Colors of compared runs in page.css; further runs repeat them.
_COLORS = 9

# Limits of tooltips: strips of a plot, and lines of text in each.
_MOST_TIPS = 64
_TIP_LINES = 7

# Roles of lines, from the back to the front.
_LAYERS = ("raw", "other", "main", "target")

# Candidates for ticks on an axis of bytes: 1, 2, 5, ... 500 of B, KiB, ... PiB.
_SIZES = [n * 1024.0**p for p in range(6) for n in (1, 2, 5, 10, 20, 50, 100, 200, 500)]

Formatter = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Shapes with axes.

    Args:
        caption: text for screen readers.
        shapes: CSS class and SVG path of each, the last on top.
        marks: numbers of the vertical axis, each with its place in percent from the top.
        below: numbers of the horizontal axis, each with its place in percent from the left.
        label: the name of the horizontal axis.
        legend: CSS class and name of each line.
        tips: tooltips of vertical strips: the ``text``; ``left`` and ``width`` of the strip in
            percent of the plot; the place of its ``line`` in percent of the strip.
        spots: tooltips of dots: the ``text``; the ``label`` beside the dot, below it if ``under``;
            ``left`` and ``top`` in percent.
        mark: place in percent and text of a vertical line.
    """

    caption: str
    shapes: Sequence[tuple[str, str]]
    marks: Sequence[tuple[float, str]]
    below: Sequence[tuple[float, str]]
    label: str
    legend: Sequence[tuple[str, str]] = ()
    tips: Sequence[Mapping[str, Any]] = ()
    spots: Sequence[Mapping[str, Any]] = ()
    mark: tuple[float, str] | None = None

    @property
    def widest(self) -> str:
        """The longest number of the vertical axis, which sets the width of its column."""
        return max(dict(self.marks).values(), key=len, default="")


class _Axes:
    """Axes of a chart.

    Args:
        left, right: ends of the horizontal axis, after ``scale``.
        scale: the scale of the horizontal axis: ``float`` for steps, ``log10`` for bytes.
    """

    def __init__(
        self, chart: Chart, left: float, right: float, scale: Callable[[float], float]
    ) -> None:
        self.left, self.right, self.scale = left, right, scale
        self.low, self.high = _axis_range(chart.heights, chart.share)
        # How values are written: in tooltips, and beside the axis, where there is less room.
        self.text_of: Formatter = amount
        self.mark_of: Formatter = short
        if chart.share:
            self.text_of = percent
            self.mark_of = lambda share: f"{100 * share:.4g}%"

    def x_of(self, value: float) -> float:
        # One decimal is a quarter of a pixel on a wide page, and keeps paths short.
        return round(WIDTH * (self.scale(value) - self.left) / (self.right - self.left), 1)

    def percent_of(self, value: float) -> float:
        return 100 * self.x_of(value) / WIDTH

    def y_of(self, value: float) -> float:
        # SVG counts from the top.
        return round(HEIGHT * (1 - (value - self.low) / (self.high - self.low)), 1)

    def grid(self) -> tuple[list[tuple[float, str]], list[tuple[str, str]]]:
        """Return the numbers of the vertical axis, and a line across the plot for each."""
        marks, lines = [], []
        for level in ticks(self.low, self.high, 4):
            top = self.y_of(level)
            marks.append((100 * top / HEIGHT, self.mark_of(level)))
            lines.append(("grid", f"M0 {top:.1f}H{WIDTH}"))
        return marks, lines


def plot_of(chart: Chart) -> Plot | None:
    """Return a chart as shapes; None for bars, whose names and texts wrap on the page."""
    if chart.bars:
        return None
    return _dot_plot(chart) if chart.dots else _line_plot(chart)


def _line_plot(chart: Chart) -> Plot:
    # 1.0: an axis of a single step would have no length. A compared run may have more steps.
    steps = [0.0, 1.0, float(chart.end), *chart.places]
    axes = _Axes(chart, min(steps), max(steps), float)
    below = []
    for step in ticks(axes.left, axes.right, 4):
        # There are no half steps.
        if step.is_integer():
            below.append((axes.percent_of(step), short(step)))
    marks, shapes = axes.grid()
    # Later shapes cover earlier ones.
    for line in sorted(chart.lines, key=lambda line: _LAYERS.index(line.role)):
        shapes.append((_css_class(line), _path(line, axes)))
    mark = None
    if chart.mark is not None:
        step, text = chart.mark
        mark = axes.percent_of(step), text
        shapes.append(("mark", f"M{axes.x_of(step)} 0V{HEIGHT}"))
    named, ends, legend = list[Line](), list[str](), list[tuple[str, str]]()
    for line in chart.lines:
        # Logged values are drawn behind their means, and have no name of their own.
        if line.role == "raw":
            continue
        named.append(line)
        ends.append(f"{line.name} ends at {axes.text_of(line.heights[-1])}")
        legend.append((_css_class(line), line.name))
    return Plot(
        caption=f"{chart.title} over steps: {'; '.join(ends)}.",
        shapes=shapes,
        marks=marks,
        below=below,
        label="step",
        mark=mark,
        # A single line needs no legend: the title of the chart names it.
        legend=legend if len(named) > 1 else [],
        tips=_tips(named, axes),
    )


def _dot_plot(chart: Chart) -> Plot:
    least, most = math.log10(min(chart.places)), math.log10(max(chart.places))
    # Dots at the edge would be cut in half; 0.02 if all have the same bytes.
    room = 0.06 * (most - least) + 0.02
    axes = _Axes(chart, least - room, most + room, math.log10)
    # Room for the labels below and above the dots.
    height = axes.high - axes.low
    axes.low -= 0.08 * height
    axes.high += 0.12 * height
    below = []
    for tick in _SIZES:
        if axes.left <= math.log10(tick) <= axes.right:
            text = size(tick).replace(".00", "").replace(".0", "")
            below.append((axes.percent_of(tick), text))
    marks, shapes = axes.grid()
    legend, spots, texts = list[tuple[str, str]](), list[dict[str, Any]](), list[str]()
    for line in chart.lines:
        look = _css_class(line)
        legend.append((look, line.name))
        shapes.append((f"{look} joined", _path(line, axes)))
        for label, taken, auc in zip(line.labels, line.places, line.heights, strict=True):
            x, y = axes.x_of(taken), axes.y_of(auc)
            # A line of no length is a dot: its ends are round.
            shapes.append((f"{look} dot", f"M{x} {y}h0"))
            tip = f"{line.name}, {label}", f"{size(taken)}, AUC {auc:.4f}"
            left, top = axes.percent_of(taken), 100 * y / HEIGHT
            spots.append({"left": left, "top": top, "label": label, "text": tip})
            texts.append(": ".join(tip))
    drawn: list[Any] = []
    # From the top: a label is above its dot, unless a dot or a label that is drawn is there.
    for spot in sorted(spots, key=lambda each: each["top"]):
        left, top = spot["left"], spot["top"]
        under = any(max(abs(x - left) / 4, abs(y - top + 9) / 9) < 1 for x, y in drawn)
        spot["under"] = under
        drawn += [(left, top), (left, top + 18 * under - 9)]
    return Plot(
        caption=f"{chart.title}: {'; '.join(texts)}",
        shapes=shapes,
        marks=marks,
        below=_every_nth(below, 5),
        label="bytes, logarithmic",
        legend=legend,
        spots=spots,
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in [low, high], 1, 2, 2.5 or 5 times a power of ten apart, at most
    ``most + 1``."""
    # Not `high <= low`, which is False for NaN.
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    # 1e-9: a rough step that is a rounding error above a round one must not jump to the next.
    steps = [power * times for times in (1, 2, 2.5, 5, 10)]
    step = steps[bisect_left(steps, rough * (1 - 1e-9))]
    # 12 digits: n * step has rounding errors that would show in a label.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def _every_nth(values: list[Any], most: int) -> list[Any]:
    """Return every n-th value, with the least n that leaves at most ``most``."""
    return values[:: max(1, math.ceil(len(values) / most))]


def _tips(lines: Sequence[Line], axes: _Axes) -> list[dict[str, Any]]:
    """Return the tooltips of the values at each step: vertical strips, side by side."""
    # A strip is an element of the page: with many steps, only every n-th has one.
    steps = sorted(set(chain(*(line.places for line in lines))))
    shown = _every_nth(steps, _MOST_TIPS)
    # Strips meet halfway between steps, so that a pointer shows the nearest one.
    edges = [
        0.0,
        *((left + right) / 2 for left, right in pairwise(map(axes.percent_of, shown))),
        100.0,
    ]
    tips = []
    for x, (left, right) in zip(shown, pairwise(edges), strict=True):
        text = [f"step {count(round(x))}"]
        for line in lines[:_TIP_LINES]:
            # Lines are thinned independently: without a point at this step, show the one before.
            before = line.points[: bisect_right(line.places, x)]
            for _, value in finite(before[-1:]):
                text.append(f"{line.name}: {axes.text_of(value)}")
        place = 100 * (axes.percent_of(x) - left) / max(right - left, 1e-9)
        tips.append({"left": left, "width": right - left, "text": text, "line": place})
    return tips


def _path(line: Line, axes: _Axes) -> str:
    """Return the path of a line, with gaps where a value is not finite."""
    # h0, a line of no length: a point between two gaps is drawn as a dot.
    move, draw = "M{} {}h0", "H{}V{}" if line.steps else "L{} {}"
    path, command = "", move
    for x, value in line.points:
        if value is None:
            command = move
        else:
            path += command.format(axes.x_of(x), axes.y_of(value))
            command = draw
    return path


def _css_class(line: Line) -> str:
    """Return the classes of a line: a compared run has one color in all charts."""
    return f"other other{line.number % _COLORS}" if line.role == "other" else line.role


def _axis_range(values: Sequence[float], share: bool) -> tuple[float, float]:
    """Return the ends of a vertical axis, with room around the values. Shares begin at 0."""
    low, high = min(values), max(values)
    if share:
        return 0.0, 1.05 * high
    room = 0.05 * (high - low)
    # The values differ by rounding errors at most: draw a flat line.
    if room <= 1e-9 * max(abs(low), abs(high)):
        room = 0.05 * (abs(low) or 1.0)
    return low - room, high + room


_FOLDER = Path(__file__).parent
_REPORT = "report.html"

# The heading above a chart, by the first word of its key.
_SECTIONS = {
    "auc": "Quality and bytes",
    **dict.fromkeys(("sparsity", "fates", "value"), "Over steps"),
    **dict.fromkeys(("bytes", "traffic"), "Tables"),
}


def write_report(
    run: Run | str | Path, out: str | Path | None = None, *, svg: str | Path | None = None
) -> Path:
    """Write the report of a run, with the config and the command of its script.

    An existing file is replaced once the new one is complete. A symbolic link is replaced, not
    followed.

    Args:
        run: folder that a :class:`~dist_sparse.RunLog` wrote, or the
            :class:`~dist_sparse.report.Run` read from it.
        out: the HTML file; ``report.html`` in the folder by default.
        svg: folder, created if missing, in which each chart is written as ``<chart>.svg`` too.

    Returns:
        ``out``.

    Raises:
        ValueError: there is no such run, or it cannot be read, or ``out`` is not a regular file;
            names the file.
        ImportError: jinja2 is not installed.
        OSError: a file can't be written. The old one is as it was.

    Example::

        >>> import tempfile
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import write_report
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder) as log:
        ...     log.step(0, loss=0.5)
        >>> write_report(folder).name
        'report.html'
    """
    run = run if isinstance(run, Run) else read_run(run)
    out = Path(out or run.folder / _REPORT)
    figures = charts(run)
    # All are rendered before the first is written: an error leaves the old files.
    contents = {out: page(run, figures).encode()}
    if svg is not None:
        contents |= {Path(svg) / f"{chart.key}.svg": svg_of(chart).encode() for chart in figures}
    for file, content in contents.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Readable by all: a report is shared. The log beside it stays private.
        write_whole(file, content, shared=True)
    return out


def page(run: Run, figures: Sequence[Chart]) -> str:
    """Return the HTML of a run and its charts.

    Raises:
        ImportError: jinja2 is not installed.
    """
    found, script = numbers(run), part("page.js")
    sections = defaultdict(list)
    for chart in figures:
        section = _SECTIONS[chart.key.partition("_")[0]]
        sections[section].append((chart, plot_of(chart)))
    # Each name once, in the order of the runs: a set would have no order.
    series = dict.fromkeys(chain(*(one.values for one in run.all_runs)))
    return render(
        "page.html",
        run=run,
        found=found,
        summary=summary,
        sections=sections,
        series=[*series],
        tables=_all_tables(found),
        most_tables=MOST_TABLES,
        config=json.dumps(run.config, indent=2, ensure_ascii=False).split("\n"),
        style=part("page.css"),
        script=script,
        # The page's policy allows this script and no other.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
    )


def _all_tables(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sparsified tables and the others, the largest first."""
    tables = [*found["tables"]]
    # Tables without a sparsifier have known bytes only, and keep all of them.
    for name, taken in found["other_tables"].items():
        sizes = dict.fromkeys(("bytes_kept", "bytes_dense"), taken)
        tables.append(dict.fromkeys(TABLE_FIELDS) | sizes | {"name": name})
    tables.sort(key=lambda table: (-(table["bytes_dense"] or table["blocks"] or 0), table["name"]))
    return tables


def svg_of(chart: Chart) -> str:
    """Return a chart as a file that needs no other: axes, text and styles, light and dark.

    Raises:
        ImportError: jinja2 is not installed.
    """
    return render("chart.svg", chart=chart, plot=plot_of(chart), WIDTH=WIDTH, HEIGHT=HEIGHT)


def render(template: str, **values: Any) -> str:
    """Return a template filled with values, all escaped.

    Raises:
        ImportError: jinja2 is not installed.
    """
    return environment().get_template(template).render(values)


def part(name: str) -> str:
    """Return a file of this package as markup, which templates do not escape."""
    from markupsafe import Markup

    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    """Return the Jinja2 environment of the templates.

    Raises:
        ImportError: jinja2 is not installed.
    """
    # Imported here: jinja2 comes with torch, and `dist-sparse inspect` works without torch.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        # Not select_autoescape(), which leaves .svg files unescaped.
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_escape_controls,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (amount, block_shape_text, count, duration, number_of, percent, printable, size)
    environment.filters |= {function.__name__: function for function in filters}
    environment.filters |= {"known": lambda text: "" if text == "-" else text}
    return environment


def _escape_controls(value: Any) -> Any:
    """Escape control characters in text from a run."""
    # Not isinstance(): Markup is a str too. It is this package's own text, and has newlines.
    if type(value) is str:
        return printable(value)
    return value
