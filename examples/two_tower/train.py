"""Training: wide, or narrowed at half time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from tqdm import tqdm

from dist_sparse import compact, sparsify
from two_tower.data import Interactions
from two_tower.model import LR, build, keyed

__all__ = ["Settings", "train"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run. ``batch_size`` counts the whole world.

    Args:
        dim: columns of the tables.
        width: columns that are left from half time on.
        l2: factor of half the squares of what an example looks up, in its loss.
        epochs: passes over the training part.
        batch_size: interactions in a step.
        seed: of weights, order and negatives.
        rank, world: of this process.
    """

    dim: int
    width: int
    l2: float
    epochs: int
    batch_size: int
    seed: int
    rank: int
    world: int


def train(name: str, data: Interactions, settings: Settings) -> DistributedModelParallel:
    """Return the model, trained from the seed. Collective.

    The learning rate is constant over the first half of the run, and falls linearly to 0 over the second. A narrowed
    model is returned with tables of ``width`` columns.
    """
    model, optimizer = build(data.users, data.items, settings.dim, settings.seed, settings.world)
    steps = settings.epochs * data.steps(settings.batch_size)
    sparse = None
    if settings.width < settings.dim:
        sparse = sparsify(
            model,
            optimizer,
            level=1 - settings.width / settings.dim,
            block="col",
            rotate=[["user", "item"]],
            schedule="one_shot",
            begin=steps // 2,
            end=steps // 2,
        )
    # disable=None: tqdm itself stays quiet when its output is not a terminal.
    bar = tqdm(total=steps, desc=name, disable=None if settings.rank == 0 else True)
    for epoch in range(settings.epochs):
        seed = settings.seed * 1_000_003 + epoch
        for user, items in data.epoch(seed, settings.batch_size, settings.rank, settings.world):
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, 2 * (1 - bar.n / steps))
            optimizer.zero_grad()
            _loss(model, user, items, settings.l2).backward()
            optimizer.step()
            if sparse is not None:
                sparse.step()
            bar.update()
    bar.close()
    return model if sparse is None else compact(model, sparse)


def _loss(model: nn.Module, user: Tensor, items: Tensor, l2: float) -> Tensor:
    """The logistic loss of the interactions against their negatives, summed over this rank's examples."""
    scores, squares = model(keyed(user, items), items)
    labels = torch.zeros_like(scores)
    labels[:, 0] = 1
    return nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum") + l2 * squares
