"""Damaged, torn and crafted checkpoints: refused with the file named, and nothing in them runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from dist_sparse.checkpoint.checkpoints import checkpoint_summary
from dist_sparse.checkpoint.storage import StepFolders
from dist_sparse.checks import sealed
from tests.checkpoint.models import Job, flipped, same

STEP = "step-00000003"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    found = Job(tmp_path)
    found.train(0, 3, save=True)
    return found


def marked(folder: Path) -> None:
    """Writes a marker that fits the files, as whoever crafts them would."""
    files = {}
    for path in folder.iterdir():
        if path.name != "COMMITTED":
            data = path.read_bytes()
            files[path.name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    head = {"format": "dist_sparse.checkpoint", "version": 1, "step": 3, "world": 1, "files": files}
    (folder / "COMMITTED").write_text(sealed(head))


@pytest.mark.slow
def test_a_thousand_bit_flips_and_truncations(job: Job, tmp_path: Path) -> None:
    """Over every file. All are refused, the file is named, and nothing has changed."""
    files = sorted(path for path in (tmp_path / STEP).iterdir() if path.stat().st_size)
    assert {path.name for path in files} == {
        ".metadata",
        "COMMITTED",
        "__0_0.distcp",
        "values.json",
    }
    other = Job(tmp_path, seed=1)
    before, drawn = other.state(), random.Random(0)
    for number in range(1000):
        path = files[number % len(files)]
        whole = path.read_bytes()
        cut = drawn.randrange(len(whole))
        path.write_bytes(
            whole[:cut] if number % 10 == 9 else flipped(whole, drawn.randrange(8 * len(whole)))
        )
        with pytest.raises(ValueError) as refused:
            other.checkpoints.resume_latest(**other.parts)
        assert f"{path} is " in str(refused.value), (number, path, refused.value)
        path.write_bytes(whole)
    assert same(other.state(), before)
    assert other.checkpoints.resume_latest(**other.parts) is not None
    assert same(other.state(), job.state())


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "values.json"])
def test_a_missing_file(name: str, job: Job, tmp_path: Path) -> None:
    (tmp_path / STEP / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing: COMMITTED lists it"):
        job.checkpoints.resume_latest(**job.parts)


def test_without_a_marker_the_one_before_is_newest(job: Job, tmp_path: Path) -> None:
    """Neither a marker that was not renamed, nor a folder that another step was copied to, is
    one."""
    (tmp_path / STEP / "COMMITTED").rename(tmp_path / STEP / "COMMITTED.tmp")
    with pytest.warns(UserWarning, match="has no COMMITTED"):
        found = job.checkpoints.resume_latest(**job.parts)
    assert found is not None and found.step == 2
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000009")
    with pytest.raises(
        ValueError, match=r"step-00000009/COMMITTED is refused: it belongs to step 2\."
    ):
        job.checkpoints.resume_latest(**job.parts)


def replaced(kind: str, path: Path) -> None:
    """Put something in the place of a file that can be opened, and that ends never or is another
    file."""
    path.rename(path.parent.parent / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(path.parent.parent / "elsewhere")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "zeros", "link", "folder"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "values.json", "COMMITTED"])
def test_what_is_no_regular_file(name: str, kind: str, job: Job, tmp_path: Path) -> None:
    """A pipe and /dev/zero would be read without an end."""
    path, before = tmp_path / STEP / name, job.state()
    replaced(kind, path)
    wanted = rf"{path} is refused: it must be a regular file, not a link\."
    inspect = partial(checkpoint_summary, tmp_path / STEP)
    for call in (inspect, lambda: job.checkpoints.resume_latest(**job.parts)):
        with pytest.raises(ValueError, match=wanted):
            call()
    assert same(job.state(), before)


def test_a_file_is_read_no_further_than_its_size(job: Job, tmp_path: Path) -> None:
    path = tmp_path / STEP / "__0_0.distcp"
    size = path.stat().st_size
    os.truncate(path, 1 << 40)  # a hole: it would be read for minutes
    with pytest.raises(
        ValueError,
        match=rf"{path} is damaged: it does not hold the {size} bytes that COMMITTED lists\.",
    ):
        job.checkpoints.resume_latest(**job.parts)


@pytest.mark.parametrize(
    "values",
    [
        "[]",
        "{}",
        '{"state": {}, "extra": null}',
        '{"state": [], "optimizer": {}, "extra": 1}',
        "[" * 100_000,
    ],
)
def test_values_of_another_kind(values: str, job: Job, tmp_path: Path) -> None:
    (tmp_path / STEP / "values.json").write_text(values)
    marked(tmp_path / STEP)
    with pytest.raises(ValueError, match=r"values.json is refused: "):
        job.checkpoints.resume_latest(**job.parts)


def test_a_newer_folder_without_a_marker_is_reported(job: Job, tmp_path: Path) -> None:
    """Rot may have taken the marker of the newest checkpoint."""
    (tmp_path / STEP / "COMMITTED").unlink()
    with pytest.warns(UserWarning, match=rf"{STEP} is newer than all .* and has no COMMITTED"):
        found = job.checkpoints.resume_latest(**job.parts)
    assert found is not None and found.step == 2


def test_a_checkpoint_of_plain_dcp_is_not_taken_for_none(tmp_path: Path) -> None:
    """None would mean that training begins from the start."""
    dcp.save({"weight": torch.zeros(3)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    job = Job(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"plain is a checkpoint that .* load it with dcp\.load"):
        job.checkpoints.resume_latest(**job.parts)


class Runs:
    """An object that runs a command when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return os.system, (f"touch {self.made}",)


def crafted(kind: str, folder: Path, made: Path) -> None:
    path = folder / ".metadata"
    with path.open("rb") as file:
        metadata: Metadata = pickle.load(file)
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Runs(made)))
    elif kind == "inside":
        metadata.planner_data = Runs(made)
        path.write_bytes(pickle.dumps(metadata))
    elif kind == "object":  # a Python value as DCP saves it, in the place of a tensor
        torch.save(Runs(made), folder / "__0_1.distcp")
        metadata.state_dict_metadata["model.0.weight"] = BytesStorageMetadata()
        path.write_bytes(pickle.dumps(metadata))
    elif kind == "tensor":  # the file of a tensor
        index = MetadataIndex("model.0.weight", torch.Size([0, 0]))
        place = metadata.storage_data[index]
        data = (folder / place.relative_path).read_bytes()
        torch.save(Runs(made), folder / "new")
        inside = (folder / "new").read_bytes().ljust(place.length, b"\0")
        assert len(inside) == place.length
        (folder / "new").unlink()
        start, end = place.offset, place.offset + place.length
        (folder / place.relative_path).write_bytes(data[:start] + inside + data[end:])
    elif kind == "outside":
        for place in metadata.storage_data.values():
            place.relative_path = "../../elsewhere.distcp"
        path.write_bytes(pickle.dumps(metadata))
    elif kind == "hole":
        metadata.state_dict_metadata["model.0.weight"].chunks[0].sizes = torch.Size([49, 8])
        path.write_bytes(pickle.dumps(metadata))
    elif kind == "number":
        tensors: Any = metadata.state_dict_metadata
        tensors[7] = tensors.pop("model.0.weight")
        path.write_bytes(pickle.dumps(metadata))
    elif kind == "nothing":
        path.write_bytes(pickle.dumps([1, 2]))
    marked(folder)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            "pickle",
            r"\.metadata is refused: it asks for posix.system, which is not part of DCP's metadata",
        ),
        ("inside", r"\.metadata is refused: it asks for posix.system"),
        ("object", r"it asks for torch.distributed.checkpoint.metadata.BytesStorageMetadata"),
        (
            "tensor",
            r"Loading .*step-00000003 failed. rank 0: UnpicklingError: Weights only load failed",
        ),
        ("outside", r"\.metadata is refused: '.*' is not at a place in a file of the checkpoint"),
        (
            "hole",
            r"'model.0.weight' has holes: its saved pieces do not cover the shape \(50, 8\) once",
        ),
        ("number", r"\.metadata is refused: 7 is not a tensor name"),
        ("nothing", r"\.metadata is refused: an entry is missing or of another type"),
    ],
)
def test_nothing_that_was_crafted_runs(kind: str, why: str, job: Job, tmp_path: Path) -> None:
    made = tmp_path / "made"
    crafted(kind, tmp_path / STEP, made)
    with pytest.raises(ValueError, match=why):
        job.checkpoints.resume_latest(**job.parts)
    assert not made.exists()


def test_the_crafted_ones_would_run_in_plain_dcp(job: Job, tmp_path: Path) -> None:
    """What the test above relies on."""
    made = tmp_path / "made"
    crafted("pickle", tmp_path / STEP, made)
    with pytest.raises(BaseException, match="CheckpointException"):
        dcp.load({"model": job.model}, checkpoint_id=tmp_path / STEP)
    assert made.exists()


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"format": "another"}, r"its format is 'another', not 'dist_sparse.checkpoint'"),
        ({"version": 2}, r"version 2 is not 1, the one that this release reads"),
        ({"world": 0}, r"Invalid world=0"),
        ({"files": {"../x": {"bytes": 1, "crc32": "0"}}}, r"'../x' is not a file name"),
        ({"files": {"a/b": {"bytes": 1, "crc32": "0"}}}, r"'a/b' is not a file name"),
        ({"files": {"values.json": {"bytes": 1, "crc32": "0"}}}, r"it lists no \.metadata"),
        ({"files": {"a": {"bytes": 1}}}, r"an entry is missing or of another type"),
        ({"files": 3}, r"an entry is missing or of another type"),
    ],
)
def test_markers_that_say_something_else(
    entries: dict[str, Any], why: str, job: Job, tmp_path: Path
) -> None:
    path = tmp_path / STEP / "COMMITTED"
    text = json.loads(path.read_text())
    path.write_text(
        sealed({**{name: value for name, value in text.items() if name != "crc32"}, **entries})
    )
    with pytest.raises(ValueError, match=why) as refused:
        job.checkpoints.resume_latest(**job.parts)
    assert f"{path} is refused" in str(refused.value)


def test_metadata_holds_no_path_of_this_machine(job: Job, tmp_path: Path) -> None:
    assert str(tmp_path).encode() not in (tmp_path / STEP / ".metadata").read_bytes()
    folders = StepFolders(tmp_path)
    assert "model.0.weight" in folders.metadata(folders.read(3)).state_dict_metadata
