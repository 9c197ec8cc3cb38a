"""Checks that the state of an OptimScheduler fits, before anything changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dist_sparse.schedulers import ReadyDataScheduler
from dist_sparse.schedulers.base import BaseDataScheduler


def check_state(
    saved: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    sparsity: Mapping[str, Any],
) -> dict[str, Any]:
    """Load a state into copies of the parts, which share tensors but no other state. Local.

    Args:
        saved: of ``OptimScheduler.state_dict()``.
        optimizer, scaler: of the OptimScheduler.
        sparsity: its data sparsifier and its scheduler, by name.

    Returns:
        The facts that must be equal on all ranks.

    Raises:
        ValueError: a part is missing or does not fit. Or any other error of torch's, for the same
            reason.
    """
    _refuse_other_parts(saved, sparsity)
    # A load replaces the groups and the state of the copy; the original's are not touched.
    loaded = copy.copy(optimizer)
    loaded.load_state_dict(saved["optimizer"])
    # States of other packages have any names and shapes.
    if type(optimizer).__module__.startswith("torch.optim."):
        _refuse_other_optimizer(optimizer, loaded)
    facts = {"learning rates": [group["lr"] for group in loaded.param_groups]}
    # A run without AMP has saved None or {}.
    if scaler is not None and saved.get("scaler"):
        facts["scale of the scaler"] = _checked_scale(saved["scaler"])
    schedule = sparsity.get("data_scheduler")
    if not isinstance(schedule, ReadyDataScheduler | None):
        # A user's class can't prepare a load: it is tried on a copy.
        copy.copy(schedule).load_state_dict(saved["data_scheduler"])
    return facts


def prepare_schedule(
    schedule: BaseDataScheduler | None, saved: Mapping[str, Any]
) -> Callable[[], object]:
    """Return the function that loads the data scheduler's state. Collective if it checks."""
    if schedule is None:
        return lambda: None
    if isinstance(schedule, ReadyDataScheduler):
        return schedule.prepare_load(saved["data_scheduler"])[1]
    return partial(schedule.load_state_dict, saved["data_scheduler"])


@contextmanager
def misfits() -> Iterator[None]:
    """Turn exceptions into a ValueError: torch has one for each way in which a state can't fit."""
    try:
        yield
    except ValueError:
        raise
    except Exception as fault:
        raise ValueError(f"The state does not fit: {type(fault).__name__}: {fault}.") from fault


def _refuse_other_parts(saved: Any, sparsity: Mapping[str, Any]) -> None:
    if missing := [name for name in ("optimizer", *sparsity) if name not in saved]:
        raise ValueError(f"The state lacks {missing}; it has {sorted(saved)}.")
    unknown = saved.keys() & {"data_sparsifier", "data_scheduler"} - sparsity.keys()
    if unknown:
        raise ValueError(
            f"The state has {sorted(unknown, reverse=True)}, which this OptimScheduler was"
            " constructed without."
        )


def _refuse_other_optimizer(
    optimizer: torch.optim.Optimizer, loaded: torch.optim.Optimizer
) -> None:
    for ours, group in zip(optimizer.param_groups, loaded.param_groups, strict=True):
        # Learning rate schedulers add others.
        if missing := sorted(loaded.defaults.keys() & ours.keys() - group.keys()):
            raise ValueError(
                f"The state is of another class than {type(loaded).__name__}: its groups lack"
                f" {missing}."
            )
        for parameter in group["params"]:
            _refuse_other_shapes(loaded.state.get(parameter, {}), parameter.shape)


def _refuse_other_shapes(state: Mapping[str, Any], shape: torch.Size) -> None:
    # Step counts are scalars, and Adafactor's two variances a row and a column.
    parts = {name: part for name, part in state.items() if name not in ("row_var", "col_var")}
    for name, part in parts.items():
        if getattr(part, "shape", shape) not in (shape, torch.Size()):
            raise ValueError(
                f"The state is of other parameters: {name} has the shape {tuple(part.shape)}, the"
                f" parameter {tuple(shape)}."
            )


def _checked_scale(saved: Any) -> Any:
    # A scaler of any device reads the state; this one is never used.
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(saved)
    scale = scaler.get_scale()
    if not 0 < scale < math.inf:
        raise ValueError(f"Invalid {scale=} of the scaler: must be a finite number > 0.")
    return scale
