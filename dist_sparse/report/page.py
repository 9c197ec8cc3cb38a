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
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dist_sparse.report import summary
from dist_sparse.report.charts import (
    MOST_TABLES,
    BarChart,
    Chart,
    DotChart,
    Dots,
    Line,
    LineChart,
    charts,
)
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

_COLORS = 9
"""Colors of compared runs, then they repeat."""
_MOST_TIPS = 64
_TIP_LINES = 7
_NEAR = 60
"""Units of the plot: labels of dots closer than this may overlap."""

_LAYERS = ("raw", "other", "main", "target")
_SIZES = [n * 1024.0**p for p in range(6) for n in (1, 2, 5, 10, 20, 50, 100, 200, 500)]

Label = tuple[float, str]
Shape = tuple[str, str]
Text = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Tip:
    """Text for a vertical strip of the plot, shown under a pointer. Places in percent; ``line``:
    within the strip."""

    left: float
    width: float
    text: tuple[str, ...]
    line: float


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Label of a dot, and text under a pointer. Places in percent; ``under``: the label is below
    the dot."""

    left: float
    top: float
    label: str
    text: tuple[str, ...]
    under: bool


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Shapes with axes.

    Args:
        caption: the same for a screen reader.
        shapes: look and path of each, the last on top.
        marks, below: numbers beside the axes, in percent from the top and from the left.
        label: of the horizontal axis.
        legend: look and name.
        tips, spots: text in the plot.
        mark: place and text of a vertical line.
    """

    caption: str
    shapes: tuple[Shape, ...]
    marks: tuple[Label, ...]
    below: tuple[Label, ...]
    label: str
    legend: Sequence[tuple[str, str]] = ()
    tips: Sequence[Tip] = ()
    spots: Sequence[Spot] = ()
    mark: Label | None = None

    @property
    def widest(self) -> str:
        """The longest number beside the plot, which decides how much room there is."""
        return max((text for _, text in self.marks), key=len, default="")


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """Axes of a plot: their ends, and the numbers and texts beside them.

    On a logarithmic horizontal axis (``log``), ``left`` and ``right`` are exponents of 10.
    """

    left: float
    right: float
    low: float
    high: float
    places: Sequence[float]
    place_text: Text
    label: str
    level_text: Text
    log: bool = False

    def x_of(self, value: float) -> float:
        # One decimal is a quarter of a pixel on a wide page, and keeps paths short.
        place = math.log10(value) if self.log else value
        return round(WIDTH * (place - self.left) / (self.right - self.left), 1)

    def y_of(self, value: float) -> float:
        # SVG counts from the top.
        return round(HEIGHT * (1 - (value - self.low) / (self.high - self.low)), 1)

    def plot(self, *, caption: str, shapes: Sequence[Shape], **texts: Any) -> Plot:
        """Return a plot of the shapes over a grid line for each level."""
        levels = ticks(self.low, self.high, 4)
        marks = tuple((100 * self.y_of(y) / HEIGHT, self.level_text(y)) for y in levels)
        # The grid comes first: shapes are drawn in their order.
        grid = [("grid", f"M0 {top * HEIGHT / 100:.1f}H{WIDTH}") for top, _ in marks]
        return Plot(
            caption=caption,
            shapes=(*grid, *shapes),
            marks=marks,
            below=tuple((100 * self.x_of(x) / WIDTH, self.place_text(x)) for x in self.places),
            label=self.label,
            **texts,
        )


def plot_of(chart: Chart) -> Plot | None:
    """Return a chart as shapes; None for bars, whose names and texts wrap on the page."""
    if isinstance(chart, BarChart):
        return None
    return _line_plot(chart) if isinstance(chart, LineChart) else _dot_plot(chart)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in [low, high], 1, 2, 2.5 or 5 times a power of ten apart, at most
    ``most + 1``."""
    # Also where one of them is not a number.
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [power * times for times in (1, 2, 2.5, 5, 10)]
    # 1e-9: a rough step that is round but for a rounding error is taken as it is.
    step = next(step for step in steps if step >= rough * (1 - 1e-9))
    # 12 digits: n * step has rounding errors that would show in a label.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def _every(values: list[float], most: int) -> list[float]:
    """Return every n-th value, at most ``most`` of them."""
    # -(-a // b) rounds up.
    return values[:: max(1, -(-len(values) // most))]


def _line_plot(chart: LineChart) -> Plot:
    axes = _line_axes(chart)
    text_of = percent if chart.share else amount
    # Values as logged are only behind their means.
    named = [line for line in chart.lines if line.role != "raw"]
    # Later shapes cover earlier ones: the run itself is on top of the others.
    layers = sorted(chart.lines, key=lambda line: _LAYERS.index(line.role))
    shapes = [(_look(line), _path(line, axes)) for line in layers]
    mark = None
    if chart.mark is not None:
        step, text = chart.mark
        mark = axes.x_of(step) / 10, text
        shapes.append(("mark", f"M{axes.x_of(step)} 0V{HEIGHT}"))
    return axes.plot(
        caption=f"{chart.title} over steps: {_ends(named, text_of)}.",
        shapes=shapes,
        mark=mark,
        # A single line has the name of its chart.
        legend=_legend(named) if len(named) > 1 else (),
        tips=_tips(named, axes, text_of),
    )


def _line_axes(chart: LineChart) -> _Axes:
    # A compared run may have gone further than the run itself.
    steps, heights = [0.0, max(float(chart.end), 1.0)], list[float]()
    for line in chart.lines:
        steps += line.steps_at
        heights += line.heights
    left, right = min(steps), max(steps)
    low, high = _range(heights, chart.share)
    return _Axes(
        left=left,
        right=right,
        low=low,
        high=high,
        # There are no half steps.
        places=[*filter(float.is_integer, ticks(left, right, 4))],
        place_text=_compact,
        level_text=_percent_tick if chart.share else _compact,
        label="step",
    )


def _legend(lines: Sequence[Line | Dots]) -> list[tuple[str, str]]:
    return [(_look(line), line.name) for line in lines]


def _ends(lines: Sequence[Line], text_of: Text) -> str:
    """Return the last value of each line."""
    return "; ".join(f"{line.name} ends at {text_of(line.heights[-1])}" for line in lines)


def _tips(lines: Sequence[Line], axes: _Axes, text_of: Text) -> list[Tip]:
    """Return the values at each step: one strip per point, halfway to its neighbors on both
    sides."""
    steps = set[float]().union(*(line.steps_at for line in lines))
    # Each strip is an element of the page: a line of 400 points has strips of several steps.
    shown = _every(sorted(steps), _MOST_TIPS)
    # Halfway to the neighbors: the strip under a pointer is the one of the nearest point.
    edges = [0.0, *((axes.x_of(a) + axes.x_of(b)) / 20 for a, b in pairwise(shown)), 100.0]
    tips = []
    for x, (left, right) in zip(shown, pairwise(edges), strict=True):
        text = [f"step {count(round(x))}"]
        for line in lines[:_TIP_LINES]:
            # Lines are thinned differently: one without a point at this step has the one before.
            if (value := _value_at(line, x)) is not None:
                text.append(f"{line.name}: {text_of(value)}")
        place = 100 * (axes.x_of(x) / 10 - left) / max(right - left, 1e-9)
        tips.append(Tip(left=left, width=right - left, text=tuple(text), line=place))
    return tips


def _value_at(line: Line, x: float) -> float | None:
    before = bisect_right(line.steps_at, x)
    return line.points[before - 1][1] if before else None


def _path(line: Line, axes: _Axes) -> str:
    """Return the path of a line, with gaps where a value is not finite."""
    # h0: with round ends, a point alone is a dot.
    begin, go_on = "M{} {}h0", "H{}V{}" if line.steps else "L{} {}"
    path, form = "", begin
    for step, value in line.points:
        if value is not None:
            path += form.format(axes.x_of(step), axes.y_of(value))
        form = begin if value is None else go_on
    return path


def _dot_plot(chart: DotChart) -> Plot:
    axes = _dot_axes(chart)
    shapes = []
    for run in chart.runs:
        places = [f"{axes.x_of(taken)} {axes.y_of(height)}" for _, taken, height in run.dots]
        shapes.append((f"{_look(run)} joined", f"M{'L'.join(places)}"))
        # A line of no length has round ends: a dot.
        shapes += [(f"{_look(run)} dot", f"M{place}h0") for place in places]
    spots = _spots(chart, axes)
    return axes.plot(
        caption=f"{chart.title}: {'; '.join(': '.join(spot.text) for spot in spots)}",
        shapes=shapes,
        legend=_legend(chart.runs),
        spots=spots,
    )


def _dot_axes(chart: DotChart) -> _Axes:
    _, sizes, metrics = zip(*chart.dots, strict=True)
    logs = [*map(math.log10, sizes)]
    # Dots at the edge would be cut in half; 0.02 where all have the same bytes.
    room = 0.06 * (max(logs) - min(logs)) + 0.02
    left, right = min(logs) - room, max(logs) + room
    low, high = _range(metrics, share=False)
    low, high = low - 0.08 * (high - low), high + 0.12 * (high - low)  # room for the labels
    visible = [each for each in _SIZES if left <= math.log10(each) <= right]
    return _Axes(
        left=left,
        right=right,
        low=low,
        high=high,
        places=_every(visible, 5),
        place_text=lambda taken: size(taken).replace(".00", "").replace(".0", ""),
        level_text=_compact,
        label="bytes, logarithmic",
        log=True,
    )


def _spots(chart: DotChart, axes: _Axes) -> list[Spot]:
    # Whether a label is above or below its dot depends on the dots of all runs.
    everywhere = [(axes.x_of(taken), axes.y_of(height)) for _, taken, height in chart.dots]
    spots = []
    for run in chart.runs:
        for number, (label, taken, height) in enumerate(run.dots):
            x, y = axes.x_of(taken), axes.y_of(height)
            name = f"{run.name}, {label}" if label else run.name
            spot = Spot(
                left=100 * x / WIDTH,
                top=100 * y / HEIGHT,
                label=label,
                text=(name, f"{size(taken)}, AUC {height:.4f}"),
                under=_is_under(x, y, everywhere, number),
            )
            spots.append(spot)
    return spots


def _is_under(x: float, y: float, dots: Sequence[tuple[float, float]], number: int) -> bool:
    """Return whether a dot's label is below it: away from the dots nearby, else below every other
    dot."""
    near = [y - other for at, other in dots if max(abs(x - at), abs(y - other)) < _NEAR]
    # Neighbors on the same height don't count: their labels are beside each other.
    offsets = [offset for offset in near if offset]
    # Below the lowest of near dots, above all others.
    return min(offsets) > 0 if offsets else number % 2 == 1


def _look(one: Line | Dots) -> str:
    """Return the classes of a line: a compared run has its own color, the same in all charts."""
    return f"other other{one.number % _COLORS}" if one.role == "other" else one.role


def _range(values: Sequence[float], share: bool) -> tuple[float, float]:
    """Return the ends of a vertical axis: with room around the values, from 0 for shares."""
    low, high = (0.0 if share else min(values)), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # only rounding errors
        low, high = low - 0.05 * (abs(low) or 1.0), high + 0.05 * (abs(high) or 1.0)
    # An axis from exactly 0 begins at its line.
    room = 0.05 * (high - low)
    return (low if low == 0 else low - room), high + room


def _percent_tick(value: float) -> str:
    return f"{100 * value:.4g}%"


def _compact(value: float) -> str:
    """Return ``625``, ``1.5M``."""
    for prefix, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 1,000 to 9,999 are short enough.
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{prefix}"
    return f"{value:.4g}"


_FOLDER: Final = Path(__file__).parent
_REPORT: Final = "report.html"
_SECTIONS: Final = {
    "auc": "Quality and bytes",
    "sparsity": "Over steps",
    "fates": "Over steps",
    "value": "Over steps",
    "bytes": "Tables",
    "traffic": "Tables",
}
"""The heading of each chart, by the first word of its key, in the order of the page."""

_WIDE: Final = ("auc", "bytes")
"""Charts as wide as the page."""

_TABLE_HEAD: Final = (
    *("table", "shape", "sharding", "block", "target", "sparsity", "blocks", "pruned"),
    *("bytes kept", "bytes dense", "mask bytes", "threshold", "dead rows"),
)
_COUNTS: Final = (
    *("blocks", "removed_blocks", "bytes_kept", "bytes_dense", "bytes_masks"),
    *("threshold", "dead_rows"),
)
"""The last columns of the table of all tables."""


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
        ImportError: jinja2 is not installed. OSError: a file can't be written. The old one is as it
            was.

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
    out = run.folder / _REPORT if out is None else Path(out)
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
    sections: dict[str, list[Any]] = {title: [] for title in _SECTIONS.values()}
    for chart in figures:
        word = chart.key.partition("_")[0]
        sections[_SECTIONS[word]].append((chart, plot_of(chart), word in _WIDE))
    series: dict[str, Any] = {}
    # Names of all runs, in the order of the first that has them.
    for one in run.all_runs:
        series |= one.values
    config = json.dumps(run.config, indent=2, ensure_ascii=False).split("\n")
    return render(
        "page.html",
        run=run,
        found=found,
        summary=summary,
        sections=sections,
        series=[*series],
        tables=_all_tables(found),
        table_head=_TABLE_HEAD,
        counts=_COUNTS,
        most_tables=MOST_TABLES,
        config=config if run.config else [],
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
    texts = (amount, block_shape_text, count, duration, number_of, percent, size)
    environment.filters |= {text.__name__: text for text in texts}
    environment.filters |= {"short": _short, "known": lambda text: "" if text == "-" else text}
    return environment


def _visible(value: Any) -> Any:
    """Return text from a run without control characters; the project's own markup has line ends."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return value


def _short(text: str, most: int) -> str:
    """Return text that fits a place of fixed width."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
