"""Compact tables that follow their traffic from then on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from dist_sparse import FollowingTables, compact, sparsify
from dist_sparse.slots.tables import FollowingCollection
from tests.compaction.test_compact_sharded import Run, cell_of, check_equal
from tests.dist.cells import batch, gathered
from tests.dist.plugin import on_ranks

EVERY = [
    (1, "ec_row_wise"),
    (2, "mixed"),
    (2, "data_parallel"),
    (4, "row_wise"),
    (4, "ec_column_wise"),
]


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_kept_rows_become_slots(world: int, name: str) -> None:
    """The same rows, state and outputs; then ids that were removed come back."""
    cell = cell_of(world, name)
    small, live = Run(cell), Run(cell)
    for run in (small, live):
        run.train(3)
    small.compact()
    live.compact(follow=True)
    rows = gathered(small.model)
    assert all(torch.equal(found, rows[key]) for key, found in gathered(live.model).items())
    slots = FollowingTables(live.model, live.optimizer, every=4, admit_after=2)
    features = batch(cell, seed=dist.get_rank())
    check_equal(live.model(features), small.model(features), True)
    for mine, other in zip(live.train(3), small.train(3), strict=True):
        check_equal(mine, other, True)
    [collection] = [each for each in live.model.modules() if isinstance(each, FollowingCollection)]
    before = {key: index.kept() for key, index in collection.table_indexes().items()}
    for _ in range(12):
        live.train(1)
        slots.step()
    after = {key: index.kept() for key, index in collection.table_indexes().items()}
    assert any(bool((after[key] & ~before[key]).any()) for key in before)
    for key, index in collection.following_ids.slots.items():
        assert int(before[key].sum()) <= int(after[key].sum()) <= index.stored


@on_ranks(1)
def test_a_protected_table_keeps_a_row_for_each_id() -> None:
    """What protect= and floor= left to the tables are their rows from then on."""
    model, optimizer, features = _sharded("user", "item")
    sparse = sparsify(model, optimizer, level=0.9, begin=0, end=0, protect="user", floor=0.25)
    model(features).values().sum().backward()
    sparse.step()
    model = compact(model, sparse, follow=True)
    [collection] = [each for each in model.modules() if isinstance(each, FollowingCollection)]
    assert {name: index.stored for name, index in collection.table_indexes().items()} == {
        "item": 16
    }
    slots = FollowingTables(model, every=1)
    model(features)
    slots.step()
    assert collection.table_indexes()["item"].kept().sum() == 16


def _sharded(*names: str) -> tuple[Any, Any, KeyedJaggedTensor]:
    """A model of tables of 64 rows, its optimizer, and a batch that looks up each row twice."""
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=16, feature_names=[name])
        for name in names
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(bags, device=torch.device("cpu"), plan=_by_table(bags))
    ids = torch.arange(64).repeat(2 * len(names))
    lengths = torch.ones_like(ids)
    return model, model.fused_optimizer, KeyedJaggedTensor(list(names), ids, lengths=lengths)


def _by_table(bags: EmbeddingBagCollection) -> ShardingPlan:
    where = {config.name: table_wise(rank=0) for config in bags.embedding_bag_configs()}
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(bags, where, sharder, 1, 1, "cpu")
    return ShardingPlan({"": plan})


@on_ranks(1)
def test_refused() -> None:
    run = Run(cell_of(1, "row_wise"))
    run.train(3)
    with pytest.raises(ValueError, match=r"default row: it can't follow its traffic"):
        run.compact(removed="default_row", follow=True)
    run.compact(follow=True)
    table = nn.EmbeddingBag(32, 4)
    plain = sparsify(table, torch.optim.SGD(table.parameters()), level=0.5, begin=0, end=0)
    plain.step()
    with pytest.raises(ValueError, match=r"^weight is in no TorchRec collection: it can't"):
        compact(table, plain, follow=True)
    assert type(compact(table, plain)).__name__ == "CompactEmbeddingBag"


@on_ranks(1)
def test_narrower_tables_are_refused() -> None:
    model, optimizer, features = _sharded("item")
    sparse = sparsify(model, optimizer, level=0.5, begin=0, end=0, block="col", rotate=[["item"]])
    model(features).values().sum().backward()
    sparse.step()
    with pytest.raises(ValueError, match=r"item.weight loses columns: it can't follow its traffic"):
        compact(model, sparse, follow=True)


@on_ranks(2)
def test_an_argument_that_differs_between_ranks() -> None:
    run = Run(cell_of(2, "row_wise"))
    run.train(3)
    with pytest.raises(ValueError, match="follow"):
        run.compact(follow=dist.get_rank() == 0)
    run.compact()
