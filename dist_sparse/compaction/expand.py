"""`expand()`: the way back from compact tables to whole ones.

It has the phases of :mod:`~dist_sparse.compaction.compact`: check, build, release. Rows move from
the shards of a compact table to those of a whole one on the same plan, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from dist_sparse.checks import choice, integer
from dist_sparse.compaction.initial import draw_rows
from dist_sparse.compaction.moving import Steppers
from dist_sparse.compaction.replacing import (
    Change,
    Planner,
    refuse_sites,
    replace_tables,
)
from dist_sparse.compaction.sites import Site, sites_of
from dist_sparse.enforcer.enforcer import refuse_masked
from dist_sparse.groups import group_over, world_ranks
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.shards import Rect

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
        _refuse(model, sites, optimizers_known=optimizer is not None)
        bounds = {site: _bounds(site) for site in sites} if initial == "init" else {}

    # Phase 2: build. The compact tables are still there, so any failure leaves the model as it was.
    with world.agreeing("expand(), building its tables"):
        changes = [Change(site, site.expanded(), *_moved_rows(site)) for site in sites]
    draw = _initializer(bounds, seed)
    return replace_tables(model, changes, steppers, plan, world, "expand", initialize=draw)


def _refuse(model: nn.Module, sites: Sequence[Site], *, optimizers_known: bool) -> None:
    """Refuse models without compact tables, and tables that can't be expanded."""
    if not sites:
        raise ValueError("No table of this model has lost rows, so there is nothing to expand.")
    for site in sites:
        refuse_masked([(site.label, weight) for weight in site.module.parameters()])
    refuse_sites(model, sites, "expand", optimizers_known=optimizers_known, narrowed=False)


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
