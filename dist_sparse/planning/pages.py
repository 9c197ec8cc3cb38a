"""A frontier as files: Markdown, JSON and, where matplotlib is installed, a plot."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from dist_sparse.planning.methods import METHODS
from dist_sparse.planning.results import NOTE, Frontier
from dist_sparse.text import printable

__all__ = ["write_pages"]

_INK = "#808080"  # readable on light and dark pages
_COLOURS = (
    "#000000",
    "#7F3C8D",
    "#E69F00",
    "#0072B2",
    "#009E73",
    "#CC79A7",
    "#999999",
)
"""Of the methods, in their order (Okabe and Ito's palette, safe for the color-blind)."""


def write_pages(result: Frontier, folder: Path) -> None:
    """Write ``frontier.json``, ``frontier.md`` and ``frontier.png`` into a folder that exists.

    Raises:
        OSError: a file can't be written.
    """
    (folder / "frontier.json").write_text(json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n")
    plotted = importlib.util.find_spec("matplotlib") is not None
    if plotted:
        _plot(result, folder / "frontier.png")
    (folder / "frontier.md").write_text(_markdown(result, plotted))


def _markdown(result: Frontier, plotted: bool) -> str:
    head, rows = result.cells()
    lines = ["# Frontier", "", f"**{result.recommendation}**", ""]
    lines += ["![The metric against the bytes](frontier.png)", ""] if plotted else []
    cells = [head, ["---"] * len(head), *rows]
    lines += ["| " + " | ".join(printable(cell).replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join([*lines, "", result.directions, NOTE, ""])


def _plot(result: Frontier, file: Path) -> None:
    """The metric against the bytes, a line a method through its best within each budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for (method, name), colour in zip(METHODS.items(), _COLOURS, strict=True):
        places = {
            (100 * point.measured.bytes / result.table_bytes, point.measured.metrics[result.metric])
            for point in result.points
            if point.method == method
        }
        if places:
            axes.plot(*zip(*sorted(places), strict=True), color=colour, marker="o", markersize=4, label=name)
    axes.axhline(result.full[result.metric], color=_INK, linestyle="--", linewidth=1, label="the model as it is")
    if (point := result.recommended) is not None:
        place = 100 * point.measured.bytes / result.table_bytes, point.measured.metrics[result.metric]
        axes.plot(*place, marker="*", markersize=16, color="#D55E00", linestyle="", label="recommended")
    axes.set_xscale("log")
    axes.set_xlabel("bytes of the tables, % of the model as it is")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if value in (2, 5, 20, 50) else "")
    axes.set_ylabel(printable(result.metric), parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6eaf0")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(file, dpi=150)
