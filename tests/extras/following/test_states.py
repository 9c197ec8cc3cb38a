"""States and arguments of following tables that are wrong, foreign or incomplete."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from dist_sparse.extras.following import FollowingTables
from tests.dist.plugin import on_ranks
from tests.extras.following.models import SLOTS, Built, batch, build
from tests.extras.following.oracle import holders
from tests.extras.following.test_sharded import HOW, SPREAD
from tests.extras.following.test_training import result, train

pytestmark = pytest.mark.whole

# Holders or reservations outside the table, twice, and of another type.
BAD_INDEXES: Any = [[0, 1, 2, 50], [0, 1, 2, -52], [0, 1, 2, -(2**31)], [0, 1, 1, 3], [0, 1, 2, -2]]
BAD_INDEXES += [torch.tensor([0, 1, 2, 2**31 + 7]), torch.tensor([0.0, 1.5, 2.0, 3.0])]
REFUSED = r"Invalid id_of_slot of table 'item': must be distinct ids in \[0, 50\), torch\.int32"


def index_of(built: Built, table: str = "item") -> Any:
    return built.model.module.tables.following_ids.slots[table]


@on_ranks(2)
def test_reservations_without_the_state_of_the_slots() -> None:
    """The next update admits them, with rows written."""
    built = build(2, "row_wise")
    slots = FollowingTables(built.model, built.optimizer, **HOW)
    train(built, slots, range(5), 2)
    loss, _ = built.model(batch(5, 2))
    loss.backward()
    in_flight = batch(6, 2)
    built.model.module.tables.following_ids(in_flight)
    slots.step()
    state = built.model.state_dict()
    assert min(min(holders(state, table)) for table in SLOTS) < -1
    again = build(2, "row_wise")
    again.model.load_state_dict(state)
    slots = FollowingTables(again.model, again.optimizer, **HOW)
    train(again, slots, range(6, 9), 2)
    for table in SLOTS:
        ids = holders(again.model.state_dict(), table)
        assert min(ids) >= -1
        assert len(set(ids)) == len(ids)


@on_ranks(2)
def test_the_state_of_the_model_alone() -> None:
    """Ids get its slots once they are looked up, and their lookups from before count."""
    built = build(2, "row_wise")
    begin = copy.deepcopy(built.model.state_dict())
    slots = FollowingTables(built.model, built.optimizer, every=1)
    train(built, slots, range(4), 2)
    built.model.load_state_dict(begin)
    assert set(result(built)["item"][0]) == {-1}
    slots.step()
    assert set(result(built)["item"][0]) == {-1}
    train(built, slots, range(4, 6), 2)
    assert min(result(built)["item"][0]) >= 0


@on_ranks(2)
def test_the_state_of_the_model_alone_before_new_holders_are_admitted() -> None:
    built = build(2, "row_wise")
    begin = copy.deepcopy(built.model.state_dict())
    slots = FollowingTables(built.model, built.optimizer, every=3)
    train(built, slots, range(2), 2)
    loss, _ = built.model(batch(2, 2))
    loss.backward()
    in_flight = batch(3, 2)
    built.model.module.tables.following_ids(in_flight)
    slots.step()
    assert min(result(built)["item"][0]) < -1
    built.model.load_state_dict(begin)
    built.model(batch(2, 2))
    built.model.module.tables.following_ids(in_flight)
    for _ in range(3):
        slots.step()
    # A batch is in flight: slots are reserved.
    assert min(result(built)["item"][0]) < -1


@on_ranks(1)
def test_holders_of_another_table_are_refused() -> None:
    built = build(1, "row_wise")
    slots = FollowingTables(built.model, built.optimizer, **HOW)
    train(built, slots, range(4), 1)
    index, state = index_of(built), built.model.state_dict()
    [key] = [key for key in state if "indexes.item.id_of" in key]
    before = index.id_of_slot.clone()
    for values in BAD_INDEXES:
        bad = torch.as_tensor(values)
        bad = torch.nn.functional.pad(bad, (0, 5), value=-1)
        bad = bad.int() if isinstance(values, list) else bad
        with pytest.raises(ValueError, match=REFUSED):
            built.model.load_state_dict({**state, key: bad})
        assert torch.equal(index.id_of_slot, before)
    # A table with fewer slots.
    with pytest.raises(ValueError, match=REFUSED):
        built.model.load_state_dict({**state, key: before[1:]})
    assert torch.equal(index.id_of_slot, before)
    # torch.distributed.checkpoint loads in place.
    index.id_of_slot[:2] = 3
    with pytest.raises(ValueError, match=REFUSED):
        slots.load_state_dict(slots.state_dict())


BAD_STATES: dict[str, list[Any]] = {
    "step": ["x", None, -7, 2.5, True],
    "updated": [5, -5, None],
    "admits_at": [10**9, -2, None],
    "seed": [1, None],
    "tables": [{}, None],
    "counts": [{}, None, [], {"item": None, "user": None}],
}


@on_ranks(1, 2)
@pytest.mark.parametrize("spread", [1, SPREAD])
def test_bad_states_of_slots_are_refused(world: int, spread: int) -> None:
    built = build(world, "row_wise", spread=spread)
    slots = FollowingTables(built.model, built.optimizer, **HOW)
    train(built, slots, range(4), world, spread)
    state = slots.state_dict()
    for key, values in BAD_STATES.items():
        without = {name: value for name, value in state.items() if name != key}
        for bad in [without, *({**state, key: value} for value in values)]:
            # Wrong on one rank, and refused on all.
            refused(slots, bad if torch.distributed.get_rank() == world - 1 else state, key)
    for bad in (None, [], 3):
        refused(slots, bad, "must be a dict")
    refused(slots, {**state, "decay": 0.7}, "counts of 4 bytes with a decay")
    if spread > 1:
        counts = state["counts"]["item"]
        too_many = [counts + torch.tensor([[0], [more]]) for more in (256, 2**32)]
        for bad in (counts.float(), counts[0], counts[:, 0], -counts, counts.flip(1), *too_many):
            refused(slots, {**state, "counts": {**state["counts"], "item": bad}}, "counts")
    slots.load_state_dict(state)
    train(built, slots, range(4, 8), world, spread)


def refused(slots: FollowingTables, state: Any, text: str) -> None:
    """Every rank raises a ValueError, and nothing has changed."""
    before = slots.state_dict()
    with pytest.raises(ValueError, match=text):
        slots.load_state_dict(state)
    after = slots.state_dict()
    for key in ("step", "updated", "admits_at"):
        assert after[key] == before[key]


@on_ranks(1)
def test_arguments() -> None:
    built = build(1, "row_wise")
    for ids in (
        None,
        ["a"],
        [True],
        [1.5],
        [1.0],
        [[1], [2, 3]],
        [50],
        [-1],
        list(range(11)),
        {7, 3},
    ):
        with pytest.raises(ValueError, match=r"Invalid protect_ids of table 'item': must be at"):
            FollowingTables(built.model, built.optimizer, protect_ids={"item": ids})
    with pytest.raises(ValueError, match=r"Invalid candidates=.*: must be an int in \[1, 2147"):
        FollowingTables(built.model, built.optimizer, candidates=10**30)
    slots = FollowingTables(built.model, built.optimizer, protect_ids={"item": [7, 3]}, every=1)
    with pytest.raises(ValueError, match="Another FollowingTables has this model"):
        FollowingTables(built.model, built.optimizer)
    in_flight = [batch(step, 1) for step in range(1, 4)]
    built.model(batch(0, 1))
    for features in in_flight:
        built.model.module.tables.following_ids(features)
    slots.step()
    with pytest.raises(ValueError, match=r"Step 2 needs an update.*use every >= 3"):
        slots.step()
    del slots
    # A model may be handed on.
    FollowingTables(built.model, built.optimizer)
    narrow = torch.tensor([3], dtype=torch.uint8)
    wide = build(1, "row_wise", spread=SPREAD)
    FollowingTables(wide.model, wide.optimizer, protect_ids={"item": narrow})
    many = FollowingTables(built.model, built.optimizer, seed=np.int64(5))
    assert json.dumps(many.state_dict()["seed"]) == "5"


@on_ranks(1)
def test_plain_tables_need_their_optimizer() -> None:
    """Its state of a row that changes hands must be reset."""
    built = build(1, "data_parallel")
    with pytest.raises(ValueError, match=r"Table '\w+': no fused optimizer steps it; pass optim"):
        FollowingTables(built.model)
    other = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"Table '\w+': no fused optimizer steps it; pass optim"):
        FollowingTables(built.model, other)
    # There is none: the tables are frozen.
    FollowingTables(built.model, ())


@on_ranks(2)
def test_protected_ids_must_be_the_same_on_all_ranks() -> None:
    built = build(2, "row_wise")
    ids = [40, 41] if torch.distributed.get_rank() else [3]
    with pytest.raises(ValueError, match=r"protect_ids is \[\[\d.* on rank"):
        FollowingTables(built.model, built.optimizer, protect_ids={"item": ids})


@on_ranks(1)
def test_what_counts_can_hold() -> None:
    built = build(1, "row_wise")
    wrong: Any
    for wrong in (0, 16, 10**30, 1.5, True, None):
        with pytest.raises(
            ValueError, match=r"Invalid admit_after=.*: must be an int in \[1, 15\]"
        ):
            FollowingTables(built.model, built.optimizer, admit_after=wrong)
    for wrong in (0, -3, 2.5, float("nan"), True, None):
        with pytest.raises(ValueError, match=r"Invalid half_life=.*: must be an int >= 1"):
            FollowingTables(built.model, built.optimizer, half_life=wrong)


@on_ranks(1)
def test_int32_ids_of_a_table_that_is_larger() -> None:
    built = build(1, "row_wise", spread=SPREAD)
    slots = FollowingTables(built.model, built.optimizer, every=1)
    wide = batch(0, 1)
    built.model(KeyedJaggedTensor(wide.keys(), wide.values().int(), lengths=wide.lengths()))
    slots.step()
    assert min(slots.moved.values()) > 2
