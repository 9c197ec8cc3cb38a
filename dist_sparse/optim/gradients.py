"""From the losses of one forward to the updates of several optimizers.

Optimizers that share a forward can't alternate backward and step: the first step would overwrite
weights that the second backward still needs. So the gradients of all of them are taken at once. A
loss leaves no gradients on parameters of the model that its optimizer does not own.

Optimizers of one loss share one backward. Several losses need one backward each, which DDP and
TorchRec don't support. Replicated gradients are equal on all ranks; of sharded ones all ranks
gather the norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse.groups import group_over, world_ranks
from dist_sparse.optim.parameters import Gradients, Owned, Wiring

NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
"""Leaves losses and gradients as they are, and always steps."""


class Claim(NamedTuple):
    """The gradients that one optimizer wants from a forward."""

    owned: Owned
    # A scalar; it is not changed.
    loss: Tensor
    # The micro-steps over which it is averaged.
    parts: int
    scaler: torch.amp.GradScaler


def check_claims(wiring: Wiring, claims: Sequence[Claim]) -> None:
    """Raise a ValueError if the model needs one backward and the claims need several."""
    if _of_one_loss(claims):
        return
    if wiring.hooked:
        reason = "with sharded tables, which need one backward per forward"
    elif wiring.replicating:
        reason = "in DDP, which averages the gradients of one backward per forward"
    else:
        return
    raise ValueError(
        f"Several OptimSchedulers share a model {reason}. So their losses must be one and the same"
        " tensor, with the same accum_grad and use_amp. Or pass each of them a loss of its own name"
        " from a forward of its own. Delete those that are no longer stepped."
    )


def take_gradients(wiring: Wiring, claims: Sequence[Claim]) -> list[Gradients]:
    """Compute the gradients for claims that have no parameter in common. Collective under DDP.

    Returns:
        For each claim the gradients of its parameters, added to those that they have in ``.grad``.
        Outside of the first claim, whose ``.grad`` is the caller's to set, these do not change.
    """
    # Each group needs one backward.
    groups = [claims] if _of_one_loss(claims) else [[claim] for claim in claims]
    inner = set(wiring.modules[""].parameters())
    unchanged = inner.difference(claims[0].owned.parameters)
    taken: list[Gradients] = []
    for group in groups:
        foreign = inner.difference(*(claim.owned.parameters for claim in group))
        with _restored(unchanged):
            _hide(wiring, foreign)
            taken += _by_one_backward(group, keep_graph=group is not groups[-1])
        # Now the first claim's gradients are taken, too.
        unchanged = inner
    return taken


def _of_one_loss(claims: Sequence[Claim]) -> bool:
    # Unscaled and scaled gradients are apart: at a scale of 1, those of float16 would underflow.
    return len({(claim.loss, claim.parts, claim.scaler.is_enabled()) for claim in claims}) == 1


@contextmanager
def _restored(parameters: set[nn.Parameter]) -> Iterator[None]:
    """Restore gradients. A backward adds to them in place, and DDP may write into them: copies."""
    # None stays None: an optimizer skips parameters without a gradient.
    kept = {p: None if p.grad is None else p.grad.clone() for p in parameters}
    try:
        yield
    finally:
        for parameter, grad in kept.items():
            parameter.grad = grad


def _hide(wiring: Wiring, foreign: set[nn.Parameter]) -> None:
    # With find_unused_parameters, DDP wants a gradient wherever a micro-step used the parameter.
    unused = any(getattr(ddp, "find_unused_parameters", False) for ddp in wiring.replicating)
    for parameter in foreign:
        parameter.grad = torch.zeros_like(parameter) if unused else None


def _by_one_backward(claims: Sequence[Claim], *, keep_graph: bool) -> list[Gradients]:
    """Add the gradients of one loss to ``.grad``, each at the scale of its own scaler."""
    roots = {
        claim.scaler.get_scale(): claim.scaler.scale(claim.loss / claim.parts) for claim in claims
    }
    # At a larger scale, gradients could overflow whose own scaler has backed off.
    scale = min(roots)
    apart = [claim for claim in claims if claim.scaler.get_scale() > scale]
    for claim in apart:
        # The gradients of earlier micro-steps are at the scale of their own scaler.
        _multiply(claim.owned.parameters, scale / claim.scaler.get_scale())
    roots[scale].backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
    for claim in apart:
        _multiply(claim.owned.parameters, claim.scaler.get_scale() / scale)
    return [_gradients(claim.owned.parameters) for claim in claims]


def _gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    return {parameter: parameter.grad for parameter in parameters}


def update_weights(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    owned: Owned,
    *,
    grad_clip: float,
    norm_type: float,
) -> tuple[float, bool]:
    """Update the weights from their gradients, which are dropped in any case. Collective with
    sharded parameters.

    Returns:
        The norm of the gradients, and whether weights were updated; both the same on all ranks. A
        norm that is not finite updates nothing, and the scaler backs off.
    """
    if not owned.parameters:
        # Fused tables alone: they were updated in the backward.
        return 0.0, True
    try:
        _coalesce_sparse(owned.parameters)
        # The scale is divided out before the norm, which is compared with grad_clip.
        unscaled = _unscale(scaler, optimizer, owned)
        norm, any_gradient = gradient_norm(owned.parameters, owned.pieces, norm_type)
        finite = bool(torch.isfinite(norm))
        if finite and any_gradient:
            clip_gradients(owned.parameters, norm, grad_clip)
            scaler.step(optimizer)
        if not finite:
            _back_off(scaler)
        elif unscaled:
            scaler.update()
    except BaseException:
        # Otherwise the scaler refuses the next unscale_().
        scaler.update(scaler.get_scale())
        raise
    finally:
        optimizer.zero_grad()
    return float(norm), finite and (any_gradient or bool(owned.fused))


def _coalesce_sparse(parameters: Sequence[nn.Parameter]) -> None:
    """Make the entries of sparse gradients unique, so that they have a norm."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def _unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, owned: Owned) -> bool:
    """Unscale the gradients; return whether any rank may have had some."""
    if any(parameter.grad is not None for parameter in owned.parameters):
        scaler.unscale_(optimizer)
        return True
    if not owned.pieces:
        return False
    # Another rank may have gradients. This one unscales zeros, so that their scales stay equal.
    lent = owned.parameters[0]
    lent.grad = torch.zeros_like(lent)
    scaler.unscale_(optimizer)
    lent.grad = None
    return True


def _back_off(scaler: torch.amp.GradScaler) -> None:
    if not scaler.is_enabled():
        return
    scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
    # GradScaler restarts the count of good steps where it finds the values itself, which it can't
    # if they are on another rank or overflow only in the norm.
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})


def gradient_norm(
    parameters: Sequence[nn.Parameter], pieces: frozenset[nn.Parameter], norm_type: float
) -> tuple[Tensor, bool]:
    """Return the norm of all gradients as one vector, and whether any rank has a gradient at all.
    Collective over the world if ``pieces`` may be nonempty on a rank (16 bytes), else local.

    Args:
        parameters: of this rank.
        pieces: this rank's parts of larger tensors. The others are equal on all ranks.
        norm_type: p of the p-norm, > 0, ``inf`` for the largest absolute value.

    Returns:
        The norm is a scalar on the device of the gradients, not finite if a gradient is not, or if
        it overflows. Without pieces it equals :func:`torch.nn.utils.get_total_norm` bit for bit.
    """
    whole_grads: list[Tensor] = []
    part_grads: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            (part_grads if parameter in pieces else whole_grads).append(parameter.grad)
    whole = _total(whole_grads, norm_type)
    any_here = bool(whole_grads or part_grads)
    if not pieces:
        return whole, any_here
    # Whole gradients are equal on all ranks and count once, pieces on each rank.
    mine = _total(part_grads, norm_type)
    sent = torch.tensor([float(mine), float(any_here)], dtype=torch.float64)
    received = group_over(world_ranks()).all_gather(sent)
    norms = torch.cat([received[:, 0], torch.tensor([float(whole)], dtype=torch.float64)])
    # Sums of powers in float64 do not overflow where float32 norms have not.
    total = torch.linalg.vector_norm(norms, norm_type).to(whole.dtype).to(whole.device)
    return total, bool(received[:, 1].any())


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, longest: float) -> None:
    """Scale the gradients in place so that their norm, ``norm``, is at most ``longest``. Local."""
    # As in torch.nn.utils.clip_grad_norm_.
    _multiply(parameters, float(torch.clamp(longest / (norm + 1e-6), max=1.0)))


def _multiply(parameters: Sequence[nn.Parameter], factor: float) -> None:
    if factor == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


@torch.no_grad()
def _total(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    # Of a sparse gradient, its entries. Empty ones (a batch without ids) have no largest value, and
    # torch refuses them for inf.
    values = [grad.values() if grad.is_sparse else grad for grad in grads]
    return torch.nn.utils.get_total_norm(filter(torch.numel, values), norm_type)
