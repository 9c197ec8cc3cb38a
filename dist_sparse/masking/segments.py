"""Scores of blocks, as the selection reads them: in pieces, with their histogram.

Scores are non-negative float32, kept as their int32 bit patterns, which order alike. The patterns
that no finite score has mark blocks about which something else decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dist_sparse.masking.device import count_each, sent
from dist_sparse.masking.flat import FlatScores
from dist_sparse.masking.masks import pack, positions
from dist_sparse.records import LEADING_SHIFT

# The bit pattern of infinity; those of NaN are larger, those of finite scores smaller.
NOT_FINITE = 0x7F800000

# In the place of a score that is decided elsewhere: never among the smallest.
KEPT = 0x7FFFFFFF

# In the place of the score of a cut block that its owner removes: always below the threshold.
REMOVED = -1

# As REMOVED, where this shard's part of the block is zero already.
REMOVED_CLEAN = -2

# The leading 11 of the 31 bits that a score has.
LEADING_BUCKETS = 2048

# Length of :func:`first_histogram`: zeros apart, then the leading bits.
HISTOGRAM = 1 + LEADING_BUCKETS


class Index(Protocol):
    """See :class:`~dist_sparse.masking.cached.indexed.IndexedScores`."""

    def counts(self, prefix: int, before: int, shift: int, buckets: int) -> Tensor | None: ...

    def within(self, least: int, most: int) -> Tensor | None: ...


class JointPart(NamedTuple):
    """Scores of one of several tables, which are counted together."""

    scores: JointScores | FlatScores
    number: int


class Segment:
    """Scores of a grid of blocks, row-major, in pieces of whole rows.

    Many pieces rather than one large tensor: an allocator hands small ones out again, while the
    pages of a large one are mapped anew in every step, which takes as long as scoring.

    Args:
        first_row: global block row of the first row; the others follow.
        col_ids: global block column of each column, int64 ``(cols,)``.
        grid_cols: block columns of the whole table; the global index of a block is
            ``row * grid_cols + col_id``.
        read: makes an iterator over ``(start, bits)`` chunks, used instead of pieces; called once
            per pass.
        counts: whether this rank owns these blocks; replicas are thresholded, not counted.

    Attributes:
        first_histogram: the histogram of the scores, if the scorer has summed it.
        joint: where the scores are stored if they are counted with those of other tables.
        index: finds some of the scores without a pass over them.
        tied: flat positions of scores at the threshold, int64, ascending, once found; None if they
            were not looked for or are too many to store.
        tied_ids: their global indices in CPU memory, where kernels have found them.
    """

    def __init__(
        self,
        first_row: int,
        col_ids: Tensor,
        grid_cols: int,
        *,
        read: Callable[[], Iterator[tuple[int, Tensor]]] | None = None,
        counts: bool = True,
    ) -> None:
        self.first_row, self.col_ids, self.grid_cols = first_row, col_ids, grid_cols
        self.counts = counts
        self.first_histogram: Tensor | None = None
        self.tied: Tensor | None = None
        self.tied_ids: Tensor | None = None
        self.joint: JointPart | None = None
        self.index: Index | None = None
        self._read = read
        self._pieces: list[Tensor] = []
        self._starts: list[int] = []
        self._rows = 0

    def add(self, bits: Tensor) -> None:
        """Append rows of scores, int32 ``(rows, cols)``, contiguous. They are held, and may be
        written later."""
        self._pieces.append(bits)
        self._starts.append(self._rows)
        self._rows += bits.shape[0]

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """``(first row, bits)`` of what was added, rows counted from the segment's own first;
        ``(rows, cols)``."""
        yield from zip(self._starts, self._pieces, strict=True)

    @property
    def on_cpu(self) -> bool:
        """Whether the host reads scores without waiting for a device."""
        return self.col_ids.is_cpu

    @property
    def blocks(self) -> int:
        """Number of scores added."""
        return self._rows * self.col_ids.numel()

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows ``[first, last)``, a view ``(last - first, cols)``; they must be in one
        piece."""
        at = bisect_right(self._starts, first) - 1
        start = self._starts[at]
        assert last - start <= self._pieces[at].shape[0]
        return self._pieces[at][first - start : last - start]

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """``(start, bits)``: flat position and scores, in order."""
        if self._read is not None:
            # Computed again; nothing is added to such a segment.
            yield from self._read()
        for first, bits in self.pieces():
            yield first * self.col_ids.numel(), bits.view(-1)

    def histogram(self) -> Tensor:
        """Return :func:`first_histogram` of all scores."""
        if self.first_histogram is not None:
            return self.first_histogram
        counts = torch.zeros(HISTOGRAM, dtype=torch.int64, device=self.col_ids.device)
        for _, bits in self.chunks():
            counts += first_histogram(bits)
        return counts

    def ids(self, positions: Tensor) -> Tensor:
        """Global block indices of flat ``positions``, int64, same shape."""
        cols = self.col_ids.numel()
        rows = positions // cols + self.first_row
        return rows * self.grid_cols + self.col_ids[positions % cols]

    def ids_from(self, start: int, count: int) -> Tensor:
        """Global block indices of ``count`` blocks from a flat position on, int64 ``(count,)``."""
        return self.ids(torch.arange(start, start + count, device=self.col_ids.device))

    def find_tied(self, threshold: int) -> None:
        """Set ``tied`` to the positions of the scores that are exactly ``threshold``."""
        near = None if self.index is None else self.index.within(threshold, threshold)
        if near is not None:
            self.tied = near.long().sort().values
            return
        # Packed first: positions() skips bytes without a tie.
        found = [positions(pack(bits == threshold)) + start for start, bits in self.chunks()]
        self.tied = torch.cat([self.col_ids.new_zeros(0), *found])

    def tied_within(self, start: int, bits: Tensor, threshold: int) -> Tensor:
        """Return the places in the chunk ``bits``, which starts at ``start``, of the scores that
        are exactly ``threshold``, int64, ascending."""
        if self.tied is None:
            return (bits == threshold).nonzero().flatten()
        ends = torch.tensor([start, start + bits.numel()], device=bits.device)
        # They ascend, so the chunk has a run of them.
        first, end = torch.searchsorted(self.tied, ends).tolist()
        return self.tied[first:end] - start


@dataclass(eq=False)
class JointScores:
    """The scores of several small tables, one after the other, so that they are counted in one
    pass.

    Args:
        bits: int32 ``(sum of sizes,)``; KEPT where there is no block.
        starts: where the scores of each table begin.
    """

    bits: Tensor
    starts: list[int]

    @cached_property
    def _sizes(self) -> Tensor:
        """Number of scores of each table, int64 ``(tables,)``."""
        ends = [*self.starts[1:], self.bits.numel()]
        sizes = [end - start for start, end in zip(self.starts, ends, strict=True)]
        return sent(sizes, self.bits.device)

    def tables(self) -> Tensor:
        """The number of the table of each score, int64 ``(scores,)``. Not kept: it is twice as
        large as the scores."""
        numbers = torch.arange(len(self.starts), device=self.bits.device)
        return numbers.repeat_interleave(self._sizes, output_size=self.bits.numel())

    def first_histograms(self) -> Tensor:
        """:func:`first_histogram` of each table, int64 ``(tables, HISTOGRAM)``."""
        # Bucket 0 for zeros, 1 + leading bits for others.
        leading = torch.bitwise_right_shift(self.bits, LEADING_SHIFT).add_(1).mul_(self.bits != 0)
        leading.clamp_(min=0)  # a score that is refused later must count somewhere
        at = self.tables().mul_(HISTOGRAM).add_(leading)
        counts = _bincount(at, len(self.starts) * HISTOGRAM).view(-1, HISTOGRAM)
        counts[:, 1 + (KEPT >> LEADING_SHIFT)] = 0
        return counts

    def histograms(
        self, numbers: list[int], prefixes: list[int], before: int, shift: int, buckets: int
    ) -> list[Tensor]:
        """Return, for each of the given tables, how many of its scores other than 0 that have the
        prefix (all bits from ``before`` on) fall into each bucket of the next bits: int64
        ``(buckets,)``."""
        device = self.bits.device
        # By table: the prefix (no score has -1), and its row in the result.
        wanted, place = [-1] * len(self.starts), [0] * len(self.starts)
        for row, (number, prefix) in enumerate(zip(numbers, prefixes, strict=True)):
            wanted[number], place[number] = prefix, row
        tables, bits = self.tables(), self.bits
        inside = ((bits >> before) == sent(wanted, device, torch.int32)[tables]) & (bits != 0)
        if bits.is_cpu:
            tables, bits = tables[inside], bits[inside]
        at = sent(place, device)[tables] * buckets + ((bits >> shift) & (buckets - 1))
        wanted_here = None if bits.is_cpu else inside
        return [*_bincount(at, len(numbers) * buckets, wanted_here).view(-1, buckets).unbind()]


def _bincount(at: Tensor, buckets: int, wanted: Tensor | None = None) -> Tensor:
    """Return torch.bincount of many buckets, of the ``wanted`` (None: all), on any device."""
    if at.is_cpu:
        return torch.bincount(at if wanted is None else at[wanted], minlength=buckets)
    ones = torch.ones_like(at) if wanted is None else wanted.to(torch.int64)
    return torch.zeros(buckets, dtype=torch.int64, device=at.device).index_add_(0, at, ones)


def bucket_counts(bits: Tensor, shift: int, buckets: int) -> Tensor:
    """Return how many of ``bits`` ``(n,)`` fall into each bucket of the ``log2(buckets)`` bits
    above ``shift``, int64 ``(buckets,)``."""
    return torch.bincount((bits >> shift) & (buckets - 1), minlength=buckets)


def first_histogram(bits: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return the first round's histogram of finite scores, int64 ``(HISTOGRAM,)`` on their device:
    the number of zeros, then other scores by leading bits. A scorer may sum it while the chunk is
    in the cache.

    Zeros are apart because removed blocks score 0: a threshold among them is found at once.

    Args:
        bits: int32 ``(n,)``.
        scratch: int32, at least ``(n,)``, to work in: a tensor of its own between those that are
            kept would leave holes in the heap.
    """
    if not bits.is_cpu:
        leading = (bits >> LEADING_SHIFT).bitwise_and_(LEADING_BUCKETS - 1).add_(bits != 0)
        return count_each(leading, HISTOGRAM)
    out = None if scratch is None else scratch[: bits.numel()]
    leading = torch.bitwise_right_shift(bits, LEADING_SHIFT, out=out)
    copies = 1
    if bits.numel() % 64 == 0:
        # Adding to the same bucket twice in a row is slow: neighbours count in different copies.
        copies = 4
        lanes = torch.arange(64, dtype=torch.int32).remainder_(copies).mul_(LEADING_BUCKETS)
        leading.view(-1, 64).add_(lanes)
    counts = torch.bincount(leading, minlength=copies * LEADING_BUCKETS)
    counts = counts.view(copies, LEADING_BUCKETS).sum(0)
    zeros = (bits.numel() - torch.count_nonzero(bits)).view(1)
    counts[0] -= zeros[0]
    return torch.cat([zeros, counts])
