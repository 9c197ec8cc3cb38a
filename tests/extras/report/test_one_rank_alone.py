"""An error on one rank alone, at any allocation: as in ``tests/dist/test_one_rank_alone.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dist_sparse.extras.report import RunLog
from tests.dist.one_rank import Call, short_timeout
from tests.dist.plugin import on_ranks
from tests.dist.test_one_rank_alone import MOST, WORLD, of, sparsified, sweep


def logging(folder: Path) -> Call:
    sparsifier, model = sparsified()
    made = iter(range(10_000))
    return Call(
        lambda: RunLog(folder / str(next(made)), sparsifier, model=model), of(sparsifier, model)
    )


def closing(folder: Path) -> Call:
    sparsifier, model = sparsified()
    made = iter(range(10_000))
    logs: list[RunLog] = []

    def opened() -> dict[str, Any]:
        if sparsifier.masks.recorder is None:
            logs.append(RunLog(folder / str(next(made)), sparsifier, model=model))
        return {"others": model}

    opened()
    return Call(lambda: logs[-1].close(), opened)


CALLS: dict[str, Callable[[Path], Call]] = {"RunLog": logging, "RunLog.close": closing}


@on_ranks(WORLD)
@MOST
@pytest.mark.parametrize("name", CALLS)
def test_one_allocation_fails(name: str, most: int, tmp_path: Path) -> None:
    sweep(name, CALLS[name], tmp_path, most, None)


@on_ranks(WORLD)
def test_a_run_log_without_a_sparsifier_on_one_rank(tmp_path: Path) -> None:
    sparsifier, model = sparsified()
    with short_timeout(), pytest.raises(ValueError, match="sparsifier"):
        RunLog(tmp_path, sparsifier if dist.get_rank() else None, model=model)
