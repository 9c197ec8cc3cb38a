"""Compact collections under DistributedModelParallel: what they give and how they train on, beside
a masked model."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import DataNormSparsifier, MaskEnforcer, compact, sparsify
from dist_sparse.compaction.collections import CompactEmbeddingBagCollection
from dist_sparse.compaction.moving import kept_rows
from dist_sparse.tables.modules import ModelTables, collection_of
from tests.dist.cells import Cell, batch, build, cells, gathered
from tests.dist.plugin import on_ranks

CELLS = {
    1: ("column_wise", "ec_row_wise"),
    2: (
        "table_wise",
        "row_wise",
        "row_wise_dense_kernel",
        "column_wise_fp16",
        "two_shards",
        "data_parallel",
        "mixed",
    ),
    4: ("row_wise", "table_row_wise", "table_column_wise", "grid_shard", "ec_column_wise", "mixed"),
}
EVERY = [(world, name) for world, names in CELLS.items() for name in names]


ROWS_ARE_CUT = (
    "row_wise",
    "table_row_wise",
    "grid_shard",
    "mixed",
    "ec_row_wise",
    "row_wise_dense_kernel",
)
"""Where kept rows are cut into blocks again, the ranks that add up a bag have other parts of it:
other roundings."""

OTHER_ORDER = (*ROWS_ARE_CUT, "table_column_wise")
"""FBGEMM adds the gradients of an id that a batch has three times in an order that depends on the
ids beside it."""


def check_equal(mine: Tensor, other: Tensor, exact: bool) -> None:
    tolerance = 0.0 if exact or dist.get_world_size() == 1 else 2e-6
    torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def cell_of(world: int, name: str) -> Cell:
    """A cell whose tables give every rank a row: with an empty table beside others of another
    width, FBGEMM's CPU backward writes other rows than it was given, in the masked model."""
    cell = cells(world)[name]
    return replace(
        cell, tables=tuple(replace(table, rows=max(table.rows, 8)) for table in cell.tables)
    )


class Run:
    """A model in training, with removed rows."""

    def __init__(
        self,
        cell: Cell,
        optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad,
        level: float = 0.6,
    ) -> None:
        self.cell, self.steps = cell, 0
        self.model = build(cell, optimizer, {"lr": 0.1})
        plain = [p for p in self.model.parameters() if not hasattr(p, "_in_backward_optimizers")]
        self.optimizer = torch.optim.Adagrad(plain, lr=0.1)
        self.prune(level)

    def prune(self, level: float) -> None:
        self.sparsifier = DataNormSparsifier(
            sparsity_level=level, sparse_block_shape=(1, "ROW"), norm="L2"
        )
        self.names = self.sparsifier.add_model(self.model)
        self.sparsifier.step()
        self.enforcer = MaskEnforcer(self.sparsifier).attach(
            self.optimizer, self.model.fused_optimizer
        )

    def train(self, steps: int) -> list[Tensor]:
        found = []
        for _ in range(steps):
            self.steps += 1
            self.optimizer.zero_grad()
            found.append(self.model(batch(self.cell, seed=100 * self.steps + dist.get_rank())))
            found[-1].square().mean().backward()
            self.optimizer.step()
        return [each.detach() for each in found]

    def compact(self, **how: Any) -> None:
        self.model = compact(self.model, self.sparsifier, **how)


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_gives_and_trains_as_before(world: int, name: str) -> None:
    cell = cell_of(world, name)
    masked, small = Run(cell), Run(cell)
    for run in (masked, small):
        run.train(3)
        for group in run.model.fused_optimizer.param_groups:
            group["lr"] = 0.05
        run.model.fused_optimizer.step()
    kept = kept_rows(small.sparsifier, small.sparsifier.masks.tables.current())
    features = batch(cell, seed=dist.get_rank())
    dense = dict(small.model.module.over.named_parameters())
    before = small.model(features)
    small.compact()
    check_equal(small.model(features), before, name not in ROWS_ARE_CUT)
    assert not small.enforcer.attached and not small.sparsifier.data_groups
    assert all(
        parameter is dense[key] for key, parameter in small.model.module.over.named_parameters()
    )
    for mine, other in zip(small.train(20), masked.train(20), strict=True):
        check_equal(mine, other, name not in OTHER_ORDER)
    masked.enforcer.settle()
    whole, rows = gathered(masked.model), gathered(small.model)
    for table, flags in kept.items():
        count = int(flags.sum())
        assert 0 < count < len(flags)
        check_equal(rows[table][:count], whole[table][flags], name not in OTHER_ORDER)
        assert len(rows[table]) < count + world and not rows[table][count:].any()


@on_ranks(1, 2)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers(world: int, optimizer: type[torch.optim.Optimizer]) -> None:
    masked, small = (Run(cell_of(world, "row_wise"), optimizer) for _ in range(2))
    assert masked.train(3) and small.train(3)
    small.compact()
    for mine, other in zip(small.train(5), masked.train(5), strict=True):
        check_equal(mine, other, False)


class Beside(nn.Module):
    """Two tables with a shared feature, a plain table and a dense layer; gives its loss and its
    predictions."""

    def __init__(self, pooling: PoolingType, weighted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(
                name=n,
                num_embeddings=40,
                embedding_dim=8,
                feature_names=[f, "both"],
                pooling=pooling,
            )
            for n, f in (("first", "a"), ("second", "b"))
        ]
        self.bags = EmbeddingBagCollection(tables, is_weighted=weighted)
        self.plain = nn.EmbeddingBag(30, 32, mode="sum")
        self.over = nn.Linear(32, 1)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.bags(ids)
        found = self.over(
            torch.cat([pooled[key] for key in ("a", "b", "both@first", "both@second")], dim=1)
        )
        return found.square().mean(), found


def beside(pooling: PoolingType, weighted: bool = False, **plan: Any) -> DistributedModelParallel:
    net = Beside(pooling, weighted)
    for bag in net.bags.embedding_bags.values():
        apply_optimizer_in_backward(RowWiseAdagrad, [bag.weight], {"lr": 0.1})
    made = construct_module_sharding_plan(
        net.bags, plan, world_size=2, local_size=2, device_type="cpu"
    )
    return DistributedModelParallel(
        net,
        device=torch.device("cpu"),
        plan=ShardingPlan({"bags": made}),
        sharders=[EmbeddingBagCollectionSharder()],
    )


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(
        [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")], lr=0.1
    )


def ids_of(world: int, weighted: bool, batch: int = 5, seed: int = 0) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(world * seed + dist.get_rank())
    lengths = torch.randint(0, 6, (3 * batch,), generator=draw)
    values = torch.randint(0, 40, (int(lengths.sum()),), generator=draw)
    weights = torch.rand(len(values), generator=draw) if weighted else None
    return KeyedJaggedTensor(["both", "b", "a"], values, weights=weights, lengths=lengths)


def by_key(pooled: Any) -> dict[str, Tensor]:
    """What a collection gives, in any order of keys."""
    return dict(
        zip(
            pooled.keys(),
            pooled.values().detach().split(pooled.length_per_key(), dim=1),
            strict=True,
        )
    )


@on_ranks(2)
@pytest.mark.parametrize("kind", ["row-wise means", "table-wise means", "weighted", "one"])
def test_pooling(world: int, kind: str) -> None:
    """Means divide by all ids; weighted sums; a batch of one; a plain table beside."""
    plans = {
        "row-wise means": {"first": row_wise(), "second": row_wise()},
        "weighted": {"first": row_wise()},
    }
    plan = {"first": table_wise(rank=0), "second": table_wise(rank=1), **plans.get(kind, {})}
    model = beside(
        PoolingType.MEAN if "means" in kind else PoolingType.SUM, kind == "weighted", **plan
    )
    optimizer = dense_optimizer(model)
    sparse = sparsify(model, [optimizer, model.fused_optimizer], level=0.6, end=0)
    sparse.step()
    ids = ids_of(world, kind == "weighted", 1 if kind == "one" else 5)
    before, plain = model.module.bags(ids), model.module.plain(torch.arange(30).view(10, 3))
    expected = by_key(before)
    model = compact(model, sparse)
    found = by_key(model.module.bags(ids))
    assert sorted(found) == sorted(expected) == ["a", "b", "both@first", "both@second"]
    for key, values in expected.items():
        torch.testing.assert_close(found[key], values, rtol=1e-6, atol=1e-6)
    assert torch.equal(model.module.plain(torch.arange(30).view(10, 3)), plain)
    assert model.module.plain.stored_weight.shape == (12, 32)
    assert any(
        parameter is model.module.plain.stored_weight
        for parameter in optimizer.param_groups[0]["params"]
    )


@on_ranks(2)
def test_means_that_torchrec_divides_wrongly(world: int) -> None:
    """TorchRec divides the tables beside row-wise means as well."""
    model = beside(PoolingType.MEAN, first=row_wise(), second=table_wise(rank=0))
    sparse = sparsify(model, [dense_optimizer(model), model.fused_optimizer], level=0.6, end=0)
    sparse.step()
    with pytest.raises(
        ValueError, match=r"bags\.embedding_bags\.first\.weight.*means of row-wise tables"
    ):
        compact(model, sparse)


@on_ranks(2)
def test_removed_ids_are_not_sent() -> None:
    """Lookups get kept ids only, over all ranks."""
    run = Run(cell_of(2, "table_wise"), level=0.75)
    kept = kept_rows(run.sparsifier, run.sparsifier.masks.tables.current())
    features = batch(run.cell, seed=dist.get_rank())
    tables = {feature: table.name for table in run.cell.tables for feature in table.features}
    here = sum(
        int(kept[tables[key]][features[key].values()].sum()) for key in sorted(features.keys())
    )
    run.compact()
    looked_up = 0

    def count(module: nn.Module, args: Any) -> None:
        nonlocal looked_up
        looked_up += args[0].values().numel()

    for each in collection_of(run.model.module.sparse.tables.inner).batches():
        each.module.register_forward_pre_hook(count)
    run.model(features)
    totals = torch.tensor([here, looked_up, features.values().numel()])
    dist.all_reduce(totals)
    assert totals[0] == totals[1] < totals[2] / 2


@on_ranks(4)
def test_rows_that_pad_a_compact_table_are_never_kept() -> None:
    """Masks that remove few rows keep some of them."""
    run = Run(cell_of(4, "row_wise"), level=0.5)
    run.train(2)
    run.compact()
    first = run.model.module.sparse.tables.ids.table_indexes()
    run.enforcer.detach()
    run.prune(0.1)
    flags = kept_rows(run.sparsifier, run.sparsifier.masks.tables.current())
    padding = {name: flags[name][index.num_kept :] for name, index in first.items()}
    assert any(map(torch.any, padding.values()))
    features = batch(run.cell, seed=dist.get_rank())
    before = run.model(features).detach()
    run.compact()
    check_equal(run.model(features), before, False)
    for name, index in run.model.module.sparse.tables.ids.table_indexes().items():
        assert index.num_kept == int(flags[name].sum()) - int(padding[name].sum())


@on_ranks(2)
def test_twice() -> None:
    """A compact model is sparsified and compacted again: bitmaps compose, and it still gives what
    it gave."""
    run = Run(cell_of(2, "mixed"), level=0.5)
    run.train(2)
    run.compact()
    run.train(2)
    run.enforcer.detach()
    run.prune(0.5)
    assert run.names == ["user", "item", "tiny", "word"]
    run.train(2)
    features = batch(run.cell, seed=dist.get_rank())
    before = run.model(features).detach()
    flags = kept_rows(run.sparsifier, run.sparsifier.masks.tables.current())
    run.compact()
    check_equal(run.model(features), before, False)
    found = run.model.module.sparse.tables
    assert (
        type(found) is CompactEmbeddingBagCollection
        and type(found.inner) is ShardedEmbeddingBagCollection
    )
    indexes = found.ids.table_indexes()
    assert (indexes["user"].rows, indexes["user"].num_kept) == (37, int(flags["user"].sum()))
    assert 8 <= indexes["user"].num_kept <= 10
    run.train(2)


@on_ranks(2)
def test_old_model_is_consumed() -> None:
    """What holds on to the old tables can't go on unnoticed, and does not keep their memory."""
    run = Run(cell_of(2, "row_wise"))
    old, fused = run.model.module.sparse.tables, run.model.fused_optimizer
    views = [weakref.ref(each.module.emb_module) for each in collection_of(old).batches()]
    run.compact()
    for use in (
        fused.step,
        fused.state_dict,
        lambda: old(batch(run.cell)),
        lambda: old.state_dict(),
    ):
        with pytest.raises(RuntimeError, match="was compacted, and its memory released"):
            use()
    assert views and all(view() is None for view in views)


@on_ranks(2)
def test_another_plan() -> None:
    """A planner's own: other sharding types, while columns stay, which row-wise state needs."""
    run = Run(cell_of(2, "row_wise"))
    run.train(2)
    features = batch(run.cell, seed=dist.get_rank())
    before = run.model(features).detach()

    def planned(module: nn.Module, **generators: Any) -> ShardingPlan:
        made = construct_module_sharding_plan(
            module.sparse.tables.inner,
            {
                table.name: generators.get(table.name, table_wise(rank=1))
                for table in run.cell.tables
            },
            world_size=2,
            local_size=2,
            device_type="cpu",
        )
        for sharding in made.values():
            sharding.compute_kernel = "fused"
        return ShardingPlan({"sparse.tables.inner": made})

    with pytest.raises(
        ValueError,
        match=r"'item': row-wise optimizer state of .* can't be derived from the state of the columns",
    ):
        run.compact(plan=partial(planned, item=column_wise(ranks=[0, 1])))
    assert torch.equal(run.model(features), before) and run.enforcer.attached  # nothing was changed
    run.train(1)
    before = run.model(features).detach()
    run.compact(plan=planned)
    torch.testing.assert_close(run.model(features), before, rtol=1e-6, atol=1e-6)
    [table] = [data for data in ModelTables(run.model).locate() if data.name == "user"]
    assert table.sharding == "table_wise" and table.tiling[0] == ()
    run.train(2)


@on_ranks(2)
def test_a_row_wise_table_with_nothing_left_trains_beside_another(world: int) -> None:
    """Each of its shards keeps a row, because FBGEMM can't have an empty table beside another."""
    model = beside(PoolingType.SUM, first=row_wise(), second=table_wise(rank=0))
    sparse = sparsify(
        model, [dense_optimizer(model), model.fused_optimizer], level={"first": 1.0}, end=0
    )
    sparse.step()
    features = ids_of(world, False)
    before = model(features)[1].detach()
    model = compact(model, sparse)
    assert {index.num_kept for index in model.module.bags.table_indexes().values()} == {0}
    assert torch.equal(model(features)[1], before)
    model(features)[0].backward()


@on_ranks(2)
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_pipeline(world: int, ahead: bool, pooling: PoolingType) -> None:
    """TrainPipelineSparseDist, with the translation of ids pipelined or not, trains as a plain loop
    does."""
    found: list[list[Tensor]] = []
    for pipelined in (False, True):
        model = beside(pooling, first=table_wise(rank=0), second=table_wise(rank=1))
        sparse = sparsify(model, [dense_optimizer(model), model.fused_optimizer], level=0.6, end=0)
        sparse.step()
        model = compact(model, sparse)
        plain = KeyedOptimizerWrapper(
            dict(model.module.over.named_parameters()), partial(torch.optim.SGD, lr=0.1)
        )
        optimizer = CombinedOptimizer([model.fused_optimizer, plain])
        batches = [ids_of(world, False, seed=i) for i in range(5)]
        found.append([])
        if pipelined:
            cpu = torch.device("cpu")
            pipeline = TrainPipelineSparseDist(
                model, optimizer, cpu, execute_all_batches=True, pipeline_postproc=ahead
            )
            stream = iter(batches)
            found[-1] = [pipeline.progress(stream).detach() for _ in batches]
            [sharded] = [
                module
                for module in model.modules()
                if type(module) is ShardedEmbeddingBagCollection
            ]
            assert isinstance(sharded.forward, PipelinedForward) is ahead
            again = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape="row", norm="L2")
            again.add_model(model, dense=False)
            again.step()
            if ahead:
                with pytest.raises(
                    ValueError,
                    match=r"a train pipeline has replaced its forward; call pipeline.detach",
                ):
                    compact(model, again, optimizer=plain)
                pipeline.detach()
            compact(model, again, optimizer=plain)
            continue
        for ids in batches:
            optimizer.zero_grad()
            loss, prediction = model(ids)
            found[-1].append(prediction.detach())
            loss.backward()
            optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


@on_ranks(2)
def test_refused() -> None:
    """On every rank, whichever is wrong; nothing is changed."""
    run = Run(cell_of(2, "data_parallel"))
    run.enforcer.detach()
    with pytest.raises(ValueError, match=r"is stepped by a plain optimizer"):
        run.compact()
    with pytest.raises(ValueError, match=r"rank 1: .*Invalid sparse of type Linear"):
        compact(run.model, run.sparsifier if dist.get_rank() == 0 else nn.Linear(1, 1))  # type: ignore[arg-type]
    run.sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    run.sparsifier.add_model(run.model)
    run.sparsifier.step()
    with pytest.raises(
        ValueError, match=r"has masks of blocks \(1, 4\); compact\(\) needs whole rows"
    ):
        run.compact()
    with pytest.raises(ValueError, match=r"is inside DistributedDataParallel"):
        wrapped = nn.parallel.DistributedDataParallel(nn.EmbeddingBag(20, 4))
        sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, "ROW"))
        sparsifier.add_model(wrapped)
        sparsifier.step()
        compact(wrapped, sparsifier, optimizer=())
    run.train(1)
