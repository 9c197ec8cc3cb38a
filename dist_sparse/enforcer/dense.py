"""Keep removed weights at zero where optimizers step whole weights: ``nn.Embedding(Bag)``, dense
parameters, data-parallel tables.

``optimizer.step()`` writes such a weight as a whole, so it is masked right after: all of it, or the
rows of a sparse gradient. Hooks see the steps of every torch optimizer, also of one made later.
Torch counts other writes (a load, ``copy_`` under ``no_grad``); they are masked before a module
next reads the weight.

First the optimizers: which one of several wrapped ones steps, which rows a step writes, and the
state of removed weights. TorchRec, Lightning and others wrap optimizers in optimizers. A post-step
hook runs only on those whose ``step`` torch has wrapped, so hooks are registered on the innermost
ones.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer import Clock, Hook, timed
from dist_sparse.enforcer.rows import SampledLookups, zero_rows
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.modules import torchrec_port
from dist_sparse.tables.shards import Rect, ShardedData, memory_of

State = tuple[Tensor, float]
"""A live view, and the optimizer's initial value."""


class Place(NamedTuple):
    """The mask of a shard: the registered name of its table, and the shard's number in it."""

    name: str
    number: int


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
    if isinstance(mask, Tensor):
        shape = mask.shape
        # A vector, too, is masked row by row.
        matrix = mask.unsqueeze(-1).flatten(1)
        mask = BlockMask.of_elements(Rect(0, 0, *matrix.shape), matrix)
    else:
        shape = torch.Size(mask.rect[2:])
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


# Weights that plain optimizers step.

Modules = Mapping[nn.Module, Mapping[str, nn.Module]]
"""All modules by path, by model."""


@dataclass(eq=False)
class Target:
    """A weight that no fused optimizer writes.

    Args:
        name: under which it is registered.
        weight: the live storage, in the shape of the mask.
        mask: returns the current mask: packed bits, or dense for plain data.
        parameter: the model's tensor over that storage, if there is one.
        owner: the module that holds it, and its name there.
        samples: returns the sums of sampled lookups of a table's shard, live; None for plain data.

    Attributes:
        aliases: tensors over that storage whose writes torch counts: the parameter, and the
            optimizers' tensors.
        stepping: an optimizer has begun to write it.
        clean_at: the count of writes at which it was last clean.
    """

    name: str
    weight: Tensor
    mask: Callable[[], BlockMask | Tensor]
    parameter: Tensor | None = None
    owner: tuple[nn.Module, str] | None = None
    samples: Callable[[], Tensor] | None = None
    stepping: bool = False
    clean_at: int = 0

    def __post_init__(self) -> None:
        # By identity: == of tensors compares elements.
        self.aliases: dict[int, Tensor] = {}
        if self.parameter is not None:
            self.add_alias(self.parameter)

    def add_alias(self, tensor: Tensor) -> None:
        """Count the writes of another tensor over the same storage too."""
        self.aliases[id(tensor)] = tensor

    @property
    def writes(self) -> int:
        """Writes that torch has counted: all except through ``.data`` and by its fused
        optimizers."""
        return sum(local(alias)._version for alias in self.aliases.values())

    @property
    def dirty(self) -> bool:
        """Whether it may have been written since :meth:`clean`."""
        return self.stepping or self.writes != self.clean_at

    @property
    def replaced(self) -> bool:
        """Whether the model holds other memory under its name by now."""
        if self.parameter is None:
            return False
        held: Tensor | None = self.parameter
        if self.owner is not None:
            module, name = self.owner
            held = module._parameters.get(name)
        # Either another parameter, or the same one with other storage: `parameter.data = ...`.
        if held is not self.parameter:
            return True
        here = local(held).untyped_storage()
        return here.data_ptr() != self.weight.untyped_storage().data_ptr()

    def clean(self, rows: Tensor | None = None) -> None:
        """Zero removed weights: in ``rows``, int64 ``(n,)``, if nothing else was written."""
        mask = self.mask()
        if isinstance(mask, Tensor):
            self.weight.data.masked_fill_(mask == 0, 0)
        elif mask.removes and rows is not None and rows.numel() < mask.rect.rows:
            zero_rows(self.weight, mask, rows)
        elif mask.removes:
            mask.apply_(self.weight)
        # Torch has not counted the write above, which went through .data.
        self.clean_at, self.stepping = self.writes, False


# Targets, each with its parameter in an optimizer.
_Pairs = list[tuple[Target, Tensor]]


class DenseWeights:
    """The hooks on optimizers, and on the modules that hold what they step.

    Args:
        targets: what has to stay masked.
        given: optimizers as the caller has them, wrapped or not.
        clock: to which the time of the hooks is added.
        before_read: called before a module that holds a target reads it.

    Raises:
        ValueError: something is no optimizer.
    """

    collection = None

    def __init__(
        self,
        targets: Sequence[Target],
        given: Sequence[Any],
        clock: Clock,
        before_read: Callable[[], None],
    ) -> None:
        self.targets, self.clock, self._before_read = targets, clock, before_read
        self._handles: list[RemovableHandle] = []
        self._optimizers = [*chain.from_iterable(map(leaves, given))]
        self._over = same_storage([target.weight for target in self.targets])
        # Of each optimizer the targets that it steps, each with its parameter there, and the number
        # of all its parameters.
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[_Pairs, int]]
        self._stepped = weakref.WeakKeyDictionary()

    def check_stepped(self) -> None:
        """Refuse weights whose writer is unknown: it might be none of torch's optimizers.

        Raises:
            ValueError: no optimizer given steps a weight that requires a gradient, or a shard of an
                unknown model.
        """
        stepped = same_storage([*chain.from_iterable(map(_parameters_of, self._optimizers))])
        for target in self.targets:
            if stepped(target.weight):
                continue
            if target.parameter is not None and target.parameter.requires_grad:
                raise ValueError(
                    f"No optimizer given steps {target.name!r}, which requires a gradient: its"
                    " removed weights would come back unseen. Pass all optimizers, or freeze it by"
                    " requires_grad_(False)."
                )
            # Plain data (a dense mask) that no optimizer steps is a constant; so is a frozen
            # parameter. A shard of an unknown model may be written by anything.
            packed = isinstance(target.mask(), BlockMask)
            if packed and not isinstance(target.parameter, nn.Parameter):
                raise ValueError(
                    f"Can't tell what writes {target.name!r}: it is not a parameter, and none of"
                    " the given optimizers steps it, so removed weights might come back undetected."
                    " Register the model that contains it by add_model(), or call squash_mask()"
                    " first."
                )

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that hold a target, each once."""
        return list(dict.fromkeys(t.owner[0] for t in self.targets if t.owner is not None))

    @property
    def replaced(self) -> bool:
        """Whether the model holds other memory for a weight by now."""
        return any(target.replaced for target in self.targets)

    def hook(self) -> None:
        """Attach the hooks."""
        for leaf in self._optimizers:
            self.meet(leaf)
        _meet_new_optimizers()
        _hooked.add(self)
        for target in self.targets:
            if target.owner is not None:
                self._hook_owner(target.owner[0], target)

    def _hook_owner(self, module: nn.Module, target: Target) -> None:
        def before(*_: Any) -> None:
            self._before_read()
            self._clean(target)

        # By exact class: ids of a subclass may be others than row numbers, as in compact tables.
        if type(module) in (nn.Embedding, nn.EmbeddingBag) and target.samples is not None:
            look = Hook(partial(_sample, SampledLookups([0]), target.mask, target.samples))
            self._handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
        self._handles += [
            module.register_forward_pre_hook(Hook(before)),
            module.register_state_dict_pre_hook(Hook(before)),  # type: ignore[no-untyped-call]
        ]

    def unhook(self) -> None:
        """Remove all hooks."""
        _hooked.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def clean(self) -> None:
        """Mask what was written other than by an optimizer's step."""
        for target in self.targets:
            self._clean(target)

    def clean_all(self) -> None:
        """Mask everything."""
        for target in self.targets:
            target.clean()

    def masked(self) -> Iterator[Masked]:
        """Yield the targets and their masks. A mask update edits dense masks in place, and replaces
        packed ones."""
        for target in self.targets:
            yield Masked(target.name, target.weight, target.mask())

    def states(self) -> Iterator[Stepped]:
        """Yield the targets, each with the state of an optimizer that steps it."""
        for leaf, (pairs, _) in self._stepped.items():
            for target, parameter in pairs:
                yield stepped(target.name, leaf, parameter, target.weight)

    def meet(self, optimizer: torch.optim.Optimizer) -> _Pairs:
        """Return the targets that an optimizer steps, each with its parameter there. A new one gets
        hooks, one with new parameters is looked through again."""
        # add_param_group() adds parameters; nothing removes them.
        parameters = _parameters_of(optimizer)
        known, count = self._stepped.get(optimizer, ([], -1))
        if count == len(parameters):
            return known
        pairs: _Pairs = []
        for parameter in parameters:
            for i in self._over(local(parameter)):
                self.targets[i].add_alias(parameter)
                pairs.append((self.targets[i], parameter))
        if pairs and not known:
            self._handles += [
                optimizer.register_step_pre_hook(Hook(self._before_step)),
                optimizer.register_step_post_hook(Hook(self._after_step)),
            ]
        self._stepped[optimizer] = pairs, len(parameters)
        return pairs

    @timed
    def _clean(self, target: Target) -> None:
        if target.dirty:
            with torch.no_grad():
                target.clean()

    @timed
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for target, parameter in self.meet(optimizer):
            # Not by this step: behind it, perhaps only the rows of its gradient are cleaned.
            self._clean(target)
            # Until the hook behind the step: other hooks may come first, and read.
            target.stepping = parameter.grad is not None

    @timed
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for target, parameter in self.meet(optimizer):
                # Without a gradient, torch's optimizers leave a parameter alone.
                if target.dirty or parameter.grad is not None:
                    target.clean(step_rows(optimizer, parameter))


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


_hooked: weakref.WeakSet[DenseWeights] = weakref.WeakSet()
"""All with attached hooks. The hooks on optimizers and modules keep them alive, this set does
not."""


@cache
def _meet_new_optimizers() -> RemovableHandle:
    """Attach, once for the process, the hook that meets optimizers made later. It stays: torch may
    be iterating over its hooks whenever the last of those above is freed."""

    def meet(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Wrappers call the step of an inner optimizer, which comes here too.
        if not hasattr(optimizer, "_optimizer") and not combines(optimizer):
            for weights in list(_hooked):
                weights.meet(optimizer)

    return register_optimizer_step_pre_hook(meet)


def _sample(
    lookups: SampledLookups,
    mask: Callable[[], Any],
    samples: Callable[[], Tensor],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Count the lookups of one forward of an embedding, if it is one of the sample."""
    ids = args[0] if args else kwargs.get("input")
    # Lookups of an evaluation are no traffic.
    if not torch.is_grad_enabled() or not isinstance(ids, Tensor):
        return
    lookups.use({0: mask()}, {0: samples()})
    if lookups.due():
        with torch.no_grad():
            lookups.add(ids.reshape(-1), [0, ids.numel()])


def packed_targets(
    tables: PackedStore, modules: Modules, located: Mapping[str, ShardedData], fused: Set[Place]
) -> Iterator[Target]:
    """Yield the shards that no fused optimizer writes."""
    held = [each for source in tables.sources for each in _parameters(source, modules)]
    holding = same_storage([parameter for parameter, _ in held])
    for name, data in located.items():
        for number, shard in enumerate(data.shards):
            if Place(name, number) in fused:
                continue
            found = holding(shard.tensor)
            parameter, owner = held[found[0]] if found else (None, None)
            mask = partial(_numbered, tables.masks, name, number)
            samples = partial(_numbered, tables.samples, name, number)
            yield Target(name, shard.tensor, mask, parameter, owner, samples)


def _numbered(of_shards: Callable[[str], Sequence[Any]], name: str, number: int) -> Any:
    return of_shards(name)[number]


def plain_targets(sparsifier: BaseDataSparsifier) -> Iterator[Target]:
    """Yield plain data that is not squashed."""
    dense = sparsifier.masks.plain
    for name in filter(dense.is_masked, dense.names):
        weight, mask = dense.weight(name), partial(dense.mask, name)
        parameter = weight if weight.is_leaf else None
        yield Target(name, weight.data, mask, parameter)


def _parameters(
    source: Any, modules: Modules
) -> Iterator[tuple[Tensor, tuple[nn.Module, str] | None]]:
    """Yield the tensors of a source that may be trained, each with its module and its name there,
    where it has one."""
    if hasattr(source, "model"):
        for module in modules[source.model].values():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield parameter, (module, name)
        return
    tensors = [source.data]
    if hasattr(source.data, "local_shards"):  # a ShardedTensor
        tensors = [piece.tensor for piece in source.data.local_shards()]
    yield from ((tensor, None) for tensor in tensors if tensor.is_leaf)
