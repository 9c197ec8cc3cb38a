"""Whole rows of tables that are cut by columns: kernels sum the parts of rows, as the CPU does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking.block_masks import new_masks, score_tables
from dist_sparse.masking.device import warn_of_torch
from dist_sparse.masking.goal import Goal
from dist_sparse.masking.scores import ByTotals, Measure, RowTotals
from dist_sparse.tables.shards import Rect, Shard, whole
from tests.extras.device.simulated.account import Spent
from tests.extras.device.simulated.ceilings import SUMS_OF_PARTS, above
from tests.extras.device.simulated.fake import counting, cuda, inner
from tests.extras.device.simulated.runs import on_device

ROWS = 301
PUT: dict[str, Callable[[Tensor], Tensor]] = {"cpu": lambda tensor: tensor, "cuda": cuda}

# Returns how elements are scored, for the shards of a table and a device.
Score = Callable[[Sequence[Rect], str], Measure]


def by_totals(squares: bool, of: str) -> Score:
    """By squared gradients of rows or elements, or by lookups; each shard has its own."""

    def measure(rects: Sequence[Rect], device: str) -> ByTotals:
        random = torch.Generator().manual_seed(1)
        found = {}
        for rect in rects:
            shape = (rect.rows, rect.cols if of == "elements" else 1)
            total = torch.rand(shape, generator=random) * 3 + 0.1
            known = RowTotals(rect, PUT[device](total), 0.1)
            if of == "lookups":
                total = torch.randint(9, (rect.rows,), generator=random).int()
                known = RowTotals(rect, PUT[device](total), 0.0, rect.cols, 6)
            found[rect[:2]] = known
        return ByTotals(lambda offset: found[offset], squares)

    return measure


SCORES: dict[str, Score] = {
    "L1": lambda rects, device: "L1",
    "L2": lambda rects, device: "L2",
    "sums of rows": by_totals(True, "rows"),
    "sums of rows alone": by_totals(False, "rows"),
    "sums of elements": by_totals(True, "elements"),
    "lookups": by_totals(False, "lookups"),
}


def cut(
    table: Tensor,
    widths: Sequence[int],
    device: str,
    score: Score = SCORES["L2"],
    upper: int = 0,
    **more: Any,
) -> Goal:
    """To remove half of the rows of a table, of which one rank has all shards, of these widths: each
    of all rows, or two, of which the first has ``upper`` rows."""
    rects, column = [], 0
    for width in widths:
        if upper:
            rects.append(Rect(0, column, upper, width))
        rects.append(Rect(upper, column, len(table) - upper, width))
        column += width
    parts = [table[rect.row : rect.row_end, rect.col : rect.col_end].contiguous() for rect in rects]
    shards = [Shard(rect, PUT[device](part)) for rect, part in zip(rects, parts, strict=True)]
    data = replace(whole("t", PUT[device](table)), tiling=(tuple(rects),), shards=tuple(shards))
    goal = Goal(
        data=data,
        block=(1, column),
        k=len(table) // 2,
        max_blocks=len(table),
        zeros_per_block=column,
        measure=score(rects, device),
    )
    return replace(goal, **more)


@contextmanager
def no_warning() -> Iterator[None]:
    """Fail where a table takes torch's path."""
    warn_of_torch.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hundreds of torch operations")
        yield


def sums_and_masks(goal: Goal) -> list[Tensor]:
    """The sums of each shard's parts of rows, and the bits of its mask, in CPU memory."""
    [table] = score_tables([goal])
    assert table.cuts is not None
    sums = [inner(table.cuts.partials[shard.rect].sums) for shard in goal.data.shards]
    [made] = new_masks([table], Group())
    return [*sums, *(inner(new.mask.bits) for new in made.masks)]


def check(table: Tensor, widths: Sequence[int], score: Score, **more: Any) -> None:
    expected = sums_and_masks(cut(table, widths, "cpu", score, **more))
    with on_device(), no_warning():
        found = sums_and_masks(cut(table, widths, "cuda", score, **more))
    assert len(expected) == len(found) >= 2 * len(widths)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("width", [20, 64, 100, 128])
def test_sums_and_masks_are_the_cpus(width: int, name: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check(torch.randn(ROWS, 2 * width).to(dtype), (width, width), SCORES[name])


@pytest.mark.parametrize("name", SCORES)
def test_a_rank_may_have_shards_of_different_widths(name: str) -> None:
    check(torch.randn(ROWS, 149), (48, 1, 4, 96), SCORES[name])


@pytest.mark.parametrize("width", [5, 7, 9, 10, 11, 13, 14, 15])
def test_sums_of_odd_widths_are_the_cpus(width: int) -> None:
    """Elements of magnitudes so different that the order of additions shows in the last bit."""
    table = torch.randn(ROWS, 2 * width) * 10 ** torch.randn(2 * width)
    for name in ("L1", "sums of elements"):
        check(table, (width, width), SCORES[name])


def test_a_table_of_several_tiles() -> None:
    check(torch.randn(20_000, 40), (20, 20), SCORES["L2"])


def test_a_row_of_two_blocks_of_which_the_last_is_narrower() -> None:
    check(torch.randn(ROWS, 56), (16, 16, 8, 16), SCORES["L2"], block=(1, 32), zeros_per_block=32)


@pytest.mark.parametrize("name", SCORES)
def test_a_table_cut_by_rows_too(name: str) -> None:
    check(torch.randn(ROWS, 40), (20, 20), SCORES[name], upper=77)


def cost(rows: int, tables: int) -> Spent:
    with on_device(), no_warning():
        goals = [cut(torch.randn(rows, 128), (64, 64), "cuda") for _ in range(tables)]
        with counting() as meter:
            score_tables(goals)
    return meter.spent


def test_costs_are_at_most_their_ceiling() -> None:
    assert not above(cost(3_000, 2), SUMS_OF_PARTS)


def test_launches_grow_with_neither_tables_nor_rows() -> None:
    few, more_tables, more_rows = cost(100, 1), cost(100, 8), cost(20_000, 1)
    assert few.launches == more_tables.launches == more_rows.launches
    assert few.waits == more_tables.waits == more_rows.waits == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25])
def test_weights_that_score_nothing_are_refused(value: float) -> None:
    """1e25 has no finite score."""
    table = torch.randn(ROWS, 40)
    table[7, 25] = value
    check_refused(table, SCORES["L2"])


@pytest.mark.parametrize("total", [-1.0, float("nan"), float("inf")])
def test_totals_that_score_nothing_are_refused(total: float) -> None:
    def score(rects: Sequence[Rect], device: str) -> Measure:
        measure = SCORES["sums of rows"](rects, device)
        assert isinstance(measure, ByTotals)
        inner(measure.find((0, 20)).total)[7] = total
        return measure

    check_refused(torch.randn(ROWS, 40), score)


def check_refused(table: Tensor, score: Score) -> None:
    """Check that the second shard's row 7 is refused in the CPU's words."""
    said = []
    for device in PUT:
        with (
            on_device(),
            pytest.raises(ValueError, match="'t': the block at row 7, column 0 scores") as caught,
        ):
            score_tables([cut(table, (20, 20), device, score)])
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_part_is_divided_by_the_width_of_the_whole_row() -> None:
    """The mean of the first part is beyond float32, that of the row is not."""
    table = torch.zeros(ROWS, 128)
    table[7, :64] = 5e38**0.5
    check(table, (64, 64), SCORES["L2"])


OTHERS: dict[str, tuple[Tensor, Sequence[int], dict[str, Any]]] = {
    "float64": (torch.ones(ROWS, 40).double(), (20, 20), {}),
    "a width without a kernel": (torch.ones(ROWS, 8200), (4100, 4100), {}),
    "a block that is not cut": (torch.ones(ROWS, 48), (16, 16, 16), {"block": (1, 32)}),
    "two parts in a shard": (torch.ones(ROWS, 48), (24, 24), {"block": (1, 16)}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_cut_tables_take_torchs_path(name: str) -> None:
    table, widths, more = OTHERS[name]
    warn_of_torch.cache_clear()
    with on_device(), pytest.warns(UserWarning, match="the borders of its shards cut blocks"):
        score_tables([cut(table, widths, "cuda", **more)])
