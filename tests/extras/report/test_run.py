"""Reading a run: what a RunLog wrote is read back, everything else is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from dist_sparse.extras.report import RunLog, add_artifact
from dist_sparse.extras.report import run as run_module
from dist_sparse.extras.report.folder import LINES, RUN
from dist_sparse.extras.report.run import read_run
from dist_sparse.extras.report.summary import numbers, status, summary
from tests.extras.report.folders import edit, write_many
from tests.extras.report.test_hostile import logged
from tests.extras.report.test_run_log import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    train(folder, config={"lr": 0.1})
    with RunLog(folder / "dense") as log:
        for step in range(9):
            log.step(step, loss=9.0 - step)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_a_run(folder: Path) -> None:
    run = read_run(folder)
    assert (run.finished, run.sessions, run.last_step, run.world, run.config) == (
        True,
        1,
        8,
        1,
        {"lr": 0.1},
    )
    assert [step for step, _ in run.values["loss"]] == list(range(9))
    assert run.values["auc"] == ((0, 0.5), (4, 0.5), (8, 0.5))
    assert [step for step, _ in run.due] == [0, 3, 6]
    [change] = run.due[-1][1].tables
    [table] = run.tables
    assert change.removed_blocks == table.removed_blocks == 10 and change.churn is not None
    assert run.spent.enforcement is not None
    assert run.spent.total > run.spent.masks + run.spent.enforcement > run.spent.masks > 0
    assert run.compared["dense"].last("loss") == 1.0


def test_the_numbers(folder: Path) -> None:
    found = numbers(read_run(folder))
    assert (found["sparsity"], found["target"], found["blocks"], found["removed_blocks"]) == (
        0.5,
        0.5,
        20,
        10,
    )
    assert (found["bytes_dense"], found["bytes_kept"]) == (320, 160)
    assert found["last"]["auc"] == 0.5 and found["compared"] == {"dense": {"last": {"loss": 1.0}}}
    assert 0 < found["seconds"]["share"] < 1 and found["due_steps"] == 3
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    text = summary(read_run(folder), Path("/r.html"))
    assert "\nThe run ended at step 8.\n" in text and "160 B of 320 B" in text
    assert text.endswith("\nreport: file:///r.html")


def test_a_run_that_has_not_ended(folder: Path) -> None:
    lines = (folder / LINES).read_text().splitlines(keepends=True)
    # A crash in the middle of the last line.
    (folder / LINES).write_text("".join(lines[:-1]) + lines[-1][:20])
    run = read_run(folder)
    assert not run.finished and run.tables == () and run.spent.enforcement is None
    found = numbers(run)
    assert (found["sparsity"], found["bytes_dense"], found["seconds"]["share"]) == (0.5, None, None)
    assert "without an end: the run failed or still runs" in status(run)
    (folder / LINES).write_text("")
    run = read_run(folder)
    assert run.last_step is None and numbers(run)["sparsity"] is None
    assert "before its first line" in status(run) and summary(run, Path("/r.html"))


def test_steps_that_a_resumed_run_does_again_count_once(folder: Path) -> None:
    with RunLog(folder, resume=True) as log:
        for step in (5, 6):
            log.step(step, loss=100.0 + step)
    run = read_run(folder)
    assert run.sessions == 2 and "2 sessions" in status(run)
    assert [step for step, _ in run.values["loss"]] == [0, 1, 2, 3, 4, 5, 6]
    assert run.last("loss") == 106.0
    # The mask update of step 6 and the AUC of step 8 are not those of this session.
    assert [step for step, _ in run.due] == [0, 3]
    assert [step for step, _ in run.values["auc"]] == [0, 4]
    assert run.finished and run.spent.enforcement is None and run.tables


def test_a_resumed_run_drops_each_kind_of_line_at_its_first_step(tmp_path: Path) -> None:
    """Also where it logs none of that kind, and where its first line is a mask update."""
    logged(tmp_path / "run")
    log = tmp_path / "run" / LINES
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "values":
            line["values"] |= {"test_auc": 0.5} if line["step"] == 3 else {}
    masks = next(line for line in lines if line["kind"] == "masks")
    again = [{"kind": "resumed", "started": ""}, masks | {"step": 2}]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, *again]))
    run = read_run(tmp_path / "run")
    assert [step for step, _ in run.values["loss"]] == [0, 1]
    assert "test_auc" not in run.values and run.validations == () and run.last_step == 2
    assert [step for step, _ in run.due] == [1, 2]


def test_a_resumed_session_without_a_step_drops_nothing(folder: Path) -> None:
    lines = (folder / LINES).read_text().splitlines()
    masks = next(json.loads(line) for line in lines if '"masks"' in line)
    again = [{"kind": "resumed", "started": ""}, masks | {"step": -1}]
    end = json.loads(lines[-1]) | {"step": -1}
    lines += [json.dumps(line) for line in (*again, end)]
    (folder / LINES).write_text("".join(f"{line}\n" for line in lines))
    run = read_run(folder)
    assert [step for step, _ in run.values["loss"]] == list(range(9)) and run.last_step == 8
    # Its mask update follows the last one.
    assert [step for step, _ in run.due] == [0, 3, 6, 6]
    # The next session repeats steps after all.
    with RunLog(folder, resume=True) as log:
        log.step(4, loss=1.0)
    assert [step for step, _ in read_run(folder).due] == [0, 3]


def test_a_resumed_session_replaces_due_steps_however_short_the_first_was(tmp_path: Path) -> None:
    write_many(tmp_path / "run", tables=1, due=2, steps=100, ends=False)
    log = tmp_path / "run" / LINES
    lines = log.read_text().splitlines(keepends=True)
    due = [json.loads(line) for line in lines if '"masks"' in line]
    # Both were logged at one step; the second session repeats the last of them before it logs a
    # time.
    due[0]["step"] = due[1]["step"]
    values = {"kind": "values", "step": 99, "seconds": 5.0, "values": {"loss": 1.0}}
    lines = lines[:100] + [json.dumps(line) + "\n" for line in due]
    log.write_text("".join(lines))
    assert [(step, d.number) for step, d in read_run(tmp_path / "run").due] == [(66, 1), (66, 2)]
    again = due[0] | {"number": 1, "step": 66}
    log.write_text(
        "".join(lines)
        + "".join(json.dumps(line) + "\n" for line in ({"kind": "resumed"}, again, values))
    )
    run = read_run(tmp_path / "run")
    assert [(step, d.number) for step, d in run.due] == [(66, 1)]
    assert run.sessions == 2 and run.spent.total == pytest.approx(0.99 + 5.0)


def test_sums_over_sessions(tmp_path: Path) -> None:
    write_many(tmp_path / "run", tables=2, due=2, steps=100)
    once = read_run(tmp_path / "run").spent
    log = tmp_path / "run" / LINES
    once_more = f"{json.dumps({'kind': 'resumed'})}\n"
    log.write_text(f"{log.read_text()}{once_more}{log.read_text()}")
    twice = read_run(tmp_path / "run")
    assert twice.sessions == 2 and len(twice.due) == 2
    assert once.enforcement is not None
    assert (twice.spent.total, twice.spent.enforcement) == (2 * once.total, 2 * once.enforcement)
    assert twice.spent.masks == pytest.approx(2 * once.masks)


def test_what_is_not_finite_is_none(folder: Path) -> None:
    with RunLog(folder, resume=True) as log:
        log.step(9, loss=float("nan"))
    run = read_run(folder)
    assert run.values["loss"][-1] == (9, None)
    assert run.last("loss") == run.values["loss"][-2][1]


def test_folders_without_a_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none does not exist\.$"):
        read_run(tmp_path / "none")
    with pytest.raises(
        ValueError, match=r"holds no run: there is no run\.json, which RunLog writes\.$"
    ):
        read_run(folder.parent)
    (folder / LINES).unlink()
    with pytest.raises(ValueError, match=r"run holds no run: there is no log\.jsonl"):
        read_run(folder)
    shutil.copy(folder / "dense" / LINES, folder)
    (folder / RUN).write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is not JSON"):
        read_run(folder)
    (folder / RUN).write_text('{"format": 1}')
    with pytest.raises(ValueError, match="has format 1; this release reads and writes 3"):
        read_run(folder)
    (folder / RUN).write_text(
        '{"format": 3, "name": null, "command": "", "tables": {}, "config": {}}'
    )
    with pytest.raises(
        ValueError, match=r"run\.json is not one that RunLog writes: it has no 'started'\.$"
    ):
        read_run(folder)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("values", {"kind": "other"}, "kind is 'other'; must be one of values, masks, validation"),
        ("values", {"values": 3}, "values is 3; must be a mapping of numbers or null"),
        ("end", {"tables": [{"name": "t"}]}, "it has no 'traffic'"),
        ("masks", {"tables": [{"name": "t"}]}, "missing .* 'target'"),
        ("masks", {"seconds": None}, "seconds is None; must be a number"),
        ("values", {"kind": "x" * 10_000_000}, "'xxx.*xxx'"),
    ],
)
def test_lines_that_no_run_log_writes(
    folder: Path, kind: str, change: dict[str, Any], says: str
) -> None:
    edit(folder, lambda line: line | change if line["kind"] == kind else line)
    with pytest.raises(
        ValueError, match=rf"log\.jsonl, line \d+ is not one that RunLog writes: .*{says}"
    ):
        read_run(folder)


def test_a_broken_run_to_compare_with_is_named(folder: Path) -> None:
    (folder / "dense" / RUN).write_text("[]")
    with pytest.raises(ValueError, match=r"dense.run\.json has format None"):
        read_run(folder)


def test_an_artifact_has_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, or that of its file or folder, also of the current one."""
    for wrong in (5, Path("int8"), b"int8"):
        with pytest.raises(ValueError, match=r"Invalid name=.*: must be text\."):
            add_artifact(folder, folder / RUN, auc=0.5, name=wrong)  # type: ignore[arg-type]
    assert read_run(folder).artifacts == ()
    monkeypatch.chdir(folder / "dense")
    assert add_artifact(folder, ".", auc=0.5).name == "dense"
    assert [one.name for one in read_run(folder).artifacts] == ["dense"]


def test_artifacts_that_are_added_at_once_all_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, read = Event(), run_module.read_artifacts

    def slowly(run: Path) -> Any:
        found = read(run)
        # The first reader waits for the second to write, which the lock makes impossible.
        if not began.is_set():
            began.set()
            written.wait(0.5)
        return found

    def add_second() -> None:
        began.wait()
        add_artifact(folder, folder / RUN, auc=0.5, name="second")
        written.set()

    began, second = Event(), Thread(target=add_second)
    monkeypatch.setattr(run_module, "read_artifacts", slowly)
    second.start()
    add_artifact(folder, folder / RUN, auc=0.5, name="first")
    second.join()
    assert [one.name for one in read(folder)] == ["first", "second"]
