"""The checks of a self-test. Each runs on all ranks at once, on one device each.

A check returns a line that says what it has found, and figures that it has measured; it raises
:class:`Difference` where a result is wrong, or :class:`NotRun`. Expected results are those of the
CPU, or of a plainer way on the same device.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn

from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.enforcer.fused import collections_of
from dist_sparse.sparsifiers.score import DataNormSparsifier
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.shards import CACHED, ROW
from dist_sparse.text import percent
from dist_sparse.torchrec.trial import (
    Shapes,
    layers_optimizer,
    pipeline_of,
    trial_batch,
    trial_model,
)

BLOCKS: Final[Mapping[str, tuple[int, int | str]]] = {
    "row": (1, ROW),
    "1x4": (1, 4),
    "2x2": (2, 2),
    "1x1": (1, 1),
}

# Several widths: FBGEMM keeps tables of one width and of several in other kernels.
_SMALL: Final[Shapes] = {"wide": (20_000, 128), "narrow": (7_001, 32)}

_STEPS: Final = 20


class Difference(Exception):
    """A result is not the expected one."""


class NotRun(Exception):
    """The check can't run here, and why."""


@dataclass(frozen=True)
class Machine:
    """Where a rank runs.

    Args:
        device: of this rank.
        rank: of this process.
    """

    device: torch.device
    rank: int

    @property
    def has_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"


Found = tuple[str, dict[str, Any]]
"""A line, and figures."""


class _Trial:
    """A model on the device, whose tables have the same weights on every machine.

    Args:
        machine: where it is.
        block: of its masks.
        level: the sparsity level.
        attach: whether an enforcer keeps removed weights at zero.
        **options: of :func:`~dist_sparse.torchrec.trial.trial_model`.
    """

    def __init__(
        self, machine: Machine, block: str, level: float, attach: bool = True, **options: Any
    ) -> None:
        self.machine = machine
        self.model = trial_model(_SMALL, machine.device, **options)
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
        first = 1 + self.machine.rank * 1_000
        return [trial_batch(_SMALL, first + step) for step in range(steps)]

    def train(self, batch: Any) -> None:
        """Take a step as plain loops do."""
        loss, _ = self.model(batch.to(self.machine.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update(self, level: float) -> None:
        """Update the masks."""
        _update(self.machine, self.sparsifier, level)

    def shards(self) -> list[Tensor]:
        """Return the weights of this rank, in CPU memory."""
        located = self.sparsifier.masks.tables.locate()
        return [shard.tensor.float().cpu() for data in located.values() for shard in data.shards]

    def check_removed(self) -> dict[str, str]:
        """Return fingerprints of the masks, after checking that what they remove is zero.

        Raises:
            Difference: something is not.
        """
        try:
            return self.sparsifier.audit()
        except ValueError as error:
            raise Difference(str(error)) from error

    def check_masks(self, what: str) -> None:
        """Check that the masks are those that a CPU makes of the same tables in one process, and
        that what they remove is zero.

        Raises:
            Difference: they are not.
        """
        group = self.sparsifier.data_groups["wide"]
        plain = _sparsifier(group["sparse_block_shape"], group["sparsity_level"])
        dtype = next(iter(self.sparsifier.masks.tables.locate().values())).dtype
        embeddings = nn.ModuleDict()
        for name, table in self.tables.items():
            embeddings[name] = nn.Embedding(len(table), table.shape[1], _weight=table.to(dtype))
        plain.add_model(embeddings)
        plain.step()
        expected = plain.fingerprint()
        wrong = [name for name, mask in self.check_removed().items() if mask != expected[name]]
        if wrong:
            raise Difference(f"{what}: the masks of {wrong} differ from the CPU's")


def _sparsifier(block: Any, level: float) -> DataNormSparsifier:
    return DataNormSparsifier(None, level, block, None, "L2")


def _needs_gpu(machine: Machine) -> None:
    if not machine.has_gpu:
        raise NotRun("needs a GPU")


def masks_equal_the_cpus(machine: Machine) -> Found:
    """Masks of all blocks, cut by rows over the ranks, against one process on the CPU."""
    for block in BLOCKS:
        trial = _Trial(machine, block, 0.5)
        trial.check_masks(f"{block} at 50%")
        # A second update, for which removed weights tie at 0.
        trial.update(0.73)
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


def ordinary_steps_never_wait(machine: Machine) -> Found:
    """Lookups and backwards of the kernels, without TorchRec's input distribution, which waits."""
    _needs_gpu(machine)
    trial = _Trial(machine, "1x4", 0.5)
    [collection] = collections_of(trial.model.modules())
    for batch in collection_of(collection).batches():
        shapes = {
            str(number): (len(view), view.shape[1]) for number, view in enumerate(batch.weights())
        }
        features = [trial_batch(shapes, seed).to(machine.device) for seed in range(_STEPS)]
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
    trial.check_removed()
    return f'{_STEPS} steps under set_sync_debug_mode("error")', {}


def mask_updates(machine: Machine) -> Found:
    """Time, waits and memory of mask updates of one table of normal weights."""
    figures: dict[str, Any] = {}
    lines = []
    sizes = (1_000_000, 10_000_000) if machine.has_gpu else (20_000, 100_000)
    for rows, block in product(sizes, ("row", "1x4")):
        name = f"{rows} x 128, {block}"
        one = figures[name] = _mask_update(machine, rows, block)
        more = ""
        if machine.has_gpu:
            more = f", {one['waits']} waits, {percent(one['peak_share'])} more memory"
        lines.append(f"{name}: {one['milliseconds']:.0f} ms{more}")
    return "; ".join(lines), figures


def _mask_update(machine: Machine, rows: int, block: str) -> dict[str, Any]:
    model = trial_model({"table": (rows, 128)}, machine.device)
    sparsifier = _sparsifier(BLOCKS[block], 0.5)
    sparsifier.add_model(model)
    [data] = sparsifier.masks.tables.locate().values()
    for shard in data.shards:
        shard.tensor.normal_()
    nbytes = sum(shard.tensor.nbytes for shard in data.shards)
    figures: dict[str, Any] = {"waits": None, "peak_share": None}
    with MaskEnforcer(sparsifier).attach(layers_optimizer(model)):
        sparsifier.step()
        # Once to warm up, once for the waits, which take longer to note than to pass, once timed.
        _update(machine, sparsifier, 0.55)
        if machine.has_gpu:
            before = torch.cuda.memory_allocated(machine.device)
            torch.cuda.reset_peak_memory_stats(machine.device)
            with _waits("warn") as waits:
                _update(machine, sparsifier, 0.6)
            more = torch.cuda.max_memory_allocated(machine.device) - before
            figures = {"waits": len(waits), "peak_share": more / nbytes}
        started = time.perf_counter()
        _update(machine, sparsifier, 0.65)
        figures["milliseconds"] = 1_000 * (time.perf_counter() - started)
    return figures


def _update(machine: Machine, sparsifier: DataNormSparsifier, level: float) -> None:
    """Take one mask update, and wait for it."""
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = level
    sparsifier.step()
    if machine.has_gpu:
        torch.cuda.synchronize(machine.device)


def pipeline(machine: Machine, kind: str) -> Found:
    """A pipeline of TorchRec's, with mask updates between its steps, against the plain loop."""
    if kind == "TrainPipelineFusedSparseDist":
        _needs_gpu(machine)  # it records streams, whatever the device
    found = []
    for piped in (True, False):
        trial = _Trial(machine, "1x4", 0.3)
        batches = trial.batches(12)
        coming = iter(batches)
        piped_model = pipeline_of(kind, trial.model, trial.optimizer, machine.device)
        for step in range(len(batches)):
            if piped:
                piped_model.progress(coming)
            else:
                trial.train(next(coming))
            if step % 4 == 3:
                trial.update(0.3 + step / 20)
        trial.check_removed()
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


_ON_EVERY_DEVICE: Final = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")
_ON_GPUS: Final = ("ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB", "LARS_SGD")


def fused_optimizers(machine: Machine) -> Found:
    """FBGEMM's optimizers: rows zeroed as they are read, against all rows after every step."""
    # FBGEMM has some for CUDA only.
    left = () if machine.has_gpu else _ON_GPUS
    done = _ON_EVERY_DEVICE if left else _ON_EVERY_DEVICE + _ON_GPUS
    figures = {}
    for name in done:
        weights = [
            _train_masked(machine, "1x4", attach=attach, optimizer=name) for attach in (True, False)
        ]
        figures[name] = _compare(f"weights of {name}", *weights)
    more = f"; not run, for they need a GPU: {', '.join(left)}" if left else ""
    return ", ".join(done) + more, figures


def _train_masked(
    machine: Machine, block: str, attach: bool = True, **options: Any
) -> list[Tensor]:
    """Check the masks of a model, and after five steps what they remove. Return its weights."""
    trial = _Trial(machine, block, 0.5, attach, **options)
    trial.check_masks(" ".join([block, *map(str, options.values())]))
    for batch in trial.batches(5):
        trial.train(batch)
        if not attach:
            trial.sparsifier.apply_masks()
    trial.check_removed()
    return trial.shards()


def half_precision(machine: Machine) -> Found:
    """float16 weights, which FBGEMM rounds stochastically on CUDA."""
    for block in ("row", "1x4"):
        _train_masked(machine, block, half=True)
    rounding = "with" if machine.has_gpu else "without"
    return f"masks bit for bit, removed weights 0, {rounding} stochastic rounding", {}


def unified_memory(machine: Machine, kernel: str) -> Found:
    """Tables in unified memory."""
    _needs_gpu(machine)
    # Rows in a cache can't be zeroed after each backward: finer blocks are refused.
    for block in ("row",) if kernel == CACHED else ("row", "1x4"):
        try:
            _train_masked(machine, block, kernel=kernel)
        except ValueError as error:
            raise NotRun(f"refused, {block}: {error}") from None
    return "masks bit for bit, 5 steps, removed weights 0", {}


CHECKS: Final[dict[str, Callable[[Machine], Found]]] = {
    "masks": masks_equal_the_cpus,
    "ordinary steps": ordinary_steps_never_wait,
    "mask updates": mask_updates,
    "TrainPipelineSparseDist": partial(pipeline, kind="TrainPipelineSparseDist"),
    "TrainPipelineFusedSparseDist": partial(pipeline, kind="TrainPipelineFusedSparseDist"),
    "fused optimizers": fused_optimizers,
    "float16": half_precision,
    "fused_uvm": partial(unified_memory, kernel="fused_uvm"),
    "fused_uvm_caching": partial(unified_memory, kernel="fused_uvm_caching"),
}
"""By name, in the order in which they run."""
