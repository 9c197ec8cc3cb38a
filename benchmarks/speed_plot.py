"""The README's plot: a mask update and a training step against what one would use instead.

``python -m benchmarks.speed_plot`` reads the newest results of ``make bench`` and writes
``docs/images/speed.png``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.sweep_plot import INK

RESULTS = Path(__file__).with_name("results")
IMAGES = Path(__file__).parents[1] / "docs" / "images"
OURS, GREY = "#009E73", "#999999"


def newest(kind: str) -> list[dict[str, Any]]:
    """Return the cases of the newest committed result of that kind."""
    cases: list[dict[str, Any]] = json.loads(max(RESULTS.glob(f"*-{kind}.json")).read_text())[
        "cases"
    ]
    return cases


def bars(axes: Axes, title: str, times: dict[str, float]) -> None:
    """Draw horizontal bars of milliseconds, ours in color."""
    labels = list(times)[::-1]
    values = [1000 * times[label] for label in labels]
    drawn = axes.barh(
        labels, values, color=[OURS if "dist_sparse" in label else GREY for label in labels]
    )
    axes.bar_label(drawn, [f"{value:,.0f} ms" for value in values], padding=4)
    axes.tick_params(left=False)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.18)


def phone_of(image: Path) -> Path:
    """Return the file of the same plot for narrow screens."""
    return image.with_stem(f"{image.stem}-phone")


def main(image: Path = IMAGES / "speed.png") -> None:
    """Write the image, and one for narrow screens."""
    _draw(image, (1, 2), (10, 1.9))
    _draw(phone_of(image), (2, 1), (6, 4))


def _draw(image: Path, shape: tuple[int, int], size: tuple[float, float]) -> None:
    alone = next(
        c
        for c in newest("mask-update")
        if c["block"] == "rows" and c["ranks"] == 1 and "ancestor_s" in c
    )
    step = next(
        c
        for c in newest("enforce")
        if c["block"] == "rows" and "ancestor_s" in c and c["model"] == "tables"
    )
    with plt.rc_context(INK):
        figure, (left, right) = plt.subplots(*shape, figsize=size, dpi=110, layout="constrained")
        bars(
            left,
            "Mask update of a 1M x 64 table, log scale",
            {
                "torch.ao": alone["ancestor_s"],
                "dist_sparse": alone["growing_s"],
                "one norm pass": alone["norm_pass_s"],
            },
        )
        left.set_xscale("log")
        left.set_xlim(1, 60_000)
        left.set_xticks([], minor=True)
        left.set_xticks([])
        bars(
            right,
            "Training step, 8 such tables, 2 CPU cores",
            {
                "table.mul_(mask)": step["whole_s"],
                "dist_sparse": step["ours_s"],
                "no sparsity": step["plain_s"],
            },
        )
        figure.savefig(image)
        plt.close(figure)


if __name__ == "__main__":
    main()
