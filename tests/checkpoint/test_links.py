"""Nothing outside the root is read, written or deleted through a link in it, and an error of the
disk is not taken for a missing checkpoint."""

from __future__ import annotations

import errno
import os
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_sparse import Checkpoints
from dist_sparse.checkpoint.checkpoints import checkpoint_summary
from dist_sparse.checkpoint.storage import StepFolders
from tests.checkpoint.models import Job, same


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A committed checkpoint of another training, and a user's own file beside it."""
    folder = tmp_path / "outside"
    Job(folder, seed=5).train(0, 1, save=True)
    found = folder / "step-00000001"
    (found / "notes.txt").write_text("not of any checkpoint")
    return found


# Every call that lists, reads, writes or deletes folders of steps.
CALLS: dict[str, Callable[[Job], Any]] = {
    "steps": lambda job: job.checkpoints.steps(),
    "save of a later step": lambda job: job.checkpoints.save(9, **job.parts),
    "save of that step": lambda job: job.checkpoints.save(3, **job.parts),
    "resume": lambda job: job.checkpoints.resume_latest(**job.parts),
    "inspect": lambda job: checkpoint_summary(job.root),
    "inspect of that step": lambda job: checkpoint_summary(job.root / "step-00000003"),
    "delete": lambda job: StepFolders(job.root).delete(3),
    "sweep": lambda job: StepFolders(job.root).sweep(1),
    "discard": lambda job: StepFolders(job.root).discard(3),
}


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("address", ["", "file://"])
@pytest.mark.parametrize("call", CALLS)
def test_a_step_folder_that_is_a_link(
    call: str, address: str, committed: bool, outside: Path, tmp_path: Path
) -> None:
    """It is refused by name, whether it leads to a checkpoint or to anything else."""
    root = tmp_path / "root"
    job = Job(root)
    job.train(0, 2, save=True)
    if not committed:
        (outside / "COMMITTED").unlink()
    link = root / "step-00000003"
    link.symlink_to(outside)
    job.checkpoints = Checkpoints(f"{address}{root}", keep=1)
    before, elsewhere = job.state(), contents(outside)
    with pytest.raises(ValueError, match=rf"{link} is refused: it must be a folder, not a link"):
        CALLS[call](job)
    assert contents(outside) == elsewhere and link.is_symlink()
    assert same(job.state(), before)
    assert {path.name for path in root.iterdir()} == {
        "step-00000001",
        "step-00000002",
        "step-00000003",
    }


def test_a_link_without_a_target_is_refused(tmp_path: Path) -> None:
    """A save would write to where it leads."""
    job = Job(tmp_path / "root")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "step-00000001").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"step-00000001 is refused: it must be a folder"):
        job.checkpoints.save(1, **job.parts)
    assert not (tmp_path / "nowhere").exists()


def test_a_file_in_the_place_of_a_step_folder_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    (tmp_path / "step-00000001").write_text("a file")
    with pytest.raises(ValueError, match=r"step-00000001 is refused: it must be a folder"):
        job.checkpoints.save(1, **job.parts)
    assert (tmp_path / "step-00000001").read_text() == "a file"


def test_links_inside_a_folder_are_deleted_and_not_followed(outside: Path, tmp_path: Path) -> None:
    """By a sweep of old checkpoints, and by the save that finds a leftover of its step."""
    job = Job(tmp_path / "root", keep=1)
    job.train(0, 1, save=True)
    leftover = tmp_path / "root" / "step-00000002"
    leftover.mkdir()
    for folder in (leftover, tmp_path / "root" / "step-00000001"):
        (folder / "__7_0.distcp").symlink_to(outside / "notes.txt")
        (folder / "COMMITTED.tmp").symlink_to(outside / "COMMITTED")
    elsewhere = contents(outside)
    job.train(1, 2, save=True)
    assert contents(outside) == elsewhere
    assert job.checkpoints.steps() == [2]
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["step-00000002"]


def test_a_link_to_a_folder_inside_a_folder_is_deleted_alone(outside: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "root", keep=1)
    job.train(0, 1, save=True)
    (tmp_path / "root" / "step-00000001" / "more").symlink_to(outside)
    elsewhere = contents(outside)
    job.train(1, 2, save=True)
    assert contents(outside) == elsewhere and job.checkpoints.steps() == [2]


def test_a_linked_root_is_the_users_own_choice(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    job = Job(tmp_path / "root", keep=1)
    job.train(0, 3, save=True)
    assert job.checkpoints.steps() == [3]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["step-00000003"]


def test_a_link_that_appears_during_a_save_is_logged(
    outside: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The new checkpoint is complete by then: the sweep must not fail on one rank alone."""
    job = Job(tmp_path / "root", keep=1)
    job.train(0, 1, save=True)
    commit = StepFolders.commit

    def linked(self: StepFolders, *args: Any) -> None:
        commit(self, *args)
        (tmp_path / "root" / "step-00000007").symlink_to(outside)

    monkeypatch.setattr(StepFolders, "commit", linked)
    elsewhere = contents(outside)
    job.train(1, 2)
    job.checkpoints.save(2, **job.parts)
    assert re.search(r"Old checkpoints can't be deleted: .*step-00000007", caplog.text)
    assert contents(outside) == elsewhere


def failing(monkeypatch: pytest.MonkeyPatch, number: int, name: str) -> None:
    """Let the status of files of a name fail with an errno, as a network file system may."""
    lstat, found = os.lstat, os.stat

    def failed(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number), str(path))
        return (lstat if not kwargs.get("follow_symlinks", True) else found)(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", failed)
    monkeypatch.setattr(os, "lstat", lambda path, **kwargs: failed(path, **kwargs))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOMEM])
def test_an_error_of_the_disk_is_not_a_missing_marker(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have loaded the checkpoint before, and the next save would have deleted this one."""
    job = Job(tmp_path)
    job.train(0, 2, save=True)
    job.train(2, 3)
    before = job.state()
    with monkeypatch.context() as patched:
        failing(patched, number, "step-00000002/COMMITTED")
        for call in (
            lambda: job.checkpoints.resume_latest(**job.parts),
            lambda: job.checkpoints.save(3, **job.parts),
        ):
            with pytest.raises(OSError, match="COMMITTED") as raised:
                call()
            assert raised.value.errno == number
    assert same(job.state(), before)
    assert job.checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error", "x")])
@pytest.mark.parametrize("name", ["COMMITTED", ".metadata", "values.json"])
def test_an_error_while_a_file_is_read_is_not_damage(
    name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting the "damaged" folder would be the advice."""
    job = Job(tmp_path)
    job.train(0, 1, save=True)
    folders = StepFolders(tmp_path)
    marker = folders.read(1)
    create_stream = folders.files.create_stream

    def failed(path: Any, mode: str) -> Any:
        stream = create_stream(path, mode)
        if str(path).endswith(name):
            raise error
        return stream

    monkeypatch.setattr(folders.files, "create_stream", failed)
    calls: dict[str, Callable[[], Any]] = {
        "COMMITTED": lambda: folders.read(1),
        ".metadata": lambda: folders.metadata(marker),
        "values.json": lambda: folders.values(1),
    }
    with pytest.raises(type(error)) as raised:
        calls[name]()
    assert raised.value is error


def test_a_failing_save_does_not_delete_what_another_has_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was thought dead writes the step that its successor has saved meanwhile."""
    job, successor = Job(tmp_path), Job(tmp_path)
    job.train(0, 1)
    successor.train(0, 1)
    save_tensors = StepFolders.save_tensors

    def overtaken(self: StepFolders, *args: Any) -> Any:
        monkeypatch.setattr(StepFolders, "save_tensors", save_tensors)
        successor.checkpoints.save(1, **successor.parts)
        raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(StepFolders, "save_tensors", overtaken)
    with pytest.raises(OSError, match="No such file"):
        job.checkpoints.save(1, **job.parts)
    assert "whole" in checkpoint_summary(tmp_path / "step-00000001")


def test_a_save_does_not_replace_the_marker_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, successor = Job(tmp_path), Job(tmp_path)
    save_tensors = StepFolders.save_tensors

    def overtaken(self: StepFolders, *args: Any) -> Any:
        monkeypatch.setattr(StepFolders, "save_tensors", save_tensors)
        written = save_tensors(self, *args)
        successor.checkpoints.save(1, **successor.parts)
        return written

    monkeypatch.setattr(StepFolders, "save_tensors", overtaken)
    with pytest.raises(ValueError, match=r"step-00000001 .*another save has committed it"):
        job.checkpoints.save(1, **job.parts)
    assert "whole" in checkpoint_summary(tmp_path / "step-00000001")


def test_a_marker_that_may_not_be_on_disk_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails after the rename: save() says that there is no new checkpoint."""
    job = Job(tmp_path)
    job.train(0, 1, save=True)
    from dist_sparse.checkpoint import storage

    synced = storage.sync_folder

    def fails(folder: Any) -> None:
        if (Path(folder) / "COMMITTED").exists() and "step-00000002" in str(folder):
            raise OSError(errno.EIO, "Input/output error")
        synced(folder)

    monkeypatch.setattr(storage, "sync_folder", fails)
    job.train(1, 2)
    with pytest.raises(OSError, match="Input/output error"):
        job.checkpoints.save(2, **job.parts)
    assert job.checkpoints.steps() == [1]
    monkeypatch.setattr(storage, "sync_folder", synced)
    assert job.checkpoints.save(2, **job.parts)


def test_no_step_folder_is_listed_under_another_name(tmp_path: Path) -> None:
    """``step-000000003`` has the number of step 3, whose folder is another."""
    job = Job(tmp_path)
    job.train(0, 1, save=True)
    (tmp_path / "step-000000003").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = job.checkpoints.resume_latest(**job.parts)
    assert found is not None and found.step == 1
    job.train(1, 3, save=True)
    assert (tmp_path / "step-000000003").is_dir() and threading.active_count() < 99
