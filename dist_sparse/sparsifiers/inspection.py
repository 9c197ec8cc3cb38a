"""What do the masks look like, over all ranks?

Counts, hashes and gathered masks, for people, reports and tests. Nothing here changes a mask or a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dist_sparse.groups import group_over
from dist_sparse.masking.masks import BlockMask, count_bits
from dist_sparse.sparsifiers import dense_store as plain
from dist_sparse.sparsifiers.dead import count_dead_rows
from dist_sparse.sparsifiers.digest import element_counts, hash_tensor, mask_hash, shape_hash
from dist_sparse.sparsifiers.recorder import Recorder
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of

if TYPE_CHECKING:
    from dist_sparse.sparsifiers.packed_store import ShardedTables

__all__ = ["Inspection", "TableStats"]


@dataclass(frozen=True, kw_only=True)
class TableStats:
    """How one table stands, over all ranks.

    Args:
        name: of the table.
        shape: global (rows, columns); of plain data as a matrix.
        dtype: of the weights.
        sharding: TorchRec's sharding type, or what else it is.
        shards: number of distinct pieces over all ranks.
        sparse_block_shape: as configured; None for a sparsifier without blocks.
        target: configured sparsity_level; None without one.
        blocks: what the mask counts: sparse blocks, or elements where it is not constant on blocks.
        removed_blocks: how many of them are removed.
        mask_bytes: bytes of masks over all ranks.
        table_bytes: bytes of the dense table, one replica.
        kept_bytes: bytes of its kept elements.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    sharding: str
    shards: int
    sparse_block_shape: tuple[int, int | str] | None
    target: float | None
    blocks: int
    removed_blocks: int
    mask_bytes: int
    table_bytes: int
    kept_bytes: int

    @property
    def sparsity(self) -> float:
        """Achieved: removed_blocks / blocks; 0 for an empty table."""
        return self.removed_blocks / self.blocks if self.blocks else 0.0


class Inspection:
    """The reading half of a sparsifier."""

    data_groups: dict[str, dict[str, Any]]
    state: dict[str, dict[str, Any]]
    _tables: ShardedTables
    _container: plain.Container
    _recorder: Recorder | None = None

    def record(self) -> Recorder:
        """What due steps change in sharded tables, from now on: one recorder a sparsifier, made at the first call.
        Every rank must call it, or none; does not communicate."""
        if self._recorder is None:
            self._recorder = Recorder()
        return self._recorder

    def stop_recording(self) -> None:
        """Lets go of :meth:`record`'s recorder: nothing is counted any more. Every rank must call it, or none; does not
        communicate."""
        self._recorder = None

    def local_masks(self, name: str) -> list[tuple[tuple[int, int], Tensor]]:
        """This rank's pieces of a mask: ``((row, column) offset, int8 mask)`` of each shard, in the order of the
        shards.

        Raises:
            ValueError: unknown name, or the shards have moved since the last step.
        """
        if name in self._tables:
            return [((mask.rect.row, mask.rect.col), mask.dense()) for mask in self._tables.masks_here(name)]
        return [((0, 0), _plain_matrix(self._plain_mask(name)).to(torch.int8))]

    def full_mask(self, name: str, max_bytes: int = 1 << 30) -> Tensor:
        """The global mask, int8 ``(rows, columns)``. Collective for a sharded table: every rank must call it. For tests
        and inspection.

        Raises:
            ValueError: unknown name, or the mask would take more than ``max_bytes``.
        """
        if name not in self._tables:
            return self._plain_mask(name).to(torch.int8)
        located = self._located()
        data = located[name]
        need = data.shape[0] * data.shape[1]
        if need > max_bytes:
            raise ValueError(f"The mask of table {name!r} takes {need} bytes: more than {max_bytes=}.")
        group = group_over(data.ranks)
        block = self._tables.block(name)
        masks = dict(zip(data.tiling[group.rank], self._tables.masks(name), strict=True))
        mine = [masks[rect].bits.cpu() for rect in data.owned(group.rank)]
        sizes = [sum(_mask_bytes(rect, block) for rect in data.owned(rank)) for rank in range(group.size)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        if mine:
            padded[: sizes[group.rank]] = torch.cat(mine)
        gathered = group.all_gather(padded)
        full = torch.zeros(data.shape, dtype=torch.int8)
        for rank in range(group.size):
            start = 0
            for rect in data.owned(rank):
                stop = start + _mask_bytes(rect, block)
                piece = BlockMask(rect, block, gathered[rank, start:stop]).dense()
                full[rect.row : rect.row_end, rect.col : rect.col_end] = piece
                start = stop
        return full

    def table_stats(self) -> list[TableStats]:
        """Counts of every registered name, the same on every rank. Collective if sharded tables are registered: one
        all-reduce."""
        located = self._located()
        counts = self._summed(
            {name: _count(self._tables.masks(name), data) for name, data in located.items()}, located, 3
        )
        stats = []
        for name, group in self.data_groups.items():
            if name in located:
                data = located[name]
                shape, dtype, sharding, shards = data.shape, data.dtype, data.sharding, len(data.rects)
                grid = grid_of(Rect(0, 0, *shape), self._tables.block(name))
                blocks, (removed, elements, mask_bytes) = grid.rows * grid.cols, counts[name]
            else:
                mask = _plain_matrix(self._plain_mask(name))
                shape, sharding, shards = (mask.shape[0], mask.shape[1]), "plain", 1
                dtype = plain.held(self._container, name).dtype
                blocks, mask_bytes = mask.numel(), mask.numel() * mask.element_size()
                removed = elements = int((mask == 0).sum())
            stats.append(
                TableStats(
                    name=name,
                    shape=shape,
                    dtype=dtype,
                    sharding=sharding,
                    shards=shards,
                    sparse_block_shape=group.get("sparse_block_shape"),
                    target=group.get("sparsity_level"),
                    blocks=blocks,
                    removed_blocks=removed,
                    mask_bytes=mask_bytes,
                    table_bytes=shape[0] * shape[1] * dtype.itemsize,
                    kept_bytes=(shape[0] * shape[1] - elements) * dtype.itemsize,
                )
            )
        return stats

    def dead_rows(self) -> dict[str, int]:
        """Rows with nothing left, of every registered name, the same on every rank. For tables cut by columns too.

        Collective if sharded tables are registered: an all-reduce, and where tables are cut by columns an all-to-all of
        a bit for each row and column shard.
        """
        located = self._located()
        counts = count_dead_rows(located, {name: self._tables.masks(name) for name in located}, self._tables.groups)
        for name in self.data_groups:
            if name not in located:
                counts[name] = int((_plain_matrix(self._plain_mask(name)) == 0).all(1).sum())
        return {name: counts[name] for name in self.data_groups}

    def fingerprint(self) -> dict[str, str]:
        """A hash of every global mask: depends on shape and mask alone, not on sharding, blocks or ranks. Collective as
        table_stats()."""
        located = self._located()
        hashes = {}
        for name, data in located.items():
            mine = set(data.owned(group_over(data.ranks).rank))
            masks = {mask.rect: mask for mask in self._tables.masks(name)}
            hashes[name] = [sum(mask_hash(mask) for rect, mask in masks.items() if rect in mine)]
        summed = self._summed(hashes, located, 1)
        prints = {}
        for name in self.data_groups:
            if name in located:
                shape, value = located[name].shape, summed[name][0]
            else:
                mask = _plain_matrix(self._plain_mask(name))
                shape = (mask.shape[0], mask.shape[1])
                value = mask_hash(BlockMask.of_elements(Rect(0, 0, *shape), mask))
            prints[name] = f"{(value + shape_hash(shape)) % (1 << 64):016x}"
        return prints

    def audit(self) -> dict[str, str]:
        """:meth:`fingerprint`, after comparing the masks of all holders: replicas, and the bits of blocks that a shard
        border cuts.

        Collective as table_stats().

        Raises:
            ValueError: on every rank; names table, place and ranks that differ.
        """
        located = self._located()
        for ranks, names in self._tables.groups.items():
            group = group_over(ranks)
            told: dict[str, list[int]] = {}
            for name in names:
                for mask in self._tables.masks(name):
                    for place, value in _shared_bits(located[name], mask):
                        told.setdefault(f"table {name!r}, {place}", []).append(value)
            seen: dict[str, list[tuple[int, int]]] = {}
            for rank, report in zip(group.ranks, group.all_gather_json(told), strict=True):
                for place, values in report.items():
                    seen.setdefault(place, []).extend((value, rank) for value in values)
            wrong = [
                f"{place}: rank {rank} differs from rank {values[0][1]}"
                for place, values in seen.items()
                for value, rank in values
                if value != values[0][0]
            ]
            if wrong:
                raise ValueError("Masks differ between their holders. " + "; ".join(wrong[:20]))
        return self.fingerprint()

    def _located(self) -> dict[str, ShardedData]:
        """The sharded tables as they lie now, their masks brought along (collective only if shards have moved)."""
        located = self._tables.locate() if self._tables else {}
        self._tables.follow(located)
        return located

    def _summed(
        self, values: Mapping[str, list[int]], located: Mapping[str, ShardedData], width: int
    ) -> dict[str, list[int]]:
        """Integers per table, summed over ranks modulo 2**64: one all-reduce a group."""
        summed: dict[str, list[int]] = {}
        for ranks, names in self._tables.groups.items():
            rows = [[_signed(v) for v in values[name]] for name in names]
            total = group_over(ranks).all_reduce(torch.tensor(rows, dtype=torch.int64).view(-1, width))
            summed.update(zip(names, total.tolist(), strict=True))
        return summed

    def _plain_mask(self, name: str) -> Tensor:
        if name not in self.state:
            raise ValueError(f"data with specified name does not exist: {name!r}; known are {list(self.data_groups)}")
        mask: Tensor = self.state[name]["mask"]
        return mask


def _count(masks: list[BlockMask], data: ShardedData) -> list[int]:
    """Removed blocks, removed elements and mask bytes of this rank's shards. Replicas and cut blocks count for their
    first holder only."""
    group = group_over(data.ranks)
    mine = set(data.owned(group.rank))
    removed = elements = 0
    for mask in {mask.rect: mask for mask in masks}.values():
        if mask.rect in mine and mask.blocks:
            top, left = mask.rect.row % mask.block[0] > 0, mask.rect.col % mask.block[1] > 0
            if top or left:  # blocks that begin in another shard
                removed += int((~mask.flags()[int(top) :, int(left) :]).sum())
            else:
                removed += mask.blocks - count_bits(mask.bits)
            elements += element_counts(mask)
    return [removed, elements, sum(mask.bits.numel() for mask in masks)]


def _shared_bits(data: ShardedData, mask: BlockMask) -> list[tuple[str, int]]:
    """Hashes of what other shards hold too, by place: the whole shard, and its block rows and columns that some border
    cuts."""
    rects, grid, (height, width) = data.rects, mask.grid, mask.block
    found = [(f"shard {mask.rect}", hash_tensor(mask.bits))]
    cut_rows = {r.row // height for r in rects if r.row % height} & set(range(grid.row, grid.row + grid.rows))
    cut_cols = {r.col // width for r in rects if r.col % width} & set(range(grid.col, grid.col + grid.cols))
    flags = mask.flags() if cut_rows or cut_cols else torch.empty(0)
    for i in cut_rows:
        place = f"block row {i}, block columns from {grid.col} on, {grid.cols}"
        found.append((place, hash_tensor(flags[i - grid.row])))
    for j in cut_cols:
        place = f"block column {j}, block rows from {grid.row} on, {grid.rows}"
        found.append((place, hash_tensor(flags[:, j - grid.col])))
    return found


def _mask_bytes(rect: Rect, block: Block) -> int:
    grid = grid_of(rect, block)
    return -(-grid.rows * grid.cols // 8)


def _plain_matrix(mask: Tensor) -> Tensor:
    return mask if mask.dim() == 2 else mask.reshape(1, -1) if mask.dim() < 2 else mask.reshape(-1, mask.shape[-1])


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
