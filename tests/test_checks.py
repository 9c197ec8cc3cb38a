"""Arguments: what each check takes, returns and refuses."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dist_sparse.checks import choice, integer, level, name_list, number


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_integers_of_numpy_are_ints(value: Any) -> None:
    found = integer("every", value, least=1, most=3)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize(
    "value", [True, np.True_, 3.0, np.float32(3), "3", None, torch.tensor(3), 0, 4]
)
def test_no_integers(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^Invalid every=.*: must be an int in \[1, 3\]\.$"):
        integer("every", value, least=1, most=3)


def test_bounds_are_named() -> None:
    with pytest.raises(ValueError, match=r"^Invalid every=0: must be an int >= 1\.$"):
        integer("every", 0, least=1)
    with pytest.raises(ValueError, match=r"^Invalid lr=-1\.5: must be a finite number >= 0\.$"):
        number("lr", -1.5, least=0)
    with pytest.raises(ValueError, match=r"^Invalid lr='x': must be a finite number\.$"):
        number("lr", "x")


def test_numbers_keep_their_kind() -> None:
    assert number("lr", np.float32(0.5)) == 0.5 and type(number("lr", np.float32(0.5))) is float
    assert type(number("lr", np.int64(2))) is int
    assert number("lr", Fraction(1, 2)) == 0.5


@pytest.mark.parametrize(
    "value", [True, np.True_, float("nan"), float("inf"), 10**400, "1", None, 1j, torch.tensor(1.0)]
)
def test_no_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^Invalid lr="):
        number("lr", value)
    with pytest.raises(ValueError, match=r"^Invalid level=.*: must be a number in \[0, 1\]\.$"):
        level("level", value)


def test_levels() -> None:
    assert [level("level", value) for value in (0, 1, np.float16(0.5))] == [0.0, 1.0, 0.5]
    for value in (-1e-9, 1.0000001):
        with pytest.raises(ValueError, match="must be a number in"):
            level("level", value)


def test_choices() -> None:
    assert choice("norm", "l2", ("L1", "L2")) == choice("norm", "L2", ("L1", "L2")) == "L2"
    with pytest.raises(
        ValueError,
        match=r"^Invalid schedule='cubicc': .* 'cubic', 'linear'. Did you mean 'cubic'\?$",
    ):
        choice("schedule", "cubicc", ("cubic", "linear"))
    with pytest.raises(
        ValueError, match=r"^Invalid norm=2: must be one of 'L1', 'L2' or a number\.$"
    ):
        choice("norm", 2, ("L1", "L2"), " or a number")


def test_lists_of_names() -> None:
    assert name_list("include", None) == ()
    assert name_list("include", "user_*") == ("user_*",)
    assert name_list("include", ["a", "b"]) == name_list("include", ("a", "b")) == ("a", "b")
    for value in (3, ["a", 3], {"a": 1}, [None]):
        with pytest.raises(
            ValueError, match=r"^Invalid include=.*: must be a string or a sequence of strings\.$"
        ):
            name_list("include", value)
