"""Tables of equal bytes: following ones and their alternatives.

On a stream whose hot ids drift, and with ``--movielens FOLDER`` on MovieLens-100K in the order of
time; every batch is predicted before it is trained on. With the stream, it also measures the memory
and the time of a table of 100,000,000 ids. Results are written to ``benchmarks/results/`` as JSON
and markdown. It takes some minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import fresh, keep

__all__ = ["CASES", "main", "report"]

METHODS = ("following", "frozen", "hash", "lfu", "distance lfu")

STREAM = {"what": "stream", "ids": 1_000_000, "dim": 64, "steps": 1_000, "methods": METHODS}

MEMORY = {"what": "memory", "ids": 100_000_000, "dim": 64, "rows": 1_000_000, "seed": 0}

CASES: list[dict[str, Any]] = [
    {**STREAM, "share": 0.5, "budgets": [0.05], "seed": seed} for seed in range(3)
]
CASES += [
    {**MEMORY, "method": method, "ranks": ranks, "every": 50, "batch": 2048, "bag": 10}
    for method, ranks in (("compact", 1), ("following", 1), ("following", 2), ("following", 4))
]


MOVIELENS = {"what": "movielens", "ids": 2_625, "dim": 64, "steps": 391, "methods": METHODS}


def main() -> int:
    """Run the cases, print the tables, write the dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--movielens", type=Path, help="folder with ml-100k.inter")
    parser.add_argument("--only", choices=("stream", "memory"), help="half of the cases")
    options = parser.parse_args()
    cases, name, found = CASES, "following", []
    if options.only:
        cases = [case for case in CASES if case["what"] == options.only]
        name = f"following-{options.only}"
    if options.movielens:
        shared = {**MOVIELENS, "folder": str(options.movielens), "budgets": [0.1, 0.25]}
        cases, name = [{**shared, "seed": seed} for seed in range(3)], "following-movielens"
    for case in tqdm(cases, disable=not sys.stderr.isatty()):
        found.append(fresh("benchmarks.following_case", case, case.get("ranks", 1), 1))
        found[-1].pop("folder", None)
    text = report(found)
    print(text)
    keep(options.out, name, found, text)
    return 0


def report(found: list[dict[str, Any]]) -> str:
    """The figures as markdown tables with what they mean."""
    tables = {
        "stream": lambda cases: _qualities(cases, _STREAM),
        "movielens": lambda cases: _qualities(cases, _MOVIELENS),
        "memory": _memory,
    }
    by_kind = {what: [each for each in found if each["what"] == what] for what in tables}
    return "\n\n".join(tables[what](cases) for what, cases in by_kind.items() if cases)


_STREAM = (
    "Bags of 4 ids of 1,000,000, Zipf's law with exponent 1.05; half of the hottest 10,000 ids change"
    " places with cold ones at each of 7 moments. 1,000 batches of 256."
)

_MOVIELENS = (
    "MovieLens-100K in the order of time: bags of the user and the item, of 2,625 ids in one table,"
    " and whether the rating is 4 or 5. 391 batches of 256. Seeds draw initial weights alone."
)


def _qualities(found: list[dict[str, Any]], stream: str) -> str:
    notes = (
        f"{stream} AUC and normalized entropy of all batches but the first eighth, each batch"
        " predicted before it was trained on: mean of seeds 0, 1 and 2, and half their range. Over"
        " hashing: the difference in AUC to hashing on the stream of the same seed. Budget: the"
        " share of the bytes of the full table, 64 columns and row-wise Adagrad's sum, that rows,"
        " sums, indexes and counts may take: 4 bytes an id and 16 a row for following tables, 0.25"
        " an id for frozen masks (which hold the full table for the first eighth), 24 or 32 a row"
        " for TorchRec's managed collisions. Updates every 10 batches, for all alike. Milliseconds:"
        " the median CPU time of a step, and the mean, which includes updates. FBGEMM resets the"
        " state of evicted rows on CUDA alone: here the benchmark does."
    )
    lines = [
        "| budget | method | rows | AUC | over hashing | normalized entropy | ms | mean ms |",
        "|" + "---|" * 8,
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in found:
        for run in each["runs"]:
            key = (run["budget"], run["method"])
            groups.setdefault(key, []).append(run)
    for (budget, method), runs in sorted(groups.items()):
        hashed = groups.get((budget, "hash"), [])
        pairs = zip(runs, hashed, strict=False)
        over = [run["auc"] - beside["auc"] for run, beside in pairs]
        row = [
            f"{budget:.0%}",
            method,
            f"{runs[0]['rows']:,}",
            _spread([run["auc"] for run in runs]),
            _spread(over) if over else "-",
            _spread([run["ne"] for run in runs]),
            f"{statistics.median(run['ms'] for run in runs):.2f}",
            f"{statistics.median(run['mean_ms'] for run in runs):.2f}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return f"{notes}\n\n" + "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {(max(values) - min(values)) / 2:.4f}"


def _memory(found: list[dict[str, Any]]) -> str:
    notes = (
        "A table of 100,000,000 ids x 64 that stores 1,000,000 rows, row-wise, with row-wise"
        " Adagrad; bags of 10 ids, 2,048 a rank; 9 of 10 lookups are of the ids that hold rows at"
        " first. Resident memory of rank 0 beyond that of its imports: once the model is made, after"
        " 150 steps, and the highest. Index: counts and indexes of all ranks, bytes an id."
        " Milliseconds: the median CPU time of rank 0 in a step between due ones, and of a due step"
        " (every 50)."
    )
    lines = [
        "| ranks | table | made | resident | peak | index | step | due step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for f in found:
        sizes = ["-" if f[key] is None else f"{f[key] / 1e6:.0f} MB" for key in _SIZES]
        due = f"{f['due_ms']:.0f} ms" if f["method"] == "following" else "-"
        row = [str(f["ranks"]), f["method"], *sizes, f"{f['bytes_an_id']:.2f}"]
        lines.append("| " + " | ".join([*row, f"{f['ms']:.1f} ms", due]) + " |")
    return f"{notes}\n\n" + "\n".join(lines)


_SIZES = ("made", "resident", "peak")


if __name__ == "__main__":
    sys.exit(main())
