"""Several OptimSchedulers of one model, in one process.

The reference takes all gradients at the weights of the forward, each loss's for its own parameters,
then steps.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse.extras.optim import OptimScheduler
from tests.extras.optim.optim_loop import Log, Steady, Two, batch, copied, same, train

LR = 0.1


def over(model: nn.Module, names: Any, **more: Any) -> Steady:
    conf = {"use_amp": False, "grad_clip": 0.05, **more}
    return Steady(conf.pop("optim_type", "SGD"), {"lr": LR}, model, updated_modules=names, **conf)


def reference(plans: Sequence[dict[str, Any]], steps: int) -> dict[str, Tensor]:
    """``plans``: module, loss, accum, every. Gradients of a step are all taken before any
    update."""
    model = Two()
    optimizers = [
        torch.optim.SGD(model.get_submodule(plan["module"]).parameters(), LR) for plan in plans
    ]
    for step_num in range(1, steps + 1):
        losses = model(batch(step_num))
        due = []
        for plan, optimizer in zip(plans, optimizers, strict=True):
            accum = plan.get("accum", 1)
            if ((step_num - 1) // accum + 1) % plan.get("every", 1) == 0:
                mine = optimizer.param_groups[0]["params"]
                (losses[plan.get("loss", "loss")] / accum).backward(inputs=mine, retain_graph=True)
                due += [optimizer] if step_num % accum == 0 else []
        for optimizer in due:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return copied(model)


def close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(
        torch.allclose(value, got[name], rtol=1e-5, atol=1e-7) for name, value in wanted.items()
    )


PLANS: dict[str, list[dict[str, Any]]] = {
    "one loss": [{"module": "encoder"}, {"module": "decoder"}],
    "two losses": [{"module": "encoder"}, {"module": "decoder", "loss": "other"}],
    "three": [{"module": "encoder.0"}, {"module": "decoder", "loss": "other"}, {"module": "norm"}],
    "other accumulation": [{"module": "encoder", "accum": 2}, {"module": "decoder", "accum": 3}],
    "one accumulates": [{"module": "encoder", "accum": 3}, {"module": "decoder"}],
    "other accumulation and loss": [
        {"module": "encoder", "accum": 2},
        {"module": "decoder", "loss": "other"},
    ],
    "both accumulate": [{"module": "encoder", "accum": 2}, {"module": "decoder", "accum": 2}],
    "not always due": [
        {"module": "encoder", "every": 2},
        {"module": "decoder", "every": 3, "loss": "other"},
    ],
    "one not always due": [{"module": "encoder"}, {"module": "decoder", "every": 2}],
    "all of it": [
        {"module": "encoder", "accum": 2, "every": 2},
        {"module": "decoder", "accum": 3, "every": 1, "loss": "other"},
    ],
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "plans", [plan for name, plan in PLANS.items() if name != "three"], ids=str
)
def test_two(plans: list[dict[str, Any]], turned: bool) -> None:
    model = Two()
    schedulers = [
        over(
            model,
            plan["module"],
            optim_loss=plan.get("loss"),
            accum_grad=plan.get("accum", 1),
            step_per_update=plan.get("every", 1),
        )
        for plan in plans
    ]
    got = train(model, schedulers[::-1] if turned else schedulers, 12)
    assert close(got, reference(plans, 12))
    assert not close(got, copied(Two()))


def test_three_and_a_module_without_an_optimizer() -> None:
    model = Two()
    model.norm = nn.Linear(2, 2)
    frozen = copied(model.encoder[0])
    del frozen["weight"]
    model.encoder[0].bias.requires_grad_(False)
    schedulers = [
        over(model, "encoder.0"),
        over(model, "decoder", optim_loss="other"),
        Steady("Adam", {"lr": LR}, model, updated_modules="norm", use_amp=False, optim_loss="loss"),
    ]
    train(model, schedulers, 3)
    assert torch.equal(model.encoder[0].bias, frozen["bias"])
    assert all(p.grad is None for p in model.parameters())
    assert [scheduler.asked for scheduler in schedulers] == [[(1, 1), (2, 1), (3, 1)]] * 3


@pytest.mark.parametrize("use_amp", [True, False])
def test_parameters_in_common_share_no_forward(use_amp: bool) -> None:
    """One that shares parameters has no part in another's steps, and torch refuses a second
    backward."""
    model, alone = Two(), Two()
    first, second = over(model, None, use_amp=use_amp), over(model, "decoder", use_amp=use_amp)
    with first.forward_context(1):
        losses = model(batch(1))
    first.step(losses, None, "a", 1, 1)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        second.step(losses, None, "b", 1, 1)
    assert same(copied(model), train(alone, [over(alone, None, use_amp=use_amp)], 1))
    before = copied(model)
    second.step(model(batch(2)), None, "b", 2, 1)
    assert [
        name.split(".")[0]
        for name, value in copied(model).items()
        if not torch.equal(value, before[name])
    ] == [
        "decoder",
        "decoder",
    ]


def test_parameters_in_common_do_not_accumulate() -> None:
    model = Two()
    schedulers = [over(model, None, accum_grad=2), over(model, "decoder")]
    before = copied(model)
    schedulers[0].step(model(batch(1)), None, "a", 1, 1)
    grad = model.decoder.weight.grad
    assert grad is not None
    grad = grad.clone()
    with pytest.raises(
        ValueError, match="has accumulated gradients in parameters that this one updates too"
    ):
        schedulers[1].step(model(batch(1)), None, "a", 1, 1)
    assert same(before, copied(model)) and torch.equal(grad, model.decoder.weight.grad)  # type: ignore[arg-type]
    train(model, schedulers[:1], 2, first=2)
    schedulers[1].step(model(batch(3)), None, "a", 3, 1)


@pytest.mark.parametrize("accum_grad", [1, 2])
def test_scales_that_differ_share_one_backward(accum_grad: int) -> None:
    """Neither scaler sees the other's scale."""
    results = []
    for scales in ((128.0, 128.0), (128.0, 8.0), (8.0, 128.0)):
        model, served = Two(), list[Any]()
        model.decoder.weight.register_hook(served.append)
        conf = {"use_amp": True, "accum_grad": accum_grad}
        pair = [
            over(model, name, scale=scale, **conf)
            for name, scale in zip(("encoder", "decoder"), scales, strict=True)
        ]
        results.append(train(model, pair, 4))
        assert len(served) == 4
        assert [scheduler.scaler.get_scale() for scheduler in pair] == list(scales)  # type: ignore[union-attr]
    assert all(
        torch.allclose(value, other[name], atol=1e-3)
        for other in results[1:]
        for name, value in results[0].items()
    )
    assert not same(results[0], copied(Two()))


def test_a_scaler_that_has_backed_off_is_not_overruled() -> None:
    """Its gradients would overflow at the scale of the other one, again and again."""
    model, log = Two(), Log()
    conf = {"use_amp": True, "grad_norm_type": float("inf")}
    pair = [
        over(model, "encoder", scale=2.0**20, **conf),
        over(model, "decoder", scale=1.0, **conf),
    ]
    before = copied(model)
    losses = {"loss": model.decoder(model.encoder(batch(1))).sum() * 1e36}
    for scheduler in pair:
        scheduler.step(losses, None, "a", 1, 1, log)
    assert same(
        copied(model.encoder), {k[8:]: v for k, v in before.items() if k.startswith("encoder.")}
    )
    assert not torch.equal(model.decoder.weight, before["decoder.weight"])
    assert [scheduler.scaler.get_scale() for scheduler in pair] == [2.0**19, 1.0]  # type: ignore[union-attr]
    assert len(log.lines) == 1


@pytest.mark.parametrize("accum_grad", [1, 2])
def test_a_dict_each(accum_grad: int) -> None:
    """Both losses are called "loss", each of its own forward."""
    got, wanted = Two(), Two()
    served: list[Any] = []
    got.encoder[0].weight.register_hook(served.append)
    schedulers = [
        over(got, "encoder", accum_grad=accum_grad),
        over(got, "decoder", accum_grad=accum_grad),
    ]
    optimizers = [
        torch.optim.SGD(wanted.get_submodule(name).parameters(), LR)
        for name in ("encoder", "decoder")
    ]
    for step_num in range(1, 5):
        for i, (scheduler, optimizer) in enumerate(zip(schedulers, optimizers, strict=True)):
            scheduler.step(got(batch(10 * i + step_num)), None, "a", step_num, 1)
            mine = optimizer.param_groups[0]["params"]
            (wanted(batch(10 * i + step_num))["loss"] / accum_grad).backward(inputs=mine)
            if step_num % accum_grad == 0:
                nn.utils.clip_grad_norm_(mine, 0.05)
                optimizer.step()
                optimizer.zero_grad()
    assert close(copied(got), copied(wanted)) and len(served) == 8


@pytest.mark.parametrize("names", [("loss", "loss"), ("loss", "other")])
@pytest.mark.parametrize("turned", [False, True])
def test_one_that_is_stepped_now_and_then(turned: bool, names: tuple[str, str]) -> None:
    """The first one's backward also computes the second one's gradients, whether or not it is
    stepped."""
    got, wanted = Two(), Two()
    schedulers = [
        over(got, "encoder", optim_loss=names[0]),
        over(got, "decoder", optim_loss=names[1]),
    ]
    optimizers = [
        torch.optim.SGD(wanted.get_submodule(name).parameters(), LR)
        for name in ("encoder", "decoder")
    ]
    for step_num in range(1, 10):
        now = schedulers if step_num % 3 == 0 else schedulers[:1]
        losses, theirs = got(batch(step_num)), wanted(batch(step_num))
        for scheduler in now[::-1] if turned else now:
            scheduler.step(losses, None, "a", step_num, 1)
        for name, optimizer in zip(names, optimizers[: len(now)], strict=False):
            theirs[name].backward(inputs=optimizer.param_groups[0]["params"], retain_graph=True)
        for optimizer in optimizers[: len(now)]:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
            optimizer.step()
            optimizer.zero_grad()
    assert close(copied(got), copied(wanted))


def test_a_replaced_one_gets_no_gradients() -> None:
    """First the decoder alone, then the whole model."""
    model, alone = Two(), Two()
    first, second = over(model, "decoder"), over(model, None)
    train(model, [first], 2)
    train(alone, [over(alone, "decoder")], 2)
    taken: list[Any] = []
    model.decoder.weight.register_hook(lambda grad: taken.append(grad.clone()))
    got = train(model, [second], 5, first=3)
    later = over(alone, None)
    assert close(got, train(alone, [later], 5, first=3))
    assert len(taken) == 3, "no gradients are computed for the one that was replaced"


def test_a_load_drops_gradients_taken_for_it() -> None:
    """Back to step 2 in the same process, after both were at step 3."""
    model = Two()
    pair = [over(model, "encoder", optim_type="Adam"), over(model, "decoder")]
    train(model, pair, 2)
    weights, states = copied(model), [scheduler.state_dict() for scheduler in pair]
    states = torch.utils._pytree.tree_map(
        lambda v: v.clone() if isinstance(v, Tensor) else v, states
    )
    wanted = train(model, pair, 3, first=3)
    losses = model(batch(4))
    pair[0].step(losses, None, "a", 4, 1)  # and the second is never stepped
    model.load_state_dict(weights)
    for scheduler, state in zip(pair, states, strict=True):
        scheduler.load_state_dict(state)
    assert same(train(model, pair, 3, first=3), wanted)


def test_the_dead_are_forgotten() -> None:
    model = Two()
    first, second = over(model, "encoder"), over(model, "decoder")
    dead = weakref.ref(second)
    del second
    gc.collect()
    assert dead() is None
    lone = Two()
    assert same(train(model, [first], 3), train(lone, [over(lone, "encoder")], 3))
    model_ref = weakref.ref(model)
    del model, first
    gc.collect()
    assert model_ref() is None


@pytest.mark.parametrize("names", [[None], ["encoder", "decoder"]])
def test_leaves_beside_the_model_accumulate(names: list[Any]) -> None:
    """For example a loss with weights, which another optimizer steps."""
    model, weight = Two(), nn.Parameter(torch.tensor(2.0))
    schedulers = [over(model, name) for name in names]
    loss = model(batch(1))["loss"]
    for scheduler in schedulers:
        scheduler.step({"loss": loss}, None, "a", 1, 1)
    assert weight.grad is None
    losses = {"loss": weight * model(batch(2))["loss"]}
    for scheduler in schedulers:
        scheduler.step(losses, None, "a", 2, 1)
    assert weight.grad is not None and weight.grad.item() == pytest.approx(
        losses["loss"].item() / 2
    )


def test_models_do_not_mix() -> None:
    one, other = Two(), Two(seed=1)
    schedulers: list[OptimScheduler] = [over(one, None), over(other, None)]
    before = copied(other)
    train(one, schedulers[:1], 2)
    assert same(before, copied(other))


def test_scalers_are_independent() -> None:
    """One loss overflows: the other optimizer steps, and its scale is unchanged."""
    model = Two()
    one, other = (
        over(model, "encoder", use_amp=True),
        over(model, "decoder", use_amp=True, optim_loss="other"),
    )
    train(model, [one, other], 2)
    encoder, decoder = copied(model.encoder), copied(model.decoder)
    losses = model(batch(3))
    for scheduler in (one, other):
        scheduler.step({**losses, "loss": losses["loss"] * float("inf")}, None, "a", 3, 1)
    assert same(encoder, copied(model.encoder)) and not same(decoder, copied(model.decoder))
    assert [scheduler.scaler.get_scale() for scheduler in (one, other)] == [2.0**15, 2.0**16]  # type: ignore[union-attr]


def test_a_failed_step_leaves_the_other_ones_gradients() -> None:
    """The second can still be stepped after a refused call."""
    got, wanted = Two(), Two()
    pair, plain = [[over(model, "encoder"), over(model, "decoder")] for model in (got, wanted)]
    losses = got(batch(1))
    pair[0].step(losses, None, "a", 1, 1)
    with pytest.raises(ValueError, match="epoch_num"):
        pair[1].step(losses, None, "a", 1, 0)
    with pytest.raises(AssertionError, match="no loss named"):
        pair[1].step({}, None, "a", 1, 1)
    pair[1].step(losses, None, "a", 1, 1)
    assert same(copied(got), train(wanted, plain, 1))
