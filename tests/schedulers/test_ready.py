"""Do the ready schedulers write what their curves say, when it is due, whatever happened before?"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_sparse.schedulers import curves
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.schedulers.ready import (
    ConstantDataScheduler,
    CosineDataScheduler,
    CubicDataScheduler,
    ExponentialDataScheduler,
    LambdaDataScheduler,
    LinearDataScheduler,
    OneShotDataScheduler,
)
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from dist_sparse.sparsifiers.norm import DataNormSparsifier

GROWING: dict[Any, curves.Curve] = {
    LinearDataScheduler: curves.linear,
    CubicDataScheduler: curves.cubic,
    CosineDataScheduler: curves.cosine,
    ExponentialDataScheduler: curves.exponential,
}


class Counting(BaseDataSparsifier):
    """Notes the level with which each mask update ran."""

    def update_mask(self, name: str, data: Tensor, sparsity_level: float, **config: Any) -> None:
        self.__dict__.setdefault("updates", []).append((name, sparsity_level))


def sparsifier_of(*names: str) -> Any:
    return Counting([(name, torch.ones(2, 2)) for name in names], sparsity_level=0.5)


def level_of(sparsifier: Any, name: str = "w") -> float:
    level: float = sparsifier.data_groups[name]["sparsity_level"]
    return level


def run(sparsifier: Any, scheduler: BaseDataScheduler, steps: int) -> list[tuple[float, bool]]:
    """The training loop; what is in force for the sparsifier's step at each step."""
    seen = []
    for _ in range(steps):
        seen.append((level_of(sparsifier), sparsifier.enable_mask_update))
        sparsifier.step()
        scheduler.step()
    return seen


class TestLoop:
    @pytest.mark.parametrize("kind", list(GROWING), ids=lambda kind: kind.__name__)
    def test_value_and_flag_at_each_step(self, kind: Any) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = kind(sparsifier, final=0.8, begin=3, end=10, every=3)
        seen = run(sparsifier, scheduler, 14)
        due = [3, 6, 9, 10]
        assert [step for step, (_, flag) in enumerate(seen) if flag] == due
        for step, (level, _) in enumerate(seen):
            last = max((earlier for earlier in due if earlier <= step), default=None)
            assert level == (0.0 if last is None else GROWING[kind](last, 0.0, 0.8, 3, 10))
        assert seen[-1][0] == 0.8
        assert [level for _, level in sparsifier.updates] == [seen[step][0] for step in due]

    def test_constant_goes_on_for_ever(self) -> None:
        sparsifier = sparsifier_of("w")
        seen = run(sparsifier, ConstantDataScheduler(sparsifier, final=0.7, initial=0.1, begin=2, every=2), 9)
        assert [level for level, _ in seen] == [0.1] * 2 + [0.7] * 7
        assert [step for step, (_, flag) in enumerate(seen) if flag] == [2, 4, 6, 8]

    def test_constant_with_an_end(self) -> None:
        sparsifier = sparsifier_of("w")
        seen = run(sparsifier, ConstantDataScheduler(sparsifier, final=0.7, end=3, every=2), 9)
        assert [step for step, (_, flag) in enumerate(seen) if flag] == [0, 2, 3]

    def test_one_shot(self) -> None:
        sparsifier = sparsifier_of("w")
        seen = run(sparsifier, OneShotDataScheduler(sparsifier, final=0.7, begin=4), 9)
        assert [level for level, _ in seen] == [0.0] * 4 + [0.7] * 5
        assert [step for step, (_, flag) in enumerate(seen) if flag] == [4]

    def test_lambda_is_called_for_due_steps_alone(self) -> None:
        asked: list[int] = []

        def fn(step: int) -> float:
            asked.append(step)
            return step / 100

        sparsifier = sparsifier_of("w")
        scheduler = LambdaDataScheduler(sparsifier, fn=fn, initial=0.05, begin=2, end=9, every=3)
        seen = run(sparsifier, scheduler, 12)
        assert asked == [2, 5, 8, 9]
        assert [level for level, _ in seen] == [0.05, 0.05, 0.02, 0.02, 0.02, 0.05, 0.05, 0.05, 0.08, 0.09, 0.09, 0.09]

    def test_another_parameter(self) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = LambdaDataScheduler(sparsifier, "shape", fn=lambda step: (1, step + 1))
        assert sparsifier.data_groups["w"] == {"sparsity_level": 0.5, "shape": (1, 1)}
        assert scheduler.base_param == {"w": None}
        sparsifier.step()
        scheduler.step()
        assert scheduler.get_last_param() == {"w": (1, 2)}
        linear = LinearDataScheduler(sparsifier_of("w"), "temperature", final=5.0, initial=-5.0, end=2)
        assert linear.get_last_param() == {"w": -5.0}

    @pytest.mark.parametrize("begin, due", [(0, True), (1, False)])
    def test_construction_puts_step_0_in_force(self, begin: int, due: bool) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = CubicDataScheduler(sparsifier, final=0.8, initial=0.2, begin=begin, end=10)
        assert scheduler.last_epoch == 0 and scheduler.base_param == {"w": 0.5}
        assert level_of(sparsifier) == 0.2 and sparsifier.enable_mask_update is due

    def test_a_step_that_is_not_due_writes_nothing(self) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = CubicDataScheduler(sparsifier, final=0.8, begin=5, end=10)
        sparsifier.data_groups["w"]["sparsity_level"] = 0.123
        sparsifier.step()
        scheduler.step()
        assert level_of(sparsifier) == 0.123 and not sparsifier.enable_mask_update

    def test_names_added_later_are_scheduled(self) -> None:
        sparsifier = sparsifier_of()
        scheduler = CubicDataScheduler(sparsifier, final=0.8, end=4)
        sparsifier.add_data("w", torch.ones(2, 2))
        run(sparsifier, scheduler, 4)
        assert level_of(sparsifier) == 0.8


class TestByName:
    def test_later_globs_win(self) -> None:
        sparsifier = sparsifier_of("user_id", "user_age", "item_id", "other")
        final = {"*_id": 0.9, "user_*": 0.4, "user_id": 0.7}
        scheduler = ConstantDataScheduler(sparsifier, final=final)
        assert scheduler.get_last_param() == {"user_id": 0.7, "user_age": 0.4, "item_id": 0.9, "other": 0.5}
        assert scheduler.get_schedule_param() == {"user_id": 0.7, "user_age": 0.4, "item_id": 0.9}

    def test_functions_by_name(self) -> None:
        sparsifier = sparsifier_of("a", "b")
        LambdaDataScheduler(sparsifier, fn={"*": lambda step: 0.75, "a": lambda step: 0.25})
        assert [level_of(sparsifier, name) for name in "ab"] == [0.25, 0.75]

    def test_what_matches_nothing_is_refused(self) -> None:
        sparsifier = sparsifier_of("user_id")
        with pytest.raises(ValueError, match=r"\['itme_\*'\].*\['user_id'\]"):
            CubicDataScheduler(sparsifier, final={"*": 0.5, "itme_*": 0.9}, end=4)
        assert level_of(sparsifier, "user_id") == 0.5 and "step" not in vars(sparsifier)

    def test_what_is_squashed_later_is_left_alone(self) -> None:
        sparsifier: Any = DataNormSparsifier([("b", torch.randn(8, 4))], sparse_block_shape=(1, 4))
        sparsifier.add_model(torch.nn.ModuleDict({"a": torch.nn.EmbeddingBag(8, 4)}))
        scheduler = LinearDataScheduler(sparsifier, final={"a": 0.25, "b": 0.5}, end=2)
        functions = {"a": lambda step: 0.25, "b": lambda step: 0.5}
        other = LambdaDataScheduler(sparsifier, "other", fn=functions)
        sparsifier.squash_mask(names=["a"])
        for _ in range(2):
            sparsifier.step()
            scheduler.step()
            other.step()
        assert scheduler.get_last_param() == {"b": 0.5} and other.get_last_param() == {"b": 0.5}
        with pytest.raises(ValueError, match=r"\['a'\]"):
            LinearDataScheduler(sparsifier, final={"a": 0.25, "b": 0.5}, end=2)

    def test_a_state_may_name_what_has_been_squashed(self) -> None:
        saved = ConstantDataScheduler(sparsifier_of("a", "b"), final={"a": 0.25, "b": 0.5}).state_dict()
        sparsifier = sparsifier_of("b")
        scheduler = ConstantDataScheduler(sparsifier, final=0.5)
        with pytest.warns(UserWarning, match=r"\['a'\] match data that the sparsifier had .* now: \['b'\]"):
            scheduler.load_state_dict(saved)
        assert scheduler.get_last_param() == {"b": 0.5}
        with pytest.raises(ValueError, match=r"Invalid names or globs \['c'\]"):
            scheduler.load_state_dict({**saved, "final": {"b": 0.5, "c": 0.5}})


class TestInts:
    """Keys that take ints, such as ``zeros_per_block``, can be scheduled by a curve."""

    def test_ints_stay_ints_rounded_half_to_even(self) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = LinearDataScheduler(sparsifier, "zeros", final=4, begin=1, end=9)
        seen = []
        for _ in range(11):
            seen.append(sparsifier.data_groups["w"]["zeros"])
            sparsifier.step()
            scheduler.step()
        assert seen == [0, 0, 0, 1, 2, 2, 2, 3, 4, 4, 4]
        assert all(type(value) is int for value in seen)

    @pytest.mark.parametrize("plan", [{"final": 4.0}, {"final": 4, "initial": 0.0}, {"final": {"*": 4.0}}])
    def test_a_float_at_either_end_makes_floats(self, plan: dict[str, Any]) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = LinearDataScheduler(sparsifier, "temperature", begin=1, end=9, **plan)
        assert type(sparsifier.data_groups["w"]["temperature"]) is float
        for _ in range(2):
            sparsifier.step()
            scheduler.step()
        assert scheduler.get_last_param() == {"w": 0.5}

    def test_levels_are_floats(self) -> None:
        sparsifier = sparsifier_of("w")
        run(sparsifier, LinearDataScheduler(sparsifier, final=1, initial=0, end=4), 1)
        assert level_of(sparsifier) == 0.25

    def test_zeros_per_block(self) -> None:
        sparsifier = DataNormSparsifier([("w", torch.randn(10, 8))], sparsity_level=1.0, sparse_block_shape=(1, 4))
        scheduler = LinearDataScheduler(sparsifier, "zeros_per_block", final=3, end=6, every=2)
        removed = []
        for _ in range(7):
            sparsifier.step()
            removed.append(int((sparsifier.get_mask("w") == 0).sum()))
            scheduler.step()
        assert removed == [0, 0, 20, 20, 40, 40, 60]


class TestRefused:
    @pytest.mark.parametrize("kind", list(GROWING), ids=lambda kind: kind.__name__)
    @pytest.mark.parametrize(
        "plan, wrong",
        [
            ({"final": 1.1}, r"final=1.1: .*\[0, 1\]"),
            ({"final": -0.1}, r"final=-0.1: .*\[0, 1\]"),
            ({"final": {"w": 2}}, r"final\['w'\]=2: .*\[0, 1\]"),
            ({"final": float("nan")}, "final=nan: must be a finite number"),
            ({"final": "0.5"}, "final='0.5': must be a finite number"),
            ({"final": True}, "final=True: must be a finite number"),
            ({"initial": 1.5}, r"initial=1.5: .*\[0, 1\]"),
            ({"begin": 11}, "end=10: must be an int >= begin=11"),
            ({"begin": 0.5}, "begin=0.5: must be an int"),
            ({"begin": -1}, "begin=-1: must be an int >= 0"),
            ({"end": None}, "end=None: .* must have an end"),
            ({"end": 10.0}, "end=10.0: must be an int"),
            ({"every": 0}, "every=0: must be an int >= 1"),
            ({"every": 1.0}, "every=1.0: must be an int"),
        ],
    )
    def test_bad_plans(self, kind: Any, plan: dict[str, Any], wrong: str) -> None:
        sparsifier = sparsifier_of("w")
        with pytest.raises(ValueError, match=wrong):
            kind(sparsifier, **{"final": 0.8, "end": 10, **plan})
        assert level_of(sparsifier) == 0.5 and "step" not in vars(sparsifier)

    def test_exponential_never_ends_at_one(self) -> None:
        with pytest.raises(ValueError, match="final=1: must be < 1"):
            ExponentialDataScheduler(sparsifier_of("w"), final=1, end=10)

    def test_other_parameters_have_other_ranges(self) -> None:
        CubicDataScheduler(sparsifier_of("w"), "temperature", final=40, initial=-3, end=10)

    def test_lambda_levels_are_checked_when_they_come(self) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = LambdaDataScheduler(sparsifier, fn=lambda step: 0.9 + step / 10)
        run(sparsifier, scheduler, 1)
        with pytest.raises(ValueError, match=r"fn\(2\) of 'w'=1.1: .*\[0, 1\]"):
            scheduler.step()
        assert scheduler.last_epoch == 1 and level_of(sparsifier) == 1.0

    def test_not_a_sparsifier(self) -> None:
        with pytest.raises(TypeError, match="Tensor"):
            CubicDataScheduler(torch.ones(2), final=0.8, end=10)  # type: ignore[arg-type]


MAKERS: list[Callable[..., Any]] = [
    lambda sparsifier, **plan: ConstantDataScheduler(sparsifier, final=0.8, **plan),
    lambda sparsifier, end=None, every=1, **plan: OneShotDataScheduler(sparsifier, final=0.8, **plan),
    *[lambda sparsifier, kind=kind, **plan: kind(sparsifier, final={"*": 0.3, "w": 0.8}, **plan) for kind in GROWING],
    lambda sparsifier, **plan: LambdaDataScheduler(sparsifier, fn=lambda step: step / 200, **plan),
]


class TestResume:
    @settings(max_examples=100, deadline=None)
    @given(
        st.sampled_from(MAKERS),
        st.fixed_dictionaries({"begin": st.integers(0, 10), "end": st.integers(10, 25), "every": st.integers(1, 8)}),
        st.integers(0, 30),
    )
    def test_at_any_step_by_one_integer_or_by_state(self, make: Any, plan: dict[str, int], cut: int) -> None:
        whole = sparsifier_of("w", "x")
        scheduler = make(whole, **plan)
        run(whole, scheduler, cut)
        saved = scheduler.state_dict()
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)

        by_number = sparsifier_of("w", "x")
        numbered = make(by_number, last_epoch=scheduler.last_epoch - 1, **plan)
        by_state = sparsifier_of("w", "x")
        stated = make(by_state, **plan)
        stated.load_state_dict(torch.load(file, weights_only=True))
        assert stated.state_dict() == saved

        expected = run(whole, scheduler, 12)
        assert run(by_number, numbered, 12) == expected
        assert run(by_state, stated, 12) == expected
        assert whole.data_groups["x"] == by_number.data_groups["x"] == by_state.data_groups["x"]

    def test_loading_brings_the_plan_too(self) -> None:
        first = CubicDataScheduler(sparsifier_of("w"), final=0.8, begin=1, end=10, every=2)
        sparsifier = sparsifier_of("w")
        other = CubicDataScheduler(sparsifier, final=0.5, end=100)
        other.load_state_dict(first.state_dict())
        assert (other.final, other.begin, other.end, other.every) == (0.8, 1, 10, 2)
        assert sparsifier.enable_mask_update is False

    def test_a_bad_state_changes_nothing(self) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = CubicDataScheduler(sparsifier, final=0.8, end=10)
        before = scheduler.state_dict()
        with pytest.raises(ValueError, match="every=0"):
            scheduler.load_state_dict({**before, "every": 0, "last_epoch": 7})
        assert scheduler.state_dict() == before and scheduler.data_sparsifier is sparsifier

    def test_functions_are_not_state(self) -> None:
        scheduler = LambdaDataScheduler(sparsifier_of("w"), fn=lambda step: 0.5)
        assert "fn" not in scheduler.state_dict()
        scheduler.load_state_dict(scheduler.state_dict())
        assert scheduler.fn(0) == 0.5  # type: ignore[operator]

    @pytest.mark.filterwarnings("ignore:The step of the data sparsifier has been replaced")  # copies are not wrapped
    def test_copies_go_on_alone(self) -> None:
        scheduler = CubicDataScheduler(sparsifier_of("w"), final=0.8, end=10)
        twin = copy.deepcopy(scheduler)
        run(twin.data_sparsifier, twin, 10)
        assert level_of(twin.data_sparsifier) == 0.8 and level_of(scheduler.data_sparsifier) == 0.0


class TestSeveralOnOneSparsifier:
    def test_due_when_any_is(self) -> None:
        sparsifier = sparsifier_of("a", "b")
        first = LinearDataScheduler(sparsifier, final={"a": 0.5}, begin=2, end=6, every=4)
        second = LinearDataScheduler(sparsifier, final={"b": 0.7}, begin=3, end=7, every=2)
        flags = []
        for _ in range(10):
            flags.append(sparsifier.enable_mask_update)
            sparsifier.step()
            first.step()
            second.step()
        assert [step for step, flag in enumerate(flags) if flag] == [2, 3, 5, 6, 7]
        assert [level_of(sparsifier, name) for name in "ab"] == [0.5, 0.7]

    def test_a_scheduler_that_is_gone_has_no_say(self) -> None:
        sparsifier = sparsifier_of("w")
        ConstantDataScheduler(sparsifier, final=0.5)
        second = CubicDataScheduler(sparsifier, final=0.8, begin=5, end=10)
        assert run(sparsifier, second, 6)[:5] == [(0.0, False)] * 5

    @pytest.mark.parametrize("still_stepped", [True, False])
    def test_one_that_has_arrived_or_is_not_stepped_any_more_has_no_say(self, still_stepped: bool) -> None:
        """At its end it is due, and its step count stays there for ever."""
        sparsifier = sparsifier_of("w")
        first = LinearDataScheduler(sparsifier, final=0.5, end=3)
        run(sparsifier, first, 3)
        assert sparsifier.enable_mask_update and first.last_epoch == 3
        second = ConstantDataScheduler(sparsifier, final=0.8, initial=0.5, begin=20, every=20)
        due = []
        for step in range(45):
            if sparsifier.enable_mask_update:
                due.append(step)
            sparsifier.step()
            if still_stepped:
                first.step()
            second.step()
        assert due == [0, 20, 40]  # at 0 the first is still due, for it has stepped since the sparsifier did

    def test_users_own_have_a_say_when_they_step(self) -> None:
        class Once(BaseDataScheduler):
            def get_schedule_param(self) -> dict[str, float]:
                return {"b": 0.1}

        sparsifier = sparsifier_of("a", "b")
        own = Once(sparsifier, "sparsity_level")
        ready = LinearDataScheduler(sparsifier, final={"a": 0.5}, begin=5, end=5)
        flags = []
        for step in range(7):
            flags.append(sparsifier.enable_mask_update)
            sparsifier.step()
            if step == 1:
                own.step()
            ready.step()
        assert flags == [True, False, True, False, False, True, False]

    def test_fast_forward_one_after_the_other(self) -> None:
        sparsifier = sparsifier_of("a", "b")
        both = [LinearDataScheduler(sparsifier, final={"a": 0.5}, end=9, every=3)]
        both.append(LinearDataScheduler(sparsifier, final={"b": 0.5}, end=9, every=4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that the sparsifier has not stepped
            for scheduler in both:
                for _ in range(3):
                    scheduler.step()
        assert sparsifier.enable_mask_update
