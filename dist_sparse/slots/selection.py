"""Which ids hold the slots of a table: the hottest ones, by exact selection over all ranks.

Each rank brings the ids of its range that hold a slot, and those that may win one. A key orders
them: the lookup count, then whether an id holds a slot already, then the smaller id. So a row does
not change hands for a tie, and the result does not depend on the number of ranks.

It is enough to compare the holders and the ids looked up since the last update: any other id lost
to all holders of that update, whose counts have not fallen since against its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.slots.counts import MOST

PROTECTED: Final = 2 * MOST + 2
"""The key of protected ids: above all counts."""

_BITS: Final = 11
"""Bits of a key that a round finds; three rounds find all."""

_BUCKETS: Final = 1 << _BITS


@dataclass(frozen=True)
class Contest:
    """The ids of one table that this rank owns and that may hold a slot.

    Args:
        slots: of the table, over all ranks.
        ids: ascending, int64 ``(n,)``. Ranges of ids ascend with the ranks.
        keys: what orders them, int64 ``(n,)``: larger wins.
        holds: which of them hold slots so far: bool ``(n,)``.
    """

    slots: int
    ids: Tensor
    keys: Tensor
    holds: Tensor


@dataclass(frozen=True)
class Holders:
    """The ids of one table that hold its slots, over all ranks.

    Args:
        number: of them.
        coldest: the smallest count among those that are not protected.
    """

    number: int
    coldest: int


def holders_here(keys: Sequence[Tensor], group: Group) -> list[Holders]:
    """Return the holders of each table from the keys of this rank's part of them. Collective: one
    all-gather."""
    mine = [[len(each), int(each.min()) if len(each) else PROTECTED] for each in keys]
    found = group.all_gather(torch.tensor(mine, dtype=torch.int64).view(-1, 2))
    numbers, coldest = found[:, :, 0].sum(0).tolist(), found[:, :, 1].amin(0).tolist()
    return [Holders(n, key // 2) for n, key in zip(numbers, coldest, strict=True)]


def winners(contests: Sequence[Contest], group: Group) -> list[Tensor]:
    """Return for each table which of this rank's ids hold a slot from now on: bool ``(n,)``.
    Collective over ``group``: three all-reduces of 16 KiB a table, and an all-gather.

    Example::

        >>> import torch
        >>> from dist_sparse.slots.selection import Contest, winners
        >>> from dist_sparse.groups import group_over
        >>> ids, keys = torch.tensor([1, 4, 6, 8]), torch.tensor([6, 2, 6, 6])
        >>> winners([Contest(2, ids, keys, keys % 2 == 1)], group_over(None))
        [tensor([ True, False,  True, False])]
    """
    left = torch.tensor([contest.slots for contest in contests], dtype=torch.int64)
    # The bits found so far of the last key that wins, of each table.
    prefix = torch.zeros(len(contests), dtype=torch.int64)
    all_win = torch.zeros(len(contests), dtype=torch.bool)
    for shift in (2 * _BITS, _BITS, 0):
        parts = [
            _histogram(contest.keys, shift, int(bits))
            for contest, bits in zip(contests, prefix, strict=True)
        ]
        counts = group.all_reduce(torch.stack(parts))
        # Keys in this bucket and above: they fall from the first bucket to the last.
        from_here = counts.flip(1).cumsum(1).flip(1)
        if shift == 2 * _BITS:
            all_win = from_here[:, 0] <= left
        bucket = ((from_here >= left[:, None]).sum(1) - 1).clamp(min=0)
        above = (from_here - counts).gather(1, bucket[:, None]).squeeze(1)
        left -= above
        prefix = prefix * _BUCKETS + bucket
    return _flags(contests, prefix, left, all_win, group)


def _histogram(keys: Tensor, shift: int, prefix: int) -> Tensor:
    """Return how many keys that begin with ``prefix`` are in each bucket of the next bits."""
    inside = keys[(keys >> (shift + _BITS)) == prefix]
    return torch.bincount((inside >> shift) & (_BUCKETS - 1), minlength=_BUCKETS)


def _flags(
    contests: Sequence[Contest], last: Tensor, left: Tensor, all_win: Tensor, group: Group
) -> list[Tensor]:
    """Return who wins, where ``left`` of the ids with the key ``last`` do. Collective."""
    tied = [contest.keys == key for contest, key in zip(contests, last, strict=True)]
    mine = torch.tensor([int(flags.sum()) for flags in tied], dtype=torch.int64)
    # Lower ranks own smaller ids, which win first.
    before = group.all_gather(mine)[: group.rank].sum(0)
    found = []
    for number, contest in enumerate(contests):
        flags = tied[number]
        first = flags & (flags.cumsum(0) <= left[number] - before[number])
        found.append((contest.keys > last[number]) | first | all_win[number])
    return found
