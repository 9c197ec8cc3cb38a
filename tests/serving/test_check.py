"""The check of an artifact: it finds what differs from the model, and artifacts that are whole but
wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import DataNormSparsifier, export
from dist_sparse.serving import export as export_module
from dist_sparse.serving.artifact import ArtifactWriter, Opened, open_artifact
from dist_sparse.serving.chain import MappedTable, check_artifact, compare_rows
from dist_sparse.serving.encodings import decode, encode
from tests.serving.stored import put

DTYPES = ("fp32", "fp16", "int8", "int4")


def exported(
    path: Path, dtype: Any, block: Any = "row", since: Path | None = None
) -> tuple[Opened, torch.Tensor]:
    """An artifact of one table, and the weights of the model."""
    torch.manual_seed(0)
    model = nn.Embedding(60, 8)
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=block, norm="L2")
    sparsifier.add_model(model)
    sparsifier.step()
    export(model, sparsifier, path, dtype, since=since)
    return open_artifact(path), model.weight.data


def compare(artifact: Opened, rows: torch.Tensor) -> None:
    """Rows of a model with what an artifact stores."""
    table = MappedTable(artifact, "weight")
    compare_rows("weight", 0, rows, {**table.whole, **table.base_rows}, table.entry)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", ["row", (1, 4)], ids=str)
def test_what_differs_is_found(tmp_path: Path, dtype: str, block: Any) -> None:
    artifact, weight = exported(tmp_path / "served", dtype, block)
    rows = weight[weight.any(1)]
    compare(artifact, rows)
    for row, column in (rows[9:10] != 0).nonzero() + torch.tensor([9, 0]):
        wrong = rows.clone()
        if dtype in ("fp32", "fp16"):
            wrong[row, column] *= 1 + (2.0**-22 if dtype == "fp32" else 2.0**-9)
        else:
            wrong[row, column] += float(artifact.tensors("weight")["scale_bias"][row, 0]) * 1.01
        with pytest.raises(ValueError, match=rf"the kept row {row} serves .* in column {column}"):
            compare(artifact, wrong)
    if block != "row":
        row, column = (rows == 0).nonzero()[3]
        wrong = rows.clone()
        wrong[row, column] = 1.0
        with pytest.raises(ValueError, match=f"the kept row {row} serves 0.0 in column {column}"):
            compare(artifact, wrong)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_zeros_must_be_exact(tmp_path: Path, dtype: str) -> None:
    """A quarter of a step is not: here everything else is served exactly."""
    artifact, weight = exported(tmp_path / "served", dtype, (1, 4))
    kept = weight.any(1)
    tail = artifact.tensors("weight")["scale_bias"].clone()
    tail[:, 1] += tail[:, 0] / 4
    rewritten(artifact, tmp_path / "shifted", scale_bias=tail)
    shifted = open_artifact(tmp_path / "shifted")
    table = MappedTable(shifted, "weight")
    served = decode({**table.whole, **table.base_rows}, 8)
    compare(shifted, served)
    with pytest.raises(ValueError, match=r"and the model has 0\.0"):
        compare(shifted, torch.where(weight[kept] == 0, 0.0, served))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_export_that_wrote_something_else_is_refused(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(weight: torch.Tensor, dtype: Any, scales: Any) -> dict[str, torch.Tensor]:
        found = encode(weight.clone(), dtype, scales)
        found["rows"].view(torch.uint8)[3, -1] ^= 0x33
        return found

    monkeypatch.setattr(export_module, "encode", wrong)
    with pytest.raises(ValueError, match="the kept row 3 serves"):
        exported(tmp_path / "served", dtype)
    assert not [*tmp_path.iterdir()]


def rewritten(artifact: Opened, path: Path, **tensors: torch.Tensor) -> None:
    """Write an artifact again with other tensors, and checksums that fit."""
    manifest = artifact.manifest
    with ArtifactWriter(path) as writer:
        writer.begin(manifest.tables)
        entry = manifest.tables["weight"]
        put(writer, "weight", entry, {**artifact.tensors("weight"), **tensors})
        writer.publish(writer.seal(manifest))


def test_artifacts_that_are_whole_but_wrong(tmp_path: Path) -> None:
    """Their checksums fit, and they are refused all the same."""
    floats, _ = exported(tmp_path / "floats", "fp32")
    codes, _ = exported(tmp_path / "codes", "int8", (1, 4))
    for artifact in (floats, codes):
        rewritten(artifact, tmp_path / f"{artifact.path.name}, same")
        check_artifact(tmp_path / f"{artifact.path.name}, same")
    rows, tail = (
        floats.tensors("weight")["rows"].clone(),
        codes.tensors("weight")["scale_bias"].clone(),
    )
    rows[11, 2] = torch.nan
    rewritten(floats, tmp_path / "nan", rows=rows)
    for name, value in (("bias", 0.1), ("above", 1.0), ("infinite", torch.inf)):
        other = tail.clone()
        other[5, 1] = value
        rewritten(codes, tmp_path / name, scale_bias=other)
    for name, message in {
        "nan": "the row of id [0-9]+ of table 'weight' has no valid weights",
        "bias": "the row of id [0-9]+ of",
        "above": "the row of id [0-9]+ of",
        "infinite": "the row of id [0-9]+ of",
    }.items():
        with pytest.raises(ValueError, match=message):
            check_artifact(tmp_path / name)
