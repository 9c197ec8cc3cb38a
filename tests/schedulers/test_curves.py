"""Values of the curves, and the steps of a window."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_sparse.schedulers import curves

GROWING = [curves.linear, curves.cubic, curves.cosine, curves.exponential]
ALL = [*GROWING, curves.constant]

levels = st.floats(0.0, 0.999)
windows = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)


def window(begin: Any, end: Any, every: Any) -> curves.Window:
    return curves.Window(begin=begin, end=end, every=every)


class TestDue:
    def test_begin_then_every_then_end_off_the_grid(self) -> None:
        assert [step for step in range(40) if window(5, 22, 4).updates(step)] == [
            5,
            9,
            13,
            17,
            21,
            22,
        ]

    def test_end_on_the_grid(self) -> None:
        assert [step for step in range(40) if window(4, 12, 4).updates(step)] == [4, 8, 12]

    def test_one_step_window(self) -> None:
        assert [step for step in range(40) if window(7, 7, 3).updates(step)] == [7]

    def test_no_end_is_for_ever(self) -> None:
        assert window(0, None, 10).updates(10**9) and not window(0, None, 10).updates(10**9 + 1)

    @given(st.integers(0, 120), windows, st.integers(1, 30), st.booleans())
    def test_last_due_is_the_latest_due_step(
        self, step: int, bounds: tuple[int, int], every: int, endless: bool
    ) -> None:
        begin, end = bounds[0], None if endless else bounds[1]
        due = [earlier for earlier in range(step + 1) if window(begin, end, every).updates(earlier)]
        assert window(begin, end, every).last_update(step) == (due[-1] if due else None)

    @pytest.mark.parametrize(
        "bounds, wrong",
        [
            ((-1, 5, 1), "begin=-1"),
            ((1.0, 5, 1), "begin=1.0"),
            ((True, 5, 1), "begin=True"),
            ((5, 4, 1), "end=4"),
            ((0, 4.0, 1), "end=4.0"),
            ((0, "4", 1), "end='4'"),
            ((0, 4, 0), "every=0"),
            ((0, 4, -2), "every=-2"),
            ((0, 4, 1.5), "every=1.5"),
            ((0, 4, None), "every=None"),
        ],
    )
    def test_invalid_windows_are_refused(self, bounds: tuple[Any, Any, Any], wrong: str) -> None:
        with pytest.raises(ValueError, match=f"Invalid {wrong}: must be"):
            window(*bounds)

    def test_windows_of_numpy_are_ints(self) -> None:
        found = window(np.int64(1), np.int32(5), np.uint8(2))
        assert found == window(1, 5, 2) and {type(part) for part in vars(found).values()} == {int}


class TestValues:
    @pytest.mark.parametrize("step", [100, 325, 550, 775, 1000])
    def test_equations(self, step: int) -> None:
        initial, final, begin, end = 0.1, 0.9, 100, 1000
        t = (step - begin) / (end - begin)
        expected = {
            curves.linear: initial + (final - initial) * t,
            curves.cubic: final + (initial - final) * (1 - t) ** 3,
            curves.cosine: final + (initial - final) * (1 + math.cos(math.pi * t)) / 2,
            curves.exponential: 1 - 0.9 * (0.1 / 0.9) ** t,
            curves.constant: final,
        }
        for curve in ALL:
            assert curve(step, initial, final, begin, end) == pytest.approx(
                expected[curve], abs=1e-12
            )

    def test_cubic_of_the_paper(self) -> None:
        # Zhu & Gupta 2017, eq. 1: s_f + (s_i - s_f) * (1 - (t - t_0) / (n * delta_t))**3
        n, delta, start = 7, 20, 40
        for t in range(start, start + n * delta + 1, delta):
            expected = 0.8 + (0.0 - 0.8) * (1 - (t - start) / (n * delta)) ** 3
            assert curves.cubic(t, 0.0, 0.8, start, start + n * delta) == pytest.approx(
                expected, abs=1e-12
            )

    def test_exponential_removes_the_same_fraction_of_what_is_left(self) -> None:
        kept = [1 - curves.exponential(step, 0.0, 0.8, 0, 10) for step in range(11)]
        fractions = [after / before for before, after in itertools.pairwise(kept)]
        assert fractions == pytest.approx([0.2**0.1] * 10)

    @given(levels, levels, windows, st.sampled_from(ALL))
    def test_ends_are_exact(
        self, initial: float, final: float, window: tuple[int, int], curve: curves.Curve
    ) -> None:
        begin, end = window
        assert curve(begin - 1, initial, final, begin, end) == initial
        assert curve(end, initial, final, begin, end) == final
        assert curve(end + 1000, initial, final, begin, end) == final
        if begin < end and curve in GROWING:
            assert curve(begin, initial, final, begin, end) == initial

    @given(levels, levels, windows, st.sampled_from(ALL))
    def test_never_goes_back_and_never_out(
        self, initial: float, final: float, window: tuple[int, int], curve: curves.Curve
    ) -> None:
        values = [curve(step, initial, final, *window) for step in range(window[1] + 3)]
        assert all(min(initial, final) <= value <= max(initial, final) for value in values)
        assert values == sorted(values, reverse=initial > final)

    @given(st.integers(0, 200), levels, levels, windows, st.sampled_from(ALL))
    def test_is_pure(
        self, step: int, initial: float, final: float, window: tuple[int, int], curve: curves.Curve
    ) -> None:
        assert curve(step, initial, final, *window) == curve(step, initial, final, *window)
