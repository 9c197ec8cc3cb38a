"""One selection over several tables: which of their blocks are removed until enough bytes are.

Blocks are removed in the order of (score, table, global index) until the bytes are reached; a table
of which no more may be removed is passed over. Tables narrow their histograms side by side
(:mod:`~dist_sparse.masking.selection`), and a :class:`Pool` finds in each round the bucket in which
the bytes are reached, the same for all of its tables. A table that reaches its own limit before
that bucket leaves the pool and goes on alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Member", "Pool"]


class Member(Protocol):
    """The narrowing of one table.

    Attributes:
        left: how many more blocks may be removed, at the end how many are, of the ``inside`` in the
            last bucket.
        done: no further round is needed.
    """

    left: int
    inside: int
    done: bool


class Pool:
    """Tables of which blocks are removed until ``need`` bytes are, wherever scores are smallest.

    Args:
        need: bytes to remove, at least 1; the last block may exceed it.
        prices: bytes of a block of each table, in the order of ``members``.

    Attributes:
        bucket: in which the bytes were reached in the last round.
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
        place = {id(member): i for i, member in enumerate(asked)}
        rows = [place[id(member)] for member, _ in self._members]
        if not rows:
            return
        prices = torch.tensor([price for _, price in self._members]).unsqueeze(1)
        limits = torch.tensor([member.left for member, _ in self._members]).unsqueeze(1)
        removed = (torch.minimum(upto[rows], limits) * prices).sum(0)
        self.bucket = min(int((removed < self._need).sum()), removed.numel() - 1)
        if self.bucket:
            self._need -= int(removed[self.bucket - 1])
        own = buckets[rows].flatten().tolist()
        self._members = [
            entry for entry, bucket in zip(self._members, own, strict=True) if bucket >= self.bucket
        ]
        buckets[rows] = buckets[rows].clamp(max=self.bucket)

    def share(self, last: bool) -> None:
        """After each round: what is still needed comes from the blocks inside the bucket: all of
        them, or in the ``last`` round, when their scores are equal, those of the first tables."""
        everything = sum(min(member.left, member.inside) * price for member, price in self._members)
        if not last and everything > self._need:
            for member, _ in self._members:
                member.done = False
            return
        for member, price in self._members:
            member.left = max(min(member.left, member.inside, -(-self._need // price)), 0)
            self._need -= member.left * price
            member.done = last or member.left == member.inside
        self._members = []
