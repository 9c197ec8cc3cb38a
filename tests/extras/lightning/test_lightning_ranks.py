"""SparsifyCallback under Lightning's DDP: the same masks on both ranks, zeros in every forward, one
file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor

from dist_sparse.extras.lightning import SparsifyCallback
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.harness import run_ranks
from tests.dist.plugin import on_ranks
from tests.extras.lightning.lightning_fits import (
    PLAN,
    Collected,
    Net,
    Numbered,
    batches,
    quiet,
    trainer,
    zero_rows,
)
from tests.extras.lightning.lightning_sharded import check_sharded
from tests.keywords import nested
from tests.oracle import oracle_mask

WORLD = 2
DUE = (1, 3, 5, 7, 9)
LEFT = round(PLAN["level"] * 40)


class NumberedCollected(Numbered, Collected):
    """Both."""


class Before(pl.Callback):
    """Notes the weights that masks are made from, and the level; before the callback that updates
    them."""

    def __init__(self, sparse: SparsifyCallback, name: str) -> None:
        self.sparse, self.name = sparse, name
        self.seen: list[tuple[bool, Tensor, float]] = []
        self.due: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert self.sparse.training is not None
        sparsifier = self.sparse.training.sparsifier
        level = sparsifier.data_groups[self.name]["sparsity_level"]
        stepped = trainer.global_step > self.sparse.training.scheduler.last_epoch
        due = stepped and sparsifier.enable_mask_update
        self.seen.append((due, pl_module.bag.weight.detach().clone(), level))
        self.due += [trainer.global_step - 1] if due else []
        reset_traffic()


class After(pl.Callback):
    """Compares the masks with the oracle's; counts collectives."""

    def __init__(self, before: Before) -> None:
        self.before = before
        self.mask = torch.ones(40, 8, dtype=torch.int8)
        self.sent: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.sent.append(traffic().collectives)
        due, weights, level = self.before.seen[-1]
        training = self.before.sparse.training
        assert training is not None
        if due:
            for other in gathered(weights):
                assert torch.equal(other, weights)
            self.mask = oracle_mask(weights, level, (1, "ROW"), norm="L2")
        for mask in gathered(training.sparsifier.full_mask(self.before.name)):
            assert torch.equal(mask, self.mask)
        assert bool((pl_module.bag.weight[self.mask == 0] == 0).all())


def gathered(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def fit(module: Net, callbacks: list[Any], folder: Path, **options: Any) -> pl.Trainer:
    ckpt = options.pop("ckpt_path", None)
    plain = {"strategy": "ddp", "devices": WORLD, "plugins": [TorchElasticEnvironment()]}
    fitted = trainer(folder, *callbacks, **{**plain, **options})
    with quiet():
        fitted.fit(module, batches(24), batches(4), ckpt_path=ckpt)
    return fitted


MASKS: dict[str, tuple[type[Net], str, dict[str, Any]]] = {
    "every batch": (Numbered, "bag", {}),
    "accumulated, clipped": (
        Numbered,
        "bag",
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "unused parameters": (Numbered, "bag", {"strategy": "ddp_find_unused_parameters_true"}),
    "mixed precision": (Numbered, "bag", {"precision": "bf16-mixed"}),
    "a collection of TorchRec's": (NumberedCollected, "item", {}),
}


@on_ranks(WORLD)
@pytest.mark.parametrize(("kind", "name", "options"), MASKS.values(), ids=MASKS)
def test_masks(kind: type[Net], name: str, options: dict[str, Any], tmp_path: Path) -> None:
    module, sparse = kind(), SparsifyCallback(**PLAN)
    before = Before(sparse, name)
    after = After(before)
    done = fit(module, [before, sparse, after], tmp_path, val_check_interval=4, **options)
    steps = done.global_step
    assert sparse.training is not None and sparse.training.scheduler.last_epoch == steps
    assert before.due == [step for step in DUE if step < steps] and before.due
    assert all(count for count, (due, *_) in zip(after.sent, before.seen, strict=True) if due)
    idle = [count for count, (due, *_) in zip(after.sent, before.seen, strict=True) if not due]
    assert idle == [0] * len(idle), "nothing is sent where no step is due"
    assert module.validated[-1] == zero_rows(module.bag.weight) > 0
    assert not sparse.training.enforcer.attached


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the checkpoints of two ranks."""
    return tmp_path_factory.mktemp("lightning")


@on_ranks(WORLD)
def test_resumes(folder: Path) -> None:
    """From the middle of an epoch and from its end: the same bits as the uninterrupted run, on both
    ranks."""
    whole = Numbered()
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    callbacks = [SparsifyCallback(**PLAN), saving]
    fit(whole, callbacks, folder, max_epochs=2, enable_checkpointing=True)
    for step in (5, 12, 14):
        module, sparse = Numbered(), SparsifyCallback(**PLAN)
        with torch.no_grad():
            module.bag.weight.add_(dist.get_rank())
        fit(module, [sparse], folder, max_epochs=2, ckpt_path=folder / f"step={step}.ckpt")
        assert module.trained == whole.trained[step:]
        assert sparse.training is not None and sparse.training.scheduler.last_epoch == 24
        for p, q in zip(module.parameters(), whole.parameters(), strict=True):
            assert torch.equal(p, q)
            assert all(torch.equal(p, other) for other in gathered(p.detach()))


class Drifting(pl.Callback):
    """Another weight on one rank."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 4 and trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.bag.weight[3] += 1


REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "a level of one rank": (
        [],
        {"level": {"no": 0.5}},
        r"rank 1: ValueError: Invalid level: \['no'\] match none",
    ),
    "a plan of one rank": ([], {"end": 11}, "The ranks disagree"),
    "a table of one rank": ([], {"include": "nothing"}, "rank 1: .*matches none of the tables"),
    "replicas that drift": ([Drifting()], {}, r"rank.*1"),
}


@on_ranks(WORLD)
@pytest.mark.parametrize(("callbacks", "wrong", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(callbacks: list[Any], wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    """On both ranks, and another fit works."""
    given = {**PLAN, **(wrong if dist.get_rank() == 1 else {})}
    sparse = SparsifyCallback(**nested(**given))
    with pytest.raises(ValueError, match=message):
        fit(Numbered(), [*callbacks, sparse], tmp_path)
    assert sparse.training is None or not sparse.training.enforcer.attached
    module = Numbered()
    fit(module, [SparsifyCallback(**PLAN)], tmp_path)
    assert zero_rows(module.bag.weight) == LEFT


@on_ranks(WORLD)
def test_sharded(tmp_path: Path) -> None:
    check_sharded(tmp_path)


def test_a_checkpoint_of_two_ranks_is_resumed_by_one(folder: Path, tmp_path: Path) -> None:
    checkpoint = folder / "step=12.ckpt"
    if not checkpoint.exists():
        run_ranks(WORLD, test_resumes, folder)
    module, sparse = Net(), SparsifyCallback(**PLAN)
    saved = torch.load(checkpoint, weights_only=True)
    fitted = trainer(tmp_path, sparse, max_epochs=2)
    with quiet():
        fitted.fit(module, batches(), ckpt_path=checkpoint)
    assert sparse.training is not None and sparse.training.scheduler.last_epoch == 24
    assert set(module.trained) == {zero_rows(saved["state_dict"]["bag.weight"])} == {LEFT}
