"""The rows that ids without a slot share, on every sharding, against loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse.extras.following import FollowingTables, following
from dist_sparse.extras.following.slot_index import SlotIndex, hashed_row
from tests.dist.cells import gathered
from tests.dist.plugin import on_ranks
from tests.extras.following.models import FEATURES, IDS, OWN, SHARE, SLOTS, batch, build, kinds
from tests.extras.following.oracle import Oracle, holders, initial, nursery_row
from tests.extras.following.test_sharded import HOW, everywhere, states

pytestmark = pytest.mark.whole

NURSERY = {table: SLOTS[table] - OWN[table] for table in SLOTS}
EVERY = [(world, kind, True) for world in (1, 2, 4) for kind in kinds(world)]
EVERY += [(1, "row_wise", False), (2, "column_wise", False), (4, "row_wise", False)]


def row_of(oracle: Oracle, table: str, number: int) -> int:
    slot = oracle.slot(number)
    return slot if slot >= 0 else OWN[table] + nursery_row(number, NURSERY[table])


@on_ranks()
@pytest.mark.parametrize(("world", "kind", "pooled"), EVERY)
def test_rows_and_lookups(world: int, kind: str, pooled: bool) -> None:
    built = build(world, kind, bags=pooled, mean=kind == "row_wise", nursery=SHARE)
    model, optimizer = built.model, built.optimizer
    slots = FollowingTables(model, optimizer, nursery_lr=0.3, **HOW)
    oracles = {table: Oracle(IDS[table], OWN[table], **HOW) for table in SLOTS}
    scale = float(np.float32(0.3))
    inherited = 0
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
                        found = bag
                        if table in oracles:
                            oracles[table].look_up(bag)
                            found = [row_of(oracles[table], table, number) for number in bag]
                        nothing = torch.zeros(built.dim)
                        first = OWN.get(table, IDS[table])
                        rows = [
                            weights[table][row] * (scale if row >= first else 1) for row in found
                        ]
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
        weights = gathered(model)
        before = {table: states(model, optimizer, table) for table in SLOTS}
        slots.step()
        for table, oracle in oracles.items():
            oracle.step()
            assert holders(model.state_dict(), table) == oracle.id_of_slot
            is_update = not (step + 1) % HOW["every"]
            rows = weights[table].clone()
            for slot, number in oracle.written:
                read = rows[OWN[table] + nursery_row(number, NURSERY[table])] * scale
                inherited += bool(read.any())
                drawn = initial(table, number, built.dim, IDS[table])
                rows[slot] = read if read.any() else drawn
            nursery = range(OWN[table], SLOTS[table] if is_update else OWN[table])
            rows[nursery] = 0
            after = states(model, optimizer, table)
            written = [slot for slot, _ in oracle.written]
            check_shards(before[table], after, rows, [*written, *nursery])
    assert inherited > 10
    assert min(slots.moved.values()) > 10


def check_shards(before: Any, after: Any, rows: Tensor, written: list[int]) -> None:
    """Shards have the given rows; the state of the written ones is new, of others as it was."""
    for (rect, _, old), (_, now, new) in zip(before, after, strict=True):
        assert torch.equal(now, rows[rect.row : rect.row_end, rect.col : rect.col_end])
        assert old
        for state, was in zip(new, old, strict=True):
            for row in written:
                if rect.row <= row < rect.row_end:
                    was[row - rect.row] = 0
            assert torch.equal(state, was)


@pytest.mark.parametrize("rows", [1, 2, 3, 26, 262, 656, 10_007, 2**31 - 1])
def test_the_hash(rows: int) -> None:
    """The same as in Python's numbers, and no more rows are empty than by chance."""
    ids = torch.tensor([0, 1, 2, 3, 2625, 2**31, 2**40 + 1, 2**62 - 1])
    assert hashed_row(ids, rows).tolist() == [nursery_row(number, rows) for number in ids.tolist()]
    if 20 < rows < 20_000:
        for step in (1, 2, 7, 1000, 2**20):
            loads = torch.bincount(hashed_row(torch.arange(20 * rows) * step, rows), minlength=rows)
            # Of a random function they have a mean and a variance of 20.
            assert (loads.float() - 20).square().mean() < 20 * 3
            assert 0 < int(loads.min()) <= int(loads.max()) < 60


@on_ranks(1)
@pytest.mark.parametrize(
    ("kind", "optimizer", "share"),
    [
        ("row_wise", RowWiseAdagrad, 0.3),
        ("row_wise", torch.optim.SGD, 0.3),
        ("data_parallel", None, 0.5),
    ],
)
def test_nursery_rows_learn_more_slowly(kind: str, optimizer: Any, share: float) -> None:
    """By the share of the learning rate, whatever the optimizer does with gradients."""
    moved = []
    for nursery_lr in (share, 1):
        built = build(1, kind, nursery=SHARE, optimizer=optimizer)
        FollowingTables(built.model, built.optimizer, nursery_lr=nursery_lr)
        built.model(batch(0, 1))[0].backward()
        built.model.module.factor.grad = None
        built.optimizer.step()
        built.model.eval()
        moved.append(built.model(batch(0, 1))[1][:, :24])
    torch.testing.assert_close(moved[0], moved[1] * share)
    assert moved[0].any()


def test_arguments() -> None:
    meta = torch.device("meta")
    item = EmbeddingBagConfig(name="item", num_embeddings=50, embedding_dim=8, feature_names=["id"])
    bags = EmbeddingBagCollection([item], device=meta)
    wrong: Any
    for wrong in (-0.1, 1.5, float("nan"), True, None, "a", {"item": 0.1}):
        with pytest.raises(ValueError, match=r"Invalid nursery=.*: must be a finite number in \["):
            following(bags, {"item": 10}, nursery=wrong)
    for wrong, rows in ((1, 10), (0.99, 10), (0.1, 1)):
        with pytest.raises(ValueError, match=r"'item': nursery=.* of rows=\d+ leaves no row for"):
            following(bags, {"item": rows}, nursery=wrong)
    for share, rows, nursery in ((0, 10, 0), (0.01, 10, 1), (0.29, 100, 29), (0.1, 30, 3)):
        item.num_embeddings = 500
        made = following(EmbeddingBagCollection([item], device=meta), {"item": rows}, nursery=share)
        index = made.following_ids.slots["item"]
        assert (index.slots, index.nursery, index.stored) == (rows - nursery, nursery, rows)
        assert made.inner.embedding_bags["item"].weight.shape == (rows, 8)


def test_an_index_reads_the_nursery_once_it_has_a_scale() -> None:
    index = SlotIndex(70, 3, torch.tensor([2, 5, 9]), nursery=4)
    ids = torch.tensor([-1, 2, 3, 5, 69, 70])
    assert index(ids).tolist() == [-2, 0, -1, 1, -1, -2]
    index.nursery_scale = 0.3
    expected = [-2, 0, 3 + nursery_row(3, 4), 1, 3 + nursery_row(69, 4), -2]
    assert index(ids).tolist() == index(ids.int()).tolist() == expected
    assert index.slots_of(ids).tolist() == [-2, 0, -1, 1, -1, -2]


@on_ranks(2)
def test_ranks_must_agree() -> None:
    lr = 0.3 if dist.get_rank() else 0.5
    built = build(2, "row_wise", nursery=SHARE)
    with pytest.raises(ValueError, match=r"nursery_lr is 0\.\d on rank"):
        FollowingTables(built.model, built.optimizer, nursery_lr=lr)
    wrong: Any
    for wrong in (0, 1.1, float("nan"), True, None):
        with pytest.raises(ValueError, match=r"Invalid nursery_lr=.*: must be a finite number in"):
            FollowingTables(built.model, built.optimizer, nursery_lr=wrong)


@on_ranks(2)
def test_ids_out_of_range_and_a_rank_without_data() -> None:
    """They read and train no nursery row, and are counted."""
    built = build(2, "row_wise", nursery=SHARE)
    slots = FollowingTables(built.model, built.optimizer, every=1)
    ids = built.model.module.tables.following_ids
    keys = [key for keys in FEATURES.values() for key in keys]
    some = batch(0, 2)
    # TorchRec wants batches of one size.
    none = KeyedJaggedTensor(
        keys, torch.empty(0, dtype=torch.int64), lengths=torch.zeros_like(some.lengths())
    )
    features = some if dist.get_rank() else none
    for _ in range(3):
        built.model(features)[0].backward()
        slots.step()
    built.model(none)[0].backward()
    slots.step()
    strays = KeyedJaggedTensor(keys, torch.tensor([50]), lengths=torch.tensor([1, 0, 0, 0]))
    assert len(ids(strays).values()) == 0
    assert ids.slots["item"](torch.tensor([50, -7])).tolist() == [-2, -2]
