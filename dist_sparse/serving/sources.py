"""The rows of each table of a model that are served, and refusals of tables that can't be."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dist_sparse.compaction.kept_rows import kept_rows, move_rows
from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.serving.codes import LARGEST, chunks, out_of_range
from dist_sparse.serving.lookups import Lookups
from dist_sparse.serving.manifest import Dtype, Pooling
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.stats import count_revived
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import Rect, ShardedData
from dist_sparse.text import count

__all__ = ["ServedTable", "check_range", "check_zero", "registered_tables", "served_tables"]


@dataclass(frozen=True, kw_only=True)
class ServedTable:
    """A table of the model, and its rows that are served.

    Args:
        data: as it is stored now.
        pooling: of the module that looks it up.
        block: of its masks; None without any.
        stored: which of its rows are served: bool ``(data.shape[0],)``.
        kept: the ids that they belong to: bool ``(original rows,)``. More than ``stored`` in a
            compact table.
        default_row: whether the last of the served rows is that of removed ids.
        rotation: what turns its outputs back: float32 ``(data.shape[1], columns of the output)``;
            None as they are.
    """

    data: ShardedData
    pooling: Pooling
    block: tuple[int, int] | None
    stored: Tensor
    kept: Tensor
    default_row: bool
    rotation: Tensor | None

    def chunks(self) -> Iterator[Tensor]:
        """Yield all kept rows on rank 0, in order, a few at a time: encoding them takes several
        times their memory. Collective over the ranks that hold the table: they must exhaust it; on
        others it ends at once."""
        ranks = self.data.ranks or (0,)
        if rank_in(world_ranks()) not in ranks:
            return
        whole = Rect(0, 0, int(self.stored.count_nonzero()), self.data.shape[1])
        wanted = [[whole] if rank == 0 else [] for rank in ranks]
        shards = [shard.tensor for shard in self.data.shards]
        for _, rows in move_rows(self.data, shards, self.stored, wanted):
            yield from (rows[some] for some in chunks(*rows.shape))


def registered_tables(
    model: nn.Module, sparsifier: BaseDataSparsifier, located: Sequence[ShardedData]
) -> dict[str, ShardedData]:
    """Return the sharded tables of a sparsifier as they are stored now, by name. Local.

    Raises:
        ValueError: it is a sparsifier of other tensors than the model's.
    """
    tables = {data.name: data for data in located}
    if not set(tables).issuperset(sparsifier.data_groups):
        _refuse_strangers(model, sparsifier, tables)
    found = {}
    for name in sparsifier.data_groups:
        if name in sparsifier.packed_store:
            found[name] = sparsifier.packed_store.find(name)
            held = [shard.tensor for shard in found[name].shards]
        else:
            held = [sparsifier.dense_store.held(name)]
        if name not in tables:
            continue
        mine = [shard.tensor for shard in tables[name].shards]
        if [each.data_ptr() for each in held] != [each.data_ptr() for each in mine]:
            raise ValueError(
                f"Table {name!r} of the model is not the one that was sparsified: it is another"
                " tensor."
            )
    return found


def _refuse_strangers(
    model: nn.Module, sparsifier: BaseDataSparsifier, tables: Collection[str]
) -> None:
    """Refuse names that are neither tables nor dense parameters of the model. Walks it."""
    known = {data.name for data in model_source(model, dense=True).locate()} | set(tables)
    for name in sparsifier.data_groups:
        if name not in known:
            raise ValueError(
                f"The sparsifier's {name!r} is none of the model's tables {sorted(tables)}: export"
                " the model that was sparsified, with all of its tables."
            )


def served_tables(
    located: Sequence[ShardedData],
    lookups: Lookups,
    sparsifier: BaseDataSparsifier | None,
    registered: Mapping[str, ShardedData],
) -> dict[str, ServedTable]:
    """Return the tables that are served, by name. Collective.

    Args:
        registered: from :func:`registered_tables`, after the masks have followed moved shards.
    """
    blocks: dict[str, tuple[int, int]] = {}
    kept: dict[str, Tensor] = {}
    if sparsifier is not None:
        kept = kept_rows(sparsifier, registered)
        packed = sparsifier.packed_store
        # Plain data is masked element by element.
        blocks = {name: packed.block(name) if name in packed else (1, 1) for name in kept}
    found = {}
    for data in located:
        stored = kept.get(data.name)
        if stored is None:
            stored = torch.ones(data.shape[0], dtype=torch.bool)
        found[data.name] = _served_table(data, lookups, stored, blocks.get(data.name))
    return found


def _served_table(
    data: ShardedData, lookups: Lookups, stored: Tensor, block: tuple[int, int] | None
) -> ServedTable:
    kept, default_row = stored, False
    index = lookups.indexes.get(data.name)
    if index is not None:
        block = block or (1, data.shape[1])
        default_row = index.default_row
        if default_row and not bool(stored[: index.stored].all()):
            raise ValueError(
                f"Table {data.name!r} has lost rows since it got its default row: it can't be"
                " served."
            )
        # No id has the rows behind.
        stored = stored & (torch.arange(len(stored)) < index.stored)
        kept = index.kept().cpu()
        # Of the ids that compact() kept, the ones whose rows masks keep still.
        kept[kept.clone()] = stored[: index.num_kept]
    removes_nothing = bool(kept.all())
    if block is not None and block[1] >= data.shape[1] and removes_nothing:
        block = None
    return ServedTable(
        data=data,
        pooling=lookups.pooling[data.name],
        block=block,
        stored=stored,
        kept=kept,
        default_row=default_row,
        rotation=lookups.rotations.get(data.name),
    )


def check_range(located: Sequence[ShardedData], dtype: Dtype) -> None:
    """Refuse values on this rank that are not finite in ``dtype``. Local."""
    for data in located:
        for shard in data.shards:
            if (value := out_of_range(shard.tensor, dtype)) is not None:
                raise ValueError(
                    f"Table {data.name!r} can't be exported in {dtype}: it has the value {value} in"
                    f" {shard.rect}, and must have finite ones of at most {LARGEST[dtype]:g}."
                )


def check_zero(
    sparsifier: BaseDataSparsifier,
    tables: Mapping[str, ServedTable],
    registered: Mapping[str, ShardedData],
) -> None:
    """Refuse removed weights that are not zero. Collective; the same on every rank."""
    revived = count_revived(sparsifier.packed_store, sparsifier.dense_store, registered)
    with group_over(world_ranks()).agreeing("export()"):
        for name, number in revived.items():
            if number and name in tables:
                raise ValueError(
                    f"Table {name!r} has {count(number)} removed weights that are not zero: an"
                    " optimizer has revived them without an enforcer, or masks were never applied."
                    " sparsifier.apply_masks() zeroes sharded tables, squash_mask() plain data."
                )
