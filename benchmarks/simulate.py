"""What a mask update costs on more ranks than there are: collectives, bytes, memory, milliseconds.

The library's own code runs as the rank that holds most, on tables of random weights, over a process
group whose other ranks send nothing. So the counts are those of a real run, and the local part is
measured on this machine. Only the time on the network is a formula.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from dist_sparse import checks
from dist_sparse.sparsifiers.score import BlockShape, DataNormSparsifier, Norm
from dist_sparse.tables.shards import Rect, Shard, ShardedData, grid_of, resolve_block
from dist_sparse.text import number_of, size, table_lines

__all__ = ["Prediction", "Sharding", "Simulation", "simulate"]

Sharding: TypeAlias = Literal["row_wise", "column_wise", "table_wise"]
_SHARDINGS = ("row_wise", "column_wise", "table_wise")

_BACKEND = "dist_sparse_simulated"
_TIES = 3 * 2048 * 8
"""Bytes of three histograms of 2048 buckets, int64."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One mask update on one number of ranks, of the rank that holds most weights.

    Attributes:
        world: number of ranks.
        collectives: how many it takes part in, if no scores tie over ranks at a threshold.
        sent: bytes that the rank hands to them; a threshold that is found early saves up to 16 KiB
            a table.
        tied: bytes that it sends in addition, at most, in three more all-reduces, where scores tie
            over ranks.
        weights: bytes of its shards.
        masks: bytes of its masks, which stay.
        scores: bytes of its scores during the update: 4 for each block of more than one element.
        local_ms: measured here.
        network_ms: by the formulas of :func:`simulate`.
    """

    world: int
    collectives: int
    sent: int
    tied: int
    weights: int
    masks: int
    scores: int
    local_ms: float
    network_ms: float

    @property
    def milliseconds(self) -> float:
        """Time of the whole update."""
        return self.local_ms + self.network_ms


@dataclass(frozen=True)
class Simulation:
    """Predictions by number of ranks. ``str()`` is a table of them."""

    predictions: tuple[Prediction, ...]

    def __str__(self) -> str:
        head = [
            "ranks",
            "collectives",
            "sent",
            "ties",
            "weights",
            "masks",
            "scores",
            "local",
            "network",
            "update",
        ]
        rows = [
            [
                f"{p.world:,}",
                str(p.collectives),
                *(size(count) for count in (p.sent, p.tied, p.weights, p.masks, p.scores)),
                *(f"{ms:.2f} ms" for ms in (p.local_ms, p.network_ms, p.milliseconds)),
            ]
            for p in self.predictions
        ]
        return "\n".join(table_lines(head, rows, right=range(len(head))))


def simulate(
    tables: Mapping[str, tuple[int, int]],
    worlds: Sequence[int],
    *,
    latency: float,
    bandwidth: float,
    sharding: Sharding = "row_wise",
    level: float = 0.8,
    block: BlockShape = "row",
    norm: Norm = "L2",
) -> Simulation:
    """Predict what a mask update costs on each number of ranks, with float32 tables and the same
    sharding for all.

    With W ranks, a latency of a seconds and b bytes a second, messages of n bytes take

    - all-reduce: ``2 log2(W) a + 2 (W - 1) / W n / b``,
    - all-gather: ``log2(W) a + (W - 1) n / b``,
    - all-to-all: ``(W - 1) a + n / b``, with n the larger of what the rank sends and receives

    (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
    MPICH", 2005). A network that is shared, or slower between hosts than within one, takes longer:
    give the part that a rank gets.

    Args:
        tables: name -> (rows, columns).
        worlds: numbers of ranks, each from 1 to 10,000.
        latency: of a message, in seconds.
        bandwidth: of a rank, in bytes a second.
        sharding: cut as TorchRec cuts them. Column-wise: into as many equal shards of a multiple of
            4 columns as there are ranks for; table-wise: one table after the other to the next
            rank.
        level: sparsity level that the update reaches.
        block, norm: as in :class:`~dist_sparse.DataNormSparsifier`.

    Raises:
        ValueError: an argument is invalid, or the shards of the rank that holds most do not fit
            into half of the free memory.
        RuntimeError: torch.distributed is initialized in this process already.

    Example::

        >>> from benchmarks.simulate import simulate
        >>> found = simulate({"user": (4096, 16), "item": (8192, 16)}, [2, 1000], latency=10e-6, bandwidth=10e9)
        >>> [(p.world, p.collectives, p.sent) for p in found.predictions]
        [(2, 4, 65584), (1000, 4, 65584)]
    """
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "simulate() makes a process group of its own: call it where none is initialized."
        )
    if not tables:
        raise ValueError(f"Invalid {tables=}: must have a table.")
    for name, shape in tables.items():
        for side, value in zip(("rows", "columns"), shape, strict=True):
            checks.integer(side, value, least=1, of=name)
    checks.choice("sharding", sharding, _SHARDINGS)
    network = (
        checks.number("latency", latency, least=0),
        checks.number("bandwidth", bandwidth, least=1),
    )
    level = checks.level("level", level)
    sizes = [checks.integer("worlds", world, least=1, most=10_000) for world in worlds]
    arguments = {"sparse_block_shape": block, "norm": norm}
    return Simulation(
        tuple(_predict(tables, world, sharding, level, arguments, network) for world in sizes)
    )


def _predict(
    shapes: Mapping[str, tuple[int, int]],
    world: int,
    sharding: str,
    level: float,
    arguments: Mapping[str, Any],
    network: tuple[float, float],
) -> Prediction:
    tilings = {
        name: _tiling(shape, world, sharding, i) for i, (name, shape) in enumerate(shapes.items())
    }
    elements = [
        sum(rect.numel for tiling in tilings.values() for rect in tiling[rank])
        for rank in range(world)
    ]
    rank = elements.index(max(elements))
    _check_fits(4 * elements[rank], world, rank)
    with _world(rank, world) as messages:
        source = _Tables(shapes, tilings, rank)
        located = source.locate()
        sparsifier = DataNormSparsifier(**arguments)
        shape = sparsifier.defaults["sparse_block_shape"]
        blocks = {data.name: resolve_block(data.name, shape, data.shape) for data in located}
        tables = sparsifier.masks.tables
        tables.add(tables.new(source, located, blocks, None))
        for data in located:
            sparsifier.data_groups[data.name] = dict(sparsifier.defaults)
        best = math.inf
        for lower in (0.02, 0.01, 0.0):
            for data in located:
                known = _known_level(data, blocks[data.name], max(level - lower, 0.0), rank)
                sparsifier.data_groups[data.name]["sparsity_level"] = known
            start = time.perf_counter()
            sparsifier.step()
            best = min(best, time.perf_counter() - start)
        # For the counts the true level, and scores that differ in their last bits alone, so that
        # every search takes all its rounds and none ties.
        for data in located:
            sparsifier.data_groups[data.name]["sparsity_level"] = level
            for shard in data.shards:
                _number_blocks_(shard.tensor, blocks[data.name])
        messages.clear()
        sparsifier.step()
        masks = sum(
            grid_of(shard.rect, blocks[data.name]).bytes
            for data in located
            for shard in data.shards
        )
        scores = 0
        for data in located:
            if blocks[data.name] != (1, 1):
                scores += sum(
                    4 * grid_of(shard.rect, blocks[data.name]).blocks for shard in data.shards
                )
    return Prediction(
        world=world,
        collectives=len(messages),
        sent=sum(sent for _, sent, _ in messages),
        tied=0 if world == 1 else _TIES * len(located),
        weights=4 * elements[rank],
        masks=masks,
        scores=scores,
        local_ms=1e3 * best,
        network_ms=1e3 * sum(_seconds(*message, world, *network) for message in messages),
    )


def _number_blocks_(weights: Tensor, block: tuple[int, int]) -> None:
    """Give all weights of a block the same value: 1 + number of the block * 2**-23."""
    rows = torch.arange(weights.shape[0]) // block[0]
    columns = torch.arange(weights.shape[1]) // block[1]
    # In place: the weights take most of the memory.
    weights.copy_(columns).add_(rows.unsqueeze(1) * (columns[-1] + 1)).mul_(2.0**-23).add_(1)


def _known_level(data: ShardedData, block: tuple[int, int], level: float, rank: int) -> float:
    """The level at which the whole table loses as many blocks as this rank's part of it does at
    ``level``: the blocks of other ranks are not known here, and are kept."""
    part = sum(rect.numel for rect in data.owned(rank)) / (data.shape[0] * data.shape[1])
    return level * part


def _tiling(
    shape: tuple[int, int], world: int, sharding: str, number: int
) -> tuple[tuple[Rect, ...], ...]:
    rows, columns = shape
    if sharding == "table_wise":
        return tuple(
            (Rect(0, 0, rows, columns),) if rank == number % world else () for rank in range(world)
        )
    if sharding == "row_wise":
        height = -(-rows // world)
        starts = [min(rank * height, rows) for rank in range(world + 1)]
        pairs = itertools.pairwise(starts)
        return tuple(
            (Rect(start, 0, end - start, columns),) if end > start else () for start, end in pairs
        )
    cuts = next((n for n in range(min(world, columns // 4), 1, -1) if columns % (4 * n) == 0), 1)
    width = columns // cuts
    return tuple(
        (Rect(0, rank * width, rows, width),) if rank < cuts else () for rank in range(world)
    )


def _check_fits(need: int, world: int, rank: int) -> None:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > free // 2:
        raise ValueError(
            f"With {number_of(world, 'rank')}, rank {rank} holds {size(need)} of weights, more than"
            f" half of the {size(free)} that are free here: simulate more ranks or fewer tables."
        )


def _seconds(
    operation: str, sent: int, received: int, world: int, latency: float, bandwidth: float
) -> float:
    rounds = math.log2(world)
    if operation == "all_reduce":
        return 2 * rounds * latency + 2 * (world - 1) / world * sent / bandwidth
    if operation == "all_gather":
        return rounds * latency + (world - 1) * sent / bandwidth
    return (world - 1) * latency + max(sent, received) / bandwidth


class _Tables:
    """Random weights of the shards of one rank."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        tilings: Mapping[str, tuple[tuple[Rect, ...], ...]],
        rank: int,
    ) -> None:
        fill = torch.Generator().manual_seed(0)
        self._tables = {}
        for name, shape in shapes.items():
            shards = [
                Shard(rect, torch.randn(rect.rows, rect.cols, generator=fill))
                for rect in tilings[name][rank]
            ]
            world = len(tilings[name])
            self._tables[name] = ShardedData(
                name=name,
                fqn=name,
                shape=shape,
                dtype=torch.float32,
                sharding="simulated",
                ranks=tuple(range(world)) if world > 1 else None,
                tiling=tilings[name],
                shards=tuple(shards),
            )

    def locate(self, names: Collection[str] | None = None) -> list[ShardedData]:
        return list(self._tables.values())

    def find(self, name: str) -> ShardedData:
        return self._tables[name]


class _Others(dist.ProcessGroup):
    """A process group of which this process is one rank. The other ranks agree to everything and
    send zeros.

    torch's own fake process group fails in an all-to-all where a rank receives but sends nothing.
    """

    def __init__(self, rank: int, world: int, messages: list[tuple[str, int, int]]) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._messages = messages

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        return self._done("all_reduce", tensors[0], tensors[0])

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self._done("all_gather", inputs[0], inputs[0])

    def alltoall_base(
        self, output: Tensor, sent: Tensor, received: Any, sending: Any, *options: Any
    ) -> Any:
        output.zero_()
        mine = torch.split(sent, list(sending))[self.rank()]
        torch.split(output, list(received))[self.rank()].copy_(mine)
        return self._done("all_to_all", sent, output)

    def _done(self, operation: str, sent: Tensor, received: Tensor) -> Any:
        self._messages.append((operation, sent.nbytes, received.nbytes))
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return c10d._create_work_from_future(future)  # type: ignore[attr-defined]


@contextmanager
def _world(rank: int, world: int) -> Iterator[list[tuple[str, int, int]]]:
    """Make this process a rank of such a world. Yields the messages: operation, bytes sent, bytes
    received."""
    messages: list[tuple[str, int, int]] = []
    if world == 1:
        yield messages
        return

    def create(store: object, rank: int, world: int, timeout: object) -> dist.ProcessGroup:
        return _Others(rank, world, messages)

    dist.Backend.register_backend(_BACKEND, create, devices=["cpu"])
    hook = sys.excepthook  # init_process_group() replaces it
    dist.init_process_group(_BACKEND, store=c10d.HashStore(), rank=rank, world_size=world)
    try:
        yield messages
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
