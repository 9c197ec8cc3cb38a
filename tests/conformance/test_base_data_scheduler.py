"""`BaseDataScheduler` equals its ancestor, its bug aside.

What both must do runs against both (``library`` is "ours" or "ancestor").
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier

_REASON = (
    "this torch has no data scheduler any more: NOTHING is compared with the ancestor; use torch"
    " 2.13 for that"
)
sparsifiers = pytest.importorskip(
    "torch.ao.pruning._experimental.data_sparsifier", reason=_REASON, exc_type=ImportError
)
schedulers = pytest.importorskip(
    "torch.ao.pruning._experimental.data_scheduler", reason=_REASON, exc_type=ImportError
)


class _Still:
    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        pass


class _Adds:
    """Adds 0.5 to the level at every step."""

    last_epoch: int
    schedule_param: str
    data_sparsifier: Any

    def get_schedule_param(self) -> dict[str, float]:
        if self.last_epoch == 0:
            return {}
        return {
            name: config[self.schedule_param] + 0.5
            for name, config in self.data_sparsifier.data_groups.items()
        }


class OurSparsifier(_Still, BaseDataSparsifier):
    pass


class OurScheduler(_Adds, BaseDataScheduler):
    pass


class AncestorSparsifier(_Still, sparsifiers.BaseDataSparsifier):
    pass


class AncestorScheduler(_Adds, schedulers.BaseDataScheduler):
    pass


class Library(NamedTuple):
    sparsifier: Any
    scheduler: Any
    base: Any

    def make(self, **kwargs: Any) -> tuple[Any, Any]:
        sparsifier = self.sparsifier([("a", torch.ones(2, 2)), ("b", torch.ones(2, 2))], level=1.0)
        return sparsifier, self.scheduler(sparsifier, "level", **kwargs)


OURS = Library(OurSparsifier, OurScheduler, BaseDataScheduler)


@pytest.fixture(params=["ours", "ancestor"])
def library(request: pytest.FixtureRequest) -> Library:
    ancestor = Library(AncestorSparsifier, AncestorScheduler, schedulers.BaseDataScheduler)
    return {"ours": OURS, "ancestor": ancestor}[request.param]


class TestConstruction:
    @pytest.mark.parametrize(
        "not_a_sparsifier", [None, object(), torch.ones(2)], ids=["None", "object", "tensor"]
    )
    def test_wants_a_sparsifier(self, library: Library, not_a_sparsifier: Any) -> None:
        with pytest.raises(TypeError):
            library.scheduler(not_a_sparsifier, "level")

    def test_wants_get_schedule_param(self, library: Library) -> None:
        sparsifier = library.sparsifier([("a", torch.ones(2, 2))], level=1.0)
        with pytest.raises((NotImplementedError, TypeError)):
            library.base(sparsifier, "level")

    def test_attributes(self, library: Library) -> None:
        sparsifier, scheduler = library.make()
        assert scheduler.data_sparsifier is sparsifier
        assert scheduler.schedule_param == "level"
        assert scheduler.base_param == {"a": 1.0, "b": 1.0}
        assert scheduler.last_epoch == 0
        assert scheduler.state_dict()["_step_count"] == 1
        assert (
            scheduler.verbose is False
            and scheduler.state_dict()["_get_sp_called_within_step"] is False
        )
        assert scheduler.get_last_param() == {"a": 1.0, "b": 1.0}
        assert sparsifier.enable_mask_update is True

    def test_base_param_is_from_before_and_none_if_absent(self, library: Library) -> None:
        class Zeroes(library.base):  # type: ignore[misc, name-defined]
            def get_schedule_param(self) -> dict[str, float]:
                return {"a": 0.0}

        sparsifier = library.sparsifier([("a", torch.ones(2, 2))], level=1.0)
        assert Zeroes(sparsifier, "level").base_param == {"a": 1.0}
        other = Zeroes(sparsifier, "other")
        assert other.base_param == {"a": None} and other.get_last_param() == {"a": 0.0}
        assert sparsifier.data_groups["a"] == {"level": 0.0, "other": 0.0}

    @pytest.mark.parametrize("last_epoch", [-1, 0, 6])
    def test_last_epoch(self, library: Library, last_epoch: int) -> None:
        sparsifier, scheduler = library.make(last_epoch=last_epoch)
        assert scheduler.last_epoch == last_epoch + 1
        assert sparsifier.data_groups["a"]["level"] == (1.0 if last_epoch == -1 else 1.5)

    def test_is_silent(self, library: Library) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            library.make()


class TestStep:
    def test_writes_configs_and_no_masks(self, library: Library) -> None:
        sparsifier, scheduler = library.make()
        sparsifier.get_mask("a")[0] = 0
        sparsifier.step()
        assert scheduler.step() is None
        assert scheduler.last_epoch == 1 and scheduler.state_dict()["_step_count"] == 2
        assert {name: config["level"] for name, config in sparsifier.data_groups.items()} == {
            "a": 1.5,
            "b": 1.5,
        }
        assert scheduler.get_last_param() == {"a": 1.5, "b": 1.5}
        assert sparsifier.get_mask("a").tolist() == [[0, 0], [1, 1]]

    def test_names_left_out_keep_theirs(self, library: Library) -> None:
        class OnlyB(library.base):  # type: ignore[misc, name-defined]
            def get_schedule_param(self) -> dict[str, float]:
                return {"b": 9.0}

        sparsifier, _ = library.make()
        scheduler = OnlyB(sparsifier, "level")
        assert scheduler.get_last_param() == {"a": 1.0, "b": 9.0}

    def test_last_param_is_a_new_dict_each_step(self, library: Library) -> None:
        sparsifier, scheduler = library.make()
        first = scheduler.get_last_param()
        sparsifier.step()
        scheduler.step()
        assert first == {"a": 1.0, "b": 1.0}

    def test_names_added_later_take_part(self, library: Library) -> None:
        sparsifier, scheduler = library.make()
        sparsifier.add_data("late", torch.ones(2, 2), level=3.0)
        sparsifier.step()
        scheduler.step()
        assert sparsifier.data_groups["late"]["level"] == 3.5
        assert scheduler.get_last_param()["late"] == 3.5 and "late" not in scheduler.base_param

    def test_flag_while_asking(self, library: Library) -> None:
        seen = []

        class Asks(library.base):  # type: ignore[misc, name-defined]
            def get_schedule_param(self) -> dict[str, float]:
                seen.append((self._get_sp_called_within_step, self.last_epoch))
                return {}

        sparsifier = library.sparsifier()
        scheduler = Asks(sparsifier, "level")
        sparsifier.step()
        scheduler.step()
        assert (
            seen == [(True, 0), (True, 1)]
            and scheduler.state_dict()["_get_sp_called_within_step"] is False
        )

    def test_enables_the_sparsifier_again(self, library: Library) -> None:
        sparsifier, scheduler = library.make()
        sparsifier.enable_mask_update = False
        sparsifier.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a disabled one counts too
            scheduler.step()
        assert sparsifier.enable_mask_update is True

    def test_verbose(self, library: Library, capsys: pytest.CaptureFixture[str]) -> None:
        sparsifier, scheduler = library.make(verbose=True)
        sparsifier.step()
        scheduler.step()
        printed = capsys.readouterr().out
        assert "level" in printed and "a" in printed and "1.5" in printed
        quiet_sparsifier, quiet = library.make()
        quiet_sparsifier.step()
        quiet.step()
        assert capsys.readouterr().out == ""

    def test_a_second_scheduler_needs_a_step_of_the_sparsifier_of_its_own(
        self, library: Library
    ) -> None:
        sparsifier, _ = library.make()
        sparsifier.step()
        step = sparsifier.step
        second = library.scheduler(sparsifier, "level")
        assert sparsifier.step == step
        with pytest.warns(UserWarning, match="before"):
            second.step()


class TestOrder:
    def test_right_order_is_silent(self, library: Library) -> None:
        sparsifier, scheduler = library.make()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                sparsifier.step()
                scheduler.step()

    def test_scheduler_first_warns_once(self, library: Library) -> None:
        _, scheduler = library.make()
        with pytest.warns(UserWarning) as caught:
            scheduler.step()
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()

    def test_replaced_step_warns(self, library: Library) -> None:
        sparsifier, scheduler = library.make()
        sparsifier.step()
        sparsifier.step = lambda: None
        with pytest.warns(UserWarning) as caught:
            scheduler.step()
        assert len(caught) == 1


class TestState:
    def test_every_attribute_but_the_sparsifier(self, library: Library) -> None:
        _, scheduler = library.make()
        scheduler.own = [1, 2]
        state = scheduler.state_dict()
        assert set(state) == set(vars(scheduler)) - {"data_sparsifier"}
        assert state == {
            "schedule_param": "level",
            "base_param": {"a": 1.0, "b": 1.0},
            "last_epoch": 0,
            "_step_count": 1,
            "verbose": False,
            "_get_sp_called_within_step": False,
            "_last_param": {"a": 1.0, "b": 1.0},
            "own": [1, 2],
        }

    def test_loading_leaves_the_sparsifier_alone(self, library: Library) -> None:
        sparsifier, scheduler = library.make()
        for _ in range(3):
            sparsifier.step()
            scheduler.step()
        scheduler.own = 7
        file = io.BytesIO()
        torch.save(scheduler.state_dict(), file)
        file.seek(0)
        other_sparsifier, other = library.make()
        other.load_state_dict(torch.load(file, weights_only=True))
        assert other.data_sparsifier is other_sparsifier
        assert other.state_dict() == scheduler.state_dict() and other.own == 7
        assert other_sparsifier.data_groups["a"]["level"] == 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.step()
        assert other.last_epoch == 4 and other_sparsifier.data_groups["a"]["level"] == 1.5

    def test_resumed_with_last_epoch(self, library: Library) -> None:
        sparsifier, scheduler = library.make()
        sparsifier.step()
        scheduler.step()
        resumed = library.scheduler(sparsifier, "level", last_epoch=scheduler.last_epoch)
        assert resumed.base_param == {"a": 1.5, "b": 1.5}  # what the config holds by now
        assert sparsifier.data_groups["a"]["level"] == 2.0  # and one more step

    def test_no_reference_cycle(self, library: Library) -> None:
        gc.collect()
        gc.disable()
        try:
            sparsifier, scheduler = library.make()
            sparsifier.step()
            scheduler.step()
            watched = weakref.ref(sparsifier), weakref.ref(scheduler)
            del scheduler, sparsifier
            assert [ref() for ref in watched] == [None, None]
        finally:
            gc.enable()

    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
        ids=["deepcopy", "pickle"],
    )
    def test_scheduled_sparsifiers_are_copied_unwrapped(
        self, library: Library, copied: Any
    ) -> None:
        sparsifier, scheduler = library.make()
        sparsifier.step()
        scheduler.step()
        twin = copied(sparsifier)
        assert "step" not in vars(twin) and not hasattr(twin.step, "_with_counter")
        assert dict(twin.data_groups) == dict(sparsifier.data_groups)
        twin_scheduler = library.scheduler(twin, "level")
        twin.enable_mask_update = True
        twin.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # steps of a copy are its own
            twin_scheduler.step()
        assert twin_scheduler.base_param == {"a": 1.5, "b": 1.5}

    def test_repr(self, library: Library) -> None:
        text = repr(library.make()[1])
        assert (
            text.startswith(library.scheduler.__name__) and "level" in text and "'a': 1.0" in text
        )


class TestAllOrNothing:
    """Bug 18, an unknown name in the answer, and what else may go wrong while asking."""

    class Script(BaseDataScheduler):
        """Returns what it was constructed with; raises it if it is an exception."""

        answers: Any = ()

        def get_schedule_param(self) -> Any:
            answer = self.answers[self.last_epoch]
            if isinstance(answer, BaseException):
                raise answer
            return answer

    def test_bug_18_unknown_names_are_refused(self) -> None:
        class Ghostly(self.Script):  # type: ignore[misc, name-defined]
            answers = ({}, {"a": 5.0, "ghost": 1.0}, {"a": 6.0})

        sparsifier, _ = OURS.make()
        scheduler = Ghostly(sparsifier, "level")
        sparsifier.step()
        before = scheduler.state_dict()
        with pytest.raises(ValueError, match=r"ghost.*'a', 'b'"):
            scheduler.step()
        assert scheduler.state_dict() == before
        assert {name: dict(config) for name, config in sparsifier.data_groups.items()} == {
            "a": {"level": 1.0},
            "b": {"level": 1.0},
        }
        sparsifier.step()

    @pytest.mark.parametrize(
        "error",
        [KeyError("k"), RuntimeError("r"), KeyboardInterrupt()],
        ids=["key", "runtime", "interrupt"],
    )
    def test_an_exception_comes_out_and_changes_nothing(self, error: BaseException) -> None:
        class Fails(self.Script):  # type: ignore[misc, name-defined]
            answers = ({}, error)

        sparsifier, _ = OURS.make()
        scheduler = Fails(sparsifier, "level")
        sparsifier.step()
        sparsifier.enable_mask_update = False
        before = scheduler.state_dict()
        with pytest.raises(type(error)) as caught:
            scheduler.step()
        assert caught.value is error
        assert scheduler.state_dict() == before and sparsifier.enable_mask_update is False

    def test_a_failed_construction_leaves_the_sparsifier_alone(self) -> None:
        class Ghostly(self.Script):  # type: ignore[misc, name-defined]
            answers = ({"ghost": 1.0},)

        sparsifier = OurSparsifier([("a", torch.ones(2, 2))], level=1.0)
        sparsifier.enable_mask_update = False
        with pytest.raises(ValueError, match="ghost"):
            Ghostly(sparsifier, "level")
        assert "step" not in vars(sparsifier) and sparsifier.enable_mask_update is False
