"""The schedule counts the batches that end with a step of an optimizer, however Lightning runs them.

The reference is a loop without Lightning that calls ``sparse.step()`` where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dist_sparse import sparsify
from tests.extras.lightning.lightning_fits import (
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
    ("how", "steps"),
    [
        (lambda batch: (1, 1), 12),
        (lambda batch: (1, 0), 12),
        (lambda batch: (3, 1), 12),
        (lambda batch: (batch % 2, 1 - batch % 2), 12),
        (lambda batch: (0, 0) if batch % 4 else (1, 1), 3),
    ],
    ids=["together", "one alone", "more often", "in turns", "now and then"],
)
def test_several_optimizers_by_hand(how: Any, steps: int, tmp_path: Path) -> None:
    module = Manual(how)
    callback = sparsified(tmp_path, module)
    assert callback.training is not None and callback.training.scheduler.last_epoch == steps
    level = callback.training.scheduler.get_last_param()["bag"]
    assert level == 0.6 if steps > 9 else level < 0.6


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
