"""The quality benchmark: its kernel trains as TorchRec does, and every method runs and keeps to its
bytes."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")

from benchmarks import quality, quality_case
from benchmarks.quality import BUDGETS
from benchmarks.quality_kernel import Books, Model, rotated
from benchmarks.quality_methods import METHODS, forms, run
from benchmarks.quality_report import plot, report
from tests.dist.plugin import on_ranks
from two_tower.data import Interactions, load
from two_tower.model import Towers, build, keyed
from two_tower.train import loss

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")

USERS, ITEMS, BATCH = 90, 60, 64


def _npz(folder: Path, name: str = "tiny.npz", seed: int = 7, split: bool = True) -> Path:
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(
        np.unique(rng.integers((USERS, ITEMS), size=(2_000, 2)), axis=0)
    ).astype(np.int32)
    (user, item), (test_user, test_item) = pairs[:1000].T, pairs[1000:].T
    named = {"train_user": user, "train_item": item, "test_user": test_user, "test_item": test_item}
    if not split:
        named = {"user": pairs[:, 0], "item": pairs[:, 1]}
    np.savez(folder / name, num_users=USERS, num_items=ITEMS, **named)
    return folder / name


def _trained(data: Interactions) -> tuple[list[torch.Tensor], torch.Tensor, Model]:
    """Tables and biases after two epochs with TorchRec, and a model that started from the same
    weights."""
    model, optimizer = build(Towers(USERS, ITEMS, 12), 1)
    tables = model.state_dict()
    weights = [
        tables[f"collection.embedding_bags.{name}.weight"].local_shards()[0].tensor
        for name in ("user", "item")
    ]
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


@pytest.mark.slow
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
def test_codes_are_the_nearest_entries_and_zeros_stay_zeros() -> None:
    made = np.random.default_rng(0)
    weight = made.standard_normal((300, 6)).astype(np.float32)
    weight[7] = 0
    book = Books(weight, 2, seed=0)
    found = book.decoded(weight)
    assert (found[7] == 0).all()
    for row, decoded in zip(weight, found, strict=True):
        for group in (slice(0, 3), slice(3, 6)):
            wrong = ((row[group] - book.books[group.start // 3]) ** 2).sum(1)
            mine = ((row[group] - decoded[group]) ** 2).sum()
            np.testing.assert_allclose(mine, wrong.min(), atol=1e-5)


@needs_compiler
def test_l2_of_codes_acts_on_floats(tmp_path: Path) -> None:
    """Without slope all gradients are those of L2."""
    data = load(_npz(tmp_path), 0)
    model = Model([data.users, data.items], data.items, 8, seed=0)
    plain = model.copy()
    # Far above 1: the gradients of the interactions are lost beside those of L2.
    settings: dict[str, Any] = {"of": 1, "lr": 0.001, "l2": 1e6, "seed": 0, "batch_size": 16}
    plain.train(data, range(1), **settings)
    model.quantize(2, seed=0)
    model.train(data, range(1), **settings)
    for weight, expected in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@needs_compiler
def test_every_method_runs_and_keeps_to_its_bytes(tmp_path: Path) -> None:
    common = {
        "data": "a key",
        "file": str(_npz(tmp_path)),
        "split_seed": 0,
        "states": str(tmp_path),
        "trainer": "kernel",
        "epochs": 2,
        "batch_size": BATCH,
    }
    trial = {"seed": 0, "l2": 0.05, "lr": 0.2, "cut": 1, "recall": True}
    full: dict[str, Any] = {
        "method": "full",
        "budget": "100%",
        "dim": 64,
        "dtype": "fp32",
        "kept": 64,
    }
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
        # The books of so few rows take more than all else.
        books = row["bytes"] - row["codes"] if "codes" in row else 0
        assert row["bytes"] - books <= BUDGETS[row["budget"]] + 0.01
    text = report(rows, "tiny.npz", "its own test part")
    assert all(f"| {method} |" in text for method in METHODS)
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size


class _Inline:
    """A ProcessPoolExecutor without processes. The "AUC" of a training is that of its file, split
    and settings."""

    trained: ClassVar[list[str]] = []

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, _: object, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.trained.extend(case["file"] for case in cases)
        return [
            {"bytes": 1.0, "validation": _figures(case), "test": _figures(case)} for case in cases
        ]


def _figures(case: dict[str, Any]) -> dict[str, float]:
    names = ("file", "split_seed", "epochs", "batch_size")
    return {
        "auc": float(zlib.crc32(str([case[name] for name in names]).encode())),
        "auc_popular": 0.0,
    }


def test_figures_are_those_of_the_data_the_split_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One --work folder and one --out folder for all; a second run of the same trains nothing."""
    monkeypatch.setattr(quality, "ProcessPoolExecutor", _Inline)
    first = _npz(tmp_path, "a.npz")
    (tmp_path / "other").mkdir()
    runs = [
        (first, ()),
        (_npz(tmp_path / "other", "a.npz", seed=8), ()),  # another file of the same name
        (first, ("--epochs", "4")),
        (first, ("--batch-size", "32")),
        (_npz(tmp_path, "whole.npz", split=False), ()),
        (_npz(tmp_path, "whole.npz", split=False), ("--split-seed", "3")),
    ]
    found: dict[str, set[float]] = {}
    for number, (file, settings) in enumerate([*runs, *runs]):
        _Inline.trained.clear()
        folders = ("--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"))
        given = ("--batch-size", "64", "--seeds", "0", "--methods", "rows", "--budgets", "20%")
        assert quality.main(["--data", str(file), *given, *settings, *folders]) == 0
        assert bool(_Inline.trained) == (number < len(runs)), number
        for result in (tmp_path / "out").glob("*.json"):
            cases = json.loads(result.read_text())["cases"]
            found.setdefault(result.name, set()).update(case["test"]["auc"] for case in cases)
    assert len(found) == len(runs)
    assert all(len(figures) == 1 for figures in found.values())
    assert len(set.union(*found.values())) == len(runs)
    texts = [result.read_text() for result in (tmp_path / "out").glob("*-whole-*.md")]
    for seed in (0, 3):
        split = f"20% of the interactions, drawn with seed {seed}: the file holds no split"
        assert any(split in text for text in texts)


@on_ranks(1)
@pytest.mark.parametrize("method", ["narrowed codes", "small dense codes"])
def test_the_package_trains_codes(method: str, tmp_path: Path) -> None:
    """With all figures of a chosen row, which the table prints."""
    pytest.importorskip("dist_sparse.extras.codes.coded_training").LEAST_ROWS = 1
    dim = 16 if method == "narrowed codes" else 8
    case: dict[str, Any] = {"method": method, "dim": dim, "dtype": "codes", "kept": 8, "codes": 2}
    case |= {"file": str(_npz(tmp_path)), "split_seed": 0, "epochs": 2, "batch_size": BATCH}
    case |= {"seed": 0, "l2": 0.05, "lr": 0.2, "cut": 1, "budget": "4.7%", "trainer": "package"}
    found = quality_case.run(case)
    tables = 2 * (USERS + ITEMS) + 2 * 256 * 2 * 8
    # Beside them is the head of the file.
    assert tables < found["bytes"] * (USERS + ITEMS) < tables + 1000
    figures = found["test"]
    assert figures["auc"] > 0.4
    line = report([{**case, **found}], "tiny.npz", "drawn").splitlines()[-1]
    for name in ("auc", "auc_popular", "recall"):
        assert f"{figures[name]:.4f}" in line


@pytest.mark.slow
@needs_compiler
def test_saved_states_are_those_of_the_data(tmp_path: Path) -> None:
    """Two data sets that share a folder, and each in a folder of its own."""
    case = {"method": "narrowed", "dim": 16, "dtype": "int8", "kept": 8, "split_seed": 0}
    case |= {
        "epochs": 2,
        "batch_size": BATCH,
        "seed": 0,
        "l2": 0.05,
        "lr": 0.2,
        "cut": 1,
        "recall": True,
    }
    found = []
    for number in (0, 1):
        data = {"file": str(_npz(tmp_path, f"{number}.npz", seed=number)), "data": f"key {number}"}
        for states in ("shared", f"own-{number}"):
            (tmp_path / states).mkdir(exist_ok=True)
            result = run({**case, **data, "states": str(tmp_path / states)})
            # The same training takes another time.
            del result["cpu_seconds"]
            found.append(result)
    assert found[0] == found[1] != found[2] == found[3]


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        (None, "not an interactions .npz"),
        ({"user": [0], "num_users": 2, "num_items": 2}, "it has no item"),
        ({"user": [0, 1], "item": [0, 5], "num_users": 2, "num_items": 2}, "must"),
        ({"user": [0] * 10, "item": [0] * 10, "num_users": 2, "num_items": 2}, "too few users"),
        ("few", "Invalid batch_size=4096"),
    ],
)
def test_a_bad_file_is_refused_before_a_worker_starts(
    arrays: Any,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(quality, "ProcessPoolExecutor")
    file = tmp_path / "bad.npz"
    if arrays is None:
        file.write_text("no zip")
    elif arrays == "few":
        _npz(tmp_path, "bad.npz")
    else:
        np.savez(file, **arrays)
    with pytest.raises(SystemExit) as ended:
        quality.main(["--data", str(file), "--work", str(tmp_path / "work")])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "work").exists()
