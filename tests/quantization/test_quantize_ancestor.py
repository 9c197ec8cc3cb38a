"""Comparison with torch.ao's own function on the same model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import DataNormSparsifier, post_training_sparse_quantize

theirs = pytest.importorskip(
    "torch.ao.pruning._experimental.data_sparsifier.quantization_utils",
    reason="this torch has no such function any more: NOTHING is compared with the ancestor; use torch 2.13 for that",
    exc_type=ImportError,
)


def by_torch(model: nn.Module, first: bool, **config: Any) -> None:
    from torch.ao.pruning._experimental.data_sparsifier import DataNormSparsifier as Theirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.post_training_sparse_quantize(model, Theirs, sparsify_first=first, **config)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("level", [0.0, 0.5, 0.8])
def test_results_are_close_and_no_less_sparse(first: bool, level: float) -> None:
    torch.manual_seed(0)
    ours = nn.ModuleDict(
        {
            "emb": nn.Embedding(200, 12),
            "deep": nn.Sequential(nn.EmbeddingBag(300, 16, mode="sum")),
            "l": nn.Linear(4, 4),
        }
    )
    weights = {path: ours.get_submodule(path).weight.detach().clone() for path in ("emb", "deep.0")}
    other = copy.deepcopy(ours)
    config = {"sparsity_level": level, "sparse_block_shape": (1, 4), "norm": "L1"}
    by_torch(other, first, **config)
    post_training_sparse_quantize(ours, DataNormSparsifier, first, **config)
    for path, weight in weights.items():
        mine, its = (torch.dequantize(model.get_submodule(path).weight()) for model in (ours, other))
        step = (weight.amax(1) - weight.amin(1)).max() / 255
        far = ((mine - its).abs() > 1.01 * step).any(dim=1)
        # Quantized first, the two score slightly different weights: at the threshold some other blocks may go.
        assert far.sum() <= (0 if first else 5)
        assert (mine == 0).sum() >= (its == 0).sum()
        assert (mine == 0).float().mean() >= level
        near = (~far).nonzero().squeeze(1)[torch.randint(190, (40, 3))]
        results = [model.get_submodule(path)(near) for model in (ours, other)]
        assert results[0].shape == results[1].shape
        assert (results[0] - results[1]).abs().max() <= 3 * 1.01 * step


def test_the_ancestor_leaves_removed_weights_other_than_zero() -> None:
    """Why the grid here is another: torch.ao's misses 0 by a part of a step where it quantizes."""
    torch.manual_seed(0)
    ours = nn.ModuleDict({"emb": nn.Embedding.from_pretrained(torch.randn(500, 8) + 0.3)})
    other = copy.deepcopy(ours)
    config = {"sparsity_level": 0.8, "sparse_block_shape": (1, 1)}
    by_torch(other, True, **config)
    post_training_sparse_quantize(ours, DataNormSparsifier, **config)
    exact = (torch.dequantize(other["emb"].weight()) == 0).float().mean()
    assert (ours["emb"].weight() == 0).float().mean() >= 0.8 > exact


def test_the_ancestor_forgets_the_mean() -> None:
    """Its bags all sum, and count padding."""
    ours = nn.ModuleDict({"bag": nn.EmbeddingBag(9, 4, mode="mean", padding_idx=0)})
    floats, other, ids = ours["bag"], copy.deepcopy(ours), torch.tensor([[1, 2, 0], [3, 4, 5]])
    by_torch(other, True, sparsity_level=0.0)
    post_training_sparse_quantize(ours, DataNormSparsifier, sparsity_level=0.0)
    torch.testing.assert_close(ours["bag"](ids), floats(ids).detach(), rtol=0, atol=0.05)
    torch.testing.assert_close(other["bag"](ids), floats.weight.detach()[ids].sum(1), rtol=0, atol=0.15)


@pytest.mark.parametrize("first", [True, False])
def test_the_sparsifiers_of_the_ancestor_work_too(first: bool) -> None:
    from torch.ao.pruning._experimental.data_sparsifier import DataNormSparsifier as Theirs

    model = nn.ModuleDict({"emb": nn.Embedding(200, 12)})
    post_training_sparse_quantize(model, Theirs, first, sparsity_level=0.8, sparse_block_shape=(1, 4))
    assert (model["emb"].weight() == 0).float().mean() >= 0.8
