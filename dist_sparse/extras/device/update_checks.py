"""Checks of the self-test on large tables: masks against torch's operations on the same device;
waits, memory and bandwidth of mask updates."""

import time
import warnings
from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import torch

from dist_sparse.extras.device.trials import (
    SCORES,
    Difference,
    MaskedModel,
    Sizes,
    random_sums,
    require_equal_masks,
    synchronize,
    waits,
)
from dist_sparse.text import percent
from dist_sparse.torchrec.trial import TrialTables

_BLOCKS = ("row", "1x4")

# What a mask update may cost on CUDA.
#: Waits of the host in one process, for any number of tables: 4, and one if scores tie. A sample
#: that has misled takes up to two more, and a list without room another one.
_WAITS = {"row": 5, "1x4": 8}
#: Messages, for each of which the host waits once: an agreement, the sums of three rounds of scores
#: and, if scores tie, of three rounds of places. A sample is summed too, and two more if it misled.
_MESSAGES = {"row": 7, "1x4": 10}
#: More memory, as a share of the tables: the lists of blocks near the threshold of C4, and masks.
MOST_MEMORY = {"row": 0.05, "1x4": 0.15}
#: The slowest kernel of an update reads the tables at this share of the bandwidth at which torch
#: adds them up on the same device.
LEAST_BANDWIDTH = 0.25


class Cost(NamedTuple):
    """What one mask update has cost.

    Args:
        waits: times that the host waited for the device.
        most_waits: how often it may.
        memory: most memory, beyond that before the update, as a share of the tables.
        seconds: of the whole update.
        kernels: seconds of each kernel on the device, by its name.
        tables: bytes of this rank's tables.
        bandwidth: bytes per second at which torch adds up the tables.
    """

    waits: int
    most_waits: int
    memory: float
    seconds: float
    kernels: Mapping[str, float]
    tables: int
    bandwidth: float


def large_masks(device: torch.device, sizes: Sizes) -> str:
    """Compare masks of a large table with the masks that torch's operations choose."""
    for score, optimizer in SCORES.items():
        for block in _BLOCKS:
            trial = TrialTables({"large": (sizes.large, 128)}, optimizer=optimizer)
            _compare_with_torch(MaskedModel(trial, device, block, score=score), block)
    return f"{sizes.large} x 128, {len(_BLOCKS)} blocks, {len(SCORES)} scores, bit for bit"


def beyond_31_bits(device: torch.device, sizes: Sizes) -> str:
    """Compare masks and lookups of a table whose elements need offsets of more than 31 bits."""
    shapes = {"beyond": (sizes.beyond, 128)}
    for block in _BLOCKS:
        trial = TrialTables(shapes, data_type="FP16", sharding="table_wise")
        model = MaskedModel(trial, device, block)
        _compare_with_torch(model, block)
        batches = model.batches()
        for _ in range(5):
            model.train(batches)
        # Raises if a removed weight is not zero.
        model.sparsifier.audit()
    return f"{sizes.beyond * 128:.2g} elements, 2 blocks, bit for bit, 5 steps, removed weights 0"


def _compare_with_torch(model: MaskedModel, block: str) -> None:
    """Compare the masks of two updates with those of a sparsifier that runs torch's operations."""
    sums = random_sums(model.trial, model.score)
    random = torch.Generator(model.device).manual_seed(torch.distributed.get_rank())
    for shard in model.shards():
        shard.normal_(generator=random)
    if model.score == "norm_accumulator":
        model.write_sums(sums)
    for level in (0.5, 0.6):
        # The reference writes zeros too: the model starts from the weights before it.
        before = [shard.clone() for shard in model.shards()]
        reference = model.reference(sums)
        reference.defaults["sparsity_level"] = level
        reference.add_model(model.model)
        reference.step()
        expected = reference.fingerprint()
        for shard, weights in zip(model.shards(), before, strict=True):
            shard.copy_(weights)
        del reference, before
        model.update(level)
        found = model.sparsifier.audit()
        require_equal_masks(f"{block} by {model.score} at {level}", found, expected)


def mask_updates(device: torch.device, sizes: Sizes) -> str:
    """Measure mask updates of one large table, alone and beside many small ones, by the default
    score. On CUDA, check their waits, memory and bandwidth."""
    lines = []
    large = {"large": (sizes.large, 128)}
    for block, more in product(_BLOCKS, ({}, sizes.small_tables)):
        trial = TrialTables({**large, **more}, optimizer="EXACT_ROWWISE_ADAGRAD")
        model = MaskedModel(trial, device, block, score="norm_accumulator")
        for shard in model.shards():
            shard.normal_()
        model.update(0.5)
        # To warm up.
        model.update(0.55)
        cost = _measured(model, most_waits(block, torch.distributed.get_world_size()))
        if device.type == "cuda":
            check_cost(block, cost)
        beside = f" and {len(more)} more" if more else ""
        lines.append(f"{sizes.large} x 128{beside}, {block}: {_as_text(cost)}")
    return "; ".join(lines)


def most_waits(block: str, ranks: int) -> int:
    """Return how often the host may wait in a mask update without a recorder."""
    return _WAITS[block] + (_MESSAGES[block] if ranks > 1 else 0)


def _measured(model: MaskedModel, most: int) -> Cost:
    """Take three mask updates: to count waits, to time kernels, and to take the time. The first two
    are slowed down by counting."""
    device = model.device
    nbytes = sum(shard.nbytes for shard in model.shards())
    found, share, kernels, bandwidth = 0, 0.0, {}, 0.0
    if device.type == "cuda":
        found, share = _waits_and_memory(model, nbytes)
        kernels = kernel_seconds(model)
        bandwidth = _bandwidth(model, nbytes)
    started = time.perf_counter()
    model.update(0.7)
    return Cost(found, most, share, time.perf_counter() - started, kernels, nbytes, bandwidth)


def _waits_and_memory(model: MaskedModel, nbytes: int) -> tuple[int, float]:
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    model.set_level(0.6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with waits("warn"):
            model.sparsifier.step()
    synchronize(model.device)
    more = torch.cuda.max_memory_allocated(model.device) - before
    found = sum("synchronizing" in str(each.message) for each in caught)
    return found, more / max(nbytes, 1)


def kernel_seconds(model: MaskedModel) -> dict[str, float]:
    """Return the seconds of each kernel of a mask update, by its name."""
    seconds: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        model.update(0.65)
    for event in profiler.key_averages():
        # A collective takes as long as the slowest rank.
        if "nccl" in event.key.lower():
            continue
        seconds[event.key] += event.self_device_time_total / 1e6
    return dict(seconds)


def _bandwidth(model: MaskedModel, nbytes: int) -> float:
    """Return the bytes per second at which torch adds up the tables, the best of three times."""
    best = 0.0
    for _ in range(3):
        synchronize(model.device)
        started = time.perf_counter()
        for shard in model.shards():
            shard.sum()
        synchronize(model.device)
        best = max(best, nbytes / (time.perf_counter() - started))
    return best


def check_cost(block: str, cost: Cost) -> None:
    """Compare what an update has cost with what it may cost.

    Raises:
        Difference: it waits too often, takes too much memory, or a kernel is too slow.
    """
    faults = []
    if cost.waits > cost.most_waits:
        faults.append(f"{cost.waits} waits instead of {cost.most_waits}")
    if cost.memory > MOST_MEMORY[block]:
        most = percent(MOST_MEMORY[block])
        faults.append(f"{percent(cost.memory)} more memory instead of {most}")
    least = LEAST_BANDWIDTH * cost.bandwidth
    for name, seconds in cost.kernels.items():
        # A kernel that reads less of the tables than all is faster than this.
        if cost.tables < least * seconds:
            speed = cost.tables / seconds
            faults.append(f"{name}: {speed / 1e9:.0f} GB/s instead of {least / 1e9:.0f}")
    if faults:
        raise Difference(f"{block}: {'; '.join(faults)} ({_as_text(cost)})")


def _as_text(cost: Cost) -> str:
    text = f"{1_000 * cost.seconds:.0f} ms"
    if cost.kernels:
        text += (
            f", {cost.waits} waits, {percent(cost.memory)} more memory,"
            f" torch reads {cost.bandwidth / 1e9:.0f} GB/s"
        )
        slowest = sorted(cost.kernels, key=lambda name: cost.kernels[name])[-3:]
        for name in reversed(slowest):
            seconds = cost.kernels[name]
            text += f", {name[:40]} {1_000 * seconds:.2f} ms {cost.tables / seconds / 1e9:.0f} GB/s"
    return text
