"""An 8-bit grid holds zero exactly, and every weight within half a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_sparse.quantization import grid

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def packed(weight: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, int]:
    rows = grid.empty_rows(*weight.shape, weight.device)
    wrong = 0
    for part in grid.chunks(*weight.shape):
        wrong += grid.fit_(rows[part], weight[part], dtype or weight.dtype)
        grid.encode_(rows[part], weight[part])
    return rows, wrong


def scale_and_zero(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale, bias = rows[:, -8:].view(torch.float32).double().unbind(dim=1)
    return scale, -bias / scale


def check(weight: Tensor) -> None:
    """Everything that the module promises of a row."""
    rows, wrong = packed(weight)
    assert wrong == 0
    columns = weight.shape[1]
    scale, zero = scale_and_zero(rows)
    assert torch.equal(zero, zero.round()) and bool(((zero >= 0) & (zero <= 255)).all())
    assert bool((scale >= 2.0**-126).all())
    assert int((rows[:, -8:].view(torch.float32)[:, 0].contiguous().view(torch.int32) & 0xFF).count_nonzero()) == 0
    exact = (rows[:, :columns].double() - zero[:, None]) * scale[:, None]
    read = grid.decode(rows, columns)
    assert read.dtype == torch.float32 and torch.equal(read.double(), exact)
    error = (exact - weight.double()).abs()
    assert bool((error <= 0.5 * scale[:, None] * (1 + 1e-6)).all())
    assert bool((read[weight == 0] == 0).all())
    low, high = weight.double().amin(1).clamp(max=0), weight.double().amax(1).clamp(min=0)
    tight = ((high - low) / 255).clamp(min=2.0**-126) * (1 + 2.0**-14)
    assert bool(((scale <= tight) | (high == low)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 3, 4, 64, 65])
def test_random_rows(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(columns)
    weight = (torch.randn(300, columns) * torch.logspace(-3, 3, 300)[:, None]).to(dtype)
    weight[torch.rand(300, columns) < 0.5] = 0
    weight[:20], weight[20:40] = weight[:20].abs(), -weight[20:40].abs()
    weight[40:60] = 0
    check(weight)


def test_rows_at_the_ends_of_float32() -> None:
    tiny, big = torch.finfo(torch.float32).tiny, 1e38
    values = [[tiny, -tiny], [1e-45, 0.0], [-1e-42, 3e-41], [big, -big], [3e38, 1.0], [-3e38, 0.0], [big, 1e-30]]
    check(torch.tensor(values))
    assert grid.decode(packed(torch.tensor([[1e-45, 0.0]]))[0], 2).count_nonzero() == 0  # below half a step of 2**-126


@settings(deadline=None, max_examples=300)
@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=9))
def test_any_row(values: list[float]) -> None:
    check(torch.tensor([values]))
    check(torch.tensor([[*values, 0.0]], dtype=torch.float64))


def test_rows_of_zeros_have_scale_one() -> None:
    rows, wrong = packed(torch.zeros(3, 5))
    assert wrong == 0 and torch.equal(rows[:, -8:].view(torch.float32), torch.tensor([[1.0, 0.0]] * 3))
    assert rows[:, :-8].count_nonzero() == 0


def test_what_no_grid_holds_is_counted() -> None:
    nan, inf = float("nan"), float("inf")
    weight = torch.tensor([[1.0, 2.0], [nan, 0.0], [0.0, inf], [3.4e38, 1.0], [-3e38, 3e38], [1e-40, 1e-45]])
    assert packed(weight)[1] == 3  # 3.4e38 alone still fits; -3e38 with 3e38 does not
    assert grid.not_finite(weight) == 2 and grid.not_finite(weight[:1]) == 0 and grid.not_finite(-weight) == 2
    assert packed(torch.tensor([[1e300, 0.0], [1e30, 0.0]], dtype=torch.float64))[1] == 1
    top = torch.tensor([[-60192.0, 65504.0]])
    assert packed(top)[1] == 0 and packed(top.half())[1] == 1  # the end of the grid would be infinite as float16


def test_codes_survive_being_read_and_written() -> None:
    torch.manual_seed(0)
    weight = torch.randn(500, 13) * torch.logspace(-38, 37, 500)[:, None]
    rows, wrong = packed(weight)
    assert wrong == 0
    again = rows.clone()
    read = grid.decode(rows, 13)
    read[:, ::2] = 0
    assert grid.encode_(again, read) == 0
    assert torch.equal(again[:, 1:13:2], rows[:, 1:13:2]) and torch.equal(again[:, 13:], rows[:, 13:])
    zero = scale_and_zero(rows)[1]
    assert torch.equal(again[:, 0:13:2].double(), zero[:, None].expand(500, 7))
    assert grid.encode_(again, read.index_fill(0, torch.tensor([7, 9]), float("nan"))) == 2


def test_rows_are_those_of_fbgemm() -> None:
    """FBGEMM's own encoder fills the same layout, and what it wrote is read the same way."""
    weight = torch.rand(50, 8) + 1
    theirs = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weight)
    ours, _ = packed(weight)
    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
    assert torch.allclose(grid.decode(theirs, 8), weight, atol=1 / 255)
    assert torch.equal(torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(ours), grid.decode(ours, 8))


@pytest.mark.parametrize("rows", [0, 1, 5, 1000])
@pytest.mark.parametrize("columns", [1, 7, 1 << 17, 1 << 19])
def test_chunks_cover_a_table_once(rows: int, columns: int) -> None:
    seen = [row for part in grid.chunks(rows, columns) for row in range(part.start, part.stop)]
    assert seen == list(range(rows))
    assert all((part.stop - part.start) * columns <= max(columns, 1 << 18) for part in grid.chunks(rows, columns))
