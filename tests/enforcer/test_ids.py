"""Ids of removed rows are dropped or flagged, all others handed on: against loops over samples."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from dist_sparse import BaseDataSparsifier, ImportanceSparsifier
from dist_sparse.enforcer.rows import KeptIds, rows_by_feature

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

    flags = {table: ~torch.tensor(rows) for table, rows in enumerate(tables) if rows is not None}
    kept = KeptIds(flags, features)
    found = kept.select(given_)

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
    found = KeptIds({0: torch.tensor([False, True, True])}, [0, 1]).select(features)
    assert found.values().tolist() == [1, 2, 2, 0] and found.lengths().tolist() == [1, 1, 2]
    assert found.variable_stride_per_key() and found.stride_per_key() == [2, 1]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_flags_by_id(data: st.DataObject) -> None:
    """On the host by features and on a device in one read, here of a CPU's memory: the same."""
    rows = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    removed = {
        table: data.draw(st.sets(st.integers(0, count - 1))) for table, count in enumerate(rows)
    }
    left_out = data.draw(st.integers(0, 3))
    features = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, max_size=4))
    drawn = [data.draw(st.lists(st.integers(-3, 23), max_size=6)) for _ in features]
    ends = [0, *torch.tensor([len(ids) for ids in drawn]).cumsum(0).tolist()]
    want = []
    for table, ids in zip(features, drawn, strict=True):
        row_of = [i if 0 <= i < rows[table] else 0 for i in ids]
        want += [table == left_out or row not in removed[table] for row in row_of]
    kept = {}
    for table, count in enumerate(rows):
        if table != left_out:
            kept[table] = torch.tensor([row not in removed[table] for row in range(count)])
    assume(kept)
    ids = torch.tensor([i for of_feature in drawn for i in of_feature], dtype=torch.int64)
    assert KeptIds(kept, features).flags(ids, ends).tolist() == want
    assert KeptIds(kept, features).flags(ids, torch.tensor(ends)).tolist() == want


def test_who_gets_zeros() -> None:
    """Scores that grow by gradients of removed rows ask for them; a score may be replaced."""
    sparsifier = ImportanceSparsifier(score="accumulator")
    assert sparsifier.trains_removed
    sparsifier.scored_by = "norm_accumulator"
    assert not sparsifier.trains_removed
    assert not BaseDataSparsifier.trains_removed


def test_rows_are_on_the_device_of_the_ids() -> None:
    """Without a GPU: the meta device takes part in no operation with the CPU."""
    ids = torch.zeros(4, dtype=torch.int64, device="meta")
    kept = torch.zeros(8, dtype=torch.bool, device="meta")
    [(_, rows)] = rows_by_feature({0: kept}, [0], ids, [0, 4])
    assert rows.device == ids.device
