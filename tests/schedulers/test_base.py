"""Does a scheduler of a user's own write values that a step of the sparsifier takes? In one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_sparse.schedulers.base import BaseDataScheduler
from dist_sparse.sparsifiers.norm import DataNormSparsifier


class Fixed(BaseDataScheduler):
    value: Any = None

    def get_schedule_param(self) -> dict[str, Any]:
        return {"w": self.value}


def scheduled(value: Any, param: str = "sparsity_level") -> Any:
    sparsifier = DataNormSparsifier([("w", torch.randn(8, 4))], sparse_block_shape=(1, 4))
    type("Fixed", (Fixed,), {"value": value})(sparsifier, param)
    return sparsifier


@pytest.mark.parametrize(
    "value, kind",
    [(torch.tensor(0.5), float), (torch.tensor(0.5, dtype=torch.float64), float), (torch.tensor(1), int)],
    ids=["float32", "float64", "int64"],
)
def test_0d_tensors_become_numbers(value: Any, kind: type) -> None:
    sparsifier = scheduled(value)
    assert type(sparsifier.data_groups["w"]["sparsity_level"]) is kind
    sparsifier.step()
    assert int((sparsifier.get_mask("w") == 0).sum()) == 32 * value.item()


def test_numpy_scalars_become_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    sparsifier = scheduled(numpy.float32(0.5))
    assert type(sparsifier.data_groups["w"]["sparsity_level"]) is float
    sparsifier.step()


def test_within_tuples_too_and_nothing_else() -> None:
    shape = scheduled((torch.tensor(1), 4), "sparse_block_shape").data_groups["w"]["sparse_block_shape"]
    assert shape == (1, 4) and [type(size) for size in shape] == [int, int]
    vector = torch.ones(1)
    assert scheduled(vector, "other").data_groups["w"]["other"] is vector
