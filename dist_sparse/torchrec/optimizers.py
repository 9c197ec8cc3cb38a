"""TorchRec's optimizers: several in one, and stand-ins for what runs inside the backward."""

from __future__ import annotations

from typing import Any

from dist_sparse.torchrec.types import CombinedOptimizer, FusedOptimizer, KeyedOptimizer


def combined(optimizer: object) -> list[Any] | None:
    """Return the optimizers inside a CombinedOptimizer; None for another optimizer."""
    if not isinstance(optimizer, CombinedOptimizer):
        return None
    return [part for _, part in optimizer.optimizers]


def is_fused(optimizer: object) -> bool:
    """Return whether an optimizer only represents one that runs inside the backward."""
    return isinstance(optimizer, FusedOptimizer)


def named_parameters(optimizer: object) -> dict[str, Any] | None:
    """Return the dict in which a keyed optimizer holds its parameters a second time, live; None for
    another optimizer."""
    # A CombinedOptimizer collects those of its parts anew at each read.
    if not isinstance(optimizer, KeyedOptimizer) or isinstance(optimizer, CombinedOptimizer):
        return None
    named: dict[str, Any] = optimizer.params
    return named
