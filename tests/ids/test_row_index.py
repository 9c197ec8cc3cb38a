"""Row indexes, against a dictionary that is built row by row."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dist_sparse.ids.row_index import UNKNOWN, RowIndex, RowIndexes


def slow(kept: Tensor, ids: Sequence[int]) -> list[int]:
    """Where the row of each id is, counted one by one: -1 where it was removed, -2 out of range."""
    places, count = [], 0
    for row in kept.tolist():
        places.append(count if row else -1)
        count += row
    places = places or [-1]  # of a table without rows, id 0 has none
    return [places[at] if 0 <= at < len(places) else -2 for at in ids]


def random_kept(rows: int, share: float) -> Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < share


def ids_of(rows: int) -> Tensor:
    """All ids of a table, and some that are out of range."""
    return torch.cat(
        [torch.arange(rows), torch.tensor([-1, rows, rows + 31, -(2**40), 2**32 + 1, 2**62, 0])]
    )


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_every_row_is_found(rows: int, share: float) -> None:
    kept, ids = random_kept(rows, share), ids_of(rows)
    index, before = RowIndex.of(kept), ids.clone()
    assert index(ids).tolist() == slow(kept, ids.tolist())
    assert index(ids).dtype == torch.int64 and torch.equal(ids, before)
    few = ids[ids.abs() < 2**31].int()
    assert index(few).tolist() == slow(kept, few.tolist())
    assert torch.equal(index.kept(), kept) and (index.rows, index.num_kept) == (
        rows,
        int(kept.sum()),
    )
    assert index.nbytes == 8 * max(1, -(-rows // 32)) == index.words.nbytes + index.counts.nbytes
    again = RowIndex(index.words, rows)
    assert torch.equal(again.counts, index.counts) and again.num_kept == index.num_kept


def test_every_pattern_of_a_word() -> None:
    """Of its lower and of its upper half, beside a full other half."""
    patterns = torch.arange(2**16, dtype=torch.int64)
    for half, full in ((0, 0), (0, 16), (16, 0)):
        other = 0xFFFF << full if full != half else 0
        words = (patterns << half) | other
        bits = (words.view(-1, 1) >> torch.arange(32)) & 1
        signed = torch.where(words >= 2**31, words - 2**32, words).int()
        found = RowIndex(signed, 2**21)(torch.arange(2**21))
        assert torch.equal(found, torch.where(bits.view(-1) > 0, bits.view(-1).cumsum(0) - 1, -1))


def test_shapes_of_ids() -> None:
    kept = random_kept(50, 0.5)
    index = RowIndex.of(kept)
    for ids in (
        torch.tensor(7),
        torch.randint(0, 50, (3, 4)),
        torch.randint(0, 50, (4, 6)).t(),
        torch.empty(0).int(),
    ):
        assert index(ids).shape == ids.shape
        assert index(ids).flatten().tolist() == slow(kept, ids.flatten().tolist())


def test_composed() -> None:
    """Ids of a table that was compacted twice."""
    outer, ids = RowIndex.of(random_kept(300, 0.5)), ids_of(300)
    for share in (0.0, 0.4, 1.0):
        inner = RowIndex.of(random_kept(outer.num_kept, share))
        both = outer.compose(inner)
        once = outer(ids)
        assert torch.equal(both(ids), torch.where(once < 0, once, inner(once.clamp(min=0))))
        assert (both.rows, both.num_kept) == (300, inner.num_kept)


def test_rows_beyond_int32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be an int in \[0, 2147483647\]"):
        RowIndex(torch.zeros(1, dtype=torch.int32), 2**31)
    with pytest.raises(ValueError, match=r"must be an int in \[0, 2147483647\]"):
        RowIndexes([None], [2**31], [0])


def several() -> tuple[RowIndexes, list[Tensor], list[int]]:
    """Tables of ragged sizes, one with nothing left, one that keeps all without an index; a table
    has two features."""
    kept = [random_kept(100, 0.4), random_kept(33, 1.0), random_kept(70, 0.0), random_kept(5, 0.5)]
    tables = [RowIndex.of(kept[0]), None, RowIndex.of(kept[2]), RowIndex.of(kept[3])]
    features = [3, 0, 1, 2, 0]
    return RowIndexes(tables, [len(table) for table in kept], features), kept, features


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_several_tables_at_once(dtype: torch.dtype) -> None:
    index, kept, features = several()
    ids = [torch.randint(-3, 110, (count,)) for count in (9, 0, 40, 7, 64)]
    want = [
        row for at, some in zip(features, ids, strict=True) for row in slow(kept[at], some.tolist())
    ]
    values = torch.cat(ids).to(dtype)
    before = values.clone()
    found, known = index(values, torch.tensor([len(some) for some in ids]))
    found = found.masked_fill(~known, UNKNOWN)
    assert found.tolist() == want and found.dtype == torch.int32 and torch.equal(values, before)


def test_several_dense_tables() -> None:
    index = RowIndexes([None, None], [5, 9], [1, 0])
    found, known = index(torch.tensor([8, 9, 4, 5, -1]), torch.tensor([2, 3]))
    assert found[known].tolist() == [8, 4] and known.tolist() == [True, False, True, False, False]


def test_exported_and_copied() -> None:
    """Both modules, with other numbers of ids than they were traced with."""
    one, ids = RowIndex.of(random_kept(100, 0.5)), ids_of(100)
    some, _, features = several()
    lengths = torch.tensor([3, 5, 0, 7, 1])
    many = (torch.randint(0, 100, (16,)), lengths)
    for module, short, args in (
        (one, (ids[:5],), (ids,)),
        (some, (many[0][:5], lengths.clamp(max=1)[:5]), many),
    ):
        if len(short) == 2:
            short = (short[0][: int(short[1].sum())], short[1])
        ids_dim = {0: torch.export.Dim.DYNAMIC}
        exported = torch.export.export(
            module, short, dynamic_shapes=(ids_dim, *[None] * (len(short) - 1))
        )
        torch.testing.assert_close(exported.module()(*args), module(*args), rtol=0, atol=0)
        torch.testing.assert_close(copy.deepcopy(module)(*args), module(*args), rtol=0, atol=0)
    assert len(features) == len(lengths)
