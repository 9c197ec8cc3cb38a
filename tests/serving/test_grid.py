"""An 8- or 4-bit grid holds zero exactly, and every weight within half a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_sparse.serving.encodings import chunks, half_grid


def check(weight: Tensor, bits: int) -> None:
    """Everything that half_grid promises of a row."""
    scale, bias = half_grid(weight, bits).double().unbind(dim=1)
    zero = -bias / scale
    last = 2**bits - 1
    assert torch.equal(zero, zero.round()) and bool(((zero >= 0) & (zero <= last)).all())
    codes = (weight.double() / scale[:, None] + zero[:, None]).round().clamp(0, last)
    read = codes * scale[:, None] + bias[:, None]
    error = (read - weight.double()).abs()
    assert bool((error <= 0.5 * scale[:, None] * (1 + 1e-6)).all())
    assert bool((read[weight == 0] == 0).all())
    low, high = weight.double().amin(1).clamp(max=0), weight.double().amax(1).clamp(min=0)
    # Rounded up to 11 - bits significant bits, or to the smallest float16.
    tight = ((high - low) / last) * (1 + 2.0 ** -(10 - bits)) + 2.0**-24
    assert bool(((scale <= tight) | (high == low)).all())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("columns", [1, 3, 4, 64, 65])
def test_random_rows(bits: int, columns: int) -> None:
    torch.manual_seed(columns)
    weight = torch.randn(300, columns) * torch.logspace(-3, 3, 300)[:, None]
    weight[torch.rand(300, columns) < 0.5] = 0
    weight[:20], weight[20:40] = weight[:20].abs(), -weight[20:40].abs()
    weight[40:60] = 0
    check(weight, bits)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.floats(-(2.0**15), 2.0**15, width=32), min_size=1, max_size=9),
    st.sampled_from([8, 4]),
)
def test_any_row(values: list[float], bits: int) -> None:
    check(torch.tensor([values]), bits)


def test_rows_of_zeros_have_scale_one() -> None:
    assert torch.equal(half_grid(torch.zeros(3, 5), 8), torch.tensor([[1.0, 0.0]] * 3).half())


@pytest.mark.parametrize("rows", [0, 1, 5, 1000])
@pytest.mark.parametrize("columns", [1, 7, 1 << 17, 1 << 19])
def test_chunks_cover_a_table_once(rows: int, columns: int) -> None:
    seen = [row for part in chunks(rows, columns) for row in range(part.start, part.stop)]
    assert seen == list(range(rows))
    assert all(
        (part.stop - part.start) * columns <= max(columns, 1 << 18)
        for part in chunks(rows, columns)
    )
