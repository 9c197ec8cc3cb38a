"""The last mask update, kept so that it can be undone: masks, removed weights and their optimizer
state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_sparse.checkpoint.storage import Staging
from dist_sparse.masking.block_masks import NewMasks
from dist_sparse.masking.masks import BlockMask, removed_parts
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
    """Keeps one mask update. All methods are local.

    Attributes:
        before: the masks before the update, by table; empty if there is none to undo.
    """

    def __init__(self) -> None:
        self.before: Mapping[str, TableMasks] = {}
        self._removed: dict[str, list[_Removed]] = {}

    def keep(self, masks: Masks, located: Located, made: Mapping[str, NewMasks]) -> None:
        """Replace the update that was kept so far. Must be called before anything is zeroed."""
        states = masks.enforcer.states()
        staging = Staging()
        self._removed = {}
        for name, new in made.items():
            self._removed[name] = []
            shards = zip(located[name].shards, masks.tables.masks(name), new.masks, strict=True)
            for shard, old, (mask, _) in shards:
                # Masks of different blocks can't be compared: all that is removed counts as new.
                newly = mask.bits if old.block != mask.block else mask.bits | ~old.bits
                removed = BlockMask(mask.rect, mask.block, newly)
                rows = mask.dead_rows() & ~old.dead_rows()
                values = []
                for tensor in _tensors_of(shard.tensor, states):
                    parts = removed_parts(tensor, removed, rows)
                    values.append([_on_host(part[flags], staging) for part, flags in parts])
                self._removed[name].append(_Removed(removed, rows, values))
        self.before = masks.tables.snapshot()

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


def _on_host(values: Tensor, staging: Staging) -> Tensor:
    """Return removed values in CPU memory: until the next validation, they may be half of the
    tables. Pageable memory, as torch would round pinned memory up to powers of two."""
    return values if values.is_cpu else staging.copy(values)


def _tensors_of(weights: Tensor, states: ByMemory[list[Tensor]]) -> list[Tensor]:
    """Return the weights of a shard and all of its optimizer state."""
    return [weights, *(states.get(weights) or ())]
