"""Lookups of rotated tables, whose results are turned back to the columns that the model had.

A stage behind :class:`~dist_sparse.serving.lookup.FbgemmLookup` or
:class:`~dist_sparse.serving.libtorch_lookup.LibtorchLookup`, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dist_sparse.serving.lookup import StoredTable

__all__ = ["TurnedLookup"]


class TurnedLookup(nn.Module):
    """Results of ``rows``, times the ``rotation`` of each feature's table if it has one.

    Args:
        rows: looks up what is stored.
        tables: by name.
        features: for each feature, the name of its table.
    """

    def __init__(
        self, rows: nn.Module, tables: dict[str, StoredTable], features: Sequence[str]
    ) -> None:
        super().__init__()
        self.rows = rows
        turns: dict[str, nn.Module] = {
            name: _Turn(table.tensors["rotation"]) if "rotation" in table.tensors else nn.Identity()
            for name, table in tables.items()
        }
        self.turns = nn.ModuleList(turns[name] for name in features)
        self.dims = [tables[name].entry.dim for name in features]
        self.sequences = tables[features[0]].entry.pooling == "none"

    def forward(
        self, rows: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """As :meth:`FbgemmLookup.forward`; columns are those of the original tables."""
        found: Tensor = self.rows(rows, offsets, counts, weights)
        if not self.sequences:
            parts = torch.split(found, self.dims, 1)
            return torch.cat([turn(part) for turn, part in zip(self.turns, parts, strict=True)], 1)
        turned: list[Tensor] = [turn(found) for turn in self.turns]
        out = turned[0]
        if len(turned) > 1:
            features = torch.arange(len(turned), device=counts.device)
            of = torch.repeat_interleave(features, counts, output_size=rows.size(0)).unsqueeze(1)
            for feature in range(1, len(turned)):
                out = torch.where(of == feature, turned[feature], out)
        return out


class _Turn(nn.Module):
    """Multiplies by a matrix."""

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix.clone())

    def forward(self, values: Tensor) -> Tensor:
        return values @ self.matrix
