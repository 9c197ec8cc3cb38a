"""The plot of a sweep: AUC, NE, size and time against the level.

The x axis is logarithmic in the fraction kept, because little happens below 80%; level 1 is drawn
apart at its end. Colors stand for blocks (Okabe and Ito's palette, safe for the color-blind),
dotted lines with dots for models that were sparsified during training, thin lines for the other
norm. Transparent background and grey ink suit light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.sweep_cells import Row
from benchmarks.sweep_report import Curve, curves, name_of

__all__ = ["INK", "plot"]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#808080"
INK = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.transparent": True,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _GREY
    ),
}
"""Matplotlib settings of plots that are shown on light and dark pages."""
_DASHES, _DOTS = (0, (4, 3)), (0, (1, 1.5))
_TICKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Write the plot as PNG: AUC, NE, zipped size and times against the level."""
    dense = next(row for row in rows if row["mode"] == "dense")
    with plt.rc_context(INK):
        figure, panels = plt.subplots(2, 2, figsize=(11, 8), dpi=110, layout="constrained")
        (auc, ne), (size, times) = panels
        _quality(auc, rows, dense, "auc", "AUC (more is better)")
        _quality(ne, rows, dense, "ne", "Normalized entropy (less is better)")
        _legend(auc, rows)
        _sizes(size, rows, dense)
        _times(times, rows, dense)
        for axes in panels.flat:
            _levels(axes, rows)
        figure.suptitle(
            f"A DLRM on MovieLens-100K: cost and savings by level (seed {dense['seed']} only)",
            fontsize=13,
        )
        figure.savefig(file)
        plt.close(figure)


def _quality(axes: Axes, rows: Sequence[Row], dense: Row, column: str, title: str) -> None:
    for curve, cells in curves(rows).items():
        axes.plot(*_series(rows, cells, lambda cell: cell[column]), **_style(rows, curve))
    up = column == "auc"
    _dense(axes, rows, dense[column], f"dense: {dense[column]:.4f}", above=not up)
    _names(axes, rows, lambda cell: cell[column], level=0.92, better_is_up=up)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")


def _sizes(axes: Axes, rows: Sequence[Row], dense: Row) -> None:
    for curve, cells in curves(rows).items():
        style = _style(rows, curve)
        if curve[0] == "post" and style["lw"] > 1:
            axes.plot(*_series(rows, cells, lambda cell: cell["zipped_bytes"] / 1e6), **style)
            both = _series(
                rows, cells, lambda cell: (cell["zipped_bytes"] + cell["mask_bytes"]) / 1e6
            )
            axes.plot(*both, **{**style, "lw": 1.2, "ls": _DOTS})
    _dense(
        axes,
        rows,
        dense["zipped_bytes"] / 1e6,
        f"dense: {dense['zipped_bytes'] / 1e6:.2f} MB",
        above=False,
    )
    # All above their lines except the lowest: the dotted lines run above the others.
    _names(
        axes,
        rows,
        lambda cell: (cell["zipped_bytes"] + cell["mask_bytes"]) / 1e6,
        level=0.98,
        better_is_up=True,
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(
        FixedLocator([0.01 * a * 10**b for b in range(8) for a in (1, 2, 5)])
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title(
        "Saved model, zipped, MB (dotted: with packed masks)",
        loc="left",
        fontsize=12,
        fontweight="bold",
    )


def _times(axes: Axes, rows: Sequence[Row], dense: Row) -> None:
    for curve, cells in curves(rows).items():
        style = _style(rows, curve)
        if curve[0] == "post" and style["lw"] > 1:
            axes.plot(*_series(rows, cells, lambda cell: cell["step_ms"]), **style)
        if curve[0] == "post":
            places, found = _series(rows, cells, lambda cell: cell["forward_ms"])
            axes.plot(places, found, color=_GREY, lw=0, marker=".", ms=4, alpha=0.6)
    axes.axhline(dense["forward_ms"], color=_GREY, lw=1.1, ls=_DASHES, zorder=0)
    _names(axes, rows, lambda cell: cell["step_ms"], level=0.98, better_is_up=True)
    axes.set_ylim(bottom=0)
    title = (
        f"Milliseconds, {dense['ranks']} ranks: step(); grey: forward of"
        f" {dense['forward_examples']:,}"
    )
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")


def _dense(axes: Axes, rows: Sequence[Row], value: float, text: str, *, above: bool) -> None:
    axes.axhline(value, color=_GREY, lw=1.1, ls=_DASHES, zorder=0)
    axes.annotate(
        text,
        (_place(rows, 1.0), value),
        xytext=(0, 4 if above else -5),
        textcoords="offset points",
        ha="right",
        va="bottom" if above else "top",
        color=_GREY,
    )


def _names(
    axes: Axes,
    rows: Sequence[Row],
    show: Callable[[Row], float],
    *,
    level: float,
    better_is_up: bool,
) -> None:
    """Label each block next to its line: on the better side, except for the worst line, which has
    room beyond it."""
    main = {
        curve[1]: cells
        for curve, cells in curves(rows).items()
        if curve[0] == "post" and _bold(rows, curve)
    }
    at = {
        block: min(cells, key=lambda cell: abs(cell["sparsity_level"] - level))
        for block, cells in main.items()
    }
    upward = sorted(at, key=lambda block: show(at[block]))
    for block, cell in at.items():
        up = better_is_up != (len(at) > 1 and block == upward[0 if better_is_up else -1])
        axes.annotate(
            name_of(block),
            (_place(rows, cell["sparsity_level"]), show(cell)),
            xytext=(5 if up == better_is_up else -5, 5 if up else -6),
            textcoords="offset points",
            ha="left" if up == better_is_up else "right",
            va="bottom" if up else "top",
            color=_colour(rows, block),
            fontweight="bold",
        )


def _legend(axes: Axes, rows: Sequence[Row]) -> None:
    shown = [Line2D([], [], color=_GREY, lw=2.2, label="pruned after training")]
    if any(not _bold(rows, curve) for curve in curves(rows)):
        shown.append(Line2D([], [], color=_GREY, lw=0.9, label="with L1 instead of L2"))
    if any(mode == "training" for mode, _, _ in curves(rows)):
        shown.append(
            Line2D(
                [],
                [],
                color=_GREY,
                lw=1.3,
                ls=_DOTS,
                marker="o",
                ms=5,
                label="pruned during training",
            )
        )
    axes.legend(handles=shown, loc="lower left", frameon=False)


def _levels(axes: Axes, rows: Sequence[Row]) -> None:
    ticks = [level for level in _TICKS if level <= max(0.0, *_finite(rows))]
    named = {_place(rows, level): f"{100 * level:g}%" for level in [*ticks, 1.0]}
    axes.set_xticks(list(named), list(named.values()))
    axes.set_xlabel("blocks removed")
    axes.grid(color=_GREY, lw=0.5, alpha=0.35)
    axes.set_axisbelow(True)
    gap = (_place(rows, 1.0) + _place(rows, max(_finite(rows)))) / 2
    axes.annotate(
        "//",
        (gap, 0),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="center",
        fontweight="bold",
    )


def _style(rows: Sequence[Row], curve: Curve) -> dict[str, Any]:
    mode, block, _ = curve
    if mode == "training":
        return {"color": _colour(rows, block), "lw": 1.3, "ls": _DOTS, "marker": "o", "ms": 5}
    return {"color": _colour(rows, block), "lw": 2.2 if _bold(rows, curve) else 0.9}


def _bold(rows: Sequence[Row], curve: Curve) -> bool:
    """Whether this is the main line of its block and mode: L2 where it was measured."""
    mode, block, norm = curve
    return norm == "L2" or (mode, block, "L2") not in curves(rows)


def _colour(rows: Sequence[Row], block: str) -> str:
    blocks = list(dict.fromkeys(row["block"] for row in rows if row["block"]))
    return _COLOURS[blocks.index(block) % len(_COLOURS)]


def _series(
    rows: Sequence[Row], cells: Sequence[Row], show: Callable[[Row], float]
) -> tuple[list[float], list[float]]:
    return [_place(rows, cell["sparsity_level"]) for cell in cells], [show(cell) for cell in cells]


def _place(rows: Sequence[Row], level: float) -> float:
    """Return the place on the x axis: a decade of the fraction kept is 1 wide."""
    return -math.log10(1 - level) if level < 1 else -math.log10(1 - max(_finite(rows))) + 0.35


def _finite(rows: Sequence[Row]) -> list[float]:
    return [row["sparsity_level"] for row in rows if row["sparsity_level"] < 1]
