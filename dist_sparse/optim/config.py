"""Arguments of an OptimScheduler, checked: which steps are updates, which parameters are updated, which states fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.checks import integer, number
from dist_sparse.tables.modules import modules_by_path
from dist_sparse.tables.tensors import is_sharded

__all__ = ["OptimConfig", "Owned", "Wiring", "check_optimizer", "owned_by", "wiring_of"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Arguments of :class:`~dist_sparse.OptimScheduler`, where they are described. Immutable.

    Raises:
        AssertionError: an interval is not an integer >= 1, or ``optim_loss`` is not a string (as in SpeeChain).
        ValueError: another argument is invalid.

    Example::

        >>> from dist_sparse.optim import OptimConfig
        >>> config = OptimConfig(accum_grad=2, step_per_update=3, use_amp=False)
        >>> [step_num for step_num in range(1, 13) if config.due(step_num)]
        [5, 6, 11, 12]
        >>> [step_num for step_num in range(1, 13) if config.updates(step_num)]
        [6, 12]
    """

    distributed: bool = False
    optim_loss: str | None = None
    updated_modules: str | Sequence[str] | None = None
    step_per_update: int = 1
    use_amp: bool = True
    accum_grad: int = 1
    ft_factor: float = 1.0
    grad_clip: float | None = 1.0
    grad_norm_type: float = 2.0
    amp_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        try:
            for name in ("step_per_update", "accum_grad"):
                self._set(name, integer(name, getattr(self, name), least=1))
        except ValueError as error:
            raise AssertionError(str(error)) from None
        if self.optim_loss is not None and not isinstance(self.optim_loss, str):
            raise AssertionError(f"Invalid optim_loss={self.optim_loss!r}: must be the name of a loss, or None.")
        modules = [self.updated_modules] if isinstance(self.updated_modules, str) else self.updated_modules
        if modules is not None and not isinstance(modules, Sequence):  # a set has another order in each process
            raise ValueError(f"Invalid updated_modules={modules!r}: must be a path or a list of paths.")
        self._set("updated_modules", None if modules is None else list(modules))
        for name in ("use_amp", "distributed"):
            if getattr(self, name) not in (True, False):  # "no" would count as true
                raise ValueError(f"Invalid {name}={getattr(self, name)!r}: must be True or False.")
        self._set("grad_clip", None if self.grad_clip is None else _positive("grad_clip", self.grad_clip))
        self._set("grad_norm_type", _positive("grad_norm_type", self.grad_norm_type))
        self._set("ft_factor", float(number("ft_factor", self.ft_factor, least=0)))
        if self.amp_dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Invalid amp_dtype={self.amp_dtype!r}: must be torch.float16 or torch.bfloat16.")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled: float16 needs it, bfloat16 has the range of float32."""
        return bool(self.use_amp) and self.amp_dtype == torch.float16

    @property
    def loss_name(self) -> str:
        """The name of the loss to differentiate."""
        return self.optim_loss or "loss"

    def real_step(self, step_num: int) -> int:
        """Return the number of the real step, from 1, to which a micro-step belongs."""
        return (step_num - 1) // self.accum_grad + 1

    def due(self, step_num: int) -> bool:
        """Return whether a micro-step contributes gradients to an update."""
        return self.real_step(step_num) % self.step_per_update == 0

    def updates(self, step_num: int) -> bool:
        """Return whether an update of the weights follows a micro-step: it is due and the last of its real step."""
        return self.due(step_num) and step_num % self.accum_grad == 0

    def loss_of(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Return the loss to differentiate, itself; raises as ``OptimScheduler.step()``."""
        if self.optim_loss is None and "loss" not in losses:
            raise AssertionError(f"There is no loss named 'loss' among {list(losses)}: pass one, or set optim_loss.")
        loss = losses[self.loss_name]
        if not isinstance(loss, Tensor):
            raise ValueError(f"Invalid loss {self.loss_name!r} of type {type(loss).__name__}: must be a tensor.")
        return loss

    def check_fused(self, *, owns_them: bool) -> None:
        """Raise a ValueError if gradients of fused tables, which no rank ever holds, would have to be scaled,
        accumulated, or (if some of the tables belong to ``updated_modules``: ``owns_them``) clipped."""
        if self.scaled:
            amp = "bfloat16 autocast (amp_dtype=torch.bfloat16)"
            raise _too_early("use_amp=True with float16", "the GradScaler's factor is divided out", amp)
        if self.accum_grad > 1:
            raise _too_early(f"accum_grad={self.accum_grad}", "gradients are accumulated", "larger batches")
        if owns_them and self.grad_clip not in (None, math.inf):
            clip = "grad_clip=None and the fused optimizer's own gradient_clipping and max_gradient, an OptimScheduler "
            clip += "that clips the other modules alone (updated_modules),"
            raise _too_early(f"grad_clip={self.grad_clip}", "the norm is known", clip)


def _too_early(argument: str, when: str, instead: str) -> ValueError:
    return ValueError(
        f"Invalid {argument}: the model has fused tables, which are updated inside every backward, before {when}. Use "
        f"{instead} or tables with a dense kernel."
    )


def _positive(name: str, value: Any) -> float:
    """A number > 0, or infinity, also as text."""
    if isinstance(value, float | str) and value in (math.inf, "inf"):
        return math.inf
    if (found := float(number(name, value))) <= 0:
        raise ValueError(f"Invalid {name}={value!r}: must be a number > 0.")
    return found


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How gradients reach the parameters of a model."""

    modules: Mapping[str, nn.Module]  # by path from the user's own module, which is ""; wrappers are left out
    fused: bool  # whether it has tables whose optimizer runs inside the backward
    # Whether gradients need a backward through the whole graph, with hooks: FSDP puts whole parameters in the place of
    # shards, and a TorchRec kernel holds several tables in one tensor.
    hooked: bool
    replicating: list[Any]  # the modules that average gradients over ranks, each with no_sync()

    @property
    def ddp(self) -> list[DistributedDataParallel]:
        """The DDP modules among ``replicating``."""
        return [module for module in self.replicating if isinstance(module, DistributedDataParallel)]


@dataclass(frozen=True, kw_only=True)
class Owned:
    """The parameters that one optimizer updates."""

    parameters: list[nn.Parameter]  # each once, frozen ones included, those of fused tables excluded
    pieces: frozenset[nn.Parameter]  # of them, this rank's parts of larger tensors: dense shards and DTensors
    fused: list[Any]  # sharded collections with a fused optimizer, which takes nothing but a learning rate

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that take a gradient."""
        return [p for p in self.parameters if p.requires_grad]

    def set_fused_lr(self, lr: float) -> None:
        """Set the learning rate of fused tables, from the next forward on: the kernels read it there."""
        for module in self.fused:
            for group in module.fused_optimizer.param_groups:
                group["lr"] = lr
            module.fused_optimizer.step()  # hands it to the kernels; they have updated the weights already


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
    """Return what is in the modules at these paths from the user's own module, or in the whole model for None.

    Raises:
        ValueError: there is no such module, it is a part of a sharded collection, it has no parameters, or torch
            itself updates some of them inside the backward.
    """
    known = wiring.modules
    if names is not None:
        unknown = [name for name in names if not name or name not in known]
        if unknown or not names:
            children = [path for path in known if path and "." not in path]
            raise ValueError(f"Invalid updated_modules={names}: {unknown} are not modules; there are {children}.")
        collections = [path for path, module in known.items() if getattr(module, "module_sharding_plan", None)]
        inside = [name for name in names if any(name.startswith(f"{path}." if path else "") for path in collections)]
        if inside:
            raise ValueError(
                f"Invalid updated_modules={names}: {inside} are parts of sharded collections, whose tables share "
                f"kernels and a learning rate: name the collections, {collections}."
            )
    roots = [known[name] for name in ([""] if names is None else names)]
    where = list(names or [type(known[""]).__name__])
    parameters = list({p: None for root in roots for p in root.parameters()})
    if not parameters:
        raise ValueError(f"The modules {where} have no parameters.")
    fused = list({module: None for root in roots for module in _fused(root)})
    moving = {p for p in parameters if hasattr(p, "_in_backward_optimizers")}
    if alone := moving.difference(*(module.parameters() for module in fused)):
        raise ValueError(
            f"{len(alone)} parameters of {where} are updated inside the backward by apply_optimizer_in_backward() and "
            "belong to no sharded collection. An OptimScheduler can't step them: leave that call out, or shard their "
            "tables with DistributedModelParallel first."
        )
    kept = [p for p in parameters if p not in moving]
    shards = {p for root in roots for p in _shards(root)}
    return Owned(parameters=kept, pieces=frozenset(p for p in kept if p in shards or is_sharded(p)), fused=fused)


def check_optimizer(loaded: torch.optim.Optimizer, present: torch.optim.Optimizer) -> None:
    """Raise a ValueError if the state of ``loaded`` is of another optimizer than ``present`` or of other parameters.

    ``load_state_dict()`` of torch compares numbers of groups and parameters only; ``step()`` would fail later. A state
    does not name its optimizer, so one of a relative (Adam's in Adamax) passes.
    """
    if not type(present).__module__.startswith("torch.optim."):
        return  # the groups and states of other packages have any names and shapes
    for old, new in zip(present.param_groups, loaded.param_groups, strict=True):
        if missing := [name for name in old if name in present.defaults and name not in new]:
            raise ValueError(f"The state is of another optimizer than {type(present).__name__}: it lacks {missing}.")
    for at, parameter in enumerate(p for group in loaded.param_groups for p in group["params"]):
        for name, part in loaded.state.get(parameter, {}).items():
            # Step counts are scalars. Adafactor's two variances are a row and a column.
            whole = isinstance(part, Tensor) and part.dim() > 0 and name not in ("row_var", "col_var")
            if whole and part.shape != parameter.shape:
                raise ValueError(
                    f"The state is of other parameters: {name} of number {at} has the shape {tuple(part.shape)}, the "
                    f"parameter {tuple(parameter.shape)}."
                )


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
