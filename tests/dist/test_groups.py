"""Agreement, parcels and timeouts on real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_sparse import DataNormSparsifier
from dist_sparse.groups import (
    Facts,
    Replica,
    agreeing,
    group_over,
    set_timeout,
    traffic,
    world_group,
)
from dist_sparse.parcels import Parcels
from tests.dist.harness import run_ranks
from tests.dist.pieces import by_rows, sharded
from tests.dist.plugin import on_ranks


def refused(
    words: str, error: BaseException | None = None, facts: dict[str, Any] | None = None
) -> ValueError:
    with (
        pytest.raises(ValueError, match=words) as caught,
        world_group().agreeing("load()") as mine,
    ):
        mine.update(facts or {})
        if error is not None:
            raise error
    return caught.value


@on_ranks(2)
def test_an_exception_of_one_rank_is_raised_on_all() -> None:
    mine = KeyError("lost") if dist.get_rank() == 1 else None
    raised = refused(
        r"load\(\) was refused on every rank, nothing was changed\. rank 1: KeyError: 'lost'", mine
    )
    assert raised.__cause__ is mine


@on_ranks(2)
def test_other_facts() -> None:
    raised = refused(
        "level is 0.6 on rank 1 and 0.5 on rank 0",
        facts={"level": 0.5 + dist.get_rank() / 10, "same": 1},
    )
    assert "same" not in str(raised)


@on_ranks(2)
def test_one_exchange_when_all_is_well() -> None:
    before = traffic()
    with world_group().agreeing("load()") as facts:
        facts["level"] = 0.5
    assert (traffic().collectives, traffic().bytes) == (before.collectives + 1, before.bytes + 32)


@on_ranks(2)
def test_facts_that_json_can_not_hold() -> None:
    loop: list[Any] = []
    loop.append(loop)
    odd = {
        "keys": {1: 2, "a": 3, None: 4, (1, 2): 5},
        "loop": loop,
        "long": 10**5000,
        "set": {1},
        "nan": float("nan"),
    }
    with world_group().agreeing("load()") as facts:
        facts.update(odd)
    refused("keys: a is 1 on rank 1 and 0 on rank 0", facts={"keys": {"a": dist.get_rank()}})
    if dist.get_rank() == 1:
        refused("x is nothing on rank 0|x is .* on rank 1", facts={"x": odd})
    else:
        refused("x is .* on rank 1 and nothing on rank 0")


@on_ranks(2)
def test_a_config_with_keys_of_two_kinds_on_one_rank() -> None:
    """It was a TypeError on that rank, and the other one waited for the timeout. (C6)"""
    sparsifier = DataNormSparsifier(sparsity_level=0.5)
    sparsifier.add_data("a", sharded(torch.randn(8, 4), by_rows(8, 4, 4)))
    sparsifier.step()
    if dist.get_rank() == 1:
        sparsifier.data_groups["a"]["mine"] = {1: 2, "b": 3}
    with pytest.raises(ValueError, match="config of table 'a'"):
        sparsifier.step()


@on_ranks(2)
def test_errors_and_drift_reach_the_larger_group() -> None:
    """A group of one rank knows something; the group of all hears it."""
    groups = [group_over(None), world_group()]
    with pytest.raises(ValueError, match="rank 0: ValueError: mine"), agreeing("step()", groups):
        if dist.get_rank() == 0:
            raise ValueError("mine")

    def agree(drift_error: str | None) -> dict[str, list[int]]:
        with agreeing("step()", groups) as (_, facts):
            facts.replicas["bias"] = Replica(
                hash=7 + dist.get_rank(), first=dist.get_rank() == 0, holders=2
            )
            facts.drift_error = drift_error
        return facts.drifted

    assert agree(None) == {"bias": [1]}
    with pytest.raises(ValueError, match="drifted: bias on rank 1"):
        agree("drifted: {places}")


@on_ranks(4)
def test_an_error_in_a_small_group_reaches_all() -> None:
    """Ranks 2 and 3 are not in the group in which it is found first."""
    groups = [*([group_over((0, 1))] if dist.get_rank() < 2 else []), world_group()]
    with pytest.raises(ValueError, match="mine"), agreeing("step()", groups):
        if dist.get_rank() == 1:
            raise ValueError("mine")


@on_ranks(2)
def test_parcels_come_as_they_were_packed() -> None:
    group, rank = world_group(), dist.get_rank()
    parcels, expected = Parcels(group), []
    for receiver in range(2):
        # Leaves doubles unaligned.
        parcels.send(receiver, torch.full((3,), 10 * rank + receiver, dtype=torch.uint8))
        parcels.send(receiver, torch.full((rank + 1, 2), float(rank), dtype=torch.float64))
    for sender in range(2):
        expected.append(
            (parcels.expect(sender, (3,)), parcels.expect(sender, (sender + 1, 2), torch.float64))
        )
    parcels.exchange(torch.device("cpu"))
    for sender, (bits, sums) in enumerate(expected):
        assert bits().tolist() == [10 * sender + rank] * 3
        assert sums().tolist() == [[float(sender)] * 2] * (sender + 1)


def _alone() -> str:
    set_timeout(2)
    group = world_group()
    group.agree("start", Facts())
    if dist.get_rank() == 1:
        return ""  # it never steps
    with pytest.raises(RuntimeError) as caught:
        group.agree("step()", Facts())
    return str(caught.value)


@pytest.mark.dist
def test_a_timeout_says_who_waited_where() -> None:
    message = run_ranks(2, _alone)[0]
    assert re.search(
        r"^Rank 0: all_gather in step\(\) failed. Not all of ranks 0-1 made this call: a rank has"
        r" ended, is stalled, or is making another call. The backend says: ",
        message,
    ), message


@on_ranks(4)
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("fails_before", [0, 1, 2, 3])
def test_a_rank_that_fails_between_two_collectives(fails_before: int, small: bool) -> None:
    """The others waited for the timeout."""
    rank = dist.get_rank()
    if small and rank < 2:
        return
    group = group_over((2, 3)) if small else world_group()

    def fail_at(turn: int) -> None:
        if rank == 3 and turn == fails_before:
            raise MemoryError(f"turn {turn}")

    for _ in range(2):  # twice: the connections are new the second time
        with (
            pytest.raises(ValueError, match=rf"refused on every rank.*rank 3: .*{fails_before}"),
            group.jointly("count()"),
        ):
            fail_at(0)
            group.all_reduce(torch.ones(4))
            fail_at(1)
            parcels = Parcels(group)
            reads = []
            for other in range(group.size):
                parcels.send(other, torch.ones(other + 1))
                reads.append(parcels.expect(other, [group.rank + 1], torch.float32))
            parcels.exchange(torch.device("cpu"))
            fail_at(2)
            group.all_gather_json(rank)
            fail_at(3)
    assert group.all_gather(torch.tensor(rank)).tolist() == [*group.ranks]


@on_ranks(4)
def test_a_rank_that_fails_between_collectives_of_a_smaller_group() -> None:
    rank = dist.get_rank()
    with (
        pytest.raises(ValueError, match="rank 1: MemoryError: mine"),
        world_group().jointly("move()"),
    ):
        group = group_over((0, 1) if rank < 2 else (2, 3))
        group.all_reduce(torch.ones(2))
        if rank == 1:
            raise MemoryError("mine")
        group.all_reduce(torch.ones(2))
        world_group().all_reduce(torch.ones(1))
    assert group.all_gather(torch.tensor(rank)).tolist() == [*group.ranks]
    assert world_group().all_gather(torch.tensor(rank)).tolist() == [0, 1, 2, 3]


@on_ranks(2)
def test_what_fails_after_the_last_collective_is_raised_alone() -> None:
    before = traffic().collectives
    failed = False
    try:
        with world_group().jointly("count()") as call:
            world_group().all_reduce(torch.ones(1))
            call.sent_all()
            if dist.get_rank():
                raise MemoryError("mine")
    except MemoryError:
        failed = True
    assert failed == bool(dist.get_rank())
    assert traffic().collectives == before + 1
    assert world_group().all_reduce(torch.ones(1)) == 2


def _ends_in_the_middle() -> str:
    set_timeout(2)
    group = world_group()
    group.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        group.hang_up()
        return ""  # it never calls again
    with pytest.raises(RuntimeError) as caught, group.jointly("count()"):
        group.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="connections between ranks 0-1 are lost"):
        group.all_reduce(torch.ones(1))
    return str(caught.value)


@pytest.mark.dist
def test_a_rank_that_ends_is_not_waited_for() -> None:
    assert "all_reduce" in run_ranks(2, _ends_in_the_middle)[0]


@on_ranks(2)
def test_new_connections_leave_no_group_open() -> None:
    """Each open group of gloo has threads, which wake up a hundred times a second."""
    threads = Path("/proc/self/task")
    if not threads.exists():
        pytest.skip("only Linux lists threads there")
    group = world_group()
    group.agree("begin()", Facts())
    before = len([*threads.iterdir()])
    for _ in range(3):
        with pytest.raises(ValueError, match="rank 1: MemoryError"), group.jointly("count()"):
            group.all_reduce(torch.ones(1))
            if dist.get_rank() == 1:
                raise MemoryError("mine")
            group.all_reduce(torch.ones(1))
    assert len([*threads.iterdir()]) == before


@on_ranks(3)
def test_groups_that_overlap_connect_in_any_order() -> None:
    """torch names them by the number of a rank's groups, which differs between ranks."""
    rank = dist.get_rank()
    for ranks in ((0, 1), (1, 2), (0, 2)):
        if rank in ranks:
            group = group_over(ranks)
            assert group.all_gather(torch.tensor(rank)).tolist() == [*ranks]
    # Of the library, and of the user.
    assert world_group().all_gather(torch.tensor(rank)).tolist() == [0, 1, 2]
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1, 2]))
    assert total == 3
