"""One case of the mask-update benchmark, in processes of its own: prints its figures as one line of
JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.measure import best, peak_extra_bytes
from benchmarks.peers import ancestor, gather_and_select, norm_pass
from dist_sparse import ROW, DataNormSparsifier
from dist_sparse.groups import reset_traffic, traffic

LEVEL = 0.5


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Times a due ``step()`` in three situations, and the peers that the case names.

    - first: from dense to half of the blocks, so half of the table is overwritten with zeros.
    - growing: the level rises by 1% of the blocks, as at a mask update of a schedule. The headline.
    - steady: the level stays.
    """
    rows, dim, norm = case["rows"], case["dim"], case["norm"]
    block = (1, ROW) if case["block"] == "rows" else tuple(case["block"])
    model = _model(rows, dim, case["sharding"])
    sparsifier = DataNormSparsifier(sparsity_level=LEVEL, sparse_block_shape=block, norm=norm)  # type: ignore[arg-type]
    sparsifier.add_model(model)
    group = sparsifier.data_groups["table"]
    weight = _local(sparsifier)
    fill = torch.Generator().manual_seed(_rank())

    def again() -> None:
        group["sparsity_level"] = 0.0
        sparsifier.step()
        weight.data.normal_(generator=fill)
        group["sparsity_level"] = LEVEL
        _barrier()

    def rise() -> None:
        group["sparsity_level"] += 0.01
        _barrier()

    # Memory first: later steps find the heap already grown.
    found: dict[str, Any] = {**case, "peak_extra_bytes": _most(peak_extra_bytes(sparsifier.step))}
    found["first_s"] = _slowest(best(sparsifier.step, 3, again))
    again()
    sparsifier.step()
    found["growing_s"] = _slowest(best(sparsifier.step, 7, rise))
    found["steady_s"] = _slowest(best(sparsifier.step, 7, _barrier))
    reset_traffic()
    sparsifier.step()
    found["collectives"], found["bytes_sent"] = traffic().collectives, traffic().bytes
    found["shard_bytes"] = weight.numel() * weight.element_size()
    again()
    for peer in case["peers"]:
        found.update(
            _peer(
                peer,
                sparsifier,
                (1, dim) if case["block"] == "rows" else tuple(case["block"]),
                norm,
            )
        )
    return found


def _peer(
    peer: str, sparsifier: DataNormSparsifier, block: tuple[int, int], norm: str
) -> dict[str, Any]:
    data = sparsifier.masks.tables.locate()["table"]
    rect, weight = data.shards[0]
    if peer == "norm_pass":
        return {"norm_pass_s": best(lambda: norm_pass(weight), 7)}
    if peer == "ancestor":
        theirs = ancestor(weight.detach().clone(), block, norm)
        found = {"ancestor_peak_extra_bytes": peak_extra_bytes(theirs.step)}
        return {**found, "ancestor_s": best(theirs.step, 2)}
    k = round(LEVEL * (data.shape[0] // block[0]) * (data.shape[1] // block[1]))
    by = peer.removeprefix("gather_")

    def run() -> None:
        gather_and_select(weight, rect, data.shape, block, norm, k, by=by)

    return {f"{peer}_s": _slowest(best(run, 3, _barrier))}


def _model(rows: int, dim: int, sharding: str) -> nn.Module:
    torch.manual_seed(0)
    config = EmbeddingBagConfig(
        num_embeddings=rows, embedding_dim=dim, name="table", feature_names=["f"]
    )
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
    if not dist.is_initialized():
        return collection
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    how = (
        row_wise()
        if sharding == "row_wise"
        else column_wise(ranks=list(range(dist.get_world_size())))
    )
    plan = construct_module_sharding_plan(
        collection,
        {"table": how},
        sharder=sharder,
        local_size=dist.get_world_size(),
        device_type="cpu",
    )
    wrapper = nn.Module()
    wrapper.tables = collection
    return DistributedModelParallel(
        wrapper, device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )


def _local(sparsifier: DataNormSparsifier) -> torch.Tensor:
    return sparsifier.get_data("table")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _slowest(seconds: float) -> float:
    return _most(seconds)


def _most(value: Any) -> Any:
    """The largest over ranks: a step is as slow as its slowest rank."""
    if value is None or not dist.is_initialized():
        return value
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    figures = main(json.loads(sys.argv[1]))
    if _rank() == 0:
        print(json.dumps(figures), flush=True)
    _barrier()
    os._exit(0)  # gloo aborts now and then when it is destroyed while a DDP module lives
