"""Small cases of the benchmarks run. No figure is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import serving_plot, speed_plot
from benchmarks.compact import report as report_compact
from benchmarks.deltas import report as report_deltas
from benchmarks.enforce import CASES, report
from benchmarks.mask_update import GATHER, table
from benchmarks.measure import fresh
from benchmarks.serving import CASES as SERVING
from benchmarks.serving import WRITTEN, loads
from benchmarks.serving import report as serving_report
from tests.warm import run_case

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "sharding", "block", "peers"),
    [
        (1, "one process", "rows", ["norm_pass", "ancestor"]),
        (2, "row_wise", [1, 4], GATHER),
        (2, "column_wise", "rows", GATHER),
    ],
)
def test_a_small_case_runs(
    ranks: int, sharding: str, block: str | list[int], peers: list[str]
) -> None:
    case = {
        "block": block,
        "norm": "L2",
        "rows": 2048,
        "dim": 64,
        "ranks": ranks,
        "sharding": sharding,
        "peers": peers,
    }
    module = "benchmarks.mask_update_case"
    found = (
        run_case(module, case, ranks)
        if sharding == "column_wise"
        else fresh(module, case, ranks, 1)
    )
    times = [value for key, value in found.items() if key.endswith("_s")]
    assert len(times) == 3 + len(peers) and all(time > 0 for time in times)
    assert found["shard_bytes"] == 2048 * 64 * 4 // ranks
    # Steady: zeros settle in one round.
    assert found["collectives"] == (0 if ranks == 1 else 4 if block == "rows" else 2)
    assert ("torch.ao" if ranks == 1 else f"{sharding} on {ranks}") in table([found])


@pytest.mark.parametrize(
    ("ranks", "score", "how"), [(1, "norm", "L2"), (2, "norm", "L2"), (1, "norm_accumulator", "by")]
)
def test_a_case_of_many_tables_runs(ranks: int, score: str, how: str) -> None:
    case = {"tables": 20, "rows": 50, "dim": 16, "block": [1, 4], "ranks": ranks, "score": score}
    found = run_case("benchmarks.many_tables_case", case, ranks)
    assert found["growing_s"] > 0 and ("by_hand_s" in found) == (ranks == 1)
    assert f"20 tables of 50 x 16, 1x4 {how}" in table([found])


@pytest.mark.parametrize("which", ["a", "main job", "tables"])
def test_a_small_case_of_enforcement_runs(which: str) -> None:
    case = next(
        c
        for c in CASES
        if which in (c["kind"], c["model"]) and (c["kind"] == "a") == (which == "a")
    )
    tables = case["tables"] and {**case["tables"], "rows": 3000, "below": 3000}
    peers = ["whole", "ancestor"] if which == "tables" else case["peers"]
    small = {
        **case,
        "tables": tables,
        "peers": peers,
        "every": 2,
        "steps": 2,
        "rounds": 1,
        "peer_steps": 1,
        "ancestor_steps": 1,
    }
    found = run_case("benchmarks.enforce_case", small, 1)
    assert all(found[key] > 0 for key in ("plain_s", "ours_s", "enforce_s", "settle_s", "move_s"))
    assert all(found[f"{peer}_s"] > 0 for peer in peers)
    assert f"{found['enforce_s'] * 1e3:.2f}" in report([found])


@pytest.mark.parametrize("kind", ["lookups", "many"])
def test_a_small_case_of_serving_runs(kind: str) -> None:
    case = next(c for c in SERVING if c["kind"] == kind and c["removed"])
    small = {
        **case,
        "rows": 2000,
        "bags": 4,
        "rounds": 1,
        "ids": "zipf",
        **({"tables": 2} if kind == "many" else {}),
    }
    found = run_case("benchmarks.serving_case", small, 1)
    assert all(time > 0 for time in found["times_s"].values()) and len(found["times_s"]) > 1
    assert f"| {case['dtype']} | " in serving_report([found])


def test_a_small_case_of_what_looks_an_artifact_up_runs() -> None:
    case = next(c for c in SERVING if c["kind"] == "targets" and c["form"] == "int4")
    found = run_case("benchmarks.serving_case", {**case, "rows": 2000, "bags": 4, "rounds": 1}, 1)
    assert len(found["times_s"]) == 6 and all(time > 0 for time in found["times_s"].values())
    assert "| through | int4 |" in serving_report([found])


def test_loading_a_small_table_runs() -> None:
    found = loads(
        {**WRITTEN, "rows": 2000}, lambda module, case, ranks, _: run_case(module, case, ranks)
    )
    assert [each["what"] for each in found] == ["dense", "fp32", "int8"] and all(
        each["seconds"] > 0 for each in found
    )
    assert "dense, 2,000 x 64" in serving_report(found)


def test_a_small_case_of_deltas_runs() -> None:
    case = {"rows": 2000, "dim": 8, "dtype": "int8", "share": 0.01}
    found = run_case("benchmarks.deltas_case", case, 1)
    assert all(found[key] > 0 for key in ("full_s", "compared_s", "noted_s", "apply_s"))
    assert 0 < found["delta_bytes"] < found["full_bytes"]
    assert "| 2,000 x 8 | int8 | 1.0% |" in report_deltas([found])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_small_case_of_compact_tables_runs(ranks: int) -> None:
    tables = {"tables": 2, "rows": 3000, "dim": 64, "ids": 3, "below": 3000, "batch": 64}
    found = run_case(
        "benchmarks.compact_case", {"tables": tables, "skew": 3, "ranks": ranks, "steps": 2}, ranks
    )
    assert all(found[key] > 0 for key in ("dense_s", "masked_s", "compact_step_s", "compact_s"))
    assert (
        found["table_bytes"] == 2 * 3000 * 260 // ranks
        and found["compact_bytes"] == 2 * 600 * 260 // ranks
    )
    assert "2 x 3,000 x 64" in report_compact([found])


def test_the_newest_results_can_be_drawn(tmp_path: Path) -> None:
    for number, plot in enumerate((serving_plot, speed_plot)):
        plot.main(tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 10_000
