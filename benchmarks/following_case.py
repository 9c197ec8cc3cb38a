"""One case of the benchmark of following tables, in a process of its own: prints its figures as one
line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.following_streams import Example, Stream, stream
from dist_sparse import compact, sparsify
from dist_sparse.tables.port import collection_of

EVERY = 25
"""Batches between two updates: of masks, slots and managed collisions alike."""

POLICIES = {"lfu": LFU_EvictionPolicy, "distance lfu": DistanceLFU_EvictionPolicy}

INDEX_BYTES = {"full": 0.0, "hash": 0.0, "frozen": 0.25, "following": 4.5, "simulated": 4.5}
"""For each id: of a bitmap with counts of kept rows; and of lookup counts besides."""

SLOT_BYTES = {"lfu": 24, "distance lfu": 32}
"""For each row: the id, the row and a count, and the batch of the last lookup, int64 each. Their
history of lookups since the last update is not counted."""


def rows_for(method: str, rows: int, dim: int, budget: float) -> int:
    """Return how many rows fit into a share of the full table's bytes, with their optimizer state
    and all that finds them."""
    row = 4 * dim + 4
    left = budget * rows * row - INDEX_BYTES.get(method, 0.0) * rows
    return max(0, min(rows, int(left / (row + SLOT_BYTES.get(method, 0)))))


class Net(nn.Module):
    """The table, small tables beside it, and two layers over them."""

    def __init__(self, table: nn.Module, source: Stream) -> None:
        super().__init__()
        self.table = table
        self.others = nn.ModuleList(nn.Embedding(rows, source.dim) for rows in source.other_rows)
        for other in self.others:
            nn.init.uniform_(other.weight, -0.01, 0.01)
        width = source.dim * (1 + len(self.others))
        self.over = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: KeyedJaggedTensor, others: Tensor) -> Tensor:
        """Return the logits: ``(batch,)``."""
        found = self.table(ids)
        # Managed collisions return the ids beside the bags.
        bags = found[0] if isinstance(found, tuple) else found
        parts = [bags["item"]]
        parts += [table(others[:, number]) for number, table in enumerate(self.others)]
        return self.over(torch.cat(parts, dim=1)).squeeze(1)


class Method:
    """A table of some rows in training."""

    def __init__(self, method: str, source: Stream, rows: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.rows = rows
        table = self.table(method, source)
        apply_optimizer_in_backward(RowWiseAdagrad, table.parameters(), {"lr": 0.1})
        net = Net(table, source)
        managed = isinstance(table, ManagedCollisionEmbeddingBagCollection)
        sharder: Any = (
            ManagedCollisionEmbeddingBagCollectionSharder()
            if managed
            else EmbeddingBagCollectionSharder()
        )
        # Of a collection that follows its traffic, the tables are inside.
        stored, path = (table.inner, "table.inner") if hasattr(table, "inner") else (table, "table")
        made = construct_module_sharding_plan(
            stored, {"item": row_wise()}, sharder, 1, world_size=1, device_type="cpu"
        )
        self.model: Any = DistributedModelParallel(
            net, device=torch.device("cpu"), plan=ShardingPlan({path: made}), sharders=[sharder]
        )
        plain = [*net.over.parameters(), *net.others.parameters()]
        self.optimizer = torch.optim.Adagrad(plain, lr=0.05)

    def table(self, method: str, source: Stream) -> nn.Module:
        return bags(self.rows, source.dim)

    def ids(self, ids: Tensor) -> Tensor:
        """Return which rows the ids look up."""
        return ids

    def step(self, step: int) -> None:
        """Update rows after a batch."""

    def logits(self, example: Example) -> Tensor:
        features = KeyedJaggedTensor(["item"], self.ids(example.ids), lengths=example.lengths)
        found: Tensor = self.model(features, example.others)
        return found


class Hashed(Method):
    """Ids share rows by a hash."""

    def ids(self, ids: Tensor) -> Tensor:
        # Knuth's multiplicative hash: ids of one row are unrelated.
        return (ids * 2_654_435_761 % 2**32) % self.rows


class Frozen(Method):
    """Masks by frequency until the warm-up is over, then a compact table."""

    def __init__(self, method: str, source: Stream, rows: int, seed: int) -> None:
        super().__init__(method, source, source.rows, seed)
        self.end = source.warmup - 1
        self.sparse = sparsify(
            self.model,
            [self.optimizer, self.model.fused_optimizer],
            level=1 - rows / source.rows,
            score="frequency",
            include="*item*",
            dense=False,
            begin=source.warmup // 2,
            end=self.end,
            every=EVERY,
        )
        self.rows = rows

    def step(self, step: int) -> None:
        if step <= self.end:
            self.sparse.step()
        if step == self.end:
            self.sparse.step()
            self.model = compact(self.model, self.sparse)


class Managed(Method):
    """TorchRec's managed collisions."""

    def table(self, method: str, source: Stream) -> nn.Module:
        inner, cpu = bags(self.rows, source.dim), torch.device("cpu")
        module = MCHManagedCollisionModule(
            zch_size=self.rows,
            device=cpu,
            eviction_policy=POLICIES[method](),
            eviction_interval=EVERY,
            input_hash_size=source.rows,
        )
        managed = ManagedCollisionCollection({"item": module}, inner.embedding_bag_configs())
        return ManagedCollisionEmbeddingBagCollection(inner, managed)


class Simulated(Method):
    """Slots that follow decayed counts, in a few lines: no library, one process.

    The hottest ids by counts that halve at every fourth update hold the rows; a row that changes
    hands starts from zeros, with fresh optimizer state.
    """

    def __init__(self, method: str, source: Stream, rows: int, seed: int) -> None:
        super().__init__(method, source, rows + 1, seed)
        self.counts = torch.zeros(source.rows)
        # Ids without a row read the last one, which is kept at zero.
        self.row_of_id = torch.full((source.rows,), rows)
        self.id_of_row = torch.full((rows,), -1)
        self.seen: list[Tensor] = []

    def ids(self, ids: Tensor) -> Tensor:
        self.seen.append(ids)
        return self.row_of_id[ids]

    def step(self, step: int) -> None:
        [batch] = collection_of(self.model.module.table).batches()
        [weight], [[state]] = batch.weights(), batch.states()
        weight[-1] = 0
        if (step + 1) % EVERY:
            return
        seen = torch.cat(self.seen)
        self.seen.clear()
        self.counts *= 0.5**0.25
        self.counts.index_add_(0, seen, torch.ones(len(seen)))
        hottest = torch.zeros(len(self.counts), dtype=torch.bool)
        hottest[self.counts.topk(len(self.id_of_row)).indices] = True
        hottest &= self.counts > 0
        held = self.id_of_row >= 0
        held[held.clone()] = hottest[self.id_of_row[held]]
        left = self.id_of_row[~held]
        self.row_of_id[left[left >= 0]] = len(self.id_of_row)
        coming = (hottest & (self.row_of_id == len(self.id_of_row))).nonzero().view(-1)
        free = (~held).nonzero().view(-1)
        self.id_of_row[free] = -1
        free = free[: len(coming)]
        self.id_of_row[free], self.row_of_id[coming] = coming, free
        weight[free], state[free] = 0, 0


METHODS: dict[str, Callable[..., Method]] = {
    "full": Method,
    "hash": Hashed,
    "frozen": Frozen,
    "lfu": Managed,
    "distance lfu": Managed,
    "simulated": Simulated,
}


def bags(rows: int, dim: int) -> EmbeddingBagCollection:
    """The table, on the meta device: every method starts from the same distribution."""
    config = EmbeddingBagConfig(
        name="item",
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=["item"],
        init_fn=partial(nn.init.uniform_, a=-0.01, b=0.01),
    )
    return EmbeddingBagCollection([config], device=torch.device("meta"))


def run(method: str, name: str, budget: float, seed: int) -> dict[str, Any]:
    """Train through a stream; every batch is predicted before it is trained on."""
    source = stream(name, seed)
    rows = source.rows if method == "full" else rows_for(method, source.rows, source.dim, budget)
    if rows < 2:
        return {"rows": rows, "auc": None, "ne": None, "ms": None, "mean_ms": None}
    subject = METHODS[method](method, source, rows, seed)
    logits, labels, times = [], [], []
    for step, example in enumerate(source.batches):
        start = time.process_time()
        subject.optimizer.zero_grad()
        found = subject.logits(example)
        functional.binary_cross_entropy_with_logits(found, example.labels).backward()
        subject.optimizer.step()
        subject.step(step)
        if step >= source.warmup:
            times.append(time.process_time() - start)
            logits.append(found.detach())
            labels.append(example.labels)
    return {
        "rows": rows,
        "auc": auc(torch.cat(logits), torch.cat(labels)),
        "ne": normalized_entropy(torch.cat(logits), torch.cat(labels)),
        "ms": 1e3 * statistics.median(times),
        "mean_ms": 1e3 * statistics.mean(times),
    }


def auc(logits: Tensor, labels: Tensor) -> float:
    """Return the area under the ROC curve; logits that are equal count half."""
    values, places = torch.unique(logits, return_inverse=True)
    clicks = torch.zeros(len(values), dtype=torch.float64).index_add_(0, places, labels.double())
    others = torch.bincount(places, minlength=len(values)).double() - clicks
    below = others.cumsum(0) - others / 2
    return float((clicks * below).sum() / (clicks.sum() * others.sum()))


def normalized_entropy(logits: Tensor, labels: Tensor) -> float:
    """Return the log loss over that of the mean label (He et al., 2014)."""
    loss = functional.binary_cross_entropy_with_logits(logits, labels)
    rate = labels.mean()
    return float(loss / functional.binary_cross_entropy(rate.expand_as(labels), labels))


def main() -> int:
    """Run the case that the arguments have as JSON."""
    case = json.loads(sys.argv[1])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps({**case, **run(**case)}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
