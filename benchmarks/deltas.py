"""Deltas beside full exports: bytes, time, and the memory of applying one.

One fused table with half of its rows removed. A share of the rows is trained before each delta. A
delta either compares all rows with the artifact before it, or streams only the rows that the
enforcer has seen written, and reads nothing else of that artifact. Results are written to
``benchmarks/results/`` as JSON and markdown.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import fresh, keep

__all__ = ["main", "report"]


def main() -> int:
    """Runs the cases, prints the table, writes the dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[500_000, 2_000_000], help="of tables, half are kept"
    )
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    cases = [
        {"rows": rows, "dim": options.dim, "dtype": dtype, "share": share}
        for rows, dtype, share in product(options.rows, ("fp32", "int8", "int4"), (0.01, 0.1))
    ]
    bar = tqdm(cases, disable=not sys.stderr.isatty())
    found = [fresh("benchmarks.deltas_case", case, 1, 1) for case in bar]
    text = report(found)
    print(text)
    keep(options.out, "deltas", found, text)
    return 0


def report(found: list[dict[str, Any]]) -> str:
    """The figures as a markdown table with what they mean."""
    lines = [
        (
            "Seconds of the processor, 1 thread, the full export and noted: the least of three."
            " compared: a delta that compares all kept rows; noted: one of the rows that the enforcer"
            " has seen written. Shares are of the full export. apply: in a process that serves;"
            " memory: its peak above the memory before."
        ),
        "",
        (
            "| table | dtype | rows trained | full | delta | bytes | full | compared | noted |"
            " apply | memory | served |"
        ),
        "|" + "---|" * 12,
    ]
    for f in found:
        full = f["full_s"]
        peak = f["apply_peak_bytes"]
        cells = [
            f"{f['rows']:,} x {f['dim']}",
            f["dtype"],
            f"{f['share']:.1%}",
            f"{f['full_bytes'] / 1e6:.1f} MB",
            f"{f['delta_bytes'] / 1e6:.2f} MB",
            f"**{f['delta_bytes'] / f['full_bytes']:.2%}**",
            f"{full:.3f} s",
            *(f"{f[name]:.3f} s, **{f[name] / full:.1%}**" for name in ("compared_s", "noted_s")),
            f"{f['apply_s']:.3f} s",
            "-" if peak is None else f"{peak / 1e6:.1f} MB",
            f"{f['served_bytes'] / 1e6:.1f} MB",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
