"""Pieces of masks and lookup counts, by global rectangle: exchanged between ranks, saved, and read
back for the current shards.

A state has a tensor of each table for torch.distributed.checkpoint, in global coordinates: eight
blocks of a row of blocks to a byte, each row of blocks beginning a new byte; the lookups of each
row. It also has this rank's pieces, keyed by their global rectangle, for torch.save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dist_sparse.checks import integer
from dist_sparse.facts import cut, from_json
from dist_sparse.groups import Parcels
from dist_sparse.masking.masks import BitWriter, BlockMask, pack, unpack
from dist_sparse.sparsifiers.digest import hash_tensor
from dist_sparse.tables.chunked import ChunkedTensor
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of, owners

Tiling = tuple[tuple[Rect, ...], ...]
"""The rectangles of each rank."""

MOST_COUNTED = 1 << 30
"""Lookups of a row from which on more make no difference. Half of the range of int32, so that as
many again can be counted before a clamp."""


class _Route(NamedTuple):
    """From the owners in one tiling to the holders in another; ``rank`` is this rank."""

    rank: int
    old: Tiling
    new: Tiling


# Exchange. Both sides derive the order of messages from the tilings, so only bits are sent.


def send_masks(
    parcels: Parcels, rank: int, masks: Sequence[BlockMask], block: Block, old: Tiling, new: Tiling
) -> Callable[[], list[BlockMask]]:
    """Pack the parts of a table's masks that other holders need.

    Args:
        parcels: over the ranks of the table.
        rank: this rank in that group.
        masks: of this rank's rectangles of ``old``.
        block: of the masks, known on ranks without one too.
        old, new: the rectangles before, and the rectangles to cover.

    Returns:
        A function that gives pieces that cover this rank's rectangles of ``new``, once the parcels
        have been exchanged.
    """
    held = dict(zip(old[rank], masks, strict=True))
    expected = _send(
        parcels,
        _Route(rank, old, new),
        # Blocks that a border cuts are in both parts; assembled() compares them.
        lambda rect, source: held[source].cut(rect).bits,
        lambda rect: grid_of(rect, block).bytes,
        torch.uint8,
    )
    # Copies: a view would keep the received bytes of all tables alive.
    return lambda: [BlockMask(rect, block, read().clone()) for rect, read in expected]


def send_counts(
    parcels: Parcels,
    rank: int,
    counts: Sequence[Tensor],
    dtype: torch.dtype,
    old: Tiling,
    new: Tiling,
) -> Callable[[], list[tuple[Rect, Tensor]]]:
    """Pack a table's lookup counts, one number per row, as :func:`send_masks` packs its masks."""
    held = dict(zip(old[rank], counts, strict=True))
    expected = _send(
        parcels,
        _Route(rank, old, new),
        lambda rect, source: held[source][rect.row - source.row : rect.row_end - source.row],
        lambda rect: rect.rows,
        dtype,
    )
    return lambda: [(rect, read()) for rect, read in expected]


def _send(
    parcels: Parcels,
    route: _Route,
    part: Callable[[Rect, Rect], Tensor],
    length: Callable[[Rect], int],
    dtype: torch.dtype,
) -> list[tuple[Rect, Callable[[], Tensor]]]:
    """Pack the parts of this rank's rectangles for other holders. Return what arrives, by
    rectangle."""
    owned = owners(route.old)
    for receiver, wanted in enumerate(route.new):
        for rect, source in _common(owned[route.rank], wanted):
            parcels.send(receiver, part(rect, source))
    # The senders loop over the same rectangles in the same order.
    expected = []
    for sender, theirs in enumerate(owned):
        for rect, _ in _common(theirs, route.new[route.rank]):
            expected.append((rect, parcels.expect(sender, (length(rect),), dtype)))
    return expected


def _common(owned: Sequence[Rect], wanted: Sequence[Rect]) -> Iterator[tuple[Rect, Rect]]:
    """Yield ``(common rectangle, owned rectangle)`` of each message from an owner to a holder."""
    # A rank may hold a rectangle twice, and needs it once.
    for target in dict.fromkeys(wanted):
        for source in owned:
            if (rect := source.intersect(target)) is not None:
                yield rect, source


def assembled(
    rect: Rect, block: Block, pieces: Sequence[BlockMask], device: torch.device
) -> BlockMask:
    """Return the mask of ``rect`` from the pieces inside it."""
    # A rank has pieces of all its shards; overlapping parts of blocks are compared.
    inside = [piece for piece in pieces if piece.rect.intersect(rect) == piece.rect]
    return BlockMask.assemble(rect, block, inside, device)


# Saving.


def written(rect: Rect, block: Block, shape: tuple[int, int]) -> Rect:
    """Return the part of a table's mask that the owner of the shard ``rect`` writes: the bytes
    whose first block begins in it.

    Over all shards they tile the table. Blocks of the last byte may belong to other shards.
    """
    # A byte is eight blocks of one row of blocks.
    height, cols = block[0], 8 * block[1]
    top, bottom = -(-rect.row // height) * height, -(-rect.row_end // height) * height
    left, right = -(-rect.col // cols) * cols, -(-rect.col_end // cols) * cols
    # The last block of a table may be smaller.
    bottom, right = min(bottom, shape[0]), min(right, shape[1])
    return Rect(top, left, max(bottom - top, 0), max(right - left, 0))


def saved_mask(
    shape: tuple[int, int], block: Block, writes: Sequence[BlockMask], masks: Sequence[BlockMask]
) -> ChunkedTensor:
    """Return the mask of a table as a state holds it.

    Args:
        shape: of the table.
        writes: the parts that this rank writes: see :func:`written`.
        masks: of this rank's shards.
    """
    grid = grid_of(Rect(0, 0, *shape), block)
    chunks = [(_first_byte(mask), _bytes_of(mask)) for mask in writes if mask.blocks]
    # Bytes at the borders of shards are wanted by both.
    wants = [(_first_byte(mask), (mask.grid.rows, _columns(mask))) for mask in masks]
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
    """Return the lookup counts of a table as a state holds them.

    Args:
        rows: of the table.
        dtype: of the counts.
        rects: of this rank's shards.
        owned: the rectangles among them that no lower rank holds.
        counts: of this rank's shards.
    """
    writes, pieces = [], []
    for rect, count in zip(rects, counts, strict=True):
        kept = count.to("cpu", copy=True)
        pieces.append({"rect": tuple(rect), "counts": kept})
        # Shards of the same rows have the same counts: the leftmost is written.
        if rect in owned and rect.col == 0:
            writes.append(((rect.row,), kept))
    wants = [((rect.row,), (rect.rows,)) for rect in rects]
    return ChunkedTensor((rows,), dtype, writes, wants, pieces)


# Loading.


def tables_of(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the JSON values of each table in a state: its shape and block, its configuration, its
    mask updates, and the number of blocks that its masks remove.

    Raises:
        ValueError: a value is missing, unknown or malformed; names the table and the key.
    """
    # JSON, not pickled values: torch.load(weights_only=True) reads it.
    tables = from_json("the tables of the state", saved.get("tables"))
    for name, entry in tables.items():
        _check_entry(name, entry)
    return tables


def _check_entry(name: str, entry: object) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
        raise ValueError(f"Table {name!r}: the state has no configuration of it.")
    # An unknown key may change the meaning of the others.
    if unknown := sorted(set(entry) - {"shape", "block", "updates", "removed", "config"}):
        raise ValueError(
            f"Table {name!r}: the state has the unknown keys {unknown}: it may be of a newer"
            " release."
        )
    for key in ("updates", "removed"):
        if entry.get(key) is not None:
            integer(key, entry[key], least=0, of=name)


def entries_of(saved: Mapping[str, Any], blocks: Mapping[str, Block]) -> dict[str, dict[str, Any]]:
    """Return the entry of each table in a state: its JSON values, and this rank's ``pieces``.

    Args:
        saved: ``tables``, JSON; ``masks`` and ``counts`` by table.
        blocks: of the masks of the registered tables; DCP has loaded by them.

    Raises:
        ValueError: a part is missing or malformed, or DCP has loaded masks of other blocks.
    """
    entries = tables_of(saved)
    masks, counts = _part(saved, "masks"), _part(saved, "counts")
    for name, entry in entries.items():
        if masks.get(name) is None and name not in blocks:
            # DCP leaves out what was not asked for; the caller names the table.
            continue
        entry["pieces"] = _mask_pieces(name, masks.get(name), entry, blocks.get(name))
        if isinstance(counts.get(name), ChunkedTensor):
            _add_counts(name, entry["pieces"], counts[name])
    return entries


def _part(saved: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    value = saved.get(part, {})
    if not isinstance(value, Mapping):
        raise ValueError(
            f"Invalid state: its {part} must be a mapping by table, and are a"
            f" {type(value).__name__}."
        )
    return value


def _mask_pieces(
    name: str, mask: object, entry: Mapping[str, Any], registered: Block | None
) -> list[dict[str, Any]]:
    """Return this rank's pieces of a saved mask, with the bits that DCP has loaded, if it has."""
    if not isinstance(mask, ChunkedTensor):
        raise ValueError(f"Table {name!r}: the state has no mask of it.")
    pieces = _pieces_of(name, mask)
    if mask.loaded is None:
        return pieces
    if (block := block_of(entry)) != registered:
        raise ValueError(
            f"Table {name!r}: its masks were saved by blocks {block}, and it is registered by"
            f" {registered}: register it with the sparse_block_shape of the checkpoint."
        )
    for piece, chunk in zip(pieces, mask.loaded, strict=True):
        # The hash is of the bits that this rank held when it asked DCP to load.
        piece["bits"], piece["hash"] = _bits_of(Rect(*piece["rect"]), block, chunk), None
    return pieces


def _pieces_of(name: str, saved: ChunkedTensor) -> list[dict[str, Any]]:
    """Return copies of this rank's pieces of a saved tensor."""
    # A state may have been edited by hand, or damaged.
    if not isinstance(saved.kept, list) or not all(isinstance(piece, dict) for piece in saved.kept):
        raise ValueError(
            f"Table {name!r}: the state has no pieces of it, but {cut(repr(saved.kept), 80)}."
        )
    # Copies: bits and counts are put in below, and the caller may load the state again.
    return [dict(piece) for piece in saved.kept]


def _add_counts(name: str, pieces: Sequence[dict[str, Any]], saved: ChunkedTensor) -> None:
    """Add the lookup counts to the pieces of a mask, which have the same order."""
    counts: list[Any] = [piece.get("counts") for piece in _pieces_of(name, saved)]
    if saved.loaded is not None:
        counts = saved.loaded
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
    # Tuples in a state of torch.save, lists where it has been through JSON.
    if (shape := entry.get("shape")) not in (data.shape, list(data.shape)):
        raise ValueError(
            f"Table {data.name!r} has the shape {data.shape}; the masks in the state are of"
            f" {shape}."
        )
    try:
        block = block_of(entry)
        pieces = [_piece(piece, block) for piece in entry["pieces"]]
        return [_mask_from(shard.rect, block, pieces, shard.tensor.device) for shard in data.shards]
    except ValueError as error:
        raise ValueError(
            f"Table {data.name!r}: {error} Outside a checkpoint of torch.distributed.checkpoint, a"
            " state_dict() has only the bits of its own rank."
        ) from error


def _mask_from(
    rect: Rect, block: Block, pieces: Sequence[BlockMask], device: torch.device
) -> BlockMask:
    parts = []
    for piece in pieces:
        if (common := piece.rect.intersect(rect)) is not None:
            parts.append((piece, common))
    if [piece.rect for piece, _ in parts] == [rect]:
        # The same shard as when it was saved: nothing to unpack.
        return BlockMask(rect, block, parts[0][0].bits.to(device))
    return BlockMask.assemble(rect, block, [piece.cut(common) for piece, common in parts], device)


def counts_from(data: ShardedData, entry: Mapping[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Return the lookup counts of this rank's shards of one table from its saved ``entry``:
    ``(rect.rows,)``.

    The pieces cover the shards, or :func:`masks_from` has refused them. Shards of the same rows
    have the same counts.

    Raises:
        ValueError: a piece has no counts, or invalid ones.
    """
    pieces = []
    for piece in entry["pieces"]:
        rect, saved = Rect(*piece["rect"]), piece.get("counts")
        if saved is None:
            raise ValueError(
                f"Table {data.name!r}: the state has no counts of lookups; it is of another score."
            )
        if not _valid_counts(saved, rect.rows):
            raise ValueError(
                f"Table {data.name!r}: the counts of {rect} must be {rect.rows} int32 or float64"
                " >= 0."
            )
        # Of any counted dtype: a state of another decay is converted.
        pieces.append((rect, saved))
    return new_counts(data, dtype, pieces)


def _valid_counts(saved: object, rows: int) -> bool:
    # Counts that decay have fractions, so that a row looked up once between two mask updates keeps
    # its share of the traffic; counts that are never forgotten are integers.
    if not isinstance(saved, Tensor) or saved.dtype not in (torch.int32, torch.float64):
        return False
    return saved.shape == (rows,) and bool(((saved >= 0) & (saved < torch.inf)).all())


def new_counts(
    data: ShardedData, dtype: torch.dtype, pieces: Sequence[tuple[Rect, Tensor]] = ()
) -> list[Tensor]:
    """Return the lookup counts of this rank's shards from pieces, 0 in other rows: ``(rect.rows,)``
    on the shard's device."""
    counts = []
    for own, weights in data.shards:
        count = torch.zeros(own.rows, dtype=dtype, device=weights.device)
        for rect, piece in pieces:
            if (common := own.intersect(rect)) is not None:
                into, first = common.row - own.row, common.row - rect.row
                count[into : into + common.rows] = piece[first : first + common.rows]
        counts.append(count)
    return counts


def _first_byte(mask: BlockMask) -> tuple[int, int]:
    return mask.grid.row, mask.grid.col // 8


def _columns(mask: BlockMask) -> int:
    """Return the number of bytes that the mask touches in a row of blocks."""
    return -(-(mask.grid.col % 8 + mask.grid.cols) // 8)


def _bytes_of(mask: BlockMask) -> Tensor:
    """Return the bits of a mask that begins with a byte, a row of bytes for each row of blocks:
    uint8, on the CPU."""
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
    """Return the bits of the mask of ``rect`` from the bytes that it touches,
    ``(rows of blocks, bytes)``."""
    grid, wide = grid_of(rect, block), chunk.shape[1]
    lead = grid.col % 8
    if lead == 0 and grid.cols % 8 == 0:
        return chunk.flatten()
    # The shard begins or ends within a byte: its bits move.
    writer = BitWriter(grid.blocks, chunk.device)
    # In chunks of about a million flags, a byte each.
    for part in torch.split(chunk, max(1, (1 << 20) // (8 * wide))):
        flags = unpack(part.flatten(), 8 * part.numel()).view(-1, 8 * wide)
        writer.add(flags[:, lead : lead + grid.cols].contiguous().flatten())
    return writer.close()


def _piece(saved: Mapping[str, Any], block: Block) -> BlockMask:
    rect, bits = Rect(*_ints("rect", saved.get("rect"), 4)), saved.get("bits")
    if min(rect) < 0 or not isinstance(bits, Tensor):
        raise ValueError(
            f"Invalid piece of masks {rect} in the state: a rectangle and its bits are needed."
        )
    # Refuses bits of another length.
    mask = BlockMask(rect, block, bits)
    if saved.get("hash") not in (None, f"{hash_tensor(bits):016x}"):
        raise ValueError(f"The bits of {rect} are not those that were saved: their hash differs.")
    return mask


def _ints(key: str, value: object, count: int) -> tuple[int, ...]:
    # Not bool, which is an int too.
    if isinstance(value, (tuple, list)) and [type(each) for each in value] == [int] * count:
        return tuple(value)
    raise ValueError(
        f"Invalid {key} in the state, of type {type(value).__name__}: must be {count} ints."
    )
