"""Rows that may have been written, of those tables alone of which they are noted."""

from __future__ import annotations

import torch

from dist_sparse.enforcer.rows import Slot
from dist_sparse.enforcer.written import WrittenRows
from dist_sparse.masking.masks import BlockMask, pack
from dist_sparse.tables.shards import Rect


def slot(weight: torch.Tensor, kept: list[int]) -> Slot:
    flags = torch.zeros(len(weight), dtype=torch.bool)
    flags[kept] = True
    return Slot(weight, BlockMask(Rect(0, 0, *weight.shape), (1, weight.shape[1]), pack(flags)))


def test_one_table_of_a_kernel_is_not_noted() -> None:
    rows = WrittenRows({0: 10, 2: 4}, [0, 1, 2, 1, 0])
    assert [*rows.tables] == [0, 2]
    assert [len(of_table.rows()) for of_table in rows.tables.values()] == [10, 4]  # at first all
    for of_table in rows.tables.values():
        of_table.clear()
    rows.add(torch.tensor([3, 99, 98, 1, 1, 97, 7, 3]), [0, 1, 3, 5, 6, 8])
    assert [of_table.rows().tolist() for of_table in rows.tables.values()] == [[3, 7], [1]]

    weights = [torch.zeros(count, 4) for count in (10, 100, 4)]
    before = {table: slot(weight, [0, 1, 2]) for table, weight in enumerate(weights)}
    after = {0: before[0], 1: slot(weights[1], []), 2: slot(weights[2], [0, 3])}
    rows.add_removed(before, after)
    assert [of_table.rows().tolist() for of_table in rows.tables.values()] == [[3, 7], [1, 2]]
    rows.add_all()
    assert [len(of_table.rows()) for of_table in rows.tables.values()] == [10, 4]
