"""Backward passes from one forward to the optimizers of parts of a model.

Optimizers that share a forward can't alternate backward and step: the first step would overwrite weights that the
second backward still needs. So the gradients of all of them are taken at once. A loss leaves no gradients on parameters
of the model that its optimizer does not own.

1. All of them want the same loss: one backward. It runs through the whole graph where hooks need that (DDP, FSDP,
   TorchRec), else to the owned parameters only.
2. They want different losses, or scale one differently: one backward each. DDP follows one backward per forward, so the
   gradients are averaged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.groups import group_over
from dist_sparse.tables.modules import modules_by_path
from dist_sparse.tables.tensors import is_sharded

__all__ = ["Backward", "Claim", "Gradients", "Owned", "Wiring", "owned_by", "wiring_of"]

Gradients = list[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How gradients reach the parameters of a model.

    Args:
        modules: by path from the user's own module, which is ``""``; wrappers are left out.
        fused: whether it has tables whose optimizer runs inside the backward.
        hooked: whether the forward reads other tensors than the parameters, so that gradients reach these only by hooks
            in a backward through the whole graph: FSDP puts whole parameters in the place of shards, and a TorchRec
            kernel holds several tables in one tensor.
        replicating: the modules that average gradients over ranks, each with ``no_sync()``.
    """

    modules: Mapping[str, nn.Module]
    fused: bool
    hooked: bool
    replicating: list[Any]

    @property
    def inner(self) -> nn.Module:
        """The user's own module, inside its wrappers."""
        return self.modules[""]

    @property
    def ddp(self) -> list[DistributedDataParallel]:
        """The DDP modules among ``replicating``."""
        return [module for module in self.replicating if isinstance(module, DistributedDataParallel)]


@dataclass(frozen=True, kw_only=True)
class Owned:
    """The parameters that one optimizer updates.

    Args:
        parameters: each once, frozen ones included, those of fused tables excluded.
        pieces: those of them that are this rank's part of a larger tensor: shards of tables with a dense kernel, and
            DTensors.
        fused: the sharded collections with a fused optimizer, which takes nothing but a learning rate.
    """

    parameters: list[nn.Parameter]
    pieces: frozenset[nn.Parameter]
    fused: list[Any]

    def set_fused_lr(self, lr: float) -> None:
        """Set the learning rate of fused tables, from the next forward on: the kernels read it there."""
        for module in self.fused:
            for group in module.fused_optimizer.param_groups:
                group["lr"] = lr
            module.fused_optimizer.step()  # hands it to the kernels; they have updated the weights already


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The gradients that one optimizer wants from a backward.

    Args:
        owned: the parameters that receive them.
        loss: the loss, as the user passed it. It is not changed.
        parts: number of micro-steps whose mean is taken: the loss is divided by it.
        scaler: scales the loss; None does not.
        reduced: whether ranks average their gradients now, at the last micro-step.
    """

    owned: Owned
    loss: Tensor
    parts: int
    scaler: torch.amp.GradScaler | None
    reduced: bool

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that take a gradient."""
        return [p for p in self.owned.parameters if p.requires_grad]

    def root(self) -> Tensor:
        """Return the scalar to differentiate."""
        loss = self.loss if self.parts == 1 else self.loss / self.parts
        return loss if self.scaler is None else self.scaler.scale(loss)


class Backward:
    """The backward passes for several claims on one forward. The constructor checks, :meth:`run` computes.

    Args:
        wiring: of the model.
        claims: at least one.

    Raises:
        ValueError: the claims can't be met from one forward; nothing was changed.
    """

    def __init__(self, wiring: Wiring, claims: Sequence[Claim]) -> None:
        self._wiring, self._claims = wiring, claims
        first, claimed = claims[0], [p for claim in claims for p in claim.trainable]
        if any(claim.parts > 1 for claim in claims) and len(claimed) > len(set(claimed)):
            raise ValueError(
                "Two OptimSchedulers with a parameter in common can't accumulate gradients. Use accum_grad=1, or "
                "delete the one that is no longer stepped."
            )
        self._one = all(
            claim.loss is first.loss and claim.parts == first.parts and claim.scaler is first.scaler for claim in claims
        )
        if not self._one:
            self._check_separate()
        owned = {p for claim in claims for p in claim.owned.parameters}
        self._foreign = [p for p in wiring.inner.parameters() if p.requires_grad and p not in owned]

    def _check_separate(self) -> None:
        """Raise if the model does not allow one backward per claim."""
        for reason, holds in (
            ("whose fused tables are updated inside every backward", self._wiring.fused),
            ("with FSDP modules or sharded tables, which need a backward through the whole graph", self._wiring.hooked),
            ("with a DDP module of static_graph=True", any(module.static_graph for module in self._wiring.ddp)),
        ):
            if holds:
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
        try:
            return self._run_one() if self._one else self._run_each()
        except RuntimeError as error:
            if "second time" in str(error):
                error.add_note(
                    "OptimSchedulers that share a forward must be constructed for the same model (with "
                    "updated_modules), be passed the very same loss tensor and be stepped once for each step_num."
                )
            raise

    def _run_one(self) -> list[Gradients]:
        first, others = self._claims[0], self._claims[1:]
        # The backward adds to these in place.
        before = {p: None if p.grad is None else p.grad.clone() for claim in others for p in claim.owned.parameters}
        root = first.root()
        if not self._foreign or self._wiring.fused or self._wiring.hooked or self._wiring.replicating:
            with self._foreign_kept():
                root.backward()  # type: ignore[no-untyped-call]
        elif leaves := [*{p: None for claim in self._claims for p in claim.trainable}, *self._outside(root)]:
            root.backward(inputs=leaves)  # type: ignore[no-untyped-call]
        taken: list[Gradients] = []
        seen: set[nn.Parameter] = set()
        for claim in self._claims:  # of a parameter in common, each clips a gradient of its own
            parameters = claim.owned.parameters
            taken.append([p.grad.clone() if p.grad is not None and p in seen else p.grad for p in parameters])
            seen.update(parameters)
        for parameter, grad in before.items():
            parameter.grad = grad
        return taken

    def _run_each(self) -> list[Gradients]:
        taken: list[Gradients] = []
        for i, claim in enumerate(self._claims):
            root = claim.root()
            outside = self._outside(root)
            inputs = [*claim.trainable, *outside]
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

    @contextmanager
    def _foreign_kept(self) -> Iterator[None]:
        """Keep the gradients of parameters that no claim owns, during a backward through the whole graph."""
        # With gradient_as_bucket_view, DDP writes into the very tensors.
        copies = any(module.gradient_as_bucket_view for module in self._wiring.ddp)
        kept = [None if p.grad is None else p.grad.clone() if copies else p.grad for p in self._foreign]
        # With find_unused_parameters, it wants a gradient of whatever one of several micro-steps has used.
        zeros = any(module.find_unused_parameters for module in self._wiring.ddp)
        for parameter in self._foreign:
            parameter.grad = torch.zeros_like(parameter) if zeros else None
        try:
            yield
        finally:
            for parameter, grad in zip(self._foreign, kept, strict=True):
                parameter.grad = grad

    def _outside(self, root: Tensor) -> list[Tensor]:
        """The leaves beside the model on which a loss depends, such as the weights of a criterion. As in a plain
        ``backward()`` they receive gradients, for their own optimizer."""
        inside = set(self._wiring.inner.parameters())
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


def wiring_of(model: nn.Module) -> Wiring:
    """Return how gradients reach the parameters of ``model``, wrapped or not."""
    modules = modules_by_path(model)
    if hasattr(model, "no_sync"):
        replicating: list[Any] = [model]
    else:  # TorchRec keeps the DDP modules of data-parallel tables outside of the module tree
        parts = (part for module in model.modules() for part in (module, *getattr(module, "_lookups", ())))
        replicating = list({part: None for part in parts if isinstance(part, DistributedDataParallel)})
    marks = ("set_requires_gradient_sync", "_fsdp_wrapped_module", "module_sharding_plan")
    return Wiring(
        modules=modules,
        fused=bool(_fused(modules[""])),
        hooked=any(getattr(module, mark, None) for module in model.modules() for mark in marks),
        replicating=replicating,
    )


def owned_by(wiring: Wiring, names: Sequence[str] | None) -> Owned:
    """Return what is in the modules of these names, or in the whole model for None.

    Args:
        wiring: of the model.
        names: paths from the user's own module.

    Raises:
        ValueError: there is no such module, it is a part of a sharded collection, it has no parameters, or torch
            itself updates some of them inside the backward.
    """
    inner, known = wiring.inner, wiring.modules
    roots = [inner]
    if names is not None:
        unknown = [name for name in names if not name or name not in known]
        if unknown or not names:
            children = [path for path in known if path and "." not in path]
            raise ValueError(f"Invalid updated_modules={list(names)}: {unknown} are not modules; there are {children}.")
        collections = [path for path, module in known.items() if getattr(module, "module_sharding_plan", None)]
        inside = [name for name in names if any(name.startswith(f"{path}." if path else "") for path in collections)]
        if inside:
            raise ValueError(
                f"Invalid updated_modules={list(names)}: {inside} are parts of sharded collections, whose tables share "
                f"kernels and a learning rate: name the collections, {collections}."
            )
        roots = [known[name] for name in names]
    parameters = list({p: None for root in roots for p in root.parameters()})
    if not parameters:
        raise ValueError(f"The modules {list(names or [type(inner).__name__])} have no parameters.")
    fused = list({module: None for root in roots for module in _fused(root)})
    in_fused = {p for module in fused for p in module.parameters()}
    moving = {p for p in parameters if hasattr(p, "_in_backward_optimizers")}
    if moving - in_fused:
        raise ValueError(
            f"{len(moving - in_fused)} parameters of {list(names or [type(inner).__name__])} are updated inside the "
            "backward by apply_optimizer_in_backward() and belong to no sharded collection. An OptimScheduler can't "
            "step them: leave that call out, or shard their tables with DistributedModelParallel first."
        )
    kept = [p for p in parameters if p not in moving]
    shards = {p for root in roots for p in _shards(root)}
    return Owned(
        parameters=kept,
        pieces=frozenset(p for p in kept if p in shards or is_sharded(p)),
        fused=fused,
    )


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


def _fused(root: nn.Module) -> list[Any]:
    """The sharded collections that have a table with a fused optimizer on any rank: the plan is the same on all."""
    plans = ((module, getattr(module, "module_sharding_plan", {})) for module in root.modules())
    return [module for module, plan in plans if any(table.compute_kernel != "dense" for table in plan.values())]


def _shards(root: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of sharded collections that are not whole on every rank."""
    for module in root.modules():
        plan = getattr(module, "module_sharding_plan", {})
        for name, parameter in module.named_parameters() if plan else ():
            table = name.split(".")[-2]
            if table in plan and plan[table].sharding_type != "data_parallel":
                yield parameter
