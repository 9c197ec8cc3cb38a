"""From the losses of one forward to the updates of several optimizers: backward passes, norm, clipping, step.

Optimizers that share a forward can't alternate backward and step: the first step would overwrite weights that the
second backward still needs. So the gradients of all of them are taken at once. A loss leaves no gradients on parameters
of the model that its optimizer does not own. If all want the same loss, there is one backward, through the whole graph
where hooks need that (DDP, FSDP, TorchRec); else one each, and gradients are averaged here: DDP follows one backward
per forward. Replicated gradients are equal on all ranks; of sharded ones all ranks gather their norms, 16 bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.groups import group_over, world_ranks
from dist_sparse.optim.config import Owned, Wiring

__all__ = ["Backward", "Claim", "Gradients", "clip_gradients", "gradient_norm", "update_weights"]

Gradients = list[Tensor | None]


class Claim(NamedTuple):
    """The gradients that one optimizer wants from a backward: of ``loss``, which is not changed, divided by ``parts``
    micro-steps and scaled by ``scaler``. They are ``reduced`` over ranks now, at the last micro-step, or not."""

    owned: Owned
    loss: Tensor
    parts: int
    scaler: torch.amp.GradScaler | None
    reduced: bool

    def root(self) -> Tensor:
        """Return the scalar to differentiate."""
        loss = self.loss if self.parts == 1 else self.loss / self.parts
        return loss if self.scaler is None else self.scaler.scale(loss)


class Backward:
    """The backward passes for several claims on one forward. The constructor checks, :meth:`run` computes.

    Raises:
        ValueError: the claims can't be met from one forward; nothing was changed.
    """

    def __init__(self, wiring: Wiring, claims: Sequence[Claim]) -> None:
        self._wiring, self._claims = wiring, claims
        claimed = [p for claim in claims for p in claim.owned.trainable]
        if any(claim.parts > 1 for claim in claims) and len(claimed) > len(set(claimed)):
            raise ValueError(
                "Two OptimSchedulers with a parameter in common can't accumulate gradients. Use accum_grad=1, or "
                "delete the one that is no longer stepped."
            )
        self._one = len({(claim.loss, claim.parts, claim.scaler) for claim in claims}) == 1
        for reason, holds in (
            ("whose fused tables are updated inside every backward", wiring.fused),
            ("with FSDP modules or sharded tables, which need a backward through the whole graph", wiring.hooked),
            ("with a DDP module of static_graph=True", any(module.static_graph for module in wiring.ddp)),
        ):
            if holds and not self._one:
                raise ValueError(
                    f"Several OptimSchedulers share a model {reason}. So their losses must be one and the same tensor, "
                    "with the same accum_grad and no GradScaler. Delete those that are no longer stepped."
                )

    def run(self) -> list[Gradients]:
        """Compute the gradients. Collective under DDP.

        Returns:
            For each claim the gradients of its parameters, added to those that they have in ``.grad``; these attributes
            may have changed and are the caller's to set.
        """
        return self._run_one() if self._one else self._run_each()

    def _run_one(self) -> list[Gradients]:
        wiring, root = self._wiring, self._claims[0].root()
        owned = {p for claim in self._claims for p in claim.owned.parameters}
        inner = [p for p in wiring.modules[""].parameters() if p.requires_grad]
        foreign = [p for p in inner if p not in owned]
        # The backward adds to gradients in place, and DDP may write into them.
        aside = {*foreign, *owned}.difference(self._claims[0].owned.parameters)
        before = {p: None if p.grad is None else p.grad.clone() for p in aside}
        if any(module.find_unused_parameters for module in wiring.ddp):
            for parameter in foreign:  # DDP wants a gradient of whatever one of several micro-steps has used
                parameter.grad = torch.zeros_like(parameter)
        taken: list[Gradients] = []
        seen: set[nn.Parameter] = set()
        try:
            if not foreign or wiring.fused or wiring.hooked or wiring.replicating:
                root.backward()  # type: ignore[no-untyped-call]
            elif leaves := [*{p: None for claim in self._claims for p in claim.owned.trainable}, *self._outside(root)]:
                root.backward(inputs=leaves)  # type: ignore[no-untyped-call]
            for claim in self._claims:  # of a parameter in common, each clips a gradient of its own
                grads = [(p.grad, p in seen) for p in claim.owned.parameters]
                taken.append([grad.clone() if grad is not None and known else grad for grad, known in grads])
                seen.update(claim.owned.parameters)
        finally:
            for parameter, grad in before.items():
                parameter.grad = grad
        return taken

    def _run_each(self) -> list[Gradients]:
        taken: list[Gradients] = []
        for i, claim in enumerate(self._claims):
            root = claim.root()
            outside = self._outside(root)
            inputs = [*claim.owned.trainable, *outside]
            keep = i + 1 < len(self._claims)
            found = torch.autograd.grad(root, inputs, retain_graph=keep, allow_unused=True) if inputs else ()
            new = dict(zip(inputs, found, strict=True))
            taken.append([_sum(p.grad, new.get(p)) for p in claim.owned.parameters])
            for leaf in outside:
                leaf.grad = _sum(leaf.grad, new[leaf])
        for i, claim in enumerate(self._claims):
            for module in self._wiring.ddp if claim.reduced else ():
                taken[i] = _averaged(taken[i], claim.owned.parameters, module)
        return taken

    def _outside(self, root: Tensor) -> list[Tensor]:
        """The leaves beside the model on which a loss depends, such as the weights of a criterion. As in a plain
        ``backward()`` they receive gradients, for their own optimizer."""
        inside = set(self._wiring.modules[""].parameters())
        found: dict[Tensor, None] = {}
        nodes, seen = [root.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                leaf = getattr(node, "variable", None)
                if leaf is not None and leaf not in inside:
                    found[leaf] = None
                nodes += [each for each, _ in node.next_functions]
        return list(found)


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
        unscaled = scaler is not None and _unscale(scaler, optimizer, owned)
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
        elif scaler is not None and unscaled:
            scaler.update()
    except BaseException:
        if scaler is not None:
            scaler.update(scaler.get_scale())  # else it refuses the next unscale_()
        raise
    finally:
        optimizer.zero_grad()
    return float(norm), finite and (any_gradient or bool(owned.fused))


def _unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, owned: Owned) -> bool:
    """Unscale the gradients, if any; return whether there were any. With sharded parameters, a rank without gradients
    unscales zeros, so that the scales of all ranks stay equal."""
    lent = None
    if all(parameter.grad is None for parameter in owned.parameters):
        if not owned.pieces:
            return False
        lent = owned.parameters[0]
        lent.grad = torch.zeros_like(lent)
    scaler.unscale_(optimizer)
    if lent is not None:
        lent.grad = None
    return True


def gradient_norm(
    parameters: Sequence[nn.Parameter], pieces: frozenset[nn.Parameter], norm_type: float
) -> tuple[Tensor, bool]:
    """Return the norm of all gradients as one vector, and whether any rank has a gradient at all. Collective over the
    world if ``pieces`` may be nonempty on a rank (16 bytes), else local.

    Args:
        parameters: of this rank.
        pieces: those that are this rank's part of a larger tensor. The others are equal on all ranks.
        norm_type: p of the p-norm, > 0, ``inf`` for the largest absolute value.

    Returns:
        The norm is a scalar on the device of the gradients, not finite if a gradient is not, or if it overflows.
        Without pieces it equals :func:`torch.nn.utils.get_total_norm` bit for bit.
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
    for parameter in parameters if factor < 1.0 else ():
        if parameter.grad is not None:
            _values(parameter.grad).mul_(factor)


def _sum(known: Tensor | None, new: Tensor | None) -> Tensor | None:
    if known is None or new is None:
        return new if known is None else known
    return known + new


def _averaged(grads: Gradients, parameters: Sequence[nn.Parameter], module: DistributedDataParallel) -> Gradients:
    """The mean over ranks of the gradients that ``module`` replicates. One that only some ranks have counts as zero on
    the others, as in DDP. Collective."""
    group = group_over(tuple(dist.get_process_group_ranks(module.process_group)))
    replicated = {p for name, p in module.module.named_parameters() if name not in module.parameters_to_ignore}
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, parameter in enumerate(parameters):
        if parameter.requires_grad and parameter in replicated:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(i)
    means = list(grads)
    for (dtype, device), places in kinds.items():
        had = [grads[i] is not None for i in places]
        # All ranks must see it: on another one, the same parameter may have no gradient.
        sparse = any(grad is not None and grad.layout != torch.strided for grad in (grads[i] for i in places))
        flat = [torch.zeros_like(parameters[i]) if sparse or (g := grads[i]) is None else g for i in places]
        flags = torch.tensor([*had, sparse], dtype=dtype, device=device)
        summed = group.all_reduce(torch.cat([*(grad.reshape(-1) for grad in flat), flags]))
        *parts, counts = torch.split(summed, [*(grad.numel() for grad in flat), len(flags)])
        *holders, refused = counts.tolist()
        if refused:
            raise ValueError(
                "Several OptimSchedulers with different losses share a DDP module: gradients must not be sparse."
            )
        for i, mean, count in zip(places, parts, holders, strict=True):
            means[i] = mean.view_as(parameters[i]) / group.size if count else None
    return means


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
    if any(place.is_partial() for place in placements):
        raise ValueError(f"Invalid gradient with placements {placements}: only Shard and Replicate have a norm here.")
    return coordinate is not None and all(
        place.is_shard() or at == 0 for place, at in zip(placements, coordinate, strict=True)
    )
