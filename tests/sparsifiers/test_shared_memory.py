"""Weights that share memory with others, or with themselves, are refused when they are
registered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dist_sparse import DataNormSparsifier


def tables(**weights: Tensor) -> nn.ModuleDict:
    return nn.ModuleDict(
        {name: nn.Embedding(*w.shape, _weight=w, _freeze=True) for name, w in weights.items()}
    )


BASE = torch.arange(1.0, 65).view(16, 4)
OVERLAPS = {
    "whole": (BASE, BASE),
    "two rows": (BASE[:9], BASE[7:]),
    "one row inside": (BASE, BASE[5:6]),
    "columns": (BASE[:, :3], BASE[:, 2:]),
    "another shape": (BASE[:8], BASE.view(8, 8)[:4]),
    "numpy": (torch.from_numpy(BASE.numpy()[:9]), torch.from_numpy(BASE.numpy()[8:])),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_two_tables_in_one_memory_are_refused(case: str) -> None:
    a, b = OVERLAPS[case]
    together = DataNormSparsifier()
    with pytest.raises(ValueError, match="'b' is registered already, as 'a': they share memory"):
        together.add_model(tables(a=a, b=b))
    assert together.data_groups == {}
    apart = DataNormSparsifier()
    apart.add_model(tables(a=a), include="a")
    with pytest.raises(ValueError, match="'b' is registered already, as 'a': they share memory"):
        apart.add_model(tables(b=b))
    plain = DataNormSparsifier([("a", a)])
    with pytest.raises(ValueError, match="'b' is registered already, as 'a': they share memory"):
        plain.add_model(tables(b=b))


def test_rows_of_one_memory_are_accepted_and_interleaved_columns_are_not() -> None:
    base = torch.arange(1.0, 65).view(16, 4)
    sparsifier = DataNormSparsifier(
        sparsity_level=0.5, sparse_block_shape=(1, 1), zeros_per_block=1
    )
    sparsifier.add_model(tables(top=base[:8], rest=base[8:], own=base.clone()))
    sparsifier.step()
    assert int((base == 0).sum()) == 32
    with pytest.raises(ValueError, match="they share memory"):
        DataNormSparsifier().add_model(tables(left=base[:, :2], right=base[:, 2:]))


def test_memory_with_a_new_owner_is_free() -> None:
    model = tables(a=BASE.clone())
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model)
    freed = model["a"].weight.data
    model["a"].weight.data = BASE.clone()
    sparsifier.add_model(tables(b=freed))
    assert list(sparsifier.data_groups) == ["a", "b"]


@pytest.mark.parametrize(
    "weight",
    [
        torch.from_numpy(np.lib.stride_tricks.as_strided(np.ones(4, np.float32), (8, 4), (0, 4))),
        torch.ones(8, 1).expand(8, 4),
        torch.ones(11).as_strided((8, 4), (1, 1)),
    ],
    ids=["numpy", "expanded", "sliding"],
)
def test_elements_in_one_memory_are_refused(weight: Tensor) -> None:
    rule = rf"'a'.*shape \(8, 4\) have the strides \({weight.stride()[0]}, {weight.stride()[1]}\)"
    sparsifier = DataNormSparsifier()
    with pytest.raises(ValueError, match=rule):
        sparsifier.add_model(tables(a=weight))
    with pytest.raises(ValueError, match=rule):
        sparsifier.add_data("a", weight)
    assert sparsifier.data_groups == {}
