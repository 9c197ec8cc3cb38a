"""Time of a mask update, against torch.ao and against all-gather + topk.

Each case runs in fresh processes; ratios are within a case, shortest of several. Results go to
``benchmarks/results/`` as JSON and markdown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import fresh, keep

__all__ = ["CASES", "kept_table", "main", "table"]

DIM = 64
MB = 1_000_000 // (DIM * 4)  # rows of a megabyte
GATHER = ["gather_topk", "gather_kthvalue"]


def _case(
    block: Any, norm: str, rows: int, ranks: int, sharding: str, peers: list[str]
) -> dict[str, Any]:
    return {
        "block": block,
        "norm": norm,
        "rows": rows,
        "dim": DIM,
        "ranks": ranks,
        "sharding": sharding,
        "peers": peers,
    }


CASES = [
    _case("rows", "L2", 1 << 20, 1, "one process", ["norm_pass", "ancestor"]),
    _case([1, 4], "L1", 1 << 20, 1, "one process", ["norm_pass", "ancestor"]),
    *[
        _case("rows", "L2", rows, 2, how, GATHER)
        for how in ("row_wise", "column_wise")
        for rows in (1 << 18, 1 << 20)
    ],
    *[
        _case([1, 4], "L1", rows, 2, how, GATHER)
        for how in ("row_wise", "column_wise")
        for rows in (1 << 18, 1 << 20)
    ],
    *[
        _case("rows", "L2", rows, 4, how, GATHER)
        for how in ("row_wise", "column_wise")
        for rows in (1 << 20, 1 << 22)
    ],
    *[
        _case([1, 4], "L1", rows, 4, how, GATHER)
        for how in ("row_wise", "column_wise")
        for rows in (1 << 18, 1 << 20)
    ],
]

MANY: list[dict[str, Any]] = [
    {"tables": tables, "rows": rows, "dim": dim, "block": block, "ranks": ranks, "score": "norm"}
    for tables, rows, dim, rank_counts in ((1000, 50, 16, (1, 2)), (26, 20_000, 32, (1,)))
    for block in ("rows", [1, 4])
    for ranks in rank_counts
]
MANY += [  # what sparsify() does for whole rows that Adagrad trains
    {
        "tables": tables,
        "rows": rows,
        "dim": dim,
        "block": "rows",
        "ranks": 1,
        "score": "norm_accumulator",
    }
    for tables, rows, dim in ((290, 100, 16), (26, 20_000, 32))
]


def main() -> int:
    """Runs the cases, prints the table, writes the dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        choices=["one", "ranks", "kept"],
        help="only these: in one process, over ranks, kept scores",
    )
    parser.add_argument(
        "--data", type=Path, help="an interactions .npz, as examples/two_tower/main.py takes"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where results are written",
    )
    options = parser.parse_args()
    chosen = {"one": [1], "ranks": [2, 4], "kept": [], None: [1, 2, 4]}[options.only]
    cases = [c for c in [*CASES, *MANY] if c["ranks"] in chosen]
    found = []
    for case in tqdm(cases, disable=not sys.stderr.isatty()):
        threads = 2 if case["ranks"] == 1 and "tables" not in case else 1
        module = (
            "benchmarks.many_tables_case" if "tables" in case else "benchmarks.mask_update_case"
        )
        found.append({**fresh(module, case, case["ranks"], threads), "threads_per_rank": threads})
    if options.only in ("kept", None):
        data = None if options.data is None else str(options.data.resolve())
        case = {"rows": 1_000_000, "dim": DIM, "touched": 10_000, "data": data}
        kept = {
            **fresh("benchmarks.kept_scores_case", case, 1, 2),
            "data": options.data and options.data.name,
        }
        keep(options.out, "kept-scores", [kept], text := kept_table(kept))
        print(text, end="\n\n")
    if found:
        text = table(found)
        print(text)
        keep(options.out, "mask-update", found, text)
    return 0


def table(found: list[dict[str, Any]]) -> str:
    """The figures as two markdown tables with what they mean."""
    one = [
        "| case | first | growing | steady | norm pass | torch.ao | / growing | / steady | steady /"
        " norm pass | extra |"
    ]
    one.append("|---|---|---|---|---|---|---|---|---|---|")
    many = [
        "| case | first | growing | steady | gather + topk | / growing | gather + kthvalue | /"
        " growing | collectives |"
    ]
    many[0] += " bytes sent | extra |"
    many.append("|---|---|---|---|---|---|---|---|---|---|---|")
    small = [
        "| case | growing | a table | by hand | by hand, a table | by hand / growing |",
        "|---|---|---|---|---|---|",
    ]
    for f in found:
        block = "rows" if f["block"] == "rows" else "x".join(map(str, f["block"]))
        if "tables" in f:
            where = "one process" if f["ranks"] == 1 else f"table-wise on {f['ranks']} ranks"
            how = "L2" if f["score"] == "norm" else f"by {f['score']}"
            row = [f"{f['tables']:,} tables of {f['rows']:,} x {f['dim']}, {block} {how}, {where}"]
            for seconds in (f["growing_s"], f.get("by_hand_s")):
                row += (
                    ["", ""]
                    if seconds is None
                    else [_ms(seconds), f"{seconds / f['tables'] * 1e3:.3f} ms"]
                )
            by_hand = f.get("by_hand_s")
            small.append(
                "| "
                + " | ".join([*row, "" if by_hand is None else f"{by_hand / f['growing_s']:.2f} x"])
                + " |"
            )
            continue
        size = f["rows"] * f["dim"] * 4 / 1e6
        times = [_ms(f["first_s"]), _ms(f["growing_s"]), _ms(f["steady_s"])]
        extra = f"{_mb(f['peak_extra_bytes'])} of {_mb(f['shard_bytes'])}"
        if f["ranks"] == 1:
            ratios = [
                f"**{f['ancestor_s'] / f[f'{kind}_s']:.0f} x**" for kind in ("growing", "steady")
            ]
            ratios.append(f"{f['steady_s'] / f['norm_pass_s']:.2f} x")
            row = [
                f"{block} {f['norm']}, {size:.0f} MB",
                *times,
                _ms(f["norm_pass_s"]),
                _ms(f["ancestor_s"]),
                *ratios,
                extra,
            ]
            one.append("| " + " | ".join(row) + " |")
        else:
            row = [f"{block} {f['norm']}, {size:.0f} MB, {f['sharding']} on {f['ranks']}", *times]
            for peer in GATHER:
                row += [_ms(f[f"{peer}_s"]), f"**{f[f'{peer}_s'] / f['growing_s']:.2f} x**"]
            row += [str(f["collectives"]), f"{f['bytes_sent']:,}", extra]
            many.append("| " + " | ".join(row) + " |")
    notes = (
        "first: from dense to 50 %, so half of the table is overwritten with zeros. growing: the"
        " level rises by 1 % of the blocks. steady: the level stays. Peers only compute a mask, in"
        " memory, and write nothing to the weights. norm pass: one chunked float64 read of the"
        " table. extra: peak resident memory above the tables during the first step in a fresh"
        " process, next to the bytes of a rank's shards. by hand: mean squares, topk and a"
        " multiplication, table by table, without sharding, ties, checks or packed masks. Shortest"
        " of several, slowest rank."
    )
    parts = [notes]
    if len(one) > 2:
        parts.append("\n".join(one))
    if len(many) > 2:
        parts.append("\n".join(many))
    if len(small) > 2:
        parts.append("\n".join(small))
    return "\n\n".join(parts)


def kept_table(found: dict[str, Any]) -> str:
    """The figures of kept scores as a markdown table with what they mean."""
    lines = [
        (
            f"Whole rows L2, {found['rows']:,} x {found['dim']}, an attached enforcer, a training"
            " step before each mask update. every row: `full_every=1`. torch.ao:"
            f" {_ms(found['ancestor_s'])}. growing: the level rises by 1% of the rows."
        ),
        "",
        (
            "| ids | rows touched | growing | every row / growing | torch.ao / growing | steady |"
            " every row / steady | torch.ao / steady |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    every = found["ids"]["every row"]
    for name, of in found["ids"].items():
        row = [name, f"{of['touched']:,}"]
        for kind in ("growing_s", "steady_s"):
            row += [
                _ms(of[kind]),
                f"{every[kind] / of[kind]:.1f} x",
                f"**{found['ancestor_s'] / of[kind]:.0f} x**",
            ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _mb(count: float | None) -> str:
    return "?" if count is None else f"{count / 1e6:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
