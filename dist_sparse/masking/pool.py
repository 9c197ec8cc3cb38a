"""One selection over several tables that lose bytes together.

:mod:`dist_sparse.masking.selection` searches for the threshold of each table; a pool tells the
searches where its bytes are reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Search(Protocol):
    """A search as a pool sees it: see :mod:`dist_sparse.masking.selection`."""

    left: int
    inside: int
    done: bool


class Limited(NamedTuple):
    """Where the bytes of a pool are reached.

    Args:
        bucket: in which they are reached.
        below: bytes removed in smaller buckets.
        leaving: the tables that reach their own maximum in smaller buckets.
    """

    bucket: int
    below: int
    leaving: list[Search]


class Pool:
    """One selection over several tables: together they lose ``need`` bytes, wherever scores are
    smallest. Without tables it changes nothing.

    Blocks are removed in the order of (score, table, global index) until the bytes are reached. A
    table that has lost its own maximum is skipped.

    The tables search side by side. In each round the pool finds the bucket in which the bytes are
    reached, the same for all of its tables. A table that reaches its maximum in a lower bucket
    leaves the pool and continues alone.

    Args:
        need: bytes to remove; the last block may exceed it.

    Attributes:
        prices: the searches of the tables in the pool, and the bytes of a block of each.
        bucket: the bucket in which the bytes were reached in the last round.
    """

    def __init__(self, need: int) -> None:
        self._need = need
        self.prices: dict[Search, int] = {}
        self.bucket = 0

    def limit(self, searches: Sequence[Search], upto: Tensor, buckets: Tensor) -> Limited:
        """Replace the buckets in which tables reach their own maximum by the one in which the bytes
        are reached, where it is lower. Return it, for :meth:`leave_at`.

        Args:
            searches: the tables of this round, of the pool or not.
            upto: blocks up to and including each bucket, int64 ``(searches, buckets)``.
            buckets: the bucket of each table, int64 ``(searches, 1)``; changed in place.
        """
        rows = [row for row, search in enumerate(searches) if search in self.prices]
        if not rows:
            return Limited(self.bucket, 0, [])
        prices = torch.tensor([self.prices[searches[row]] for row in rows]).unsqueeze(1)
        most = torch.tensor([searches[row].left for row in rows]).unsqueeze(1)
        # Bytes removed up to and including each bucket; no table loses more than its maximum.
        removed = (torch.minimum(upto[rows], most) * prices).sum(0)
        # The last bucket if all tables together do not reach the bytes.
        limit = min(int((removed < self._need).sum()), removed.numel() - 1)
        below = int(removed[limit - 1]) if limit else 0
        leaving = []
        for row, bucket in zip(rows, buckets[rows].flatten().tolist(), strict=True):
            if bucket < limit:
                leaving.append(searches[row])
        buckets[rows] = buckets[rows].clamp(max=limit)
        return Limited(limit, below, leaving)

    def leave_at(self, limited: Limited) -> None:
        """Continue in the bucket of a limit."""
        self.bucket = limited.bucket
        self._need -= limited.below
        for search in limited.leaving:
            del self.prices[search]

    def share(self, last: bool) -> None:
        """Divide the bytes that are still needed among the tables, after each round.

        If all blocks in the bucket are needed, every table loses its own. In the ``last`` round the
        scores in the bucket are equal, and the first tables lose theirs. Otherwise another round
        must tell the blocks apart.
        """
        most = {search: min(search.left, search.inside) for search in self.prices}
        total = sum(blocks * self.prices[search] for search, blocks in most.items())
        if not last and total > self._need:
            # A table may lose its whole bucket and still not be done: other tables may use up the
            # bytes first.
            for search in self.prices:
                search.done = False
            return
        for search, price in self.prices.items():
            # Rounded up, as the last block may exceed the bytes; 0 once they are reached.
            search.left = max(min(most[search], -(-self._need // price)), 0)
            self._need -= search.left * price
            search.done = last or search.left == search.inside
        self.prices = {}
