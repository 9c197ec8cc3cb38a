"""Deltas of tables whose mask updates are undone: rows that come back are written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_sparse import export, sparsify
from dist_sparse.extras.guard import Guard
from dist_sparse.serving.chain import merge
from tests.dist.cells import build
from tests.dist.enforcing import optimizer_of, trained_cells
from tests.dist.plugin import on_ranks
from tests.dist.test_importance import learn
from tests.keywords import nested
from tests.serving.stored import crcs


@on_ranks(1)
@pytest.mark.parametrize("undoes", [False, True])
def test_another_sparsifier_on_the_same_tables_of_a_kernel(undoes: bool, tmp_path: Path) -> None:
    """It zeroes rows, and brings rows back, that only the first one notes."""
    cell = trained_cells(1)["table_wise"]
    model = build(cell)
    optimizer = optimizer_of(model)
    plan: Any = {"block": "row", "end": 8, "every": 1, "min_rows": 0, "schedule": "linear"}
    mine = sparsify(model, optimizer, **nested(level=0.5, include="*user*", **plan))
    guard = Guard()
    other = sparsify(model, optimizer, **nested(level=0.8, include="*item*", guard=guard, **plan))
    guard.check(0.75)
    export(model, mine, tmp_path / "base")
    export(model, mine, tmp_path / "1", since=tmp_path / "base")
    learn(model, optimizer, cell, 0)
    for _ in range(2):
        other.step()
        guard.check(0.75)
    other.step()
    if undoes:
        export(model, mine, tmp_path / "2", since=[tmp_path / "base", tmp_path / "1"])
        assert not guard.check(0.5)
    folders = sorted(tmp_path.iterdir(), key=lambda folder: (folder.name != "base", folder.name))
    export(model, mine, tmp_path / "last", since=folders)
    export(model, mine, tmp_path / "full")
    merge(*folders, tmp_path / "last", out=tmp_path / "merged")
    assert crcs(tmp_path / "merged") == crcs(tmp_path / "full")
    mine.detach()
    other.detach()
