"""Scores of blocks, as the selection reads them: in pieces, with their histogram.

Scores are non-negative float32, kept as their int32 bit patterns, which order alike. The patterns
that no finite score has mark blocks about which something else decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from operator import add
from typing import Final, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.device import count_each, sent
from dist_sparse.masking.flat import FlatMask, FlatScores, Limit
from dist_sparse.masking.masks import pack
from dist_sparse.records import LEADING_SHIFT

# The bit pattern of infinity; those of NaN are larger, those of finite scores smaller.
NOT_FINITE = 0x7F800000

# In the place of a score that is decided elsewhere: never among the smallest.
KEPT = 0x7FFFFFFF

# In the place of the score of a cut block that its owner removes: always below the threshold.
REMOVED = -1

# The leading 11 of the 31 bits that a score has.
LEADING_BUCKETS = 2048

# Length of :func:`first_histogram`: zeros apart, then the leading bits.
HISTOGRAM = 1 + LEADING_BUCKETS


CPU: Final = torch.device("cpu")


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
        columns: global block column of each column, ascending.
        grid_cols: block columns of the whole table; the global index of a block is
            ``row * grid_cols + column``.
        device: of the scores.
        read: makes an iterator over ``(start, bits)`` chunks, used instead of pieces; called once
            per pass.
        counts: whether this rank owns these blocks; replicas are thresholded, not counted.

    Attributes:
        joint: where the scores are stored if they are counted with those of other tables.
        count: counts scores without a pass over all of them, as
            :meth:`~dist_sparse.masking.cached.kept_scores.IndexedScores.counts`.
    """

    joint: JointPart | None = None
    count: Callable[[int, int, int, int], Tensor | None] | None = None
    _histogram: Tensor | None = None

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
        return self.device.type == "cpu"

    @property
    def blocks(self) -> int:
        """Number of scores added."""
        return self._rows * len(self.columns)

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
            yield first * len(self.columns), bits.view(-1)

    @property
    def histogram(self) -> Tensor:
        """:func:`first_histogram` of all scores. A scorer that has counted them sets it."""
        if self._histogram is None:
            counts = torch.zeros(HISTOGRAM, dtype=torch.int64, device=self.device)
            for _, bits in self.chunks():
                counts += first_histogram(bits)
            self._histogram = counts
        return self._histogram

    @histogram.setter
    def histogram(self, counts: Tensor) -> None:
        self._histogram = counts

    def ids(self, places: Tensor) -> Tensor:
        """Return the global block indices of flat ``places``, int64, same shape."""
        cols = len(self.columns)
        rows, at = places // cols + self.first_row, places % cols
        if isinstance(self.columns, range):
            return rows * self.grid_cols + (at + self.columns.start)
        return rows * self.grid_cols + sent(self.columns, places.device)[at]

    def places_upto(self, last: int | None) -> int:
        """Return before which flat place the blocks are whose global index is at most ``last``
        (None: all): places and indices ascend together."""
        if last is None:
            return _ALL
        row, column = divmod(last, self.grid_cols)
        inside = max(row - self.first_row, 0) * len(self.columns)
        return inside + bisect_right(self.columns, column) if row >= self.first_row else 0


# More places than a segment has.
_ALL: Final = 1 << 62


@dataclass(eq=False)
class JointScores:
    """The scores of several small tables, one after the other, so that they are counted in one
    pass.

    Args:
        bits: int32 ``(sum of sizes,)``; KEPT where there is no block.
        starts: where the scores of each table begin: at whole bytes of flags.
        blocks: how many scores each table has.
        limits: of the tables, by their number. Set them before reading :attr:`masks`.
    """

    bits: Tensor
    starts: list[int]
    blocks: list[int]
    limits: dict[int, Limit] = field(default_factory=dict)

    @cached_property
    def _sizes(self) -> Tensor:
        """Number of scores up to the next table, int64 ``(tables,)``."""
        starts = sent([*self.starts, self.bits.numel()], self.bits.device)
        return starts.diff()

    @cached_property
    def _places(self) -> Tensor:
        return torch.arange(self.bits.numel(), device=self.bits.device)

    def mark_gaps(self) -> None:
        """Write KEPT between the tables."""
        ends = list(map(add, self.starts, self.blocks))
        self.bits.masked_fill_(self._places >= self._of_scores(ends), KEPT)

    def parts(self) -> list[Tensor]:
        """Return the scores of each table."""
        return list(map(self.bits.narrow, repeat(0), self.starts, self.blocks))

    def _of_scores(self, of_tables: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return for each score the value of its table. Not kept: it is as large as the scores."""
        values = sent(of_tables, self.bits.device, dtype)
        return values.repeat_interleave(self._sizes, output_size=self.bits.numel())

    def first_histograms(self) -> Tensor:
        """:func:`first_histogram` of each table, int64 ``(tables, HISTOGRAM)``."""
        # Bucket 0 for zeros, 1 + leading bits for others.
        leading = torch.bitwise_right_shift(self.bits, LEADING_SHIFT).add_(1).mul_(self.bits != 0)
        leading.clamp_(min=0)  # a score that is refused later must count somewhere
        tables = len(self.starts)
        at = self._of_scores(range(0, tables * HISTOGRAM, HISTOGRAM)).add_(leading)
        counts = _bincount(at, tables * HISTOGRAM).view(-1, HISTOGRAM)
        counts[:, -1] = 0  # of KEPT
        return counts

    def histograms(
        self, prefixes: Mapping[int, int], before: int, shift: int, buckets: int
    ) -> list[Tensor]:
        """Return, for each table with a prefix, how many of its scores other than 0 that have the
        prefix (all bits from ``before`` on) fall into each bucket of the next bits: int64
        ``(buckets,)``."""
        # By table: the prefix (no score has -1), and its row in the result.
        wanted, place = [-1] * len(self.starts), [0] * len(self.starts)
        for row, (number, prefix) in enumerate(prefixes.items()):
            wanted[number], place[number] = prefix, row * buckets
        bits = self.bits
        inside = ((bits >> before) == self._of_scores(wanted, torch.int32)) & (bits != 0)
        at = self._of_scores(place) + ((bits >> shift) & (buckets - 1))
        return [*_bincount(at, len(prefixes) * buckets, inside).view(-1, buckets).unbind()]

    @cached_property
    def masks(self) -> dict[int, FlatMask]:
        """The new masks of tables, by their numbers."""
        bits, ends = [0] * len(self.starts), [0] * len(self.starts)
        for number, limit in self.limits.items():
            bits[number], ends[number] = limit.bits, self.starts[number] + limit.upto
        removes_ties = self._places < self._of_scores(ends)
        gone = self.bits < self._of_scores(bits) + removes_ties
        kept, dirty = pack(~gone & (self.bits != KEPT)), pack(gone & (self.bits != 0))
        found = {}
        for number in self.limits:
            first = self.starts[number] // 8
            bytes_of = slice(first, first - (-self.blocks[number] // 8))
            found[number] = FlatMask(kept[bytes_of].clone(), dirty[bytes_of], None)
        return found


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
        scratch: int32, resized to work in.
    """
    if not bits.is_cpu:
        leading = (bits >> LEADING_SHIFT).bitwise_and_(LEADING_BUCKETS - 1).add_(bits != 0)
        return count_each(leading, HISTOGRAM)
    out = None if scratch is None else scratch.resize_(bits.numel())
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
