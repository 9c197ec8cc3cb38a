"""Following tables in pipelines, in evaluation, and in checkpoints."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec import KeyedJaggedTensor
from torchrec.distributed import TrainPipelineSparseDist

from dist_sparse import Checkpoints, expand, plan, sparsify
from dist_sparse.extras.following import FollowingTables
from tests.checkpoint.faults import inject, kill
from tests.dist.cells import gathered
from tests.dist.harness import RanksFailed, run_ranks
from tests.dist.plugin import on_ranks
from tests.extras.following.models import FEATURES, IDS, OWN, SHARE, SLOTS, Built, batch, build
from tests.extras.following.oracle import Oracle, holders
from tests.extras.following.test_sharded import HOW, SPREAD, everywhere

pytestmark = pytest.mark.whole


def pipeline_of(built: Built, **how: Any) -> Any:
    return TrainPipelineSparseDist(
        built.model, built.optimizer, torch.device("cpu"), pipeline_postproc=True, **how
    )


def count(oracles: dict[str, Oracle], features: Any) -> None:
    """Look a batch of all ranks up."""
    for bags in everywhere(features):
        for table, oracle in oracles.items():
            for key in FEATURES[table]:
                for bag in bags[key]:
                    oracle.look_up(bag)


@on_ranks()
@pytest.mark.parametrize(("world", "bags"), [(2, True), (2, False), (4, True)])
def test_pipelines_translate_ahead(world: int, bags: bool) -> None:
    """An id that loses its slot between the translation of a batch and its forward still trains its
    own row in that batch: the slot changes hands after it."""
    steps = 13
    built = build(world, "row_wise", bags=bags, nursery=SHARE)
    slots = FollowingTables(built.model, built.optimizer, **HOW)
    oracles = {table: Oracle(IDS[table], OWN[table], ahead=1, **HOW) for table in SLOTS}
    pipeline = pipeline_of(built)
    batches = [batch(step, world) for step in range(steps)]
    stream = iter(batches)
    for step in range(steps):
        pipeline.progress(stream)
        ahead = step + 1 < steps
        count(oracles, batches[step])
        weights = gathered(built.model)
        slots.step()
        now = gathered(built.model)
        for table, oracle in oracles.items():
            oracle.ahead = int(ahead)
            oracle.step()
            assert holders(built.model.state_dict(), table) == oracle.id_of_slot, (step, table)
            same = [slot for slot in range(OWN[table]) if slot not in dict(oracle.written)]
            assert torch.equal(now[table][same], weights[table][same])
            # The nursery is emptied when the new holders are admitted, not before.
            nursery = slice(OWN[table], SLOTS[table])
            is_admission = step > 0 and step % HOW["every"] == 0
            expected = torch.zeros(1) if is_admission else weights[table][nursery]
            assert torch.equal(now[table][nursery], expected.expand_as(now[table][nursery]))
    assert min(slots.moved.values()) > 5


@on_ranks(2)
def test_dropped_batches_are_not_in_flight() -> None:
    """Batches that a pipeline drops at the end of an epoch, or that fail between translation and
    forward, hold no update up; that the data set keeps them alive does not matter."""
    built = build(2, "row_wise")
    slots = FollowingTables(built.model, built.optimizer, every=4)
    ids = built.model.module.tables.following_ids
    data_set = [batch(step, 2) for step in range(6)]
    for _ in range(4):
        pipeline, stream = pipeline_of(built, execute_all_batches=False), iter(data_set)
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(stream)
                slots.step()
        pipeline.detach()
        ids(data_set[-1])
    built.model(data_set[0])
    assert ids.ahead == 0
    # The same batch twice in a row: one of the two is in flight.
    ids(data_set[0])
    ids(data_set[0])
    ids.record_lookup(data_set[0])
    assert ids.ahead == 1
    assert slots.steps >= 16
    assert min(slots.moved.values()) > 2


@on_ranks(1)
def test_a_pipeline_resumes_where_it_was_saved() -> None:
    """A batch in flight is not in the saved counts: it is counted when it is replayed."""
    batches = [batch(step, 1) for step in range(13)]

    def run(cut: int | None) -> tuple[list[Any], Any]:
        built = build(1, "row_wise", nursery=SHARE)
        slots = FollowingTables(built.model, built.optimizer, **HOW)
        pipeline, stream, found = pipeline_of(built), iter(batches), []
        for step in range(12):
            if step == cut:
                state = copy.deepcopy((built.model.state_dict(), slots.state_dict()))
                built = build(1, "row_wise", nursery=SHARE)
                slots = FollowingTables(built.model, built.optimizer, **HOW)
                built.model.load_state_dict(state[0])
                slots.load_state_dict(state[1])
                pipeline, stream = pipeline_of(built), iter(batches[cut:])
            pipeline.progress(stream)
            slots.step()
            model = built.model.state_dict()
            found.append([holders(model, table) for table in SLOTS])
        return found, slots.state_dict()["counts"]["item"].writes[0][1]

    slots, counts = run(None)
    for cut in range(1, 11):
        again, counts_again = run(cut)
        assert again == slots, cut
        assert torch.equal(counts_again, counts), cut


@on_ranks(2)
def test_evaluation_counts_nothing() -> None:
    built = build(2, "row_wise", bags=False)
    slots = FollowingTables(built.model, built.optimizer, every=1)
    with torch.no_grad():
        built.model(batch(0, 2))
    built.model.eval()
    built.model(batch(0, 2))
    slots.step()
    assert slots.moved == dict.fromkeys(SLOTS, 0)
    built.model.train()
    _, out = built.model(batch(0, 2))
    lengths = batch(0, 2).lengths()
    assert len(out) == int(lengths.sum())
    slots.step()
    assert min(slots.moved.values()) > 2


@on_ranks(1)
def test_a_tie_moves_no_row() -> None:
    """Of equal scores holders stay, then smaller ids win."""
    built = build(1, "row_wise")
    slots = FollowingTables(built.model, built.optimizer, every=1)

    def held_after(item: list[int]) -> list[int]:
        lengths = torch.tensor([1] * len(item) + [0] * 3 * len(item))
        keys = [key for keys in FEATURES.values() for key in keys]
        built.model(KeyedJaggedTensor(keys, torch.tensor(item), lengths=lengths))
        slots.step()
        return sorted(holders(built.model.state_dict(), "item"))

    assert held_after([*range(20, 30), *range(20, 29)]) == [*range(20, 30)]
    # Two lookups and an age of 1 are as good as one of age 0. Only 29 has less: 7 gets its slot.
    assert held_after([8, 7]) == [7, *range(20, 29)]


def train(built: Built, slots: FollowingTables, steps: range, world: int, spread: int = 1) -> None:
    for step in steps:
        built.optimizer.zero_grad()
        loss, _ = built.model(batch(step, world, spread=spread))
        loss.backward()
        built.optimizer.step()
        slots.step()


def result(built: Built) -> dict[str, Any]:
    state = built.model.state_dict()
    return {table: (holders(state, table), gathered(built.model)[table]) for table in SLOTS}


def seven_more_steps(
    root: Path, world: int, kind: str, spread: int, nursery: float
) -> list[dict[str, Any]]:
    """Resume from a checkpoint at step 7, or train until then and save one; then train on. Returns
    holders and rows at both ends."""
    built = build(world, kind, spread=spread, nursery=nursery)
    slots = FollowingTables(built.model, built.optimizer, **HOW, candidates=2)
    both = [built.model.fused_optimizer, built.optimizer]
    parts: dict[str, Any] = {"model": built.model, "optimizer": both, "sparse": slots}
    Checkpoints(root).resume_latest(**parts)
    if not slots.steps:
        train(built, slots, range(7), world, spread)
        Checkpoints(root).save(7, **parts)
    begin = result(built)
    train(built, slots, range(7, 14), world, spread)
    return [begin, result(built)]


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "nursery"), [(1, 0), (1, SHARE), (SPREAD, SHARE)])
def test_two_ranks_save_for_one_and_four(spread: int, nursery: float, tmp_path: Path) -> None:
    how = (spread, nursery)
    [[begin, end], _] = run_ranks(2, seven_more_steps, tmp_path, 2, "row_wise", *how)
    for world, kind in ((1, "table_wise"), (4, "row_wise")):
        resumed = run_ranks(world, seven_more_steps, tmp_path, world, kind, *how)
        for table in SLOTS:
            for new_begin, new_end in resumed:
                assert new_begin[table][0] == begin[table][0]
                assert torch.equal(new_begin[table][1], begin[table][1])
                # TorchRec divides gradients by the number of ranks, so rows differ from here on.
                assert new_end[table][0] == end[table][0]


@on_ranks(2)
@pytest.mark.parametrize("spread", [1, SPREAD])
def test_saves_for_other_shardings(spread: int, tmp_path: Path) -> None:
    how = {**HOW, "candidates": 2}
    built = build(2, "row_wise", spread=spread)
    slots = FollowingTables(built.model, built.optimizer, **how)
    train(built, slots, range(7), 2, spread)
    state = {"model": built.model.state_dict(), "slots": slots.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    Checkpoints(tmp_path / "own").save(
        7, model=built.model, optimizer=built.optimizer, sparse=slots
    )
    train(built, slots, range(7, 14), 2, spread)
    expected = result(built)
    for own in (True, False):
        again = build(2, "column_wise" if own else "row_wise", spread=spread)
        resumed = FollowingTables(again.model, again.optimizer, **how)
        if own:
            Checkpoints(tmp_path / "own").resume_latest(
                model=again.model, optimizer=again.optimizer, sparse=resumed
            )
        else:
            held = {"model": again.model.state_dict(), "slots": resumed.state_dict()}
            dcp.load(held, checkpoint_id=tmp_path / "dcp")
            again.model.load_state_dict(held["model"])
            resumed.load_state_dict(held["slots"])
        assert resumed.steps == 7
        train(again, resumed, range(7, 14), 2, spread)
        found = result(again)
        for table in SLOTS:
            assert found[table][0] == expected[table][0]


def saving(root: Path, killed: bool) -> dict[str, Any]:
    """Resume, train to step 12 and save every third; on request die while the third is written."""
    built = build(2, "row_wise", nursery=SHARE)
    slots = FollowingTables(built.model, built.optimizer, **HOW)
    both = [built.model.fused_optimizer, built.optimizer]
    parts: dict[str, Any] = {"model": built.model, "optimizer": both, "sparse": slots}
    checkpoints = Checkpoints(root)
    checkpoints.resume_latest(**parts)
    if killed:
        # Each save opens it twice: to write it, and to hash it.
        inject(kill, rank=1, when_it_opens="__1_0.distcp", for_the=5)
    for first in range(slots.steps, 12, 3):
        train(built, slots, range(first, first + 3), 2)
        checkpoints.save(first + 3, **parts)
    counts = slots.state_dict()["counts"]["item"].writes[0][1]
    return {**result(built), "counts": counts.clone()}


@pytest.mark.slow
def test_a_killed_rank_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    """Slots, rows, nurseries and counts of the newest checkpoint; the end is that of a run without
    a kill."""
    with pytest.raises(RanksFailed, match=r"rank 1 ----\ndied with exit code -9"):
        run_ranks(2, saving, tmp_path / "killed", True)
    assert Checkpoints(tmp_path / "killed").steps() == [3, 6]
    ended = run_ranks(2, saving, tmp_path / "killed", False)
    whole = run_ranks(2, saving, tmp_path / "whole", False)
    for mine, other in zip(ended, whole, strict=True):
        assert torch.equal(mine["counts"], other["counts"])
        for table in SLOTS:
            assert mine[table][0] == other[table][0]
            assert torch.equal(mine[table][1], other[table][1])


@on_ranks(2)
@pytest.mark.parametrize("bags", [True, False])
def test_what_would_take_slots_for_ids_is_refused(bags: bool) -> None:
    """A mask or a whole table of them would be of other ids a moment later."""
    built = build(2, "row_wise", bags=bags)
    for use in (
        lambda: sparsify(built.model, built.optimizer, level=0.5, end=1),
        lambda: expand(built.model, optimizer=built.optimizer),
    ):
        with pytest.raises(ValueError, match="its rows are slots, which FollowingTables gives"):
            use()
    with pytest.raises(ValueError, match="Following tables have a fixed capacity"):
        plan(built.model, "50%")
