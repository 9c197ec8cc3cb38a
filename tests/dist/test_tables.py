"""Tables of sharded models are found in place: every cell, on real ranks, against TorchRec's
state_dict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules import embedding_modules
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import Rect, ShardedData, check_tiling
from tests.dist.cells import LOCAL, Cell, batch, build, cells, every_cell, gathered, weights
from tests.dist.plugin import on_ranks
from tests.torchrec.contract import is_in


@on_ranks()
@pytest.mark.parametrize(("world", "name"), every_cell())
def test_tables_are_found_in_place(world: int, name: str) -> None:
    cell = cells(world)[name]
    model = build(cell)
    source = ModelTables(model)
    located = source.locate()
    _check_metadata(cell, located)
    _check_truth(model, located)
    full = gathered(located)
    for table, wanted in weights(cell).items():
        torch.testing.assert_close(full[table], wanted.to(full[table].dtype), rtol=0, atol=0)
    if cell.trains:
        features = batch(cell, seed=dist.get_rank())
        model(features).sum().backward()
        # What the fused optimizer wrote is seen, by the views of before too.
        _check_truth(model, source.locate())
        _check_truth(model, located)
        out = model(features)
        _zero(located)
        out.sum().backward()  # writes between forward and backward go unnoticed by autograd
        _zero(located)
        bias = model.module.over.bias
        torch.testing.assert_close(model(features), torch.ones_like(out) * bias, rtol=0, atol=0)


def _check_metadata(cell: Cell, located: list[ShardedData]) -> None:
    prefix = "sparse.tables.embedding_bags" if cell.bags else "sparse.tables.embeddings"
    assert [data.name for data in located] == [table.name for table in cell.tables]
    assert [data.fqn for data in located] == [
        f"{prefix}.{table.name}.weight" for table in cell.tables
    ]
    assert [data.shape for data in located] == [(table.rows, table.dim) for table in cell.tables]
    for data in located:
        kind = "".join(cell.name.removeprefix("ec_"))
        assert cell.name == "mixed" or data.sharding in kind or kind == "two_shards"
        assert data.kernel == (
            "fused" if cell.fused and data.sharding != "data_parallel" else "dense"
        )
        assert data.ranks == (tuple(range(cell.world)) if cell.world > 1 else None)
        assert data.replicated == (data.sharding == "data_parallel" and cell.world > 1)
        assert data.dtype == getattr(
            torch, {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}[cell.data_type.value]
        )


def _check_truth(model: nn.Module, located: list[ShardedData]) -> None:
    """The tiling is exact and is what the ranks really hold, and the views hold what TorchRec's
    state_dict says."""
    rank = dist.get_rank()
    for data in located:
        check_tiling(data)
        assert data.tiling[rank] == tuple(shard.rect for shard in data.shards)
        for rect, tensor in data.shards:
            assert tuple(tensor.shape) == (rect.rows, rect.cols)
            assert tensor.dtype == data.dtype
            assert not tensor.requires_grad
    mine = [
        (data.name, data.tiling, [tuple(shard.rect) for shard in data.shards]) for data in located
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name, tiling, _ in mine:
        held = [next(entry for entry in theirs if entry[0] == name) for theirs in everyone]
        assert [entry[1] for entry in held] == [tiling] * len(held)
        assert [tuple(map(tuple, rects)) for rects in tiling] == [tuple(entry[2]) for entry in held]
    state, views = gathered(model), gathered(located)
    assert sorted(state) == sorted(views)
    for name in state:
        torch.testing.assert_close(views[name], state[name], rtol=0, atol=0)


def _zero(located: list[ShardedData]) -> None:
    for data in located:
        for shard in data.shards:
            shard.tensor.zero_()


@on_ranks(2, 4)
def test_reshard_moves_the_views(world: int) -> None:
    every = cells(world)
    # What torchrec 1.8 can do on gloo: every shard of a changed table moves, no rank holds two of
    # them, and the features were not in the order of the ranks before (or the forward would
    # misroute ids).
    moves = {
        "table_wise": {"user": table_wise(rank=0), "tiny": table_wise(rank=2 % world)},
        "column_wise": {
            "item": column_wise(ranks=list(range(world))[::-1]),
            "tiny": column_wise(ranks=[1, 2 % world]),
        },
    }
    for name, move in moves.items():
        model = build(every[name])
        features = batch(every[name], seed=dist.get_rank())
        model(features).sum().backward()
        source = ModelTables(model)
        before = {data.name: data for data in source.locate()}
        was = gathered(list(before.values()))
        tables = model.module.sparse.tables
        plan = construct_module_sharding_plan(
            EmbeddingBagCollection(
                tables=[c for c in tables._embedding_bag_configs if c.name in move]
            ),
            move,
            sharder=EmbeddingBagCollectionSharder(),
            local_size=LOCAL[world],
            world_size=world,
            device_type="cpu",
        )
        for sharding in plan.values():
            sharding.compute_kernel = "fused"
        model.reshard(
            sharded_module_fqn="sparse.tables",
            changed_shard_to_params={"sparse.tables": (0.0, EmbeddingModuleShardingPlan(plan))},
        )
        located = source.locate()
        _check_truth(model, located)
        now = gathered(located)
        for table in was:
            torch.testing.assert_close(now[table], was[table], rtol=0, atol=0)
        moved = {data.name for data in located if data.tiling != before[data.name].tiling}
        assert moved == set(move)
        _zero(located)
        out = model(features)
        torch.testing.assert_close(
            out, torch.ones_like(out) * model.module.over.bias, rtol=0, atol=0
        )


def _ebc(*names: str) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=n, num_embeddings=5, embedding_dim=4, feature_names=[f"f_{n}"])
        for n in names
    ]
    return EmbeddingBagCollection(tables=configs)


def _shard(
    model: nn.Module, paths: dict[str, Any], sharders: list[Any], **options: Any
) -> DistributedModelParallel:
    plan = {}
    for path, generator in paths.items():
        collection = model.get_submodule(path)
        sharder = next(each for each in sharders if isinstance(collection, each.module_type))
        tables = sharder.shardable_parameters(collection)
        plan[path] = construct_module_sharding_plan(
            collection,
            {t: generator for t in tables},
            sharder=sharder,
            local_size=2,
            world_size=2,
            device_type="cpu",
        )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan), sharders=sharders, **options
    )


@on_ranks(2)
def test_two_collections_with_one_name() -> None:
    net = nn.ModuleDict({"left": _ebc("id", "age"), "right": _ebc("id"), "over": nn.Linear(2, 2)})
    model = _shard(
        net, {"left": row_wise(), "right": table_wise(rank=1)}, [EmbeddingBagCollectionSharder()]
    )
    located = ModelTables(model).locate()
    assert [data.name for data in located] == ["left/id", "age", "right/id"]
    assert [data.sharding for data in located] == ["row_wise", "row_wise", "table_wise"]
    assert [data.name for data in ModelTables(model, include="right/*").locate()] == ["right/id"]
    assert [data.name for data in ModelTables(model, exclude="left.*").locate()] == ["right/id"]


@on_ranks(2)
def test_tables_in_the_dense_part() -> None:
    """Tables that the plan leaves alone are replicated by the DDP around the dense part, like its
    parameters."""
    net = nn.ModuleDict(
        {
            "sharded": _ebc("id"),
            "left_alone": _ebc("age"),
            "position": nn.Embedding(7, 3),
            "over": nn.Linear(2, 2),
        }
    )
    model = _shard(net, {"sharded": row_wise()}, [EmbeddingBagCollectionSharder()])
    located = {data.name: data for data in ModelTables(model, dense=True).locate()}
    assert list(located) == ["id", "age", "position", "over/weight", "over/bias"]
    for name in ("age", "position", "over/weight", "over/bias"):
        assert located[name].ranks == (0, 1)
        assert located[name].sharding == "replicated"
        assert located[name].replicated
    assert located["age"].fqn == "left_alone.embedding_bags.age.weight"
    assert located["over/bias"].shape == (1, 2)
    assert located["position"].shards[0].tensor.data_ptr() == net["position"].weight.data_ptr()


@on_ranks(2)
def test_feature_processors() -> None:
    processed = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="id", num_embeddings=5, embedding_dim=4, feature_names=["f_id"]
                )
            ],
            is_weighted=True,
        ),
        {"f_id": PositionWeightedModule(max_feature_length=3)},
    )
    model = _shard(
        nn.ModuleDict({"fp": processed}),
        {"fp": row_wise()},
        [FeatureProcessedEmbeddingBagCollectionSharder()],
    )
    located = ModelTables(model).locate()
    assert [(data.name, data.fqn) for data in located] == [
        ("id", "fp._embedding_bag_collection.embedding_bags.id.weight")
    ]
    assert located[0].fqn in model.state_dict()
    _check_truth(model, located)
    names = [data.name for data in ModelTables(model, include=[], dense=True).locate()]
    assert [name for name in names if not name.endswith("position_weight")] == []
    assert names


@on_ranks(2)
def test_plain_ddp() -> None:
    group = dist.new_group([0, 1])
    net = nn.Sequential()
    net.add_module("tables", _ebc("id"))
    net.add_module("local", nn.Embedding(4, 2))
    net.add_module("over", nn.Linear(3, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["local.weight"])
    located = {
        data.name: data
        for data in ModelTables(
            DistributedDataParallel(net, process_group=group), dense="*.weight"
        ).locate()
    }
    assert {name: data.ranks for name, data in located.items()} == {
        "id": (0, 1),
        "local": None,
        "over/weight": (0, 1),
    }
    assert located["id"].tiling == ((Rect(0, 0, 5, 4),),) * 2
    alone = [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
    assert (
        ModelTables(DistributedDataParallel(_ebc("id"), process_group=alone)).locate()[0].ranks
        is None
    )


@on_ranks(2)
def test_lazy_data_parallel() -> None:
    """Before init_data_parallel() the dense part is every rank's own, afterwards it is
    replicated."""
    net = nn.ModuleDict({"sharded": _ebc("id"), "position": nn.Embedding(7, 3)})
    model = _shard(
        net,
        {"sharded": table_wise(rank=0)},
        [EmbeddingBagCollectionSharder()],
        init_data_parallel=False,
    )
    source = ModelTables(model)
    assert [data.ranks for data in source.locate()] == [(0, 1), None]
    model.init_data_parallel()
    assert [data.ranks for data in source.locate()] == [(0, 1), (0, 1)]


@on_ranks(2)
@pytest.mark.skipif(not is_in("1.9"), reason="new in TorchRec 1.9")
def test_replicas_that_nothing_keeps_equal_are_refused() -> None:
    marked = _ebc("id")
    embedding_modules.mark_data_parallel_skip_grad_sync(marked)
    net = nn.ModuleDict({"marked": marked})
    model = _shard(net, {"marked": data_parallel()}, [EmbeddingBagCollectionSharder()])
    with pytest.raises(ValueError, match="Table 'id': it is data-parallel without DDP, so its rep"):
        ModelTables(model).locate()


@on_ranks(2)
def test_refused_modules() -> None:
    config = EmbeddingBagConfig(
        name="id", num_embeddings=8, embedding_dim=4, feature_names=["f_id"]
    )
    remap = MCHManagedCollisionModule(
        8,
        torch.device("cpu"),
        DistanceLFU_EvictionPolicy(),
        eviction_interval=1,
        input_hash_size=100,
    )
    managed = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=[config]), ManagedCollisionCollection({"id": remap}, [config])
    )
    net = nn.ModuleDict({"managed": managed, "plain": _ebc("age")})
    with pytest.raises(
        ValueError,
        match=(
            r"ManagedCollisionEmbeddingBagCollection at 'managed'.*move ids.*exclude=\['managed'\]"
        ),
    ):
        ModelTables(net).locate()
    sharders = [ManagedCollisionEmbeddingBagCollectionSharder(), EmbeddingBagCollectionSharder()]
    model = _shard(net, {"managed": row_wise(), "plain": row_wise()}, sharders)
    with pytest.raises(
        ValueError, match=r"ShardedManagedCollisionEmbeddingBagCollection at 'managed'.*move ids"
    ):
        ModelTables(model).locate()
    assert [data.name for data in ModelTables(model, exclude="managed").locate()] == ["age"]
    assert [data.name for data in ModelTables(model, include="age").locate()] == ["age"]


@on_ranks(2)
def test_refused_kernels() -> None:
    cell = cells(2)["row_wise"]
    # A sharding of its own, so that its kernel holds no other table.
    cached = table_wise(rank=0, compute_kernel="fused_uvm_caching")
    model = build(replace(cell, plan={**cell.plan, "item": cached}))
    [found] = ModelTables(model, include="item").locate()
    assert found.kernel == "fused_uvm_caching"
    # CPUs have no such kernel. The kernels of all ranks have the same configurations.
    for sharding in model.module.sparse.tables._embedding_shardings:
        for groups in sharding._grouped_embedding_configs_per_rank:
            for config in (table for group in groups for table in group.embedding_tables):
                if config.name == "item":
                    config.compute_kernel = EmbeddingComputeKernel.KEY_VALUE
    with pytest.raises(
        ValueError,
        match="Table 'item': the compute kernel 'key_value' is not supported; dense, fused, fused_u",
    ):
        ModelTables(model).locate()
    assert [data.name for data in ModelTables(model, exclude="item").locate()] == [
        "user",
        "tiny",
        "word",
    ]
