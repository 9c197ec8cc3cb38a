"""All ranks schedule the same values, and a rank that differs is named on every rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_sparse import Advanced, sparsify
from dist_sparse.groups import reset_traffic, traffic
from dist_sparse.schedulers import (
    CubicDataScheduler,
    CurveDataScheduler,
    LambdaDataScheduler,
    LinearDataScheduler,
    curves,
)
from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.base import BaseDataSparsifier
from tests.dist.plugin import on_ranks


class Still(BaseDataSparsifier):
    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        pass


class Script(BaseDataScheduler):
    """Answers ``answers[step]``; raises what is an exception."""

    answers: tuple[Any, ...] = ()

    def get_schedule_param(self) -> Any:
        answer = self.answers[self.last_epoch]
        if isinstance(answer, Exception):
            raise answer
        return answer


class OtherScript(Script):
    pass


def scripted(*answers: Any, kind: type[Script] = Script) -> type[Script]:
    return type(kind.__name__, (kind,), {"answers": answers})


def sparsifier_of(*names: str) -> Still:
    return Still([(name, torch.ones(2, 2)) for name in names], sparsity_level=0.5)


def levels(sparsifier: BaseDataSparsifier) -> dict[str, Any]:
    return {name: config["sparsity_level"] for name, config in sparsifier.data_groups.items()}


def per_rank(*values: Any) -> Any:
    return values[dist.get_rank()]


def refused(call: Callable[[], Any], *words: str) -> None:
    """``call`` raises a ValueError with these words, on every rank."""
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


@on_ranks(2)
def test_rank_0_is_written_everywhere_with_one_warning() -> None:
    sparsifier = sparsifier_of("a", "b")
    same, mine = {"a": 0.1}, {"a": per_rank(0.2, 0.9), "b": per_rank(0.3, 0.3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = scripted(same, mine, mine, same)(sparsifier, "sparsity_level")
        assert levels(sparsifier) == {"a": 0.1, "b": 0.5} and not caught
        for _ in range(2):
            sparsifier.step()
            scheduler.step()
            assert levels(sparsifier) == scheduler.get_last_param() == {"a": 0.2, "b": 0.3}
        sparsifier.step()
        scheduler.step()
    assert len(caught) == (dist.get_rank() == 0)
    if caught:
        assert caught[0].filename == __file__
        assert "'sparsity_level' of 'a' is 0.9 on rank 1 and 0.2 on rank 0, whose" in str(
            caught[0].message
        )


@on_ranks(4)
def test_the_warning_names_all_ranks_that_are_overruled() -> None:
    """Through sparsify() too, whose first rank is the one that a user reads."""
    model = nn.parallel.DistributedDataParallel(nn.EmbeddingBag(40, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()

    def schedule(
        sparsifier: Any, param: str, *, final: Any, begin: int, end: int, every: int
    ) -> Any:
        fn = lambda step: 0.5 if rank in (0, 2) else 0.1 * rank  # noqa: E731
        return LambdaDataScheduler(sparsifier, param, fn=fn, begin=begin, end=end, every=every)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparse = sparsify(model, optimizer, level=0.5, end=2, every=1, schedule=schedule)
        for _ in range(3):
            sparse.step()
    found = [str(each.message) for each in caught if "LambdaDataScheduler" in str(each.message)]
    assert len(found) == (rank == 0)
    for said in found:
        assert "is 0.1 on rank 1 and 0.5 on rank 0, whose" in said and "ranks 1, 3." in said
    assert sparse.sparsity == 0.5


@on_ranks(2)
def test_values_keep_their_types() -> None:
    answer = {
        "a": (1, (2, "x")),
        "b": per_rank(math.nan, float("nan")),
        "c": per_rank((1, 2), (3, 4)),
        "d": None,
    }
    sparsifier = sparsifier_of("a", "b", "c", "d", "e")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scripted({**answer, "e": torch.tensor(0.5)})(sparsifier, "shape")
    shapes = {name: config["shape"] for name, config in sparsifier.data_groups.items()}
    assert (
        shapes["a"] == (1, (2, "x"))
        and math.isnan(shapes["b"])
        and shapes["c"] == (1, 2)
        and shapes["d"] is None
    )
    assert shapes["e"] == 0.5 and type(shapes["e"]) is float
    assert len(caught) == (dist.get_rank() == 0)
    # NaN is NaN: the other name is the one that differs.
    assert all("'c'" in str(each.message) for each in caught)


@on_ranks(2)
def test_what_can_not_cross_is_refused() -> None:
    sparsifier = sparsifier_of("a")
    refused(
        lambda: scripted({"a": object()})(sparsifier, "sparsity_level"),
        "ranks 0-1: ",
        "object",
        "JSON",
    )
    assert levels(sparsifier) == {"a": 0.5}


@on_ranks(2)
def test_exception_on_one_rank_is_raised_on_both() -> None:
    sparsifier = sparsifier_of("a")
    scheduler = scripted({}, per_rank({"a": 0.7}, KeyError("lost")), {"a": 0.8})(
        sparsifier, "sparsity_level"
    )
    sparsifier.step()
    sparsifier.enable_mask_update = False
    before = scheduler.state_dict()
    refused(scheduler.step, "rank 1: KeyError: 'lost'", "nothing was changed")
    assert scheduler.state_dict() == before
    assert levels(sparsifier) == {"a": 0.5} and sparsifier.enable_mask_update is False
    type(scheduler).answers = ({}, {"a": 0.8})
    scheduler.step()
    assert levels(sparsifier) == {"a": 0.8} and scheduler.last_epoch == 1


@on_ranks(2)
def test_unknown_name_on_one_rank() -> None:
    sparsifier = sparsifier_of("a")
    make = scripted(per_rank({"ghost": 1.0}, {}))
    refused(lambda: make(sparsifier, "sparsity_level"), "rank 0", "ghost", "['a']")
    assert "step" not in vars(sparsifier)


@on_ranks(2)
def test_not_a_sparsifier_on_one_rank() -> None:
    refused(
        lambda: scripted({})(per_rank(sparsifier_of("a"), object()), "sparsity_level"),
        "rank 1: TypeError",
        "object",
    )
    refused(
        lambda: CubicDataScheduler(per_rank(3, sparsifier_of("a")), final=0.5, end=5),
        "rank 0: TypeError",
        "int",
    )


@on_ranks(2)
def test_other_answers() -> None:
    sparsifier = sparsifier_of("a", "b")
    make = scripted(per_rank({"a": 0.1}, {"a": 0.1, "b": 0.1}))
    refused(
        lambda: make(sparsifier, "sparsity_level"),
        "data 'b' is scheduled on rank 1 and not scheduled on rank 0",
    )
    assert levels(sparsifier) == {"a": 0.5, "b": 0.5}


@on_ranks(2)
def test_other_names() -> None:
    sparsifier = per_rank(sparsifier_of("a"), sparsifier_of("a", "b"))
    refused(
        lambda: scripted({})(sparsifier, "sparsity_level"),
        "data 'b'",
        "nothing on rank 0",
        "rank 1",
    )
    refused(
        lambda: LinearDataScheduler(sparsifier, final=0.5, end=5),
        "data 'b'",
        "nothing on rank 0",
        "rank 1",
    )


@on_ranks(2)
def test_other_parameter() -> None:
    param = per_rank("sparsity_level", "zeros_per_block")
    refused(
        lambda: scripted({})(sparsifier_of("a"), param),
        "schedule_param is zeros_per_block on rank 1",
    )


@on_ranks(2)
def test_other_class() -> None:
    make = per_rank(scripted({}), scripted({}, kind=OtherScript))
    refused(
        lambda: make(sparsifier_of("a"), "sparsity_level"),
        "rank 1",
        "'step of OtherScript'",
        "'step of Script'",
    )


@on_ranks(2)
def test_other_step() -> None:
    make = scripted({}, {}, {})
    refused(
        lambda: make(sparsifier_of("a"), "sparsity_level", last_epoch=per_rank(-1, 0)),
        "last_epoch is 1 on rank 1 and 0",
    )


@on_ranks(2)
def test_other_plan() -> None:
    plan: dict[str, Any] = {"final": 0.8, "begin": 1, "end": 9, "every": 2}
    for key, values in {
        "final": (0.8, 0.7),
        "begin": (1, 2),
        "end": (9, 8),
        "every": (2, 3),
        "initial": (0.0, 0.1),
    }.items():
        sparsifier = sparsifier_of("a")
        mine = {**plan, key: per_rank(*values)}
        refused(
            lambda mine=mine, on=sparsifier: CubicDataScheduler(on, **mine),
            f"{key} is {values[1]} on rank 1",
        )
        assert levels(sparsifier) == {"a": 0.5}
    globs = per_rank({"*": 0.5, "a": 0.7}, {"a": 0.7, "*": 0.5})
    refused(
        lambda: CubicDataScheduler(sparsifier_of("a"), final=globs, end=9), "final is", "rank 1"
    )
    curve = per_rank(curves.linear, curves.cosine)
    refused(
        lambda: CurveDataScheduler(sparsifier_of("a"), curve=curve, final=0.5, end=9),
        "curve is cosine on rank 1 and linear on rank 0",
    )


@on_ranks(2)
def test_bad_plan_on_one_rank() -> None:
    make = CubicDataScheduler
    refused(
        lambda: make(sparsifier_of("a"), final=per_rank(1.5, 0.5), end=5),
        "rank 0: ValueError: Invalid final=1.5",
    )
    refused(
        lambda: make(sparsifier_of("a"), final=0.5, end=per_rank(5, 5.5)),
        "rank 1: ValueError: Invalid end=5.5",
    )
    initials = per_rank(1, 1.0)
    refused(
        lambda: make(sparsifier_of("a"), "x", final=2, initial=initials, end=5),
        "initial is 1.0 on rank 1 and 1 on",
    )
    finals = per_rank({"*": 0.5}, {"b*": 0.5})
    refused(
        lambda: make(sparsifier_of("a"), final=finals, end=5),
        "rank 1: ValueError: Invalid names or globs ['b*']",
    )


@on_ranks(2)
def test_ready_steps_send_nothing() -> None:
    sparsifier = sparsifier_of("a", "b")
    reset_traffic()
    scheduler = CubicDataScheduler(sparsifier, final={"a": 0.8, "b": 0.4}, begin=2, end=8, every=3)
    assert traffic().collectives == 1 and traffic().bytes < 64
    reset_traffic()
    due = []
    for step in range(10):
        if sparsifier.enable_mask_update:
            due.append(step)
        sparsifier.step()
        scheduler.step()
    assert due == [2, 5, 8] and levels(sparsifier) == {"a": 0.8, "b": 0.4}
    assert traffic().collectives == 0


@on_ranks(2)
def test_lambda_talks_at_due_steps_alone() -> None:
    sparsifier = sparsifier_of("a")
    gap = per_rank(0.0, 0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = LambdaDataScheduler(
            sparsifier, fn=lambda step: step / 10 + gap, begin=1, every=2, end=5
        )
        talked = []
        for _ in range(7):
            reset_traffic()
            sparsifier.step()
            scheduler.step()
            talked.append(traffic().collectives > 0)
            assert levels(sparsifier) == {
                "a": (None, 0.1, 0.1, 0.3, 0.3, 0.5, 0.5, 0.5)[scheduler.last_epoch]
            }
    assert talked == [True, False, True, False, True, False, False]
    assert len(caught) == (dist.get_rank() == 0)


@on_ranks(2)
def test_user_written_steps_send_little() -> None:
    sparsifier = sparsifier_of(*(f"table_{i}" for i in range(100)))
    answer = {name: 0.25 for name in sparsifier.data_groups}
    scheduler = scripted({}, answer)(sparsifier, "sparsity_level")
    sparsifier.step()
    reset_traffic()
    scheduler.step()
    assert traffic().collectives == 3 and traffic().bytes < 100 * 32


@on_ranks(2)
def test_load_of_another_step_is_refused() -> None:
    sparsifier = sparsifier_of("a")
    scheduler = CubicDataScheduler(sparsifier, final=0.8, end=8)
    before = scheduler.state_dict()
    refused(
        lambda: scheduler.load_state_dict({**before, "last_epoch": per_rank(4, 5)}),
        "last_epoch is 5 on rank 1 and 4 on rank 0",
    )
    refused(
        lambda: scheduler.load_state_dict({**before, "every": per_rank(1, 0)}),
        "rank 1: ValueError: Invalid every=0",
    )
    refused(
        lambda: scheduler.load_state_dict(per_rank(before, None)),
        "rank 1: ValueError: Invalid state of CubicData",
    )
    refused(
        lambda: scheduler.load_state_dict({**before, "final": per_rank(0.5, float("nan"))}),
        "rank 1: ValueError: Invalid final=nan",
    )
    refused(
        lambda: scheduler.load_state_dict({**before, "every": per_rank("x", 1)}),
        "rank 0: ValueError: Invalid ev",
    )
    refused(
        lambda: scheduler.load_state_dict({**before, "last_epoch": per_rank(4, "x")}), "rank 1: "
    )
    refused(
        lambda: scheduler.load_state_dict({**before, "base_param": per_rank(3, {})}),
        "rank 0: ValueError: Invalid",
    )
    assert scheduler.state_dict() == before and levels(sparsifier) == {"a": 0.0}
    scheduler.load_state_dict({**before, "last_epoch": 8})
    assert levels(sparsifier) == {"a": 0.8}


@on_ranks(2)
def test_a_warning_that_is_an_error_leaves_no_rank_a_step_behind() -> None:
    """Only the first rank warns."""
    sparsifier = sparsifier_of("a")
    answers = {"a": 0.1}, {"a": per_rank(0.2, 0.9)}, {"a": 0.3}
    scheduler = scripted(*answers)(sparsifier, "sparsity_level")
    sparsifier.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(scheduler.step, "rank 0: UserWarning: Script: 'sparsity_level' of 'a' is 0.9")
        assert levels(sparsifier) == {"a": 0.1} and scheduler.last_epoch == 0
        for level in (0.2, 0.3):
            scheduler.step()
            assert levels(sparsifier) == {"a": level}
            sparsifier.step()


@on_ranks(2)
def test_no_untouched_row_as_an_error_leaves_no_rank_a_step_behind() -> None:
    model = nn.parallel.DistributedDataParallel(nn.EmbeddingBag(40, 8, mode="sum"))
    optimizer = torch.optim.Adagrad(model.parameters())
    sparse = sparsify(
        model,
        optimizer,
        level="untouched",
        schedule="constant",
        end=4,
        every=1,
        advanced=Advanced(trust_record=True),
    )
    for step in range(1, 4):
        optimizer.zero_grad()
        model(torch.arange(40).view(4, 10)).sum().backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*has removed no row")
            if dist.get_rank() == 0:
                with pytest.raises(UserWarning, match="has removed no row"):
                    sparse.step()
            else:
                sparse.step()
        assert sparse.scheduler.last_epoch == step
