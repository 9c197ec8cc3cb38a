"""`MaskEnforcer`: every removed weight that a forward reads is exactly 0 while a model trains.

An optimizer revives what a mask has removed: a fused one inside every backward, in the rows of the
batch; a plain one in its step. Those rows are zeroed again just before a lookup reads them
(:mod:`~dist_sparse.enforcer.fused`), and what plain optimizers step right after the step
(:mod:`~dist_sparse.enforcer.dense`), at a cost that grows with the batch.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
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
    lookups_of,
    places_in,
    places_of,
)
from dist_sparse.enforcer.hooks import Clock, Hook, Wrapped, timed
from dist_sparse.enforcer.optimizers import State, same_storage
from dist_sparse.masking.cached.kept_scores import Written
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.port import collection_of
from dist_sparse.text import number_of

__all__ = ["MaskEnforcer", "settle_all"]

_STATES: Final = ("keep", "reset")
_REMOVED: Final = ("drop", "zero")

_attached: weakref.WeakSet[MaskEnforcer] = weakref.WeakSet()
"""All that are attached, so that no weight gets two masks."""


class MaskEnforcer:
    """Keeps removed weights at zero in every forward. Never communicates, unless it finds that
    shards have moved.

    Between a backward and the next lookup, rows that the backward wrote are *dirty*: removed
    weights in them may be nonzero. They are cleaned before a lookup reads them, in a mask update
    before scoring, in ``get_data`` and ``state_dict`` of the sparsifier, in ``state_dict()`` of the
    model, before the ``sync()`` of a DMPCollection, and in :meth:`settle`. Weights that plain
    optimizers step are clean as soon as ``step()`` returns.

    Args:
        sparsifier: everything registered with it is enforced.
        optimizer_state: the state of removed weights: ``"keep"`` leaves it to the optimizers;
            ``"reset"`` sets it to its initial value at every mask update, before and after, so that
            a block that comes back starts with fresh state.
        removed_rows: for tables with a fused optimizer on a CPU whose lookups sum rows (SUM
            pooling, weighted or not, and MEAN pooling of row-wise sharded tables): ``"drop"`` drops
            the ids of rows that are removed whole before the lookup. These rows are not read, get
            no gradient and are not written; their optimizer state does not change. With ``"zero"``,
            and for all other tables, such rows are read as zeros, trained and zeroed again.
            Outputs, kept weights and masks are equal bit for bit. A sparsifier with
            ``trains_removed`` gets ``"zero"``.

    Attributes:
        seconds: host time spent so far, without ``sparsifier.step()``. On a device, this includes
            only launching the kernels.

    Example::

        >>> import torch
        >>> from dist_sparse import DataNormSparsifier, MaskEnforcer
        >>> table = torch.nn.EmbeddingBag(10, 4)
        >>> optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        >>> sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
        >>> sparsifier.add_model(table)
        ['weight']
        >>> sparsifier.step()
        >>> with MaskEnforcer(sparsifier).attach(optimizer):
        ...     table(torch.arange(10).view(5, 2)).sum().backward()
        ...     optimizer.step()
        ...     int((table.weight == 0).sum())
        20
    """

    def __init__(
        self,
        sparsifier: BaseDataSparsifier,
        optimizer_state: str = "keep",
        removed_rows: str = "drop",
    ) -> None:
        if not isinstance(sparsifier, BaseDataSparsifier):
            raise ValueError(
                f"Invalid sparsifier of type {type(sparsifier).__name__}: must be a data"
                " sparsifier."
            )
        if optimizer_state not in _STATES:
            raise ValueError(f"Invalid {optimizer_state=}: must be one of {_STATES}.")
        if removed_rows not in _REMOVED:
            raise ValueError(f"Invalid {removed_rows=}: must be one of {_REMOVED}.")
        self.clock = Clock()
        self._sparsifier = sparsifier
        self._reset = optimizer_state == "reset"
        self._drop = removed_rows == "drop"
        self._optimizers: tuple[Any, ...] | None = None
        self._kernels: list[Kernel] = []
        self._known_lookups: list[tuple[nn.Module, list[Any]]] = []
        self._dense = DenseWeights([], [], self.clock)
        self._handles: list[RemovableHandle | Wrapped] = []
        self._before: tuple[list[list[BlockMask | None]], list[BlockMask | Tensor]] | None = None
        self._loaded = False

    def __repr__(self) -> str:
        names = number_of(len(self._sparsifier.data_groups), "name")
        return f"{type(self).__name__}({names}, {'attached' if self.attached else 'detached'})"

    @property
    def attached(self) -> bool:
        """Whether the hooks are attached."""
        return self._optimizers is not None

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """What :meth:`attach` was called with; empty when detached."""
        return self._optimizers or ()

    @property
    def seconds(self) -> float:
        """See the class."""
        return self.clock.seconds

    def attach(self, *optimizers: Any) -> MaskEnforcer:
        """Attach the hooks and zero what is removed. Collective if shards have moved since the last
        step.

        Call it between an optimizer step and the next forward: a backward whose forward came before
        is not seen.

        Args:
            *optimizers: all that step what is registered, as the training loop has them (TorchRec's
                CombinedOptimizer, torch's own, wrapped ones), or lists of them. Fused tables need
                none. Steps of torch optimizers made later are seen too.

        Returns:
            Itself, so that ``MaskEnforcer(sparsifier).attach(optimizer)`` is one line, and ``with``
            one block.

        Raises:
            ValueError: it is already attached, or another enforcer is attached to the same
                sparsifier or weights; nothing is registered; none of the optimizers steps a
                registered weight that requires a gradient; or a module that holds registered
                weights is compiled. Nothing was changed.
        """
        if self.attached:
            raise ValueError("The enforcer is attached already: call detach() first.")
        if self._sparsifier.enforcer is not None:
            raise ValueError(
                "Another enforcer is attached to this sparsifier: call its detach() first."
            )
        if not self._sparsifier.data_groups:
            raise ValueError(
                "Nothing is registered yet: call add_model() or add_data() before attach()."
            )
        flat = tuple(
            o for each in optimizers for o in (each if isinstance(each, (list, tuple)) else (each,))
        )
        try:
            self._optimizers = flat
            self._look_up(check=True)
        except BaseException:
            self._remove_hooks(())
            self._optimizers = None
            raise
        self._sparsifier.enforcer = self
        _attached.add(self)
        return self

    def detach(self) -> None:
        """Clean all dirty rows and remove the hooks: the model trains on as if it had never been
        attached. Does nothing if it is not attached."""
        if self.attached:
            try:
                self._clean()
            finally:
                self._remove_hooks(())
                self._optimizers = None
                self._sparsifier.enforcer = None
                _attached.discard(self)

    def __enter__(self) -> MaskEnforcer:
        self._check_attached()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    @timed
    def settle(self) -> None:
        """Zero every removed weight that an optimizer, or any write that torch counts, has revived.
        Local.

        Call it before weights are read other than by a forward of their module or ``state_dict()``:
        after a load, or in tables of fused optimizers. After writes that torch does not count
        (through ``.data``) call ``sparsifier.apply_masks()`` instead, which writes all tables.

        Raises:
            ValueError: shards have moved since masks were last used: first run a forward,
                ``step()`` or ``apply_masks()`` on every rank.
            RuntimeError: it is not attached.
        """
        self._check_attached()
        if not self._renew_if_stale():
            self._clean()

    def accumulators(self) -> dict[int, tuple[Tensor, float]]:
        """Return the sums of squared gradients that Adagrad keeps, and their initial value, by the
        address of the weights; see :class:`~dist_sparse.ImportanceSparsifier`."""
        self._check_attached()
        found = {
            w.data_ptr(): (total, 0.0)
            for kernel in self._kernels
            for w, total in kernel.accumulators()
        }
        return found | {
            w.data_ptr(): (total, initial) for w, total, initial in self._dense.accumulators()
        }

    def written(self) -> dict[int, Written]:
        """Return which rows may have been written, live, by the address of the weights: of tables
        of fused optimizers on a CPU, whose writes are all seen."""
        return {address: rows for kernel in self._kernels for address, rows in kernel.written()}

    def begin_step(self) -> None:
        """Called by the sparsifier before a mask update."""
        spent = self.clock.seconds
        self._renew_if_stale()
        self._clean()
        self.clock.seconds = spent
        self._before = self._masks() if self._reset else None

    def end_step(self) -> None:
        """Called by the sparsifier after a mask update."""
        with torch.no_grad():
            # What is newly removed in sharded tables is zero already, in plain data it is not.
            self._dense.clean_all()
        if self._before is not None:
            self._reset_states(self._before)  # of blocks that have come back
            self._reset_states(self._masks())

    def check_rotation(self, names: Collection[str]) -> None:
        """Refuse to rotate weights whose optimizer keeps state for each element, unless it is to be
        reset.

        Raises:
            ValueError: names them.
        """
        kept = sorted({name for name, _ in self._element_states(names)})
        if kept and not self._reset:
            raise ValueError(
                f"Tables {kept} can't be rotated: their optimizer keeps element-wise state in the"
                ' old basis. Pass optimizer_state="reset", or use SGD or a row-wise optimizer,'
                " whose state stays valid."
            )

    def after_rotation(self, names: Collection[str]) -> None:
        """Set the optimizer state for each element of rotated weights to its initial value."""
        with torch.no_grad():
            for _, states in self._element_states(names):
                for state, initial in states:
                    state.data.fill_(initial)

    def _element_states(self, names: Collection[str]) -> Iterator[tuple[str, list[State]]]:
        for found in (
            self._dense.element_states(),
            *(kernel.element_states() for kernel in self._kernels),
        ):
            yield from ((name, states) for name, states in found if name in names)

    def renew(self) -> None:
        """Look everything up again and zero what is removed, after masks or weights were replaced.
        Collective if shards have moved since the last step."""
        self._check_attached()
        self._look_up()

    def _check_attached(self) -> None:
        if not self.attached:
            raise RuntimeError("The enforcer is not attached: call attach(optimizer) first.")

    def _clean(self) -> None:
        """Clean what is dirty, except in collections that TorchRec has resharded: it calls their
        ``state_dict`` before it does, so that they were cleaned then."""
        if self._loaded:
            self._clean_all()
            return
        replaced = {
            id(module) for module, known in self._known_lookups if lookups_of(module) != known
        }
        with torch.no_grad():
            for kernel in self._kernels:
                if id(kernel.collection) not in replaced:
                    kernel.clean()
            self._dense.clean()

    def _clean_all(self) -> None:
        """Clean everything, and warn if a load has brought what the masks remove."""
        weights = [*self._weights()] if self._loaded else []
        self._loaded = False
        before = [int(weight.count_nonzero()) for _, weight in weights]
        with torch.no_grad():
            for kernel in self._kernels:
                kernel.clean_all()
            self._dense.clean_all()
        found: dict[str, int] = {}
        for (name, weight), count in zip(weights, before, strict=True):
            if revived := count - int(weight.count_nonzero()):
                found[name] = found.get(name, 0) + revived
        if found:
            names = ", ".join(map(repr, list(found)[:5])) + (", ..." if len(found) > 5 else "")
            warnings.warn(
                f"The model was loaded with {sum(found.values())} non-zero weights that the masks"
                f" remove, in {names}; they are 0 now, so this is not the model that was saved."
                " Load the state of the sparsifier that was saved with it too, before the next"
                " forward.",
                stacklevel=2,
            )

    def _renew_if_stale(self) -> bool:
        """Look everything up again if something was replaced. The caller may be a single rank, so
        masks must not move.

        Stale are kernels after ``DistributedModelParallel.reshard``, and parameters after a load
        with ``assign=True``.
        """
        if not self._dense.replaced and all(
            lookups_of(module) == known for module, known in self._known_lookups
        ):
            return False
        moved = self._sparsifier.packed_store.moved(self._sparsifier.packed_store.locate())
        if moved:
            raise ValueError(
                f"The shards of the tables {moved} have moved since their masks were last used: run"
                " a forward, step() or apply_masks() on every rank first."
            )
        self._look_up(check=True)
        return True

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for kernel in self._kernels:
            yield from kernel.weights()
        yield from ((target.name, target.weight) for target in self._dense.targets)

    def _masks(self) -> tuple[list[list[BlockMask | None]], list[BlockMask | Tensor]]:
        return [kernel.masks() for kernel in self._kernels], self._dense.masks()

    def _reset_states(
        self, masks: tuple[list[list[BlockMask | None]], list[BlockMask | Tensor]]
    ) -> None:
        with torch.no_grad():
            for kernel, of_kernel in zip(self._kernels, masks[0], strict=True):
                kernel.reset(of_kernel)
            self._dense.reset(masks[1])

    def _look_up(self, check: bool = False) -> None:
        """Find what is registered, hook it and clean all of it. On an error, hooks are as they
        were.

        With ``check``, refuse what :meth:`attach` refuses: weights may have been replaced, also for
        a single forward.
        """
        tables = self._sparsifier.packed_store
        located = tables.locate() if tables else {}
        # First: the other ranks may be waiting in it, whatever is refused below on this one.
        tables.reshard(located)
        models = [source.model for source in tables.sources if hasattr(source, "model")]
        places = places_of(located)
        collections = list(collections_of(models))
        present = [
            (m, batch, found)
            for m in collections
            for batch in collection_of(m).batches()
            if any(found := places_in(batch, places))
        ]
        fused = {place for _, _, found in present for place in found if place}
        targets = [
            *packed_targets(tables.sources, located, fused, self._mask),
            *plain_targets(self._sparsifier),
        ]
        dense = DenseWeights(targets, self._optimizers or (), self.clock)
        if check:
            _check_not_compiled(models, [*collections, *dense.owners])
            dense.check_stepped()
            pieces = [
                (name, shard.tensor) for name, data in located.items() for shard in data.shards
            ]
            self._check_alone([*pieces, *((target.name, target.weight) for target in targets)])
        # A kernel that stays keeps its hooks: a backward may be on its way to them.
        staying = {id(kernel.module): kernel for kernel in self._kernels}
        kernels = []
        for module, batch, found in present:
            known = staying.get(id(batch.module))
            if known is None:
                version = partial(getattr, tables, "version")
                known = Kernel(
                    batch,
                    module,
                    found,
                    self._mask,
                    self._counts,
                    self._samples,
                    version,
                    self._drops,
                    self.clock,
                )
            else:
                known.moved_to(found)
            kernels.append(known)
        self._remove_hooks(kernels)
        self._kernels, self._dense = kernels, dense
        self._known_lookups = [(module, lookups_of(module)) for module in collections]
        self._hook(models)
        self._clean_all()
        if self._reset:
            self._reset_states(self._masks())

    def _check_alone(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Refuse weights that another enforcer masks.

        Raises:
            ValueError: some are.
        """
        for other in (other for other in _attached if other is not self):
            theirs = same_storage([weight for _, weight in other._weights()])
            for name, weight in weights:
                if theirs(weight):
                    raise ValueError(
                        f"The weights of {name!r} are already sparsified: call detach() first, on"
                        " the earlier result of sparsify() or on the MaskEnforcer attached to"
                        " them."
                    )

    def _mask(self, place: Place) -> BlockMask:
        return self._sparsifier.packed_store.masks(place.name)[place.number]

    def _counts(self, place: Place) -> Tensor | None:
        counts = self._sparsifier.packed_store.counts(place.name)
        return None if counts is None else counts[place.number]

    def _samples(self, place: Place) -> Tensor:
        return self._sparsifier.packed_store.samples(place.name)[place.number]

    def _drops(self) -> bool:
        return self._drop and not self._sparsifier.trains_removed

    def _hook(self, models: list[nn.Module]) -> None:
        self._dense.hook(self._before_read)
        for kernel in self._kernels:
            kernel.hook()
        for module, known in self._known_lookups:
            self._handles += [
                module.register_forward_pre_hook(Hook(partial(self._before_forward, known))),
                module.register_state_dict_pre_hook(Hook(self._before_state_dict)),  # type: ignore[no-untyped-call]
            ]
        for model in models:
            self._handles.append(model.register_forward_pre_hook(Hook(self._before_model)))
            if averages(model):
                self._handles.append(Wrapped(model, "sync", self._before_average))
        # Parts of a model are loaded by themselves too, TorchRec's collections always, and then its
        # own hook is silent.
        parts = *models, *(module for module, _ in self._known_lookups), *self._dense.owners
        for module in {id(part): part for part in parts}.values():
            handle = module.register_load_state_dict_post_hook(Hook(self._after_load))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _remove_hooks(self, staying: Sequence[Kernel]) -> None:
        """Remove all hooks except those of the kernels that stay."""
        for handle in self._handles:
            handle.remove()
        for kernel in self._kernels:
            if kernel not in staying:
                kernel.unhook()
        self._dense.unhook()
        self._handles, self._kernels, self._known_lookups = [], [], []
        self._dense = DenseWeights([], [], self.clock)

    def _before_read(self) -> None:
        """Weights are about to be read: those that were loaded since are cleaned now, so that masks
        can be loaded before or after them."""
        if self._loaded:
            self._clean_all()

    @timed
    def _before_forward(self, known: list[Any], module: nn.Module, args: Any) -> None:
        if lookups_of(module) != known:  # on all ranks alike, with or without shards
            self._look_up(check=True)
        self._before_read()

    @timed
    def _before_model(self, module: nn.Module, args: Any) -> None:
        if self._dense.replaced:
            self._look_up(check=True)
        self._before_read()
        self._dense.clean()

    @timed
    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._clean()

    def _before_average(self, sync: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces a 2-D model's ``sync()``: what one copy has revived must not be averaged into
        the others."""
        self.settle()
        done = sync(*args, **kwargs)
        for kernel in self._kernels:
            kernel.mark_in_sync()
        return done

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        self._loaded = True
        for kernel in self._kernels:
            kernel.mark_all()


def settle_all(weights: Sequence[Tensor]) -> None:
    """:meth:`MaskEnforcer.settle` of all attached enforcers that mask some of these weights.
    Local."""
    for enforcer in list(_attached):
        masked = same_storage([weight for _, weight in enforcer._weights()])
        if any(masked(weight) for weight in weights):
            enforcer.settle()


def _check_not_compiled(models: Sequence[nn.Module], registered: Sequence[nn.Module]) -> None:
    """Refuse modules in which hooks do not run.

    Raises:
        ValueError: a module that holds registered weights is compiled, or one that it is a part of.
    """
    holding = set(registered)
    for model in models:
        for path, module in model.named_modules():
            compiled = (
                hasattr(module, "_orig_mod")
                or getattr(module, "_compiled_call_impl", None) is not None
            )
            if compiled and not holding.isdisjoint(module.modules()):
                raise ValueError(
                    f"The model is compiled{f' at {path!r}' if path else ''}: hooks do not run"
                    " inside torch.compile, so removed weights would come back unseen. Attach to"
                    " the model as it was before torch.compile."
                )
