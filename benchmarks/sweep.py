"""Cost and savings of every level on the example DLRM, after torch.ao's DLRM evaluation.

The dense DLRM is trained once under torchrun; then each cell (block, norm, level) sparsifies a copy
of its tables, with no more training (``post``). For a few cells a model is sparsified during
training (``training``), once with each seed. Results go to ``benchmarks/results/`` as CSV, row by
row, and at the end as JSON, markdown and a plot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from tqdm import tqdm

from benchmarks.measure import fresh, keep
from benchmarks.sweep_cells import LEVELS, TRAINING_LEVELS, Cell, cells, left_to_do, read
from benchmarks.sweep_plot import plot
from benchmarks.sweep_report import report
from dlrm import movielens
from dlrm.batches import DataError
from dlrm.model import sharding_of
from dlrm.options import as_block, as_level, as_levels, as_positive, as_seed

__all__ = ["main"]

BATCH_SIZE = 128
LEAST_EXAMPLES = 20 * BATCH_SIZE
FORWARD_EXAMPLES = 16_384  # torch.ao's
REPEATS = 10
QUICK = {
    "levels": [0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0],
    "training_levels": [("", 0.8)],
    "train_examples": 12_800,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the cells that are not there yet, prints the tables, writes the dated result."""
    parser = _parser()
    options = parser.parse_args(argv)
    name = "sweep-quick" if options.quick else "sweep"
    asked = {key: value for key, value in vars(options).items() if value is not None}
    settings = {
        "levels": LEVELS,
        "training_levels": TRAINING_LEVELS,
        **(QUICK if options.quick else {}),
        **asked,
    }
    if settings.get("train_examples", LEAST_EXAMPLES) < LEAST_EXAMPLES:
        parser.error(
            f"argument --train-examples: invalid value: {options.train_examples} (must be at least"
            f" {LEAST_EXAMPLES})"
        )
    try:
        dataset = movielens.load(movielens.fetch())
        sharding_of(
            {feature.name: feature.rows for feature in dataset.sparse}, "mixed", options.nproc
        )
    except (DataError, ValueError) as error:
        parser.error(str(error))
    tested = len(dataset.test) // BATCH_SIZE * BATCH_SIZE
    run = {
        "train_examples": min(
            settings.get("train_examples", len(dataset.train)), len(dataset.train)
        ),
        "test_examples": tested,
        "forward_examples": min(FORWARD_EXAMPLES, tested),
        "batch_size": BATCH_SIZE,
        "ranks": options.nproc,
        "sharding": "mixed",
    }
    wanted = cells(
        settings["levels"],
        options.blocks,
        options.norms,
        settings["training_levels"],
        options.training_blocks,
        options.seeds,
    )
    stem = options.out / f"{date.today().isoformat()}-{name}"
    table = stem.with_suffix(".csv")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if not options.resume:
            table.unlink(missing_ok=True)
        to_do = left_to_do(table, wanted, run)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    jobs: dict[tuple[int, str], list[Cell]] = {}  # a job has 15 minutes
    for cell in to_do:
        jobs.setdefault(
            (cell.seed, f"training, {cell.block}" if cell.mode == "training" else "dense and post"),
            [],
        ).append(cell)
    for (seed, what), some in jobs.items():
        _measure(table, some, {"run": run, "seed": seed}, f"seed {seed}, {what}")
    rows = read(table)
    text = report(rows)
    print(text)
    plot(rows, stem.with_suffix(".png"))
    keep(options.out, name, rows, f"{text}\n\n![The sweep]({stem.name}.png)")
    return 0


def _measure(table: Path, to_do: list[Cell], job: dict[str, Any], what: str) -> None:
    """One job for these cells; it writes the rows, and this end only counts them for the bar."""
    before = read(table)
    dense = next(
        (row for row in before if (row["mode"], row["seed"]) == ("dense", job["seed"])), {}
    )
    case = {
        **job,
        "cells": [asdict(cell) for cell in to_do],
        "csv": str(table.resolve()),
        "repeats": REPEATS,
        "dense_auc": dense.get("auc"),
        "dense_zipped_bytes": dense.get("zipped_bytes"),
    }
    with (
        tqdm(total=len(to_do), desc=what, unit="cell", disable=not sys.stderr.isatty()) as bar,
        ThreadPoolExecutor(1) as pool,
    ):
        job = pool.submit(fresh, "benchmarks.sweep_job", case, job["run"]["ranks"], 1)
        while not job.done():
            wait([job], timeout=0.5)
            bar.update(len(read(table)) - len(before) - bar.n)
        job.result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--levels",
        type=as_level,
        nargs="+",
        metavar="LEVEL",
        help="of the post cells (default: torch.ao's twenty)",
    )
    add(
        "--blocks",
        type=_block_name,
        nargs="+",
        default=["1x1", "1x4", "1xROW"],
        metavar="R,C",
        help="of the post cells (default: 1x1 1x4 row)",
    )
    add(
        "--norms",
        choices=("L1", "L2"),
        nargs="+",
        default=["L1", "L2"],
        help=(
            "of the post cells (default: both; with 1,1 only the first, because they rank elements"
            " alike)"
        ),
    )
    add(
        "--training-levels",
        type=_training_level,
        nargs="*",
        metavar="LEVEL",
        help=(
            "of the training cells, each of which trains a model; TABLE=LEVEL sparsifies one table"
            " alone; none leaves "
            "them out (default:"
            f" {' '.join(f'{name}={level}' if name else str(level) for name, level in TRAINING_LEVELS)})"
        ),
    )
    add(
        "--training-blocks",
        type=_block_name,
        nargs="*",
        default=["1x4", "1xROW"],
        metavar="R,C",
        help="of the training cells, by L2 (default: 1x4 row)",
    )
    add(
        "--train-examples",
        type=as_positive,
        metavar="N",
        help="train on the first N only (default: all)",
    )
    add(
        "--seeds",
        type=as_seed,
        nargs="+",
        default=[0, 1, 2],
        metavar="N",
        help="of the weights and the order; post cells have the first only (default: 0 1 2)",
    )
    add(
        "--nproc",
        type=as_positive,
        default=2,
        metavar="N",
        help="processes under torchrun (default: %(default)s)",
    )
    add(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where results are written",
    )
    add(
        "--resume",
        action="store_true",
        help="keep the cells that today's CSV has; without it they are measured again",
    )
    add(
        "--quick",
        action="store_true",
        help=(
            f"fewer levels, one training level, {QUICK['train_examples']} examples to train: a"
            " minute; results have a name of their own"
        ),
    )
    return parser


def _training_level(text: str) -> tuple[str, float]:
    level = as_levels([text])
    return ("", level) if isinstance(level, float) else next(iter(level.items()))


def _block_name(text: str) -> str:
    return "x".join(map(str, as_block(text)))


if __name__ == "__main__":
    sys.exit(main())
