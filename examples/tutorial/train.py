"""Train a DLRM on MovieLens-100K in order of time, and save a checkpoint.

torchrun --standalone --nproc-per-node 2 \\
  examples/tutorial/train.py runs/tutorial

A second call resumes from the checkpoint, and trains on later ratings:

torchrun --standalone --nproc-per-node 2 \\
  examples/tutorial/train.py runs/tutorial --ratings 80000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse.extras.report import Quality
from dlrm.batches import DataError, Dataset
from dlrm.model import ShardedModel
from dlrm.options import as_positive
from dlrm.process import run_and_leave
from tutorial.job import BATCH_SIZE, TESTED, batches_of, checkpoints_of, parser_of, start


def main(options: argparse.Namespace) -> None:
    """Train from the newest checkpoint, or from the start. Collective."""
    data, sharded = start()
    checkpoints = checkpoints_of(options.folder)
    # The optimizer's state is the record of the rows that training has read: save it too.
    parts = {"model": sharded.model, "optimizer": sharded.optimizer}
    resumed = checkpoints.resume_latest(**parts)
    steps, first = (resumed.step, resumed.extra["ratings"]) if resumed else (0, 0)
    last = min(options.ratings, len(data.train))
    if last - first < BATCH_SIZE:
        raise DataError(f"The checkpoint has trained on {first:,} ratings: pass more as --ratings.")
    if dist.get_rank() == 0:
        print(f"Training for {(last - first) // BATCH_SIZE} steps", flush=True)
    steps += train(sharded, data, torch.arange(first, last))
    checkpoints.save(steps, **parts, extra={"ratings": last})
    auc = auc_of(sharded, data)
    if dist.get_rank() == 0:
        print(f"Trained on ratings {first:,} to {last:,}, in order of time: {steps} steps in all.")
        print(f"AUC on the last {TESTED:,} ratings, which are later: {auc:.4f}")
        print(f"Checkpoint: {checkpoints.root}, step {steps}", flush=True)


def train(sharded: ShardedModel, data: Dataset, index: Tensor) -> int:
    """Train on the ratings ``index``, and return the number of steps."""
    sharded.model.train()
    steps = 0
    for batch in batches_of(data, index, shuffle_seed=0):
        loss, _ = sharded.model(batch)
        sharded.optimizer.zero_grad()
        loss.mean().backward()
        sharded.optimizer.step()
        steps += 1
    return steps


@torch.no_grad()
def auc_of(sharded: ShardedModel, data: Dataset) -> float:
    """Return the AUC on the last ratings, over all ranks. Collective."""
    sharded.model.eval()
    answers = [sharded.model(batch)[1] for batch in batches_of(data, data.test[-TESTED:])]
    logits = torch.cat([logits for _, logits, _ in answers])
    labels = torch.cat([labels for _, _, labels in answers])
    return Quality(every=1).update(logits, labels)["auc"]


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument(
        "--ratings",
        type=as_positive,
        default=70_000,
        metavar="N",
        help="train on the ratings up to this one (default: %(default)s)",
    )
    run_and_leave(main, parser.parse_args())
