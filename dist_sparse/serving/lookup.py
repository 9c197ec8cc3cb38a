"""Lookups of rows that have been found, by FBGEMM's operator.

It takes the rows of all ids of all features as
:class:`~dist_sparse.compaction.row_index.RowIndexes` returns them, -1 for removed rows, which count
as zeros. It holds tensors and numbers alone, no module of FBGEMM, which ``torch.export`` refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.serving.manifest import Table

__all__ = ["FbgemmLookup", "StoredTable", "fbgemm_ops", "mean_columns"]

_ALIGNMENT = 128
"""Bytes at whose multiples tables begin, as in FBGEMM's own modules."""


@dataclass(frozen=True)
class StoredTable:
    """A table of an artifact and its tensors, named as in :meth:`Table.layout`."""

    entry: Table
    tensors: Mapping[str, Tensor]


def fbgemm_ops() -> Any:
    """Return ``torch.ops.fbgemm`` with its kernels loaded, None where FBGEMM is not installed."""
    try:
        import fbgemm_gpu  # noqa: F401  (it registers the kernels)
    except ImportError:
        return None
    return torch.ops.fbgemm


class FbgemmLookup(nn.Module):
    """``fbgemm::int_nbit_split_embedding_codegen_lookup_function`` over the kept rows of several
    tables.

    Args:
        tables: by name.
        features: for each feature, the name of its table.
    """

    weights: Tensor
    no_weights: Tensor
    placements: Tensor
    starts: Tensor
    types: Tensor
    columns: Tensor
    mean_columns: Tensor

    def __init__(self, tables: dict[str, StoredTable], features: Sequence[str]) -> None:
        super().__init__()
        starts, end = {}, 0
        for name, table in tables.items():
            starts[name] = end
            end += -(-table.entry.stored * _row_bytes(table.entry) // _ALIGNMENT) * _ALIGNMENT
        weights = torch.zeros(end, dtype=torch.uint8)
        for name, table in tables.items():
            _store(weights[starts[name] :], table)
        entries = [tables[name].entry for name in features]
        dims = [entry.dim for entry in entries]
        self.register_buffer("weights", weights)
        self.register_buffer("no_weights", torch.zeros(0, dtype=torch.uint8))
        self.register_buffer("placements", torch.full((len(dims),), _HOST, dtype=torch.int32))
        self.register_buffer("starts", torch.tensor([starts[name] for name in features]))
        self.register_buffer(
            "types", torch.full((len(dims),), _TYPES[entries[0].dtype], dtype=torch.uint8)
        )
        self.register_buffer("columns", F.pad(torch.tensor(dims).cumsum(0), (1, 0)).int())
        self.register_buffer("mean_columns", mean_columns(entries))
        self.total = sum(dims)
        self.widest = {name: max(dims) if entries[0].dtype == name else 0 for name in _TYPES}
        self.pooling = _POOLING[entries[0].pooling]
        self.mixed = len({entry.pooling for entry in entries}) > 1

    def forward(
        self, rows: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the pooled rows of each bag, float32 ``(bags, columns of all features)``, or of
        sequences those of each id, ``(n, columns)``.

        Args:
            rows: int32 ``(n,)``, feature after feature, in each of them bag after bag.
            offsets: int32 ``(features * bags + 1,)``: where each bag starts.
            counts: ``(features,)``, how many ids each feature has.
            weights: float32 ``(n,)``, a factor for each id.
        """
        if not self.mixed:
            return self._pooled(rows, offsets, weights, self.pooling)
        mean = self._pooled(rows, offsets, weights, 1)
        return torch.where(self.mean_columns, mean, self._pooled(rows, offsets, weights, 0))

    def _pooled(
        self, rows: Tensor, offsets: Tensor, weights: Tensor | None, pooling: int
    ) -> Tensor:
        found: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            self.weights,
            self.no_weights,
            self.placements,
            self.starts,
            self.types,
            self.columns,
            self.total,
            0,
            self.widest["int4"],
            self.widest["int8"],
            self.widest["fp16"],
            self.widest["fp32"],
            rows,
            offsets,
            pooling,
            weights,
            0,  # SparseType.FP32: the dtype of the results
            None,
            None,
            1,  # alignment of rows in bytes
        )
        return found


_HOST = 3
"""``EmbeddingLocation.HOST``."""

_TYPES = {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3}
"""``SparseType``s as numbers."""

_POOLING = {"sum": 0, "mean": 1, "none": 2}
"""``PoolingMode``s."""


def _row_bytes(entry: Table) -> int:
    """Bytes of a row as FBGEMM stores it: weights, or scale and bias followed by codes."""
    return {
        "fp32": 4 * entry.dim,
        "fp16": 2 * entry.dim,
        "int8": 4 + entry.dim,
        "int4": 4 + -(-entry.dim // 2),
    }[entry.dtype]


def _store(weights: Tensor, table: StoredTable) -> None:
    """Write the rows of a table to the front of FBGEMM's buffer."""
    entry = table.entry
    rows = weights[: entry.stored * _row_bytes(entry)].view(entry.stored, _row_bytes(entry))
    codes = table.tensors["rows"].view(torch.uint8)
    if "scale_bias" in table.tensors:
        rows[:, :4] = table.tensors["scale_bias"].view(torch.uint8)
        rows[:, 4:] = codes
    else:
        rows.copy_(codes)


def mean_columns(entries: Sequence[Table]) -> Tensor:
    """Which columns of the result are means: bool ``(columns of all features,)``."""
    means = torch.tensor([entry.pooling == "mean" for entry in entries])
    return means.repeat_interleave(torch.tensor([entry.dim for entry in entries]))
