"""Grids of columns in 4 bits: chosen as by a search over all scales, zeros exact, decoded alike
everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse import DataNormSparsifier, export, load_served
from dist_sparse.serving.artifact import open_artifact
from dist_sparse.serving.chain import MappedTable, check_artifact, compare_rows
from dist_sparse.serving.encodings import ColumnSpread, books_of, decode, encode


def scales_of(rows: Tensor, chunks: int = 1) -> Tensor:
    spread = ColumnSpread(rows.shape[1])
    for some in rows.tensor_split(chunks):
        spread.add(some)
    return spread.scales()


def decoded(byte: int, scales: Tensor) -> list[float]:
    """The two weights of a byte, by hand."""
    low, high = byte & 15, byte >> 4
    return [
        (half - 16 if half > 7 else half) * float(scale)
        for half, scale in zip((low, high), scales.tolist(), strict=True)
    ]


@pytest.mark.parametrize("columns", [1, 2, 5, 24])
@pytest.mark.parametrize("spread", ["normal", "heavy tails", "tiny"])
def test_errors_are_near_those_of_the_best_scale(columns: int, spread: str) -> None:
    rows = torch.randn(3000, columns)
    if spread == "heavy tails":
        rows = rows**5
    rows *= torch.logspace(-2, 1, columns) * (1e-4 if spread == "tiny" else 1)
    scales = scales_of(rows)
    found = decode(encode(rows, "int4", scales), columns)
    errors = ((found - rows) ** 2).sum(0).double()
    for column in range(columns):
        largest = float(rows[:, column].abs().max()) / 7
        tried = torch.linspace(largest / 100, largest, 400, dtype=torch.float64)
        exact = rows[:, column, None].double()
        steps = (exact / tried).round().clamp(-8, 7)
        best = ((exact - steps * tried) ** 2).sum(0).min()
        assert errors[column] <= 1.08 * best


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_scales_depend_on_the_rows_alone(dtype: torch.dtype) -> None:
    """Not on their order, nor on how they come."""
    rows = torch.randn(500, 7).to(dtype)
    expected = scales_of(rows)
    assert torch.equal(scales_of(rows, 9), expected)
    assert torch.equal(scales_of(rows[torch.randperm(500)], 3), expected)
    assert expected.dtype == torch.float16 and bool((expected > 0).all())


def test_bytes_by_hand() -> None:
    scales = torch.tensor([0.5, 0.25]).half()
    books = books_of({"scales": scales})
    assert books is not None
    assert books.shape == (1, 256, 2) and books.dtype == torch.float16
    for byte in range(256):
        assert books[0, byte].tolist() == decoded(byte, scales)
    rows = torch.tensor([[0.0, 0.0], [0.5, -0.25], [-9.0, 9.0], [0.24, 0.13]])
    codes = encode(rows, "int4", scales)["rows"]
    assert codes.flatten().tolist() == [0x00, 0xF1, 0x78, 0x10]


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_steps_are_exact_in_float16_and_zeros_are_zeros(columns: int) -> None:
    rows = torch.randn(400, columns) * 3
    rows[::3] = 0
    rows[:, -1] = 0
    scales = scales_of(rows)
    assert scales[-1] == 1 or columns == 1
    books = books_of({"scales": scales})
    assert books is not None
    assert not books[:, 0].any()
    steps = torch.arange(-8, 8).double()
    exact = scales.double().unsqueeze(1) * steps
    assert torch.equal(exact, exact.half().double())
    found = decode(encode(rows, "int4", scales), columns)
    assert not found[rows == 0].any()


def exported(path: Path, block: Any = "row", columns: int = 9) -> tuple[nn.Embedding, Tensor]:
    model = nn.Embedding(60, columns)
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=block, norm="L2")
    sparsifier.add_model(model)
    sparsifier.step()
    export(model, sparsifier, path, "int4", "column")
    return model, model.weight.detach()


@pytest.mark.parametrize("block", ["row", (1, 3)], ids=str)
def test_what_is_served_is_what_was_encoded(tmp_path: Path, block: Any) -> None:
    _, weight = exported(tmp_path / "served", block)
    kept = weight.any(1)
    scales = scales_of(weight[kept])
    expected = torch.zeros_like(weight)
    expected[kept] = decode(encode(weight[kept], "int4", scales), 9)
    served = load_served(tmp_path / "served")
    assert torch.equal(served(torch.arange(60)), expected)
    entry = check_artifact(tmp_path / "served").manifest.tables["weight"]
    assert entry.scale == "column" and entry.bytes.scales == 18
    kept_bytes, index = int(kept.sum()) * 5, 8 if kept.sum() < 60 else 0
    assert entry.bytes.after == kept_bytes + index + 18


def test_another_step_is_found(tmp_path: Path) -> None:
    _, weight = exported(tmp_path / "served")
    kept = weight.any(1)
    rows, artifact = weight[kept], open_artifact(tmp_path / "served")
    scales = artifact.tensors("weight")["scales"]
    wrong = rows.clone()
    wrong[4, 2] += 2 * scales[2] if wrong[4, 2] < 0 else -2 * scales[2]
    with pytest.raises(ValueError, match=r"the kept row 4 serves .* in column 2"):
        table = MappedTable(artifact, "weight")
        compare_rows("weight", 0, wrong, {**table.whole, **table.base_rows}, table.entry)


@pytest.mark.parametrize(
    ("dtype", "scale", "words"),
    [
        ("int8", "column", "Invalid scale='column' with dtype='int8'"),
        ("fp32", "column", "Invalid scale='column' with dtype='fp32'"),
        ("int4", "table", "Invalid scale='table'"),
    ],
)
def test_other_scales_are_refused(tmp_path: Path, dtype: Any, scale: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        export(nn.Embedding(8, 4), None, tmp_path / "served", dtype, scale)
    assert not (tmp_path / "served").exists()
