"""What compact tables gain: the time of a training step and the memory, beside the dense and the
masked model.

80% of the rows are removed; the ids of batches are drawn evenly, or so that kept rows are the
frequent ones. Results are written to ``benchmarks/results/`` as JSON and markdown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import fresh, keep

__all__ = ["CASES", "main", "report"]

TABLES = {"tables": 4, "rows": 250_000, "dim": 64, "ids": 10, "below": 250_000, "batch": 2048}

MANY = (
    {"tables": 26, "rows": 20_000, "dim": 32, "ids": 10, "below": 20_000, "batch": 512},
    {"tables": 26, "rows": 2_000, "dim": 16, "ids": 1, "below": 2_000, "batch": 2048},
)
"""Many small tables, whose ids cost as much as their rows."""

CASES: list[dict[str, Any]] = [
    *(
        {"tables": TABLES, "skew": skew, "ranks": ranks, "steps": 20}
        for ranks in (1, 2)
        for skew in (1, 3)
    ),
    *({"tables": tables, "skew": 1, "ranks": 1, "steps": 50} for tables in MANY),
]


def main() -> int:
    """Run the cases, print the table, write the dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where results are written",
    )
    options = parser.parse_args()
    found = []
    for case in tqdm(CASES, disable=not sys.stderr.isatty()):
        found.append(fresh("benchmarks.compact_case", case, case["ranks"], 1))
    text = report(found)
    print(text)
    keep(options.out, "compact", found, text)
    return 0


def report(found: list[dict[str, Any]]) -> str:
    """The figures as a markdown table with what they mean."""
    notes = (
        "A DLRM in training, row-wise tables with a fused row-wise Adagrad, 80% of the rows"
        " removed, one thread a rank. Milliseconds a step: the median of 20 (many tables: 50) on"
        " fresh batches on the slowest rank, the least of three rounds. dense: nothing removed."
        " masked: with MaskEnforcer. tables: bytes of a rank's tables and their optimizer state."
        " freed: by how much the resident memory of rank 0 fell in compact(), beside by how much"
        " its tables did (malloc keeps some for later, and gives some back). index: bitmaps and"
        " counts, and maps of small tables. peak: resident memory in compact() above that"
        " before it."
    )
    lines = [
        (
            "| tables | ids | ranks | dense | masked | compact | masked / compact | tables |"
            " compact | freed / removed | index | compact() | peak |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for f in found:
        shape, removed = f["tables"], f["table_bytes"] - f["compact_bytes"]
        row = [
            f"{shape['tables']} x {shape['rows']:,} x {shape['dim']}",
            "evenly" if f["skew"] == 1 else "58% in kept rows",
            str(f["ranks"]),
            *(f"{f[key] * 1e3:.1f} ms" for key in ("dense_s", "masked_s", "compact_step_s")),
            f"**{f['masked_s'] / f['compact_step_s']:.2f} x**",
            *(f"{f[key] / 1e6:.1f} MB" for key in ("table_bytes", "compact_bytes")),
            f"{f['freed_bytes'] / removed:.2f}" if removed else "-",
            f"{f['index_bytes'] / 1e6:.2f} MB",
            f"{f['compact_s']:.2f} s",
            "-" if f["peak_bytes"] is None else f"{f['peak_bytes'] / 1e6:.0f} MB",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return f"{notes}\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
