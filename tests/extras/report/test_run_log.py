"""What a RunLog writes, in one process."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dist_sparse import (
    ROW,
    Advanced,
    CubicDataScheduler,
    DataNormSparsifier,
    MaskEnforcer,
    sparsify,
)
from dist_sparse.extras.report import RunLog
from dist_sparse.extras.report.charts import charts
from dist_sparse.extras.report.folder import LINES, LOCK, RUN, read_lines
from dist_sparse.extras.report.run import read_run
from dist_sparse.extras.report.run_log import MLflowSink, Quality, TensorBoardSink, WandbSink
from dist_sparse.extras.report.writing import write_report
from tests.extras.report.folders import full_disk


class Heard:
    """A sink that collects what it gets."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(folder / LINES)]


def train(folder: Path, steps: int = 9, **options: Any) -> DataNormSparsifier:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(20, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=(1, ROW))
    sparsifier.add_model(model)
    scheduler = CubicDataScheduler(sparsifier, "sparsity_level", final=0.5, begin=0, end=6, every=3)
    with RunLog(
        folder, sparsifier, enforcer=MaskEnforcer(sparsifier).attach(optimizer), **options
    ) as log:
        for step in range(steps):
            loss = model(torch.arange(20).view(1, -1)).pow(2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sparsifier.step()
            scheduler.step()
            log.step(step, loss=loss, auc=0.5 if step % 4 == 0 else None)
    return sparsifier


def test_a_run(tmp_path: Path) -> None:
    heard = Heard()
    sparsifier = train(tmp_path / "run", config={"lr": 0.1}, sinks=[heard])
    about = json.loads((tmp_path / "run" / RUN).read_text())
    assert about["format"] == 3 and about["config"] == {"lr": 0.1} and about["world"] == 1
    assert about["versions"]["torch"] == str(torch.__version__)
    lines = lines_of(tmp_path / "run")
    values = [line for line in lines if line["kind"] == "values"]
    assert [line["step"] for line in values] == list(range(9))
    assert [line["values"].get("auc") for line in values] == [0.5, None, None, None] * 2 + [0.5]
    masks = [line for line in lines if line["kind"] == "masks"]
    assert [line["step"] for line in masks] == [0, 3, 6]
    assert [line["number"] for line in masks] == [1, 2, 3]
    [table] = masks[-1]["tables"]
    assert table["name"] == "weight" or table["name"]
    assert (table["target"], table["removed_blocks"], table["dead_rows"]) == (0.5, 10, 10)
    assert 0 < table["flipped_blocks"] < 20 and table["regrown_blocks"] == 0
    assert table["threshold"] > 0
    assert masks[0]["seconds"] > 0 and masks[0]["collectives"] == 0
    [end] = [line for line in lines if line["kind"] == "end"]
    assert end is lines[-1] or end == lines[-1]
    assert end["tables"][0]["removed_blocks"] == 10 and end["tables"][0]["dtype"] == "float32"
    assert (
        end["seconds"]["total"] >= end["seconds"]["masks"] > 0 and end["seconds"]["enforcement"] > 0
    )
    assert sparsifier.table_stats()[0].removed_blocks == 10
    assert heard.closed == 1
    name = table["name"]
    assert (6, 0.5) in [
        (step, told[f"sparsity/{name}"]) for step, told in heard.told if f"sparsity/{name}" in told
    ]
    assert [step for step, told in heard.told if "loss" in told] == list(range(9))
    assert len([told for _, told in heard.told if "loss" not in told]) == 3, (
        "one call per mask update"
    )


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    train(tmp_path)
    before = (tmp_path / LINES).read_text()
    with pytest.raises(
        ValueError, match="holds the log of a run: choose another folder, or resume=True"
    ):
        RunLog(tmp_path)
    assert (tmp_path / LINES).read_text() == before
    with RunLog(tmp_path, resume=True) as log:
        log.step(100, loss=1.0)
    assert (tmp_path / LINES).read_text().startswith(before)
    assert lines_of(tmp_path)[-1]["step"] == 100
    (tmp_path / RUN).write_text('{"format": 1}')
    with pytest.raises(ValueError, match="has format 1; this release reads and writes 3"):
        RunLog(tmp_path, resume=True)


def test_what_a_crash_has_cut_off_is_skipped_when_the_run_is_resumed(tmp_path: Path) -> None:
    train(tmp_path)
    whole = (tmp_path / LINES).read_text().splitlines(keepends=True)
    # Cut short once, and when it was resumed.
    for cut in (
        whole[-1][:20],
        whole[-1][:20] + "\n" + whole[-1][:30],
    ):
        (tmp_path / LINES).write_text("".join(whole[:-1]) + cut)
        with RunLog(tmp_path, resume=True) as log:
            log.step(100, loss=1.0)
        lines = lines_of(tmp_path)
        assert [line["kind"] for line in lines[len(whole) - 1 :]] == ["resumed", "values", "end"]
        assert (tmp_path / LINES).read_text().startswith("".join(whole[:-1]))
    (tmp_path / LINES).write_text('{"kind": "val')
    RunLog(tmp_path, resume=True).close()
    assert [line["kind"] for line in lines_of(tmp_path)] == ["resumed", "end"]
    assert read_run(tmp_path).finished
    (tmp_path / LINES).write_text('{"kind": "val\n' + whole[-1])
    with pytest.raises(ValueError, match=r"log\.jsonl, line 1: "):  # no session begins below it
        lines_of(tmp_path)


def test_a_blank_line_in_a_log_is_passed_over(tmp_path: Path) -> None:
    """A crash between two writes left one, which no reader took."""
    with RunLog(tmp_path) as log:
        log.step(0, loss=1.0)
    (tmp_path / LINES).write_bytes((tmp_path / LINES).read_bytes() + b"\n")
    assert read_run(tmp_path).last_step == 0
    RunLog(tmp_path, resume=True).close()
    assert [line["kind"] for line in lines_of(tmp_path)][-2:] == ["resumed", "end"]


def test_a_line_of_which_a_crash_has_cut_off_the_end_alone_counts(tmp_path: Path) -> None:
    RunLog(tmp_path).close()
    (tmp_path / LINES).write_text('{"kind":"values","step":0,"seconds":1.0,"values":{"loss":1.0}}')
    RunLog(tmp_path, resume=True).close()
    assert [line["kind"] for line in lines_of(tmp_path)] == ["values", "resumed", "end"]


def test_run_json_comes_into_being_whole(tmp_path: Path) -> None:
    with full_disk(20), pytest.raises(OSError, match=r"File too large: .*run\.json"):
        RunLog(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {LINES, LOCK}
    RunLog(tmp_path, config={"lr": math.nan}).close()
    assert json.loads((tmp_path / RUN).read_text())["config"] == {"lr": "NaN"}
    (tmp_path / RUN).write_text('{"format": 2, "sta')
    with pytest.raises(ValueError, match=r"run\.json is not JSON"):
        RunLog(tmp_path, resume=True)


def sparsifier_of(rows: int = 20) -> DataNormSparsifier:
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    sparsifier.add_model(nn.EmbeddingBag(rows, 4))
    return sparsifier


def test_what_sparsify_returned_is_logged_with_its_enforcer(tmp_path: Path) -> None:
    model = nn.EmbeddingBag(20, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sparsify(model, optimizer, level=0.5, begin=0, end=2, every=1)
    with RunLog(tmp_path, sparse) as log:
        for step in range(3):
            model(torch.arange(20).view(1, -1)).sum().backward()
            optimizer.step()
            sparse.step()
            log.step(step, loss=1.0)
    assert sparse.sparsifier.masks.recorder is None
    [end] = [line for line in lines_of(tmp_path) if line["kind"] == "end"]
    assert end["tables"][0]["removed_blocks"] == 10
    assert end["seconds"]["enforcement"] > 0 and end["seconds"]["masks"] > 0
    # A second log has none of the seconds before it.
    with RunLog(tmp_path / "second", sparse) as log:
        log.step(3, loss=1.0)
    [end] = [line for line in lines_of(tmp_path / "second") if line["kind"] == "end"]
    assert end["seconds"]["enforcement"] == 0


def test_all_mask_updates_between_two_calls_are_logged(tmp_path: Path) -> None:
    sparsifier = sparsifier_of()
    with RunLog(tmp_path, sparsifier) as log:
        for step in range(10):
            sparsifier.step()
            if step % 4 == 3:
                log.step(step, loss=1.0)
    masks = [
        (line["step"], line["number"]) for line in lines_of(tmp_path) if line["kind"] == "masks"
    ]
    assert masks == [
        (3, 1),
        (3, 2),
        (3, 3),
        (3, 4),
        (7, 5),
        (7, 6),
        (7, 7),
        (7, 8),
        (7, 9),
        (7, 10),
    ]
    assert [(step, due.number) for step, due in read_run(tmp_path).due] == masks


def test_a_log_has_no_steps_of_another(tmp_path: Path) -> None:
    sparsifier = sparsifier_of()
    with pytest.raises(KeyError), RunLog(tmp_path / "failed", sparsifier) as log:
        sparsifier.step()
        raise KeyError
    assert sparsifier.masks.recorder is None, "nothing would read its counts"
    sparsifier.step()
    with RunLog(tmp_path / "run", sparsifier) as log:
        with pytest.raises(ValueError, match="has this sparsifier: close that log"):
            RunLog(tmp_path / "second", sparsifier)
        for step in range(2):
            sparsifier.step()
            log.step(step, loss=1.0)
    masks = [
        (line["step"], line["number"])
        for line in lines_of(tmp_path / "run")
        if line["kind"] == "masks"
    ]
    assert masks == [(0, 1), (1, 2)] and not (tmp_path / "second").exists()
    RunLog(tmp_path / "third", sparsifier).close()
    assert sparsifier.masks.recorder is None


def test_nothing_more_is_closed_twice(tmp_path: Path) -> None:
    heard = Heard()
    with RunLog(tmp_path, sinks=[heard]) as log:
        log.close()
    assert heard.closed == 1 and [line["kind"] for line in lines_of(tmp_path)] == ["end"]


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path) -> None:
    heard = Heard()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with RunLog(tmp_path, sinks=[heard]) as log, full_disk(100):
            for step in range(3):
                log.step(step, loss=1.0)
    [warning] = [str(one.message) for one in said if one.category is RuntimeWarning]
    assert "log.jsonl could not be written" in warning and "File too large" in warning
    assert len(lines_of(tmp_path)) == 1, "the line that was cut short is left out"
    assert [step for step, _ in heard.told] == [0, 1, 2] and heard.closed == 1


def test_a_sink_that_fails_gets_no_more(tmp_path: Path) -> None:
    class Broken(Heard):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            super().scalars(step, values)
            raise ConnectionError("gone")

    class Stuck(Heard):
        def close(self) -> None:
            raise OSError("stuck")

    broken, heard = Broken(), Heard()
    with (
        pytest.warns(RuntimeWarning) as said,
        RunLog(tmp_path, sinks=[broken, Stuck(), heard]) as log,
    ):
        for step in range(3):
            log.step(step, loss=1.0)
    assert [str(one.message) for one in said] == [
        "Broken failed (ConnectionError: gone): it gets no more values.",
        "Stuck failed (OSError: stuck): it gets no more values.",
    ]
    assert (
        len(broken.told) == 1
        and [step for step, _ in heard.told] == [0, 1, 2]
        and heard.closed == 1
    )
    assert [line["kind"] for line in lines_of(tmp_path)] == ["values"] * 3 + ["end"]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.step(0, loss=math.nan, other=torch.tensor(math.inf), third=3)
    assert lines_of(tmp_path)[0]["values"] == {"loss": None, "other": None, "third": 3.0}


def test_bad_values(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON serializable"):
        RunLog(tmp_path / "none", config={"model": nn.Linear(1, 1)})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="Invalid config: Circular reference"):
        RunLog(tmp_path / "none", config={"loop": loop})
    for wrong in ({"sparsifier": nn.Linear(1, 1)}, {"enforcer": 3}):
        with pytest.raises(
            ValueError, match=r"Invalid (sparsifier|enforcer) of type .*: must be a "
        ):
            RunLog(tmp_path / "none", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid config: "):
        RunLog(tmp_path / "none", config=[1])  # type: ignore[arg-type]
    for name in (5, Path("x"), b"x"):
        with pytest.raises(ValueError, match=r"Invalid name=.*: must be text\."):
            RunLog(tmp_path / "none", name=name)  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()
    log = RunLog(tmp_path)
    log.step(3, loss=1.0)
    with pytest.raises(ValueError, match=r"Invalid step=3: must be an int >= 4"):
        log.step(3, loss=1.0)
    for bad in ("high", torch.zeros(2), 10**400, 1j, torch.tensor(1j)):
        with pytest.raises(ValueError, match="Invalid loss="):
            log.step(4, loss=bad)  # type: ignore[arg-type]
    for bad in (4.5, "4", True, -1):
        with pytest.raises(ValueError, match=r"Invalid step=.*: must be an int >= "):
            log.step(bad)  # type: ignore[arg-type]
    log.close()
    with pytest.raises(ValueError, match="is closed: it takes no step 5"):
        log.step(5, loss=1.0)
    assert [line["kind"] for line in lines_of(tmp_path)] == ["values", "end"]


def test_sinks_are_any_iterable(tmp_path: Path) -> None:
    heard = Heard()
    with RunLog(tmp_path, sinks=(one for one in [heard])) as log:
        log.step(0, loss=1.0)
    assert heard.told == [(0, {"loss": 1.0})] and heard.closed == 1
    with pytest.raises(ValueError, match="holds the log of a run"):
        RunLog(tmp_path, sinks=[heard])
    assert heard.closed == 1, "a log that was refused does not close them"


def test_numbers_of_numpy(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.step(np.int64(1), loss=np.float32(0.5), hits=np.int32(3), auc=np.float64(0.25))
    assert lines_of(tmp_path)[0]["values"] == {"loss": 0.5, "hits": 3.0, "auc": 0.25}


def test_a_line_that_a_crash_has_cut_off(tmp_path: Path) -> None:
    train(tmp_path)
    whole = lines_of(tmp_path)
    text = (tmp_path / LINES).read_text()
    (tmp_path / LINES).write_text(text[:-10])
    assert lines_of(tmp_path) == whole[:-1]
    (tmp_path / LINES).write_text("{broken\n" + text)
    with pytest.raises(ValueError, match=r"log\.jsonl, line 1"):
        lines_of(tmp_path)
    (tmp_path / LINES).write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"log\.jsonl, line 1: 'utf-8' codec can't decode"):
        lines_of(tmp_path)


def test_an_exception_leaves_what_was_written(tmp_path: Path) -> None:
    heard = Heard()
    with pytest.raises(KeyError), RunLog(tmp_path, sinks=[heard]) as log:
        log.step(0, loss=1.0)
        raise KeyError("training failed")
    assert [line["kind"] for line in lines_of(tmp_path)] == ["values"]
    assert heard.closed == 1


def test_tensorboard(tmp_path: Path) -> None:
    """Real event files, read back by TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path / "run", sinks=[TensorBoardSink(tmp_path / "events")])
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(9))
    [name] = [tag for tag in events.Tags()["scalars"] if tag.startswith("sparsity/")]
    assert [(event.step, event.value) for event in events.Scalars(name)][-1] == (6, 0.5)


class Calls:
    """A module, or a run of it, that notes the calls of its functions."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.seen.append((name, *args, kwargs) if kwargs else (name, *args))
            return self

        return called


WANDB = [
    ("init", {"project": "tables"}),
    ("define_metric", "*", {"step_metric": "step"}),
    ("log", {"step": 3, "loss": 1.0}),
    ("log", {"step": 5, "loss": 0.5, "auc": 0.75}),
    ("finish",),
]
MLFLOW = [
    ("start_run", {"project": "tables"}),
    ("log_metrics", {"loss": 1.0}, {"step": 3}),
    ("log_metrics", {"loss": 0.5, "auc": 0.75}, {"step": 5}),
    ("end_run",),
]


@pytest.mark.parametrize(
    ("sink", "module", "calls"),
    [(WandbSink, "wandb", WANDB), (MLflowSink, "mlflow", MLFLOW)],
    ids=["wandb", "mlflow"],
)
def test_trackers(
    sink: Any,
    module: str,
    calls: list[tuple[Any, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their run starts with the first values: other ranks, and logs without any, start none."""
    tracker = Calls()
    monkeypatch.setitem(sys.modules, module, tracker)
    with RunLog(tmp_path / "empty", sinks=[sink(project="tables")]):
        pass
    assert tracker.seen == []
    with RunLog(tmp_path / "run", sinks=[sink(project="tables")]) as log:
        log.step(3, loss=1.0)
        log.step(5, loss=0.5, auc=0.75)
    assert tracker.seen == calls
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=module):
        sink()


def test_validations_of_a_guard_are_logged_and_drawn(tmp_path: Path) -> None:
    guard = pytest.importorskip("dist_sparse.extras.guard").Guard()
    model = nn.EmbeddingBag(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"level": 0.8, "block": "row", "begin": 2, "end": 6, "every": 1}
    sparse = sparsify(model, optimizer, **plan, advanced=Advanced(guard=guard))
    with RunLog(tmp_path, sparse, model=model) as log:
        for step in range(9):
            model(torch.arange(64)[None]).sum().backward()
            optimizer.step()
            guard.check(0.75 if sparse.sparsity < 0.5 else 0.5)
            sparse.step()
            log.step(step, loss=1.0)
    lines = [line for line in lines_of(tmp_path) if line["kind"] == "validation"]
    assert [line["step"] for line in lines] == list(range(9))
    run = read_run(tmp_path)
    assert [check for _, check in run.validations] == sparse.validations
    undone = run.undone
    assert undone is not None and undone[1].sparsity == sparse.sparsity < 0.5
    [chart] = [chart for chart in charts(run) if chart.key == "sparsity"]
    assert chart.mark == (undone[0], "undone at 0.5000")
    assert chart.lines[0].points[-1] == (8, sparse.sparsity)
    assert "The guard undid the last update" in chart.note
    assert "undone at 0.5000" in write_report(tmp_path, svg=tmp_path).read_text()
    assert "undone at 0.5000" in (tmp_path / "sparsity.svg").read_text()


@pytest.mark.parametrize("module", ["torchrec.metrics.auc", "torchrec.metrics.ne"])
def test_without_torchrec_quality_says_so_at_once(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at its first result, which ends the run."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=r"Quality\(\) .* TorchRec, .* `dist-sparse doctor` prints"
    ):
        Quality()
    with pytest.raises(ValueError, match="every=0"):
        Quality(0)


def test_it_shows_the_tables(tmp_path: Path) -> None:
    """Of the model, or of the sparsifier alone."""
    model = nn.ModuleDict({"user": nn.EmbeddingBag(1000, 8), "day": nn.Embedding(7, 4)})
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model, include="user")
    user, day = "  user: 1,000 rows, 8 columns, float32", "  day: 7 rows, 4 columns, float32"
    with RunLog(tmp_path / "a", sparsifier, model=model) as log:
        log.step(3)
        assert repr(log).splitlines()[1:-1] == [user, day, "  last step: 3"]
    assert repr(log).startswith(f"RunLog({tmp_path / 'a'}, closed\n")
    with RunLog(tmp_path / "b", sparsifier) as log:
        assert repr(log).splitlines()[1:-1] == [user, "  last step: none"]
