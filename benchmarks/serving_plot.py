"""The plot of serving on the page of results: lookups over the rows removed, and memory.

``python -m benchmarks.serving_plot`` reads the newest result of ``python -m benchmarks.serving``
and writes ``docs/images/serving.png``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.speed_plot import GREY, IMAGES, OURS, newest, phone_of
from benchmarks.sweep_plot import INK

_LINES = {
    "served": ("artifact", OURS, "o"),
    "tbe": ("FBGEMM, dense", GREY, "s"),
    "nn.EmbeddingBag": ("nn.EmbeddingBag, dense", "#E69F00", "^"),
}
"""Name in the results: label, color, marker."""


def lookups(axes: Axes, cases: list[dict[str, Any]], ids: str, title: str) -> None:
    """Draw microseconds of a float32 lookup over the share of rows removed, of the artifact and of
    dense tables."""
    some = [
        c
        for c in cases
        if c["kind"] == "lookups" and (c["dtype"], c["ids"], c["bags"]) == ("fp32", ids, 512)
    ]
    some.sort(key=lambda case: case["removed"])
    for name, (label, color, marker) in _LINES.items():
        times = [1e6 * case["times_s"][name] for case in some]
        axes.plot(range(len(some)), times, color=color, marker=marker, ms=6, lw=1.8, label=label)
    axes.set_xticks(range(len(some)), [f"{case['removed']:.0%}" for case in some])
    axes.set_xlabel("rows removed")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")


def memory(axes: Axes, cases: list[dict[str, Any]]) -> None:
    """Draw the resident memory of each loaded table, ours in color."""
    some = [case for case in cases if case["kind"] == "load"][::-1]
    labels = [
        case["what"]
        if case["what"] == "dense"
        else f"{case['removed']:.0%} removed, {case['what']}"
        for case in some
    ]
    values = [case["resident"] / 1e6 for case in some]
    drawn = axes.barh(
        labels, values, color=[GREY if label == "dense" else OURS for label in labels]
    )
    axes.bar_label(drawn, [f"{value:,.0f} MB" for value in values], padding=4)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.3)
    axes.set_title("Resident memory, 2M x 64", loc="left", fontsize=11, fontweight="bold")


def main(image: Path = IMAGES / "serving.png") -> None:
    """Write the image, and one for narrow screens."""
    _draw(image, (1, 3), (11, 3))
    _draw(phone_of(image), (3, 1), (4.2, 8.4))


def _draw(image: Path, shape: tuple[int, int], size: tuple[float, float]) -> None:
    cases = newest("serving")
    with plt.rc_context(INK):
        figure, panels = plt.subplots(*shape, figsize=size, dpi=110, layout="constrained")
        lookups(panels[0], cases, "uniform", "Uniform ids, us a lookup")
        lookups(panels[1], cases, "zipf", "Zipf ids, us a lookup")
        memory(panels[2], cases)
        top = max(axes.get_ylim()[1] for axes in panels[:2])
        for axes in panels[:2]:
            axes.set_ylim(top=top)
        panels[0].legend(frameon=False, fontsize=9, loc="lower left")
        figure.savefig(image)
        plt.close(figure)


if __name__ == "__main__":
    main()
