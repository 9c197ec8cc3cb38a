"""`compact()`: from a sparsified model to one that stores kept rows, or columns, only, in training.

It has three phases, and every rank agrees on the end of each step before the next one begins:

1. Check: which rows and columns are kept, and whether all can be compacted. Nothing changes.
2. Build: compact modules take the places of the old ones in the user's module; weights and
   optimizer state of kept rows move, bit for bit and table by table. A failure is undone.
3. Release: optimizers get the new parameters, and the old tables are freed. This can't be undone.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.checks import choice
from dist_sparse.compaction.consumed import consume, consume_parameter
from dist_sparse.compaction.kept_rows import kept_rows, sparsifier_of
from dist_sparse.compaction.moving import Stepped, Steppers, move_collection
from dist_sparse.compaction.sites import (
    CollectionSite,
    Kept,
    Site,
    dmp_port,
    replace_modules,
    sites_of,
)
from dist_sparse.compaction.tables import cut
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.groups import Group, group_over, world_ranks
from dist_sparse.records import TableStats
from dist_sparse.rotation.outputs import is_turned, move_bases
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.protocols import Replacement, TorchRecPort
from dist_sparse.tables.shards import ShardedData
from dist_sparse.tables.sizes import narrow_width
from dist_sparse.training.sparsify import SparseTraining

__all__ = ["Removed", "compact"]

Removed: TypeAlias = Literal["zero", "default_row"]
"""What removed ids give."""

Planner: TypeAlias = Callable[[nn.Module], Any]
"""Returns a ShardingPlan for the compact, unsharded module."""


def compact(
    model: nn.Module,
    sparse: SparseTraining | BaseDataSparsifier,
    *,
    optimizer: Any = None,
    plan: Planner | None = None,
    removed: Removed = "zero",
) -> nn.Module:
    """Return ``model`` with tables that store only kept rows or columns. Collective: every rank of
    the world must call it.

    Collections of TorchRec become
    :class:`~dist_sparse.compaction.collections.CompactEmbeddingBagCollection` or
    ``CompactEmbeddingCollection``, ``nn.Embedding`` and ``nn.EmbeddingBag``
    :class:`~dist_sparse.compaction.tables.CompactEmbedding` and ``CompactEmbeddingBag``. Weights
    and optimizer state of kept rows are moved bit for bit, with learning rates and step counts; all
    other parameters stay the same objects. The model's output does not change. It can be trained
    further, and sparsified and compacted again.

    ``model`` is consumed. A DistributedModelParallel is built again around the same module: use the
    one that is returned, and its ``fused_optimizer``; the old one raises. ``sparse`` is detached,
    and its sparsifier registers nothing any more. The memory of old tables is released, and
    computing with their parameters raises: make again what holds them, such as pipelines,
    optimizers that combine ``fused_optimizer`` with others, and lists.

    Reading ``weight`` of a table that lost rows raises too, because its rows are no ids any more:
    use :meth:`~dist_sparse.compaction.tables.CompactEmbedding.full_weight`.

    Args:
        model: the sparsified model: a DistributedModelParallel or a plain module. For a DDP module,
            pass the inner module, then wrap the result.
        sparse: what :func:`~dist_sparse.sparsify` returned, or a sparsifier. Its masks must remove
            whole rows, or columns of rotated tables: these become narrower, by columns whose number
            is a multiple of 4.
        optimizer: all optimizers that step tables that are not fused, one or a sequence: they hold
            the new parameters afterwards. None uses those that the enforcer is attached to; ``()``
            means there are none.
        plan: returns a ShardingPlan for the compact, unsharded module, whose collections of kept
            rows are called ``inner``. None keeps sharding types, ranks and columns, and cuts the
            kept rows evenly.
        removed: ``"zero"``: removed ids give zeros. ``"default_row"``: all removed ids of a table
            share one row, which is 0 at first, is trained as any other, and is served. Measure it
            on validation data: it helps where ids are those of training, and can harm where they
            are new.

    Raises:
        ValueError: nothing is removed; a mask removes parts of rows; or a table or model is of a
            kind that can't be compacted. Or arguments differ between ranks, or any rank failed, out
            of memory for example. It is raised on every rank, and the model is as it was.
        RuntimeError: a rank failed while old tables were released: on every rank, and no model is
            left.

    Example::

        >>> import torch
        >>> from dist_sparse import compact, sparsify
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        >>> sparse = sparsify(model, optimizer, level=0.8, begin=0, end=0)
        >>> sparse.step()
        >>> before = model(torch.arange(100).view(20, 5))
        >>> model = compact(model, sparse)
        >>> model[0].stored_weight.shape, bool(
        ...     (model(torch.arange(100).view(20, 5)) == before).all()
        ... )
        (torch.Size([20, 8]), True)
    """
    world = group_over(world_ranks())
    # Phase 1: check. Ranks that were called differently must not begin to count rows, which
    # communicates over the tables' groups.
    with world.agreeing("compact()") as facts:
        default_row = choice("removed", removed, ("zero", "default_row")) == "default_row"
        sparsifier = sparsifier_of(sparse)
        _refuse_plain_data(sparsifier)
        optimizers = _optimizers_of(sparsifier, optimizer)
        facts.update(removed=removed, **_arguments(model, sparsifier, optimizers, plan))
        if isinstance(sparse, SparseTraining):
            # Now: where warnings are errors, one while it is detached came too late.
            sparse.warn_of_early_end()
    with world.agreeing("compact(), counting rows"):
        stats = {table.name: table for table in sparsifier.table_stats() if table.removed_blocks}
        flags = kept_rows(sparsifier)
    with world.agreeing("compact()"):
        if sparsifier.masks.enforcer is not None:
            # Removed columns up to a multiple of 4 stay: they must be zeros.
            sparsifier.masks.enforcer.settle()
        steppers = Steppers(optimizers or ())
        widths = _widths(sparsifier, stats)
        reductions = _reductions(model, sparsifier, set(stats), widths, flags)
        sites = [each.site for each in reductions]
        _refuse_sites(model, sites, optimizers is not None, bool(widths), default_row)

    # Phase 2: build. The old tables are still there, so any failure leaves the model as it was.
    with world.agreeing("compact(), building its tables"):
        made = {
            each: each.site.compacted(each.kept, each.widths, model, default_row)
            for each in reductions
        }
    result, stepped = _put_in_place(model, made, steppers, plan, world)

    # Phase 3: release.
    try:
        with world.agreeing("compact(), releasing the old tables"):
            _move_bases(made, result)
            _detach(sparse, sparsifier)
            for pair in stepped:
                steppers.replace(pair)
            for site in sites:
                _release(site)
            if (torchrec := dmp_port(model)) is not None:
                _consume_model(model, torchrec)
    except ValueError as fault:
        # What is released can't be had back, so no rank may go on with a model that others lack.
        raise RuntimeError(
            "compact() failed on every rank, and no model is left: resume from a checkpoint."
            f" {fault}"
        ) from fault
    # Table batches, DDP and their hooks are cycles.
    gc.collect()
    return result


@dataclass(frozen=True, eq=False)
class _Reduction:
    """What a module loses.

    Args:
        site: the module.
        names: of its registered tables, by the table's name in the module.
        kept: by table, which of its stored rows are kept.
        widths: by table, the columns that are left, of tables that lose some.
    """

    site: Site
    names: dict[str, str]
    kept: Kept
    widths: dict[str, int]


def _users_module(model: nn.Module) -> nn.Module:
    """The module without the DistributedModelParallel around it."""
    torchrec = dmp_port(model)
    return model if torchrec is None else torchrec.unwrapped(model)


# Phase 1


def _refuse_plain_data(sparsifier: BaseDataSparsifier) -> None:
    if names := sparsifier.masks.plain.names:
        raise ValueError(f"Plain data can't be compacted: {names} are no tables of a model.")


def _optimizers_of(sparsifier: BaseDataSparsifier, optimizer: Any) -> Sequence[Any] | None:
    """The optimizers that step tables themselves, None if they are unknown."""
    if optimizer is not None:
        return optimizer if isinstance(optimizer, Sequence) else [optimizer]
    enforcer = sparsifier.masks.enforcer
    return enforcer.optimizers if isinstance(enforcer, MaskEnforcer) else None


def _arguments(
    model: nn.Module,
    sparsifier: BaseDataSparsifier,
    optimizers: Sequence[Any] | None,
    plan: Planner | None,
) -> dict[str, Any]:
    """The arguments of compact() that must be equal on all ranks."""
    # Ranks may hold different objects, but they must be of the same kinds.
    return {
        "model": type(model).__name__,
        "tables": sparsifier.masks.tables.names,
        "optimizer": None if optimizers is None else Steppers(optimizers).kinds,
        "plan": plan is not None,
    }


def _widths(sparsifier: BaseDataSparsifier, stats: Mapping[str, TableStats]) -> dict[str, int]:
    """The columns that are left of each rotated table, a multiple of 4, as FBGEMM needs."""
    rotation, store = sparsifier.masks.rotation, sparsifier.masks.tables

    def left(name: str) -> int:
        # A table that has lost nothing keeps all columns, and so does its whole group.
        if name not in stats:
            return store.find(name).shape[1]
        return (stats[name].blocks - stats[name].removed_blocks) * store.block(name)[1]

    widths: dict[str, int] = {}
    if rotation is None:
        return widths
    for group in rotation.groups:
        # Tables that are rotated together meet in dot products: they need the same columns.
        width = narrow_width(max(map(left, group)), store.find(group[0]).shape[1])
        widths |= dict.fromkeys(stats.keys() & group, width)
    return widths


def _reductions(
    model: nn.Module,
    sparsifier: BaseDataSparsifier,
    removed: set[str],
    widths: Mapping[str, int],
    flags: Mapping[str, Tensor],
) -> list[_Reduction]:
    """What each module loses that holds a table with removed rows or columns."""
    store = sparsifier.masks.tables
    located = store.locate()
    _refuse_blocks(store, [located[name] for name in sorted(removed - set(widths))])
    if not removed:
        raise ValueError("Nothing is removed yet, so there is nothing to compact.")
    # Another model may have tables of the same names. Tensors that were registered have no model.
    known: set[nn.Module] = set()
    for source in store.sources:
        known.update(getattr(source, "model", nn.Module()).modules())
    by_fqn = {data.fqn: name for name, data in located.items()}
    found, missing = [], set(removed)
    for site in sites_of(model):
        names = {table: by_fqn[fqn] for table, fqn in site.tables.items() if fqn in by_fqn}
        # Beside a table with removed rows, others of the module keep all of theirs.
        if site.module not in known or removed.isdisjoint(names.values()):
            continue
        kept, columns = _kept(site, names, flags), _narrowed(site, names, widths)
        found.append(_Reduction(site, names, kept, columns))
        missing.difference_update(names.values())
    if missing:
        raise ValueError(
            f"{sorted(missing)} are no embedding tables of this model: they can't be compacted."
        )
    return found


def _kept(site: Site, names: Mapping[str, str], flags: Mapping[str, Tensor]) -> Kept:
    """Which stored rows of each table are kept: all of a table that is not registered."""
    kept = {table: torch.ones(rows, dtype=torch.bool) for table, rows in site.rows().items()}
    kept |= {table: flags[name] for table, name in names.items()}
    for table, index in site.indexes().items():
        # Shards are padded to equal blocks by rows that no id has.
        kept[table][index.stored :] = False
    return kept


def _narrowed(site: Site, names: Mapping[str, str], widths: Mapping[str, int]) -> dict[str, int]:
    """The columns that are left of tables that lose some, by the table's name in the module."""
    found = {table: widths[name] for table, name in names.items() if name in widths}
    if not found or not site.has_one_width:
        return found
    # TorchRec refuses an EmbeddingCollection of several widths.
    if others := [fqn for table, fqn in site.tables.items() if table not in found]:
        raise ValueError(
            f"{others} keep all columns, but tables of an EmbeddingCollection have one width:"
            " rotate all."
        )
    return dict.fromkeys(found, max(found.values()))


def _refuse_blocks(store: PackedStore, tables: Iterable[ShardedData]) -> None:
    """Refuse tables whose masks remove parts of rows."""
    for data in tables:
        height, width = store.block(data.name)
        if height != 1 or width < data.shape[1]:
            raise ValueError(
                f"Table {data.name!r} has masks of blocks ({height}, {width}), and only whole rows"
                " can be compacted, (1, ROW), or columns of rotated tables: what a finer mask"
                " removes inside of kept rows would come back. export() stores such masks."
            )


def _refuse_sites(
    model: nn.Module,
    sites: Iterable[Site],
    optimizers_known: bool,
    narrowed: bool,
    default_row: bool,
) -> None:
    """Refuse modules that can't be compacted, or whose optimizers are unknown.

    Args:
        optimizers_known: whether the caller knows all optimizers that are not fused.
        narrowed: whether any table loses columns.
        default_row: whether removed ids share a row.
    """
    # Once: a model has thousands of parameters.
    users = _users_of_parameters(model)
    for site in sites:
        _refuse_wrapper_inside(site, model)
        if is_turned(site.module) and not narrowed:
            raise ValueError(
                f"{site.label} is rotated, and its output is turned back by a hook: it can't be"
                " compacted."
            )
        if reason := site.refusal(model, narrowed):
            raise ValueError(f"{site.label} {reason}")
        for parameter in site.parameters().values():
            _refuse_tied_weight(site, users[parameter])
            if parameter.requires_grad and not optimizers_known:
                raise ValueError(
                    f"{site.label} is stepped by a plain optimizer, which must get the new"
                    " parameters: pass compact(optimizer=...), or optimizer=() if there is none."
                    " An attached enforcer knows them."
                )
        _refuse_default_row(site, default_row)


def _users_of_parameters(model: nn.Module) -> Mapping[nn.Parameter, list[nn.Module]]:
    """Which modules of a model hold each parameter themselves."""
    users: defaultdict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        # named_parameters() of TorchRec's modules has those of their children too.
        for parameter in filter(torch.is_tensor, module._parameters.values()):
            users[parameter].append(module)
    return users


def _refuse_wrapper_inside(site: Site, model: nn.Module) -> None:
    """A wrapper around a part of the model can't be built again, as that of a DMP is."""
    if dmp_port(model) is not None:
        return
    for path, wrapper in model.named_modules():
        wraps = isinstance(wrapper, (DistributedDataParallel, nn.DataParallel))
        if wraps and site.module in wrapper.modules():
            place = f" at {path!r}" if path else ""
            raise ValueError(
                f"{site.label} is inside {type(wrapper).__name__}{place}, which holds on to the old"
                " parameters: compact the module inside, and wrap the result again."
            )


def _refuse_tied_weight(site: Site, users: Iterable[nn.Module]) -> None:
    """A layer that shares a table's weight has a row for each id."""
    # In a collection, an embedding inside of it holds the parameter.
    own = set(site.module.modules())
    others = [type(user).__name__ for user in users if user not in own]
    if others:
        raise ValueError(
            f"{site.label} is the weight of other modules too ({others}): it can't be compacted."
        )


def _refuse_default_row(site: Site, default_row: bool) -> None:
    """Refuse a default row where there is one, or where ids would have it that are padding."""
    indexes = site.indexes().values()
    if any(index.default_row for index in indexes):
        raise ValueError(
            f"{site.label} has default rows, and tables with a default row can't lose rows again."
        )
    if not default_row:
        return
    if site.padding_id is not None:
        raise ValueError(
            f"{site.label} has a padding_idx, whose id would get the default row if its row was"
            " removed."
        )
    # The ids that were removed before would have no row, and the others that of the default.
    if indexes:
        raise ValueError(
            f"{site.label} has already lost rows without a default row; it can't get one now."
        )


# Phase 2


def _put_in_place(
    model: nn.Module,
    made: Mapping[_Reduction, nn.Module],
    steppers: Steppers,
    plan: Planner | None,
    world: Group,
) -> tuple[nn.Module, list[Stepped]]:
    """Return the compact model, whose tables hold the kept rows, and what plain optimizers step in
    it. Collective.

    An exception on any rank is raised on all, and the model is as it was.
    """
    torchrec, root = dmp_port(model), _users_module(model)
    places = {each.site.replaced: new for each, new in made.items()}
    try:
        with world.agreeing("compact(), putting its tables in place"):
            result = replace_modules(root, places)
            sharding = None
            if torchrec is not None:
                sharding = _sharding_plan(torchrec, model, result, made, plan)
        if torchrec is not None and sharding is not None:
            result = _sharded(torchrec, model, result, sharding, world)
        stepped: list[Stepped] = []
        with world.agreeing("compact(), moving rows"):
            for each, new in made.items():
                stepped += _moved(each, new, steppers)
    # An interrupted notebook goes on with the old model too.
    except BaseException:
        # The old modules still have their tables.
        replace_modules(root, dict(zip(places.values(), places, strict=True)))
        raise
    return result, stepped


def _sharding_plan(
    torchrec: TorchRecPort,
    model: nn.Module,
    root: nn.Module,
    made: Mapping[_Reduction, Any],
    plan: Planner | None,
) -> Any:
    """The plan of a DistributedModelParallel around ``root``, which has the compact modules."""
    replacements = []
    for each, new in made.items():
        site = each.site
        if site.is_sharded:
            path = f"{site.place}.inner".lstrip(".")
            replacements.append(Replacement(site.module, site.path, new.inner, path))
    return torchrec.compact_plan(model, root, replacements, plan)


def _sharded(
    torchrec: TorchRecPort, model: nn.Module, root: nn.Module, plan: Any, world: Group
) -> nn.Module:
    """Build a DistributedModelParallel like ``model`` around ``root``. Collective."""

    def agree() -> None:
        with world.agreeing("compact(), before DDP"):
            pass

    # DDP communicates while it is built: a rank that has failed before must meet the others there.
    with world.agreeing("compact(), sharding its tables"), _before_ddp(agree):
        result = torchrec.reshard(model, root, plan)
    with world.agreeing("compact(), wrapping its layers"), _before_ddp(agree):
        torchrec.wrap_layers(result, model)
    return result


@contextmanager
def _before_ddp(agree: Callable[[], None]) -> Iterator[None]:
    """Call ``agree`` in the block whenever DDP is about to be built, just before its first
    collective.

    TorchRec builds it in constructors, after work that may fail on one rank alone, such as
    allocating tables. DDP sets its attribute ``module`` before it communicates.
    """

    def registering(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and name == "module":
            agree()

    handle = register_module_module_registration_hook(registering)
    try:
        yield
    finally:
        handle.remove()


def _moved(each: _Reduction, new: Any, steppers: Steppers) -> list[Stepped]:
    """Move optimizer state, of a sharded collection weights too. Collective over its ranks."""
    if each.site.is_sharded:
        return move_collection(each.site.module, new.inner, each.kept, steppers)
    stepped, parameters = [], each.site.parameters(new)
    for table, old in each.site.parameters().items():
        rows, columns = parameters[table].shape
        states = {
            key: cut(state, each.kept[table], rows, columns)
            for key, state in steppers.states(old).items()
        }
        stepped.append(Stepped(old, parameters[table], states))
    return stepped


# Phase 3


def _move_bases(made: Mapping[_Reduction, nn.Module], result: nn.Module) -> None:
    """Have the modules of rotated tables turn outputs back that have fewer columns now."""
    root = _users_module(result)
    for each, new in made.items():
        widths = {each.names[table]: width for table, width in each.widths.items()}
        move_bases(each.site.module, getattr(new, "inner", new), root, widths)


def _detach(sparse: Any, sparsifier: BaseDataSparsifier) -> None:
    """Detach the enforcer, and have the sparsifier forget all tables."""
    if isinstance(sparse, SparseTraining):
        sparse.detach()
    # A sparsifier may have an enforcer that was attached by hand.
    if isinstance(sparsifier.masks.enforcer, MaskEnforcer):
        sparsifier.masks.enforcer.detach()
    for name in sparsifier.masks.tables.names:
        sparsifier.masks.tables.drop(name)
        del sparsifier.data_groups[name]


def _release(site: Site) -> None:
    """Free the old tables of a module. Lists of them, for clipping for example, raise when they are
    used."""
    for name, parameter in list(site.module.named_parameters()):
        consume_parameter(parameter, f"{site.path}.{name}".lstrip("."))
    if isinstance(site, CollectionSite) and site.is_sharded:
        for used in (site.module, *site.collection.optimizers()):
            consume(used, "This table collection")


def _consume_model(model: nn.Module, torchrec: TorchRecPort) -> None:
    """Release everything that a DistributedModelParallel holds, but for the user's module: using it
    raises from now on.

    A forward whose backward has not come waits in the hooks of its DDP, which end with it: they
    would take the next backward of the compact model for theirs.
    """
    layers = torchrec.dense_layers(model)
    if isinstance(layers, DistributedDataParallel):
        consume(layers, "This model")
    consume(model, "This model")
