"""Kill a training and resume it: it ends exactly as an uninterrupted one.

One process:               python examples/resume.py runs/resumed
Killed after 70 steps:     python examples/resume.py runs/resumed --kill-at 70
Resumed:                   python examples/resume.py runs/resumed
On two processes:          dist-sparse launch --nproc 2 examples/resume.py -- \\
                             runs/resumed
Restarted automatically:   dist-sparse launch --nproc 2 --max-restarts 1 \\
                             examples/resume.py -- runs/again --kill-at 70

The number of processes may change between starts: tables are sharded by rows
over all of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# So that this file can be started as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import Advanced, Checkpoints, sparsify
from dlrm.process import run_and_leave

_STEPS, _SAMPLES, _ROWS = 100, 64, 2_000


class Clicks(nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="item", num_embeddings=_ROWS, embedding_dim=16, feature_names=["item"]
        )
        self.tables = EmbeddingBagCollection(tables=[table])
        self.over = nn.Linear(16, 1)

    def forward(self, items: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(self.tables(items).values()).squeeze(1)
        return logits


def build() -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the sharded model and its optimizers and masks. Collective."""
    torch.manual_seed(0)
    net = Clicks()
    apply_optimizer_in_backward(RowWiseAdagrad, net.tables.parameters(), {"lr": 0.1})
    sharder, world = EmbeddingBagCollectionSharder(), dist.get_world_size()
    plan = construct_module_sharding_plan(
        net.tables,
        {"item": row_wise()},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        net, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    layers = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(layers, lambda params: torch.optim.Adam(params, lr=0.01))
    return model, CombinedOptimizer([model.fused_optimizer, adam])


def batches(start: int) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
    """Yield this rank's part of every batch from the step ``start`` on. A reader of files would
    seek there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(start, _STEPS):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(_ROWS, (_SAMPLES, 5), generator=drawn)[rank::world]
        clicked = (ids % 7 == 0).any(dim=1).float()
        items = KeyedJaggedTensor(
            keys=["item"], values=ids.flatten(), lengths=torch.full((len(ids),), 5)
        )
        yield items, clicked


def main(options: argparse.Namespace) -> None:
    """Train from the newest checkpoint, or from the start."""
    model, optimizer = build()
    sparse = sparsify(
        model,
        optimizer,
        level=0.5,
        block="row",
        begin=20,
        end=80,
        every=10,
        advanced=Advanced(min_rows=0),
    )
    parts = {"model": model, "optimizer": optimizer, "sparse": sparse}

    checkpoints = Checkpoints(options.folder, keep=2, every=25)
    resumed = checkpoints.resume_latest(**parts)
    start = 0 if resumed is None else resumed.step
    if dist.get_rank() == 0:
        print(f"starts at step {start}", flush=True)
    for step, (items, clicked) in enumerate(batches(start), start):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(items), clicked).backward()
        optimizer.step()
        sparse.step()
        checkpoints.save(step + 1, **parts)
        if step + 1 == options.kill_at and start == 0 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    summed = torch.stack([value.double().sum() for value in state_of(model)]).sum()
    dist.all_reduce(summed)
    if dist.get_rank() == 0:
        print(f"{sparse}\nsum of the table's weights: {float(summed):.12g}", flush=True)


def state_of(model: nn.Module) -> list[Tensor]:
    """Return this rank's shard of the table."""
    return [
        shard.tensor
        for shard in model.state_dict()["tables.embedding_bags.item.weight"].local_shards()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the checkpoints are")
    parser.add_argument(
        "--kill-at",
        type=int,
        metavar="STEP",
        help="kill rank 0 after this many steps of a first start",
    )
    run_and_leave(main, parser.parse_args())
