"""Which parameters does an optimizer of part of a model step, which move inside the backward, which lie in pieces?

Wrappers (DistributedModelParallel, DDP, FSDP, torch.compile) are looked through. TorchRec's modules are told by what
they have, so that none of its classes is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.enforcer.optimizers import leaves
from dist_sparse.tables.tensors import is_sharded

__all__ = ["Owned", "gathers", "owned_by", "replicating", "unwrapped"]

_WRAPPED = ("_dmp_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True, kw_only=True)
class Owned:
    """What one optimizer is in charge of.

    Args:
        parameters: those that an optimizer steps, each once, frozen ones too.
        pieces: those of them, by id, that are this rank's part of something larger: shards of tables with a dense
            kernel, and DTensors.
        fused: the modules with a fused optimizer, which only takes a learning rate.
        in_backward: torch's own optimizers that ``apply_optimizer_in_backward`` runs inside the backward.
        whole: whether that is the whole model.
    """

    parameters: list[nn.Parameter]
    pieces: frozenset[int]
    fused: list[Any]
    in_backward: list[torch.optim.Optimizer]
    whole: bool

    @property
    def moves_in_backward(self) -> bool:
        """Whether some of its weights are written inside every backward."""
        return bool(self.fused or self.in_backward)

    def set_fused_lr(self, lr: float) -> None:
        """The learning rate of fused tables from the next forward on: FBGEMM's kernels note it there for the backward.
        TorchRec pushes it to them in ``step()``."""
        for module in self.fused:
            optimizer = module.fused_optimizer
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def set_lr(self, lr: float) -> None:
        """The learning rate of the optimizers that step inside the next backward."""
        for optimizer in self.in_backward:
            for group in optimizer.param_groups:
                group["lr"] = lr


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside its wrappers."""
    while True:
        inner = next(
            (getattr(model, name) for name in _WRAPPED if isinstance(getattr(model, name, None), nn.Module)), None
        )
        if inner is None and isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def replicating(model: nn.Module) -> list[Any]:
    """Everything in a model that averages gradients over ranks and can be told not to by ``no_sync()``."""
    if hasattr(model, "no_sync"):
        return [model]
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", ())]
    return found + [lookup for lookup in lookups if isinstance(lookup, DistributedDataParallel)]


def gathers(model: nn.Module) -> bool:
    """Whether the forward of some parameters reads other tensors than them, so that gradients reach them only by hooks
    in a backward through everything: FSDP puts whole parameters in the place of shards, and in TorchRec's kernels all
    tables are one tensor."""
    marks = ("set_requires_gradient_sync", "_fsdp_wrapped_module", "module_sharding_plan")
    return any(getattr(module, mark, None) for module in model.modules() for mark in marks)


def owned_by(model: nn.Module, names: Sequence[str] | None) -> Owned:
    """What is in the modules of these names, paths from the user's own module; in all of it for None.

    Raises:
        ValueError: there is no module of that name, it is part of a sharded collection, or there is no parameter in
            all of them.
    """
    inner = unwrapped(model)
    roots = [inner]
    if names is not None:
        known = dict(inner.named_modules())
        unknown = [name for name in names if not name or name not in known]
        if unknown or not names:
            children = [name for name, _ in inner.named_children()]
            raise ValueError(f"Invalid updated_modules={list(names)}: {unknown} are not modules; there are {children}.")
        collections = [path for path, module in known.items() if getattr(module, "module_sharding_plan", None)]
        inside = [name for name in names if any(name.startswith(f"{path}." if path else "") for path in collections)]
        if inside:
            raise ValueError(
                f"Invalid updated_modules={list(names)}: {inside} are parts of sharded collections, whose tables share "
                f"kernels and a learning rate: name the collections, {collections}."
            )
        roots = [known[name] for name in names]
    parameters = {id(p): p for root in roots for p in root.parameters()}
    if not parameters:
        raise ValueError(f"The modules {list(names or [type(inner).__name__])} have no parameters.")
    moving = {key: p for key, p in parameters.items() if hasattr(p, "_in_backward_optimizers")}
    fused = {id(module): module for root in roots for module in _fused(root)}
    in_backward = {
        id(optimizer): optimizer
        for p in moving.values()
        for optimizer in getattr(p, "_in_backward_optimizers", ())
        if any(True for _ in leaves(optimizer))  # TorchRec's fused ones only stand for what the kernel does
    }
    kept = [p for key, p in parameters.items() if key not in moving]
    sharded = {id(p) for root in roots for p in _sharded(root)}
    return Owned(
        parameters=kept,
        pieces=frozenset(id(p) for p in kept if id(p) in sharded or is_sharded(p)),
        fused=list(fused.values()),
        in_backward=list(in_backward.values()),
        whole=names is None,
    )


def _fused(module: nn.Module) -> Iterator[nn.Module]:
    """The sharded collections that have a table with a fused optimizer, on any rank: the plan is the same on all."""
    for part in module.modules():
        plan = getattr(part, "module_sharding_plan", {})
        if any(table.compute_kernel != "dense" for table in plan.values()):
            yield part


def _sharded(root: nn.Module) -> Iterator[Tensor]:
    """Parameters of sharded collections that are not whole on every rank."""
    for module in root.modules():
        plan = getattr(module, "module_sharding_plan", {})
        for name, parameter in module.named_parameters() if plan else ():
            table = name.split(".")[-2]
            if table in plan and plan[table].sharding_type != "data_parallel":
                yield parameter
