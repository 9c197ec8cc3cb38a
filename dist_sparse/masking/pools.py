"""One selection over several tables, which removes blocks until enough bytes are removed.

Blocks are removed in the order of (score, table, global index) until the bytes are reached; a table
at its own limit is passed over. Tables narrow their histograms side by side
(:mod:`~dist_sparse.masking.selection`), and a :class:`Pool` finds in each round the bucket in which
the bytes are reached, the same for all of its tables. A table that reaches its own limit before
that bucket leaves the pool and goes on alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Member(Protocol):
    """The narrowing of one table.

    Attributes:
        left: number of blocks that may still be removed, in the end of those that are, of the
            ``inside`` in the last bucket.
        done: no further round is needed.
    """

    left: int
    inside: int
    done: bool


class Pool:
    """Tables that lose ``need`` bytes together, wherever scores are smallest.

    Args:
        need: bytes to remove, at least 1; the last block may exceed it.
        prices: bytes of a block of each table, in the order of ``members``.

    Attributes:
        bucket: where the bytes were reached in the last round.
    """

    def __init__(self, need: int, prices: Sequence[int]) -> None:
        self._need, self._prices = need, list(prices)
        self._members: list[tuple[Member, int]] = []
        self.bucket = 0

    def join(self, members: Sequence[Member]) -> None:
        """Take in the narrowing of every table, before the first round."""
        self._members = list(zip(members, self._prices, strict=True))

    def limit(self, asked: Sequence[Member], upto: Tensor, buckets: Tensor) -> None:
        """Replace the buckets in which tables reach their own limits by the one in which the bytes
        are reached, if it comes first.

        Args:
            asked: the tables of this round, of the pool or not.
            upto: blocks up to and including each bucket, int64 ``(asked, buckets)``.
            buckets: int64 ``(asked, 1)``; changed in place.
        """
        if not self._members:
            return
        place = {id(member): i for i, member in enumerate(asked)}
        rows = [place[id(member)] for member, _ in self._members]
        prices = torch.tensor([price for _, price in self._members]).unsqueeze(1)
        limits = torch.tensor([member.left for member, _ in self._members]).unsqueeze(1)
        # Bytes removed up to and including each bucket; no table gives more than its limit.
        removed = (torch.minimum(upto[rows], limits) * prices).sum(0)
        # The last bucket if all tables together don't reach the bytes.
        self.bucket = min(int((removed < self._need).sum()), removed.numel() - 1)
        if self.bucket:
            self._need -= int(removed[self.bucket - 1])
        # Tables that reach their own limit in an earlier bucket leave the pool.
        own = buckets[rows].flatten().tolist()
        members = zip(self._members, own, strict=True)
        self._members = [member for member, bucket in members if bucket >= self.bucket]
        buckets[rows] = buckets[rows].clamp(max=self.bucket)

    def share(self, last: bool) -> None:
        """Take what is still needed from the blocks inside the bucket, after each round: from all,
        or in the ``last`` round, when their scores are equal, from the first tables."""
        everything = sum(min(member.left, member.inside) * price for member, price in self._members)
        if not last and everything > self._need:
            # Another round must tell them apart, even for a table that loses all of its own.
            for member, _ in self._members:
                member.done = False
            return
        for member, price in self._members:
            # Rounded up: the last block may exceed the bytes. Nothing once they are reached.
            blocks = -(-self._need // price)
            member.left = max(min(member.left, member.inside, blocks), 0)
            self._need -= member.left * price
            member.done = last or member.left == member.inside
        self._members = []
