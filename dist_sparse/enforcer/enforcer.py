"""`MaskEnforcer`: every removed weight that a forward reads is exactly 0 while a model trains.

An optimizer revives what a mask has removed: a fused one inside every backward, in the rows of the
batch; a plain one in its step. Those rows are zeroed again just before a lookup reads them
(:mod:`~dist_sparse.enforcer.fused`), and what plain optimizers step right after the step
(:mod:`~dist_sparse.enforcer.dense`), at a cost that grows with the batch.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dist_sparse.enforcer import Clock, Hook, Wrapped, timed
from dist_sparse.enforcer.dense import (
    DenseWeights,
    Masked,
    Modules,
    Place,
    State,
    Stepped,
    packed_targets,
    plain_targets,
    reset_state,
    same_storage,
)
from dist_sparse.enforcer.fused import (
    TableBatchHooks,
    collections_of,
    lookups_of,
)
from dist_sparse.groups import cut
from dist_sparse.masking.kept_scores import Written
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.masks import Enforcer
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.modules import collection_of, torchrec_port
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import number_of

_attached: weakref.WeakSet[MaskEnforcer] = weakref.WeakSet()
"""All that are attached, so that no weight gets two masks."""


@dataclass(frozen=True)
class Walked:
    """The registered tables and the modules of their models, as walks over the models found them.

    Args:
        located: tables by name, as they are stored now.
        modules: all modules by path, by model.
    """

    located: Mapping[str, ShardedData]
    modules: Modules

    @classmethod
    def of(cls, tables: PackedStore) -> Walked:
        """Walk the models of registered tables."""
        models = [source.model for source in tables.sources if hasattr(source, "model")]
        modules = {model: dict(model.named_modules()) for model in models}
        return cls(tables.locate() if tables else {}, modules)


class MaskEnforcer(Enforcer):
    """Keeps removed weights at zero in every forward. Never communicates, unless it finds that
    shards have moved.

    Where a fused optimizer writes the tables, ids of rows that are removed whole are dropped before
    a lookup or weigh nothing in it: such rows get no gradient and stay zero, and their optimizer
    state stays as it is. All other removed weights are revived by a backward and zeroed again: from
    then until the next lookup, the rows that the backward wrote are *dirty*. They are cleaned
    before a lookup reads them, in a mask update before scoring, in ``get_data`` and ``state_dict``
    of the sparsifier, in ``state_dict()`` of the model, before the ``sync()`` of a DMPCollection,
    and in :meth:`settle`. Weights that plain optimizers step are clean as soon as ``step()``
    returns.

    Args:
        sparsifier: everything registered with it is enforced.
        optimizer_state: the state of removed weights: ``"keep"`` leaves it to the optimizers;
            ``"reset"`` sets it to its initial value at every mask update, before and after, so that
            a block that comes back starts with fresh state.

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
    ) -> None:
        if not isinstance(sparsifier, BaseDataSparsifier):
            raise ValueError(
                f"Invalid sparsifier of type {type(sparsifier).__name__}: must be a data"
                " sparsifier."
            )
        if optimizer_state not in ("keep", "reset"):
            raise ValueError(f"Invalid {optimizer_state=}: must be one of ('keep', 'reset').")
        self.clock = Clock()
        self._sparsifier = sparsifier
        self._reset = optimizer_state == "reset"
        self._optimizers: tuple[Any, ...] | None = None
        self._batches: list[TableBatchHooks] = []
        # The lookups of sharded collections, which a reshard replaces.
        self._known_lookups: dict[nn.Module, list[nn.Module]] = {}
        # Weights that plain optimizers step, if there are any.
        self._dense: list[DenseWeights] = []
        self._handles: list[RemovableHandle | Wrapped] = []
        # Masks before the last update, by the address of the weights, where it resets optimizer
        # state.
        self._before: dict[int, BlockMask | Tensor] = {}
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
        return self.attach_to(None, optimizers)

    def attach_to(self, walked: Walked | None, optimizers: Sequence[Any]) -> MaskEnforcer:
        """:meth:`attach` for a caller that has walked the models just now; None walks them."""
        masks = self._sparsifier.masks
        if masks.enforcer is not None:
            which = "The" if self.attached else "Another"
            raise ValueError(
                f"{which} enforcer is attached to this sparsifier: call its detach() first."
            )
        if not self._sparsifier.data_groups:
            raise ValueError(
                "Nothing is registered yet: call add_model() or add_data() before attach()."
            )
        flat: list[Any] = []
        for each in optimizers:
            flat += each if isinstance(each, (list, tuple)) else [each]
        try:
            # _look_up() reads them; on an error the enforcer is as detached as before.
            self._optimizers = tuple(flat)
            self._look_up(check=True, walked=walked)
        except BaseException:
            self._remove_hooks(())
            self._optimizers = None
            raise
        masks.enforcer = masks.hooks = self
        _attached.add(self)
        return self

    def detach(self) -> None:
        """Clean all dirty rows and remove the hooks: the model trains on as if it had never been
        attached. Does nothing if it is not attached."""
        if self.attached:
            try:
                self._clean()
            finally:
                # Even on an error: a detach() that always fails would leave the hooks forever.
                self._remove_hooks(())
                self._optimizers = None
                masks = self._sparsifier.masks
                masks.enforcer, masks.hooks = None, Enforcer()
                _attached.discard(self)

    def __enter__(self) -> MaskEnforcer:
        self._check_attached()
        return self

    def __exit__(self, *_: object) -> None:
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
        self._renew_if_stale()
        self._clean()

    def accumulators(self) -> dict[int, State]:
        """Return the sums of squared gradients that Adagrad keeps, and their initial value, by the
        address of the weights; see :class:`~dist_sparse.ImportanceSparsifier`."""
        return {each.weight.data_ptr(): each.sums for each in self._states() if each.sums}

    def states(self) -> dict[int, list[Tensor]]:
        """Return all state that optimizers keep of registered weights, live, by the address of the
        weights: with an element for each weight, or for each row, or step counts."""
        found: dict[int, list[Tensor]] = defaultdict(list)
        for each in self._states():
            # Several optimizers may step a weight.
            found[each.weight.data_ptr()] += [state for state, _ in each.states]
        return found

    def written(self, reader: str = "scores") -> dict[int, Written]:
        """Return the possibly written rows, live, by the address of the weights: of tables of fused
        optimizers on a CPU, whose writes are all seen. Each reader has and clears its own."""
        return dict(chain.from_iterable(batch.written(reader) for batch in self._batches))

    def begin_step(self) -> None:
        """Called by the sparsifier before a mask update."""
        # `seconds` excludes the sparsifier's step().
        spent = self.clock.seconds
        self._renew_if_stale()
        self._clean()
        self.clock.seconds = spent
        if self._reset:
            self._before = self._masks()

    def end_step(self) -> None:
        """Called by the sparsifier after a mask update."""
        # The update has zeroed newly removed weights in sharded tables, not in plain data.
        with torch.no_grad():
            for dense in self._dense:
                dense.clean_all()
        if self._reset:
            # Of blocks that were removed before: those that come back start with fresh state.
            self._reset_states(self._before)
            self._reset_states(self._masks())
        for batch in self._batches:
            batch.masks_updated()

    def check_rotation(self, names: Collection[str]) -> None:
        """Refuse to rotate weights whose optimizer keeps state for each element, unless it is to be
        reset.

        Raises:
            ValueError: names them.
        """
        kept = sorted({each.name for each in self._states() if each.by_element} & {*names})
        if kept and not self._reset:
            raise ValueError(
                f"Tables {kept} can't be rotated: their optimizer keeps element-wise state in the"
                ' old basis. Pass optimizer_state="reset", or use SGD or a row-wise optimizer,'
                " whose state stays valid."
            )

    def after_rotation(self, names: Collection[str]) -> None:
        """Set the optimizer state for each element of rotated weights to its initial value."""
        rotated = (each for each in self._states() if each.by_element and each.name in names)
        for each in rotated:
            for state, initial in each.states:
                if state.shape == each.weight.shape:
                    state.data.fill_(initial)

    def renew(self) -> None:
        """Look everything up again and zero what is removed, after masks or weights were replaced.
        Collective if shards have moved since the last step."""
        self._check_attached()
        self._look_up()

    def _check_attached(self) -> None:
        if not self.attached:
            raise RuntimeError("The enforcer is not attached: call attach(optimizer) first.")

    def _clean(self) -> None:
        """Clean dirty rows, except in collections that TorchRec has resharded: it calls their
        ``state_dict`` before it does, so that they were cleaned then."""
        if self._loaded:
            # A load may have written any row of any table.
            self._clean_all()
            return
        # Kernels of a collection that was resharded are not those that its forward will use.
        resharded = self._resharded()
        with torch.no_grad():
            for part in self._parts():
                if part.collection not in resharded:
                    part.clean()

    def _clean_all(self) -> None:
        """Clean everything, and warn if a load has revived removed weights."""
        loaded, self._loaded = self._loaded, False
        before = self._nonzero() if loaded else Counter()
        with torch.no_grad():
            for part in self._parts():
                part.clean_all()
        if loaded and (revived := before - self._nonzero()):
            _warn_of_revived(revived)

    def _nonzero(self) -> Counter[str]:
        """Count non-zero weights by name, over all shards here."""
        counts: Counter[str] = Counter()
        for each in self.masked():
            counts[each.name] += int(each.weight.count_nonzero())
        return counts

    def _renew_if_stale(self) -> None:
        """Look everything up again if something was replaced. The caller may be a single rank, so
        masks must not move.

        Stale are batches after ``DistributedModelParallel.reshard``, and parameters after a load
        with ``assign=True``.
        """
        if not self._replaced() and not self._resharded():
            return
        # To bring masks to shards that have moved is collective.
        tables = self._sparsifier.masks.tables
        if moved := tables.moved(tables.locate()):
            raise ValueError(
                f"The shards of the tables {moved} have moved since their masks were last used: run"
                " a forward, step() or apply_masks() on every rank first."
            )
        self._look_up(check=True)

    def _resharded(self) -> list[nn.Module]:
        """The collections that TorchRec has resharded since the last look."""
        known = self._known_lookups
        return [module for module in known if lookups_of(module) != known[module]]

    def _replaced(self) -> bool:
        """Whether models hold other memory for a weight by now."""
        return any(dense.replaced for dense in self._dense)

    def _parts(self) -> Sequence[DenseWeights | TableBatchHooks]:
        return [*self._batches, *self._dense]

    def masked(self) -> Iterator[Masked]:
        """Yield the registered weights and their masks."""
        return chain.from_iterable(part.masked() for part in self._parts())

    def _states(self) -> Iterator[Stepped]:
        return chain.from_iterable(part.states() for part in self._parts())

    def _masks(self) -> dict[int, BlockMask | Tensor]:
        """The current masks by the address of the weights, to be kept over an update, which edits
        dense ones."""
        found = {}
        for _, weight, mask in self.masked():
            found[weight.data_ptr()] = mask.clone() if isinstance(mask, Tensor) else mask
        return found

    def _reset_states(self, masks: Mapping[int, BlockMask | Tensor]) -> None:
        with torch.no_grad():
            for each in self._states():
                mask = masks.get(each.weight.data_ptr())
                if mask is not None:
                    reset_state(mask, each.states)

    def _look_up(self, check: bool = False, walked: Walked | None = None) -> None:
        """Find the registered weights, hook and clean them. On an error, hooks are as they were.

        With ``check``, refuse what :meth:`attach` refuses: weights may have been replaced, also for
        a single forward.
        """
        tables = self._sparsifier.masks.tables
        if walked is None:
            walked = Walked.of(tables)
        # First: the other ranks may be waiting in it, whatever is refused below on this one.
        tables.reshard(walked.located)
        modules = chain.from_iterable(each.values() for each in walked.modules.values())
        collections = list(collections_of(modules))
        fused = self._fused_tables(collections, walked.located)
        known = set(chain.from_iterable(places.values() for _, places in fused))
        packed = packed_targets(tables, walked.modules, walked.located, known)
        targets = [*packed, *plain_targets(self._sparsifier)]
        dense = DenseWeights(targets, self.optimizers, self.clock, self._before_read)
        if check:
            _check_not_compiled(walked.modules, [*collections, *dense.owners])
            dense.check_stepped()
            weights = [(target.name, target.weight) for target in targets]
            for name, data in walked.located.items():
                weights += [(name, shard.tensor) for shard in data.shards]
            refuse_masked(weights, but=self)
        # Last: nothing of the old hooks is lost if something above is refused.
        for hooks, places in fused:
            hooks.moved_to(places)
        batches = [hooks for hooks, _ in fused]
        self._remove_hooks(batches)
        self._batches, self._dense = batches, [dense] if targets else []
        self._known_lookups = {module: lookups_of(module) for module in collections}
        self._hook(list(walked.modules))
        self._clean_all()
        if self._reset:
            # As a mask update does: what is removed has no history.
            self._reset_states(self._masks())

    def _fused_tables(
        self, collections: Sequence[nn.Module], located: Mapping[str, ShardedData]
    ) -> list[tuple[TableBatchHooks, dict[int, Place]]]:
        """Return the hooks of batches with registered tables, and the places of their masks. All
        other batches get no hooks, and cost nothing."""
        # A batch that stays keeps its hooks, since a backward may be on its way to them.
        attached = {hooks.module: hooks for hooks in self._batches}
        places: dict[tuple[int, torch.Size], Place] = {}
        for name, data in located.items():
            for number, (_, weight) in enumerate(data.shards):
                places[weight.data_ptr(), weight.shape] = Place(name, number)
        found = []
        for collection in collections:
            for batch in collection_of(collection).batches():
                # By the number of the table in the batch.
                registered: dict[int, Place] = {}
                for table, weight in enumerate(batch.weights()):
                    if place := places.get((weight.data_ptr(), weight.shape)):
                        registered[table] = place
                if registered:
                    hooks = attached.get(batch.module)
                    if hooks is None:
                        hooks = TableBatchHooks(batch, collection, self._sparsifier, self.clock)
                    found.append((hooks, registered))
        return found

    def _hook(self, models: list[nn.Module]) -> None:
        # Before a forward: collections look whether they were resharded, models whether weights
        # were replaced, batches clean the rows that they read.
        for part in self._parts():
            part.hook()
        for module in self._known_lookups:
            self._handles += [
                module.register_forward_pre_hook(Hook(self._before_forward)),
                module.register_state_dict_pre_hook(Hook(self._before_state_dict)),  # type: ignore[no-untyped-call]
            ]
        torchrec = torchrec_port()
        for model in models:
            self._handles.append(model.register_forward_pre_hook(Hook(self._before_model)))
            if torchrec is not None and torchrec.averages(model):
                self._handles.append(Wrapped(model, "sync", self._before_average))
        # Parts of a model are loaded by themselves too, TorchRec's collections always, and then its
        # own hook is silent.
        owners = chain.from_iterable(dense.owners for dense in self._dense)
        for module in dict.fromkeys([*models, *self._known_lookups, *owners]):
            handle = module.register_load_state_dict_post_hook(Hook(self._after_load))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _remove_hooks(self, staying: Sequence[TableBatchHooks]) -> None:
        """Remove all hooks except those on the batches that stay."""
        for handle in self._handles:
            handle.remove()
        for part in self._parts():
            if part not in staying:
                part.unhook()
        self._handles, self._batches, self._dense, self._known_lookups = [], [], [], {}

    def _before_read(self) -> None:
        """Weights are about to be read: those that were loaded since are cleaned now, so that masks
        can be loaded before or after them."""
        if self._loaded:
            self._clean_all()

    @timed
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        # On all ranks alike, with or without shards.
        if lookups_of(module) != self._known_lookups[module]:
            self._look_up(check=True)
        self._before_read()

    @timed
    def _before_model(self, module: nn.Module, args: Any) -> None:
        # Here, not in the owners' hooks: those hold the weights that were replaced.
        if self._replaced():
            self._look_up(check=True)
        self._before_read()
        for dense in self._dense:
            dense.clean()

    @timed
    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._clean()

    def _before_average(self, sync: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces a 2-D model's ``sync()``: what one copy has revived must not be averaged into
        the others."""
        self.settle()
        done = sync(*args, **kwargs)
        # Torch has counted these writes, but averages of masked copies are masked.
        for batch in self._batches:
            batch.mark_in_sync()
        return done

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        if self._sparsifier.masks.undo is not None:
            # What was kept belongs to the weights of before.
            self._sparsifier.masks.undo.forget()
        self._loaded = True
        # Masks may be loaded after weights, so that nothing is zeroed before the next read.
        for batch in self._batches:
            batch.mark_all()


def settle_all(weights: Sequence[Tensor]) -> None:
    """:meth:`MaskEnforcer.settle` of all attached enforcers that mask some of these weights.
    Local."""
    # A copy: weak references may die during the loop.
    for enforcer in list(_attached):
        masked = _masked_by(enforcer)
        if any(map(masked, weights)):
            enforcer.settle()


def _masked_by(enforcer: MaskEnforcer) -> Callable[[Tensor], list[int]]:
    """Return a function that lists the weights of an enforcer that share memory with a tensor."""
    return same_storage([each.weight for each in enforcer.masked()])


def _warn_of_revived(revived: Counter[str]) -> None:
    warnings.warn(
        f"The model was loaded with {revived.total()} non-zero weights that the masks remove, in"
        f" {cut(', '.join(map(repr, revived)), 100)}; they are 0 now, so this is not the model that"
        " was saved. Load the state of the sparsifier that was saved with it too, before the next"
        " forward.",
        stacklevel=3,
    )


def refuse_masked(weights: Sequence[tuple[str, Tensor]], but: MaskEnforcer | None = None) -> None:
    """Refuse weights, by name, that an attached enforcer masks, other than ``but``.

    Raises:
        ValueError: some are.
    """
    for other in _attached:
        if other is but:
            continue
        theirs = _masked_by(other)
        for name, weight in weights:
            if theirs(weight):
                raise ValueError(
                    f"The weights of {name!r} are already sparsified: call detach() first, on"
                    " the earlier result of sparsify() or on the MaskEnforcer attached to"
                    " them."
                )


def _check_not_compiled(modules: Modules, registered: Sequence[nn.Module]) -> None:
    """Refuse modules in which hooks do not run.

    Raises:
        ValueError: a module that holds registered weights is compiled, or one that it is a part of.
    """
    holding = set(registered)
    for by_path in modules.values():
        for path, module in by_path.items():
            # torch.compile(module) wraps it; module.compile() replaces its call in place.
            wrapped = hasattr(module, "_orig_mod")
            compiled = wrapped or getattr(module, "_compiled_call_impl", None) is not None
            if compiled and not holding.isdisjoint(module.modules()):
                raise ValueError(
                    f"The model is compiled{f' at {path!r}' if path else ''}: hooks do not run"
                    " inside torch.compile, so removed weights would come back unseen. Attach to"
                    " the model as it was before torch.compile."
                )
