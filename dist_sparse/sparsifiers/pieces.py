"""Saved pieces of a table, checked and put together: masks, and how often each row was looked up.

A piece is what one shard had when it was saved, keyed by its global rectangle; the shards of now may have others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers.digest import hash_tensor
from dist_sparse.tables.shards import Block, Rect, ShardedData

__all__ = ["block_of", "copy_counts", "counts_from", "masks_from", "new_counts"]


def block_of(entry: Mapping[str, Any]) -> Block:
    """Return the block of one table's saved masks.

    Raises:
        ValueError: it is not two positive ints.
    """
    height, width = _ints("block", entry.get("block"), 2)
    if min(height, width) < 1:
        raise ValueError(f"Invalid block={entry.get('block')!r} in the state: must be two positive ints.")
    return height, width


def masks_from(data: ShardedData, entry: Mapping[str, Any]) -> list[BlockMask]:
    """Return the masks of this rank's shards of one table from its saved ``entry``.

    Raises:
        ValueError: it does not fit the table, was changed since it was saved, or does not cover the shards.
    """
    if (shape := entry.get("shape")) is None or tuple(shape) != data.shape:
        raise ValueError(f"Table {data.name!r} has the shape {data.shape}; the masks in the state are of {shape}.")
    try:
        block = block_of(entry)
        pieces = [_piece(piece, block) for piece in entry["pieces"]]
        masks = []
        for shard in data.shards:
            parts = [p.cut(common) for p in pieces if (common := p.rect.intersect(shard.rect)) is not None]
            masks.append(BlockMask.assemble(shard.rect, block, parts, shard.tensor.device))
    except ValueError as error:
        raise ValueError(f"Table {data.name!r}: {error} A state_dict() holds only the bits of its own rank.") from error
    return masks


def counts_from(data: ShardedData, entry: Mapping[str, Any]) -> list[Tensor]:
    """Return the lookup counts of this rank's shards of one table from its saved ``entry``: int32 ``(rect.rows,)``.

    The pieces cover the shards, or :func:`masks_from` has refused them. Shards of the same rows have the same counts.

    Raises:
        ValueError: a piece has no counts, or what it has can't be.
    """
    found = new_counts(data)
    for piece in entry["pieces"]:
        rect, saved = Rect(*piece["rect"]), piece.get("counts")
        if saved is None:
            raise ValueError(f"Table {data.name!r}: the state has no counts of lookups; it is of another score.")
        fits = isinstance(saved, Tensor) and saved.dtype == torch.int32 and saved.shape == (rect.rows,)
        if not fits or bool((saved < 0).any()):
            raise ValueError(f"Table {data.name!r}: the counts of {rect} must be {rect.rows} int32 >= 0.")
        copy_counts(found, [shard.rect for shard in data.shards], saved, rect)
    return found


def new_counts(data: ShardedData) -> list[Tensor]:
    """Return a count of 0 for each row of this rank's shards: int32 ``(rect.rows,)`` on the shard's device."""
    return [torch.zeros(shard.rect.rows, dtype=torch.int32, device=shard.tensor.device) for shard in data.shards]


def copy_counts(counts: Sequence[Tensor], rects: Sequence[Rect], rows: Tensor, rect: Rect) -> None:
    """Copy the counts ``rows`` of ``rect`` into those of the shards ``rects`` that overlap it."""
    for count, own in zip(counts, rects, strict=True):
        if (common := own.intersect(rect)) is not None:
            first = common.row - rect.row
            count[common.row - own.row : common.row_end - own.row] = rows[first : first + common.rows]


def _piece(saved: Mapping[str, Any], block: Block) -> BlockMask:
    rect, bits = Rect(*_ints("rect", saved.get("rect"), 4)), saved.get("bits")
    if min(rect) < 0 or not isinstance(bits, Tensor):
        raise ValueError(f"Invalid piece of masks {rect} in the state: a rectangle and its bits are needed.")
    mask = BlockMask(rect, block, bits)
    if saved.get("hash") not in (None, f"{hash_tensor(bits):016x}"):
        raise ValueError(f"The bits of {rect} are not those that were saved: their hash differs.")
    return mask


def _ints(key: str, value: object, count: int) -> tuple[int, ...]:
    if isinstance(value, (tuple, list)) and len(value) == count and all(type(each) is int for each in value):
        return tuple(value)
    raise ValueError(f"Invalid {key} in the state, of type {type(value).__name__}: must be {count} ints.")
