"""Logs that no RunLog wrote: each ends in a page or in one line, never in a traceback."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_sparse import RunLog
from dist_sparse.cli.main import main
from dist_sparse.report import Run, read_run
from dist_sparse.report.charts import charts
from dist_sparse.report.figures import LineChart
from dist_sparse.report.folder import LINES, RUN
from dist_sparse.report.page import page
from dist_sparse.report.run import Spent
from dist_sparse.report.summary import inspect_json, inspect_text, summary
from tests.report.test_run_log import train

WRONG: list[Any] = [
    *(None, True, "", -1, 0, 2**63 - 1, 10**30, 0.5, 1e-320, 3e38, 1e300, -1e308, math.nan, math.inf),
    *([], {}, {"a": 1}, "x" * 5_000, [[]], [1] * 3_000),
]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all parts of a JSON value."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths(child, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def test_every_value_may_be_wrong(tmp_path: Path) -> None:
    """Replace each value of each kind of line, and of run.json, by each wrong one."""
    train(tmp_path, config={"lr": 0.1})
    about = json.loads((tmp_path / RUN).read_text())
    lines = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    first = {line["kind"]: place for place, line in reversed([*enumerate(lines)])}
    assert set(first) == {"values", "masks", "scores", "end"}
    shown = 0
    for place in (*first.values(), None):
        for path in paths(about if place is None else lines[place]):
            for wrong in WRONG:
                changed = [*lines]
                if place is not None:
                    changed[place] = replaced(lines[place], path, wrong)
                (tmp_path / RUN).write_text(json.dumps(replaced(about, path, wrong) if place is None else about))
                (tmp_path / LINES).write_text("".join(json.dumps(line) + "\n" for line in changed))
                try:
                    run = read_run(tmp_path)
                except ValueError as error:
                    assert len(str(error)) < len(str(tmp_path)) + 400, "values are cut"
                    continue
                shown += 1
                assert page(run, charts(run)) and summary(run) and inspect_text(run)
                json.dumps(inspect_json(run), allow_nan=False)
    assert shown > 200


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("values", {"seconds": -1e308}),
        ("end", {"seconds": {"total": 1e308, "masks": 0.0}}),
        ("masks", {"seconds": 1e300}),
        ("scores", {"tables": [{"low": 3e38, "counts": [1] * 100}]}),
        ("values", {"step": "x" * 10_000_000}),
        ("values", {"kind": "x" * 10_000_000}),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("command", ["report", "inspect"])
def test_a_hostile_log_ends_in_one_line(
    command: str, kind: str, change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    for line in lines:
        if line["kind"] == kind:
            tables = change.get("tables", [])
            line |= change | ({"tables": [line["tables"][0] | table for table in tables]} if tables else {})
    (tmp_path / LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([command, str(tmp_path)]) == 1
    said = capsys.readouterr()
    [line_said] = said.err.splitlines()
    assert "log.jsonl, line " in line_said and len(line_said) < 500 and not said.out


@pytest.mark.parametrize("name", [LINES, RUN])
def test_a_line_that_is_too_long_is_not_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunLog(tmp_path).close()
    with (tmp_path / name).open("wb") as file:
        file.truncate(70 << 20)
    assert main(["inspect", str(tmp_path)]) == 1
    assert "longer than 64 MiB" in capsys.readouterr().err


def test_a_config_with_numbers_that_json_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RunLog does not write them, but an editor may: the output is valid JSON."""
    RunLog(tmp_path, config={"lr": math.inf}).close()
    about = json.loads((tmp_path / RUN).read_text())
    assert about["config"] == {"lr": None}
    (tmp_path / RUN).write_text(
        json.dumps(about)[:-1].replace('"lr": null', '"lr": NaN, "deep": [[-Infinity], 1e999]') + "}"
    )
    assert main(["inspect", str(tmp_path), "--json"]) == 0

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refused)
    assert found["config"] == {"lr": None, "deep": [[None], None]}


def run_of(steps: int) -> Run:
    return Run(
        folder=Path("run"),
        name="run",
        started="",
        command="",
        world=1,
        versions={},
        config={},
        finished=True,
        sessions=1,
        last_step=steps - 1,
        values={"loss": tuple((step, 1.0 + step % 7) for step in range(steps))},
        due=(),
        tables=(),
        spent=Spent(total=1.0, masks=0.0, enforcement=None),
    )


def test_charts_take_time_that_is_linear_in_the_steps() -> None:
    """Counted, not timed: calls of Python functions, generators included."""

    def calls(steps: int) -> int:
        run, counted = run_of(steps), 0

        def count(*_: Any) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            charts(run)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(4_000) < 2.5 * calls(2_000)


def test_a_running_mean_is_that_of_its_window() -> None:
    """Also after a value so large that differences of prefix sums would lose every later mean."""
    run = run_of(3_000)
    values = [1e20 if step == 100 else 1.0 + step % 7 for step in range(3_000)]
    run.values["loss"] = tuple(enumerate(values))  # type: ignore[index]
    [chart] = [chart for chart in charts(run) if isinstance(chart, LineChart)]
    [mean] = [line for line in chart.lines if line.role == "main"]
    assert 300 < len(mean.points) <= 400 and [x for x, _ in mean.points][:1] == [0] and mean.points[-1][0] == 2_999
    for x, y in mean.points:
        window = values[max(0, int(x) - 100) : int(x) + 101]
        assert y == math.fsum(window) / len(window)
