"""Optimizer state of one number a row, such as row-wise Adagrad's, of tables that are cut by
columns.

Such state depends on the cuts: each column cut sums its own gradients. TorchRec keeps it as a
vector of ``cuts x rows`` numbers. Between other cuts it can't be equal, and is **merged**: a cut
takes the mean of the saved cuts that it overlaps, weighted by the columns that they share, in
float64 and in ascending order. That is what an uncut row-wise Adagrad would have summed from the
same gradients; a cut that is split hands its sum to both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dist_sparse.tables.chunked import ChunkedTensor


def merging(
    state: Any, shape: Sequence[int], before: Sequence[int], now: Sequence[int]
) -> tuple[ChunkedTensor, Callable[[], None]]:
    """Return what this rank has to load of saved state, and a function that merges it into the
    state here.

    Args:
        state: row-wise state of one table: sharded, or whole.
        shape: of the table: rows, columns.
        before: first column of each saved cut, ascending.
        now: first column of each cut of ``state``, ascending.
    """
    rows, width = shape
    saved, cuts = (list(pairwise([*firsts, width])) for firsts in (before, now))
    wants: list[tuple[tuple[int], tuple[int]]] = []
    # Numbers of this rank; the columns that they share with saved ones, by place in ``wants``.
    merges: list[tuple[Tensor, dict[int, int]]] = []
    for offset, numbers in _pieces(state):
        # Offsets count numbers of rows, cut after cut.
        cut, row = divmod(offset, rows)
        shares = {}
        for number, (first, last) in enumerate(saved):
            columns = min(cuts[cut][1], last) - max(cuts[cut][0], first)
            if columns > 0:
                shares[len(wants)] = columns
                wants.append(((number * rows + row,), (numbers.numel(),)))
        merges.append((numbers, shares))
    # The state as it was saved, of which this rank loads what its cuts overlap.
    target = ChunkedTensor([len(saved) * rows], state.dtype, (), wants)

    def merge() -> None:
        assert target.loaded is not None
        for numbers, shares in merges:
            # In ascending order of columns, so that all ranks get the same bits.
            total = torch.zeros(numbers.shape, dtype=torch.float64)
            for want, columns in shares.items():
                total += columns * target.loaded[want].double()
            numbers.copy_(total / sum(shares.values()))

    return target, merge


def _pieces(state: Any) -> list[tuple[int, Tensor]]:
    """What this rank holds of row-wise state, live, by offset."""
    if not hasattr(state, "local_shards"):
        return [(0, state)]
    shards = [(shard.metadata.shard_offsets[0], shard.tensor) for shard in state.local_shards()]
    # A rank without a part of the table has an empty shard.
    return [(offset, numbers) for offset, numbers in shards if numbers.numel()]
