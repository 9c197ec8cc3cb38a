"""Which optimizer state belongs to what is removed?

State with an element for each weight goes with its element. State with one for each row of a shard (row-wise Adagrad)
goes when the whole row of that shard is removed, and stays while something of the row is kept. Other state (step
counts) belongs to no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dist_sparse.enforcer.optimizers import local
from dist_sparse.masking.masks import BlockMask

__all__ = ["reset_state", "state_of"]

State = tuple[Tensor, float]
"""A live view, and the value that the optimizer begins with."""


_INITIAL = {"sum": "initial_accumulator_value", "step_size": "lr"}
"""State that does not begin at 0, by its name in the optimizer, and the option with its first value: that of Adagrad
and row-wise Adagrad, and of Rprop."""


def reset_state(mask: BlockMask | Tensor, states: Iterable[State]) -> None:
    """Writes its initial value to the state of what ``mask`` removes.

    Args:
        mask: of one shard, or a dense one of plain data.
        states: those that fit neither the elements nor the rows are left alone.
    """
    if isinstance(mask, BlockMask) and not mask.removes:
        return
    shape = (mask.rect.rows, mask.rect.cols) if isinstance(mask, BlockMask) else tuple(mask.shape)
    empty: Tensor | None = None
    for state, initial in states:
        if tuple(state.shape) == shape:
            for rows, kept in _chunks(mask):
                state.data[rows].masked_fill_(~kept, initial)
        elif shape and state.dim() in (1, 2) and state.numel() == state.shape[0] == shape[0]:
            empty = _empty_rows(mask, shape[0], state.device) if empty is None else empty
            state.data.view(-1).masked_fill_(empty, initial)


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor, weight: Tensor) -> Iterator[State]:
    """What an optimizer keeps for ``weight``, which is ``parameter``, its matrix of one row, or a part of it."""
    here = local(parameter)
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    first = (weight.data_ptr() - here.data_ptr()) // here.element_size()
    for name, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor):
            continue
        initial = float(group.get(_INITIAL.get(name, ""), 0.0))
        state = local(value)
        rows = here.shape[0] if here.dim() else 0
        if state.shape == here.shape and state.is_contiguous():
            yield state.view(-1)[first : first + weight.numel()].view_as(weight), initial
        elif rows and state.numel() == rows and here.numel():
            width = here.numel() // rows
            yield state.view(-1)[first // width : (first + weight.numel()) // width], initial


def _chunks(mask: BlockMask | Tensor) -> Iterator[tuple[slice, Tensor]]:
    if isinstance(mask, BlockMask):
        yield from mask.element_chunks()
    else:
        yield slice(None), mask != 0


def _empty_rows(mask: BlockMask | Tensor, rows: int, device: torch.device) -> Tensor:
    """The rows of which nothing is kept: bool ``(rows,)``."""
    empty = torch.empty(rows, dtype=torch.bool, device=device)
    for some, kept in _chunks(mask):
        empty[some] = ~kept.flatten(1).any(dim=1)
    return empty
