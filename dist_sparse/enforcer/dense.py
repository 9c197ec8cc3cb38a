"""Keep removed weights at zero where optimizers step whole weights: ``nn.Embedding(Bag)``, dense
parameters, data-parallel tables.

``optimizer.step()`` writes such a weight as a whole, so it is masked right after: all of it, or the
rows of a sparse gradient. Hooks see the steps of every torch optimizer, also of one made later.
Torch counts other writes (a load, ``copy_`` under ``no_grad``); they are masked before a module
next reads the weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer import optimizers
from dist_sparse.enforcer.fused import Place
from dist_sparse.enforcer.hooks import Clock, Hook, timed
from dist_sparse.enforcer.ids import SampledLookups
from dist_sparse.enforcer.optimizers import Masked, Stepped, local, same_storage
from dist_sparse.enforcer.rows import zero_rows
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.shards import ShardedData

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
        self._optimizers = [*chain.from_iterable(map(optimizers.leaves, given))]
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
            if not stepped(target.weight):
                _refuse_trained(target)

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
                yield optimizers.stepped(target.name, leaf, parameter, target.weight)

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
                    target.clean(optimizers.step_rows(optimizer, parameter))


def _refuse_trained(target: Target) -> None:
    """Refuse a target that none of the given optimizers steps, if something else may write it."""
    if target.parameter is not None and target.parameter.requires_grad:
        raise ValueError(
            f"No optimizer given steps {target.name!r}, which requires a gradient: its removed"
            " weights would come back unseen. Pass all optimizers, or freeze it by"
            " requires_grad_(False)."
        )
    # Plain data (a dense mask) that no optimizer steps is a constant; so is a frozen parameter. A
    # shard of an unknown model may be written by anything.
    packed = isinstance(target.mask(), BlockMask)
    if packed and not isinstance(target.parameter, nn.Parameter):
        raise ValueError(
            f"Can't tell what writes {target.name!r}: it is not a parameter, and none of the given"
            " optimizers steps it, so removed weights might come back undetected. Register the"
            " model that contains it by add_model(), or call squash_mask() first."
        )


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
        if not hasattr(optimizer, "_optimizer") and not optimizers.combines(optimizer):
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
