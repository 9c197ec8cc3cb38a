"""A small model with a table, layers and two optimizers, in one process, and how it trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse import Checkpoints, SparseTraining, sparsify

__all__ = ["Job", "flipped", "same"]


@dataclass
class Job:
    """A model, what steps it, and its checkpoints. Each has other weights at first than its seed's
    neighbours."""

    root: Path
    seed: int = 0
    sparse: bool = True
    every: int = 1
    keep: int = 3
    lr: float = 0.1
    checkpoints: Checkpoints = field(init=False)
    model: nn.Module = field(init=False)
    optimizers: list[torch.optim.Optimizer] = field(init=False)
    masks: SparseTraining | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = nn.Sequential(nn.EmbeddingBag(50, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        table, _, layer = self.model
        self.optimizers = [
            torch.optim.Adagrad(table.parameters(), lr=self.lr),
            torch.optim.AdamW(layer.parameters(), lr=self.lr / 10, betas=(0.8, 0.9)),
        ]
        self.checkpoints = Checkpoints(self.root, every=self.every, keep=self.keep)
        if self.sparse:
            self.masks = sparsify(
                self.model, self.optimizers, level=0.6, block="row", begin=2, end=8, every=2
            )

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizers, "sparse": self.masks}

    def train(self, start: int, stop: int, *, save: bool = False, extra: Any = None) -> None:
        for step in range(start, stop):
            ids = torch.randint(50, (4, 5), generator=torch.Generator().manual_seed(step))
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.model(ids).square().sum().backward()
            for optimizer in self.optimizers:
                optimizer.step()
            if self.masks is not None:
                self.masks.step()
            if save:
                self.checkpoints.save(step + 1, **self.parts, extra=extra)

    def state(self) -> dict[str, Tensor]:
        """All tensors: weights, masks and optimizer state."""
        found = dict(self.model.state_dict())
        for number, optimizer in enumerate(self.optimizers):
            for param, held in optimizer.state_dict()["state"].items():
                found |= {f"{number}.{param}.{name}": value for name, value in held.items()}
        if self.masks is not None:
            found["mask"] = self.masks.sparsifier.full_mask(*self.masks.sparsifier.data_groups)
        return {name: value.clone() for name, value in found.items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether all are equal, bit for bit."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
