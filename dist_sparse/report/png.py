"""Charts as PNG files, for slides and papers. Imports matplotlib when called; nothing else does."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dist_sparse.report.figures import BarChart, Chart, DotChart, LineChart, ScoreChart
from dist_sparse.text import amount, percent, printable, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "png_files"]

_DPI = 150
_MAIN, _GONE = "#1d5fc4", "#b3500a"
_KINDS = {"gone": (_GONE, "pruned"), "kept": (_MAIN, "kept"), "both": ("#8a6a4a", "both")}
_OTHERS = ("#b3500a", "#18794e", "#8a3fb5", "#b02a52")
_LOOKS: dict[str, dict[str, Any]] = {
    "main": {"color": _MAIN, "linewidth": 2.2, "zorder": 5},
    "target": {"color": "#5a6472", "linewidth": 1.8, "linestyle": ":", "zorder": 4},
    "other": {"linewidth": 1.8, "zorder": 3},
    "raw": {"color": _MAIN, "linewidth": 0.8, "alpha": 0.4, "zorder": 2},
    "table": {"color": "#8a97a8", "linewidth": 0.8, "alpha": 0.75, "zorder": 1},
}


def png_files(charts: Sequence[Chart]) -> dict[str, bytes]:
    """Return each chart as a PNG 1050 pixels wide, by its key.

    Raises:
        ImportError: matplotlib is not installed.
    """
    files = {}
    for chart in charts:
        held = io.BytesIO()
        with warnings.catch_warnings():  # matplotlib's font lacks the scripts of some names
            warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
            warnings.filterwarnings("ignore", message="Matplotlib currently does not support", category=UserWarning)
            figure(chart).savefig(held, format="png", dpi=_DPI)
        files[chart.key] = held.getvalue()
    return files


def figure(chart: Chart) -> Figure:
    """Return a chart as a figure 7 inches wide that pyplot does not know.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "PNGs need matplotlib: pip install matplotlib; or leave them out: --no-png, pngs=False."
        ) from error
    rows = len(chart.bars) if isinstance(chart, BarChart) else 0
    made = Figure(figsize=(7, max(2.6, 1.2 + 0.27 * rows) if rows else 3.6), layout="constrained")
    axes = made.add_subplot()
    # A $ in a name would begin a formula.
    axes.set_title(_short(chart.title, 60), loc="left", fontweight="bold", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    if isinstance(chart, LineChart):
        _lines(axes, chart)
    elif isinstance(chart, ScoreChart):
        _scores(axes, chart)
    elif isinstance(chart, DotChart):
        _dots(axes, chart)
    else:
        _bars(axes, chart)
    return made


def _lines(axes: Any, chart: LineChart) -> None:
    for line in chart.lines:
        look = dict(_LOOKS[line.role])
        if line.role == "other":
            look["color"] = _OTHERS[line.number % len(_OTHERS)]
        shown = [(x, float("nan") if y is None else y) for x, y in line.points]
        xs, ys = zip(*shown, strict=True)
        label = _short(line.name, 32) if line.role in ("main", "target", "other") else "_"
        axes.plot(xs, ys, drawstyle="steps-post" if line.steps else "default", label=label, **look)
    axes.set_xlabel("step")
    axes.set_xlim(left=0, right=max(chart.end, 1))
    axes.grid(axis="y", color="#e6eaf0")
    if chart.share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        axes.set_ylim(bottom=0)
    _legend(axes)


def _scores(axes: Any, chart: ScoreChart) -> None:
    for kind, (color, label) in _KINDS.items():
        for i, piece in enumerate(one for one in chart.bins if one.kind(chart.threshold) == kind):
            wide = piece.high - piece.low
            axes.bar(piece.low, piece.density, wide, align="edge", color=color, label=None if i else label)
    axes.set_xscale("log")
    axes.set_xlabel(f"score ({percent(chart.zeros)} of the blocks scored 0, not shown)")
    axes.set_ylabel("blocks per octave")
    if chart.threshold > 0:
        axes.axvline(chart.threshold, color="black", linestyle="--", label=f"threshold {amount(chart.threshold)}")
    _legend(axes)


def _dots(axes: Any, chart: DotChart) -> None:
    for run in chart.runs:
        color = _OTHERS[run.number % len(_OTHERS)] if run.role == "other" else _MAIN
        names, taken, aucs = zip(*run.dots, strict=True)
        axes.plot(
            taken, aucs, marker="o", color=color, label=_short(run.name, 32), zorder=5 if run.role == "main" else 3
        )
        for name, x, y in zip(names, taken, aucs, strict=True):
            label = _short(name, 16)
            axes.annotate(label, (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=8, parse_math=False)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: size(value))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel("bytes")
    axes.set_ylabel("AUC")
    axes.grid(axis="y", color="#e6eaf0")
    axes.margins(0.08, 0.12)
    _legend(axes)


def _bars(axes: Any, chart: BarChart) -> None:
    places = range(len(chart.bars))
    axes.barh(places, [bar.whole for bar in chart.bars], color="#e3e8ef")
    axes.barh(places, [bar.share for bar in chart.bars], color=_MAIN)
    axes.set_yticks(places, [_short(bar.name, 32) for bar in chart.bars], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_visible(False)  # the texts say it
    for place, bar in enumerate(chart.bars):
        axes.text(1.02, place, bar.text, va="center", fontsize=8, transform=axes.get_yaxis_transform())


def _short(name: str, most: int) -> str:
    name = printable(name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[1]:
        for text in axes.legend(frameon=False, fontsize=8).get_texts():
            text.set_parse_math(False)
