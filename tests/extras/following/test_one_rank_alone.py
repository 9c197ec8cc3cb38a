"""An error on one rank alone, at any allocation: as in ``tests/dist/test_one_rank_alone.py``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_sparse.extras.following import FollowingTables, follow_kept_rows
from tests.dist.one_rank import Call
from tests.dist.plugin import on_ranks
from tests.dist.test_one_rank_alone import MOST, WORLD, compacting, sweep
from tests.extras.following import models as slot_models


def followed() -> tuple[FollowingTables, Any]:
    """Following tables before an update, with lookups that were not counted yet."""
    built = slot_models.build(WORLD, "row_wise", nursery=slot_models.SHARE)
    slots = FollowingTables(built.model, built.optimizer, every=3)
    for step in range(5):
        look_up(built, step)
        slots.step()
    look_up(built, 5)
    return slots, built


def look_up(built: Any, step: int) -> None:
    built.optimizer.zero_grad()
    built.model(slot_models.batch(step, WORLD))[0].backward()
    built.optimizer.step()


def following_tables(folder: Path) -> Call:
    built = slot_models.build(WORLD, "row_wise")
    look_up(built, 0)
    kept: list[FollowingTables] = []

    def call() -> None:
        kept.append(FollowingTables(built.model, built.optimizer, every=3))

    return Call(call, lambda: {"model": built.model})


def following(name: str) -> Callable[[Path], Call]:
    def made(folder: Path) -> Call:
        slots, built = followed()
        state = copy.deepcopy(slots.state_dict())
        arguments = (state,) if name == "load_state_dict" else ()
        return Call(lambda: getattr(slots, name)(*arguments), lambda: {"model": built.model})

    return made


CALLS: dict[str, Callable[[Path], Call]] = {
    "compact, follow": lambda folder: compacting(folder, convert=follow_kept_rows),
    "FollowingTables": following_tables,
    "FollowingTables.step": following("step"),
    "FollowingTables.state_dict": following("state_dict"),
    "FollowingTables.load_state_dict": following("load_state_dict"),
    "FollowingTables.summary": following("summary"),
}


# What a call may leave, as its docstring says: paths of its state.
LEFT = {
    # No model is left if a rank fails while the old tables are released.
    "compact, follow": ".",
    # Some slots have moved.
    "FollowingTables.step": r"id_of_slot|\.weight",
}


@on_ranks(WORLD)
@MOST
@pytest.mark.parametrize("name", CALLS)
def test_one_allocation_fails(name: str, most: int, tmp_path: Path) -> None:
    sweep(name, CALLS[name], tmp_path, most, LEFT.get(name))
