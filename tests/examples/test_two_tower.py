"""The two-tower example: runs on two ranks, and what it serves is what it says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("dist_sparse.extras.rotation")

from tests.warm import run_ranks_of, run_script
from two_tower import data, quality
from two_tower.data import Interactions

MAIN = Path(data.__file__).with_name("main.py")
USERS, ITEMS = 300, 200


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read back: none is folded."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who like the items whose number has their own parity, so that there is something to
    learn."""
    rng = np.random.default_rng(7)
    pairs = np.unique(rng.integers((USERS, ITEMS), size=(12_000, 2)), axis=0)
    pairs = rng.permutation(pairs[pairs.sum(axis=1) % 2 == 0]).astype(np.int32)
    path, cut = tmp_path_factory.mktemp("data") / "tiny.npz", len(pairs) * 3 // 4
    (user, item), (test_user, test_item) = pairs[:cut].T, pairs[cut:].T
    named = {"train_user": user, "train_item": item, "test_user": test_user, "test_item": test_item}
    np.savez(path, num_users=USERS, num_items=ITEMS, **named)
    return path


@pytest.fixture(scope="module")
def interactions(npz: Path) -> Interactions:
    return data.load(npz)


def test_an_epoch_is_the_same_on_any_world(interactions: Interactions) -> None:
    whole = list(interactions.epoch(3, 64))
    halves = zip(interactions.epoch(3, 64, 0, 2), interactions.epoch(3, 64, 1, 2), strict=True)
    for (user, items), parts in zip(whole, halves, strict=True):
        assert torch.equal(user, torch.cat([part[0] for part in parts]))
        assert torch.equal(items, torch.cat([part[1] for part in parts]))
    assert len(whole) == len(interactions.user) // 64


def test_negatives_of_the_test_are_unknown_and_recall_is_counted_as_by_hand(
    interactions: Interactions,
) -> None:
    test = interactions.test("test")
    for negatives in (test.uniform, test.popular):
        pairs = (test.user[:, None] * ITEMS + negatives).numpy()
        assert not np.isin(pairs, interactions.known).any()
    torch.manual_seed(0)
    user, item, bias = torch.randn(USERS, 8), torch.randn(ITEMS, 8), torch.randn(ITEMS)
    measured = quality.measure(user, item, bias, interactions, test)
    recalls = []
    for one in test.ranked_users.tolist():
        scores = user[one] @ item.T + bias
        scores[interactions.item[interactions.user == one]] = -torch.inf
        held = set(test.all_pairs[1][test.all_pairs[0] == one].tolist())
        recalls.append(len(held & set(scores.topk(20).indices.tolist())) / len(held))
    assert measured.recall == pytest.approx(np.mean(recalls), abs=1e-6)
    assert 0.45 < measured.auc < 0.55  # random tables know nothing
    right, wrong = (
        (user[test.user][:, None] * item[items]).sum(2) + bias[items]
        for items in (test.item[:, None], test.uniform)
    )
    share = 1 / (1 + data.NEGATIVES)  # of interactions in training
    surprise = [-torch.nn.functional.logsigmoid(logits).mean() for logits in (right, -wrong)]
    loss = share * surprise[0] + (1 - share) * surprise[1]
    entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    assert measured.ne == pytest.approx(loss.item() / entropy, rel=1e-5)


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_print_what_they_serve(npz: Path, tmp_path: Path) -> None:
    options = (
        "--data",
        npz,
        "--dim",
        16,
        "--width",
        4,
        "--epochs",
        5,
        "--batch-size",
        64,
        "--out",
        tmp_path / "out",
    )
    done = run_ranks_of(MAIN, options, world=2, cwd=tmp_path)[0]
    assert done.returncode == 0, done.stderr
    head, _, *lines = (
        re.split(r" {2,}", line) for line in done.stdout.strip().split("\n\n")[-1].splitlines()
    )
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    assert [(row["run"], row["served as"]) for row in rows] == [
        (run, dtype)
        for run in ("wide", "narrowed", "narrow from the start")
        for dtype in ("fp32", "int8", "int4")
    ]
    by_run = {(row["run"], row["served as"]): row for row in rows}
    for dtype in ("fp32", "int8", "int4"):  # a narrowed table is a narrow one: no mask, no index
        assert (
            abs(
                int(by_run["narrowed", dtype]["bytes"])
                - int(by_run["narrow from the start", dtype]["bytes"])
            )
            < 256
        )
    assert all(float(row["AUC"]) > 0.7 for row in rows), done.stdout
    assert len(list(tmp_path.glob("out/*/manifest.json"))) == 9


@pytest.mark.slow
def test_wrong_options_are_refused(npz: Path, tmp_path: Path) -> None:
    for options, says in (
        (["--width", 6], "multiple of 4"),
        (["--width", 64], "less than --dim 64"),
        (["--cut", 14], "less than --epochs 14"),
        (["--lr", "nan"], "above 0"),
        (["--codes", 5], "must divide --width 16"),
        (["--out", npz.parent], "is not empty"),
    ):
        done = run_script(MAIN, ["--data", npz, *options], cwd=tmp_path)
        assert done.returncode == 2 and says in done.stderr
    done = run_script(MAIN, ["--data", npz, "--batch-size", 10**6], cwd=tmp_path)
    assert (
        done.returncode == 1
        and "interactions to train with" in done.stderr
        and "Traceback" not in done.stderr
    )
    done = run_script(
        MAIN, ["--data", tmp_path / "none.npz", "--out", tmp_path / "out"], cwd=tmp_path
    )
    assert done.returncode == 1 and "no such file" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_frontier(npz: Path, tmp_path: Path) -> None:
    """In one process: small dense tables are trained, and compared with what is removed after
    training."""
    pytest.importorskip("dist_sparse.extras.frontier")
    options = (
        "--data",
        npz,
        "--dim",
        8,
        "--epochs",
        1,
        "--batch-size",
        256,
        "--out",
        tmp_path / "out",
    )
    done = run_script(MAIN.with_name("frontier.py"), options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("small dense", "rotated columns", "rows", "recall@20", "of the whole model"):
        assert text in done.stdout
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {
        "trials.jsonl",
        "frontier.json",
    }
