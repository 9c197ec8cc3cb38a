"""Parts of masks and lookup counts by global rectangle: exchanged between ranks, saved, and loaded
for the current shards; hashes of masks and weights.

For torch.distributed.checkpoint, a state has tensors of each table in global coordinates: the mask,
eight blocks to a byte, where each row of blocks begins a new byte; and the lookups of each row. For
torch.save, it has this rank's pieces, keyed by their global rectangle.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dist_sparse.checks import from_json, integer
from dist_sparse.groups import Group, Replica, rank_in
from dist_sparse.masking.device import on_host, pieces_on
from dist_sparse.masking.masks import BitWriter, BlockMask, Held, count_bits, pack, unpack
from dist_sparse.messages import cut
from dist_sparse.parcels import Parcels, Read
from dist_sparse.tables.chunked import ChunkedTensor
from dist_sparse.tables.hashing import STEP, logical_shift, mix64
from dist_sparse.tables.shards import Block, Grid, Rect, ShardedData, grid_of, owners

# The rectangles of each rank.
Tiling = tuple[tuple[Rect, ...], ...]

# Lookups of a row are clamped to this number. Half of the range of int32, so that the same number
# can be counted again before the next clamp.
MOST_COUNTED = 1 << 30


def assembled(
    rect: Rect,
    block: Block,
    pieces: Iterable[Held],
    device: torch.device,
    counted: torch.dtype | None,
) -> Held:
    """Return the mask and counts of ``rect`` from pieces that cover it: a copy on ``device``. Rows
    without a piece have no lookups.

    Args:
        counted: dtype of the counts, which may differ in the pieces; None: no counts.

    Raises:
        ValueError: the pieces leave a block uncovered, or differ where they overlap.
    """
    masks, counts = [], no_counts(rect, counted, device)
    for piece in pieces:
        if (common := piece.mask.rect.intersect(rect)) is not None:
            part, first = piece.cut(common), common.row - rect.row
            masks.append(part.mask)
            counts[first : first + common.rows] = part.counts
    if len(masks) == 1 and masks[0].grid == grid_of(rect, block):
        # The usual case, one piece for the same blocks: nothing to unpack.
        return Held(BlockMask(rect, block, masks[0].bits.to(device, copy=True)), counts)
    return Held(BlockMask.assemble(rect, block, masks, device), counts)


def no_counts(rect: Rect, counted: torch.dtype | None, device: torch.device | str) -> Tensor:
    """Return lookup counts of zero for the rows of a rectangle; ``(0,)`` if ``counted`` is None."""
    if counted is None:
        return torch.empty(0, device=device)
    return torch.zeros(rect.rows, dtype=counted, device=device)


# Exchange. Both sides derive the order of messages from the tilings, so messages have no header.


class Move(NamedTuple):
    """A move of a table's masks from the owners in one tiling to the holders in another.

    Args:
        held: the masks and counts that this rank holds in the old tiling.
        block: of the masks. Ranks without a mask need it too.
        old, new: both tilings.
        counted: dtype of the lookup counts that move with the masks; None: no counts.
    """

    held: Sequence[Held]
    block: Block
    old: Tiling
    new: Tiling
    counted: torch.dtype | None = None


def exchange(group: Group, moves: Sequence[Move]) -> list[list[Held]]:
    """Return for each move the pieces that cover this rank's rectangles of its new tiling, on the
    CPU. Collective over ``group``: one all-to-all."""
    parcels = Parcels(group)
    arriving = [_packed(parcels, group.rank, move) for move in moves]
    parcels.exchange(torch.device("cpu"))
    arrived: list[list[Held]] = []
    for move, parts in zip(moves, arriving, strict=True):
        arrived.append([])
        for rect, bits, counts in parts:
            # Copies: a view would keep the received bytes of all tables alive.
            mask = BlockMask(rect, move.block, bits().clone())
            arrived[-1].append(Held(mask, counts().clone()))
    return arrived


def _packed(parcels: Parcels, rank: int, move: Move) -> list[tuple[Rect, Read, Read]]:
    """Pack the pieces that a move sends from this rank. Return the rectangles of the pieces that it
    brings here, with functions that read their bits and counts."""
    owned = owners(move.old)
    here = {held.mask.rect: held for held in move.held}
    for receiver, wanted in enumerate(move.new):
        for rect, source in _common(owned[rank], wanted):
            part = here[source].cut(rect)
            parcels.send(receiver, part.mask.bits)
            parcels.send(receiver, part.counts)
    arriving = []
    # The senders loop over the same rectangles in the same order.
    for sender, theirs in enumerate(owned):
        for rect, _ in _common(theirs, move.new[rank]):
            bits = parcels.expect(sender, (grid_of(rect, move.block).bytes,))
            like = no_counts(rect, move.counted, "meta")
            counts = parcels.expect(sender, like.shape, like.dtype)
            arriving.append((rect, bits, counts))
    return arriving


def _common(owned: Sequence[Rect], wanted: Sequence[Rect]) -> Iterator[tuple[Rect, Rect]]:
    """Yield ``(common rectangle, owned rectangle)`` of each message from an owner to a holder."""
    # A rank may hold a rectangle twice, and needs it once.
    for target in dict.fromkeys(wanted):
        for source in owned:
            if (rect := source.intersect(target)) is not None:
                yield rect, source


# Saving.


def written(tiling: Tiling, block: Block, shape: tuple[int, int]) -> tuple[Tiling, bool]:
    """Return for each rank the parts of a table's mask that it writes to a checkpoint: for each
    owned shard, the bytes whose first block begins in it. Also return whether the last byte of any
    part holds bits of other shards.

    Over all ranks, the parts tile the table.
    """
    # A byte is eight blocks of one row of blocks.
    height, width = block[0], 8 * block[1]
    parts, cuts_bytes = [], False
    for owned in owners(tiling):
        held = []
        for rect in owned:
            # Rounding up may pass the end of the table, as its last block may be smaller.
            top, left = _up(rect.row, height, shape[0]), _up(rect.col, width, shape[1])
            bottom = _up(rect.row_end, height, shape[0])
            right = _up(rect.col_end, width, shape[1])
            to = Rect(top, left, bottom - top, right - left)
            if to.numel:
                held.append(to)
                if grid_of(to, block).col_end > grid_of(rect, block).col_end:
                    cuts_bytes = True
        parts.append(tuple(held))
    return tuple(parts), cuts_bytes


def _up(number: int, step: int, most: int) -> int:
    """Return the next multiple of ``step``, at most ``most``."""
    return min(-(-number // step) * step, most)


def begun(mask: BlockMask) -> BlockMask:
    """Return the part of a shard's mask with the blocks that begin in the shard, so that each block
    is counted once."""
    rect = mask.rect
    top = _up(rect.row, mask.block[0], rect.row_end)
    left = _up(rect.col, mask.block[1], rect.col_end)
    return mask.cut(Rect(top, left, rect.row_end - top, rect.col_end - left))


def removed_blocks(mask: BlockMask) -> int:
    """Return how many of the blocks that begin in a shard its mask removes."""
    mask = begun(mask)
    return mask.blocks - count_bits(mask.bits)


def saved_masks(
    shape: tuple[int, int], block: Block, writes: Sequence[BlockMask], shards: Sequence[Held]
) -> ChunkedTensor:
    """Return the masks of a table as a state holds them.

    Args:
        shape: of the table.
        block: of its masks.
        writes: the parts that this rank writes: see :func:`written`.
        shards: of this rank.
    """
    grid = grid_of(Rect(0, 0, *shape), block)
    chunks = [(_place_of(mask.grid)[0], _bytes_of(mask)) for mask in writes]
    wants, kept = [], []
    for held in shards:
        mask = held.mask
        # Bytes across the border of two shards are read by both.
        wants.append(_place_of(mask.grid))
        bits = mask.bits.to("cpu", copy=True)
        digest = f"{hash_tensor(mask.bits):016x}"
        kept.append({"rect": tuple(mask.rect), "bits": bits, "hash": digest})
    return ChunkedTensor((grid.rows, -(-grid.cols // 8)), torch.uint8, chunks, wants, kept)


def saved_counts(
    rows: int, dtype: torch.dtype, writes: Sequence[Held], shards: Sequence[Held]
) -> ChunkedTensor:
    """Return the lookup counts of a table as a state holds them.

    Args:
        rows: of the table.
        dtype: of the counts.
        writes: the shards whose counts this rank writes.
        shards: of this rank.
    """
    chunks, wants, kept = [], [], []
    for held in shards:
        rect = held.mask.rect
        counts = held.counts.to("cpu", copy=True)
        wants.append(((rect.row,), (rect.rows,)))
        kept.append({"rect": tuple(rect), "counts": counts})
        if held in writes:
            chunks.append(((rect.row,), counts))
    return ChunkedTensor((rows,), dtype, chunks, wants, kept)


# Loading.


def tables_of(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the JSON values of each table in a state: its shape and block, its configuration, its
    mask updates, and the number of blocks that its masks remove.

    Raises:
        ValueError: a value is missing, unknown or malformed; names the table and the key.
    """
    # JSON rather than pickled values, for torch.load(weights_only=True).
    tables = from_json("the tables of the state", saved.get("tables", "{}"))
    for name, entry in tables.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
            raise ValueError(f"Table {name!r}: the state has no configuration for it.")
        # Refused, because a newer release may give the other keys another meaning.
        if unknown := sorted(set(entry) - {"shape", "block", "updates", "removed", "config"}):
            raise ValueError(
                f"Table {name!r}: the state has unknown keys {unknown}: it may be of a newer"
                " release."
            )
        integer("updates", entry.get("updates", 0), least=0, of=name)
        if entry.get("removed") is not None:
            integer("removed", entry["removed"], least=0, of=name)
    return tables


def mapping_of(saved: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Return a part of a state that maps names; empty where the state has left it out."""
    value = saved.get(part, {})
    if not isinstance(value, Mapping):
        raise ValueError(
            f"Invalid state: {part!r} must be a mapping, and is a {type(value).__name__}."
        )
    return value


def saved_pieces(
    masks: object, counts: object, block: Block, *, registered: Block, counted: bool
) -> list[Held]:
    """Return this rank's pieces of a table in a state, with the values that DCP has loaded, if
    any.

    Args:
        masks, counts: its tensors in the state.
        block: of these masks.
        registered: the block of its present masks.
        counted: whether lookups are counted.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: they are malformed, or were changed
            since they were saved.
    """
    saved = _chunked(masks, "the state has no mask for it.")
    if saved.loaded is not None and block != registered:
        raise ValueError(
            f"its masks were saved by blocks {block}, not {registered}: register it with the"
            " checkpoint's sparse_block_shape."
        )
    pieces = []
    for i, entry in enumerate(saved.kept):
        rect = Rect(*ints("rect", entry.get("rect"), 4, least=0))
        if saved.loaded is None:
            # The constructor refuses bits of another length.
            mask = BlockMask(rect, block, entry["bits"])
            if entry.get("hash") not in (None, f"{hash_tensor(mask.bits):016x}"):
                raise ValueError(
                    f"The bits of {rect} are not the ones that were saved: their hash differs."
                )
        else:
            mask = BlockMask(rect, block, _bits_of(rect, block, saved.loaded[i]))
        pieces.append(Held(mask))
    return _with_counts(pieces, counts) if counted else pieces


def _chunked(saved: object, missing: str) -> ChunkedTensor:
    if not isinstance(saved, ChunkedTensor):
        raise ValueError(missing)
    return saved


def _with_counts(pieces: Sequence[Held], saved: object) -> list[Held]:
    """Return pieces with their lookup counts, which have the same order and may have any counted
    dtype."""
    saved = _chunked(saved, "the state has no counts of lookups; it was saved with another score.")
    counts = saved.loaded
    if counts is None:
        counts = [entry["counts"] for entry in saved.kept]
    found = []
    for piece, count in zip(pieces, counts, strict=True):
        rect = piece.mask.rect
        # Decayed counts are float64, others int32.
        fits = count.dtype in (torch.int32, torch.float64) and count.shape == (rect.rows,)
        if not fits or not ((count >= 0) & (count < torch.inf)).all():
            raise ValueError(f"the counts of {rect} must be {rect.rows} int32 or float64 >= 0.")
        found.append(Held(piece.mask, count))
    return found


def _place_of(grid: Grid) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (row, column) and the number of (rows, columns) of the bytes in a saved mask that
    a grid of blocks touches."""
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
    # The shard may begin or end within a byte, so its bits are unpacked and packed again.
    lead = grid.col % 8
    writer = BitWriter(grid.blocks, chunk.device)
    # In chunks of about a million flags, a byte each.
    for part in torch.split(chunk, max(1, (1 << 20) // (8 * wide))):
        flags = unpack(part.flatten(), 8 * part.numel()).view(-1, 8 * wide)
        writer.add(flags[:, lead : lead + grid.cols].contiguous().flatten())
    return writer.close()


def ints(key: str, value: Any, count: int, least: int) -> tuple[int, ...]:
    """Return a sequence of ints of a state, checked."""
    # isinstance() would accept a bool as an int.
    is_ints = isinstance(value, (tuple, list)) and [*map(type, value)] == [int] * count
    if is_ints and min(value) >= least:
        return tuple(value)
    raise ValueError(
        f"Invalid {key}={cut(repr(value), 80)} in the state: must be {count} ints >= {least}."
    )


# Hashes. The hash of a mask is the sum, modulo 2**64, of a(row) * b(column) over its removed
# elements, with pseudo-random a and b. A sum over pieces in any order is the same, so the hash
# depends on neither the sharding nor the blocks. It detects accidents, not attacks.


# Seeds of a(row) and b(column).
_ROWS, _COLS = 0x51, 0xC3
# Odd, so that the product is invertible modulo 2**64. Saved states hold such hashes.
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

    Each word is mixed with its position by invertible steps, so a change of one word always changes
    the sum. The steps are not linear, so changes that cancel as numbers do not cancel here.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    # Begin with the length. Otherwise zeros at the end would not show.
    total = torch.full((), raw.numel(), dtype=torch.int64, device=raw.device)
    step = pieces_on(raw.device).hashed
    for start in range(0, raw.numel(), step):
        part = raw[start : start + step]
        # Padded to whole words. pad() copies, so the view as int64 is aligned.
        words = functional.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        # The position makes swapped words show.
        mixed = torch.arange(start // 8, start // 8 + words.numel(), device=words.device)
        mixed.mul_(_MIX).bitwise_xor_(words)
        for shift in (32, 29):
            mixed.bitwise_xor_(logical_shift(mixed, shift)).mul_(_MIX)
        # Int64 wraps around: sums are modulo 2**64.
        total += (mixed ^ logical_shift(mixed, 32)).sum()
    return total


def shape_hash(shape: tuple[int, int]) -> int:
    """Return a number that tells shapes apart."""
    rows, cols = torch.tensor(shape).unbind()
    return int(_mix(rows, _ROWS ^ 0xFF) * 3 + _mix(cols, _COLS ^ 0xFF))


def shared_weights(tables: Sequence[ShardedData]) -> dict[str, Replica]:
    """Return hashes of the weights that other ranks hold too, by table and rectangle. Local."""
    return shared_tensors([(data, *shard) for data in tables for shard in data.shards])


def shared_tensors(
    held: Iterable[tuple[ShardedData, Rect, Tensor]], what: str = ""
) -> dict[str, Replica]:
    """Return hashes of the tensors of shards that other ranks hold too, by table and rectangle.
    Local."""
    hashes: dict[str, Tensor] = {}
    holders_of: dict[str, tuple[bool, int]] = {}
    for data, rect, tensor in held:
        # The rectangles of all ranks are known from metadata; equal ones are replicas. Copies that
        # are trained apart may differ: they get the masks of the first one.
        holders = [rank for rank, rects in enumerate(data.tiling) if rect in rects]
        if len(holders) > 1 and not data.copied:
            place = f"{what}{data.name} {rect}"
            hashes[place] = _hashed(tensor)
            holders_of[place] = holders[0] == rank_in(data.ranks), len(holders)
    replicas = {}
    # One wait for all hashes on a device.
    for place, value in zip(hashes, on_host([*hashes.values()]), strict=True):
        replicas[place] = Replica(int(value) % (1 << 64), *holders_of[place])
    return replicas


def _mix(values: Tensor, seed: int) -> Tensor:
    """Return pseudo-random odd int64 from int64."""
    return mix64((values + seed) * STEP) | 1
