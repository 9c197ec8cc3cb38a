"""Rows that may have been written, of those tables alone of which they are noted."""

from __future__ import annotations

import torch

from dist_sparse.enforcer.rows import MaskedShard, RowFlags, add_pruned, flag_rows
from dist_sparse.masking.masks import BlockMask, pack
from dist_sparse.tables.shards import Rect


def slot(weight: torch.Tensor, kept: list[int]) -> MaskedShard:
    flags = torch.zeros(len(weight), dtype=torch.bool)
    flags[kept] = True
    return MaskedShard(
        weight, BlockMask(Rect(0, 0, *weight.shape), (1, weight.shape[1]), pack(flags))
    )


def test_one_table_of_a_kernel_is_not_noted() -> None:
    flags = {0: RowFlags(10), 2: RowFlags(4)}
    ids = torch.tensor([3, 99, 98, 1, 1, 97, 7, 3])
    flag_rows(flags, [0, 1, 2, 1, 0], ids, [0, 1, 3, 5, 6, 8])
    assert [rows.rows().tolist() for rows in flags.values()] == [[3, 7], [1]]

    weights = [torch.zeros(count, 4) for count in (10, 100, 4)]
    before = {table: slot(weight, [0, 1, 2]) for table, weight in enumerate(weights)}
    after = {0: before[0], 1: slot(weights[1], []), 2: slot(weights[2], [0, 3])}
    # Table 3 has no masks.
    flags[3] = RowFlags(4)
    add_pruned(flags, before, after)
    assert [rows.rows().tolist() for rows in flags.values()] == [[3, 7], [1, 2], []]
    del flags[3]
    # Another shard in its place: any row may differ.
    add_pruned(flags, after, {**after, 2: slot(torch.zeros(4, 4), [0, 3])})
    assert [len(rows.rows()) for rows in flags.values()] == [2, 4]
