"""Arguments and states of an OptimScheduler, checked; which steps are updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_sparse.checks import integer, number
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["OptimConfig", "check_optimizer", "check_sparsity"]

_TOO_EARLY = "the model has fused tables, which are updated inside every backward, before"


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
            self._set("step_per_update", integer("step_per_update", self.step_per_update, least=1))
            self._set("accum_grad", integer("accum_grad", self.accum_grad, least=1))
        except ValueError as error:
            raise AssertionError(str(error)) from None
        if self.optim_loss is not None and not isinstance(self.optim_loss, str):
            raise AssertionError(f"Invalid optim_loss={self.optim_loss!r}: must be the name of a loss, or None.")
        if isinstance(self.updated_modules, str):
            self._set("updated_modules", [self.updated_modules])
        elif self.updated_modules is not None:
            if not isinstance(self.updated_modules, Sequence):  # a set has another order in each process
                raise ValueError(
                    f"Invalid updated_modules={self.updated_modules!r}: must be a path or a list of paths."
                )
            self._set("updated_modules", list(self.updated_modules))
        for name in ("use_amp", "distributed"):
            if getattr(self, name) not in (True, False):  # "no" would count as true
                raise ValueError(f"Invalid {name}={getattr(self, name)!r}: must be True or False.")
        if self.grad_clip is not None:
            self._set("grad_clip", _positive("grad_clip", self.grad_clip))
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
        """Return the loss to differentiate, itself.

        Raises:
            AssertionError: there is no loss named "loss". KeyError: there is none named ``optim_loss``.
            ValueError: it is not a tensor.
        """
        if self.optim_loss is None and "loss" not in losses:
            raise AssertionError(f"There is no loss named 'loss' among {list(losses)}: pass one, or set optim_loss.")
        loss = losses[self.loss_name]
        if not isinstance(loss, Tensor):
            raise ValueError(f"Invalid loss {self.loss_name!r} of type {type(loss).__name__}: must be a tensor.")
        return loss

    def check_fused(self, *, owns_them: bool) -> None:
        """Check the arguments for a model with fused tables.

        Args:
            owns_them: whether some of the tables belong to ``updated_modules``.

        Raises:
            ValueError: gradients would have to be scaled, accumulated or clipped that no rank ever holds.
        """
        if self.scaled:
            raise ValueError(
                f"Invalid use_amp=True with float16: {_TOO_EARLY} the factor of the GradScaler can be divided out. Use "
                "bfloat16 autocast (amp_dtype=torch.bfloat16) or tables with a dense kernel."
            )
        if self.accum_grad > 1:
            raise ValueError(
                f"Invalid accum_grad={self.accum_grad}: {_TOO_EARLY} gradients can be accumulated. Use larger batches "
                "or tables with a dense kernel."
            )
        if owns_them and self.grad_clip is not None and not math.isinf(self.grad_clip):
            raise ValueError(
                f"Invalid grad_clip={self.grad_clip}: {_TOO_EARLY} the norm is known. Use grad_clip=None and the fused "
                "optimizer's own gradient_clipping and max_gradient, an OptimScheduler that clips the other modules "
                "alone (updated_modules), or tables with a dense kernel."
            )


def _positive(name: str, value: Any) -> float:
    """A number > 0; infinity is one, also spelled "inf"."""
    if isinstance(value, str) and value == "inf":
        return math.inf
    if isinstance(value, float) and value == math.inf:
        return math.inf
    if (found := float(number(name, value))) <= 0:
        raise ValueError(f"Invalid {name}={value!r}: must be a number > 0.")
    return found


def check_sparsity(sparsifier: Any, scheduler: Any) -> None:
    """Raise a ValueError unless they are a sparsifier and its scheduler."""
    if sparsifier is not None and not isinstance(sparsifier, BaseDataSparsifier):
        raise ValueError(f"Invalid data_sparsifier of type {type(sparsifier).__name__}: must be a BaseDataSparsifier.")
    if scheduler is None:
        return
    if not isinstance(scheduler, BaseDataScheduler):
        raise ValueError(f"Invalid data_scheduler of type {type(scheduler).__name__}: must be a BaseDataScheduler.")
    if scheduler.data_sparsifier is not sparsifier:
        raise ValueError("Invalid data_scheduler: it schedules another sparsifier than data_sparsifier.")


def check_optimizer(loaded: torch.optim.Optimizer, present: torch.optim.Optimizer) -> None:
    """Raise a ValueError if the state is of another optimizer or of other parameters.

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
