"""Keep removed weights at zero where ``optimizer.step()`` writes them: ``nn.Embedding(Bag)``, dense
parameters, data-parallel tables.

A step writes a whole weight, so it is masked right after the step: all of it, or the rows of a
sparse gradient. Hooks see the steps of every torch optimizer, including one made later. Torch
counts other writes (a load, ``copy_`` under ``no_grad``): they are masked before a module next
reads the weight.

TorchRec, Lightning and others wrap optimizers in optimizers. Torch runs hooks on ``step`` only for
its own optimizers, so hooks are registered on the innermost ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dist_sparse.enforcer import Clock, Hook, Hooks, timed
from dist_sparse.enforcer.rows import SampledLookups, zero_rows
from dist_sparse.masking.masks import BlockMask, Held, removed_parts
from dist_sparse.optimizers import (
    Known,
    State,
    leaves,
    plain_records,
    state_of,
    stepped_by,
    sums_of,
    torchrec_parts,
)
from dist_sparse.sparsifiers.dense_store import DenseStore
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.memory import local, same_storage
from dist_sparse.tables.shards import Rect, steps_in_backward


class MaskPlace(NamedTuple):
    """The mask of a shard: the registered name of its table, and the shard's number in it."""

    name: str
    number: int


class WeightState(NamedTuple):
    """A registered weight, and the state that an optimizer keeps for it.

    Args:
        name: its registered name.
        weight: its live storage.
        mask: the mask when this was read. Plain data of any shape has the mask of a matrix with the
            same number of rows.
        states: one value per element, or per row, or step counts.
        sums: Adagrad's sums of squared gradients; None with another optimizer.
        by_element: the optimizer keeps one value per element, perhaps only from its first step on.
    """

    name: str
    weight: Tensor
    mask: BlockMask
    states: list[State]
    sums: State | None
    by_element: bool

    def reset_removed(self) -> None:
        """Set the state of removed weights to its initial value; see
        :func:`~dist_sparse.masking.masks.removed_parts`."""
        if not self.mask.removes:
            return
        dead_rows = self.mask.dead_rows()
        for state, initial in self.states:
            for part, removed in removed_parts(state, self.mask, dead_rows):
                part.masked_fill_(removed, initial)

    def reset_elements(self) -> None:
        """Set state with one value per element to its initial value."""
        for state, initial in self.states:
            if state.shape == self.weight.shape:
                state.data.fill_(initial)


def keeps_elements(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps, or will keep, one value per element of a weight. SGD
    without momentum keeps nothing, and row-wise optimizers keep one value per row."""
    # By class and name, not by state: before the first step there is none.
    if type(optimizer) is SGD:
        return any(group["momentum"] for group in optimizer.param_groups)
    # TorchRec's RowWiseAdagrad, for example.
    return not type(optimizer).__name__.lower().startswith("rowwise")


def step_rows(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    """Return the rows of ``parameter`` that the last step may have written, int64 ``(n,)``,
    possibly repeated.

    None means any row: the rows are known only for a sparse gradient, and an optimizer that writes
    no others.
    """
    grad = parameter.grad
    if grad is None or not grad.is_sparse:
        return None
    # Exactly these classes: a subclass may write more.
    writes_no_others = {
        SparseAdam: True,
        Adagrad: True,
        # Momentum moves every row that was ever touched.
        SGD: not keeps_elements(optimizer),
    }
    return grad._indices()[0] if writes_no_others.get(type(optimizer)) else None


class Holder(NamedTuple):
    """A tensor over registered memory, the module that holds it, and its attribute there."""

    parameter: Tensor
    module: nn.Module
    attribute: str

    @classmethod
    def alone(cls, tensor: Tensor) -> Holder:
        """Wrap a tensor that no module holds in a new module."""
        return cls(tensor, _holding([tensor]), "0")


def model_of(source: Any) -> nn.Module:
    """Return the model of a registered source, or a module that holds the registered tensor."""
    if hasattr(source, "model"):
        model: nn.Module = source.model
        return model
    # A ShardedTensor is not a Tensor: the module holds its local shards.
    is_sharded = hasattr(source.data, "local_shards")
    return _holding(
        [shard.tensor for shard in source.data.local_shards()] if is_sharded else [source.data]
    )


def _holding(tensors: Sequence[Tensor]) -> nn.Module:
    """Return a module that holds tensors and is never called."""
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        module._parameters[str(number)] = tensor  # type: ignore[assignment]
    return module


@dataclass(eq=False)
class Target:
    """A weight that no fused optimizer writes.

    Args:
        name: its registered name.
        weight: the live storage, in the shape of the mask.
        holder: the model's tensor over that storage, or the weight itself.
        writers_known: only torch's optimizers can step it, if anything does. A shard of an unknown
            model may be written by other code; plain data that no optimizer steps is a constant.

    Attributes:
        aliases: tensors over that storage whose writes torch counts: the parameter, and the
            optimizers' tensors. By id: == of tensors compares elements.
        stepping: an optimizer has begun to write it.
        clean_at: the count of writes when it was last clean.
    """

    name: str
    weight: Tensor
    holder: Holder
    writers_known: bool

    def __post_init__(self) -> None:
        self.stepping, self.clean_at = False, 0
        self.aliases = {id(self.holder.parameter): self.holder.parameter}

    def mask(self) -> BlockMask:
        """Return the current mask."""
        raise NotImplementedError

    def zero(self, rows: Tensor | None) -> None:
        """Zero removed weights in at least these rows, int64 ``(n,)``; None is all rows."""
        raise NotImplementedError

    @property
    def writes(self) -> int:
        """Torch's count of writes: all except through ``.data`` and by its ``fused=True``
        optimizers."""
        return sum(local(alias)._version for alias in self.aliases.values())

    @property
    def dirty(self) -> bool:
        """Whether it may have been written since :meth:`clean`."""
        return self.stepping or self.writes != self.clean_at

    @property
    def replaced(self) -> bool:
        """Whether the model has replaced the parameter, or its storage (``parameter.data =
        ...``)."""
        parameter, module, attribute = self.holder
        storage = local(parameter).untyped_storage()
        is_held = module._parameters.get(attribute) is parameter
        return not is_held or storage.data_ptr() != self.weight.untyped_storage().data_ptr()

    def clean(self, rows: Tensor | None = None) -> None:
        """Zero removed weights in ``rows``, int64 ``(n,)``, the only rows written since they were
        last clean; None is all rows. Autograd does not see it."""
        self.zero(rows)
        # Torch has not counted this write, because it was through .data.
        self.clean_at, self.stepping = self.writes, False


@dataclass(eq=False)
class ShardTarget(Target):
    """A shard of a table.

    Args:
        tables: the store of all masks.
        place: where this shard's mask is in it.
    """

    tables: PackedStore
    place: MaskPlace

    def held(self) -> Held:
        """Return the current mask and counts of the shard."""
        return self.tables.table(self.place.name).shards[self.place.number]

    def mask(self) -> BlockMask:
        """Return the current mask."""
        return self.held().mask

    def zero(self, rows: Tensor | None) -> None:
        """Zero removed weights in at least these rows."""
        mask = self.mask()
        if not mask.removes:
            return
        # One pass over the shard is quicker than that many single rows.
        if rows is None or rows.numel() >= mask.rect.rows:
            mask.apply_(self.weight)
        else:
            zero_rows(self.weight, mask, rows)


@dataclass(eq=False)
class PlainTarget(Target):
    """Plain data.

    Args:
        store: the store of its mask.
    """

    store: DenseStore

    def mask(self) -> BlockMask:
        """Return the current mask, as the mask of a matrix. A mask update writes the stored mask in
        place."""
        # A vector becomes a column: each element is a row.
        matrix = self.store.mask(self.name).unsqueeze(-1).flatten(1)
        return BlockMask.of_elements(Rect(0, 0, *matrix.shape), matrix)

    def zero(self, rows: Tensor | None) -> None:
        """Zero removed weights."""
        self.weight.data.masked_fill_(self.store.mask(self.name) == 0, 0)


# The end of error messages about a table that a planner has replicated, as it does with small ones.
REPLICATED = (
    "The table is data-parallel (replicated on all ranks), and model.fused_optimizer does not step"
    " it: pass its dense optimizer too, as in sparsify(model, [model.fused_optimizer,"
    " dense_optimizer])."
)

_LOST = (
    "an optimizer that has stepped it exists no more: keep one for the whole training, or count"
    " lookups"
)

# Targets that an optimizer steps, each with the optimizer's parameter.
_Pairs = list[tuple[Target, Tensor]]


class DenseWeights:
    """Hooks on optimizers, and on the modules that hold the weights that they step.

    Args:
        targets: the weights to keep masked.
        given: optimizers as the caller has them, wrapped or not.
        clock: adds up the time of the hooks.
        before_read: called before a module that holds a target reads it.
        lost: gets the names of targets that an optimizer has stepped which exists no more.

    Raises:
        ValueError: a part of ``given`` is not an optimizer.
    """

    # As in TableBatchHooks. TorchRec reshards none of these weights.
    collection = None

    def __init__(
        self,
        targets: Sequence[Target],
        given: Sequence[Any],
        clock: Clock,
        before_read: Callable[[], None],
        lost: set[str],
    ) -> None:
        self.targets, self.clock, self._before_read = targets, clock, before_read
        self._lost = lost
        # The names of the targets that each optimizer has stepped.
        self._written: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()
        self._hooks = Hooks()
        self._optimizers = [*leaves(given)]
        self._targets_at = same_storage([target.weight for target in self.targets])
        # For each optimizer its targets, and the number of all its parameters.
        self._stepped: weakref.WeakKeyDictionary[Optimizer, tuple[_Pairs, int]]
        self._stepped = weakref.WeakKeyDictionary()

    def check_stepped(self, shardings: Mapping[str, str]) -> None:
        """Refuse weights that something other than torch's optimizers may write.

        Args:
            shardings: TorchRec's sharding types, by table.

        Raises:
            ValueError: none of the given optimizers steps a weight that requires a gradient, or a
                shard of an unknown model.
        """
        stepped = same_storage([*chain(*map(stepped_by, self._optimizers))])
        for target in self.targets:
            if stepped(target.weight):
                continue
            if target.holder.parameter.requires_grad:
                way = "Pass all optimizers that step the model, or leave the table out by exclude=."
                if shardings.get(target.name) == "data_parallel":
                    way = REPLICATED
                elif steps_in_backward(target.holder.parameter):
                    way = (
                        "Its optimizer runs in the backward: pass those of"
                        " weight._in_backward_optimizers too."
                    )
                raise ValueError(
                    f"None of the given optimizers steps {target.name!r}, which requires a"
                    f" gradient: removed weights would come back. {way}"
                )
            if not target.writers_known:
                raise ValueError(
                    f"Can't tell what writes {target.name!r}: it is not a parameter, and none of"
                    " the given optimizers steps it. Register its model by add_model(), or call"
                    " squash_mask() first."
                )

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that hold a target, each once."""
        return list(dict.fromkeys(target.holder.module for target in self.targets))

    @property
    def replaced(self) -> bool:
        """Whether the model has replaced a target's parameter or its storage."""
        return any(target.replaced for target in self.targets)

    def hook(self) -> None:
        """Attach the hooks."""
        for leaf in self._optimizers:
            self.find_targets(leaf)
        _watch_new_optimizers()
        _hooked.add(self)
        for target in self.targets:
            self._hook_owner(target)

    def _hook_owner(self, target: Target) -> None:
        module = target.holder.module

        def before(*_: Any) -> None:
            self._before_read()
            self._clean(target)

        # By exact class: ids of a subclass may not be row numbers, as in compact tables.
        if type(module) in (nn.Embedding, nn.EmbeddingBag):
            assert isinstance(target, ShardTarget)
            look = Hook(partial(_sample, SampledLookups([0]), target.held))
            self._hooks.add(module.register_forward_pre_hook(look, with_kwargs=True))
        self._hooks.add(
            module.register_forward_pre_hook(Hook(before)),
            module.register_state_dict_pre_hook(Hook(before)),  # type: ignore[no-untyped-call]
        )

    def unhook(self) -> None:
        """Remove all hooks."""
        _hooked.discard(self)
        self._hooks.remove()

    def clean(self) -> None:
        """Mask weights that something other than an optimizer's step has written."""
        for target in self.targets:
            self._clean(target)

    def clean_all(self) -> None:
        """Mask everything."""
        for target in self.targets:
            target.clean()

    def masks_updated(self) -> None:
        """Zero newly removed weights. A mask update itself zeroes sharded tables, not plain
        data."""
        self.clean_all()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the targets by name."""
        for target in self.targets:
            yield target.name, target.weight

    def states(self) -> Iterator[WeightState]:
        """Yield the targets with their optimizer state; once for each optimizer that steps one."""
        for leaf, (pairs, _) in self._stepped.items():
            for target, parameter in pairs:
                states = [*state_of(leaf, parameter, target.weight).values()]
                sums = sums_of(leaf, parameter, target.weight)
                by_element = keeps_elements(leaf)
                weight = target.weight
                yield WeightState(target.name, weight, target.mask(), states, sums, by_element)

    def records(self) -> list[tuple[Tensor, Known]]:
        """Return the weights of the targets, each with its record."""
        known = plain_records(self._stepped, [target.weight for target in self.targets])
        for i, target in enumerate(self.targets):
            if target.name in self._lost:
                known[i] = target.weight, _LOST
        return known

    def find_targets(self, optimizer: Optimizer) -> _Pairs:
        """Return the targets that an optimizer steps, each with the optimizer's parameter. Attach
        hooks to it at the first call."""
        # Parameters are only ever added (add_param_group()): another count means new ones.
        parameters = stepped_by(optimizer)
        known, count = self._stepped.get(optimizer, ([], -1))
        if count == len(parameters):
            return known
        pairs = []
        for parameter in parameters:
            for i in self._targets_at(local(parameter)):
                self.targets[i].aliases[id(parameter)] = parameter
                pairs.append((self.targets[i], parameter))
        # At the first call that finds a target: the hooks stay for parameters that are added later.
        if pairs and not known:
            self._hooks.add(
                optimizer.register_step_pre_hook(Hook(self._before_step)),
                optimizer.register_step_post_hook(Hook(self._after_step)),
            )
        self._stepped[optimizer] = pairs, len(parameters)
        return pairs

    @timed
    def _clean(self, target: Target) -> None:
        if target.dirty:
            target.clean()

    @timed
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        for target, parameter in self.find_targets(optimizer):
            # Earlier writes first: _after_step() may clean the rows of the gradient only.
            self._clean(target)
            # Dirty until _after_step(): hooks that run before it may read the weight.
            target.stepping = parameter.grad is not None

    @timed
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        pairs = self.find_targets(optimizer)
        for target, parameter in pairs:
            # Torch's optimizers do not write a parameter without a gradient.
            if target.dirty or parameter.grad is not None:
                target.clean(step_rows(optimizer, parameter))
        names = self._written.get(optimizer)
        if names is None:
            names = self._written[optimizer] = set()
            # Its state is the record of the rows that it has stepped, and goes with it.
            weakref.finalize(optimizer, self._lost.update, names).atexit = False
        names.update([target.name for target, _ in pairs])


# All instances with attached hooks. Weak: the hooks on modules and optimizers keep them alive.
_hooked: weakref.WeakSet[DenseWeights] = weakref.WeakSet()


@cache
def _watch_new_optimizers() -> None:
    """Attach, once for the process, a hook that finds optimizers made later. It is never removed:
    the last instance may be freed while torch iterates over its hooks."""

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        # A wrapper calls the step of its inner optimizer, which runs this hook too.
        if not hasattr(optimizer, "_optimizer") and torchrec_parts(optimizer) is None:
            for weights in list(_hooked):
                weights.find_targets(optimizer)

    register_optimizer_step_pre_hook(before_step)


def _sample(
    lookups: SampledLookups, held: Callable[[], Held], module: Any, args: Any, kwargs: Any
) -> None:
    """Count the lookups of one forward of an embedding, if the sample includes it."""
    # Each time: a mask update replaces what held() returns.
    lookups.use({0: held()})
    if lookups.counts_forward():
        ids = args[0] if args else kwargs["input"]
        lookups.add(ids.reshape(-1), [0, ids.numel()])


def packed_targets(
    tables: PackedStore,
    modules: Iterable[nn.Module],
    shards: Mapping[MaskPlace, Tensor],
) -> Iterator[Target]:
    """Yield shards that no fused optimizer writes.

    Args:
        tables: the store of all masks.
        modules: all modules of the models, as :func:`model_of` has them.
        shards: by the place of the mask.
    """
    holders = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.append(Holder(parameter, module, name))
    find = same_storage([holder.parameter for holder in holders])
    for place, weight in shards.items():
        indices = find(weight)
        holder = holders[indices[0]] if indices else Holder.alone(weight)
        is_parameter = isinstance(holder.parameter, nn.Parameter)
        yield ShardTarget(place.name, weight, holder, is_parameter, tables, place)


def plain_targets(plain: DenseStore) -> Iterator[Target]:
    """Yield plain data that is not squashed."""
    for name in filter(plain.is_masked, plain.names):
        weight = plain.weight(name)
        # A view, like a constant, keeps no gradient.
        holder = Holder.alone(weight if weight.is_leaf else weight.detach())
        yield PlainTarget(name, weight.data, holder, True, plain)
