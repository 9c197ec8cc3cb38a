"""What optimizers know about tables: the state of each shard, and the rows that were touched.

Optimizers are found inside wrappers, such as TorchRec's and Lightning's. A shard is a view of the
parameter that an optimizer steps: :mod:`~dist_sparse.tables.memory` finds what belongs together.

:func:`records` tells which rows of each table were ever touched, or why that is unknown: the state
of Adagrad, Adam, AdamW, RMSprop and FBGEMM's fused optimizers is zero until a gradient reaches the
row, and never again. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)
from torch.utils._pytree import tree_leaves

from dist_sparse.tables.memory import ByMemory, local, same_storage
from dist_sparse.tables.modules import batches_of, collections_of, torchrec_port
from dist_sparse.tables.protocols import TableBatch
from dist_sparse.tables.shards import Rect, ShardedData, optimizers_in_backward
from dist_sparse.text import number_of

# A live view of optimizer state, and the initial value of its elements.
State = tuple[Tensor, float]

Optimizers = Optimizer | Sequence[Optimizer]
"""One optimizer of torch or TorchRec, or several."""


def leaves(optimizer: Any) -> Iterator[Optimizer]:
    """Yield the optimizers inside ``optimizer``, or inside several, that step parameters
    themselves: not TorchRec's fused ones, whose tables are updated inside the backward.

    Raises:
        ValueError: ``optimizer``, or a part of it, is not an optimizer.
    """
    optimizer = unwrapped_optimizer(optimizer)
    inside = torchrec_parts(optimizer)
    if isinstance(optimizer, (list, tuple)):
        inside = list(optimizer)
    if inside is not None:
        yield from chain(*map(leaves, inside))
    # Set by the constructor of torch's optimizers: without it, no hook can be registered.
    elif hasattr(optimizer, "_optimizer_step_post_hooks"):
        yield optimizer
    else:
        raise ValueError(
            f"Invalid optimizer of type {type(optimizer).__name__}: must be an initialized"
            " torch.optim.Optimizer, or have one in its attribute _optimizer."
        )


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers: the innermost, or the first that combines several or
    fused ones."""
    # TorchRec's KeyedOptimizerWrapper and OptimizerWrapper, LightningOptimizer and others.
    while torchrec_parts(optimizer) is None and hasattr(optimizer, "_optimizer"):
        optimizer = optimizer._optimizer
    return optimizer


def torchrec_parts(optimizer: object) -> list[Any] | None:
    """Return the optimizers inside one of TorchRec's: none in a fused one. None for any other
    optimizer, wrappers too."""
    torchrec = torchrec_port()
    return None if torchrec is None else torchrec.parts(optimizer)


# State whose initial value is not 0, with the option that sets it: "sum" in Adagrad and row-wise
# Adagrad, "step_size" in Rprop.
_INITIAL = {"sum": "initial_accumulator_value", "step_size": "lr"}


def state_of(optimizer: Optimizer, parameter: Tensor, weight: Tensor) -> dict[str, State]:
    """Return the optimizer's state by name for ``weight``: contiguous elements of ``parameter``,
    or all of them, perhaps in another shape."""
    found = {}
    here = local(parameter)
    first = (weight.data_ptr() - here.data_ptr()) // here.element_size()
    last = first + weight.numel()
    width = math.prod(here.shape[1:])
    # A parameter of some of the weight's elements tells nothing about the others.
    held = optimizer.state.get(parameter, {}) if 0 <= first <= last <= here.numel() else {}
    for name, value in held.items():
        if not isinstance(value, Tensor):
            continue
        state = local(value)
        # As the state holds it: a float32 sum that began at 0.1 differs from the float64 option.
        initial = torch.tensor(initial_state(optimizer, parameter, name), dtype=state.dtype).item()
        # State of other shapes, such as a step count, belongs to no element and no row.
        if state.shape == here.shape and state.is_contiguous():
            found[name] = state.view(-1)[first:last].view_as(weight), initial
        elif state.shape in ((len(here),), (len(here), 1)):
            # One value per row. By its shape: a step count has one value too, without dimensions.
            found[name] = state.view(-1)[first // width : last // width], initial
    return found


def sums_of(optimizer: Optimizer, parameter: Tensor, weight: Tensor) -> State | None:
    """Return Adagrad's sums of squared gradients of ``weight``, a part of ``parameter``; None for
    another optimizer."""
    if not _is_adagrad(optimizer):
        return None
    return state_of(optimizer, parameter, weight).get("sum")


def _is_adagrad(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is Adagrad, of torch or of a user's own."""
    return "initial_accumulator_value" in optimizer.defaults


def initial_state(optimizer: Optimizer, parameter: Tensor, name: str) -> float:
    """Return the initial value of a parameter's state, by the options of its group."""
    return float(group_of(optimizer, parameter).get(_INITIAL.get(name, ""), 0.0))


def group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the options that an optimizer has for a parameter."""
    # By identity: == of tensors compares elements.
    groups = optimizer.param_groups
    return next(group for group in groups if id(parameter) in map(id, group["params"]))


def stepped_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


def fused_sums(model: nn.Module) -> ByMemory[State]:
    """Return the sums of a model's fused Adagrad optimizers and their initial value, by shard;
    nothing for other optimizers."""
    found: list[tuple[Tensor, State]] = []
    for _, batch in batches_of(collections_of(model.modules())):
        if batch.is_adagrad:
            for weight, states in zip(batch.weights(), batch.states(), strict=True):
                found.append((weight, (states[0], 0.0)))
    return ByMemory(found)


# ------------------------------------------------------------------------------
# Which rows a gradient has reached.

# State that is zero until a gradient reaches the row, by exact class: a subclass may do more.
# Adam's second moment alone would lose gradients whose squares underflow.
_MOMENTS: Mapping[type[Optimizer], tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
    SparseAdam: ("exp_avg", "exp_avg_sq"),
    RMSprop: ("square_avg",),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class LookupRecord:
    """The rows of a shard that a gradient has reached, by the state of its optimizer, or those that
    were looked up, by counts.

    To an optimizer, a row that was looked up only with gradients of 0 is untouched.

    Args:
        rows: of the shard.
        states: live, one value per element or per row, zero until a gradient reaches the row.
        is_sum: the only state is Adagrad's sum of squared gradients.
        lookups_only: only lookups make gradients. Otherwise a loss term over the whole table may
            have reached rows that no batch has looked up.
        count_steps: returns how many steps the record covers; for a fused optimizer, lookups of its
            kernel. None if the optimizer does not count, like FBGEMM's EXACT_ADAGRAD.
        since: since when these steps have been counted, as text.
        source: what the record is, as text.
    """

    rows: int
    states: tuple[Tensor, ...]
    is_sum: bool
    lookups_only: bool
    count_steps: Callable[[], int | None]
    since: str = ""
    source: str = "the optimizer's state"

    def text(self) -> str:
        """Return what the record is, and what it covers: ``the optimizer's state, 3 steps``."""
        steps = self.count_steps()
        covers = "" if steps is None else f", {number_of(steps, 'step')}{self.since}"
        return f"{self.source}{covers}"

    def has_stepped(self) -> bool:
        """Return whether the record covers any step; where none are counted, whether it has any
        row."""
        steps = self.count_steps()
        return bool(self.touched().any() if steps is None else steps)

    def touched(self) -> Tensor:
        """Return which rows a gradient has reached: bool ``(rows,)``, on the device of the
        state."""
        flags = torch.zeros(self.rows, dtype=torch.bool, device=self.states[0].device)
        for state in self.states:
            # any() takes NaN for True: a row that diverged was read.
            flags |= state.reshape(self.rows, -1).any(1)
        return flags

    def row_sums(self) -> Tensor:
        """Return Adagrad's sum of each row, ``(rows,)``: the largest of its columns if each has its
        own."""
        assert self.is_sum
        return self.states[0].reshape(self.rows, -1).amax(1)


# Why nothing is known of a table that another optimizer steps, or none.
NOT_STEPPED = "no optimizer was passed that steps it"

# For a shard or a table: a record, or the reason why it is unknown which rows were touched.
Known = LookupRecord | str


def records(
    model: nn.Module, located: Sequence[ShardedData], optimizer: Any = None
) -> dict[str, list[LookupRecord] | str]:
    """Return for each table a record of each of this rank's shards, in their order, or the reason
    why it is unknown which rows were touched. Local: another rank may know less about its shards.

    Args:
        model: holds the tables, and the optimizers that run in the backward: fused ones, and those
            of torch's ``apply_optimizer_in_backward()``.
        located: the tables.
        optimizer: what steps the other tables, wrapped or not; several may come in any container.

    Raises:
        ValueError: something in ``optimizer`` is not an optimizer.

    Example::

        >>> import torch
        >>> from dist_sparse.optimizers import records
        >>> from dist_sparse.tables.modules import ModelTables
        >>> table = torch.nn.EmbeddingBag(4, 2)
        >>> located = ModelTables(table).locate()
        >>> records(table, located, torch.optim.SGD(table.parameters()))["weight"]
        'SGD keeps no state that tells'
        >>> adam = torch.optim.Adam(table.parameters())
        >>> table(torch.tensor([[1, 3]])).sum().backward()
        >>> adam.step()
        >>> [record] = records(table, located, adam)["weight"]
        >>> record.touched(), record.count_steps()
        (tensor([False,  True, False,  True]), 1)
    """
    weights = [shard.tensor for data in located for shard in data.shards]
    # Those in the backward of unsharded tables are in the model alone; perhaps they are passed too.
    given = [*filter(None, tree_leaves(optimizer)), *optimizers_in_backward(model.parameters())]
    once = {id(leaf): leaf for leaf in leaves(given)}
    found = plain_records(once.values(), weights)
    # Fused ones come last and win: an optimizer may list fused tables, which it never steps.
    for _, batch in batches_of(collections_of(model.modules())):
        found += fused_records(batch)
    known = ByMemory(found)
    return {data.name: records_of(data, known) for data in located}


def records_of(data: ShardedData, known: ByMemory[Known]) -> list[LookupRecord] | str:
    """Return the record of each of this rank's shards of a table, or the reason why one is
    unknown."""
    of_shards = []
    for shard in data.shards:
        record = known.get(shard.tensor) or NOT_STEPPED
        if isinstance(record, str):
            return record
        of_shards.append(record)
    return of_shards


def read_rows(data: ShardedData, of_shards: Sequence[LookupRecord]) -> dict[Rect, Tensor]:
    """Return which rows of each of this rank's shards count as read: bool ``(rows,)``. A gradient
    has reached them, or they are the row of a ``padding_idx`` that is not zeros."""
    found = {}
    for record, shard in zip(of_shards, data.shards, strict=True):
        found[shard.rect] = data.with_padding(shard, record.touched())
    return found


# TorchRec does not save FBGEMM's count of steps; Checkpoints does.
_SINCE_FUSED = " since this process began (with Checkpoints: in all)"


def fused_records(batch: TableBatch) -> list[tuple[Tensor, Known]]:
    """Return a fused optimizer's shards, each with its record. FBGEMM writes only the state of rows
    that were looked up, even with weight decay."""
    found: list[tuple[Tensor, Known]] = []
    for weight, states in zip(batch.weights(), batch.states(), strict=True):
        known: Known = "its fused optimizer keeps no state of rows"
        if states:
            known = LookupRecord(
                rows=len(weight),
                states=(states[0],) if batch.is_adagrad else tuple(states),
                is_sum=batch.is_adagrad,
                lookups_only=True,
                count_steps=lambda: int(batch.hyperparameters()["step"]) or None,
                since=_SINCE_FUSED,
            )
        found.append((weight, known))
    return found


def plain_records(
    optimizers: Iterable[Optimizer], weights: Iterable[Tensor]
) -> list[tuple[Tensor, Known]]:
    """Return weights, each with its record by the torch optimizers that step it."""
    stepped = [(leaf, parameter) for leaf in optimizers for parameter in stepped_by(leaf)]
    find = same_storage([parameter for _, parameter in stepped])
    found: list[tuple[Tensor, Known]] = []
    for weight in weights:
        # An empty shard has no rows, so none was touched.
        of_each: list[Known] = [] if weight.numel() else [_untouched(weight)]
        for index in find(weight):
            optimizer, parameter = stepped[index]
            known = record_of(optimizer, parameter, weight)
            of_each.append(known)
            if isinstance(known, str) and not _is_idle(optimizer, parameter):
                # The records of other optimizers miss its rows.
                of_each = [known]
                break
        found.append((weight, _joined(of_each)))
    return found


# Classes of optimizers that have state for each parameter that they have stepped. SGD without
# momentum has none, LBFGS for its first parameter alone.
_STATEFUL = (
    *(Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD),
    *(NAdam, RAdam, RMSprop, Rprop, SparseAdam),
)


def _is_idle(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether the state of an optimizer shows that it has never stepped a parameter."""
    return type(optimizer) in _STATEFUL and not optimizer.state.get(parameter)


def _joined(of_each: Sequence[Known]) -> Known:
    """Return the record of a weight that several optimizers list. One without a record does not
    count: it has never stepped the weight."""
    if not of_each:
        return NOT_STEPPED
    known = [record for record in of_each if isinstance(record, LookupRecord)]
    # None for those that do not count.
    stepped = [record for record in known if record.count_steps() != 0]
    if not stepped:
        # None has stepped it yet.
        return known[-1] if known else of_each[-1]
    if len(stepped) == 1:
        return stepped[0]
    return _sum_of(stepped)


def _sum_of(records: Sequence[LookupRecord]) -> LookupRecord:
    """Return the record of a weight that several optimizers step. Each has seen its own steps."""
    return LookupRecord(
        rows=records[0].rows,
        states=tuple(chain.from_iterable(record.states for record in records)),
        is_sum=False,
        lookups_only=all(record.lookups_only for record in records),
        count_steps=lambda: sum(record.count_steps() or 0 for record in records) or None,
    )


def record_of(optimizer: Optimizer, parameter: Tensor, weight: Tensor) -> Known:
    """Return the record of ``weight``, a part of ``parameter``, by an optimizer's state."""
    kind = type(optimizer).__name__
    is_sum = _is_adagrad(optimizer)
    names = ("sum",) if is_sum else _MOMENTS.get(type(optimizer), ())
    if not names:
        return f"{kind} keeps no state that tells"
    if reason := _rewrites(optimizer, parameter):
        return reason
    state = state_of(optimizer, parameter, weight)
    if any(name not in state for name in names):
        if optimizer.state.get(parameter):
            return f"the state of {kind} has another shape or order than its weights"
        # It has not stepped the parameter yet, or its state was not loaded.
        return _untouched(weight)
    if state[names[0]][0].dtype == torch.float16:
        return f"the state of {kind} is float16, where small gradients, and their squares, are 0"
    steps = optimizer.state[parameter].get("step")
    return LookupRecord(
        rows=len(weight),
        states=tuple(state[name][0] for name in names),
        is_sum=is_sum,
        # It refuses dense gradients, such as from a loss term over the table.
        lookups_only=type(optimizer) is SparseAdam,
        count_steps=lambda: None if steps is None else int(steps),
    )


def _rewrites(optimizer: Optimizer, parameter: Tensor) -> str | None:
    """Return why an optimizer's state says nothing about lookups; None if it does."""
    kind = type(optimizer).__name__
    group = group_of(optimizer, parameter)
    if not parameter.requires_grad:
        return "it is frozen (requires_grad=False): lookups of it leave no trace"
    # AdamW's decay writes weights, not the state.
    decay = 0 if group.get("decoupled_weight_decay") else group.get("weight_decay", 0)
    if decay:
        return f"weight_decay={decay:g} of {kind} is a gradient of every row at each step"
    if initial := group.get("initial_accumulator_value", 0):
        return f"the sums of {kind} begin at {initial:g}, where float32 absorbs small gradients"
    # Moments shrink at each step without a gradient. Above 0.5, the smallest float times the factor
    # rounds to itself, unless such floats are flushed to zero.
    factor = max(map(float, group.get("betas") or [group.get("alpha", 1.0)]))
    if factor <= 0.5:
        return f"the state of {kind} fades to zero at the factor {factor:g}"
    if factor < 1 and torch.full((), 2.0**-149) * 1 == 0:
        return f"torch.set_flush_denormal() lets the state of {kind} fade to zero"
    return None


def _untouched(weight: Tensor) -> LookupRecord:
    """Return the record of a shard that no gradient has reached."""
    return LookupRecord(
        rows=len(weight),
        states=(torch.zeros(len(weight), device=weight.device),),
        is_sum=True,
        lookups_only=True,
        count_steps=lambda: 0,
    )
