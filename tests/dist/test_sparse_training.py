"""sparsify() on real ranks: loads are atomic over all of them, and a model that is sharded
afterwards is noticed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dist_sparse import SparseTraining, sparsify
from tests.dist.cells import batch, build, cells, gathered
from tests.dist.plugin import on_ranks
from tests.keywords import nested
from tests.states import edited

PLAN: dict[str, Any] = {"level": 0.6, "end": 9, "every": 3, "block": (1, 4), "min_rows": 0}


def sharded() -> tuple[nn.Module, SparseTraining]:
    model = build(cells(2)["row_wise"])
    return model, sparsify(model, model.fused_optimizer, **nested(**PLAN))


def everything(model: nn.Module, sparse: SparseTraining) -> list[Any]:
    weights = {name: table.clone() for name, table in gathered(model).items()}
    masks = [sparse.sparsifier.audit(), copy.deepcopy(sparse.sparsifier.data_groups)]
    return [weights, *masks, sparse.scheduler.state_dict()]


@on_ranks(2)
def test_states_of_different_steps_change_nothing() -> None:
    """The newest file of one rank is older than that of the other."""
    model, sparse = sharded()
    for _ in range(5):
        sparse.step()
    state = copy.deepcopy(sparse.state_dict())
    for _ in range(5):
        sparse.step()
    before = everything(model, sparse)
    with edited(state, "schedule") as saved:
        saved["scheduler"]["last_epoch"] += dist.get_rank()
    with pytest.raises(ValueError, match="nothing was changed"):
        sparse.load_state_dict(state)
    after = everything(model, sparse)
    assert all(torch.equal(before[0][name], table) for name, table in after[0].items())
    assert after[1:] == before[1:]
    with edited(state, "schedule") as saved:
        saved["scheduler"]["last_epoch"] -= dist.get_rank()
    sparse.load_state_dict(state)
    assert sparse.scheduler.last_epoch == 5


@on_ranks(2)
def test_masks_of_another_step_on_all_ranks_change_nothing() -> None:
    model, sparse = sharded()
    for _ in range(4):
        sparse.step()
    early = copy.deepcopy(sparse.state_dict())
    for _ in range(4):
        sparse.step()
    before = everything(model, sparse)
    with pytest.raises(ValueError, match="different steps"):
        sparse.load_state_dict({**sparse.state_dict(), "sparsifier": early["sparsifier"]})
    assert everything(model, sparse)[1:] == before[1:]


@on_ranks(2)
@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["scope"], "global", "scope of the state is global on rank 1 and table on rank 0"),
        (["floors"], {"user": 0.5}, "floors of the state"),
        (["score"], "norm_accumulator", "scored_by of the state is norm_accumulator on rank 1"),
        (["floors"], 5, "rank 1: ValueError: The entry 'floors' of the state must be a mapping"),
        (["scheduler", "base_param"], {"user": 0.5}, "base_param of the state"),
        (["scheduler", "_step_count"], 0, "step count is 0 on rank 1 and 6 on rank 0"),
    ],
    ids=str,
)
def test_settings_of_one_rank_change_nothing(path: list[str], value: Any, says: str) -> None:
    """They were accepted, and the next mask update found that the ranks disagree, for good."""
    model, sparse = sharded()
    for _ in range(5):
        sparse.step()
    good = copy.deepcopy(sparse.state_dict())
    state = copy.deepcopy(good)
    for _ in range(2):
        sparse.step()
    before = everything(model, sparse)
    if dist.get_rank() == 1:
        with edited(state, "schedule") as saved:
            node = saved
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
    with pytest.raises(ValueError, match=says):
        sparse.load_state_dict(state)
    after = everything(model, sparse)
    assert all(torch.equal(before[0][name], table) for name, table in after[0].items())
    assert after[1:] == before[1:]
    sparse.load_state_dict(good)
    for _ in range(5):
        sparse.step()
    sparse.sparsifier.audit()


class Unsharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=50, embedding_dim=8, feature_names=["f"]
        )
        self.tables = EmbeddingBagCollection(tables=[config])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        result: torch.Tensor = self.tables(features).values()
        return result


@on_ranks(1, 2)
def test_a_model_that_is_sharded_afterwards_is_noticed() -> None:
    model = Unsharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sparsify(model, optimizer, level=0.8, end=4, every=1)
    wrapped = DistributedModelParallel(model, device=torch.device("cpu"))
    features = KeyedJaggedTensor.from_lengths_sync(
        ["f"], torch.randint(50, (12,)), torch.full((4,), 3)
    )
    wrapped(features).sum().backward()
    with pytest.raises(RuntimeError, match=r"No forward has used the collections \['tables'\]"):
        sparse.step()
    sparse.detach()


@on_ranks(2)
def test_a_replicated_collection_is_none_that_is_sharded_afterwards() -> None:
    model = nn.parallel.DistributedDataParallel(Unsharded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sparsify(model, optimizer, level=0.8, end=0)
    features = KeyedJaggedTensor.from_lengths_sync(
        ["f"], torch.randint(50, (12,)), torch.full((4,), 3)
    )
    model(features).sum().backward()
    optimizer.step()
    sparse.step()
    assert sparse.sparsity == 0.8 and sparse.partial_tables == []


@on_ranks(2)
def test_shown_on_a_sharded_model() -> None:
    _, sparse = sharded()
    # Local: one rank may show it alone.
    assert repr(sparse).startswith("SparseTraining(step 0 of 9")
    assert sparse.partial_tables == list(sparse.sparsifier.data_groups)
    assert sparse.sparsity == 0 and "row_wise" in sparse.summary()


@on_ranks(2)
def test_partial_tables_where_a_shard_is_empty() -> None:
    """Of a table with one row, rank 0 holds all and rank 1 a shard without rows."""
    cell = cells(2)["row_wise"]
    cell = replace(cell, tables=tuple(replace(table, rows=1) for table in cell.tables))
    model = build(cell)
    sparse = sparsify(model, model.fused_optimizer, **nested(**PLAN))
    assert sparse.partial_tables == (list(sparse.sparsifier.data_groups) if dist.get_rank() else [])


@on_ranks(2)
@pytest.mark.parametrize("dense_too", [True, False])
def test_auto_step_follows_combined_optimizers(dense_too: bool) -> None:
    """One step of the schedule for each step of the whole, fused tables alone included."""
    model = build(cells(2)["row_wise"])
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda given: torch.optim.SGD(given, lr=0.1))
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, dense] if dense_too else [model.fused_optimizer]
    )
    sparse = sparsify(model, optimizer, **nested(**PLAN, auto_step=True))
    for step in range(10):
        optimizer.zero_grad()
        model(batch(cells(2)["row_wise"], seed=step)).sum().backward()
        optimizer.step()
    assert sparse.scheduler.last_epoch == 10 and sparse.finished
    assert sparse.sparsity == pytest.approx(0.6, abs=0.01)
    sparse.detach()
