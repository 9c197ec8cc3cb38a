"""Logs that somebody else wrote or that are long: no markup on the page, and time that is linear in
the steps."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dist_sparse.report import Run, read_run
from dist_sparse.report.charts import charts
from dist_sparse.report.folder import LINES, RUN
from dist_sparse.report.page import page, svg_of
from dist_sparse.report.run import Spent
from tests.report.folders import HOSTILE
from tests.report.test_run_log import train


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


def test_no_value_is_markup(tmp_path: Path) -> None:
    """Replace each value of each kind of line, and of run.json, numbers too: markup is refused or
    shown as text."""
    train(tmp_path, config={"lr": 0.1})
    about = json.loads((tmp_path / RUN).read_text())
    lines = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    first = {line["kind"]: place for place, line in reversed([*enumerate(lines)])}
    assert set(first) == {"values", "masks", "end"}
    shown = 0
    for place in (*first.values(), None):
        for path in paths(about if place is None else lines[place]):
            changed = [*lines]
            if place is not None:
                changed[place] = replaced(lines[place], path, HOSTILE)
            (tmp_path / RUN).write_text(
                json.dumps(replaced(about, path, HOSTILE) if place is None else about)
            )
            (tmp_path / LINES).write_text("".join(json.dumps(line) + "\n" for line in changed))
            try:
                run = read_run(tmp_path)
                written = [page(run, charts(run)), *map(svg_of, charts(run))]
            except Exception:
                continue  # of any kind: values are not checked
            shown += 1
            assert written[0].count("<script>") == 1 and not any("<img" in text for text in written)
    assert shown > 20


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
