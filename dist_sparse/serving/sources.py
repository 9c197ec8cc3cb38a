"""What is served of each table of a model, and refusing what can't be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dist_sparse.compaction.kept_rows import kept_rows, move_rows
from dist_sparse.groups import group_over, rank_in, world_ranks
from dist_sparse.serving.codes import LARGEST, out_of_range
from dist_sparse.serving.grid import chunks
from dist_sparse.serving.lookups import Lookups
from dist_sparse.serving.manifest import Dtype, Pooling
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.tables.modules import model_source
from dist_sparse.tables.shards import Rect, ShardedData
from dist_sparse.text import count

__all__ = ["Source", "check_range", "check_registered", "check_zero", "sources_of"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table of the model, and what of it is served.

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
        for _, rows in move_rows(
            self.data, [shard.tensor for shard in self.data.shards], self.stored, wanted
        ):
            yield from (rows[some] for some in chunks(*rows.shape))


def check_registered(
    model: nn.Module, sparsifier: BaseDataSparsifier, located: list[ShardedData]
) -> None:
    """Refuse a sparsifier of other tensors than the model's. Local."""
    tables = {data.name: data for data in located}
    others = {data.name for data in model_source(model, dense=True).locate()} - set(tables)
    for name in sparsifier.data_groups:
        if name in others:
            continue
        if name not in tables:
            raise ValueError(
                f"The sparsifier's {name!r} is none of the model's tables {sorted(tables)}: export"
                " the model that was sparsified, with all of its tables."
            )
        if name in sparsifier.packed_store:
            held = [shard.tensor for shard in sparsifier.packed_store.find(name).shards]
        else:
            held = [sparsifier.dense_store.held(name)]
        mine = [shard.tensor for shard in tables[name].shards]
        if [each.data_ptr() for each in held] != [each.data_ptr() for each in mine]:
            raise ValueError(
                f"Table {name!r} of the model is not the one that was sparsified: it is another"
                " tensor."
            )


def sources_of(
    located: list[ShardedData], lookups: Lookups, sparsifier: BaseDataSparsifier | None
) -> dict[str, Source]:
    """What is served of each table. Collective."""
    masked = {} if sparsifier is None else kept_rows(sparsifier)
    found = {}
    for data in located:
        stored, block, default_row = masked.get(data.name), None, False
        if stored is None or sparsifier is None:
            stored = torch.ones(data.shape[0], dtype=torch.bool)
        else:
            packed = sparsifier.packed_store
            block = packed.block(data.name) if data.name in packed else (1, 1)
        kept = stored
        if (index := lookups.indexes.get(data.name)) is not None:
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
            kept[kept.clone()] = stored[: index.num_kept]
        if block is not None and block[1] >= data.shape[1] and bool(kept.all()):
            block = None  # of whole rows, none of which is removed
        pooling, rotation = lookups.pooling[data.name], lookups.rotations.get(data.name)
        found[data.name] = Source(
            data=data,
            pooling=pooling,
            block=block,
            stored=stored,
            kept=kept,
            default_row=default_row,
            rotation=rotation,
        )
    return found


def check_range(located: list[ShardedData], dtype: Dtype) -> None:
    """Refuse values on this rank that are not finite in ``dtype``. Local."""
    for data in located:
        for shard in data.shards:
            if (value := out_of_range(shard.tensor, dtype)) is not None:
                raise ValueError(
                    f"Table {data.name!r} can't be exported in {dtype}: it has the value {value} in"
                    f" {shard.rect}, and must have finite ones of at most {LARGEST[dtype]:g}."
                )


def check_zero(sparsifier: BaseDataSparsifier, sources: Mapping[str, Source]) -> None:
    """Refuse removed weights that are not zero. Collective; the same on every rank."""
    revived = {
        name: number
        for name, number in sparsifier.count_revived().items()
        if number and name in sources
    }
    with group_over(world_ranks()).agreeing("export()"):
        if revived:
            first, number = next(iter(revived.items()))
            raise ValueError(
                f"Table {first!r} has {count(number)} removed weights that are not zero: an"
                " optimizer has revived them without an enforcer, or masks were never applied."
                " sparsifier.apply_masks() zeroes sharded tables, squash_mask() plain data."
            )
