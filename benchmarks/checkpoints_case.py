"""One case of the benchmark of checkpoints, on each rank:
``torchrun ... -m benchmarks.checkpoints_case CASE``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.measure import peak_extra_bytes
from dist_sparse import Checkpoints, sparsify


def _model(case: dict[str, Any]) -> DistributedModelParallel:
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=case["rows"],
                embedding_dim=case["dim"],
                feature_names=[f"f{i}"],
            )
            for i in range(case["tables"])
        ]
    )
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    sharder, world = EmbeddingBagCollectionSharder(), dist.get_world_size()
    plan = construct_module_sharding_plan(
        tables,
        {f"t{i}": row_wise() for i in range(case["tables"])},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    model = torch.nn.Module()
    model.tables = tables
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )


def _timed(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _measure(case: dict[str, Any], root: Path) -> dict[str, Any]:
    rank, model = dist.get_rank(), _model(case)
    optimizer = model.fused_optimizer
    sparse = sparsify(model, optimizer, level=0.8, block=tuple(case["block"]), end=1, every=1)
    sparse.step()
    sparse.step()
    parts = {"model": model, "optimizer": optimizer, "sparse": sparse}
    checkpoints, plain = Checkpoints(root / "ours", keep=1), root / "plain"
    step, writing, apart = 0, None, dist.new_group()

    def ours() -> None:
        nonlocal step
        step += 1
        checkpoints.save(step, **parts)

    def ours_later() -> None:
        nonlocal step
        step += 1
        checkpoints.save_async(step, **parts)

    def theirs() -> None:
        nonlocal step
        step += 1
        dcp.save(dict(parts), checkpoint_id=plain / str(step))
        only_newest()

    def theirs_later() -> None:
        nonlocal step, writing
        step += 1
        # DCP's default stager fails on ShardedTensors, the writer's does not. Its thread needs a
        # group of its own.
        writer = dcp.FileSystemWriter(plain / str(step))
        writing = dcp.async_save(dict(parts), storage_writer=writer, process_group=apart)

    def only_newest() -> None:
        """As Checkpoints(keep=1) does."""
        if rank == 0:
            for folder in plain.iterdir():
                if folder.name != str(step):
                    shutil.rmtree(folder)

    def wait() -> None:
        """Ends what was left to threads, outside the clock."""
        nonlocal writing
        checkpoints.wait()
        if writing is not None:
            writing.result()
            dist.barrier()
            only_newest()
            writing = None
        dist.barrier()

    calls: dict[str, Callable[[], object]] = {
        "save": ours,
        "save_dcp": theirs,
        "save_async": ours_later,
        "save_async_dcp": theirs_later,
        "load": lambda: checkpoints.resume_latest(**parts),
        "load_dcp": lambda: dcp.load(dict(parts), checkpoint_id=next(plain.iterdir())),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in ("save", "save_dcp"):
        calls[name]()
        wait()
    order = list(calls.items())
    for _ in range(case["rounds"]):  # in turns, so that all see the same machine
        for name, call in order:
            model.state_dict()  # masks what was loaded, as a first forward would
            times[name].append(_timed(call))
            wait()
        order.reverse()  # what comes after a load writes to other pages of memory
    memory = {}
    for name in ("save", "save_dcp", "load", "load_dcp"):
        memory[f"{name}_memory"] = peak_extra_bytes(calls[name])
        wait()
    folder = Path(checkpoints.root, f"step-{checkpoints.steps()[-1]:08d}")
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    masks = [each.size for key, each in saved.items() if ".masks." in key]
    return {
        **case,
        "shard_bytes": case["tables"] * case["rows"] * case["dim"] * 4 // dist.get_world_size(),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "mask_bytes": sum(rows * columns for rows, columns in masks),
        "blocks": sum(table.blocks for table in sparse.sparsifier.table_stats()),
        **{f"{name}_s": min(each) for name, each in times.items()},
        **{f"{name}_all_s": each for name, each in times.items()},
        **memory,
    }


def main() -> None:
    """Prints what rank 0 has measured, as JSON."""
    warnings.filterwarnings("ignore")
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp(dir=case.get("folder"))]
    dist.broadcast_object_list(shared)
    try:
        found = _measure(case, Path(shared[0]))
        dist.barrier()
    finally:
        shutil.rmtree(shared[0], ignore_errors=True)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo and DDP sometimes abort while they are torn down


if __name__ == "__main__":
    main()
