"""Runs a self-test: starts its processes, and collects what they find.

All checks run in one set of processes. After one that is not passed the rest runs in a new set:
the device may be unusable, and ranks may be at different collectives. A limit ends a hang.

Each process runs ``python -m dist_sparse.selftest.run FOLDER RANK WORLD DEVICE CHECK ...``, and
writes a file of JSON for each check.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from dist_sparse.groups import group_over, world_ranks
from dist_sparse.selftest.results import WRONG, Outcome, Results
from dist_sparse.text import number_of

WORKER: Final = ("-m", "dist_sparse.selftest.run")
"""What Python runs in each process."""

NAMES: Final = (
    *("masks", "ordinary steps", "mask updates"),
    *("TrainPipelineSparseDist", "TrainPipelineFusedSparseDist"),
    *("fused optimizers", "float16", "fused_uvm", "fused_uvm_caching"),
)
"""Of :data:`~dist_sparse.selftest.checks.CHECKS`, which imports TorchRec."""

_LIMIT: Final = 180.0
"""Seconds for one check, loading TorchRec included."""

_COLLECTIVES: Final = timedelta(seconds=120)

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
    command = [sys.executable, *WORKER, *words]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _wait_for(
    check: str, number: int, folder: Path, processes: Sequence[subprocess.Popen[bytes]]
) -> Outcome:
    """Return the outcome of the next check: the worst of all ranks."""
    started = time.monotonic()
    while True:
        # Asked before the files are read: a process that has ended writes no more.
        ended = {rank for rank, process in enumerate(processes) if process.poll() is not None}
        found = _answers(folder, number, len(processes))
        worst = max(found.values(), key=_badness, default={"status": "ok"})
        if worst["status"] in WRONG or len(found) == len(processes):
            seconds = max(each["seconds"] for each in found.values())
            return Outcome(check=check, **worst | {"seconds": seconds})
        lost = not ended <= found.keys()
        if lost or time.monotonic() - started > _LIMIT:
            says = "a process ended" if lost else f"no answer in {_LIMIT:.0f} s"
            # The end of what each process has printed.
            files = sorted(folder.glob("*.log"))
            logs = {"logs": [file.read_text(errors="replace")[-2_000:] for file in files]}
            return Outcome(check=check, status="failed", says=says, figures=logs)
        time.sleep(0.05)


def _answers(folder: Path, number: int, world: int) -> dict[int, dict[str, Any]]:
    """Return by rank what has been found in a check so far."""
    files = {rank: _file(folder, number, rank) for rank in range(world)}
    return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def _file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}-{rank}.json"


def _badness(outcome: dict[str, Any]) -> int:
    return _ORDER.index(outcome["status"])


def worker(words: Sequence[str]) -> int:
    """Run checks as one rank; return 1 after one that is not passed: its error may have left the
    device unusable, or this rank at another place than the others."""
    folder, rank, world, device = Path(words[0]), int(words[1]), int(words[2]), words[3]
    # What TorchRec and FBGEMM say while they are imported is not of this machine.
    warnings.simplefilter("ignore")
    from dist_sparse.selftest.checks import CHECKS, Machine

    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(place)
        backend = "nccl"
    dist.init_process_group(backend, f"file://{folder / 'store'}", _COLLECTIVES, world, rank)
    machine = Machine(place, rank)
    for number, name in enumerate(words[4:]):
        outcome = _outcome(CHECKS[name], machine)
        part = folder / f"{rank}.part"
        part.write_text(json.dumps(outcome))
        # Whole, or not there.
        part.rename(_file(folder, number, rank))
        if outcome["status"] in WRONG:
            return 1
    # The store ends with the first process: the others may not have begun.
    group_over(world_ranks()).all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    return 0


def _outcome(check: Any, machine: Any) -> dict[str, Any]:
    from dist_sparse.selftest.checks import Difference, NotRun

    started = time.perf_counter()
    figures: dict[str, Any] = {}
    try:
        status, (says, figures) = "ok", check(machine)
    except NotRun as reason:
        status, says = "not run", str(reason)
    except Difference as difference:
        status, says = "differs", str(difference)
    except Exception as error:
        # The whole report goes into an issue: where it was raised is what helps.
        status, says = "failed", f"{type(error).__name__}: {error}"
        figures = {"traceback": traceback.format_exc()}
    seconds = time.perf_counter() - started
    return {"status": status, "says": says, "seconds": seconds, "figures": figures}


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


if __name__ == "__main__":
    sys.exit(worker(sys.argv[1:]))
