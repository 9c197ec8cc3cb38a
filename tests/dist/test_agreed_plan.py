"""Every argument of sparsify() is agreed at the call: a rank that differs is named before anything
is attached. (C6)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse import sparsify
from dist_sparse.schedulers import CosineDataScheduler
from tests.dist.plugin import on_ranks
from tests.dist.refusals import is_bad, raised_by
from tests.keywords import nested

PLAN: dict[str, Any] = {"level": 0.6, "end": 6, "every": 2, "min_rows": 4}


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"user": nn.EmbeddingBag(40, 4), "item": nn.EmbeddingBag(30, 4)})
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.Adagrad(wrapped.parameters(), lr=0.1)


@on_ranks(2)
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("optimizer_state", "reset", "optimizer_state is reset on rank 1 and keep on rank 0"),
        ("norm", "L1", "norm is L1 on rank 1 and L2 on rank 0"),
        ("norm", "L2", "score is norm on rank 1 and None on rank 0"),
        ("score", "norm", "score is norm on rank 1 and None on rank 0"),
        ("scope", "global", "scope is global on rank 1 and table on rank 0"),
        ("floor", 0.3, r"floor is 0\.3 on rank 1 and None on rank 0"),
        ("floor", {"user": 0.3}, "floor is .*user.* on rank 1 and None on rank 0"),
        ("level", 0.7, r"level is 0\.7 on rank 1 and 0\.6 on rank 0"),
        ("level", {"*": 0.6, "user": 0.5}, r"level is .*user.* on rank 1 and 0\.6 on rank 0"),
        ("end", 8, "end is 8 on rank 1 and 6 on rank 0"),
        ("begin", 1, "begin is 1 on rank 1 and 0 on rank 0"),
        ("every", 3, "every is 3 on rank 1 and 2 on rank 0"),
        ("block", "1x4", "block is .*1, 4.* on rank 1 and .*ROW.* on rank 0"),
        (
            "schedule",
            "linear",
            "schedule is LinearDataScheduler on rank 1 and CubicDataScheduler on rank 0",
        ),
        ("schedule", CosineDataScheduler, "schedule is CosineDataScheduler on rank 1"),
        ("min_rows", 35, "min_rows is 35 on rank 1 and 4 on rank 0"),
        ("protect", "item", "protect is .*item.* on rank 1"),
        ("exclude", "item", "exclude is .*item.* on rank 1"),
        ("include", "user", "include is .*user.* on rank 1 and None on rank 0"),
        ("auto_step", True, "auto_step is True on rank 1 and False on rank 0"),
        ("level", None, "rank 1: ValueError: Invalid level=None"),
    ],
    ids=str,
)
def test_an_argument_of_one_rank(key: str, value: Any, says: str) -> None:
    model, optimizer = model_and_optimizer()
    before = [weight.clone() for weight in model.parameters()]
    message = raised_by(
        lambda: sparsify(model, optimizer, **nested(**(PLAN | ({key: value} if is_bad(1) else {}))))
    )
    with pytest.raises(ValueError, match=says):
        raise ValueError(message)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    sparse = sparsify(model, optimizer, **nested(**PLAN))  # nothing was left attached
    sparse.step()
    sparse.sparsifier.audit()
    sparse.detach()


@on_ranks(2)
def test_a_budget_of_one_rank() -> None:
    model, optimizer = model_and_optimizer()
    budget = {"budget": "30%" if is_bad(1) else "40%", "end": 6, "min_rows": 4}
    assert "budget is 0.3 on rank 1 and 0.4 on rank 0" in raised_by(
        lambda: sparsify(model, optimizer, **nested(**budget))
    )


@on_ranks(2)
def test_sets_of_globs_have_no_order() -> None:
    """Ranks hash strings by seeds of their own, so equal sets come in another order."""
    model, optimizer = model_and_optimizer()
    include = ["user", "item"] if is_bad(1) else ["item", "user"]
    sparse = sparsify(model, optimizer, **nested(**PLAN, include=include, protect=["item"]))
    assert list(sparse.sparsifier.data_groups) == ["user"]  # the other one is protected
    sparse.detach()
