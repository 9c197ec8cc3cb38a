"""The example with two OptimSchedulers trains, sparsifies, saves and resumes, alone and under
torchrun."""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")

from dist_sparse.tables.chunked import ChunkedTensor
from dlrm import interactions, movielens
from dlrm.batches import DataError
from optim_scheduler import checkpoint
from optim_scheduler.options import parse
from optim_scheduler.train import Job
from tests.warm import run_ranks_of, run_script

MAIN = Path(checkpoint.__file__).with_name("main.py")
USERS, ITEMS = 400, 300
SMALL = ("--batch-size", 128, "--accumulate", 2, "--every", 2, "--epochs", 2)


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who like the items whose number has their own parity; an epoch is no whole number of
    updates."""
    rng = np.random.default_rng(7)
    pairs = np.unique(rng.integers((USERS, ITEMS), size=(3_000, 2)), axis=0)
    pairs = rng.permutation(pairs[pairs.sum(axis=1) % 2 == 0])
    (users, items), cut = pairs.T, 1_000
    train = {"train_user": users[:cut], "train_item": items[:cut]}
    path = tmp_path_factory.mktemp("data") / "tiny.npz"
    test = {"test_user": users[cut:], "test_item": items[cut:]}
    np.savez(path, num_users=USERS, num_items=ITEMS, **train, **test)
    return path


def start(*arguments: object, world: int) -> subprocess.CompletedProcess[str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    env["OMP_NUM_THREADS"] = "1"
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
    ]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(world), *rendezvous]
    command = [sys.executable, *torchrun, str(MAIN), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=env, check=False
    )


def printed(*arguments: object, folder: Path, world: int = 1) -> str:
    """By rank 0. Without torchrun and its imports."""
    ranks = run_ranks_of(MAIN, arguments, world=world, cwd=folder)
    for done in ranks:
        assert done.returncode == 0, done.stderr
    assert not any(done.stdout for done in ranks[1:])
    return ranks[0].stdout


def job(npz: Path, *arguments: object) -> Job:
    options = parse(None, ["--data", str(npz), *map(str, (*SMALL, *arguments))])
    return Job(options, interactions.load(npz, options.seed), rank=0, world=1)


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def same(left: Any, right: Any) -> bool:
    """Bit for bit, at any depth."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, ChunkedTensor):
        return same(left.writes, right.writes) and same(left.kept, right.kept)
    if isinstance(left, torch.Tensor):
        return torch.equal(left.to_dense(), right.to_dense())
    return bool(left == right)


def check_tables(out: str, state: dict[str, Any], level: float) -> None:
    """The saved weights have the printed sparsity, which is that of the command line."""
    removed = 0
    lines = re.findall(r"^tables/(\w+) +(\d+)  ([\d.]+)$", out, re.MULTILINE)
    assert [name for name, _, _ in lines] == ["user_id", "item_id", "user_x_item"]
    for name, rows, sparsity in lines:
        weight = state["model"][f"tables.{name}.weight"]
        zero = int((weight == 0).all(dim=1).sum())
        assert zero == round(level * int(rows)) == round(level * len(weight))
        assert float(sparsity) == pytest.approx(zero / len(weight), abs=1e-4)
        removed += zero * weight.shape[1]
    assert f"all {removed} removed weights are 0" in out


def auc(out: str) -> float:
    return float(re.findall(r"^AUC ([\d.]+)$", out, re.MULTILINE)[0])


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_resumed_are_two_ranks_uninterrupted(npz: Path, tmp_path: Path) -> None:
    whole, parted, alone = (tmp_path / f"{name}.pt" for name in ("whole", "parted", "alone"))
    # So that there are scalers to resume.
    options = (
        "--data",
        npz,
        *SMALL,
        "--sparsity",
        0.7,
        "--amp",
        "fp16",
    )
    done = start(*options, "--checkpoint", whole, world=2)
    assert done.returncode == 0, done.stderr
    first = done.stdout
    check_tables(first, read(whole), 0.7)
    # In the second epoch.
    stopped = printed(*options, "--checkpoint", parted, "--stop-at", 9, folder=tmp_path, world=2)
    assert "Stopped after update 9" in stopped
    assert "AUC" not in stopped
    assert read(parted)["done"] == 9
    shutil.copy(parted, alone)
    second = printed(*options, "--checkpoint", parted, "--resume", folder=tmp_path, world=2)
    assert "updates 10 to 15" in second
    assert same(read(whole), read(parted))
    assert first.partition("\n\n")[2] == second.partition("\n\n")[2]  # except for the time
    # On another number of ranks.
    third = printed(*options, "--checkpoint", alone, "--resume", folder=tmp_path)
    check_tables(third, read(alone), 0.7)
    assert auc(third) == pytest.approx(auc(first), abs=0.01)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.network
def test_movielens_in_one_process(tmp_path: Path) -> None:
    try:
        movielens.fetch()
    except DataError as error:
        pytest.skip(f"OFFLINE, MovieLens-100K is not tested: {error}")
    out = printed("--batch-size", 1024, "--accumulate", 2, "--every", 5, folder=tmp_path)
    assert "updates 1 to 39 of 2 x 1024 examples" in out
    assert 0.55 < auc(out) < 0.8
    assert re.search(r"^tables/user_x_genre +50000  0\.8000$", out, re.MULTILINE)
    assert re.search(r"^Read at the end: all \d{7} removed weights are 0\.$", out, re.MULTILINE)


class TestJob:
    @pytest.mark.slow
    def test_learns_resumes_and_keeps_removed_weights_at_zero(
        self, npz: Path, tmp_path: Path
    ) -> None:
        whole = job(npz, "--checkpoint", tmp_path / "whole.pt")
        assert whole.updates == 15 == 2 * 15 // 2
        whole.train()
        assert 0.45 < whole.auc() <= 1
        assert (
            whole.check_zeros()
            == sum(t.removed_blocks * t.shape[1] for t in whole.sparsities())
            > 0
        )
        stopped = job(npz, "--checkpoint", tmp_path / "parted.pt", "--stop-at", 9)
        stopped.train()
        parted = job(npz, "--checkpoint", tmp_path / "parted.pt", "--resume")
        parted.resume()
        assert parted.done == 9
        parted.train()
        assert same(read(tmp_path / "whole.pt"), read(tmp_path / "parted.pt"))

    def test_both_learning_rates_move_as_they_should(self, npz: Path) -> None:
        both = job(npz, "--table-lr", 0.1, "--layer-lr", 0.01)
        both.train()
        assert both.tables.get_lr() == pytest.approx(0.1 * 0.5)  # the second epoch
        # Warm-up is 1 of 15 updates.
        assert both.layers.get_lr() == pytest.approx(0.01 * (1 / 15) ** 0.5)

    def test_a_revived_weight_is_found(self, npz: Path) -> None:
        done = job(npz)
        done.train()
        weight = done.net.tables["item_id"].weight
        row = int((weight == 0).all(dim=1).nonzero()[0])
        weight.data[row, 3] = 1.0
        with pytest.raises(
            RuntimeError, match="1 removed weights of tables/item_id are not 0 on rank 0"
        ):
            done.check_zeros()

    def test_saves_when_asked(
        self, npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = []
        monkeypatch.setattr(checkpoint, "save", lambda path, state: saved.append(state["done"]))
        job(npz, "--checkpoint", tmp_path / "c.pt", "--save-every", 6).train()
        assert saved == [6, 12, 15]

    def test_another_plan_is_refused(self, npz: Path, tmp_path: Path) -> None:
        path = tmp_path / "c.pt"
        job(npz, "--checkpoint", path, "--stop-at", 2).train()
        other = job(npz, "--checkpoint", path, "--resume", "--seed", 3, "--sparsity", 0.5)
        with pytest.raises(
            DataError, match=r"of another run: sparsity was 0\.8, is 0\.5; seed was 0, is 3\."
        ):
            other.resume()

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda s: {"plan": s["plan"]}, "does not fit: KeyError: 'model'"),
            (lambda s: {**s, "tables": s["layers"]}, "does not fit: ValueError: The state lacks"),
            (lambda s: {**s, "model": {}}, "does not fit: RuntimeError: .*Ranker"),
            (lambda s: {**s, "done": None}, "does not fit: TypeError"),
        ],
    )
    def test_a_part_that_does_not_fit_is_named(
        self, npz: Path, tmp_path: Path, change: Any, says: str
    ) -> None:
        path = tmp_path / "c.pt"
        job(npz, "--checkpoint", path, "--stop-at", 2).train()
        checkpoint.save(path, change(read(path)))
        with pytest.raises(DataError, match=says):
            job(npz, "--checkpoint", path, "--resume").resume()

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("--batch-size", 2000), "too few for updates of 2 x 2000"),
            (("--accumulate", 60), "too few for updates"),
        ],
    )
    def test_too_few_examples_are_refused(
        self, npz: Path, arguments: tuple[object, ...], says: str
    ) -> None:
        with pytest.raises(DataError, match=says):
            job(npz, *arguments)


class TestCheckpoint:
    def test_one_that_fails_leaves_the_last(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "c.pt"
        checkpoint.save(path, {"plan": {}, "x": torch.ones(3)})
        with pytest.raises(Exception, match="pickle"):
            checkpoint.save(path, {"plan": {}, "x": lambda: None})
        assert torch.equal(checkpoint.load(path, {})["x"], torch.ones(3))
        assert list(path.parent.iterdir()) == [path]

    def test_a_full_disk_is_named_and_leaves_the_last(self, tmp_path: Path) -> None:
        path, before = tmp_path / "c.pt", resource.getrlimit(resource.RLIMIT_FSIZE)
        checkpoint.save(path, {"plan": {}, "x": torch.ones(3)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(DataError, match=r"never\.pt can't be written: .*File too large"):
                checkpoint.save(tmp_path / "never.pt", {"x": torch.ones(1_000_000)})
            with pytest.raises(
                DataError, match=r"c\.pt can't be written, and is as it was: .*File too large"
            ):
                checkpoint.save(path, {"plan": {}, "x": torch.ones(1_000_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert torch.equal(checkpoint.load(path, {})["x"], torch.ones(3)) and list(
            tmp_path.iterdir()
        ) == [path]
        with pytest.raises(DataError, match=r"under_a_file\.pt can't be written: "):
            checkpoint.save(path / "under_a_file.pt", {})

    def test_an_error_of_what_is_saved_is_not_the_disk_s(self, tmp_path: Path) -> None:
        class Refuses:
            def __getstate__(self) -> None:
                raise RuntimeError("is in use")

        with pytest.raises(RuntimeError, match=r"^is in use$"):
            checkpoint.save(tmp_path / "c.pt", {"x": Refuses()})
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (None, "no checkpoint to resume from: .*does not exist"),
            ("hello", "is not a checkpoint: "),
            (
                argparse.Namespace(plan={}),
                "is not a checkpoint: ",
            ),  # an object, which could be any code
            ([1, 2], "holds no plan"),
            ({"model": {}}, "holds no plan"),
            ({"plan": 3}, "holds no plan"),
            ("", "is not a checkpoint: EOFError"),
        ],
    )
    def test_what_is_none_is_refused(self, tmp_path: Path, content: object, says: str) -> None:
        path = tmp_path / "c.pt"
        if isinstance(content, str):
            path.write_text(content)
        elif content is not None:
            torch.save(content, path)
        with pytest.raises(DataError, match=says):
            checkpoint.load(path, {})


class TestOptions:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ("--sparsity 1.1", "--sparsity: invalid value: 1.1 (must be in [0, 1])"),
            ("--sparsity nan", "(must be in [0, 1])"),
            ("--accumulate 0", "--accumulate: invalid value: 0 (must be at least 1)"),
            ("--epochs 1.5", "--epochs: invalid int value: '1.5'"),
            ("--table-lr 0", "--table-lr: invalid value: 0.0 (must be above 0)"),
            ("--clip inf", "(must be above 0)"),
            ("--seed -1", "at least 0"),
            ("--amp int8", "invalid choice: 'int8'"),
            ("--resume", "--resume: needs --checkpoint PATH"),
            ("--stop-at 3", "--stop-at: needs --checkpoint PATH"),
            ("--save-every 0 --checkpoint c.pt", "--save-every: invalid value: 0"),
            ("--checkpoint .", "--checkpoint: a folder, not a file"),
            ("--data nowhere.npz", "--data: no such file: nowhere.npz"),
        ],
    )
    def test_wrong_ones_are_refused_with_the_rule(
        self, arguments: str, says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as refusal:
            parse(None, arguments.split())
        assert refusal.value.code == 2
        assert says in capsys.readouterr().err

    def test_a_batch_that_does_not_divide_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(SystemExit):
            parse(None, [])
        assert "256 (must be divisible by 3 processes)" in capsys.readouterr().err


@pytest.mark.slow
def test_help_and_failures_are_words(tmp_path: Path, npz: Path) -> None:
    helped = run_script(MAIN, ["--help"], cwd=tmp_path)
    assert helped.returncode == 0
    assert "--resume" in helped.stdout
    done = run_script(
        MAIN,
        ["--data", npz, *SMALL, "--checkpoint", tmp_path / "none.pt", "--resume"],
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "error: There is no checkpoint to resume from" in done.stderr
    assert "Traceback" not in done.stderr
