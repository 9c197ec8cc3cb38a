"""One update of the weights: unscale, norm over all ranks, clip, step; or nothing, if the norm is not finite.

Replicated gradients are equal on all ranks, so their norm is taken locally. Of sharded ones the norms of all ranks are
gathered, 16 bytes each. Without sharded parameters nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dist_sparse.groups import group_over, world_ranks
from dist_sparse.optim.backward import Owned

__all__ = ["clip_gradients", "gradient_norm", "update_weights"]


def update_weights(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    owned: Owned,
    *,
    grad_clip: float | None,
    norm_type: float,
) -> tuple[float, bool]:
    """Update the weights from their gradients, which are dropped in any case. Collective with sharded parameters.

    Returns:
        The norm of the gradients, and whether weights were updated; both the same on all ranks. A norm that is not
        finite updates nothing, and the scaler backs off.
    """
    if not owned.parameters:
        return 0.0, True  # fused tables alone: they were updated in the backward
    try:
        for parameter in owned.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        if scaler is not None:
            _unscale(scaler, optimizer, owned)
        norm, any_gradient = gradient_norm(owned.parameters, owned.pieces, norm_type)
        finite = bool(torch.isfinite(norm))
        if finite and any_gradient:
            if grad_clip is not None:
                clip_gradients(owned.parameters, norm, grad_clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None and not finite:
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            # GradScaler resets it where it finds the values itself, which it can't on another rank.
            scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})
        elif scaler is not None and (any_gradient or owned.pieces):  # where unscale_() was called
            scaler.update()
    except BaseException:
        if scaler is not None:
            scaler.update(scaler.get_scale())  # else it refuses the next unscale_()
        raise
    finally:
        optimizer.zero_grad()
    return float(norm), finite and (any_gradient or bool(owned.fused))


def _unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, owned: Owned) -> None:
    """Unscale the gradients. With sharded parameters, a rank without gradients calls it on zeros, so that the scales of
    all ranks stay equal."""
    lent = None
    if all(parameter.grad is None for parameter in owned.parameters):
        if not owned.pieces:
            return
        lent = owned.parameters[0]
        lent.grad = torch.zeros_like(lent)
    scaler.unscale_(optimizer)
    if lent is not None:
        lent.grad = None


def gradient_norm(
    parameters: Sequence[nn.Parameter], pieces: frozenset[nn.Parameter], norm_type: float
) -> tuple[Tensor, bool]:
    """Return the norm of all gradients as one vector. Collective over the world if ``pieces`` may be nonempty on a
    rank (16 bytes), else local.

    Args:
        parameters: of this rank.
        pieces: those that are this rank's part of a larger tensor. The others are equal on all ranks.
        norm_type: p of the p-norm, > 0, ``inf`` for the largest absolute value.

    Returns:
        A scalar, on the device of the gradients, and whether any rank has a gradient at all. Not finite if a gradient
        is not, or if the norm overflows. Without pieces it equals :func:`torch.nn.utils.get_total_norm` bit for bit.
    """
    replicated = [p.grad for p in parameters if p.grad is not None and p not in pieces]
    whole = _total(replicated, norm_type)
    if not pieces:
        return whole, bool(replicated)
    parts = [p.grad for p in parameters if p.grad is not None and p in pieces]
    mine = _total([grad for grad in parts if _counts(grad)], norm_type)
    sent = torch.tensor([float(mine), float(bool(replicated or parts))], dtype=torch.float64)
    received = group_over(world_ranks()).all_gather(sent)
    norms = torch.cat([received[:, 0], torch.tensor([float(whole)], dtype=torch.float64)])
    # Sums of powers in float64 do not overflow where float32 norms have not.
    total = torch.linalg.vector_norm(norms, norm_type).to(whole.dtype).to(whole.device)
    return total, bool(received[:, 1].any())


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, longest: float) -> None:
    """Scale the gradients in place so that their norm, ``norm``, is at most ``longest``. Local."""
    factor = float(torch.clamp(longest / (norm + 1e-6), max=1.0))  # as in torch.nn.utils.clip_grad_norm_
    if factor < 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                _values(parameter.grad).mul_(factor)


def _total(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    # Empty ones (a batch without ids) have no largest value, and torch refuses them for norm_type=inf.
    filled = [values for values in map(_values, grads) if values.numel()]
    return torch.nn.utils.get_total_norm(filled, norm_type)


@torch.no_grad()
def _values(grad: Tensor) -> Tensor:
    """The storage of a gradient on this rank: the entries of a sparse one, the local part of a DTensor."""
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local.values() if local.is_sparse else local


def _counts(grad: Tensor) -> bool:
    """Whether this rank counts its piece in the norm: of a DTensor's replicas only the first does."""
    if not hasattr(grad, "device_mesh"):
        return True
    coordinate, placements = grad.device_mesh.get_coordinate(), grad.placements  # type: ignore[attr-defined]
    if coordinate is None:
        return False
    if any(place.is_partial() for place in placements):
        raise ValueError(f"Invalid gradient with placements {placements}: only Shard and Replicate have a norm here.")
    return all(place.is_shard() or at == 0 for place, at in zip(placements, coordinate, strict=True))
