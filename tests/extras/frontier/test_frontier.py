"""A frontier: what fits is measured, once, and the recommendation follows from it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dist_sparse.cli.main import main
from dist_sparse.extras.frontier import frontier, measure, serving
from dist_sparse.extras.frontier.measure import trials_of
from dist_sparse.planning.candidates import Candidate, Choices, TableShape

IDS = torch.arange(400).view(80, 5)


def table(rank: int, columns: int = 16) -> nn.EmbeddingBag:
    """Rows that need ``rank`` columns, in a basis of their own."""
    torch.manual_seed(0)
    return nn.EmbeddingBag.from_pretrained(torch.randn(400, rank) @ torch.randn(rank, columns))


def error_of(model: nn.Module) -> Callable[[nn.Module], dict[str, float]]:
    expected = model(IDS)
    return lambda model: {"error": float((model(IDS) - expected).abs().mean()), "fit": 1.0}


def found(model: nn.Module, **options: object) -> dict[tuple[float, str], float]:
    result = frontier(model, error_of(model), lower_is_better=["error"], **options)  # type: ignore[arg-type]
    return {(point.budget, point.method): point.bytes for point in result.points}


def test_each_method_uses_what_a_budget_holds() -> None:
    pytest.importorskip("dist_sparse.extras.rotation")
    model = table(4)
    before = model.weight.clone()
    evaluated: list[Tensor] = []
    error = error_of(model)

    def evaluate(model: nn.Module) -> dict[str, float]:
        evaluated.append(model.weight.clone())  # type: ignore[operator]
        return error(model)

    result = frontier(
        model, evaluate, budgets=[0.5, 0.1], lower_is_better=["error"], tolerance=0.01
    )
    assert torch.equal(model.weight, before) and torch.equal(evaluated[0], before)
    assert result.table_bytes == 400 * 16 * 4 and result.full == {"error": 0.0, "fit": 1.0}
    assert {point.method for point in result.points if point.budget == 0.5} == {
        "bits", "rotated", "rows", "column"
    }  # fmt: skip
    for point in result.points:
        bytes_ = point.bytes
        candidate = point.candidate
        assert bytes_ <= point.budget * result.table_bytes
        [served] = [
            rows for rows, each in zip(evaluated[1:], result.trials, strict=True) if each is point
        ]
        with serving(model, candidate):
            assert torch.equal(model.weight, served)
        if point.method == "rows":
            assert bytes_ > 0.99 * point.budget * result.table_bytes
    assert [result.loss(point) for point in result.points[:4]] == sorted(
        result.loss(point) for point in result.points[:4]
    )


def test_the_recommendation() -> None:
    """int4 where that is enough; columns in a rotated basis where few hold everything; and a word
    if nothing is."""
    pytest.importorskip("dist_sparse.extras.rotation")
    for rank, tolerance, expected in (
        (16, 0.5, "Recommended: bits alone as int4 (everything): 18.8% of the bytes"),
        (4, 0.2, "Recommended: rotated columns as int4 (25.0% of columns): 10.4% of the bytes"),
        (16, 1e-9, "Nothing comes within 1e-09 of the error 0.0000 of the whole model; nearest is"),
    ):
        model = table(rank)
        result = frontier(
            model,
            error_of(model),
            budgets=[0.5, 0.2, 0.11],
            methods=["rotated", "bits"],
            lower_is_better=["error"],
            tolerance=tolerance,
        )
        assert result.recommendation.startswith(expected), str(result)
        assert " ".join(str(result).split()).endswith(result.recommendation)


def test_notes_are_of_the_methods_that_are_shown() -> None:
    """Where bits alone are measured nothing was removed; and each sentence ends."""
    model = table(16)
    for methods, removed in ((["bits"], False), (["bits", "rows"], True)):
        how = {"methods": methods, "tolerance": 0.0, "lower_is_better": ["error"]}
        text = str(frontier(model, error_of(model), **how))  # type: ignore[arg-type]
        assert ("were removed from the trained model" in text) == removed
        assert "nearest is this" in text and text.endswith(".")


def test_smaller_tables_are_trained_once(tmp_path: Path) -> None:
    model = table(2)
    trained: list[float] = []

    def columns(share: float) -> tuple[nn.Module, Callable[[nn.Module], dict[str, float]]]:
        trained.append(share)
        small = table(2, round(16 * share))
        return small, error_of(small)

    options = {
        "train": columns,
        "methods": ["small", "rows"],
        "out": tmp_path,
    }
    points = found(model, budgets=[0.2, 0.1], **options)
    assert points[0.2, "small"] == 400 * (8 + 4) and points[0.1, "small"] == 400 * (2 + 4)
    assert sorted(trained) == [0.25, 0.5]
    trained.clear()
    # Read from trials.jsonl.
    assert found(model, budgets=[0.2, 0.1], **options) == points and trained == []
    written = (tmp_path / "trials.jsonl").read_text()
    # Interrupted in the last line.
    (tmp_path / "trials.jsonl").write_text(written[:-40])
    assert found(model, budgets=[0.2, 0.1], **options) == points and len(trained) == 1
    # What was measured again is below the line that was cut short.
    assert found(model, budgets=[0.2, 0.1], **options) == points and len(trained) == 1
    assert "of the bytes" in json.loads((tmp_path / "frontier.json").read_text())["recommendation"]
    trained.clear()
    model.weight.data[0, 0] += 1
    assert found(model, budgets=[0.1], **options) and trained  # of another model


SMALL = {"methods": ["bits"], "budgets": [0.5], "dtypes": ["int8"]}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["trials.jsonl", "frontier.json"])
def test_pipes_are_refused_before_the_first_evaluation(name: str, tmp_path: Path) -> None:
    """Opening one would block forever."""
    os.mkfifo(tmp_path / name)
    evaluated: list[nn.Module] = []
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        frontier(table(2), lambda model: evaluated.append(model) or {"error": 0.0}, out=tmp_path)  # type: ignore[func-returns-value]
    assert not evaluated


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    """In a folder from somebody else, that leads to files of the reader."""
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.write_text("mine")
    out.mkdir()
    (out / "frontier.json").symlink_to(mine)
    assert found(table(2), out=out, **SMALL)
    assert mine.read_text() == "mine" and not (out / "frontier.json").is_symlink()
    for target in (mine, tmp_path / "new"):
        (out / "trials.jsonl").unlink()
        (out / "trials.jsonl").symlink_to(target)
        with pytest.raises(ValueError, match=r"trials\.jsonl is not a regular file"):
            found(table(2), out=out, **SMALL)
    assert mine.read_text() == "mine" and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bytes": "12"}, "Invalid bytes='12': must be an int"),
        ({"metrics": {"error": "low"}}, "Invalid error='low': must be a finite number"),
        ({"metrics": None}, "an entry is missing or of another type"),
        ({"trained": True}, "Invalid trained=True: must be a finite number"),
    ],
)
def test_text_for_a_number_in_trials_is_named(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    model, file = table(2), tmp_path / "trials.jsonl"
    assert found(model, out=tmp_path, **SMALL)
    lines = [json.dumps(json.loads(line) | change) for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines))
    place = r"trials\.jsonl, line 1 is refused: "
    with pytest.raises(ValueError, match=place + re.escape(says)):
        found(model, out=tmp_path, **SMALL)
    file.write_text("[1]\n")
    with pytest.raises(ValueError, match=place + "an entry is missing or of another type"):
        found(model, out=tmp_path, **SMALL)


def test_untouched_rows_are_a_method_of_their_own() -> None:
    choices = Choices(
        tables=[TableShape("cross", (1000, 16))],
        budget=5_000,
        groups=(("cross",),),
        untouched={"cross": 750},
    )
    by_method: dict[str, list[Candidate]] = {}
    methods = ["bits", "untouched", "rows"]
    for trial in trials_of(
        choices, 0.1, methods, ["fp32", "int4"], prunable=["cross"], trains=True
    ):
        by_method.setdefault(trial.method, []).append(trial.candidate)
    assert "bits" not in by_method
    assert [each.dtype for each in by_method["untouched"]] == ["int4"]
    assert by_method["untouched"][0].levels == {"cross": 0.75}
    assert all(each.levels["cross"] != 0.75 for each in by_method["rows"])


def test_budgets_in_each_spelling() -> None:
    model = table(2)
    options = {"methods": ["bits"], "dtypes": ["int8"]}
    assert found(model, budgets=["30%"], **options) == found(model, budgets=[0.3], **options)


def test_errors(tmp_path: Path) -> None:
    model = table(2)
    for options, message in (
        ({"methods": ["small"]}, "Invalid methods='small'"),
        ({"methods": ["colums"]}, "Invalid methods='colums'"),
        ({"metric": "auc"}, "Invalid metric='auc'"),
        ({"budgets": [1.5]}, "Invalid budgets=1.5"),
        ({"budgets": [5]}, "No table fits in 5 bytes. Did you mean 5%?"),
        ({"budgets": "20%"}, "Invalid budgets='20%': must be a list"),
        ({"rotate": [["weight", "item"]]}, "['item'] are not among the tables ['weight']"),
        ({"budgets": []}, "Invalid budgets=[]"),
        ({"protect": "user*"}, "Invalid protect: ['user*'] match none of ['weight']"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            frontier(model, error_of(model), **options)  # type: ignore[arg-type]
    for metrics, message in (
        ({}, r"returned {}"),
        ({"auc": None}, "by name, finite numbers"),
        ({"auc": "high"}, "by name, finite numbers"),
        ({"auc": float("nan")}, r"{'auc': nan}; must return"),
    ):
        with pytest.raises(ValueError, match=message):
            frontier(model, lambda model, metrics=metrics: metrics)  # type: ignore[misc]
    model.weight.data[3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"Table 'weight' .* has the value nan"):
        frontier(model, lambda model: {"loss": float(model.weight.sum())})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(
        "from tests.extras.frontier.test_frontier import error_of, table\n\n\ndef measured(columns=1.0):\n"
        "    model = table(2, round(16 * columns))\n    return model, error_of(model)\n\n\ndef"
        " stopped():\n    model = table(2)\n    evaluate, calls = error_of(model), []\n    def"
        " third(model):\n        calls.append(1)\n        if len(calls) == 3:\n            raise"
        " KeyboardInterrupt\n        return evaluate(model)\n    return model, third\n"
    )
    words = [
        "frontier",
        f"{entry}:measured",
        "--budget",
        "20%",
        "--method",
        "small",
        "--method",
        "bits",
    ]
    assert main([*words, "--less", "error", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [point["method"] for point in told["points"]] == ["small", "bits"]
    kept = [
        "--budget",
        "20%",
        "--method",
        "rows",
        "--less",
        "error",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(["frontier", f"{entry}:stopped", *kept]) == 130
    assert capsys.readouterr().err.endswith("dist-sparse: interrupted\n")
    assert main(["frontier", f"{entry}:measured", *kept, "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert len((tmp_path / "out" / "trials.jsonl").read_text().splitlines()) == len(trials), (
        "none is measured twice"
    )
    assert main([*words, "--metric", "auc"]) == 1
    assert "Invalid --metric='auc'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["NE", "Loss"])
def test_names_of_metrics_in_any_case(name: str) -> None:
    """The default knows ne and loss: more of them is worse."""
    model = table(4)
    error = error_of(model)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {name: error(model)["error"]}

    result = frontier(model, evaluate, budgets=[0.5, 0.2], methods=["bits"], tolerance=0.5)
    assert result.loss(result.points[-1]) > 0 and "less is better" in str(result)
    with pytest.raises(ValueError, match=r"Invalid budgets=0\.1: must be a list"):
        frontier(model, evaluate, budgets=0.1)  # type: ignore[arg-type]


def test_metrics_are_shown_under_their_names() -> None:
    """Also where evaluate() returns them in another order."""
    model = table(4)
    calls = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        calls.append(model)
        found = {"auc": 0.7, "ne": 0.9}
        return dict(reversed(found.items())) if len(calls) > 1 else found

    result = frontier(model, evaluate, budgets=[0.5], methods=["bits"])
    rows = [line.split() for line in str(result).splitlines() if "%" in line and "as" not in line]
    assert rows and all(row[-2:] == ["0.7000", "0.9000"] for row in rows)


def test_a_repl_and_a_notebook_show_the_table() -> None:
    pretty = pytest.importorskip("IPython.lib.pretty")
    model = table(4)
    result = frontier(model, error_of(model), budgets=[0.5], methods=["bits"])
    assert repr(result) == str(result) == pretty.pretty(result)
    assert str(result).startswith("   at  method ") and len(str(result).splitlines()) > 5


def test_tables_that_cannot_be_rotated_are_refused() -> None:
    """Before the first evaluation; other methods take them."""
    pytest.importorskip("dist_sparse.extras.rotation")
    bags = {"user": nn.EmbeddingBag(50, 8), "item": nn.EmbeddingBag(50, 4)}
    how = {"rotate": [["user", "item"]], "budgets": [0.5]}
    with pytest.raises(ValueError, match="'item'"):
        frontier(nn.ModuleDict(bags), lambda _: {"loss": 0.0}, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["rotated", "codes"])
def test_without_its_extra_a_method_is_not_known(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"rotated": "dist_sparse.extras.rotation", "codes": "dist_sparse.extras.codes"}[
        method
    ]
    find = measure.find_spec
    monkeypatch.setattr(measure, "find_spec", lambda name: None if name == missing else find(name))
    model = table(2)
    options = {"budgets": [0.1], "lower_is_better": ["error"]}
    result = frontier(model, error_of(model), **options)  # type: ignore[arg-type]
    assert method not in {trial.method for trial in result.trials}
    with pytest.raises(ValueError, match=f"Invalid methods='{method}'"):
        frontier(model, error_of(model), methods=[method], **options)  # type: ignore[arg-type]
