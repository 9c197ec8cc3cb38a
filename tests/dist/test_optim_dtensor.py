"""OptimScheduler trains DTensor parameters, FSDP's and others, as one process trains whole ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dist_sparse.optim.gradients import clip_gradients, gradient_norm
from tests.dist.plugin import on_ranks
from tests.dist.test_optim_scheduler import plans, reference, refuses
from tests.optim.optim_loop import Clock, Log, Steady, Two, batch

WORLD, STEPS = 2, 6


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All weights, gathered. Collective."""
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def sharded() -> Two:
    """Three rows of the decoder over two ranks: uneven."""
    model, mesh = Two(), init_device_mesh("cpu", (WORLD,))
    for module in (model.encoder, model.decoder, model):
        fully_shard(module, mesh=mesh)
    return model


def made(model: nn.Module, wanted: list[dict[str, Any]]) -> list[Steady]:
    conf = {"use_amp": False, "scale": 128.0}
    return [
        Steady("SGD", {"lr": 0.2, "momentum": 0.5}, model, **{**conf, **plan}) for plan in wanted
    ]


def check_fsdp(wanted: list[dict[str, Any]]) -> None:
    model = sharded()
    schedulers = made(model, wanted)
    for step_num in range(1, STEPS + 1):
        losses = model(batch(WORLD * step_num + dist.get_rank()))
        for scheduler in schedulers:
            scheduler.step(losses, None, "a", step_num, 1)
    got = whole(model)
    for name, value in reference(wanted).items():
        assert torch.allclose(got[name], value, rtol=1e-4, atol=1e-5), name
    assert not torch.allclose(got["encoder.0.weight"], Two().encoder[0].weight, atol=1e-3)


def check_not_finite(use_amp: bool) -> None:
    """In one rank's piece alone."""
    model, log = sharded(), Log()
    (scheduler,) = made(model, [{"use_amp": use_amp}])
    before = whole(model)

    def spoil(clock: str) -> None:
        grad = model.decoder.weight.grad
        if clock == "loss_backward_time" and dist.get_rank() == 1:
            assert isinstance(grad, DTensor)
            grad.to_local()[0, 0] = math.inf

    scheduler.step(model(batch(dist.get_rank())), Clock(spoil), "a", 1, 1, log)
    assert (
        all(torch.equal(value, before[name]) for name, value in whole(model).items())
        and len(log.lines) == 1
    )
    assert scheduler.scaler is None or scheduler.scaler.get_scale() == 64.0
    scheduler.step(model(batch(dist.get_rank())), None, "a", 2, 1, log)
    assert not torch.equal(whole(model)["decoder.weight"], before["decoder.weight"])


def check_refused(_: None) -> None:
    model = sharded()
    for which in ("two losses", "other accumulation"):
        pair = made(model, plans(which))
        refuses("FSDP modules", partial(pair[0].step, model(batch(1)), None, "a", 1, 1))
        pair.clear()


def check_norm(norm_type: float) -> None:
    """A row split over ranks, a copy on each, and a plain parameter: each counts once."""
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    full = [torch.randn(5, 3), torch.randn(4), torch.randn(2, 2), torch.randn(1, 2)]
    placed = [[Shard(0)], [Replicate()], None, [Shard(0)]]
    parameters, grads = [], []
    for value, placements in zip(full, placed, strict=True):
        made_of = value if placements is None else distribute_tensor(value, mesh, placements)
        parameters.append(nn.Parameter(made_of.clone()))
        parameters[-1].grad = made_of.clone()
        grads.append(value.clone())
    pieces = frozenset(p for p, placements in zip(parameters, placed, strict=True) if placements)
    norm, any_gradient = gradient_norm(parameters, pieces, norm_type)
    assert any_gradient
    assert float(norm) == pytest.approx(float(nn.utils.get_total_norm(grads, norm_type)), rel=1e-6)
    clip_gradients(parameters, norm, 0.5)
    nn.utils.clip_grads_with_norm_([leaf(grad) for grad in grads], 0.5, norm)
    for parameter, grad in zip(parameters, grads, strict=True):
        got = (
            parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        )
        assert torch.allclose(got, grad * min(1, 0.5 / (float(norm) + 1e-6)), rtol=1e-5)
    alone = [parameters[3]]  # its one row is on rank 0
    total = gradient_norm(alone, pieces, norm_type)[0]
    assert float(total) == pytest.approx(
        float(parameters[3].grad.full_tensor().norm(norm_type)), rel=1e-5
    )
    if dist.get_rank() == 1:
        alone[0].grad = None
    assert gradient_norm(alone, pieces, norm_type)[1], "the other rank has one"


def check_no_gradient(_: None) -> None:
    """On any rank: an update of nothing, though the optimizer would make something even of
    zeros."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = nn.ParameterList([nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]))])
    scheduler = Steady("SGD", {"lr": 0.5, "weight_decay": 0.1}, model, grad_clip=None, scale=128.0)
    other = nn.Parameter(torch.ones(()))
    for step_num in (1, 2):
        scheduler.step({"loss": other * 2}, None, "a", step_num, 1)
        assert bool((model[0].full_tensor() == 1).all())
    scheduler.step({"loss": model[0].full_tensor().sum()}, None, "a", 3, 1)
    assert torch.allclose(model[0].full_tensor(), torch.tensor(1 - 0.5 * 1.1))
    assert scheduler.scaler is not None and scheduler.scaler.get_scale() == 128.0


def check_placements(_: None) -> None:
    """On one rank of two; and partial sums, which have no norm."""
    here = DeviceMesh("cpu", [0])
    parameter = nn.Parameter(distribute_tensor(torch.tensor([3.0, 4.0]), here, [Replicate()]))
    parameter.grad = distribute_tensor(torch.tensor([3.0, 4.0]), here, [Replicate()])
    norm, any_gradient = gradient_norm([parameter], frozenset([parameter]), 2.0)
    assert float(norm) == 5 and any_gradient
    both = init_device_mesh("cpu", (WORLD,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(2), both, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2), both, [Partial()])
    refuses(
        "only Shard and Replicate", partial(gradient_norm, [parameter], frozenset([parameter]), 2.0)
    )


def leaf(grad: Tensor) -> Tensor:
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    return parameter


CASES: dict[str, tuple[Callable[[Any], None], Any]] = {
    **{
        f"fsdp: {which} {conf}": (check_fsdp, plans(which, **conf))
        for which in ("whole", "part", "one loss")
        for conf in (
            {"grad_clip": 0.05},
            {"accum_grad": 3, "grad_clip": 0.05},
            {"use_amp": True, "grad_clip": 0.05},
        )
    },
    **{f"not finite, AMP {amp}": (check_not_finite, amp) for amp in (True, False)},
    "refused": (check_refused, None),
    "placements": (check_placements, None),
    "no gradient": (check_no_gradient, None),
    **{f"norm {p}": (check_norm, p) for p in (1.0, 2.0, math.inf)},
}


@on_ranks(WORLD)
@pytest.mark.parametrize("name", CASES)
def test_dtensor(name: str) -> None:
    check, argument = CASES[name]
    check(argument)
