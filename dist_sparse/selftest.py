"""A self-test of this machine's devices: small models train on all of them, and masks and weights
are compared with the CPU's.

All checks run in one set of processes, on all ranks at once, one device each. After a check that is
not passed the rest runs in a new set: the device may be unusable, and ranks may be at different
collectives. A limit ends a hang. Each process runs ``python -m dist_sparse.selftest FOLDER RANK
WORLD DEVICE CHECK ...``, and writes a file of JSON for each check.

A check returns a line that says what it has found, and figures that it has measured; it raises
:class:`Difference` where a result is wrong. Expected results are those of the CPU, or of a plainer
way on the same device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse import checks
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.enforcer.fused import collections_of
from dist_sparse.groups import world_group
from dist_sparse.sparsifiers.score import DataNormSparsifier
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.shards import CACHED, ROW
from dist_sparse.text import duration, number_of, percent, printable, table_lines, wrapped
from dist_sparse.torchrec import installed
from dist_sparse.torchrec.trial import (
    Shapes,
    layers_optimizer,
    pipeline_of,
    trial_batch,
    trial_model,
)

BLOCKS: Final = {
    "row": (1, ROW),
    "1x4": (1, 4),
    "2x2": (2, 2),
    "1x1": (1, 1),
}

# Several widths: FBGEMM keeps tables of one width and of several in other kernels.
_SMALL: Final[Shapes] = {"wide": (20_000, 128), "narrow": (7_001, 32)}

_STEPS: Final = 20

# The worst of all ranks counts. A wrong result "differs", an error "failed".
_ORDER: Final = ("ok", "not run", "differs", "failed")
_WRONG: Final = _ORDER[2:]

_WORKER: Final = ("-m", "dist_sparse.selftest")
"""What Python runs in each process."""

_LIMIT: Final = 180.0
"""Seconds for one check, loading TorchRec included."""


class Difference(Exception):
    """A result is not the expected one."""


Json = dict[str, Any]
Found = tuple[str, Json]
"""A line, and figures."""

# Checks


class _Trial:
    """A model on the device, whose tables have the same weights on every machine.

    Args:
        device: of this rank.
        block: of its masks.
        level: the sparsity level.
        attach: whether an enforcer keeps removed weights at zero.
        **options: of :func:`~dist_sparse.torchrec.trial.trial_model`.
    """

    def __init__(
        self, device: torch.device, block: str, level: float, attach: bool = True, **options: Any
    ) -> None:
        self.device = device
        self.model = trial_model(_SMALL, device, **options)
        self.optimizer = layers_optimizer(self.model)
        self.sparsifier = _sparsifier(BLOCKS[block], level)
        self.sparsifier.add_model(self.model)
        random = torch.Generator().manual_seed(7)
        self.tables = {name: torch.randn(shape, generator=random) for name, shape in _SMALL.items()}
        for name, data in self.sparsifier.masks.tables.locate().items():
            for shard in data.shards:
                rect = shard.rect
                part = self.tables[name][rect.row : rect.row_end, rect.col : rect.col_end]
                shard.tensor.copy_(part)
        self.sparsifier.step()
        if attach:
            MaskEnforcer(self.sparsifier).attach(self.optimizer)

    def batches(self, steps: int) -> list[Any]:
        """Return batches in CPU memory, other ones on each rank."""
        first = 1 + dist.get_rank() * 1_000
        return [trial_batch(_SMALL, first + step) for step in range(steps)]

    def train(self, batch: Any) -> None:
        """Take a step as plain loops do."""
        loss, _ = self.model(batch.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def shards(self) -> list[Tensor]:
        """Return the weights of this rank, in CPU memory."""
        located = self.sparsifier.masks.tables.locate()
        return [shard.tensor.float().cpu() for data in located.values() for shard in data.shards]

    def check_masks(self, what: str) -> None:
        """Check that the masks are those that a CPU makes of the same tables in one process, and
        that what they remove is zero.

        Raises:
            Difference: they are not.
        """
        group = self.sparsifier.data_groups["wide"]
        plain = _sparsifier(group["sparse_block_shape"], group["sparsity_level"])
        for name, data in self.sparsifier.masks.tables.locate().items():
            plain.add_data(name, self.tables[name].to(data.dtype))
        plain.step()
        expected = plain.fingerprint()
        wrong = [name for name, mask in self.sparsifier.audit().items() if mask != expected[name]]
        if wrong:
            raise Difference(f"{what}: the masks of {wrong} differ from the CPU's")


def _sparsifier(block: Any, level: float) -> DataNormSparsifier:
    return DataNormSparsifier(None, level, block, None, "L2")


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def masks_equal_the_cpus(device: torch.device) -> Found:
    """Masks of all blocks, cut by rows over the ranks, against one process on the CPU."""
    for block in BLOCKS:
        trial = _Trial(device, block, 0.5)
        trial.check_masks(f"{block} at 50%")
        # A second update, for which removed weights tie at 0.
        _update(device, trial.sparsifier, 0.73)
        trial.check_masks(f"{block} at 73%")
    return f"{len(BLOCKS)} blocks, 2 updates, bit for bit", {}


@contextmanager
def _waits(mode: str) -> Iterator[list[str]]:
    """Raise where the host waits for the device (``"error"``), or note it (``"warn"``)."""
    waits: list[str] = []
    torch.cuda.set_sync_debug_mode(mode)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    said = [str(each.message) for each in caught]
    waits += [each for each in said if "synchronizing" in each]


def ordinary_steps_never_wait(device: torch.device) -> Found:
    """Lookups and backwards of the kernels, without TorchRec's input distribution, which waits."""
    trial = _Trial(device, "1x4", 0.5)
    [collection] = collections_of(trial.model.modules())
    for batch in collection_of(collection).batches():
        shapes = {
            str(number): (len(view), view.shape[1]) for number, view in enumerate(batch.weights())
        }
        features = [trial_batch(shapes, seed).to(device) for seed in range(_STEPS)]
        for each in features:
            each.offsets()
        # The first ones take the masks, and compile.
        for each in features[:3]:
            batch.module(each).sum().backward()
        versions = [storage._version for storage in batch.storage()]
        with _waits("error"):
            for each in features:
                batch.module(each).sum().backward()
        if versions != [storage._version for storage in batch.storage()]:
            # Then every step would take all rows for dirty.
            raise Difference("FBGEMM's backward changes the version of its weights")
    trial.sparsifier.audit()
    return f'{_STEPS} steps under set_sync_debug_mode("error")', {}


def mask_updates(device: torch.device) -> Found:
    """Time, waits and memory of mask updates of one table of normal weights."""
    figures: Json = {}
    lines = []
    sizes = (1_000_000, 10_000_000) if _is_gpu(device) else (20_000, 100_000)
    for rows, block in product(sizes, ("row", "1x4")):
        name = f"{rows} x 128, {block}"
        one = figures[name] = _mask_update(device, rows, block)
        more = ""
        if _is_gpu(device):
            more = f", {one['waits']} waits, {percent(one['peak_share'])} more memory"
        lines.append(f"{name}: {one['milliseconds']:.0f} ms{more}")
    return "; ".join(lines), figures


def _mask_update(device: torch.device, rows: int, block: str) -> Json:
    model = trial_model({"table": (rows, 128)}, device)
    sparsifier = _sparsifier(BLOCKS[block], 0.5)
    sparsifier.add_model(model)
    [data] = sparsifier.masks.tables.locate().values()
    for shard in data.shards:
        shard.tensor.normal_()
    nbytes = sum(shard.tensor.nbytes for shard in data.shards)
    figures: Json = {"waits": None, "peak_share": None}
    with MaskEnforcer(sparsifier).attach(layers_optimizer(model)):
        sparsifier.step()
        # Once to warm up, once for the waits, which take longer to note than to pass, once timed.
        _update(device, sparsifier, 0.55)
        if _is_gpu(device):
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            with _waits("warn") as waits:
                _update(device, sparsifier, 0.6)
            more = torch.cuda.max_memory_allocated(device) - before
            figures = {"waits": len(waits), "peak_share": more / nbytes}
        started = time.perf_counter()
        _update(device, sparsifier, 0.65)
        figures["milliseconds"] = 1_000 * (time.perf_counter() - started)
    return figures


def _update(device: torch.device, sparsifier: DataNormSparsifier, level: float) -> None:
    """Take one mask update, and wait for it."""
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = level
    sparsifier.step()
    if _is_gpu(device):
        torch.cuda.synchronize(device)


def pipeline(device: torch.device, kind: str) -> Found:
    """A pipeline of TorchRec's, with mask updates between its steps, against the plain loop."""
    found = []
    for piped in (True, False):
        trial = _Trial(device, "1x4", 0.3)
        batches = iter(trial.batches(12))
        piped_model = pipeline_of(kind, trial.model, trial.optimizer, device)
        for step in range(12):
            if piped:
                piped_model.progress(batches)
            else:
                trial.train(next(batches))
            if step % 4 == 3:
                _update(device, trial.sparsifier, 0.3 + step / 20)
        trial.sparsifier.audit()
        found.append(trial.shards())
    return f"12 steps, 3 mask updates: {_compare('weights', *found)}", {}


def _compare(what: str, found: list[Tensor], expected: list[Tensor]) -> str:
    """Say how near two lists of tensors are.

    Raises:
        Difference: not near enough.
    """
    if all(map(torch.equal, found, expected)):
        return "bit for bit"
    most = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    # Sums of gradients may have another order.
    if most > 1e-4:
        raise Difference(f"{what} differ by up to {most:.2g}")
    return f"within {most:.1g}"


_ON_EVERY_DEVICE: Final[tuple[str, ...]] = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")
_ON_GPUS: Final = ("ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB", "LARS_SGD")


def fused_optimizers(device: torch.device) -> Found:
    """FBGEMM's optimizers: rows zeroed as they are read, against all rows after every step."""
    # FBGEMM has some for CUDA only.
    done = _ON_EVERY_DEVICE + _ON_GPUS
    says = ", ".join(done)
    if not _is_gpu(device):
        done = _ON_EVERY_DEVICE
        says = f"{', '.join(done)}; not run, for they need a GPU: {', '.join(_ON_GPUS)}"
    figures = {}
    for name in done:
        weights = [
            _train_masked(device, "1x4", attach=attach, optimizer=name) for attach in (True, False)
        ]
        figures[name] = _compare(f"weights of {name}", *weights)
    return says, figures


def _train_masked(
    device: torch.device, block: str, attach: bool = True, **options: Any
) -> list[Tensor]:
    """Check the masks of a model, and after five steps what they remove. Return its weights."""
    trial = _Trial(device, block, 0.5, attach, **options)
    trial.check_masks(" ".join([block, *map(str, options.values())]))
    for batch in trial.batches(5):
        trial.train(batch)
        if not attach:
            trial.sparsifier.apply_masks()
    trial.sparsifier.audit()
    return trial.shards()


def half_precision(device: torch.device) -> Found:
    """float16 weights, which FBGEMM rounds stochastically on CUDA."""
    for block in ("row", "1x4"):
        _train_masked(device, block, data_type="FP16")
    return "masks bit for bit, removed weights 0", {}


def unified_memory(device: torch.device, kernel: str, blocks: Sequence[str]) -> Found:
    """Tables in unified memory."""
    for block in blocks:
        _train_masked(device, block, kernel=kernel)
    return "masks bit for bit, 5 steps, removed weights 0", {}


CHECKS: Final[dict[str, Callable[[torch.device], Found]]] = {
    "masks": masks_equal_the_cpus,
    "ordinary steps": ordinary_steps_never_wait,
    "mask updates": mask_updates,
    "TrainPipelineSparseDist": partial(pipeline, kind="TrainPipelineSparseDist"),
    "TrainPipelineFusedSparseDist": partial(pipeline, kind="TrainPipelineFusedSparseDist"),
    "fused optimizers": fused_optimizers,
    "float16": half_precision,
    "fused_uvm": partial(unified_memory, kernel="fused_uvm", blocks=("row", "1x4")),
    # Rows in a cache can't be zeroed after each backward: finer blocks are refused.
    "fused_uvm_caching": partial(unified_memory, kernel=CACHED, blocks=("row",)),
}
"""By name, in the order in which they run."""

# TorchRec's fused pipeline records streams, whatever the device.
_FOR_GPUS: Final = (
    "ordinary steps",
    "TrainPipelineFusedSparseDist",
    "fused_uvm",
    "fused_uvm_caching",
)


# Processes


def selftest(device: str | None, nproc: int | None, progress: Callable[[str], None]) -> Json:
    """Run all checks on this machine; return their outcomes as JSON-able values.

    Args:
        device: ``"cuda"`` or ``"cpu"``; None takes GPUs where there are some.
        nproc: processes, one for each GPU; None is one for each GPU, or two on a CPU.
        progress: is called with the name of each check when it begins.

    Raises:
        ValueError: the machine has no GPU, or too few; or ``nproc`` is below 1.
    """
    if nproc is not None:
        checks.integer("nproc", nproc, least=1)
    gpus = torch.cuda.device_count()
    device = device or ("cuda" if gpus else "cpu")
    world = nproc or {"cuda": max(gpus, 1), "cpu": 2}[device]
    if device == "cuda" and gpus < world:
        processes = number_of(world, "process", "processes")
        raise ValueError(f"Invalid {device=} for {processes}: torch finds {gpus} GPUs here.")
    outcomes: list[Json] = []
    while left := list(CHECKS)[len(outcomes) :]:
        outcomes += _attempt(device, world, left, progress)
    passed = all(each["status"] not in _WRONG for each in outcomes)
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


def as_text(found: Json) -> str:
    """Return the conclusion of :func:`selftest` and a table."""
    outcomes = found["outcomes"]
    rows = []
    for each in outcomes:
        says = printable(f"{each['says']} ({duration(each['seconds'])})")
        rows.append((each["check"], each["status"], says))
    where = f"on {found['device']}, {number_of(found['nproc'], 'process', 'processes')}"
    skipped = sum(each["status"] == "not run" for each in outcomes)
    verdict = f"As it should be {where}; {skipped} of {len(outcomes)} checks not run."
    if wrong := [each["check"] for each in outcomes if each["status"] in _WRONG]:
        verdict = f"Not as it should be {where}: {', '.join(wrong)}."
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    lines = [*wrapped(verdict), *wrapped(printable(machine)), ""]
    return "\n".join([*lines, *table_lines(("check", "status", "result"), rows)])


def _attempt(
    device: str, world: int, names: Sequence[str], progress: Callable[[str], None]
) -> list[Json]:
    """Run checks in one set of processes until they are done or one is not passed; return at least
    one outcome."""
    done: list[Json] = []
    # Gloo would otherwise bind the address of the host's name, which may not be its own.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            command = [sys.executable, *_WORKER, folder, str(rank), str(world), device, *names]
            with Path(folder, f"{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    env=environment | {"LOCAL_RANK": str(rank)},
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
                    break  # other ranks may wait for that one forever
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return done


def _wait_for(number: int, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> Json:
    """Return the outcome of the next check: the worst of all ranks."""
    started = time.monotonic()
    while True:
        # Asked before the files are read: a process that has ended writes no more.
        ended = {rank for rank, process in enumerate(processes) if process.poll() is not None}
        found = _answers(folder, number, len(processes))
        worst: Json = max(
            found.values(), key=lambda each: _ORDER.index(each["status"]), default={"status": "ok"}
        )
        if worst["status"] in _WRONG or len(found) == len(processes):
            return worst | {"seconds": max(each["seconds"] for each in found.values())}
        lost = not ended <= found.keys()
        took = time.monotonic() - started
        if lost or took > _LIMIT:
            says = "a process ended" if lost else f"no answer in {_LIMIT:.0f} s"
            # The end of what each process has printed.
            logs = [
                log.read_text(errors="replace")[-2_000:] for log in sorted(folder.glob("*.log"))
            ]
            return {"status": "failed", "says": says, "seconds": took, "figures": {"logs": logs}}
        time.sleep(0.05)


def _answers(folder: Path, number: int, world: int) -> dict[int, Json]:
    """Return by rank what has been found in a check so far."""
    files = {rank: _file(folder, number, rank) for rank in range(world)}
    return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def _file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}-{rank}.json"


def worker(words: Sequence[str]) -> int:
    """Run checks as one rank; return 1 after one that is not passed: its error may have left the
    device unusable, or this rank at another place than the others."""
    folder, rank, world, kind = Path(words[0]), int(words[1]), int(words[2]), words[3]
    backend, device = "gloo", torch.device(kind)
    if kind == "cuda":
        backend, device = "nccl", torch.device(kind, rank)
        torch.cuda.set_device(device)
    limit = timedelta(seconds=120)
    dist.init_process_group(backend, f"file://{folder / 'store'}", limit, world, rank)
    for number, name in enumerate(words[4:]):
        outcome = _outcome(name, device)
        part = folder / f"{rank}.part"
        part.write_text(json.dumps(outcome))
        # Whole, or not there.
        part.rename(_file(folder, number, rank))
        if outcome["status"] in _WRONG:
            return 1
    # The store ends with the first process: the others may not have begun.
    world_group().all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    return 0


def _outcome(name: str, device: torch.device) -> Json:
    started = time.perf_counter()
    figures: Json = {}
    try:
        if name in _FOR_GPUS and not _is_gpu(device):
            status, says = "not run", "needs a GPU"
        else:
            status, (says, figures) = "ok", CHECKS[name](device)
    except Difference as difference:
        status, says = "differs", str(difference)
    except Exception as error:
        # The whole report goes into an issue: where it was raised is what helps.
        status, says = "failed", f"{type(error).__name__}: {error}"
        figures = {"traceback": traceback.format_exc()}
    seconds = time.perf_counter() - started
    return {"status": status, "says": says, "seconds": seconds, "figures": figures}


if __name__ == "__main__":
    sys.exit(worker(sys.argv[1:]))
