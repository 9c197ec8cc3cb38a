"""`compact()` replaces the tables of a sparsified model with tables of their kept rows or columns.
`expand()` is the inverse: it replaces compact tables with whole ones.

Both have three phases. All ranks must succeed in one part of a phase before any begins the next:

1. Check which rows and columns are kept, and whether all tables can be replaced. Nothing changes.
2. Build: new modules are made here. :meth:`~dist_sparse.compaction.replacing.Rebuild.replace` puts
   them in place of the old ones, and moves weights and optimizer state of kept rows bit for bit,
   table by table. A failure is undone.
3. Release, by the same method: optimizers get the new parameters, and the old tables are freed.
   This can't be undone.
"""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from dist_sparse.checks import choice, integer
from dist_sparse.compaction.moving import kept_rows
from dist_sparse.compaction.replacing import Change, Planner, Site, rebuild_of, sites_of
from dist_sparse.enforcer.enforcer import MaskEnforcer, refuse_masked
from dist_sparse.groups import world_group
from dist_sparse.optimizers import Optimizers
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.bases import move_bases
from dist_sparse.tables.shards import Block, Located, ShardedData, narrow_width
from dist_sparse.training.sparsify import SparseTraining, sparsifier_of


def compact(
    model: nn.Module,
    sparse: SparseTraining | BaseDataSparsifier,
    *,
    optimizer: Optimizers | None = None,
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

    Compact collections refuse some batches that training accepts, on the rank whose batch it is:
    batch sizes that differ between features, inverse indices, ids after the last bag, weights that
    are not floating, and weights of means, which TorchRec divides differently by sharding.

    ``model`` is consumed. A DistributedModelParallel is built again around the same module: use the
    returned one and its ``fused_optimizer``; the old one raises. ``sparse`` is detached, and its
    sparsifier forgets all tables. The memory of old tables is released, and computing with their
    parameters raises: rebuild pipelines, lists and combined optimizers that hold them.

    Reading ``weight`` of a table that lost rows raises too, because row numbers are not ids there:
    use :meth:`~dist_sparse.compaction.tables.CompactEmbedding.full_weight`.

    Args:
        model: the sparsified model: a DistributedModelParallel or a plain module. For a DDP module,
            pass the inner module, then wrap the result.
        sparse: what :func:`~dist_sparse.sparsify` returned, or a sparsifier. Its masks must remove
            whole rows, or columns of rotated tables: these become narrower, by a multiple of 4
            columns.
        optimizer: one or all optimizers that step tables without a fused optimizer; they get the
            new parameters. None uses the optimizers that the enforcer is attached to; ``()`` means
            there are none.
        plan: returns a ShardingPlan for the compact, unsharded module, whose collections of kept
            rows are called ``inner``. None keeps sharding types, ranks and columns, and cuts the
            kept rows evenly.
        removed: ``"zero"``: removed ids give zeros. ``"default_row"``: all removed ids of a table
            share one row, which is 0 at first, is trained as any other, and is served. Measure it
            on validation data: it helps with ids seen in training, and can harm with new ones.

    Raises:
        ValueError: nothing is removed; a mask removes parts of rows; a table has codes; or a table
            or model is of a kind that can't be compacted. Or arguments differ between ranks, or any
            rank failed, out of memory for example. Raised on every rank; the model is unchanged.
        RuntimeError: a rank failed while old tables were released. Raised on every rank; no model
            is left. A rank that fails inside DDP's constructor raises alone: the others wait for
            the timeout of the model's process group.

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
    world = world_group()
    # 1. Check. Arguments are compared over the world first: counting rows communicates over the
    # groups of the tables, where ranks with different arguments would wait for each other.
    with world.agreeing("compact()") as facts:
        default_row = choice("removed", removed, ("zero", "default_row")) == "default_row"
        sparsifier = sparsifier_of(sparse)
        masks = sparsifier.masks
        plain = masks.plain.names
        if plain:
            raise ValueError(f"Plain data can't be compacted: {plain} are not tables of a model.")
        if optimizer is None:
            # An attached enforcer knows the optimizers.
            optimizer = getattr(masks.enforcer, "optimizers", None)
        rebuild = rebuild_of(model, "compact", optimizer, plan, world)
        facts.update(rebuild.facts, removed=removed, tables=masks.tables.names)
        if isinstance(sparse, SparseTraining):
            # Not in detach() below: where warnings are errors, this raises before any change.
            sparse.warn_of_early_end()
    with world.jointly("compact(), counting rows"):
        located = masks.tables.current_for("compact()")
        kept = kept_rows(sparsifier, located)
        gone = _removed_blocks(masks.tables)
    with world.agreeing("compact()"):
        # Widths are rounded up to a multiple of 4, so removed columns may stay: they must be zeros.
        masks.enforcer.settle()
        losing = {name for name, blocks in gone.items() if blocks}
        if not losing:
            raise ValueError("Nothing is removed yet, so there is nothing to compact.")
        widths = _widths(sparsifier, located, gone)
        changes = _plan_changes(model, sparsifier, located, losing, widths, kept)
        rebuild.refuse([change.site for change in changes], bool(widths), default_row)

    # 2. Build. The old tables are still in place, so any failure leaves the model unchanged.
    with world.agreeing("compact(), building its tables"):
        for change in changes:
            change.new = change.site.compacted(change.kept, change.widths, model, default_row)

    def finish(root: nn.Module) -> None:
        # The hooks that rotate outputs back move to the narrower tables.
        for change in changes:
            move_bases(change.site.module, root.get_submodule(change.path), root, widths)
        _detach(sparse, sparsifier)

    # replace() moves the rows, calls finish(), and then, 3., releases the old tables.
    return rebuild.replace(changes, finish=finish)


def _removed_blocks(tables: PackedStore) -> dict[str, int]:
    """Return how many blocks the masks remove over all ranks, by table. Collective."""
    here = {name: [tables.table(name).removed_here] for name in tables.names}
    return {name: blocks for name, [blocks] in tables.summed(here).items()}


def _widths(
    sparsifier: BaseDataSparsifier, located: Located, gone: Mapping[str, int]
) -> dict[str, int]:
    """Return the remaining columns of the rotated tables that lose some: a multiple of 4, as FBGEMM
    needs, or all.

    Args:
        gone: removed blocks over all ranks, by table.
    """
    widths: dict[str, int] = {}
    store = sparsifier.masks.tables
    for group in sparsifier.masks.rotated_groups:
        # Outputs of tables that are rotated together meet in dot products, so they need the same
        # columns. One table that has lost nothing makes its whole group keep all.
        most = 0
        for name in group:
            block = store.table(name).block
            kept = located[name].grid(block).blocks - gone[name]
            most = max(most, kept * block[1])
        width = narrow_width(most, located[group[0]].shape[1])
        widths |= dict.fromkeys([name for name in group if gone[name]], width)
    return widths


def _plan_changes(
    model: nn.Module,
    sparsifier: BaseDataSparsifier,
    located: Located,
    losing: set[str],
    widths: dict[str, int],
    kept: Mapping[str, Tensor],
) -> list[Change]:
    """Return a change for every module with a table in ``losing``.

    Args:
        located: the registered tables as they are stored now.
        losing: registered names of tables with removed rows or columns.
        widths: remaining columns of rotated tables, by registered name.
        kept: which rows are kept, by registered name: bool ``(rows,)``.

    Raises:
        ValueError: a mask removes parts of rows, or ``model`` does not have a table of ``losing``.
    """
    store = sparsifier.masks.tables
    for name in sorted(losing.difference(widths)):
        _refuse_partial_rows(located[name], store.table(name).block)
    # All modules of the models that tables were registered from. Names alone do not tell: another
    # model may have tables of the same names. A source of tensors that were registered without a
    # model has no such attribute.
    models = [getattr(source, "model", nn.Module()) for source in store.sources]
    sparsified = set(nn.ModuleList(models).modules())
    registered = {data.fqn: name for name, data in located.items()}
    changes = []
    missing = set(losing)
    for site in sites_of(model):
        # Registered names of the module's tables, by their names in the module. A table that is not
        # registered keeps all its rows.
        names = {own: registered[fqn] for own, fqn in site.tables.items() if fqn in registered}
        if losing.isdisjoint(names.values()) or site.module not in sparsified:
            continue
        rows = site.used_rows()
        for own, name in names.items():
            rows[own] &= kept[name]
        changes.append(Change(site, rows, names, widths=_site_widths(site, names, widths)))
        missing.difference_update(names.values())
    _refuse_parted_groups(sparsifier, widths)
    if missing:
        raise ValueError(
            f"{sorted(missing)} are not embedding tables of this model: they can't be compacted."
        )
    return changes


def _refuse_parted_groups(sparsifier: BaseDataSparsifier, widths: Mapping[str, int]) -> None:
    """Refuse tables that are rotated together but keep different columns: a collection with a
    single width may have split the group."""
    for group in sparsifier.masks.rotated_groups:
        left = {name: widths[name] for name in group if name in widths}
        if len(set(left.values())) > 1:
            raise ValueError(
                f"Tables rotated together keep different columns, {left}: give all one level."
            )


def _site_widths(site: Site, names: Mapping[str, str], widths: dict[str, int]) -> dict[str, int]:
    """Return the remaining columns of a module's narrower tables. If the module's tables must have
    one width, their entries in ``widths`` are raised to the widest."""
    if site.has_one_width:
        # TorchRec refuses an EmbeddingCollection of several widths.
        narrower = widths.keys() & names.values()
        if 0 < len(narrower) < len(site.tables):
            raise ValueError(
                f"Tables {sorted(narrower)} are narrower, and others of their EmbeddingCollection"
                " are not: its tables must have one width. Rotate all of them, or none."
            )
        widest = max((widths[name] for name in narrower), default=0)
        # In place: finish() moves the rotations by the same widths.
        widths |= dict.fromkeys(narrower, widest)
    return {table: widths[name] for table, name in names.items() if name in widths}


def _refuse_partial_rows(data: ShardedData, block: Block) -> None:
    """Refuse a table whose masks remove parts of rows."""
    height, width = block
    if height != 1 or width < data.shape[1]:
        raise ValueError(
            f"Table {data.name!r} has masks of blocks ({height}, {width}); compact() needs whole"
            " rows, (1, ROW), or columns of rotated tables."
        )


def _detach(sparse: Any, sparsifier: BaseDataSparsifier) -> None:
    """Detach the enforcer and unregister all tables from the sparsifier."""
    masks = sparsifier.masks
    if isinstance(sparse, SparseTraining):
        sparse.detach()
    # Without a SparseTraining, the user may have attached an enforcer.
    if isinstance(masks.enforcer, MaskEnforcer):
        masks.enforcer.detach()
    for name in masks.tables.names:
        masks.tables.drop(name)
        del sparsifier.data_groups[name]


def expand(
    model: nn.Module,
    *,
    optimizer: Optimizers | None = None,
    plan: Planner | None = None,
    initial: Literal["zero", "init"] = "zero",
    seed: int = 0,
) -> nn.Module:
    """Return ``model`` with compact tables replaced by whole ones: the inverse of
    :func:`~dist_sparse.compact`. Collective: every rank of the world must call it.

    Weights and optimizer state of kept rows are moved bit for bit, with learning rates and step
    counts; besides its shards a rank holds chunks of a few MB, and with ``"init"`` some 13 bytes
    for each id of one table. Rows that were removed come back with fresh optimizer state. With
    ``initial="zero"`` the model's output does not change. All other parameters stay the same
    objects.

    ``model`` is consumed as compact() consumes its argument: use the returned model and its
    ``fused_optimizer``; old tables raise.

    Args:
        model: with compact tables: a DistributedModelParallel or a plain module. For a DDP module,
            pass the inner module, then wrap the result.
        optimizer: one or all optimizers that step tables without a fused optimizer; they get the
            new parameters. ``()`` means there are none.
        plan: returns a ShardingPlan for the unsharded module with whole tables. None keeps sharding
            types, ranks and columns, and cuts the rows evenly.
        initial: initial weights of the rows that were removed: ``"zero"``, or ``"init"``, drawn
            from the distribution of the table's initializer (TorchRec's uniform one, or the one of
            ``nn.Embedding``). They are the same on every sharding and number of ranks.
        seed: of ``initial="init"``.

    Raises:
        ValueError: no table is compact, a table has a default row or codes, or a table or model is
            of a kind that can't be expanded. Or arguments differ between ranks, or any rank failed,
            out of memory for example. Raised on every rank; the model is unchanged.
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
    world = world_group()
    # 1. Check.
    with world.agreeing("expand()") as facts:
        draws = choice("initial", initial, ("zero", "init")) == "init"
        integer("seed", seed, least=0)
        rebuild = rebuild_of(model, "expand", optimizer, plan, world)
        # Compact collections that keep all rows need no change.
        sites = [site for site in sites_of(model) if site.indexes()]
        facts.update(rebuild.facts, initial=initial, seed=seed)
        facts["tables"] = [site.label for site in sites]
        if not sites:
            raise ValueError("No table of this model has lost rows, so there is nothing to expand.")
        rebuild.refuse(sites)
        changes = [_expansion(site, draws) for site in sites]

    # 2. Build. The compact tables are still in place, so any failure leaves the model unchanged.
    with world.agreeing("expand(), building its tables"):
        for change in changes:
            change.new = change.site.expanded()
    # replace() moves the rows and then, 3., releases the compact tables.
    return rebuild.replace(changes, seed)


def _expansion(site: Site, draws: bool) -> Change:
    """Return which stored rows of a module move, and which rows of whole tables receive them.

    Args:
        draws: whether to draw the other rows; otherwise they are zero.

    Raises:
        ValueError: an enforcer masks the tables, or an initializer can't draw single rows.
    """
    refuse_masked([(site.label, weight) for weight in site.module.parameters()])
    indexes = site.indexes()
    placed = {table: index.kept().cpu() for table, index in indexes.items()}
    bounds = {table: site.initial_bounds(table) for table in indexes} if draws else {}
    return Change(site, site.used_rows(), placed=placed, bounds=bounds)
