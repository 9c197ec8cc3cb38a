"""With ``quantize(commitment=)``, an L2 of lookups trains the floats as it does without codes: on
every sharding, as in one process with the batches of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import LazyAwaitable, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

import dist_sparse.extras.codes.coded_training as coded_module
from dist_sparse.extras.codes import quantize
from dist_sparse.tables.modules import modules_by_path
from tests.dist.cells import Cell, build, cells, gathered, plain, set_weights, weights
from tests.dist.plugin import on_ranks

FACTOR = 0.5


def single_ids(cell: Cell, rank: int) -> KeyedJaggedTensor:
    """Bags of at most one id: row-wise sharding cuts none."""
    generator = torch.Generator().manual_seed(rank)
    keys = [feature for table in cell.tables for feature in table.features]
    lengths = torch.randint(0, 2, (len(keys), 6), generator=generator)
    ids = []
    for table in cell.tables:
        for _ in table.features:
            count = int(lengths[len(ids)].sum())
            ids.append(torch.randint(0, table.rows, (count,), generator=generator))
    return KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=lengths.flatten())


def loss_of(model: nn.Module, cell: Cell, rank: int) -> Tensor:
    """An L2 of the lookups of a rank, and a term that does not depend on their values."""
    found = modules_by_path(model)["sparse.tables"](single_ids(cell, rank))
    found = found.wait() if isinstance(found, LazyAwaitable) else found
    total = torch.zeros(())
    for key in sorted(found.keys()):
        rows = (found[key] if cell.bags else found[key].values()).float()
        total = total + FACTOR / 2 * rows.square().sum() + rows.sum()
    return total


def step(model: nn.Module, cell: Cell, loss: Tensor) -> dict[str, Tensor]:
    """One step of SGD; returns the global weights."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.SGD(dense.values(), lr=0.1)
    loss.backward()
    optimizer.step()
    return {name: weight.float() for name, weight in gathered(model).items()}


def coded(model: nn.Module, cell: Cell, commitment: float = FACTOR) -> Any:
    groups = {spec.name: spec.dim // 4 for spec in cell.tables}
    handle = quantize(model, [], codes=groups, begin=0, commitment=commitment)
    # The books of other weights: the decoded rows are far from the floats.
    set_weights(model, weights(cell, seed=1))
    handle.step()
    set_weights(model, weights(cell))
    return handle


@on_ranks()
@pytest.mark.parametrize("divides", [True, False], ids=["average", "sum"])
@pytest.mark.parametrize(
    ("world", "name"),
    [
        (1, "row_wise"),
        *((2, "table_wise"), (2, "row_wise"), (2, "column_wise_uneven"), (2, "ec_row_wise")),
        *((2, "mixed"), (2, "row_wise_dense_kernel"), (2, "data_parallel"), (2, "two_shards")),
        *((4, "grid_shard"), (4, "table_row_wise"), (4, "table_column_wise")),
    ],
)
def test_the_pull_is_that_of_one_process(
    world: int, name: str, divides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchRec averages the gradients of ranks, or adds them up, as it is told; DDP averages."""
    monkeypatch.setattr(coded_module, "LEAST_ROWS", 1)
    cell = cells(world)[name]
    parallel = {
        spec.name for spec in cell.tables if "data_parallel" in cell.plan[spec.name].__qualname__
    }
    set_gradient_division(divides)
    try:
        model = build(cell, torch.optim.SGD)
        with coded(model, cell):
            found = step(model, cell, loss_of(model, cell, dist.get_rank()))
    finally:
        set_gradient_division(True)
    whole = plain(cell)
    total = torch.stack([loss_of(whole, cell, rank) for rank in range(world)]).sum()
    summed = step(whole, cell, total)
    whole = plain(cell)
    total = torch.stack([loss_of(whole, cell, rank) for rank in range(world)]).mean()
    averaged = step(whole, cell, total)
    for table, weight in found.items():
        expected = averaged if divides or table in parallel else summed
        torch.testing.assert_close(weight, expected[table], rtol=1e-5, atol=1e-5, msg=table)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["means", "dedup"])
def test_lookups_whose_l2_is_not_that_of_the_kernel_are_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean divides both the L2's gradient and that of the rows; a merged id has one pull for
    several lookups."""
    monkeypatch.setattr(coded_module, "LEAST_ROWS", 1)
    if kind == "means":
        tables: nn.Module = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="t",
                    num_embeddings=40,
                    embedding_dim=8,
                    feature_names=["f"],
                    pooling=PoolingType.MEAN,
                )
            ]
        )
        sharder: Any = EmbeddingBagCollectionSharder()
        message = "'t' can't have a commitment: TorchRec divides the means of row-wise tables"
    else:
        tables = EmbeddingCollection(
            [EmbeddingConfig(name="t", num_embeddings=40, embedding_dim=8, feature_names=["f"])]
        )
        sharder = EmbeddingCollectionSharder(use_index_dedup=True)
        message = "'t' can't have a commitment: use_index_dedup=True looks equal ids"
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    cut = construct_module_sharding_plan(
        tables,
        {"t": row_wise()},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        tables, device=torch.device("cpu"), plan=ShardingPlan({"": cut}), sharders=[sharder]
    )
    with pytest.raises(ValueError, match=message):
        quantize(model, [], codes=2, begin=0, commitment=0.1)
    quantize(model, [], codes=2, begin=0).detach()
