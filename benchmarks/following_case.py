"""One case of the benchmark of tables whose rows follow the traffic, in a process of its own, which
prints its figures as one line of JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

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
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.following_streams import Example, batches, hashed
from dist_sparse import Advanced, compact, sparsify
from dist_sparse.compaction import collections

WARMUP = 1 / 8
"""Part of a stream whose predictions count nothing; frozen masks are chosen in it."""

TUNED = 0.4
"""Part of a log that chooses settings."""

BOUND = 0.01
"""Initial weights are drawn from below it in size."""

ID_BYTES = {"frozen": 0.25, "following": 1}
"""For each id: a bitmap with counts of kept rows; 5 bits of lookups and 3 of age."""

SLOT_BYTES = {"following": 16, "lfu": 24, "distance lfu": 32}
"""For each row: its id in the state, its place in the hash table, and at most two starts of
buckets, int32 each (12 to 16 bytes, by the number of rows); the id, the row and a count, and the
batch of the last lookup, int64 each. Lookups that wait for the next update are not counted in
either."""


def rows_for(method: str, ids: int, dim: int, budget: float) -> int:
    """Return how many rows fit into a share of the full table's bytes, with their optimizer state
    and all that finds them."""
    row = 4 * dim + 4
    left = budget * ids * row - ID_BYTES.get(method, 0.0) * ids
    return max(0, min(ids, int(left / (row + SLOT_BYTES.get(method, 0)))))


class Net(nn.Module):
    """The large table, small ones, and two layers over them.

    With small tables, the layers also read the dot product of each two embeddings.
    """

    def __init__(self, table: nn.Module, small: EmbeddingBagCollection | None, dim: int) -> None:
        super().__init__()
        self.table, self.small, self.dim = table, small, dim
        count = 1 + (len(small.embedding_bag_configs()) if small else 0)
        width = count * dim + count * (count - 1) // 2
        self.over = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: KeyedJaggedTensor, others: KeyedJaggedTensor | None) -> Tensor:
        """Return the logits: ``(batch,)``."""
        found = self.table(ids)
        # Managed collisions return the ids beside the bags.
        bags = found[0] if isinstance(found, tuple) else found
        read = bags["item"].view(-1, self.dim)
        if self.small is not None:
            small = self.small(others).values().view(len(read), -1, self.dim)
            each = torch.cat([read[:, None], small], dim=1)
            first, second = torch.triu_indices(each.shape[1], each.shape[1], offset=1)
            dots = (each @ each.mT)[:, first, second]
            read = torch.cat([each.flatten(1), dots], dim=1)
        logits: Tensor = self.over(read).squeeze(1)
        return logits


class Method:
    """A table in training that stores some rows; here a full one.

    Args:
        case: ``ids`` and ``dim`` of the table, ``steps`` of the run; ``small``, the rows of each
            small table; ``every``, batches between two updates of masks, slots and managed
            collisions alike; ``settings`` of the method.
        rows: the number of rows that it stores.
    """

    def __init__(self, case: dict[str, Any], rows: int) -> None:
        torch.manual_seed(case["seed"])
        self.case, self.rows = case, rows
        self.every: int = case["every"]
        self.settings: dict[str, Any] = case.get("settings", {})
        table = self.table()
        small = bags(case["small"], case["dim"]) if case.get("small") else None
        net = Net(table, small, case["dim"])
        trained = [*table.parameters(), *(small.parameters() if small else [])]
        apply_optimizer_in_backward(RowWiseAdagrad, trained, {"lr": 0.1})
        sharder: Any = EmbeddingBagCollectionSharder()
        if isinstance(table, ManagedCollisionEmbeddingBagCollection):
            sharder = ManagedCollisionEmbeddingBagCollectionSharder()
        # The tables of a collection with an index in front of it are inside.
        stored, path = (table.inner, "table.inner") if hasattr(table, "inner") else (table, "table")
        plan = {path: _row_wise(stored, ["item"], sharder)}
        sharders = [sharder]
        if small is not None:
            plain: Any = EmbeddingBagCollectionSharder()
            plan["small"] = _row_wise(small, list(case["small"]), plain)
            sharders = [sharder, plain] if type(sharder) is not type(plain) else [sharder]
        self.model: Any = DistributedModelParallel(
            net, device=torch.device("cpu"), plan=ShardingPlan(plan), sharders=sharders
        )
        self.optimizer = torch.optim.Adagrad(net.over.parameters(), lr=0.05)
        self.draws = torch.get_rng_state()

    def table(self) -> Any:
        return bags({"item": self.rows}, self.case["dim"])

    def ids(self, ids: Tensor) -> Tensor:
        """Return which rows the ids look up."""
        return ids

    def weights(self, rows: Tensor) -> Tensor | None:
        """Return what to multiply each looked-up row by; None for 1."""
        return None

    def after(self, step: int, ids: Tensor) -> None:
        """Update rows after a batch of ids."""

    def train(self, step: int, example: Example) -> Tensor:
        """Train on a batch; return what was predicted before."""
        self.optimizer.zero_grad()
        lengths = torch.full((len(example.labels),), len(example.ids) // len(example.labels))
        rows = self.ids(example.ids)
        weights = self.weights(rows)
        features = KeyedJaggedTensor(["item"], rows, lengths=lengths, weights=weights)
        others = None
        if example.others is not None:
            ids = example.others.T.reshape(-1)
            others = KeyedJaggedTensor(list(self.case["small"]), ids, lengths=torch.ones_like(ids))
        found: Tensor = self.model(features, others)
        functional.binary_cross_entropy_with_logits(found, example.labels).backward()
        self.optimizer.step()
        self.after(step, example.ids)
        return found.detach()


class Hashed(Method):
    """Ids share rows by a hash."""

    def ids(self, ids: Tensor) -> Tensor:
        return hashed(ids) % self.rows


class Frozen(Method):
    """Masks by frequency until the warm-up is over, then a compact table."""

    def __init__(self, case: dict[str, Any], rows: int) -> None:
        super().__init__(case, case["ids"])
        warmup = int(WARMUP * case["steps"])
        self.end = warmup - 1
        self.sparse = sparsify(
            self.model,
            [self.optimizer, self.model.fused_optimizer],
            level=1 - rows / case["ids"],
            advanced=Advanced(score="frequency", min_rows=1, dense=False),
            include="*item*",
            begin=warmup // 2,
            end=self.end,
            every=self.every,
        )

    def after(self, step: int, ids: Tensor) -> None:
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
        inner = bags({"item": self.rows}, self.case["dim"])
        module = MCHManagedCollisionModule(
            zch_size=self.rows,
            device=torch.device("cpu"),
            eviction_policy=self.policy(),
            eviction_interval=self.every,
            input_hash_size=self.case["ids"],
        )
        managed = ManagedCollisionCollection({"item": module}, inner.embedding_bag_configs())
        return ManagedCollisionEmbeddingBagCollection(inner, managed)

    def policy(self) -> MCHEvictionPolicy:
        """Return what chooses the ids that hold rows: ``exponent`` of the time since the last
        lookup, or ``least``, the lookups in an interval that count."""
        if self.case["method"] == "distance lfu":
            return DistanceLFU_EvictionPolicy(self.settings.get("exponent", 1.0))
        over = self.settings.get("least", 1) - 1
        return LFU_EvictionPolicy((lambda counts: (counts > over, over)) if over else None)


def _reset_momentum(tables: Any, pruned_indices: Tensor, **_: Any) -> None:
    """Do what FBGEMM does on CUDA alone: TorchRec draws the weights of evicted rows afterwards."""
    [[state]] = tables.split_optimizer_states()
    state.view(-1)[pruned_indices] = 0


class Following(Method):
    """Rows of their own for the ids with the most lookups; the others share *nursery* rows.

    Lookups saturate at 31 and are halved every ``half_life`` steps. An id ranks by its lookups over
    1 + the updates since the last one, at most 7; with equal ranks, holders stay, then smaller ids
    win. After each update the nursery rows are 0 again; a new holder begins with the row that it
    read there. dist_sparse had such tables, for several ranks, until 2026-11-30.
    """

    SCALE = 0.3
    """Of a nursery row in a lookup, and so of its learning rate with Adagrad."""

    def __init__(self, case: dict[str, Any], rows: int) -> None:
        self.shared = max(1, round(case["settings"].get("nursery", 0.1) * rows))
        self.own = rows - self.shared
        super().__init__(case, rows)
        [lookup] = self.model.module.table._lookups
        [tables] = (
            m for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)
        )
        [self.weight] = tables.split_embedding_weights()
        [[state]] = tables.split_optimizer_states()
        self.state = state.view(-1)
        self.weight[self.own :] = 0
        self.row_of = torch.full((case["ids"],), -1)
        self.id_of = torch.full((self.own,), -1)
        self.lookups, self.age = torch.zeros(2, case["ids"], dtype=torch.int64)
        self.nursery = self.own + hashed(torch.arange(case["ids"])) % self.shared

    def table(self) -> Any:
        return bags({"item": self.rows}, self.case["dim"], is_weighted=True)

    def ids(self, ids: Tensor) -> Tensor:
        rows = self.row_of[ids]
        return torch.where(rows < 0, self.nursery[ids], rows)

    def weights(self, rows: Tensor) -> Tensor:
        return torch.where(rows < self.own, 1.0, self.SCALE)

    def after(self, step: int, ids: Tensor) -> None:
        distinct, times = torch.unique(ids, return_counts=True)
        self.lookups[distinct] = (self.lookups[distinct] + times).clamp(max=31)
        self.age[distinct] = 0
        steps = step + 1
        if steps % self.every == 0:
            self._update()
            self.age.add_(1).clamp_(max=7)
            half_life = self.settings.get("half_life", 80)
            self.lookups >>= steps // half_life - (steps - self.every) // half_life

    @torch.no_grad()
    def _update(self) -> None:
        """Give the rows to the ids with the highest ranks, and empty the nursery."""
        holds = self.row_of >= 0
        [ids] = (holds | (self.lookups > 0) & (self.age == 0)).nonzero(as_tuple=True)
        ranks = self.lookups[ids] / (self.age[ids] + 1)
        # Differences between ranks are larger than 1/64. Stable: smaller ids come first.
        order = (ranks + holds[ids] / 128).argsort(descending=True, stable=True)
        wins = torch.zeros_like(holds)
        wins[ids[order[: self.own]]] = True
        [leaving], [coming] = (
            each.nonzero(as_tuple=True) for each in (holds & ~wins, wins & ~holds)
        )
        self.id_of[self.row_of[leaving]] = -1
        self.row_of[leaving] = -1
        rows = (self.id_of < 0).nonzero()[: len(coming), 0]
        self.id_of[rows], self.row_of[coming] = coming, rows
        read = self.weight[self.nursery[coming]]
        drawn = torch.empty_like(read).uniform_(-BOUND, BOUND)
        self.weight[rows] = torch.where(read.any(1, keepdim=True), read * self.SCALE, drawn)
        self.state[rows] = 0
        self.weight[self.own :] = 0
        self.state[self.own :] = 0


METHODS: dict[str, Callable[[dict[str, Any], int], Method]] = {
    "full": Method,
    "hash": Hashed,
    "frozen": Frozen,
    "lfu": Managed,
    "distance lfu": Managed,
    "following": Following,
}


def bags(rows: dict[str, int], dim: int, is_weighted: bool = False) -> EmbeddingBagCollection:
    """Tables on the meta device: every method starts from the same distribution."""
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=count,
            embedding_dim=dim,
            feature_names=[name],
            init_fn=partial(nn.init.uniform_, a=-BOUND, b=BOUND),
        )
        for name, count in rows.items()
    ]
    meta = torch.device("meta")
    return EmbeddingBagCollection(configs, device=meta, is_weighted=is_weighted)


def _row_wise(tables: Any, names: list[str], sharder: Any) -> Any:
    world, placed = dist.get_world_size(), {name: row_wise() for name in names}
    return construct_module_sharding_plan(
        tables, placed, sharder, world, world_size=world, device_type="cpu"
    )


def stream(case: dict[str, Any]) -> dict[str, Any]:
    """Train a table for each run of the case through the same stream; to tune on a log, through
    its first part."""
    stream = batches(case)
    shared = {key: value for key, value in case.items() if key != "runs"}
    if case["tuning"] and case["what"] in ("movielens", "lastfm"):
        stream = stream[: int(TUNED * len(stream))]
    return {"runs": through([{**shared, **run} for run in case["runs"]], stream)}


def through(cases: list[dict[str, Any]], stream: list[Example]) -> list[dict[str, Any]]:
    """Train tables through a stream, batch by batch one after the other, so that their times are
    comparable; every batch is predicted before it is trained on."""
    rows = [rows_for(each["method"], each["ids"], each["dim"], each["budget"]) for each in cases]
    made = zip(cases, rows, strict=True)
    subjects = [METHODS[each["method"]](each, count) for each, count in made]
    logits: list[list[Tensor]] = [[] for _ in cases]
    times: list[list[float]] = [[] for _ in cases]
    for step, example in enumerate(stream):
        for number, subject in enumerate(subjects):
            # Managed collisions draw new rows: the draws of one table don't change those of another.
            torch.set_rng_state(subject.draws)
            start = time.process_time()
            logits[number].append(subject.train(step, example))
            times[number].append(time.process_time() - start)
            subject.draws = torch.get_rng_state()
    warmup, tuned = (int(part * cases[0]["steps"]) for part in (WARMUP, TUNED))
    runs = []
    for number, each in enumerate(cases):
        spent = times[number][warmup:]
        run = {
            **{key: each[key] for key in ("method", "budget", "every", "settings")},
            "rows": rows[number],
            **_quality(logits[number][warmup:], stream[warmup:]),
            "ms": 1e3 * statistics.median(spent),
            "mean_ms": 1e3 * statistics.mean(spent),
        }
        if len(stream) > tuned:
            later = _quality(logits[number][tuned:], stream[tuned:])
            run |= {f"later_{key}": value for key, value in later.items()}
        runs.append(run)
    return runs


def _quality(logits: list[Tensor], stream: list[Example]) -> dict[str, float]:
    found, truth = torch.cat(logits), torch.cat([example.labels for example in stream])
    return {"auc": auc(found, truth), "ne": normalized_entropy(found, truth)}


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
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given = json.loads(sys.argv[1])
    print(json.dumps({**given, **stream(given)}), flush=True)
    os._exit(0)
