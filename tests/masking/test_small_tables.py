"""Small tables that are scored together get the masks that each gets alone, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.optim import RowWiseAdagrad

from dist_sparse import ROW, DataNormSparsifier, ImportanceSparsifier, MaskEnforcer
from dist_sparse.masking.block_masks import SMALL
from tests.oracle import oracle_mask

Sizes = list[tuple[int, int]]


def masked(
    weights: list[Tensor], levels: list[float], block: tuple[int, int | str], norm: str
) -> list[Tensor]:
    """The masks of all tables in one model."""
    model = nn.ModuleDict(
        {f"t{i}": nn.Embedding(*w.shape, _weight=w.clone()) for i, w in enumerate(weights)}
    )
    sparsifier = DataNormSparsifier(sparse_block_shape=block, norm=norm)
    sparsifier.add_model(
        model, config={f"t{i}": {"sparsity_level": level} for i, level in enumerate(levels)}
    )
    for _ in range(2):  # the second time over removed blocks, which tie at a score of 0
        sparsifier.step()
    for i, weight in enumerate(weights):
        mask = sparsifier.full_mask(f"t{i}")
        assert torch.equal(model[f"t{i}"].weight.detach(), torch.where(mask != 0, weight, 0.0)), i
    return [sparsifier.full_mask(f"t{i}") for i in range(len(weights))]


@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("block", [(1, ROW), (1, 4), (1, 5), (1, 16)])
@pytest.mark.parametrize(
    "sizes",
    [
        [(50, 16)] * 5,
        [(1, 16), (7, 16), (8, 16), (9, 16), (100, 16), (3, 12), (5, 12), (64, 1), (65, 1), (4, 3)],
        [(SMALL // 16, 16), (SMALL // 16 + 1, 16), (2, 16), (3, 16)],
    ],
)
def test_together_as_alone(sizes: Sizes, block: tuple[int, int | str], norm: str) -> None:
    draw = torch.Generator().manual_seed(len(sizes))
    weights = [torch.randn(*size, generator=draw) for size in sizes]
    levels = [(0.0, 0.3, 0.5, 0.9, 1.0)[i % 5] for i in range(len(sizes))]
    for weight, level, mask in zip(
        weights, levels, masked(weights, levels, block, norm), strict=True
    ):
        width = weight.shape[1] if block[1] == ROW else int(block[1])
        assert torch.equal(mask, oracle_mask(weight, level, (1, width), width, norm))


@pytest.mark.parametrize("block", [(1, ROW), (1, 4)])
def test_ties(block: tuple[int, int | str]) -> None:
    """Few different scores: the smaller block index is removed first."""
    draw = torch.Generator().manual_seed(1)
    weights = [
        torch.randint(0, 3, (rows, 8), generator=draw).float() for rows in (5, 30, 31, 32, 200)
    ]
    levels = [0.5, 0.4, 0.6, 0.1, 0.75]
    for weight, level, mask in zip(
        weights, levels, masked(weights, levels, block, "L1"), strict=True
    ):
        width = 8 if block[1] == ROW else 4
        assert torch.equal(mask, oracle_mask(weight, level, (1, width), width, "L1"))


@pytest.mark.slow
def test_more_than_a_batch() -> None:
    draw = torch.Generator().manual_seed(2)
    weights = [torch.randn(1000, 16, generator=draw) for _ in range(140)]
    masks = masked(weights, [0.5] * 140, (1, ROW), "L2")
    assert all(
        torch.equal(m, oracle_mask(w, 0.5, (1, ROW), None, "L2"))
        for w, m in zip(weights, masks, strict=True)
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_the_table_with_a_bad_score_is_named(value: float) -> None:
    model = nn.ModuleDict({name: nn.Embedding(9, 4) for name in "abc"})
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, 4), norm="L2")
    sparsifier.add_model(model)
    sparsifier.step()
    before = {name: sparsifier.full_mask(name) for name in "abc"}
    with torch.no_grad():
        model["b"].weight[7, 2] = value
    with pytest.raises(ValueError, match="Table 'b': the block at row 7, column 0 scores"):
        sparsifier.step()
    assert all(torch.equal(before[name], sparsifier.full_mask(name)) for name in "abc")


class ByElement(ImportanceSparsifier):
    """The same scores, element by element: each table in a pass of its own."""

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        return super().score(name, data, offset=offset, **config)


@pytest.mark.parametrize("block", [(1, ROW), (1, 4), (2, 4)])
@pytest.mark.parametrize("adagrad", [torch.optim.Adagrad, RowWiseAdagrad])
def test_weighted_squares_as_scores_of_elements(
    block: tuple[int, int | str], adagrad: type[torch.optim.Optimizer]
) -> None:
    """Together, alone, and in several chunks; what was removed and is written through ``.data`` is
    zeroed again."""
    sizes = [(50, 16), (51, 16), (3, 16), (2, 16), (SMALL // 16 + 1, 16), (270_000, 4)]
    masks = []
    for kind in (ImportanceSparsifier, ByElement):
        draw = torch.Generator().manual_seed(3)
        weights = [torch.randn(*size, generator=draw) for size in sizes]
        model = nn.ModuleDict(
            {f"t{i}": nn.Embedding(*w.shape, _weight=w.clone()) for i, w in enumerate(weights)}
        )
        optimizer = adagrad(model.parameters(), lr=0.1)
        sparsifier = kind(sparsity_level=0.5, sparse_block_shape=block, score="norm_accumulator")
        sparsifier.add_model(model)
        with MaskEnforcer(sparsifier).attach(optimizer):
            for _ in range(2):
                sparsifier.step()
                for table in model.values():
                    table.weight.data[-1] += 1.0
                    table(
                        torch.randint(0, table.num_embeddings, (20,), generator=draw)
                    ).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            sparsifier.step()
        assert sum(sparsifier.count_revived().values()) == 0
        masks.append([sparsifier.full_mask(f"t{i}") for i in range(len(sizes))])
    assert all(torch.equal(one, other) for one, other in zip(*masks, strict=True))
