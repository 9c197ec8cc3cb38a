"""How do removed weights stay zero in what a plain optimizer steps?

Dense parameters, ``nn.Embedding(Bag)``, data-parallel tables and plain data are written by ``optimizer.step()`` as a
whole, so they are made true to their masks right after it: all of them, or the rows of a sparse gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer.fused import Place
from dist_sparse.enforcer.hooks import Hook
from dist_sparse.enforcer.optimizers import leaves, local, reset_state, same_storage, state_of, step_rows
from dist_sparse.enforcer.rows import settle_rows
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers import dense_store as plain
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.digest import hash_tensor
from dist_sparse.tables.shards import ShardedData, Source

__all__ = ["DenseWeights", "Target", "packed_targets", "plain_targets"]


@dataclass(eq=False)
class Target:
    """A weight that an optimizer steps.

    Args:
        name: under which it is registered.
        weight: the live storage, as the mask has it.
        mask: gives the mask of this moment: packed bits, or dense for plain data.
        parameter: what the model has of it, if anything.
        owner: the module that has it, and its name there.
    """

    name: str
    weight: Tensor
    mask: Callable[[], BlockMask | Tensor]
    parameter: Tensor | None = None
    owner: tuple[nn.Module, str] | None = None
    steppers: list[tuple[torch.optim.Optimizer, Tensor]] = field(default_factory=list)
    trained: bool = False
    """Whether a gradient has come since :meth:`note`."""
    version: int = 0
    hash: int | None = None

    def note(self, *, hashed: bool = False) -> None:
        """Remembers what the weights are, so that later writes are seen; ``hashed`` those too that torch does not
        count, such as its fused optimizers'."""
        self.version = self._versions()
        self.hash = hash_tensor(self.weight) if hashed else None
        self.trained = False

    def written(self) -> bool:
        """Whether somebody has written the weights since :meth:`note`."""
        return self._versions() != self.version or (self.hash is not None and hash_tensor(self.weight) != self.hash)

    @property
    def replaced(self) -> bool:
        """Whether the model has other memory for the weight by now, or has begun to train it."""
        if self.parameter is None:
            return False
        if self.owner is not None and self.owner[0]._parameters.get(self.owner[1]) is not self.parameter:
            return True
        if not self.steppers and self.parameter.requires_grad:
            return True
        here = local(self.parameter)
        return here.untyped_storage().data_ptr() != self.weight.untyped_storage().data_ptr()

    def _versions(self) -> int:
        counted = [parameter for _, parameter in self.steppers]
        if not counted and self.parameter is not None:
            counted = [self.parameter]
        return sum(local(parameter)._version for parameter in counted)


class DenseWeights:
    """The hooks behind the steps of some optimizers.

    Args:
        targets: what has to stay true to its mask.
        optimizers: as the user has them, wrapped or not.

    Raises:
        ValueError: no optimizer given steps a weight that requires a gradient, or something is no optimizer.
    """

    def __init__(self, targets: Sequence[Target], optimizers: Sequence[Any]) -> None:
        self.seconds = 0.0
        self._targets = list(targets)
        self._fired: set[int] = set()
        self._loaded = False
        self._handles: list[RemovableHandle] = []
        self._leaves = list({id(leaf): leaf for each in optimizers for leaf in leaves(each)}.values())
        stepped = [(leaf, p) for leaf in self._leaves for group in leaf.param_groups for p in group["params"]]
        by_storage = same_storage([parameter for _, parameter in stepped])
        for target in self._targets:
            target.steppers = [stepped[i] for i in by_storage(target.weight)]
            if target.steppers:
                continue
            trained = target.parameter is not None and target.parameter.requires_grad
            # A tensor of plain data that nobody steps is a constant; a shard belongs to a model that is not known.
            if not trained and not isinstance(target.parameter, nn.Parameter) and isinstance(target.mask(), BlockMask):
                raise ValueError(
                    f"Nobody is known to write {target.name!r}: it is no parameter, no optimizer given steps it. Its "
                    "removed weights might come back unseen: register the model that holds it by add_model(), or "
                    "squash_mask() it first."
                )
            if trained:
                raise ValueError(
                    f"No optimizer given steps {target.name!r}, which requires a gradient: its removed weights would "
                    "come back unseen. Attach all optimizers, attach(first, second), or freeze it by "
                    "requires_grad_(False)."
                )

    def hook(self) -> None:
        """Begins to follow the optimizers' steps."""
        for leaf in self._leaves:
            self._handles.append(leaf.register_step_pre_hook(Hook(self._before_step)))
            self._handles.append(leaf.register_step_post_hook(Hook(self._stepped)))
        for target in self._targets:
            for _, parameter in target.steppers:
                if parameter.is_leaf and parameter.requires_grad:
                    hook = Hook(lambda _, target=target: setattr(target, "trained", True))
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)
            if target.owner is not None:
                module = target.owner[0]
                before = Hook(lambda *_, target=target: self._check(target))
                self._handles.append(module.register_forward_pre_hook(before))
                if getattr(module, "max_norm", None) is not None:  # the forward itself writes; zeros stay zeros
                    after = Hook(lambda *_, target=target: self._note(target))
                    self._handles.append(module.register_forward_hook(after))

    def unhook(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def replaced(self) -> bool:
        """Whether the model has other memory for a weight by now."""
        return any(target.replaced for target in self._targets)

    def check(self) -> None:
        """Settles what was written behind the optimizers' backs: by a load, by hand.

        Raises:
            RuntimeError: it was written after a gradient came, and no step of the optimizers has been seen yet.
        """
        for target in self._targets:
            self._check(target)
        self._loaded = False

    def masks(self) -> list[BlockMask | Tensor]:
        """Those of this moment, to be kept over a move of the masks."""
        masks = (target.mask() for target in self._targets)
        return [mask if isinstance(mask, BlockMask) else mask.clone() for mask in masks]

    def loaded(self) -> None:
        """After weights were loaded: takes the next change that it sees for that."""
        self._loaded = True

    def settle(self, *, all_of_them: bool = False) -> None:
        """Settles what was written behind the optimizers' backs, or everything."""
        for target in self._targets:
            if all_of_them or target.written():
                self._settle(target, None)

    def reset(self, masks: Sequence[BlockMask | Tensor]) -> None:
        """Sets the optimizer state of what ``masks`` remove to its initial value."""
        for target, mask in zip(self._targets, masks, strict=True):
            for leaf, parameter in target.steppers:
                reset_state(mask, state_of(leaf, parameter, target.weight))

    def _check(self, target: Target) -> None:
        started = time.perf_counter()
        if target.written():
            if target.trained and not self._has_fired(target) and not self._loaded:
                raise RuntimeError(
                    f"The weights of {target.name!r} have changed, but no step of the optimizers attached was seen: "
                    f"{[type(leaf).__name__ for leaf in self._leaves]}. Attach the optimizer whose step() is called; "
                    "after writing weights yourself, call enforcer.settle()."
                )
            with torch.no_grad():
                self._settle(target, None)
        self.seconds += time.perf_counter() - started

    def _has_fired(self, target: Target) -> bool:
        return any(id(leaf) in self._fired for leaf, _ in target.steppers)

    def _note(self, target: Target) -> None:
        trained = target.trained
        target.note(hashed=bool(target.steppers) and not self._has_fired(target))
        target.trained = trained

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        started = time.perf_counter()
        self._fired.add(id(optimizer))
        with torch.no_grad():
            for target in self._targets:
                if target.written():  # not by this step, which may write a few rows only
                    self._settle(target, None)
        self.seconds += time.perf_counter() - started

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        started = time.perf_counter()
        with torch.no_grad():
            for target in self._targets:
                for leaf, parameter in target.steppers:
                    if leaf is optimizer and (parameter.grad is not None or target.written()):
                        self._settle(target, step_rows(optimizer, parameter))
        self.seconds += time.perf_counter() - started

    def _settle(self, target: Target, rows: Tensor | None) -> None:
        mask = target.mask()
        if isinstance(mask, BlockMask):
            if mask.removes:
                if rows is None or rows.numel() >= mask.rect.rows:
                    mask.apply_(target.weight)
                else:
                    settle_rows(target.weight, mask, rows)
        else:
            target.weight.data.masked_fill_(mask == 0, 0)
        target.note(hashed=bool(target.steppers) and not self._has_fired(target))


def packed_targets(
    sources: Iterable[Source],
    located: Mapping[str, ShardedData],
    fused: set[Place],
    mask: Callable[[Place], BlockMask],
) -> Iterator[Target]:
    """The shards that no fused optimizer writes."""
    owners = [owner for source in sources for owner in _parameters(source)]
    owning = same_storage([parameter for _, _, parameter in owners])
    for name, data in located.items():
        for number, shard in enumerate(data.shards):
            place = Place(name, number)
            if place not in fused:
                target = Target(name, shard.tensor, partial(mask, place))
                for i in owning(shard.tensor)[:1]:
                    module, attribute, target.parameter = owners[i]
                    target.owner = None if module is None else (module, attribute)
                yield target


def plain_targets(sparsifier: BaseDataSparsifier) -> Iterator[Target]:
    """Plain data that is not squashed."""
    container = sparsifier._container
    for name in sparsifier.state:
        if plain.is_attached(container, name):
            weight = plain.original(container, name)
            mask = partial(_plain_mask, sparsifier, name)
            yield Target(name, weight.data, mask, weight if weight.is_leaf else None)


def _parameters(source: Any) -> Iterator[tuple[nn.Module | None, str, Tensor]]:
    """What a source has that may be trained: its module and its name there, where there is one."""
    if hasattr(source, "model"):
        for module in source.model.modules():
            yield from ((module, name, p) for name, p in module._parameters.items() if p is not None)
    else:
        pieces = source.data.local_shards() if hasattr(source.data, "local_shards") else None
        tensors = [source.data] if pieces is None else [piece.tensor for piece in pieces]
        yield from ((None, "", tensor) for tensor in tensors if tensor.is_leaf)


def _plain_mask(sparsifier: BaseDataSparsifier, name: str) -> Tensor:
    mask: Tensor = sparsifier.state[name]["mask"]
    return mask
