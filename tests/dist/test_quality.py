"""The quality benchmark: its kernel trains as TorchRec does, and every method runs and keeps to its bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")

from benchmarks.quality import BUDGETS
from benchmarks.quality_kernel import Model, rotated
from benchmarks.quality_methods import METHODS, forms, run
from benchmarks.quality_report import plot, report
from tests.dist.plugin import on_ranks
from two_tower.data import Interactions, load
from two_tower.model import Towers, build, keyed
from two_tower.train import loss

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")

USERS, ITEMS, BATCH = 90, 60, 64


def _npz(folder: Path) -> Path:
    rng = np.random.default_rng(7)
    pairs = rng.permutation(np.unique(rng.integers((USERS, ITEMS), size=(2_000, 2)), axis=0)).astype(np.int32)
    (user, item), (test_user, test_item) = pairs[:1000].T, pairs[1000:].T
    named = {"train_user": user, "train_item": item, "test_user": test_user, "test_item": test_item}
    np.savez(folder / "tiny.npz", num_users=USERS, num_items=ITEMS, **named)
    return folder / "tiny.npz"


def _trained(data: Interactions) -> tuple[list[torch.Tensor], torch.Tensor, Model]:
    """Tables and biases after two epochs with TorchRec, and a model that started from the same weights."""
    model, optimizer = build(Towers(USERS, ITEMS, 12), 1)
    tables = model.state_dict()
    weights = [tables[f"collection.embedding_bags.{name}.weight"].local_shards()[0].tensor for name in ("user", "item")]
    same = Model((USERS, ITEMS), ITEMS, 12, 0)
    same.weights = [weight.numpy().copy() for weight in weights]
    for epoch in range(2):
        for user, items in data.epoch(epoch, BATCH):
            for group in optimizer.param_groups:
                group["lr"] = 0.2
            optimizer.zero_grad()
            loss(model, keyed(user, items), items, 0.05).backward()
            optimizer.step()
    return weights, model.module.bias.detach(), same


@needs_compiler
@on_ranks(1)
def test_the_kernel_trains_as_torchrec_does(tmp_path: Path) -> None:
    data = load(_npz(tmp_path))
    weights, bias, model = _trained(data)
    model.train(data, range(2), of=4, lr=0.2, l2=0.05, seed=0, batch_size=BATCH)
    for weight, found in zip((*weights, bias[:, None]), (*model.weights, model.bias), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), weight, atol=1e-4, rtol=1e-4)


def test_scores_stay_as_tables_are_rotated() -> None:
    made = np.random.default_rng(0)
    tables = [made.standard_normal((count, 8)).astype(np.float32) for count in (40, 30)]
    user, item = rotated(tables)
    np.testing.assert_allclose(user @ item.T, tables[0] @ tables[1].T, atol=1e-4)
    sizes = np.linalg.norm(user, axis=0)
    np.testing.assert_allclose(sizes, np.linalg.norm(item, axis=0), rtol=1e-4)
    assert (np.diff(sizes) <= 0).all()


@needs_compiler
def test_every_method_runs_and_keeps_to_its_bytes(tmp_path: Path) -> None:
    common = {
        "data": str(_npz(tmp_path)),
        "states": str(tmp_path),
        "trainer": "kernel",
        "epochs": 2,
        "batch_size": BATCH,
    }
    trial = {"seed": 0, "l2": 0.05, "lr": 0.2, "cut": 1, "recall": True}
    full: dict[str, Any] = {"method": "full", "budget": "100%", "dim": 64, "dtype": "fp32", "kept": 64}
    cases = [full] + [
        {"method": method, "budget": budget, **form}
        for budget, limit in BUDGETS.items()
        for method in METHODS
        for form in forms(method, limit)
    ]
    rows = [{**case, **trial, **common} for case in cases]
    rows = [{**row, **run(row)} for row in rows]
    assert {row["method"] for row in rows} == {"full", *METHODS}
    for row in rows[1:]:
        assert row["bytes"] <= BUDGETS[row["budget"]] + 0.01
    text = report(rows, "tiny.npz")
    assert all(f"| {method} |" in text for method in METHODS)
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size
