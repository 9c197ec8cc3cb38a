"""Checkpoints in one process: what is restored, what is refused, and which folders there are."""

from __future__ import annotations

import copy
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from dist_sparse import Checkpoints
from dist_sparse.checkpoint.checkpoints import checkpoint_summary
from tests.checkpoint.models import Job, same


def test_a_resumed_training_ends_bit_equal(tmp_path: Path) -> None:
    """Weights, masks, schedule, state of optimizers that have not stepped, learning rates and
    dropout's numbers."""
    whole = Job(tmp_path / "whole")
    whole.train(0, 6)
    whole.optimizers[1].param_groups[0]["lr"] = 0.03
    whole.checkpoints.save(6, **whole.parts, extra={"epoch": 2, "names": ["a", None]})
    whole.train(6, 12)

    resumed = Job(tmp_path / "whole", seed=7, lr=0.5)
    found = resumed.checkpoints.resume_latest(**resumed.parts)
    assert found is not None and (found.step, found.rng, found.merged) == (6, True, ())
    assert found.extra == {"epoch": 2, "names": ["a", None]}
    group = resumed.optimizers[1].param_groups[0]
    assert (
        group["lr"] == 0.03
        and group["betas"] == (0.8, 0.9)
        and resumed.optimizers[0].param_groups[0]["lr"] == 0.1
    )
    resumed.train(6, 12)
    assert same(resumed.state(), whole.state())


def test_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    job = Job(tmp_path / "none")
    before = job.state()
    assert job.checkpoints.resume_latest(**job.parts) is None
    assert same(job.state(), before) and job.checkpoints.steps() == []


def test_save_async_copies_before_training_goes_on(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(0, 4)
    job.checkpoints.save_async(4, **job.parts)
    wanted = job.state()
    job.train(4, 9)
    job.checkpoints.save_async(9, **job.parts)  # waits for the one before
    job.checkpoints.wait()
    assert job.checkpoints.steps() == [4, 9]
    job.checkpoints.wait()
    for file in (tmp_path / "step-00000009").iterdir():
        file.unlink()
    resumed = Job(tmp_path, seed=1)
    assert resumed.checkpoints.resume_latest(**resumed.parts) is not None
    assert same(resumed.state(), wanted)


def test_the_thread_of_save_async_changes_nothing_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither filters of warnings nor options of torch: whichever thread restores them last would
    decide."""
    changed = []
    enter = warnings.catch_warnings.__enter__

    def entered(self: Any) -> Any:
        changed.append(("catch_warnings", threading.current_thread().name))
        return enter(self)

    def option(value: bool) -> None:
        changed.append(("set_crc32_options", threading.current_thread().name))

    monkeypatch.setattr(warnings.catch_warnings, "__enter__", entered)
    monkeypatch.setattr(torch.serialization, "set_crc32_options", option)
    job = Job(tmp_path)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        job.checkpoints.save_async(1, **job.parts)
        job.checkpoints.wait()
    assert job.checkpoints.steps() == [1] and not shown
    assert not [change for change in changed if change[1].startswith("checkpoint")]


def test_wait_raises_what_the_thread_has_raised(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(0, 2, save=True)
    job.checkpoints.save_async(1, **job.parts)
    with pytest.raises(
        ValueError, match=r"Invalid step=1: .* holds the checkpoint of step 2, and steps must grow"
    ):
        job.checkpoints.wait()
    job.checkpoints.wait()


def test_which_checkpoints_there_are(tmp_path: Path) -> None:
    """``every`` and ``force``; the last ``keep``; nothing that is no checkpoint is deleted."""
    (tmp_path / "notes.txt").touch()
    (tmp_path / "step-00000003").mkdir()  # what a killed save has left
    (tmp_path / "step-00000003" / "__0_0.distcp").touch()
    job = Job(tmp_path, every=2, keep=2)
    job.train(0, 7, save=True)
    assert job.checkpoints.save(7, **job.parts) is False
    assert job.checkpoints.steps() == [4, 6]
    assert job.checkpoints.save(7, **job.parts, force=True) is True
    assert job.checkpoints.steps() == [6, 7]
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.txt",
        "step-00000006",
        "step-00000007",
    }


def test_a_step_is_written_once(tmp_path: Path) -> None:
    job = Job(tmp_path, sparse=False)
    job.checkpoints.save(5, **job.parts)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-00000005").iterdir()}
    for step in (5, 4):
        with pytest.raises(ValueError, match=rf"Invalid step={step}: .*steps must grow"):
            job.checkpoints.save(step, **job.parts)
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "step-00000005").iterdir()
    } == before


def another(kind: str) -> dict[str, Any]:
    """Parts that do not fit a checkpoint of :class:`Job`, and why."""
    job = Job(Path("unused"), seed=3, sparse=kind not in ("dense", "reader"))
    parts = job.parts
    if kind == "layer":
        parts["model"] = nn.Sequential(*job.model, nn.Linear(1, 1))
    elif kind == "no optimizer":
        parts["optimizer"] = None
    elif kind == "one optimizer":
        parts["optimizer"] = job.optimizers[0]
    elif kind == "other optimizer":
        parts["optimizer"] = [torch.optim.Adagrad(job.model.parameters(), lr=0.1)]
    elif kind == "class of optimizer":
        parts["optimizer"] = [torch.optim.SGD(job.model[0].parameters(), lr=0.1), job.optimizers[1]]
    elif kind == "dtype":
        parts |= {"model": copy.deepcopy(job.model).double(), "optimizer": None}
    elif kind == "shape":
        parts |= {
            "model": nn.Sequential(nn.EmbeddingBag(51, 8), nn.Dropout(), nn.Linear(8, 1)),
            "optimizer": None,
        }
    return parts


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("layer", r"'model.3.weight' is not in the checkpoint"),
        (
            "no optimizer",
            r"'optimizer.0.weight.\w+' and \d+ more of the checkpoint would be dropped",
        ),
        (
            "one optimizer",
            r"'optimizer.2.bias.exp_avg' and \d+ more of the checkpoint would be dropped",
        ),
        (
            "other optimizer",
            r"'0.weight' and '2.bias' had different values of '\w+', and are in one group now",
        ),
        (
            "class of optimizer",
            r"'0.weight' was saved with the option 'eps', which SGD does not have",
        ),
        (
            "dtype",
            (
                r"'model.0.weight' was saved with shape \(50, 8\) and torch.float32, and now has .*"
                r" torch.float64"
            ),
        ),
        (
            "shape",
            r"'model.0.weight' was saved with shape \(50, 8\) and .* now has shape \(51, 8\)",
        ),
        ("dense", r"'sparse.* of the checkpoint would be dropped"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    kind: str, why: str, tmp_path: Path
) -> None:
    Job(tmp_path).train(0, 3, save=True)
    parts = another(kind)
    before = {name: value.clone() for name, value in parts["model"].state_dict().items()}
    with pytest.raises(ValueError, match=why):
        Checkpoints(tmp_path).resume_latest(**parts)
    assert same(parts["model"].state_dict(), before)


@pytest.mark.parametrize("extra", [(1, 2), {1: 2}, float("nan"), {"a": torch.ones(1)}, object()])
def test_extra_is_what_json_gives_back(extra: Any, tmp_path: Path) -> None:
    job = Job(tmp_path, sparse=False)
    with pytest.raises(ValueError, match="Invalid extra: must be JSON"):
        job.checkpoints.save(1, **job.parts, extra=extra)
    assert job.checkpoints.steps() == []


def test_arguments() -> None:
    for wrong in ({"keep": 0}, {"every": 0}, {"keep": True}):
        with pytest.raises(ValueError, match=r"Invalid (keep|every)=.*must be an int >= 1|Invalid"):
            Checkpoints("here", **wrong)
    with pytest.raises(ValueError, match=r"Invalid root='nowhere://at/all': Protocol not known"):
        Checkpoints("nowhere://at/all")
    with pytest.raises(ValueError, match=r"Invalid root='s3:/here': pass an address as a string"):
        Checkpoints(Path("s3://here"))
    with pytest.raises(ValueError, match=r"Invalid root='.*\.py': must be a folder, and is a file"):
        Checkpoints(__file__)
    with pytest.raises(
        ValueError, match=r"Invalid sparse of type int: must be what sparsify\(\) returns"
    ):
        Checkpoints("here").save(1, model=nn.Linear(1, 1), sparse=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Invalid optimizer of type str"):
        Checkpoints("here").save(1, model=nn.Linear(1, 1), optimizer="Adam")
    with pytest.raises(
        ValueError, match=r"a parameter of shape \(2, 3\), which is not in the model"
    ):
        Checkpoints("here").save(
            1, model=nn.Linear(1, 1), optimizer=torch.optim.SGD(nn.Linear(3, 2).parameters())
        )
    with pytest.raises(ValueError, match=r"Invalid root=None: must be a path"):
        Checkpoints(None)  # type: ignore[arg-type]
    for use in (
        lambda: Checkpoints("here").save(1, model=None),  # type: ignore[arg-type]
        lambda: Checkpoints("here").save_async(1, model={}),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"Invalid model of type \w+: must be a torch"):
            use()
    linear = nn.Linear(1, 1)
    twice = [torch.optim.SGD(linear.parameters()), torch.optim.SGD(linear.parameters())]
    with pytest.raises(ValueError, match=r"two of them step 'weight'"):
        Checkpoints("here").save(1, model=linear, optimizer=twice)
    with pytest.raises(ValueError, match=r"Invalid row_wise_state='guess'"):
        Checkpoints("here").resume_latest(model=linear, row_wise_state="guess")  # type: ignore[arg-type]


def test_any_file_system_of_fsspec(tmp_path: Path) -> None:
    del tmp_path
    job = Job(Path("unused"), sparse=False)
    checkpoints = Checkpoints("memory://jobs/one", keep=1)
    for step in (1, 2):
        job.train(step - 1, step)
        checkpoints.save(step, **job.parts)
    assert checkpoints.steps() == [2] and checkpoints.root == "memory://jobs/one"
    resumed = Job(Path("unused"), seed=4, sparse=False)
    found = Checkpoints("memory://jobs/one/").resume_latest(**resumed.parts)
    assert found is not None and found.path == "memory://jobs/one/step-00000002"
    assert same(resumed.state(), job.state())


def test_summary(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train(0, 2, save=True, extra={"epoch": 1})
    with pytest.raises(ValueError, match="no checkpoint of step 5; a folder without its marker"):
        checkpoint_summary(tmp_path / "step-00000005")
    steps = [line.split()[:2] for line in checkpoint_summary(tmp_path).splitlines()[-2:]]
    assert steps == [["1", "1"], ["2", "1"]]
    shown = checkpoint_summary(tmp_path / "step-00000002")
    assert "step 2, saved by 1 rank" in shown and "optimizer.2.bias.step" in shown
    (tmp_path / "step-00000002" / "values.json").write_text("{}")
    with pytest.raises(ValueError, match=r"values\.json is damaged"):
        checkpoint_summary(tmp_path / "step-00000002")


def test_extra_is_copied_at_once(tmp_path: Path) -> None:
    job, progress = Job(tmp_path), {"samples": 1}
    job.checkpoints.save_async(np.int64(1), **job.parts, extra=progress)  # type: ignore[arg-type]
    progress["samples"] = 2
    # Another object for the same folder: it waits for the write.
    found = Checkpoints(tmp_path).resume_latest(**job.parts)
    assert found is not None and (found.step, found.extra) == (1, {"samples": 1})


def test_a_scheduler_that_is_made_after_the_resume(tmp_path: Path) -> None:
    """It reads initial_lr from the groups."""

    def scheduler(optimizer: Any, last: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5, last_epoch=last)

    job = Job(tmp_path)
    before = scheduler(job.optimizers[1], -1)
    job.optimizers[1].step()
    before.step()
    job.checkpoints.save(1, **job.parts)
    resumed = Job(tmp_path, seed=1)
    resumed.checkpoints.resume_latest(**resumed.parts)
    after = scheduler(resumed.optimizers[1], 0)
    assert after.base_lrs == before.base_lrs


def test_an_interrupted_wait_is_waited_for_again(tmp_path: Path) -> None:
    """Two threads would write at once."""
    job = Job(tmp_path)
    writing = Future[None]()
    Checkpoints.writing = writing
    with (
        mock.patch.object(writing, "result", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        job.checkpoints.wait()
    assert Checkpoints.writing is writing
    writing.set_result(None)
    job.checkpoints.wait()
    assert Checkpoints.writing is None
