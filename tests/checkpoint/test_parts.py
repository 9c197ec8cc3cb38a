"""Several parts in one resume are all replaced, or none is; and what a save or a resume asks of its
parts fails on every rank, whichever rank it has failed on."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_sparse import Checkpoints, SparseTraining, sparsify
from dist_sparse.checkpoint import storage
from dist_sparse.checkpoint.storage import StepFolders
from dist_sparse.checks import sealed
from dist_sparse.tables.chunked import ChunkedTensor
from tests.checkpoint.models import Job, same
from tests.checkpoint.ranks import Job as RankJob
from tests.dist.plugin import on_ranks
from tests.keywords import nested


def towers() -> tuple[nn.ModuleDict, torch.optim.Optimizer, dict[str, SparseTraining]]:
    """Two trainings in one model, each with its own masks."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.EmbeddingBag(40, 4) for name in "ab"})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    plan: dict[str, Any] = {"level": 0.5, "end": 4, "every": 1, "block": "row"}
    trainings = {}
    for name in "ab":
        part = torch.optim.Adagrad(model[name].parameters(), lr=0.1)
        trainings[name] = sparsify(model[name], part, **nested(**plan))
    return model, optimizer, trainings


def everything(model: nn.Module, trainings: dict[str, SparseTraining]) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, training in trainings.items():
        found[f"{name}.mask"] = training.sparsifier.full_mask("weight")
        found[f"{name}.step"] = torch.tensor(training.scheduler.last_epoch)
        level = training.sparsifier.data_groups["weight"]["sparsity_level"]
        found[f"{name}.level"] = torch.tensor(level)
    return found


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the values of a checkpoint, and fit its marker to them."""
    values = json.loads((folder / "values.json").read_text())
    change(values)
    text = json.dumps(values).encode()
    (folder / "values.json").write_bytes(text)
    entries = json.loads((folder / "COMMITTED").read_text())
    del entries["crc32"]
    crc = f"{storage.zlib.crc32(text):08x}"
    entries["files"]["values.json"] = {"bytes": len(text), "crc32": crc}
    (folder / "COMMITTED").write_text(sealed(entries))


def other_step(name: str) -> Callable[[dict[str, Any]], None]:
    """A change that makes the load of one part refuse its schedule."""

    def change(values: dict[str, Any]) -> None:
        schedule = json.loads(values["state"][f"sparse.{name}.schedule"])
        schedule["scope"] = "nowhere"
        values["state"][f"sparse.{name}.schedule"] = json.dumps(schedule)

    return change


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_part_that_is_refused_leaves_the_others_alone(name: str, tmp_path: Path) -> None:
    model, optimizer, trainings = towers()
    for _ in range(3):
        for training in trainings.values():
            training.step()
    checkpoints = Checkpoints(tmp_path)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sparse": trainings}
    checkpoints.save(1, **parts)
    edit(tmp_path / "step-00000001", other_step(name))
    for training in trainings.values():
        training.step()
    before = everything(model, trainings)
    with pytest.raises(ValueError, match="Invalid scope='nowhere'"):
        checkpoints.resume_latest(**parts)
    assert same(everything(model, trainings), before)


class Counter:
    """An object of a user's, with a live tensor in its state, that may refuse to load one."""

    def __init__(self, refuses: bool = False) -> None:
        self.seen = torch.zeros(3)
        self.name = "first"
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"])
        if self.refuses:
            raise RuntimeError("no name")
        self.name = state["name"]


@pytest.mark.parametrize("last", ["sparse", "other"])
def test_objects_that_can_not_check_a_state_get_their_own_back(last: str, tmp_path: Path) -> None:
    """They are loaded before all others are replaced."""
    job = Job(tmp_path)
    counter, other = Counter(), Counter()
    job.train(0, 4)
    parts = job.parts | {"sparse": {"counter": counter, "sparse": job.masks, "other": other}}
    job.checkpoints.save(1, **parts)
    job.train(4, 6)
    counter.seen += 1
    counter.name = "second"
    other.refuses = last == "other"
    if last == "sparse":
        edit(tmp_path / "step-00000001", other_step("sparse"))
    before = job.state()
    with pytest.raises((ValueError, RuntimeError), match=r"no name|Invalid scope"):
        job.checkpoints.resume_latest(**parts)
    assert same(job.state(), before)
    assert counter.seen.tolist() == [1, 1, 1] and counter.name == "second"


class Chunked(Counter):
    """Its state has a tensor in pieces, as that of codes."""

    def state_dict(self) -> dict[str, Any]:
        pieces = [((0,), self.seen.clone())]
        return {"seen": ChunkedTensor((3,), torch.float32, pieces, [((0,), (3,))])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"].pieces()[0,])


def test_a_part_with_pieces_gets_its_own_back(tmp_path: Path) -> None:
    job, chunked, other = Job(tmp_path), Chunked(), Counter()
    parts = job.parts | {"sparse": {"chunked": chunked, "other": other}}
    chunked.seen += 5
    job.checkpoints.save(1, **parts)
    chunked.seen += 1
    other.refuses = True
    with pytest.raises(RuntimeError, match="no name"):
        job.checkpoints.resume_latest(**parts)
    assert chunked.seen.tolist() == [6, 6, 6]
    other.refuses = False
    assert job.checkpoints.resume_latest(**parts) is not None
    assert chunked.seen.tolist() == [5, 5, 5]


def test_a_state_of_live_tensors_is_restored(tmp_path: Path) -> None:
    job, counter = Job(tmp_path), Counter()
    parts = job.parts | {"sparse": {"counter": counter}}
    counter.seen += 5
    job.checkpoints.save(1, **parts)
    counter.seen += 1
    seen = counter.seen
    assert job.checkpoints.resume_latest(**parts) is not None
    assert counter.seen is seen and seen.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda values: values["optimizer"].update(fused_steps="x"), "Invalid fused_steps='x'"),
        (lambda values: values["optimizer"]["groups"][0][0].update(lr="x"), "Invalid lr of '0.w"),
        (
            lambda values: [each[0].update(betas=3) for each in values["optimizer"]["groups"][1:]],
            "Invalid betas of '2.bias'=3: must be a list",
        ),
        (
            lambda values: values["optimizer"]["values"]["0.weight"].update(step=[1]),
            r"Invalid step of '0.weight'=\[1\]: must be a finite number",
        ),
    ],
)
def test_values_of_another_type_are_refused_before_anything_changes(
    change: Any, why: str, tmp_path: Path
) -> None:
    job = Job(tmp_path)
    job.train(0, 3)
    job.checkpoints.save(3, **job.parts)
    edit(tmp_path / "step-00000003", change)
    job.train(3, 5)
    before = job.state()
    with pytest.raises(ValueError, match=why):
        job.checkpoints.resume_latest(**job.parts)
    assert same(job.state(), before)


class Failing:
    """A part whose state can be taken or loaded on some ranks only."""

    def __init__(self, fails_at: str, rank: int) -> None:
        self.fails_at = fails_at if dist.get_rank() == rank else ""
        self.loaded = 0

    def state_dict(self) -> dict[str, Any]:
        if self.fails_at == "state_dict":
            raise RuntimeError("no state here")
        return {"value": {1, 2} if self.fails_at == "json" else 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["value"]
        if self.fails_at == "load_state_dict":
            raise MemoryError("no memory here")


SAVES = {
    "state_dict": "rank 1: RuntimeError: no state here",
    "json": "rank 1: ValueError: Invalid sparse.failing: must be JSON",
    "config": "rank 1: ValueError: Invalid object in the configuration of sharded tables",
    "other parts": "The ranks disagree at 'save",
    "copies": "rank 1: MemoryError: no memory for copies",
    "prepare": "rank 0: OSError: the disk is gone",
    "tensors": "rank 1: OSError: the disk is gone",
    "commit": "rank 0: OSError: the disk is gone",
}


@on_ranks(2)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("at", SAVES)
def test_a_save_fails_on_every_rank_or_on_none(
    at: str, later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at == "copies" and not later:
        return
    rank, job = dist.get_rank(), RankJob("column_wise", tmp_path)
    job.train(0, 1, save=True)
    failing = Failing(at, rank=1)
    # The masks come after the object that fails: their state is collective in this sharding.
    sparse = {"failing": failing, **job.parts["sparse"]}
    parts = job.parts | {"sparse": sparse}
    if at == "config" and rank == 1:
        job.sparsifier.data_groups["user"]["note"] = object()
    if at == "other parts" and rank == 1:
        del sparse["failing"]

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no memory for copies") if at == "copies" else OSError("the disk is gone")

    places = {"prepare": (StepFolders, "prepare"), "commit": (StepFolders, "commit")}
    places |= {"tensors": (storage.Writer, "write_data"), "copies": (storage, "copied")}
    if at in places and rank == (0 if at in ("prepare", "commit") else 1):
        monkeypatch.setattr(*places[at], gone)
    started = time.monotonic()
    with pytest.raises((ValueError, OSError), match=SAVES[at]):
        (job.checkpoints.save_async if later else job.checkpoints.save)(2, **parts)
        job.checkpoints.wait()
    assert time.monotonic() - started < 30
    monkeypatch.undo()
    dist.barrier()
    assert job.checkpoints.steps() == [1]
    job.sparsifier.data_groups["user"].pop("note", None)
    assert job.checkpoints.save(2, **job.parts)


RESUMES = {
    "state_dict": "rank 1: RuntimeError: no state here",
    "load_state_dict": "rank 1: MemoryError: no memory here",
    "read": "rank 1: OSError: the disk is gone",
    "verify": "rank 1: OSError: the disk is gone",
    "metadata": "rank 1: MemoryError",
    "masks": "rank 1: OSError: the disk is gone",
    "other parts": "The ranks disagree at 'resume_latest",
}


@on_ranks(2)
@pytest.mark.parametrize("at", RESUMES)
def test_a_resume_fails_on_every_rank_or_on_none(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, job = dist.get_rank(), RankJob("column_wise", tmp_path)
    job.train(0, 3)
    failing = Failing("", rank=1)
    # Masks and schedule come before and after the object that fails.
    masks, scheduler = job.parts["sparse"].values()
    sparse = {"masks": masks, "failing": failing, "scheduler": scheduler}
    parts = job.parts | {"sparse": sparse}
    job.checkpoints.save(3, **parts)
    job.train(3, 5)
    before = job.state(), copy.deepcopy(job.scheduler.state_dict())
    failing.fails_at = at if rank == 1 else ""

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError if at == "metadata" else OSError("the disk is gone")

    if at == "other parts" and rank == 1:
        del sparse["scheduler"]
    names = {"read": "read", "verify": "verify", "metadata": "metadata"}
    if rank == 1 and at in names:
        monkeypatch.setattr(StepFolders, names[at], gone)
    if rank == 1 and at == "masks":
        monkeypatch.setattr(storage.Reader, "read_data", gone)
    started = time.monotonic()
    with pytest.raises((ValueError, OSError), match=RESUMES[at]):
        job.checkpoints.resume_latest(**parts)
    assert time.monotonic() - started < 30
    monkeypatch.undo()
    after = job.state(), job.scheduler.state_dict()
    assert same(after[0], before[0]) and after[1] == before[1]
    assert failing.loaded in (0, 7)
    failing.fails_at = ""
    parts["sparse"] = {"masks": masks, "failing": failing, "scheduler": scheduler}
    assert job.checkpoints.resume_latest(**parts) is not None
    assert job.scheduler.last_epoch == 3


class Extra(nn.Linear):
    """A layer whose own state can't be set on one rank."""

    fails = False

    def get_extra_state(self) -> Any:
        return 3

    def set_extra_state(self, state: Any) -> None:
        if self.fails:
            raise RuntimeError("no extra state here")


@on_ranks(2)
def test_a_model_that_fails_at_last_is_reported_on_every_rank(tmp_path: Path) -> None:
    model = nn.Sequential(Extra(2, 2))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model=model)
    model[0].fails = dist.get_rank() == 1
    with pytest.raises(ValueError, match=r"loaded in part. rank 1: RuntimeError: .*no extra state"):
        checkpoints.resume_latest(model=model)


@on_ranks(2)
def test_a_step_that_is_invalid_on_one_rank(tmp_path: Path) -> None:
    """Where all ranks save, the agreement refuses it. Where nothing may be due, its rank alone
    does: it must not wait for a save that the others do not make."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    each, second = Checkpoints(tmp_path / "each"), Checkpoints(tmp_path / "second", every=2)
    for wrong in (-1, 2.0, True, "2", None):
        for checkpoints, force in ((each, False), (second, True)):
            with pytest.raises(ValueError, match=r"rank 1: ValueError: Invalid step="):
                checkpoints.save(wrong if rank else 2, model=model, force=force)
        if rank == 1:
            with pytest.raises(ValueError, match=r"^Invalid step="):
                second.save(wrong, model=model)  # type: ignore[arg-type]
        else:
            assert second.save(3, model=model) is False
    assert second.save(4, model=model) is True


def test_a_state_of_no_generator_is_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    job.train(0, 3)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_rng_state", lambda: torch.full((5056,), 255).byte())
        job.checkpoints.save(3, **job.parts)
    job.train(3, 5)
    before = job.state()
    with pytest.raises(RuntimeError, match="mt19937"):
        job.checkpoints.resume_latest(**job.parts)
    assert same(job.state(), before)
