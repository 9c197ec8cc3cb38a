"""Stored rows: zeros stay exactly zero, the rest is bit-equal or within half a step."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from dist_sparse.serving.encodings import ENCODINGS, decode, encode
from dist_sparse.serving.sources import refuse_range

DTYPES = ("fp32", "fp16", "int8", "int4")
TYPES = {"fp32": torch.float32, "fp16": torch.float16}


def rows_of(columns: int, magnitude: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of several ranges with blocks of zeros; a row of zeros, of negative zeros, of one sign,
    with both ends."""
    generator = torch.Generator().manual_seed(columns)
    weight = (
        torch.randn(120, columns, generator=generator)
        * torch.rand(120, 1, generator=generator)
        * magnitude
    )
    kept = torch.rand(120, -(-columns // 4), generator=generator) < 0.3
    weight = torch.where(kept.repeat_interleave(4, 1)[:, :columns], weight, 0.0).clamp(
        -ENCODINGS["int8"].largest, ENCODINGS["int8"].largest
    )
    weight[0], weight[1], weight[2] = 0.0, -0.0, weight[2].abs()
    weight[3, 0], weight[3, -1] = -ENCODINGS["int8"].largest, ENCODINGS["int8"].largest
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [3e-8, 1e-5, 0.1, 3e4])
@pytest.mark.parametrize("columns", [1, 13, 64])
def test_rows(dtype: str, magnitude: float, columns: int) -> None:
    weight = rows_of(columns, magnitude)
    stored = encode(weight, dtype)
    found = decode(stored, columns)
    assert (found[weight == 0] == 0).all()
    if "scale_bias" not in stored:
        assert torch.equal(
            stored["rows"].view(torch.uint8), weight.to(TYPES[dtype]).view(torch.uint8)
        )
    else:
        step = stored["scale_bias"][:, :1].double()
        assert stored["scale_bias"].isfinite().all()
        assert ((found.double() - weight.double()).abs() <= step / 2 * (1 + 2**-40)).all()
        levels = 255 if dtype == "int8" else 15
        span = weight.amax(1).clamp(min=0).double() - weight.amin(1).clamp(max=0).double()
        coarsest = 1.25 if dtype == "int8" else 1 + 2**-6  # of 3 and 7 significant bits
        assert (step[:, 0] <= torch.maximum(span / levels * coarsest, span / levels + 2.0**-24))[
            span > 0
        ].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_other_types(dtype: str, source: torch.dtype) -> None:
    weight = rows_of(8, 0.1, source)
    stored = encode(weight, dtype)
    if "scale_bias" not in stored:
        assert torch.equal(stored["rows"], weight.to(TYPES[dtype]))
    else:
        assert torch.equal(stored["rows"], encode(weight.double(), dtype)["rows"])


@pytest.mark.parametrize("bits", [8, 4])
def test_fbgemm_reads_the_same(bits: int) -> None:
    """Its inference kernels, on the bytes as they are stored."""
    pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    kind = {8: SparseType.INT8, 4: SparseType.INT4}[bits]
    for magnitude in (1e-6, 0.1, 3e4):
        weight = rows_of(16, magnitude)
        stored = encode(weight, f"int{bits}")
        tables = IntNBitTableBatchedEmbeddingBagsCodegen(
            [("t", 120, 16, kind, EmbeddingLocation.HOST)],
            device="cpu",
            weight_lists=[(stored["rows"], stored["scale_bias"].view(torch.uint8))],
            output_dtype=SparseType.FP32,
        )
        found = tables(torch.arange(120), torch.arange(121))
        assert torch.equal(found, decode(stored, 16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_out_of_range(dtype: str) -> None:
    largest = ENCODINGS[dtype].largest
    for sign in (1, -1):
        refuse_range("t", torch.tensor([[1.0, sign * largest]], dtype=torch.float64), dtype)
        assert decode(encode(torch.tensor([[1.0, sign * largest]]), dtype), 2).isfinite().all()
        beyond = sign * largest * (1 + 2**-11)
        for value in (beyond, sign * torch.inf, torch.nan):
            weight = torch.tensor([[value, 1.0]], dtype=torch.float64)
            with pytest.raises(ValueError, match=re.escape(f"it has the value {value}, ")):
                refuse_range("t", weight, dtype)
    refuse_range("t", torch.zeros(0, 4), dtype)
