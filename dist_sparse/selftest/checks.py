"""The checks of a self-test. Each runs on all ranks at once, on one device each.

A check returns what it has found, raises :class:`Difference` where a result is wrong, or
:class:`NotRun`. Expected results are those of the CPU, or of a plainer way on the same device.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn

from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.enforcer.fused import collections_of
from dist_sparse.groups import group_over, world_ranks
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
        world: number of processes.
    """

    device: torch.device
    rank: int
    world: int

    @property
    def has_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self.has_gpu:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Found:
    """What a check has found: a line, and what it has measured."""

    says: str
    figures: dict[str, Any] = field(default_factory=dict)


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
        self.sparsifier = _sparsifier(block, level)
        self.sparsifier.add_model(self.model)
        self.tables = _whole_tables(_SMALL)
        for name, data in self.sparsifier.masks.tables.locate().items():
            for shard in data.shards:
                rect = shard.rect
                part = self.tables[name][rect.row : rect.row_end, rect.col : rect.col_end]
                shard.tensor.copy_(part)
        self.sparsifier.step()
        self.enforcer = MaskEnforcer(self.sparsifier)
        if attach:
            self.enforcer.attach(self.optimizer)

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
        _set_level(self.sparsifier, level)
        self.sparsifier.step()

    def shards(self) -> list[Tensor]:
        """Return the weights of this rank, clean, in CPU memory."""
        if self.enforcer.attached:
            self.enforcer.settle()
        located = self.sparsifier.masks.tables.locate()
        return [shard.tensor.float().cpu() for data in located.values() for shard in data.shards]

    def check_removed(self) -> None:
        """Check that what is removed is zero.

        Raises:
            Difference: something is not.
        """
        if self.enforcer.attached:
            self.enforcer.settle()
        store = self.sparsifier.masks.tables
        for name, data in store.locate().items():
            for shard, mask in zip(data.shards, store.masks(name), strict=True):
                masked = shard.tensor.clone()
                mask.apply_(masked)
                if not torch.equal(masked, shard.tensor):
                    alive = int((masked != shard.tensor).sum())
                    raise Difference(f"{alive} removed weights of {name!r} are not 0")

    def check_masks(self, what: str) -> None:
        """Check that the masks are those that a CPU makes of the same tables in one process.

        Raises:
            Difference: they are not.
        """
        group = self.sparsifier.data_groups["wide"]
        level, block = group["sparsity_level"], group["sparse_block_shape"]
        plain = DataNormSparsifier(None, level, block, None, "L2")
        dtype = next(iter(self.sparsifier.masks.tables.locate().values())).dtype
        embeddings = nn.ModuleDict()
        for name, table in self.tables.items():
            embeddings[name] = nn.Embedding(len(table), table.shape[1], _weight=table.to(dtype))
        plain.add_model(embeddings)
        plain.step()
        for name in self.tables:
            differing = int((plain.full_mask(name) != self.sparsifier.full_mask(name).cpu()).sum())
            if differing:
                raise Difference(f"{what}: {differing} elements of the mask of {name!r} differ")


def _sparsifier(block: str, level: float) -> DataNormSparsifier:
    return DataNormSparsifier(None, level, BLOCKS[block], None, "L2")


def _set_level(sparsifier: DataNormSparsifier, level: float) -> None:
    for group in sparsifier.data_groups.values():
        group["sparsity_level"] = level


def _whole_tables(shapes: Shapes) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


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
        trial.check_removed()
    return Found(f"{len(BLOCKS)} blocks, 2 updates, bit for bit")


@contextmanager
def _waits_raise() -> Iterator[None]:
    """Raise where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise Difference(f"the host waits in an ordinary step: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
        with _waits_raise():
            for each in features:
                batch.module(each).sum().backward()
        if versions != [storage._version for storage in batch.storage()]:
            # Then every step would take all rows for dirty.
            raise Difference("FBGEMM's backward changes the version of its weights")
    trial.check_removed()
    return Found(f'{_STEPS} steps under set_sync_debug_mode("error")')


def mask_updates(machine: Machine) -> Found:
    """Time, waits and memory of mask updates of one table of normal weights."""
    figures: dict[str, Any] = {}
    lines = []
    sizes = (1_000_000, 10_000_000) if machine.has_gpu else (20_000, 100_000)
    for rows, block in product(sizes, ("row", "1x4")):
        name = f"{rows} x 128, {block}"
        one = figures[name] = _mask_update(machine, rows, block)
        on_gpu = ""
        if machine.has_gpu:
            on_gpu = f", {one['waits']} waits, {percent(one['peak_share'])} more memory"
        lines.append(f"{name}: {one['milliseconds']:.0f} ms{on_gpu}")
    return Found("; ".join(lines), figures)


def _mask_update(machine: Machine, rows: int, block: str) -> dict[str, Any]:
    model = trial_model({"table": (rows, 128)}, machine.device)
    sparsifier = _sparsifier(block, 0.5)
    sparsifier.add_model(model)
    [data] = sparsifier.masks.tables.locate().values()
    for shard in data.shards:
        shard.tensor.normal_()
    with MaskEnforcer(sparsifier).attach(layers_optimizer(model)):
        sparsifier.step()
        # Once to warm up, once for the waits, which take longer to note than to pass, once timed.
        _step(machine, sparsifier, 0.55)
        waits, peak = _noted_step(machine, sparsifier, 0.6)
        seconds = _step(machine, sparsifier, 0.65)
    nbytes = sum(shard.tensor.nbytes for shard in data.shards)
    return {
        "milliseconds": 1_000 * seconds,
        "waits": waits,
        "peak_share": None if peak is None else peak / nbytes,
    }


def _step(machine: Machine, sparsifier: DataNormSparsifier, level: float) -> float:
    """Take one mask update, and return its seconds."""
    _set_level(sparsifier, level)
    machine.wait()
    started = time.perf_counter()
    sparsifier.step()
    machine.wait()
    return time.perf_counter() - started


def _noted_step(
    machine: Machine, sparsifier: DataNormSparsifier, level: float
) -> tuple[int | None, int | None]:
    """Take one mask update, and return the waits of the host and the most bytes of memory beside
    the tables; None on a CPU."""
    if not machine.has_gpu:
        return None, None
    before = torch.cuda.memory_allocated(machine.device)
    torch.cuda.reset_peak_memory_stats(machine.device)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _step(machine, sparsifier, level)
    torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(each.message) for each in caught)
    return waits, torch.cuda.max_memory_allocated(machine.device) - before


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
        machine.wait()
        trial.check_removed()
        found.append(trial.shards())
    return Found(f"12 steps, 3 mask updates: {_compare(*found)}")


def _compare(found: list[Tensor], expected: list[Tensor]) -> str:
    """Say how near two lists of tensors are.

    Raises:
        Difference: not near enough.
    """
    if all(map(torch.equal, found, expected)):
        return "bit for bit"
    most = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    # Sums of gradients may have another order.
    if most > 1e-4:
        raise Difference(f"weights differ by up to {most:.2g}")
    return f"within {most:.1g}"


def collectives(machine: Machine) -> Found:
    """Everything that the package sends, of tensors on the device."""
    ranks = world_ranks()
    if ranks is None:
        raise NotRun("needs several devices: --nproc 2")
    group, world, device = group_over(ranks), machine.world, machine.device
    mine = torch.arange(1 << 16, device=device) + machine.rank
    total = world * torch.arange(1 << 16) + sum(range(world))
    sent = [[torch.full((machine.rank + 1,), peer, device=device)] for peer in range(world)]
    received = group.all_to_all(sent, [8 * (peer + 1) for peer in range(world)], device)
    expected = [[machine.rank] * (peer + 1) for peer in range(world)]
    found = {
        "all_reduce": torch.equal(group.all_reduce(mine.clone()).cpu(), total),
        "all_gather": group.all_gather(mine)[:, 0].tolist() == [*range(world)],
        "all_to_all": [part.view(torch.int64).tolist() for part in received] == expected,
        "JSON": group.all_gather_json(machine.rank) == [*range(world)],
    }
    wrong = [name for name, right in found.items() if not right]
    if wrong:
        raise Difference(f"wrong results of {', '.join(wrong)}")
    where = "on the device" if group.device.type == "cuda" else "on the CPU"
    return Found(f"{', '.join(found)} over {world} processes, sent {where}")


_ON_EVERY_DEVICE: Final = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")
_ON_GPUS: Final = ("ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB", "LARS_SGD")


def fused_optimizers(machine: Machine) -> Found:
    """FBGEMM's optimizers: rows zeroed as they are read, against all rows after every step."""
    # FBGEMM has some for CUDA only.
    left = () if machine.has_gpu else _ON_GPUS
    done = _ON_EVERY_DEVICE if left else _ON_EVERY_DEVICE + _ON_GPUS
    figures = {name: _fused_optimizer(machine, name) for name in done}
    more = f"; not run, for they need a GPU: {', '.join(left)}" if left else ""
    return Found(", ".join(done) + more, figures)


def _fused_optimizer(machine: Machine, name: str) -> str:
    found = []
    for attach in (True, False):
        trial = _Trial(machine, "1x4", 0.5, attach, optimizer=name)
        for batch in trial.batches(5):
            trial.train(batch)
            if not attach:
                trial.sparsifier.apply_masks()
        trial.check_removed()
        found.append(trial.shards())
    try:
        return _compare(*found)
    except Difference as error:
        raise Difference(f"{name}: {error}") from None


def _train_masked(machine: Machine, block: str, what: str, **options: Any) -> None:
    """Check the masks of a model, and after five steps what they remove."""
    trial = _Trial(machine, block, 0.5, **options)
    trial.check_masks(what)
    for batch in trial.batches(5):
        trial.train(batch)
    trial.check_removed()


def half_precision(machine: Machine) -> Found:
    """float16 weights, which FBGEMM rounds stochastically on CUDA."""
    for block in ("row", "1x4"):
        _train_masked(machine, block, f"float16, {block}", half=True)
    rounding = "with" if machine.has_gpu else "without"
    return Found(f"masks bit for bit, removed weights 0, {rounding} stochastic rounding")


def unified_memory(machine: Machine, kernel: str) -> Found:
    """Tables in unified memory."""
    _needs_gpu(machine)
    # Rows in a cache can't be zeroed after each backward: finer blocks are refused.
    for block in ("row",) if kernel == CACHED else ("row", "1x4"):
        try:
            _train_masked(machine, block, block, kernel=kernel)
        except ValueError as error:
            raise NotRun(f"refused, {block}: {error}") from None
    return Found("masks bit for bit, 5 steps, removed weights 0")


CHECKS: Final[dict[str, Callable[[Machine], Found]]] = {
    "masks": masks_equal_the_cpus,
    "ordinary steps": ordinary_steps_never_wait,
    "mask updates": mask_updates,
    "collectives": collectives,
    "TrainPipelineSparseDist": partial(pipeline, kind="TrainPipelineSparseDist"),
    "TrainPipelineFusedSparseDist": partial(pipeline, kind="TrainPipelineFusedSparseDist"),
    "fused optimizers": fused_optimizers,
    "float16": half_precision,
    "fused_uvm": partial(unified_memory, kernel="fused_uvm"),
    "fused_uvm_caching": partial(unified_memory, kernel="fused_uvm_caching"),
}
"""By name, in the order in which they run."""
