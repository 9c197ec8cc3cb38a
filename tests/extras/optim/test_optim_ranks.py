"""OptimScheduler under DDP trains as one process with all ranks' batches, and sends no more than
needed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.groups import reset_traffic, traffic
from tests.dist.plugin import on_ranks
from tests.extras.optim.optim_loop import Log, Steady, Two, batch, copied, same

WORLD, STEPS = 2, 6


def reduces(model: DistributedDataParallel) -> list[int]:
    """Counts the all-reduces of a model from now on, in the one number that is returned."""
    count = [0]

    def hook(state, bucket):  # DDP refuses annotations that are strings
        count[0] += 1
        sent = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True).get_future()
        return sent.then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    return count


def plans(which: str, **conf: Any) -> list[dict[str, Any]]:
    """Which schedulers a case has."""
    one, two = {"updated_modules": "encoder", **conf}, {"updated_modules": "decoder", **conf}
    return {
        "whole": [conf],
        "part": [one],
        "one loss": [one, two],
        "two losses": [one, {**two, "optim_loss": "other"}],
        "other accumulation": [{**one, "accum_grad": 2}, {**two, "accum_grad": 3}],
        "one now and then": [one, {**two, "step_per_update": 3}],
    }[which]


def trained(model: nn.Module, schedulers: list[Steady], context: bool = True) -> dict[str, Tensor]:
    """On this rank's batches."""
    for step_num in range(1, STEPS + 1):
        with schedulers[0].forward_context(step_num) if context else contextlib.nullcontext():
            losses = model(batch(WORLD * step_num + dist.get_rank()))
        for scheduler in schedulers:
            scheduler.step(losses, None, "a", step_num, 1)
    return copied(getattr(model, "module", model))


def reference(wanted: list[dict[str, Any]]) -> dict[str, Tensor]:
    """One process: the gradients of a step are those of all ranks' batches, and all are taken
    before any update."""
    model = Two()
    optimizers = []
    for plan in wanted:
        module = model.get_submodule(plan.get("updated_modules", ""))
        optimizers.append(torch.optim.SGD(module.parameters(), 0.2, momentum=0.5))
    kept: list[dict[int, Tensor]] = [{} for _ in wanted]
    for step_num in range(1, STEPS + 1):
        all_losses = [model(batch(WORLD * step_num + rank)) for rank in range(WORLD)]
        due = []
        for plan, optimizer, sums in zip(wanted, optimizers, kept, strict=True):
            accum = plan.get("accum_grad", 1)
            if ((step_num - 1) // accum + 1) % plan.get("step_per_update", 1):
                continue
            mine = optimizer.param_groups[0]["params"]
            for losses in all_losses:
                loss = losses[plan.get("optim_loss", "loss")] / (accum * WORLD)
                for i, grad in enumerate(torch.autograd.grad(loss, mine, retain_graph=True)):
                    sums[i] = sums[i] + grad if i in sums else grad
            due += [(optimizer, sums, plan)] if step_num % accum == 0 else []
        for optimizer, sums, plan in due:
            mine = optimizer.param_groups[0]["params"]
            for i, parameter in enumerate(mine):
                parameter.grad = sums.pop(i)
            nn.utils.clip_grad_norm_(mine, plan.get("grad_clip", 1.0))
            optimizer.step()
            optimizer.zero_grad()
    return copied(model)


def made(model: nn.Module, wanted: list[dict[str, Any]]) -> list[Steady]:
    conf = {"distributed": True, "use_amp": False, "scale": 128.0}
    return [
        Steady("SGD", {"lr": 0.2, "momentum": 0.5}, model, **{**conf, **plan}) for plan in wanted
    ]


def check_equal(case: tuple[list[dict[str, Any]], dict[str, Any], bool]) -> None:
    """One process with the same global batch gives the same weights; ranks agree to the last
    bit."""
    wanted, options, context = case
    model = DistributedDataParallel(Two(), **options)
    got = trained(model, made(model, wanted), context)
    alone = reference(wanted)
    for name, value in alone.items():
        assert torch.allclose(got[name], value, rtol=1e-4, atol=2e-6), (name, got[name], value)
        other = [torch.empty_like(value) for _ in range(WORLD)]
        dist.all_gather(other, got[name])
        assert torch.equal(*other), f"{name} has drifted"
    assert not all(
        torch.allclose(value, got[name], atol=1e-3) for name, value in copied(Two()).items()
    )


def equal_cases() -> dict[str, Any]:
    views, static = {"gradient_as_bucket_view": True}, {"static_graph": True}
    unused = {"find_unused_parameters": True}
    cases: dict[str, Any] = {}
    for which in ("whole", "part", "one loss", "one now and then"):
        for name, conf in {"": {}, "clip": {"grad_clip": 0.05}, "accum": {"accum_grad": 3}}.items():
            cases[f"{which} {name}"] = (plans(which, **conf), {}, True)
    cases["one now and then, views"] = (plans("one now and then", grad_clip=0.05), views, True)
    cases["one now and then, no context"] = (plans("one now and then", grad_clip=0.05), {}, False)
    for name, options in {"views": views, "static": static, "unused": unused}.items():
        for which in ("whole", "part", "one loss"):
            cases[f"{which}, {name}"] = (plans(which, accum_grad=2, grad_clip=0.05), options, True)
    cases["part, views and static"] = (plans("part", accum_grad=3), {**views, **static}, True)
    cases["every second"] = (plans("whole", step_per_update=2, accum_grad=2), {}, True)
    cases["no context"] = (plans("whole", accum_grad=3), {}, False)
    cases["amp"] = (plans("whole", accum_grad=3, grad_clip=0.05, use_amp=True), {}, False)
    cases["amp, one loss"] = (
        plans("one loss", accum_grad=3, grad_clip=0.05, use_amp=True),
        {},
        False,
    )
    scales = [
        {**plan, "scale": scale}
        for plan, scale in zip(
            plans("one loss", accum_grad=3, use_amp=True), (128.0, 8.0), strict=True
        )
    ]
    cases["amp, two scales"] = (scales, {}, False)
    cases["amp, two scales, static"] = (scales[::-1], static, False)
    cases["not said to be distributed"] = (
        plans("one loss", distributed=False, grad_clip=0.05),
        {},
        True,
    )
    return cases


def check_sent(case: tuple[list[dict[str, Any]], dict[str, Any], bool, int, int]) -> None:
    """Bug 27. How many all-reduces DDP makes in 6 steps, and how many collectives are the library's
    own."""
    wanted, options, context, by_ddp, by_us = case
    model = DistributedDataParallel(Two(), **options)
    schedulers = made(model, wanted)
    count = reduces(model)
    reset_traffic()
    trained(model, schedulers, context)
    assert (count[0], traffic().collectives) == (by_ddp, by_us)


SENT: dict[str, Any] = {
    "each step": (plans("whole"), {}, True, 6, 0),
    "each third": (plans("whole", accum_grad=3), {}, True, 2, 0),
    "each third, not said to be distributed": (
        plans("whole", accum_grad=3, distributed=False),
        {},
        True,
        6,
        0,
    ),
    "each third, no context": (plans("whole", accum_grad=3), {}, False, 6, 0),
    "each third, static": (plans("whole", accum_grad=3), {"static_graph": True}, True, 3, 0),
    "each second of those due": (plans("whole", accum_grad=2, step_per_update=3), {}, True, 1, 0),
    "both": (plans("one loss", accum_grad=3), {}, True, 2, 0),
    "both, two scalers": (plans("one loss", accum_grad=3, use_amp=True), {}, False, 6, 0),
}


def check_wrapped(_: None) -> None:
    """Bug 25: modules are looked for in what DDP wraps; and the context of the forward is that of
    all of them."""
    model = DistributedDataParallel(Two())
    one, other = made(model, plans("one loss", accum_grad=2))
    held = {id(p) for p in one.optimizer.param_groups[0]["params"]}
    assert held == {id(p) for p in model.module.encoder.parameters()}
    with one.forward_context(1):
        assert not model.require_backward_grad_sync
    with other.forward_context(2):
        assert model.require_backward_grad_sync
    third = made(model, plans("one now and then"))[1]
    with one.forward_context(1), other.forward_context(1):
        assert not model.require_backward_grad_sync
    with one.forward_context(3):
        assert model.require_backward_grad_sync, (
            "the third one, which has the place of the other, updates after step 3"
        )
    del third


class Forked(nn.Module):
    """One branch on even steps of a rank, another on odd ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.over = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, left: bool) -> dict[str, Tensor]:
        y = self.over((self.left if left else self.right)(x).tanh())
        return {"loss": y.square().mean(), "other": y.mean()}


class Sometimes(nn.Module):
    """A module and a table that some forwards leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.over, self.aside = nn.Linear(4, 2), nn.Linear(4, 2)
        self.table = nn.Embedding(3, 2)

    def forward(self, x: Tensor, aside: bool) -> Tensor:
        y = self.over(x)
        return (
            (y + self.aside(x) + self.table(torch.tensor([1]))).square().mean()
            if aside
            else y.square().mean()
        )


def check_unused_and_foreign(used: tuple[tuple[bool, bool], ...]) -> None:
    """DDP remembers over accumulated steps what was used; parameters that no OptimScheduler owns
    are unchanged."""
    model, alone = Sometimes(), Sometimes()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    scheduler = Steady(
        "SGD",
        {"lr": 0.1},
        wrapped,
        distributed=True,
        accum_grad=2,
        use_amp=False,
        updated_modules="over",
    )
    optimizer = torch.optim.SGD(alone.over.parameters(), 0.1)
    for step_num, asides in enumerate(used, start=1):
        with scheduler.forward_context(step_num):
            loss = wrapped(batch(WORLD * step_num + dist.get_rank()), asides[dist.get_rank()])
        scheduler.step({"loss": loss}, None, "a", step_num, 1)
        for rank in range(WORLD):
            mine = list(alone.over.parameters())
            (alone(batch(WORLD * step_num + rank), asides[rank]) / WORLD / 2).backward(inputs=mine)
        if step_num % 2 == 0:
            nn.utils.clip_grad_norm_(alone.over.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(model.over.weight, alone.over.weight, atol=1e-6)
    assert model.aside.weight.grad is None and model.table.weight.grad is None


def check_unused(_: None) -> None:
    """What is unused on one rank has the other one's half gradient; what is unused on both is not
    updated."""
    model, alone = Forked(), Forked()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    conf: dict[str, Any] = {"distributed": True, "use_amp": False, "grad_clip": 0.05}
    pair = [
        Steady("Adam", {"lr": 0.1}, wrapped, updated_modules=["left", "right"], **conf),
        Steady("Adam", {"lr": 0.1}, wrapped, updated_modules="over", **conf),
    ]
    optimizers = [
        torch.optim.Adam([*alone.left.parameters(), *alone.right.parameters()], 0.1),
        torch.optim.Adam(alone.over.parameters(), 0.1),
    ]
    for step_num, branches in enumerate(
        [(True, False), (True, True), (False, False), (False, True)], start=1
    ):
        losses = wrapped(batch(WORLD * step_num + dist.get_rank()), branches[dist.get_rank()])
        for scheduler in pair:
            scheduler.step(losses, None, "a", step_num, 1)
        theirs = [alone(batch(WORLD * step_num + rank), branches[rank]) for rank in range(WORLD)]
        for optimizer in optimizers:
            mine = optimizer.param_groups[0]["params"]
            sum(losses["loss"] / WORLD for losses in theirs).backward(
                inputs=mine, retain_graph=True
            )
        for optimizer in optimizers:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in copied(alone).items():
        assert torch.allclose(copied(model)[name], value, rtol=1e-4, atol=1e-5), name


def check_not_finite(case: tuple[str, bool]) -> None:
    """A NaN in one rank's loss: no rank updates what it reaches, and scales stay alike."""
    which, use_amp = case
    model = DistributedDataParallel(Two())
    schedulers = made(model, plans(which, use_amp=use_amp))
    trained(model, schedulers)
    before, log = copied(model.module), Log()
    losses = {
        name: loss * (math.nan if dist.get_rank() else 1) for name, loss in model(batch(1)).items()
    }
    for scheduler in schedulers:
        scheduler.step(losses, None, "a", STEPS + 1, 1, log)
    assert same(before, copied(model.module)) and len(log.lines) == len(schedulers)
    if use_amp:
        assert [s.scaler.get_scale() for s in schedulers] == [64.0] * len(schedulers)  # type: ignore[union-attr]
    assert not same(before, trained(model, schedulers))


def refuses(said: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError("nothing was raised")


def check_refused(_: None) -> None:
    """DDP averages one backward per forward. Nothing changes, and each can have a forward of its
    own."""
    refuses(
        "does not average gradients", lambda: Steady("SGD", {"lr": 0.1}, Two(), distributed=True)
    )
    model = DistributedDataParallel(Two())
    before = copied(model.module)
    for which in ("two losses", "other accumulation"):
        losses, pair = model(batch(dist.get_rank())), made(model, plans(which))
        for scheduler in pair:
            refuses(
                "Give them the same loss tensor", partial(scheduler.step, losses, None, "a", 1, 1)
            )
    assert same(before, copied(model.module)) and model.module.decoder.weight.grad is None
    pair = made(model, plans("two losses"))
    for scheduler, name in zip(pair, ("loss", "other"), strict=True):
        losses = model(batch(dist.get_rank()))
        scheduler.step({name: losses[name]}, None, "a", 1, 1)
    after = copied(model.module)
    assert not any(torch.equal(value, before[name]) for name, value in after.items())
    for value in after.values():
        other = [torch.empty_like(value) for _ in range(WORLD)]
        dist.all_gather(other, value)
        assert torch.equal(*other)


def check_foreign(views: bool) -> None:
    """A backward leaves the gradients of other parameters, and of OptimSchedulers stepped later,
    unchanged."""
    model = DistributedDataParallel(Two(), gradient_as_bucket_view=views)
    late_plan = {"updated_modules": "decoder", "optim_loss": "late", "accum_grad": 2}
    mine, other = made(model, [{"updated_modules": "encoder"}, late_plan])
    late = dict(model(batch(dist.get_rank())))
    other.step({"late": late["loss"]}, None, "b", 1, 1)
    kept = model.module.decoder.weight.grad
    assert kept is not None
    kept = kept.clone()
    mine.step(model(batch(5 + dist.get_rank())), None, "a", 1, 1)
    assert torch.equal(model.module.decoder.weight.grad, kept)


def check_ignored(_: None) -> None:
    """What DDP leaves to its rank keeps the gradient of that rank; the rest is averaged."""
    model, alone = Two(), Two()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["decoder.weight"])
    wrapped = DistributedDataParallel(model)
    pair = made(wrapped, plans("one loss"))
    losses = wrapped(batch(dist.get_rank()))
    for scheduler in pair:
        scheduler.step(losses, None, "a", 1, 1)
    of_rank = [alone(batch(rank)) for rank in range(WORLD)]
    for name, parameter in alone.named_parameters():
        grads = [
            torch.autograd.grad(losses["loss"], parameter, retain_graph=True)[0]
            for losses in of_rank
        ]
        grad = grads[dist.get_rank()] if name == "decoder.weight" else sum(grads) / WORLD
        assert torch.allclose(model.get_parameter(name), parameter - 0.2 * grad, atol=1e-6), name


CASES: dict[str, tuple[Callable[[Any], None], Any]] = {
    "unused, foreign: in one step": (check_unused_and_foreign, ((True, True), (False, False)) * 2),
    "unused, foreign: on one rank": (check_unused_and_foreign, ((False, True), (False, False)) * 2),
    "unused, foreign: at the end": (check_unused_and_foreign, ((False, False), (True, False)) * 2),
    **{f"equal: {name}": (check_equal, case) for name, case in equal_cases().items()},
    **{f"sent: {name}": (check_sent, case) for name, case in SENT.items()},
    "wrapped": (check_wrapped, None),
    "unused": (check_unused, None),
    **{
        f"not finite: {which}, {'amp' if amp else 'no amp'}": (check_not_finite, (which, amp))
        for which in ("whole", "one loss")
        for amp in (True, False)
    },
    "foreign": (check_foreign, False),
    "foreign, views": (check_foreign, True),
    "ignored": (check_ignored, None),
    "refused": (check_refused, None),
}


@on_ranks(WORLD)
@pytest.mark.parametrize("name", CASES)
def test_ddp(name: str) -> None:
    check, argument = CASES[name]
    check(argument)
