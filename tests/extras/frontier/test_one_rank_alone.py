"""An error on one rank alone, at any allocation: as in ``tests/dist/test_one_rank_alone.py``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dist_sparse.extras.frontier import serving
from dist_sparse.planning.candidates import BY_COLUMN, Candidate
from tests.dist.cells import build, cells
from tests.dist.one_rank import Call
from tests.dist.plugin import on_ranks
from tests.dist.test_one_rank_alone import CELL, MOST, WORLD, sweep


def trying(**options: Any) -> Callable[[Path], Call]:
    def made(folder: Path) -> Call:
        model = build(cells(WORLD)[CELL])
        candidate = Candidate(**options)

        def call() -> None:
            with serving(model, candidate):
                pass

        return Call(call, lambda: {"model": model})

    return made


CALLS: dict[str, Callable[[Path], Call]] = {
    "rows": trying(dtype="int8", levels={"user": 0.7, "word": 0.5}),
    "columns": trying(dtype=BY_COLUMN, levels={"user": 0.7}),
}
if find_spec("dist_sparse.extras.codes") is not None:
    CALLS["codes"] = trying(dtype="codes of 4")


@on_ranks(WORLD)
@MOST
@pytest.mark.parametrize("name", CALLS)
def test_one_allocation_fails(name: str, most: int, tmp_path: Path) -> None:
    sweep(name, CALLS[name], tmp_path, most, None)
