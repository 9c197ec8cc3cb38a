"""Names of process groups over some of the ranks, which only these ranks create."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world as groups_of_torch

__all__ = ["named_by_ranks"]

# By ranks and thread: the world, and how many groups have been named in it.
_named: dict[tuple[tuple[int, ...], str | None], tuple[Any, int]] = {}


class _Next(threading.local):
    """The name of the group that this thread creates; None leaves it to torch."""

    name: str | None = None


_next = _Next()
_name_by_torch = distributed_c10d._hash_ranks_to_str


def _name(ranks: list[int]) -> str:
    return _next.name or str(_name_by_torch(ranks))


distributed_c10d._hash_ranks_to_str = _name


@contextmanager
def named_by_ranks(ranks: tuple[int, ...], apart: str | None) -> Iterator[None]:
    """Let ``dist.new_group(ranks, use_local_synchronization=True)`` take a name that is the same on
    these ranks, and that no other group has.

    torch makes the name from the ranks and a number that counts the groups of this rank: up to 2.13
    its open groups, from 2.14 on all groups that it created. It differs between ranks whose groups
    overlap, as (0, 1) and (1, 2), which then wait for each other until the timeout. In 2.14 the
    number names groups of the whole world too, the user's included: this one must not count.

    Args:
        ranks: global ranks of the group.
        apart: as in :func:`~dist_sparse.groups.group_over`.
    """
    world = dist.group.WORLD
    made_in, number = _named.get((ranks, apart), (world, 0))
    if made_in is not world:
        number = 0
    _named[ranks, apart] = world, number + 1
    text = f"dist_sparse {ranks} {apart} {number}"
    _next.name = hashlib.sha256(text.encode()).hexdigest()
    count = groups_of_torch.group_count
    try:
        yield
    finally:
        _next.name = None
        groups_of_torch.group_count = count
