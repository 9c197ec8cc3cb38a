"""`MaskEnforcer`: every removed weight that a forward reads is exactly 0 while a model trains.

An optimizer revives what a mask has removed: a fused one inside every backward, in the rows of the
batch; a plain one in its step. Rows that a fused optimizer wrote are zeroed again just before a
lookup reads them (:mod:`~dist_sparse.enforcer.fused`). Weights that a plain optimizer steps are
zeroed right after the step (:mod:`~dist_sparse.enforcer.dense`). The cost grows with the batch.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_sparse.checks import choice
from dist_sparse.enforcer import Clock, Hook, Hooks, Wrapped, timed
from dist_sparse.enforcer.dense import (
    DenseWeights,
    MaskPlace,
    WeightState,
    model_of,
    packed_targets,
    plain_targets,
)
from dist_sparse.enforcer.fused import TableBatchHooks, lookups_of
from dist_sparse.masking.kept_scores import Written
from dist_sparse.messages import cut
from dist_sparse.optimizers import Known, State
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.masks import ATTACHED, NO_ENFORCER, Enforcer
from dist_sparse.tables.decoded import refuse_decoded
from dist_sparse.tables.memory import ByMemory, same_storage
from dist_sparse.tables.modules import batches_of, collections_of, torchrec_port
from dist_sparse.tables.shards import ShardedData
from dist_sparse.text import number_of


@dataclass(frozen=True)
class Walked:
    """The registered tables and the modules of their models, from one walk over each model.

    Args:
        located: tables by name, as they are stored now.
        modules: for each model all its modules, by path.
    """

    located: Mapping[str, ShardedData]
    modules: Mapping[nn.Module, Mapping[str, nn.Module]]

    @cached_property
    def paths(self) -> list[tuple[str, nn.Module]]:
        """The modules of all models, each with its path."""
        return [*chain.from_iterable(by_path.items() for by_path in self.modules.values())]

    @cached_property
    def shards(self) -> dict[MaskPlace, Tensor]:
        """This rank's shards by the places of their masks."""
        found = {}
        for name, data in self.located.items():
            for number, shard in enumerate(data.shards):
                found[MaskPlace(name, number)] = shard.tensor
        return found


class MaskEnforcer(Enforcer):
    """Keeps removed weights at zero in every forward. Never communicates, unless it finds that
    shards have moved.

    Where a fused optimizer writes the tables, ids of rows that are removed whole are dropped before
    a lookup or get the weight 0 in it: such rows get no gradient and stay zero, and their optimizer
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
        optimizers: the arguments of :meth:`attach`; empty when detached.
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

    def __init__(self, sparsifier: BaseDataSparsifier, optimizer_state: str = "keep") -> None:
        if not isinstance(sparsifier, BaseDataSparsifier):
            raise ValueError(
                f"Invalid sparsifier of type {type(sparsifier).__name__}: must be a data"
                " sparsifier."
            )
        self.clock = Clock()
        self._sparsifier = sparsifier
        self._reset = choice("optimizer_state", optimizer_state, ("keep", "reset")) == "reset"
        self.optimizers: tuple[Any, ...] = ()
        self._batches: list[TableBatchHooks] = []
        # The lookups of each sharded collection: a reshard replaces them.
        self._known_lookups: dict[nn.Module, list[nn.Module]] = {}
        # At most one: the weights that plain optimizers step.
        self._dense: list[DenseWeights] = []
        self._hooks = Hooks()
        # During a mask update: the state to reset, with the masks before the update.
        self._states_before: list[WeightState] = []
        # Whether weights were loaded since they were last cleaned.
        self._loaded = False
        # The weights whose record is lost, by name: an optimizer that stepped them is gone.
        self._lost: set[str] = set()

    def __repr__(self) -> str:
        names = number_of(len(self._sparsifier.data_groups), "name")
        return f"{type(self).__name__}({names}, {'attached' if self.attached else 'detached'})"

    @property
    def attached(self) -> bool:
        """Whether the hooks are attached."""
        return self._sparsifier.masks.enforcer is self

    @property
    def seconds(self) -> float:
        """See the class."""
        return self.clock.seconds

    def attach(self, *optimizers: Any) -> MaskEnforcer:
        """Attach the hooks and zero all removed weights. Collective if shards have moved since the
        last step.

        Call it between an optimizer step and the next forward: the backward of an earlier forward
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
                registered weight that requires a gradient; a module that holds registered weights
                is compiled; or a table has codes that another sparsifier's masks do not reach.
                Nothing was changed.
        """
        return self.attach_to(self._walk(), optimizers)

    def attach_to(self, walked: Walked, optimizers: Sequence[Any]) -> MaskEnforcer:
        """:meth:`attach` for a caller that has walked the models just now."""
        masks = self._sparsifier.masks
        if masks.enforcer is not NO_ENFORCER:
            raise ValueError("An enforcer is attached to this sparsifier: call its detach() first.")
        if not self._sparsifier.data_groups:
            raise ValueError(
                "Nothing is registered yet: call add_model() or add_data() before attach()."
            )
        try:
            # _attach_hooks() reads them; on an error the enforcer is as detached as before.
            self.optimizers = tuple(tree_leaves(optimizers))
            self._attach_hooks(walked)
        except BaseException:
            self._forget_weights()
            raise
        masks.enforcer = self
        ATTACHED.add(self)
        return self

    def detach(self) -> None:
        """Clean all dirty rows and remove the hooks: the model trains on as if it had never been
        attached. Does nothing if it is not attached."""
        if self.attached:
            try:
                self._clean()
            finally:
                # Even on an error: a detach() that always fails would leave the hooks forever.
                self._forget_weights()
                masks = self._sparsifier.masks
                masks.enforcer = NO_ENFORCER
                ATTACHED.discard(self)

    def _forget_weights(self) -> None:
        # A detached enforcer keeps no model alive.
        self._remove_hooks()
        self.optimizers = ()
        self._batches = []
        self._dense = []
        self._known_lookups = {}

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

    def accumulators(self) -> ByMemory[State]:
        """Return the sums of squared gradients that Adagrad keeps, and their initial value, by
        weight; see :class:`~dist_sparse.ImportanceSparsifier`."""
        return ByMemory([(each.weight, each.sums) for each in self._states() if each.sums])

    def records(self) -> ByMemory[Known]:
        """Return which rows of each registered weight a gradient has reached, or why that is
        unknown; see :func:`~dist_sparse.optimizers.records`."""
        return ByMemory(chain.from_iterable(part.records() for part in self._parts()))

    def states(self) -> ByMemory[list[Tensor]]:
        """Return all state that optimizers keep of each registered weight, live: with an element
        for each weight or for each row, or step counts."""
        found: ByMemory[list[Tensor]] = ByMemory()
        for each in self._states():
            # Several optimizers may step a weight.
            found.setdefault(each.weight, []).extend(state for state, _ in each.states)
        return found

    def written(self, reader: str = "scores") -> ByMemory[Written]:
        """Return the possibly written rows of weights, live: of tables with fused optimizers on a
        CPU, where every write is seen. Each reader has and clears its own."""
        return ByMemory(chain.from_iterable(batch.written(reader) for batch in self._batches))

    def begin_step(self) -> None:
        """Called by the sparsifier before a mask update."""
        # `seconds` excludes the sparsifier's step().
        spent = self.clock.seconds
        self._renew_if_stale()
        self._clean()
        self.clock.seconds = spent
        self._states_before = self._states_to_reset()

    def end_step(self) -> None:
        """Called by the sparsifier after a mask update."""
        # By the masks before the update too: blocks that come back start with fresh state.
        for state in [*self._states_before, *self._states_to_reset()]:
            state.reset_removed()
        self._states_before = []
        for part in self._parts():
            part.masks_updated()

    def check_rotation(self, names: Collection[str]) -> None:
        """Refuse to rotate weights with one value of optimizer state per element, unless this state
        is reset.

        Raises:
            ValueError: names them.
        """
        kept = {*names}.intersection(each.name for each in self._states() if each.by_element)
        if kept and not self._reset:
            raise ValueError(
                f"Tables {sorted(kept)} can't be rotated: their optimizer keeps element-wise state"
                ' in the old basis. Pass optimizer_state="reset", or use SGD or a row-wise'
                " optimizer."
            )

    def after_rotation(self, names: Collection[str]) -> None:
        """Reset the element-wise optimizer state of rotated weights."""
        for each in self._states():
            if each.name in names:
                each.reset_elements()

    def renew(self) -> None:
        """Find the weights again and zero removed ones, after masks or weights were replaced.
        Collective if shards have moved since the last step."""
        self._check_attached()
        self._attach_hooks(self._walk(), check=False)

    def _walk(self) -> Walked:
        """Walk the models of registered tables."""
        tables = self._sparsifier.masks.tables
        models = map(model_of, tables.sources)
        return Walked(tables.locate(), {model: dict(model.named_modules()) for model in models})

    def _check_attached(self) -> None:
        if not self.attached:
            raise RuntimeError("The enforcer is not attached: call attach(optimizer) first.")

    def _clean(self) -> None:
        """Clean dirty rows, except in collections that TorchRec has resharded: they were cleaned
        when it called their ``state_dict()``, before it moved anything."""
        self._before_read()
        # A collection that was resharded no longer uses the kernels that these hooks know.
        resharded = self._resharded()
        with torch.no_grad():
            for part in self._parts():
                if part.collection not in resharded:
                    part.clean()

    def _clean_all(self) -> None:
        """Zero removed weights wherever they are, dirty or not."""
        with torch.no_grad():
            for part in self._parts():
                part.clean_all()

    def _clean_loaded(self) -> None:
        """Clean all rows after a load; warn if it has revived removed weights."""
        self._loaded = False
        before = self._nonzero()
        self._clean_all()
        if revived := before - self._nonzero():
            warnings.warn(
                f"The masks zeroed {revived.total()} of the loaded weights, in"
                f" {cut(', '.join(map(repr, revived)), 100)}: this is not the saved model. Load the"
                " state of its sparsifier too, before the next forward.",
                stacklevel=2,
            )

    def _nonzero(self) -> Counter[str]:
        """Count non-zero weights by name, over all shards here."""
        counts: Counter[str] = Counter()
        for name, weight in self.weights():
            counts[name] += int(weight.count_nonzero())
        return counts

    def _renew_if_stale(self) -> None:
        """Find the weights again if some were replaced: kernels by
        ``DistributedModelParallel.reshard``, parameters by a load with ``assign=True``. Local."""
        if not self._replaced() and not self._resharded():
            return
        # Moving masks to their shards is collective, and the caller may be a single rank.
        walked = self._walk()
        if moved := self._sparsifier.masks.tables.moved(walked.located):
            raise ValueError(
                f"The shards of the tables {moved} have moved since their masks were last used: run"
                " a forward, step() or apply_masks() on every rank first."
            )
        self._attach_hooks(walked)

    def _resharded(self) -> list[nn.Module]:
        """Return the collections that TorchRec has resharded since hooks were attached."""
        known = self._known_lookups
        return [module for module in known if lookups_of(module) != known[module]]

    def mark_all(self) -> None:
        """Take any row of the tables with fused optimizers for written."""
        for batch in self._batches:
            batch.mark_all()

    def _replaced(self) -> bool:
        """Whether a model has replaced the storage of a weight that plain optimizers step."""
        return any(dense.replaced for dense in self._dense)

    def _parts(self) -> Sequence[DenseWeights | TableBatchHooks]:
        return [*self._batches, *self._dense]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the registered weights by name, live."""
        return chain.from_iterable(part.weights() for part in self._parts())

    def _states(self) -> Iterator[WeightState]:
        return chain.from_iterable(part.states() for part in self._parts())

    def _states_to_reset(self) -> list[WeightState]:
        """Return the optimizer state that a mask update resets, with the current masks."""
        return list(self._states()) if self._reset else []

    def _attach_hooks(self, walked: Walked, check: bool = True) -> None:
        """Find the registered weights, attach hooks to them and clean them. On an error, the hooks
        stay as they were.

        With ``check``, refuse the same weights and modules as :meth:`attach`: weights may have been
        replaced since.
        """
        tables = self._sparsifier.masks.tables
        # First: the other ranks may be waiting in it, whatever is refused below on this one.
        tables.reshard(walked.located)
        modules = [module for _, module in walked.paths]
        collections = list(collections_of(modules))
        fused = self._fused_tables(collections, walked.shards)
        # Plain optimizers step all shards that no fused optimizer writes.
        stepped = dict(walked.shards)
        for places in fused.values():
            for place in places.values():
                stepped.pop(place, None)
        targets = [
            *packed_targets(tables, modules, stepped),
            *plain_targets(self._sparsifier.masks.plain),
        ]
        dense = DenseWeights(targets, self.optimizers, self.clock, self._before_read, self._lost)
        if check:
            _check_not_compiled(walked.paths, [*collections, *dense.owners])
            dense.check_stepped({name: data.sharding for name, data in walked.located.items()})
            weights = [(place.name, weight) for place, weight in walked.shards.items()]
            weights += dense.weights()
            refuse_masked(weights, but=self)
            refuse_decoded(weights, but=self._sparsifier)
        # Only now: if something above is refused, the old hooks are still in place.
        for hooks, places in fused.items():
            hooks.moved_to(places)
        self._remove_hooks()
        # Without targets it would still inspect every step of every optimizer.
        self._batches = list(fused)
        self._dense = [dense] if targets else []
        self._known_lookups = {module: lookups_of(module) for module in collections}
        self._hook(list(walked.modules), dense.owners)
        self._before_read()
        self._clean_all()
        # As after a mask update: removed weights start with fresh state when they come back.
        for state in self._states_to_reset():
            state.reset_removed()

    def _fused_tables(
        self, collections: Iterable[nn.Module], shards: Mapping[MaskPlace, Tensor]
    ) -> dict[TableBatchHooks, dict[int, MaskPlace]]:
        """Return the hooks of each batch with registered tables, and the places of the tables'
        masks, by number in the batch. Batches without registered tables get no hooks."""
        # A batch that is still in use keeps its dirty rows and its pending backwards.
        known = {hooks.module: hooks for hooks in self._batches}
        places = ByMemory([(weight, place) for place, weight in shards.items()])
        found = {}
        for collection, batch in batches_of(collections):
            registered = {}
            for table, weight in enumerate(batch.weights()):
                if place := places.get(weight):
                    registered[table] = place
            if registered:
                hooks = known.get(batch.module) or TableBatchHooks(
                    batch, collection, self._sparsifier, self.clock
                )
                found[hooks] = registered
        return found

    def _hook(self, models: list[nn.Module], owners: list[nn.Module]) -> None:
        # Before a forward, collections check whether they were resharded, models whether weights
        # were replaced, and batches clean the rows that they read.
        for part in self._parts():
            part.hook()
        for module in self._known_lookups:
            self._hooks.add(
                module.register_forward_pre_hook(Hook(self._before_forward)),
                module.register_state_dict_pre_hook(Hook(self._before_state_dict)),  # type: ignore[no-untyped-call]
            )
        torchrec = torchrec_port()
        for model in models:
            self._hooks.add(model.register_forward_pre_hook(Hook(self._before_model)))
            if torchrec is not None and torchrec.averages(model):
                self._hooks.add(Wrapped(model, "sync", self._before_average))
        # Not on the models alone: a part that is loaded by itself, as TorchRec always loads its
        # collections, does not run the hooks of the model around it.
        for module in dict.fromkeys([*models, *self._known_lookups, *owners]):
            handle = module.register_load_state_dict_post_hook(Hook(self._after_load))  # type: ignore[no-untyped-call]
            self._hooks.add(handle)

    def _remove_hooks(self) -> None:
        for part in self._parts():
            part.unhook()
        self._hooks.remove()

    def _before_read(self) -> None:
        """Clean loaded weights. Not in the load itself: masks may be loaded after the weights. Not
        before the next forward finds tables that have moved."""
        if self._loaded and not self._resharded():
            self._clean_loaded()

    @timed
    def _before_forward(self, module: nn.Module, *_: Any) -> None:
        # True on all ranks or on none, with or without shards: what follows is collective.
        if lookups_of(module) != self._known_lookups[module]:
            self._attach_hooks(self._walk())
        self._before_read()

    @timed
    def _before_model(self, *_: Any) -> None:
        # Not in the hooks of the weights' modules, which know only the replaced weights.
        if self._replaced():
            self._attach_hooks(self._walk())
        self._before_read()
        for dense in self._dense:
            dense.clean()

    @timed
    def _before_state_dict(self, *_: Any) -> None:
        self._clean()

    def _before_average(self, sync: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Clean before a 2-D model's ``sync()``, which would average revived weights of one copy
        into the others."""
        self.settle()
        done = sync(*args, **kwargs)
        # Torch has counted the writes of sync(), but an average of masked copies is masked.
        for batch in self._batches:
            batch.note_clean_write()
        return done

    def _after_load(self, *_: Any) -> None:
        # It holds values of the weights before the load.
        self._sparsifier.masks.forget_update()
        self._loaded = True
        # Masks may be loaded after weights: nothing is zeroed before the next read.
        self.mark_all()


def settle_all(weights: Sequence[Tensor]) -> None:
    """Settle every attached enforcer that masks some of these weights. Local."""
    # A list: weak references may die during the loop.
    for enforcer in list(ATTACHED):
        if _masked_by(enforcer, weights):
            enforcer.settle()


def _masked_by(enforcer: Enforcer, weights: Sequence[Tensor]) -> list[int]:
    """Return the indices of the weights that share memory with weights that an enforcer masks."""
    find = same_storage(weights)
    return [i for _, masked in enforcer.weights() for i in find(masked)]


def refuse_masked(
    weights: Sequence[tuple[str, Tensor]],
    but: object = None,
    how: str = "call detach() first, on the earlier result of sparsify() or on the MaskEnforcer"
    " attached to them.",
) -> None:
    """Refuse weights, by name, that an attached enforcer other than ``but`` masks; ``how`` ends the
    message.

    Raises:
        ValueError: one of the weights is masked.
    """
    tensors = [weight for _, weight in weights]
    masked: list[int] = []
    for enforcer in set(ATTACHED) - {but}:
        masked += _masked_by(enforcer, tensors)
    if masked:
        # The first one: the set has another order on each rank.
        name, _ = weights[min(masked)]
        raise ValueError(f"The weights of {name!r} are already sparsified: {how}")


def _check_not_compiled(
    paths: Iterable[tuple[str, nn.Module]], registered: Iterable[nn.Module]
) -> None:
    """Refuse modules in which hooks do not run.

    Raises:
        ValueError: a module that holds registered weights is compiled, or is part of a compiled
            module.
    """
    holding = set(registered)
    for path, module in paths:
        # torch.compile(module) wraps it; module.compile() replaces its call in place.
        compiled = getattr(module, "_orig_mod", module._compiled_call_impl)
        if compiled is not None and not holding.isdisjoint(module.modules()):
            raise ValueError(
                f"The model is compiled{f' at {path!r}' if path else ''}: hooks do not run inside"
                " torch.compile. Attach to the original model."
            )
