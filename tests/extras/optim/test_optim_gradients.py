"""Exact steps with sparse, empty and missing gradients, frozen parameters and mixed precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse.extras.optim.gradients import clip_gradients, gradient_norm
from tests.extras.optim.optim_loop import Log, Steady, Two, batch, copied, same, train


class Words(nn.Module):
    """A table with sparse gradients, or the same with dense ones, and a layer over it."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4, sparse=sparse)
        self.over = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"loss": self.over(self.table(ids)).float().square().sum()}


def fed(model: Words, schedulers: list[Any], steps: int) -> dict[str, Tensor]:
    """Ids that repeat within a batch, so that gradients are not coalesced."""
    for step_num in range(1, steps + 1):
        ids = torch.randint(0, 6, (8,), generator=torch.Generator().manual_seed(step_num))
        with schedulers[0].forward_context(step_num):
            losses = model(ids)
        for scheduler in schedulers:
            scheduler.step(losses, None, "a", step_num, 1)
    return copied(model)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("use_amp", [True, False])
@pytest.mark.parametrize("accum_grad", [1, 3])
def test_sparse_gradients_are_clipped_as_dense_ones(
    accum_grad: int, use_amp: bool, norm_type: float
) -> None:
    conf = {
        "accum_grad": accum_grad,
        "use_amp": use_amp,
        "grad_clip": 0.1,
        "grad_norm_type": norm_type,
        "scale": 128.0,
    }
    weights = []
    for sparse in (True, False):
        model = Words(sparse)
        weights.append(fed(model, [Steady("SGD", {"lr": 0.5}, model, **conf)], 6))
    assert all(
        torch.allclose(weights[0][name], value, rtol=1e-5, atol=1e-6)
        for name, value in weights[1].items()
    )
    unclipped = Words(True)
    conf["grad_clip"] = None
    assert not same(weights[0], fed(unclipped, [Steady("SGD", {"lr": 0.5}, unclipped, **conf)], 6))


@pytest.mark.parametrize("use_amp", [True, False])
def test_sparse_adam_beside_adam(use_amp: bool) -> None:
    """On the first step both are Adam, on the rows of the batch and on all of the layer."""
    model, plain = Words(True), Words(False)
    conf: dict[str, Any] = {"use_amp": use_amp, "grad_clip": None, "scale": 128.0}
    pair = [
        Steady("SparseAdam", {"lr": 0.1}, model, updated_modules="table", **conf),
        Steady("Adam", {"lr": 0.1}, model, updated_modules="over", **conf),
    ]
    got, wanted = fed(model, pair, 1), fed(plain, [Steady("Adam", {"lr": 0.1}, plain, **conf)], 1)
    assert all(torch.allclose(got[name], value, atol=1e-6) for name, value in wanted.items())


@pytest.mark.parametrize("use_amp", [True, False])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_batch_without_ids(sparse: bool, norm_type: float, use_amp: bool) -> None:
    """A sparse gradient without a row has no largest value."""
    model, log = Words(sparse), Log()
    scheduler = Steady(
        "SGD",
        {"lr": 0.1},
        model,
        updated_modules="table",
        grad_norm_type=norm_type,
        use_amp=use_amp,
    )
    before = copied(model)
    scheduler.step(model(torch.tensor([], dtype=torch.int64)), None, "a", 1, 1, log)
    assert same(before, copied(model)) and log.lines == []
    assert not same(before, fed(model, [scheduler], 2))


def test_a_sparse_gradient_that_is_not_finite() -> None:
    model, log = Words(True), Log()
    scheduler = Steady("SGD", {"lr": 0.1}, model)
    before = copied(model)
    with torch.no_grad():
        model.over.weight[0, 2] = math.inf
    scheduler.step(model(torch.tensor([1, 1])), None, "a", 1, 1, log)
    assert torch.equal(model.table.weight, before["table.weight"]) and len(log.lines) == 1


@pytest.mark.parametrize("use_amp", [True, False])
def test_frozen_parameters(use_amp: bool) -> None:
    model, wanted = Two(), Two()
    for each in (model, wanted):
        each.encoder.requires_grad_(False)
    before = copied(model)
    scheduler = Steady("Adam", {"lr": 0.1}, model, use_amp=use_amp)
    got = train(model, [scheduler], 3)
    alone = Steady("Adam", {"lr": 0.1}, wanted, updated_modules="decoder", use_amp=use_amp)
    assert same(got, train(wanted, [alone], 3))
    assert torch.equal(got["encoder.0.weight"], before["encoder.0.weight"])
    model.encoder.requires_grad_(True)
    model.decoder.requires_grad_(False)
    assert not same(train(model, [scheduler], 4, first=4), got)


def test_one_of_two_is_frozen() -> None:
    model = Two()
    pair = [
        Steady("SGD", {"lr": 0.1}, model, updated_modules=name) for name in ("encoder", "decoder")
    ]
    model.encoder.requires_grad_(False)
    before = copied(model)
    got = train(model, pair, 2)
    assert [name for name in got if torch.equal(got[name], before[name])] == [
        "encoder.0.weight",
        "encoder.0.bias",
    ]


def test_the_scale_grows_and_shrinks_as_in_torch() -> None:
    model = Two()
    scheduler = Steady("SGD", {"lr": 1e-3}, model)
    assert scheduler.scaler is not None
    scheduler.scaler.load_state_dict({**scheduler.scaler.state_dict(), "growth_interval": 2})
    seen = []
    for step_num in range(1, 8):
        bad = math.nan if step_num == 4 else 1.0
        scheduler.step({"loss": model(batch(step_num))["loss"] * bad}, None, "a", step_num, 1)
        seen.append(scheduler.scaler.get_scale() / 2**16)
    assert seen == [1, 2, 2, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "optim", [("Adam", {"fused": True}), ("Adagrad", {}), ("SGD", {"foreach": True})]
)
def test_optimizers_that_know_of_amp(optim: tuple[str, dict[str, Any]]) -> None:
    """GradScaler hands the scale and found_inf to fused optimizers."""
    name, conf = optim
    model, slow = Two(), Two()
    got = train(model, [Steady(name, {"lr": 0.1, **conf}, model)], 3)
    wanted = train(slow, [Steady(name, {"lr": 0.1, "foreach": False}, slow)], 3)
    assert all(
        torch.allclose(got[key], value, rtol=1e-4, atol=1e-5) for key, value in wanted.items()
    )


def test_the_context_of_the_forward() -> None:
    model = Two()
    for conf, wanted in [
        ({}, torch.float16),
        ({"amp_dtype": torch.bfloat16}, torch.bfloat16),
        ({"use_amp": False}, None),
    ]:
        scheduler = Steady("SGD", {"lr": 0.1}, model, **conf)
        with scheduler.forward_context(1):
            assert torch.is_autocast_enabled("cpu") == (wanted is not None)
            assert model.decoder(torch.ones(1, 6)).dtype == (wanted or torch.float32)
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(KeyError, match="mine"), scheduler.forward_context(1):
        raise KeyError("mine")


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_norms_are_torchs(norm_type: float) -> None:
    parameters = list(Two().parameters())
    for i, parameter in enumerate(parameters[:-1]):
        parameter.grad = torch.randn_like(parameter) * (i + 1)
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = gradient_norm(parameters, norm_type)
    assert torch.equal(norm, nn.utils.get_total_norm(grads, norm_type))
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
    clip_gradients(parameters, norm, 0.1)
    nn.utils.clip_grad_norm_(copies, 0.1, norm_type)
    for copy, parameter in zip(copies[:-1], parameters[:-1], strict=True):
        assert (
            parameter.grad is not None
            and copy.grad is not None
            and torch.equal(parameter.grad, copy.grad)
        )
