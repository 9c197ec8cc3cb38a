"""Scores by lookups or summed gradients on the device: masks equal the CPU's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking.block_masks import new_masks, score_tables
from dist_sparse.masking.goal import Goal
from dist_sparse.masking.scores import ByTotals, RowTotals
from dist_sparse.tables.shards import Block, Rect, whole
from tests.extras.device.simulated.fake import counting, cuda, inner
from tests.extras.device.simulated.runs import on_device, small_programs

ROWS, COLUMNS = 301, 48
RECT = Rect(0, 0, ROWS, COLUMNS)
BLOCKS = {"row": (1, COLUMNS), "1x4": (1, 4), "1x1": (1, 1), "1x16": (1, 16), "1x5": (1, 5)}
# Blocks of widths that are no power of two and no multiple of 16.
BLOCKS |= {"1x6": (1, 6), "1x24": (1, 24)}


def sums(*shape: int) -> Tensor:
    """Squared gradients from 0.1 on; some rows have none."""
    found = torch.rand(shape) * (torch.rand(ROWS, *[1] * (len(shape) - 1)) < 0.8)
    return found * 3 + 0.1


TOTALS = {
    "of rows": lambda: RowTotals(RECT, sums(ROWS), 0.1),
    "of rows, as a column": lambda: RowTotals(RECT, sums(ROWS, 1), 0.1),
    "of elements": lambda: RowTotals(RECT, sums(ROWS, COLUMNS), 0.1),
    "lookups": lambda: RowTotals(RECT, torch.randint(9, (ROWS,)).int(), 0.0, COLUMNS, 6),
    "decayed lookups": lambda: RowTotals(RECT, sums(ROWS).double(), 0.0, COLUMNS, 2),
}


def masks_of(
    weights: Tensor, known: RowTotals, block: Block, squares: bool, times: int = 1
) -> list[Tensor]:
    """The bits of the masks and of what may not be zero, at 60%."""
    data = whole("t", weights)
    blocks = data.grid(block).blocks
    goal = Goal(
        data=data,
        block=block,
        k=round(0.6 * blocks),
        max_blocks=blocks,
        zeros_per_block=math.prod(block),
        measure=ByTotals(lambda offset: known, squares),
    )
    made = new_masks(score_tables([goal] * times), Group())
    return [inner(new.mask.bits) for table in made for new in table.masks]


@pytest.mark.parametrize("squares", [True, False], ids=["with norms", "alone"])
@pytest.mark.parametrize("name", TOTALS)
@pytest.mark.parametrize("block", BLOCKS)
def test_masks_are_the_cpus(block: str, name: str, squares: bool) -> None:
    torch.manual_seed(0)
    weights, known = torch.randn(ROWS, COLUMNS), TOTALS[name]()
    expected = masks_of(weights, known, BLOCKS[block], squares)
    with on_device():
        there = known._replace(total=cuda(known.total))
        found = masks_of(cuda(weights), there, BLOCKS[block], squares)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", ["of rows", "of elements"])
@pytest.mark.parametrize("block", ["row", "1x6", "1x24"])
def test_programs_of_several_tiles(block: str, name: str) -> None:
    torch.manual_seed(0)
    weights, known = torch.randn(ROWS, COLUMNS), TOTALS[name]()
    expected = masks_of(weights, known, BLOCKS[block], True)
    with on_device(), small_programs():
        there = known._replace(total=cuda(known.total))
        found = masks_of(cuda(weights), there, BLOCKS[block], True)
    assert all(map(torch.equal, expected, found))


# Widths with an odd factor above 3, whose last elements or pairs are added one by one.
ODD = [5, 7, 9, 10, 11, 13, 14, 15]


@pytest.mark.parametrize("columns", [*ODD, 20, 39, 100, 500])
def test_rows_of_any_width_take_kernels(columns: int) -> None:
    weights = torch.randn(ROWS, columns)
    known = RowTotals(Rect(0, 0, ROWS, columns), sums(ROWS), 0.1)
    expected = masks_of(weights, known, (1, columns), True)
    with on_device():
        there = known._replace(total=cuda(known.total))
        with counting() as meter:
            found = masks_of(cuda(weights), there, (1, columns), True)
    assert all(map(torch.equal, expected, found))
    assert meter.spent.launches <= 22


@pytest.mark.parametrize("of_elements", [True, False])
@pytest.mark.parametrize("width", ODD)
def test_blocks_of_odd_widths(width: int, of_elements: bool) -> None:
    columns = 3 * width
    # Of magnitudes so different that the order of additions shows in the last bit.
    weights = torch.randn(ROWS, columns) * 10 ** torch.randn(columns)
    total = sums(ROWS, columns) if of_elements else sums(ROWS)
    known = RowTotals(Rect(0, 0, ROWS, columns), total, 0.1)
    expected = masks_of(weights, known, (1, width), True)
    with on_device(), small_programs():
        there = known._replace(total=cuda(known.total))
        with counting() as meter:
            found = masks_of(cuda(weights), there, (1, width), True)
    assert all(map(torch.equal, expected, found))
    assert meter.spent.launches <= 26


def test_tables_share_launches() -> None:
    weights, known = torch.randn(ROWS, COLUMNS), TOTALS["of rows"]()
    launches = []
    with on_device():
        there = known._replace(total=cuda(known.total))
        for times in (2, 8):
            with counting() as meter:
                masks_of(cuda(weights), there, (1, COLUMNS), True, times)
            launches.append(meter.spent.launches)
    assert launches[1] <= launches[0]


@pytest.mark.parametrize("squares", [True, False], ids=["with norms", "alone"])
@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_totals_that_score_nothing_are_refused(wrong: float, squares: bool) -> None:
    """A sum below its initial value, as after a load of another model's state."""
    known = TOTALS["of rows"]()
    known.total[7] = wrong
    weights = torch.randn(ROWS, COLUMNS)
    with on_device():
        there = known._replace(total=cuda(known.total))
        with pytest.raises(ValueError, match="'t': the block at row 7, column 0 scores"):
            masks_of(cuda(weights), there, (1, COLUMNS), squares)
