"""An error on one rank alone, at any allocation: as in ``tests/dist/test_one_rank_alone.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dist_sparse import DataNormSparsifier, MaskEnforcer
from dist_sparse.extras.rotation import rotate
from tests.dist.cells import build, cells
from tests.dist.enforcing import optimizer_of
from tests.dist.one_rank import Call
from tests.dist.plugin import on_ranks
from tests.dist.test_one_rank_alone import MOST, WORLD, of, sweep


def rotated_step(folder: Path) -> Call:
    model = build(cells(WORLD)["row_wise"])
    sparsifier = DataNormSparsifier(sparsity_level=0.25, sparse_block_shape="col", norm="L2")
    sparsifier.add_model(model)
    MaskEnforcer(sparsifier, "reset").attach(optimizer_of(model))
    rotate(sparsifier)
    return Call(sparsifier.step, of(sparsifier, model))


def rotating(folder: Path) -> Call:
    model = build(cells(WORLD)["row_wise"])
    sparsifier = DataNormSparsifier(sparsity_level=0.25, sparse_block_shape="col", norm="L2")
    sparsifier.add_model(model)
    return Call(lambda: rotate(sparsifier), of(sparsifier, model))


CALLS: dict[str, Callable[[Path], Call]] = {"step, rotated": rotated_step, "rotate": rotating}

# What a call may leave: tables are rotated, which changes no output.
LEFT = {"step, rotated": r"rotation_of_|\.weight/0$"}


@on_ranks(WORLD)
@MOST
@pytest.mark.parametrize("name", CALLS)
def test_one_allocation_fails(name: str, most: int, tmp_path: Path) -> None:
    sweep(name, CALLS[name], tmp_path, most, LEFT.get(name))
