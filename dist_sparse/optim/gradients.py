"""From the losses of one forward to the updates of several optimizers.

Optimizers that share a forward can't alternate backward and step: the first step would overwrite
weights that the second backward still needs. So the gradients of all of them are taken at once. A
loss leaves no gradients on parameters of the model that its optimizer does not own.

Optimizers of one loss share one backward. Several losses need one backward each, which DDP and
TorchRec don't support. Gradients are equal on all ranks, and so are their norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dist_sparse.optim.parameters import Wiring

Gradients = dict[nn.Parameter, Tensor | None]
"""The gradients of all parameters of an optimizer."""

NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
"""Leaves losses and gradients as they are, and always steps."""


class Claim(NamedTuple):
    """The gradients that one optimizer wants from a forward."""

    parameters: Sequence[nn.Parameter]
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
    unchanged = inner.difference(claims[0].parameters)
    taken: list[Gradients] = []
    for group in groups:
        foreign = inner.difference(*(claim.parameters for claim in group))
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
        _multiply(claim.parameters, scale / claim.scaler.get_scale())
    roots[scale].backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
    for claim in apart:
        _multiply(claim.parameters, claim.scaler.get_scale() / scale)
    return [_gradients(claim.parameters) for claim in claims]


def _gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    return {parameter: parameter.grad for parameter in parameters}


def update_weights(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    parameters: Sequence[nn.Parameter],
    *,
    grad_clip: float,
    norm_type: float,
) -> tuple[float, bool]:
    """Update the weights from their gradients, which are dropped in any case.

    Returns:
        The norm of the gradients, and whether weights were updated; both the same on all ranks. A
        norm that is not finite updates nothing, and the scaler backs off.
    """
    if all(parameter.grad is None for parameter in parameters):
        return 0.0, False
    try:
        _coalesce_sparse(parameters)
        # The scale is divided out before the norm, which is compared with grad_clip.
        scaler.unscale_(optimizer)
        norm = gradient_norm(parameters, norm_type)
        finite = bool(torch.isfinite(norm))
        if finite:
            clip_gradients(parameters, norm, grad_clip)
            scaler.step(optimizer)
            scaler.update()
        else:
            _back_off(scaler)
    except BaseException:
        # Otherwise the scaler refuses the next unscale_().
        scaler.update(scaler.get_scale())
        raise
    finally:
        optimizer.zero_grad()
    return float(norm), finite


def _coalesce_sparse(parameters: Sequence[nn.Parameter]) -> None:
    """Make the entries of sparse gradients unique, so that they have a norm."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def _back_off(scaler: torch.amp.GradScaler) -> None:
    if not scaler.is_enabled():
        return
    scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
    # GradScaler restarts the count of good steps where it finds the values itself, which it can't
    # if they overflow only in the norm.
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 0})


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    """Return the p-norm of all gradients as one vector: a scalar on their device, not finite if a
    gradient is not, or if it overflows."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Of a sparse gradient, its entries. Empty ones (a batch without ids) have no largest value, and
    # torch refuses them for inf.
    values = [grad.values() if grad.is_sparse else grad for grad in grads]
    return torch.nn.utils.get_total_norm(filter(torch.numel, values), norm_type)


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
