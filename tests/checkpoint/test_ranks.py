"""Checkpoints of sharded models: on other ranks, under other shardings, with masks, and what one
rank can't do."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_sparse import Checkpoints
from dist_sparse.checkpoint.checkpoints import checkpoint_summary
from dist_sparse.groups import traffic
from tests.checkpoint.faults import full_disk, inject, io_error, read_only
from tests.checkpoint.kills import live
from tests.checkpoint.ranks import SAVED, SHARDINGS, Job, compared, save
from tests.dist.harness import RanksFailed, run_ranks
from tests.dist.plugin import on_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks, one for each sharding."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_all, folder)
    return folder


def save_all(folder: Path) -> None:
    for sharding in SHARDINGS:
        save(sharding, folder)


LOADS = [
    *[(2, sharding, sharding) for sharding in SHARDINGS],
    *[(1, "row_wise", "table_wise"), (2, "row_wise", "data_parallel")],
    *[(1, "row_wise", "column_wise"), (1, "row_wise", "mixed")],
    *[(2, "mixed", "row_wise"), (2, "column_wise", "mixed"), (2, "data_parallel", "table_wise")],
    *[(4, "mixed", "mixed"), (4, "table_wise", "data_parallel")],
]
"""Ranks, the sharding on them, and the one that was saved. ``python -m tests.checkpoint.ranks`` has
all pairs."""


@on_ranks()
@pytest.mark.parametrize(("world", "sharding", "before"), LOADS)
def test_load(world: int, sharding: str, before: str, saved: Path) -> None:
    """Weights and masks are equal, optimizer state too, unless column cuts differ. Training goes on
    alike."""
    found = compared(sharding, saved / f"2-{before}")
    if (world, sharding) == (2, before):
        assert found == {"merged": 0, "masks": True, "far": 0.0}
    elif not found["merged"]:
        assert found["masks"] and found["far"] < 1e-5
    else:
        assert "column_wise" in (sharding, before) or "mixed" in (sharding, before)


OTHER_CUTS = [(1, "row_wise", "column_wise"), (2, "mixed", "row_wise"), (4, "mixed", "mixed")]


@on_ranks()
@pytest.mark.parametrize(("world", "sharding", "before"), OTHER_CUTS)
def test_row_wise_state_of_other_column_cuts_is_refused(
    world: int, sharding: str, before: str, saved: Path
) -> None:
    job = Job(sharding, saved / f"2-{before}")
    fresh = job.state()
    with pytest.raises(ValueError, match=r"saved with cuts at columns \[0.*\], not \[0"):
        job.checkpoints.resume_latest(**job.parts)
    assert all(torch.equal(value, fresh[name]) for name, value in job.state().items())


@on_ranks(2)
def test_merged_row_wise_state_follows_the_rule(world: int, saved: Path, tmp_path: Path) -> None:
    """Refused unless the user wants it; then the mean of the cuts, weighted by their columns."""
    whole, cut = Job("row_wise", saved / "2-column_wise"), Job("column_wise", tmp_path)
    with pytest.raises(
        ValueError, match=r"saved with cuts at columns \[0, 8\], not \[0\].*'merge'"
    ):
        whole.checkpoints.resume_latest(**whole.parts)
    resumed = whole.checkpoints.resume_latest(**whole.parts, row_wise_state="merge")
    assert resumed is not None and len(resumed.merged) == 4
    then, found = torch.load(saved / "2-column_wise" / "states.pt")[0], whole.state()
    for table in whole.cell.tables:
        name = next(name for name in found if name.endswith(f"{table.name}.sums"))
        sums = then[name].view(-1, found[name].numel()).double()  # cuts of equal width
        assert torch.equal(found[name], sums.mean(0).float())
    whole.checkpoints = Checkpoints(tmp_path)
    whole.checkpoints.save(1, **whole.parts)
    resumed = cut.checkpoints.resume_latest(**cut.parts, row_wise_state="merge")
    assert resumed is not None and len(resumed.merged) == 4
    for name, sums in cut.state().items():
        if name.endswith(".sums"):
            assert torch.equal(sums, found[name].repeat(sums.numel() // found[name].numel()))


FAULTS = {
    "full disk": (r"rank 1: OSError: \[Errno 27\] File too large: '.*__1_0.distcp'",),
    "disk of the metadata": (r"rank 0: OSError: \[Errno 5\] Input/output error",),
    "disk of the values": (r"rank 0: OSError: \[Errno 5\] Input/output error",),
    "disk before the marker": (r"rank 0: OSError: \[Errno 5\] Input/output error",),
    "read-only": (r"rank 0: PermissionError: \[Errno 13\] Permission denied: '.*'",),
    "another step": (
        (
            r"The ranks disagree at 'save\(\)', nothing was changed. step is 4 on rank 1 and 3 on"
            r" rank 0"
        ),
    ),
    "bad step": (r"rank 1: ValueError: Invalid step=-1: must be an int >= 0",),
    "bad extra": (
        (
            r"save\(\) was refused on every rank, nothing was changed. rank 1: ValueError: Invalid"
            r" extra"
        ),
    ),
    "bad optimizer": (r"rank 1: ValueError: Invalid optimizer of type int",),
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("fault", "later"),
    [
        *[(fault, False) for fault in FAULTS],
        *[(f, True) for f in ("full disk", "disk before the marker", "bad extra")],
    ],
)
def test_a_rank_that_fails(fault: str, later: bool, tmp_path: Path) -> None:
    """All ranks raise at once, the checkpoint before stands, and the next save succeeds."""
    rank, job = dist.get_rank(), Job("row_wise", tmp_path)
    job.train(0, 2, save=True)
    before = job.state()
    job.train(2, 3)

    def saves(step: int = 3) -> None:
        parts = job.parts | ({"optimizer": 3} if fault == "bad optimizer" and rank == 1 else {})
        extra = (1,) if fault == "bad extra" and rank == 1 else None
        (job.checkpoints.save_async if later else job.checkpoints.save)(step, **parts, extra=extra)
        job.checkpoints.wait()

    started = time.monotonic()
    with pytest.raises((ValueError, OSError), match=FAULTS[fault][0]):
        if fault == "full disk":
            with full_disk(rank=1, after=1000):
                saves()
        elif fault == "read-only":
            with read_only(tmp_path):
                saves()
        else:
            of = {
                "metadata": ".metadata.tmp",
                "values": "values.json.tmp",
                "marker": "COMMITTED.tmp",
            }
            inject(io_error, rank=0, when_it_opens=of.get(fault.rpartition(" ")[2], "nothing"))
            saves({"another step": 4, "bad step": -1}.get(fault, 3) if rank == 1 else 3)
    assert time.monotonic() - started < 30
    assert job.checkpoints.steps() == [1, 2]
    dist.barrier()
    resumed = Job("row_wise", tmp_path)
    found = resumed.checkpoints.resume_latest(**resumed.parts)
    assert found is not None and found.step == 2
    after = resumed.state()
    assert all(torch.equal(after[name], before[name]) for name in before)
    fault = "none"
    saves()
    assert job.checkpoints.steps() == [1, 2, 3]


@on_ranks(2)
def test_a_damaged_file_is_refused_on_all_ranks(saved: Path, tmp_path: Path) -> None:
    job = Job("row_wise", tmp_path)
    job.train(0, SAVED)
    job.checkpoints.save(1, **job.parts)
    for name in ("__0_0.distcp", "__1_0.distcp", "values.json"):
        path = tmp_path / "step-00000001" / name
        whole = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        dist.barrier()
        with pytest.raises(
            ValueError, match=rf"refused on every rank, nothing was changed.*{name} is damaged"
        ):
            job.checkpoints.resume_latest(**job.parts)
        dist.barrier()
        path.write_bytes(whole)
    dist.barrier()
    assert job.checkpoints.resume_latest(**job.parts) is not None


@on_ranks(2)
@pytest.mark.parametrize("name", ["__1_0.distcp", "values.json", "COMMITTED"])
def test_a_pipe_is_refused_on_all_ranks(name: str, tmp_path: Path) -> None:
    job = Job("row_wise", tmp_path)
    job.checkpoints.save(1, **job.parts)
    if dist.get_rank() == 0:
        (tmp_path / "step-00000001" / name).unlink()
        os.mkfifo(tmp_path / "step-00000001" / name)
    dist.barrier()
    with pytest.raises(
        ValueError, match=rf"refused on every rank.*{name} is refused: it must be a regular file"
    ):
        job.checkpoints.resume_latest(**job.parts)


@on_ranks(2)
def test_save_async_is_not_counted_and_says_nothing(tmp_path: Path) -> None:
    """Its collectives belong to no mask update of the thread that trains."""
    job = Job("row_wise", tmp_path)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        # Of the states, in this thread.
        warnings.filterwarnings("ignore", message="Please use DTensor instead")
        job.checkpoints.save_async(1, **job.parts)
        before = traffic()
        job.checkpoints.wait()
    assert traffic() == before and not shown
    assert job.checkpoints.steps() == [1]


@pytest.mark.slow
def test_kills_while_writing_before_the_marker_and_after_it(tmp_path: Path) -> None:
    """The newest committed checkpoint loads each time, and the end is that of a training without
    kills.

    ``python -m tests.checkpoint.kills`` kills at random moments, under the launcher too.
    """
    root = tmp_path / "killed"
    lives: list[tuple[dict[str, object], int]] = [
        # Each save opens it twice: to write it, and to hash it.
        ({"rank": 1, "when_it_opens": "__1_0.distcp", "for_the": 5}, 2),
        # To write it, and to bring it to disk.
        ({"rank": 0, "when_it_opens": "COMMITTED.tmp", "for_the": 3}, 3),
        ({"rank": 0, "when_it_removes": "COMMITTED"}, 4),  # of an old one, when it sweeps
    ]
    for fault, newest in lives:
        with pytest.raises(
            RanksFailed, match=rf"rank {fault['rank']} ----\ndied with exit code -9"
        ):
            run_ranks(2, live, root, 8, fault)
        steps = Checkpoints(root).steps()
        assert steps[-1] == newest and all(
            "whole" in checkpoint_summary(root / f"step-{step:08d}") for step in steps
        )
    ended, whole = run_ranks(2, live, root, 8)[0], run_ranks(2, live, tmp_path / "whole", 8)[0]
    assert ended.keys() == whole.keys() and all(
        torch.equal(ended[name], whole[name]) for name in whole
    )


def refused_once(call: Callable[[], Any]) -> None:
    """All ranks raise the error of a write that has failed on rank 0 alone."""
    failed = Future[None]()
    if dist.get_rank() == 0:
        failed.set_exception(OSError(5, "gone"))
    else:
        failed.set_result(None)
    Checkpoints.writing = failed
    with pytest.raises(ValueError, match=r"refused on every rank.* rank 0: OSError: .* gone"):
        call()
    assert Checkpoints.writing is None


@on_ranks(2)
def test_a_write_that_failed_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    job = Job("row_wise", tmp_path)
    refused_once(lambda: job.checkpoints.save(1, **job.parts))
    refused_once(lambda: job.checkpoints.resume_latest(**job.parts))
    assert job.checkpoints.resume_latest(**job.parts) is None
    job.checkpoints.save(1, **job.parts)
    assert job.checkpoints.steps() == [1]


@on_ranks(2)
@pytest.mark.parametrize("later", [False, True])
def test_an_old_folder_that_stays_ends_no_save(later: bool, tmp_path: Path) -> None:
    """Rank 0 alone deletes it: a warning that is an error would leave the other waiting."""
    warnings.filterwarnings("error", message="Old checkpoints")
    checkpoints, model = Checkpoints(tmp_path, keep=1), torch.nn.Linear(1, 1)
    for step in range(1, 4):
        (checkpoints.save_async if later else checkpoints.save)(step, model=model)
        checkpoints.wait()
        dist.barrier()
        assert checkpoints.steps()[-1] == step
        # A folder in the folder of a checkpoint can't be deleted.
        (tmp_path / f"step-{step:08d}" / "kept").mkdir(exist_ok=True)
        dist.barrier()
