"""What a mask update would take from 2 to 1,000 ranks, as :func:`benchmarks.simulate.simulate`
predicts it.

``python -m benchmarks.scaling`` writes a dated result and ``docs/images/scaling.png``, and
one for narrow screens.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from tqdm import tqdm

from benchmarks.measure import keep
from benchmarks.simulate import simulate
from benchmarks.speed_plot import phone_of
from benchmarks.sweep_plot import INK

RESULTS = Path(__file__).with_name("results")
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"
TABLES = {f"table_{i}": (1_000_000, 64) for i in range(8)}
WORLDS = (2, 8, 64, 256, 1000)
NETWORK = {"latency": 10e-6, "bandwidth": 10e9}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("rows, row-wise", {"sharding": "row_wise", "block": "row"}, "#009E73"),
    ("rows, column-wise", {"sharding": "column_wise", "block": "row"}, "#56B4E9"),
    ("1x4, row-wise", {"sharding": "row_wise", "block": "1x4"}, "#D55E00"),
    ("columns, row-wise", {"sharding": "row_wise", "block": "col"}, "#CC79A7"),
]


def main() -> int:
    """Predict, print, write the result and the images."""
    found: list[dict[str, Any]] = []
    parts = [
        "simulate() of 8 tables of 1M x 64 at level 0.8, 10 us and 10 GB/s: the rank that holds"
        " most. local: measured here; network: by formula."
    ]
    for name, arguments, _ in tqdm(CASES, disable=None):
        simulation = simulate(TABLES, WORLDS, **NETWORK, **arguments)
        found += [
            {"case": name, **NETWORK, **asdict(prediction)} for prediction in simulation.predictions
        ]
        parts.append(f"**{name}**\n\n```text\n{simulation}\n```")
    draw(found, IMAGE, (7, 3.6))
    draw(found, phone_of(IMAGE), (4.2, 3.6))
    print("\n\n".join(parts))
    keep(RESULTS, "scaling", found, "\n\n".join(parts))
    return 0


def draw(found: list[dict[str, Any]], image: Path, size: tuple[float, float]) -> None:
    """Write an image of the predictions, as a result holds them."""
    with plt.rc_context(INK):
        figure, axes = plt.subplots(figsize=size, dpi=110, layout="constrained")
        for name, _, color in CASES:
            times = [
                each["local_ms"] + each["network_ms"] for each in found if each["case"] == name
            ]
            axes.plot(WORLDS, times, color=color, marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="mask update, ms")
        axes.set_xticks(WORLDS, [f"{world:,}" for world in WORLDS])
        axes.set_xticks([], minor=True)
        # On a phone, a legend inside covers the curves.
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
        figure.savefig(image)


if __name__ == "__main__":
    sys.exit(main())
