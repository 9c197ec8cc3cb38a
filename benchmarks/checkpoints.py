"""Checkpoints compared with plain torch.distributed.checkpoint, of the same model in the same run:
time, memory, bytes.

256 MB of row-wise tables with row-wise Adagrad over 2 ranks, to files that are flushed to disk:
weights, optimizer state, masks and schedule. Both keep one checkpoint: they write the new one and
delete the one before. ``Checkpoints`` adds learning rates and a CRC32 of every file, which it
verifies before it reads one. They take turns, in alternating order; the shortest of several times
counts. Results are written to ``benchmarks/results/`` as JSON and markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import fresh, keep

__all__ = ["CASES", "main", "report"]

CASES: list[dict[str, Any]] = [
    {"tables": 1, "rows": 1_000_000, "dim": 64, "block": [1, "ROW"], "ranks": 2, "rounds": 7},
    {"tables": 8, "rows": 125_000, "dim": 64, "block": [1, 4], "ranks": 2, "rounds": 7},
]

_MIB = 1 << 20


def report(found: Sequence[dict[str, Any]]) -> str:
    """The result as markdown."""
    lines = [
        (
            "Seconds of the slowest rank, the shortest of several, in turns; extra peak memory of"
            " rank 0; sizes on disk."
        ),
        "",
        (
            "| tables | block | save | plain DCP | ratio | async: returns after | plain DCP |"
            " resume | plain DCP | ratio | memory, save | plain | memory, resume | plain | masks on"
            " disk |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in found:
        block = "row" if case["block"][1] == "ROW" else "x".join(map(str, case["block"]))
        memory = [
            "-" if case[f"{name}_memory"] is None else f"{case[f'{name}_memory'] / _MIB:.0f} MiB"
            for name in ("save", "save_dcp", "load", "load_dcp")
        ]
        cells = [
            f"{case['tables']} x {case['rows']:,} x {case['dim']}",
            block,
            *(f"{case[f'{name}_s']:.2f} s" for name in ("save", "save_dcp")),
            f"{case['save_s'] / case['save_dcp_s']:.2f}",
            *(f"{case[f'{name}_s']:.2f} s" for name in ("save_async", "save_async_dcp")),
            *(f"{case[f'{name}_s']:.2f} s" for name in ("load", "load_dcp")),
            f"{case['load_s'] / case['load_dcp_s']:.2f}",
            *memory,
            f"{case['mask_bytes'] * 8 / case['blocks']:.2f} bit a block",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the cases, prints the table, writes the dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", help="where checkpoints are written while it runs (default: the system's own)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where results are written",
    )
    options = parser.parse_args()
    cases = [{**case, "folder": options.folder} for case in CASES]
    found = [
        fresh("benchmarks.checkpoints_case", case, case["ranks"], 1)
        for case in tqdm(cases, disable=not sys.stderr.isatty())
    ]
    for case in found:
        del case["folder"]
    print(report(found))
    keep(options.out, "checkpoints", found, report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
