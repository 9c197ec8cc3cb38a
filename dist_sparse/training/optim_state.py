"""What of an OptimScheduler is saved, and how does it come back, all of it or nothing?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_sparse.groups import group_over, world_ranks

if TYPE_CHECKING:
    from dist_sparse.training.optim_scheduler import OptimScheduler

__all__ = ["load_states", "states"]

_SPARSITY = ("data_sparsifier", "data_scheduler")


def states(scheduler: OptimScheduler) -> dict[str, Any]:
    """See :meth:`OptimScheduler.state_dict`. Everything in it loads with ``torch.load``'s default
    ``weights_only=True``."""
    saved: dict[str, Any] = {
        "optimizer": scheduler.optimizer.state_dict(),
        "scaler": None if scheduler.scaler is None else scheduler.scaler.state_dict(),
    }
    for name in _SPARSITY:
        if (part := getattr(scheduler, name)) is not None:
            saved[name] = part.state_dict()
    return saved


def load_states(scheduler: OptimScheduler, saved: Mapping[str, Any]) -> None:
    """See :meth:`OptimScheduler.load_state_dict`."""
    sparsity = [name for name in _SPARSITY if getattr(scheduler, name) is not None]
    before = scheduler.optimizer.state_dict()
    # The optimizer's values may be the very tensors that train: a copy of the moment before is not needed, since
    # load_state_dict() replaces its state and never writes into it.
    error: Exception | None = None
    try:
        if missing := [name for name in ("optimizer", *sparsity) if name not in saved]:
            raise ValueError(f"The state lacks {missing}; it has {sorted(saved)}.")
        if unknown := [name for name in _SPARSITY if name in saved and name not in sparsity]:
            raise ValueError(f"The state has {unknown}, which this OptimScheduler was not given.")
        scheduler.optimizer.load_state_dict(saved["optimizer"])
    except Exception as fault:
        error = fault
    try:
        if sparsity:
            group_over(world_ranks()).agree("load_state_dict() of an OptimScheduler", {}, error)
        elif error is not None:
            raise error
        for name in sparsity:
            getattr(scheduler, name).load_state_dict(saved[name])
    except BaseException:
        scheduler.optimizer.load_state_dict(before)
        raise
    # None and {} are of runs without AMP, and of a scaler that was disabled: the scale starts afresh.
    if scheduler.scaler is not None and saved.get("scaler"):
        scheduler.scaler.load_state_dict(saved["scaler"])
