"""Scores of blocks, as the selection reads them: in pieces, with their histogram.

Scores are non-negative float32, kept as their int32 bit patterns, which order alike. The patterns
that no finite score has mark blocks about which something else decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from dist_sparse.masking.masks import pack, positions
from dist_sparse.records import LEADING_SHIFT

__all__ = [
    "HISTOGRAM",
    "KEPT",
    "LEADING_BUCKETS",
    "NOT_FINITE",
    "REMOVED",
    "REMOVED_CLEAN",
    "Index",
    "JointScores",
    "Segment",
    "first_histogram",
]

NOT_FINITE = 0x7F800000
"""The bit pattern of infinity; those of NaN are larger, those of finite scores smaller."""

KEPT = 0x7FFFFFFF
"""In the place of a score that is decided elsewhere: never among the smallest."""

REMOVED = -1
"""Likewise, of a block that was decided to be removed: always below the threshold."""

REMOVED_CLEAN = -2
"""Likewise, when this shard's part of the block is zero already."""

LEADING_BUCKETS = 2048
"""The leading 11 of the 31 bits that a score has."""

HISTOGRAM = 1 + LEADING_BUCKETS
"""Length of :func:`first_histogram`: zeros apart, then the leading bits."""


class Index(Protocol):
    """See :class:`~dist_sparse.masking.indexed.IndexedScores`."""

    def counts(self, prefix: int, before: int, shift: int, buckets: int) -> Tensor | None: ...

    def within(self, least: int, most: int) -> Tensor | None: ...


class Segment:
    """Scores of a grid of blocks, row-major, in pieces of whole rows.

    Many pieces rather than one large tensor: an allocator hands small ones out again, while the
    pages of a large one are mapped anew in every step, which takes as long as scoring.

    Args:
        first_row: global block row of the first row; the others follow.
        col_ids: global block column of each column, int64 ``(cols,)``.
        grid_cols: block columns of the whole table; the global index of a block is
            ``row * grid_cols + col_id``.
        read: instead of pieces, makes an iterator over ``(start, bits)`` chunks; called once per
            pass.
        counts: whether this rank owns these blocks; replicas are thresholded, not counted.

    Attributes:
        first_histogram: that of the scores, where a scorer has summed it.
        joint: where else the scores are, together with those of other tables, and the number of the
            table there.
        index: what finds some of the scores without a pass over them.
        tied: positions of scores at the threshold, once found; None if they were not looked for or
            are too many to keep.
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
        self.first_row, self.col_ids, self.grid_cols, self.counts = (
            first_row,
            col_ids,
            grid_cols,
            counts,
        )
        self.first_histogram: Tensor | None = None
        self.tied: Tensor | None = None
        self.joint: tuple[JointScores, int] | None = None
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
    def blocks(self) -> int:
        """How many scores have been added."""
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
            yield from self._read()
        for first, bits in self.pieces():
            yield first * self.col_ids.numel(), bits.view(-1)

    def ids(self, positions: Tensor) -> Tensor:
        """Global block indices of flat ``positions``, int64, same shape."""
        cols = self.col_ids.numel()
        return (positions // cols + self.first_row) * self.grid_cols + self.col_ids[
            positions % cols
        ]

    def find_tied(self, threshold: int) -> None:
        """Keep in ``tied`` the flat positions of the scores that are exactly ``threshold``, int64,
        ascending."""
        if (
            self.index is not None
            and (places := self.index.within(threshold, threshold)) is not None
        ):
            self.tied = places.long().sort().values
            return
        found = [positions(pack(bits == threshold)) + start for start, bits in self.chunks()]
        self.tied = torch.cat(found) if found else self.col_ids.new_zeros(0)


class JointScores:
    """The scores of several small tables, one after the other, so that they are counted in one
    pass.

    Args:
        bits: int32 ``(sum of sizes,)``; KEPT where there is no block.
        sizes: int64 ``(tables,)``, how many of them belong to each table.
    """

    def __init__(self, bits: Tensor, sizes: Tensor) -> None:
        self.bits, self.sizes = bits, sizes

    def tables(self) -> Tensor:
        """The number of the table of each score, int64 ``(scores,)``. Not kept: it is twice as
        large as the scores."""
        numbers = torch.arange(self.sizes.numel(), device=self.bits.device)
        return numbers.repeat_interleave(self.sizes, output_size=self.bits.numel())

    def first_histograms(self) -> Tensor:
        """:func:`first_histogram` of each table, int64 ``(tables, HISTOGRAM)``."""
        leading = torch.bitwise_right_shift(self.bits, LEADING_SHIFT).add_(1).mul_(self.bits != 0)
        at = self.tables().mul_(HISTOGRAM).add_(leading)
        counts = torch.bincount(at, minlength=self.sizes.numel() * HISTOGRAM).view(-1, HISTOGRAM)
        counts[:, 1 + (KEPT >> LEADING_SHIFT)] = 0
        return counts

    def histograms(
        self, numbers: list[int], prefixes: list[int], before: int, shift: int, buckets: int
    ) -> Tensor:
        """For the given tables, how many of their scores other than 0 that have the prefix (all
        bits from ``before`` on) fall into each bucket of the next bits: int64
        ``(len(numbers), buckets)``."""
        device, count = self.bits.device, self.sizes.numel()
        wanted = torch.full((count,), -1, dtype=torch.int32)
        wanted[numbers] = torch.tensor(prefixes, dtype=torch.int32)
        place = torch.zeros(count, dtype=torch.int64)
        place[numbers] = torch.arange(len(numbers))
        tables = self.tables()
        inside = ((self.bits >> before) == wanted.to(device)[tables]) & (self.bits != 0)
        at = place.to(device)[tables[inside]] * buckets + (
            (self.bits[inside] >> shift) & (buckets - 1)
        )
        return torch.bincount(at, minlength=len(numbers) * buckets).view(-1, buckets)


def first_histogram(bits: Tensor, scratch: Tensor | None = None) -> Tensor:
    """The first round's histogram of finite scores, int64 ``(HISTOGRAM,)``: how many are 0, then by
    leading bits those that are not. A scorer may sum it while the chunk is in the cache.

    Zeros are apart because what was removed before scores 0: a threshold among them is found at
    once.

    Args:
        bits: int32 ``(n,)``.
        scratch: int32, at least ``(n,)``, to work in: a tensor of its own between those that are
            kept would leave holes in the heap.
    """
    leading = torch.bitwise_right_shift(
        bits, LEADING_SHIFT, out=None if scratch is None else scratch[: bits.numel()]
    )
    # Adding to the same bucket twice in a row is slow.
    copies = 4 if bits.is_cpu and bits.numel() % 64 == 0 else 1
    if copies > 1:
        leading.view(-1, 64).add_(
            torch.arange(64, dtype=torch.int32).remainder_(copies).mul_(LEADING_BUCKETS)
        )
    counts = (
        torch.bincount(leading, minlength=copies * LEADING_BUCKETS)
        .view(copies, LEADING_BUCKETS)
        .sum(0)
    )
    zeros = (bits.numel() - torch.count_nonzero(bits)).view(1)
    counts[0] -= zeros[0]
    return torch.cat([zeros, counts])
