"""A frontier as files: Markdown, JSON and a chart."""

from __future__ import annotations

import json
from pathlib import Path

from dist_sparse.planning.methods import METHODS
from dist_sparse.planning.results import NOTE, Frontier
from dist_sparse.report.drawing import svg_of
from dist_sparse.report.figures import DotChart, Dots
from dist_sparse.text import printable, size

__all__ = ["write_pages"]


def write_pages(result: Frontier, folder: Path) -> None:
    """Write ``frontier.json``, ``frontier.md`` and, of a frontier with points, ``frontier.svg``
    into a folder that exists.

    Raises:
        OSError: a file can't be written.
    """
    (folder / "frontier.json").write_text(
        json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n"
    )
    if result.points:
        (folder / "frontier.svg").write_text(svg_of(_chart(result)), encoding="utf-8")
    (folder / "frontier.md").write_text(_markdown(result))


def _markdown(result: Frontier) -> str:
    head, rows = result.cells()
    lines = ["# Frontier", "", f"**{result.recommendation}**", ""]
    lines += ["![The metric against the bytes](frontier.svg)", ""] if result.points else []
    cells = [head, ["---"] * len(head), *rows]
    lines += [
        "| " + " | ".join(printable(cell).replace("|", "\\|") for cell in row) + " |"
        for row in cells
    ]
    return "\n".join([*lines, "", result.directions, NOTE, ""])


def _chart(result: Frontier) -> DotChart:
    """Return the metric against the bytes: a line per method through its best within each budget,
    the recommended method in the color of the main line."""
    recommended = result.recommended
    runs: list[Dots] = []
    for method, name in METHODS.items():
        points = [point for point in result.points if point.method == method]
        if not points:
            continue
        # A method may be best with the same trial within two budgets: one dot.
        dots = {
            (point.measured.bytes, point.measured.metrics[result.metric]): "" for point in points
        }
        if recommended in points:
            dots[recommended.measured.bytes, recommended.measured.metrics[result.metric]] = (
                "recommended"
            )
        runs.append(
            Dots(
                name=name,
                role="main" if recommended in points else "other",
                number=len(runs),
                dots=tuple(
                    (label, taken, metric) for (taken, metric), label in sorted(dots.items())
                ),
            )
        )
    less = "less" if result.metric in result.lower_is_better else "more"
    return DotChart(
        key="frontier",
        title=f"{result.metric} over bytes of the tables",
        note=(
            f"{less.capitalize()} is better. The model as it is has {size(result.table_bytes)} of"
            " tables."
        ),
        runs=tuple(runs),
        metric=result.metric,
        level=("the model as it is", result.full[result.metric]),
    )
