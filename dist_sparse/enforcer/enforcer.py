"""How do removed weights stay zero while a model trains?

An optimizer revives what a mask has removed: a fused one inside every backward, in the rows that the batch touched. A
:class:`MaskEnforcer` zeroes those rows again just before a lookup reads them, and what plain optimizers step right
after their step, so that every removed weight that a forward reads is exactly 0, at a cost that grows with the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer.dense import DenseWeights, packed_targets, plain_targets
from dist_sparse.enforcer.fused import (
    Kernel,
    Place,
    averages,
    collections_of,
    fused_kernels,
    lookups_of,
    places_in,
    places_of,
)
from dist_sparse.enforcer.hooks import Hook, Wrapped
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.shards import Source

__all__ = ["MaskEnforcer"]

_STATES: Final = ("keep", "reset")


class MaskEnforcer:
    """Keeps removed weights at zero in every forward. Never communicates, but when it finds that shards have moved.

    Between a backward and the next lookup, rows that the backward wrote may hold other values than zero where they are
    removed. They are settled before a lookup reads them, in a due ``step()`` before scoring, in ``get_data`` and
    ``state_dict`` of the sparsifier, before a ``state_dict()`` of a sharded collection, before the ``sync()`` of a
    DMPCollection, and in :meth:`settle`.

    Args:
        sparsifier: everything registered with it is enforced.
        optimizer_state: of removed weights: ``"keep"`` lets optimizers go on with it; ``"reset"`` sets it to
            its first value whenever masks move, before and after, so that a block that comes back starts afresh.

    Attributes:
        seconds: host time spent so far, what goes into ``sparsifier.step()`` not counted. On a device, kernels are
            only launched in it.
    """

    def __init__(self, sparsifier: BaseDataSparsifier, optimizer_state: str = "keep") -> None:
        if not isinstance(sparsifier, BaseDataSparsifier):
            raise ValueError(f"Invalid sparsifier of type {type(sparsifier).__name__}: must be a data sparsifier.")
        if optimizer_state not in _STATES:
            raise ValueError(f"Invalid {optimizer_state=}: must be one of {_STATES}.")
        self._sparsifier = sparsifier
        self._reset = optimizer_state == "reset"
        self._optimizers: tuple[Any, ...] | None = None
        self._kernels: list[Kernel] = []
        self._lookups: list[tuple[nn.Module, list[Any]]] = []
        self._dense = DenseWeights([], [])
        self._handles: list[RemovableHandle | Wrapped] = []
        self._before: tuple[list[list[BlockMask | None]], list[BlockMask | Tensor]] | None = None
        self._seconds = 0.0

    @property
    def attached(self) -> bool:
        """Whether it is at work."""
        return self._optimizers is not None

    @property
    def seconds(self) -> float:
        """See the class."""
        return self._seconds + self._dense.seconds + sum(kernel.seconds for kernel in self._kernels)

    def attach(self, *optimizers: Any) -> MaskEnforcer:
        """Begins. What is removed now is zeroed at once. Collective if shards have moved since the last step.

        Args:
            *optimizers: all that step what is registered, as the training loop has them (TorchRec's CombinedOptimizer,
                torch's own, wrapped ones), or lists of them. Fused tables need none.

        Returns:
            Itself, so that ``MaskEnforcer(sparsifier).attach(optimizer)`` is one line, and ``with`` one block.

        Raises:
            ValueError: it is attached already, or another one is to the same sparsifier; nothing is registered; no
                optimizer given steps a registered weight that requires a gradient; or the model is compiled. Nothing
                was changed.

        Attach between an optimizer step and the next forward: a backward whose forward came before is not seen.
        """
        if self.attached:
            raise ValueError("The enforcer is attached already: call detach() first.")
        if self._sparsifier._enforcer is not None:
            raise ValueError("Another enforcer is attached to this sparsifier: call its detach() first.")
        if not self._sparsifier.data_groups:
            raise ValueError("Nothing is registered yet: call add_model() or add_data() before attach().")
        flat = tuple(o for each in optimizers for o in (each if isinstance(each, (list, tuple)) else (each,)))
        try:
            self._look_up(flat)
        except BaseException:
            self._let_go(())
            raise
        self._optimizers = flat
        self._sparsifier._enforcer = self
        return self

    def detach(self) -> None:
        """Ends; does nothing if it is not attached. What is unsettled is settled first, then the model trains as if it
        had never been attached."""
        if self.attached:
            try:
                self._settle_here()
            finally:
                self._let_go(())
                self._optimizers = None
                self._sparsifier._enforcer = None

    def __enter__(self) -> MaskEnforcer:
        self._attached_only()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def settle(self) -> None:
        """Zeroes every removed weight that an optimizer, or anybody whose write torch has counted, has revived. Local.

        Call it before weights are read past their module: ``named_parameters()``, views of one's own. After writing
        table weights behind torch's back, ``sparsifier.apply_masks()`` goes over all of them.

        Raises:
            ValueError: shards have moved since masks were last used: a forward, ``step()`` or ``apply_masks()`` on
                every rank comes first. RuntimeError: it is not attached.
        """
        self._attached_only()
        if self._renewed_if_stale():
            return
        started = time.perf_counter()
        self._settle_here()
        self._seconds += time.perf_counter() - started

    def _settle_here(self) -> None:
        """Settles all but collections that TorchRec has resharded: it asks for their state before it does, so that they
        were settled then."""
        replaced = {id(module) for module, known in self._lookups if lookups_of(module) != known}
        with torch.no_grad():
            for kernel in self._kernels:
                if id(kernel.collection) not in replaced:
                    kernel.settle()
            self._dense.settle()

    def _renewed_if_stale(self) -> bool:
        """Looks everything up anew if something was replaced; whoever calls it may be alone, so masks must not move."""
        if self._stale():
            moved = self._sparsifier._tables.moved(self._sparsifier._tables.locate())
            if moved:
                raise ValueError(
                    f"The shards of the tables {moved} have moved since their masks were last used: run a forward, "
                    "step() or apply_masks() on every rank first."
                )
            self.renew()
            return True
        return False

    def begin_step(self) -> None:
        """The sparsifier calls it before masks move."""
        self._renewed_if_stale()
        counted = self.seconds
        self._dense.check()
        self._settle_here()
        self._seconds -= self.seconds - counted
        self._before = self._masks() if self._reset else None

    def end_step(self) -> None:
        """The sparsifier calls it after masks have moved."""
        with torch.no_grad():
            self._dense.settle(all_of_them=True)
        if self._before is not None:
            self._reset_states(self._before)  # of blocks that have come back
            self._reset_states(self._masks())

    def renew(self) -> None:
        """Looks everything up anew and zeroes all that is removed, after registrations, masks or weights were replaced.
        Collective if shards have moved since the last step."""
        self._attached_only()
        assert self._optimizers is not None
        self._look_up(self._optimizers)

    def _attached_only(self) -> None:
        if not self.attached:
            raise RuntimeError("The enforcer is not attached: call attach(optimizer) first.")

    def _masks(self) -> tuple[list[list[BlockMask | None]], list[BlockMask | Tensor]]:
        return [kernel.masks() for kernel in self._kernels], self._dense.masks()

    def _reset_states(self, masks: tuple[list[list[BlockMask | None]], list[BlockMask | Tensor]]) -> None:
        with torch.no_grad():
            for kernel, of_kernel in zip(self._kernels, masks[0], strict=True):
                kernel.reset(of_kernel)
            self._dense.reset(masks[1])

    def _look_up(self, optimizers: tuple[Any, ...]) -> None:
        """Finds what is registered, hooks on to it and settles all of it. On an error, hooks are as they were."""
        tables = self._sparsifier._tables
        models = models_of(tables.sources)
        for model in models:
            check_not_compiled(model)
        located = tables.locate() if tables else {}
        places = places_of(located)
        collections = list(collections_of(models))
        present = [(m, k, found) for m in collections for k in fused_kernels(m) if any(found := places_in(k, places))]
        fused = {place for _, _, found in present for place in found if place}
        targets = [*packed_targets(tables.sources, located, fused, self._mask), *plain_targets(self._sparsifier)]
        dense = DenseWeights(targets, optimizers)
        tables.follow(located)
        # A kernel that stays keeps its hooks: a backward may be on its way to them.
        staying = {id(kernel.module): kernel for kernel in self._kernels}
        kernels = []
        for module, kernel, found in present:
            known = staying.get(id(kernel))
            if known is None:
                known = Kernel(kernel, module, found, self._mask, lambda: tables.version)
            else:
                known.moved_to(found)
            kernels.append(known)
        self._let_go(kernels)
        self._kernels, self._dense = kernels, dense
        self._lookups = [(module, lookups_of(module)) for module in collections]
        self._hook(models)
        with torch.no_grad():
            for kernel in self._kernels:
                kernel.settle_all()
            dense.settle(all_of_them=True)
        if self._reset:
            self._reset_states(self._masks())

    def _mask(self, place: Place) -> BlockMask:
        return self._sparsifier._tables.masks(place.name)[place.number]

    def _hook(self, models: list[nn.Module]) -> None:
        self._dense.hook()
        for kernel in self._kernels:
            kernel.hook()
        for module, known in self._lookups:
            self._handles += [
                module.register_forward_pre_hook(Hook(partial(self._before_forward, known))),
                module.register_state_dict_pre_hook(Hook(self._before_state_dict)),  # type: ignore[no-untyped-call]
            ]
        for model in models:
            self._handles.append(model.register_forward_pre_hook(Hook(self._before_model)))
            if averages(model):
                self._handles.append(Wrapped(model, "sync", self._before_average))
        # TorchRec loads collections by themselves, so that the model's own hook may not fire.
        for module in {id(m): m for m in (*models, *(module for module, _ in self._lookups))}.values():
            handle = module.register_load_state_dict_post_hook(Hook(self._after_load))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _let_go(self, staying: Sequence[Kernel]) -> None:
        """Takes all hooks away but those of the kernels that stay."""
        for handle in self._handles:
            handle.remove()
        for kernel in self._kernels:
            if kernel not in staying:
                kernel.unhook()
                self._seconds += kernel.seconds
        self._dense.unhook()
        self._seconds += self._dense.seconds
        self._handles, self._kernels, self._lookups, self._dense = [], [], [], DenseWeights([], [])

    def _stale(self) -> bool:
        """Whether something was replaced: kernels, as by ``DistributedModelParallel.reshard``, or parameters, as by
        loading with ``assign=True``."""
        return self._dense.replaced or any(lookups_of(module) != known for module, known in self._lookups)

    def _before_forward(self, known: list[Any], module: nn.Module, args: Any) -> None:
        if lookups_of(module) != known:  # on all ranks alike, with or without shards
            self.renew()

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if self._dense.replaced:
            self.renew()
        self._dense.check()

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._settle_here()

    def _before_average(self, sync: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of a 2-D model's ``sync()``: what one copy has revived must not get into the others."""
        self.settle()
        done = sync(*args, **kwargs)
        for kernel in self._kernels:
            kernel.note_writes()
        return done

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        for kernel in self._kernels:
            kernel.unsettle()
        self._dense.loaded()


def models_of(sources: Iterable[Source]) -> list[nn.Module]:
    """The models that were registered."""
    return [source.model for source in sources if hasattr(source, "model")]


def check_not_compiled(model: nn.Module) -> None:
    """Refuses what hooks can't follow.

    Raises:
        ValueError: the model, or a part of it, is compiled.
    """
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"The model is compiled{f' at {path!r}' if path else ''}: hooks do not run inside torch.compile, so "
                "removed weights would come back unseen. Attach to the model as it was before torch.compile."
            )
