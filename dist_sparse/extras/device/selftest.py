"""A self-test of this machine's devices: small models train on all of them, and masks and weights
are compared with the CPU's.

All checks run in one set of processes, one for each device. After a check that fails, the rest runs
in new processes: the device may be unusable, and ranks may be at different collectives. A time
limit ends a hang. Each process runs ``python -m dist_sparse.extras.device.selftest FOLDER RANK
WORLD DEVICE CHECK ...``, and writes a JSON file for each check.

A check returns its result as a line of text, and raises :class:`Difference` if a result is wrong.
Expected results are computed on the CPU, or without the tested feature on the same device.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse import checks
from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.groups import world_group
from dist_sparse.records import TINY
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.sparsifiers.score import ScoreSparsifier
from dist_sparse.tables.modules import collection_of, collections_of
from dist_sparse.tables.protocols import TableBatch
from dist_sparse.tables.shards import CACHED
from dist_sparse.text import duration, number_of, percent, printable, table_lines, wrapped
from dist_sparse.torchrec import installed
from dist_sparse.torchrec.trial import (
    Shapes,
    layers_optimizer,
    pipeline_of,
    trial_batch,
    trial_model,
)

_BLOCKS = ("row", "1x4", "2x2", "1x1")

# The fused optimizer with which each score is tried: norms alone, and the default of sparsify().
_SCORES = {"norm": "EXACT_SGD", "norm_accumulator": "EXACT_ROWWISE_ADAGRAD"}

# Two widths: FBGEMM has different kernels for tables of one width and of several.
_SMALL: Shapes = {"wide": (20_000, 128), "narrow": (7_001, 32)}

_STEPS = 20

# Outcomes from best to worst; the worst of all ranks counts.
# A wrong result "differs", an error "failed".
_ORDER = ("ok", "not run", "differs", "failed")
_WRONG = _ORDER[2:]

# Arguments of Python in each process.
_WORKER = ("-m", "dist_sparse.extras.device.selftest")

# Seconds for one check, loading TorchRec included.
_LIMIT = 180.0


class Difference(Exception):
    """A result is not the expected one."""


Json = dict[str, Any]

# Checks


class _Reference(ScoreSparsifier):
    """Score plain tables on the CPU, by their norms times given sums of rows."""

    sums: dict[str, Tensor]

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        sums = self.sums[name][offset[0] : offset[0] + len(data), None]
        # Scores by norm alone have sums of 1, which TINY does not change.
        return data.double().square() * (sums + TINY)


class _Model:
    """A model on the device, with the same weights and sums of Adagrad on every machine, and its
    sparsifier.

    Args:
        device: the device of this rank.
        block: the block of its masks.
        level: the sparsity level.
        score: a score of :class:`~dist_sparse.ImportanceSparsifier`.
        attach: whether an enforcer keeps removed weights at zero.
        **options: of :func:`~dist_sparse.torchrec.trial.trial_model`.
    """

    def __init__(
        self,
        device: torch.device,
        block: str,
        level: float,
        attach: bool = True,
        score: Any = "norm",
        **options: Any,
    ) -> None:
        self.device = device
        self.model = trial_model(_SMALL, device, **{"optimizer": _SCORES[score], **options})
        self.optimizer = layers_optimizer(self.model)
        self.sparsifier = ImportanceSparsifier(None, level, block, score=score)
        self.sparsifier.add_model(self.model)
        if attach:
            MaskEnforcer(self.sparsifier).attach(self.optimizer)
        sums = {} if score == "norm" else self.sparsifier.sums()
        random = torch.Generator().manual_seed(7)
        self.tables = {name: torch.randn(shape, generator=random) for name, shape in _SMALL.items()}
        self.sums = {name: torch.ones(rows).double() for name, (rows, _) in _SMALL.items()}
        for name, data in self.sparsifier.masks.tables.locate().items():
            if sums:
                self.sums[name].copy_(torch.rand(data.shape[0], generator=random))
            for (row, col, rows, cols), tensor in data.shards:
                tensor.copy_(self.tables[name][row : row + rows, col : col + cols])
                if sums:
                    total, _ = sums[tensor.data_ptr()]
                    total.view(-1).copy_(self.sums[name][row : row + rows])
        self.sparsifier.step()

    def batches(self) -> Iterator[Any]:
        """Yield batches in CPU memory, different ones on each rank."""
        for seed in count(1 + dist.get_rank() * 1_000):
            yield trial_batch(_SMALL, seed)

    def train(self, batches: Iterator[Any]) -> None:
        """Train on the next batch, as a plain loop does."""
        loss, _ = self.model(next(batches).to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def shards(self) -> list[Tensor]:
        """Return the weights of this rank, in CPU memory."""
        located = self.sparsifier.masks.tables.locate()
        return [shard.tensor.float().cpu() for data in located.values() for shard in data.shards]

    def check_masks(self, what: str) -> None:
        """Check that the masks equal the masks of the same tables in one process on the CPU, and
        that removed weights are zero.

        Raises:
            Difference: masks differ.
        """
        config = self.sparsifier.data_groups["wide"]
        reference = _Reference(None, config["sparsity_level"], config["sparse_block_shape"])
        reference.sums = self.sums
        for name, data in self.sparsifier.masks.tables.locate().items():
            reference.add_data(name, self.tables[name].to(data.dtype))
        reference.step()
        # audit() compares masks with weights too, and returns hashes of the masks.
        wrong = dict(self.sparsifier.audit().items() - reference.fingerprint().items())
        if wrong:
            raise Difference(f"{what}: the masks of {sorted(wrong)} differ from the CPU's")


def masks_equal_the_cpus(device: torch.device) -> str:
    """Compare the masks of all blocks, of tables cut by rows over the ranks, with the masks that
    one process computes on the CPU."""
    for score, block in product(_SCORES, _BLOCKS):
        trial = _Model(device, block, 0.5, score=score)
        trial.check_masks(f"{block} by {score} at 50%")
        # A second update finds the removed weights tied at 0.
        _update(device, trial.sparsifier, 0.73)
        trial.check_masks(f"{block} by {score} at 73%")
    return f"{len(_BLOCKS)} blocks, {len(_SCORES)} scores, 2 updates, bit for bit"


@contextmanager
def _waits(mode: str) -> Iterator[list[warnings.WarningMessage]]:
    """Raise if the host waits for the device (``"error"``), or warn (``"warn"``); yield the
    warnings."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ordinary_steps_never_wait(device: torch.device) -> str:
    """Run lookups and backwards of the kernels, without TorchRec's input distribution, which
    waits."""
    trial = _Model(device, "1x4", 0.5)
    [collection] = collections_of(trial.model.modules())
    for batch in collection_of(collection).batches():
        shapes: Any = {str(number): view.shape for number, view in enumerate(batch.weights())}
        features = []
        for seed in range(_STEPS):
            features.append(trial_batch(shapes, seed).to(device))
            # Computed from the lengths at the first call: before the steps that may not wait.
            features[-1].offsets()
        # The first steps read the masks, and compile kernels.
        _train_on(batch, features[:3])
        versions = _versions(batch)
        with _waits("error"):
            _train_on(batch, features)
        if versions != _versions(batch):
            # A changed version marks all rows as dirty: every step would zero whole tables.
            raise Difference("FBGEMM's backward changes the version of its weights")
    trial.sparsifier.audit()
    return f'{_STEPS} steps under set_sync_debug_mode("error")'


def _train_on(batch: TableBatch, features: Sequence[Any]) -> None:
    for feature in features:
        batch.module(feature).sum().backward()


def _versions(batch: TableBatch) -> list[int]:
    return [storage._version for storage in batch.storage()]


def mask_updates(device: torch.device) -> str:
    """Measure time, waits and memory of mask updates of one table, by the default score."""
    lines = []
    sizes = {"cuda": (1_000_000, 10_000_000), "cpu": (20_000, 100_000)}
    for rows, block in product(sizes[device.type], ("row", "1x4")):
        lines.append(f"{rows} x 128, {block}: {_mask_update(device, rows, block)}")
    return "; ".join(lines)


def _mask_update(device: torch.device, rows: int, block: str) -> str:
    model = trial_model({"table": (rows, 128)}, device, optimizer="EXACT_ROWWISE_ADAGRAD")
    sparsifier = ImportanceSparsifier(None, 0.5, block)
    sparsifier.add_model(model)
    [data] = sparsifier.masks.tables.locate().values()
    nbytes = 0
    for shard in data.shards:
        shard.tensor.normal_()
        nbytes += shard.tensor.nbytes
    more = ""
    with MaskEnforcer(sparsifier).attach(layers_optimizer(model)):
        sparsifier.step()
        # Three updates: to warm up; to count waits, which slows them down; and to take the time.
        _update(device, sparsifier, 0.55)
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            with _waits("warn") as caught:
                _update(device, sparsifier, 0.6)
            share = (torch.cuda.max_memory_allocated(device) - before) / nbytes
            waits = sum("synchronizing" in str(each.message) for each in caught)
            more = f", {waits} waits, {percent(share)} more memory"
        started = time.perf_counter()
        _update(device, sparsifier, 0.65)
        milliseconds = 1_000 * (time.perf_counter() - started)
    return f"{milliseconds:.0f} ms{more}"


def _update(device: torch.device, sparsifier: ImportanceSparsifier, level: float) -> None:
    """Take one mask update, and wait for it."""
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = level
    sparsifier.step()
    torch.get_device_module(device).synchronize(device)


def pipeline(device: torch.device, kind: str) -> str:
    """Compare a pipeline of TorchRec's, with mask updates between its steps, with a plain loop."""
    piped = _Model(device, "1x4", 0.3)
    plain = _Model(device, "1x4", 0.3)
    progress = pipeline_of(kind, piped.model, piped.optimizer, device).progress
    found = _with_updates(piped, progress)
    expected = _with_updates(plain, plain.train)
    return f"12 steps, 3 mask updates: {_compare('weights', found, expected)}"


def _with_updates(trial: _Model, train: Callable[[Iterator[Any]], object]) -> list[Tensor]:
    """Take steps by ``train``, and a mask update after every fourth. Return the weights."""
    batches = islice(trial.batches(), 12)
    for step in range(12):
        train(batches)
        if step % 4 == 3:
            _update(trial.device, trial.sparsifier, 0.3 + step / 20)
    trial.sparsifier.audit()
    return trial.shards()


def _compare(what: str, found: list[Tensor], expected: list[Tensor]) -> str:
    """Return a text of how close two lists of tensors are.

    Raises:
        Difference: not close enough.
    """
    if all(map(torch.equal, found, expected)):
        return "bit for bit"
    most = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    # Sums of gradients may differ in their order.
    if most > 1e-4:
        raise Difference(f"{what} differ by up to {most:.2g}")
    return f"within {most:.1g}"


_ON_EVERY_DEVICE = ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"]
# Optimizers that FBGEMM has for CUDA only.
_ON_GPUS = ["ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB", "LARS_SGD"]


def fused_optimizers(device: torch.device) -> str:
    """Compare FBGEMM's optimizers with an enforcer, which zeroes rows as they are read, and with
    all rows zeroed after every step."""
    done = _ON_EVERY_DEVICE
    more = f"; not run, for they need a GPU: {', '.join(_ON_GPUS)}"
    if device.type == "cuda":
        done = _ON_EVERY_DEVICE + _ON_GPUS
        more = ""
    lines = []
    for name in done:
        found = _train_masked(device, "1x4", optimizer=name)
        expected = _train_masked(device, "1x4", attach=False, optimizer=name)
        lines.append(f"{name} {_compare(f'weights of {name}', found, expected)}")
    return f"{', '.join(lines)}{more}"


def _train_masked(
    device: torch.device, block: str, attach: bool = True, **options: Any
) -> list[Tensor]:
    """Check the masks of a model, and after five steps that removed weights are zero. Return its
    weights."""
    trial = _Model(device, block, 0.5, attach, **options)
    trial.check_masks(" ".join([block, *map(str, options.values())]))
    batches = trial.batches()
    for _ in range(5):
        trial.train(batches)
        if not attach:
            trial.sparsifier.apply_masks()
    trial.sparsifier.audit()
    return trial.shards()


def other_storage(device: torch.device, blocks: Sequence[str], **options: Any) -> str:
    """Check tables of another dtype, or in unified memory."""
    for block in blocks:
        _train_masked(device, block, **options)
    return "masks bit for bit, 5 steps, removed weights 0"


# Checks by name, in the order in which they run.
CHECKS: dict[str, Callable[[torch.device], str]] = {
    "masks": masks_equal_the_cpus,
    "ordinary steps": ordinary_steps_never_wait,
    "mask updates": mask_updates,
    "TrainPipelineSparseDist": partial(pipeline, kind="TrainPipelineSparseDist"),
    "TrainPipelineFusedSparseDist": partial(pipeline, kind="TrainPipelineFusedSparseDist"),
    "fused optimizers": fused_optimizers,
    # FBGEMM rounds it stochastically on CUDA.
    "float16": partial(other_storage, blocks=("row", "1x4"), data_type="FP16"),
    "fused_uvm": partial(other_storage, blocks=("row", "1x4"), kernel="fused_uvm"),
    # Whole rows only: cached rows can't be zeroed after each backward, so finer blocks are refused.
    "fused_uvm_caching": partial(other_storage, blocks=("row",), kernel=CACHED),
}

# Checks that need CUDA. TorchRec's fused pipeline, too: it records streams.
_FOR_GPUS = (
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
    gpus = torch.cuda.device_count()
    device = device or ("cuda" if gpus else "cpu")
    usual = {"cuda": max(gpus, 1), "cpu": 2}[device]
    world = checks.integer("nproc", usual if nproc is None else nproc, least=1)
    if device == "cuda" and gpus < world:
        ranks = number_of(world, "rank")
        raise ValueError(f"Invalid {device=} for {ranks}: torch finds {gpus} GPUs here.")
    outcomes: list[Json] = []
    while left := list(CHECKS)[len(outcomes) :]:
        outcomes += _attempt(device, world, left, progress)
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


def as_text(results: Json) -> str:
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
) -> list[Json]:
    """Run checks in one set of processes until they are done or one is not passed; return at least
    one outcome."""
    done: list[Json] = []
    # Gloo would otherwise bind the address of the host's name, which may not be its own.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    # `-m` imports from the current folder first, whose json.py or torch.py is not Python's: the
    # processes run in a folder of their own.
    package = Path(__file__).parents[1]
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


def _wait_for(number: int, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> Json:
    """Return the outcome of the next check: the worst of all ranks."""
    started = time.monotonic()
    while (took := time.monotonic() - started) < _LIMIT:
        # Before the files are read: a process that has ended by now writes no more of them.
        has_ended = any(process.poll() is not None for process in processes)
        files = folder.glob(f"{number}-*.json")
        outcomes: list[Json] = [json.loads(file.read_text()) for file in files]
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


def _lost(says: str, seconds: float, folder: Path) -> Json:
    # The last output of each process.
    logs = [log.read_text(errors="replace")[-2_000:] for log in sorted(folder.glob("*.log"))]
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
    dist.init_process_group(backend, f"file://{folder / 'store'}", limit, world, rank)
    for number, name in enumerate(names):
        outcome = _outcome(name, device)
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


def _outcome(name: str, device: torch.device) -> Json:
    started = time.perf_counter()
    details = []
    try:
        if name in _FOR_GPUS and device.type != "cuda":
            status, says = "not run", "needs a GPU"
        else:
            status, says = "ok", CHECKS[name](device)
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
