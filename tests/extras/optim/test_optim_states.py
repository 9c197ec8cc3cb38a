"""Saved and resumed OptimSchedulers equal uninterrupted ones; a bad state changes nothing."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse import BaseDataScheduler, CubicDataScheduler, DataNormSparsifier, MaskEnforcer
from dist_sparse.extras.optim import ExponentDecayLr, Noamlr
from tests.extras.optim.optim_loop import Steady, Two, copied, same, train


def through_a_file(state: Any) -> Any:
    """With torch's defaults: ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def made(model: Two, **more: Any) -> list[Any]:
    decoder = {"updated_modules": "decoder", "optim_loss": "other", **more}
    return [
        Noamlr("Adam", {"lr": 0.1}, model, updated_modules="encoder", warmup_steps=4, **more),
        ExponentDecayLr("SGD", {"lr": 0.1, "momentum": 0.9}, model, **decoder),
    ]


@pytest.mark.parametrize("accum_grad", [1, 2])
@pytest.mark.parametrize("use_amp", [True, False])
def test_resumed_is_uninterrupted(use_amp: bool, accum_grad: int) -> None:
    whole = Two()
    conf: dict[str, Any] = {"use_amp": use_amp, "accum_grad": accum_grad}
    first = made(whole, **conf)
    train(whole, first, 4)
    saved = through_a_file([copied(whole), *(scheduler.state_dict() for scheduler in first)])
    wanted = train(whole, first, 10, first=5)
    resumed = Two(seed=5)
    second = made(resumed, **conf)
    train(resumed, second, 2)
    resumed.load_state_dict(saved[0])
    for scheduler, state in zip(second, saved[1:], strict=True):
        scheduler.load_state_dict(state)
    assert second[0].get_lr() == 0.1 * (4 // accum_grad) / 4, "the learning rate of the step before"
    assert same(train(resumed, second, 10, first=5), wanted)
    assert repr(second[0].state_dict()) == repr(first[0].state_dict())


def turned(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a run with its modules in another order."""
    model = Two()
    other = Steady("Adam", {"lr": 0.1}, model, updated_modules=["decoder", "encoder"])
    train(model, [other], 2)
    return {**state, "optimizer": other.optimizer.state_dict()}


def of_sgd(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a run with another class of optimizer."""
    other = Steady("SGD", {"lr": 0.1}, Two())
    return {**state, "optimizer": other.optimizer.state_dict()}


def corrupted(change: Callable[[dict[str, Any]], Any], state: dict[str, Any]) -> Any:
    return change({**state, "optimizer": {**state["optimizer"]}})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: None, "The state does not fit: TypeError"),
        (lambda s: {"scaler": s["scaler"]}, r"lacks \['optimizer'\]"),
        (lambda s: {**s, "optimizer": {}}, "KeyError: 'param_groups'"),
        (lambda s: {**s, "optimizer": None}, "The state does not fit"),
        (lambda s: {**s, "optimizer": {**s["optimizer"], "param_groups": []}}, "parameter group"),
        (of_sgd, r"another optimizer class: its groups lack \['betas', 'eps'\]; expected Adam"),
        (
            lambda s: turned(s),
            (
                r"of other parameters: exp_avg has the shape \(3, 6\), the parameter"
                r" \(6, 4\)"
            ),
        ),
        (lambda s: {**s, "scaler": {**s["scaler"], "scale": math.nan}}, "Invalid scale=nan"),
        (lambda s: {**s, "scaler": {**s["scaler"], "scale": 0.0}}, "Invalid scale=0.0"),
        (lambda s: {**s, "scaler": {"scale": 3.0}}, "KeyError: 'growth_factor'"),
        (lambda s: {**s, "scaler": {**s["scaler"], "scale": "much"}}, "Invalid scale='much'"),
        (
            lambda s: {**s, "data_scheduler": {}},
            r"has \['data_scheduler'\], which this OptimScheduler was constructed without",
        ),
    ],
)
def test_a_bad_state_changes_nothing(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    model, twin = Two(), Two()
    scheduler, plain = (Steady("Adam", {"lr": 0.1}, each) for each in (model, twin))
    train(model, [scheduler], 2)
    train(twin, [plain], 2)
    assert scheduler.scaler is not None
    other = Steady("Adam", {"lr": 0.7}, Two(seed=3))
    train(other.model, [other], 3)
    other.scaler.update(8.0)  # type: ignore[union-attr]
    before = repr(scheduler.state_dict())
    with pytest.raises(ValueError, match=said):
        scheduler.load_state_dict(corrupted(change, other.state_dict()))
    assert repr(scheduler.state_dict()) == before
    assert same(train(model, [scheduler], 4, first=3), train(twin, [plain], 4, first=3))


OF_TORCH = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS")
)


@pytest.mark.parametrize("name", OF_TORCH)
def test_every_optimizer_of_torch_resumes(name: str) -> None:
    def make() -> tuple[nn.Module, Steady]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False)  # Muon takes matrices only
        if name == "SparseAdam":
            model = nn.EmbeddingBag(9, 3, sparse=True)
        return model, Steady(name, {"lr": 0.01}, model)

    def steps(model: nn.Module, scheduler: Steady, numbers: range) -> dict[str, Tensor]:
        for step_num in numbers:
            x = torch.arange(8).view(2, 4) % (step_num + 4)
            loss = model(x if name == "SparseAdam" else x.float()).square().mean()
            scheduler.step({"loss": loss}, None, "a", step_num, 1)
        return copied(model)

    model, scheduler = make()
    steps(model, scheduler, range(1, 4))
    weights, state = through_a_file((model.state_dict(), scheduler.state_dict()))
    resumed, other = make()
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    assert same(steps(model, scheduler, range(4, 7)), steps(resumed, other, range(4, 7)))


@pytest.mark.parametrize(
    "own",
    [lambda o: torch.optim.lr_scheduler.StepLR(o, 3), lambda o: o.param_groups[0].update(step=3)],
    ids=["initial_lr", "step"],
)
def test_foreign_keys_of_the_groups_are_not_required(own: Callable[[Any], Any]) -> None:
    model, other = Two(), Two()
    saved = Steady("Adam", {"lr": 0.1}, other)
    train(other, [saved], 2)
    scheduler = Steady("Adam", {"lr": 0.1}, model)
    own(scheduler.optimizer)
    scheduler.load_state_dict(saved.state_dict())
    assert repr(scheduler.optimizer.state_dict()) == repr(saved.optimizer.state_dict())


def test_a_size_of_1_does_not_fit_any_size() -> None:
    small, large = nn.Linear(3, 1, bias=False), nn.Linear(3, 2, bias=False)
    saved, scheduler = (
        Steady("Adam", {"lr": 0.1}, model, use_amp=False) for model in (small, large)
    )
    saved.step({"loss": small(torch.ones(1, 3)).sum()}, None, "a", 1, 1)
    with pytest.raises(ValueError, match=r"exp_avg has the shape \(1, 3\), the parameter \(2, 3\)"):
        scheduler.load_state_dict(saved.state_dict())


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.EmbeddingBag(24, 4)
        self.over = nn.Linear(4, 1)

    def forward(self, step_num: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 24, (6, 3), generator=torch.Generator().manual_seed(step_num))
        return {"loss": self.over(self.table(ids)).float().square().sum()}


def sparse(model: Net, **more: Any) -> Any:
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, 2), norm="L2")
    sparsifier.add_model(model, include=["table"])
    curve = CubicDataScheduler(sparsifier, "sparsity_level", final=0.5, begin=1, end=4, every=1)
    scheduler = Steady(
        "Adagrad",
        {"lr": 0.1},
        model,
        data_sparsifier=sparsifier,
        data_scheduler=curve,
        use_amp=False,
        **more,
    )
    MaskEnforcer(sparsifier).attach(scheduler.optimizer)
    return scheduler


def sparse_steps(scheduler: Any, steps: int, first: int = 1) -> list[tuple[float, int, int]]:
    """After each step: zeros in the table, the data scheduler's step, how often the sparsifier has
    stepped."""
    seen = []
    for step_num in range(first, steps + 1):
        scheduler.step(scheduler.model(step_num), None, "a", step_num, 1)
        zeros = float((scheduler.model.table.weight == 0).float().mean())
        seen.append(
            (zeros, scheduler.data_scheduler.last_epoch, scheduler.data_sparsifier.step_count)
        )
    return seen


def test_sparsity_is_part_of_the_step() -> None:
    """Optimizer, then sparsifier, then scheduler: the sparsifier uses the level that the scheduler
    last set, on the weights that the optimizer has just written, and pruned weights stay zero."""
    scheduler = sparse(Net())
    order: list[str] = []
    scheduler.optimizer.register_step_post_hook(lambda *args: order.append("optimizer"))
    for name in ("data_sparsifier", "data_scheduler"):
        part = getattr(scheduler, name)
        inner = part.step
        part.step = lambda inner=inner, name=name: (order.append(name), inner())
    zeros = [row[0] for row in sparse_steps(scheduler, 6)]
    assert order == ["optimizer", "data_sparsifier", "data_scheduler"] * 6
    assert zeros[0] == 0 and zeros == sorted(zeros) and zeros[-1] == zeros[-2] == 0.5


@pytest.mark.parametrize(
    ("more", "wanted"),
    [({"accum_grad": 2}, [2, 4, 6]), ({"step_per_update": 3}, [3, 6]), ({}, [1, 2, 3, 4, 5, 6])],
)
def test_sparsity_moves_on_real_steps_only(more: dict[str, int], wanted: list[int]) -> None:
    counts = [row[2] for row in sparse_steps(sparse(Net(), **more), 6)]
    assert [i + 1 for i, count in enumerate(counts) if count > ([0, *counts])[i]] == wanted


@pytest.mark.parametrize("bad", [float("nan"), 0.0])
def test_a_skipped_step_counts_nowhere(bad: float) -> None:
    scheduler = sparse(Net())
    sparse_steps(scheduler, 2)
    before = scheduler.data_scheduler.last_epoch, scheduler.data_sparsifier.step_count
    loss = (
        scheduler.model(3)["loss"] * bad
        if bad
        else (scheduler.model.over.bias.detach().requires_grad_() * 1).sum()
    )
    scheduler.step({"loss": loss}, None, "a", 3, 1)
    assert (scheduler.data_scheduler.last_epoch, scheduler.data_sparsifier.step_count) == before


def test_one_state_for_all() -> None:
    scheduler = sparse(Net())
    sparse_steps(scheduler, 3)
    saved = through_a_file([copied(scheduler.model), scheduler.state_dict()])
    assert list(saved[1]) == ["optimizer", "scaler", "data_sparsifier", "data_scheduler"]
    wanted = sparse_steps(scheduler, 8, first=4)
    resumed = sparse(Net(seed=4))
    resumed.model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert [row[:2] for row in sparse_steps(resumed, 8, first=4)] == [row[:2] for row in wanted]
    assert same(copied(resumed.model), copied(scheduler.model))
    assert resumed.data_sparsifier.fingerprint() == scheduler.data_sparsifier.fingerprint()


@pytest.mark.parametrize("name", ["data_sparsifier", "data_scheduler"])
def test_a_state_without_its_sparsity_changes_nothing(name: str) -> None:
    scheduler = sparse(Net())
    sparse_steps(scheduler, 3)
    state = scheduler.state_dict()
    before = (
        repr(state["optimizer"]),
        scheduler.data_sparsifier.fingerprint(),
        scheduler.data_scheduler.last_epoch,
    )
    other = sparse(Net(seed=1))
    sparse_steps(other, 4)
    theirs = other.state_dict()
    broken = theirs["data_sparsifier"].copy()
    broken["sharded"] = {}
    for wrong in (
        {k: v for k, v in theirs.items() if k != name},
        {**theirs, "data_sparsifier": broken},
    ):
        with pytest.raises((ValueError, RuntimeError)):
            scheduler.load_state_dict(wrong)
        now = repr(scheduler.state_dict()["optimizer"])
        assert (
            now,
            scheduler.data_sparsifier.fingerprint(),
            scheduler.data_scheduler.last_epoch,
        ) == before


def everything(scheduler: Any) -> tuple[str, str, Tensor, str]:
    """All that a load may change, and the weights, which an enforcer zeroes with new masks."""
    state = scheduler.state_dict()
    curve = repr({key: value for key, value in state["data_scheduler"].items()})
    table = scheduler.model.table.weight.detach().clone()
    return repr(state["optimizer"]), scheduler.data_sparsifier.fingerprint(), table, curve


@pytest.mark.parametrize("wrong", [{"final": math.nan}, {"every": 0}], ids=str)
def test_a_load_that_the_scheduler_refuses_changes_nothing(wrong: dict[str, Any]) -> None:
    """Neither masks nor weights, though the sparsifier's own part fits."""
    scheduler, other = sparse(Net()), sparse(Net(seed=1))
    sparse_steps(scheduler, 2)
    sparse_steps(other, 5)
    state = other.state_dict()
    before = everything(scheduler)
    with pytest.raises(ValueError, match=f"Invalid {next(iter(wrong))}"):
        scheduler.load_state_dict({**state, "data_scheduler": {**state["data_scheduler"], **wrong}})
    after = everything(scheduler)
    assert torch.equal(before[2], after[2])
    assert before[:2] + before[3:] == after[:2] + after[3:]


class Written(BaseDataScheduler):
    """A schedule of a user."""

    def get_schedule_param(self) -> dict[str, float]:
        return dict.fromkeys(self.data_sparsifier.data_groups, 0.1 * self.last_epoch)


def test_a_load_that_a_users_scheduler_refuses_changes_nothing() -> None:
    pair = []
    for seed in (0, 1):
        model = Net(seed)
        sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=(1, 2))
        sparsifier.add_model(model, include=["table"])
        parts: dict[str, Any] = {
            "data_sparsifier": sparsifier,
            "data_scheduler": Written(sparsifier, "sparsity_level"),
        }
        pair.append(Steady("Adagrad", {"lr": 0.1}, model, use_amp=False, **parts))
    scheduler, other = pair
    sparse_steps(scheduler, 2)
    sparse_steps(other, 5)
    state, before = other.state_dict(), everything(scheduler)
    with pytest.raises(ValueError, match="last_epoch"):
        scheduler.load_state_dict(
            {**state, "data_scheduler": {**state["data_scheduler"], "last_epoch": "5"}}
        )
    after = everything(scheduler)
    assert torch.equal(before[2], after[2]) and before[:2] + before[3:] == after[:2] + after[3:]
    scheduler.load_state_dict(state)
    assert scheduler.data_scheduler is not None and scheduler.data_scheduler.last_epoch == 5


def test_masks_hold_under_amp_and_clipping() -> None:
    model = Net()
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    sparsifier.add_model(model, include=["table"])
    scheduler = Steady(
        "Adam", {"lr": 0.1}, model, data_sparsifier=sparsifier, grad_clip=0.1, scale=128.0
    )
    MaskEnforcer(sparsifier).attach(scheduler.optimizer)
    for step_num in range(1, 6):
        with scheduler.forward_context(step_num):
            losses = model(step_num)
        scheduler.step(losses, None, "a", step_num, 1)
        assert int((model.table.weight == 0).all(1).sum()) == 12
        sparsifier.enable_mask_update = False
