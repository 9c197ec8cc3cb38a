"""Arguments that OptimScheduler refuses before anything changes, in one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from dist_sparse import CubicDataScheduler, DataNormSparsifier
from dist_sparse.extras.optim import Noamlr
from dist_sparse.extras.optim.gradients import optimizer_class
from tests.extras.optim.optim_loop import Steady, Two, batch, copied, same, train


def made(model: nn.Module | None = None, **more: Any) -> Steady:
    return Steady(
        more.pop("optim_type", "SGD"), more.pop("optim_conf", {"lr": 0.1}), model or Two(), **more
    )


def data() -> DataNormSparsifier:
    return DataNormSparsifier([("w", torch.randn(4, 4))], sparsity_level=0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"grad_clip": value} for value in (0, -1.0, math.nan, "1", True)),
        *({"grad_norm_type": value} for value in (0, -2.0, math.nan, "inf", True, None)),
        *({"ft_factor": value} for value in (-0.1, math.nan, math.inf, "1", False, None)),
        *({"amp_dtype": value} for value in (torch.float32, "float16", None)),
    ],
    ids=str,
)
def test_invalid_values_are_refused(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"Invalid {name}="):
        made(**wrong)


@pytest.mark.parametrize(
    "fine", [{"grad_clip": 1}, {"grad_norm_type": 3}, {"ft_factor": 0}, {"ft_factor": 2}], ids=str
)
def test_valid_values_are_accepted(fine: dict[str, Any]) -> None:
    model = Two()
    before = copied(model)
    assert same(before, train(model, [made(model, use_amp=False, **fine)], 1)) == (
        fine == {"ft_factor": 0}
    )


@pytest.mark.parametrize(
    "query", ["torch.optim.AdamW", "torch.optim.adamw.AdamW", "AdamW", torch.optim.AdamW]
)
def test_optimizers_by_name_by_path_and_by_class(query: Any) -> None:
    assert type(made(optim_type=query).optimizer) is torch.optim.AdamW


def test_optimizers_of_other_packages() -> None:
    table = made(nn.Embedding(3, 2), optim_type="torchrec.optim.RowWiseAdagrad")
    assert type(table.optimizer).__name__ == "RowWiseAdagrad"
    assert type(made(optim_type="SGD", optim_conf=None).optimizer) is torch.optim.SGD


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("adamw", "such as SGD"),
        ("", "such as SGD"),
        ("torch.optim", "dotted path"),
        ("torch.nn.Linear", "dotted path"),
        ("no_such_module.SGD", "No module named 'no_such_module'"),
        ("lr_scheduler.StepLR", "No module named 'lr_scheduler'"),
        (3, "dotted path"),
        (None, "dotted path"),
        (nn.Linear, "dotted path"),
        ("LBFGS", "needs a closure"),
    ],
)
def test_unknown_optimizers_are_refused(query: Any, said: str) -> None:
    with pytest.raises(ValueError, match="Invalid optim_type=") as raised:
        optimizer_class(query)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["middle"], "['middle'] are not modules; there are ['encoder', 'decoder']"),
        ("middle", "['middle'] are not modules"),
        ([], "there are ['encoder', 'decoder']"),
        ("", "[''] are not modules"),
        (["decoder", "encoder.7"], "['encoder.7'] are not modules"),
        ("encoder.1", "['encoder.1'] have no parameters"),
    ],
)
def test_unknown_modules_are_refused(names: Any, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        made(updated_modules=names)
    assert said in str(raised.value)


def test_a_model_without_parameters() -> None:
    with pytest.raises(ValueError, match=r"\['Tanh'\] have no parameters"):
        made(nn.Tanh())


def test_fsdp_is_refused() -> None:
    """Its modules hold DTensors, or flat parameters in a module of this attribute."""
    model = Two()
    model.encoder._fsdp_wrapped_module = None
    with pytest.raises(ValueError, match="trains no FSDP modules and no DTensors"):
        made(model)


def test_averaging_needs_something_that_averages() -> None:
    made(distributed=True)  # one process, nothing to save
    with pytest.raises(
        ValueError, match="Invalid distributed=True: Two does not average gradients"
    ):
        made(distributed=True, accum_grad=2)


@pytest.mark.parametrize("name", ["step_num", "epoch_num"])
@pytest.mark.parametrize(
    "value",
    [0, -1, math.nan, 1.5, "1", True, [1], torch.tensor(1), np.array(1), np.bool_(True)],
)
def test_numbers_count_from_1(name: str, value: Any) -> None:
    model = Two()
    numbers: dict[str, Any] = {"step_num": 1, "epoch_num": 1, name: value}
    scheduler = made(model)
    with pytest.raises(ValueError, match=f"Invalid {name}="):
        scheduler.step(model(batch(1)), None, "a", **numbers)
    assert model.decoder.weight.grad is None
    with pytest.raises(ValueError, match=f"Invalid {name}="), scheduler.forward_context(**numbers):
        pass


@pytest.mark.parametrize("number", [np.int64, np.uint8])
def test_integers_of_numpy_are_step_numbers(number: Any) -> None:
    model, same_model = Two(), Two()
    scheduler, other = (made(each, use_amp=False, accum_grad=2) for each in (model, same_model))
    for step_num in range(1, 5):
        with scheduler.forward_context(number(step_num), number(1)):
            losses = model(batch(step_num))
        scheduler.step(losses, None, "a", number(step_num), number(1))
    assert same(train(same_model, [other], 4), copied(model))
    assert {type(each) for pair in scheduler.asked for each in pair} == {int}


@pytest.mark.parametrize(
    "asked", [math.nan, math.inf, -0.1, None, "much", "0.1", b"0.1", 10**400, 1e308]
)
def test_an_invalid_learning_rate_changes_nothing(asked: Any) -> None:
    model = Two()
    scheduler = made(model, use_amp=False, ft_factor=10)
    before = copied(model)
    scheduler.base = asked
    with pytest.raises(ValueError, match="Invalid learning rate"):
        train(model, [scheduler], 1)
    assert same(before, copied(model)) and scheduler.get_lr() == 0.1
    scheduler.base = torch.tensor(0.05)  # a tensor is a number
    assert not same(before, train(model, [scheduler], 1))
    assert type(scheduler.get_lr()) is float and scheduler.get_lr() == pytest.approx(0.5)


def test_a_loss_that_is_missing() -> None:
    loss = torch.ones(())
    with pytest.raises(AssertionError, match=r"among \['other', 3\]"):
        made().step({"other": loss, 3: loss}, None, "a", 1, 1)  # type: ignore[dict-item]


def test_sparsifier_and_scheduler_are_a_pair() -> None:
    sparsifier, other = data(), data()
    scheduler = CubicDataScheduler(other, final=0.5, begin=0, end=4, every=2)
    for wrong in ({"data_sparsifier": sparsifier}, {}):
        with pytest.raises(ValueError, match="schedules another sparsifier"):
            made(**wrong, data_scheduler=scheduler)
    made(data_sparsifier=other, data_scheduler=scheduler)


def test_parameters_that_are_updated_inside_the_backward_are_not_stepped() -> None:
    model = Two()
    apply_optimizer_in_backward(torch.optim.SGD, model.encoder.parameters(), {"lr": 0.5})
    with pytest.raises(ValueError, match=r"\['encoder'\] have no parameters, or only fused tables"):
        made(model, updated_modules="encoder")
    stepped = made(model).optimizer.param_groups[0]["params"]
    assert set(stepped) == set(model.decoder.parameters())


def test_the_arguments_are_attributes() -> None:
    scheduler = made(accum_grad=np.int64(3), updated_modules="encoder", use_amp=False)
    assert (scheduler.accum_grad, scheduler.updated_modules, scheduler.use_amp) == (
        3,
        ["encoder"],
        False,
    )


def test_what_a_model_is_wrapped_in_does_not_matter() -> None:
    model = Two()
    compiled = torch.compile(model, backend="eager")
    scheduler = Steady("SGD", {"lr": 0.1}, compiled, updated_modules="decoder", use_amp=False)
    assert {id(p) for p in scheduler.optimizer.param_groups[0]["params"]} == {
        id(p) for p in model.decoder.parameters()
    }


@pytest.mark.parametrize(
    "wrong", [{"d_model": value} for value in (math.inf, math.nan, 0, "8")], ids=str
)
def test_schedules_check_their_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid d_model="):
        Noamlr("SGD", {"lr": 0.1}, Two(), **wrong)


def test_arguments_of_other_kinds() -> None:
    with pytest.raises(ValueError, match="Invalid model of type generator"):
        made(Two().parameters())  # type: ignore[arg-type]
    step = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(Two().parameters()), 1)
    with pytest.raises(ValueError, match="Invalid data_scheduler: it schedules another sparsifier"):
        made(data_scheduler=step)
    for wrong in ({"use_amp": "bf16"}, {"distributed": "false"}):
        with pytest.raises(ValueError, match="use_amp and distributed must be True or False"):
            made(**wrong)
