"""Scores of sparse blocks, and the smallest elements of chosen blocks.

The score of a block is ``float32(float64 sum of the element scores / number of real elements)``: a
mean, so edge blocks compete with whole ones. Element scores are ``|x|`` (L1), ``x * x`` (L2, no
root: the order is the same) or a user's function. Sums are taken in float64 over chunks of rows, in
an order that depends on neither the chunks nor the sharding, so that a block has the same score on
every sharding.

Small tables are scored together (:class:`Batch`): a call of torch costs as much as the work on a
few kilobytes. Tables of one width, block and measure are laid one below the other; blocks of one
row know nothing of their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dist_sparse.tables.shards import Block, Rect, Shard, ShardedData, grid_of

__all__ = [
    "Batch",
    "Measure",
    "WeightedSquares",
    "batches",
    "block_sums",
    "block_widths",
    "element_scores",
    "row_chunks",
    "smallest_in_blocks",
    "to_scores",
]


@dataclass(frozen=True, eq=False)
class WeightedSquares:
    """Score an element ``x`` as ``x * x * factor``, with a positive factor for each row.

    A measure of its own, rather than a callable: it needs no memory besides the scores, and small
    tables share a pass.

    Args:
        factors: takes a chunk of rows and the global (row, column) of its first element, as a
            callable measure does; returns float64 ``(rows, 1)`` or ``(rows, columns)``.
    """

    factors: Callable[[Tensor, tuple[int, int]], Tensor]


Measure = (
    Literal["L1", "L2", "given"] | WeightedSquares | Callable[[Tensor, tuple[int, int]], Tensor]
)
"""How an element is scored. ``"given"``: the tensor holds element scores already. A callable takes
a chunk of rows and the global (row, column) of its first element and returns element scores of the
same shape."""

CHUNK_ELEMENTS = 1 << 20
"""Most elements scored at a time: 8 MiB of float64, about what the last-level cache of one core
keeps."""

_LEAST_CHUNK = 1 << 18
_CHUNKS = 8
"""A shard is scored in so many chunks, unless they are smaller than that: the first one writes into
fresh memory, whose pages are mapped in while it does, which takes longer than scoring."""

_FEW = 16
"""Up to this width, adding strided slices is faster than a reduction over the last dimension."""

_LONG = 8192
"""Longer rows and columns are summed in pieces of this length: below it torch never splits one sum
over threads."""


def element_scores(
    chunk: Tensor, measure: Measure, offset: tuple[int, int], out: Tensor | None = None
) -> Tensor:
    """Element scores of ``chunk`` ``(rows, cols)`` as a new float64 tensor of that shape (in
    ``out``, if given)."""
    buffer = (
        torch.empty(chunk.shape, dtype=torch.float64, device=chunk.device) if out is None else out
    )
    if callable(measure):
        scored = measure(chunk, offset)
        if scored.shape != chunk.shape:
            raise ValueError(
                f"score() returned shape {tuple(scored.shape)} for data of shape"
                f" {tuple(chunk.shape)}: must be equal."
            )
        return buffer.copy_(scored)
    buffer.copy_(chunk)
    if measure == "L1":
        buffer.abs_()
    elif measure != "given":
        torch.mul(buffer, buffer, out=buffer)
    if isinstance(measure, WeightedSquares):
        buffer.mul_(measure.factors(chunk, offset))
    return buffer


def block_sums(
    tensor: Tensor, rect: Rect, block: Block, measure: Measure, of: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Sums of element scores per block of the shard ``rect``, in chunks of block rows from the top.

    Args:
        tensor: the shard.
        rect: of the shard.
        block: the sparse block.
        measure: how elements are scored.
        of: which rows of ``tensor`` are those of ``rect``, int64 ``(rect.rows,)``; None is all of
            them.

    Yields:
        ``(first, sums)``: the first block row of the chunk, counted from the shard's own first, and
        float64 sums of shape ``(block rows, block columns)`` over the elements that the shard
        holds. ``sums`` is overwritten by the next chunk.
    """
    grid = grid_of(rect, block)
    buffer = torch.empty(0, dtype=torch.float64, device=tensor.device)
    folded = buffer
    for start, stop in row_chunks(rect, block):
        height = min(block[0], stop - start)
        total: Tensor | None = None
        # Tall blocks are summed in pieces.
        for first in range(start, stop, _LONG) if height > _LONG else (start,):
            last = min(first + _LONG, stop) if height > _LONG else stop
            if last - first > buffer.shape[0]:
                buffer = torch.empty(
                    last - first, rect.cols, dtype=torch.float64, device=tensor.device
                )
                folded = torch.empty(
                    last - first, grid.cols, dtype=torch.float64, device=tensor.device
                )
            offset = rect.row + first, rect.col
            chunk = tensor[first:last] if of is None else tensor.index_select(0, of[first:last])
            scored = element_scores(chunk, measure, offset, out=buffer[: last - first])
            rows = _fold_columns(scored, rect, block[1], folded[: last - first])
            sums = _fold(rows.view(-1, min(height, last - first), grid.cols).transpose(1, 2))
            total = sums if total is None else total.add_(sums)
        assert total is not None
        yield (rect.row + start) // block[0] - grid.row, total


def row_chunks(rect: Rect, block: Block) -> Iterator[tuple[int, int]]:
    """The shard's rows in chunks ``[start, stop)`` of whole block rows, of at most about
    CHUNK_ELEMENTS elements.

    A block row that is not whole (cut by the shard's border, or the last of the table) makes a
    chunk of its own, and so does a tall one.
    """
    if rect.numel == 0:
        return
    elements = min(CHUNK_ELEMENTS, max(_LEAST_CHUNK, rect.numel // _CHUNKS))
    per_chunk = max(1, elements // (rect.cols * block[0]) if block[0] <= _LONG else 1) * block[0]
    start = 0
    while start < rect.rows:
        ahead = (rect.row + start) % block[0]  # rows of this block row above the shard
        stop = min(rect.rows, start + (block[0] - ahead if ahead else per_chunk))
        if not ahead and (rest := (stop - start) % block[0]) and stop - start > block[0]:
            stop -= rest
        yield start, stop
        start = stop


def to_scores(
    sums: Tensor, first: int, widths: Tensor, shape: tuple[int, int], block: Block
) -> Tensor:
    """Scores, a new float32 tensor ``(block rows, block columns)``: the sums over the number of
    real elements; ``sums`` is overwritten.

    Args:
        sums: float64, of block rows ``[first, first + block rows)``.
        widths: elements in a row of each block column, from :func:`block_widths`.
        shape: of the whole table; its last block row may be lower.
    """
    whole = shape[0] // block[0] - first
    sums[:whole].div_(widths * block[0])
    if shape[0] % block[0] and whole < sums.shape[0]:
        sums[max(whole, 0) :].div_(widths * (shape[0] % block[0]))
    return sums.to(torch.float32, memory_format=torch.contiguous_format)


def block_widths(shape: tuple[int, int], block: Block, columns: Tensor) -> Tensor:
    """Elements in a row of the blocks in the given global block columns, float64: the last block of
    a row may be narrower."""
    return (shape[1] - columns * block[1]).clamp_(max=block[1]).to(torch.float64)


def _fold_columns(scored: Tensor, rect: Rect, width: int, out: Tensor) -> Tensor:
    """Sums ``scored`` ``(rows, rect.cols)`` over the columns of each block, into ``out``
    ``(rows, block columns)``."""
    if width == 1:
        return scored
    # Columns that belong to a block begun left of the shard.
    first = min(rect.cols, -rect.col % width)
    whole = (rect.cols - first) // width
    left = 1 if first else 0
    if first:
        _fold(scored[:, None, :first], out[:, :1])
    if whole:
        body = scored[:, first : first + whole * width].unfold(1, width, width)
        _fold(body, out[:, left : left + whole])
    if first + whole * width < rect.cols:
        _fold(scored[:, None, first + whole * width :], out[:, left + whole :])
    return out


def _fold(parts: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over the last dimension of ``parts`` ``(a, b, w)``, in an order that depends on ``w``
    alone: neighbours in pairs while ``w`` is even, then one by one. ``parts`` may be overwritten.

    torch.sum keeps to that over a contiguous last dimension, but neither over a strided one (its
    order changes with the position of the column) nor for one long row (it may be split over
    threads): so the last dimension is made contiguous, and long ones are cut.
    """
    width = parts.shape[-1]
    if width <= _FEW:
        while width % 2 == 0 and width > 2:
            parts, width = parts[..., 0::2].add_(parts[..., 1::2]), width // 2
        if width == 1:
            return parts[..., 0] if out is None else out.copy_(parts[..., 0])
        total = torch.add(parts[..., 0], parts[..., 1], out=out)
        for k in range(2, width):
            total += parts[..., k]
        return total
    if parts.stride(-1) != 1:
        parts = parts.contiguous()
    total = (
        torch.sum(parts[..., :_LONG], -1)
        if out is None
        else torch.sum(parts[..., :_LONG], -1, out=out)
    )
    for start in range(_LONG, width, _LONG):
        total += parts[..., start : start + _LONG].sum(-1)
    return total


def smallest_in_blocks(scores: Tensor, chosen: Tensor, block: Block, zeros: int) -> Tensor:
    """The ``zeros`` smallest elements of each chosen block; among equal scores those first in the
    block's row-major order.

    Args:
        scores: element scores, float32 ``(rows, cols)``, starting at the corner of a block. Blocks
            at the right and lower edge may be smaller; one with no more than ``zeros`` elements is
            removed whole.
        chosen: bool ``(block rows, block columns)``.
        zeros: at least 1, at most the block's area.

    Returns:
        Removed flags, bool ``(rows, cols)``.
    """
    height, width = block
    rows, cols = scores.shape
    down, across = chosen.shape
    # Padding ranks behind every (finite) element.
    padded = scores.new_full((down * height, across * width), torch.inf)
    padded[:rows, :cols] = scores
    blocks = (
        padded.view(down, height, across, width)
        .transpose(1, 2)
        .reshape(down, across, height * width)
    )
    smallest = blocks.argsort(dim=-1, stable=True)[..., :zeros]
    gone = torch.zeros_like(blocks, dtype=torch.bool).scatter_(
        -1, smallest, True
    ) & chosen.unsqueeze(-1)
    flat = (
        gone.view(down, across, height, width)
        .transpose(1, 2)
        .reshape(down * height, across * width)
    )
    return flat[:rows, :cols]


SMALL = 1 << 14
"""Elements of a shard that is batched."""

_BATCH = 1 << 20
"""Elements of a batch."""


def batches(shards: Sequence[tuple[ShardedData, Shard, Block, Measure]]) -> Iterator[list[int]]:
    """Group shards that can be scored together; yields their places in ``shards``. Others are in no
    group.

    The caller leaves out shards that a border cuts, and those that lose only some elements of a
    block.
    """
    groups: dict[Any, list[int]] = {}
    for i, (data, shard, block, measure) in enumerate(shards):
        rect = shard.rect
        if block[0] == 1 and block[1] > 1 and 0 < rect.numel <= SMALL and not callable(measure):
            how = "weighted" if isinstance(measure, WeightedSquares) else measure
            key = (
                data.ranks,
                data.shape[1],
                rect.col,
                rect.cols,
                shard.tensor.device,
                data.dtype,
                block,
                how,
            )
            groups.setdefault(key, []).append(i)
    for group in groups.values():
        start = elements = 0
        for at, i in enumerate(group):
            elements += shards[i][1].rect.numel
            if elements > _BATCH:
                yield group[start:at]
                start, elements = at, shards[i][1].rect.numel
        yield group[start:]


@dataclass(eq=False)
class Batch:
    """Scores of several shards, one below the other.

    Args:
        scores: float32 ``(rows, block columns)``; rows between two shards are no block.
        starts: the first row of each shard; it fills whole bytes of flags.
        rows: how many rows each shard has.
        gaps: the rows between shards, int64.
    """

    scores: Tensor
    starts: list[int]
    rows: list[int]
    gaps: Tensor

    @staticmethod
    def of(shards: Sequence[Shard], width: int, block: Block, measures: Sequence[Measure]) -> Batch:
        """Score shards that :func:`batches` has put together, of tables of ``width`` columns; a
        measure for each."""
        first = shards[0]
        grid = grid_of(first.rect, block)
        whole_bytes = next(rows for rows in (1, 2, 4, 8) if rows * grid.cols % 8 == 0)
        filling = first.tensor.new_zeros(whole_bytes, first.rect.cols)
        parts: list[Tensor] = []
        starts: list[int] = []
        gaps: list[int] = []
        at = 0
        for shard in shards:
            rows, rest = shard.rect.rows, -shard.rect.rows % whole_bytes
            starts.append(at)
            parts.append(shard.tensor)
            if rest:
                parts.append(filling[:rest])
                gaps += range(at + rows, at + rows + rest)
            at += rows + rest
        everything = torch.cat(parts)
        measure = _of_batch(shards, measures, starts, at)
        rect = Rect(0, first.rect.col, at, first.rect.cols)
        device = everything.device
        widths = block_widths(
            (at, width), block, torch.arange(grid.col, grid.col + grid.cols, device=device)
        )
        scores = [
            to_scores(sums, start, widths, (at, width), block)
            for start, sums in block_sums(everything, rect, block, measure)
        ]
        together = scores[0] if len(scores) == 1 else torch.cat(scores)
        return Batch(
            together,
            starts,
            [shard.rect.rows for shard in shards],
            torch.tensor(gaps, dtype=torch.int64, device=device),
        )

    def part(self, i: int) -> Tensor:
        """The scores of one shard, a view ``(rows, block columns)``."""
        return self.scores[self.starts[i] : self.starts[i] + self.rows[i]]


def _of_batch(
    shards: Sequence[Shard], measures: Sequence[Measure], starts: Sequence[int], rows: int
) -> Measure:
    """The measure of all rows of a batch, which has the factors of its shards."""
    first = measures[0]
    if not isinstance(first, WeightedSquares):
        return first
    found = []
    for shard, measure in zip(shards, measures, strict=True):
        assert isinstance(measure, WeightedSquares)
        found.append(measure.factors(shard.tensor, (shard.rect.row, shard.rect.col)))
    factors = found[0].new_zeros(rows, max(each.shape[1] for each in found))
    for start, each in zip(starts, found, strict=True):
        factors[start : start + len(each)] = each
    return WeightedSquares(lambda chunk, offset: factors[offset[0] : offset[0] + len(chunk)])
