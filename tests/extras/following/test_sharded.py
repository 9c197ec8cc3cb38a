"""Following tables on every sharding: slots, rows and lookups against loops."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from dist_sparse import export
from dist_sparse.compaction.moving import Steppers, StoredTables
from dist_sparse.extras.following import FollowingTables
from tests.dist.cells import gathered
from tests.dist.plugin import on_ranks
from tests.extras.following.models import FEATURES, IDS, SLOTS, batch, build, kinds
from tests.extras.following.oracle import Oracle, holders, initial

pytestmark = pytest.mark.whole

EVERY = [(world, kind) for world in (1, 2, 4) for kind in kinds(world)]
HOW: dict[str, Any] = {"every": 3, "admit_after": 2, "half_life": 7}
# Few lookups are left of a half-life shorter than an interval: many ids have the same score.
TIES: dict[str, Any] = {"every": 2, "half_life": 1}
PROTECTED = {"item": [7, 30], "user": [0]}


def everywhere(features: KeyedJaggedTensor) -> list[dict[str, list[list[int]]]]:
    """The bags of every rank, by feature."""
    mine = {
        key: [
            bag.tolist() for bag in features[key].values().split(features[key].lengths().tolist())
        ]
        for key in features.keys()  # noqa: SIM118
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def states(model: Any, optimizer: Any, table: str) -> list[tuple[Any, Tensor, list[Tensor]]]:
    """What this rank stores of a table, copied."""
    stored = StoredTables(model.module.tables.inner, [table], Steppers(optimizer))
    held = stored.states(table).values()
    return [
        (rect, weight.clone(), [shards[number].clone() for shards in held])
        for number, (rect, weight) in enumerate(stored.located[table].shards)
    ]


def check_step(
    before: Any,
    after: Any,
    table: str,
    dim: int,
    written: list[tuple[int, int]],
    spread: int = 1,
) -> None:
    """Only rows that change hands are written: the initial row, and new optimizer state."""
    for (rect, weight, old), (_, now, new) in zip(before, after, strict=True):
        for slot, number in written:
            if rect.row <= slot < rect.row_end:
                row = initial(table, number, dim, IDS[table] * spread)
                weight[slot - rect.row] = row[rect.col : rect.col_end]
                for state in old:
                    state[slot - rect.row] = 0
        assert torch.equal(weight, now)
        assert old and all(map(torch.equal, old, new))


def check_summary(text: str, oracles: dict[str, Oracle]) -> None:
    """Each id is in one column of a table's line."""
    for table, oracle in oracles.items():
        [line] = [line for line in text.splitlines() if line.startswith(table)]
        ids, slots, held, waiting, never = map(int, line.split()[1:6])
        holders = {number for number in oracle.id_of_slot if number >= 0}
        seen = {number for number, times in oracle.counts.items() if times}
        assert (ids, slots, held) == (oracle.rows, oracle.slots, len(holders))
        assert (waiting, never) == (len(seen - holders), ids - len(seen))


@on_ranks()
@pytest.mark.parametrize(
    ("world", "kind", "how", "pooled"),
    [
        *((world, kind, HOW, True) for world, kind in EVERY),
        (1, "table_wise", TIES, True),
        (2, "row_wise", TIES, True),
        (4, "grid", TIES, True),
        (1, "table_wise", HOW, False),
        (2, "column_wise", TIES, False),
        (4, "row_wise", HOW, False),
    ],
)
def test_slots_rows_and_lookups(world: int, kind: str, how: dict[str, Any], pooled: bool) -> None:
    built = build(world, kind, bags=pooled, mean=kind == "row_wise")
    model, optimizer = built.model, built.optimizer
    slots = FollowingTables(model, optimizer, protect_ids=PROTECTED, **how)
    oracles = {
        table: Oracle(IDS[table], SLOTS[table], protected=PROTECTED[table], **how)
        for table in SLOTS
    }
    for step in range(14):
        features = batch(step, world)
        ranks, weights = everywhere(features), gathered(model)
        optimizer.zero_grad()
        loss, out = model(features)
        expected = []
        for table, keys in FEATURES.items():
            for key in keys:
                columns = []
                for rank, bags in enumerate(ranks):
                    for bag in bags[key]:
                        found = oracles[table].look_up(bag) if table in oracles else bag
                        nothing = torch.zeros(built.dim)
                        rows = [weights[table][slot] if slot >= 0 else nothing for slot in found]
                        if pooled:
                            rows = [sum(rows, nothing)]
                        if pooled and kind == "row_wise":
                            rows[0] = rows[0] / max(1, len(bag))
                        if rank == dist.get_rank():
                            columns += rows
                expected.append(torch.stack([nothing, *columns])[1:])
        outputs = torch.cat(expected, dim=int(pooled))
        torch.testing.assert_close(out / model.module.factor.detach(), outputs)
        loss.backward()
        optimizer.step()
        before = {table: states(model, optimizer, table) for table in SLOTS}
        slots.step()
        for table, oracle in oracles.items():
            oracle.step()
            assert holders(model.state_dict(), table) == oracle.id_of_slot
            after = states(model, optimizer, table)
            check_step(before[table], after, table, built.dim, oracle.written)
            assert slots.moved[table] == oracle.moved
    assert min(slots.moved.values()) > 10
    check_summary(slots.summary(), oracles)


SPREAD = 2**36 + 12_345
"""Ids of following tables are its multiples: above 2**40."""


@on_ranks()
@pytest.mark.parametrize(("world", "kind"), [(1, "table_wise"), (2, "row_wise"), (4, "grid")])
def test_hashed_ids(world: int, kind: str) -> None:
    """Fewer candidates than ids: which of them have counts is the same on every number of ranks."""
    built = build(world, kind, spread=SPREAD)
    protected = {"item": [7 * SPREAD, 3 * SPREAD + 1]}
    slots = FollowingTables(
        built.model, built.optimizer, candidates=1, protect_ids=protected, **HOW
    )
    oracles = {
        table: Oracle(
            IDS[table] * SPREAD,
            SLOTS[table],
            protected=protected.get(table, ()),
            candidates=SLOTS[table],
            **HOW,
        )
        for table in SLOTS
    }
    for step in range(14):
        features = batch(step, world, spread=SPREAD)
        for bags in everywhere(features):
            for table, oracle in oracles.items():
                for key in FEATURES[table]:
                    for bag in bags[key]:
                        oracle.look_up(bag)
        built.optimizer.zero_grad()
        loss, _ = built.model(features)
        loss.backward()
        built.optimizer.step()
        before = {table: states(built.model, built.optimizer, table) for table in SLOTS}
        # It forgets no candidate.
        slots.summary()
        slots.step()
        for table, oracle in oracles.items():
            oracle.step()
            assert holders(built.model.state_dict(), table) == oracle.id_of_slot
            after = states(built.model, built.optimizer, table)
            check_step(before[table], after, table, built.dim, oracle.written, spread=SPREAD)
    assert min(slots.moved.values()) > 10
    # A line a table below the rule, whatever the terminal of the tests.
    with patch.dict(os.environ, COLUMNS="80"):
        lines = slots.summary().splitlines()
    below = lines[next(at for at, line in enumerate(lines) if line.startswith("-")) + 1 :]
    assert [line.split()[0] for line in below] == list(slots.moved)
    assert max(map(len, below)) <= 80
    with pytest.raises(ValueError, match=r"Table 'item' has \d+ ids; compact tables"):
        export(built.model, None, "never")
