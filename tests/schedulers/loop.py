"""Training loops and sparsifiers for the tests of the ready schedulers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_sparse.schedulers import (
    CosineDataScheduler,
    CubicDataScheduler,
    ExponentialDataScheduler,
    LinearDataScheduler,
    curves,
)
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["GROWING", "level_of", "run", "sparsifier_of"]

GROWING: dict[Any, curves.Curve] = {
    LinearDataScheduler: curves.linear,
    CubicDataScheduler: curves.cubic,
    CosineDataScheduler: curves.cosine,
    ExponentialDataScheduler: curves.exponential,
}


class Counting(BaseDataSparsifier):
    """Notes the level with which each mask update ran."""

    def update_mask(self, name: str, data: Tensor, sparsity_level: float, **config: Any) -> None:
        self.__dict__.setdefault("updates", []).append((name, sparsity_level))


def sparsifier_of(*names: str) -> Any:
    return Counting([(name, torch.ones(2, 2)) for name in names], sparsity_level=0.5)


def level_of(sparsifier: Any, name: str = "w") -> float:
    level: float = sparsifier.data_groups[name]["sparsity_level"]
    return level


def run(sparsifier: Any, scheduler: BaseDataScheduler, steps: int) -> list[tuple[float, bool]]:
    """The training loop; what is in force for the sparsifier's step at each step."""
    seen = []
    for _ in range(steps):
        seen.append((level_of(sparsifier), sparsifier.enable_mask_update))
        sparsifier.step()
        scheduler.step()
    return seen
