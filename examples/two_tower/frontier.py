"""Measure wide towers at several sizes of their tables, with every method, on held-out
interactions.

Two processes:   dist-sparse launch --nproc 2 --ranks 0 \\
                   examples/two_tower/frontier.py -- --data gowalla.npz
One process:     python examples/two_tower/frontier.py --data gowalla.npz

Small dense tables are trained too. An interrupted run continues with the same --out.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from torch import nn

from dist_sparse.extras.frontier import frontier
from dlrm.options import as_positive, as_seed
from dlrm.process import run_and_leave
from two_tower.data import load
from two_tower.model import rows_of
from two_tower.quality import measure
from two_tower.train import Settings, train


def main(options: argparse.Namespace) -> None:
    """Train the wide model, and print its frontier. Collective over the default process group."""
    data = load(options.data)
    test = data.test("validation")
    wide = Settings(
        dim=options.dim,
        width=options.dim,
        l2=options.l2,
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
    )

    def evaluate(model: nn.Module) -> dict[str, float]:
        rows = rows_of(model.module.collection, (data.users, data.items))
        found = measure(*rows, model.module.bias.detach(), data, test)
        return {
            "auc": found.auc,
            "ne": found.ne,
            "auc_popular": found.auc_popular,
            "recall@20": found.recall,
        }

    def trained(columns: float = 1.0) -> tuple[nn.Module, object]:
        dim = round(columns * options.dim)
        model, _ = train(f"{dim} columns", data, replace(wide, dim=dim, width=dim))
        return model, evaluate

    found = frontier(*trained(), trained, rotate=[["user", "item"]], out=options.out)
    if dist.get_rank() == 0:
        print(found)


def parse() -> argparse.Namespace:
    """Return the checked options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="an interactions .npz, as main.py takes",
    )
    add(
        "--dim",
        type=as_positive,
        default=64,
        metavar="D",
        help="columns of the tables (default: %(default)s)",
    )
    add("--l2", type=float, default=0.05, metavar="X", help="regularization (default: %(default)s)")
    add(
        "--epochs",
        type=as_positive,
        default=14,
        metavar="N",
        help="passes over the data (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=as_positive,
        default=4096,
        metavar="N",
        help="over all processes (default: %(default)s)",
    )
    add("--seed", type=as_seed, default=0, metavar="N", help="random seed (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("runs/two-tower-frontier"),
        metavar="DIR",
        help="default: %(default)s",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_and_leave(main, parse())
