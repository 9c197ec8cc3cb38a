"""Models, schedulers and loops for the tests of OptimScheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.extras.optim import OptimScheduler

__all__ = ["Clock", "Log", "Steady", "Two", "batch", "copied", "same", "train"]


class Two(nn.Module):
    """Two modules and two losses that share a forward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.decoder = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.decoder(self.encoder(x)).float()
        return {"loss": y.square().mean(), "other": (y - 1).abs().mean()}


class Steady(OptimScheduler):
    """Constant learning rate; records the calls of ``update_lr``. ``scale`` is the initial scale
    under AMP."""

    def sche_init(self, **sche_conf: Any) -> None:
        self.conf, self.base, self.asked = sche_conf, self.get_lr(), []
        if self.scaler is not None and "scale" in sche_conf:
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": sche_conf["scale"]})

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        self.asked.append((real_step, epoch_num))
        return self.base


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, line: str) -> None:
        self.lines.append(line)


class Clock:
    """Records the clocks entered, and calls ``inside`` in them."""

    def __init__(self, inside: Callable[[str], None] = lambda name: None) -> None:
        self.names: list[list[str]] = []
        self.inside = inside

    @contextmanager
    def __call__(self, names: list[str]) -> Iterator[None]:
        self.names.append(names)
        yield
        self.inside(names[0])


def batch(seed: int, size: int = 5) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def train(
    model: nn.Module, schedulers: list[Any], steps: int, first: int = 1, **more: Any
) -> dict[str, Tensor]:
    """Run steps ``first`` to ``steps``, passing the losses of each forward to all schedulers;
    return the weights."""
    for step_num in range(first, steps + 1):
        with schedulers[0].forward_context(step_num):
            losses = model(batch(step_num))
        for scheduler in schedulers:
            scheduler.step(losses, None, "main", step_num, 1, **more)
    return copied(model)
