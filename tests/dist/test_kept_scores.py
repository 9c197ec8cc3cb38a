"""Mask updates that score only what was written equal the oracle, whatever writes the weights."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

from dist_sparse import ROW, DataNormSparsifier, ImportanceSparsifier, MaskEnforcer
from dist_sparse.extend import ScoreSparsifier
from dist_sparse.groups import Call
from dist_sparse.masking import scores
from dist_sparse.masking.kept_scores import ScoreCache
from dist_sparse.sparsifiers.step import make_masks
from tests.dist.cells import Cell, TableSpec, batch, build, cells, gathered, set_weights, weights
from tests.dist.enforcing import Run, kernels, loss_of, optimizer_of, pieces
from tests.dist.plugin import on_ranks
from tests.dist.test_reshard import reshard

TABLES = (
    TableSpec("user", 1100, 32, ("user_id",)),
    TableSpec("item", 300, 64, ("item_id", "last_item_id")),
)
PLANS = {
    "row_wise": lambda: {"user": row_wise(), "item": table_wise(rank=0)},
    "column_wise": lambda: {
        "user": table_wise(rank=0),
        "item": column_wise(ranks=[0, dist.get_world_size() - 1]),
    },
    "table_wise": lambda: {"user": table_wise(rank=1), "item": table_wise(rank=0)},
}
MOVED = {"user": table_wise(rank=0), "item": table_wise(rank=1)}

Action = tuple[str, Any, float]
TRAIN = st.tuples(
    st.just("train"),
    st.sampled_from(
        [2, 8, 8, 8, 40]
    ),  # samples; of 40 many rows are touched, so that all are scored
    st.sampled_from([0.0, 0.01, 0.02, 0.03, 0.03, -0.1, 0.25]),  # what the level changes by
)
OTHER = st.tuples(
    st.sampled_from(["nothing", "audit", "write", "load", "move", "move"]),
    st.none(),
    st.just(0.0),
)
ACTIONS = st.one_of(TRAIN, TRAIN, TRAIN, OTHER)


def drawn(examples: int) -> list[list[Action]]:
    """Lists of actions, the same at each call and on every rank."""
    found: list[list[Action]] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
    )
    @given(st.lists(ACTIONS, min_size=4, max_size=6))
    def collect(actions: list[Action]) -> None:
        found.append(actions)

    collect()
    return found


def keep_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep scores of the tables here, too."""
    monkeypatch.setattr(scores, "LARGE", 1 << 14)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keep scores, and return the ages of kept ones after each of their updates: 0 where every row
    was scored."""
    keep_small(monkeypatch)
    ages: list[int] = []
    update = ScoreCache.update

    def noted(self: ScoreCache, *args: object) -> None:
        update(self, *args)  # type: ignore[arg-type]
        ages.append(self.age)

    monkeypatch.setattr(ScoreCache, "update", noted)
    return ages


def step_checked(sparsifier: ScoreSparsifier) -> None:
    """A mask update, equal to one that scores all rows."""
    every, sparsifier.full_every = sparsifier.full_every, 1
    with torch.no_grad():
        _, fresh = make_masks(sparsifier, [], Call())
    sparsifier.full_every = every
    sparsifier.step()
    for name, made in fresh.items():
        masks = [mask for mask, _ in made.masks]
        for mask, expected in zip(sparsifier.masks.tables.masks(name), masks, strict=True):
            assert torch.equal(mask.bits, expected.bits), name
    sparsifier.audit()


@torch.no_grad()
def scale_weights(model: Any) -> None:
    for kernel in kernels(model):
        kernel.emb_module.weights_dev.mul_(1.5)
        kernel.emb_module.weights_host.mul_(1.5)


@on_ranks()
@pytest.mark.parametrize(
    ("world", "plan", "block", "examples"),
    [
        (1, "row_wise", (1, 32), 20),
        (2, "row_wise", (1, ROW), 4),
        (2, "column_wise", (1, 32), 4),
        (2, "table_wise", (1, ROW), 6),
    ],
)
def test_masks_are_those_of_the_oracle(
    world: int,
    plan: str,
    block: tuple[int, int | str],
    examples: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After some actions that the ranks share, with ids of their own; and after each of them masks
    and kept scores are those of a pass over all rows."""
    ages = counted(monkeypatch)
    user, item = TABLES
    cell = Cell(plan, world, PLANS[plan](), (replace(user, rows=550 * world), item))
    moved, own = replace(cell, plan=MOVED), random.Random(dist.get_rank())
    model = build(cell, optimizer_args={"lr": 0.5})
    for actions in drawn(examples):
        set_weights(model, weights(cell))
        run = Run(model, block)
        level, placed = 0.4, cell
        for action, samples, change in [("train", 4, 0.0), ("train", 4, 0.03), *actions]:
            level = min(0.9, level + change)
            if action == "train":
                run.train(batch(cell, seed=own.randrange(1000), size=samples))
            elif action == "audit":  # scores rows, and makes no masks
                run.sparsifier.audit()
            elif action == "write":  # torch counts it
                scale_weights(model)
            elif action == "load":
                model.load_state_dict(build(placed).state_dict())
                run.enforcer.settle()
            elif action == "move" and plan == "table_wise":
                placed = cell if placed is moved else moved
                reshard(model, placed.plan, world)
                run.reads.follow(model)
            for group in run.sparsifier.data_groups.values():
                group["sparsity_level"] = level
            step_checked(run.sparsifier)
        run.step()
        run.check_given_out()
        assert not run.faults
        run.enforcer.detach()
        run.reads.close()
        if plan == "table_wise":  # it may be elsewhere now
            model = build(cell, optimizer_args={"lr": 0.5})
    if ages:  # not on ranks whose shards are cut or small
        assert 0 in ages and max(ages) > 2, ages


@on_ranks(2)
def test_scores_that_know_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its state is reset, and after a reshard."""
    ages = counted(monkeypatch)
    cell = Cell("rows", 2, PLANS["row_wise"](), TABLES)
    model = build(cell)
    sparsifier = ImportanceSparsifier(sparsity_level=0.5)
    sparsifier.add_model(model)
    enforcer = MaskEnforcer(sparsifier, optimizer_state="reset").attach(model.fused_optimizer)
    own = random.Random(dist.get_rank())
    for level in (0.5, 0.5, 0.7, 0.6, 0.6, 0.4):
        for _ in range(2):
            model(batch(cell, seed=own.randrange(1000), size=8)).square().mean().backward()
        for group in sparsifier.data_groups.values():
            group["sparsity_level"] = level
        step_checked(sparsifier)
    assert max(ages) > 5
    enforcer.detach()


class Weighted(ImportanceSparsifier):
    """A score of a user's own."""

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        rows = torch.arange(offset[0], offset[0] + len(data)).unsqueeze(1)
        return super().score(name, data, offset=offset, **config) * (1 + rows % 7)


@on_ranks(2)
@pytest.mark.parametrize("event", ["sums are loaded", "apply_masks", "every row", "score"])
def test_scores_change_without_a_backward(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mask update can't see of its own accord has every row scored."""
    keep_small(monkeypatch)
    cell = Cell("rows", 2, PLANS["row_wise"](), TABLES)
    model = build(cell)
    sparsifier = (Weighted if event == "score" else ImportanceSparsifier)(sparsity_level=0.5)
    sparsifier.add_model(model)
    enforcer = MaskEnforcer(sparsifier).attach(model.fused_optimizer)
    views = [view for kernel in kernels(model) for _, _, view in pieces(kernel)]

    def update() -> None:
        model(batch(cell, seed=dist.get_rank(), size=8)).square().mean().backward()
        sparsifier.step()

    for _ in range(3):
        update()
    if event == "sums are loaded":
        other = build(cell)
        other(batch(cell, seed=5, size=64)).square().mean().backward()
        model.fused_optimizer.load_state_dict(other.fused_optimizer.state_dict())
    elif event == "apply_masks":
        for view in views:
            view.data[::3] *= 3.0
        sparsifier.apply_masks()
    elif event == "every row":  # removed rows that were revived unseen are found, and zeroed again
        for view in views:
            view.data[::3] += 0.01
        sparsifier.full_every = 2
        update()
        sparsifier.full_every = 100
    for _ in range(2):
        update()
        sparsifier.audit()
    enforcer.detach()


@on_ranks(2)
def test_what_is_not_seen_is_found_by_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, whoever holds the row."""
    keep_small(monkeypatch)
    cell = Cell("rows", 2, PLANS["row_wise"](), TABLES)
    model = build(cell)
    run = Run(model, (1, ROW))
    run.move(0.5)
    run.sparsifier.audit()
    if dist.get_rank() == 1:
        [(_, _, view)] = [
            piece for kernel in kernels(model) for piece in pieces(kernel) if piece[0] == "user"
        ]
        view.data[3] += 1.0
    with pytest.raises(ValueError, match=r"'user': 1 kept scores differ .* in row 553"):
        run.sparsifier.audit()
    run.sparsifier.full_every = 1
    run.sparsifier.audit()


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "column_wise", "data_parallel"])
def test_an_audit_counts_removed_weights_that_are_not_zero(name: str) -> None:
    """Not those that an optimizer has revived since the last forward, which the enforcer zeroes
    before the next."""
    model = build(cells(2)[name])
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4), norm="L2")
    sparsifier.add_model(model)
    optimizer = optimizer_of(model)
    with MaskEnforcer(sparsifier).attach(optimizer):
        sparsifier.step()
        before = sparsifier.audit()
        loss_of(model(batch(cells(2)[name], seed=dist.get_rank()))).backward()
        optimizer.step()
        if name != "data_parallel":
            assert sum(sparsifier.count_revived().values()) > 0
        assert sparsifier.audit() == before
        full = gathered(model)["user"] + 1
        set_weights(model, {"user": full})
        holders = 2 if name == "data_parallel" else 1
        number = holders * int((sparsifier.full_mask("user") == 0).sum())
        with pytest.raises(
            ValueError, match=rf"'user': {number} removed weights are not zero.*data.*apply_masks"
        ):
            sparsifier.audit()
        sparsifier.apply_masks()
        assert sparsifier.audit() == before
    set_weights(model, {"user": full})
    with pytest.warns(
        UserWarning,
        match=rf"'user': {number} removed weights are not zero.*no enforcer is attached",
    ):
        assert sparsifier.audit() == before
