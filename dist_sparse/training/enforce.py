"""How do removed weights stay zero while a model trains?

An optimizer revives what a mask has removed: a fused one inside every backward, in the rows that the batch touched. A
:class:`MaskEnforcer` zeroes those rows again just before a lookup reads them, and what plain optimizers step right
after their step, so that every removed weight that a forward reads is exactly 0, at a cost that grows with the batch.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.masks import BlockMask
from dist_sparse.shards import ShardedData
from dist_sparse.sparsifiers import plain
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.training.dense import DenseWeights, Target
from dist_sparse.training.hooks import Hook
from dist_sparse.training.lookups import Kernel, Place
from dist_sparse.training.optimizers import same_storage

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
        optimizer_state: of removed weights: ``"keep"`` lets optimizers go on with it; ``"reset"`` sets it to zero
            whenever masks move, before and after, so that a block that comes back starts afresh.

    Attributes:
        seconds: host time spent so far, beside that of ``sparsifier.step()``. On a device, kernels are only launched in
            it.
    """

    def __init__(self, sparsifier: BaseDataSparsifier, optimizer_state: str = "keep") -> None:
        if not isinstance(sparsifier, BaseDataSparsifier):
            raise ValueError(f"Invalid sparsifier of type {type(sparsifier).__name__}: must be a data sparsifier.")
        if optimizer_state not in _STATES:
            raise ValueError(f"Invalid {optimizer_state=}: must be one of {_STATES}.")
        self._sparsifier = sparsifier
        self._reset = optimizer_state == "reset"
        self._optimizers: tuple[Any, ...] | None = None
        self._collections: list[tuple[nn.Module, list[Kernel]]] = []
        self._dense = DenseWeights([], [])
        self._handles: list[RemovableHandle] = []
        self._averaging: list[nn.Module] = []
        self._torchrec: Any = None
        self._seconds = 0.0

    @property
    def attached(self) -> bool:
        """Whether it is at work."""
        return self._optimizers is not None

    @property
    def seconds(self) -> float:
        """See the class."""
        return self._seconds + sum(kernel.seconds for kernel in self._kernels())

    def attach(self, *optimizers: Any) -> MaskEnforcer:
        """Begins. What is removed now is zeroed at once. Collective if shards have moved since the last step.

        Args:
            *optimizers: all that step what is registered, as the training loop has them (TorchRec's CombinedOptimizer,
                torch's own, wrapped ones). Fused tables need none.

        Returns:
            Itself, so that ``MaskEnforcer(sparsifier).attach(optimizer)`` is one line, and ``with`` one block.

        Raises:
            ValueError: it is attached already, or another one is to the same sparsifier; nothing is registered; no
                optimizer given steps a registered weight that requires a gradient; or the model is compiled. Nothing
                was changed.
        """
        if self.attached:
            raise ValueError("The enforcer is attached already: call detach() first.")
        if self._sparsifier._enforcer is not None:
            raise ValueError("Another enforcer is attached to this sparsifier: call its detach() first.")
        if not self._sparsifier.data_groups:
            raise ValueError("Nothing is registered yet: call add_model() or add_data() before attach().")
        try:
            self._look_up(optimizers)
        except BaseException:
            self._let_go()
            raise
        self._optimizers = optimizers
        self._sparsifier._enforcer = self
        return self

    def detach(self) -> None:
        """Ends; does nothing if it is not attached. What is unsettled is settled first, then the model trains as if it
        had never been attached."""
        if self.attached:
            if not self._stale():
                self.settle()
            self._let_go()
            self._optimizers = None
            self._sparsifier._enforcer = None

    def __enter__(self) -> MaskEnforcer:
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
        with torch.no_grad():
            for kernel in self._kernels():
                kernel.settle()
            self._dense.settle()
        self._seconds += time.perf_counter() - started

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
        with torch.no_grad():
            self._dense.check()
        self.settle()
        if self._reset:
            self._reset_states()

    def end_step(self) -> None:
        """The sparsifier calls it after masks have moved."""
        with torch.no_grad():
            self._dense.settle(all_of_them=True)
        if self._reset:
            self._reset_states()

    def renew(self) -> None:
        """Looks everything up anew and zeroes all that is removed, after registrations, masks or weights were replaced.
        Collective if shards have moved since the last step."""
        self._attached_only()
        assert self._optimizers is not None
        self._look_up(self._optimizers)

    def _attached_only(self) -> None:
        if not self.attached:
            raise RuntimeError("The enforcer is not attached: call attach(optimizer) first.")

    def _kernels(self) -> Iterator[Kernel]:
        for _, kernels in self._collections:
            yield from kernels

    def _reset_states(self) -> None:
        with torch.no_grad():
            for kernel in self._kernels():
                kernel.reset()
            self._dense.reset()

    def _look_up(self, optimizers: tuple[Any, ...]) -> None:
        """Finds what is registered, hooks on to it and settles all of it. On an error, hooks are as they were."""
        models = [source.model for source in self._sparsifier._tables.sources if hasattr(source, "model")]
        tables = self._sparsifier._tables
        located = tables.locate() if tables else {}
        for model in models:
            _check_not_compiled(model)
        places: dict[tuple[int, tuple[int, ...]], Place] = {}
        for name, data in located.items():
            for number, shard in enumerate(data.shards):
                places[shard.tensor.data_ptr(), tuple(shard.tensor.shape)] = Place(name, number)
        collections = list(self._find_collections(models, places))
        fused = {place for _, kernels in collections for kernel in kernels for place in kernel.places if place}
        targets = [*self._packed_targets(models, located, fused), *self._plain_targets()]
        dense = DenseWeights(targets, optimizers)
        tables.follow(located)
        self._seconds = self.seconds
        self._let_go()
        self._collections, self._dense = collections, dense
        self._hook(models)
        with torch.no_grad():
            for kernel in self._kernels():
                kernel.settle_all()
            dense.settle(all_of_them=True)
        if self._reset:
            self._reset_states()

    def _find_collections(
        self, models: list[nn.Module], places: dict[tuple[int, tuple[int, ...]], Place]
    ) -> Iterator[tuple[nn.Module, list[Kernel]]]:
        """Every sharded collection, with those of its kernels that have a fused optimizer."""
        if "torchrec" not in sys.modules:
            return
        torchrec = self._torchrec = importlib.import_module("dist_sparse.torchrec")
        tables = self._sparsifier._tables
        for module in {id(m): m for model in models for m in model.modules() if torchrec.shards_tables(m)}.values():
            kernels = []
            for kernel in torchrec.fused_kernels(module):
                views = kernel.emb_module.split_embedding_weights()
                found = [places.get((view.data_ptr(), tuple(view.shape))) for view in views]
                kernels.append(Kernel(kernel, found, self._mask, lambda: tables.version))
            yield module, kernels

    def _packed_targets(
        self, models: list[nn.Module], located: Mapping[str, ShardedData], fused: set[Place]
    ) -> Iterator[Target]:
        """The shards that no fused optimizer writes."""
        modules = {id(module): module for model in models for module in model.modules()}.values()
        owners = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        owning = same_storage([parameter for _, _, parameter in owners])
        for name, data in located.items():
            for number, shard in enumerate(data.shards):
                place = Place(name, number)
                if place not in fused:
                    target = Target(name, shard.tensor, partial(self._mask, place))
                    for i in owning(shard.tensor)[:1]:
                        module, attribute, target.parameter = owners[i]
                        target.owner = module, attribute
                    yield target

    def _plain_targets(self) -> Iterator[Target]:
        """Plain data that is not squashed."""
        container = self._sparsifier._container
        for name in self._sparsifier.state:
            if plain.is_attached(container, name):
                weight = plain.original(container, name)
                yield Target(name, weight.data, partial(self._plain_mask, name), weight if weight.is_leaf else None)

    def _mask(self, place: Place) -> BlockMask:
        return self._sparsifier._tables.masks(place.name)[place.number]

    def _plain_mask(self, name: str) -> Tensor:
        mask: Tensor = self._sparsifier.state[name]["mask"]
        return mask

    def _hook(self, models: list[nn.Module]) -> None:
        self._dense.hook()
        for kernel in self._kernels():
            kernel.hook()
        for module, kernels in self._collections:
            self._handles += [
                module.register_forward_pre_hook(Hook(partial(self._before_forward, kernels))),
                module.register_state_dict_pre_hook(Hook(self._before_state_dict)),  # type: ignore[no-untyped-call]
            ]
        for model in models:
            self._handles.append(model.register_forward_pre_hook(Hook(self._before_model)))
            if self._torchrec is not None and self._torchrec.averages(model):
                model.sync = partial(self._before_average, model.sync)  # type: ignore[arg-type, assignment]
                self._averaging.append(model)
        # TorchRec loads collections by themselves, so that the model's own hook may not fire.
        for module in {id(m): m for m in (*models, *(module for module, _ in self._collections))}.values():
            handle = module.register_load_state_dict_post_hook(Hook(self._after_load))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        for model in self._averaging:
            del model.sync
        for kernel in self._kernels():
            kernel.unhook()
        self._dense.unhook()
        self._handles, self._averaging = [], []
        self._collections, self._dense = [], DenseWeights([], [])

    def _stale(self) -> bool:
        """Whether something was replaced: kernels, as by ``DistributedModelParallel.reshard``, or parameters, as by
        loading with ``assign=True``."""
        return self._dense.replaced or any(self._replaced(module, kernels) for module, kernels in self._collections)

    def _replaced(self, module: nn.Module, kernels: list[Kernel]) -> bool:
        return [kernel.module for kernel in kernels] != list(self._torchrec.fused_kernels(module))

    def _before_forward(self, kernels: list[Kernel], module: nn.Module, args: Any) -> None:
        if self._replaced(module, kernels):
            self.renew()

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if self._dense.replaced:
            self.renew()
        with torch.no_grad():
            self._dense.check()

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.settle()

    def _before_average(self, sync: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of a 2-D model's ``sync()``: what one copy has revived must not get into the others."""
        self.settle()
        done = sync(*args, **kwargs)
        for kernel in self._kernels():
            kernel.note_writes()
        return done

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        for kernel in self._kernels():
            kernel.unsettle()
        self._dense.loaded()


def _check_not_compiled(model: nn.Module) -> None:
    for path, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if compiled:
            raise ValueError(
                f"The model is compiled{f' at {path!r}' if path else ''}: hooks do not run inside torch.compile, so "
                "removed weights would come back unseen. Attach to the model as it was before torch.compile."
            )
