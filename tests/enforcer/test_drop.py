"""Ids of removed rows are dropped, all others handed on: against a loop over samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from dist_sparse import BaseDataSparsifier, DataNormSparsifier, ImportanceSparsifier, MaskEnforcer
from dist_sparse.enforcer.drop import KeptIds, kept_row_flags
from dist_sparse.masking.masks import BlockMask, pack
from dist_sparse.tables.shards import Rect, grid_of

Bag = list[int]


def jagged(bags: list[list[Bag]], weighted: bool, dtype: torch.dtype) -> KeyedJaggedTensor:
    """Features named alike, as those of two column shards of a table are; weights number the
    ids."""
    ids = torch.tensor([i for feature in bags for bag in feature for i in bag], dtype=dtype)
    return KeyedJaggedTensor(
        keys=["same"] * len(bags),
        values=ids,
        weights=torch.arange(len(ids), dtype=torch.float32).requires_grad_() if weighted else None,
        lengths=torch.tensor([len(bag) for feature in bags for bag in feature], dtype=torch.int32),
        stride=len(bags[0]),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_by_sample(data: st.DataObject) -> None:
    tables = [
        None
        if data.draw(st.integers(0, 3)) == 0
        else data.draw(st.lists(st.booleans(), min_size=1, max_size=9))
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    features = data.draw(st.lists(st.sampled_from(range(len(tables))), min_size=1, max_size=4))
    samples, slack = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0, 0, 0, 2]))
    last = [8 if tables[table] is None else len(tables[table] or ()) - 1 for table in features]
    bags = [
        [data.draw(st.lists(st.integers(-slack, most + slack), max_size=4)) for _ in range(samples)]
        for most in last
    ]
    weighted = data.draw(st.booleans())
    given_ = jagged(bags, weighted, data.draw(st.sampled_from([torch.int32, torch.int64])))
    before = given_.values().clone()

    kept = KeptIds(
        [None if (rows := tables[table]) is None else ~torch.tensor(rows) for table in features]
    )
    found = kept.among(given_)

    assert torch.equal(given_.values(), before)
    outside = any(
        tables[table] is not None and not 0 <= i <= most
        for table, most, feature in zip(features, last, bags, strict=True)
        for bag in feature
        for i in bag
    )
    if outside:
        assert found is given_
        return
    want: list[list[Bag]] = []
    numbers: list[float] = []
    number = 0
    for table, feature in zip(features, bags, strict=True):
        want.append([])
        for bag in feature:
            want[-1].append([])
            for i in bag:
                rows = tables[table]
                if rows is None or not rows[i]:
                    want[-1][-1].append(i)
                    numbers.append(number)
                number += 1
    expected = jagged(want, False, before.dtype)
    assert found.values().dtype == before.dtype and torch.equal(found.values(), expected.values())
    assert torch.equal(found.lengths(), expected.lengths()) and torch.equal(
        found.offsets(), expected.offsets()
    )
    assert found.keys() == given_.keys() and found.stride() == samples
    if weighted:
        assert found.weights().tolist() == numbers
        found.weights().sum().backward()
        grad = given_.weights().grad
        # Of dropped ones 0.
        assert grad is not None and grad.nonzero().flatten().tolist() == numbers
    else:
        assert found.weights_or_none() is None


def test_batches_of_several_sizes() -> None:
    """Features with other numbers of samples each: 2 of the first, 1 of the second."""
    features = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([0, 1, 2, 2, 0]),
        lengths=torch.tensor([2, 1, 2]),
        stride_per_key_per_rank=[[2], [1]],
    )
    found = KeptIds([torch.tensor([False, True, True]), None]).among(features)
    assert found.values().tolist() == [1, 2, 2, 0] and found.lengths().tolist() == [1, 1, 2]
    assert found.variable_stride_per_key() and found.stride_per_key() == [2, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 5),
    st.integers(1, 40),
    st.sampled_from([(1, 8), (3, 8), (1, 4), (1, 1), (2, 3)]),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_kept_row_flags(
    row: int, rows: int, block: tuple[int, int], share: float, seed: int
) -> None:
    torch.manual_seed(seed)
    rect = Rect(row, 0, rows, 8)
    grid = grid_of(rect, block)
    mask = BlockMask(rect, block, pack(torch.rand(grid.rows * grid.cols) < share))
    want = (mask.dense() != 0).any(1)
    found = kept_row_flags(mask)
    if block[1] == 8 or int((~want).sum()) * 4 >= rows:
        assert found is not None and torch.equal(found, want)
    else:
        assert found is None


def test_who_gets_zeros() -> None:
    """Scores that grow by gradients of removed rows ask for them; a score may be replaced."""
    sparsifier = ImportanceSparsifier(score="accumulator")
    assert sparsifier.trains_removed
    sparsifier.scored_by = "norm_accumulator"
    assert not sparsifier.trains_removed
    assert not BaseDataSparsifier.trains_removed
    with pytest.raises(ValueError, match="removed_rows='keep'"):
        MaskEnforcer(DataNormSparsifier(), removed_rows="keep")
