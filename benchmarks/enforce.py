"""The cost of keeping removed weights at zero while a model trains.

Two questions, batch 4,096 (512 for 26 tables), masks updated every 100 steps, 80% removed: (a) does
the time of enforcement depend on the rows of the table? (b) how long is a training step with
everything on (enforcer, mask update, its share of it), ids of removed rows dropped or zeroed,
against the plain loop, a whole-table multiplication after every step, and torch.ao's
parametrization? Results are written to ``benchmarks/results/`` as JSON and markdown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import fresh, keep

__all__ = ["CASES", "main", "report"]

BLOCKS: list[Any] = ["rows", [1, 4]]
EVERY = 100

SHORT = 25
"""Rounds of 20 steps, instead of a few of 100, for small models: a machine changes its speed by
more than they cost."""


def _tables(tables: int, rows: int, ids: int, below: int) -> dict[str, int]:
    return {"tables": tables, "rows": rows, "dim": 64, "ids": ids, "below": below}


def _case(
    kind: str, block: Any, tables: dict[str, int] | None, ids: str, peers: list[str], rounds: int
) -> dict[str, Any]:
    return {
        "kind": kind,
        "model": "main job" if tables is None else "tables",
        "tables": tables,
        "ids": ids,
        "block": block,
        "every": EVERY,
        "steps": 100 if rounds < SHORT else 20,
        "rounds": rounds,
        "peers": peers,
        "peer_steps": 10,
        "ancestor_steps": 2,
    }


MANY_SMALL = {**_tables(26, 20_000, 10, 20_000), "dim": 32, "batch": 512}

CASES = [
    *[
        _case("a", block, _tables(1, rows, 10, min(rows, below)), ids, [], 3)
        for block in BLOCKS
        for ids, below in (("below 100k", 100_000), ("uniform", 1 << 62))
        for rows in (100_000, 10_000_000)
    ],
    *[_case("b", block, None, "drawn", ["whole"], SHORT) for block in BLOCKS],
    *[
        _case("b", block, _tables(8, 1_000_000, ids, 1_000_000), f"uniform, {ids} a bag", peers, 3)
        for block in BLOCKS
        for ids, peers in ((1, ["whole", "ancestor"]), (10, ["whole"]))
    ],
    *[_case("b", block, MANY_SMALL, "uniform, 10 a bag", ["whole"], SHORT) for block in BLOCKS],
]


def main() -> int:
    """Runs the cases, prints the tables, writes the dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["a", "b"], help="only the cases of one question")
    parser.add_argument("--tables", type=int, help="only the cases with this many tables")
    parser.add_argument(
        "--rounds", type=int, help=f"of every case, instead of 3 or {SHORT}: 1 takes a few minutes"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where results are written",
    )
    options = parser.parse_args()
    found = []
    chosen = [c for c in CASES if options.only in (None, c["kind"])]
    if options.tables is not None:
        chosen = [c for c in chosen if (c["tables"] or {}).get("tables") == options.tables]
    if options.rounds is not None:
        chosen = [{**c, "rounds": options.rounds} for c in chosen]
    for case in tqdm(chosen, disable=not sys.stderr.isatty()):
        found.append(fresh("benchmarks.enforce_case", case, 1, 2))
    text = report(found)
    print(text)
    keep(options.out, "enforce", found, text)
    return 0


def report(found: list[dict[str, Any]]) -> str:
    """The figures as markdown tables with what they mean."""
    notes = (
        "Milliseconds a step, 2 threads, one process; the median of 100 steps (20 for small models)"
        " on fresh batches, the least of several rounds in turns. enforce: host time in the"
        " enforcer's hooks. settle: in the mask update, before scoring, for all rows that were"
        " written since the last. move: the rest of that update. with all: a step with hooks, and a"
        " hundredth of the mask update; zeroed: the same with trains_removed, all else with"
        " ids of removed rows dropped. mul_: the plain loop and every table times its mask after"
        " every step (masks as one column for rows). torch.ao: forward through mask * weight and a"
        " dense gradient, tables only; its masks are not applied to the weights, and updating them"
        " takes seconds more."
    )
    return "\n\n".join(part for part in (notes, _by_rows(found), _loops(found)) if part)


def _by_rows(found: list[dict[str, Any]]) -> str:
    """Question (a): pairs of cases that differ in the rows alone."""
    lines = [
        "| block | ids | rows | enforce | / 100k rows | settle | move |",
        "|---|---|---|---|---|---|---|",
    ]
    small: dict[tuple[str, str], float] = {}
    for f in (f for f in found if f["kind"] == "a"):
        place = str(f["block"]), f["ids"]
        small.setdefault(place, f["enforce_s"])
        ratio = f"**{f['enforce_s'] / small[place]:.2f} x**"
        row = [_block(f), f["ids"], f"{f['tables']['rows']:,}", _ms(f["enforce_s"]), ratio]
        lines.append("| " + " | ".join([*row, _ms(f["settle_s"]), _ms(f["move_s"])]) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _loops(found: list[dict[str, Any]]) -> str:
    """Question (b)."""
    lines = [
        "| block | model | ids | plain | with all | / plain | zeroed | / plain | enforce | mask"
        " update / 100 |"
    ]
    lines[0] += " mul_ | / with all | torch.ao | / with all |"
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for f in (f for f in found if f["kind"] == "b"):
        tables = f["tables"]
        model = (
            "main job"
            if tables is None
            else f"{tables['tables']} x {tables['rows']:,} x {tables['dim']}"
        )
        ours = f["ours_s"]
        row = [
            _block(f),
            model,
            f["ids"],
            _ms(f["plain_s"]),
            _ms(ours),
            f"**{100 * (ours / f['plain_s'] - 1):+.1f}%**",
            _ms(f["zero_s"]),
            f"{100 * (f['zero_s'] / f['plain_s'] - 1):+.1f}%",
        ]
        row += [_ms(f["enforce_s"]), _ms((f["settle_s"] + f["move_s"]) / f["every"])]
        for peer in ("whole_s", "ancestor_s"):
            row += [_ms(f[peer]), f"{f[peer] / ours:.1f} x"] if peer in f else ["-", "-"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _block(found: dict[str, Any]) -> str:
    return "rows" if found["block"] == "rows" else "x".join(map(str, found["block"]))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


if __name__ == "__main__":
    sys.exit(main())
