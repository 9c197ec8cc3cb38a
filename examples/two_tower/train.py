"""Training: wide, narrowed at half time, or through codes from then on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from dist_sparse import Advanced, compact, sparsify
from two_tower.data import Interactions
from two_tower.model import Towers, build, keyed

if TYPE_CHECKING:
    from dist_sparse.extras.codes import CodedTraining

__all__ = ["Settings", "loss", "train"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run. ``batch_size`` counts the whole world.

    Args:
        dim: columns of the tables.
        width: columns after the cut.
        lr: the learning rate.
        l2: factor, in the loss, of half the squares of an example's looked-up rows.
        epochs: passes over the training part.
        cut: epochs before the tables are cut to ``width``, and have codes; None is half of them.
        codes: bytes of a row as codes; None for tables of floats.
        batch_size: interactions in a step.
        seed: of weights, order and negatives.
        rank, world: of this process.
    """

    dim: int
    width: int
    lr: float = 0.4
    l2: float
    epochs: int
    cut: int | None = None
    codes: int | None = None
    batch_size: int
    seed: int
    rank: int
    world: int


def train(
    name: str, data: Interactions, settings: Settings
) -> tuple[DistributedModelParallel, CodedTraining | None]:
    """Return the model, trained from the seed, and its codes, if any. Collective.

    The learning rate is constant over the first half of the run, and falls linearly to 0 over the
    second. A narrowed model is returned with tables of ``width`` columns.
    """
    torch.manual_seed(settings.seed)
    model, optimizer = build(Towers(data.users, data.items, settings.dim), settings.world)
    each = data.steps(settings.batch_size)
    steps = settings.epochs * each
    cut = steps // 2 if settings.cut is None else settings.cut * each
    sparse = coded = None
    if settings.width < settings.dim:
        # Only the narrowed tables need this extra.
        from dist_sparse.extras.rotation import Rotation

        sparse = sparsify(
            model,
            optimizer,
            level=1 - settings.width / settings.dim,
            block="col",
            advanced=Advanced(rotate=Rotation([["user", "item"]])),
            schedule="one_shot",
            begin=cut,
            end=cut,
        )
    # disable=None: tqdm itself stays quiet when its output is not a terminal.
    bar = tqdm(total=steps, desc=name, disable=None if settings.rank == 0 else True)
    for epoch in range(settings.epochs):
        seed = settings.seed * 1_000_003 + epoch
        batches = data.epoch(seed, settings.batch_size, settings.rank, settings.world)
        for step, (user, items) in enumerate(batches, epoch * each):
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, 2 * (1 - step / steps))
            optimizer.zero_grad()
            loss(model, keyed(user, items), items, settings.l2).backward()
            optimizer.step()
            if sparse is not None:
                sparse.step()
            if settings.codes is not None and step == cut:
                if sparse is not None:
                    model, sparse = compact(model, sparse), None
                    # compact() gives the tables a new fused optimizer; the biases keep theirs.
                    _, (_, biases) = optimizer.optimizers
                    optimizer = CombinedOptimizer([model.fused_optimizer, biases])
                coded = _coded(model, optimizer, settings, each)
            if coded is not None:
                coded.step()
            bar.update()
    bar.close()
    return model if sparse is None else compact(model, sparse), coded


def _coded(
    model: nn.Module, optimizer: CombinedOptimizer, settings: Settings, steps: int
) -> CodedTraining:
    """Return the codes of both tables; ``steps`` is the length of an epoch."""
    from dist_sparse.extras.codes import quantize

    assert settings.codes is not None
    return quantize(
        model,
        optimizer,
        codes=settings.codes,
        begin=0,
        every=-(-steps // 8),  # 8 times an epoch
        # Otherwise the loss's L2 would shrink the decoded rows, not the floats.
        commitment=settings.l2,
    )


def loss(model: nn.Module, ids: KeyedJaggedTensor, items: Tensor, l2: float) -> Tensor:
    """Return the logistic loss of the interactions against their negatives, summed over this rank's
    examples."""
    scores, squares = model(ids, items)
    labels = torch.zeros_like(scores)
    labels[:, 0] = 1
    return (
        nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        + l2 * squares
    )
