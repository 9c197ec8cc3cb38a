"""An error on one rank alone, at any allocation: as in ``tests/dist/test_one_rank_alone.py``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import dist_sparse.extras.codes.coded_training as coded_module
from dist_sparse.extras.codes import quantize
from tests.dist.cells import build, cells, set_weights, weights
from tests.dist.one_rank import Call
from tests.dist.plugin import on_ranks
from tests.dist.test_one_rank_alone import CELL, MOST, WORLD, hooks_of, sweep


def quantizing(folder: Path) -> Call:
    coded_module.LEAST_ROWS = 1  # type: ignore[misc]
    cell = cells(WORLD)[CELL]
    model = build(cell)
    groups = {spec.name: spec.dim // 4 for spec in cell.tables}
    return Call(
        lambda: quantize(model, [], codes=groups, begin=0, every=1),
        lambda: {"model": model, "hooks": hooks_of(model)},
    )


def quantized(again: bool = True) -> tuple[Any, nn.Module]:
    coded_module.LEAST_ROWS = 1  # type: ignore[misc]
    cell = cells(WORLD)["row_wise"]
    model = build(cell)
    groups = {spec.name: spec.dim // 4 for spec in cell.tables}
    handle = quantize(model, [], codes=groups, begin=0, every=1)
    if again:
        handle.step()
    set_weights(model, weights(cell, seed=1))
    return handle, model


def fitting(again: bool) -> Callable[[Path], Call]:
    def made(folder: Path) -> Call:
        handle, model = quantized(again)
        return Call(handle.step, lambda: {"model": model, "handle": handle})

    return made


def loading_codes(folder: Path) -> Call:
    handle, model = quantized()
    state = copy.deepcopy(handle.state_dict())
    handle.step()
    return Call(lambda: handle.load_state_dict(state), lambda: {"model": model, "handle": handle})


CALLS: dict[str, Callable[[Path], Call]] = {
    "quantize": quantizing,
    "quantize, first step": fitting(False),
    "quantize, step": fitting(True),
    "quantize, load": loading_codes,
}


@on_ranks(WORLD)
@MOST
@pytest.mark.parametrize("name", CALLS)
def test_one_allocation_fails(name: str, most: int, tmp_path: Path) -> None:
    sweep(name, CALLS[name], tmp_path, most, None)
