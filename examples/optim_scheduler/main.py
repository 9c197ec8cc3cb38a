"""Train a DLRM of torch's own modules under DDP, with two OptimSchedulers.

One updates and sparsifies the tables, the other updates the layers. Each has its
own learning rate, gradient norm and schedule. TorchRec trains nothing here; only
the batches of examples/dlrm have its types.

One process:     python examples/optim_scheduler/main.py
Two processes:   dist-sparse launch --nproc 2 examples/optim_scheduler/main.py
Interrupted:     ... --checkpoint runs/ranker.pt --stop-at 100
Resumed:         ... --checkpoint runs/ranker.pt --resume
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from dist_sparse.text import number_of
from dlrm import interactions, movielens
from dlrm.batches import DataError, Dataset
from dlrm.options import started_world
from optim_scheduler.options import parse
from optim_scheduler.train import Job

_TIMEOUT = timedelta(minutes=5)


def main(options: argparse.Namespace) -> None:
    """Run the whole job. Collective over the processes that torchrun has started, if any."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    # TorchRec's batches log through torch.fx.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    world = started_world() or 1
    if world > 1:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank = dist.get_rank() if world > 1 else 0
    if rank:
        logging.disable(logging.INFO)  # gradients are averaged: all ranks would log the same

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    dataset = _data(options, rank, world)
    job = Job(options, dataset, rank, world)
    if options.resume:
        job.resume()
    say(
        f"{dataset.name}: {len(dataset.train)} examples to train, {len(dataset.test)} to test;"
        f" {number_of(world, 'rank')}, updates {job.done + 1} to {job.updates} of"
        f" {options.accumulate} x {options.batch_size} examples"
    )
    say(f"  tables: {job.tables}\n  layers: {job.layers}")
    started, first = time.perf_counter(), job.done
    job.train()
    seconds = time.perf_counter() - started
    if job.done < job.updates:
        say(
            f"Stopped after update {job.done}. {options.checkpoint} is the checkpoint: go on with"
            " --resume."
        )
        return
    say(
        f"{1000 * seconds / max(1, job.done - first):.1f} ms an update\n\n{'table':20}{'rows':>6} "
        " sparsity"
    )
    for table in job.sparsities():
        say(f"{table.name:20}{table.shape[0]:6}  {table.sparsity:.4f}")
    say(f"\nAUC {job.auc():.4f}")
    say(f"Read at the end: all {job.check_zeros()} removed weights are 0.")


def _data(options: argparse.Namespace, rank: int, world: int) -> Dataset:
    if options.data is not None:
        return interactions.load(options.data, options.seed)
    if rank == 0:
        movielens.fetch()
    if world > 1:
        dist.barrier()  # the others read what rank 0 has fetched
    return movielens.load(movielens.fetch())


if __name__ == "__main__":
    options = parse(__doc__)
    status = 1
    try:
        main(options)
        if dist.is_initialized():
            dist.barrier()  # no rank exits while another still communicates with it
        status = 0
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, in which the teardown of gloo and DDP sometimes aborts.
    os._exit(status)
