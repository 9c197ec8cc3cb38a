"""A self-test of this machine's devices: small models train on all of them, and masks and weights
are compared with the CPU's.

All checks run in one set of processes, one for each device. After a check that fails, the rest runs
in new processes: the device may be unusable, and ranks may be at different collectives. A time
limit ends a hang. Each process runs ``python -m dist_sparse.extras.device.selftest FOLDER RANK
WORLD DEVICE CHECK ...``, and writes a JSON file for each check.

The checks are in ``training_checks``, ``update_checks`` and ``use_checks``. Expected results are
computed on the CPU, or without the tested feature on the same device.
"""

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_sparse import checks
from dist_sparse.extras.device import training_checks, update_checks, use_checks
from dist_sparse.extras.device.trials import SIZES, Difference, NotRun, Sizes
from dist_sparse.groups import world_group
from dist_sparse.tables.shards import CACHED
from dist_sparse.text import duration, number_of, printable, table_lines, wrapped
from dist_sparse.torchrec import installed

# Outcomes from best to worst; the worst of all ranks counts.
# A wrong result "differs", an error "failed".
_ORDER = ("ok", "not run", "differs", "failed")
_WRONG = _ORDER[2:]

# Arguments of Python in each process.
_WORKER = ("-m", "dist_sparse.extras.device.selftest")

# Seconds for one check, loading TorchRec included.
_LIMIT = 300.0

# Seconds after which a process writes the stacks of its threads to its log.
_STACKS = 150.0


Outcome = dict[str, Any]

Check = Callable[[torch.device, Sizes], str]

# Checks by name, in the order in which they run.
CHECKS: dict[str, Check] = {
    "masks": training_checks.masks_equal_the_cpus,
    "large masks": update_checks.large_masks,
    "beyond 2^31 elements": update_checks.beyond_31_bits,
    "lookup counts": training_checks.lookups_are_counted,
    "sampled lookups": training_checks.lookups_are_sampled,
    "ordinary steps": training_checks.ordinary_steps_never_wait,
    "mask updates": update_checks.mask_updates,
    "streams": training_checks.streams_are_ordered,
    "TrainPipelineSparseDist": partial(training_checks.pipeline, kind="TrainPipelineSparseDist"),
    "TrainPipelineFusedSparseDist": partial(
        training_checks.pipeline, kind="TrainPipelineFusedSparseDist"
    ),
    "fused optimizers": training_checks.fused_optimizers,
    **{kind: partial(training_checks.kind_of_tables, kind=kind) for kind in training_checks.KINDS},
    "many tables": training_checks.many_tables,
    # FBGEMM rounds it stochastically on CUDA.
    "float16, rounded": partial(
        training_checks.removed_stay_zero, blocks=("row", "1x4"), data_type="FP16"
    ),
    # Whole rows only: cached rows can't be zeroed after each backward, so finer blocks are refused.
    "fused_uvm_caching": partial(training_checks.removed_stay_zero, blocks=("row",), kernel=CACHED),
    "compact": use_checks.compact_model,
    "export": use_checks.exported,
    "checkpoints": use_checks.checkpointed,
    "guard": use_checks.undone,
    "codes": use_checks.coded,
    # The last one: it runs in processes of its own.
    "device_id=": training_checks.bound_to_devices,
}

# Checks that need CUDA. TorchRec's fused pipeline, too: it records streams.
_FOR_GPUS = (
    "ordinary steps",
    "streams",
    "bfloat16",
    "TrainPipelineFusedSparseDist",
    "fused_uvm",
    "fused_uvm_caching",
    "device_id=",
)

# Checks whose processes bind their world to their devices.
_BOUND = ("device_id=",)


# Processes


def selftest(device: str | None, nproc: int | None, progress: Callable[[str], None]) -> Outcome:
    """Run all checks on this machine; return their outcomes as JSON-able values.

    Args:
        device: ``"cuda"`` or ``"cpu"``; None takes GPUs where there are some.
        nproc: processes, one for each GPU; None is one for each GPU, or two on a CPU.
        progress: is called with the name of each check when it begins.

    Raises:
        ValueError: the machine has no GPU, or too few; or ``nproc`` is below 1.
    """
    gpus = torch.cuda.device_count()
    device = device or ("cuda" if gpus else "cpu")
    usual = {"cuda": max(gpus, 1), "cpu": 2}[device]
    world = checks.integer("nproc", usual if nproc is None else nproc, least=1)
    if device == "cuda" and gpus < world:
        ranks = number_of(world, "rank")
        raise ValueError(f"Invalid {device=} for {ranks}: torch finds {gpus} GPUs here.")
    outcomes: list[Outcome] = []
    while left := list(CHECKS)[len(outcomes) :]:
        apart = _BOUND if device == "cuda" else ()
        together = [name for name in left if name not in apart]
        outcomes += _attempt(device, world, together or left, progress)
    passed = all(outcome["status"] not in _WRONG for outcome in outcomes)
    machine = installed()
    if gpus:
        machine["CUDA"] = str(torch.version.cuda)
        machine["GPU"] = f"{gpus} x {torch.cuda.get_device_name(0)}"
    return {
        "passed": passed,
        "device": device,
        "nproc": world,
        "machine": machine,
        "outcomes": outcomes,
    }


def as_text(results: Outcome) -> str:
    """Return the conclusion of :func:`selftest` and a table."""
    rows = []
    by_status = defaultdict(list)
    for outcome in results["outcomes"]:
        text = outcome["says"]
        if outcome["status"] != "not run":
            text += f" ({duration(outcome['seconds'])})"
        rows.append((outcome["check"], outcome["status"], printable(text)))
        by_status[outcome["status"]].append(outcome["check"])
    where = f"on {results['device']}, {number_of(results['nproc'], 'rank')}"
    skipped = len(by_status["not run"])
    verdict = f"As it should be {where}; {skipped} of {len(rows)} checks not run."
    if wrong := [*by_status["differs"], *by_status["failed"]]:
        verdict = f"Not as it should be {where}: {', '.join(wrong)}."
    machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    table = table_lines(("check", "status", "result"), rows)
    return "\n".join([*wrapped(verdict), *wrapped(printable(machine)), "", *table])


def _attempt(
    device: str, world: int, names: Sequence[str], progress: Callable[[str], None]
) -> list[Outcome]:
    """Run checks in one set of processes until they are done or one is not passed; return at least
    one outcome."""
    done: list[Outcome] = []
    # Gloo would otherwise bind the address of the host's name, which may not be its own.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    # `-m` imports from the current folder first, whose json.py or torch.py is not Python's: the
    # processes run in a folder of their own.
    package = Path(__file__).parents[3]
    environment["PYTHONPATH"] = f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            command = [sys.executable, *_WORKER, folder, str(rank), str(world), device, *names]
            with Path(folder, f"{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    env=environment | {"LOCAL_RANK": str(rank)},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            processes.append(process)
        try:
            for number, check in enumerate(names):
                progress(check)
                done.append({"check": check, **_wait_for(number, Path(folder), processes)})
                if done[-1]["status"] in _WRONG:
                    # Other ranks may wait for the failed one forever.
                    break
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return done


def _wait_for(number: int, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> Outcome:
    """Return the outcome of the next check: the worst of all ranks."""
    started = time.monotonic()
    while (took := time.monotonic() - started) < _LIMIT:
        # Before the files are read: a process that has ended by now writes no more of them.
        has_ended = any(process.poll() is not None for process in processes)
        files = folder.glob(f"{number}-*.json")
        outcomes: list[Outcome] = [json.loads(file.read_text()) for file in files]
        worst = max(
            outcomes, key=lambda each: _ORDER.index(each["status"]), default={"status": "ok"}
        )
        if worst["status"] in _WRONG or len(outcomes) == len(processes):
            return worst | {"seconds": max(each["seconds"] for each in outcomes)}
        # A process that has passed all checks ends after all ranks have written their files.
        if has_ended:
            return _lost("a process ended", took, folder)
        time.sleep(0.05)
    return _lost(f"no answer in {_LIMIT:.0f} s", took, folder)


def _lost(says: str, seconds: float, folder: Path) -> Outcome:
    # The last output of each process: stacks, if it hangs.
    logs = [log.read_text(errors="replace")[-8_000:] for log in sorted(folder.glob("*.log"))]
    return {"status": "failed", "says": says, "seconds": seconds, "details": logs}


def worker(words: Sequence[str]) -> int:
    """Run checks as one rank; return 1 at the first that fails: the device may be unusable, and the
    other ranks may be at another collective."""
    folder, kind, names = Path(words[0]), words[3], words[4:]
    rank, world = map(int, words[1:3])
    backend, device = "gloo", torch.device(kind)
    if kind == "cuda":
        backend, device = "nccl", torch.device(kind, rank)
        torch.cuda.set_device(device)
    limit = timedelta(seconds=120)
    bound = device if kind == "cuda" and names[0] in _BOUND else None
    store = f"file://{folder / 'store'}"
    dist.init_process_group(backend, store, limit, world, rank, device_id=bound)
    for number, name in enumerate(names):
        faulthandler.dump_traceback_later(_STACKS)
        outcome = _outcome(name, device)
        faulthandler.cancel_dump_traceback_later()
        part = folder / f"{rank}.part"
        part.write_text(json.dumps(outcome))
        # Renamed, so that the reader never sees half a file.
        part.rename(folder / f"{number}-{rank}.json")
        if outcome["status"] in _WRONG:
            return 1
    # Wait for all: the store ends with the first process, and the others may still need it.
    world_group().all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    return 0


def _outcome(name: str, device: torch.device) -> Outcome:
    started = time.perf_counter()
    details = []
    try:
        if name in _FOR_GPUS and device.type != "cuda":
            status, says = "not run", "needs a GPU"
        else:
            status, says = "ok", CHECKS[name](device, SIZES[device.type])
    except NotRun as reason:
        status, says = "not run", str(reason)
    except Difference as difference:
        status, says = "differs", str(difference)
    except Exception as error:
        # Users paste the report into an issue: the traceback helps there.
        status, says = "failed", f"{type(error).__name__}: {error}"
        details.append(traceback.format_exc())
    seconds = time.perf_counter() - started
    return {"status": status, "says": says, "seconds": seconds, "details": details}


if __name__ == "__main__":
    sys.exit(worker(sys.argv[1:]))
