"""The benchmark of tables whose rows follow the traffic: its streams, its tuning, a small case. No figure is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")

from benchmarks.following import DEFAULTS, DRIFTING, GRIDS, report, tune
from benchmarks.following_case import rows_for
from benchmarks.following_streams import drifting, hashed, lastfm
from benchmarks.measure import fresh

WORD = (1 << 64) - 1


@pytest.mark.parametrize("seed", [0, 7])
def test_the_hash_is_splitmix64(seed: int) -> None:
    ids = [0, 1, 2, 2_624, 1 << 40, (1 << 62) + 1]
    expected = []
    for each in ids:
        mixed = each + (seed + 1) * 0x9E3779B97F4A7C15 & WORD
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & WORD
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & WORD
        expected.append((mixed ^ mixed >> 31) & (1 << 62) - 1)
    assert hashed(torch.tensor(ids), seed).tolist() == expected


def test_hashing_leaves_few_rows_empty() -> None:
    # A multiplicative hash left 194 of these 262 rows of MovieLens-100K empty.
    assert len(torch.unique(hashed(torch.arange(2_625)) % 262)) == 262


def test_negatives_have_artists_of_earlier_taggings(tmp_path: Path) -> None:
    date = np.repeat([30, 60, 90], 200).astype(np.int32)
    log = {"user": date % 7, "tag": date % 5, "artist": np.arange(600) % 200 + date}
    np.savez(tmp_path / "lastfm.npz", date=date, **log)
    seen: set[int] = set()
    for batch in lastfm(tmp_path / "lastfm.npz", 50, seed=0):
        assert batch.others is not None
        assert batch.labels.view(-1, 3).tolist() == [[1, 0, 0]] * (len(batch.labels) // 3)
        for (positive, *negatives), row in zip(
            batch.others.view(-1, 3, 3).tolist(), batch.ids.view(-1, 3).tolist(), strict=True
        ):
            # The first tagging has none before it.
            assert not seen or all(artist in seen for _, artist, _ in negatives)
            assert all(each[::2] == positive[::2] for each in negatives)
            assert len(set(row)) == 1
            seen.add(positive[1])


def test_dates_stay_in_order(tmp_path: Path) -> None:
    date = np.repeat([30, 60, 90], 200).astype(np.int32)
    same = np.zeros(600, dtype=np.int32)
    np.savez(tmp_path / "lastfm.npz", date=date, user=date, artist=same, tag=same)
    found = [batch.others[::3, 0] for batch in lastfm(tmp_path / "lastfm.npz", 50, seed=0)]  # type: ignore[index]
    assert torch.cat(found).tolist() == date.tolist()


def test_ids_of_a_group_share_their_effect() -> None:
    alike, alone = (
        list(drifting(5_000, 20, changes=4, share=0.0, shared=shared, seed=0))
        for shared in (1.0, 0.0)
    )
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(alike, alone, strict=False))
    assert not all(torch.equal(a.labels, b.labels) for a, b in zip(alike, alone, strict=True))


def test_rows_pay_for_ids_and_indexes() -> None:
    full, counts = 1_000_000 * 260, 1_000_000
    assert rows_for("following", 1_000_000, 64, 0.05) == int((0.05 * full - counts) / 276)
    assert rows_for("distance lfu", 1_000_000, 64, 0.05) == int(0.05 * full / 292)
    assert rows_for("full", 1_000, 64, 1.0) == 1_000


def test_tuning_takes_the_best_mean_of_as_many_settings() -> None:
    assert {len(grid) for grid in GRIDS.values()} == {4}
    assert all(DEFAULTS[method] in grid for method, grid in GRIDS.items())

    def run(method: str, settings: dict[str, float], auc: float) -> dict[str, Any]:
        return {"method": method, "budget": 0.05, "settings": settings, "auc": auc}

    one = [run("lfu", {"least": 1}, 0.7), run("lfu", {"least": 2}, 0.5)]
    other = [run("lfu", {"least": 1}, 0.5), run("lfu", {"least": 2}, 0.8)]
    assert tune([{"runs": one}, {"runs": other}]) == {(0.05, "lfu"): {"least": 2}}


@pytest.mark.slow
def test_a_small_case_runs() -> None:
    case = {**DRIFTING, "ids": 2_000, "steps": 20, "seed": 0, "budgets": [0.5]}
    methods = ["full", "hash", "frozen", *GRIDS]
    runs: list[dict[str, Any]] = [
        {"method": each, "every": every, "settings": DEFAULTS.get(each, {}), "budget": budget}
        for each in methods
        for every in ((1, 5, 10, 40) if each in GRIDS else (10,))
        for budget in ([1.0] if each == "full" else [0.5])
    ]
    cases = [{**case, "tuning": tuning, "runs": runs} for tuning in (True, False)]
    found = [fresh("benchmarks.following_case", each, 1, 1) for each in cases]
    assert all(0 < run["auc"] < 1 for each in found for run in each["runs"])
    text = report(found)
    assert "| 50% | distance lfu | exponent 1 |" in text and "| 100% | full | - | 2,000 |" in text
