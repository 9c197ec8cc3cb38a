"""Masks and counts of lookups brought from the ranks that have them to those that need them, by one
all-to-all.

Every rank knows who has what and who needs what from the tilings, so nothing but bits is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dist_sparse.groups import Group, Parcels
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.pieces import written
from dist_sparse.tables.shards import Block, Rect, grid_of, owners

__all__ = ["Held", "Tiling", "assembled", "brought", "mask_bytes", "to_write"]

Tiling = tuple[tuple[Rect, ...], ...]


class Held(Protocol):
    """What a rank has of one table, by the rectangles of ``tiling``."""

    shape: tuple[int, int]
    tiling: Tiling
    block: Block
    masks: list[BlockMask]
    counts: list[Tensor] | None
    counted: torch.dtype | None


def brought(
    tables: Mapping[str, Held], tilings: Mapping[str, Tiling], group: Group
) -> tuple[dict[str, list[BlockMask]], dict[str, list[tuple[Rect, Tensor]]]]:
    """Return pieces of masks, and of counts, that cover this rank's rectangles in other
    ``tilings``. Collective over the group."""
    parcels = Parcels(group)
    masks: dict[str, list[tuple[Rect, Callable[[], Tensor]]]] = {name: [] for name in tilings}
    counts: dict[str, list[tuple[Rect, Callable[[], Tensor]]]] = {name: [] for name in tilings}
    for name, tiling in tilings.items():
        table = tables[name]
        before = dict(zip(table.tiling[group.rank], table.masks, strict=True))
        for _, receiver, rect, old in _transfers(table.tiling, tiling, sender=group.rank):
            parcels.send(receiver, before[old].cut(rect).bits)
            if table.counts is not None:
                count = table.counts[table.tiling[group.rank].index(old)]
                parcels.send(receiver, count[rect.row - old.row : rect.row_end - old.row])
        for sender, _, rect, _ in _transfers(table.tiling, tiling, receiver=group.rank):
            masks[name].append((rect, parcels.expect(sender, (mask_bytes(rect, table.block),))))
            if table.counted is not None:
                counts[name].append((rect, parcels.expect(sender, (rect.rows,), table.counted)))
    parcels.exchange(torch.device("cpu"))
    found: dict[str, list[BlockMask]] = {}
    counted: dict[str, list[tuple[Rect, Tensor]]] = {}
    for name in tilings:
        block = tables[name].block
        found[name] = [BlockMask(rect, block, read().clone()) for rect, read in masks[name]]
        counted[name] = [(rect, read()) for rect, read in counts[name]]
    return found, counted


def to_write(tables: Mapping[str, Held], group: Group) -> dict[str, list[BlockMask]]:
    """Return what this rank writes of each mask to a checkpoint: see
    :func:`~dist_sparse.sparsifiers.pieces.written`.

    Local, unless a border of columns cuts bytes of a mask: then collective over the group.
    """
    found: dict[str, list[BlockMask]] = {}
    cut: dict[str, Tiling] = {}
    for name, table in tables.items():
        pairs = [
            [(rect, to) for rect in held if (to := written(rect, table.block, table.shape)).numel]
            for held in owners(table.tiling)
        ]
        if any(
            grid_of(to, table.block).col_end > grid_of(rect, table.block).col_end
            for held in pairs
            for rect, to in held
        ):
            cut[name] = tuple(tuple(to for _, to in held) for held in pairs)
        else:
            masks = {mask.rect: mask for mask in table.masks}
            found[name] = [
                masks[rect] if to == rect else masks[rect].cut(to) for rect, to in pairs[group.rank]
            ]
    if cut:
        parts, _ = brought(tables, cut, group)
        for name, tiling in cut.items():
            own, block = tiling[group.rank], tables[name].block
            found[name] = [assembled(rect, block, parts[name], torch.device("cpu")) for rect in own]
    return found


def assembled(
    rect: Rect, block: Block, pieces: Sequence[BlockMask], device: torch.device
) -> BlockMask:
    """Return the mask of ``rect`` from those of the pieces that are inside it."""
    inside = [piece for piece in pieces if piece.rect.intersect(rect) == piece.rect]
    return BlockMask.assemble(rect, block, inside, device)


def mask_bytes(rect: Rect, block: Block) -> int:
    """Return how many bytes the bits of a shard take."""
    return grid_of(rect, block).bytes


def _transfers(
    old: Tiling, new: Tiling, *, sender: int | None = None, receiver: int | None = None
) -> Iterator[tuple[int, int, Rect, Rect]]:
    """``(sender, receiver, common rectangle, old rectangle)`` of every message from an old owner to
    a new holder."""
    owned = owners(old)
    for to in range(len(new)) if receiver is None else (receiver,):
        for target in dict.fromkeys(new[to]):
            for origin in range(len(old)) if sender is None else (sender,):
                for rect in owned[origin]:
                    common = rect.intersect(target)
                    if common is not None:
                        yield origin, to, common, rect
