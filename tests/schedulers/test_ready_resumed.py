"""Ready schedulers that are resumed, copied, or several on one sparsifier write the same values."""

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

from dist_sparse.schedulers import (
    ConstantDataScheduler,
    CubicDataScheduler,
    LambdaDataScheduler,
    LinearDataScheduler,
    OneShotDataScheduler,
)
from dist_sparse.schedulers.base import BaseDataScheduler
from tests.schedulers.loop import GROWING, level_of, run, sparsifier_of

MAKERS: list[Callable[..., Any]] = [
    lambda sparsifier, **plan: ConstantDataScheduler(sparsifier, final=0.8, **plan),
    lambda sparsifier, end=None, every=1, **plan: OneShotDataScheduler(
        sparsifier, final=0.8, **plan
    ),
    *[
        lambda sparsifier, kind=kind, **plan: kind(sparsifier, final={"*": 0.3, "w": 0.8}, **plan)
        for kind in GROWING
    ],
    lambda sparsifier, **plan: LambdaDataScheduler(sparsifier, fn=lambda step: step / 200, **plan),
]


class TestResume:
    @settings(max_examples=100, deadline=None)
    @given(
        st.sampled_from(MAKERS),
        st.fixed_dictionaries(
            {"begin": st.integers(0, 10), "end": st.integers(10, 25), "every": st.integers(1, 8)}
        ),
        st.integers(0, 30),
    )
    def test_at_any_step_by_one_integer_or_by_state(
        self, make: Any, plan: dict[str, int], cut: int
    ) -> None:
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

    @pytest.mark.filterwarnings(
        "ignore:The step of the data sparsifier has been replaced"
    )  # copies are not wrapped
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
    def test_one_that_has_arrived_or_is_not_stepped_any_more_has_no_say(
        self, still_stepped: bool
    ) -> None:
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
        # At 0 the first is still due, for it has stepped since the sparsifier did.
        assert due == [
            0,
            20,
            40,
        ]

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
