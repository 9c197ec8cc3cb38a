"""`LambdaSL` and `CubicSL` give torch.ao's levels, and update masks only when a level changes."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dist_sparse import DataNormSparsifier
from dist_sparse.schedulers.torch_ao import CubicSL, LambdaSL
from tests.schedulers.loop import sparsifier_of

_REASON = (
    "this torch has no sparsity schedulers any more: NOTHING is compared with them; use torch 2.13"
    " for that"
)
pruning = pytest.importorskip("torch.ao.pruning", reason=_REASON, exc_type=ImportError)

LEVELS = st.floats(0, 1)
STEPS = 40


class _Still(pruning.BaseSparsifier):  # type: ignore[misc, name-defined]
    def update_mask(self, module: nn.Module, tensor_name: str, **config: Any) -> None:
        pass


def ours_of(levels: list[float]) -> Any:
    sparsifier = sparsifier_of(*(f"t{i}" for i in range(len(levels))))
    for config, level in zip(sparsifier.data_groups.values(), levels, strict=True):
        config["sparsity_level"] = level
    return sparsifier


def theirs_of(levels: list[float]) -> Any:
    sparsifier = _Still()
    config = [
        {"tensor_fqn": f"{i}.weight", "sparsity_level": level} for i, level in enumerate(levels)
    ]
    sparsifier.prepare(nn.Sequential(*(nn.Linear(1, 1) for _ in levels)), config)
    return sparsifier


def levels_by_step(sparsifier: Any, scheduler: Any, steps: int) -> list[tuple[list[float], bool]]:
    """The levels in force at each step, and whether masks may move there."""
    seen = []
    for _ in range(steps):
        seen.append((scheduler.get_last_sl(), sparsifier.enable_mask_update))
        sparsifier.step()
        scheduler.step()
    return seen


def only_at_changes(seen: list[tuple[list[float], bool]]) -> None:
    assert seen[0][1]
    for (before, _), (now, moved) in itertools.pairwise(seen):
        assert moved == (now != before)


def each(values: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[Any]:
    return values | st.lists(values, min_size=count, max_size=count)


@st.composite
def cubic_plans(draw: st.DrawFn) -> tuple[list[float], dict[str, Any]]:
    levels = draw(st.lists(LEVELS, min_size=1, max_size=3))
    number = st.integers(1, 12) | st.floats(1, 12)
    plan = {
        "init_sl": each(LEVELS, len(levels)),
        "init_t": each(st.integers(-5, 12) | st.floats(-5, 12), len(levels)),
        "delta_t": each(number, len(levels)),
        "total_t": each(number, len(levels)),
        "initially_zero": each(st.booleans(), len(levels)),
    }
    return levels, draw(st.fixed_dictionaries({}, optional=plan))


class TestCubic:
    @settings(max_examples=150, deadline=None)
    @given(cubic_plans())
    def test_torch_ao_s_levels_to_the_last_bit(
        self, given: tuple[list[float], dict[str, Any]]
    ) -> None:
        levels, plan = given
        ours, theirs = ours_of(levels), theirs_of(levels)
        scheduler, ancestor = CubicSL(ours, **plan), pruning.CubicSL(theirs, **plan)
        seen = levels_by_step(ours, scheduler, STEPS)
        only_at_changes(seen)
        assert [level for level, _ in seen] == [
            level for level, _ in levels_by_step(theirs, ancestor, STEPS)
        ]

    def test_what_they_look_like(self) -> None:
        sparsifier = ours_of([0.8])
        scheduler = CubicSL(sparsifier, init_t=3, delta_t=2, total_t=2)
        seen = levels_by_step(sparsifier, scheduler, 12)
        assert [round(level, 3) for (level,), _ in seen] == [
            0,
            0,
            0,
            0,
            0.463,
            0.7,
            0.788,
            *[0.8] * 5,
        ]
        assert [step for step, (_, moves) in enumerate(seen) if moves] == [0, 4, 5, 6, 7]
        assert len(sparsifier.updates) == 5

    def test_by_name(self) -> None:
        by_list, by_dict = ours_of([0.8, 0.6]), ours_of([0.8, 0.6])
        one = CubicSL(by_list, init_sl=[0.1, 0.2], init_t=[0, 3], total_t=1)
        other = CubicSL(
            by_dict, init_sl={"t1": 0.2, "t0": 0.1}, init_t={"t0": 0, "t1": 3}, total_t=1
        )
        assert levels_by_step(by_list, one, 20) == levels_by_step(by_dict, other, 20)

    def test_masks_follow(self) -> None:
        sparsifier = DataNormSparsifier(
            [("w", torch.randn(10, 10))], sparsity_level=0.8, sparse_block_shape=(1, 1)
        )
        scheduler = CubicSL(sparsifier, delta_t=1, total_t=4)
        removed = []
        for _ in range(6):
            sparsifier.step()
            removed.append(int((sparsifier.get_mask("w") == 0).sum()))
            scheduler.step()
        assert removed == [0, 46, 70, 79, 80, 80]

    def test_data_added_later_and_data_gone(self) -> None:
        table = nn.ModuleDict({"a": nn.EmbeddingBag(4, 4)})
        sparsifier = DataNormSparsifier([("w", torch.ones(4, 4))], sparsity_level=0.8)
        sparsifier.add_model(table)
        scheduler = CubicSL(sparsifier, delta_t=1, total_t=4)
        sparsifier.add_data("late", torch.ones(4, 4), sparsity_level=0.4)
        sparsifier.squash_mask(names=["a"])
        for _ in range(5):
            sparsifier.step()
            scheduler.step()
        assert scheduler.get_last_param() == {"w": 0.8, "late": 0.4}

    @pytest.mark.parametrize(
        "plan, message",
        [
            ({"init_sl": [0.1]}, r"init_sl of length 1.*'t0', 't1'"),
            ({"delta_t": (1, 2, 3)}, "delta_t of length 3"),
            ({"init_t": {"t0": 1}}, r"init_t for \['t0'\].*'t0', 't1'"),
            ({"init_t": {"t0": 1, "t1": 2, "t2": 3}}, "init_t for"),
            ({"init_sl": [0.1, 1.1]}, r"init_sl of 't1'=1.1.*\[0, 1\]"),
            ({"init_sl": -0.1}, r"init_sl of 't0'=-0.1.*\[0, 1\]"),
            ({"init_sl": "0.1"}, "init_sl of 't0'='0.1'.*must be a number"),
            ({"init_t": math.nan}, "init_t of 't0'=nan.*finite number"),
            ({"total_t": None}, "total_t of 't0'=None.*finite number"),
            ({"delta_t": True}, "delta_t of 't0'=True.*finite number"),
            ({"delta_t": 0.5, "total_t": 1}, r"delta_t=0.5, total_t=1 of 't0'.*>= 1"),
            ({"total_t": [5, 0]}, r"delta_t=10, total_t=0 of 't1'.*>= 1"),
            ({"total_t": -1}, r"total_t=-1.*>= 1"),
            ({"initially_zero": [True, 1]}, "initially_zero=1 of 't1'.*bool"),
        ],
    )
    def test_refused(self, plan: dict[str, Any], message: str) -> None:
        sparsifier = ours_of([0.5, 0.5])
        with pytest.raises(ValueError, match=message):
            CubicSL(sparsifier, **plan)
        assert "step" not in vars(sparsifier) and sparsifier.data_groups["t0"] == {
            "sparsity_level": 0.5
        }

    @pytest.mark.parametrize("level", [None, 1.5, -0.5, math.nan, "x"])
    def test_levels_it_can_not_end_at(self, level: Any) -> None:
        sparsifier = ours_of([0.5, level])
        with pytest.raises(ValueError, match="sparsity_level of 't1'="):
            CubicSL(sparsifier)
        assert "step" not in vars(sparsifier)


def no_factor(step: int) -> float:
    return 1.0


class TestLambda:
    @settings(max_examples=100, deadline=None)
    @given(st.lists(LEVELS, min_size=1, max_size=3), st.data())
    def test_torch_ao_s_levels_to_the_last_bit(
        self, levels: list[float], data: st.DataObject
    ) -> None:
        factors = st.lists(LEVELS | st.floats(-3, 3), min_size=1, max_size=5)
        tables = data.draw(each(factors, len(levels)))
        looked_up = [tables] if isinstance(tables[0], float) else tables
        functions: Any = [
            lambda step, table=table: table[step // 3 % len(table)] for table in looked_up
        ]
        if isinstance(tables[0], float):
            functions = functions[0]
        ours, theirs = ours_of(levels), theirs_of(levels)
        scheduler, ancestor = LambdaSL(ours, functions), pruning.LambdaSL(theirs, functions)
        seen = levels_by_step(ours, scheduler, STEPS)
        only_at_changes(seen)
        assert [level for level, _ in seen] == [
            level for level, _ in levels_by_step(theirs, ancestor, STEPS)
        ]

    def test_asked_once_a_step(self) -> None:
        asked: list[int] = []
        sparsifier = ours_of([0.5])
        scheduler = LambdaSL(sparsifier, lambda step: asked.append(step) or 1.0)  # type: ignore[func-returns-value]
        levels_by_step(sparsifier, scheduler, 3)
        assert asked == [0, 1, 2, 3]

    def test_by_name(self) -> None:
        sparsifier = ours_of([0.8, 0.5])
        scheduler = LambdaSL(sparsifier, {"t1": lambda step: step / 4, "t0": no_factor})
        assert levels_by_step(sparsifier, scheduler, 3)[2] == ([0.8, 0.25], True)

    def test_numpy_s_numbers(self) -> None:
        scheduler = LambdaSL(ours_of([0.5]), lambda step: np.float64(0.5))
        assert scheduler.get_last_sl() == [0.25] and type(scheduler.get_last_sl()[0]) is float

    @pytest.mark.parametrize(
        "functions, message",
        [
            ([no_factor], r"sl_lambda of length 1.*'t0', 't1'"),
            ((no_factor,) * 3, "sl_lambda of length 3"),
            ({"t0": no_factor}, r"sl_lambda for \['t0'\]"),
            ({"t*": no_factor}, r"sl_lambda for \['t\*'\]"),
            ([no_factor, 0.5], "sl_lambda=0.5 of 't1'.*function"),
            (lambda step: math.nan, r"0.5 \* sl_lambda\(0\) of 't0'=nan.*finite number"),
            (lambda step: math.inf, "of 't0'=inf.*finite number"),
        ],
    )
    def test_refused(self, functions: Any, message: str) -> None:
        sparsifier = ours_of([0.5, 0.5])
        with pytest.raises(ValueError, match=message):
            LambdaSL(sparsifier, functions)
        assert "step" not in vars(sparsifier) and sparsifier.data_groups["t0"] == {
            "sparsity_level": 0.5
        }

    @pytest.mark.parametrize("level", [None, math.nan, "x"])
    def test_levels_it_can_not_multiply(self, level: Any) -> None:
        sparsifier = ours_of([0.5, level])
        with pytest.raises(ValueError, match="sparsity_level of 't1'="):
            LambdaSL(sparsifier, no_factor)
        assert "step" not in vars(sparsifier)

    def test_the_example_of_torch_ao_s_documentation(self) -> None:
        """``epoch // 30`` leaves the unit interval: everything is removed there, and later steps
        work."""
        sparsifier = DataNormSparsifier([("w", torch.randn(10, 8))])
        scheduler = LambdaSL(sparsifier, lambda epoch: epoch // 30)
        removed = []
        for _ in range(100):
            sparsifier.step()
            removed.append(int((sparsifier.get_mask("w") == 0).sum()))
            scheduler.step()
        assert removed == [0] * 30 + [40] * 30 + [80] * 40
        assert scheduler.get_last_sl() == [1.5]

    def test_a_level_that_is_no_number_later_changes_nothing(self) -> None:
        sparsifier = ours_of([0.8])
        scheduler = LambdaSL(sparsifier, lambda step: step // 2 if step < 4 else math.nan)
        levels_by_step(sparsifier, scheduler, 3)
        before = scheduler.state_dict()
        with pytest.raises(ValueError, match=r"0.8 \* sl_lambda\(4\) of 't0'=nan"):
            scheduler.step()
        assert scheduler.state_dict() == before and before["last_epoch"] == 3
        assert sparsifier.data_groups["t0"]["sparsity_level"] == 0.8

    def test_functions_are_not_state(self) -> None:
        scheduler = LambdaSL(ours_of([0.5]), no_factor)
        assert "sl_lambda" not in scheduler.state_dict()
        scheduler.load_state_dict(scheduler.state_dict())
        assert scheduler.sl_lambda is no_factor


def test_not_a_sparsifier() -> None:
    for make in (CubicSL, lambda sparsifier: LambdaSL(sparsifier, no_factor)):
        with pytest.raises(TypeError, match="BaseDataSparsifier"):
            make(theirs_of([0.5]))


@pytest.mark.parametrize(
    "make",
    [
        lambda sparsifier: CubicSL(sparsifier, init_t=4, delta_t=1, total_t=1),
        lambda sparsifier: LambdaSL(sparsifier, lambda step: 1.0 if step > 4 else 0.0),
    ],
    ids=["cubic", "lambda"],
)
def test_what_is_written_by_hand_between_stays(make: Callable[..., Any]) -> None:
    sparsifier = ours_of([0.8])
    scheduler = make(sparsifier)
    sparsifier.data_groups["t0"]["sparsity_level"] = 0.3
    levels_by_step(sparsifier, scheduler, 4)
    assert sparsifier.data_groups["t0"]["sparsity_level"] == 0.3
    scheduler.step()
    assert sparsifier.data_groups["t0"]["sparsity_level"] == 0.8


MAKERS: list[Callable[..., Any]] = [
    lambda sparsifier, **more: CubicSL(
        sparsifier, init_sl=0.1, init_t=[4, 7], delta_t=2, total_t=3, **more
    ),
    lambda sparsifier, **more: CubicSL(
        sparsifier, init_t=6, total_t=1, initially_zero=True, **more
    ),
    lambda sparsifier, **more: LambdaSL(sparsifier, lambda step: step // 4 / 6, **more),
    lambda sparsifier, **more: LambdaSL(
        sparsifier, [lambda step: min(1.0, step / 9), no_factor], **more
    ),
]


class TestResume:
    @settings(max_examples=80, deadline=None)
    @given(st.sampled_from(MAKERS), st.integers(0, 20))
    def test_at_any_step_by_one_integer_or_by_state(
        self, make: Callable[..., Any], cut: int
    ) -> None:
        whole = ours_of([0.8, 0.6])
        scheduler = make(whole)
        levels_by_step(whole, scheduler, cut)
        saved = scheduler.state_dict()
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        numbered = make(ours_of([0.8, 0.6]), last_epoch=scheduler.last_epoch - 1)
        # Whatever its levels: those of the first run's construction are in the state.
        stated = make(ours_of([0.2, 0.3]))
        stated.load_state_dict(torch.load(file, weights_only=True))
        assert stated.state_dict() == saved
        expected = levels_by_step(whole, scheduler, 3)
        for resumed in (numbered, stated):
            assert levels_by_step(resumed.data_sparsifier, resumed, 3) == expected

    def test_as_torch_ao_by_one_integer(self) -> None:
        """From what the groups hold then, as theirs."""
        for ours, theirs in [
            (
                MAKERS[0],
                lambda s, **m: pruning.CubicSL(
                    s, init_sl=0.1, init_t=[4, 7], delta_t=2, total_t=3, **m
                ),
            ),
            (MAKERS[2], lambda s, **m: pruning.LambdaSL(s, lambda step: step // 4 / 6, **m)),
        ]:
            mine, other = ours_of([0.4, 0.6]), theirs_of([0.4, 0.6])
            scheduler, ancestor = ours(mine, last_epoch=5), theirs(other, last_epoch=5)
            assert scheduler.last_epoch == ancestor.last_epoch == 6
            got, expected = levels_by_step(mine, scheduler, 9), levels_by_step(other, ancestor, 9)
            assert [level for level, _ in got] == [level for level, _ in expected]

    def test_into_an_empty_sparsifier_that_was_loaded(self) -> None:
        source = DataNormSparsifier(
            [("a", torch.randn(4, 8)), ("b", torch.randn(4, 8))], sparsity_level=0.8
        )
        scheduler = LambdaSL(source, lambda step: step / 10)
        levels_by_step(source, scheduler, 4)
        target = DataNormSparsifier()
        resumed = LambdaSL(target, lambda step: step / 10)
        target.load_state_dict(source.state_dict())
        resumed.load_state_dict(scheduler.state_dict())
        assert levels_by_step(target, resumed, 5) == levels_by_step(source, scheduler, 5)
        assert all(torch.equal(target.get_mask(name), source.get_mask(name)) for name in "ab")

    @pytest.mark.parametrize("make", MAKERS)
    def test_a_bad_state_changes_nothing(self, make: Callable[..., Any]) -> None:
        sparsifier = ours_of([0.8, 0.6])
        scheduler = make(sparsifier)
        levels_by_step(sparsifier, scheduler, 5)
        before = scheduler.state_dict()
        with pytest.raises(ValueError, match="sparsity_level of 't0'=nan"):
            scheduler.load_state_dict({**before, "base_param": {"t0": math.nan, "t1": 0.5}})
        assert scheduler.state_dict() == before

    def test_a_state_of_torch_ao_s(self) -> None:
        """Its base levels count, not those that are here; no function gets into the next state."""
        factor = partial(pow, 0.9)
        for ours, theirs in [
            (lambda s: LambdaSL(s, factor), lambda s: pruning.LambdaSL(s, factor)),
            (
                CubicSL,
                lambda s: pruning.CubicSL(s, init_sl=0.1, init_t=[2, 3], delta_t=2, total_t=3),
            ),
        ]:
            other, mine = theirs_of([0.8, 0.6]), ours_of([0.2, 0.3])
            ancestor, scheduler = theirs(other), ours(mine)
            levels_by_step(other, ancestor, 4)
            scheduler.load_state_dict(ancestor.state_dict())
            assert scheduler.state_dict().keys() == ours(ours_of([0.2, 0.3])).state_dict().keys()
            got, expected = levels_by_step(mine, scheduler, 5), levels_by_step(other, ancestor, 5)
            assert [level for level, _ in got] == [level for level, _ in expected]
            before = scheduler.state_dict()
            with pytest.raises(ValueError, match="base_sl of length 1"):
                scheduler.load_state_dict({**ancestor.state_dict(), "base_sl": [0.5]})
            assert scheduler.state_dict() == before

    def test_a_state_of_other_names_warns(self) -> None:
        source = sparsifier_of("x[0]")
        state = CubicSL(source).state_dict()
        scheduler = CubicSL(sparsifier_of("y"))
        with pytest.warns(UserWarning, match="none that it has now"):
            scheduler.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CubicSL(source).load_state_dict(state)
