"""Fused tables, which TorchRec updates inside the backward, next to modules that an OptimScheduler
updates: one process, a real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.extras.optim.optim_loop import Steady

ROWS, DIM = 1000, 16


class Net(nn.Module):
    """One table and a layer over it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingBagConfig(
            name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["id"]
        )
        self.tables = EmbeddingBagCollection(tables=[config])
        self.over = nn.Linear(DIM, 1)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        y = self.over(self.tables(ids).values())
        return {"loss": y.square().mean(), "other": (y - 1).abs().mean()}


def ids_of(step_num: int) -> KeyedJaggedTensor:
    values = torch.randint(ROWS, (6,), generator=torch.Generator().manual_seed(step_num))
    return KeyedJaggedTensor(["id"], values, lengths=torch.ones(6, dtype=torch.int64))


@pytest.fixture
def model() -> Iterator[DistributedModelParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = Net()
        apply_optimizer_in_backward(torch.optim.SGD, net.tables.parameters(), {"lr": 7.0})
        yield DistributedModelParallel(net, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def weights(model: DistributedModelParallel) -> list[Tensor]:
    state = model.state_dict()
    table = next(value for key, value in state.items() if "item" in key)
    table = table.local_shards()[0].tensor if hasattr(table, "local_shards") else table
    over = next(value for key, value in state.items() if key.endswith("over.weight"))
    return [table.clone(), over.clone()]


def made(model: nn.Module, names: Any, **more: Any) -> Steady:
    conf = {"use_amp": False, "grad_clip": None, **more}
    return Steady("SGD", {"lr": conf.pop("lr", 0.125)}, model, updated_modules=names, **conf)


def steps(model: DistributedModelParallel, schedulers: list[Steady], first: int, last: int) -> None:
    for step_num in range(first, last + 1):
        with schedulers[0].forward_context(step_num, 1):
            losses = model(ids_of(step_num))
        for scheduler in schedulers:
            scheduler.step(losses, None, "a", step_num, 1)


@pytest.mark.parametrize("names", [None, "over"])
def test_the_tables_keep_their_optimizer(model: DistributedModelParallel, names: Any) -> None:
    """And its learning rate, which a scheduler of torch's sets."""
    plain = Net()
    with torch.no_grad():
        for parameter, value in zip(
            (plain.tables.embedding_bags["item"].weight, plain.over.weight),
            weights(model),
            strict=True,
        ):
            parameter.copy_(value)
        plain.over.bias.copy_(
            next(value for name, value in model.named_parameters() if name.endswith("over.bias"))
        )
    groups = [
        {"params": plain.tables.parameters(), "lr": 0.125},
        {"params": plain.over.parameters(), "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups)
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.125
    model.fused_optimizer.step()
    for step_num in (1, 2, 3):
        optimizer.zero_grad()
        plain(ids_of(step_num))["loss"].backward()
        optimizer.step()
    steps(model, [made(model, names, lr=0.1)], 1, 3)
    table, over = weights(model)
    assert torch.allclose(table, plain.tables.embedding_bags["item"].weight, atol=1e-6)
    assert torch.allclose(over, plain.over.weight, atol=1e-6)


@pytest.mark.parametrize(
    ("conf", "names", "said"),
    [
        ({"use_amp": True}, "over", r"use_amp=True with float16.*amp_dtype=torch.bfloat16"),
        ({"accum_grad": 2}, "over", r"Invalid accum_grad=2.*larger batches"),
        ({}, "tables", r"\['tables'\] have no parameters, or only fused tables"),
    ],
)
def test_arguments_that_fused_tables_do_not_allow(
    model: DistributedModelParallel, conf: dict[str, Any], names: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        made(model, names, **conf)


def test_fused_tables_refuse_a_scaler_that_is_assigned(model: DistributedModelParallel) -> None:
    scheduler = made(model, "over")
    with pytest.raises(ValueError, match=r"Invalid scaler: every backward updates the model's fus"):
        scheduler.scaler = torch.amp.GradScaler("cpu")
    scheduler.scaler = torch.amp.GradScaler("cpu", enabled=False)


def test_arguments_that_fused_tables_allow(model: DistributedModelParallel) -> None:
    made(model, "over", grad_clip=1.0)
    made(model, None, use_amp=True, amp_dtype=torch.bfloat16)
