"""Optimizers: which one of several wrapped ones steps, which rows a step writes, and the state of
removed weights.

TorchRec, Lightning and others wrap optimizers in optimizers. A post-step hook runs only on those
whose ``step`` torch has wrapped, so hooks are registered on the innermost ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.modules import torchrec_port
from dist_sparse.tables.shards import Rect, memory_of

State = tuple[Tensor, float]
"""A live view, and the optimizer's initial value."""


class Masked(NamedTuple):
    """A registered weight: its name, live storage and current mask (packed bits, or dense for plain
    data)."""

    name: str
    weight: Tensor
    mask: BlockMask | Tensor


class Stepped(NamedTuple):
    """A registered weight, and the state that an optimizer keeps of it.

    Args:
        name: under which it is registered.
        weight: its live storage.
        states: for each weight, for each row, or step counts.
        sums: the squared gradients that Adagrad has summed; None of another optimizer.
        by_element: it has state for each element, which a first step may yet have to make.
    """

    name: str
    weight: Tensor
    states: list[State]
    sums: State | None
    by_element: bool


def leaves(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers inside ``optimizer`` that step parameters themselves: not TorchRec's
    fused ones, whose tables are updated inside the backward.

    Raises:
        ValueError: something in there is no optimizer.
    """
    torchrec = torchrec_port()
    parts = torchrec.combined(optimizer) if torchrec else None
    # TorchRec's KeyedOptimizerWrapper and OptimizerWrapper, LightningOptimizer and others.
    if parts is None and hasattr(optimizer, "_optimizer"):
        parts = [optimizer._optimizer]
    if parts is not None:
        for part in parts:
            yield from leaves(part)
    elif combines(optimizer):
        return
    elif isinstance(optimizer, torch.optim.Optimizer) and hasattr(
        optimizer, "_optimizer_step_post_hooks"
    ):
        yield optimizer
    else:
        raise ValueError(
            f"Invalid optimizer of type {type(optimizer).__name__}: must be a torch.optim.Optimizer"
            " whose constructor has run, or a wrapper of one in its attribute _optimizer: masks"
            " are applied by a hook on its step()."
        )


def combines(optimizer: object) -> bool:
    """Whether an optimizer is TorchRec's, of several ones or of what runs inside the backward."""
    torchrec = torchrec_port()
    return torchrec is not None and (
        torchrec.is_fused(optimizer) or torchrec.combined(optimizer) is not None
    )


def keeps_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer keeps, or will keep, state for each element of a weight. Plain
    SGD and row-wise ones, with a number for each row, do not."""
    # By class and name, not by state: before the first step there is none.
    if type(optimizer) is torch.optim.SGD:
        return any(group["momentum"] for group in optimizer.param_groups)
    return not type(optimizer).__name__.lower().startswith("rowwise")


def step_rows(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """Return the rows of ``parameter`` that the last step may have written, int64 ``(n,)``,
    possibly repeated.

    None means any row: only for sparse gradients, and optimizers that write no other row, the rows
    are known.
    """
    grad = parameter.grad
    if grad is None or not grad.is_sparse:
        return None
    # Exactly these classes: a subclass may write more.
    only_those = {
        torch.optim.SparseAdam: True,
        torch.optim.Adagrad: True,
        # Momentum moves every row that was ever touched.
        torch.optim.SGD: not keeps_elements(optimizer),
    }
    return grad._indices()[0] if only_those.get(type(optimizer)) else None


def local(tensor: Tensor) -> Tensor:
    """Return the storage of this rank behind a parameter: of a DTensor its local tensor."""
    # Without to_local(), which would make another tensor, with an autograd node.
    inner = getattr(tensor, "_local_tensor", None)
    return inner if isinstance(inner, Tensor) else tensor


def same_storage(tensors: Sequence[Tensor]) -> Callable[[Tensor], list[int]]:
    """Return a function that lists the indices of those ``tensors`` that share memory with a given
    one.

    Views and ``.data`` of a parameter are other objects than the parameter; memory is what they
    have in common.
    """
    # By storage: most hold one tensor.
    known: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for i, tensor in enumerate(map(local, tensors)):
        # Empty tensors share nothing.
        if tensor.numel():
            known[tensor.untyped_storage().data_ptr()].append((i, *memory_of(tensor)))

    def find(tensor: Tensor) -> list[int]:
        held = known.get(tensor.untyped_storage().data_ptr())
        if not held or not tensor.numel():
            return []
        first, end = memory_of(tensor)
        return [i for i, start, behind in held if max(first, start) < min(end, behind)]

    return find


_INITIAL = {"sum": "initial_accumulator_value", "step_size": "lr"}
"""State whose initial value is not 0, and the option that holds that value: in Adagrad and row-wise
Adagrad, and in Rprop."""


def reset_state(mask: BlockMask | Tensor, states: Iterable[State]) -> None:
    """Set the state of weights removed by ``mask`` to its initial value.

    State with an element for each weight is reset with its element. State with one for each row of
    a shard (row-wise Adagrad) is reset when all of that row of that shard is removed. Other state
    (step counts) belongs to no weight.

    Args:
        mask: packed, of one shard, or dense, of plain data.
        states: those with neither the shape of the mask nor its number of rows are left alone.
    """
    shape = torch.Size(mask.rect[2:]) if isinstance(mask, BlockMask) else mask.shape
    if isinstance(mask, Tensor):
        # A vector, too, is masked row by row.
        matrix = mask.unsqueeze(-1).flatten(1)
        mask = BlockMask.of_elements(Rect(0, 0, *matrix.shape), matrix)
    if not mask.removes:
        return
    for state, initial in states:
        if state.shape == shape:
            by_row = state.data.view(mask.rect[2:])
            for rows, kept in mask.element_chunks():
                by_row[rows].masked_fill_(~kept, initial)
        # One number for each row: (rows,) or (rows, 1).
        elif state.dim() in (1, 2) and shape[:1] == (state.numel(),) == state.shape[:1]:
            state.data.view(-1).masked_fill_(mask.dead_rows().to(state.device), initial)


def state_of(
    optimizer: torch.optim.Optimizer, parameter: Tensor, weight: Tensor
) -> dict[str, State]:
    """Return the optimizer's state by name for ``weight``, which is ``parameter``, its matrix of
    one row, or a part of it."""
    found: dict[str, State] = {}
    here = local(parameter)
    # A part of a parameter is contiguous elements of it, from the first one on.
    first = (weight.data_ptr() - here.data_ptr()) // here.element_size()
    last = first + weight.numel()
    for name, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor):
            continue
        state, initial = local(value), initial_state(optimizer, parameter, name)
        if state.shape == here.shape and state.is_contiguous():
            found[name] = state.view(-1)[first:last].view_as(weight), initial
        elif here.dim() and here.numel() and state.numel() == here.shape[0]:
            # One number for each row: a part of whole rows has a part of them.
            width = here.numel() // here.shape[0]
            found[name] = state.view(-1)[first // width : last // width], initial
    return found


def initial_state(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str) -> float:
    """Return the initial value of a parameter's state, by the options of its group."""
    # By identity: == of tensors compares elements.
    [group] = [
        group for group in optimizer.param_groups if id(parameter) in map(id, group["params"])
    ]
    return float(group.get(_INITIAL.get(name, ""), 0.0))


def stepped(
    name: str, optimizer: torch.optim.Optimizer, parameter: Tensor, weight: Tensor
) -> Stepped:
    """Return what an optimizer keeps of ``weight``, a part of ``parameter``."""
    states = state_of(optimizer, parameter, weight)
    is_adagrad = "initial_accumulator_value" in optimizer.defaults
    sums = states.get("sum") if is_adagrad else None
    return Stepped(name, weight, [*states.values()], sums, keeps_elements(optimizer))
