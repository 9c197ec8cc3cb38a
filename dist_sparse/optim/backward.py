"""How do the losses of one forward reach the gradients of the optimizers that are in charge of parts of a model?

Optimizers that share a forward cannot take turns at backward and step: the first step would write weights that the
second backward still needs. So the first one that is stepped takes the gradients of all that are due; each of the
others finds its own when its turn comes. In the model, a loss never leaves gradients on parameters of anybody else.

1. All want the same loss: one backward. Under DDP, or with fused tables, through the whole model, since DDP waits for
   all gradients; else to the parameters in charge alone.
2. They want different losses (or different scales of one): a backward each; under DDP, gradients are then averaged
   here, since DDP can follow one backward per forward only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.groups import group_over
from dist_sparse.optim.ownership import unwrapped

__all__ = ["Backward", "Claim", "Peers"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one optimizer wants of a backward.

    Args:
        owner: whose it is.
        parameters: to which gradients go.
        whole: whether that is the whole model, so that a plain ``backward()`` does it.
        loss: what to take the gradients of, as the user gave it.
        parts: the number of micro-steps over which they are averaged.
        scaled: the gradients of which multiple of it, for a loss divided by ``parts``.
        scale: tells apart different ``scaled``; None is no scale.
        reduced: whether ranks average their gradients now: the last of several micro-steps.
    """

    owner: Any
    parameters: list[nn.Parameter]
    whole: bool
    loss: Tensor
    parts: int
    scaled: Callable[[Tensor], Tensor]
    scale: int | None
    reduced: bool

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Those of its parameters that take a gradient."""
        return [p for p in self.parameters if p.requires_grad]

    def root(self) -> Tensor:
        """What ``backward()`` is called on. The user's own tensor is never changed."""
        return self.scaled(self.loss if self.parts == 1 else self.loss / self.parts)


class Peers:
    """The optimizers in charge of one model, in the order in which they were made; it does not keep them alive."""

    _of: ClassVar[weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]] = weakref.WeakKeyDictionary()
    _new: ClassVar[list[weakref.ref[Any]]] = []

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def join(self, owner: Any) -> None:
        """One more. Whose peer it is, is found out when somebody next looks: ``owner.model`` may be a copy that is not
        finished yet."""
        self._new.append(weakref.ref(owner, self._new.remove))

    def __iter__(self) -> Iterator[Any]:
        for new in list(self._new):
            if (owner := new()) is not None:
                try:
                    known = self._of.setdefault(unwrapped(owner.model), [])
                except AttributeError:  # a wrapper without its module: a copy that has failed half-way
                    continue
                known.append(weakref.ref(owner, known.remove))
                self._new.remove(new)
        known = self._of.get(unwrapped(self._model), [])
        return iter([owner for ref in list(known) if (owner := ref()) is not None])


class Backward:
    """One backward for several claims: checks first, then runs.

    Args:
        model: as the user has it, wrapped or not.
        claims: the first is of whoever is stepped now.
        fused: whether some weights of the model move inside every backward.
        gathered: whether hooks in a backward through everything make some of its gradients (see
            :func:`~dist_sparse.optim.ownership.gathers`).
        replicating: what averages the model's gradients over ranks, if anything does.

    Raises:
        ValueError: these claims can't be met from one forward; nothing was changed.
    """

    def __init__(
        self, model: nn.Module, claims: Sequence[Claim], *, fused: bool, gathered: bool, replicating: Sequence[Any]
    ) -> None:
        self._model, self._claims = unwrapped(model), claims
        self._ddp = [module for module in replicating if isinstance(module, DistributedDataParallel)]
        self._through = fused or gathered or bool(replicating) or any(claim.whole for claim in claims)
        first = claims[0]
        self._one = all((c.loss is first.loss, c.parts, c.scale) == (True, first.parts, first.scale) for c in claims)
        seen: set[int] = set()
        for claim in claims:
            mine = {id(p) for p in claim.trainable}
            if seen & mine and any(c.parts > 1 for c in claims):
                raise ValueError(
                    "Two OptimSchedulers with a parameter in common can't accumulate gradients: accum_grad=1, or "
                    "delete the one that is no longer stepped."
                )
            seen |= mine
        if self._one:
            return
        rule = (
            "so their losses must be one and the same tensor, with the same accum_grad and no GradScaler (delete those "
            "that are no longer stepped)."
        )
        if fused:
            raise ValueError(
                f"Several OptimSchedulers share a model whose fused tables move inside every backward, {rule}"
            )
        if gathered:
            raise ValueError(
                "Several OptimSchedulers share a model with FSDP modules or sharded tables, whose gradients come of a "
                f"backward through everything, {rule}"
            )
        if any(module.static_graph for module in self._ddp):
            raise ValueError(f"Several OptimSchedulers share a DDP module with static_graph=True, {rule}")

    def run(self) -> dict[Any, list[Tensor | None]]:
        """Takes the gradients: those of the first claim's owner are where optimizers look for them, ``.grad``.

        Returns:
            Those of the other owners, parameter by parameter, accumulated ones included; ``.grad`` is as it was.
        """
        try:
            return self._at_once() if self._one else self._one_by_one()
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise RuntimeError(
                "The graph of this loss is gone: somebody has called backward() on it. OptimSchedulers that share a "
                "forward must be made for one and the same model (with updated_modules), be given the very same loss "
                "tensor, not copies of it, and be stepped once for each step_num."
            ) from error

    def _at_once(self) -> dict[Any, list[Tensor | None]]:
        first, others = self._claims[0], self._claims[1:]
        taken: dict[Any, list[Tensor | None]] = {}
        if first.whole and not others:
            first.root().backward()  # type: ignore[no-untyped-call]
            return taken
        mine = {id(p) for p in first.parameters}
        # What the others have accumulated so far: the backward adds to it, in place.
        before = {id(p): None if p.grad is None else p.grad.clone() for c in others for p in c.parameters}
        root = first.root()
        if self._through:
            with self._set_aside({id(p) for claim in self._claims for p in claim.parameters}):
                root.backward()  # type: ignore[no-untyped-call]
        else:
            inputs = list({id(p): p for claim in self._claims for p in claim.trainable}.values())
            if leaves := [*inputs, *self._outside(root)]:
                root.backward(inputs=leaves)  # type: ignore[no-untyped-call]
        for claim in others:
            # Of a parameter in common each has a gradient of its own, to be clipped by itself.
            taken[claim.owner] = [
                p.grad.clone() if p.grad is not None and id(p) in mine else p.grad for p in claim.parameters
            ]
            for parameter in claim.parameters:
                if id(parameter) not in mine:
                    parameter.grad = before[id(parameter)]
        return taken

    def _one_by_one(self) -> dict[Any, list[Tensor | None]]:
        taken: dict[Any, list[Tensor | None]] = {}
        for i, claim in enumerate(self._claims):
            root = claim.root()
            outside = self._outside(root)
            inputs = [*claim.trainable, *outside]
            fresh = (
                torch.autograd.grad(root, inputs, retain_graph=i + 1 < len(self._claims), allow_unused=True)
                if inputs
                else ()
            )
            new = dict(zip((id(p) for p in inputs), fresh, strict=True))
            taken[claim.owner] = [_sum(p.grad, new.get(id(p))) for p in claim.parameters]
            for leaf in outside:
                leaf.grad = _sum(leaf.grad, new[id(leaf)])
        for claim in self._claims:
            for module in self._ddp if claim.reduced else ():
                taken[claim.owner] = _averaged(taken[claim.owner], claim.parameters, module)
        first = self._claims[0]
        for parameter, grad in zip(first.parameters, taken.pop(first.owner), strict=True):
            parameter.grad = grad
        return taken

    @contextmanager
    def _set_aside(self, claimed: set[int]) -> Iterator[None]:
        """The gradients of parameters that nobody claims, while a backward runs through all of the model."""
        foreign = [(p, p.grad) for p in self._model.parameters() if id(p) not in claimed and p.requires_grad]
        if any(module.gradient_as_bucket_view for module in self._ddp):  # the backward writes into those views
            foreign = [(p, None if grad is None else grad.clone()) for p, grad in foreign]
        # Where DDP looks for unused parameters, it remembers over micro-steps that one was used, and wants a gradient.
        zeros = any(module.find_unused_parameters for module in self._ddp)
        sparse = {id(m.weight) for m in self._model.modules() if zeros and getattr(m, "sparse", False)}
        for parameter, _ in foreign:
            parameter.grad = _zeros(parameter, id(parameter) in sparse) if zeros else None
        try:
            yield
        finally:
            for parameter, grad in foreign:
                parameter.grad = grad

    def _outside(self, root: Tensor) -> list[Tensor]:
        """The leaves beside the model on which a loss depends, such as a criterion's weights: like a plain
        ``backward()``, ours leaves gradients there, for whoever owns them."""
        inside = {id(p) for p in self._model.parameters()}
        found: dict[int, Tensor] = {}
        nodes, seen = [root.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                leaf = getattr(node, "variable", None)
                if leaf is not None and id(leaf) not in inside:
                    found[id(leaf)] = leaf
                nodes += [each for each, _ in node.next_functions]
        return list(found.values())


def _zeros(parameter: nn.Parameter, sparse: bool) -> Tensor:
    if not sparse:
        return torch.zeros_like(parameter)
    none = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(none, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape)


def _sum(known: Tensor | None, new: Tensor | None) -> Tensor | None:
    if known is None or new is None:
        return new if known is None else known
    return known + new


def _averaged(
    grads: list[Tensor | None], parameters: Sequence[nn.Parameter], module: DistributedDataParallel
) -> list[Tensor | None]:
    """The mean over ranks of those that ``module`` replicates; a gradient that only some ranks have counts as zero on
    the others, as in DDP. Collective."""
    group = group_over(tuple(dist.get_process_group_ranks(module.process_group)))
    replicated = {id(p) for name, p in module.module.named_parameters() if name not in module.parameters_to_ignore}
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, parameter in enumerate(parameters):
        if parameter.requires_grad and id(parameter) in replicated:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(i)
    means = list(grads)
    for (dtype, device), places in kinds.items():
        had = [grads[i] is not None for i in places]
        # Told to all ranks: on another one, the same parameter may have no gradient.
        sparse = any(grad is not None and grad.layout != torch.strided for grad in (grads[i] for i in places))
        flat = [torch.zeros_like(parameters[i]) if sparse or (g := grads[i]) is None else g for i in places]
        flags = torch.tensor([*had, sparse], dtype=dtype, device=device)
        summed = group.all_reduce(torch.cat([*(grad.reshape(-1) for grad in flat), flags]))
        *parts, counts = torch.split(summed, [*(grad.numel() for grad in flat), len(flags)])
        *holders, refused = counts.tolist()
        if refused:
            raise ValueError(
                "Several OptimSchedulers with different losses share a DDP module: no sparse gradients then."
            )
        for i, mean, count in zip(places, parts, holders, strict=True):
            means[i] = mean.view_as(parameters[i]) / group.size if count else None
    return means
