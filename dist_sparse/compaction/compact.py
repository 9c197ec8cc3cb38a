"""`compact()`: replace the tables of a sparsified model by tables of their kept rows or columns.
`expand()`: the way back, in which rows move from the shards of a compact table to those of a whole
one on the same plan, chunk by chunk.

Both have three phases. No rank begins the next part of a phase before all have succeeded in this
one:

1. Check which rows and columns are kept, and whether all tables can be compacted. Nothing changes.
2. Build: compact modules replace the old ones in the user's module; weights and optimizer state of
   kept rows are moved bit for bit, table by table. A failure is undone.
3. Release: optimizers get the new parameters, and the old tables are freed. This can't be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from dist_sparse.checks import choice, integer
from dist_sparse.compaction.initial import draw_rows
from dist_sparse.compaction.kept_rows import kept_rows, sparsifier_of
from dist_sparse.compaction.moving import Steppers
from dist_sparse.compaction.replacing import (
    Change,
    Planner,
    refuse_sites,
    replace_tables,
    unwrapped,
)
from dist_sparse.compaction.sites import Kept, Site, sites_of
from dist_sparse.enforcer.enforcer import MaskEnforcer, refuse_masked
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.records import TableStats
from dist_sparse.rotation.outputs import move_bases
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.shards import Rect, ShardedData, narrow_width
from dist_sparse.training.sparsify import SparseTraining


def compact(
    model: nn.Module,
    sparse: SparseTraining | BaseDataSparsifier,
    *,
    optimizer: Any = None,
    plan: Planner | None = None,
    removed: Literal["zero", "default_row"] = "zero",
) -> nn.Module:
    """Return ``model`` with tables that store only kept rows or columns. Collective: every rank of
    the world must call it.

    Collections of TorchRec become
    :class:`~dist_sparse.compaction.collections.CompactEmbeddingBagCollection` or
    ``CompactEmbeddingCollection``; ``nn.Embedding`` and ``nn.EmbeddingBag`` become
    :class:`~dist_sparse.compaction.tables.CompactEmbedding` and ``CompactEmbeddingBag``. Weights
    and optimizer state of kept rows are moved bit for bit, with learning rates and step counts; all
    other parameters stay the same objects. The model's output does not change. It can be trained
    further, and sparsified and compacted again.

    ``model`` is consumed. A DistributedModelParallel is built again around the same module: use the
    returned one and its ``fused_optimizer``; the old one raises. ``sparse`` is detached, and its
    sparsifier forgets all tables. The memory of old tables is released, and
    computing with their parameters raises: rebuild pipelines, lists and combined optimizers that
    hold them.

    Reading ``weight`` of a table that lost rows raises too, because row numbers are not ids there:
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
            on validation data: it helps with ids seen in training, and can harm with new ones.

    Raises:
        ValueError: nothing is removed; a mask removes parts of rows; or a table or model is of a
            kind that can't be compacted. Or arguments differ between ranks, or any rank failed, out
            of memory for example. Raised on every rank; the model is unchanged.
        RuntimeError: a rank failed while old tables were released. Raised on every rank; no model
            is left.

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
    # Phase 1: check. Arguments are compared first: counting rows communicates over the groups of
    # the tables, where ranks with different arguments would wait for each other.
    with world.agreeing("compact()") as facts:
        choice("removed", removed, ("zero", "default_row"))
        default_row = removed == "default_row"
        sparsifier = sparsifier_of(sparse)
        if names := sparsifier.masks.plain.names:
            raise ValueError(f"Plain data can't be compacted: {names} are no tables of a model.")
        optimizers = _optimizers_of(sparsifier, optimizer)
        steppers = Steppers(optimizers)
        # Objects can't be compared between ranks; their kinds can.
        facts.update(removed=removed, model=type(model).__name__, plan=plan is not None)
        facts.update(tables=sparsifier.masks.tables.names)
        facts.update(optimizer=None if optimizers is None else steppers.kinds)
        if isinstance(sparse, SparseTraining):
            # Before any change: if warnings are errors, detach() would raise too late.
            sparse.warn_of_early_end()
    with world.agreeing("compact(), counting rows"):
        stats = {table.name: table for table in sparsifier.table_stats() if table.removed_blocks}
        kept = kept_rows(sparsifier)
    with world.agreeing("compact()"):
        # The width is rounded up to a multiple of 4: removed columns that stay must be zeros.
        sparsifier.masks.hooks.settle()
        widths = _widths(sparsifier, stats)
        reductions = _reductions(model, sparsifier, set(stats), widths, kept)
        sites = [reduction.site for reduction in reductions]
        refuse_sites(
            model,
            sites,
            "compact",
            optimizers_known=optimizers is not None,
            narrowed=bool(widths),
            default_row=default_row,
        )

    # Phase 2: build. The old tables are still there, so any failure leaves the model as it was.
    with world.agreeing("compact(), building its tables"):
        changes = []
        for each in reductions:
            new = each.site.compacted(each.kept, each.widths, model, default_row)
            changes.append(Change(each.site, new, each.kept))

    # Phase 3: release.
    def finish(result: nn.Module) -> None:
        _narrow_outputs(reductions, changes, result)
        _detach(sparse, sparsifier)

    return replace_tables(model, changes, steppers, plan, world, "compact", finish=finish)


@dataclass(frozen=True, eq=False)
class _Reduction:
    """A module to be compacted, and what its tables keep, by the table's name in the module.

    Args:
        site: the module.
        names: registered names; other tables are missing.
        kept: which stored rows are kept.
        widths: remaining columns; tables that keep all are missing.
    """

    site: Site
    names: dict[str, str]
    kept: Kept
    widths: dict[str, int]


# Phase 1: check


def _optimizers_of(sparsifier: BaseDataSparsifier, optimizer: Any) -> Any:
    """Return the optimizers that step tables that are not fused; None if they are unknown."""
    if optimizer is not None:
        return optimizer
    enforcer = sparsifier.masks.enforcer
    return enforcer.optimizers if isinstance(enforcer, MaskEnforcer) else None


def _widths(sparsifier: BaseDataSparsifier, stats: Mapping[str, TableStats]) -> dict[str, int]:
    """Return the remaining columns of rotated tables, a multiple of 4, as FBGEMM needs."""
    rotation = sparsifier.masks.rotation
    if rotation is None:
        return {}
    store = sparsifier.masks.tables
    widths: dict[str, int] = {}
    for group in rotation.groups:
        # Tables that are rotated together meet in dot products: they need the same columns. So one
        # table that has lost nothing makes its whole group keep all.
        most = max(_kept_columns(store, name, stats.get(name)) for name in group)
        width = narrow_width(most, store.find(group[0]).shape[1])
        widths |= dict.fromkeys(stats.keys() & group, width)
    return widths


def _kept_columns(store: PackedStore, name: str, stats: TableStats | None) -> int:
    """Return how many columns a rotated table keeps; without ``stats`` it has lost nothing."""
    if stats is None:
        return store.find(name).shape[1]
    return (stats.blocks - stats.removed_blocks) * store.table(name).block[1]


def _reductions(
    model: nn.Module,
    sparsifier: BaseDataSparsifier,
    removed: set[str],
    widths: Mapping[str, int],
    kept: Mapping[str, Tensor],
) -> list[_Reduction]:
    """Return what every module with a table in ``removed`` keeps.

    Args:
        removed: registered names of tables with removed rows or columns.
        widths: remaining columns of the rotated ones, by registered name.
        kept: which rows are kept, by registered name.
    """
    store = sparsifier.masks.tables
    located = store.locate()
    if not removed:
        raise ValueError("Nothing is removed yet, so there is nothing to compact.")
    _refuse_partial_rows(store, [located[name] for name in sorted(removed - set(widths))])
    # Another model may have tables of the same names.
    sparsified: set[nn.Module] = set()
    for source in store.sources:
        # The source of registered tensors has no model.
        sparsified.update(getattr(source, "model", nn.Module()).modules())
    by_fqn = {data.fqn: name for name, data in located.items()}
    found = []
    missing = set(removed)
    for site in sites_of(model):
        names = {table: by_fqn[fqn] for table, fqn in site.tables.items() if fqn in by_fqn}
        if site.module not in sparsified or removed.isdisjoint(names.values()):
            continue
        rows = _site_rows(site, names, kept)
        found.append(_Reduction(site, names, rows, _site_widths(site, names, widths)))
        missing.difference_update(names.values())
    if missing:
        raise ValueError(
            f"{sorted(missing)} are no embedding tables of this model: they can't be compacted."
        )
    return found


def _site_rows(site: Site, names: Mapping[str, str], kept: Mapping[str, Tensor]) -> Kept:
    """Return which stored rows of a module's tables are kept."""
    # A table that is not registered keeps all.
    rows = {table: torch.ones(count, dtype=torch.bool) for table, count in site.rows().items()}
    rows |= {table: kept[name] for table, name in names.items()}
    for table, index in site.indexes().items():
        # Shards are padded to equal blocks by rows without an id.
        rows[table][index.stored :] = False
    return rows


def _site_widths(site: Site, names: Mapping[str, str], widths: Mapping[str, int]) -> dict[str, int]:
    """Return the remaining columns of a module's narrower tables."""
    found = {table: widths[name] for table, name in names.items() if name in widths}
    if not found or not site.has_one_width:
        return found
    # TorchRec refuses an EmbeddingCollection of several widths.
    if others := [fqn for table, fqn in site.tables.items() if table not in found]:
        raise ValueError(
            f"{others} keep all columns, "
            "but tables of an EmbeddingCollection have one width: rotate all."
        )
    return dict.fromkeys(found, max(found.values()))


def _refuse_partial_rows(store: PackedStore, tables: Iterable[ShardedData]) -> None:
    """Refuse tables whose masks remove parts of rows."""
    for data in tables:
        height, width = store.table(data.name).block
        if height != 1 or width < data.shape[1]:
            raise ValueError(
                f"Table {data.name!r} has masks of blocks ({height}, {width}), and only whole "
                "rows can be compacted, (1, ROW), or columns of rotated tables: what a finer "
                "mask removes inside of kept rows would come back. export() stores such masks."
            )


# Phase 3: release


def _narrow_outputs(
    reductions: Iterable[_Reduction], changes: Iterable[Change], result: nn.Module
) -> None:
    """Have the compact modules of rotated tables turn back their narrower outputs."""
    root = unwrapped(result)
    for each, change in zip(reductions, changes, strict=True):
        widths = {each.names[table]: width for table, width in each.widths.items()}
        move_bases(each.site.module, root.get_submodule(change.path), root, widths)


def _detach(sparse: Any, sparsifier: BaseDataSparsifier) -> None:
    """Detach the enforcer and let the sparsifier forget all tables."""
    if isinstance(sparse, SparseTraining):
        sparse.detach()
    # A sparsifier may have an enforcer that was attached by hand.
    if isinstance(sparsifier.masks.enforcer, MaskEnforcer):
        sparsifier.masks.enforcer.detach()
    for name in sparsifier.masks.tables.names:
        sparsifier.masks.tables.drop(name)
        del sparsifier.data_groups[name]


# The way back

_Bounds: TypeAlias = tuple[float, float] | None
"""Of a uniform initializer; None: the standard normal distribution."""


def expand(
    model: nn.Module,
    *,
    optimizer: Any = None,
    plan: Planner | None = None,
    initial: Literal["zero", "init"] = "zero",
    seed: int = 0,
) -> nn.Module:
    """Return ``model`` with whole tables in the places of compact ones: the inverse of
    :func:`~dist_sparse.compact`. Collective: every rank of the world must call it.

    Weights and optimizer state of kept rows are moved bit for bit, with learning rates and step
    counts; a rank holds its shards and chunks of a few MB besides. Rows that were removed come back
    with fresh optimizer state. With ``initial="zero"`` the model's output does not change. All
    other parameters stay the same objects.

    ``model`` is consumed as compact() consumes its argument: use the returned model and its
    ``fused_optimizer``; old tables raise.

    Args:
        model: with compact tables: a DistributedModelParallel or a plain module. For a DDP module,
            pass the inner module, then wrap the result.
        optimizer: all optimizers that step tables that are not fused, one or a sequence: they hold
            the new parameters afterwards. ``()`` means there are none.
        plan: returns a ShardingPlan for the unsharded module with whole tables. None keeps sharding
            types, ranks and columns, and cuts the rows evenly.
        initial: what rows that come back start from: ``"zero"``, or ``"init"``, the distribution of
            the table's initializer (TorchRec's uniform one, or that of ``nn.Embedding``). They are
            the same on every sharding and number of ranks.
        seed: of ``initial="init"``.

    Raises:
        ValueError: no table is compact, a table has a default row, or a table or model is of a kind
            that can't be expanded. Or arguments differ between ranks, or any rank failed, out of
            memory for example. Raised on every rank; the model is unchanged.
        RuntimeError: a rank failed while old tables were released. Raised on every rank; no model
            is left.

    Example::

        >>> import torch
        >>> from dist_sparse import compact, expand, sparsify
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        >>> sparse = sparsify(model, optimizer, level=0.8, begin=0, end=0)
        >>> sparse.step()
        >>> masked = model[0].weight.detach().clone()
        >>> model = compact(model, sparse)
        >>> model = expand(model, optimizer=optimizer)
        >>> type(model[0]).__name__, bool((model[0].weight == masked).all())
        ('EmbeddingBag', True)
    """
    world = group_over(world_ranks())
    # Phase 1: check.
    with world.agreeing("expand()") as facts:
        choice("initial", initial, ("zero", "init"))
        integer("seed", seed, least=0)
        steppers = Steppers(optimizer)
        # Compact collections that keep all rows have nothing to bring back.
        sites = [site for site in sites_of(model) if site.indexes()]
        facts.update(initial=initial, seed=seed, plan=plan is not None)
        facts.update(model=type(model).__name__, tables=[site.label for site in sites])
        facts.update(optimizer=None if optimizer is None else steppers.kinds)
        if not sites:
            raise ValueError("No table of this model has lost rows, so there is nothing to expand.")
        for site in sites:
            refuse_masked([(site.label, weight) for weight in site.module.parameters()])
        refuse_sites(model, sites, "expand", optimizers_known=optimizer is not None)
        bounds = {site: _bounds(site) for site in sites} if initial == "init" else {}

    # Phase 2: build. The compact tables are still there, so any failure leaves the model as it was.
    with world.agreeing("expand(), building its tables"):
        changes = [Change(site, site.expanded(), *_moved_rows(site)) for site in sites]
    draw = _initializer(bounds, seed)
    return replace_tables(model, changes, steppers, plan, world, "expand", initialize=draw)


def _moved_rows(site: Site) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return which stored rows of a module move, and which rows of whole tables take them."""
    placed = {}
    if site.outer is not None:
        placed = {each.name: torch.ones(each.rows, dtype=torch.bool) for each in site.outer.tables}
    placed |= {table: index.kept().cpu() for table, index in site.indexes().items()}
    # Rows behind the kept ones pad shards.
    kept = {
        table: torch.arange(stored) < placed[table].count_nonzero()
        for table, stored in site.rows().items()
    }
    return kept, placed


# Initial rows


def _bounds(site: Site) -> dict[str, _Bounds]:
    """Return the initializer of each table that has lost rows."""
    return {table: site.initial_bounds(table) for table in site.indexes()}


def _initializer(
    bounds: Mapping[Site, Mapping[str, _Bounds]], seed: int
) -> Callable[[Change, nn.Module], None]:
    """Return a function that draws the rows that come back."""

    def draw(change: Change, stored: nn.Module) -> None:
        assert change.placed is not None
        for table, of_table in bounds.get(change.site, {}).items():
            for rect, weight in _shards(change.site, stored, table):
                back = ~change.placed[table][rect.row : rect.row_end]
                # Lookups give zeros for padding.
                padding = change.site.padding_id
                if padding is not None:
                    back[padding] = False
                places, name = back.nonzero().view(-1), table or change.site.path
                draw_rows(weight, rect, places, places + rect.row, seed, name, of_table)

    return draw


def _shards(site: Site, stored: nn.Module, table: str) -> Iterator[tuple[Rect, Tensor]]:
    """Yield this rank's part of a whole table, and where it is."""
    if site.is_sharded:
        found = collection_of(stored)
        for shard in found.locate(table, found.fqn("", table), table).shards:
            yield shard.rect, shard.tensor
        return
    # Of an unsharded module those that require no gradient too.
    holder = collection_of(stored).embeddings()[table] if table else stored
    weight = holder.get_parameter("weight")
    yield Rect(0, 0, *weight.shape), weight.data
