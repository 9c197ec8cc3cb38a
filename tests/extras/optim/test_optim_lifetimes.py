"""OptimSchedulers that are deleted, fail or are replaced leave nothing in another one's steps."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dist_sparse import ROW, DataNormSparsifier
from dist_sparse.schedulers import LinearDataScheduler
from tests.extras.optim.optim_loop import Steady, Two, batch, copied, same, train


def made(model: nn.Module, **conf: Any) -> Steady:
    return Steady("SGD", {"lr": 0.1}, model, **{"use_amp": False, **conf})


@pytest.mark.parametrize("use_amp", [False, True])
def test_a_new_scheduler_drops_gradients_of_an_unfinished_real_step(use_amp: bool) -> None:
    model, fresh = Two(), Two()
    first = made(model, accum_grad=4, use_amp=use_amp)
    first.step({"loss": model(batch(1))["loss"]}, None, "a", 1, 1)
    assert any(p.grad is not None for p in model.parameters())
    second = made(model)
    assert same(train(model, [second], 3), train(fresh, [made(fresh)], 3))


def test_a_load_drops_gradients_of_an_unfinished_real_step() -> None:
    model, fresh = Two(), Two()
    scheduler, other = made(model, accum_grad=2), made(fresh, accum_grad=2)
    state = scheduler.state_dict()
    scheduler.step({"loss": model(batch(9))["loss"]}, None, "a", 1, 1)
    scheduler.load_state_dict(state)
    assert same(train(model, [scheduler], 4), train(fresh, [other], 4))


@pytest.mark.parametrize("conf", [{"accum_grad": 2}, {"accum_grad": 2, "use_amp": True}, {}])
def test_one_that_an_exception_keeps_alive_is_no_obstacle(conf: dict[str, Any]) -> None:
    """As in a notebook: the last traceback holds the frames of the failed call."""
    model, fresh = Two(), Two()

    def call(model: nn.Module, fail: bool) -> dict[str, torch.Tensor]:
        scheduler = made(model, **conf)
        scheduler.step({"loss": model(batch(7))["loss"]}, None, "a", 1, 1)
        if fail:
            raise KeyError("of the user's")
        return train(model, [scheduler], 4, first=2)

    with pytest.raises(KeyError) as held:
        call(model, fail=True)
    for parameter, value in zip(model.parameters(), fresh.parameters(), strict=True):
        parameter.data.copy_(value)
    assert same(call(model, fail=False), call(fresh, fail=False))
    assert held.value.__traceback__ is not None


def test_a_replaced_scheduler_can_still_be_stepped() -> None:
    model = Two()
    old, new = made(model), made(model)
    losses = model(batch(1))
    new.step(losses, None, "new", 1, 1)
    before = copied(model)
    old.step(model(batch(2)), None, "old", 2, 1)
    assert not same(before, copied(model))
    assert same(train(model, [old], 5, first=3), copied(model))


@pytest.mark.parametrize("modules", [[None], [["encoder", "decoder"]], ["encoder", "decoder"]])
@pytest.mark.parametrize("different", [False, True])
def test_leaves_beside_the_model_have_gradients_as_of_a_plain_backward(
    modules: list[Any], different: bool
) -> None:
    model, weight, alone = Two(), nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(2.0))
    names = ["loss", "other"] if different else ["loss", "loss"]
    schedulers = [
        made(model, updated_modules=part, optim_loss=name)
        for part, name in zip(modules, names, strict=False)
    ]
    found = model(batch(1))
    for name in dict.fromkeys(scheduler.optim_loss or "loss" for scheduler in schedulers):
        (found[name] * alone).backward(inputs=[alone], retain_graph=True)
    losses = {name: loss * weight for name, loss in found.items()}
    for scheduler in schedulers:
        scheduler.step(losses, None, "a", 1, 1)
    assert weight.grad is not None and torch.allclose(weight.grad, alone.grad)


def test_a_sparsifier_in_two_schedulers_is_refused() -> None:
    model = Two()
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    sparsifier.add_data("w", model.decoder.weight)
    schedule = LinearDataScheduler(sparsifier, "sparsity_level", final=0.5, begin=0, end=2, every=1)
    parts = {"data_sparsifier": sparsifier, "data_scheduler": schedule}
    kept = made(model, updated_modules="encoder", **parts)
    with pytest.raises(
        ValueError, match="Invalid data_sparsifier: another OptimScheduler of the model steps it"
    ):
        made(model, updated_modules="decoder", **parts)
    train(model, [kept, made(model, updated_modules="decoder")], 2)
    made(model, updated_modules="encoder", **parts)  # in the place of the first


def test_one_forward_has_one_precision() -> None:
    model = Two()
    low = made(model, updated_modules="encoder", use_amp=True, amp_dtype=torch.bfloat16)
    plain = made(model, updated_modules="decoder")
    for scheduler in (low, plain):
        with scheduler.forward_context(1):
            assert model.decoder(torch.zeros(1, 6)).dtype == torch.bfloat16
    with pytest.raises(
        ValueError, match=r"another OptimScheduler of the model has torch\.bfloat16"
    ):
        made(model, updated_modules="decoder", use_amp=True)


def test_numbers_of_a_configuration() -> None:
    model, same_model = Two(), Two()
    conf = {"accum_grad": np.int64(2), "step_per_update": np.int32(1), "grad_clip": np.float32(0.5)}
    scheduler = made(model, **conf, ft_factor=np.float32(0.5), grad_norm_type=np.inf)
    other = made(
        same_model, accum_grad=2, grad_clip=0.5, ft_factor=0.5, grad_norm_type=float("inf")
    )
    assert same(train(model, [scheduler], 4), train(same_model, [other], 4))


def test_the_base_class_of_optimizers_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid optim_type='Optimizer'"):
        Steady("Optimizer", {}, Two())


class Fails(torch.autograd.Function):
    """Its backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise MemoryError("too large a batch")


@pytest.mark.parametrize("use_amp", [False, True])
@pytest.mark.parametrize("names", [[None], ["encoder", "decoder"]])
@pytest.mark.parametrize("at", [1, 2])
def test_a_backward_that_fails_leaves_no_gradients(
    at: int, names: list[Any], use_amp: bool
) -> None:
    """The decoder has gradients by then, the encoder has none. The rest of the real step makes its
    update."""
    model, fresh = Two(), Two()
    pairs = [
        [made(each, updated_modules=name, accum_grad=2, use_amp=use_amp) for name in names]
        for each in (model, fresh)
    ]
    for step_num in range(1, at + 1):
        if step_num < at:
            train(model, pairs[0], step_num, first=step_num)
            continue
        failing = model.encoder.register_forward_hook(
            lambda module, args, result: Fails.apply(result)
        )
        losses = model(batch(step_num))
        with pytest.raises(MemoryError):
            pairs[0][0].step(losses, None, "a", step_num, 1)
        failing.remove()
    assert all(p.grad is None for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs[0][0].state_dict()
    assert same(train(model, pairs[0], 6, first=at + 1), train(fresh, pairs[1], 6, first=at + 1))


@pytest.mark.parametrize("use_amp", [False, True])
def test_an_update_that_fails_leaves_no_gradients(
    use_amp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fresh = Two(), Two()
    scheduler, plain = (made(each, use_amp=use_amp) for each in (model, fresh))

    def fails(closure: Any = None) -> None:
        raise MemoryError("no room for its state")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(scheduler.optimizer, "step", fails)
        train(model, [scheduler], 1)
    assert all(p.grad is None for p in model.parameters())
    assert same(train(model, [scheduler], 3, first=2), train(fresh, [plain], 3, first=2))
    assert repr(scheduler.state_dict()) == repr(plain.state_dict())


@pytest.mark.parametrize("copied_by", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_refused(copied_by: Any) -> None:
    model = Two()
    scheduler = made(model, accum_grad=2)
    train(model, [scheduler], 1)
    with pytest.raises(
        TypeError, match=r"Steady can't be copied or pickled: .* load state_dict\(\)"
    ):
        copied_by(scheduler)
    train(model, [scheduler], 4, first=2)


def test_the_copy_of_a_model_has_no_part_in_the_original() -> None:
    model = Two()
    scheduler = made(model)
    twin = copy.deepcopy(model)
    other = made(twin)
    before = copied(model)
    assert not same(train(twin, [other], 2), before)
    assert same(before, copied(model))
    assert same(train(model, [scheduler], 2), copied(twin))


def test_a_refused_step_changes_no_other_scheduler() -> None:
    model = Two()
    old, new = made(model, accum_grad=2), made(model, accum_grad=2)
    train(model, [new], 2)
    with pytest.raises(AssertionError, match="There is no loss named 'loss'"):
        old.step({"another": model(batch(3))["loss"]}, None, "a", 3, 1)
    train(model, [new], 4, first=3)
