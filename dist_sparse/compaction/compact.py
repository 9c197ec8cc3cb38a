"""`compact()`: from a sparsified model to one that stores kept rows, or columns, only, in training.

Everything is checked on all ranks first. Then compact modules take the places of the old ones in
the user's module, rows and optimizer state of kept rows move, bit for bit and table by table, and
last the old tables are released.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.checks import choice
from dist_sparse.compaction.consumed import consume, consume_parameter
from dist_sparse.compaction.kept_rows import kept_rows
from dist_sparse.compaction.moving import move_collection
from dist_sparse.compaction.sites import (
    Site,
    compact_embedding,
    cut,
    narrow_embedding,
    replace_modules,
    sites_of,
)
from dist_sparse.compaction.steppers import Stepped, Steppers
from dist_sparse.compaction.tables import CompactEmbedding, CompactEmbeddingBag
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.enforcer.optimizers import leaves
from dist_sparse.groups import Group, group_over, world_ranks
from dist_sparse.records import TableStats
from dist_sparse.rotation.outputs import is_turned, move_bases
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.port import collection_of, torchrec_port
from dist_sparse.tables.protocols import Replacement, TorchRecPort
from dist_sparse.tables.shards import Source
from dist_sparse.tables.sizes import narrow_width
from dist_sparse.training.sparsify import SparseTraining

__all__ = ["Removed", "compact"]

Removed: TypeAlias = Literal["zero", "default_row"]
"""What removed ids give."""


def compact(
    model: nn.Module,
    sparse: SparseTraining | BaseDataSparsifier,
    *,
    optimizer: Any = None,
    plan: Callable[[nn.Module], Any] | None = None,
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
    together = group_over(world_ranks())
    with together.agreeing("compact()") as facts:
        default_row = choice("removed", removed, ("zero", "default_row")) == "default_row"
        sparsifier, optimizers = _parts(sparse, optimizer)
        facts.update(removed=removed, **_arguments(model, sparsifier, optimizers, plan))
        if isinstance(sparse, SparseTraining):
            # Now: where warnings are errors, one while it is detached came too late.
            sparse.warn_of_early_end()
    with together.agreeing("compact(), counting rows"):
        stats = {table.name: table for table in sparsifier.table_stats() if table.removed_blocks}
        flags = kept_rows(sparsifier)
    with together.agreeing("compact()"):
        if sparsifier.enforcer is not None:
            sparsifier.enforcer.settle()  # removed columns up to a multiple of 4 stay, as zeros
        steppers = Steppers(optimizers or ())
        widths = _widths(sparsifier, stats)
        kept = _kept(model, sparsifier, set(stats), widths, flags)
        for site in kept:
            _check(model, site, optimizers is not None, widths)
            _check_default(site, default_row)
        names = {sparsifier.packed_store.find(name).fqn: name for name in widths}
        narrow = {
            site: _narrowed(site, {fqn: widths[name] for fqn, name in names.items()})
            for site in kept
        }
    with together.agreeing("compact(), building its tables"):
        made = {
            site: _compacted(site, kept[site], model, narrow[site], default_row) for site in kept
        }
    result, stepped = _put_in_place(model, kept, made, steppers, plan, together)
    dmp = _dmp_port(model)
    inner = dmp.unwrapped(result) if dmp is not None else result
    try:
        with together.agreeing("compact(), releasing the old tables"):
            for site in kept:
                by_name = {
                    names[site.tables[table]]: width for table, width in narrow[site].items()
                }
                move_bases(site.module, getattr(made[site], "inner", made[site]), inner, by_name)
            _detach(sparse, sparsifier)
            for each in stepped:
                steppers.replace(each)
            for site in kept:
                _release(site)
            if dmp is not None:
                _consume_model(model, dmp)
    except ValueError as fault:
        # What is released can't be had back, so no rank may go on with a model that others lack.
        raise RuntimeError(
            "compact() failed on every rank, and no model is left: resume from a checkpoint."
            f" {fault}"
        ) from fault
    gc.collect()  # table batches, DDP and their hooks are cycles
    return result


def _dmp_port(model: nn.Module) -> TorchRecPort | None:
    """TorchRec's port if the model is a DistributedModelParallel."""
    torchrec = torchrec_port()
    return torchrec if torchrec is not None and torchrec.is_sharded_model(model) else None


def _is_sharded(site: Site) -> bool:
    torchrec = torchrec_port()
    return torchrec is not None and torchrec.is_sharded(site.module)


def _put_in_place(
    model: nn.Module,
    kept: Mapping[Site, Kept],
    made: Mapping[Site, Any],
    steppers: Steppers,
    plan: Callable[[nn.Module], Any] | None,
    together: Group,
) -> tuple[nn.Module, list[Stepped]]:
    """Return the compact model, whose tables hold the kept rows, and what plain optimizers step in
    it. Collective.

    An exception on any rank is raised on all, and the model is as it was.
    """
    dmp = _dmp_port(model)
    root = model if dmp is None else dmp.unwrapped(model)
    stepped: list[Stepped] = []
    try:
        with together.agreeing("compact(), putting its tables in place"):
            result = replace_modules(root, {site.replaced: made[site] for site in kept})
            if dmp is not None:
                replacements = [
                    Replacement(
                        site.module, site.path, made[site].inner, f"{site.place}.inner".lstrip(".")
                    )
                    for site in kept
                    if _is_sharded(site)
                ]
                sharding = dmp.compact_plan(model, result, replacements, plan)
        if dmp is not None:
            agree = partial(_agree, together)
            with together.agreeing("compact(), sharding its tables"), _before_ddp(agree):
                result = dmp.reshard(model, result, sharding)
            with together.agreeing("compact(), wrapping its layers"), _before_ddp(agree):
                dmp.wrap_layers(result, model)
        with together.agreeing("compact(), moving rows"):
            for site, flags in kept.items():
                move = _moved if _is_sharded(site) else _stepped
                stepped += move(site, made[site], flags, steppers)
    except BaseException:
        replace_modules(root, {made[site]: site.replaced for site in kept})
        raise
    return result, stepped


def _agree(together: Group) -> None:
    """Raise on every rank what any of them has raised since the last agreement. Collective."""
    with together.agreeing("compact(), before DDP"):
        pass


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


def _release(site: Site) -> None:
    """Free the old tables of a module. What still holds them, such as a list for clipping, raises
    when it is used."""
    for name, parameter in list(site.module.named_parameters()):
        consume_parameter(parameter, f"{site.path}.{name}".lstrip("."))
    if _is_sharded(site):
        for used in (site.module, *collection_of(site.module).optimizers()):
            consume(used, "This table collection")


def _consume_model(model: nn.Module, dmp: TorchRecPort) -> None:
    """Release everything that a DistributedModelParallel holds, but for the user's module: using it
    raises from now on.

    A forward whose backward has not come waits in the hooks of its DDP, which end with it: they
    would take the next backward of the compact model for theirs.
    """
    layers = dmp.dense_layers(model)
    if isinstance(layers, DistributedDataParallel):
        consume(layers, "This model")
    consume(model, "This model")


Kept = dict[str, Tensor]
"""Which rows of the tables of one module are kept, by the table's name in the module."""


def _parts(sparse: Any, optimizer: Any) -> tuple[BaseDataSparsifier, Sequence[Any] | None]:
    """The sparsifier, and the optimizers that step tables themselves, None if they are unknown."""
    sparsifier = sparse.sparsifier if isinstance(sparse, SparseTraining) else sparse
    if not isinstance(sparsifier, BaseDataSparsifier):
        raise ValueError(
            f"Invalid sparse of type {type(sparse).__name__}: must be what sparsify() returned, or"
            " a sparsifier."
        )
    if sparsifier.dense_store.names:
        raise ValueError(
            f"Plain data can't be compacted: {sparsifier.dense_store.names} are no tables of a"
            " model. Delete them from the sparsifier first."
        )
    if optimizer is None:
        enforcer = sparsifier.enforcer
        return sparsifier, enforcer.optimizers if isinstance(enforcer, MaskEnforcer) else None
    return sparsifier, optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]


def _arguments(
    model: nn.Module,
    sparsifier: BaseDataSparsifier,
    optimizers: Sequence[Any] | None,
    plan: Callable[[nn.Module], Any] | None,
) -> dict[str, Any]:
    """What must be equal on all ranks of what compact() was called with."""
    if plan is not None and not callable(plan):
        raise ValueError(
            f"Invalid plan of type {type(plan).__name__}: must be a function that returns a"
            " ShardingPlan, or None."
        )
    steps = [type(leaf).__name__ for optimizer in optimizers or () for leaf in leaves(optimizer)]
    return {
        "model": type(model).__name__,
        "tables": sparsifier.packed_store.names,
        "optimizer": None if optimizers is None else steps,
        "plan": plan is not None,
    }


def _widths(sparsifier: BaseDataSparsifier, stats: Mapping[str, TableStats]) -> dict[str, int]:
    """The columns that stay of each rotated table, a multiple of 4, as FBGEMM needs; tables that
    are rotated together meet in dot products, and keep as many as the one of them that keeps the
    most."""
    widths: dict[str, int] = {}
    for group in () if sparsifier.rotation is None else sparsifier.rotation.groups:
        columns = sparsifier.packed_store.find(group[0]).shape[1]
        kept = [columns]
        if all(name in stats for name in group):
            blocks = {name: stats[name].blocks - stats[name].removed_blocks for name in group}
            kept = [n * sparsifier.packed_store.block(name)[1] for name, n in blocks.items()]
        widths |= {name: narrow_width(max(kept), columns) for name in group if name in stats}
    return widths


def _kept(
    model: nn.Module,
    sparsifier: BaseDataSparsifier,
    removed: set[str],
    widths: Mapping[str, int],
    flags: Mapping[str, Tensor],
) -> dict[Site, Kept]:
    """What is kept in each module that holds a table with removed rows."""
    located = sparsifier.packed_store.locate()
    for name in sorted(removed - set(widths)):
        height, width = sparsifier.packed_store.block(name)
        if height != 1 or width < located[name].shape[1]:
            raise ValueError(
                f"Table {name!r} has masks of blocks ({height}, {width}), and only whole rows can"
                " be compacted, (1, ROW), or columns of rotated tables: what a finer mask removes"
                " inside of kept rows would come back. export() stores such masks."
            )
    if not removed:
        raise ValueError("Nothing is removed yet, so there is nothing to compact.")
    names = {data.fqn: name for name, data in located.items()}
    known = {
        module
        for source in sparsifier.packed_store.sources
        for module in _model_of(source).modules()
    }
    found: dict[Site, Kept] = {}
    for site in (site for site in sites_of(model) if site.module in known):
        registered = {table: names.get(fqn, "") for table, fqn in site.tables.items()}
        if removed.isdisjoint(registered.values()):
            continue
        found[site] = {
            table: (
                flags[registered[table]].clone()
                if registered[table]
                else torch.ones(rows, dtype=torch.bool)
            )
            for table, rows in _rows(site).items()
        }
        indexes = {} if site.outer is None else site.outer.table_indexes()
        for table, index in indexes.items():
            found[site][table][index.stored :] = False  # rows that no id has
    if missing := removed - {names.get(fqn) for site in found for fqn in site.tables.values()}:
        raise ValueError(
            f"{sorted(missing)} are no embedding tables of this model: they can't be compacted."
        )
    return found


def _model_of(source: Source) -> nn.Module:
    """What was registered by add_model(); nothing for a tensor."""
    model = getattr(source, "model", None)
    return model if isinstance(model, nn.Module) else nn.Module()


def _rows(site: Site) -> dict[str, int]:
    """The rows that each table of a module stores."""
    if isinstance(site.module, (nn.Embedding, nn.EmbeddingBag)):
        return {"": len(site.module.get_parameter("weight"))}
    return {table.name: table.rows for table in collection_of(site.module).tables}


def _check(model: nn.Module, site: Site, optimizers_known: bool, widths: Mapping[str, int]) -> None:
    """Refuse a module that can't be compacted, or whose optimizers are unknown."""
    module, name = site.module, _named(site)
    torchrec = torchrec_port()
    if _dmp_port(model) is None:
        for path, wrapper in model.named_modules():
            if (
                isinstance(wrapper, (DistributedDataParallel, nn.DataParallel))
                and module in wrapper.modules()
            ):
                raise ValueError(
                    f"{name} is inside {type(wrapper).__name__}{f' at {path!r}' if path else ''},"
                    " which holds on to the old parameters: compact the module inside, and wrap"
                    " the result again."
                )
    if is_turned(module) and not widths:
        raise ValueError(
            f"{name} is rotated, and its output is turned back by a hook: it can't be compacted."
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if type(module) not in (
            nn.Embedding,
            nn.EmbeddingBag,
            CompactEmbedding,
            CompactEmbeddingBag,
        ):
            raise ValueError(
                f"{name} belongs to a {type(module).__name__}, which is neither nn.Embedding nor"
                " nn.EmbeddingBag and may do more: it can't be compacted."
            )
        if isinstance(module, (CompactEmbedding, CompactEmbeddingBag)) and widths:
            raise ValueError(
                f"{name} has lost rows already: narrow its table before it loses rows."
            )
        if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
            raise ValueError(
                f"{name} has mode='max', in which removed rows count as zeros: it can't be"
                " compacted."
            )
    elif torchrec is not None and (reason := torchrec.compact_refusal(model, module)):
        raise ValueError(f"{name} can't be compacted: {reason}.")
    others = set(model.modules()) - set(module.modules())
    for parameter in _parameters(module).values():
        holders = [
            type(other).__name__ for other in others if parameter in set(other._parameters.values())
        ]
        if holders:
            raise ValueError(
                f"{name} is the weight of other modules too ({holders}): it can't be compacted."
            )
        if parameter.requires_grad and not optimizers_known:
            raise ValueError(
                f"{name} is stepped by a plain optimizer, which must get the new parameters: pass"
                " compact(optimizer=...), or optimizer=() if there is none. An attached enforcer"
                " knows them."
            )


def _named(site: Site) -> str:
    """The tables of a module, for a message: up to 3 names, of more than that the first and their
    number."""
    names = list(site.tables.values())
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def _check_default(site: Site, default_row: bool) -> None:
    """Refuse a default row where there is one, or where ids would have it that are padding."""
    name, module = _named(site), site.module
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        indexes = (
            [module.index] if isinstance(module, (CompactEmbedding, CompactEmbeddingBag)) else []
        )
        if default_row and getattr(module, "padding_id", module.padding_idx) is not None:
            raise ValueError(
                f"{name} has a padding_idx, whose id would get the default row if its row was"
                " removed."
            )
    else:
        indexes = [] if site.outer is None else list(site.outer.table_indexes().values())
    if any(index.default_row for index in indexes):
        raise ValueError(
            f"{name} has default rows, and tables with a default row can't lose rows again."
        )
    if default_row and indexes:
        raise ValueError(
            f"{name} has already lost rows without a default row; it can't get one now."
        )


def _compacted(
    site: Site, kept: Kept, model: nn.Module, widths: Mapping[str, int], default_row: bool
) -> Any:
    """The compact module that takes the place of another; ``widths`` by the table's name in the
    module."""
    if isinstance(site.module, (nn.Embedding, nn.EmbeddingBag)):
        if widths:
            return narrow_embedding(site.module, widths[""])
        return compact_embedding(site.module, kept[""], default_row)
    # Not above: it needs torchrec.
    from dist_sparse.compaction.collections import compact_collection

    device: Any = getattr(model, "device", None)
    return compact_collection(site.module, site.outer, kept, device, widths, default_row)


def _narrowed(site: Site, by_fqn: Mapping[str | None, int]) -> dict[str, int]:
    """The columns that stay of a module's narrower tables, by the table's name in it. Those of an
    EmbeddingCollection have one width, that of the widest.

    Raises:
        ValueError: not all tables of an EmbeddingCollection are narrower.
    """
    found = {table: by_fqn[fqn] for table, fqn in site.tables.items() if fqn in by_fqn}
    if (
        not found
        or isinstance(site.module, (nn.Embedding, nn.EmbeddingBag))
        or collection_of(site.module).pooled
    ):
        return found
    if others := [fqn for fqn in site.tables.values() if fqn not in by_fqn]:
        raise ValueError(
            f"{others} keep all columns, but tables of an EmbeddingCollection have one width:"
            " rotate all."
        )
    return dict.fromkeys(found, max(found.values()))


def _parameters(module: Any) -> dict[str, nn.Parameter]:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return {"": module.get_parameter("weight")}
    return collection_of(module).parameters()


def _stepped(site: Site, made: Any, kept: Kept, steppers: Steppers) -> list[Stepped]:
    """The parameters of an unsharded module, old and new, and the state of the new ones."""
    new = _parameters(getattr(made, "inner", made))
    return [
        Stepped(
            old,
            new[name],
            {
                key: cut(state, kept[name], len(new[name]), new[name].shape[1])
                for key, state in steppers.states(old).items()
            },
        )
        for name, old in _parameters(site.module).items()
    ]


def _moved(site: Site, made: Any, kept: Kept, steppers: Steppers) -> list[Stepped]:
    """Move the tables of a sharded collection. Collective."""
    return move_collection(site.module, made.inner, kept, steppers)


def _detach(sparse: Any, sparsifier: BaseDataSparsifier) -> None:
    """Detach the enforcer, and have the sparsifier forget all tables."""
    if isinstance(sparse, SparseTraining):
        sparse.detach()
    if isinstance(sparsifier.enforcer, MaskEnforcer):
        sparsifier.enforcer.detach()
    for name in sparsifier.packed_store.names:
        sparsifier.packed_store.drop(name)
        del sparsifier.data_groups[name]
