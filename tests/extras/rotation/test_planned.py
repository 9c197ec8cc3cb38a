"""What a plan prints for rotated columns makes what was planned, and takes these bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import Advanced, compact, plan, sparsify
from dist_sparse.extras.rotation import Rotation
from dist_sparse.planning.candidates import Candidate
from dist_sparse.tables.shards import ShardedData
from tests.planning.test_candidates import DTYPES, check, two
from tests.planning.test_plan import paste, trained, used

pytest.importorskip("safetensors")


def narrowed(groups: Any) -> tuple[nn.Module, list[ShardedData]]:
    """The model with a third of the columns of two tables, and its tables as they were."""
    model, tables = two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: Any = {
        "level": 1 - 0.3,
        "block": "col",
        "schedule": "one_shot",
        "exclude": "odd",
        "advanced": Advanced(rotate=Rotation(groups)),
    }
    sparse = sparsify(model, optimizer, end=1, **how)
    sparse.step()
    return compact(model, sparse), tables


def test_narrow_tables(tmp_path: Path) -> None:
    groups = (("user", "item"),)
    model, tables = narrowed(groups)
    for dtype in DTYPES:
        candidate = Candidate(dtype=dtype, columns=0.3, groups=groups)
        assert [candidate.shape(table) for table in tables] == [(70, 8), (33, 8), (40, 7)], (
            "of 7 columns"
        )
        check(candidate, model, tables, tmp_path / dtype)


def test_tables_that_are_turned_back() -> None:
    model, tables = narrowed("table")
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    candidate = Candidate(columns=0.3, groups=(("user",), ("item",)))
    served = candidate.served_bytes(tables)
    assert (served.total, served.bases) == (held, 2 * 24 * 8 * 4)


def test_what_is_printed_makes_what_was_planned(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD)
    answer = plan(model, "13%", rotate=[["user", "cross"]])
    assert used(answer)[:2] == [("columns", "int8", 4), ("columns", "int4", 8)]
    made = paste(answer, 2, model, optimizer, tmp_path)["model"]
    assert made.user.weight.shape == (50, 8) and made.cross.weight.shape == (1000, 8)


def test_what_is_printed_fits_tables_of_a_few_rows(tmp_path: Path) -> None:
    """sparsify() leaves tables of fewer than 16 rows dense, unless it is asked not to."""
    model = nn.ModuleDict({"user": nn.EmbeddingBag(64, 16), "country": nn.EmbeddingBag(10, 16)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answer = plan(model, "13%", rotate=[["user", "country"]])
    assert "min_rows=0" in str(answer)
    made = paste(answer, 2, model, optimizer, tmp_path)["model"]
    assert made["country"].weight.shape == (10, 8)
