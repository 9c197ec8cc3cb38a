"""The last mask update, kept so that it can be undone.

An update writes zeros over the weights that it removes. :class:`Undo` keeps these weights and their
optimizer state before that, on the rank that holds the shard, together with the masks of before.
Weights that stay train on, and are never kept or put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_sparse.masking.block_masks import MadeMasks
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.masks import Masks
from dist_sparse.sparsifiers.packed_store import TableMasks
from dist_sparse.tables.shards import ShardedData


@dataclass(frozen=True)
class _Removed:
    """What an update removes of one shard.

    Args:
        mask: bits of 0 for newly removed blocks.
        rows: flags of the rows that it leaves nothing of, bool ``(rect.rows,)``.
        weights: removed elements, in the order of the mask.
        states: optimizer states: of the removed elements, or of the rows; None for a state that
            belongs to neither.
    """

    mask: BlockMask
    rows: Tensor
    weights: Tensor
    states: list[Tensor | None]


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
                _removed_of(shard.tensor, states.get(shard.tensor.data_ptr(), ()), old, mask)
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
                _put(shard.tensor, one.mask, one.weights)
                # A state that an optimizer has made since comes behind the others, and stays.
                live = states.get(shard.tensor.data_ptr(), ())
                for state, kept in zip(live, one.states, strict=False):
                    _put_state(state, one, kept)
        masks.hooks.end_step()
        self.forget()

    def forget(self) -> None:
        """Release what is kept."""
        self.before, self._removed = {}, {}


def _removed_of(
    weights: Tensor, states: Sequence[Tensor], old: BlockMask, new: BlockMask
) -> _Removed:
    # Masks of other blocks can't be compared: then all that is removed counts as new.
    newly = new.bits if old.block != new.block else new.bits | ~old.bits
    mask = BlockMask(new.rect, new.block, newly)
    rows = new.dead_rows() & ~old.dead_rows()
    kept: list[Tensor | None] = []
    for state in states:
        if state.shape == weights.shape:
            kept.append(_taken(state, mask))
        elif state.numel() == new.rect.rows:
            # One number for each row: it is still in use where a part of the row stays.
            kept.append(state.data.view(-1)[rows.to(state.device)])
        else:
            # A step count belongs to no weight.
            kept.append(None)
    return _Removed(mask, rows, _taken(weights, mask), kept)


def _taken(tensor: Tensor, mask: BlockMask) -> Tensor:
    """Return the elements that a mask removes, flat, in its order."""
    parts = [tensor.data[rows][~kept] for rows, kept in mask.element_chunks(only_removing=True)]
    return torch.cat([tensor.data.new_empty(0), *parts])


def _put(tensor: Tensor, mask: BlockMask, values: Tensor) -> None:
    """Write back what :func:`_taken` has returned."""
    at = 0
    for rows, kept in mask.element_chunks(only_removing=True):
        removed = ~kept
        count = int(removed.sum())
        tensor.data[rows].masked_scatter_(removed, values[at : at + count])
        at += count


def _put_state(state: Tensor, removed: _Removed, values: Tensor | None) -> None:
    if values is None:
        return
    if tuple(state.shape) == (removed.mask.rect.rows, removed.mask.rect.cols):
        _put(state, removed.mask, values)
    else:
        state.data.view(-1)[removed.rows.to(state.device)] = values
