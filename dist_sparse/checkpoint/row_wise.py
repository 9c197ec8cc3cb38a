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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dist_sparse.tables.chunked import ChunkedTensor


@dataclass(frozen=True)
class RowWise:
    """Row-wise state of one table.

    Args:
        name: of the state in a checkpoint.
        tensor: of ``cuts x rows`` numbers, as the checkpoint holds it.
        cuts: first column of each cut, ascending.
        shape: of the table: rows, columns.
        pieces: ``(offset, numbers)``: what this rank holds of ``tensor``, live.
    """

    name: str
    tensor: Tensor
    cuts: list[int]
    shape: tuple[int, int]
    pieces: Sequence[tuple[int, Tensor]]

    def merging(self, before: Sequence[int]) -> tuple[ChunkedTensor, Callable[[], None]]:
        """Return what has to be loaded of state that was saved with the cuts ``before``, and a
        function that merges it."""
        rows, width = self.shape
        saved, now = (list(pairwise([*cuts, width])) for cuts in (before, self.cuts))
        wants: list[tuple[tuple[int], tuple[int]]] = []
        # Numbers of this rank; the columns that they share with saved ones, by place in ``wants``.
        merges: list[tuple[Tensor, dict[int, int]]] = []
        for offset, numbers in self.pieces:
            # Offsets count numbers of rows, cut after cut.
            cut, row = divmod(offset, rows)
            shares = {}
            for number, (first, last) in enumerate(saved):
                columns = min(now[cut][1], last) - max(now[cut][0], first)
                if columns > 0:
                    shares[len(wants)] = columns
                    wants.append(((number * rows + row,), (numbers.numel(),)))
            merges.append((numbers, shares))
        # The state as it was saved, of which this rank loads what its cuts overlap.
        target = ChunkedTensor([len(saved) * rows], self.tensor.dtype, (), wants)

        def merge() -> None:
            assert target.loaded is not None
            for numbers, shares in merges:
                # In ascending order of columns, so that all ranks get the same bits.
                total = torch.zeros(numbers.shape, dtype=torch.float64)
                for want, columns in shares.items():
                    total += columns * target.loaded[want].double()
                numbers.copy_(total / sum(shares.values()))

        return target, merge


def row_wise(name: str, value: Any, param: Any) -> RowWise | None:
    """Return the state ``value`` of ``param`` as row-wise state, or None if it is something else.

    Args:
        name: of it in the optimizer: ``"<table>.<name>"`` of fused ones. The sums of the row-wise
            Adagrad that steps data-parallel tables get FBGEMM's name.
    """
    if param.dim() != 2 or not isinstance(value, Tensor):
        return None
    if hasattr(value, "local_shards") and hasattr(param, "local_shards"):
        return _sharded(name, value, param)
    rows, columns = param.shape
    # A table of one column has sums of its own shape in any Adagrad.
    is_row_wise = value.shape == (rows, 1) != param.shape
    if name != "sum" or not is_row_wise or not value.is_contiguous():
        return None
    flat = value.view(-1)
    return RowWise("momentum1", flat, [0], (rows, columns), [(0, flat)])


def _sharded(name: str, value: Any, param: Any) -> RowWise | None:
    """State of a sharded table, if it has a number for each row of each column cut."""
    rows, columns = param.shape
    shards = [shard for shard in param.metadata().shards_metadata if 0 not in shard.shard_sizes]
    cuts = sorted({shard.shard_offsets[1] for shard in shards})
    if value.dim() != 1 or value.size(0) != rows * len(cuts):
        return None
    pieces = []
    for shard in value.local_shards():
        # A rank without a part of the table has an empty shard.
        if shard.tensor.numel():
            pieces.append((shard.metadata.shard_offsets[0], shard.tensor))
    return RowWise(name.rpartition(".")[2], value, cuts, (rows, columns), pieces)
