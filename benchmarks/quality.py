"""Quality at equal bytes: tables narrowed while they train, small dense tables, and other ways to a
smaller table.

Every method is tuned alike for each number of bytes, with the first seed, on one grid of learning
rates and L2: each form that fits (columns and bits) at its four coarse points, then the best form
at all neighbors of its best point, until none is better. The AUC on validation chooses; what is
best is trained with all seeds. All are trained by a kernel in C, and
with ``--package`` the methods of examples/two_tower by the package too. Finished trainings are kept
in a file with a hash of the data and its split, so that an interrupted run continues, and other
data starts anew. A file without a split (user, item, num_users, num_items) is split by a seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import quality_case, quality_methods
from benchmarks.measure import keep
from benchmarks.quality_methods import CUT_METHODS, DIM, FULL, METHODS, forms
from benchmarks.quality_report import report
from dlrm import interactions
from dlrm.batches import DataError
from two_tower.data import load

__all__ = ["main"]

Row = dict[str, Any]

BUDGETS = {"2.3%": 6.0, "4.7%": 12.0, "8.9%": 22.8, "9.4%": 24.0, "20%": 0.2 * FULL}
"""Bytes of a row."""

_WAYS = ("", " by column", " codes")
PACKAGE = ("full", *(f"{how}{way}" for how in ("small dense", "narrowed") for way in _WAYS))
"""Methods that the package's example trains."""

L2 = (0.03, 0.05, 0.08, 0.15, 0.27)
LR = (0.2, 0.4, 0.8, 1.6, 3.2)
COARSE = [(lr, l2) for lr in (0.4, 1.6) for l2 in (0.05, 0.15)]


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, print the tables, write the dated result."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:  # before a worker starts
        load(options.data, options.split_seed).steps(options.batch_size)
    except DataError as error:
        parser.error(str(error))
    split = interactions.split_of(options.data, options.split_seed)
    data = _key(options.data.read_bytes(), split.encode())
    states = options.work / "states"
    states.mkdir(parents=True, exist_ok=True)
    places = {
        "file": str(options.data.resolve()),
        "split_seed": options.split_seed,
        "states": str(states.resolve()),
    }
    done = _Done(options.work / "trainings.jsonl", options.workers, places)
    common = {
        "data": data,
        "trainer": "kernel",
        "epochs": options.epochs,
        "batch_size": options.batch_size,
    }
    best = done.tuned(_cells(common, options.methods, options.budgets), options.seeds[0])
    chosen = done.trained(
        [{**case, "seed": seed, "recall": True} for seed in options.seeds for case in best]
    )
    again = [
        {**_case(row), "trainer": "package"}
        for row in chosen
        if row["method"] in PACKAGE and options.package
    ]
    fewer_bits = [
        {**_case(row), "dtype": bits}
        for row in chosen
        if row["method"] == "full"
        for bits in ("int8", "int4")
    ]
    chosen += done.trained(fewer_bits + again)
    text = report(chosen, f"{options.data.name} (SHA-256 of file and split: {data})", split)
    print(text)
    settings = [common, options.seeds, options.methods, options.budgets, options.package]
    name = f"quality-{options.data.stem}-{_key(json.dumps(settings).encode())[:8]}"
    keep(options.out, name, [{**row, "chosen": row in chosen} for row in done.used], text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        help="an interactions .npz, as examples/two_tower/main.py takes",
    )
    add(
        "--split-seed",
        type=int,
        default=0,
        metavar="N",
        help="splits a file that holds no split (default: 0)",
    )
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    add("--epochs", type=int, default=14, metavar="N", help="default: 14")
    add("--batch-size", type=int, default=4096, metavar="N", help="default: 4096")
    add(
        "--methods",
        nargs="+",
        default=METHODS,
        choices=METHODS,
        metavar="NAME",
        help=f"default: {', '.join(METHODS)}",
    )
    add(
        "--budgets",
        nargs="+",
        default=list(BUDGETS),
        choices=BUDGETS,
        metavar="X",
        help=f"default: {', '.join(BUDGETS)}".replace("%", "%%"),
    )
    add("--package", action="store_true", help="train what is chosen by the package too")
    add(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="trainings at a time, of one thread each (default: 2)",
    )
    add(
        "--work",
        type=Path,
        default=Path("runs", "quality"),
        help="folder for trainings (default: runs/quality)",
    )
    add(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where results are written",
    )
    return parser


def _cells(common: Row, methods: Sequence[str], budgets: Sequence[str]) -> list[Row]:
    """What is tuned: every form of every method, and the full table."""
    full = {"method": "full", "budget": "100%", "dim": DIM, "dtype": "fp32", "kept": DIM}
    cells = [full] + [
        {"method": method, "budget": budget, **form}
        for budget in budgets
        for method in methods
        for form in forms(method, BUDGETS[budget])
    ]
    for cell in cells:
        epochs = common["epochs"]
        cell.update(common, cut=epochs // 2 if cell["method"] in CUT_METHODS else epochs)
    return cells


def _key(*parts: bytes) -> str:
    """The first half of a SHA-256."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


class _Done:
    """The trainings that are done, a line of JSON each: of any data, in a file for several runs.

    Attributes:
        used: those that were asked for.
    """

    def __init__(self, file: Path, workers: int, places: dict[str, str]) -> None:
        self.file, self.workers, self.places = file, workers, places
        self.rows: list[Row] = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        )
        self.used: list[Row] = []

    def tuned(self, cells: Sequence[Row], seed: int) -> list[Row]:
        """Return the best case of each method and budget, without a seed."""
        trial = {"seed": seed, "recall": False}
        coarse = [{"lr": lr, "l2": l2} for lr, l2 in COARSE]
        found = []
        for kind in dict.fromkeys((cell["method"], cell["budget"]) for cell in cells):
            mine = [cell for cell in cells if (cell["method"], cell["budget"]) == kind]
            best = _best(
                self.trained([{**cell, **trial, **point} for cell in mine for point in coarse])
            )
            better = True
            while better:
                point = best["lr"], best["l2"]
                best = _best(
                    self.trained(
                        [{**_case(best), "lr": lr, "l2": l2} for lr, l2 in _around(*point)]
                    )
                )
                better = (best["lr"], best["l2"]) != point
            found.append({name: value for name, value in _case(best).items() if name not in trial})
        return found

    def trained(self, cases: Sequence[Row]) -> list[Row]:
        """Return the rows of these cases; train those that are not done, several at a time."""
        missing = [case for case in cases if not any(_is(row, case) for row in self.rows)]
        context = multiprocessing.get_context("spawn")
        with (
            ProcessPoolExecutor(self.workers, mp_context=context) as pool,
            tqdm(total=len(missing), disable=None) as bar,
        ):
            for case, found in zip(
                missing,
                pool.map(_train, [{**case, **self.places} for case in missing]),
                strict=True,
            ):
                self.rows.append({**case, **found})
                with self.file.open("a") as stream:
                    stream.write(json.dumps(self.rows[-1]) + "\n")
                bar.update()
        found = [next(row for row in self.rows if _is(row, case)) for case in cases]
        self.used += [row for row in found if row not in self.used]
        return found


def _around(lr: float, l2: float) -> list[tuple[float, float]]:
    """A point of the grid, and all of its neighbors."""
    near = [
        [values[at] for at in range(len(values)) if abs(at - values.index(value)) <= 1]
        for values, value in ((LR, lr), (L2, l2))
    ]
    return list(product(*near))


def _train(case: Row) -> Row:
    torch.set_num_threads(1)
    return (quality_case if case["trainer"] == "package" else quality_methods).run(case)


def _best(rows: Iterable[Row]) -> Row:
    return max(rows, key=lambda row: row["validation"]["auc"])


def _case(row: Row) -> Row:
    return {
        name: value
        for name, value in row.items()
        if name not in ("validation", "test", "bytes", "cpu_seconds")
    }


def _is(row: Row, case: Row) -> bool:
    return all(row.get(name) == value for name, value in case.items())


if __name__ == "__main__":
    sys.exit(main())
