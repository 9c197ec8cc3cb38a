"""The benchmark of ids that training never looked up runs, and means what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")

from benchmarks import unread_ids
from benchmarks.unread_ids import CASES, Case, fill, mapped, measured, reads, report, trained
from dist_sparse import remove_untouched
from dlrm.batches import Dataset, SparseFeature
from tests.dist.plugin import on_ranks

ROWS = 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Logs of 600 events; later ones are of more ids."""
    draw = np.random.default_rng(0)
    ids = (draw.random((3, 600)) * np.linspace(ROWS / 2, ROWS, 600)).astype(np.int32)
    user, artist, tag = ids
    date = np.arange(600) // 5
    np.savez(tmp_path / "lastfm.npz", user=user, artist=artist, tag=tag, date=date)
    names = ("train_user", "train_item", "test_user", "test_item")
    parts = (user[:400], artist[:400], user[400:], artist[400:])
    np.savez(tmp_path / "gowalla.npz", **dict(zip(names, parts, strict=True)))
    return tmp_path


def _small(name: str) -> Case:
    [case] = [each for each in CASES if each.name.startswith(name)]
    return replace(case, batch=8, dim=4, passes=2)


@on_ranks(1)
@pytest.mark.parametrize("name", ["Last.FM by time, DLRM", "Last.FM by time, two", "Gowalla"])
def test_all_methods_are_measured(name: str, folder: Path) -> None:
    case = _small(name)
    rows, shares = measured(case, case.load(folder, False), 0, (0.5, 0.5))
    assert len({row["method"] for row in rows}) == len(rows) == 8
    assert all(row["log loss"] > 0 and 0 <= row["AUC, unread"] <= 1 for row in rows)
    assert 0 < shares["examples"] < 1
    text = report([{**row, "about": "small", "seed": seed} for row in rows for seed in (0, 1)])
    assert "| zeros | " in text and f"## {case.name}" in text


@on_ranks(1)
def test_zeros_are_what_removed_rows_read(folder: Path) -> None:
    case = _small("Last.FM by time, DLRM")
    data = case.load(folder, False)
    model, counts = trained(case, data, 0)
    flags = {each.name: (counts[each.name] == 0)[each.ids] for each in data.sparse}
    fill(model.tables, counts, "zeros")
    zeros = model.logits(mapped(data, flags), data.test)
    before = model.logits(data, data.test)
    removed = remove_untouched(model.model)
    # The shared row was not read either.
    expected = {name: int((rows == 0).sum()) + 1 for name, rows in counts.items()}
    assert removed.removed == expected and max(expected.values()) > 1
    assert torch.equal(model.logits(data, data.test), zeros) and not torch.equal(before, zeros)


@pytest.mark.slow
@on_ranks(1)
def test_a_shared_row_is_trained_by_the_lookups_that_it_gets(folder: Path) -> None:
    case = _small("Last.FM by time, DLRM")
    data = case.load(folder, False)
    for method, setting, is_trained in (
        ("", (0.0, 0.0), False),
        (unread_ids.RARE, (0.5, 0.5), True),
        (unread_ids.COMPACTED, (0.0, 0.0), False),  # both passes read the same ids
    ):
        model, _ = trained(case, data, 0, method, setting)
        assert bool(model.tables["artist"][-1].any()) == is_trained, method
    model, counts = trained(replace(case, passes=1), data, 0, unread_ids.COMPACTED)
    assert model.tables["user"][-1].any() and (counts["user"] == 0).any()


def test_means_are_of_rows_that_were_read() -> None:
    ids = torch.tensor([0, 2, 2, 2, 3])
    feature = SparseFeature(name="item", rows=4, ids=ids)
    index, dense = torch.arange(5), torch.zeros(5, 1)
    data = Dataset(
        name="small",
        sparse=(feature,),
        dense_names=("none",),
        dense=dense,
        labels=dense[:, 0],
        train=index[:4],
        test=index[4:],
    )
    counts = reads(data, data.train)
    assert counts["item"].tolist() == [1, 0, 3, 0]
    table = torch.tensor([[4.0], [100.0], [8.0], [100.0], [-1.0]])
    for how, value in (("zeros", 0.0), ("mean", 6.0), ("mean by reads", 7.0)):
        fill({"item": table, "item bias": table}, counts, how)
        assert table[-1] == value
    shown = mapped(data, {"item": (counts["item"] == 0)[ids]})
    assert shown.sparse[0].ids.tolist() == [0, 2, 2, 2, 4]


def test_missing_data_is_skipped_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unread_ids, "CASES", [_small("Gowalla")])
    monkeypatch.setattr(unread_ids.dist, "is_initialized", lambda: True)
    assert unread_ids.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "SKIPPED Gowalla" in capsys.readouterr().err and not (tmp_path / "out").exists()
