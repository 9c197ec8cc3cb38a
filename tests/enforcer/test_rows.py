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
from dist_sparse.enforcer.dense import WeightState
from dist_sparse.enforcer.rows import (
    CountedLookups,
    KeptIds,
    MaskedShard,
    RowFlags,
    SampledLookups,
    ZeroedRows,
    flag_rows,
    in_table,
    one_pass_is_quicker,
    zero_rows,
)
from dist_sparse.masking import device
from dist_sparse.masking.masks import BlockMask, Held, pack
from dist_sparse.optimizers import State
from dist_sparse.tables.shards import Rect, grid_of

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD_VALUES = (torch.nan, -torch.nan, -0.0, torch.inf, -torch.inf)


@st.composite
def shards(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> MaskedShard:
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
    return MaskedShard(
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


def expected(slot: MaskedShard, rows: Sequence[int]) -> Tensor:
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
    def test_by_definition(self, slot: MaskedShard, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, slot.mask.rect.rows - 1), max_size=50))
        want = expected(slot, rows)
        zero_rows(slot.weight, slot.mask, torch.tensor(rows, dtype=torch.int64))
        assert torch.equal(words(slot.weight), want)

    @settings(max_examples=60, deadline=None)
    @given(shards(), st.data())
    def test_in_several_parts(self, slot: MaskedShard, data: st.DataObject) -> None:
        """Gathered a few rows at a time, as large batches are."""
        rows = data.draw(st.lists(st.integers(0, slot.mask.rect.rows - 1), max_size=50))
        want = expected(slot, rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows_module, "CHUNK", data.draw(st.integers(1, 100)))
            zero_rows(slot.weight, slot.mask, torch.tensor(rows, dtype=torch.int64))
        assert torch.equal(words(slot.weight), want)

    @settings(max_examples=60, deadline=None)
    @given(shards(), st.data())
    def test_as_on_a_device(self, slot: MaskedShard, data: st.DataObject) -> None:
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
    def test_equals_its_rows_one_by_one(self, slot: MaskedShard, data: st.DataObject) -> None:
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
            mask = BlockMask(Rect(0, 0, rows, cols), block, torch.empty(0, dtype=torch.uint8))
            mask.apply_(torch.empty(rows, cols))
            assert not mask.removes

    def test_few_ids_take_their_rows_alone(self) -> None:
        whole_row, one, square = (
            BlockMask.full(Rect(0, 0, 100, 8), block, CPU) for block in ((1, 8), (1, 1), (4, 4))
        )
        assert one_pass_is_quicker(whole_row, 20) and one_pass_is_quicker(one, 20)
        assert not (
            one_pass_is_quicker(whole_row, 19)
            or one_pass_is_quicker(one, 19)
            or one_pass_is_quicker(square, 100)
        )


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
def lookups(draw: st.DrawFn) -> tuple[list[MaskedShard | None], Tensor, list[int]]:
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


class TestReads:
    @settings(max_examples=250, deadline=None)
    @given(lookups(), st.data())
    def test_only_rows_that_are_dirty(
        self, drawn: tuple[list[MaskedShard | None], Tensor, list[int]], data: st.DataObject
    ) -> None:
        """What is read of the dirty rows is cleaned; many ids may clean the whole table."""
        slots, ids, ends = drawn
        tables = list({id(slot): slot for slot in slots}.values())
        features = [next(i for i, slot in enumerate(tables) if slot is each) for each in slots]
        masked = {table: slot for table, slot in enumerate(tables) if slot is not None}
        noted = {}
        for table, slot in masked.items():
            noted[table] = data.draw(st.sets(st.integers(0, slot.mask.rect.rows - 1)))

        cleaned: dict[int, set[int]] = {table: set() for table in masked}
        for table, (first, stop) in zip(features, pairwise(ends), strict=True):
            if table in masked and first < stop and any(noted.values()):
                mask = masked[table].mask
                found = set(of_table(ids[first:stop].tolist(), mask.rect.rows))
                if one_pass_is_quicker(mask, stop - first):
                    cleaned[table].update(range(mask.rect.rows))
                elif stop - first < mask.rect.rows:
                    cleaned[table].update(noted[table] & found)
                else:
                    cleaned[table].update(noted[table])
        want = {table: expected(masked[table], sorted(cleaned[table])) for table in masked}

        zeroed = ZeroedRows(features, CPU)
        zeroed.use(masked, set(masked))
        removing = {t for t, slot in masked.items() if not bool(kept_by(slot.mask).all())}
        assert zeroed.removing.keys() == removing and not zeroed.any_dirty
        for table, rows in noted.items():
            # The lookup that wrote them: ids of this table alone.
            first = features.index(table)
            some = [0] * (first + 1) + [len(rows)] * (len(features) - first)
            if rows:
                zeroed.add(torch.tensor(sorted(rows), dtype=torch.int64), some)
            if len(rows) == masked[table].mask.rect.rows:
                noted[table] = set(range(len(rows)))
        if zeroed.any_dirty:
            zeroed.clean_read(ids, ends)
        for table, slot in masked.items():
            assert torch.equal(words(slot.weight), want[table])
        # They stay dirty.
        want = {table: expected(slot, sorted(noted[table])) for table, slot in masked.items()}
        zeroed.clean()
        for table, slot in masked.items():
            assert torch.equal(words(slot.weight), want[table])

    def test_ends_that_do_not_fit_are_refused(self) -> None:
        mask = BlockMask(Rect(0, 0, 3, 5), (1, 1), torch.zeros(2, dtype=torch.uint8))
        zeroed = ZeroedRows([0, 0], CPU)
        zeroed.use({0: MaskedShard(torch.ones(3, 5), mask)}, {0})
        with pytest.raises(ValueError):
            zeroed.add(torch.tensor([1, 2]), [0, 2])
        with pytest.raises(ValueError):
            zeroed.clean_read(torch.tensor([1, 2]), [0, 2])

    def test_rows_that_are_no_longer_watched(self) -> None:
        """Their flags are lost, so that all rows are cleaned."""
        mask = BlockMask(Rect(0, 0, 3, 5), (1, 1), torch.zeros(2, dtype=torch.uint8))
        slot = MaskedShard(torch.ones(3, 5), mask)
        zeroed = ZeroedRows([0], CPU)
        zeroed.use({0: slot}, {0})
        zeroed.add(torch.tensor([1]), [0, 1])
        zeroed.use({0: slot}, set())
        assert zeroed.revived and not zeroed.any_dirty
        zeroed.clean()
        assert not slot.weight.any() and not zeroed.revived


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


class TestRowFlags:
    @settings(max_examples=200, deadline=None)
    @given(noted(), st.sampled_from([64, 1 << 20]), st.integers(0, 5))
    def test_by_sets(
        self,
        drawn: tuple[list[int], list[int], list[tuple[Tensor, list[int]]]],
        chunk: int,
        ignored: int,
    ) -> None:
        """All of a table may be flagged that gets as many ids as it has rows. Ids of a table that
        is not followed leave the others alone."""
        rows, features, batches = drawn
        flags = {t: RowFlags(rows[t]) for t in range(len(rows)) if t != ignored}
        want: list[set[int]] = [set() for _ in rows]
        for ids, ends in batches:
            flag_rows(flags, features, ids, ends)
            for table, (start, stop) in zip(features, pairwise(ends), strict=True):
                want[table].update(of_table(ids[start:stop].tolist(), rows[table]))
                if stop - start >= rows[table]:
                    want[table].update(range(rows[table]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows_module, "FLAGS_AT_A_TIME", chunk)
            for table, of_this in flags.items():
                assert all(part.dtype == torch.int64 for part in of_this.parts())
                assert of_this.rows().tolist() == sorted(want[table])
                of_this.clear()
                assert not of_this.rows().numel()

    @pytest.mark.parametrize("count", [3, 8, 17])
    def test_whole_tables(self, count: int) -> None:
        flags = RowFlags(count)
        flags.add_all()
        assert flags.rows().tolist() == list(range(count))

    def test_tables_of_more_rows_than_are_taken_at_a_time(self) -> None:
        count = (1 << 20) * 2 + 13
        flags = RowFlags(count)
        ids = torch.tensor([0, 7, (1 << 20) - 1, 1 << 20, count - 1])
        flags.add(ids)
        parts = list(flags.parts())
        assert len(parts) == 3 and torch.cat(parts).tolist() == ids.tolist()

    def test_ids_that_belong_to_no_feature_are_left_out(self) -> None:
        """In front of the first end and behind the last, as a slice of a larger KeyedJaggedTensor
        has them."""
        flags = {0: RowFlags(9), 1: RowFlags(9)}
        flag_rows(flags, [0, 1], torch.tensor([5, 1, 2, 3, 6, 7]), [1, 2, 4])
        assert flags[0].rows().tolist() == [1] and flags[1].rows().tolist() == [2, 3]


def of_elements(mask: Tensor) -> BlockMask:
    return BlockMask.of_elements(Rect(0, 0, *mask.shape), mask)


def reset(mask: BlockMask, weight: Tensor, states: list[State]) -> None:
    WeightState("name", weight, mask, states, None, True).reset_removed()


class TestResetState:
    @settings(max_examples=100, deadline=None)
    @given(shards(), st.sampled_from([0.0, 0.5]))
    def test_by_definition(self, slot: MaskedShard, initial: float) -> None:
        rect, kept = slot.mask.rect, kept_by(slot.mask)
        by_element = torch.randn(rect.rows, rect.cols).fill_diagonal_(torch.nan)
        by_row, by_column_of_rows = torch.rand(rect.rows) + 1, torch.rand(rect.rows, 1) + 1
        step, others = torch.tensor(5.0), torch.ones(rect.rows + 1)
        was = by_element.clone(), by_row.clone(), by_column_of_rows.clone()
        reset(
            slot.mask,
            slot.weight,
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
        states = [(by_element, 0.0), (others, 0.0), (torch.tensor(3.0), 0.0)]
        reset(of_elements(mask), by_element, states)
        assert torch.equal(by_element == 0, mask == 0) and others.eq(1).all()

    def test_plain_data_by_rows(self) -> None:
        """Row-wise Adagrad's state belongs to rows of plain data as well."""
        mask = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
        by_row = torch.ones(2, 1)
        reset(of_elements(mask), torch.ones(2, 3), [(by_row, 0.0)])
        assert by_row.flatten().tolist() == [1, 0]


def test_lookups_are_counted_alike_by_a_list_and_a_tensor_of_ends() -> None:
    """Features of one table, and of one that is not counted; ids out of range (read as row 0), and
    of no feature."""
    ids = torch.tensor([9, 3, 3, -1, 7, 2, 0, 3, 1, 4])
    ends, features = [1, 4, 6, 9], [0, 1, 0]
    want = torch.bincount(torch.tensor([3, 3, 0, 0, 3, 1]), minlength=5).int()
    for form in (ends, torch.tensor(ends)):
        counts = torch.zeros(5, dtype=torch.int32)
        CountedLookups({0: counts}, features).add(ids, form)
        assert torch.equal(counts, want)


def test_lookups_are_sampled_alike_by_a_list_and_a_tensor_of_ends() -> None:
    """Of all lookups in a forward; those of removed rows are counted apart."""
    ids = torch.tensor([9, 3, 3, -1, 7, 2, 0, 3, 1, 4])
    ends, features = [1, 4, 6, 9], [0, 1, 0]
    # Rows 0 and 3 of five are removed: 9 and -1 are outside, and read as row 0.
    mask = BlockMask(Rect(0, 0, 5, 4), (1, 4), torch.tensor([0b10110], dtype=torch.uint8))
    for form in (ends, torch.tensor(ends)):
        held, sampled = Held(mask), SampledLookups(features)
        sampled.use({0: held})
        assert sampled.counts_forward()
        sampled.add(ids, form)
        assert held.lookups.tolist() == [6, 5]


def test_weights_of_removed_rows_are_0() -> None:
    """Whatever they were: 0 times NaN would be NaN. Gradients flow back to the others."""
    kept = KeptIds({0: torch.tensor([False, True])}, [0, 1])
    ids, ends = torch.tensor([0, 1, 0, 0]), [0, 3, 4]
    assert kept.weights(ids, ends, None).tolist() == [0, 1, 0, 1]
    before = torch.tensor([torch.nan, 2.0, -3.0, 4.0], dtype=torch.float16, requires_grad=True)
    for form in (ends, torch.tensor(ends)):
        weights = kept.weights(ids, form, before)
        assert weights.dtype == before.dtype and weights.tolist() == [0, 2, 0, 4]
        before.grad = None
        weights.sum().backward()
        assert before.grad.tolist() == [0, 1, 0, 1]
