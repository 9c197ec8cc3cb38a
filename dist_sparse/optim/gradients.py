"""How long is the gradient over all ranks, each piece of it counted once, and how is it cut to a length?

Replicated gradients are the same on every rank, so their norm is taken here; of what lies in pieces, the norms of all
ranks are gathered: 16 bytes. Nothing is sent when nothing lies in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dist_sparse.groups import group_over, world_ranks

__all__ = ["clip_gradients", "gradient_norm"]


def gradient_norm(parameters: Sequence[nn.Parameter], pieces: frozenset[int], norm_type: float) -> tuple[Tensor, bool]:
    """The norm of all gradients of ``parameters``, as one vector. Collective over the world if ``pieces`` may be
    nonempty on a rank, else local.

    Args:
        parameters: of this rank.
        pieces: ids of those that are this rank's part of something larger.
        norm_type: p of the p-norm, > 0, ``inf`` for the largest absolute value.

    Returns:
        A scalar, on the device of the gradients, and whether any rank has a gradient at all. Not finite if a gradient
        is not, or if the norm overflows.

    Without pieces it is what :func:`torch.nn.utils.get_total_norm` gives, to the last bit.
    """
    alike = [p.grad for p in parameters if p.grad is not None and id(p) not in pieces]
    whole = _total(alike, norm_type)
    if not pieces:
        return whole, bool(alike)
    parts = [p.grad for p in parameters if p.grad is not None and id(p) in pieces]
    mine = _total([grad for grad in parts if _speaks(grad)], norm_type)
    said = torch.tensor([float(mine), float(bool(alike or parts))], dtype=torch.float64)
    told = group_over(world_ranks()).all_gather(said)
    norms = torch.cat([told[:, 0], torch.tensor([float(whole)], dtype=torch.float64)])
    # Sums of powers in float64: they do not overflow where float32 norms have not.
    total = torch.linalg.vector_norm(norms, norm_type).to(whole.dtype).to(whole.device)
    return total, bool(told[:, 1].any())


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, longest: float) -> None:
    """Scales the gradients in place, so that ``norm``, theirs, comes to ``longest`` if it is more. Local."""
    factor = float(torch.clamp(longest / (norm + 1e-6), max=1.0))  # as torch.nn.utils.clip_grad_norm_ has it
    if factor < 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                for values in _values(parameter.grad):
                    values.mul_(factor)


def _total(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    # Empty ones (a batch without ids) have no largest value, and torch refuses them for norm_type=inf.
    filled = [values for grad in grads for values in _values(grad) if values.numel()]
    return torch.nn.utils.get_total_norm(filled, norm_type)


def _values(grad: Tensor) -> Iterator[Tensor]:
    """The storage behind a gradient: of a sparse one the entries, of a DTensor the local part."""
    local = getattr(grad, "_local_tensor", grad)
    if local.is_sparse:
        assert local.is_coalesced(), "sparse gradients are coalesced before their norm is taken"
        local = local._values()
    yield local


def _speaks(grad: Tensor) -> bool:
    """Whether this rank counts its piece: of a DTensor's replicas only the first does."""
    mesh = getattr(grad, "device_mesh", None)
    if mesh is None:
        return True
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    placements = grad.placements  # type: ignore[attr-defined]
    if any(place.is_partial() for place in placements):
        raise ValueError(f"A gradient has placements {placements}: only those of Shard and Replicate have a norm here.")
    return all(place.is_shard() or at == 0 for place, at in zip(placements, coordinate, strict=True))
