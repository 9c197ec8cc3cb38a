"""Plan what the tables of the newest checkpoint can lose, and publish what a
server needs.

torchrun --standalone --nproc-per-node 2 \\
  examples/tutorial/publish.py runs/tutorial

The first call publishes everything, in FOLDER/published/000: tables without the
rows that training never read, and the layers above them. A later call publishes
the changes since then, in 001. One rank writes the same tables as two.
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

import dist_sparse as ds
from dlrm.batches import Batch, DataError
from dlrm.process import run_and_leave
from tutorial.job import TESTED, batches_of, checkpoints_of, parser_of, start
from tutorial.layers import Layers, save_layers


def main(options: argparse.Namespace) -> None:
    """Plan, remove and export. Collective."""
    data, sharded = start()
    model, optimizer = sharded.model, sharded.optimizer
    # The weights, and the optimizer's state: without it, no row is known to be unread.
    resumed = checkpoints_of(options.folder).resume_latest(model=model, optimizer=optimizer)
    if resumed is None:
        raise DataError(f"{options.folder} holds no checkpoint: run train.py first.")

    # Lookups of later ratings tell what a server will read. Every rank passes its own.
    later = list(batches_of(data, data.test[-TESTED:]))
    answer = ds.plan(
        model,
        options.budget,
        optimizer=optimizer,
        batches=[batch.sparse_features for batch in later],
    )
    removed = ds.remove_untouched(model, optimizer)

    published = sorted(options.folder.glob("published/*/tables"))
    version = options.folder / "published" / f"{len(published):03d}"
    dlrm = model.module.model
    if dist.get_rank() == 0:
        print(f"{answer}\n\n{removed}\n", flush=True)
        version.mkdir(parents=True, exist_ok=True)
        save_layers(dlrm, version / "layers.safetensors")
    # The tables come last, and appear at once: a server waits for them.
    exported = ds.export(
        model, removed, version / "tables", dtype=options.dtype, since=published or None
    )
    model.eval()
    with torch.no_grad():
        _, (_, trained, _) = model(later[0])
    if dist.get_rank() == 0:
        served = served_logits([*published, version / "tables"], later[0])
        print(exported)
        difference = float((served - trained).abs().max())
        print(f"Served logits differ from trained ones by at most {difference:.1g}.")


def served_logits(folders: list[Path], batch: Batch) -> Tensor:
    """Return the logits of a batch as a server computes them."""
    tables = ds.load_served(folders)
    ids = batch.sparse_features
    embedded = tables(ids.values(), ids.lengths())
    layers = Layers(folders[-1].with_name("layers.safetensors"))
    return layers(batch.dense_features, embedded.view(ids.stride(), len(ids.keys()), -1))


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--budget", default="5%", help="as of dist-sparse plan (default: 5%%)")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "int8", "int4"),
        default="int4",
        help="of the published tables (default: %(default)s)",
    )
    run_and_leave(main, parser.parse_args())
