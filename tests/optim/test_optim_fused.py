"""Fused tables, which TorchRec updates inside the backward, next to other modules: one process, a
real model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.optim.optim_loop import Steady

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


def same(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(one, other, strict=True)]


def steps(model: DistributedModelParallel, schedulers: list[Steady], first: int, last: int) -> None:
    for step_num in range(first, last + 1):
        with schedulers[0].forward_context(step_num, 1):
            losses = model(ids_of(step_num))
        for scheduler in schedulers:
            scheduler.step(losses, None, "a", step_num, 1)


@pytest.mark.parametrize("order", [1, -1])
def test_the_tables_take_the_learning_rate_of_their_owner(
    model: DistributedModelParallel, order: int
) -> None:
    """The first one to be stepped runs the backward, which updates the other one's tables."""
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
    pair = [made(model, "over", lr=0.1), made(model, "tables")][::order]
    groups = [{"params": plain.tables.parameters()}, {"params": plain.over.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.125)
    for step_num in (1, 2, 3):
        optimizer.zero_grad()
        plain(ids_of(step_num))["loss"].backward()
        optimizer.step()
    steps(model, pair, 1, 3)
    table, over = weights(model)
    assert torch.allclose(table, plain.tables.embedding_bags["item"].weight, atol=1e-6)
    assert torch.allclose(over, plain.over.weight, atol=1e-6)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"step_per_update": 2}, "is not due at step_num=1"),
        ({"optim_loss": "third"}, "does not use this loss"),
        ({"optim_loss": "other"}, "must be one and the same tensor"),
    ],
)
def test_a_backward_never_updates_tables_of_another_optimizer_in_passing(
    model: DistributedModelParallel, theirs: dict[str, Any], said: str
) -> None:
    mine, other = made(model, "over"), made(model, "tables", **theirs)
    before = weights(model)
    with mine.forward_context(1, 1):
        losses = model(ids_of(1))
    with pytest.raises(ValueError, match=said):
        mine.step(losses, None, "a", 1, 1)
    assert same(before, weights(model)) == [True, True]
    del other
    steps(model, [mine], 1, 1)
    assert same(before, weights(model)) == [False, False]


def test_a_new_owner_of_the_tables_replaces_the_old_one(model: DistributedModelParallel) -> None:
    old, new = made(model, None, lr=0.5), made(model, None, lr=0.25)
    steps(model, [new], 1, 2)
    assert [group["lr"] for group in model.fused_optimizer.param_groups] == [0.25]
    assert old.get_lr() == 0.5


@pytest.mark.parametrize("numbers", [None, (1, 1), (2, 2)])
def test_a_forward_outside_of_its_context_is_refused(
    model: DistributedModelParallel, numbers: tuple[int, int] | None
) -> None:
    """Or in that of another step or epoch: the tables would take a wrong learning rate."""
    schedulers = [made(model, "over"), made(model, "tables")]
    steps(model, schedulers, 1, 1)
    before = weights(model)
    with schedulers[0].forward_context(*numbers) if numbers else nullcontext():
        losses = model(ids_of(2))
    for scheduler in schedulers:
        with pytest.raises(
            ValueError, match=r"was not in forward_context\(\). Run the model inside"
        ):
            scheduler.step(losses, None, "a", 2, 1)
    assert same(before, weights(model)) == [True, True]
    with (
        pytest.raises(ValueError, match="Invalid epoch_num=None"),
        schedulers[0].forward_context(2),
    ):
        pass
    steps(model, schedulers, 2, 2)
    assert same(before, weights(model)) == [False, False]


@pytest.mark.parametrize(
    ("conf", "names", "said"),
    [
        ({"use_amp": True}, "over", r"use_amp=True with float16.*amp_dtype=torch.bfloat16"),
        ({"accum_grad": 2}, "over", r"Invalid accum_grad=2.*larger batches.*dense kernel"),
        ({"grad_clip": 1.0}, "tables", r"Invalid grad_clip=1.0.*gradient_clipping"),
    ],
)
def test_arguments_that_fused_tables_do_not_allow(
    model: DistributedModelParallel, conf: dict[str, Any], names: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        made(model, names, **conf)
    assert "updated inside every backward" in str(raised.value)


def test_arguments_that_fused_tables_allow(model: DistributedModelParallel) -> None:
    made(model, "tables", grad_clip=math.inf)
    made(model, "tables", use_amp=True, amp_dtype=torch.bfloat16)
