"""OptimScheduler.load_state_dict on real ranks: whole on all of them, or on none."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse import ROW, CubicDataScheduler, DataNormSparsifier, MaskEnforcer
from tests.dist.plugin import on_ranks
from tests.extras.optim.optim_loop import Steady

pytestmark = pytest.mark.dist

WORLD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.over = nn.EmbeddingBag(24, 4), nn.Linear(4, 1)

    def forward(self, step_num: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 24, (6, 3), generator=torch.Generator().manual_seed(step_num))
        return {"loss": self.over(self.table(ids)).square().sum()}


def trained(steps: int) -> Steady:
    model = DistributedDataParallel(Net())
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, ROW), norm="L2")
    sparsifier.add_model(model, include=["table"])
    curve = CubicDataScheduler(sparsifier, "sparsity_level", final=0.5, begin=1, end=6, every=1)
    parts: dict[str, Any] = {"data_sparsifier": sparsifier, "data_scheduler": curve}
    scheduler = Steady("Adagrad", {"lr": 0.1}, model, distributed=True, use_amp=False, **parts)
    MaskEnforcer(sparsifier).attach(scheduler.optimizer)
    for step_num in range(1, steps + 1):
        scheduler.step(model(step_num), None, "a", step_num, 1)
    return scheduler


def everything(scheduler: Steady) -> tuple[str, str, str]:
    state = scheduler.state_dict()
    parts = {name: state[name] for name in ("optimizer", "data_scheduler")}
    assert scheduler.data_sparsifier is not None
    return repr(parts), repr(scheduler.model.state_dict()), scheduler.data_sparsifier.fingerprint()


@on_ranks(WORLD)
@pytest.mark.parametrize("wrong", ["scheduler", "older schedule", "optimizer", "lr"])
def test_a_part_that_one_rank_refuses_changes_no_rank(wrong: str) -> None:
    state = copy.deepcopy(trained(5).state_dict())
    scheduler = trained(2)
    before = everything(scheduler)
    if dist.get_rank() == 1:
        if wrong == "scheduler":
            state["data_scheduler"]["final"] = math.nan
        elif wrong == "older schedule":
            state["data_scheduler"]["last_epoch"] -= 1
        elif wrong == "optimizer":
            del state["optimizer"]
        else:
            state["optimizer"]["param_groups"][0]["lr"] = 0.7
    with pytest.raises(ValueError, match=r"nothing was changed|nothing has changed"):
        scheduler.load_state_dict(state)
    assert everything(scheduler) == before


@on_ranks(WORLD)
def test_masks_of_plain_data_that_one_rank_refuses_change_no_rank() -> None:
    """No table has a group of ranks in which they would agree."""
    model = Net()
    sparsifier = DataNormSparsifier([("w", model.over.weight)], sparse_block_shape=(1, 1))
    sparsifier.step()
    parts: dict[str, Any] = {"data_sparsifier": sparsifier}
    scheduler = Steady("SGD", {"lr": 0.1}, model, distributed=False, use_amp=False, **parts)
    state = copy.deepcopy(scheduler.state_dict())
    state["optimizer"]["param_groups"][0]["lr"] = 0.7
    if dist.get_rank() == 1:
        del state["data_sparsifier"]["state"]["w"]["mask"]
    with pytest.raises(ValueError, match="rank 1: RuntimeError"):
        scheduler.load_state_dict(state)
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.1


@on_ranks(WORLD)
def test_a_load_that_fits_restores_every_part() -> None:
    saved, scheduler = trained(5), trained(2)
    scheduler.model.load_state_dict(saved.model.state_dict())
    scheduler.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert everything(scheduler) == everything(saved)
