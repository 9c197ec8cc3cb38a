"""How many rounds of optimizer steps has a training loop really made?

A round is one step of every optimizer that steps most often: the most steps that any one optimizer has made. Two
optimizers that step in turns make one round together, one that steps four times in a batch makes four. A step counts
when it has happened: not a batch whose gradients are only accumulated, not a step that a gradient scaler has skipped,
not one without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer.hooks import Hook
from dist_sparse.enforcer.optimizers import leaves

__all__ = ["OptimizerRounds"]


class OptimizerRounds:
    """Counts from its construction on, until :meth:`stop`.

    Args:
        optimizers: as the training loop has them, wrapped or not.

    Raises:
        ValueError: something is no optimizer.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        counted = {id(each): each for optimizer in optimizers for each in _that_step(optimizer)}
        self._counts = [0] * len(counted)
        self._handles: list[RemovableHandle] = [
            each.register_step_post_hook(Hook(partial(self._stepped, number)))
            for number, each in enumerate(counted.values())
        ]

    @property
    def rounds(self) -> int:
        """How many there were."""
        return max(self._counts, default=0)

    @property
    def counts(self) -> list[int]:
        """By optimizer, to be saved."""
        return list(self._counts)

    def load(self, counts: Sequence[int]) -> None:
        """Goes on from :attr:`counts` of the same optimizers.

        Raises:
            ValueError: they are others.
        """
        if len(counts) != len(self._counts):
            raise ValueError(
                f"Invalid state: it has the steps of {len(counts)} optimizers; the model has {len(self._counts)} here."
            )
        self._counts = list(counts)

    def stop(self) -> None:
        """Ends counting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _stepped(self, number: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # The gradients of fused tables are gone: their optimizers' steps always count.
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        if _holds_others(optimizer) or any(gradient is not None for gradient in gradients):
            self._counts[number] += 1


def _that_step(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The innermost optimizers, and one that is made of fused ones or of several: torch's hooks run on both."""
    yield from leaves(optimizer)
    while not _holds_others(optimizer) and hasattr(optimizer, "_optimizer"):  # as LightningOptimizer does
        optimizer = optimizer._optimizer
    if _holds_others(optimizer):
        yield optimizer


def _holds_others(optimizer: Any) -> bool:
    """Whether it is TorchRec's CombinedOptimizer or FusedOptimizer."""
    return any(kind.__name__ in ("CombinedOptimizer", "FusedOptimizer") for kind in type(optimizer).__mro__)
