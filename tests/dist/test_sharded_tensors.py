"""Masks of ShardedTensors and DTensors are the oracle's, for drawn shapes, tilings, blocks,
weights. (C1, C2, C4)

Cases are drawn in the process of pytest, always the same ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dist_sparse import ROW, DataNormSparsifier
from tests.dist.pieces import Piece, gathered, local_tensors, sharded, write
from tests.dist.plugin import on_ranks
from tests.oracle import oracle_blocks, oracle_mask

COUNT = {2: 60, 4: 40}
"""Examples by world."""

LEVELS = (0.0, 0.1, 0.3, 0.5, 0.66, 0.9, 1.0)
PATTERNS = ("random", "ties", "equal", "zeros", "halves", "lower")
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)
MESHES: dict[int, dict[str, list[Any]]] = {
    2: {"line": [0, 1], "turned": [1, 0], "column": [[0], [1]], "row": [[0, 1]]},
    4: {
        "line": [0, 1, 2, 3],
        "turned": [3, 1, 0, 2],
        "square": [[0, 1], [2, 3]],
        "crossed": [[3, 0], [1, 2]],
    },
}


@dataclass(frozen=True)
class Case:
    """One tensor, its tiling, and two steps of a sparsifier over it.

    Args:
        shape: global; (n,) is a 1-D tensor.
        tiling: pieces of a ShardedTensor by rank, or None.
        mesh: of a DTensor, or None.
        placements: of a DTensor: "0" and "1" shard that dimension, "r" replicates; one a mesh
            dimension.
        steps: pattern, seed and level of each step; new weights are written before each.
    """

    shape: tuple[int, ...]
    tiling: tuple[tuple[Piece, ...], ...] | None
    mesh: str | None
    placements: str
    block: tuple[int, int | str]
    zeros: int | None
    norm: str
    dtype: torch.dtype
    steps: tuple[tuple[str, int, float], ...]

    @property
    def matrix(self) -> tuple[int, int]:
        return (1, self.shape[0]) if len(self.shape) == 1 else (self.shape[0], self.shape[1])


@st.composite
def tilings(draw: st.DrawFn, rows: int, cols: int, world: int) -> tuple[tuple[Piece, ...], ...]:
    """Bands of rows, each cut into columns of its own (or all alike), dealt to ranks; some ranks
    get empty pieces."""

    def cut(length: int) -> list[int]:
        inner = (
            draw(st.lists(st.integers(1, length - 1), unique=True, max_size=4))
            if length > 1
            else []
        )
        return [0, *sorted(inner), length]

    bands, alike = cut(rows), cut(cols)
    brick = draw(st.booleans())
    held: list[list[Piece]] = [[] for _ in range(world)]
    for top, bottom in itertools.pairwise(bands):
        columns = cut(cols) if brick else alike
        for left, right in itertools.pairwise(columns):
            pieces = held[draw(st.integers(0, world - 1))]
            pieces.insert(
                draw(st.integers(0, len(pieces))), (top, left, bottom - top, right - left)
            )
    for pieces in held:
        if draw(st.integers(0, 3)) == 0:
            pieces.append((0, cols, rows, 0) if rows == 1 else (rows, 0, 0, cols))
    return tuple(tuple(pieces) for pieces in held)


@st.composite
def cases(draw: st.DrawFn, world: int) -> Case:
    rows, cols = draw(st.integers(1, 30)), draw(st.integers(1, 20))
    flat = draw(st.integers(0, 7)) == 0
    rows = 1 if flat else rows
    height = draw(st.sampled_from([1, 1, 2, 3, 4, 8, 40]))
    width: int | str = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 30, ROW, ROW]))
    tiling = mesh = None
    placements = ""
    if draw(st.booleans()):
        tiling = draw(tilings(rows, cols, world))
    else:
        mesh = draw(st.sampled_from(sorted(MESHES[world])))
        dims = 1 if isinstance(MESHES[world][mesh][0], int) else 2
        letters = st.sampled_from("0r" if flat else "01r")
        placements = "".join(draw(letters) for _ in range(dims))
    columns_cut = tiling is not None or "1" in placements or (flat and "0" in placements)
    area = height * (cols if width == ROW else int(width))
    zeros = None
    if area > 1 and draw(st.booleans()):
        zeros = draw(st.integers(0, area))
        if columns_cut and zeros < area:
            width = 1  # a border may not cut blocks that lose some elements only
            zeros = draw(st.integers(0, height))
    steps = [
        (draw(st.sampled_from(PATTERNS)), draw(st.integers(0, 9)), draw(st.sampled_from(LEVELS)))
        for _ in range(2)
    ]
    return Case(
        shape=(cols,) if flat else (rows, cols),
        tiling=tiling,
        mesh=mesh,
        placements=placements,
        block=(height, width),
        zeros=zeros,
        norm=draw(st.sampled_from(["L1", "L2"])),
        dtype=draw(st.sampled_from(DTYPES)),
        steps=tuple(steps),
    )


def drawn(world: int) -> dict[str, Case]:
    """The same cases at each call, simple ones first."""
    found: list[Case] = []

    @settings(
        max_examples=COUNT[world],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(world))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return {f"drawn {i}": case for i, case in enumerate(dict.fromkeys(found))}


def known(world: int) -> dict[str, Case]:
    """What breaks things, whatever is drawn."""
    ties = ("ties", 1, 0.5), ("halves", 2, 0.66)
    zeros = ("equal", 1, 0.3), ("zeros", 2, 0.5)

    def tiled(
        *pieces: list[Piece],
        shape: tuple[int, ...],
        block: Any = (1, ROW),
        keep: Any = None,
        **more: Any,
    ) -> Case:
        tiling = tuple(map(tuple, [*pieces, *[[] for _ in range(world - len(pieces))]]))
        return Case(
            shape, tiling, None, "", block, keep, "L1", torch.float32, **{"steps": ties, **more}
        )

    def meshed(mesh: str, placements: str, block: Any, keep: Any = None, **more: Any) -> Case:
        return Case(
            (13, 10),
            None,
            mesh,
            placements,
            block,
            keep,
            "L2",
            torch.float32,
            **{"steps": ties, **more},
        )

    thirds: list[Piece] = [(3, 0, 3, 6), (0, 0, 3, 6), (6, 0, 1, 6)]
    made = {
        "three pieces on one rank, in another order": tiled(thirds, shape=(7, 6), block=(2, 4)),
        "an empty piece on each rank": tiled(
            [(0, 0, 7, 6), (7, 0, 0, 6)], [(0, 6, 7, 0)], shape=(7, 6)
        ),
        "slabs: zeros_per_block over row borders": tiled(
            [(0, 0, 3, 9), (8, 0, 2, 9)], [(3, 0, 5, 9)], shape=(10, 9), block=(4, 3), keep=5
        ),
        "a slab over three pieces": tiled(thirds, shape=(7, 6), block=(40, 4), keep=9),
        "a block over a cross of borders": tiled(
            [(0, 0, 3, 4), (3, 4, 4, 2)],
            [(0, 4, 3, 2), (3, 0, 4, 4)],
            shape=(7, 6),
            block=(5, 5),
            steps=zeros,
        ),
        "bricks": tiled(
            [(0, 0, 3, 4), (3, 2, 4, 4)], [(0, 4, 3, 2), (3, 0, 4, 2)], shape=(7, 6), block=(2, 3)
        ),
        "one block": tiled(
            [(0, 0, 3, 6)], [(3, 0, 4, 6)], shape=(7, 6), block=(40, 30), steps=ties[::-1]
        ),
        "vector": tiled([(0, 0, 1, 5)], [(0, 5, 1, 8)], shape=(13,), block=(1, 4)),
        "shard 1": meshed("line", "1", (2, 3)),
        "shard 1, mesh turned": meshed("turned", "1", (1, ROW), steps=zeros),
        "shard 0, mesh turned": meshed("turned", "0", (4, 3), 5),
        "replicas": meshed("line", "r", (3, 4), 7),
    }
    if world == 4:
        made |= {
            "grid": meshed("square", "01", (3, 4)),
            "grid, mesh crossed": meshed("crossed", "10", (2, 3), steps=zeros),
            "spread replicas by rows": meshed("square", "r0", (2, 3), steps=zeros),
            # All that tie is known to rank 1: its shard, and the row of blocks above that is cut.
            # Rank 3, its replica, knows the shard alone.
            "spread replicas, ties in a cut row": meshed(
                "square", "r0", (2, 3), steps=(("lower", 1, 0.3), ("lower", 1, 0.4))
            ),
            "spread replicas by columns": meshed("crossed", "1r", (1, ROW), steps=zeros),
            "spread replicas, elements": meshed("square", "0r", (3, 4), 5, steps=ties),
        }
    return made


def weights(case: Case, pattern: str, seed: int) -> Tensor:
    """The global matrix of one step."""
    made = torch.randn(case.matrix, generator=torch.Generator().manual_seed(seed))
    made = {
        "random": lambda w: w,
        "ties": lambda w: (w * 2).round(),
        "equal": lambda w: torch.full_like(w, -0.25),
        "zeros": lambda w: torch.where(torch.arange(w.shape[0]).unsqueeze(1) % 3 == 0, w, -0.0),
        "halves": lambda w: torch.where(w > 0, 1.0, w),
        "lower": lambda w: torch.where(
            torch.arange(w.shape[0]).unsqueeze(1) < w.shape[0] // 2 - 1, 5.0, 0.25 + 0 * w
        ),
    }[pattern](made)
    return made.to(case.dtype)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:  # here, so that ranks need not draw them too
        found = [
            (world, name, case)
            for world in COUNT
            for name, case in (known(world) | drawn(world)).items()
        ]
        ids = [f"{world}-{name}" for world, name, _ in found]
        metafunc.parametrize(
            ("world", "case"), [(world, case) for world, _, case in found], ids=ids
        )


@on_ranks()
def test_masks_equal_the_oracle(world: int, case: Case) -> None:
    """On two mask updates, with weights written in between."""
    first = weights(case, *case.steps[0][:2])
    full = first.view(case.shape)
    if case.tiling is not None:
        tensor: Any = sharded(full, case.tiling)
    else:
        placements = [
            Replicate() if letter == "r" else Shard(int(letter)) for letter in case.placements
        ]
        tensor = distribute_tensor(full, meshes()[case.mesh], placements, src_data_rank=None)
    sparsifier = DataNormSparsifier(None, 0.5, case.block, case.zeros, case.norm)
    sparsifier.add_data("it", tensor)
    for pattern, seed, level in case.steps:
        before = weights(case, pattern, seed)
        write(tensor, before)
        sparsifier.data_groups["it"]["sparsity_level"] = level
        sparsifier.step()
        want = oracle_mask(before, level, case.block, case.zeros, case.norm)
        got = sparsifier.full_mask("it")
        assert torch.equal(got, want), (
            f"{pattern}, {level}: {int((got != want).sum())} elements differ"
        )
        for (row, col), mask in sparsifier.local_masks("it"):
            assert torch.equal(mask, want[row : row + mask.shape[0], col : col + mask.shape[1]])
        after = gathered(tensor)
        assert torch.equal(
            after, torch.where(want.bool(), before, torch.zeros((), dtype=case.dtype))
        )
        alone = DataNormSparsifier([("it", before)], level, case.block, case.zeros, case.norm)
        alone.step()
        assert torch.equal(alone.get_mask("it"), want)
    assert sparsifier.audit() == alone.fingerprint()
    check_stats(case, sparsifier, tensor, want, level)


def check_stats(
    case: Case, sparsifier: DataNormSparsifier, tensor: Any, want: Tensor, level: float
) -> None:
    """Counts over all ranks: cut blocks and replicas once, but the mask bytes of each holder."""
    [stats] = sparsifier.table_stats()
    rows, cols = case.matrix
    height, width = case.block[0], cols if case.block[1] == ROW else int(case.block[1])
    blocks = oracle_blocks(case.matrix, case.block)
    removed = round(level * blocks)
    if case.zeros is not None and case.zeros < height * width:  # a mask of single elements
        height = width = 1
        blocks, removed = rows * cols, int((want == 0).sum())
    pieces = [(at, tuple(local.shape)) for at, local in local_tensors(tensor) if local.numel()]
    mine = sum(
        math.ceil(
            (math.ceil((row + high) / height) - row // height)
            * (math.ceil((col + wide) / width) - col // width)
            / 8
        )
        for (row, col), (high, wide) in pieces
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, pieces))
    assert (stats.blocks, stats.removed_blocks) == (blocks, removed)
    assert (stats.shape, stats.dtype, stats.target) == ((rows, cols), case.dtype, level)
    assert stats.shards == len({piece for _, held in everyone for piece in held})
    assert stats.mask_bytes == sum(number for number, _ in everyone)
    assert stats.table_bytes == rows * cols * case.dtype.itemsize
    assert stats.kept_bytes == int(want.sum()) * case.dtype.itemsize
    assert stats.sparsity == removed / blocks


@functools.cache
def meshes() -> dict[str, DeviceMesh]:
    """All of this world, at the same time on all ranks: each makes process groups."""
    return {name: DeviceMesh("cpu", ranks) for name, ranks in MESHES[dist.get_world_size()].items()}
