"""Which arguments of an OptimScheduler make sense, alone and together?

Weights that move inside the backward are why some do not: by the time anybody could scale, clip, accumulate or skip
their gradients, they have been applied.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_sparse.optim.ownership import Owned, replicating
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

if TYPE_CHECKING:
    from dist_sparse.optim.scheduler import OptimScheduler

__all__ = [
    "check_alone",
    "check_arguments",
    "check_averaging",
    "check_fused",
    "check_sparsity",
    "count",
    "is_number",
    "learning_rate",
    "lr_arguments",
]

_WHY = "they move inside every backward, before anybody can"


def check_arguments(
    *,
    optim_conf: Any,
    model: Any,
    updated_modules: Any,
    accum_grad: Any,
    step_per_update: Any,
    optim_loss: Any,
    grad_clip: Any,
    grad_norm_type: Any,
    ft_factor: Any,
    amp_dtype: Any,
    use_amp: Any,
    distributed: Any,
) -> None:
    """Refuses values that make no sense by themselves.

    Raises:
        AssertionError: of an interval or the loss's name, as in the ancestor. ValueError: of the others.
    """
    for name, every in {"accum_grad": accum_grad, "step_per_update": step_per_update}.items():
        if _index(every) < 1:
            raise AssertionError(f"Invalid {name}={every!r}: must be an integer >= 1.")
    if optim_loss is not None and not isinstance(optim_loss, str):
        raise AssertionError(f"Invalid {optim_loss=}: must be the name of a loss, or None for 'loss'.")
    if not isinstance(model, nn.Module):
        raise ValueError(f"Invalid model of type {type(model).__name__}: must be a torch.nn.Module.")
    if optim_conf is not None and not isinstance(optim_conf, Mapping):
        raise ValueError(f"Invalid {optim_conf=}: must be the optimizer's keyword arguments, by name.")
    if updated_modules is not None and not isinstance(updated_modules, Sequence):
        # A set has another order in each process: states and messages go by the order.
        raise ValueError(f"Invalid {updated_modules=}: must be a module's path, or a list of some.")
    for name, value in {"use_amp": use_amp, "distributed": distributed}.items():
        if value not in (True, False):  # else "no" means yes
            raise ValueError(f"Invalid {name}={value!r}: must be True or False.")
    if grad_clip is not None and not (is_number(grad_clip) and grad_clip > 0):
        raise ValueError(f"Invalid {grad_clip=}: must be a number > 0, or None not to clip.")
    if grad_norm_type != "inf" and not (is_number(grad_norm_type) and grad_norm_type > 0):
        raise ValueError(f"Invalid {grad_norm_type=}: must be a number > 0.")
    if not (is_number(ft_factor) and math.isfinite(ft_factor) and ft_factor >= 0):
        raise ValueError(f"Invalid {ft_factor=}: must be a finite number >= 0.")
    if amp_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"Invalid {amp_dtype=}: must be torch.float16 or torch.bfloat16.")


def count(name: str, given: Any) -> int:
    """The number of a step or an epoch; integers of NumPy and tensors of one integer are numbers, too.

    Raises:
        ValueError: it is no integer, or less than 1.
    """
    if (number := _index(given)) < 1:
        raise ValueError(f"Invalid {name}={given!r}: must be an integer; it counts from 1.")
    return number


def check_sparsity(sparsifier: Any, scheduler: Any) -> None:
    """Refuses what is no sparsifier, no data scheduler, or not that sparsifier's.

    Raises:
        ValueError: see above.
    """
    if sparsifier is not None and not isinstance(sparsifier, BaseDataSparsifier):
        raise ValueError(f"Invalid data_sparsifier of type {type(sparsifier).__name__}: must be a BaseDataSparsifier.")
    if scheduler is None:
        return
    if not isinstance(scheduler, BaseDataScheduler):
        raise ValueError(f"Invalid data_scheduler of type {type(scheduler).__name__}: must be a BaseDataScheduler.")
    if scheduler.data_sparsifier is not sparsifier:
        raise ValueError("Invalid data_scheduler: it schedules another sparsifier than the data_sparsifier given.")


def check_fused(*, model_moves: bool, owned: Owned, scaled: bool, accum_grad: int, grad_clip: float | None) -> None:
    """Refuses what can't reach weights that move inside the backward.

    Args:
        model_moves: whether the model has such weights.
        owned: what the object is in charge of.
        scaled: whether losses are scaled.

    Raises:
        ValueError: says why, and what works.
    """
    if not model_moves:
        return
    if scaled:
        raise ValueError(
            f"Invalid use_amp=True with float16: a GradScaler's factor would reach the model's fused tables: {_WHY} "
            "take it back. bfloat16 autocast works (amp_dtype=torch.bfloat16), and so do tables with a dense kernel."
        )
    if accum_grad > 1:
        raise ValueError(
            f"Invalid {accum_grad=}: the gradients of the model's fused tables can't be accumulated: {_WHY} add them "
            "up. Larger batches work, and so do tables with a dense kernel."
        )
    if owned.moves_in_backward and grad_clip is not None and not math.isinf(grad_clip):
        raise ValueError(
            f"Invalid {grad_clip=}: the gradients of fused tables can't be clipped here: {_WHY} know the norm. The "
            "tables' own clipping works (the fused optimizer's gradient_clipping and max_gradient), with grad_clip="
            "None, or with an OptimScheduler that clips for the other modules alone (updated_modules); and so do "
            "tables with a dense kernel."
        )


def check_averaging(model: nn.Module, accum_grad: int) -> None:
    """Refuses a model that does not average gradients where it was said to.

    Raises:
        ValueError: ``distributed=True``, and nothing in the model has ``no_sync()``.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if (several or accum_grad > 1) and not replicating(model):
        raise ValueError(
            f"Invalid distributed=True: {type(model).__name__} does not average gradients over ranks; wrap the model "
            "in DistributedDataParallel or DistributedModelParallel first."
        )


def check_alone(new: OptimScheduler, others: Sequence[OptimScheduler]) -> None:
    """Refuses what several OptimSchedulers of one model can't have each.

    Args:
        others: those of the model that go on beside ``new``.

    Raises:
        ValueError: another one steps the same sparsifier or data scheduler, or wants the forward in another precision.
    """
    for other in others:
        for name in ("data_sparsifier", "data_scheduler"):
            if getattr(new, name) is not None and getattr(new, name) is getattr(other, name):
                raise ValueError(
                    f"Invalid {name}: another OptimScheduler of the model steps it already, once an update."
                )
        if new.use_amp and other.use_amp and new.amp_dtype != other.amp_dtype:
            raise ValueError(
                f"Invalid amp_dtype={new.amp_dtype}: another OptimScheduler of the model has {other.amp_dtype}, and "
                "they share its forward."
            )


def lr_arguments(update_lr: Callable[..., Any]) -> list[str]:
    """Which of its two arguments a schedule's ``update_lr`` takes; older ones know no ``epoch_num``.

    Raises:
        ValueError: it does not take ``real_step``.
    """
    known = inspect.signature(update_lr).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return ["real_step", "epoch_num"]
    if "real_step" not in known:
        raise ValueError(f"Invalid update_lr with the arguments {list(known)}: must take real_step and epoch_num.")
    return [name for name in ("real_step", "epoch_num") if name in known]


def learning_rate(asked: Any, ft_factor: float) -> float:
    """What a schedule has answered, times ``ft_factor``.

    Raises:
        ValueError: it is no finite number >= 0: one such step would make weights of NaN.
    """
    try:
        lr = math.nan if isinstance(asked, (str, bytes)) else ft_factor * float(asked)
    except (TypeError, ValueError, OverflowError):
        lr = math.nan
    if not 0 <= lr < math.inf:
        raise ValueError(f"Invalid learning rate {asked!r} of update_lr(): must be a finite number >= 0.")
    return lr


def _index(value: Any) -> int:
    """What is no integer, as bools are none, is 0: it does not count."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return 0
    try:
        return operator.index(value)
    except TypeError:
        return 0


def is_number(value: Any) -> bool:
    """Whether it is a real number, which neither NaN nor a bool is."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and not math.isnan(value)
