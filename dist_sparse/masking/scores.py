"""Scores of sparse blocks, and the smallest elements of chosen blocks.

The score of a block is ``float32(float64 sum of the element scores / number of real elements)``: a
mean, so edge blocks compete with whole ones. Element scores are ``|x|`` (L1), ``x * x`` (L2, no
root: the order is the same) or a user's function. Sums are taken in float64 over chunks of rows, in
an order that depends on neither the chunks nor the sharding, so that a block has the same score on
every sharding.

Small tables are scored together (:func:`score_batch`): a call of torch costs as much as the work on
a few kilobytes. Tables of one width, block and measure are laid one below the other; blocks of one
row know nothing of their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dist_sparse.masking.device import pieces_on
from dist_sparse.tables.shards import Block, Rect, Shard, grid_of


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


# How an element is scored. `"given"`: the tensor holds element scores already. A callable takes a
# chunk of rows and the global (row, column) of its first element and returns element scores of the
# same shape.
Measure = (
    Literal["L1", "L2", "given"] | WeightedSquares | Callable[[Tensor, tuple[int, int]], Tensor]
)

# Up to this width, adding strided slices is faster than a reduction over the last dimension.
_FEW = 16

# Longer rows and columns are summed in pieces of this length: below it torch never splits one sum
# over threads.
_LONG = 8192


def element_scores(
    chunk: Tensor, measure: Measure, offset: tuple[int, int], out: Tensor | None = None
) -> Tensor:
    """Return element scores of ``chunk`` ``(rows, cols)`` as a new float64 tensor of that shape (in
    ``out``, if given)."""
    buffer = out
    if buffer is None:
        buffer = torch.empty(chunk.shape, dtype=torch.float64, device=chunk.device)
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
    tensor: Tensor, rect: Rect, block: Block, measure: Measure
) -> Iterator[tuple[int, Tensor]]:
    """Sums of element scores per block of the shard ``rect``, in chunks of block rows from the top.

    Args:
        tensor: the shard.
        rect: of the shard.
        block: the sparse block.
        measure: how elements are scored.

    Yields:
        ``(first, sums)``: the first block row of the chunk, counted from the shard's own first, and
        float64 sums of shape ``(block rows, block columns)`` over the elements that the shard
        holds. ``sums`` is overwritten by the next chunk.
    """
    grid = grid_of(rect, block)
    buffer = folded = torch.empty(0, dtype=torch.float64, device=tensor.device)
    for start, stop in row_chunks(rect, block, tensor.device):
        height = min(block[0], stop - start)
        total: Tensor | None = None
        # A tall block, which is alone in its chunk, is summed in pieces.
        step = min(stop - start, _LONG) if block[0] > _LONG else stop - start
        if step > len(buffer):
            buffer = buffer.new_empty(step, rect.cols)
            folded = buffer.new_empty(step, grid.cols)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            offset = rect.row + first, rect.col
            scored = element_scores(tensor[first:last], measure, offset, buffer[: last - first])
            rows = _fold_columns(scored, rect, block[1], folded[: last - first])
            sums = _fold(rows.view(-1, min(height, last - first), grid.cols).transpose(1, 2))
            total = sums if total is None else total.add_(sums)
        assert total is not None
        yield (rect.row + start) // block[0] - grid.row, total


def row_chunks(rect: Rect, block: Block, device: torch.device) -> Iterator[tuple[int, int]]:
    """The shard's rows in chunks ``[start, stop)`` of whole block rows, as large as is quick on the
    device.

    A block row that is not whole (cut by the shard's border, or the last of the table) makes a
    chunk of its own, and so does a tall one.
    """
    if rect.numel == 0:
        return
    sizes = pieces_on(device)
    elements = min(sizes.elements, max(sizes.least, rect.numel // sizes.chunks))
    per_chunk = block[0]
    if block[0] <= _LONG:
        per_chunk *= max(1, elements // (rect.cols * block[0]))
    start = 0
    while start < rect.rows:
        above = (rect.row + start) % block[0]  # rows of this block row above the shard
        if above:
            stop = min(rect.rows, start + block[0] - above)
        else:
            stop = min(rect.rows, start + per_chunk)
            rest = (stop - start) % block[0]
            if rest < stop - start:
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
    if block == (1, 1):
        return sums.to(torch.float32)  # an element is its own mean
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
    """Return the sums of ``scored`` ``(rows, rect.cols)`` over the columns of each block, in
    ``out`` ``(rows, block columns)``."""
    if width == 1:
        return scored
    # Columns of a block begun left of the shard, of whole blocks, and of one begun in it.
    first = min(rect.cols, -rect.col % width)
    whole = (rect.cols - first) // width
    end = first + whole * width
    at = 0
    if first:
        _fold(scored[:, None, :first], out[:, :1])
        at = 1
    if whole:
        _fold(scored[:, first:end].unfold(1, width, width), out[:, at : at + whole])
    if end < rect.cols:
        _fold(scored[:, None, end:], out[:, at + whole :])
    return out


def _fold(parts: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the sum over the last dimension of ``parts`` ``(a, b, w)``, in an order that depends
    on ``w`` alone: neighbours in pairs while ``w`` is even, then one by one. ``parts`` may be
    overwritten.

    torch.sum keeps to that over a contiguous last dimension, but neither over a strided one (its
    order changes with the position of the column) nor for one long row (it may be split over
    threads): so the last dimension is made contiguous, and long ones are cut.
    """
    width = parts.shape[-1]
    if width > _FEW:
        return _fold_long(parts.contiguous() if parts.stride(-1) != 1 else parts, out)
    while width % 2 == 0 and width > 2:
        parts, width = parts[..., 0::2].add_(parts[..., 1::2]), width // 2
    if width == 1:
        return parts[..., 0] if out is None else out.copy_(parts[..., 0])
    total = torch.add(parts[..., 0], parts[..., 1], out=out)
    for k in range(2, width):
        total += parts[..., k]
    return total


def _fold_long(parts: Tensor, out: Tensor | None) -> Tensor:
    first = parts[..., :_LONG]
    # mypy: torch.sum has no overload with out=None.
    total = torch.sum(first, -1) if out is None else torch.sum(first, -1, out=out)
    for start in range(_LONG, parts.shape[-1], _LONG):
        total += parts[..., start : start + _LONG].sum(-1)
    return total


def smallest_in_blocks(scores: Tensor, chosen: Tensor, block: Block, zeros: int) -> Tensor:
    """Return the ``zeros`` smallest elements of each chosen block; among equal scores those first
    in the block's row-major order.

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
    # (down, height, across, width) to one row of elements a block, and back.
    blocks = padded.view(down, height, across, width).transpose(1, 2).flatten(2)
    smallest = blocks.argsort(dim=-1, stable=True)[..., :zeros]
    gone = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, smallest, True)
    gone &= chosen.unsqueeze(-1)
    flat = gone.view(down, across, height, width).transpose(1, 2).flatten(2).flatten(0, 1)
    return flat[:rows, :cols]


# Most elements of a shard that is batched.
SMALL = 1 << 14

# Most elements of a batch.
BATCH = 1 << 20


def score_batch(
    shards: Sequence[Shard], width: int, block: Block, measures: Sequence[Measure]
) -> tuple[Tensor, list[int]]:
    """Score shards of tables of ``width`` columns, alike in all but their rows, one below the
    other; a measure for each.

    Returns:
        Scores, float32 ``(rows, block columns)``, and the first row of each shard. It fills whole
        bytes of flags, as its mask is cut from those of the batch: rows between two shards are no
        block.
    """
    first = shards[0]
    grid = grid_of(first.rect, block)
    align = 8 // math.gcd(8, grid.cols)
    filling = first.tensor.new_zeros(align, first.rect.cols)
    parts: list[Tensor] = []
    starts: list[int] = []
    rows = 0
    for shard in shards:
        starts.append(rows)
        rest = -shard.rect.rows % align
        parts += [shard.tensor, filling[:rest]]
        rows += shard.rect.rows + rest
    measure = _of_batch(shards, measures, starts, rows)
    rect = Rect(0, first.rect.col, rows, first.rect.cols)
    columns = torch.arange(grid.col, grid.col + grid.cols, device=first.tensor.device)
    widths = block_widths((rows, width), block, columns)
    scores = []
    for start, sums in block_sums(torch.cat(parts), rect, block, measure):
        scores.append(to_scores(sums, start, widths, (rows, width), block))
    return scores[0] if len(scores) == 1 else torch.cat(scores), starts


def _of_batch(
    shards: Sequence[Shard], measures: Sequence[Measure], starts: Sequence[int], rows: int
) -> Measure:
    """Return the measure of all rows of a batch, which has the factors of its shards."""
    if not isinstance(measures[0], WeightedSquares):
        return measures[0]
    found = []
    for shard, measure in zip(shards, measures, strict=True):
        assert isinstance(measure, WeightedSquares)
        found.append(measure.factors(shard.tensor, (shard.rect.row, shard.rect.col)))
    # Factors of a row, or of each element: expanded where the tables differ.
    factors = found[0].new_zeros(rows, max(each.shape[1] for each in found))
    for start, each in zip(starts, found, strict=True):
        factors[start : start + len(each)] = each
    return WeightedSquares(lambda chunk, offset: factors[offset[0] : offset[0] + len(chunk)])
