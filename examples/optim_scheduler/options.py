"""Command line of the example, checked before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dlrm.options import started_world

__all__ = ["AMP", "parse"]

AMP = ("no", "bf16", "fp16")

_COUNTS = ("epochs", "batch_size", "accumulate", "every", "save_every", "stop_at")
_SIZES = ("clip", "table_lr", "layer_lr")


def parse(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, checked: an invalid one ends the process with status 2 and an error
    line."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, default: int | float, metavar: str, says: str) -> None:
        says = f"{says} (default: %(default)s)"
        parser.add_argument(name, type=type(default), default=default, metavar=metavar, help=says)

    add("--epochs", 1, "N", "passes over the training data")
    add("--batch-size", 256, "N", "examples per micro-step, over all processes")
    add("--accumulate", 2, "N", "micro-steps whose gradients make one update")
    parser.add_argument(
        "--amp", choices=AMP, default="no", help="fp16 also scales the loss (default: %(default)s)"
    )
    add("--clip", 1.0, "NORM", "longest gradient, of the tables and of the layers each")
    add("--table-lr", 0.05, "LR", "of the tables, in the first epoch (Adagrad)")
    add("--layer-lr", 2e-3, "LR", "of the layers, at the end of their warm-up (Adam)")
    add("--sparsity", 0.8, "LEVEL", "final part of the rows to remove from each large table")
    add("--every", 10, "N", "updates between two mask updates")
    add("--seed", 0, "N", "of weights and order")
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="an interactions .npz instead of MovieLens-100K"
    )
    group = parser.add_argument_group("checkpoints", "updates are counted")
    group.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="where: one file, also written at the end"
    )
    group.add_argument(
        "--save-every", type=int, metavar="N", help="updates between two checkpoints"
    )
    group.add_argument(
        "--stop-at", type=int, metavar="N", help="leave a checkpoint after update N, and stop"
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue from --checkpoint, on any number of processes",
    )
    options = parser.parse_args(argv)

    for names, good, rule in (
        (_COUNTS, lambda value: value >= 1, "at least 1"),
        (_SIZES, lambda value: 0 < value < float("inf"), "above 0"),
        (("sparsity",), lambda value: 0 <= value <= 1, "in [0, 1]"),
        (("seed",), lambda value: value >= 0, "at least 0"),
    ):
        for name in names:
            if (value := getattr(options, name)) is not None and not good(value):
                parser.error(
                    f"argument --{name.replace('_', '-')}: invalid value: {value} (must be {rule})"
                )
    world = started_world() or 1
    if options.batch_size % world:
        parser.error(
            f"argument --batch-size: invalid value: {options.batch_size} (must be divisible by"
            f" {world} processes)"
        )
    if options.checkpoint is None:
        for name in ("save_every", "stop_at", "resume"):
            if getattr(options, name):
                parser.error(f"argument --{name.replace('_', '-')}: needs --checkpoint PATH")
    elif options.checkpoint.is_dir():
        parser.error(f"argument --checkpoint: a folder, not a file: {options.checkpoint}")
    if options.data is not None and not options.data.is_file():
        parser.error(f"argument --data: no such file: {options.data}")
    return options
