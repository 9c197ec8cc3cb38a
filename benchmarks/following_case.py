"""One case of the benchmark of following tables, in processes of its own: rank 0 prints its figures
as one line of JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
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

from benchmarks.measure import peak_extra_bytes
from dist_sparse import Advanced, compact, sparsify
from dist_sparse.compaction import collections
from dist_sparse.compaction.collections import CompactEmbeddingBagCollection
from dist_sparse.compaction.row_index import RowIndex
from dist_sparse.extras.following import FollowingTables, following

EVERY = 10
"""Batches between two updates: of masks, slots and managed collisions alike."""

DECAY = 0.5**0.125
"""What a lookup is worth after each update: half after eight."""

POLICIES = {"lfu": LFU_EvictionPolicy, "distance lfu": DistanceLFU_EvictionPolicy}

ID_BYTES = {"frozen": 0.25, "following": 4}
"""For each id: a bitmap with counts of kept rows; an int32 count of lookups."""

SLOT_BYTES = {"following": 16, "lfu": 24, "distance lfu": 32}
"""For each row: its id in the state, its place in the hash table, and at most two starts of
buckets, int32 each (12 to 16 bytes, by the number of rows); the id, the row and a count, and the batch of the last lookup, int64 each. Lookups
that wait for the next update are not counted in either."""

ZIPF = 1.05
HOT = 0.01
"""Share of the ids that count as hot: 70% of the lookups."""

IDS_A_BAG = 4
BATCH = 256
CHANGES = 8
"""How often hot ids are replaced in a run."""

USERS = 943


class Example(NamedTuple):
    """A batch: ids, one bag after the other, and a label for each bag, 0 or 1."""

    ids: Tensor
    labels: Tensor


def drifting(ids: int, steps: int, share: float, seed: int) -> Iterator[Example]:
    """Yield batches by Zipf's law; at each change a share of the hot ids change places with cold
    ones."""
    draw = torch.Generator().manual_seed(seed)
    # The id of each rank; ids in the order of their rank would be easy to hash apart.
    id_of_rank = torch.randperm(ids, generator=draw)
    effect = torch.randn(ids, generator=draw)
    until = torch.arange(1, ids + 1, dtype=torch.float64).pow(-ZIPF).cumsum(0)
    until /= until[-1].item()
    hot = round(HOT * ids)
    for step in range(steps):
        if step and step % (steps // CHANGES) == 0:
            leaving = torch.randperm(hot, generator=draw)[: round(share * hot)]
            coming = hot + torch.randperm(ids - hot, generator=draw)[: len(leaving)]
            id_of_rank[leaving], id_of_rank[coming] = id_of_rank[coming], id_of_rank[leaving]
        uniform = torch.rand(BATCH * IDS_A_BAG, dtype=torch.float64, generator=draw)
        drawn = id_of_rank[torch.searchsorted(until, uniform).clamp_(max=ids - 1)]
        logits = effect[drawn].view(BATCH, IDS_A_BAG).sum(1) / IDS_A_BAG**0.5
        yield Example(drawn, torch.bernoulli(torch.sigmoid(1.5 * logits), generator=draw))


def movielens(folder: Path) -> Iterator[Example]:
    """Yield the ratings of MovieLens-100K in the order of time: a bag has the user and the item,
    and the label is whether the rating is 4 or 5."""
    lines = (folder / "ml-100k.inter").read_text().splitlines()[1:]
    ratings = torch.tensor([[float(field) for field in line.split("\t")] for line in lines])
    users, items, rating, _ = ratings.double()[ratings[:, 3].argsort(stable=True)].unbind(1)
    ids = torch.stack([users - 1, USERS + items - 1], dim=1).long()
    labels = (rating >= 4).float()
    for some, truth in zip(ids.split(BATCH), labels.split(BATCH), strict=True):
        yield Example(some.reshape(-1), truth)


def rows_for(method: str, ids: int, dim: int, budget: float) -> int:
    """Return how many rows fit into a share of the full table's bytes, with their optimizer state
    and all that finds them."""
    row = 4 * dim + 4
    left = budget * ids * row - ID_BYTES.get(method, 0.0) * ids
    return max(0, min(ids, int(left / (row + SLOT_BYTES.get(method, 0)))))


class Net(nn.Module):
    """The table, and two layers over it."""

    def __init__(self, table: nn.Module, dim: int) -> None:
        super().__init__()
        self.table = table
        self.over = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return the logits: ``(batch,)``."""
        found = self.table(ids)
        # Managed collisions return the ids beside the bags.
        bags = found[0] if isinstance(found, tuple) else found
        logits: Tensor = self.over(bags["item"]).squeeze(1)
        return logits


class Method:
    """A table in training that stores some rows; here a full one.

    Args:
        case: ``ids`` and ``dim`` of the table, ``steps`` of the run.
        rows: the number of rows that it stores.
    """

    def __init__(self, case: dict[str, Any], rows: int) -> None:
        torch.manual_seed(case["seed"])
        self.case, self.rows = case, rows
        table = self.table()
        apply_optimizer_in_backward(RowWiseAdagrad, table.parameters(), {"lr": 0.1})
        net = Net(table, case["dim"])
        sharder: Any = EmbeddingBagCollectionSharder()
        if isinstance(table, ManagedCollisionEmbeddingBagCollection):
            sharder = ManagedCollisionEmbeddingBagCollectionSharder()
        # The tables of a collection with an index in front of it are inside.
        stored, path = (table.inner, "table.inner") if hasattr(table, "inner") else (table, "table")
        world = dist.get_world_size()
        made = construct_module_sharding_plan(
            stored, {"item": row_wise()}, sharder, world, world_size=world, device_type="cpu"
        )
        self.model: Any = DistributedModelParallel(
            net, device=torch.device("cpu"), plan=ShardingPlan({path: made}), sharders=[sharder]
        )
        self.optimizer = torch.optim.Adagrad(net.over.parameters(), lr=0.05)

    def table(self) -> Any:
        return bags(self.rows, self.case["dim"])

    def ids(self, ids: Tensor) -> Tensor:
        """Return which rows the ids look up."""
        return ids

    def after(self, step: int) -> None:
        """Update rows after a batch."""

    def train(self, step: int, example: Example) -> Tensor:
        """Train on a batch; return what was predicted before."""
        self.optimizer.zero_grad()
        lengths = torch.full((len(example.labels),), len(example.ids) // len(example.labels))
        features = KeyedJaggedTensor(["item"], self.ids(example.ids), lengths=lengths)
        found: Tensor = self.model(features)
        functional.binary_cross_entropy_with_logits(found, example.labels).backward()
        self.optimizer.step()
        self.after(step)
        return found.detach()


class Hashed(Method):
    """Ids share rows by a hash."""

    def ids(self, ids: Tensor) -> Tensor:
        # Knuth's multiplicative hash: ids of one row are unrelated.
        return (ids * 2_654_435_761 % 2**32) % self.rows


class Frozen(Method):
    """Masks by frequency until the warm-up is over, then a compact table."""

    def __init__(self, case: dict[str, Any], rows: int) -> None:
        super().__init__(case, case["ids"])
        warmup = case["steps"] // CHANGES
        self.end = warmup - 1
        self.sparse = sparsify(
            self.model,
            [self.optimizer, self.model.fused_optimizer],
            level=1 - rows / case["ids"],
            advanced=Advanced(score="frequency", min_rows=1, dense=False),
            include="*item*",
            begin=warmup // 2,
            end=self.end,
            every=EVERY,
        )

    def after(self, step: int) -> None:
        if step <= self.end:
            self.sparse.step()
        if step == self.end:
            self.sparse.step()
            # The index takes the same bytes as for any table; only small tables have a map.
            collections.MAPPED_ROWS = 0
            self.model = compact(self.model, self.sparse)


class Managed(Method):
    """TorchRec's managed collisions."""

    def __init__(self, case: dict[str, Any], rows: int) -> None:
        kind: Any = SplitTableBatchedEmbeddingBagsCodegen
        kind.reset_embedding_weight_momentum = _reset_momentum
        super().__init__(case, rows)

    def table(self) -> Any:
        inner = bags(self.rows, self.case["dim"])
        module = MCHManagedCollisionModule(
            zch_size=self.rows,
            device=torch.device("cpu"),
            eviction_policy=POLICIES[self.case["method"]](),
            eviction_interval=EVERY,
            input_hash_size=self.case["ids"],
        )
        managed = ManagedCollisionCollection({"item": module}, inner.embedding_bag_configs())
        return ManagedCollisionEmbeddingBagCollection(inner, managed)


def _reset_momentum(tables: Any, pruned_indices: Tensor, **_: Any) -> None:
    """Do what FBGEMM does on CUDA alone: TorchRec draws the weights of evicted rows afterwards."""
    [[state]] = tables.split_optimizer_states()
    state.view(-1)[pruned_indices] = 0


class Following(Method):
    """Slots for the ids that are looked up most."""

    def __init__(self, case: dict[str, Any], rows: int) -> None:
        super().__init__(case, rows)
        every = case.get("every", EVERY)
        self.slots = FollowingTables(self.model, every=every, decay=DECAY, seed=case["seed"])

    def table(self) -> Any:
        return following(bags(self.case["ids"], self.case["dim"]), rows={"item": self.rows})

    def after(self, step: int) -> None:
        self.slots.step()


class Compact(Method):
    """Only the first ids keep their rows."""

    def table(self) -> Any:
        kept = torch.arange(self.case["ids"]) < self.rows
        [config] = bags(self.case["ids"], self.case["dim"]).embedding_bag_configs()
        meta = torch.device("meta")
        return CompactEmbeddingBagCollection([config], {"item": RowIndex.of(kept)}, device=meta)


METHODS: dict[str, Callable[[dict[str, Any], int], Method]] = {
    "full": Method,
    "hash": Hashed,
    "frozen": Frozen,
    "lfu": Managed,
    "distance lfu": Managed,
    "following": Following,
    "compact": Compact,
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


def stream(case: dict[str, Any]) -> dict[str, Any]:
    """Train with every method and budget through the same stream."""
    if case["what"] == "movielens":
        batches = list(movielens(Path(case["folder"])))
    else:
        batches = list(drifting(case["ids"], case["steps"], case["share"], case["seed"]))
    runs = [{**case, "method": "full", "budget": 1.0}]
    for budget in case["budgets"]:
        runs += [{**case, "method": method, "budget": budget} for method in case["methods"]]
    return {"runs": through(runs, batches)}


def through(cases: list[dict[str, Any]], batches: list[Example]) -> list[dict[str, Any]]:
    """Train tables through a stream, batch by batch one after the other, so that their times are
    comparable; every batch is predicted before it is trained on."""
    rows = [rows_for(each["method"], each["ids"], each["dim"], each["budget"]) for each in cases]
    made = zip(cases, rows, strict=True)
    subjects = [METHODS[each["method"]](each, count) for each, count in made]
    logits: list[list[Tensor]] = [[] for _ in cases]
    times: list[list[float]] = [[] for _ in cases]
    for step, example in enumerate(batches):
        for number, subject in enumerate(subjects):
            start = time.process_time()
            logits[number].append(subject.train(step, example))
            times[number].append(time.process_time() - start)
    warmup = len(batches) // CHANGES
    truth = torch.cat([example.labels for example in batches[warmup:]])
    runs = []
    for number, each in enumerate(cases):
        found, spent = torch.cat(logits[number][warmup:]), times[number][warmup:]
        run = {
            "method": each["method"],
            "budget": each["budget"],
            "rows": rows[number],
            "auc": auc(found, truth),
            "ne": normalized_entropy(found, truth),
            "ms": 1e3 * statistics.median(spent),
            "mean_ms": 1e3 * statistics.mean(spent),
        }
        runs.append(run)
    return runs


def memory(case: dict[str, Any]) -> dict[str, Any]:
    """Train a table of many ids and few rows: the memory and the time that it takes."""
    made: list[Method] = []
    before = resident()
    # Made, trained, and through a due step, in which temporaries are largest.
    peak = peak_extra_bytes(lambda: made.append(METHODS[case["method"]](case, case["rows"])))
    subject = made[0]
    if isinstance(subject, Following):
        # The ids that the compact table keeps hold the slots, as if from a checkpoint.
        index = subject.model.module.table.following_ids.slots["item"]
        index.id_of_slot.copy_(torch.arange(case["rows"]))
    start, times, due = resident(), [], []
    draw = torch.Generator().manual_seed(dist.get_rank())
    every = case["every"]

    def steps() -> None:
        for step in range(3 * every):
            # Nine of ten lookups are of ids that a compact table keeps: both train as many rows.
            size = (case["batch"], case["bag"])
            ids = torch.randint(0, case["rows"], size, generator=draw)
            cold = torch.rand(size, generator=draw) < 0.1
            ids[cold] = torch.randint(0, case["ids"], size, generator=draw)[cold]
            example = Example(ids.view(-1), torch.zeros(case["batch"]))
            began = time.process_time()
            subject.train(step, example)
            spent = time.process_time() - began
            # The first update compares all ids; later ones those that were looked up since.
            if step > every:
                (due if (step + 1) % every == 0 else times).append(spent)

    extra = peak_extra_bytes(steps)
    # A count of 4 bytes for each id, which one rank has; the index is on every rank.
    counts = 4 * case["ids"] if isinstance(subject, Following) else 0
    indexes = torch.tensor([subject.model.module.table.ids.nbytes])
    dist.all_reduce(indexes)
    return {
        "bytes_an_id": (counts + int(indexes)) / case["ids"],
        "made": start - before,
        "resident": resident() - before,
        "peak": None if peak is None or extra is None else max(peak, start - before + extra),
        "ms": 1e3 * statistics.median(times),
        "due_ms": 1e3 * statistics.median(due),
    }


def resident() -> int:
    """Bytes that this process holds in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in status if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


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


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given = json.loads(sys.argv[1])
    figures = memory(given) if given["what"] == "memory" else stream(given)
    if dist.get_rank() == 0:
        print(json.dumps({**given, **figures}), flush=True)
    dist.barrier()
    os._exit(0)
