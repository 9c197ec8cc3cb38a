"""The table of a quality benchmark, and its plot: ``python -m benchmarks.quality_report`` draws the
newest result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.quality_methods import FULL
from benchmarks.speed_plot import phone_of
from benchmarks.sweep_plot import INK

__all__ = ["plot", "report"]

Row = dict[str, Any]

_IMAGE = Path(__file__).parents[1] / "docs" / "images" / "quality.png"
_LOOKS = {
    "narrowed": ("#009E73", "o"),
    "small dense": ("#0072B2", "o"),
    "narrowed by column": ("#009E73", "s"),
    "small dense by column": ("#0072B2", "s"),
    "narrowed codes": ("#009E73", "*"),
    "small dense codes": ("#0072B2", "*"),
    "small dense float32": ("#882255", "s"),
    "soft threshold": ("#E69F00", "D"),
    "elements": ("#D55E00", "D"),
    "1x4 blocks": ("#CC79A7", "D"),
    "double hash": ("#56B4E9", "v"),
    "mod hash": ("#808080", "v"),
    "frequency cut-off": ("#56B4E9", "^"),
    "rows": ("#808080", "^"),
}
"""Color and marker of a method."""

_SIZE = {"*": 9}
"""Sizes of markers that look smaller than others of the same size."""


def report(rows: Sequence[Row], data: str, split: str) -> str:
    """Return the figures as markdown, with what they mean.

    Args:
        rows: of the chosen cases.
        data: names the data set.
        split: says where its test part comes from.
    """
    epochs = rows[0]["epochs"]
    lines = [
        (
            f"The two-tower model of examples/two_tower on {data}, {epochs} epochs. Validation and"
            f" test are {split}, cut in two by users. For each method and bytes: each form that"
            " fits (columns and bits) at four coarse points of one grid of learning rates (0.2 to"
            " 3.2) and L2 (0.03 to 0.27), then the best with all neighbors of its best point, until"
            " none is better; by the validation AUC of the first seed. On the"
            " test part: mean over seeds and half the range. Bytes are those of a row against 256,"
            " with scales, bitmasks and index; of the package those of its artifact. AUC over 10"
            " items drawn for each of 60,000 interactions: drawn uniformly, and by popularity."
            " recall@20 over all items, 3,000 users. Narrowed: 64 columns, rotated and cut at half"
            " time; codes are trained from then on."
        ),
        "",
        (
            "| at most | method | trained by | columns | kept | served as | bytes | L2 | lr "
            "| seeds | AUC | AUC, popular | recall@20 |"
        ),
        "|---" * 13 + "|",
    ]
    for _, some in _cells(rows):
        one, count = some[0], len(some)
        figures = [
            _spread(row["test"][name] for row in some if name in row["test"])
            for name in ("auc", "auc_popular", "recall")
        ]
        kept = one["kept"] if one["kept"] >= 1 else f"{one['kept']:.0%}"
        table = [one["budget"], one["method"], one["trainer"], one["dim"], kept, one["dtype"]]
        row = [*table, f"{one['bytes'] / FULL:.1%}", one["l2"], one["lr"], count, *figures]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def _cells(rows: Iterable[Row]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """The seeds of each method, budget, dtype and trainer; the largest first."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (-float(row["budget"].rstrip("%")), row["method"], row["trainer"], row["dtype"])
        found.setdefault(key, []).append(row)
    return sorted(found.items(), key=lambda cell: (cell[0][0], -cell[1][0]["test"]["auc"]))


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _spread(values: Iterable[float]) -> str:
    values = list(values)
    if not values:
        return "-"
    spread = f" ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
    return f"{_mean(values):.4f}{spread}"


def plot(rows: Sequence[Row], file: Path) -> None:
    """Write the AUC against the bytes, the best form of each method: near the full table, and
    all. Beside it, ``-phone`` in its name, the same with one panel below the other."""
    _plot(rows, file, stacked=False)
    _plot(rows, phone_of(file), stacked=True)


def _plot(rows: Sequence[Row], file: Path, *, stacked: bool) -> None:
    shape, size = ((2, 1), (4.2, 8.4)) if stacked else ((1, 2), (10, 3.4))
    with plt.rc_context(INK):
        figure, panels = plt.subplots(*shape, figsize=size, dpi=110, layout="constrained")
        cells = [some for (_, _, trainer, _), some in _cells(rows) if trainer == "kernel"]
        points: dict[str, list[tuple[float, float]]] = {}
        for some in cells:
            mean = _mean(row["test"]["auc"] for row in some)
            points.setdefault(some[0]["method"], []).append((100 * some[0]["bytes"] / FULL, mean))
        full = points.pop("full")
        for axes in panels:
            axes.plot(
                *zip(*sorted(full), strict=True),
                "s",
                color="#808080",
                ms=7,
                label="full table: int4, int8, float32",
            )
            axes.axhline(max(auc for _, auc in full), color="#808080", lw=0.8, ls=(0, (4, 3)))
            for method in sorted(points, key=lambda name: -max(auc for _, auc in points[name])):
                (color, marker), drawn = _LOOKS[method], zip(*sorted(points[method]), strict=True)
                axes.plot(
                    *drawn,
                    color=color,
                    marker=marker,
                    label=method,
                    lw=1.6,
                    ms=_SIZE.get(marker, 5),
                )
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator([5, 10, 20, 50, 100]))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticklabels(["5%", "10%", "20%", "50%", "100%"])
            axes.set_xlabel("bytes of the full float32 table")
        best = max(auc for _, auc in full)
        panels[0].set_ylim(best - 0.013, best + 0.001)
        panels[0].set_title(
            "AUC on Gowalla, near the full table", loc="left", fontsize=11, fontweight="bold"
        )
        panels[1].set_title("The same, all methods", loc="left", fontsize=11, fontweight="bold")
        near = [line for line in panels[0].get_lines() if not line.get_label().startswith("_")]
        near = [line for line in near if max(line.get_ydata()) > best - 0.013]
        # On a phone, a legend inside a panel covers its curves.
        below = {"loc": "upper left", "bbox_to_anchor": (-0.1, -0.2), "ncols": 2}
        where = below if stacked else {"loc": "lower right"}
        panels[0].legend(handles=near, frameon=False, fontsize=8, **where)
        named = {line.get_label() for line in near}
        rest = [line for line in panels[1].get_lines() if not line.get_label().startswith("_")]
        rest = [line for line in rest if line.get_label() not in named]
        panels[1].legend(handles=rest, frameon=False, fontsize=8, **where)
        figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    results = Path(__file__).with_name("results")
    cells: dict[str, list[Row]] = {}
    # The newest result of each method and number of bytes.
    for file in sorted(
        [*results.glob("*-quality.json"), *results.glob("*-quality-gowalla-*.json")]
    ):
        cases = json.loads(file.read_text())["cases"]
        # Trainings of twice the epochs would not be comparable.
        rows = [row for row in cases if row["chosen"] and row["epochs"] == 14]
        found: dict[str, list[Row]] = {}
        for row in rows:
            found.setdefault(f"{row['method']} {row['budget']}", []).append(row)
        cells |= found
    plot([row for some in cells.values() for row in some], _IMAGE)
