"""A sharded model that trains on ranks with masks, a schedule and checkpoints, and all of its state
as global tensors.

``python -m tests.checkpoint.ranks`` saves and loads every pair of 1, 2 and 4 ranks and five
shardings (see ``test_ranks.py``, which runs some of them): weights, masks and optimizer state by
global index, and 20 steps more, which are bit-equal on the same ranks and sharding.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import ROW, Checkpoints, CubicDataScheduler, DataNormSparsifier, MaskEnforcer
from dist_sparse.checkpoint.checkpoints import Resumed
from tests.dist.cells import batch, build
from tests.dist.enforcing import loss_of, optimizer_of, trained_cells
from tests.dist.harness import Ranks

__all__ = ["SHARDINGS", "Job", "compared", "load", "save"]

SHARDINGS: Final = ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed")
SAVED: Final = 4
LATER: Final = 20
"""Steps before a checkpoint, and after it."""

_SAMPLES: Final = 12
"""Of a step, over all ranks: the same for every world."""


class Job:
    """A cell of ``tests.dist.cells`` in training. Collective."""

    def __init__(
        self, sharding: str, root: Path, block: tuple[int, Any] = (1, ROW), **settings: Any
    ) -> None:
        cell = trained_cells(dist.get_world_size())[sharding]
        # In every world.
        self.cell = replace(
            cell, tables=tuple(replace(t, rows=max(t.rows, 4)) for t in cell.tables)
        )
        # Otherwise DDP changes its buckets after two steps, and a resumed run adds up in another
        # order for as long.
        buckets = DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)
        self.model = build(self.cell, layers=buckets)
        self.optimizer = optimizer_of(
            self.model, tables=lambda params: RowWiseAdagrad(params, lr=0.1)
        )
        self.sparsifier = DataNormSparsifier(
            sparsity_level=0.0, sparse_block_shape=block, norm="L2"
        )
        self.sparsifier.add_model(self.model)
        self.scheduler = CubicDataScheduler(
            self.sparsifier, "sparsity_level", final={"*": 0.7}, end=10, every=2
        )
        self.enforcer = MaskEnforcer(self.sparsifier).attach(self.optimizer)
        self.checkpoints = Checkpoints(root, **settings)

    @property
    def parts(self) -> dict[str, Any]:
        sparse = {"sparsifier": self.sparsifier, "scheduler": self.scheduler}
        return {"model": self.model, "optimizer": self.optimizer} | {"sparse": sparse}

    def train(self, start: int, stop: int, *, save: bool = False) -> None:
        for step in range(start, stop):
            self.optimizer.zero_grad()
            loss_of(self.model(own_part(batch(self.cell, step, size=_SAMPLES)))).backward()
            self.optimizer.step()
            self.sparsifier.step()
            self.scheduler.step()
            if save:
                self.checkpoints.save(step + 1, **self.parts)

    def state(self) -> dict[str, Tensor]:
        """Weights, masks and optimizer state, whole. Collective."""
        tensors: dict[str, Any] = {
            f"model.{name}": value for name, value in self.model.state_dict().items()
        }
        for key, held in self.optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer.{key}.{name}": value for name, value in held.items() if name != "step"
            }
        masks = {
            f"mask.{name}": self.sparsifier.full_mask(name)
            for name in sorted(self.sparsifier.data_groups)
        }
        return {**whole(tensors), **masks}


def own_part(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """This rank's samples of a batch of all ranks."""
    count = _SAMPLES // dist.get_world_size()
    start = dist.get_rank() * count
    parts = {key: features[key] for key in list(features.keys())}
    values = [
        part.values()[part.offsets()[start] : part.offsets()[start + count]]
        for part in parts.values()
    ]
    lengths = [part.lengths()[start : start + count] for part in parts.values()]
    return KeyedJaggedTensor(keys=list(parts), values=torch.cat(values), lengths=torch.cat(lengths))


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Sharded tensors put together. Row-wise Adagrad's sums get one name and shape. Collective."""
    mine: list[tuple[str, tuple[int, ...], list[tuple[list[int], Tensor]]]] = []
    for name, value in tensors.items():
        pieces = [([0] * value.dim(), value)]
        if isinstance(value, ShardedTensor):
            pieces = [
                (shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()
            ]
        mine.append((name, tuple(value.shape), pieces))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found: dict[str, Tensor] = {}
    for name, shape, pieces in (entry for entries in every for entry in entries):
        for offsets, part in pieces:
            full = found.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
            full[
                tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))
            ] = part
    named = {}
    for name, full in found.items():
        if name.endswith((".momentum1", "embedding_bags.weight.sum")) or (
            name.endswith("weight.sum")
        ):
            name, full = f"{name.partition('.weight.')[0]}.sums", full.flatten()
        named[name] = full
    return named


def save(sharding: str, root: Path) -> None:
    """Train, save to a folder of the world and the sharding, and note the state then and later.
    Collective."""
    folder = root / f"{dist.get_world_size()}-{sharding}"
    job = Job(sharding, folder)
    job.train(0, SAVED)
    job.checkpoints.save(SAVED, **job.parts, extra={"world": dist.get_world_size()})
    then = job.state()
    job.train(SAVED, SAVED + LATER)
    later = job.state()
    if dist.get_rank() == 0:
        torch.save([then, later], folder / "states.pt")


def load(
    sharding: str, folder: Path, steps: int = LATER
) -> tuple[Resumed, dict[str, Tensor], dict[str, Tensor]]:
    """Resume a model of another start, and train on. Returns the state at both ends. Collective."""
    job = Job(sharding, folder)
    resumed = job.checkpoints.resume_latest(**job.parts, row_wise_state="merge")
    assert resumed is not None
    then = job.state()
    job.train(SAVED, SAVED + steps)
    return resumed, then, job.state()


def compared(sharding: str, folder: Path) -> dict[str, Any]:
    """What a load gives against what was saved; every rank has the same. Collective."""
    then, later = torch.load(folder / "states.pt")
    resumed, found, after = load(sharding, folder)
    sums = {name for name in found if name.endswith(".sums")}
    merged = {name.removesuffix(".weight.momentum1") + ".sums" for name in resumed.merged}
    assert found.keys() == then.keys() and merged <= sums
    equal = {
        name
        for name in found
        if found[name].shape == then[name].shape and torch.equal(found[name], then[name])
    }
    assert equal == found.keys() - merged, sorted(found.keys() - merged - equal)
    masks = all(torch.equal(after[name], later[name]) for name in after if name.startswith("mask."))
    far = max(
        float((after[name] - later[name]).abs().max())
        for name in after
        if name.startswith("model.")
    )
    return {"merged": len(merged), "masks": masks, "far": far}


def _all_pairs(worlds: Iterable[int] = (1, 2, 4)) -> None:
    running = {world: Ranks(world) for world in worlds}
    try:
        with tempfile.TemporaryDirectory() as name:
            root, started, pairs = Path(name), time.perf_counter(), 0
            for (_, ranks), sharding in itertools.product(running.items(), SHARDINGS):
                ranks.call(save, sharding, root)
            far: dict[str, tuple[float, str]] = {}
            for (world, ranks), sharding in itertools.product(running.items(), SHARDINGS):
                for folder in sorted(root.iterdir()):
                    found = ranks.call(compared, sharding, folder)[0]
                    pairs += 1
                    kind = "merged" if found["merged"] else "another world"
                    if folder.name == f"{world}-{sharding}":
                        kind = "the same"
                    elif folder.name.startswith(f"{world}-") and not found["merged"]:
                        kind = "another sharding"
                    far[kind] = max(
                        far.get(kind, (0.0, "")),
                        (found["far"], f"{folder.name} on {world}-{sharding}"),
                    )
                    assert found["masks"] or found["merged"], (world, sharding, folder.name)
                    most = {"the same": 0.0, "merged": math.inf}.get(kind, 1e-5)
                    assert found["far"] <= most, (world, sharding, folder.name, found)
            seconds = time.perf_counter() - started
            print(f"{pairs} pairs in {seconds:.0f} s, all equal when loaded; {LATER} steps later:")
            for kind, (value, cell) in far.items():
                print(f"  {kind}: weights differ by at most {value:.2g} ({cell})")
    finally:
        for ranks in running.values():
            ranks.close()


if __name__ == "__main__":
    _all_pairs()
