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

from dist_sparse.checks import from_json, integer
from dist_sparse.facts import cut
from dist_sparse.groups import Group, Parcels, Replica
from dist_sparse.masking.device import on_host, pieces_on
from dist_sparse.masking.masks import BitWriter, BlockMask, count_bits, pack, unpack
from dist_sparse.tables.chunked import ChunkedTensor
from dist_sparse.tables.shards import Block, Grid, Rect, Shard, ShardedData, grid_of, owners

Tiling = tuple[tuple[Rect, ...], ...]
"""The rectangles of each rank."""

MOST_COUNTED = 1 << 30
"""Lookups of a row from which on more make no difference. Half of the range of int32, so that as
many again can be counted before a clamp."""


Piece = tuple[Rect, Tensor]
"""Bits or counts of a rectangle."""


# Exchange. Both sides derive the order of messages from the tilings, so only bits are sent.


class Move(NamedTuple):
    """Values of a table on their way from the owners in one tiling to the holders in another.

    Args:
        old, new: the rectangles before, and the rectangles to cover.
        part: the values of a rectangle inside one that this rank owns: ``part(rect, owned)``.
        length: how many values a rectangle has, known on ranks without one too.
        dtype: of the values.
    """

    old: Tiling
    new: Tiling
    part: Callable[[Rect, Rect], Tensor]
    length: Callable[[Rect], int]
    dtype: torch.dtype


def move_of_masks(masks: Sequence[BlockMask], block: Block, old: Tiling, new: Tiling) -> Move:
    """Return the move of this rank's ``masks`` of its rectangles of ``old``."""
    held = {mask.rect: mask for mask in masks}
    return Move(
        old,
        new,
        # Blocks that a border cuts are in both parts; assembled() compares them.
        lambda rect, owned: held[owned].cut(rect).bits,
        lambda rect: grid_of(rect, block).bytes,
        torch.uint8,
    )


def move_of_counts(
    counts: Mapping[Rect, Tensor], dtype: torch.dtype, old: Tiling, new: Tiling
) -> Move:
    """Return the move of lookup counts, one number per row, of this rank's shards in ``old``."""
    return Move(
        old,
        new,
        lambda rect, owned: counts[owned][rect.row - owned.row : rect.row_end - owned.row],
        lambda rect: rect.rows,
        dtype,
    )


def exchange(group: Group, moves: Sequence[Move]) -> list[list[Piece]]:
    """Return for each move the pieces that cover this rank's rectangles of its new tiling, on the
    CPU. Collective over ``group``: one all-to-all, none if there are no moves."""
    if not moves:
        return []
    parcels, arriving = Parcels(group), []
    for move in moves:
        owned = owners(move.old)
        for receiver, wanted in enumerate(move.new):
            for rect, source in _common(owned[group.rank], wanted):
                parcels.send(receiver, move.part(rect, source))
        # The senders loop over the same rectangles in the same order.
        expected = []
        for sender, theirs in enumerate(owned):
            for rect, _ in _common(theirs, move.new[group.rank]):
                expected.append((rect, parcels.expect(sender, (move.length(rect),), move.dtype)))
        arriving.append(expected)
    parcels.exchange(torch.device("cpu"))
    # Copies: a view would keep the received bytes of all tables alive.
    return [_read(expected) for expected in arriving]


def _read(expected: Sequence[tuple[Rect, Callable[[], Tensor]]]) -> list[Piece]:
    return [(rect, read().clone()) for rect, read in expected]


def _common(owned: Sequence[Rect], wanted: Sequence[Rect]) -> Iterator[tuple[Rect, Rect]]:
    """Yield ``(common rectangle, owned rectangle)`` of each message from an owner to a holder."""
    # A rank may hold a rectangle twice, and needs it once.
    for target in dict.fromkeys(wanted):
        for source in owned:
            if (rect := source.intersect(target)) is not None:
                yield rect, source


def assembled(rect: Rect, block: Block, bits: Sequence[Piece], device: torch.device) -> BlockMask:
    """Return the mask of ``rect`` from the bits of rectangles inside it."""
    # A rank has pieces of all its shards; overlapping parts of blocks are compared.
    inside = [BlockMask(at, block, part) for at, part in bits if at.intersect(rect) == at]
    return BlockMask.assemble(rect, block, inside, device)


# Saving.


class Written(NamedTuple):
    """A shard, and the part ``to`` of the table's mask that its owner writes to a checkpoint."""

    shard: Rect
    to: Rect
    needs_bits_of_others: bool
    """Whether the last byte holds bits of other shards."""


def written(tiling: Tiling, block: Block, shape: tuple[int, int]) -> list[list[Written]]:
    """Return for each rank the parts of a table's mask that it writes: of each shard that it owns,
    the bytes whose first block begins in it.

    Over all shards they tile the table. Blocks of the last byte may belong to other shards.
    """
    # A byte is eight blocks of one row of blocks.
    height, width = block[0], 8 * block[1]
    parts = []
    for owned in owners(tiling):
        held = []
        for rect in owned:
            # The last block of a table may be smaller.
            top, bottom = (min(_up(at, height), shape[0]) for at in (rect.row, rect.row_end))
            left, right = (min(_up(at, width), shape[1]) for at in (rect.col, rect.col_end))
            to = Rect(top, left, bottom - top, right - left)
            if to.numel:
                last = grid_of(to, block).col_end
                held.append(Written(rect, to, last > grid_of(rect, block).col_end))
        parts.append(held)
    return parts


def _up(number: int, step: int) -> int:
    """Return the next multiple of ``step``."""
    return -(-number // step) * step


def whole_blocks(rect: Rect, block: Block, shape: tuple[int, int]) -> Rect:
    """Return a rectangle of a table with all of the blocks that it touches."""
    grid = grid_of(rect, block)
    top, left = grid.row * block[0], grid.col * block[1]
    # The last block of a table may be smaller.
    rows = min(grid.rows * block[0], shape[0] - top)
    return Rect(top, left, rows, min(grid.cols * block[1], shape[1] - left))


def begun(mask: BlockMask) -> BlockMask:
    """Return the part of a shard's mask with the blocks that begin in the shard, so that each block
    is counted once."""
    rect = mask.rect
    top = min(_up(rect.row, mask.block[0]), rect.row_end)
    left = min(_up(rect.col, mask.block[1]), rect.col_end)
    inside = Rect(top, left, rect.row_end - top, rect.col_end - left)
    if inside.numel == 0:
        return BlockMask.full(inside, mask.block, mask.bits.device)
    return mask.cut(inside)


def removed_blocks(mask: BlockMask) -> int:
    """Return how many of the blocks that begin in a shard its mask removes."""
    mask = begun(mask)
    return mask.blocks - count_bits(mask.bits)


def saved_mask(
    shape: tuple[int, int], block: Block, writes: Sequence[BlockMask], masks: Sequence[BlockMask]
) -> ChunkedTensor:
    """Return the mask of a table as a state holds it.

    Args:
        shape: of the table.
        block: of its masks.
        writes: the parts that this rank writes: see :func:`written`.
        masks: of this rank's shards.
    """
    grid = grid_of(Rect(0, 0, *shape), block)
    chunks = [(_place_of(mask.grid)[0], _bytes_of(mask)) for mask in writes if mask.blocks]
    # Bytes at the borders of shards are wanted by both.
    wants = [_place_of(mask.grid) for mask in masks]
    kept = [
        {
            "rect": tuple(mask.rect),
            "bits": mask.bits.to("cpu", copy=True),
            "hash": f"{hash_tensor(mask.bits):016x}",
        }
        for mask in masks
    ]
    return ChunkedTensor((grid.rows, -(-grid.cols // 8)), torch.uint8, chunks, wants, kept)


def saved_counts(
    rows: int, dtype: torch.dtype, counts: Mapping[Rect, Tensor], writes: Sequence[Rect]
) -> ChunkedTensor:
    """Return the lookup counts of a table as a state holds them.

    Args:
        rows: of the table.
        dtype: of the counts.
        counts: of this rank's shards, by rectangle.
        writes: the rectangles among them whose counts this rank writes.
    """
    kept = {rect: count.to("cpu", copy=True) for rect, count in counts.items()}
    chunks = [((rect.row,), kept[rect]) for rect in writes]
    wants = [((rect.row,), (rect.rows,)) for rect in kept]
    entries = [{"rect": tuple(rect), "counts": count} for rect, count in kept.items()]
    return ChunkedTensor((rows,), dtype, chunks, wants, entries)


# Loading.


def tables_of(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the JSON values of each table in a state: its shape and block, its configuration, its
    mask updates, and the number of blocks that its masks remove.

    Raises:
        ValueError: a value is missing, unknown or malformed; names the table and the key.
    """
    if not saved:
        return {}
    # JSON, not pickled values: torch.load(weights_only=True) reads it.
    tables = from_json("the tables of the state", saved.get("tables"))
    for name, entry in tables.items():
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
    return tables


def mapping_of(saved: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Return a part of a state that maps names; empty where the state has left it out."""
    value = saved.get(part, {})
    if not isinstance(value, Mapping):
        raise ValueError(
            f"Invalid state: {part!r} must be a mapping, and is a {type(value).__name__}."
        )
    return value


def loaded_table(
    data: ShardedData,
    entry: Mapping[str, Any],
    masks: object,
    counts: object,
    *,
    registered: Block,
    counted: torch.dtype | None,
) -> tuple[Block, list[BlockMask], Sequence[Tensor | None]]:
    """Return the block of a table's masks in a state, and the masks and lookup counts of this
    rank's shards, in their order.

    Args:
        data: the table as it is stored now.
        entry: see :func:`tables_of`.
        masks, counts: its tensors in the state.
        registered: the block of its present masks.
        counted: dtype of its counts; None if lookups are not counted.

    Raises:
        ValueError: they do not fit the table, were changed since they were saved, or do not cover
            the shards.
    """
    # Tuples in a state of torch.save, lists where it has been through JSON.
    if (shape := entry.get("shape")) not in (data.shape, list(data.shape)):
        raise ValueError(
            f"Table {data.name!r} has the shape {data.shape}; the masks in the state are of"
            f" {shape}."
        )
    try:
        height, width = _ints("block", entry.get("block"), 2, least=1)
        block = height, width
        saved = _saved_masks(masks, block, registered)
        found = [_mask_from(shard, block, saved) for shard in data.shards]
        rows = [] if counted is None else _rows_from(counts, saved)
    except ValueError as error:
        raise ValueError(
            f"Table {data.name!r}: {error} Outside a checkpoint of torch.distributed.checkpoint, a"
            " state_dict() has only the bits of its own rank."
        ) from error
    return block, found, new_counts(data, counted, rows)


def _saved_masks(saved: object, block: Block, registered: Block) -> list[BlockMask]:
    """Return this rank's pieces of a saved mask, with the bits that DCP has loaded, if it has."""
    if not isinstance(saved, ChunkedTensor):
        raise ValueError("the state has no mask of it.")
    if saved.loaded is not None and block != registered:
        raise ValueError(
            f"its masks were saved by blocks {block}, and it is registered by {registered}:"
            " register it with the sparse_block_shape of the checkpoint."
        )
    masks, loaded = [], saved.loaded
    for i, piece in enumerate(_pieces_of(saved)):
        rect = Rect(*_ints("rect", piece.get("rect"), 4, least=0))
        bits = piece.get("bits") if loaded is None else _bits_of(rect, block, loaded[i])
        if not isinstance(bits, Tensor):
            raise ValueError(f"Invalid piece of masks {rect} in the state: it has no bits.")
        # Refuses bits of another length.
        masks.append(BlockMask(rect, block, bits))
        # The hash is of the bits that this rank held when it asked DCP to load.
        if loaded is None and piece.get("hash") not in (None, f"{hash_tensor(bits):016x}"):
            raise ValueError(
                f"The bits of {rect} are not those that were saved: their hash differs."
            )
    return masks


def _pieces_of(saved: ChunkedTensor) -> list[dict[str, Any]]:
    # A state may have been edited by hand, or damaged.
    if isinstance(saved.kept, list) and all(isinstance(piece, dict) for piece in saved.kept):
        return saved.kept
    raise ValueError(f"the state has no pieces of it, but {cut(repr(saved.kept), 80)}.")


def _mask_from(shard: Shard, block: Block, saved: Sequence[BlockMask]) -> BlockMask:
    parts = []
    for mask in saved:
        if (common := mask.rect.intersect(shard.rect)) is not None:
            parts.append(mask.cut(common))
    return BlockMask.assemble(shard.rect, block, parts, shard.tensor.device)


def _rows_from(saved: object, masks: Sequence[BlockMask]) -> list[Piece]:
    """Return saved lookup counts, of any counted dtype. The pieces of ``masks``, which cover the
    shards, have the same order."""
    if not isinstance(saved, ChunkedTensor):
        raise ValueError("the state has no counts of lookups; it is of another score.")
    counts: Sequence[Any] | None = saved.loaded
    if counts is None:
        counts = [piece.get("counts") for piece in _pieces_of(saved)]
    if len(masks) != len(counts):
        raise ValueError(f"the state has {len(masks)} pieces of masks and {len(counts)} of counts.")
    pieces = []
    for mask, count in zip(masks, counts, strict=True):
        if not _valid_counts(count, mask.rect.rows):
            raise ValueError(
                f"the counts of {mask.rect} must be {mask.rect.rows} int32 or float64 >= 0."
            )
        pieces.append((mask.rect, count))
    return pieces


def _valid_counts(saved: object, rows: int) -> bool:
    # Counts that decay have fractions; counts that are never forgotten are integers.
    if not isinstance(saved, Tensor) or saved.dtype not in (torch.int32, torch.float64):
        return False
    return saved.shape == (rows,) and bool(((saved >= 0) & (saved < torch.inf)).all())


def new_counts(
    data: ShardedData, dtype: torch.dtype | None, pieces: Sequence[Piece] = ()
) -> Sequence[Tensor | None]:
    """Return the lookup counts of this rank's shards from pieces, 0 in other rows: ``(rect.rows,)``
    on the shard's device. Pieces may be of another dtype. None each if lookups are not counted."""
    if dtype is None:
        return [None] * len(data.shards)
    counts = []
    for own, weights in data.shards:
        count = torch.zeros(own.rows, dtype=dtype, device=weights.device)
        for rect, piece in pieces:
            if (common := own.intersect(rect)) is not None:
                into, first = common.row - own.row, common.row - rect.row
                count[into : into + common.rows] = piece[first : first + common.rows]
        counts.append(count)
    return counts


def _place_of(grid: Grid) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the bytes that a grid of blocks touches begin in a saved mask, and how many rows
    and columns of bytes they are."""
    wide = -(-(grid.col % 8 + grid.cols) // 8)
    return (grid.row, grid.col // 8), (grid.rows, wide)


def _bytes_of(mask: BlockMask) -> Tensor:
    """Return the bits of a mask that begins with a byte, a row of bytes for each row of blocks:
    uint8, on the CPU."""
    assert mask.grid.col % 8 == 0
    out = torch.empty(_place_of(mask.grid)[1], dtype=torch.uint8)
    wide = out.shape[1]
    for first, last in mask.row_chunks():
        flags = functional.pad(mask.flags(first, last), (0, 8 * wide - mask.grid.cols))
        out[first:last] = pack(flags.flatten()).view(-1, wide)
    return out


def _bits_of(rect: Rect, block: Block, chunk: Tensor) -> Tensor:
    """Return the bits of the mask of ``rect`` from the bytes that it touches,
    ``(rows of blocks, bytes)``."""
    grid, wide = grid_of(rect, block), chunk.shape[1]
    if grid.blocks == 0:
        return chunk.flatten()
    # The shard may begin or end within a byte: then its bits move.
    lead = grid.col % 8
    writer = BitWriter(grid.blocks, chunk.device)
    # In chunks of about a million flags, a byte each.
    for part in torch.split(chunk, max(1, (1 << 20) // (8 * wide))):
        flags = unpack(part.flatten(), 8 * part.numel()).view(-1, 8 * wide)
        writer.add(flags[:, lead : lead + grid.cols].contiguous().flatten())
    return writer.close()


def _ints(key: str, value: Any, count: int, least: int) -> tuple[int, ...]:
    # Not bool, which is an int too.
    is_ints = isinstance(value, (tuple, list)) and [*map(type, value)] == [int] * count
    if is_ints and min(value) >= least:
        return tuple(value)
    raise ValueError(
        f"Invalid {key}={cut(repr(value), 80)} in the state: must be {count} ints >= {least}."
    )


# Hashes. That of a mask is the sum, modulo 2**64, of a(row) * b(column) over its removed elements,
# with pseudo-random a and b. Sums can be taken over any pieces in any order, so it depends on
# neither the sharding nor the blocks. It detects accidents, not attacks.


_ROWS, _COLS = 0x51, 0xC3
# Odd, so that multiplying by it can be undone. Saved states hold hashes made with it.
_MIX = 0x1E3779B97F4A7C15


def mask_hash(mask: BlockMask) -> int:
    """Return the hash of one shard's part of a mask, by its global rows and columns."""
    rect, device = mask.rect, mask.bits.device
    rows = _mix(torch.arange(rect.row, rect.row_end, device=device), _ROWS)
    cols = _mix(torch.arange(rect.col, rect.col_end, device=device), _COLS)
    # Int64 wraps around: sums are modulo 2**64.
    total = torch.zeros((), dtype=torch.int64, device=device)
    for here, kept in mask.element_chunks(only_removing=True):
        total += ((~kept * cols).sum(1) * rows[here]).sum()
    return int(total)


def hash_tensor(tensor: Tensor) -> int:
    """Return a 64-bit hash of the bytes of ``tensor``, in row-major order."""
    return int(_hashed(tensor)) % (1 << 64)


def _hashed(tensor: Tensor) -> Tensor:
    """Return :func:`hash_tensor` modulo 2**64, an int64 scalar on the device of ``tensor``.

    Each word is mixed with its position by steps that can be undone, so a change of one word always
    changes the sum; and not linearly, so that changes which cancel as numbers do not cancel here.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    # The length counts: zeros at the end would change nothing else.
    total = torch.full((), raw.numel(), dtype=torch.int64, device=raw.device)
    step = pieces_on(raw.device).hashed
    for start in range(0, raw.numel(), step):
        part = raw[start : start + step]
        if rest := -part.numel() % 8:
            part = torch.cat([part, part.new_zeros(rest)])
        if part.storage_offset() % 8:
            # A view as int64 must begin at a word.
            part = part.clone()
        # Mixed with their position, so that swapped words are noticed.
        words = part.view(torch.int64)
        mixed = torch.arange(start // 8, start // 8 + words.numel(), device=words.device)
        mixed.mul_(_MIX).bitwise_xor_(words)
        for shift in (32, 29):
            # Torch shifts int64 with its sign: the bits shifted in are cleared.
            mixed.bitwise_xor_((mixed >> shift) & ((1 << (64 - shift)) - 1)).mul_(_MIX)
        # Int64 wraps around: sums are modulo 2**64.
        total += (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)).sum()
    return total


def shape_hash(shape: tuple[int, int]) -> int:
    """Return a number that tells shapes apart."""
    rows, cols = (torch.tensor([size]) for size in shape)
    return int(_mix(rows, _ROWS ^ 0xFF) * 3 + _mix(cols, _COLS ^ 0xFF))


def shared_weights(tables: Sequence[ShardedData], rank: int) -> dict[str, Replica]:
    """Return hashes of the weights that group rank ``rank`` holds in common with others, by place;
    local."""
    held = [(data, shard.rect, shard.tensor) for data in tables for shard in data.shards]
    return shared_tensors(held, rank)


def shared_tensors(
    held: Sequence[tuple[ShardedData, Rect, Tensor]], rank: int, what: str = ""
) -> dict[str, Replica]:
    """Return hashes of the tensors of shards that group rank ``rank`` holds in common with others,
    by place; local."""
    hashes: dict[str, Tensor] = {}
    holders_of: dict[str, list[int]] = {}
    for data, rect, tensor in held:
        # Rectangles of other ranks are known from metadata: equal ones are replicas.
        holders = [r for r, rects in enumerate(data.tiling) if rect in rects]
        if len(holders) > 1:
            place = f"{what}{data.name} {rect}"
            hashes[place], holders_of[place] = _hashed(tensor), holders
    found = {}
    # One wait for all of them.
    for place, value in zip(hashes, on_host([*hashes.values()]), strict=True):
        holders = holders_of[place]
        found[place] = Replica(int(value) % (1 << 64), holders[0] == rank, len(holders))
    return found


def _mix(values: Tensor, seed: int) -> Tensor:
    """Pseudo-random odd int64 from int64 (the finalizer of splitmix64, Steele et al. 2014)."""
    # Constants of splitmix64 as int64; masked shifts, as torch shifts with the sign.
    z = (values + seed) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1
