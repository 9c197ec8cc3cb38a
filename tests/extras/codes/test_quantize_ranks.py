"""`quantize()` on ranks: the same books, codes and files on every sharding and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import LazyAwaitable, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import dist_sparse.extras.codes.coded_training as coded_module
from dist_sparse import Advanced, compact, export, load_served, sparsify
from dist_sparse.extras.codes import quantize
from dist_sparse.tables.modules import modules_by_path
from tests.dist.cells import Cell, batch, build, cells, gathered, set_weights, weights
from tests.dist.plugin import on_ranks
from tests.dist.test_reshard import moves, reshard
from tests.serving.stored import crcs, unsharded

CELLS = {
    1: ("row_wise",),
    2: ("table_wise", "row_wise", "column_wise_uneven", "data_parallel", "ec_row_wise", "mixed"),
    4: (
        "row_wise",
        "column_wise",
        "grid_shard",
        "row_wise_dense_kernel",
        "table_row_wise",
        "table_column_wise",
    ),
}
# Six seconds each: two of them in the quick tests.
QUICK = {(2, "column_wise_uneven"), (4, "grid_shard")}
EVERY = [
    pytest.param(world, name, marks=() if (world, name) in QUICK else pytest.mark.slow)
    for world, names in CELLS.items()
    for name in names
]


def quantized(cell: Cell, model: torch.nn.Module, path: Path) -> Any:
    """A first fit, other weights, and a refit with the codes of before."""
    coded_module.LEAST_ROWS = 1  # type: ignore[misc]
    groups = {spec.name: spec.dim // 4 for spec in cell.tables}
    handle = quantize(model, [], codes=groups, begin=0, every=1)
    handle.step()
    set_weights(model, weights(cell, seed=1))
    handle.step()
    export(model, handle, path, dtype="codes")
    return handle


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_files_depend_on_the_model_alone(world: int, name: str, tmp_path: Path) -> None:
    cell = cells(world)[name]
    model = build(cell)
    handle = quantized(cell, model, tmp_path / "sharded")
    if dist.get_rank() == 0:
        expected = alone(cell, tmp_path / "alone")
        assert unsharded(tmp_path / "sharded") == expected
    dist.barrier()
    if cell.trains:
        check_served(cell, model, tmp_path / "sharded")
        handle.step()


@on_ranks(2)
def test_a_checkpoint_loads_on_another_sharding(tmp_path: Path) -> None:
    """With codes of a due step before it."""
    cell, other = (cells(2)[name] for name in ("row_wise", "column_wise_uneven"))
    model = build(cell)
    handle = quantized(cell, model, tmp_path / "base")
    set_weights(model, weights(cell, seed=2))
    export(model, handle, tmp_path / "expected", dtype="codes")
    dcp.save({"codes": handle.state_dict()}, checkpoint_id=tmp_path / "checkpoint")
    resharded = build(other)
    groups = {spec.name: spec.dim // 4 for spec in cell.tables}
    resumed = quantize(resharded, [], codes=groups, begin=9)
    set_weights(resharded, weights(cell, seed=2))
    state = {"codes": resumed.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    resumed.load_state_dict(state["codes"])
    export(resharded, resumed, tmp_path / "found", dtype="codes")
    assert crcs(tmp_path / "found") == crcs(tmp_path / "expected")


@on_ranks(2)
def test_hooks_and_codes_follow_a_reshard(tmp_path: Path) -> None:
    cell, move = moves(2)["table_wise"]
    model = build(cell)
    handle = quantized(cell, model, tmp_path / "before")
    reshard(model, move, 2)
    model(batch(cell, seed=dist.get_rank()))
    export(model, handle, tmp_path / "after", dtype="codes")
    assert crcs(tmp_path / "after") == crcs(tmp_path / "before")
    check_served(cell, model, tmp_path / "after")
    handle.step()


@on_ranks(2)
@pytest.mark.parametrize("name", ["table_wise", "row_wise"])
def test_what_would_change_tables_with_codes_is_refused_on_all_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_module, "LEAST_ROWS", 1)
    cell = cells(2)[name]
    model = build(cell)
    plan: dict[str, Any] = {"level": 0.5, "end": 0, "advanced": Advanced(min_rows=0)}
    coded = cell.tables[0].name
    handle = quantize(model, [], codes={coded: 2}, begin=0)
    with pytest.raises(ValueError, match=f"Table {coded!r} has codes: call detach"):
        sparsify(model, model.fused_optimizer, **plan)
    handle.detach()
    sparse = sparsify(model, model.fused_optimizer, **plan)
    model(batch(cell, seed=dist.get_rank())).sum().backward()
    sparse.step()
    with quantize(model, [], codes={coded: 2}, begin=0, sparse=sparse) as handle:
        handle.step()
        with pytest.raises(ValueError, match="has codes: call detach"):
            compact(model, sparse)
    sparse.detach()


@on_ranks(2)
def test_a_handle_that_one_rank_has_detached_leaves_no_rank_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coded_module, "LEAST_ROWS", 1)
    model = build(cells(2)["table_wise"])
    handle = quantize(model, [], codes=2, begin=0, every=1)
    state = handle.state_dict()
    if dist.get_rank() == 1:
        handle.detach()
    for call in (handle.step, lambda: handle.load_state_dict(state)):
        with pytest.raises(ValueError, match="rank 1: RuntimeError: The codes are detached"):
            call()
    handle.detach()


def alone(cell: Cell, path: Path) -> dict[str, Any]:
    """What one process writes of the unsharded model."""
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from tests.dist.cells import plain;"
        "from tests.extras.codes.test_quantize_ranks import cells, quantized;"
        f"cell = cells({cell.world})[{cell.name!r}];"
        f"quantized(cell, plain(cell), Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    return unsharded(path)


def check_served(cell: Cell, model: torch.nn.Module, path: Path) -> None:
    """One forward and backward; lookups of single rows are the served ones."""
    features = batch(cell, seed=dist.get_rank())
    found = modules_by_path(model)["sparse.tables"](features)
    found = found.wait() if isinstance(found, LazyAwaitable) else found
    served = load_served(path)(features)
    for key in found.keys():  # noqa: SIM118  (of a KeyedTensor too)
        mine, other = found[key], served[key]
        if not cell.bags:
            mine, other = mine.values(), other.values()
        torch.testing.assert_close(mine.float(), other, rtol=1e-6, atol=1e-6)
    before = gathered(model)
    model(features).sum().backward()
    if cell.fused:
        after = gathered(model)
        assert any(not torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
def test_weighted_sums_are_served_bit_for_bit(tmp_path: Path) -> None:
    """One table on each rank: no sum is split over ranks."""
    coded_module.LEAST_ROWS = 1  # type: ignore[misc]
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=400, embedding_dim=8, feature_names=[name])
        for name in ("a", "b")
    ]
    bags = EmbeddingBagCollection(configs, is_weighted=True)
    plan = construct_module_sharding_plan(
        bags,
        {"a": table_wise(rank=0), "b": table_wise(rank=1)},
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        bags, device=torch.device("cpu"), plan=ShardingPlan({"": plan})
    )
    handle = quantize(model, [], codes=4, begin=0)
    handle.step()
    lengths = torch.tensor([3, 1, 0, 5, 7, 2, 4, 0, 6, 1])
    total = int(lengths.sum())
    ids = KeyedJaggedTensor(
        ["a", "b"], torch.randint(0, 400, (total,)), lengths=lengths, weights=torch.rand(total)
    )
    out = model(ids)
    out = out.wait() if isinstance(out, LazyAwaitable) else out
    export(model, handle, tmp_path / "served", dtype="codes")
    assert torch.equal(load_served(tmp_path / "served")(ids).values(), out.values())


@on_ranks(2)
def test_a_shard_that_cuts_a_group_is_refused() -> None:
    coded_module.LEAST_ROWS = 1  # type: ignore[misc]
    cell = cells(2)["two_shards"]
    model = build(cell)
    with pytest.raises(ValueError, match="Shards of \\[8\\] columns fit 1 codes"):
        quantize(model, [], codes={"user": 1}, begin=0)


@on_ranks(1)
@pytest.mark.parametrize("output_dtype", ["FP32", "FP16"])
def test_sharded_tables_of_half_precision(output_dtype: str, tmp_path: Path) -> None:
    """Kernels decode to their output dtype: float32 lookups equal the served ones, float16 lookups
    are the served ones rounded."""
    coded_module.LEAST_ROWS = 1  # type: ignore[misc]
    config = EmbeddingBagConfig(
        name="t", num_embeddings=400, embedding_dim=8, feature_names=["f"], data_type=DataType.FP16
    )
    tables = EmbeddingBagCollection(tables=[config])
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder({"output_dtype": SparseType[output_dtype]})
    model = DistributedModelParallel(tables, device=torch.device("cpu"), sharders=[sharder])
    handle = quantize(model, [], codes=2, begin=0)
    handle.step()
    export(model, handle, tmp_path / "served", dtype="codes")
    ids, lengths = torch.arange(400), torch.full((100,), 4)
    features = KeyedJaggedTensor(["f"], ids, lengths=lengths)
    found = model(features).values()
    served = load_served(tmp_path / "served")(features).values()
    assert torch.equal(found.float(), served.to(found.dtype).float())
    assert (found.dtype == torch.float16) == (output_dtype == "FP16")
