"""A guard over ranks: an undone update has never been, on every sharding; ranks decide alike."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse import sparsify
from dist_sparse.checkpoint import host_memory
from dist_sparse.extras.guard import Guard
from tests.dist.cells import build, gathered
from tests.dist.enforcing import optimizer_of, trained_cells
from tests.dist.plugin import on_ranks
from tests.dist.test_importance import RowWiseAdagrad, learn, totals
from tests.dist.test_reshard import moves, reshard
from tests.keywords import nested

pytestmark = pytest.mark.dist

PLAN: dict[str, Any] = {"level": 0.8, "schedule": "linear", "end": 4, "every": 1, "min_rows": 0}


def trained(name: str, world: int, guarded: bool, **plan: Any) -> dict[str, Any]:
    """All state of six steps, the last update of which is at step 2: a guard has undone the one at
    step 3, or none has followed."""
    cell = trained_cells(world)[name]
    torch.manual_seed(0)
    model = build(cell)
    optimizer = optimizer_of(model, tables=lambda params: RowWiseAdagrad(params, lr=0.1))
    guard = Guard()
    more = {"guard": guard if guarded else None, **plan}
    sparse = sparsify(model, optimizer, **nested(**{**PLAN, **more}))
    if guarded:
        guard.check(0.75)
    for step in range(6):
        learn(model, optimizer, cell, step)
        if guarded:
            sparse.step()
            assert guard.check(0.75 if sparse.sparsity < 0.5 else 0.7) == (step != 3)
            if step == 3:
                # No forward has read the masks that came back; counts go on.
                counts = plan.get("score") == "frequency"
                assert ("lookups of removed rows: not known" in sparse.summary()) != counts
        elif step < 3:
            sparse.step()
    if guarded:
        assert sparse.finished and 0.3 < sparse.sparsity < 0.5
    found: dict[str, Any] = dict(gathered(model))
    shapes = {name: weight.shape for name, weight in found.items()}
    sums = totals(model, optimizer, shapes)
    found |= {f"sums of {name}": total for name, total in sums.items()}
    found["masks"] = sparse.sparsifier.audit()
    tables = sparse.sparsifier.masks.tables
    kept = tables.snapshot()
    found["counts"] = {name: (one.updates, one.removed) for name, one in kept.items()}
    sparse.detach()
    return found


@on_ranks()
@pytest.mark.parametrize(
    ("world", "name", "plan"),
    [
        (1, "two_shards", {}),
        (2, "row_wise", {"score": "frequency"}),
        (2, "column_wise", {}),
        (2, "mixed", {}),
        (2, "mixed", {"block": "col"}),
        (2, "ec_row_wise", {}),
        (4, "grid_shard", {}),
    ],
    ids=str,
)
def test_a_run_that_was_undone_is_one_that_stopped_by_hand(
    world: int, name: str, plan: dict[str, Any]
) -> None:
    one = trained(name, world, guarded=True, **plan)
    other = trained(name, world, guarded=False, **plan)
    assert one.keys() == other.keys()
    for key, value in one.items():
        same = torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key]
        assert same, key


@on_ranks(2)
@pytest.mark.parametrize("metric", [0.75, 0.7])
def test_tables_that_move_before_the_validation(metric: float) -> None:
    """Their update stays: it can't be undone where the weights are no more."""
    cell, moved = moves(2)["table_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    guard = Guard()
    sparse = sparsify(model, optimizer, **nested(guard=guard, **PLAN))
    guard.check(0.75)
    for step in range(2):
        learn(model, optimizer, cell, step)
        sparse.step()
    level = sparse.sparsity
    reshard(model, moved, 2)
    holds = metric == 0.75
    warns = not holds and dist.get_rank() == 0
    warning = pytest.warns(UserWarning, match="tables have moved")
    with warning if warns else contextlib.nullcontext():
        assert guard.check(metric) == holds
    assert sparse.sparsity == level and sparse.finished == (not holds)
    learn(model, optimizer, cell, 2)
    sparse.detach()


@on_ranks(2)
def test_ranks_that_differ_change_nothing() -> None:
    cell = trained_cells(2)["row_wise"]
    model, rank = build(cell), dist.get_rank()
    guard = Guard()
    sparse = sparsify(model, model.fused_optimizer, **nested(guard=guard, **PLAN))
    for metric, says in [
        (0.5 + rank, r"metric is 1\.5 on rank 1 and 0\.5 on rank 0"),
        (float("nan") if rank else 0.5, "rank 1: ValueError: Invalid metric=nan"),
    ]:
        with pytest.raises(ValueError, match=says):
            guard.check(metric)
        assert guard.state_dict()["best"] is None
    assert guard.check(0.5)
    sparse.detach()
    for other, says in [
        (Guard(tolerance=0.1 * rank), r"tolerance is 0\.1 on rank 1"),
        (Guard(mode="min" if rank else "max"), "mode is min on rank 1"),
    ]:
        with (
            sparsify(model, model.fused_optimizer, **nested(guard=other, **PLAN)),
            pytest.raises(ValueError, match=says),
        ):
            other.check(0.5)
    with pytest.raises(ValueError, match="guard is True on rank 1 and False on rank 0"):
        mine = nested(guard=guard if rank else None, **PLAN)
        sparsify(model, model.fused_optimizer, **mine)


@on_ranks(2)
def test_a_rank_that_is_detached_does_not_leave_the_other_waiting() -> None:
    model = build(trained_cells(2)["row_wise"])
    guard = Guard()
    sparse = sparsify(model, model.fused_optimizer, **nested(guard=guard, **PLAN))
    if dist.get_rank() == 1:
        sparse.detach()
    with pytest.raises(
        ValueError, match=r"rank 1: RuntimeError: .* needs an attached SparseTraining"
    ):
        guard.check(0.5)
    assert guard.state_dict()["best"] is None
    sparse.detach()


@on_ranks(2)
def test_a_state_of_one_rank_is_refused() -> None:
    cell = trained_cells(2)["row_wise"]
    model = build(cell)
    guard = Guard()
    sparse = sparsify(model, model.fused_optimizer, **nested(guard=guard, **PLAN))
    without = sparse.state_dict()
    guard.check(0.5)
    with pytest.raises(ValueError, match=r"guard of the state: best is 0\.5 on rank 1"):
        sparse.load_state_dict(sparse.state_dict() if dist.get_rank() else without)
    assert guard.state_dict()["best"] == 0.5
    sparse.load_state_dict(without)
    assert guard.state_dict()["best"] is None
    sparse.detach()


@on_ranks(2)
def test_warnings_that_are_errors_leave_no_rank_a_step_behind() -> None:
    """Only the first rank warns."""
    cell, moved = moves(2)["table_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    guard = Guard()
    sparse = sparsify(model, optimizer, **nested(guard=guard, **PLAN))
    warnings.filterwarnings("error", message="The guard has let|The metric fell")
    learn(model, optimizer, cell, 0)
    sparse.step()
    with pytest.raises(ValueError, match="rank 0: UserWarning: The guard has let nothing"):
        sparse.step()
    sparse.step()
    guard.check(0.75)
    sparse.step()
    reshard(model, moved, 2)
    if dist.get_rank() == 0:
        with pytest.raises(UserWarning, match="tables have moved"):
            guard.check(0.7)
    else:
        assert not guard.check(0.7)
    assert [check.holds for check in guard.validations] == [True, False]
    assert not guard.check(0.7) and sparse.finished
    sparse.detach()


@on_ranks(2)
def test_an_update_whose_copies_do_not_fit_changes_nothing() -> None:
    """One rank's machine has no memory left."""
    cell = trained_cells(2)["row_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    guard = Guard()
    sparse = sparsify(model, optimizer, **nested(guard=guard, **PLAN))
    guard.check(0.75)
    learn(model, optimizer, cell, 0)
    sparse.step()
    assert guard.check(0.75)
    learn(model, optimizer, cell, 1)
    before, weights = sparse.sparsifier.fingerprint(), gathered(model)
    left = 0 if dist.get_rank() else 1 << 60
    with (
        mock.patch.object(host_memory, "available_bytes", lambda: left),
        pytest.raises(ValueError, match=r"step\(\) was refused on every rank.* do not fit .*guard"),
    ):
        sparse.step()
    assert sparse.sparsifier.fingerprint() == before
    assert all(torch.equal(weights[name], each) for name, each in gathered(model).items())
    # With memory, the update happens, and can be undone.
    sparse.step()
    assert sparse.sparsifier.fingerprint() != before
    assert not guard.check(0.1)
    assert sparse.sparsifier.fingerprint() == before
    sparse.detach()
