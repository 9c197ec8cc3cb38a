"""Ready schedulers write what their curves say at mask updates, and refuse invalid arguments."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from dist_sparse.schedulers import (
    ConstantDataScheduler,
    CubicDataScheduler,
    CurveDataScheduler,
    ExponentialDataScheduler,
    LambdaDataScheduler,
    LinearDataScheduler,
    OneShotDataScheduler,
    curves,
)
from dist_sparse.sparsifiers.score import DataNormSparsifier
from tests.schedulers.loop import GROWING, level_of, run, sparsifier_of


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
        seen = run(
            sparsifier,
            ConstantDataScheduler(sparsifier, final=0.7, initial=0.1, begin=2, every=2),
            9,
        )
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
        assert [level for level, _ in seen] == [
            0.05,
            0.05,
            0.02,
            0.02,
            0.02,
            0.05,
            0.05,
            0.05,
            0.08,
            0.09,
            0.09,
            0.09,
        ]

    def test_another_parameter(self) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = LambdaDataScheduler(sparsifier, "shape", fn=lambda step: (1, step + 1))
        assert sparsifier.data_groups["w"] == {"sparsity_level": 0.5, "shape": (1, 1)}
        assert scheduler.base_param == {"w": None}
        sparsifier.step()
        scheduler.step()
        assert scheduler.get_last_param() == {"w": (1, 2)}
        linear = LinearDataScheduler(
            sparsifier_of("w"), "temperature", final=5.0, initial=-5.0, end=2
        )
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


def steps_of(step: int, initial: float, final: float, begin: int, end: int | None) -> float:
    """A curve of a user's own, which needs no end."""
    return min(final, initial + (step - begin) / 10)


class TestOwnCurve:
    @pytest.mark.parametrize("kind", list(GROWING), ids=lambda kind: kind.__name__)
    def test_a_name_is_the_class_with_its_curve(self, kind: Any) -> None:
        plan: dict[str, Any] = {
            "final": {"*": 0.8},
            "initial": 0.1,
            "begin": 2,
            "end": 9,
            "every": 3,
        }
        named, general = sparsifier_of("w"), sparsifier_of("w")
        one, other = kind(named, **plan), CurveDataScheduler(general, curve=GROWING[kind], **plan)
        assert isinstance(one, CurveDataScheduler) and one.curve is other.curve
        assert run(named, one, 12) == run(general, other, 12)
        assert one.state_dict() == other.state_dict() and "curve" not in one.state_dict()

    def test_a_function_of_the_user(self) -> None:
        sparsifier = sparsifier_of("w")
        scheduler = CurveDataScheduler(sparsifier, curve=steps_of, final=0.3, begin=1, end=None)
        assert [level for level, _ in run(sparsifier, scheduler, 6)] == [
            0.0,
            0.0,
            0.1,
            0.2,
            0.3,
            0.3,
        ]
        twin = pickle.loads(pickle.dumps(scheduler))
        assert twin.curve is steps_of and twin.state_dict() == scheduler.state_dict()
        restored = CurveDataScheduler(sparsifier_of("w"), curve=steps_of, final=0.9, end=None)
        restored.load_state_dict(scheduler.state_dict())
        assert restored.get_last_param() == {"w": 0.3}

    def test_rules_of_the_curve_are_checked(self) -> None:
        with pytest.raises(
            ValueError, match="Invalid end=None: CurveDataScheduler must have an end"
        ):
            CurveDataScheduler(sparsifier_of("w"), curve=curves.cosine, final=0.5, end=None)
        with pytest.raises(ValueError, match="final=1: must be < 1"):
            CurveDataScheduler(sparsifier_of("w"), curve=curves.exponential, final=1, end=9)


class TestByName:
    def test_later_globs_win(self) -> None:
        sparsifier = sparsifier_of("user_id", "user_age", "item_id", "other")
        final = {"*_id": 0.9, "user_*": 0.4, "user_id": 0.7}
        scheduler = ConstantDataScheduler(sparsifier, final=final)
        assert scheduler.get_last_param() == {
            "user_id": 0.7,
            "user_age": 0.4,
            "item_id": 0.9,
            "other": 0.5,
        }
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
        saved = ConstantDataScheduler(
            sparsifier_of("a", "b"), final={"a": 0.25, "b": 0.5}
        ).state_dict()
        sparsifier = sparsifier_of("b")
        scheduler = ConstantDataScheduler(sparsifier, final=0.5)
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

    @pytest.mark.parametrize(
        "plan", [{"final": 4.0}, {"final": 4, "initial": 0.0}, {"final": {"*": 4.0}}]
    )
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
        sparsifier = DataNormSparsifier(
            [("w", torch.randn(10, 8))], sparsity_level=1.0, sparse_block_shape=(1, 4)
        )
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
            ({"final": float("nan")}, "final=nan: must be a number in"),
            ({"final": "0.5"}, r"final='0.5': must be one of 'untouched'"),
            ({"final": True}, "final=True: must be a number in"),
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
        sparsifier = sparsifier_of("w")
        scheduler = CubicDataScheduler(sparsifier, "temperature", final=40, initial=-3, end=10)
        assert scheduler.get_last_param() == {"w": -3}

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


@pytest.mark.parametrize("kind", [*GROWING, ConstantDataScheduler, OneShotDataScheduler])
def test_the_level_is_called_final(kind: Any) -> None:
    """Not ``level``, as in ``sparsify()``: the error names the right argument, of the class that
    was called."""
    sparsifier = sparsifier_of("w")
    says = rf"^{kind.__name__}\(\) has no argument level; see final"
    for plan in ({}, {"final": 0.8}):
        with pytest.raises(TypeError, match=says):
            kind(sparsifier, level=0.8, **plan)
    with pytest.raises(ValueError, match="Invalid final=None: must be a number"):
        kind(sparsifier, **({} if kind is OneShotDataScheduler else {"end": 4}))
    assert level_of(sparsifier) == 0.5
