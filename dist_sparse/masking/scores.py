"""Scores of sparse blocks: of elements, of blocks, and as the selection reads them.

The score of a block is ``float32(float64 sum of the element scores / number of real elements)``: a
mean, so edge blocks compete with whole ones. Element scores are ``|x|`` (L1), ``x * x`` (L2
without the root, which would not change the order) or a user's function. Sums are in float64. The
order of additions depends on neither the chunks nor the sharding, so a block has the same score on
every sharding.

The selection reads the int32 bit patterns of scores, which sort like the scores because none is
negative. A :class:`Segment` holds the scores of a shard in pieces, with their histogram;
:class:`JointScores` holds the scores of several small tables, counted in one pass. Bit patterns
that no finite score has mark blocks that are decided elsewhere.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dist_sparse.masking.device import count_each, pieces_on
from dist_sparse.masking.masks import pack
from dist_sparse.records import LEADING_SHIFT, TINY
from dist_sparse.tables.shards import Block, Rect, grid_of, sent

# The bit pattern of infinity. All finite scores are smaller, all NaN with a clear sign larger.
NOT_FINITE = 0x7F800000

# Replaces the score of a block that is decided elsewhere: never among the smallest.
KEPT = 0x7FFFFFFF

# Replaces the score of a cut block that its owner removes: below every threshold.
REMOVED = -1

# The leading 11 of the 31 bits that a score has.
LEADING_BUCKETS = 2048

# Length of :func:`first_histogram`: zeros apart, then the leading bits.
HISTOGRAM = 1 + LEADING_BUCKETS

CPU = torch.device("cpu")


def refused(bits: Tensor) -> Tensor:
    """Return which scores are negative or not finite. Bits of negative floats are negative."""
    return (bits < 0) | (bits >= NOT_FINITE)


class RowTotals(NamedTuple):
    """Lookups or summed gradients of a shard's rows.

    Args:
        rect: of the shard.
        total: ``(rows,)``, ``(rows, 1)`` or ``(rows, columns)``; live.
        initial: the total of a row that was never looked up or updated, which is subtracted.
        share: number of elements that share a total: each scores ``1 / share`` of it.
        most: larger totals count as this one.
    """

    rect: Rect
    total: Tensor
    initial: float = 0.0
    share: int = 1
    most: float = math.inf

    @property
    def of_elements(self) -> bool:
        """Whether each element has a total of its own."""
        return self.total.numel() > self.rect.rows

    def of_rows(self, rows: slice | Tensor) -> Tensor:
        """Return the value of an element of these rows, float64 ``(rows, 1)`` or
        ``(rows, columns)``."""
        # Copied: the total is live, and the caller computes in place.
        totals = self.total.reshape(self.rect.rows, -1)[rows].to(torch.float64, copy=True)
        # Live counts are clamped now and then, at different times in the shards that share a row.
        # They must score alike.
        return totals.clamp_(max=self.most).sub_(self.initial).div_(self.share)


@dataclass(frozen=True, eq=False)
class ByTotals:
    """Score an element by its total, alone or times its own square.

    Not a callable like a user's measure: kernels know it, and it scores in place.

    Args:
        find: returns the totals of the shard that holds a global (row, column).
        squares: score an element ``x`` as ``x * x * (total + 2**-100)``.
    """

    find: Callable[[tuple[int, int]], RowTotals]
    squares: bool

    def score(self, chunk: Tensor, offset: tuple[int, int], out: Tensor) -> Tensor:
        """Return the scores of some rows of a shard in ``out``, float64; arguments as in
        :func:`~dist_sparse.masking.scores.element_scores`."""
        totals = self.find(offset)
        first = offset[0] - totals.rect.row
        value = totals.of_rows(slice(first, first + len(chunk)))
        if not self.squares:
            return out.copy_(value.expand_as(out))
        return squares_times(out.copy_(chunk), value)


def squares_times(elements: Tensor, value: Tensor) -> Tensor:
    """Return the scores of elements by their squares and the value of their totals, both float64;
    both are overwritten."""
    return elements.mul_(elements).mul_(value.add_(TINY))


# How an element is scored. `"given"`: the tensor holds element scores already. A callable takes a
# chunk of rows and the global (row, column) of its first element and returns element scores of the
# same shape.
Measure = Literal["L1", "L2", "given"] | ByTotals | Callable[[Tensor, tuple[int, int]], Tensor]

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
    if isinstance(measure, ByTotals):
        return measure.score(chunk, offset, buffer)
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
    return buffer


# Minimum elements of a shard for keeping scores. Scoring all rows of a smaller one takes up to
# 2.5 ms in a mask update. Tracking its written rows takes up to 0.1 ms in each of the many backward
# passes between two updates.
LARGE = 1 << 22


def worth_keeping(rect: Rect, block: Block) -> bool:
    """Return whether scores of such a shard are worth keeping from one mask update to the next."""
    return block[0] == 1 and min(block[1], rect.cols) >= 32 and rect.numel >= LARGE


def block_sums(
    tensor: Tensor, rect: Rect, block: Block, measure: Measure
) -> Iterator[tuple[int, Tensor]]:
    """Yield sums of element scores per block of the shard ``rect``, in chunks of block rows from
    the top.

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
    # Two buffers for all chunks: fresh memory for each would be mapped page by page.
    buffer = folded = torch.empty(0, dtype=torch.float64, device=tensor.device)
    for start, stop in row_chunks(rect, block, tensor.device):
        height = min(block[0], stop - start)
        total: Tensor | None = None
        # A tall block row, which is a chunk by itself, is summed in pieces.
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
    """Yield the shard's rows in chunks ``[start, stop)`` of whole block rows, of a size that is
    fast on the device.

    A partial block row (cut by the shard's border, or the last of the table) is a chunk by itself,
    and so is a tall one.
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
        # Rows of this block row above the shard.
        above = (rect.row + start) % block[0]
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
    """Return scores, a new float32 tensor ``(block rows, block columns)``: the sums divided by the
    number of real elements. ``sums`` is overwritten.

    Args:
        sums: float64, of block rows ``[first, first + block rows)``.
        widths: elements in a row of each block column, from :func:`block_widths`.
        shape: of the whole table; its last block row may be lower.
    """
    # An element is its own mean.
    if block == (1, 1):
        return sums.to(torch.float32)
    # The last block row of the table may be lower than the others.
    whole = shape[0] // block[0] - first
    sums[:whole].div_(widths * block[0])
    if shape[0] % block[0] and whole < sums.shape[0]:
        sums[max(whole, 0) :].div_(widths * (shape[0] % block[0]))
    return sums.to(torch.float32, memory_format=torch.contiguous_format)


def block_widths(shape: tuple[int, int], block: Block, columns: Tensor) -> Tensor:
    """Return the widths of the blocks in the given global block columns, float64. The last block
    of a row may be narrower."""
    return (shape[1] - columns * block[1]).clamp_(max=block[1]).to(torch.float64)


def _fold_columns(scored: Tensor, rect: Rect, width: int, out: Tensor) -> Tensor:
    """Return the sums of ``scored`` ``(rows, rect.cols)`` over the columns of each block, in
    ``out`` ``(rows, block columns)``."""
    if width == 1:
        return scored
    # From left to right: a block that begins left of the shard, whole blocks, and a block that ends
    # right of the shard.
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

    For larger ``w`` torch.sum has a fixed order too, but only over a contiguous last dimension of
    limited length. Over a strided one the order changes with the position of the column, and one
    long row may be split over threads. So the dimension is made contiguous, and cut if it is long.
    """
    width = parts.shape[-1]
    if width > _FEW:
        parts = parts.contiguous() if parts.stride(-1) != 1 else parts
        total = torch.sum(parts[..., :_LONG], -1, out=out)
        for start in range(_LONG, width, _LONG):
            total += parts[..., start : start + _LONG].sum(-1)
        return total
    while width % 2 == 0 and width > 2:
        parts = parts[..., 0::2].add_(parts[..., 1::2])
        width = width // 2
    if width == 1:
        return parts[..., 0] if out is None else out.copy_(parts[..., 0])
    total = torch.add(parts[..., 0], parts[..., 1], out=out)
    for k in range(2, width):
        total += parts[..., k]
    return total


def smallest_in_blocks(scores: Tensor, chosen: Tensor, block: Block, zeros: int) -> Tensor:
    """Return the ``zeros`` smallest elements of each chosen block; among equal scores, the first
    ones in the block's row-major order.

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
    # Padding ranks after every (finite) element.
    padded = scores.new_full((down * height, across * width), torch.inf)
    padded[:rows, :cols] = scores
    # (down, height, across, width) to one row of elements a block, and back.
    blocks = padded.view(down, height, across, width).transpose(1, 2).flatten(2)
    smallest = blocks.argsort(dim=-1, stable=True)[..., :zeros]
    removed = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, smallest, True)
    removed &= chosen.unsqueeze(-1)
    flat = removed.view(down, across, height, width).transpose(1, 2).flatten(2).flatten(0, 1)
    return flat[:rows, :cols]


# By the number of a table in its batch: the leading bits of the scores to count, and the table's
# first histogram.
Prefixes = Mapping[int, tuple[int, Tensor]]

# By the number of a table in its batch: a score, and a count or a place.
Limits = Mapping[int, tuple[int, int]]

# The new mask of a shard: packed flags of kept blocks, packed flags of removed blocks that score
# more than 0, and whether anything is removed.
NewBits = tuple[Tensor, Tensor, bool]


class Batch(Protocol):
    """Scores of several tables, with one shard each, that are counted together. A table's number is
    its position in the batch.

    Attributes:
        held: the scores of each table, int32 ``(blocks,)``; empty if they are computed again.
        sampled: for each table, how many blocks its first histogram stands for, if it is of a
            sample; else 0.
    """

    held: list[Tensor]
    sampled: list[int]

    def first_histograms(self) -> Tensor:
        """Return :func:`first_histogram` of each table, int64 ``(tables, HISTOGRAM)``, or of a
        sample."""

    def around(self, buckets: Mapping[int, int], samples: Mapping[int, Tensor]) -> Tensor:
        """Return the exact histograms of some sampled tables, int64 ``(tables, HISTOGRAM)``, in CPU
        memory: but all blocks below a bucket other than zeros count in the first one, all above in
        the last finite one. If a score is refused, its bucket counts at least one.

        Args:
            buckets: by the number of the table, the place of the bucket in the histogram.
            samples: by the number of the table, its :meth:`first_histograms` in CPU memory.
        """

    def exact_histograms(self, numbers: Sequence[int]) -> Tensor:
        """Return :func:`first_histogram` of some tables, int64 ``(tables, HISTOGRAM)``."""

    def histograms(self, prefixes: Prefixes, before: int, shift: int, buckets: int) -> list[Tensor]:
        """Return, for each table with a prefix, how many of its scores other than 0 that have the
        prefix (all bits from ``before`` on) fall into each bucket of the next bits: int64
        ``(buckets,)``.

        Args:
            prefixes: by the number of the table, with its last histogram in CPU memory.
        """

    def ties(self, wanted: Limits) -> Mapping[int, Tensor]:
        """Return the flat places of the blocks that have a score, int32 in no order, by the number
        of the table; some may be NO_PLACE. For a missing table, the caller reads all scores.

        Args:
            wanted: by the number of the table, the score, and the most blocks that can have it.
        """

    def masks(self, limits: Limits) -> dict[int, NewBits]:
        """Return the new masks of tables, by their numbers. Waits for the device at most once.

        Args:
            limits: for each table a score and a flat place. Blocks with a smaller score are
                removed, and blocks with this score before that place.
        """


class Segment:
    """Scores of a grid of blocks, row-major, in pieces of whole rows.

    Many pieces rather than one large tensor: the allocator reuses small blocks of memory. The pages
    of a large one are mapped again in every mask update, which takes as long as scoring.

    Args:
        first_row: global block row of the first row; the others follow.
        columns: global block column of each column, ascending.
        grid_cols: block columns of the whole table; the global index of a block is
            ``row * grid_cols + column``.
        device: of the scores.
        read: computes the scores again in each pass: yields ``(start, bits)`` chunks. Such a
            segment has no pieces.
        counts: whether this rank counts these blocks. Another rank counts replicas; both compare
            them with the threshold.

    Attributes:
        batch: counts the scores together with the scores of other tables, if any.
        number: the table's number in the batch.
        sampled: how many blocks its first histogram stands for, if it is of a sample; else 0.
        sample: that histogram, once a more exact one is known.
        find_refused: raises an error that names the first score that is refused, if any.
        count: counts scores without reading all of them, or returns None; see
            :meth:`~dist_sparse.masking.kept_scores.IndexedScores.counts`.
    """

    batch: Batch | None = None
    number = 0
    sampled = 0
    sample: Tensor | None = None
    find_refused: Callable[[], None] | None = None
    count: Callable[[int, int, int, int], Tensor | None]

    def __init__(
        self,
        first_row: int,
        columns: Sequence[int],
        grid_cols: int,
        device: torch.device = CPU,
        *,
        read: Callable[[], Iterator[tuple[int, Tensor]]] | None = None,
        counts: bool = True,
    ) -> None:
        self.first_row, self.columns, self.grid_cols = first_row, columns, grid_cols
        self.device, self.counts = device, counts
        self.count = lambda *_: None
        self._read = read
        # Each with its first row, counted from the segment's first; bits are int32 (rows, cols).
        self.pieces: list[tuple[int, Tensor]] = []
        self._rows = 0

    def add(self, bits: Tensor) -> None:
        """Append rows of scores, int32 ``(rows, cols)``, contiguous. They are held, and may be
        written later."""
        self.pieces.append((self._rows, bits))
        self._rows += bits.shape[0]

    @property
    def on_cpu(self) -> bool:
        """Whether the host reads scores without waiting for a device."""
        return self.device.type == "cpu"

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows ``[first, last)``, a view ``(last - first, cols)``; they must be in one
        piece."""
        at = bisect_right(self.pieces, first, key=itemgetter(0)) - 1
        start, bits = self.pieces[at]
        assert last - start <= len(bits)
        return bits[first - start : last - start]

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(start, bits)``, flat position and scores, in order."""
        if self._read is not None:
            yield from self._read()
        for first, bits in self.pieces:
            yield first * len(self.columns), bits.view(-1)

    @cached_property
    def histogram(self) -> Tensor:
        """:func:`first_histogram` of all scores. Set by a scorer that has counted them already."""
        counts = torch.zeros(HISTOGRAM, dtype=torch.int64, device=self.device)
        for _, bits in self.chunks():
            counts += first_histogram(bits)
        return counts

    def ids(self, places: Tensor) -> Tensor:
        """Return the global block indices of flat ``places``, int64, same shape."""
        cols = len(self.columns)
        rows, at = places // cols + self.first_row, places % cols
        if isinstance(self.columns, range):
            return rows * self.grid_cols + (at + self.columns.start)
        return rows * self.grid_cols + sent(self.columns, places.device)[at]

    def places_upto(self, last: int | None) -> int:
        """Return the number of blocks with a global index up to ``last`` (None: all). They are the
        first ones, because places and indices ascend together."""
        if last is None:
            return _ALL
        row, column = divmod(last, self.grid_cols)
        inside = max(row - self.first_row, 0) * len(self.columns)
        return inside + bisect_right(self.columns, column) if row >= self.first_row else 0


# More places than a segment has.
_ALL = 1 << 62


class JointScores:
    """A :class:`Batch` of small tables in CPU memory: their scores one after the other.

    Args:
        bits: int32 ``(sum of sizes,)``.
        sizes: how many scores each table has.
    """

    def __init__(self, bits: Tensor, sizes: Sequence[int]) -> None:
        self._bits, self._sizes = bits, torch.tensor(sizes)
        self._starts = [0, *accumulate(sizes)]
        self.held = [*torch.split(bits, list(sizes))]
        self.sampled = [0] * len(sizes)

    def _of_scores(self, of_tables: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return for each score the value of its table. Not cached: it is as large as the
        scores."""
        return torch.tensor(of_tables, dtype=dtype).repeat_interleave(self._sizes)

    def first_histograms(self) -> Tensor:
        # Bucket 0 for zeros, 1 + leading bits for others.
        leading = torch.bitwise_right_shift(self._bits, LEADING_SHIFT).add_(1)
        # Negative scores are refused later; bincount() would refuse them without naming a table.
        leading.mul_(self._bits != 0).clamp_(min=0)
        tables = len(self.held)
        at = self._of_scores(range(0, tables * HISTOGRAM, HISTOGRAM)).add_(leading)
        return torch.bincount(at, minlength=tables * HISTOGRAM).view(-1, HISTOGRAM)

    def around(self, buckets: Mapping[int, int], samples: Mapping[int, Tensor]) -> Tensor:
        raise AssertionError("nothing is sampled")

    def exact_histograms(self, numbers: Sequence[int]) -> Tensor:
        return self.first_histograms()[list(numbers)]

    def histograms(self, prefixes: Prefixes, before: int, shift: int, buckets: int) -> list[Tensor]:
        # By table, its prefix and where its counts begin. No score has the prefix -1: tables that
        # are not asked for count nothing.
        wanted = [-1] * len(self.held)
        starts = [0] * len(self.held)
        for row, (number, (prefix, _)) in enumerate(prefixes.items()):
            wanted[number] = prefix
            starts[number] = row * buckets
        bits = self._bits
        inside = ((bits >> before) == self._of_scores(wanted, torch.int32)) & (bits != 0)
        at = self._of_scores(starts) + ((bits >> shift) & (buckets - 1))
        counts = torch.bincount(at[inside], minlength=len(prefixes) * buckets)
        return [*counts.view(-1, buckets).unbind()]

    def ties(self, wanted: Limits) -> Mapping[int, Tensor]:
        # The caller reads all scores: in CPU memory that is as fast as a list.
        return {}

    def masks(self, limits: Limits) -> dict[int, NewBits]:
        scores = [0] * len(self.held)
        ends = [0] * len(self.held)
        for number, (score, upto) in limits.items():
            scores[number] = score
            ends[number] = self._starts[number] + upto
        places = torch.arange(self._bits.numel())
        # Score < limit, or <= limit for places before the end: adding the flag does both.
        removed = self._bits < self._of_scores(scores) + (places < self._of_scores(ends))
        dirty = removed & (self._bits != 0)
        found: dict[int, NewBits] = {}
        for number in limits:
            table = slice(self._starts[number], self._starts[number + 1])
            found[number] = pack(~removed[table]), pack(dirty[table]), bool(removed[table].any())
        return found


def with_prefix(bits: Tensor, prefix: int, shift: int) -> Tensor:
    """Return the scores ``bits`` ``(n,)`` other than 0 whose bits from ``shift`` on are
    ``prefix``."""
    # In place: the shifted scores are the only temporary of their size.
    inside = bits[(bits >> shift).eq_(prefix).to(torch.bool)]
    # Zeros have a bucket of their own in the first round.
    return inside if prefix else inside[inside != 0]


def bucket_counts(bits: Tensor, shift: int, buckets: int) -> Tensor:
    """Return how many of ``bits`` ``(n,)`` fall into each bucket of the ``log2(buckets)`` bits
    above ``shift``, int64 ``(buckets,)``."""
    return torch.bincount((bits >> shift) & (buckets - 1), minlength=buckets)


def first_histogram(bits: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return the first round's histogram of finite scores, int64 ``(HISTOGRAM,)`` on their device:
    the number of zeros, then other scores by leading bits.

    Zeros have their own bucket because removed blocks score 0: a threshold of 0 needs no second
    round.

    Args:
        bits: int32 ``(n,)``.
        scratch: int32, resized to work in.
    """
    if not bits.is_cpu:
        leading = (bits >> LEADING_SHIFT).bitwise_and_(LEADING_BUCKETS - 1).add_(bits != 0)
        return count_each(leading, HISTOGRAM)
    out = None if scratch is None else scratch.resize_(bits.numel())
    leading = torch.bitwise_right_shift(bits, LEADING_SHIFT, out=out)
    copies = 1
    if bits.numel() % 64 == 0:
        # Incrementing one counter twice in a row stalls the CPU: neighbours count in four copies.
        copies = 4
        lanes = torch.arange(64, dtype=torch.int32).remainder_(copies).mul_(LEADING_BUCKETS)
        leading.view(-1, 64).add_(lanes)
    counts = torch.bincount(leading, minlength=copies * LEADING_BUCKETS)
    counts = counts.view(copies, LEADING_BUCKETS).sum(0)
    zeros = (bits.numel() - torch.count_nonzero(bits)).view(1)
    counts[0] -= zeros[0]
    return torch.cat([zeros, counts])
