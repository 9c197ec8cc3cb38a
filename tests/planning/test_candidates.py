"""Bytes of candidates are those of real artifacts and of real modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import DataNormSparsifier, export
from dist_sparse.planning.candidates import (
    BY_COLUMN,
    CODED,
    Candidate,
    TableShape,
)
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData
from dist_sparse.training.arguments import dense_bytes

pytest.importorskip("safetensors")

DTYPES: Any = ("fp32", "fp16", "int8", "int4", BY_COLUMN)


def two() -> tuple[nn.Module, list[ShardedData]]:
    """Two tables of one width, and one of an odd one."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"user": nn.Embedding(70, 24), "item": nn.Embedding(33, 24), "odd": nn.EmbeddingBag(40, 7)}
    )
    return model, ModelTables(model).locate()


def check(
    candidate: Candidate, model: nn.Module, tables: Any, path: Path, sparse: Any = None
) -> None:
    form: Any = {"dtype": candidate.dtype}
    if candidate.dtype == BY_COLUMN:
        form = {"dtype": "int4", "scale": "column"}
    elif candidate.dtype in CODED:
        form = {"dtype": "int4"}
    manifest = export(model, sparse, path, **form).manifest
    assert manifest.bytes == (path / "tables.safetensors").stat().st_size
    written = [table.bytes for table in manifest.tables.values()]
    served = candidate.served_bytes(tables)
    assert served.index == sum(2 * each.index for each in written), (
        "in memory each word has a count"
    )
    assert served.scales == sum(each.scales for each in written)
    assert served.books == sum(each.books for each in written)
    assert served.total == served.bases + served.index // 2 + sum(each.after for each in written)


def masked(model: nn.Module, levels: Mapping[str, float], block: Any) -> DataNormSparsifier:
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=block, norm="L2")
    for name in sparsifier.add_model(model):
        sparsifier.data_groups[name]["sparsity_level"] = levels.get(name, 0.0)
    sparsifier.step()
    return sparsifier


def test_dense_and_rows_in_every_dtype(tmp_path: Path) -> None:
    model, tables = two()
    for dtype in DTYPES:
        check(Candidate(dtype=dtype), model, tables, tmp_path / dtype)
    levels = {"user": 0.75, "odd": 0.3}
    sparsifier = masked(model, levels, "row")
    for dtype in DTYPES:
        check(
            Candidate(dtype=dtype, levels=levels),
            model,
            tables,
            tmp_path / f"{dtype}-rows",
            sparsifier,
        )
    assert Candidate(levels=levels).shape(tables[0]) == (18, 24), "round(52.5) rows are removed"


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_within_rows_save_nothing(dtype: Any, tmp_path: Path) -> None:
    """Where each row keeps a block, the file is as large as that of the whole tables."""
    model, tables = two()
    with torch.no_grad():
        model["user"].weight[:, :8] = 9.0  # type: ignore[index]
    check(
        Candidate(dtype=dtype), model, tables, tmp_path / "a", masked(model, {"user": 0.6}, "1x4")
    )


def test_small_dense_tables() -> None:
    tables = [
        TableShape("a", (100, 64)),
        TableShape("b", (10, 16), torch.float16),
        TableShape("c", (10, 2)),
    ]
    small = Candidate(dtype="int8", columns=12 / 64)
    assert [small.shape(table) for table in tables] == [(100, 12), (10, 4), (10, 2)]
    assert small.served_bytes(tables).total == 100 * 16 + 10 * 8 + 10 * 6
    assert dense_bytes(tables) == 100 * 64 * 4 + 10 * 16 * 2 + 10 * 2 * 4


def test_one_row_stays_below_level_1() -> None:
    tables = [TableShape("a", (10, 4))]
    assert [Candidate(levels={"a": level}).shape(tables[0])[0] for level in (0.0, 0.99, 1.0)] == [
        10,
        1,
        0,
    ]


def test_through_json() -> None:
    candidate = Candidate(
        dtype="int8", columns=0.25, groups=(("a", "b"), ("c",)), levels={"d": 0.5}
    )
    read = Candidate(**json.loads(json.dumps(asdict(candidate))))
    assert read == candidate and hash(read) == hash(candidate)
    assert str(read) == "int8, 25.0% of the columns, rotated, d without 50.0% of its rows"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int2"}, "dtype='int2'"),
        ({"columns": 0.0}, "columns=0.0"),
        ({"levels": {"a": 1.5}}, r"levels\['a'\]=1.5"),
    ],
)
def test_what_is_wrong_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Candidate(**wrong)
