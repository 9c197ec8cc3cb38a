"""Lookups in pure torch.

They replace :class:`~dist_sparse.serving.lookup.FbgemmLookup` in processes without FBGEMM, and for
widths that it has no rows for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_sparse.serving.lookup import StoredTable, mean_columns

__all__ = ["LibtorchLookup"]


class LibtorchLookup(nn.Module):
    """Kept rows of several tables. Sums of float32 rows are those of ``torch.nn.EmbeddingBag``.

    Args:
        tables: by name.
        features: for each feature, the name of its table.
    """

    mean_columns: Tensor

    def __init__(self, tables: dict[str, StoredTable], features: Sequence[str]) -> None:
        super().__init__()
        entries = [tables[name].entry for name in features]
        self.register_buffer("mean_columns", mean_columns(entries))
        self.pooling = entries[0].pooling
        self.mixed = len({entry.pooling for entry in entries}) > 1
        by_width: dict[int, list[str]] = {}
        for name, table in tables.items():
            by_width.setdefault(table.entry.dim, []).append(name)
        self.groups = nn.ModuleList(_Group(tables, names, features) for names in by_width.values())
        self.group_of = [list(by_width).index(entry.dim) for entry in entries]

    def forward(
        self, rows: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """As :meth:`FbgemmLookup.forward`."""
        if not self.mixed:
            return self._pooled(rows, offsets, counts, weights, self.pooling)
        mean = self._pooled(rows, offsets, counts, weights, "mean")
        return torch.where(
            self.mean_columns, mean, self._pooled(rows, offsets, counts, weights, "sum")
        )

    def _pooled(
        self, rows: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None, pooling: str
    ) -> Tensor:
        found: list[Tensor] = [
            group(rows, offsets, counts, weights, pooling) for group in self.groups
        ]
        if pooling == "none":
            return torch.stack(found).sum(0) if len(found) > 1 else found[0]
        if len(found) == 1:
            return found[0].transpose(0, 1).flatten(1)
        return torch.cat([found[at][feature] for feature, at in enumerate(self.group_of)], 1)


class _Group(nn.Module):
    """Tables of one width in one tensor, with a row of zeros behind the last: for removed ids, and
    for those of tables that are in another group.

    Args:
        tables: by name.
        mine: names of those of the group.
        features: for each feature, the name of its table.
    """

    rows: Tensor
    scale_bias: Tensor
    firsts: Tensor

    def __init__(
        self, tables: dict[str, StoredTable], mine: Sequence[str], features: Sequence[str]
    ) -> None:
        super().__init__()
        firsts, self.count = dict.fromkeys(tables, -1), 0
        for name in mine:
            firsts[name] = self.count
            self.count += tables[name].entry.stored
        self.dtype, self.width = tables[mine[0]].entry.dtype, tables[mine[0]].entry.dim
        if self.count > _MOST_ROWS:
            raise ValueError(
                f"Tables of {self.width} columns keep {self.count} rows: without FBGEMM at most"
                f" {_MOST_ROWS}."
            )
        for key in ("rows", "scale_bias"):
            parts = [tables[name].tensors[key] for name in mine if key in tables[name].tensors] or [
                torch.empty(0, 2)
            ]
            self.register_buffer(key, torch.cat([*parts, parts[0].new_zeros(1, parts[0].shape[1])]))
        # For each feature, where its table's rows start; -1: they are in another group.
        self.register_buffer(
            "firsts", torch.tensor([firsts[name] for name in features], dtype=torch.int32)
        )

    def forward(
        self, rows: Tensor, offsets: Tensor, counts: Tensor, weights: Tensor | None, pooling: str
    ) -> Tensor:
        """Return the bags of all features, ``(features, bags, width)``, or each id's row,
        ``(n, width)``."""
        features = self.firsts.size(0)
        if features > 1:
            first = self.firsts.index_select(
                0, torch.repeat_interleave(counts, output_size=rows.size(0))
            )
            here = torch.where((rows < 0) | (first < 0), self.count, rows + first)
        else:
            here = torch.where(rows < 0, self.count, rows)
        if pooling == "none":
            return self._vectors(here)
        matrix, at = self.rows, here
        if self.dtype != "fp32":  # only the rows of these ids are decoded
            matrix, at = (
                self._vectors(here),
                torch.arange(here.size(0), dtype=torch.int32, device=here.device),
            )
        if weights is None:
            bags = F.embedding_bag(at, matrix, offsets, mode=pooling, include_last_offset=True)
        else:
            bags = F.embedding_bag(
                at,
                matrix,
                offsets,
                mode="sum",
                per_sample_weights=weights,
                include_last_offset=True,
            )
            if pooling == "mean":  # of weighted rows, over their number, as FBGEMM has it
                bags = bags / offsets.diff().clamp(min=1).unsqueeze(1)
        return bags.view(features, -1, self.width)

    def _vectors(self, here: Tensor) -> Tensor:
        """The rows at ``here``, float32 ``(n, width)``."""
        found = self.rows.index_select(0, here)
        if self.dtype in ("fp32", "fp16"):
            return found.float()
        if self.dtype == "int4":
            found = torch.stack((found & 15, found >> 4), 2).flatten(1)[:, : self.width]
        scale, bias = self.scale_bias.index_select(0, here).float().chunk(2, 1)
        return found * scale + bias


_MOST_ROWS = 2**31 - 2
