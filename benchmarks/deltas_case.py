"""One case of ``benchmarks/deltas.py``, in a process of its own:
``python -m benchmarks.deltas_case JSON``."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.measure import peak_extra_bytes
from dist_sparse import Advanced, export, load_served, sparsify

__all__ = ["main", "publish"]


def main() -> int:
    """Runs the case given as JSON and prints what it found as JSON."""
    case = json.loads(sys.argv[1])
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps({**case, **publish(case)}))
    dist.destroy_process_group()
    return 0


def publish(case: dict[str, Any]) -> dict[str, Any]:
    """A fused table with half of its rows removed: a full export, a delta that compares all rows and
    three of noted rows; the last of them is applied to the served weights of the chain before it."""
    rows, dim, dtype = case["rows"], case["dim"], case["dtype"]
    config = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"]
    )
    tables = EmbeddingBagCollection(tables=[config])
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
    # The planner replicates small tables.
    plan = construct_module_sharding_plan(
        tables, {"t": table_wise(rank=0)}, local_size=1, world_size=1, device_type="cpu"
    )
    model: Any = DistributedModelParallel(
        tables, device=torch.device("cpu"), plan=ShardingPlan({"": plan})
    )
    sparse = sparsify(
        model,
        model.fused_optimizer,
        level=0.5,
        block="row",
        end=0,
        advanced=Advanced(score="norm", min_rows=1),
    )
    train(model, torch.arange(4))
    sparse.step()
    kept = sparse.sparsifier.full_mask("t").any(1).nonzero().flatten()

    def some() -> Tensor:
        return kept[torch.randperm(len(kept))[: round(len(kept) * case["share"])]]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Records begin with the first full export, so the first delta after another compares.
        export(model, sparse, folder / "noted", dtype)
        base = export(model, sparse, folder / "base", dtype)
        train(model, some())
        last, compared = timed(lambda: export(model, sparse, folder / "1", dtype, since=base))
        noted = full = math.inf
        for number in ("2", "3", "4"):
            train(model, some())
            target, since = folder / number, last
            last, seconds = timed(partial(export, model, sparse, target, dtype, since=since))
            noted = min(noted, seconds)
            _, seconds = timed(partial(export, model, sparse, folder / f"full {number}", dtype))
            full = min(full, seconds)
        served: Any = load_served([folder / name for name in ("base", "1", "2", "3")])
        resident = sum(buffer.nbytes for buffer in served.buffers())
        start = time.process_time()
        peak = peak_extra_bytes(lambda: served.apply_delta(folder / "4"))
        apply = time.process_time() - start
    return {
        "full_s": full,
        "compared_s": compared,
        "noted_s": noted,
        "full_bytes": last.manifest.bytes,
        "delta_bytes": last.delta.bytes,
        "apply_s": apply,
        "apply_peak_bytes": peak,
        "served_bytes": resident,
    }


def train(model: Any, ids: Tensor) -> None:
    """Writes the rows of these ids."""
    lengths = torch.ones(len(ids), dtype=torch.int64)
    model(KeyedJaggedTensor(["f"], ids, lengths=lengths)).values().square().sum().backward()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and the seconds of the processor that it took."""
    start = time.process_time()
    found = call()
    return found, time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
