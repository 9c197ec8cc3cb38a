"""Where do the masks of sharded tables live, and how do they follow their shards?

A :class:`ShardedTables` holds what was registered (sources that say where tables lie at the moment) and, for each shard
on this rank, its :class:`~dist_sparse.masking.masks.BlockMask`. When the rectangles of the moment differ from those
that the bits were stored for, the bits move to their new holders by one all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dist_sparse.groups import Group, group_over
from dist_sparse.masking.masks import BlockMask
from dist_sparse.tables.shards import Block, Rect, ShardedData, Source, grid_of

__all__ = ["ShardedTables"]

Tiling = tuple[tuple[Rect, ...], ...]


class ShardedTables:
    """The registered sharded tables of one sparsifier, in the order in which they were added."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._masks: dict[str, list[BlockMask]] = {}
        self._tilings: dict[str, Tiling] = {}
        self._blocks: dict[str, Block] = {}
        self._ranks: dict[str, tuple[int, ...] | None] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self.version = 0
        """Changes whenever a mask is replaced, added or dropped."""

    def __bool__(self) -> bool:
        return bool(self._masks)

    def __contains__(self, name: object) -> bool:
        return name in self._masks

    @property
    def names(self) -> list[str]:
        return list(self._masks)

    @property
    def sources(self) -> list[Source]:
        """What was registered, in that order."""
        return list(self._sources)

    def add(self, source: Source, located: Sequence[ShardedData], blocks: Mapping[str, Block]) -> None:
        """Registers what ``source`` located just now, all blocks kept."""
        self._sources.append(source)
        self.version += 1
        for data in located:
            self._tilings[data.name], self._ranks[data.name] = data.tiling, data.ranks
            self._shapes[data.name] = data.shape
            block = self._blocks[data.name] = blocks[data.name]
            self._masks[data.name] = [BlockMask.full(shard.rect, block, shard.tensor.device) for shard in data.shards]

    def drop(self, name: str) -> None:
        """Forgets one table's masks; its source stays, for the sake of the others in it."""
        self.version += 1
        del self._masks[name], self._tilings[name], self._blocks[name], self._ranks[name], self._shapes[name]

    @property
    def groups(self) -> dict[tuple[int, ...] | None, list[str]]:
        """The tables' names by the global ranks over which they lie, in an order that depends on neither rank nor
        registration; larger groups come later."""
        groups: dict[tuple[int, ...] | None, list[str]] = {}
        for name in sorted(self._ranks):
            groups.setdefault(self._ranks[name], []).append(name)
        return dict(sorted(groups.items(), key=lambda entry: (len(entry[0] or ()), entry[0] or ())))

    def agree(self, action: str, error: Exception | None, facts: Mapping[str, Any] | None = None) -> None:
        """Makes sure that no rank has an ``error``, or other ``facts`` than the rest. Collective over the tables'
        groups.

        Raises:
            ValueError: some rank has one; on every rank. One that nobody else waits for comes out as it is.
        """
        for ranks in self.groups:
            group = group_over(ranks)
            if group.size > 1:
                try:
                    group.agree(action, facts or {}, error)
                except ValueError as refused:
                    error = refused
        if error is not None:
            raise error

    def locate(self) -> dict[str, ShardedData]:
        """The registered tables as they lie now, by name. Does not communicate."""
        located = {data.name: data for source in self._sources for data in source.locate()}
        missing = [name for name in self._masks if name not in located]
        if missing:
            raise ValueError(f"The registered tables {missing} are no longer in the model; it holds {sorted(located)}.")
        for name, shape in self._shapes.items():
            if located[name].shape != shape:
                raise ValueError(
                    f"Table {name!r} was registered with the shape {shape} and has {located[name].shape} now: its mask "
                    "does not fit. Make a new sparsifier and register the model anew."
                )
        return {name: located[name] for name in self._masks}

    def held(self) -> dict[str, list[Tensor]]:
        """The pieces of the registered tables on this rank, by name."""
        pieces = {name: tensors for source in self._sources for name, tensors in source.held().items()}
        return {name: pieces[name] for name in self._masks if name in pieces}

    def masks(self, name: str) -> list[BlockMask]:
        """The masks of this rank's shards, in their order. The list is live: :meth:`commit` replaces it."""
        return self._masks[name]

    def masks_here(self, name: str) -> list[BlockMask]:
        """As :meth:`masks`, for a caller that may be alone and so can't make them follow their shards.

        Raises:
            ValueError: the shards have moved since the masks were last used.
        """
        if self.moved({name: self.locate()[name]}):
            raise ValueError(
                f"The shards of table {name!r} have moved since its masks were last used: call step(), apply_masks() "
                "or table_stats() on every rank first."
            )
        return self._masks[name]

    def block(self, name: str) -> Block:
        """What one bit of the table's masks stands for; known on ranks without a shard too."""
        return self._blocks[name]

    def shape(self, name: str) -> tuple[int, int]:
        """The table's global (rows, columns), as registered."""
        return self._shapes[name]

    def commit(self, data: ShardedData, masks: list[BlockMask], block: Block) -> None:
        """Replaces the masks of this rank's shards by masks of the rectangles that it holds in ``data``."""
        assert all(mask.block == block for mask in masks)
        assert tuple(mask.rect for mask in masks) == tuple(shard.rect for shard in data.shards)
        self.version += 1
        self._masks[data.name], self._blocks[data.name], self._tilings[data.name] = masks, block, data.tiling

    def moved(self, located: Mapping[str, ShardedData]) -> list[str]:
        """The tables whose rectangles differ from those that the bits were stored for. The same on every rank."""
        return [name for name, data in located.items() if data.tiling != self._tilings[name]]

    def follow(self, located: Mapping[str, ShardedData]) -> None:
        """Moves the bits of moved tables to their new holders. Collective over the groups of moved tables: one
        all-to-all each. Bits whose shard went to another device go there too, which is local."""
        moved = self.moved(located)
        for ranks, names in self.groups.items():
            if tables := [located[name] for name in names if name in moved]:
                self._move(tables, group_over(ranks))
        for name, data in located.items():
            for mask, shard in zip(self._masks[name], data.shards, strict=True):
                if mask.bits.device != shard.tensor.device:
                    self.version += 1
                    mask.bits = mask.bits.to(shard.tensor.device)

    def _move(self, tables: Sequence[ShardedData], group: Group) -> None:
        self.version += 1
        pieces: list[list[Tensor]] = [[] for _ in range(group.size)]
        sizes = [0] * group.size
        for table in tables:
            block = self._blocks[table.name]
            before = dict(zip(self._tilings[table.name][group.rank], self._masks[table.name], strict=True))
            for _, receiver, rect, old in _transfers(self._tilings[table.name], table.tiling, sender=group.rank):
                pieces[receiver].append(before[old].cut(rect).bits)
            for sender, _, rect, _ in _transfers(self._tilings[table.name], table.tiling, receiver=group.rank):
                sizes[sender] += _bytes_of(rect, block)
        received = group.all_to_all(pieces, sizes, torch.device("cpu"))
        at = [0] * group.size
        for table in tables:
            block = self._blocks[table.name]
            parts: list[BlockMask] = []
            for sender, _, rect, _ in _transfers(self._tilings[table.name], table.tiling, receiver=group.rank):
                count = _bytes_of(rect, block)
                parts.append(BlockMask(rect, block, received[sender][at[sender] : at[sender] + count].clone()))
                at[sender] += count
            self._masks[table.name] = [
                BlockMask.assemble(
                    shard.rect, block, [p for p in parts if p.rect.intersect(shard.rect) == p.rect], shard.tensor.device
                )
                for shard in table.shards
            ]
            self._tilings[table.name] = table.tiling


def _transfers(
    old: Tiling, new: Tiling, *, sender: int | None = None, receiver: int | None = None
) -> Iterator[tuple[int, int, Rect, Rect]]:
    """``(sender, receiver, common rectangle, old rectangle)`` of every message from an old owner to a new holder."""
    owners = [
        [rect for rect in dict.fromkeys(held) if all(rect not in o for o in old[:rank])]
        for rank, held in enumerate(old)
    ]
    for to in range(len(new)) if receiver is None else (receiver,):
        for target in dict.fromkeys(new[to]):
            for origin in range(len(old)) if sender is None else (sender,):
                for rect in owners[origin]:
                    common = rect.intersect(target)
                    if common is not None:
                        yield origin, to, common, rect


def _bytes_of(rect: Rect, block: Block) -> int:
    grid = grid_of(rect, block)
    return -(-grid.rows * grid.cols // 8)
