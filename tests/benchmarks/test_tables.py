"""The benchmark of tables runs from its command line, continues where it stopped, and counts the bytes
that it says."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("matplotlib")
pytest.importorskip("dist_sparse.extras.codes")

from benchmarks import tables, tables_methods
from benchmarks.tables_data import Problem
from benchmarks.tables_methods import ALL_FORMS, FULL, METHODS, ZCH, Form, forms, run
from benchmarks.tables_report import lines_of, report, verdict
from dlrm.batches import Dataset, SparseFeature
from tests.benchmarks.files import write_avazu, write_criteo, write_movielens_1m
from tests.dist.plugin import on_ranks

ROWS = {"item": 20_000, "user": 300, "day": 7}


def small_problem() -> Problem:
    """A few examples of tables that all methods take."""
    draw = torch.Generator().manual_seed(0)
    examples = 400
    offsets = torch.arange(examples + 1) * 2  # two items an example
    ids = {name: torch.randint(rows, (examples,), generator=draw) for name, rows in ROWS.items()}
    items = torch.randint(ROWS["item"] // 2, (2 * examples,), generator=draw)
    sparse = [SparseFeature(name=name, rows=ROWS[name], ids=ids[name]) for name in ("user", "day")]
    data = Dataset(
        name="small",
        sparse=(SparseFeature(name="item", rows=ROWS["item"], ids=items, offsets=offsets), *sparse),
        dense_names=("one", "two"),
        dense=torch.randn(examples, 2, generator=draw),
        labels=torch.randint(2, (examples,), generator=draw).float(),
        train=torch.arange(320),
        test=torch.arange(320, examples),
    )
    return Problem(data=data)


def rows_read(problem: Problem) -> dict[str, int]:
    data = problem.data
    return {each.name: len(each.take(data.train)[0].unique()) for each in data.sparse}


@on_ranks(1)
@pytest.mark.parametrize("network", ["DLRM", "DeepFM"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_fits_its_bytes(method: str, network: str) -> None:
    problem = small_problem()
    limit = 0.1 * 4 * 8 * sum(ROWS.values())
    found = forms(method, ROWS, rows_read(problem), 8, limit)
    assert 1 <= len(found) <= 2
    for form in found:
        case = {"network": network, "method": method, "lr": 0.1, "seed": 0, "part": "test"}
        case |= asdict(form)
        if method == ZCH:
            case["interval"] = 2
        figures = run(case, problem, 64)
        [quality] = figures["served_as"].values()
        assert 0 < quality["bytes"] <= limit
        assert 0 <= quality["auc"] <= 1 and quality["log_loss"] > 0 and quality["ne"] > 0
        assert 0 <= quality.get("cold", 0.0) < 1
        assert figures["cpu_seconds"] > 0


@on_ranks(1)
def test_the_full_table_is_served_in_all_forms_of_one_training() -> None:
    problem = small_problem()
    case = {"network": "DLRM", "method": FULL, "lr": 0.1, "seed": 0, "part": "test"}
    case |= {**asdict(Form(dim=8, served="fp32")), "served": "all"}
    found = run(case, problem, 64)["served_as"]
    assert tuple(found) == ALL_FORMS
    rows = sum(ROWS.values())
    sizes = {name: quality["bytes"] for name, quality in found.items()}
    assert sizes["fp32"] == 32 * rows and sizes["fp16"] == 16 * rows
    assert sizes["int8"] == 12 * rows and sizes["int4"] == 8 * rows
    assert sizes["int4 column"] == 4 * rows + 2 * 8 * len(ROWS)  # a scale in float16
    read = rows_read(problem)
    bits = sum(4 * -(-ROWS[name] // 32) for name in ("item", "user"))
    kept = read["item"] + read["user"] + ROWS["day"]
    assert sizes["touched rows, fp32"] == 32 * kept + bits
    # Of the test, half of the items at least are new.
    assert found["fp32"]["cold"] == found["touched rows, fp32"]["cold"] > 0.25


@on_ranks(1)
def test_a_frequency_cut_keeps_the_ids_that_training_looks_up_most() -> None:
    problem = small_problem()
    cut = tables_methods.frequent_only(problem.data, {"user": 10})
    [user] = [each for each in cut.sparse if each.name == "user"]
    [before] = [each for each in problem.data.sparse if each.name == "user"]
    counts = torch.bincount(before.ids[problem.data.train], minlength=ROWS["user"])
    kept = before.ids[user.ids > 0].unique()
    assert user.rows == 10 and len(kept) == 9
    assert int(counts[kept].min()) >= int(counts[counts.argsort()[:-9]].max())


@on_ranks(1)
def test_two_hashes_add_two_rows() -> None:
    problem = small_problem()
    data = tables_methods.two_hashed(problem.data, {"item": 50, "user": 20})
    for name, ids in (("item", 4), ("user", 2), ("day", 1)):
        [each] = [one for one in data.sparse if one.name == name]
        assert each.take(torch.arange(3))[1].tolist() == [ids] * 3
    [user] = [each for each in data.sparse if each.name == "user"]
    both = user.ids.view(-1, 2)
    assert 0.5 < float((both[:, 0] != both[:, 1]).float().mean()) < 1


def arguments(folder: Path, *more: str) -> list[str]:
    data = str(write_movielens_1m(folder / "ml", 900))
    out = ["--out", str(folder / "out"), "--cache", str(folder / "cache")]
    short = [
        "--networks",
        "DLRM",
        "--budgets",
        "20%",
        "--seeds",
        "0",
        "1",
        "--batch",
        "128",
        "--settings",
        "4",
    ]
    return ["--movielens", data, *out, *short, *more]


@on_ranks(1)
def test_a_run_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--methods", "hash", "touched rows, retrained")
    trained: list[Any] = []
    stop = 11

    def train(case: Any, problem: Problem, batch: int) -> Any:
        if len(trained) == stop:
            raise KeyboardInterrupt
        trained.append(case)
        return run(case, problem, batch)

    with mock.patch.object(tables_methods, "run", train):
        assert tables.main(argv) == 130
        assert len(list((tmp_path / "cache").glob("*.json"))) == len(trained) == 11
        assert not (tmp_path / "out").exists()
        stop = 1000
        assert tables.main(argv) == 0
        # 4 settings and 2 seeds of each method, 8 settings of the full table; none of them twice.
        assert len(trained) == 22
        assert tables.main(argv) == 0
        assert len(trained) == 22
    [text] = [file.read_text() for file in (tmp_path / "out").glob("*-tables.md")]
    assert "## Verdicts" in text and "| 20% | hash |" in text
    assert len(list((tmp_path / "out").glob("*-tables.png"))) == 1
    [stored] = [json.loads(file.read_text()) for file in (tmp_path / "out").glob("*-tables.json")]
    assert {row["method"] for row in stored["cases"]} == {FULL, "hash", "touched rows, retrained"}
    assert {row["seed"] for row in stored["cases"]} == {0, 1}, "not the seed of tuning"
    command = "python -m benchmarks.tables --movielens PATH --networks DLRM"
    assert f"`{command} --methods hash 'touched rows, retrained' --budgets 20%" in text
    assert str(tmp_path) not in text


def test_a_search_follows_the_best_and_begins_as_a_longer_one() -> None:
    best = (1, 4, 0)

    def score(place: tuple[int, int, int]) -> float:
        return -sum(abs(a - b) for a, b in zip(place, best, strict=True))

    found = tables.climb((2, 6, 1), (0, 2, 0), score, 9)
    assert max(found, key=found.__getitem__) == best
    assert len(found) == 9
    assert list(tables.climb((2, 6, 1), (0, 2, 0), score, 5)) == list(found)[:5]
    assert len(tables.climb((1, 2, 1), (0, 0, 0), score, 9)) == 2, "no more than there are"


@on_ranks(1)
def test_the_interval_of_managed_collisions_is_tuned(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--methods", ZCH, "--seeds", "0", "--settings", "6")
    assert tables.main(argv) == 0
    stored = [json.loads(file.read_text()) for file in (tmp_path / "cache").glob("*.json")]
    tuned = [row for row in stored if row["method"] == ZCH and row["part"] == "tuning"]
    assert len(tuned) == 6
    assert len({row["interval"] for row in tuned}) > 1
    assert {row["interval"] for row in stored if row["method"] == FULL} == {0}
    [text] = [file.read_text() for file in (tmp_path / "out").glob("*-tables.md")]
    assert ", updates every " in text


def test_a_setting_at_an_end_of_its_range_is_named() -> None:
    row = {"data": "data", "network": "DLRM", "budget": "10%", "lr": 0.1, "dim": 8, "interval": 0}
    assert "Chosen at an end: none." in tables.edges([{**row, "method": "hash"}])
    said = tables.edges([{**row, "method": FULL, "lr": 3.0, "dim": 32}])
    assert "full at 10%: learning rate 3; data, DLRM, full at 10%: columns 32." in said
    assert "ZCH at 10%: interval 1." in tables.edges([{**row, "method": ZCH, "interval": 1}])


@on_ranks(1)
@pytest.mark.parametrize("kind", ["criteo", "avazu"])
def test_criteo_and_avazu_run(kind: str, tmp_path: Path) -> None:
    write = write_criteo if kind == "criteo" else write_avazu
    data = write(tmp_path / "data", 1000)
    out = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache"), "--batch", "400"]
    one = [
        "--networks",
        "DLRM",
        "--methods",
        "hash",
        "--budgets",
        "20%",
        "--seeds",
        "0",
        "--settings",
        "2",
    ]
    assert tables.main([f"--{kind}", str(data), *out, *one]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--budgets", "10"], "'10' is not a share such as 10%"),
        (["--methods", "magic"], "invalid choice: 'magic'"),
        (["--networks", "GPT"], "invalid choice: 'GPT'"),
    ],
)
def test_wrong_options_are_refused(
    argv: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tables.main(argv)
    assert message in capsys.readouterr().err


@on_ranks(1)
def test_wrong_data_ends_with_its_message(tmp_path: Path) -> None:
    with redirect_stderr(io.StringIO()) as said:
        assert tables.main(["--movielens", str(tmp_path)]) == 1
    assert f"error: {tmp_path} has neither ratings.dat" in said.getvalue()


# The report.

SEEDS = (0, 1, 2)


def made(
    method: str, budget: str, auc: dict[str, list[float]], size: dict[str, float]
) -> list[Any]:
    """Rows of a method: by how it is served, the AUC of each seed, and the bytes."""
    common = {"data": "data", "network": "DLRM", "dense_bytes": 1000, "dim": 16, "lr": 0.1}
    form = {"share": 1.0, "largest": False, "group": 0, "interval": 0, "cpu_seconds": 1.0}
    rows = []
    for place, seed in enumerate(SEEDS):
        served = {
            name: {
                "bytes": size[name],
                "auc": values[place],
                "ne": 0.9,
                "log_loss": 0.6,
                "cold": 0.2,
            }
            for name, values in auc.items()
        }
        one = {**common, **form, "method": method, "budget": budget, "seed": seed}
        rows.append({**one, "served_as": served})
    return rows


FP32 = [0.700, 0.702, 0.704]  # noise: 0.002


def full(int8: float, int4: float, untouched: float) -> list[Any]:
    over = {"fp32": 0.0, "int8": int8, "int4": int4, "touched rows, int4": untouched}
    sizes = {"fp32": 1000.0, "int8": 310.0, "int4": 180.0, "touched rows, int4": 90.0}
    auc = {name: [value + more for value in FP32] for name, more in over.items()}
    return made(FULL, "100%", auc, sizes)


def said(*rows: list[Any]) -> str:
    [lines] = lines_of([row for some in rows for row in some]).values()
    return verdict(lines)


def test_the_verdict_is_int8_where_nothing_smaller_is_as_good() -> None:
    worse = made("hash", "10%", {"int4": [value - 0.01 for value in FP32]}, {"int4": 99.0})
    text = said(full(0.001, -0.01, -0.01), worse)
    assert "All rows in int8" in text and "use full, int8 and stop" in text


def test_the_verdict_names_what_is_smaller_and_as_good() -> None:
    rows = full(0.0, -0.001, -0.0005)
    assert said(rows).endswith("Nothing smaller is: use touched rows, int4 and stop.")
    hashed = made("hash", "5%", {"int4": [value - 0.0015 for value in FP32]}, {"int4": 50.0})
    assert said(rows, hashed).endswith("with a second training: hash (5.0%).")
    # As good, and not smaller.
    larger = made("hash", "10%", {"int4": FP32}, {"int4": 99.0})
    assert "and stop" in said(rows, larger)


@pytest.mark.parametrize(
    ("auc", "expected"),
    [
        ([0.698, 0.700, 0.702], 0),  # each 0.002 below: the noise of the full table
        ([0.6975, 0.6995, 0.7015], -1),
        ([0.7065, 0.7085, 0.7105], 1),
        ([0.680, 0.702, 0.710], 0),  # far below on average, but so are seeds from each other
    ],
)
def test_a_difference_within_the_spread_of_seeds_is_noise(auc: list[float], expected: int) -> None:
    rows = full(0, 0, 0) + made("hash", "10%", {"int4": auc}, {"int4": 99.0})
    [lines] = lines_of(rows).values()
    assert lines[-1].against_full == expected
    text = report(rows, {"data": "About."}, 4)
    assert ("(noise)" in text.splitlines()[-1]) == (expected == 0)


def test_methods_that_do_not_fit_say_so() -> None:
    rows = full(0, 0, 0) + made("hash", "10%", {"int4": FP32}, {"int4": 99.0})
    missing = {
        "data": "other",
        "network": "DLRM",
        "method": "hash",
        "budget": "10%",
        "served_as": {},
    }
    other = [{**row, "data": "other"} for row in full(0, 0, 0)]
    text = report([*rows, *other, missing], {"data": "About.", "other": "About."}, 4)
    assert "| 10% | hash | +0.0000 (9.9%) | does not fit |" in text
    assert "never below float32 by more than the noise: at 10%, none." in text
    nowhere = {**missing, "method": "codes"}
    text = report([*rows, *other, missing, nowhere], {"data": "About.", "other": "About."}, 4)
    assert "| 10% | codes | does not fit | does not fit |" in text


def test_methods_that_hold_in_all_cases_are_named() -> None:
    rows = full(0, 0, 0) + made("hash", "10%", {"int4": FP32}, {"int4": 99.0})
    rows += made("codes", "10%", {"int4": [value - 0.01 for value in FP32]}, {"int4": 99.0})
    text = report(rows, {"data": "About."}, 4)
    assert "never below float32 by more than the noise: at 10%, hash." in text
