"""What of an OptimScheduler is saved, and how does it come back, all of it or nothing?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dist_sparse.groups import group_over, world_ranks

if TYPE_CHECKING:
    from dist_sparse.optim.scheduler import OptimScheduler

__all__ = ["LIKE_PARAMETERS", "ONE_WIDE", "load_states", "states"]

_SPARSITY = ("data_sparsifier", "data_scheduler")

# What the optimizers of torch.optim keep in the shape of the parameter, or (Adafactor) with one dimension of size 1.
LIKE_PARAMETERS = frozenset(
    {
        "acc_delta",
        "ax",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "max_exp_avg_sq",
        "momentum_buffer",
        "prev",
        "square_avg",
        "step_size",
        "sum",
        "variance",
    }
)
ONE_WIDE = frozenset({"row_var", "col_var"})


def states(scheduler: OptimScheduler) -> dict[str, Any]:
    """See :meth:`OptimScheduler.state_dict`. Everything in it loads with ``torch.load``'s default
    ``weights_only=True``."""
    if scheduler._unfinished:
        warnings.warn(
            f"The state is of the middle of a real step: the gradients of {scheduler._unfinished} of "
            f"{scheduler.accum_grad} steps are not in it. Save where step_num is a multiple of accum_grad.",
            stacklevel=3,
        )
    saved: dict[str, Any] = {
        "optimizer": scheduler.optimizer.state_dict(),
        "scaler": None if scheduler.scaler is None else scheduler.scaler.state_dict(),
    }
    if scheduler._owned.fused:
        saved["fused_lr"] = scheduler._fused_lr
    for name in _SPARSITY:
        if (part := getattr(scheduler, name)) is not None:
            saved[name] = part.state_dict()
    return saved


def load_states(scheduler: OptimScheduler, saved: Mapping[str, Any]) -> None:
    """See :meth:`OptimScheduler.load_state_dict`."""
    optimizer, scaler = scheduler.optimizer, scheduler.scaler
    sparsity = [name for name in _SPARSITY if getattr(scheduler, name) is not None]
    # The optimizer's values may be the very tensors that train: a copy of the moment before is not needed, since
    # load_state_dict() replaces its state and never writes into it.
    before, scale = optimizer.state_dict(), {} if scaler is None else scaler.state_dict()
    error: Exception | None = None
    try:
        _check_parts(saved, sparsity)
        optimizer.load_state_dict(saved["optimizer"])
        _check_optimizer(optimizer, before)
        # None and {} are of runs without AMP, and of a scaler that was disabled: the scale stays what it is.
        if scaler is not None and saved.get("scaler"):
            scaler.load_state_dict(saved["scaler"])
            if not 0 < (found := scaler.get_scale()) < math.inf:
                raise ValueError(f"Invalid scale {found} of the scaler: must be a finite number > 0.")
    except ValueError as fault:
        error = fault
    except Exception as fault:  # torch's ways to say that something is not there, or of another type
        error = ValueError(f"The state does not fit: {type(fault).__name__}: {fault}.")
        error.__cause__ = fault
    try:
        if sparsity:
            group_over(world_ranks()).agree("load_state_dict() of an OptimScheduler", {}, error)
        elif error is not None:
            raise error
        for name in sparsity:
            getattr(scheduler, name).load_state_dict(saved[name])
    except BaseException:
        optimizer.load_state_dict(before)
        if scaler is not None:
            scaler.load_state_dict(scale)
        raise
    if (lr := saved.get("fused_lr")) is not None:
        scheduler._set_fused_lr(lr)


def _check_parts(saved: Any, sparsity: list[str]) -> None:
    if not isinstance(saved, Mapping):
        raise ValueError(f"Invalid state of type {type(saved).__name__}: must be what state_dict() gave.")
    if missing := [name for name in ("optimizer", *sparsity) if name not in saved]:
        raise ValueError(f"The state lacks {missing}; it has {sorted(saved)}.")
    if unknown := [name for name in _SPARSITY if name in saved and name not in sparsity]:
        raise ValueError(f"The state has {unknown}, which this OptimScheduler was not given.")


def _check_optimizer(optimizer: torch.optim.Optimizer, before: Mapping[str, Any]) -> None:
    """``load_state_dict()`` only counts groups and parameters; with another one's state, ``step()`` would fail. The
    state does not say whose it is: a relative's (Adam's in Adamax) is not found out here."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return  # others' groups and states may have any names and shapes
    groups = zip(before["param_groups"], optimizer.param_groups, strict=True)
    # Of what the groups had, the optimizer's own: learning rate schedulers put names there, too.
    if missing := [name for old, new in groups for name in old if name in optimizer.defaults and name not in new]:
        raise ValueError(f"The state is of another optimizer than {type(optimizer).__name__}: it lacks {missing}.")
    for at, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, part in optimizer.state.get(parameter, {}).items():
            if isinstance(part, Tensor) and not _fits(name, part, parameter):
                raise ValueError(
                    f"The state is of other parameters: {name} of number {at} has the shape {tuple(part.shape)}, the "
                    f"parameter {tuple(parameter.shape)}."
                )


def _fits(name: str, part: Tensor, parameter: Tensor) -> bool:
    """What is neither in the shape of the parameter nor nearly so (a user's own entry, a count) fits any."""
    if name in ONE_WIDE:
        return part.dim() == parameter.dim() and all(
            size in (1, whole) for size, whole in zip(part.shape, parameter.shape, strict=True)
        )
    return name not in LIKE_PARAMETERS or part.shape == parameter.shape
