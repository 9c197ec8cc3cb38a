"""What the checks of the self-test share: sizes, a model with masks, and comparisons.

A check returns its result as a line of text. It raises :class:`Difference` if a result is wrong,
and :class:`NotRun` where it can't run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse.enforcer.enforcer import MaskEnforcer
from dist_sparse.records import TINY
from dist_sparse.sparsifiers.importance import ImportanceSparsifier
from dist_sparse.sparsifiers.score import ScoreSparsifier
from dist_sparse.tables.shards import ShardedData
from dist_sparse.torchrec.trial import TrialTables, layers_optimizer, trial_batch, trial_model

BLOCKS = ("row", "1x4", "2x2", "1x1")

# The fused optimizer with which each score is tried: norms alone, and the default of sparsify().
SCORES = {"norm": "EXACT_SGD", "norm_accumulator": "EXACT_ROWWISE_ADAGRAD"}


class Difference(Exception):
    """A result is not the expected one."""


class NotRun(Exception):
    """The check can't run here; its text is the reason."""


@dataclass(frozen=True)
class Sizes:
    """How large the tables of the checks are. All are cut by rows over the ranks, except one.

    Args:
        small: rows of tables whose expected masks one process computes on the CPU.
        large: rows of 128 columns whose masks are compared with torch's operations on the device,
            and whose mask updates are measured.
        beyond: rows of 128 columns of a float16 table on rank 0. Its last elements should have
            offsets beyond 2**31.
        tables: small tables beside one large one.
        steps: steps in which nothing may wait.
        sleep: clock cycles for which a stream sleeps, so that a missing event shows.
    """

    small: int
    large: int
    beyond: int
    tables: int
    steps: int
    sleep: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Two widths: FBGEMM has different kernels for tables of one width and of several."""
        return {"wide": (self.small, 128), "narrow": (self.small // 3 + 1, 32)}

    @property
    def small_tables(self) -> dict[str, tuple[int, int]]:
        """Many small tables, of different sizes."""
        return {f"small{number}": (100 + number, 16) for number in range(self.tables)}


SIZES = {
    "cuda": Sizes(20_000, 10_000_000, 20_000_000, tables=99, steps=20, sleep=500_000_000),
    "cpu": Sizes(5_000, 20_000, 20_000, tables=8, steps=3, sleep=0),
}


class Reference(ScoreSparsifier):
    """Score tables by their norms times given sums of rows, by torch's operations.

    Attributes:
        sums: float64 ``(rows,)`` by name; by norms alone, ones, which TINY does not change.
    """

    sums: Mapping[str, Tensor]

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        """See :meth:`dist_sparse.extend.ScoreSparsifier.score`."""
        sums = self.sums[name][offset[0] : offset[0] + len(data), None].to(data.device)
        return data.double().square() * (sums + TINY)


class MaskedModel:
    """A model on the device, and its sparsifier, before its first mask update.

    Args:
        trial: the model; its weights, and its sums of Adagrad, are the same on every machine.
        device: the device of this rank.
        block: the block of its masks.
        level: the sparsity level.
        score: a score of :class:`~dist_sparse.ImportanceSparsifier`.
        attach: whether an enforcer keeps removed weights at zero.
    """

    def __init__(
        self,
        trial: TrialTables,
        device: torch.device,
        block: str,
        level: float = 0.5,
        *,
        score: Any = "norm",
        attach: bool = True,
    ) -> None:
        self.trial, self.device, self.score = trial, device, score
        self.model = trial_model(trial, device)
        self.optimizer = layers_optimizer(self.model)
        self.sparsifier = ImportanceSparsifier(None, level, block, score=score)
        self.sparsifier.add_model(self.model)
        if attach:
            MaskEnforcer(self.sparsifier).attach(self.optimizer)

    def located(self) -> dict[str, ShardedData]:
        """Return the tables by name, as they are stored now."""
        return dict(self.sparsifier.masks.tables.locate())

    def shards(self) -> list[Tensor]:
        """Return the live weights of this rank."""
        return [shard.tensor for data in self.located().values() for shard in data.shards]

    def weights(self) -> list[Tensor]:
        """Return a copy of the weights of this rank in CPU memory, once all removed ones are
        zero.

        Raises:
            ValueError: a removed weight is not zero.
        """
        self.sparsifier.audit()
        return [tensor.detach().to("cpu", torch.float32, copy=True) for tensor in self.shards()]

    def write(self, tables: Mapping[str, Tensor]) -> None:
        """Overwrite all tables: float32 ``(rows, columns)`` by name, the same on every rank."""
        for name, data in self.located().items():
            for (row, col, rows, cols), tensor in data.shards:
                tensor.copy_(tables[name][row : row + rows, col : col + cols])

    def write_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Overwrite Adagrad's sums: float64 ``(rows,)`` by name, the same on every rank."""
        live = self.sparsifier.sums()
        for name, data in self.located().items():
            for (row, _, rows, _), tensor in data.shards:
                found = live.get(tensor)
                assert found is not None
                found[0].view(-1).copy_(sums[name][row : row + rows])

    def set_level(self, level: float | Mapping[str, float]) -> None:
        """Set the sparsity level, of all tables or by name."""
        for name, group in self.sparsifier.data_groups.items():
            group["sparsity_level"] = level[name] if isinstance(level, Mapping) else level

    def update(self, level: float | Mapping[str, float]) -> None:
        """Update the masks to this level, and wait until the device has done so."""
        self.set_level(level)
        self.sparsifier.step()
        synchronize(self.device)

    def batches(self) -> Iterator[Any]:
        """Yield batches in CPU memory, different ones on each rank."""
        for seed in count(1 + dist.get_rank() * 1_000):
            yield trial_batch(self.trial, seed)

    def train(self, batches: Iterator[Any]) -> None:
        """Train on the next batch, as a plain loop does."""
        loss, _ = self.model(next(batches).to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def reference(self, sums: Mapping[str, Tensor]) -> Reference:
        """Return a sparsifier by torch's operations, with the configuration of this one, for no
        table yet."""
        config = next(iter(self.sparsifier.data_groups.values()))
        reference = Reference(None, config["sparsity_level"], config["sparse_block_shape"])
        reference.sums = sums
        return reference


def random_tables(trial: TrialTables) -> dict[str, Tensor]:
    """Return normal weights, float32, the same on every rank."""
    random = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=random) for name, shape in trial.shapes.items()}


def random_sums(trial: TrialTables, score: str) -> dict[str, Tensor]:
    """Return sums of Adagrad, float64 ``(rows,)``; ones if the score reads none."""
    random = torch.Generator().manual_seed(8)
    found = {}
    for name, (rows, _) in trial.shapes.items():
        sums = torch.rand(rows, generator=random)
        found[name] = (sums if score == "norm_accumulator" else torch.ones(rows)).double()
    return found


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    torch.get_device_module(device).synchronize(device)


def new_stream(device: torch.device) -> Any:
    """Return a stream beside the current one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def sleep(cycles: int) -> None:
    """Have the current stream sleep."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def require_equal_masks(what: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Compare fingerprints of masks by table.

    Raises:
        Difference: with the tables whose masks differ.
    """
    wrong = sorted(name for name in found if found[name] != expected[name])
    if wrong:
        raise Difference(f"{what}: the masks of {wrong} differ from the expected ones")


# The share of all movement by which two runs may differ. Sums in another order differ by 1e-6 of
# it. A row that was not trained, or trained twice, is more than 1e-2 of what a trial moves.
_MOST = 3e-3


def compare_runs(
    what: str, found: Sequence[Tensor], expected: Sequence[Tensor], start: Sequence[Tensor]
) -> str:
    """Return a text of how close the weights of two runs are.

    Args:
        what: what ran, for messages.
        found, expected: the weights at the end of both runs.
        start: the weights at the start of both.

    Raises:
        Difference: not close enough, or the expected run moved nothing.
    """
    moved = _distance(expected, start)
    apart = _distance(found, expected)
    # An empty shard, of a rank without a part of the tables, does not move.
    if any(tensor.numel() for tensor in start) and not moved > 0:
        raise Difference(f"{what}: nothing was trained")
    # Not `apart > ...`, which is False for a NaN.
    if not apart <= _MOST * moved:
        raise Difference(f"{what}: weights differ by {apart / moved:.1e} of what training moved")
    return "bit for bit" if apart == 0 else f"within {apart / moved:.0e}"


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    squares = [
        float((a.double() - b.double()).square().sum()) for a, b in zip(one, other, strict=True)
    ]
    return math.sqrt(sum(squares))


@contextmanager
def waits(mode: str) -> Iterator[None]:
    """Have waits of the host for the device raise (``"error"``) or warn (``"warn"``)."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
