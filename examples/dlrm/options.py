"""The command line of the job. Imports torch, and not TorchRec, which takes longer to load than a
wrong option to be refused."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from dist_sparse import ROW
from dist_sparse.checks import parse_block
from dist_sparse.sparsifiers.importance import SCORES

DIM = 32
"""Default columns of all tables; they are equal because DLRM's interaction multiplies the features'
vectors with each other."""

NARROWEST = 4
"""The smallest number of columns; FBGEMM requires multiples of it."""

SHARDINGS = ("mixed", "row_wise", "column_wise", "table_wise", "data_parallel")


def parse(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options; a wrong one ends the process with status 2 and one line."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--sharding",
        choices=SHARDINGS,
        default="mixed",
        metavar="KIND",
        help=f"sharding of the tables: {', '.join(SHARDINGS)} (default: %(default)s)",
    )
    add(
        "--block",
        type=as_block,
        default=(1, ROW),
        metavar="BLOCK",
        help="block that is kept or removed as a whole: `row` (the default), or such as `1x4`",
    )
    add(
        "--norm",
        choices=("L1", "L2"),
        default="L2",
        help="norm by which blocks are compared (default: %(default)s)",
    )
    add(
        "--score",
        choices=SCORES,
        help=(
            "blocks with the smallest score are removed: by norm, by lookups, or by what Adagrad"
            " has summed (default: norm_accumulator for rows, otherwise norm)"
        ),
    )
    add(
        "--level",
        "--sparsity",
        dest="level",
        nargs="+",
        metavar="LEVEL",
        help=(
            "fraction of the blocks to remove, such as 0.8 or 80%%: of all tables, or TABLE=LEVEL"
            " for each table to sparsify (default: user_x_genre=0.95; with --data 0.8)"
        ),
    )
    add(
        "--dims",
        type=as_dim,
        nargs="+",
        metavar="DIM",
        help=(
            "embedding dimensions of the small dense models to compare with, multiples of 4"
            " (default: the one whose tables take about the bytes that the sparsified model kept)"
        ),
    )
    add(
        "--every",
        type=as_positive,
        default=20,
        metavar="STEPS",
        help="steps between mask updates (default: %(default)s)",
    )
    add(
        "--epochs",
        type=as_positive,
        default=1,
        metavar="N",
        help="passes over the training data (default: %(default)s)",
    )
    add(
        "--seed",
        type=as_seed,
        default=0,
        metavar="N",
        help="random seed (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=as_positive,
        default=128,
        metavar="N",
        help="examples per step over all processes (default: %(default)s)",
    )
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help=(
            "instead of MovieLens-100K: an interactions .npz with train_user, train_item,"
            " test_user, test_item, num_users, num_items; for large ones raise --batch-size, too"
        ),
    )
    add(
        "--run-dir",  # torchrun would take --run for an abbreviation of an option of its own
        type=Path,
        metavar="DIR",
        help=(
            "folder for logs, artifacts and the report; must hold no run yet (default:"
            " runs/dlrm-<time>, or run in the folder of --checkpoint)"
        ),
    )
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help=(
            "folder for checkpoints; if it holds some, of the same options, training goes on from"
            " the newest"
        ),
    )
    add(
        "--checkpoint-every",
        type=as_positive,
        default=200,
        metavar="STEPS",
        help="steps between checkpoints (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.score is None:
        is_l2_of_rows = (options.block, options.norm) == ((1, ROW), "L2")
        options.score = "norm_accumulator" if is_l2_of_rows else "norm"
    if options.score != "norm" and options.norm != "L2":
        parser.error(f"argument --norm: {options.norm} is for --score norm")
    if options.level is None:
        options.level = {"user_x_genre": 0.95} if options.data is None else 0.8
    else:
        try:
            options.level = as_levels(options.level)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --level/--sparsity: {error}")

    world = started_world() or 1
    if options.batch_size % world:
        parser.error(
            f"argument --batch-size: invalid value: {options.batch_size} "
            f"(must be divisible by {world} processes)"
        )
    if options.sharding in ("mixed", "column_wise") and DIM % world:
        parser.error(
            f"argument --sharding: {options.sharding} cuts {DIM} columns, "
            f"which don't divide by {world} processes"
        )
    if options.data is not None and not options.data.is_file():
        parser.error(f"argument --data: no such file: {options.data}")
    # With checkpoints, a job that is started again continues its logs.
    if options.checkpoint is not None:
        options.run_dir = options.run_dir or options.checkpoint / "run"
        return options
    options.run_dir = options.run_dir or Path("runs", time.strftime("dlrm-%Y%m%d-%H%M%S"))
    # Here: other jobs take these options without a log.
    from dist_sparse.extras.report.folder import RUN

    for log in (options.run_dir / RUN, *sorted(options.run_dir.glob(f"*/{RUN}"))):
        if log.exists():
            parser.error(
                f"argument --run-dir: {log.parent} holds the log of a run: choose another folder"
            )
    return options


def is_usual(options: argparse.Namespace) -> bool:
    """Return whether all options that decide what is trained are the default, except the seed, the
    sharding and the number of processes."""
    usual = {
        "data": None,
        "epochs": 1,
        "batch_size": 128,
        "dims": None,
        "level": {"user_x_genre": 0.95},
        "block": (1, ROW),
        "every": 20,
        "score": "norm_accumulator",
    }
    return all(getattr(options, name) == value for name, value in usual.items())


def started_world() -> int | None:
    """Return the number of processes that torchrun started, or None if it did not start this
    one."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return int(os.environ["WORLD_SIZE"])
    return None


def as_positive(text: str) -> int:
    return _whole(text, 1)


def as_dim(text: str) -> int:
    dim = _whole(text, NARROWEST)
    if dim % NARROWEST:
        raise argparse.ArgumentTypeError(
            f"invalid value: {text!r} (must be a multiple of {NARROWEST})"
        )
    return dim


def as_seed(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"invalid value: {text!r} (must be a whole number, at least {least})"
        )
    return int(text)


def as_level(text: str) -> float:
    try:
        level = float(text.removesuffix("%"))
    except ValueError:
        level = float("nan")
    if text.endswith("%"):
        level /= 100
    if not 0 <= level <= 1:
        raise argparse.ArgumentTypeError(
            f"invalid value: {text!r} (must be in [0, 1], or a percentage such as 80%)"
        )
    return level


def as_levels(texts: Sequence[str]) -> float | dict[str, float]:
    """Return one level of all tables, or levels by table from ``TABLE=LEVEL``."""
    if len(texts) == 1 and "=" not in texts[0]:
        return as_level(texts[0])
    levels = {}
    for text in texts:
        name, equals, level = text.partition("=")
        if not name or not equals or name in levels:
            raise argparse.ArgumentTypeError(
                f"invalid value: {text!r} (must be one LEVEL, or TABLE=LEVEL once a table)"
            )
        levels[name] = as_level(level)
    return levels


def as_block(text: str) -> tuple[int, int | str]:
    try:
        return parse_block(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
