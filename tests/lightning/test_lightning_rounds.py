"""The schedule counts the steps that optimizers really made, however Lightning runs them.

The reference is a loop without Lightning that calls ``sparse.step()`` where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn, optim
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dist_sparse import sparsify
from dist_sparse.lightning import OptimizerRounds
from tests.lightning.lightning_fits import (
    PLAN,
    Collected,
    Net,
    adam,
    batches,
    quiet,
    sparsified,
    trainer,
    zero_rows,
)


def looped(module: Net, steps: int, *, accumulate: int = 1, clip: float = 0.0) -> list[int]:
    """Trains without Lightning; how many rows were zero in each forward."""
    optimizer = module.configure_optimizers()
    training = sparsify(module, optimizer, **PLAN)
    zeros = []
    for number, (ids,) in enumerate(list(batches(steps))):
        (module.loss(ids) / accumulate).backward()
        zeros.append(zero_rows(module.bag.weight))
        if number % accumulate == accumulate - 1 or number == steps - 1:
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            training.step()
            optimizer.zero_grad()
    training.detach()
    return zeros


def same(module: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(p, q) for p, q in zip(module.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.0), (3, 0.0), (5, 0.01)])
def test_equals_a_loop_without_lightning(accumulate: int, clip: float, tmp_path: Path) -> None:
    """Bit for bit, and every forward sees the same zeros; 23 batches leave a rest to accumulate."""
    expected = Net()
    zeros = looped(expected, 23, accumulate=accumulate, clip=clip)
    found = Net()
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip or None}
    callback = sparsified(tmp_path, found, 23, **options)
    assert found.trained == zeros and zeros[-1] > 0
    assert same(found, expected)
    assert callback.training is not None and callback.training.scheduler.last_epoch == -(
        -23 // accumulate
    )


def test_bf16_mixed(tmp_path: Path) -> None:
    found = Net()
    callback = sparsified(tmp_path, found, precision="bf16-mixed")
    assert callback.training is not None and callback.training.scheduler.last_epoch == 12
    assert found.trained[-1] == round(0.6 * 40)


class Overflowing(Net):
    """Its loss is infinite in some batches."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (
            float("inf") if batch_idx in (0, 4, 5) else 1.0
        )


def test_steps_that_a_gradient_scaler_skips_do_not_count(tmp_path: Path) -> None:
    found = Overflowing()
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))
    callback = sparsified(tmp_path, found, plugins=[scaled])
    assert callback.training is not None and callback.training.scheduler.last_epoch == 9
    assert (
        found.trained[1] == found.trained[0]
        and found.trained[5] == found.trained[6] == found.trained[4]
    )
    assert not bool(found.bag.weight.isnan().any())


class Skipping(Net):
    """It skips some batches."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None if batch_idx % 3 == 0 else super().training_step(batch, batch_idx)


def test_batches_that_are_skipped_do_not_count(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="returned `None`"):
        callback = sparsified(tmp_path, Skipping())
    assert callback.training is not None and callback.training.scheduler.last_epoch == 8


class Manual(Net):
    """Two optimizers, stepped as ``how`` says."""

    def __init__(self, how: Callable[[int], tuple[int, int]]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, times in zip(self.optimizers(), self.how(batch_idx), strict=True):
            for _ in range(times):
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return adam(self.bag.parameters()), optim.SGD(self.over.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("how", "rounds"),
    [
        (lambda batch: (1, 1), 12),
        (lambda batch: (1, 0), 12),
        (lambda batch: (3, 1), 36),
        (lambda batch: (batch % 2, 1 - batch % 2), 6),
        (lambda batch: (0, 0) if batch % 4 else (1, 1), 3),
    ],
    ids=["together", "one alone", "more often", "in turns", "now and then"],
)
def test_several_optimizers_by_hand(how: Any, rounds: int, tmp_path: Path) -> None:
    module = Manual(how)
    callback = sparsified(tmp_path, module)
    assert callback.training is not None and callback.training.scheduler.last_epoch == rounds
    level = callback.training.scheduler.get_last_param()["bag"]
    assert level == 0.6 if rounds > 9 else level < 0.6


def test_torchrecs_optimizers() -> None:
    """One that is made of others counts by itself, also where nothing that torch steps has a
    gradient."""
    module = Net()
    ids = next(iter(batches()))[0]
    dense = KeyedOptimizerWrapper(
        dict(module.over.named_parameters()), lambda params: optim.SGD(params, lr=0.1)
    )
    table = KeyedOptimizerWrapper(
        dict(module.bag.named_parameters()), lambda params: optim.SGD(params, lr=0.1)
    )
    combined = CombinedOptimizer([("dense", dense), ("table", table)])
    rounds = OptimizerRounds([combined])
    for _ in range(3):
        combined.zero_grad()
        module.loss(ids).backward()
        combined.step()
    assert rounds.rounds == 3 and rounds.counts == [3, 3, 3]
    combined.zero_grad(set_to_none=True)
    combined.step()
    assert rounds.rounds == 4
    rounds.stop()
    combined.step()
    assert rounds.rounds == 4
    with pytest.raises(ValueError, match="the steps of 1 optimizers; the model has 3 here"):
        rounds.load([1])
    assert issubclass(FusedOptimizer, torch.optim.Optimizer)


def test_goes_on_from_saved_counts() -> None:
    """Two that step in turns, cut between the two: the second one's step ends the round that the
    first began."""
    module = Net()
    both = [optim.SGD(module.bag.parameters(), lr=0.1), optim.SGD(module.over.parameters(), lr=0.1)]
    module.loss(next(iter(batches()))[0]).backward()
    before = OptimizerRounds(both)
    for number in (0, 1, 0):
        both[number].step()
    before.stop()
    after = OptimizerRounds(both)
    after.load(before.counts)
    assert (before.rounds, after.rounds) == (2, 2)
    both[1].step()
    assert after.rounds == 2
    both[0].step()
    assert after.rounds == 3


def test_a_table_of_torchrecs(tmp_path: Path) -> None:
    module = Collected()
    callback = sparsified(tmp_path, module)
    assert callback.training is not None and list(callback.training.sparsifier.data_groups) == [
        "item"
    ]
    assert module.trained[-1] == 24


def test_nothing_counts_between_fits(tmp_path: Path) -> None:
    """The hooks are gone with the fit."""
    module = Net()
    callback = sparsified(tmp_path, module)
    with quiet():
        trainer(tmp_path).fit(module, batches())
    assert callback.training is not None and callback.training.scheduler.last_epoch == 12
    assert zero_rows(module.bag.weight) < 24
