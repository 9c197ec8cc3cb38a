"""Logs that somebody else wrote or that are long: no markup on the page, and time that is linear in
the steps."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_sparse.extras.report import Run, add_artifact, numbers, read_run
from dist_sparse.extras.report.charts import charts
from dist_sparse.extras.report.folder import LINES, RUN
from dist_sparse.extras.report.page import page
from dist_sparse.extras.report.run import Spent
from dist_sparse.extras.report.summary import inspect_text
from tests.extras.report.folders import HOSTILE, write_many


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all parts of a JSON value."""
    yield path
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:1])
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield from paths(child, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def changes(folder: Path, new: object) -> Iterator[tuple[Any, ...]]:
    """Replace each value of each kind of line, and of run.json and artifacts.json, in turn by
    ``new``; yield its path."""
    texts = {name: (folder / name).read_text() for name in (RUN, LINES, "artifacts.json")}
    lines = [json.loads(line) for line in texts[LINES].splitlines()]
    first = {line["kind"]: place for place, line in reversed([*enumerate(lines)])}
    assert set(first) == {"values", "masks", "validation", "resumed", "end"}
    for name in (RUN, "artifacts.json"):
        whole = json.loads(texts[name])
        for path in paths(whole):
            (folder / name).write_text(json.dumps(replaced(whole, path, new)))
            yield name, *path
        (folder / name).write_text(texts[name])
    for place in first.values():
        for path in paths(lines[place]):
            changed = [*lines]
            changed[place] = replaced(lines[place], path, new)
            (folder / LINES).write_text("".join(json.dumps(line) + "\n" for line in changed))
            yield LINES, *path
    (folder / LINES).write_text(texts[LINES])


def logged(folder: Path) -> None:
    """The folder of a run with lines of every kind, and an artifact."""
    write_many(folder, tables=2, due=2, steps=4)
    traffic = {"kept": [1, 2], "removed": [3, 0], "kept_lookups": 5, "removed_lookups": 1}
    undone = {"undone": 1, "sparsity": 0.5}
    check = {"step": 1, "metric": 0.5, "best": 0.75, "holds": False, **undone}
    *lines, end = [json.loads(line) for line in (folder / LINES).read_text().splitlines()]
    end["tables"][0]["traffic"] = traffic
    lines.append({"kind": "validation", "step": 3, "check": check})
    lines.append({"kind": "resumed", "started": "2026-11-21T15:02:15+0000"})
    (folder / LINES).write_text("".join(json.dumps(line) + "\n" for line in (*lines, end)))
    add_artifact(folder, folder / LINES, auc=0.5)


WRONG = [HOSTILE, "12", [], {}]
MORE = ["", -1, 1e400, 10**30, None, True, ["x"], {"x": "y"}]


@pytest.mark.parametrize(
    "new",
    [*WRONG, *(pytest.param(new, marks=pytest.mark.slow) for new in MORE)],
    ids=[str(new)[:12] for new in [*WRONG, *MORE]],
)
def test_a_value_of_another_type_is_named_or_shown_as_text(tmp_path: Path, new: object) -> None:
    """In a report, in its JSON and in the text of inspect; and no text becomes markup."""
    folder = tmp_path / "run"
    logged(folder)
    refused = 0
    for name, *path in changes(folder, new):
        try:
            run = read_run(folder)
        except ValueError as error:
            refused += 1
            # The key; an item of a list, or of a mapping whose keys are free, is named by that list
            # or mapping. A mapping in place of another one lacks keys.
            keys = [key for key in path if isinstance(key, str)]
            named = any(
                text in str(error) for text in (*keys, "it has no", "missing", "unexpected")
            )
            assert name in str(error) and (named or not keys), (path, error)
            continue
        json.dumps(numbers(run), allow_nan=False)
        inspect_text(run)
        # With all charts in it.
        text = page(run, charts(run))
        assert text.count("<script>") <= 1 and "<img" not in text, path
    assert refused > 20


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


def test_a_mean_is_that_of_its_stretch() -> None:
    """Also after a value so large that differences of prefix sums would lose every later mean."""
    run = run_of(3_000)
    values = [1e20 if step == 100 else 1.0 + step % 7 for step in range(3_000)]
    run.values["loss"] = tuple(enumerate(values))  # type: ignore[index]
    [chart] = [chart for chart in charts(run) if chart.lines]
    [mean] = [line for line in chart.lines if line.role == "main"]
    assert [x for x, _ in mean.points] == [*range(25, 2_975, 50), 2_999]
    for place, (_, y) in enumerate(mean.points):
        assert y == math.fsum(values[50 * place : 50 * place + 50]) / 50
