"""Saved masks of tables, and how often each row was looked up: what a state holds, and how the
shards of now read it.

A state has a tensor of each table for torch.distributed.checkpoint, in global coordinates: eight
blocks of a row of blocks to a byte, each row of blocks beginning a new byte; the lookups of each
row. It also has this rank's pieces, keyed by their global rectangle, for torch.save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dist_sparse.checks import integer
from dist_sparse.facts import cut, from_json
from dist_sparse.masking.masks import BitWriter, BlockMask, pack, unpack
from dist_sparse.sparsifiers.digest import hash_tensor
from dist_sparse.tables.chunked import ChunkedTensor
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of

__all__ = [
    "COUNTED",
    "MOST_COUNTED",
    "block_of",
    "copy_counts",
    "counts_from",
    "entries_of",
    "masks_from",
    "new_counts",
    "saved_counts",
    "saved_mask",
    "tables_of",
    "written",
]

COUNTED = (torch.int32, torch.float64)
"""Dtypes of counts: lookups that are never forgotten are integers; those that decay have fractions,
so that a row that is looked up once between two mask updates keeps its share of the traffic."""

MOST_COUNTED = 1 << 30
"""Lookups of a row from which on more make no difference. Half of what its int32 holds, so that so
many more can be counted before it has to be clamped."""


def written(rect: Rect, block: Block, shape: tuple[int, int]) -> Rect:
    """Return what the owner of the shard ``rect`` writes of a table's mask: the bytes whose first
    block begins in it.

    Over all shards they tile the table. Blocks of the last byte may belong to other shards.
    """
    height, cols = block[0], 8 * block[1]
    top, bottom = -(-rect.row // height) * height, -(-rect.row_end // height) * height
    left, right = -(-rect.col // cols) * cols, -(-rect.col_end // cols) * cols
    bottom, right = min(bottom, shape[0]), min(right, shape[1])
    return Rect(top, left, max(bottom - top, 0), max(right - left, 0))


def saved_mask(
    shape: tuple[int, int], block: Block, writes: Sequence[BlockMask], masks: Sequence[BlockMask]
) -> ChunkedTensor:
    """Return what a state holds of a table's mask.

    Args:
        shape: of the table.
        writes: what this rank writes: see :func:`written`.
        masks: of this rank's shards.
    """
    grid = grid_of(Rect(0, 0, *shape), block)
    chunks = [
        ((mask.grid.row, mask.grid.col // 8), _bytes_of(mask)) for mask in writes if mask.blocks
    ]
    wants = [
        ((mask.grid.row, mask.grid.col // 8), (mask.grid.rows, _columns(mask))) for mask in masks
    ]
    pieces = [
        {
            "rect": tuple(mask.rect),
            "bits": mask.bits.to("cpu", copy=True),
            "hash": f"{hash_tensor(mask.bits):016x}",
        }
        for mask in masks
    ]
    return ChunkedTensor((grid.rows, -(-grid.cols // 8)), torch.uint8, chunks, wants, pieces)


def saved_counts(
    rows: int,
    dtype: torch.dtype,
    rects: Sequence[Rect],
    owned: Sequence[Rect],
    counts: Sequence[Tensor],
) -> ChunkedTensor:
    """Return what a state holds of a table's lookups.

    Args:
        rows: of the table.
        dtype: of the counts.
        rects: of this rank's shards.
        owned: those that no other rank holds before this one. Shards of the same rows have the same
            counts: the leftmost is written.
        counts: of this rank's shards.
    """
    kepts = [count.to("cpu", copy=True) for count in counts]
    pieces = [
        {"rect": tuple(rect), "counts": kept} for rect, kept in zip(rects, kepts, strict=True)
    ]
    writes = [
        ((rect.row,), kept)
        for rect, kept in zip(rects, kepts, strict=True)
        if rect in owned and rect.col == 0
    ]
    return ChunkedTensor(
        (rows,), dtype, writes, [((rect.row,), (rect.rows,)) for rect in rects], pieces
    )


def tables_of(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the JSON values of each table in a state: its shape and block, its configuration, its
    mask updates, and the blocks that it has removed.

    Raises:
        ValueError: a value is missing, unknown or malformed; names the table and the key.
    """
    tables = from_json("the tables of the state", saved.get("tables"))
    for name, entry in tables.items():
        _check_entry(name, entry)
    return tables


def _check_entry(name: str, entry: object) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
        raise ValueError(f"Table {name!r}: the state has no configuration of it.")
    if unknown := sorted(set(entry) - {"shape", "block", "updates", "removed", "config"}):
        raise ValueError(
            f"Table {name!r}: the state has the unknown keys {unknown}: it may be of a newer"
            " release."
        )
    for key in ("updates", "removed"):
        if entry.get(key) is not None:
            integer(key, entry[key], least=0, of=name)


def entries_of(saved: Mapping[str, Any], blocks: Mapping[str, Block]) -> dict[str, dict[str, Any]]:
    """Return what a state has of each table: its JSON values, and this rank's ``pieces``.

    Args:
        saved: ``tables``, JSON; ``masks`` and ``counts`` by table.
        blocks: what a bit of the registered tables' masks stands for: DCP has loaded by it.

    Raises:
        ValueError: a part is missing or malformed, or DCP has loaded masks of other blocks.
    """
    entries = tables_of(saved)
    all_masks, all_counts = (_mapping(part, saved.get(part, {})) for part in ("masks", "counts"))
    for name, entry in entries.items():
        mask, counts = all_masks.get(name), all_counts.get(name)
        if mask is None and name not in blocks:
            continue  # DCP leaves out what was not asked for; the caller names it
        if not isinstance(mask, ChunkedTensor):
            raise ValueError(f"Table {name!r}: the state has no mask of it.")
        if mask.loaded is not None and (block := block_of(entry)) != blocks.get(name):
            raise ValueError(
                f"Table {name!r}: its masks were saved by blocks {block}, and it is registered by"
                f" {blocks.get(name)}: register it with the sparse_block_shape of the checkpoint."
            )
        entry["pieces"] = _pieces_of(name, mask)
        if mask.loaded is not None:
            for piece, chunk in zip(entry["pieces"], mask.loaded, strict=True):
                piece["bits"], piece["hash"] = (
                    _bits_of(Rect(*piece["rect"]), blocks[name], chunk),
                    None,
                )
        if isinstance(counts, ChunkedTensor):
            counted = [piece.get("counts") for piece in _pieces_of(name, counts)]
            _add_counts(name, entry["pieces"], counted if counts.loaded is None else counts.loaded)
    return entries


def _mapping(part: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"Invalid state: its {part} must be a mapping by table, and are a"
            f" {type(value).__name__}."
        )
    return value


def _pieces_of(name: str, saved: ChunkedTensor) -> list[dict[str, Any]]:
    """Copies of this rank's pieces of a saved tensor."""
    if not isinstance(saved.kept, list) or not all(isinstance(piece, dict) for piece in saved.kept):
        raise ValueError(
            f"Table {name!r}: the state has no pieces of it, but {cut(repr(saved.kept), 80)}."
        )
    return [dict(piece) for piece in saved.kept]


def _add_counts(name: str, pieces: Sequence[dict[str, Any]], counts: Sequence[object]) -> None:
    """Add the counts of lookups to the pieces of a mask, which have the same order."""
    if len(pieces) != len(counts):
        raise ValueError(
            f"Table {name!r}: the state has {len(pieces)} pieces of masks and {len(counts)} of"
            " counts."
        )
    for piece, count in zip(pieces, counts, strict=True):
        piece["counts"] = count


def block_of(entry: Mapping[str, Any]) -> Block:
    """Return the block of one table's saved masks.

    Raises:
        ValueError: it is not two positive ints.
    """
    height, width = _ints("block", entry.get("block"), 2)
    if min(height, width) < 1:
        raise ValueError(
            f"Invalid block={entry.get('block')!r} in the state: must be two positive ints."
        )
    return height, width


def masks_from(data: ShardedData, entry: Mapping[str, Any]) -> list[BlockMask]:
    """Return the masks of this rank's shards of one table from its saved ``entry``.

    Raises:
        ValueError: it does not fit the table, was changed since it was saved, or does not cover the
            shards.
    """
    if (shape := entry.get("shape")) not in (data.shape, list(data.shape)):
        raise ValueError(
            f"Table {data.name!r} has the shape {data.shape}; the masks in the state are of"
            f" {shape}."
        )
    try:
        block = block_of(entry)
        pieces = [_piece(piece, block) for piece in entry["pieces"]]
        masks = []
        for shard in data.shards:
            parts = [
                (p, common) for p in pieces if (common := p.rect.intersect(shard.rect)) is not None
            ]
            if [p.rect for p, _ in parts] == [shard.rect]:  # as it is: nothing to unpack
                masks.append(BlockMask(shard.rect, block, parts[0][0].bits.to(shard.tensor.device)))
            else:
                cut = [p.cut(common) for p, common in parts]
                masks.append(BlockMask.assemble(shard.rect, block, cut, shard.tensor.device))
    except ValueError as error:
        raise ValueError(
            f"Table {data.name!r}: {error} Outside a checkpoint of torch.distributed.checkpoint, a"
            " state_dict() has only the bits of its own rank."
        ) from error
    return masks


def counts_from(data: ShardedData, entry: Mapping[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Return the lookup counts of this rank's shards of one table from its saved ``entry``:
    ``(rect.rows,)``.

    The pieces cover the shards, or :func:`masks_from` has refused them. Shards of the same rows
    have the same counts.

    Raises:
        ValueError: a piece has no counts, or what it has can't be.
    """
    found = new_counts(data, dtype)
    for piece in entry["pieces"]:
        rect, saved = Rect(*piece["rect"]), piece.get("counts")
        if saved is None:
            raise ValueError(
                f"Table {data.name!r}: the state has no counts of lookups; it is of another score."
            )
        fits = isinstance(saved, Tensor) and saved.dtype in COUNTED and saved.shape == (rect.rows,)
        if not fits or not bool(((saved >= 0) & (saved < torch.inf)).all()):
            raise ValueError(
                f"Table {data.name!r}: the counts of {rect} must be {rect.rows} int32 or float64"
                " >= 0."
            )
        copy_counts(found, [shard.rect for shard in data.shards], saved, rect)
    return found


def new_counts(data: ShardedData, dtype: torch.dtype) -> list[Tensor]:
    """Return a count of 0 for each row of this rank's shards: ``(rect.rows,)`` on the shard's
    device."""
    return [
        torch.zeros(shard.rect.rows, dtype=dtype, device=shard.tensor.device)
        for shard in data.shards
    ]


def copy_counts(counts: Sequence[Tensor], rects: Sequence[Rect], rows: Tensor, rect: Rect) -> None:
    """Copy the counts ``rows`` of ``rect`` into those of the shards ``rects`` that overlap it."""
    for count, own in zip(counts, rects, strict=True):
        if (common := own.intersect(rect)) is not None:
            first = common.row - rect.row
            count[common.row - own.row : common.row_end - own.row] = rows[
                first : first + common.rows
            ]


def _columns(mask: BlockMask) -> int:
    """Bytes that the mask touches in a row of blocks."""
    return -(-(mask.grid.col % 8 + mask.grid.cols) // 8)


def _bytes_of(mask: BlockMask) -> Tensor:
    """The bits of a mask that begins with a byte, a row of bytes for each row of blocks: uint8, on
    the CPU."""
    rows, cols, wide = mask.grid.rows, mask.grid.cols, _columns(mask)
    assert mask.grid.col % 8 == 0
    if cols % 8 == 0:
        return mask.bits.view(rows, wide).to("cpu", copy=True)
    out = torch.empty(rows, wide, dtype=torch.uint8)
    for first, last in mask.row_chunks():
        flags = functional.pad(mask.flags(first, last), (0, 8 * wide - cols))
        out[first:last] = pack(flags.flatten()).view(-1, wide)
    return out


def _bits_of(rect: Rect, block: Block, chunk: Tensor) -> Tensor:
    """The bits of the mask of ``rect`` from the bytes that it touches,
    ``(rows of blocks, bytes)``."""
    grid, wide = grid_of(rect, block), chunk.shape[1]
    if grid.col % 8 == 0 and grid.cols % 8 == 0:
        return chunk.flatten()
    writer = BitWriter(grid.blocks, chunk.device)
    lead, step = grid.col % 8, max(1, (1 << 20) // (8 * wide))
    for part in torch.split(chunk, step):
        flags = unpack(part.flatten(), 8 * part.numel()).view(-1, 8 * wide)
        writer.add(flags[:, lead : lead + grid.cols].contiguous().flatten())
    return writer.close()


def _piece(saved: Mapping[str, Any], block: Block) -> BlockMask:
    rect, bits = Rect(*_ints("rect", saved.get("rect"), 4)), saved.get("bits")
    if min(rect) < 0 or not isinstance(bits, Tensor):
        raise ValueError(
            f"Invalid piece of masks {rect} in the state: a rectangle and its bits are needed."
        )
    mask = BlockMask(rect, block, bits)
    if saved.get("hash") not in (None, f"{hash_tensor(bits):016x}"):
        raise ValueError(f"The bits of {rect} are not those that were saved: their hash differs.")
    return mask


def _ints(key: str, value: object, count: int) -> tuple[int, ...]:
    if (
        isinstance(value, (tuple, list))
        and len(value) == count
        and all(type(each) is int for each in value)
    ):
        return tuple(value)
    raise ValueError(
        f"Invalid {key} in the state, of type {type(value).__name__}: must be {count} ints."
    )
