"""Replacement of modules that hold tables: the common part of ``compact()`` and ``expand()``.

A :class:`Site` is a torch embedding or a TorchRec collection in the model. It has the fully
qualified names of its tables and implements, for its kind of module, which rows are stored, why
they can't be compacted, and how to build the compact or whole module that replaces it.

A :class:`Change` is a site, its new module, and the rows that move there. Either all changes are
put in place on all ranks, or none on any. Then the old tables are released, which can't be undone.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.compaction.moving import Steppers, StoredTables, Swapped, move_tables
from dist_sparse.compaction.stale import consume, consume_parameter
from dist_sparse.compaction.tables import (
    CompactCollection,
    CompactEmbedding,
    CompactEmbeddingBag,
    CompactTable,
    draw_rows,
    lookup_options,
    padding_id_of,
)
from dist_sparse.enforcer import FORWARD_HOOKS, GRADIENT_HOOKS, has_foreign_hooks
from dist_sparse.groups import Group
from dist_sparse.ids.row_index import RowIndex
from dist_sparse.tables.bases import bases_of_outputs
from dist_sparse.tables.decoded import refuse_decoded
from dist_sparse.tables.modules import (
    check_module,
    collection_of,
    loaded_torchrec,
    modules_by_path,
    torchrec_port,
    weight_name,
)
from dist_sparse.tables.protocols import Replacement, TableCollection
from dist_sparse.tables.shards import steps_in_backward

# Sites

# Flags of the stored rows of a module's tables, bool `(rows,)`, by the table's name in the module.
Kept = Mapping[str, Tensor]

# How many rows are looked through at once: their numbers take 8 MiB.
_SPAN = 1 << 20

# Where the classes are defined whose forward looks rows up and does nothing else.
_KNOWN = ("torch.nn.modules.sparse", "torchrec.", "dist_sparse.")

# Looked up by exact class: a subclass's forward may do more.
_COMPACT: Mapping[Any, Any] = {
    nn.Embedding: CompactEmbedding,
    nn.EmbeddingBag: CompactEmbeddingBag,
}
_WHOLE = {CompactEmbedding: nn.Embedding, CompactEmbeddingBag: nn.EmbeddingBag}


@dataclass(frozen=True, eq=False)
class _Site:
    """A module that holds tables.

    Args:
        path: of the module in the model.
        module: a torch embedding, or a TorchRec collection.
        tables: fully qualified names of the weights, by the table's name in the module, which is
            ``""`` for an embedding.
    """

    path: str
    module: nn.Module
    tables: dict[str, str]

    @property
    def replaced(self) -> nn.Module:
        """The module that a new one replaces."""
        return self.module

    @property
    def place(self) -> str:
        """The path of :attr:`replaced`."""
        return self.path

    @property
    def label(self) -> str:
        """The tables, for a message: up to 3 names, or the first and the number of others."""
        # A collection may have hundreds of tables.
        names = list(self.tables.values())
        return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"

    def indexes(self) -> dict[str, RowIndex]:
        """Return the index of each table that has already lost rows."""
        return {}

    def reasons_of_outputs(self) -> Iterator[str]:
        """Yield why another module with the same tables may return other outputs."""
        module = self.replaced
        kind = type(module)
        # Any other class is a subclass.
        if not kind.__module__.startswith(_KNOWN):
            yield (
                f"the {kind.__name__} at {self.place!r} is a subclass, and its forward may do more"
                " than look rows up; use torch's or TorchRec's own class, and do the rest in a"
                " module around it"
            )
        if has_foreign_hooks(module.modules(), FORWARD_HOOKS):
            yield (
                f"the {kind.__name__} at {self.place!r} has forward hooks, which may change its"
                " outputs; call remove() on their handles first"
            )


class EmbeddingSite(_Site):
    """An ``nn.Embedding`` or ``nn.EmbeddingBag``, compact already or not.

    Attributes:
        is_sharded: whether TorchRec shards its tables.
        has_one_width: whether its tables must have the same columns.
    """

    # One of four classes without a useful common base.
    module: Any
    is_sharded: ClassVar = False
    has_one_width: ClassVar = False

    @property
    def _weight(self) -> nn.Parameter:
        weight: nn.Parameter = self.module.get_parameter(weight_name(self.module))
        return weight

    @property
    def padding_id(self) -> int | None:
        """The id that lookups treat as padding."""
        return padding_id_of(self.module)

    def used_rows(self) -> dict[str, Tensor]:
        """Return which stored rows of each table have an id: bool ``(rows,)``."""
        return {"": torch.ones(len(self._weight), dtype=torch.bool)}

    def indexes(self) -> dict[str, RowIndex]:
        return {"": self.module.index} if isinstance(self.module, CompactTable) else {}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that plain optimizers step, by table."""
        return {"": self._weight}

    def refusal(self, model: nn.Module, narrowed: bool) -> str | None:
        """Return why it can't be compacted, or made narrower; None if it can. The label of the site
        is the subject of the sentence."""
        if steps_in_backward(self._weight):
            return (
                "has an optimizer that runs in the backward, and would not step a new parameter;"
                " use one with step()."
            )
        if narrowed and self.indexes():
            return "has lost rows already: narrow its table before it loses rows."
        # A removed row would be a zero, which may be the maximum; without its row it never is.
        if getattr(self.module, "mode", None) == "max":
            return "has mode='max', in which removed rows count as zeros: it can't be compacted."
        return None

    def compacted(
        self, kept: Kept, widths: Mapping[str, int], model: nn.Module, default_row: bool
    ) -> nn.Module:
        """Return an embedding with fewer columns, or with fewer rows; its weights are
        uninitialized."""
        old = self.module
        weight = self._weight.data
        if widths:
            # A table that loses columns keeps all rows, so ids stay row numbers.
            return self._table(type(old), len(weight), widths[""])
        index = RowIndex.of(kept[""].to(weight.device), default_row)
        # A table that was compacted before still takes the ids of the original one.
        for earlier in self.indexes().values():
            index = earlier.compose(index)
        stored = weight.new_empty(index.stored, weight.shape[1])
        # A compact table is replaced by one of its own class.
        table: nn.Module = _COMPACT.get(type(old), type(old))(old, stored, index)
        return table.train(old.training)

    def initial_bounds(self, table: str) -> None:
        """Return None: torch draws both kinds from the standard normal distribution."""

    def expanded(self) -> nn.Module:
        """Return an embedding with all rows of the original table, uninitialized."""
        old = self.module
        return self._table(_WHOLE[type(old)], old.index.rows, old.embedding_dim)

    def _table(self, kind: Any, rows: int, columns: int) -> nn.Module:
        """Return an uninitialized table of another shape, in which ids are row numbers."""
        table: nn.Module = kind(
            rows,
            columns,
            **lookup_options(self.module),
            padding_idx=self.padding_id,
            _weight=self._weight.new_empty(rows, columns),
        )
        return table.requires_grad_(self._weight.requires_grad).train(self.module.training)


class CollectionSite(_Site):
    """A collection of TorchRec's, sharded or not."""

    padding_id: ClassVar = None

    @property
    def collection(self) -> TableCollection:
        """The collection as it is now."""
        return collection_of(self.module)

    @property
    def whole(self) -> TableCollection | CompactCollection:
        """The collection that takes the ids of the original tables."""
        return self.collection

    @property
    def is_sharded(self) -> bool:
        """Whether TorchRec shards its tables."""
        return self.collection.is_sharded

    @property
    def has_one_width(self) -> bool:
        """Whether its tables must have the same columns, as in an EmbeddingCollection."""
        return not self.collection.pooled

    def used_rows(self) -> dict[str, Tensor]:
        """Return which stored rows of each table have an id: bool ``(rows,)``."""
        # Rows without an id, after the others, pad shards to blocks of equal size.
        used = {table.name: table.rows for table in self.whole.tables}
        used |= {table: index.stored for table, index in self.indexes().items()}
        tables = self.collection.tables
        return {table.name: torch.arange(table.rows) < used[table.name] for table in tables}

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that plain optimizers step, by table."""
        return self.collection.parameters()

    def refusal(self, model: nn.Module, narrowed: bool) -> str | None:
        """Return why it can't be compacted; None if it can. The label of the site is the subject of
        the sentence."""
        reason = loaded_torchrec().compact_refusal(model, self.module)
        return reason and f"can't be compacted: {reason}."

    def compacted(
        self, kept: Kept, widths: Mapping[str, int], model: nn.Module, default_row: bool
    ) -> nn.Module:
        """Return a compact collection, uninitialized."""
        # Not at the top: this module imports TorchRec.
        from dist_sparse.compaction.collections import compact_collection

        # A DistributedModelParallel gets ids on its own device.
        device: Any = getattr(model, "device", None)
        indexes = self.indexes()
        return compact_collection(
            self.module, self.replaced, indexes, kept, device, widths, default_row
        )

    def initial_bounds(self, table: str) -> tuple[float, float]:
        """Return the bounds of the uniform distribution of a table's initial weights.

        Raises:
            ValueError: the table has another initializer.
        """
        from dist_sparse.compaction.collections import initial_bounds

        return initial_bounds(self.replaced, table)

    def expanded(self) -> nn.Module:
        """Return a collection with all rows of the original tables, uninitialized."""
        from dist_sparse.compaction.collections import expanded_collection

        whole: nn.Module = expanded_collection(self.module, self.replaced)
        return whole


@dataclass(frozen=True, eq=False)
class CompactSite(CollectionSite):
    """The ``inner`` of a compact collection, ``outer``."""

    outer: CompactCollection

    @property
    def replaced(self) -> nn.Module:
        return self.outer

    @property
    def place(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def whole(self) -> CompactCollection:
        return self.outer

    def indexes(self) -> dict[str, RowIndex]:
        return self.outer.table_indexes()


Site = EmbeddingSite | CollectionSite


def sites_of(model: nn.Module) -> Iterator[Site]:
    """Yield every module that holds tables, with its path in the user's module."""
    torchrec = torchrec_port()
    inside = set[nn.Module]()
    modules = modules_by_path(model)
    for path, module in modules.items():
        # The embeddings inside a collection are not sites of their own.
        if module in inside:
            continue
        if torchrec and (collection := torchrec.collection(module)):
            inside.update(module.modules())
            outer = modules.get(path.rpartition(".")[0])
            tables = {table.name: collection.fqn(path, table.name) for table in collection.tables}
            if isinstance(outer, CompactCollection):
                yield CompactSite(path, module, tables, outer)
            else:
                yield CollectionSite(path, module, tables)
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            # The path of a model that is a table itself is empty.
            yield EmbeddingSite(path, module, {"": f"{path}.{weight_name(module)}".lstrip(".")})


# A module's parent, its name in the parent, and the module.
Place = tuple[nn.Module, str, Any]


def places_in(root: nn.Module, modules: Collection[nn.Module]) -> list[Place]:
    """Return all places of ``modules`` in ``root``. A module may have several."""
    return [
        (holder, name, child)
        for holder in root.modules()
        for name, child in holder._modules.items()
        if child in modules
    ]


def put(places: Iterable[Place], instead: Mapping[nn.Module, nn.Module]) -> None:
    """Put the replacement of each module, or the module itself if it has none, in its places."""
    for holder, name, old in places:
        setattr(holder, name, instead.get(old, old))


# Returns a ShardingPlan for the unsharded module with the new tables.
Planner = Callable[[nn.Module], Any]


@dataclass(eq=False)
class Change:
    """A module whose tables are replaced, and the rows that move. Mappings are by the table's name
    in the module.

    Args:
        site: the module.
        kept: which stored rows move, in their order.
        names: the names under which a sparsifier has registered the tables.
        placed: which rows of the new tables receive them; the first rows for a table that is
            missing here. Other rows start at 0, with fresh optimizer state.
        widths: remaining columns of tables that lose some.
        bounds: of the uniform distribution that the other rows are drawn from; None for the
            standard normal distribution. Missing: they stay 0.
        new: the module that replaces the old one, once it is built.
    """

    site: Site
    kept: Kept
    names: Mapping[str, str] = field(default_factory=dict)
    placed: Kept = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    new: Any = None

    @property
    def stored(self) -> nn.Module:
        """The new module that stores the tables."""
        return self.new.inner if isinstance(self.new, CompactCollection) else self.new

    @property
    def path(self) -> str:
        """The path of :attr:`stored`."""
        inside = ".inner" if self.stored is not self.new else ""
        return f"{self.site.place}{inside}".lstrip(".")


class Rebuild:
    """The replacement of modules that hold tables in a plain model.

    Args:
        model: the model.
        action: ``"compact"`` or ``"expand"``.
        optimizer: one or all optimizers of tables without a fused one; None if they are unknown.
        plan: as in :func:`~dist_sparse.compact`.
        world: all ranks.
    """

    def __init__(
        self, model: nn.Module, action: str, optimizer: Any, plan: Planner | None, world: Group
    ) -> None:
        self._model = model
        self._action = action
        self._plan = plan
        self._world = world
        self._steppers = Steppers(optimizer)
        self._optimizers_known = optimizer is not None

    @property
    def facts(self) -> dict[str, Any]:
        """Values that must be equal on all ranks. Objects are compared by their classes."""
        return {
            "model": type(self._model).__name__,
            "plan": self._plan is not None,
            "optimizer": self._steppers.kinds if self._optimizers_known else None,
        }

    def refuse(
        self, sites: Iterable[Site], narrowed: bool = False, default_row: bool = False
    ) -> None:
        """Refuse modules whose tables can't be replaced, or whose optimizers are unknown.

        Args:
            narrowed: whether any table loses columns.
            default_row: whether removed ids share a row.
        """
        # Before the loop: a model has thousands of parameters.
        holders = _holders_of_parameters(self._model)
        wrappers = self._wrappers()
        for site in sites:
            # Replaced modules would lose the hooks that decode.
            refuse_decoded([(site.label, weight) for weight in site.module.parameters()])
            reasons = [
                *self._reasons_of_behavior(site),
                *self._reasons(site, narrowed, wrappers),
                *self._reasons_of_tied_weights(site, holders),
                *(_reasons_against_a_default_row(site) if default_row else ()),
            ]
            if reasons:
                raise ValueError(f"{site.label} {reasons[0]}")

    def _reasons(self, site: Site, narrowed: bool, wrappers: Iterable[nn.Module]) -> Iterator[str]:
        """Yield reasons to refuse a site: of the module itself, and of what wraps it."""
        cant = f"it can't be {self._action}ed."
        if refusal := site.refusal(self._model, narrowed):
            yield refusal
        around = [type(each).__name__ for each in wrappers if site.module in each.modules()]
        if around:
            yield (
                f"is inside {' in '.join(around)}, which holds on to the old parameters:"
                f" {self._action} the module inside, and wrap the result again."
            )
        if not narrowed and bases_of_outputs(site.module):
            yield f"is rotated, and its output is turned back by a hook: {cant}"
        # expand() would lose the shared row; compact() would give it to newly removed ids.
        if any(index.default_row for index in site.indexes().values()):
            yield f"has default rows: {cant}"
        is_trained = any(weight.requires_grad for weight in site.parameters().values())
        if is_trained and not self._optimizers_known:
            yield (
                "is stepped by a plain optimizer, which must get the new parameters: pass"
                f" {self._action}(optimizer=...), or optimizer=() if there is none."
            )

    def _reasons_of_behavior(self, site: Site) -> Iterator[str]:
        """Yield reasons to refuse a site that does what a new module would not do."""
        cant = f"can't be {self._action}ed:"
        for reason in site.reasons_of_outputs():
            yield f"{cant} {reason}."
        module = site.replaced
        if has_foreign_hooks([*module.modules(), *module.parameters()], GRADIENT_HOOKS):
            yield (
                f"{cant} it has hooks on gradients, which new parameters would not have; call"
                f" remove() on their handles, and register them again after {self._action}()."
            )

    def _reasons_of_tied_weights(
        self, site: Site, holders: Mapping[Any, set[nn.Module]]
    ) -> Iterator[str]:
        """Yield the reason to refuse a site whose weights other modules hold too, if they do."""
        tied = set[nn.Module]()
        for parameter in site.parameters().values():
            tied |= holders[parameter]
        # An embedding inside a collection holds the parameter too.
        tied.difference_update(site.module.modules())
        # The other module needs a row for each id.
        if others := sorted(type(module).__name__ for module in tied):
            yield f"is the weight of other modules too ({others}): it can't be {self._action}ed."

    def _wrappers(self) -> list[nn.Module]:
        """Return the wrappers inside the model that hold references to old parameters."""
        kinds = (DistributedDataParallel, nn.DataParallel)
        return [each for each in self._model.modules() if isinstance(each, kinds)]

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the user's module in a model."""
        return model

    def _wrapped(self, root: nn.Module, changes: Iterable[Change]) -> nn.Module:
        """Wrap ``root``, the user's module, as the model is wrapped. Collective."""
        return root

    def _release_wrapper(self) -> None:
        """Release all that the model holds except the user's module."""

    def replace(
        self,
        changes: Sequence[Change],
        seed: int = 0,
        finish: Callable[[nn.Module], None] = lambda root: None,
    ) -> nn.Module:
        """Put the new modules in place, move rows into them, and release the old ones; return the
        new model. Collective; an exception on any rank is raised on all.

        Args:
            seed: of initial rows.
            finish: called with the user's module before anything is released.

        Raises:
            ValueError: a rank failed before that; the model is unchanged.
            RuntimeError: a rank failed after that.
        """
        result, stepped = self._put_in_place(changes, seed)
        try:
            with self._agreeing("releasing the old tables"):
                finish(self._unwrapped(result))
                for pair in stepped:
                    self._steppers.replace(pair)
                for change in changes:
                    release_site(change.site, self._action)
                self._release_wrapper()
        except Exception as fault:
            # Released tables can't be restored: no rank may continue with a model that others lost.
            raise RuntimeError(
                f"{self._action}() failed on every rank, and no model is left: resume from a"
                f" checkpoint. {fault}"
            ) from fault
        # Reference cycles keep FBGEMM's table batches, DDP and their hooks alive.
        gc.collect()
        return result

    def _agreeing(self, part: str) -> AbstractContextManager[Any]:
        return self._world.agreeing(f"{self._action}(), {part}")

    def _put_in_place(
        self, changes: Sequence[Change], seed: int
    ) -> tuple[nn.Module, list[Swapped]]:
        """Put the new modules in place and move rows into them. Return the new model and the
        parameters that plain optimizers step. Collective; if a rank fails, the model is
        unchanged."""
        replaced = {change.site.replaced: change.new for change in changes}
        places: list[Place] = []
        try:
            root = self._unwrapped(self._model)
            with self._agreeing("putting its tables in place"):
                places = places_in(root, replaced)
                put(places, replaced)
            result = self._wrapped(replaced.get(root, root), changes)
            stepped: list[Swapped] = []
            root = self._unwrapped(result)
            with self._world.jointly(f"{self._action}(), moving rows"):
                for change in changes:
                    # By path: TorchRec has replaced the new collection by a sharded one.
                    stored = root.get_submodule(change.path)
                    stepped += move_tables(
                        change.site.module,
                        stored,
                        change.kept,
                        change.placed,
                        self._steppers,
                        self._world,
                    )
                    _draw(change, stored, seed)
        except BaseException:
            # KeyboardInterrupt too: a notebook continues with the old model. Without a replacement,
            # put() restores the old modules.
            put(places, {})
            raise
        return result, stepped


class ShardedRebuild(Rebuild):
    """The replacement in a DistributedModelParallel, which is rebuilt around the user's module."""

    def _wrappers(self) -> list[nn.Module]:
        # The DDP inside is rebuilt.
        return []

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        return loaded_torchrec().unwrapped(model)

    def _wrapped(self, root: nn.Module, changes: Iterable[Change]) -> nn.Module:
        """Build a DistributedModelParallel like the model around ``root``. Collective.

        TorchRec's constructors allocate tables, which may fail on one rank alone, and then build
        DDP, which communicates: the other ranks would wait. So all ranks agree in between.
        """

        # The only call in between: DDP registers its attribute ``module`` before its first
        # collective.
        def on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
            if isinstance(module, DistributedDataParallel) and name == "module":
                with self._agreeing("before DDP"):
                    pass

        torchrec = loaded_torchrec()
        handle = register_module_module_registration_hook(on_registration)
        try:
            with self._agreeing("sharding its tables"):
                replacements = [
                    Replacement(each.site.module, each.site.path, each.stored, each.path)
                    for each in changes
                    if each.site.is_sharded
                ]
                plan = torchrec.compact_plan(self._model, root, replacements, self._plan)
                result = torchrec.reshard(self._model, root, plan)
            with self._agreeing("wrapping its layers"):
                torchrec.wrap_layers(result, self._model)
        finally:
            handle.remove()
        return result

    def _release_wrapper(self) -> None:
        # The old DDP's hooks are on parameters that the new model shares: after a forward without a
        # backward, they would run in the new model's next backward.
        layers = loaded_torchrec().dense_layers(self._model)
        if isinstance(layers, DistributedDataParallel):
            consume(layers, "This model", self._action)
        consume(self._model, "This model", self._action)


def rebuild_of(
    model: nn.Module, action: str, optimizer: Any, plan: Planner | None, world: Group
) -> Rebuild:
    """Return the rebuild of a DistributedModelParallel or a plain module; for the arguments see
    :class:`Rebuild`.

    Raises:
        ValueError: the model is not a module.
    """
    check_module(model)
    torchrec = torchrec_port()
    is_sharded = torchrec is not None and torchrec.is_sharded_model(model)
    kind = ShardedRebuild if is_sharded else Rebuild
    return kind(model, action, optimizer, plan, world)


def _reasons_against_a_default_row(site: Site) -> Iterator[str]:
    """Yield the reasons to refuse a default row in a site."""
    if site.padding_id is not None:
        yield "has a padding_idx, whose id would get the default row if its row was removed."
    # Ids removed earlier would still read zeros, ids removed now the default row.
    if site.indexes():
        yield "has already lost rows without a default row; it can't get one now."


def _holders_of_parameters(model: nn.Module) -> Mapping[Any, set[nn.Module]]:
    """Return the modules that hold each parameter directly, not in a child."""
    holders: defaultdict[Any, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        # Not named_parameters(): TorchRec's modules list their children's parameters as their own.
        for parameter in module._parameters.values():
            holders[parameter].add(module)
    return holders


def _draw(change: Change, stored: nn.Module, seed: int) -> None:
    """Draw the rows of new tables that received none."""
    located = StoredTables(stored, change.bounds, Steppers(None)).located
    for table, bounds in change.bounds.items():
        for rect, weight in located[table].shards:
            drawn = ~change.placed[table][rect.row : rect.row_end]
            # The row of the padding id stays zero.
            if change.site.padding_id is not None:
                drawn[change.site.padding_id] = False
            name = table or change.site.path
            for number, part in enumerate(torch.split(drawn, _SPAN)):
                places = part.nonzero().view(-1) + number * _SPAN
                draw_rows(weight, rect, places, places + rect.row, seed, name, bounds)


def release_site(site: Site, action: str) -> None:
    """Free the old tables of a module. Using a parameter that is still in some list, such as one
    for clipping, raises."""
    for name, parameter in list(site.module.named_parameters()):
        consume_parameter(parameter, f"{site.path}.{name}".lstrip("."), action)
    if isinstance(site, CollectionSite) and site.is_sharded:
        for used in (site.module, *site.collection.optimizers()):
            consume(used, "This table collection", action)
