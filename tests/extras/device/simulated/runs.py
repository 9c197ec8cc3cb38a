"""A model that trains with masks, on the CPU or on the device that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dist_sparse import ImportanceSparsifier, MaskEnforcer
from dist_sparse.extras.device import kernels
from tests.extras.device.simulated.account import Spent
from tests.extras.device.simulated.fake import counting, cuda, fake_cuda, inner
from tests.extras.device.simulated.tables import Collection, Kernel, Layout, one_rank, standing_in

__all__ = ["BLOCKS", "Run", "on_device", "small_programs"]

BLOCKS: Final = {"row": (1, "ROW"), "1x4": (1, 4), "2x2": (2, 2), "1x1": (1, 1)}


@contextlib.contextmanager
def on_device() -> Iterator[None]:
    """The device, and tables that may be on it."""
    with fake_cuda(), standing_in():
        yield


@contextlib.contextmanager
def small_programs() -> Iterator[None]:
    """Inside it, on the device, a launch has a few programs of many small tiles each, and several
    copies of its histograms: as for large tables."""
    with (
        mock.patch.object(kernels, "TILE", 512),
        mock.patch.object(kernels, "PROGRAMS", 5),
        mock.patch.object(kernels, "_SHARED", 64),
    ):
        yield


class Run:
    """A sparsifier and its enforcer over the tables of one collection.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        block: of the masks.
        layouts: of the tables; by default two tables of 3,000 x 128 in a world of one.
        rank: of this process.
        level: the sparsity level.
        score: of :class:`~dist_sparse.ImportanceSparsifier`.
        enforcer: options of the enforcer.
        kind: of kernel, :class:`Kernel` or one that caches rows or returns sequences.
        finer: blocks of tables with others.
        **options: of the sparsifier.
    """

    def __init__(
        self,
        device: str,
        block: Any,
        layouts: Sequence[Layout] | None = None,
        rank: int = 0,
        level: float = 0.5,
        score: str = "norm",
        enforcer: dict[str, Any] | None = None,
        kind: type[Kernel] = Kernel,
        finer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.device = device
        self.layouts = layouts or [one_rank(3_000, 128)] * 2
        generator = torch.Generator().manual_seed(0)
        # Whole tables on every rank, so that shards are parts of the same ones.
        tables = [torch.randn(layout.shape, generator=generator) for layout in self.layouts]
        shards = [
            layout.shard(table, rank) for layout, table in zip(self.layouts, tables, strict=True)
        ]
        self.model = Collection(self.layouts, shards, rank, device == "cuda", kind)
        self.sparsifier = ImportanceSparsifier(
            sparsity_level=level, sparse_block_shape=block, score=score, norm="L2", **options
        )
        self.sparsifier.add_model(
            self.model,
            config={name: {"sparse_block_shape": shape} for name, shape in (finer or {}).items()},
        )
        self.enforcer = MaskEnforcer(self.sparsifier, **(enforcer or {})).attach()
        self._turn = rank

    @property
    def kernel(self) -> Kernel:
        return self.model.kernel

    def features(self, bags: int = 8, each: int = 4, weighted: bool = False) -> KeyedJaggedTensor:
        """Return the next batch; its offsets are known, as after TorchRec's input distribution."""
        self._turn += 2
        generator = torch.Generator().manual_seed(self._turn)
        keys = [f"f{number}" for number in range(len(self.layouts))]
        rows = [shape[0] for shape in self.kernel.shapes]
        ids = [torch.randint(count, (bags * each,), generator=generator) for count in rows]
        put: Callable[[Tensor], Tensor] = cuda if self.device == "cuda" else lambda t: t
        lengths = torch.full((len(keys) * bags,), each)
        weights = torch.randn(len(lengths) * each, generator=generator)
        batch = KeyedJaggedTensor(
            keys,
            put(torch.cat(ids)),
            put(weights) if weighted else None,
            lengths=put(lengths),
            stride=bags,
        )
        batch.offsets()
        return batch

    def train(self, steps: int = 1) -> None:
        """Take ordinary training steps."""
        for _ in range(steps):
            self._step(self.features())

    def ordinary_step(self) -> Spent:
        """Take one, and return what it costs beside the kernels of FBGEMM."""
        features = self.features()
        with counting() as meter:
            self._step(features)
        return meter.spent

    def update(self, level: float | None = None) -> Spent:
        """Update the masks, and return what that costs."""
        if level is not None:
            for group in self.sparsifier.data_groups.values():
                group["sparsity_level"] = level
        with counting() as meter:
            self.sparsifier.step()
        return meter.spent

    def masks(self) -> list[Tensor]:
        """The bits of all masks, in CPU memory."""
        tables = self.sparsifier.masks.tables
        return [inner(mask.bits) for name in tables.names for mask in tables.masks(name)]

    def weights(self) -> list[Tensor]:
        """The tables once everything removed is zero, in CPU memory."""
        self.enforcer.settle()
        return [table.clone() for table in self.kernel.rows()]

    def _step(self, features: KeyedJaggedTensor) -> None:
        self.model(features).square().sum().backward()
