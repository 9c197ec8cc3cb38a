"""`OptimScheduler` equals SpeeChain's class step for step, its bugs aside.

The ancestor is not a dependency: the reference is a plain loop in torch.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse.extras.optim import ExponentDecayLr, Noamlr, OptimScheduler
from tests.extras.optim.optim_loop import Clock, Log, Steady, Two, batch, copied, same, train


def by_hand(
    model: Two,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    accum_grad: int = 1,
    grad_clip: float | None = 1.0,
    grad_norm_type: float = 2.0,
    name: str = "loss",
    amp: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """A plain training loop."""
    scaler = torch.amp.GradScaler("cpu", enabled=amp is torch.float16)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step_num in range(1, steps + 1):
        with torch.autocast("cpu", dtype=amp or torch.bfloat16, enabled=amp is not None):
            loss = model(batch(step_num))[name]
        scaler.scale(loss if accum_grad == 1 else loss / accum_grad).backward(inputs=parameters)
        if step_num % accum_grad == 0:
            scaler.unscale_(optimizer)
            if grad_clip is not None:
                nn.utils.clip_grad_norm_(parameters, grad_clip, grad_norm_type)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return copied(model)


def test_signature_is_the_ancestors() -> None:
    known = dict(inspect.signature(OptimScheduler.__init__).parameters)
    assert list(known)[1:13] == [
        *(
            "optim_type",
            "optim_conf",
            "model",
            "distributed",
            "optim_loss",
            "updated_modules",
            "step_per_update",
        ),
        *("use_amp", "accum_grad", "ft_factor", "grad_clip", "grad_norm_type"),
    ]
    defaults = {name: known[name].default for name in list(known)[4:13]}
    assert defaults == {
        "distributed": False,
        "optim_loss": None,
        "updated_modules": None,
        "step_per_update": 1,
        "use_amp": True,
        "accum_grad": 1,
        "ft_factor": 1.0,
        "grad_clip": 1.0,
        "grad_norm_type": 2.0,
    }
    step = ["self", "losses", "time_func", "optim_name", "step_num", "epoch_num", "logger"]
    assert list(inspect.signature(OptimScheduler.step).parameters) == step
    with pytest.raises(TypeError, match="abstract"):
        OptimScheduler("SGD", {"lr": 0.1}, Two())  # type: ignore[abstract]


@pytest.mark.parametrize("accum_grad", [1, 3])
@pytest.mark.parametrize("optim", [("SGD", {"lr": 0.3, "momentum": 0.9}), ("Adam", {"lr": 0.05})])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"grad_clip": 0.05},
        {"grad_clip": None},
        {"grad_clip": math.inf},
        {"grad_clip": 0.05, "grad_norm_type": 1},
        {"grad_clip": 0.05, "grad_norm_type": math.inf},
    ],
)
def test_steps_are_those_of_a_plain_loop(
    optim: tuple[str, dict[str, Any]], accum_grad: int, more: Any
) -> None:
    ours, theirs = Two(), Two()
    scheduler = Steady(*optim, ours, use_amp=False, accum_grad=accum_grad, **more)
    got = train(ours, [scheduler], 7)
    optimizer = getattr(torch.optim, optim[0])(theirs.parameters(), **optim[1])
    assert same(got, by_hand(theirs, optimizer, 7, accum_grad=accum_grad, **more))
    assert not same(got, copied(Two()))
    # The seventh step is the first of an unfinished real step, or an update of its own.
    assert (ours.decoder.weight.grad is not None) == (accum_grad == 3)


@pytest.mark.parametrize("accum_grad", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_amp_is_that_of_a_plain_loop(dtype: torch.dtype, accum_grad: int) -> None:
    ours, theirs = Two(), Two()
    scheduler = Steady(
        "Adam", {"lr": 0.05}, ours, accum_grad=accum_grad, grad_clip=0.05, amp_dtype=dtype
    )
    assert (scheduler.scaler is not None) == (dtype is torch.float16)
    assert scheduler.scaler is None or scheduler.scaler.is_enabled()
    got = train(ours, [scheduler], 6)
    wanted = by_hand(
        theirs,
        torch.optim.Adam(theirs.parameters(), 0.05),
        6,
        accum_grad=accum_grad,
        grad_clip=0.05,
        amp=dtype,
    )
    assert same(got, wanted)
    in_full = Two()
    plain = Steady(
        "Adam", {"lr": 0.05}, in_full, accum_grad=accum_grad, grad_clip=0.05, use_amp=False
    )
    assert not same(got, train(in_full, [plain], 6)), "nothing ran in half precision"


class Recording(torch.amp.GradScaler):
    """A test double: notes the calls that the ancestor makes."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=4.0)
        self.calls: list[str] = []

    def scale(self, outputs: Any) -> Any:
        self.calls.append("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("unscale_")
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("step")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        self.calls.append("update")
        super().update(new_scale)


@pytest.mark.parametrize("use_amp", [True, False])
@pytest.mark.parametrize("accum_grad", [1, 2])
def test_a_scaler_that_is_assigned_is_the_scaler_in_use(use_amp: bool, accum_grad: int) -> None:
    model, plain = Two(), Two()
    scheduler = Steady("SGD", {"lr": 0.1}, model, use_amp=use_amp, accum_grad=accum_grad)
    recording = Recording()
    scheduler.scaler = recording
    scales: list[float] = []
    model.decoder.weight.register_hook(lambda grad: scales.append(float(grad.abs().max())))
    trained = train(model, [scheduler], accum_grad)
    assert recording.calls == ["scale"] * accum_grad + ["unscale_", "step", "update"]
    assert scheduler.scaler is recording
    assert scheduler.state_dict()["scaler"] == recording.state_dict()
    unscaled: list[float] = []
    plain.decoder.weight.register_hook(lambda grad: unscaled.append(float(grad.abs().max())))
    other = Steady("SGD", {"lr": 0.1}, plain, use_amp=use_amp, accum_grad=accum_grad)
    other.scaler = None
    expected = train(plain, [other], accum_grad)
    assert scales == pytest.approx([4 * each for each in unscaled], rel=1e-2)
    for name, weight in trained.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-2, atol=1e-3)
    recording.update(2.0)
    state = scheduler.state_dict()
    recording.update(16.0)
    scheduler.load_state_dict(state)
    assert recording.get_scale() == 2.0, "a load reaches the scaler in use"


def test_a_scaler_of_another_scale_backs_off_by_its_own_rule() -> None:
    model = Two()
    scheduler = Steady("SGD", {"lr": 0.1}, model)
    scheduler.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, backoff_factor=0.25)
    before = copied(model)
    scheduler.step({"loss": model(batch(1))["loss"] * math.inf}, None, "a", 1, 1)
    assert same(copied(model), before) and scheduler.scaler.get_scale() == 2.0


def test_scalers_that_can_not_be_used_are_refused_by_name() -> None:
    model = Two()
    scheduler = Steady("SGD", {"lr": 0.1}, model, accum_grad=2)
    before = scheduler.scaler
    with pytest.raises(ValueError, match=r"Invalid scaler of type object: it lacks \['scale', "):
        scheduler.scaler = object()  # type: ignore[assignment]
    scheduler.step(model(batch(1)), None, "a", 1, 1)
    with pytest.raises(ValueError, match="Invalid scaler: there are gradients at the scale"):
        scheduler.scaler = None
    assert scheduler.scaler is before
    scheduler.step(model(batch(2)), None, "a", 2, 1)
    scheduler.scaler = None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("optim_loss", "other"), ("ft_factor", 0.5), ("grad_clip", 0.01), ("accum_grad", 2)),
        *(("grad_norm_type", 1.0), ("step_per_update", 2)),
    ],
)
def test_attributes_that_are_assigned_take_effect(name: str, value: Any) -> None:
    """As in the ancestor, which reads them at every step."""
    ours, theirs = Two(), Two()
    given = {name: value, "use_amp": False, "grad_clip": value if name == "grad_clip" else 0.05}
    assigned = Steady("SGD", {"lr": 0.3}, ours, use_amp=False, grad_clip=0.05)
    setattr(assigned, name, value)
    found = train(ours, [assigned], 4)
    assert same(found, train(theirs, [Steady("SGD", {"lr": 0.3}, theirs, **given)], 4))
    same_as_before = Two()
    default = Steady("SGD", {"lr": 0.3}, same_as_before, use_amp=False, grad_clip=0.05)
    assert not same(found, train(same_as_before, [default], 4))


def test_an_optimizer_that_is_assigned_trains_what_it_steps() -> None:
    """Also other parameters than the first one, as those of a group that is added."""
    ours, theirs = Two(), Two()
    scheduler = Steady("SGD", {"lr": 0.3}, ours, updated_modules="encoder", use_amp=False)
    scheduler.optimizer = torch.optim.SGD(ours.decoder.parameters(), 0.3)
    expected = by_hand(theirs, torch.optim.SGD(theirs.decoder.parameters(), 0.3), 3)
    assert same(train(ours, [scheduler], 3), expected)
    scheduler.optimizer.add_param_group({"params": ours.encoder.parameters()})
    before = copied(ours)
    trained = train(ours, [scheduler], 4, first=4)
    assert all(not torch.equal(weight, before[name]) for name, weight in trained.items())


@pytest.mark.parametrize(
    ("name", "value"), [("model", Two()), ("updated_modules", ["encoder"]), ("use_amp", True)]
)
def test_attributes_that_are_read_once_refuse_another_value(name: str, value: Any) -> None:
    scheduler = Steady("SGD", {"lr": 0.1}, Two(), use_amp=False)
    with pytest.raises(AttributeError, match=f"{name} of Steady .* construct a new one"):
        setattr(scheduler, name, value)
    assert getattr(scheduler, name) is not value


@pytest.mark.parametrize(
    "names", ["decoder", ["decoder"], ("decoder",), ["encoder", "decoder"], ["encoder.0"], None]
)
def test_only_the_modules_named_are_updated(names: Any) -> None:
    ours, theirs = Two(), Two()
    scheduler = Steady(
        "SGD", {"lr": 0.3}, ours, updated_modules=names, use_amp=False, optim_loss="other"
    )
    listed = (
        ["encoder", "decoder"]
        if names is None
        else [names]
        if isinstance(names, str)
        else list(names)
    )
    mine = [p for name in listed for p in theirs.get_submodule(name).parameters()]
    held = [p for group in scheduler.optimizer.param_groups for p in group["params"]]
    assert {p.data_ptr() for p in held} == {
        p.data_ptr() for name in listed for p in ours.get_submodule(name).parameters()
    }
    got = train(ours, [scheduler], 3)
    assert same(got, by_hand(theirs, torch.optim.SGD(mine, 0.3), 3, name="other"))
    assert all(p.grad is None for p in ours.parameters())


def test_the_schedule_is_made_last_and_reads_the_learning_rate() -> None:
    scheduler = Steady("Adam", {"lr": 0.25}, Two(), use_amp=False, warm=3, cold=None)
    assert scheduler.conf == {"warm": 3, "cold": None}
    assert scheduler.base == scheduler.get_lr() == 0.25
    assert type(scheduler.optimizer) is torch.optim.Adam
    with pytest.raises(TypeError, match="warm"):
        ExponentDecayLr("SGD", {"lr": 0.1}, Two(), warm=3)


def test_which_steps_are_updates_and_what_the_schedule_is_asked() -> None:
    """accum_grad 2, step_per_update 3: real steps 3 and 6 are updates, from steps 5, 6 and 11,
    12."""
    model = Two()
    scheduler = Steady(
        "SGD", {"lr": 0.1}, model, use_amp=False, accum_grad=2, step_per_update=3, ft_factor=0.5
    )
    moved, differentiated, clock = [], [], Clock()
    model.decoder.weight.register_hook(lambda grad: differentiated.append(step_num))
    for step_num in range(1, 14):
        before = copied(model)
        scheduler.step(model(batch(step_num)), clock, "main", step_num, 1 + step_num // 10)
        if not same(before, copied(model)):
            moved.append(step_num)
    assert moved == [6, 12]
    assert differentiated == [5, 6, 11, 12]
    assert scheduler.asked == [(3, 1), (3, 1), (6, 2), (6, 2)]
    assert scheduler.get_lr() == 0.05
    assert clock.names == [["loss_backward_time", "main"], ["optim_time", "main"]] * 13


def test_what_the_clocks_time() -> None:
    model, seen = Two(), []
    weight = model.decoder.weight
    clock = Clock(
        lambda name: seen.append(
            (name, weight.grad is not None, bool(weight.detach().ne(before).any()))
        )
    )
    before = weight.detach().clone()
    Steady("SGD", {"lr": 0.1}, model, use_amp=False).step(model(batch(1)), clock, "a", 1, 1)
    assert seen == [("loss_backward_time", True, False), ("optim_time", False, True)]


def test_losses_are_named() -> None:
    model = Two()
    losses = model(batch(1))
    with pytest.raises(AssertionError, match="no loss named 'loss' among"):
        Steady("SGD", {"lr": 0.1}, model).step({"other": losses["other"]}, None, "a", 1, 1)
    with pytest.raises(KeyError, match="third"):
        Steady("SGD", {"lr": 0.1}, model, optim_loss="third").step(losses, None, "a", 1, 1)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("value", [0, -1, 1.0, "2", None, True])
@pytest.mark.parametrize("name", ["accum_grad", "step_per_update"])
def test_intervals_are_integers_from_1_on(name: str, value: Any) -> None:
    with pytest.raises(AssertionError, match=f"Invalid {name}="):
        Steady("SGD", {"lr": 0.1}, Two(), **{name: value})


def test_a_loss_is_a_name() -> None:
    with pytest.raises(AssertionError, match="optim_loss=3"):
        Steady("SGD", {"lr": 0.1}, Two(), optim_loss=3)  # type: ignore[arg-type]


def test_states_and_repr() -> None:
    model = Two()
    plain = Steady("SGD", {"lr": 0.1}, model, use_amp=False, updated_modules="encoder")
    assert plain.state_dict() == {"optimizer": plain.optimizer.state_dict(), "scaler": None}
    amp = Noamlr(
        "Adam", {"lr": 0.1}, model, updated_modules="decoder", optim_loss="x", warmup_steps=7
    )
    assert amp.scaler is not None
    assert amp.state_dict() == {
        "optimizer": amp.optimizer.state_dict(),
        "scaler": amp.scaler.state_dict(),
    }
    assert repr(plain) == "Steady(optimizer=SGD, optim_loss=None, updated_modules=['encoder'])"
    extra = amp.extra_repr_fn()
    assert (
        repr(amp) == f"Noamlr(optimizer=Adam, optim_loss=x, updated_modules=['decoder'], {extra})"
    )
    assert "warmup_steps=7" in extra and "d_model=None" in extra
    assert "decay_factor=0.5" in repr(ExponentDecayLr("SGD", {"lr": 0.1}, model, decay_factor=0.5))


@pytest.mark.parametrize(
    ("conf", "peak"),
    [({"warmup_steps": 4}, 0.25), ({"d_model": 16, "warmup_steps": 4}, 0.125)],
    ids=["own", "d_model"],
)
@pytest.mark.parametrize("accum_grad", [1, 2])
def test_noam(conf: dict[str, Any], peak: float, accum_grad: int) -> None:
    model = Two()
    scheduler = Noamlr(
        "SGD", {"lr": 0.25}, model, use_amp=False, accum_grad=accum_grad, ft_factor=0.5, **conf
    )
    for step_num in range(1, 12 * accum_grad + 1):
        scheduler.step(model(batch(step_num)), None, "a", step_num, 1 + step_num // 5)
        t = (step_num - 1) // accum_grad + 1
        top = peak * 4**0.5
        assert scheduler.get_lr() == pytest.approx(0.5 * top * min(t**-0.5, t * 4**-1.5), rel=1e-12)
    assert 0.5 * scheduler.update_lr(4, 1) == pytest.approx(0.5 * peak)


def test_exponential_decay_is_by_epoch_and_from_the_first_learning_rate() -> None:
    """Bug 26: the ancestor decays the rate it wrote itself at every step, and applies ft_factor
    again."""
    model = Two()
    scheduler = ExponentDecayLr(
        "SGD", {"lr": 0.8}, model, use_amp=False, decay_factor=0.5, ft_factor=0.5
    )
    seen = []
    for step_num in range(1, 7):
        scheduler.step(model(batch(step_num)), None, "a", step_num, 1 + (step_num - 1) // 2)
        seen.append(scheduler.get_lr())
    assert seen == [0.4, 0.4, 0.2, 0.2, 0.1, 0.1]
    assert ExponentDecayLr("SGD", {"lr": 1.0}, model).update_lr(real_step=9, epoch_num=2) == 0.999


@pytest.mark.parametrize(
    ("kind", "conf"),
    [
        *((Noamlr, {"warmup_steps": value}) for value in (0, math.nan, math.inf, "4e3", None)),
        *((Noamlr, {"d_model": value}) for value in (0, "512")),
        *(
            (ExponentDecayLr, {"decay_factor": value})
            for value in (0.0, math.nan, math.inf, "0.5", None)
        ),
    ],
)
def test_schedules_that_make_no_sense(kind: Any, conf: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Invalid {next(iter(conf))}="):
        kind("SGD", {"lr": 0.1}, Two(), **conf)


def test_every_group_gets_the_learning_rate() -> None:
    model = Two()
    scheduler = Steady(
        "SGD", {"lr": 0.5}, model, use_amp=False, updated_modules="encoder", ft_factor=0.5
    )
    scheduler.optimizer.add_param_group({"params": model.decoder.parameters(), "lr": 9.0})
    scheduler.step(model(batch(1)), None, "a", 1, 1)
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == [0.25, 0.25]


def test_bug_19_the_losses_stay_as_they_are() -> None:
    model = Two()
    scheduler = Steady("SGD", {"lr": 0.1}, model, use_amp=False, accum_grad=4)
    losses = model(batch(1))
    before = {name: loss.item() for name, loss in losses.items()}
    scheduler.step(losses, None, "a", 1, 1)
    assert {name: loss.item() for name, loss in losses.items()} == before
    leaf = nn.ParameterList([nn.Parameter(torch.tensor(2.0))])
    scheduler = Steady("SGD", {"lr": 0.1}, leaf, use_amp=False, accum_grad=2)
    for step_num in (1, 2):
        scheduler.step({"loss": leaf[0]}, None, "a", step_num, 1)
    assert leaf[0].item() == pytest.approx(1.9)


@pytest.mark.parametrize("use_amp", [False, True])
@pytest.mark.parametrize("value", [100.0, math.inf])
def test_bug_20_foreign_gradients_neither_count_nor_change(value: float, use_amp: bool) -> None:
    ours, theirs = Two(), Two()
    scheduler = Steady(
        "SGD", {"lr": 0.1}, ours, updated_modules="encoder", use_amp=use_amp, grad_clip=0.01
    )
    ours.decoder.weight.grad = torch.full_like(ours.decoder.weight, value)
    got = train(ours, [scheduler], 1)
    wanted = by_hand(
        theirs,
        torch.optim.SGD(theirs.encoder.parameters(), 0.1),
        1,
        grad_clip=0.01,
        amp=torch.float16 if use_amp else None,
    )
    assert same(got, wanted)
    assert bool((ours.decoder.weight.grad == value).all())
    assert ours.decoder.bias.grad is None


@pytest.mark.parametrize("order", [("encoder", "decoder"), ("decoder", "encoder")])
@pytest.mark.parametrize("names", [("loss", "other"), ("loss", "loss")])
def test_bug_21_two_schedulers_share_a_forward(
    order: tuple[str, str], names: tuple[str, str]
) -> None:
    """Each gets the gradients of its own loss at the weights of the forward. In the ancestor the
    second backward of one loss fails, and those of two losses add up."""
    ours = Two()
    conf = {"use_amp": False, "grad_clip": None}
    schedulers = [
        Steady("SGD", {"lr": 0.1}, ours, updated_modules=module, optim_loss=name, **conf)
        for module, name in zip(order, names, strict=True)
    ]
    got = train(ours, schedulers, 4)
    theirs = Two()
    optimizers = [
        torch.optim.SGD(theirs.get_submodule(module).parameters(), 0.1) for module in order
    ]
    for step_num in range(1, 5):
        losses = theirs(batch(step_num))
        for optimizer, name in zip(optimizers, names, strict=True):
            losses[name].backward(inputs=optimizer.param_groups[0]["params"], retain_graph=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(
        torch.allclose(value, got[name], rtol=1e-6, atol=1e-7)
        for name, value in copied(theirs).items()
    )


@pytest.mark.parametrize("use_amp", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bug_22_what_is_not_finite_updates_nothing(bad: float, use_amp: bool) -> None:
    model, log = Two(), Log()
    scheduler = Steady("Adam", {"lr": 0.1}, model, use_amp=use_amp, accum_grad=2)
    train(model, [scheduler], 3)
    before, state = copied(model), copy.deepcopy(scheduler.optimizer.state_dict())
    scheduler.step({"loss": model(batch(4))["loss"] * bad}, None, "a", 4, 1, log)
    assert same(copied(model), before)
    assert repr(scheduler.optimizer.state_dict()) == repr(state)
    assert len(log.lines) == 1 and "Real step 2:" in log.lines[0]
    assert all(p.grad is None for p in model.parameters())
    if use_amp:
        assert scheduler.scaler is not None and scheduler.scaler.get_scale() == 2.0**15
    after = train(model, [scheduler], 6, first=5)
    assert not same(after, before) and all(bool(value.isfinite().all()) for value in after.values())


def test_bug_23_a_norm_that_overflows_updates_nothing() -> None:
    """Every gradient is finite, so GradScaler sees nothing; it must back off as after any skipped
    step."""
    model, log = nn.Linear(1, 2), Log()
    scheduler = Steady("SGD", {"lr": 1e-30}, model, grad_norm_type=2.0)
    assert scheduler.scaler is not None
    scheduler.scaler.load_state_dict(
        {**scheduler.scaler.state_dict(), "scale": 1.0, "growth_interval": 3}
    )
    small, large = torch.ones(1, 1), torch.full((1, 1), 3e38)
    for step_num in (1, 2):
        scheduler.step({"loss": model(small).sum()}, None, "a", step_num, 1, log)
    before = copied(model)
    scheduler.step({"loss": model(large).sum()}, None, "a", 3, 1, log)
    assert same(before, copied(model)) and len(log.lines) == 1
    assert scheduler.scaler.get_scale() == 0.5
    scheduler.step({"loss": model(small).sum()}, None, "a", 4, 1, log)
    assert scheduler.scaler.get_scale() == 0.5, "a skipped step starts the count of good ones again"


@pytest.mark.parametrize("saved_with", [True, False])
def test_bug_24_states_pass_between_runs_with_and_without_amp(saved_with: bool) -> None:
    one, other = Two(), Two(seed=1)
    first = Steady("Adam", {"lr": 0.1}, one, use_amp=saved_with)
    train(one, [first], 3)
    second = Steady("Adam", {"lr": 0.1}, other, use_amp=not saved_with)
    second.load_state_dict(first.state_dict())
    assert repr(second.optimizer.state_dict()) == repr(first.optimizer.state_dict())
    train(other, [second], 4, first=4)
    # The ancestor's without CUDA.
    disabled = {
        "optimizer": first.optimizer.state_dict(),
        "scaler": {},
    }
    second.load_state_dict(disabled)


@pytest.mark.parametrize("use_amp", [True, False])
def test_no_gradient_at_all(use_amp: bool) -> None:
    """With AMP, GradScaler's assertion fails in the ancestor."""
    model, log = Two(), Log()
    scheduler = Steady("SGD", {"lr": 0.1}, model, updated_modules="decoder", use_amp=use_amp)
    before = copied(model)
    for step_num in (1, 2):
        scheduler.step({"loss": model.encoder(batch(step_num)).sum()}, None, "a", step_num, 1, log)
    assert same(before, copied(model)) and log.lines == []
    assert not same(before, train(model, [scheduler], 3, first=3))


def test_a_runner_that_leaves_out_empty_batches() -> None:
    """Several by name with the same losses; one step number is skipped."""
    model = Two()
    runner = {
        "dec": ExponentDecayLr(
            "SGD", {"lr": 0.1}, model, updated_modules="decoder", optim_loss="other"
        ),
        "enc": Noamlr("Adam", {"lr": 0.1}, model, updated_modules="encoder", warmup_steps=4),
    }
    rates: dict[str, list[float]] = {name: [] for name in runner}
    for step_num in (1, 2, 4, 5):
        losses = model(batch(step_num))
        for name, scheduler in runner.items():
            scheduler.step(losses, Clock(), name, step_num, 1)
            rates[name].append(scheduler.get_lr())
    assert rates["dec"] == [0.1] * 4
    assert rates["enc"] == pytest.approx([0.025, 0.05, 0.1, 0.2 * 5**-0.5])
