"""Copies that the memory of a machine can't hold are refused, on every rank, before any is made."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dist_sparse import ROW
from dist_sparse.checkpoint import host_memory, storage
from dist_sparse.checkpoint.host_memory import available_bytes, refuse_without_memory
from dist_sparse.groups import world_group
from dist_sparse.tables.chunked import ChunkedTensor
from tests.checkpoint.ranks import Job
from tests.dist.plugin import on_ranks

GIB = 1 << 30


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def limit(folder: Path, most: str, used: int, cached: int) -> None:
    """Of a control group of version 2."""
    write(folder / "memory.max", f"{most}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_file {cached}\nactive_file 7\n")


def test_what_linux_has_available(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 1 << 60
    write(tmp_path / "proc/meminfo", "MemFree:  1 kB\nMemAvailable:   2097152 kB\n")
    assert available_bytes(tmp_path) == 2 * GIB
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    limit(tmp_path / "sys/fs/cgroup/job/step", "max", 900, 0)
    assert available_bytes(tmp_path) == 2 * GIB
    # A limit of a group around it. Cached files count as used, and make room.
    limit(tmp_path / "sys/fs/cgroup/job", "1000", 900, 250)
    assert available_bytes(tmp_path) == 350


def test_limits_of_control_groups_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu,memory,blkio:/docker/ab12\n1:name=x:/\n")
    # In the container, the files of its own group are at the top.
    folder = tmp_path / "sys/fs/cgroup/memory"
    write(folder / "memory.limit_in_bytes", "1000\n")
    write(folder / "memory.usage_in_bytes", "900\n")
    write(folder / "memory.stat", "inactive_file 1\ntotal_inactive_file 50\n")
    assert available_bytes(tmp_path) == 150
    write(folder / "docker/ab12/memory.limit_in_bytes", "500\n")
    write(folder / "docker/ab12/memory.usage_in_bytes", "400\n")
    assert available_bytes(tmp_path) == 100


def test_the_bytes_of_copies() -> None:
    whole = torch.zeros(10, 4)
    tensors = {
        "view": whole[:3],
        "chunks": ChunkedTensor((9, 4), torch.float32, [((0, 0), whole[:2])], ()),
    }
    assert storage.copied_bytes(tensors) == (3 + 2) * 4 * 4


@on_ranks(2)
def test_ranks_of_a_machine_add_up() -> None:
    rank, group = dist.get_rank(), world_group()
    with mock.patch.object(host_memory, "available_bytes", lambda: 100 + rank):
        refuse_without_memory("copy()", "Do not.", 50, group)
        refuse_without_memory("copy()", "Do not.", 100 * rank, group)
        wrong = (
            r"copy\(\) was refused on every rank, nothing was changed\. ranks 0-1: copies of 101 B"
            r" do not fit into the 100 B .* Do not\."
        )
        with pytest.raises(ValueError, match=wrong):
            refuse_without_memory("copy()", "Do not.", 50 + rank, group)
        name = mock.patch("socket.gethostname", lambda: f"machine {rank}")
        with name:
            # Each on a machine of its own.
            refuse_without_memory("copy()", "Do not.", 90, group)
            with pytest.raises(ValueError, match=r"changed\. rank 1: copies of 102 B .* the 101 B"):
                refuse_without_memory("copy()", "Do not.", 102 * rank, group)


@on_ranks(2)
def test_save_async_is_refused_before_it_copies(tmp_path: Path) -> None:
    """One rank's machine is short of memory."""
    rank, job = dist.get_rank(), Job("row_wise", tmp_path, block=(1, ROW))
    job.train(0, 2)
    before = job.state()
    name = mock.patch("socket.gethostname", lambda: f"machine {rank}")
    short = mock.patch.object(host_memory, "available_bytes", lambda: (GIB, 10)[rank])
    with (
        name,
        short,
        mock.patch.object(storage, "copied", side_effect=AssertionError),
        pytest.raises(ValueError, match=r"save_async\(\) .* rank 1: .* 10 B .* Call save\(\)"),
    ):
        job.checkpoints.save_async(2, **job.parts)
    assert job.checkpoints.steps() == []
    after = job.state()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with name, short:
        job.checkpoints.save(2, **job.parts)
    job.checkpoints.save_async(3, **job.parts)
    job.checkpoints.wait()
    assert job.checkpoints.steps() == [2, 3]
