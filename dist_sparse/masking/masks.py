"""Masks of shards, one bit per block, and flags packed eight to a byte.

A :class:`BlockMask` holds the bits of the blocks that touch one global rectangle, row-major, 1 =
kept. Flag ``n`` is bit ``n % 8`` of byte ``n // 8``; the bits after the last flag are 0. A block
that a shard's border cuts has the same bit in every shard that it touches. Masks that differ within
a block use blocks of (1, 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.device import flat_width, kernels_on, on_host, pieces_on, row_block_width
from dist_sparse.tables.shards import Block, Grid, Rect, grid_of

# Up to this many bytes, Python counts bits faster than a single call of torch.
_FEW = 1 << 8

# Bytes of flags whose blocks are zeroed at a time. Their positions take up to 200x the memory.
_WRITTEN = 1 << 15

# Integers of the size of an element. Weights are masked with a bitwise `and`, since 0 * NaN is NaN.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Eight bytes of 0 or 1 as one word, times this: the highest byte holds their lowest bits, in order.
# Bit 8i of the word times bit 56 - 7i of the factor is bit 56 + i; no two products share a bit.
_GATHER = 0x0102040810204080


def pack(flags: Tensor) -> Tensor:
    """Pack bools ``(n,)`` into bytes ``(ceil(n / 8),)``, uint8; the bits after the last flag are
    0."""
    return ((_words_of(flags) * _GATHER) >> 56).to(torch.uint8)


def places_of(flags: Tensor) -> Tensor:
    """Return the places of flags ``(n,)``, one byte each, that are not 0: int64, ascending. Fast if
    few are, because it reads words of 8 flags first."""
    words = _words_of(flags)
    touched = words.nonzero().flatten()
    if 4 * len(touched) > len(words):
        return flags.nonzero().flatten()
    at = words.index_select(0, touched).view(torch.uint8).nonzero().flatten()
    # Flag `at` of the touched words is byte at % 8 of word at // 8.
    return touched.index_select(0, at >> 3).mul_(8).add_(at & 7)


def _words_of(flags: Tensor) -> Tensor:
    """Return flags of one byte as words of 8 flags, padded with 0: int64."""
    rest = -flags.numel() % 8
    if rest:
        flags = torch.cat([flags, flags.new_zeros(rest)])
    # A view as int64 must begin at a multiple of 8 bytes.
    flags = flags.contiguous() if flags.storage_offset() % 8 == 0 else flags.clone()
    return flags.view(torch.int64)


def unpack(packed: Tensor, count: int) -> Tensor:
    """Unpack bytes ``(ceil(count / 8),)`` into bools ``(count,)``."""
    words = _flags_of_bytes(packed.device).index_select(0, packed.int())
    return words.view(torch.bool)[:count]


@cache
def _flags_of_bytes(device: torch.device) -> Tensor:
    """Return the 8 flags of each byte value as one word. This lookup is 10x faster than shifts."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8)
    return (bits & 1).to(torch.uint8).view(torch.int64).flatten().to(device)


class BitWriter:
    """Packs ``count`` flags that arrive in pieces of any length.

    Packed pieces are written to one tensor at once: small tensors that outlive the large ones they
    were computed from would leave holes in the heap.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._bits = torch.empty(-(-count // 8), dtype=torch.uint8, device=device)
        self._at = 0
        self._rest: Tensor | None = None

    def add(self, flags: Tensor) -> None:
        """Append flags, bool ``(n,)``."""
        flags = flags if self._rest is None else torch.cat([self._rest, flags])
        whole = flags.numel() // 8 * 8
        self._write(flags[:whole])
        # A copy: the caller may overwrite its flags.
        self._rest = flags[whole:].clone() if whole < flags.numel() else None

    def close(self) -> Tensor:
        """Return the bytes, once all flags have been added."""
        if self._rest is not None:
            self._write(self._rest)
        assert self._at == self._bits.numel()
        return self._bits

    def _write(self, flags: Tensor) -> None:
        packed = pack(flags)
        self._bits[self._at : self._at + packed.numel()] = packed
        self._at += packed.numel()


def count_bits(packed: Tensor) -> int:
    """Return how many bits of ``packed`` (uint8, any length) are 1."""
    if packed.numel() <= _FEW:
        return int.from_bytes(packed.tolist()).bit_count()
    return int(bit_total(packed))


def bit_total(packed: Tensor) -> Tensor:
    """Return how many bits of ``packed`` (uint8, any length) are 1, as an int64 scalar on its
    device. Does not wait for the device."""
    total = torch.zeros((), dtype=torch.int64, device=packed.device)
    for part in torch.split(packed, pieces_on(packed.device).flags):
        # Sums of neighbouring bits, then of pairs, then of fours, all within their bytes.
        pairs = part - ((part >> 1) & 0x55)
        fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
        total += ((fours + (fours >> 4)) & 0x0F).sum()
    return total


def positions(packed: Tensor) -> Tensor:
    """Return the positions of bits of ``packed`` (uint8) that are 1: int64, ascending. Fast if few
    are, because it reads whole bytes first."""
    nonzero = packed.nonzero().flatten()
    byte, bit = unpack(packed[nonzero], nonzero.numel() * 8).view(-1, 8).nonzero().unbind(1)
    return nonzero[byte] * 8 + bit


@lru_cache(maxsize=16)
def _spread(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return, for each byte of a mask, the words of its ``8 * width`` columns:
    ``(256, 8 * width)``, all bits set where kept, none where removed."""
    byte, bit = torch.arange(256, device=device), torch.arange(8, device=device)
    return ((byte.unsqueeze(1) >> bit) & 1).to(dtype).neg_().repeat_interleave(width, dim=1)


def wide(matrix: Tensor) -> Tensor:
    """Return a view of a contiguous ``matrix`` with words of up to 16 bytes as elements; another
    matrix as it is.

    To zero or copy rows faster: torch does both element by element.
    """
    if not matrix.is_contiguous():
        return matrix
    size = matrix.element_size()
    # Rows, the offset in the storage and the address must all be multiples of the word.
    offsets = matrix.shape[1] * size, matrix.storage_offset() * size, matrix.data_ptr()
    for dtype in (torch.complex128, torch.int64):
        if math.gcd(*offsets) % dtype.itemsize == 0:
            return matrix.view(dtype)
    return matrix


# Without ==, which returns a tensor for tensors, not a bool.
@dataclass(frozen=True, eq=False)
class BlockMask:
    """The mask of one shard.

    Args:
        rect: the shard's global rectangle.
        block: the (rows, columns) that one bit stands for, on the grid anchored at the global (0,
            0).
        bits: uint8, ``ceil(grid.rows * grid.cols / 8)`` bytes on the device of the shard.
    """

    rect: Rect
    block: Block
    bits: Tensor

    def __post_init__(self) -> None:
        need = self.grid.bytes
        if self.bits.dtype != torch.uint8 or self.bits.shape != (need,):
            raise ValueError(
                f"The mask of {self.rect} by blocks {self.block} needs {need} bytes, got"
                f" {tuple(self.bits.shape)}."
            )

    @staticmethod
    def full(rect: Rect, block: Block, device: torch.device) -> BlockMask:
        """Return a mask that keeps everything."""
        grid = grid_of(rect, block)
        bits = torch.full((grid.bytes,), 0xFF, dtype=torch.uint8, device=device)
        if grid.blocks % 8:
            bits[-1] = (1 << grid.blocks % 8) - 1
        return BlockMask(rect, block, bits)

    @staticmethod
    def of_elements(rect: Rect, kept: Tensor) -> BlockMask:
        """Return a mask of (1, 1) blocks from a dense one ``(rect.rows, rect.cols)`` of any dtype:
        0 = removed."""
        if tuple(kept.shape) != (rect.rows, rect.cols):
            raise ValueError(f"A mask of shape {tuple(kept.shape)} does not fit the shard {rect}.")
        return BlockMask(rect, (1, 1), pack((kept != 0).flatten()))

    @cached_property
    def grid(self) -> Grid:
        """The blocks that touch the shard."""
        return grid_of(self.rect, self.block)

    @property
    def blocks(self) -> int:
        """Number of blocks that touch the shard."""
        return self.grid.blocks

    @cached_property
    def removes(self) -> bool:
        """Whether anything is removed. Computed once: masks are replaced, not edited."""
        return bool(self._any_removed())

    def learn_removes(self, removes: bool) -> None:
        """Set :attr:`removes` where it is known without reading the bits."""
        # cached_property keeps its value there. The dataclass is frozen, so it can't be assigned.
        vars(self)["removes"] = removes

    def _any_removed(self) -> Tensor:
        """Return whether anything is removed, as a bool scalar on the device of the mask."""
        whole, rest = divmod(self.blocks, 8)
        found = (self.bits[:whole] != 0xFF).any()
        return found | (self.bits[whole] != (1 << rest) - 1) if rest else found

    def flags(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return kept flags, bool ``(last - first, grid.cols)``, of block rows ``[first, last)``.
        They must begin at a byte: ``first`` or ``grid.cols`` is a multiple of 8, as in
        :meth:`row_chunks`."""
        rows, start = len(range(self.grid.rows)[first:last]), first * self.grid.cols
        assert start % 8 == 0
        count = rows * self.grid.cols
        packed = self.bits[start // 8 : -(-(start + count) // 8)]
        return unpack(packed, count).view(rows, self.grid.cols)

    def row_chunks(self, most: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the block rows in chunks ``[first, last)`` of about ``most`` blocks (None: as many
        as are fast on the device), for :meth:`flags`."""
        most = pieces_on(self.bits.device).flags if most is None else most
        step = max(8, most // max(1, self.grid.cols) // 8 * 8)
        for first in range(0, self.grid.rows, step):
            yield first, min(first + step, self.grid.rows)

    def dense(self) -> Tensor:
        """Return the mask element by element, int8 ``(rect.rows, rect.cols)``: 1 = kept, 0 =
        removed."""
        out = torch.empty(self.rect[2:], dtype=torch.int8, device=self.bits.device)
        for rows, kept in self.element_chunks():
            out[rows].copy_(kept)
        return out

    def element_chunks(self, only_removing: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Yield the mask in chunks of the shard's rows: ``(rows, kept)`` with ``kept`` bool
        ``(len(rows), rect.cols)``.

        Args:
            only_removing: leave out chunks that keep everything. The last chunk is left out only
                if the unused bits of the last byte are 1.
        """
        if self.blocks == 0:
            return
        at_once = pieces_on(self.bits.device).flags
        if self.grid.rows == 1:
            # Every row is the same, however many there are.
            kept = self._over_columns(self.flags())
            step = max(1, at_once // self.rect.cols)
            for top in range(0, self.rect.rows, step):
                rows = slice(top, min(top + step, self.rect.rows))
                yield rows, kept.expand(rows.stop - top, -1)
            return
        height, cols = self.block[0], self.grid.cols
        for first, last in self.row_chunks(at_once // (height * self.block[1])):
            part = self.bits[first * cols // 8 : -(-last * cols // 8)]
            if only_removing and bool((part == 0xFF).all()):
                continue
            kept = self.flags(first, last)
            top = max((self.grid.row + first) * height, self.rect.row)
            bottom = min((self.grid.row + last) * height, self.rect.row_end)
            if height > 1:
                rows_of = torch.arange(top, bottom, device=kept.device) // height
                kept = kept[rows_of - self.grid.row - first]
            yield slice(top - self.rect.row, bottom - self.rect.row), self._over_columns(kept)

    def _over_columns(self, kept: Tensor) -> Tensor:
        """Return flags ``(rows, grid.cols)`` of blocks expanded to columns,
        ``(rows, rect.cols)``."""
        if self.grid.cols == self.rect.cols:
            return kept
        if self.grid.cols == 1:
            return kept.expand(-1, self.rect.cols)
        columns = torch.arange(self.rect.col, self.rect.col_end, device=kept.device)
        return kept[:, columns // self.block[1] - self.grid.col]

    def apply_(self, tensor: Tensor) -> None:
        """Write zero to the removed elements of the live shard ``tensor``
        ``(rect.rows, rect.cols)``; NaN there becomes zero too."""
        live = tensor.data
        if not self.in_one_pass:
            self._zero(live, ~self.bits)
            return
        word = WORDS[live.element_size()]
        if self.grid.rows == 1:
            live.view(word).bitwise_and_(self.words(slice(0, 1), word))
            return
        # A multiple of 8 rows, so that words() finds whole bytes of bits.
        step = max(1, pieces_on(live.device).flags // max(1, self.rect.cols) // 8) * 8
        for first in range(0, self.rect.rows, step):
            rows = slice(first, min(first + step, self.rect.rows))
            live[rows].view(word).bitwise_and_(self.words(rows, word))

    def words(self, block_rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask of some block rows as words, all bits set where kept, none where removed:
        ``(n, rect.cols)``, or ``(n, 1)`` if one block covers all columns.

        Args:
            block_rows: as in :meth:`flags`, or int64 ``(n,)``.
            dtype: one of :data:`WORDS`.
        """
        cols = self.grid.cols
        width = self.block[1]
        device = self.bits.device
        if cols % 8 == 0 and self.rect.cols == cols * width:
            # Whole bytes: one look-up in a table expands each to the words of 8 blocks.
            at = self.bits.view(-1, cols // 8)[block_rows].flatten().to(torch.int32)
            return _spread(width, dtype, device).index_select(0, at).view(-1, self.rect.cols)
        if isinstance(block_rows, slice):
            kept = self.flags(block_rows.start, block_rows.stop)
        else:
            # Rows of bits do not begin at bytes, or the shard cuts a block: one bit at a time.
            places = block_rows.unsqueeze(1) * cols + torch.arange(cols, device=device)
            kept = self.keeps(places.flatten()).view(-1, cols)
        # 1 becomes -1: all bits of the word.
        return (kept if cols == 1 else self._over_columns(kept)).to(dtype).neg_()

    @property
    def in_one_pass(self) -> bool:
        """Whether :meth:`apply_` is one pass over the shard, several times faster than zeroing
        scattered rows: all rows have the same mask, or a row of elements is a row of one block or
        of whole bytes of bits."""
        if self.grid.rows == 1:
            return True
        cols = self.grid.cols
        uncut = row_block_width(self.rect, self.block) is not None
        return uncut and (cols == 1 or cols % 8 == 0 < cols)

    @staticmethod
    def apply_all_changed_(
        changes: Sequence[ShardChange],
    ) -> None:
        """Write zero to the removed blocks of each shard that may not be zero already. Shards on an
        accelerator share launches."""
        on_devices = []
        for change in changes:
            mask, tensor, before, dirty = change
            if mask is before and dirty is None:
                continue
            if not tensor.is_cpu:
                on_devices.append(change)
            elif mask.block != before.block:
                mask.apply_(tensor)
            else:
                newly = before.bits & ~mask.bits
                mask._zero(tensor.data, newly if dirty is None else newly | dirty)
        _apply_on_devices(on_devices)

    def _zero(self, live: Tensor, removed: Tensor) -> None:
        """Write zero to the blocks of a live shard whose bit is set in ``removed``; bits after the
        last block are ignored. ``live`` must be ``.data``: autograd would refuse the backward of a
        forward that has read the weights."""
        width = row_block_width(self.rect, self.block)
        if live.is_cpu and width is not None and live.is_contiguous():
            blocks = wide(live.view(-1, width))
            if len(removed) <= _FEW:
                # One call instead of five: models have many small tables.
                blocks.masked_fill_(unpack(removed, len(blocks)).unsqueeze(1), 0)
                return
            for first in range(0, len(removed), _WRITTEN):
                found = positions(removed[first : first + _WRITTEN]).add_(8 * first)
                blocks.index_fill_(0, found[found < len(blocks)], 0)
            return
        others = BlockMask(self.rect, self.block, ~removed)
        for rows, kept in others.element_chunks(only_removing=live.is_cpu):
            live[rows].masked_fill_(~kept, 0)

    def keeps(self, places: Tensor) -> Tensor:
        """Return kept flags, bool ``(n,)``, of the blocks at flat ``places``, integers ``(n,)``."""
        return ((self.bits.index_select(0, places >> 3) >> (places & 7).to(torch.uint8)) & 1).to(
            torch.bool
        )

    def changed(self, places: Tensor, kept: Tensor) -> BlockMask:
        """Return the mask with new flags for some of its blocks; the mask itself, if no flag
        changes.

        Args:
            places: flat, integers ``(n,)``, each once.
            kept: bool ``(n,)``.
        """
        flips = (self.keeps(places) != kept).nonzero().view(-1)
        if not flips.numel():
            return self
        places = places[flips]
        # Add the bit to set it, subtract it to clear it, modulo 256. Places are distinct, so that
        # flips in one byte do not interfere.
        bit = torch.where(kept[flips], 1, -1) << (places & 7)
        bits = self.bits.index_add(0, places >> 3, bit.to(torch.uint8))
        return BlockMask(self.rect, self.block, bits)

    def cut(self, rect: Rect) -> BlockMask:
        """Return the part of the mask over ``rect``, which must be within this shard."""
        if rect == self.rect:
            return self
        inner = grid_of(rect, self.block)
        top, left = inner.row - self.grid.row, inner.col - self.grid.col
        # flags() must begin at a byte.
        first = top // 8 * 8
        flags = self.flags(first, top + inner.rows)[top - first :, left : left + inner.cols]
        return BlockMask(rect, self.block, pack(flags.flatten()))

    @staticmethod
    def assemble(
        rect: Rect, block: Block, pieces: list[BlockMask], device: torch.device
    ) -> BlockMask:
        """Return the mask of ``rect`` from pieces that cover it, such as other shards' :meth:`cut`.

        Raises:
            ValueError: the pieces leave a block of ``rect`` uncovered, or differ where they
                overlap.
        """
        grid = grid_of(rect, block)
        kept = torch.zeros(grid.rows, grid.cols, dtype=torch.bool, device=device)
        known = torch.zeros_like(kept)
        for piece in pieces:
            row, col = piece.grid.row - grid.row, piece.grid.col - grid.col
            at = slice(row, row + piece.grid.rows), slice(col, col + piece.grid.cols)
            flags = piece.flags().to(device)
            if bool((known[at] & (kept[at] != flags)).any()):
                raise ValueError(
                    f"The mask pieces of {rect} differ where they overlap, in {piece.rect}."
                )
            kept[at] = flags
            known[at] = True
        if not bool(known.all()):
            raise ValueError(
                f"The mask pieces do not cover {rect}: {int((~known).sum())} of {known.numel()}"
                " blocks are unknown."
            )
        return BlockMask(rect, block, pack(kept.flatten()))

    def dead_rows(self) -> Tensor:
        """Return the rows of the shard in which the mask keeps nothing: bool ``(rect.rows,)``, on
        the mask's device."""
        if not self.blocks:
            # Nothing is kept of a row without columns.
            return torch.ones(self.rect.rows, dtype=torch.bool, device=self.bits.device)
        dead, height = self._dead_block_rows(), self.block[0]
        if height == 1:
            return dead
        # The first and the last row of blocks may have only some of their rows in this shard.
        first, last = self.grid.row, self.grid.row_end
        edges = torch.arange(first, last + 1, device=dead.device) * height
        repeats = edges.clamp(self.rect.row, self.rect.row_end).diff()
        # If the size were not given, torch would wait for the device to sum the repeats.
        return dead.repeat_interleave(repeats, output_size=self.rect.rows)

    def _dead_block_rows(self) -> Tensor:
        """Return the rows of blocks of which the mask keeps nothing: bool ``(grid.rows,)``."""
        if self.grid.cols % 8:
            return torch.cat([~self.flags(first, last).any(1) for first, last in self.row_chunks()])
        # Rows of blocks begin at bytes, so no bit is unpacked. Rows as long as a word are compared
        # as words.
        size = self.grid.cols // 8
        if size in WORDS:
            return self.bits.view(WORDS[size]) == 0
        return self.bits.view(-1, size).amax(1) == 0


def removed_parts(
    tensor: Tensor, mask: BlockMask, dead_rows: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield live parts of a shard's weights or optimizer state, and flags of what is removed.

    State with one value per row is removed where the whole row is. Other state, such as a step
    count, does not belong to any element.

    Args:
        tensor: plain data, and its state, may have any shape; its mask belongs to a matrix with the
            same number of rows.
        dead_rows: bool ``(rect.rows,)``.
    """
    rect = mask.rect
    if tensor.shape[:1] != (rect.rows,):
        return
    if tensor.numel() == rect.numel:
        elements = tensor.data.view(rect[2:])
        for rows, kept in mask.element_chunks(only_removing=True):
            yield elements[rows], ~kept
    elif tensor.numel() == rect.rows:
        yield tensor.data.view(-1), dead_rows.to(tensor.device)


class ShardChange(NamedTuple):
    """A new mask, before the weights that it removes are zeroed.

    Args:
        mask: the new mask.
        tensor: the live shard.
        before: the mask so far. Blocks that it keeps and ``mask`` removes are zeroed.
        dirty: packed like ``mask``, further removed blocks that may not be zero. None: none is
            known, and :func:`prune` writes all removed blocks.
    """

    mask: BlockMask
    tensor: Tensor
    before: BlockMask
    dirty: Tensor | None


@dataclass(eq=False, frozen=True)
class Held:
    """What is stored with one shard on this rank, or with a part of one. A mask update replaces it.

    Attributes:
        mask: of the shard's rectangle.
        counts: lookups of each row in training, live: ``(rect.rows,)``, int32, or float64 where
            counts decay; ``(0,)`` where they are not counted.
    """

    mask: BlockMask
    counts: Tensor = field(default_factory=partial(torch.empty, 0))

    @cached_property
    def samples(self) -> Tensor:
        """Lookups that an enforcer has sampled since the mask was replaced, live: int64 ``(2,)``,
        all lookups, and lookups of wholly removed rows."""
        return torch.zeros(2, dtype=torch.int64, device=self.mask.bits.device)

    @property
    def lookups(self) -> Tensor:
        """All lookups of the shard, and lookups of its removed rows, ``(2,)``: counted, or else
        sampled."""
        if not self.counts.numel():
            return self.samples
        rows = self.counts.double()
        # Picking the removed rows would wait for the device.
        removed = torch.where(self.mask.dead_rows(), rows, 0.0)
        return torch.stack([rows.sum(), removed.sum()])

    def to(self, device: torch.device) -> Held:
        if self.mask.bits.device == device:
            return self
        # Move the counts too: lookups of the shard are added on its device.
        bits = self.mask.bits.to(device)
        return Held(replace(self.mask, bits=bits), self.counts.to(device))

    def cut(self, rect: Rect) -> Held:
        """Return the part over a rectangle within this one, with all blocks that touch it."""
        rows = slice(rect.row - self.mask.rect.row, rect.row_end - self.mask.rect.row)
        return Held(self.mask.cut(rect), self.counts[rows])


def _apply_on_devices(changes: Sequence[ShardChange]) -> None:
    """:meth:`BlockMask.apply_all_changed_` of shards on accelerators: one wait to find the masks
    that remove anything, and one launch for many."""
    # Reading the property of each mask would wait for each.
    unknown = [change.mask for change in changes if "removes" not in vars(change.mask)]
    found = on_host([mask._any_removed().view(1) for mask in unknown])
    for mask, removes in zip(unknown, found, strict=True):
        mask.learn_removes(bool(removes))
    prune(change for change in changes if change.mask.removes)


def prune(changes: Iterable[ShardChange]) -> None:
    """Write zero to removed blocks of live shards: to those that were kept before and to dirty
    ones; to all where ``dirty`` is None or the blocks have another shape. Where kernels run, shards
    of one block width and element size share a launch."""
    launches: dict[tuple[Any, ...], list[Any]] = {}
    for mask, tensor, before, dirty in changes:
        kernels = kernels_on(tensor.device)
        width = flat_width(mask.rect, mask.block, tensor)
        if kernels is None or width is None:
            # Write all that is removed: finding what has changed would wait for the device.
            mask.apply_(tensor)
            continue
        addresses: list[int] = []
        if dirty is not None and before.block == mask.block:
            addresses = [before.bits.data_ptr(), dirty.data_ptr()]
        job = kernels.Pruning(tensor.data_ptr(), mask.blocks, mask.bits.data_ptr(), *addresses)
        launch = kernels, width, tensor.element_size(), tensor.device, not addresses
        launches.setdefault(launch, []).append(job)
    for (kernels, width, size, device, _), jobs in launches.items():
        kernels.prune(jobs, width, size, device)
