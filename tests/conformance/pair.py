"""The two libraries that are compared, as sparsifiers whose every step shows, and data for them.

A test module that imports this is skipped where torch has no data sparsifier.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse.sparsifiers.base import BaseDataSparsifier

__all__ = ["Ancestor", "Doubled", "Ours", "data_of_each_kind", "saved_and_loaded", "weight_of"]

ancestors = pytest.importorskip(
    "torch.ao.pruning._experimental.data_sparsifier",
    reason=(
        "this torch has no data sparsifier any more: NOTHING is compared with the ancestor; use"
        " torch 2.13 for that"
    ),
    exc_type=ImportError,
)


class _FirstRow:
    """Removes the first row at the first step, the second at the next, and so on: every step
    shows."""

    def update_mask(self, name: str, data: Tensor, rows: int = 1, **config: Any) -> None:
        calls = self.state[name].setdefault("calls", 0)  # type: ignore[attr-defined]
        self.state[name]["calls"] = calls + 1  # type: ignore[attr-defined]
        mask = self.get_mask(name)  # type: ignore[attr-defined]
        mask[calls * rows : (calls + 1) * rows] = 0


class Ours(_FirstRow, BaseDataSparsifier):
    pass


class Ancestor(_FirstRow, ancestors.BaseDataSparsifier):
    pass


class Doubled(nn.Module):
    """A parametrization other than the default."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * self.mask

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


def data_of_each_kind() -> list[tuple[str, Any]]:
    return [
        ("tensor", torch.randn(6, 4)),
        ("param", nn.Parameter(torch.randn(5, 3))),
        ("emb", nn.Embedding(8, 4)),
        ("bag", nn.EmbeddingBag(7, 2)),
    ]


def weight_of(data: Any) -> Tensor:
    return data.weight if isinstance(data, nn.Module) else data


def saved_and_loaded(state: Any, **kwargs: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **kwargs)
