"""The last mask update, kept so that it can be undone.

An update writes zeros over the weights that it removes. :class:`Undo` keeps these weights and their
optimizer state before that, on the rank that holds the shard, together with the masks of before.
Weights that stay train on, and are never kept or put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_sparse.masking.block_masks import MadeMasks
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.packed_store import TableMasks
from dist_sparse.sparsifiers.step import Masks
from dist_sparse.tables.shards import Shard, ShardedData


@dataclass(frozen=True)
class _Removed:
    """What an update removes of one shard.

    Args:
        mask: bits of 0 for newly removed blocks.
        rows: flags of the rows that it leaves nothing of, bool ``(rect.rows,)``.
        values: the removed elements of the weights, then those of each optimizer state; empty for a
            state that belongs to no weight.
    """

    mask: BlockMask
    rows: Tensor
    values: list[Tensor]


class LastUpdate:
    """Keeps one mask update. All methods are local.

    Attributes:
        before: the masks before the update, by table; empty if there is none to undo.
    """

    def __init__(self) -> None:
        self.before: Mapping[str, TableMasks] = {}
        self._removed: dict[str, list[_Removed]] = {}

    def keep(
        self, masks: Masks, located: Mapping[str, ShardedData], made: Mapping[str, MadeMasks]
    ) -> None:
        """Take the place of the update that was kept so far. Called before anything is zeroed."""
        states = masks.hooks.states()
        self._removed = {}
        for name, new in made.items():
            shards = zip(located[name].shards, masks.tables.masks(name), new.masks, strict=True)
            self._removed[name] = [
                _removed_of(_tensors_of(shard, states), old, mask)
                for shard, old, (mask, _) in shards
            ]
        self.before = masks.tables.snapshot()

    def check(self, located: Mapping[str, ShardedData]) -> None:
        """Refuse to undo an update of tables that are stored elsewhere by now.

        Raises:
            ValueError: names them.
        """
        moved = [name for name, one in self.before.items() if located[name].tiling != one.tiling]
        if moved:
            raise ValueError(
                f"The shards of the tables {moved} have moved since the last mask update, which"
                " can't be undone now: call guard() before tables are resharded."
            )

    @torch.no_grad()
    def undo(self, masks: Masks, located: Mapping[str, ShardedData]) -> None:
        """Put masks, removed weights and their optimizer state back, as they were before."""
        masks.tables.load(self.before)
        # Zeroes the blocks that the update brought back; the weights below must come later.
        masks.hooks.renew()
        states = masks.hooks.states()
        for name, removed in self._removed.items():
            for shard, one in zip(located[name].shards, removed, strict=True):
                # A state that an optimizer has made since comes behind the others, and stays.
                for tensor, values in zip(_tensors_of(shard, states), one.values, strict=False):
                    _put(tensor, one, values)
        masks.hooks.end_step()
        self.forget()

    def forget(self) -> None:
        """Release what is kept."""
        self.before, self._removed = {}, {}


def _tensors_of(shard: Shard, states: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    """Return the weights of a shard and all of its optimizer state."""
    return [shard.tensor, *states.get(shard.tensor.data_ptr(), ())]


def _removed_of(tensors: Sequence[Tensor], old: BlockMask, new: BlockMask) -> _Removed:
    # Masks of other blocks can't be compared: then all that is removed counts as new.
    newly = new.bits if old.block != new.block else new.bits | ~old.bits
    mask = BlockMask(new.rect, new.block, newly)
    removed = _Removed(mask, new.dead_rows() & ~old.dead_rows(), [])
    for tensor in tensors:
        parts = [part[flags] for part, flags in _parts(tensor, removed)]
        removed.values.append(torch.cat([tensor.data.new_empty(0), *parts]))
    return removed


def _put(tensor: Tensor, removed: _Removed, values: Tensor) -> None:
    """Write back what was kept of a tensor."""
    at = 0
    for part, flags in _parts(tensor, removed):
        count = int(flags.sum())
        part.masked_scatter_(flags, values[at : at + count])
        at += count


def _parts(tensor: Tensor, removed: _Removed) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a shard's weights or optimizer state, live, and flags of the elements that an
    update removes."""
    rect = removed.mask.rect
    if tuple(tensor.shape) == (rect.rows, rect.cols):
        for rows, kept in removed.mask.element_chunks(only_removing=True):
            yield tensor.data[rows], ~kept
    elif tensor.numel() == rect.rows:
        # One number for each row: it is still in use where a part of the row stays.
        yield tensor.data.view(-1), removed.rows.to(tensor.device)
    # A step count belongs to no weight.
