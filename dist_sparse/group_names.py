"""Names of process groups over some of the ranks, which only these ranks create."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["named_by_ranks"]

# By ranks and thread: the world, and how many groups have been named in it.
_named: dict[tuple[tuple[int, ...], str | None], tuple[Any, int]] = {}


class _Next(threading.local):
    """The name of the group that this thread creates; None leaves it to torch."""

    name: str | None = None


_next = _Next()
_name_by_torch: Any = distributed_c10d._process_group_name


def _name(ranks: Any, use_hashed_name: bool) -> str:
    # The function of torch counts the group too: in a name of ours it must not.
    name: str = _next.name or _name_by_torch(ranks, use_hashed_name)
    return name


distributed_c10d._process_group_name = _name  # type: ignore[assignment]


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
    try:
        yield
    finally:
        _next.name = None
