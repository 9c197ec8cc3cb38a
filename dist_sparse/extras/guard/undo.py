"""The last mask update, kept so that it can be undone: masks, removed weights and their optimizer
state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_sparse.checkpoint.host_memory import refuse_without_memory
from dist_sparse.checkpoint.storage import Staging
from dist_sparse.masking.block_masks import NewMasks
from dist_sparse.masking.device import on_host
from dist_sparse.masking.masks import BlockMask, bit_total, removed_parts
from dist_sparse.sparsifiers.masks import Masks
from dist_sparse.sparsifiers.packed_store import TableMasks
from dist_sparse.tables.memory import ByMemory
from dist_sparse.tables.shards import Located


@dataclass(frozen=True)
class _Removed:
    """The elements of one shard that an update removes.

    Args:
        mask: bits of 0 for newly removed blocks.
        rows: flags of the rows that are newly removed whole, bool ``(rect.rows,)``.
        values: for the weights and then for each optimizer state, the removed elements, part by
            part, in CPU memory; empty for a state that is neither by element nor by row.
    """

    mask: BlockMask
    rows: Tensor
    values: list[list[Tensor]]


class LastUpdate:
    """Keeps one mask update. All methods but :meth:`keep` are local.

    Attributes:
        before: the masks before the update, by table; empty if there is none to undo.
    """

    def __init__(self) -> None:
        self.before: Mapping[str, TableMasks] = {}
        self._removed: dict[str, list[_Removed]] = {}

    def keep(self, masks: Masks, located: Located, made: Mapping[str, NewMasks]) -> None:
        """Replace the update that was kept so far. Must be called before anything is zeroed.
        Collective over the tables' groups.

        Raises:
            ValueError: a machine has too little memory; on every rank, before anything is copied.
        """
        states = masks.enforcer.states()
        # Not in self until all is copied: a refusal leaves what was kept before.
        found: dict[str, list[_Removed]] = {}
        sizes = []
        for name, new in made.items():
            found[name] = []
            shards = zip(located[name].shards, masks.tables.masks(name), new.masks, strict=True)
            for shard, old, (mask, _) in shards:
                # Masks of different blocks can't be compared: all that is removed counts as new.
                newly = mask.bits if old.block != mask.block else mask.bits | ~old.bits
                removed = BlockMask(mask.rect, mask.block, newly)
                rows = mask.dead_rows() & ~old.dead_rows()
                found[name].append(_Removed(removed, rows, []))
                sizes.append(_most_bytes(_tensors_of(shard.tensor, states), removed, rows))
        nbytes = sum(map(int, on_host(sizes)))
        for group, _ in masks.tables.over_groups(made):
            refuse_without_memory(
                "step()", "Remove less in an update, or train without a guard.", nbytes, group
            )
        staging = Staging()
        for name, of_table in found.items():
            for shard, one in zip(located[name].shards, of_table, strict=True):
                for tensor in _tensors_of(shard.tensor, states):
                    parts = removed_parts(tensor, one.mask, one.rows)
                    one.values.append([_on_host(part[flags], staging) for part, flags in parts])
        self.before, self._removed = masks.tables.snapshot(), found

    def forget_moved(self, located: Located) -> None:
        """Release what is kept, if tables are stored elsewhere by now."""
        if any(located[name].tiling != one.tiling for name, one in self.before.items()):
            self.forget()

    @torch.no_grad()
    def undo(self, masks: Masks, located: Located) -> None:
        """Put masks, removed weights and their optimizer state back, as they were before."""
        masks.tables.load(self.before)
        # First, because it zeroes what the old masks remove. The restored weights come after it.
        masks.enforcer.renew()
        states = masks.enforcer.states()
        for name, removed in self._removed.items():
            for shard, one in zip(located[name].shards, removed, strict=True):
                # strict=False: a state created since comes after the others, and stays as it is.
                tensors = _tensors_of(shard.tensor, states)
                for tensor, kept in zip(tensors, one.values, strict=False):
                    parts = removed_parts(tensor, one.mask, one.rows)
                    for (part, flags), values in zip(parts, kept, strict=True):
                        part.masked_scatter_(flags, values.to(part.device))
        masks.enforcer.end_step()
        self.forget()

    def forget(self) -> None:
        """Release what is kept."""
        self.before, self._removed = {}, {}


def _most_bytes(tensors: Sequence[Tensor], removed: BlockMask, rows: Tensor) -> Tensor:
    """Return an upper bound for the bytes that an update removes from a shard: the elements of
    these blocks, and of state by row these rows. An int64 scalar on the device of the mask."""
    rect = removed.rect
    # Not removed.blocks - bit_total(removed.bits): bits that pad the last byte may be 1.
    elements = bit_total(~removed.bits) * math.prod(removed.block)
    by_element = sum(each.element_size() for each in tensors if each.numel() == rect.numel)
    by_row = sum(each.element_size() for each in tensors if each.numel() == rect.rows)
    return elements * by_element + rows.sum() * by_row


def _on_host(values: Tensor, staging: Staging) -> Tensor:
    """Return removed values in CPU memory: until the next validation, they may be half of the
    tables. Pageable memory, as torch would round pinned memory up to powers of two."""
    return values if values.is_cpu else staging.copy(values)


def _tensors_of(weights: Tensor, states: ByMemory[list[Tensor]]) -> list[Tensor]:
    """Return the weights of a shard and all of its optimizer state."""
    return [weights, *(states.get(weights) or ())]
