"""Runs a self-test: starts its processes, and collects what they find.

All checks run in one set of processes. After one that is not passed the rest runs in a new set:
the device may be unusable, and ranks may be at different collectives. A limit ends a hang.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from dist_sparse.selftest.results import WRONG, Outcome, Results
from dist_sparse.text import number_of

WORKER: Final = ("-m", "dist_sparse.selftest.worker")
"""What Python runs in each process."""

NAMES: Final = (
    *("masks", "ordinary steps", "mask updates", "collectives"),
    *("TrainPipelineSparseDist", "TrainPipelineFusedSparseDist"),
    *("fused optimizers", "float16", "fused_uvm", "fused_uvm_caching"),
)
"""Of :data:`~dist_sparse.selftest.checks.CHECKS`, which imports TorchRec."""

_LIMIT: Final = 180.0
"""Seconds for one check, loading TorchRec included."""

# The worst of all ranks counts.
_ORDER: Final = ("ok", "not run", "differs", "failed")


def selftest(
    device: str | None = None,
    nproc: int | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Results:
    """Run all checks on this machine.

    Args:
        device: ``"cuda"`` or ``"cpu"``; None takes GPUs where there are some.
        nproc: processes, one for each GPU; None is one for each GPU, or two on a CPU.
        progress: is called with the name of each check when it begins.

    Raises:
        ValueError: the machine has no GPU, or too few.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus else "cpu")
    if device == "cuda" and gpus < (nproc or 1):
        processes = number_of(nproc or 1, "process", "processes")
        raise ValueError(f"Invalid {device=} for {processes}: torch finds {gpus} GPUs here.")
    world = nproc or (gpus if device == "cuda" else 2)
    outcomes: list[Outcome] = []
    while len(outcomes) < len(NAMES):
        outcomes += _attempt(device, world, NAMES[len(outcomes) :], progress)
    return Results(device=device, nproc=world, machine=_machine(gpus), outcomes=tuple(outcomes))


def _attempt(
    device: str, world: int, names: Sequence[str], progress: Callable[[str], None]
) -> list[Outcome]:
    """Run checks in one set of processes until they are done or one is not passed; return at least
    one outcome."""
    done: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [_start(folder, rank, world, device, names) for rank in range(world)]
        try:
            for number, check in enumerate(names):
                progress(check)
                done.append(_wait_for(check, number, folder, processes))
                if done[-1].status in WRONG:
                    break  # other ranks may wait for that one forever
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return done


def _start(
    folder: Path, rank: int, world: int, device: str, names: Sequence[str]
) -> subprocess.Popen[bytes]:
    words = [str(folder), str(rank), str(world), device, *names]
    # Gloo would otherwise bind the address of the host's name, which may not be its own.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    environment["LOCAL_RANK"] = str(rank)
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *WORKER, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait_for(
    check: str, number: int, folder: Path, processes: Sequence[subprocess.Popen[bytes]]
) -> Outcome:
    """Return the outcome of the next check."""
    started = time.monotonic()
    while True:
        # Asked before the files are read: a process that has ended writes no more.
        ended = {rank for rank, process in enumerate(processes) if process.poll() is not None}
        found = _answers(folder, number, len(processes))
        is_wrong = any(answer["status"] in WRONG for answer in found.values())
        if is_wrong or len(found) == len(processes):
            return _worst([*found.values()])
        lost = not ended <= found.keys()
        if lost or time.monotonic() - started > _LIMIT:
            says = "a process ended" if lost else f"no answer in {_LIMIT:.0f} s"
            # The end of what each process has printed.
            texts = [log.read_text(errors="replace") for log in sorted(folder.glob("*.log"))]
            logs = {"logs": [text[-2_000:] for text in texts]}
            return Outcome(check=check, status="failed", says=says, figures=logs)
        time.sleep(0.05)


def _answers(folder: Path, number: int, world: int) -> dict[int, dict[str, Any]]:
    """Return by rank what has been found in a check so far."""
    found = {}
    for rank in range(world):
        file = folder / f"{rank}.jsonl"
        # The last line may not be whole yet.
        *lines, _ = file.read_text().split("\n") if file.exists() else [""]
        if len(lines) > number:
            found[rank] = json.loads(lines[number])
    return found


def _worst(found: Sequence[dict[str, Any]]) -> Outcome:
    """Return the outcome of a check: that of the first of the ranks that fared worst."""
    worst = max(found, key=lambda each: _ORDER.index(each["status"]))
    return Outcome(**{**worst, "seconds": max(each["seconds"] for each in found)})


def _machine(gpus: int) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for package in ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # of the two builds of FBGEMM, one
    if gpus:
        found["CUDA"] = str(torch.version.cuda)
        found["GPU"] = f"{gpus} x {torch.cuda.get_device_name(0)}"
    return found
