"""How are weights updated once, from the gradients that a real step has gathered: unscale, clip, step, or skip?"""

from __future__ import annotations

from typing import Any

import torch

from dist_sparse.training.gradients import clip_gradients, gradient_norm
from dist_sparse.training.owned import Owned

__all__ = ["update"]


def update(
    optimizer: torch.optim.Optimizer,
    owned: Owned,
    scaler: torch.amp.GradScaler | None,
    *,
    grad_clip: float | None,
    norm_type: float,
    logger: Any,
    real_step: int,
) -> bool:
    """Whether weights were written: the same on all ranks. Collective if gradients lie in pieces over ranks.

    Gradients whose norm is not finite update nothing, and a scaler backs off. They are gone afterwards in any case.
    """
    parameters = owned.parameters
    if not parameters:
        return True  # fused tables alone: they were written in the backward
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    if scaler is not None:
        _unscale(scaler, optimizer, owned)
    norm, any_gradient = gradient_norm(parameters, owned.pieces, norm_type)
    finite = bool(torch.isfinite(norm))
    if not finite:
        if logger is not None:
            logger.info(f"Real step {real_step}: the norm of the gradients is {float(norm)}, so nothing is updated.")
        if scaler is not None:
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            # As GradScaler does where it finds them by itself, which it can't on another rank.
            scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})
    elif any_gradient:
        if grad_clip is not None:
            clip_gradients(parameters, norm, grad_clip)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    elif scaler is not None and owned.pieces:
        scaler.update()  # what _unscale() has begun on every rank
    optimizer.zero_grad()
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
