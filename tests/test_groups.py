"""A world of one, and the messages of ranks that disagree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_sparse import groups
from dist_sparse.groups import Group, RankGroup, agreeing, group_over, set_timeout, traffic
from dist_sparse.messages import explain_actions, explain_errors, explain_facts
from dist_sparse.parcels import Parcels

ALONE = Group()
WORLD = range(512)


def test_a_world_of_one_raises_what_was_raised() -> None:
    mistake = KeyError("lost")
    with pytest.raises(KeyError) as caught, ALONE.agreeing("step()") as facts:
        facts["level"] = 0.5
        raise mistake
    assert caught.value is mistake


def test_interrupts_are_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), agreeing("step()", [ALONE]):
        raise KeyboardInterrupt


def test_nothing_is_sent_by_a_world_of_one() -> None:
    before = traffic()
    assert ALONE.all_reduce(torch.tensor([3])).tolist() == [3]
    parcels = Parcels(group_over(None))
    parcels.send(0, torch.tensor([1, 2, 3], dtype=torch.uint8))
    parcels.send(0, torch.tensor([[0.5], [1.5]], dtype=torch.float64))
    bits, sums = parcels.expect(0, (3,)), parcels.expect(0, (2, 1), torch.float64)
    parcels.exchange(torch.device("cpu"))
    assert bits().tolist() == [1, 2, 3] and sums().tolist() == [[0.5], [1.5]]
    assert traffic() == before


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, "600"])
def test_invalid_timeouts(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^Invalid seconds="):
        set_timeout(seconds)


CUDA = torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("config", "bound", "weights", "expected"),
    [
        ("cpu:gloo,cuda:gloo", CUDA, CUDA, "cpu"),
        ("cpu:gloo,cuda:nccl", None, CUDA, "cpu"),
        ("cuda:nccl", None, CUDA, "cuda:3"),
        ("cuda:nccl", CUDA, torch.device("cpu"), "cuda:3"),
    ],
)
def test_messages_are_sent_from_a_device_of_the_backend(
    config: str,
    bound: torch.device | None,
    weights: torch.device,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups.dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(groups, "_bound_device", lambda: bound)
    monkeypatch.setattr(groups, "_weights_device", None)
    made: Any = object()
    group = RankGroup((0, 1), made)
    # The first group is often older than the tables.
    groups.set_weights_device(weights)
    assert str(group.device) == expected


@pytest.mark.parametrize(
    ("ranks", "bound", "backend"),
    [((1, 2), CUDA, "gloo"), ((1, 3), None, None), ((0, 1, 2, 3), CUDA, None)],
)
def test_no_group_is_split_off_a_world_bound_to_devices(
    ranks: tuple[int, ...],
    bound: torch.device | None,
    backend: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL would wait for the ranks that are not in it."""
    asked: list[Any] = []

    def new_group(ranks: Any, timeout: Any, backend: Any, **options: Any) -> Any:
        asked.append(backend)
        return object()

    monkeypatch.setattr(groups.dist, "new_group", new_group)
    monkeypatch.setattr(groups.dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(groups.dist, "group", SimpleNamespace(WORLD=object()))
    monkeypatch.setattr(groups, "world_ranks", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(groups, "_bound_device", lambda: bound)
    assert group_over(ranks).rank == 1 - ranks[0]
    assert asked == [backend]


def test_one_mistake_on_512_ranks_is_said_once() -> None:
    message = explain_errors(WORLD, "step()", ["ValueError: " + "x" * 300] * 512)
    assert message.startswith(
        "step() was refused on every rank, nothing was changed. ranks 0-511: ValueError: xxx"
    )
    assert message.count("ValueError") == 1 and len(message) < 500


def test_512_different_mistakes_are_cut() -> None:
    errors = [f"ValueError: {rank} " + "x" * 5000 for rank in WORLD]
    message = explain_errors(WORLD, "step()", errors)
    assert (
        "rank 0: ValueError: 0 xxx" in message
        and "ranks 3-511: other errors" in message
        and len(message) < 2000
    )


def test_what_to_do_is_said_once_and_whole() -> None:
    """Where the errors of ranks end alike; a sentence of one rank stays with it."""
    remedy = "Load the state. Or pass the lookups of all training data."
    errors = [f"ValueError: {'x' * 600} {rank}. {remedy}" for rank in WORLD]
    message = explain_errors(WORLD, "step()", errors)
    assert message.endswith(f"ranks 3-511: other errors. {remedy}")
    assert message.count(remedy) == 1 and message.count("xxx...") == 3
    other = explain_errors([0, 1], "step()", [f"ValueError: a. {remedy}", "OSError: no file"])
    assert other.endswith(f"rank 0: ValueError: a. {remedy} | rank 1: OSError: no file")
    alone = explain_errors([0, 1], "step()", [f"ValueError: a. {remedy}", None])
    assert alone.endswith(f"rank 0: ValueError: a. {remedy}")


def test_other_actions_are_grouped() -> None:
    actions = ["audit()" if rank in (3, 5, 6) else "step()" for rank in WORLD]
    assert "ranks 3, 5-6 at 'audit()' while rank 0 is at 'step()'" in explain_actions(
        WORLD, actions
    )


def test_the_part_that_differs_is_shown_alone() -> None:
    tiling = [[rank * 100, 0, 100, 64] for rank in WORLD]
    other = [*tiling[:300], [7, 0, 100, 64], *tiling[301:]]
    values = [
        {"table 'a'": {"config": {"level": 0.5}, "tiling": other if rank == 9 else tiling}}
        for rank in WORLD
    ]
    message = explain_facts(WORLD, "add_model()", ["table 'a'"], values)
    assert (
        "[7, 0, 100, 64], [301" in message
        and "on rank 9 and ..." in message
        and "[30000, 0, 100, 64], [301" in message
    )
    assert len(message) < 500


def test_differences_on_many_ranks_are_cut() -> None:
    keys = [f"table {number}" for number in range(3)]
    values = [{key: f"{rank} " * 1000 for key in keys} for rank in WORLD]
    message = explain_facts(WORLD, "add_model()", keys, values)
    assert len(message) < 2000 and message.endswith("...")


def test_a_key_that_one_rank_lacks() -> None:
    message = explain_facts(range(2), "step()", ["b"], [{"b": {"level": 0.5}}, {}])
    assert "b is nothing on rank 1 and {'level': 0.5} on rank 0" in message
