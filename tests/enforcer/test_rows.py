"""Rows of a shard, sets of rows and optimizer state are masked bit for bit, and nothing else
changes.

The reference expands each mask by its definition, element by element, and compares integers, of
which equal ones have equal bits: NaN, -0.0 and infinities that are kept stay as they are, removed
ones are +0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_sparse.enforcer import rows as rows_module
from dist_sparse.enforcer.optimizers import reset_state
from dist_sparse.enforcer.rows import (
    DirtyRows,
    Slot,
    TorchRowCleaner,
    count_lookups,
    in_table,
    many,
    zero_rows,
)
from dist_sparse.enforcer.zeroed import row_cleaner_on
from dist_sparse.masking import device
from dist_sparse.masking.masks import BlockMask, pack
from dist_sparse.tables.shards import Rect, grid_of

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD_VALUES = (torch.nan, -torch.nan, -0.0, torch.inf, -torch.inf)


@st.composite
def shards(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> Slot:
    """A shard anywhere in its table, cutting blocks or not, in memory of its own or amid other
    values."""
    row, col = (
        draw(st.sampled_from([0, 0, 1, 2, 4, 7, 16])),
        draw(st.sampled_from([0, 0, 1, 3, 4, 8, 13])),
    )
    rect = Rect(
        row,
        col,
        draw(st.integers(1, 30)),
        draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 32, 33, 64])),
    )
    whole_row = col + rect.cols + draw(st.sampled_from([0, 0, 5]))
    block = draw(
        st.sampled_from(
            [
                (1, whole_row),
                (1, 1),
                (1, 4),
                (4, 4),
                (3, 5),
                (4, whole_row),
                (2, 1),
                (1, 8),
                (40, 2),
            ]
        )
    )
    torch.manual_seed(draw(st.integers(0, 2**30)))
    grid = grid_of(rect, block)
    kept = torch.rand(grid.rows * grid.cols) < draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]))
    around = 0 if draw(st.booleans()) else 2
    whole = torch.randn(rect.rows + 2 * around, rect.cols + 2 * around, dtype=torch.float64)
    for value in ODD_VALUES:
        whole[torch.rand_like(whole) < 0.08] = value
    whole = whole.to(draw(st.sampled_from(dtypes)))
    return Slot(
        whole[around : around + rect.rows, around : around + rect.cols],
        BlockMask(rect, block, pack(kept)),
    )


def kept_by(mask: BlockMask) -> Tensor:
    """By the definition: each element asks for the bit of its block."""
    rect, (height, width), bits = mask.rect, mask.block, mask.bits.tolist()

    def kept(row: int, col: int) -> int:
        n = (row // height - mask.grid.row) * mask.grid.cols + col // width - mask.grid.col
        return bits[n // 8] >> n % 8 & 1

    return torch.tensor(
        [
            [kept(r, c) == 1 for c in range(rect.col, rect.col_end)]
            for r in range(rect.row, rect.row_end)
        ]
    )


def words(tensor: Tensor) -> Tensor:
    """The bits of all memory behind a view."""
    whole = tensor if tensor._base is None else tensor._base
    return whole.detach().clone().view(INTS[whole.element_size()])


def expected(slot: Slot, rows: Sequence[int]) -> Tensor:
    """What :func:`words` should be once these rows are clean."""
    weight = slot.weight.clone() if slot.weight._base is None else slot.weight._base.clone()
    around = (weight.shape[0] - slot.mask.rect.rows) // 2
    live = weight[around : around + slot.mask.rect.rows, around : around + slot.mask.rect.cols]
    kept = kept_by(slot.mask)
    for row in set(rows):
        live[row] = torch.where(kept[row], live[row], torch.zeros((), dtype=live.dtype))
    return words(weight)


def of_table(ids: Sequence[int], rows: int) -> list[int]:
    """The rows that FBGEMM reads for these ids."""
    return [i if 0 <= i < rows else 0 for i in ids]


class TestSettleRows:
    @settings(max_examples=250, deadline=None)
    @given(shards(), st.data())
    def test_by_definition(self, slot: Slot, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, slot.mask.rect.rows - 1), max_size=50))
        want = expected(slot, rows)
        zero_rows(slot.weight, slot.mask, torch.tensor(rows, dtype=torch.int64))
        assert torch.equal(words(slot.weight), want)

    @settings(max_examples=60, deadline=None)
    @given(shards(), st.data())
    def test_in_several_parts(self, slot: Slot, data: st.DataObject) -> None:
        """Gathered a few rows at a time, as large batches are."""
        rows = data.draw(st.lists(st.integers(0, slot.mask.rect.rows - 1), max_size=50))
        want = expected(slot, rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows_module, "CHUNK", data.draw(st.integers(1, 100)))
            zero_rows(slot.weight, slot.mask, torch.tensor(rows, dtype=torch.int64))
        assert torch.equal(words(slot.weight), want)

    @settings(max_examples=60, deadline=None)
    @given(shards(), st.data())
    def test_as_on_a_device(self, slot: Slot, data: st.DataObject) -> None:
        """Without waiting for the number of removed rows."""
        rows = data.draw(st.lists(st.integers(0, slot.mask.rect.rows - 1), max_size=50))
        want = expected(slot, rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "is_cpu", False, raising=False)
            patch.setattr(Tensor, "masked_select", None)
            zero_rows(slot.weight, slot.mask, torch.tensor(rows, dtype=torch.int64))
        assert torch.equal(words(slot.weight), want)

    def test_autograd_does_not_see_it(self) -> None:
        """A forward may be waiting for its backward."""
        for block in ((1, 1), (1, 8)):
            mask = BlockMask(
                Rect(0, 0, 5, 8),
                block,
                torch.zeros(40 // block[1] // 8 + (block[1] == 8), dtype=torch.uint8),
            )
            weight = torch.nn.Parameter(torch.ones(5, 8))
            loss = (weight * weight).sum()
            zero_rows(weight, mask, torch.tensor([1, 4]))
            assert weight._version == 0
            loss.backward()
            assert weight[[1, 4]].eq(0).all() and weight[[0, 2, 3]].eq(1).all()


class TestWholeTable:
    @settings(max_examples=250, deadline=None)
    @given(shards(), st.data())
    def test_equals_its_rows_one_by_one(self, slot: Slot, data: st.DataObject) -> None:
        """A pass over the whole shard, in parts of 8 rows or in one, writes the bits that cleaning
        every row writes."""
        want = expected(slot, range(slot.mask.rect.rows))
        with pytest.MonkeyPatch.context() as patch:
            flags = data.draw(st.sampled_from([1, 1 << 20]))
            patch.setattr(device, "ON_CPU", replace(device.ON_CPU, flags=flags))
            slot.mask.apply_(slot.weight)
        assert torch.equal(words(slot.weight), want)

    @pytest.mark.parametrize(("rows", "cols"), [(0, 8), (8, 0)])
    def test_an_empty_shard(self, rows: int, cols: int) -> None:
        for block in ((1, 1), (1, 8)):
            BlockMask(Rect(0, 0, rows, cols), block, torch.empty(0, dtype=torch.uint8)).apply_(
                torch.empty(rows, cols)
            )

    def test_few_ids_take_their_rows_alone(self) -> None:
        whole_row, one, square = (
            BlockMask.full(Rect(0, 0, 100, 8), block, CPU) for block in ((1, 8), (1, 1), (4, 4))
        )
        assert many(whole_row, 20) and many(one, 20)
        assert not (many(whole_row, 19) or many(one, 19) or many(square, 100))


class TestInTable:
    @given(
        st.lists(st.integers(-5, 20), min_size=1),
        st.integers(1, 12),
        st.sampled_from([torch.int32, torch.int64]),
    )
    def test_outside_is_row_0(self, ids: list[int], rows: int, dtype: torch.dtype) -> None:
        found = in_table(torch.tensor(ids, dtype=dtype), rows)
        assert found.dtype == torch.int64 and found.tolist() == of_table(ids, rows)

    def test_the_largest_ids(self) -> None:
        ids = torch.tensor([2**31 - 1, -(2**31), 2**40, -(2**63), 2**63 - 1, 3])
        assert in_table(ids, 4).tolist() == [0, 0, 0, 0, 0, 3]


@st.composite
def lookups(draw: st.DrawFn) -> tuple[list[Slot | None], Tensor, list[int]]:
    """Slots by feature (some of one table, some of none), ids in and out of range, and ends."""
    dtype = draw(st.sampled_from(DTYPES))
    tables = [draw(st.none() | shards((dtype,))) for _ in range(draw(st.integers(1, 3)))]
    slots = [tables[draw(st.integers(0, len(tables) - 1))] for _ in range(draw(st.integers(1, 5)))]
    ids: list[int] = []
    ends = [0]
    for slot in slots:
        rows = 10 if slot is None else slot.mask.rect.rows
        number = st.integers(0, rows - 1) | st.integers(-3, rows + 3)
        ids += draw(
            st.just([])
            | st.lists(number, max_size=6)
            | st.lists(number, min_size=rows, max_size=rows + 9)
        )
        ends.append(len(ids))
    return slots, torch.tensor(ids, dtype=draw(st.sampled_from([torch.int32, torch.int64]))), ends


def all_dirty(slots: list[Slot | None]) -> DirtyRows:
    """A table for each feature, with all rows dirty."""
    rows = [0 if slot is None else slot.mask.rect.rows for slot in slots]
    dirty = DirtyRows(dict(enumerate(rows)), range(len(slots)), CPU)
    for table in range(len(rows)):
        dirty.add_all(table)
    return dirty


class TestTorchRowCleaner:
    @settings(max_examples=200, deadline=None)
    @given(lookups(), st.booleans())
    def test_by_definition(
        self, drawn: tuple[list[Slot | None], Tensor, list[int]], as_tensor: bool
    ) -> None:
        """A lookup of many ids may clean the whole table, and else touches its rows alone."""
        slots, ids, ends = drawn
        tables = {id(slot): slot for slot in slots if slot is not None}
        read: dict[int, set[int]] = {key: set() for key in tables}
        for slot, (start, stop) in zip(slots, pairwise(ends), strict=True):
            if slot is not None:
                rows = slot.mask.rect.rows
                everything = (
                    range(rows)
                    if start < stop and (many(slot.mask, stop - start) or stop - start >= rows)
                    else ()
                )
                read[id(slot)].update(of_table(ids[start:stop].tolist(), rows), everything)
        want = {key: expected(slot, sorted(read[key])) for key, slot in tables.items()}
        lookup = TorchRowCleaner(slots, all_dirty(slots))
        assert lookup.needed == any(not bool(kept_by(slot.mask).all()) for slot in tables.values())
        lookup(ids, torch.tensor(ends) if as_tensor else ends)
        for key, slot in tables.items():
            assert torch.equal(words(slot.weight), want[key])

    def test_nothing_removed_is_not_needed(self) -> None:
        mask = BlockMask.full(Rect(0, 0, 3, 5), (1, 1), CPU)
        for slots in ([None, Slot(torch.ones(3, 5), mask)], []):
            assert not TorchRowCleaner(slots, all_dirty(slots)).needed

    def test_ends_that_do_not_fit_are_refused(self) -> None:
        slot = Slot(torch.ones(3, 5), BlockMask.full(Rect(0, 0, 3, 5), (1, 1), CPU))
        with pytest.raises(ValueError):
            TorchRowCleaner([slot, slot], all_dirty([slot]))(torch.tensor([1, 2]), [0, 2])

    def test_the_form_of_a_cpu(self) -> None:
        assert isinstance(row_cleaner_on(CPU, [], DirtyRows({}, [], CPU)), TorchRowCleaner)

    @settings(max_examples=150, deadline=None)
    @given(lookups(), st.data())
    def test_only_rows_that_are_dirty(
        self, drawn: tuple[list[Slot | None], Tensor, list[int]], data: st.DataObject
    ) -> None:
        """What is read of the dirty rows is cleaned; many ids may clean the whole table."""
        slots, ids, ends = drawn
        tables = list({id(slot): slot for slot in slots}.values())
        rows = [10 if slot is None else slot.mask.rect.rows for slot in tables]
        features = [
            next(i for i, slot in enumerate(tables) if slot is of_feature) for of_feature in slots
        ]
        noted = [data.draw(st.sets(st.integers(0, count - 1))) for count in rows]
        dirty = DirtyRows(dict(enumerate(rows)), list(range(len(rows))) + features, CPU)
        start = [0, *torch.tensor([len(of_table) for of_table in noted]).cumsum(0).tolist()]
        dirty.add(
            torch.tensor([row for of_table in noted for row in sorted(of_table)]),
            start + start[-1:] * len(features),
        )

        cleaned: list[set[int]] = [set() for _ in rows]
        for table, (first, stop) in zip(features, pairwise(ends), strict=True):
            slot = tables[table]
            if slot is not None and many(slot.mask, stop - first):
                cleaned[table].update(range(rows[table]) if first < stop and any(noted) else ())
            elif slot is not None:
                found = set(of_table(ids[first:stop].tolist(), rows[table]))
                cleaned[table].update(
                    noted[table] & found if stop - first < rows[table] else noted[table]
                )
        want = [
            slot and expected(slot, sorted(each))
            for slot, each in zip(tables, cleaned, strict=True)
        ]
        none = [None] * len(rows)  # the features by which rows were noted
        TorchRowCleaner([*none, *slots], dirty)(ids, [0] * len(rows) + ends)
        for table, slot in enumerate(tables):
            assert slot is None or torch.equal(words(slot.weight), want[table])
            left = [row for part in dirty.rows(table) for row in part.tolist()]
            assert left == sorted(noted[table])


@st.composite
def noted(draw: st.DrawFn) -> tuple[list[int], list[int], list[tuple[Tensor, list[int]]]]:
    """Rows of each table, the table of each feature, and the ids and ends of some lookups."""
    rows = draw(st.lists(st.sampled_from([1, 2, 7, 8, 9, 16, 65, 300]), min_size=1, max_size=4))
    features = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        ids: list[int] = []
        ends = [0]
        for table in features:
            number = st.integers(0, rows[table] - 1) | st.integers(-2, rows[table] + 2)
            ids += draw(st.just([]) | st.lists(number, max_size=12))
            ends.append(len(ids))
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        batches.append((torch.tensor(ids, dtype=dtype), ends))
    return rows, features, batches


class TestDirtyRows:
    @settings(max_examples=200, deadline=None)
    @given(
        noted(),
        st.sampled_from(["list", "int64", "int32"]),
        st.sampled_from([64, 1 << 20]),
        st.integers(0, 5),
    )
    def test_by_sets(
        self,
        drawn: tuple[list[int], list[int], list[tuple[Tensor, list[int]]]],
        kind: str,
        chunk: int,
        ignored: int,
    ) -> None:
        """Ends as a list may flag all of a table that gets as many ids as it has rows; as a tensor
        they do not. Ids of a table that is not followed leave the others alone."""
        rows, features, batches = drawn
        dirty = DirtyRows({t: rows[t] for t in range(len(rows)) if t != ignored}, features, CPU)
        assert not dirty
        want: list[set[int]] = [set() for _ in rows]
        for ids, ends in batches:
            dirty.add(
                ids, ends if kind == "list" else torch.tensor(ends, dtype=getattr(torch, kind))
            )
            for table, (start, stop) in zip(features, pairwise(ends), strict=True):
                want[table].update(of_table(ids[start:stop].tolist(), rows[table]))
                if kind == "list" and stop - start >= rows[table]:
                    want[table].update(range(rows[table]))
        if kind != "list":
            assert bool(dirty) == any(ids.numel() and dirty.tables for ids, _ in batches)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows_module, "TAKEN", chunk)
            for table in dirty.tables:
                of_this, parts = want[table], list(dirty.rows(table))
                assert all(part.dtype == torch.int64 for part in parts)
                assert [row for part in parts for row in part.tolist()] == sorted(of_this)
        dirty.clear()
        assert not dirty and not any(list(dirty.rows(table)) for table in dirty.tables)

    def test_whole_tables(self) -> None:
        dirty = DirtyRows({0: 9, 1: 3, 2: 17}, [0, 1, 2], CPU)
        dirty.add_all(2)
        assert dirty
        assert [
            torch.cat([*dirty.rows(i), torch.tensor([], dtype=torch.int64)]).tolist()
            for i in range(3)
        ] == [
            *([], []),
            list(range(17)),
        ]

    def test_cleared_tables(self) -> None:
        dirty = DirtyRows({0: 9, 1: 17}, [0, 1], CPU)
        dirty.add_all(0)
        dirty.add_all(1)
        dirty.clear()
        assert not dirty and list(dirty.rows(0)) == list(dirty.rows(1)) == []

    def test_tables_of_more_rows_than_are_taken_at_a_time(self) -> None:
        count = (1 << 20) * 2 + 13
        dirty = DirtyRows({0: 5, 1: count, 2: 8}, [1], CPU)
        ids = torch.tensor([0, 7, (1 << 20) - 1, 1 << 20, count - 1])
        dirty.add(ids, [0, 5])
        parts = list(dirty.rows(1))
        assert len(parts) == 3 and torch.cat(parts).tolist() == ids.tolist()

    def test_ends_with_a_stride(self) -> None:
        """Every n-th of FBGEMM's offsets, where they lie."""
        dirty = DirtyRows({0: 9, 1: 4}, [0, 1], CPU)
        offsets = torch.tensor([0, 1, 2, 3, 3, 4, 6])
        dirty.add(torch.tensor([8, 1, 30, 3, 1, 2]), offsets[::3])
        assert torch.cat(list(dirty.rows(0))).tolist() == [0, 1, 8]
        assert torch.cat(list(dirty.rows(1))).tolist() == [1, 2, 3]

    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_ids_that_belong_to_no_feature_are_left_out(self, as_tensor: bool) -> None:
        """In front of the first end and behind the last, as a slice of a larger KeyedJaggedTensor
        has them."""
        dirty = DirtyRows({0: 9, 1: 9}, [0, 1], CPU)
        ends = [1, 2, 4]
        dirty.add(torch.tensor([5, 1, 2, 3, 6, 7]), torch.tensor(ends) if as_tensor else ends)
        assert torch.cat(list(dirty.rows(0))).tolist() == [1]
        assert torch.cat(list(dirty.rows(1))).tolist() == [2, 3]


class TestResetState:
    @settings(max_examples=100, deadline=None)
    @given(shards(), st.sampled_from([0.0, 0.5]))
    def test_by_definition(self, slot: Slot, initial: float) -> None:
        rect, kept = slot.mask.rect, kept_by(slot.mask)
        by_element = torch.randn(rect.rows, rect.cols).fill_diagonal_(torch.nan)
        by_row, by_column_of_rows = torch.rand(rect.rows) + 1, torch.rand(rect.rows, 1) + 1
        step, others = torch.tensor(5.0), torch.ones(rect.rows + 1)
        was = by_element.clone(), by_row.clone(), by_column_of_rows.clone()
        reset_state(
            slot.mask,
            [(state, initial) for state in (by_element, step, by_row, others, by_column_of_rows)],
        )

        want = torch.where(kept, was[0], initial)
        assert torch.equal(by_element.view(torch.int32), want.view(torch.int32))
        some = kept.any(dim=1)
        assert torch.equal(by_row, torch.where(some, was[1], initial))
        if rect.cols > 1:  # of one column, (rows, 1) is state by element, which is the same
            assert torch.equal(by_column_of_rows, torch.where(some[:, None], was[2], initial))
        assert step.item() == 5 and others.eq(1).all()

    def test_plain_data(self) -> None:
        mask = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
        by_element, others = torch.full((2, 3), torch.nan), torch.ones(3)
        reset_state(mask, [(by_element, 0.0), (others, 0.0), (torch.tensor(3.0), 0.0)])
        assert torch.equal(by_element == 0, mask == 0) and others.eq(1).all()

    def test_plain_data_by_rows(self) -> None:
        """Row-wise Adagrad's state belongs to rows of plain data as well."""
        mask = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
        by_row = torch.ones(2, 1)
        reset_state(mask, [(by_row, 0.0)])
        assert by_row.flatten().tolist() == [1, 0]


def test_lookups_are_counted_alike_with_and_without_waiting() -> None:
    """Features of one table, and of one that is not counted; ids out of range (read as row 0), and
    of no feature."""
    ids = torch.tensor([9, 3, 3, -1, 7, 2, 0, 3, 1, 4])
    ends, features = [1, 4, 6, 9], [0, 1, 0]
    want = torch.bincount(torch.tensor([3, 3, 0, 0, 3, 1]), minlength=5).int()
    for form in (ends, torch.tensor(ends)):
        counts = torch.zeros(5, dtype=torch.int32)
        count_lookups({0: counts}, features, ids, form)
        assert torch.equal(counts, want)
