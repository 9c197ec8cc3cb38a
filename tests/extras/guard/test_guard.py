"""A level that asks first: an update that costs quality is undone, as if it had never been."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dist_sparse import SparseTraining, sparsify
from dist_sparse.extras.guard import Guard
from tests.keywords import nested
from tests.states import edited

ROWS = 40
PLAN: dict[str, Any] = {"level": 0.8, "schedule": "linear", "end": 8, "every": 2, "min_rows": 0}
LIMIT = 0.5
"""Sparsity from which on the metric of these tests is worse. Updates are at 0, 0.2, 0.4, 0.6."""

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda params: optim.SGD(params, lr=0.01, momentum=0.9),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "adam": lambda params: optim.Adam(params, lr=0.1),
}


def made(kind: str = "adam", **plan: Any) -> tuple[nn.Module, optim.Optimizer, Any]:
    """The training's ``guard`` is a Guard; of plans with ``guard=None`` it allows all updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(ROWS, 8, mode="sum"), nn.Linear(8, 1))
    optimizer = OPTIMIZERS[kind](model.parameters())
    return (
        model,
        optimizer,
        sparsify(model, optimizer, **nested(**{"guard": Guard(), **PLAN, **plan})),
    )


def learn(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    ids = torch.randint(ROWS, (6, 5), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    (model(ids) - ids.sum(1, keepdim=True) / ROWS).square().mean().backward()
    optimizer.step()


def metric_of(sparse: SparseTraining) -> float:
    return 0.75 if sparse.sparsity < LIMIT else 0.7


def everything(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    """All weights and the optimizer state of all that are not zero: what an update resets of
    removed ones is reset."""
    found = []
    for parameter in model.parameters():
        weight = parameter.detach().clone()
        found.append(weight)
        for value in optimizer.state[parameter].values():
            found.append(value * (weight != 0) if value.shape == weight.shape else value.clone())
    return found


@pytest.mark.parametrize(
    ("kind", "block", "optimizer_state"),
    [
        ("sgd", "row", "keep"),
        ("adagrad", "row", "reset"),
        ("adagrad", "1x4", "keep"),
        ("adam", "row", "keep"),
        ("adam", "3x5", "reset"),
        ("adam", "col", "keep"),
    ],
)
def test_a_run_that_was_undone_is_one_that_stopped_by_hand(
    kind: str, block: str, optimizer_state: str
) -> None:
    plan = {"block": block, "optimizer_state": optimizer_state}
    model, optimizer, sparse = made(kind, **plan)
    assert sparse.guard.check(0.75)
    holds = []
    for step in range(14):
        learn(model, optimizer, step)
        sparse.step()
        holds.append(sparse.guard.check(metric_of(sparse)))
        if not holds[-1]:
            # Samples are of the masks that were undone: they left with them.
            assert "lookups of removed rows: not known" in sparse.summary()
    by_hand, its_optimizer, its = made(kind, guard=None, **plan)
    for step in range(14):
        learn(by_hand, its_optimizer, step)
        if step < 6:
            its.step()
    assert holds == [True] * 6 + [False] + [True] * 7
    assert sparse.sparsifier.fingerprint() == its.sparsifier.fingerprint()
    found, wanted = everything(model, optimizer), everything(by_hand, its_optimizer)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    # It ends just below the limit, and says so.
    assert sparse.sparsity < LIMIT <= sparse.sparsity + 0.25
    assert sparse.finished and sparse.scheduler.end == 4
    assert [one.undone for one in sparse.validations if one.undone is not None] == [6]
    [stats] = sparse.sparsifier.table_stats()
    assert stats.target == pytest.approx(0.4)
    sparse.sparsifier.audit()
    sparse.detach()
    its.detach()


def test_an_update_waits_for_the_validation_of_the_one_before() -> None:
    model, optimizer, sparse = made(every=1, end=4)
    sparse.guard.check(0.9)
    seen = []
    for step in range(12):
        learn(model, optimizer, step)
        sparse.step()
        seen.append(round(sparse.sparsity, 3))
        if step % 3 == 2:
            sparse.guard.check(0.9)
    # Updates at 1 and, owed, right after each validation, at the level of that moment.
    assert seen == [0.0, 0.2, 0.2, 0.6, 0.6, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]
    assert sparse.finished
    sparse.detach()


def test_it_asks_before_the_first_update_and_ends_below_the_limit() -> None:
    model, optimizer, sparse = made(level=0.99, end=20, every=1)
    with pytest.warns(UserWarning, match="has let nothing be removed"):
        for step in range(5):
            learn(model, optimizer, step)
            sparse.step()
    assert sparse.sparsity == 0, "no update before the first validation"
    sparse.guard.check(0.75)
    for step in range(5, 30):
        learn(model, optimizer, step)
        sparse.step()
        sparse.guard.check(metric_of(sparse))
    assert sparse.sparsity == 0.45 and sparse.finished
    assert "schedule ended at 9, level 0.4387" in repr(sparse)
    sparse.detach()


def test_without_a_validation_warns_once_at_its_second_update() -> None:
    model, optimizer, sparse = made(level=0.99, begin=2, end=20, every=2)
    learn(model, optimizer, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            sparse.step()
    with pytest.warns(
        UserWarning, match=r"has let nothing be removed .* Guard\.check\(metric\)"
    ) as caught:
        for _ in range(5):
            sparse.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    sparse.detach()


@pytest.mark.filterwarnings("error")
def test_training_and_then_validating_does_not_warn() -> None:
    model, optimizer, sparse = made(level=0.99, end=4, every=2)
    for step in range(4):
        learn(model, optimizer, step)
        sparse.step()
        if step % 2:
            sparse.guard.check(0.75)
    assert sparse.sparsity > 0


def test_less_is_better_and_a_tolerance() -> None:
    model, optimizer, sparse = made(guard=Guard(tolerance=0.25, mode="min"))
    assert sparse.guard.check(1.0)
    for step, metric, holds in [(0, 1.0, True), (1, 1.0, True), (2, 1.25, True), (3, 0.5, True)]:
        learn(model, optimizer, step)
        sparse.step()
        assert sparse.guard.check(metric) == holds, step
    learn(model, optimizer, 4)
    sparse.step()
    # Against the best one since.
    assert not sparse.guard.check(0.76)
    assert sparse.sparsity == 0.2
    sparse.detach()


def test_a_fall_without_an_update_undoes_nothing_and_holds_the_next_one_back() -> None:
    model, optimizer, sparse = made()
    for step in range(3):
        sparse.guard.check(0.75)
        learn(model, optimizer, step)
        sparse.step()
    assert sparse.guard.check(0.75) and not sparse.guard.check(0.7)
    for step in range(3, 6):
        learn(model, optimizer, step)
        sparse.step()
    assert sparse.sparsity == 0.2 and sparse.guard.check(0.75)
    learn(model, optimizer, 6)
    sparse.step()
    assert sparse.sparsity == 0.6
    sparse.detach()


@pytest.mark.parametrize("stop", [4, 6, 7, 8, 10])
@pytest.mark.filterwarnings("ignore:Sparse training stopped")
def test_resumed_is_as_not_interrupted(stop: int) -> None:
    def trained(stops: bool) -> tuple[list[Tensor], dict[str, str], Any]:
        model, optimizer, sparse = made("adagrad", every=1, end=8)
        sparse.guard.check(0.75)
        for step in range(12):
            if stops and step == stop:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
                state = copy.deepcopy(sparse.state_dict())
                sparse.detach()
                model, optimizer, sparse = made("adagrad", every=1, end=8)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                sparse.load_state_dict(state)
            learn(model, optimizer, step)
            sparse.step()
            if step % 2:
                sparse.guard.check(metric_of(sparse))
        prints = sparse.sparsifier.fingerprint()
        sparse.detach()
        return everything(model, optimizer), prints, sparse.state_dict()["schedule"]

    if stop == 7:
        # Between the update at 6 and its validation: what it removed was not saved.
        with pytest.warns(UserWarning, match="step 6, which can't be undone"):
            trained(stops=True)
        return
    one, other = trained(stops=False), trained(stops=True)
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert one[1:] == other[1:]


def kept_bytes(sparse: SparseTraining) -> int:
    """Bytes that are kept of the last update."""
    total = 0
    for shards in vars(vars(sparse.guard)["_last"])["_removed"].values():
        for shard in shards:
            total += sum(each.nbytes for each in (shard.mask.bits, shard.rows))
            total += sum(part.nbytes for part in chain.from_iterable(shard.values))
    return total


def test_weights_that_are_loaded_between_update_and_validation_stay() -> None:
    model, optimizer, sparse = made(every=1, end=8)
    sparse.guard.check(0.75)
    for step in range(2):
        learn(model, optimizer, step)
        sparse.step()
    other = {name: torch.full_like(weight, 2.0) for name, weight in model.state_dict().items()}
    model.load_state_dict(other)
    assert kept_bytes(sparse) == 0
    with pytest.warns(UserWarning, match="can't be undone: weights, masks or a state"):
        assert not sparse.guard.check(0.7)
    assert sparse.validations[-1].undone is sparse.guard.state_dict()["undone"] is None
    weight = next(iter(model.state_dict().values()))
    assert weight.unique().tolist() == [0.0, 2.0] and sparse.finished
    sparse.detach()


@pytest.mark.parametrize("how", ["load", "squash", "squash some"])
def test_masks_that_are_replaced_while_a_guard_waits_can_not_be_undone(how: str) -> None:
    """The update that waits is no longer the last word on the masks: undoing it would have put
    older masks, and weights under them, in place of what was loaded or squashed."""
    other, other_steps, others = made("sgd", guard=None, end=0, every=1)
    learn(other, other_steps, 0)
    others.step()
    masks = copy.deepcopy(others.sparsifier.state_dict())
    others.detach()
    model, optimizer, sparse = made("sgd", every=1, end=8)
    sparse.guard.check(0.75)
    for step in range(2):
        learn(model, optimizer, step)
        sparse.step()
    if how == "load":
        sparse.sparsifier.load_state_dict(masks)
    else:
        sparse.sparsifier.squash_mask(names=["0"] if how == "squash some" else None)
    before = [weight.clone() for weight in model.state_dict().values()]
    assert kept_bytes(sparse) == 0
    with pytest.warns(UserWarning, match=r"can't be undone: .*masks"):
        assert not sparse.guard.check(0.7)
    assert sparse.validations[-1].undone is None
    assert all(map(torch.equal, before, model.state_dict().values()))
    if how == "load":
        assert sparse.sparsity == 0.8
    learn(model, optimizer, 3)
    sparse.step()
    sparse.detach()


def test_what_is_kept_is_the_removed_weights_and_is_released() -> None:
    model, optimizer, sparse = made("sgd", block="row", end=2, every=2)
    sparse.guard.check(0.75)
    for step in range(3):
        learn(model, optimizer, step)
        sparse.step()
    kept = kept_bytes(sparse)
    removed = round(0.8 * ROWS)
    assert kept == 2 * removed * 8 * 4 + ROWS + ROWS // 8, "weights, momentum, flags and bits"
    sparse.guard.check(0.75)
    assert kept_bytes(sparse) == 0
    sparse.detach()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"metric": float("nan")}, "Invalid metric=nan: must be a finite number"),
        ({"metric": float("inf")}, "Invalid metric=inf"),
        ({"metric": torch.tensor(float("nan"))}, "Invalid metric=nan"),
        ({"metric": torch.ones(2)}, "Invalid metric=tensor"),
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], says: str) -> None:
    _, _, sparse = made()
    with pytest.raises(ValueError, match=says):
        sparse.guard.check(**arguments)
    assert sparse.guard.state_dict()["best"] is None and not sparse.validations
    sparse.detach()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tolerance": -1.0}, "Invalid tolerance=-1.0: must be a finite number >= 0"),
        ({"mode": []}, r"Invalid mode=\[\]: must be one of 'max', 'min'"),
        ({"mode": "least"}, "Invalid mode='least': must be one of 'max', 'min'"),
    ],
    ids=str,
)
def test_bad_settings(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Guard(**arguments)


@pytest.mark.parametrize("metric", [torch.tensor(0.75), torch.tensor([0.75], dtype=torch.float64)])
def test_a_metric_of_torch_is_a_number(metric: Tensor) -> None:
    _, _, sparse = made()
    assert sparse.guard.check(metric)
    assert [type(each.metric) for each in sparse.validations] == [float]
    sparse.detach()


def test_refusals() -> None:
    with pytest.raises(RuntimeError, match=r"pass the guard to sparsify\(\)"):
        Guard().check(0.75)
    _, _, sparse = made()
    sparse.detach()
    with pytest.raises(RuntimeError, match="needs an attached SparseTraining"):
        sparse.guard.check(0.75)
    model, optimizer, sparse = made(begin=0, end=0)
    learn(model, optimizer, 0)
    # Past the guard, which waits.
    sparse.sparsifier.data_groups["0"]["sparsity_level"] = 0.5
    sparse.sparsifier.enable_mask_update = True
    sparse.sparsifier.step()
    with pytest.raises(ValueError, match=r"The first Guard.check\(\) must come before weights"):
        sparse.guard.check(0.75)
    sparse.detach()
    for wrong in ({"guard": 0.75}, {"guard": Guard}):
        with pytest.raises(ValueError, match=r"Invalid guard=.*extras\.guard\.Guard\(\)"):
            made(**wrong)


def test_updates_that_can_not_be_undone_are_refused() -> None:
    with pytest.raises(ValueError, match="Invalid guard with rotate or decay"):
        made("adagrad", score="frequency", decay=0.9)
    rotation = pytest.importorskip("dist_sparse.extras.rotation")
    plan: dict[str, Any] = {"block": "col", "optimizer_state": "reset"}
    with pytest.raises(ValueError, match="Invalid guard with rotate or decay"):
        made("sgd", rotate=rotation.Rotation("table"), **plan)
    _, _, sparse = made("sgd", **plan)
    rotation.rotate(sparse.sparsifier)
    with pytest.raises(ValueError, match="can't undo updates that rotate tables"):
        sparse.guard.check(0.75)
    sparse.detach()


def test_a_state_fits_a_training_with_the_same_guard() -> None:
    """With one or without, and of one mode; what is refused changes nothing."""
    _, _, sparse = made()
    sparse.guard.check(0.75)
    guarded = copy.deepcopy(sparse.state_dict())
    with edited(guarded, "schedule") as parts:
        parts["guard"]["mode"] = "min"
    with pytest.raises(ValueError, match=r"Invalid mode='max' of the guard: .* mode='min'"):
        sparse.load_state_dict(guarded)
    guarded = copy.deepcopy(sparse.state_dict())
    sparse.detach()
    _, _, plain = made(guard=None)
    unguarded = plain.state_dict()
    with pytest.raises(ValueError, match=r"a training with a guard: pass one, as Advanced\(guard"):
        plain.load_state_dict(guarded)
    plain.load_state_dict(unguarded)
    plain.detach()
    _, _, sparse = made()
    with pytest.raises(ValueError, match="a training without a guard: leave Advanced"):
        sparse.load_state_dict(unguarded)
    sparse.load_state_dict(guarded)
    assert sparse.guard.state_dict()["best"] == 0.75
    sparse.detach()


def test_a_guard_starts_again_with_another_training() -> None:
    guard = Guard()
    _, _, sparse = made(guard=guard)
    assert guard.check(0.75) and len(sparse.validations) == 1
    sparse.detach()
    _, _, again = made(guard=guard)
    assert not again.validations and guard.check(0.25)
    again.detach()


@pytest.mark.parametrize("of_other_model", [False, True])
def test_a_guard_of_an_attached_training_gets_no_other(of_other_model: bool) -> None:
    """A cell of a notebook that runs twice: the refused call left the first training unguarded."""
    guard = Guard()
    model, optimizer, sparse = made(guard=guard, every=1, end=8)
    guard.check(0.75)
    with pytest.raises(ValueError, match="The guard belongs to an attached SparseTraining"):
        if of_other_model:
            made(guard=guard)
        else:
            sparsify(model, optimizer, **nested(guard=guard, **PLAN))
    assert guard.state_dict()["best"] == 0.75
    for step in range(4):
        learn(model, optimizer, step)
        sparse.step()
    # The second update waits for the validation of the first.
    assert sparse.sparsity == 0.1
    assert guard.check(0.75)
    sparse.detach()


def test_a_refused_training_does_not_get_the_guard() -> None:
    guard = Guard()
    _, _, before = made(guard=guard)
    guard.check(0.75)
    before.detach()
    model, optimizer, sparse = made(guard=None)
    with pytest.raises(ValueError, match="already sparsified"):
        sparsify(model, optimizer, **nested(guard=guard, **PLAN))
    assert guard.state_dict()["best"] == 0.75 and len(before.validations) == 1
    sparse.detach()


def test_a_warning_that_is_an_error_ends_the_schedule_too() -> None:
    model, optimizer, sparse = made(every=1, end=8)
    sparse.guard.check(0.75)
    for step in range(2):
        learn(model, optimizer, step)
        sparse.step()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="can't be undone"):
            sparse.guard.check(0.7)
    assert sparse.guard.state_dict()["pending"] is None and sparse.finished
    sparse.detach()
