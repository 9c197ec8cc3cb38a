"""Plan what the tables of a checkpoint can lose, on any number of processes.

Train and save, then plan:   dist-sparse launch --nproc 2 examples/plan_checkpoint.py -- \\
                               runs/planned
Plan again, on one:          python examples/plan_checkpoint.py runs/planned --budget 15%

The optimizer's state is the record of the rows that training has read: load it
with the weights. Nothing is removed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor

from dist_sparse import Checkpoints, plan
from dlrm.process import run_and_leave
from resume import build

_STEPS, _SAMPLES = 100, 64

# Training has ids below 500 of 2,000; some ids of the next day are new.
_READ, _LATER = 500, 600


def lookups(step: int, ids: int) -> KeyedJaggedTensor:
    """Return this rank's lookups of a batch, of one id each."""
    drawn = torch.Generator().manual_seed(step)
    values = torch.randint(ids, (_SAMPLES,), generator=drawn)
    mine = values[dist.get_rank() :: dist.get_world_size()]
    return KeyedJaggedTensor(["item"], mine, lengths=torch.ones(len(mine), dtype=torch.int64))


def main(options: argparse.Namespace) -> None:
    """Plan for the newest checkpoint; train and save one, if there is none."""
    model, optimizer = build()
    checkpoints = Checkpoints(options.folder)
    # The weights, and the optimizer's state: without it, no row is known to be unread.
    if checkpoints.resume_latest(model=model, optimizer=optimizer) is None:
        for step in range(_STEPS):
            optimizer.zero_grad()
            clicked = torch.ones(_SAMPLES)[dist.get_rank() :: dist.get_world_size()]
            logits = model(lookups(step, _READ))
            nn.functional.binary_cross_entropy_with_logits(logits, clicked).backward()
            optimizer.step()
        checkpoints.save(_STEPS, model=model, optimizer=optimizer)

    # Collective: every rank calls it, with its own part of the batches.
    later = [lookups(_STEPS + step, _LATER) for step in range(10)]
    answer = plan(model, options.budget, batches=later)
    if dist.get_rank() == 0:
        print(answer, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the checkpoint is")
    parser.add_argument("--budget", default="10%", help="as of dist-sparse plan")
    run_and_leave(main, parser.parse_args())
