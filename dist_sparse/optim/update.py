"""How are weights updated once, from the gradients that a real step has gathered: unscale, clip, step, or skip?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dist_sparse.optim.gradients import clip_gradients, gradient_norm
from dist_sparse.optim.ownership import Owned

if TYPE_CHECKING:
    from dist_sparse.optim.scheduler import OptimScheduler

__all__ = ["update"]


def update(scheduler: OptimScheduler, real_step: int, logger: Any) -> bool:
    """Whether weights were written: the same on all ranks. Collective if gradients lie in pieces over ranks.

    Gradients whose norm is not finite update nothing, and a scaler backs off; ``logger.info`` is told of ``real_step``.
    Gradients are gone afterwards in any case, after an error as well.
    """
    if not scheduler._owned.parameters:
        return True  # fused tables alone: they were written in the backward
    scaler = scheduler.scaler
    try:
        return _update(scheduler, real_step, logger)
    except BaseException:
        if scaler is not None:
            scaler.update(scaler.get_scale())  # else it says for ever that gradients have been unscaled already
        raise
    finally:
        scheduler.optimizer.zero_grad()


def _update(scheduler: OptimScheduler, real_step: int, logger: Any) -> bool:
    optimizer, owned, scaler = scheduler.optimizer, scheduler._owned, scheduler.scaler
    parameters = owned.parameters
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    if scaler is not None:
        _unscale(scaler, optimizer, owned)
    norm, any_gradient = gradient_norm(parameters, owned.pieces, scheduler.grad_norm_type)
    finite = bool(torch.isfinite(norm))
    if not finite:
        if logger is not None:
            logger.info(f"Real step {real_step}: the norm of the gradients is {float(norm)}, so nothing is updated.")
        if scaler is not None:
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            # As GradScaler does where it finds them by itself, which it can't on another rank.
            scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})
    elif any_gradient:
        if scheduler.grad_clip is not None:
            clip_gradients(parameters, norm, scheduler.grad_clip)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    elif scaler is not None and owned.pieces:
        scaler.update()  # what _unscale() has begun on every rank
    return finite and (any_gradient or owned.moves_in_backward)


def _unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, owned: Owned) -> None:
    """Unscales the gradients. A rank that has none lends one of zeros, so that all ranks' scales go on alike."""
    lent = None
    if all(parameter.grad is None for parameter in owned.parameters):
        if not owned.pieces:
            return
        lent = owned.parameters[0]
        lent.grad = torch.zeros_like(lent)
    scaler.unscale_(optimizer)
    if lent is not None:
        lent.grad = None
