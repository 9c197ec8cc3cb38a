"""The report of a run: one HTML file, and each chart as an SVG file of its own.

This module decides what is on the page; ``page.html`` lays it out. The page needs no network, font
or image, and no script but to sort and filter its tables. Everything that a template prints from a
run is escaped, and control characters in it are made visible.
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
from operator import attrgetter, itemgetter
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
    size,
)

if TYPE_CHECKING:
    from jinja2 import Environment


# ------------------------------------------------------------------------------
# Charts as shapes, and as files: the page and the SVG files draw the same :class:`Plot`.
#
# A plot is WIDTH by HEIGHT units large. Text around it is placed in percent, so that on the page
# lines stretch with the window while text keeps its size. Colors and widths belong to the template,
# by the name of a shape's look.

WIDTH, HEIGHT = 1000, 400

# Colors of compared runs, then they repeat.
_COLORS = 9
_MOST_TIPS = 64
_TIP_LINES = 7

_LAYERS = ("raw", "other", "main", "target")
_SIZES = [n * 1024.0**p for p in range(6) for n in (1, 2, 5, 10, 20, 50, 100, 200, 500)]

Text = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Shapes with axes.

    Args:
        caption: the same for a screen reader.
        shapes: look and path of each, the last on top.
        marks, below: numbers beside the axes, in percent from the top and from the left.
        label: of the horizontal axis.
        legend: look and name.
        tips: ``text`` for vertical strips of the plot, shown under a pointer: ``left`` and
            ``width`` in percent of the plot, the place of ``line`` in percent of the strip.
        spots: the ``label`` of dots, and ``text`` shown under a pointer: ``left`` and ``top`` in
            percent; ``under``: the label is below the dot.
        mark: place and text of a vertical line.
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
        """The longest number beside the plot, which decides how much room there is."""
        return max(map(itemgetter(1), self.marks), key=len, default="")


class _Axes:
    """Axes of a chart: from ``left`` to ``right`` on the scale of steps, or of bytes."""

    def __init__(
        self, chart: Chart, left: float, right: float, scale: Callable[[float], float]
    ) -> None:
        self.left, self.right, self.scale = left, right, scale
        self.low, self.high = _range(chart.heights, chart.share)
        # The texts of heights: of points, and beside the axis, where there is less room.
        texts: tuple[Text, Text] = (percent, _percent_tick) if chart.share else (amount, _compact)
        self.text_of, self.mark_of = texts

    def x_of(self, value: float) -> float:
        # One decimal is a quarter of a pixel on a wide page, and keeps paths short.
        return round(WIDTH * (self.scale(value) - self.left) / (self.right - self.left), 1)

    def y_of(self, value: float) -> float:
        # SVG counts from the top.
        return round(HEIGHT * (1 - (value - self.low) / (self.high - self.low)), 1)

    def numbers(self, below: Mapping[float, str]) -> dict[str, Any]:
        """Return what a plot has beside its shapes: the numbers of both axes, and its grid."""
        marks, grid = [], []
        for level in ticks(self.low, self.high, 4):
            top = self.y_of(level)
            marks.append((100 * top / HEIGHT, self.mark_of(level)))
            grid.append(("grid", f"M0 {top:.1f}H{WIDTH}"))
        places = [(100 * self.x_of(x) / WIDTH, text) for x, text in below.items()]
        return {"marks": marks, "below": places, "grid": grid}


def plot_of(chart: Chart) -> Plot | None:
    """Return a chart as shapes; None for bars, whose names and texts wrap on the page."""
    if chart.bars:
        return None
    return _dot_plot(chart) if chart.dots else _line_plot(chart)


def _line_plot(chart: Chart) -> Plot:
    # A compared run may have gone further than the run itself.
    steps = [0.0, 1.0, float(chart.end), *chart.places]
    axes = _Axes(chart, min(steps), max(steps), float)
    # There are no half steps.
    whole = [*filter(float.is_integer, ticks(axes.left, axes.right, 4))]
    numbers = axes.numbers(dict(zip(whole, map(_compact, whole), strict=True)))
    # The grid comes first, and later shapes cover earlier ones: the run itself is on top.
    layers = sorted(chart.lines, key=lambda line: _LAYERS.index(line.role))
    shapes = numbers.pop("grid") + [(_look(line), _path(line, axes)) for line in layers]
    mark = None
    if chart.mark is not None:
        step, text = chart.mark
        mark = axes.x_of(step) / 10, text
        shapes.append(("mark", f"M{axes.x_of(step)} 0V{HEIGHT}"))
    named = list[Line]()
    ends = list[str]()
    legend = list[tuple[str, str]]()
    for line in chart.lines:
        # Values as logged are only behind their means.
        if line.role != "raw":
            named.append(line)
            ends.append(f"{line.name} ends at {axes.text_of(line.heights[-1])}")
            legend.append((_look(line), line.name))
    return Plot(
        caption=f"{chart.title} over steps: {'; '.join(ends)}.",
        shapes=shapes,
        label="step",
        mark=mark,
        # A single line has the name of its chart.
        legend=legend if len(named) > 1 else [],
        tips=_tips(named, axes),
        **numbers,
    )


def _dot_plot(chart: Chart) -> Plot:
    logs = [*map(math.log10, chart.places)]
    # Dots at the edge would be cut in half; 0.02 where all have the same bytes.
    room = 0.06 * (max(logs) - min(logs)) + 0.02
    axes = _Axes(chart, min(logs) - room, max(logs) + room, math.log10)
    # Room for the labels.
    height = axes.high - axes.low
    axes.low, axes.high = axes.low - 0.08 * height, axes.high + 0.12 * height
    below = {}
    for each in _SIZES:
        if axes.left <= math.log10(each) <= axes.right:
            below[each] = size(each).replace(".00", "").replace(".0", "")
    numbers = axes.numbers(dict(_every([*below.items()], 5)))
    shapes = numbers.pop("grid")
    spots = list[dict[str, Any]]()
    texts = list[str]()
    for place, line in enumerate(chart.lines):
        shapes.append((f"{_look(line)} joined", _path(line, axes)))
        dots = zip(line.labels, line.places, line.heights, strict=True)
        for number, (label, taken, auc) in enumerate(dots):
            x, y = axes.x_of(taken), axes.y_of(auc)
            # A line of no length has round ends: a dot.
            shapes.append((f"{_look(line)} dot", f"M{x} {y}h0"))
            spot: dict[str, Any] = {"left": 100 * x / WIDTH, "top": 100 * y / HEIGHT}
            spot["label"] = label
            spot["text"] = (f"{line.name}, {label}", f"{size(taken)}, AUC {auc:.4f}")
            texts.append(": ".join(spot["text"]))
            # On both sides in turn, so that labels of neighbors are apart.
            spots.append(spot | {"under": (place + number) % 2 == 1})
    return Plot(
        caption=f"{chart.title}: {'; '.join(texts)}",
        shapes=shapes,
        label="bytes, logarithmic",
        legend=[(_look(line), line.name) for line in chart.lines],
        spots=spots,
        **numbers,
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in [low, high], 1, 2, 2.5 or 5 times a power of ten apart, at most
    ``most + 1``."""
    # Also where one of them is not a number.
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    # 1e-9: a rough step that is round but for a rounding error is taken as it is.
    steps = [power * times for times in (1, 2, 2.5, 5, 10)]
    step = steps[bisect_left(steps, rough * (1 - 1e-9))]
    # 12 digits: n * step has rounding errors that would show in a label.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def _every(values: list[Any], most: int) -> list[Any]:
    """Return every n-th value, at most ``most`` of them."""
    # -(-a // b) rounds up.
    return values[:: max(1, -(-len(values) // most))]


def _tips(lines: Sequence[Line], axes: _Axes) -> list[dict[str, Any]]:
    """Return the values at each step: one strip per point, halfway to its neighbors on both
    sides."""
    steps = set[float]().union(*map(attrgetter("places"), lines))
    # Each strip is an element of the page: a line of 400 points has strips of several steps.
    shown = _every(sorted(steps), _MOST_TIPS)
    # Halfway to the neighbors: the strip under a pointer is the one of the nearest point.
    edges = [0.0, *((axes.x_of(a) + axes.x_of(b)) / 20 for a, b in pairwise(shown)), 100.0]
    tips = []
    for x, (left, right) in zip(shown, pairwise(edges), strict=True):
        text = [f"step {count(round(x))}"]
        for line in lines[:_TIP_LINES]:
            # Lines are thinned differently: one without a point at this step has the one before.
            before = line.points[: bisect_right(line.places, x)]
            for _, value in finite(before[-1:]):
                text.append(f"{line.name}: {axes.text_of(value)}")
        place = 100 * (axes.x_of(x) / 10 - left) / max(right - left, 1e-9)
        tips.append({"left": left, "width": right - left, "text": text, "line": place})
    return tips


def _path(line: Line, axes: _Axes) -> str:
    """Return the path of a line, with gaps where a value is not finite."""
    # h0: with round ends, a point alone is a dot.
    begin, go_on = "M{} {}h0", "H{}V{}" if line.steps else "L{} {}"
    path, form = "", begin
    for x, value in line.points:
        if value is None:
            form = begin
        else:
            path += form.format(axes.x_of(x), axes.y_of(value))
            form = go_on
    return path


def _look(one: Line) -> str:
    """Return the classes of a line: a compared run has its own color, the same in all charts."""
    return f"other other{one.number % _COLORS}" if one.role == "other" else one.role


def _range(values: Sequence[float], share: bool) -> tuple[float, float]:
    """Return the ends of a vertical axis: with room around the values, from 0 for shares."""
    low, high = min(values), max(values)
    if share:
        return 0.0, 1.05 * high
    room = 0.05 * (high - low)
    if room <= 1e-9 * max(abs(low), abs(high)):  # only rounding errors
        room = 0.05 * (abs(low) or 1.0)
    return low - room, high + room


def _percent_tick(value: float) -> str:
    return f"{100 * value:.4g}%"


def _compact(value: float) -> str:
    """Return ``625``, ``1.5M``."""
    for prefix, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 1,000 to 9,999 are short enough.
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{prefix}"
    return f"{value:.4g}"


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

    A file that is there is replaced once the new one is whole; a symbolic link is replaced, not
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
    # All of them before the first is written: a failure leaves the old ones.
    contents = {out: page(run, figures).encode()}
    if svg is not None:
        contents |= {Path(svg) / f"{chart.key}.svg": svg_of(chart).encode() for chart in figures}
    for file, content in contents.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        # A report exists to be shown; the log beside it stays private.
        write_whole(file, content, shared=True)
    return out


def page(run: Run, figures: Sequence[Chart]) -> str:
    """Return the HTML of a run and its charts.

    Raises:
        ImportError: jinja2 is not installed.
    """
    found, script = numbers(run), part("page.js")
    # Charts come in the order of their sections.
    sections = defaultdict(list)
    for chart in figures:
        section = _SECTIONS[chart.key.partition("_")[0]]
        sections[section].append((chart, plot_of(chart)))
    # Names of all runs, in the order of the first that has them.
    series = dict.fromkeys(chain.from_iterable(map(attrgetter("values"), run.all_runs)))
    config = json.dumps(run.config, indent=2, ensure_ascii=False).split("\n")
    return render(
        "page.html",
        run=run,
        found=found,
        summary=summary,
        sections=sections,
        series=[*series],
        tables=_all_tables(found),
        most_tables=MOST_TABLES,
        config=config,
        style=part("page.css"),
        script=script,
        # The page's policy allows this script and no other.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
    )


def _all_tables(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the registered tables and the others, the largest first."""
    tables = [*found["tables"]]  # numbers() keeps the two apart
    # Of these only the bytes are known, and all of them are kept.
    for name, taken in found["other_tables"].items():
        unknown = dict.fromkeys(TABLE_FIELDS)
        tables.append({**unknown, "name": name, "bytes_kept": taken, "bytes_dense": taken})
    tables.sort(key=lambda table: (-(table["bytes_dense"] or table["blocks"] or 0), table["name"]))
    return tables


def svg_of(chart: Chart) -> str:
    """Return a chart as a file of its own: axes, text and style within, light and dark.

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
    """Return a file of the page, which Jinja2 takes for markup: never text from a run."""
    from markupsafe import Markup  # jinja2 needs it

    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


@cache
def environment() -> Environment:
    # torch brings it, but runs are read without torch.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,  # by name it would leave .svg out
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,  # a file ends with one
    )
    texts = (amount, block_shape_text, count, duration, number_of, percent, printable, size)
    environment.filters |= {text.__name__: text for text in texts}
    environment.filters |= {"known": lambda text: "" if text == "-" else text}
    return environment


def _visible(value: Any) -> Any:
    """Return text from a run without control characters."""
    # Not of a subclass of str: that is the project's own markup, and has line ends.
    if type(value) is str:
        return printable(value)
    return value
