"""FBGEMM's operators that the package calls itself. Needs FBGEMM alone, without TorchRec."""

from __future__ import annotations

import torch
from torch import Tensor

HOST = 3
"""``EmbeddingLocation.HOST`` as a number."""

SPARSE_TYPES = {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3}
"""``SparseType``s as numbers."""

POOLING = {"sum": 0, "mean": 1, "none": 2}
"""``PoolingMode``s as numbers."""


def available() -> bool:
    """Return whether FBGEMM is installed, with its operators loaded."""
    try:
        import fbgemm_gpu  # noqa: F401  (it registers the operators)
    except ImportError:
        return False
    return True


def select_jagged(values: Tensor, lengths: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen values and the lengths that are left: one pass over both."""
    found: tuple[Tensor, Tensor] = torch.ops.fbgemm.masked_select_jagged_1d(values, lengths, chosen)
    return found


def look_up_stored(
    weights: Tensor,
    no_weights: Tensor,
    placements: Tensor,
    starts: Tensor,
    types: Tensor,
    columns: Tensor,
    total: int,
    widest: dict[str, int],
    rows: Tensor,
    offsets: Tensor,
    pooling: int,
    factors: Tensor | None,
) -> Tensor:
    """Return rows of tables in FBGEMM's format for inference, pooled, float32.

    Args:
        weights: of all tables, uint8, on the host.
        no_weights: the same of devices, empty.
        placements: for each feature :data:`HOST`.
        starts: for each feature where its table begins in ``weights``, in bytes.
        types: for each feature one of :data:`SPARSE_TYPES`, all the same.
        columns: where the columns of each feature begin in the result, and their number.
        total: columns of the result.
        widest: the columns of the widest table by type.
        rows: int32 ``(n,)``, feature after feature, in each of them bag after bag.
        offsets: int32 ``(features * bags + 1,)``: where each bag starts.
        pooling: one of :data:`POOLING`.
        factors: float32 ``(n,)``, a factor for each row.
    """
    found: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        weights,
        no_weights,
        placements,
        starts,
        types,
        columns,
        total,
        0,
        widest["int4"],
        widest["int8"],
        widest["fp16"],
        widest["fp32"],
        rows,
        offsets,
        pooling,
        factors,
        0,  # SparseType.FP32: the dtype of the results
        None,
        None,
        1,  # alignment of rows in bytes
    )
    return found
