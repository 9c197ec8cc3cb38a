"""`DataNormSparsifier` chooses the ancestor's masks, its bugs aside.

Without ties the masks must be the ancestor's own, element by element; in every case they must be
those of the plain oracle of the rules.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dist_sparse.sparsifiers.score import DataNormSparsifier
from tests.oracle import oracle_blocks, oracle_mask

ancestors = pytest.importorskip(
    "torch.ao.pruning._experimental.data_sparsifier",
    reason=(
        "this torch has no data sparsifier any more: NOTHING is compared with the ancestor; use"
        " torch 2.13 for that"
    ),
)
Ancestor = ancestors.DataNormSparsifier

LEVELS = [0.0, 0.1, 0.25, 0.5, 0.8, 0.99, 1.0]
BLOCKS = [(1, 1), (1, 4), (4, 1), (3, 5), (8, 8), (2, 3)]
SHAPES = [(16, 8), (7, 10), (1, 9), (13, 3), (5, 5), (33, 17)]


@pytest.fixture(params=["ours", "ancestor"])
def library(request: pytest.FixtureRequest) -> Any:
    return {"ours": DataNormSparsifier, "ancestor": Ancestor}[request.param]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def mask_of(library: Any, data: Any, **config: Any) -> Tensor:
    sparsifier = library(**config)
    sparsifier.add_data("w", data)
    sparsifier.step()
    mask: Tensor = sparsifier.get_mask("w")
    return mask


def area(block: tuple[int, int]) -> int:
    return math.prod(block)


class TestConfig:
    def test_defaults(self, library: Any) -> None:
        sparsifier = library()
        assert sparsifier.defaults["sparsity_level"] == 0.5
        assert sparsifier.defaults["sparse_block_shape"] == (1, 4)
        assert sparsifier.defaults["zeros_per_block"] == 4
        assert set(sparsifier.defaults) == {
            "sparsity_level",
            "sparse_block_shape",
            "zeros_per_block",
        }
        assert sparsifier.norm == "L1"

    def test_positional_arguments(self, library: Any) -> None:
        sparsifier = library([("w", random(4, 4))], 0.25, (2, 2), 3, "L2")
        expected = {"sparsity_level": 0.25, "sparse_block_shape": (2, 2), "zeros_per_block": 3}
        assert sparsifier.defaults == sparsifier.data_groups["w"] == expected
        assert sparsifier.norm == "L2"

    @pytest.mark.parametrize("norm", ["L3", "linf", 1, None])
    def test_other_norms_are_refused(self, library: Any, norm: Any) -> None:
        with pytest.raises(AssertionError):
            library(norm=norm)

    @pytest.mark.parametrize("zeros", [-1, 5])
    def test_impossible_zeros_per_block(self, library: Any, zeros: int) -> None:
        with pytest.raises(ValueError):
            mask_of(library, random(4, 4), zeros_per_block=zeros)

    def test_more_than_two_dimensions_are_refused(self, library: Any) -> None:
        with pytest.raises(ValueError):
            mask_of(library, random(2, 3, 4))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
    def test_integers_are_refused_when_scored(self, library: Any, dtype: torch.dtype) -> None:
        sparsifier = library()
        sparsifier.add_data("w", torch.ones(4, 4, dtype=dtype))
        with pytest.raises(NotImplementedError):
            sparsifier.step()

    def test_further_keys_are_ignored(self, library: Any) -> None:
        sparsifier = library()
        sparsifier.add_data("w", random(4, 8), anything=1)
        sparsifier.step()
        assert sparsifier.get_mask("w").sum() == 16

    def test_config_of_the_entry_counts(self, library: Any) -> None:
        sparsifier = library(sparsity_level=0.5, sparse_block_shape=(1, 2), zeros_per_block=2)
        sparsifier.add_data("a", random(4, 8))
        sparsifier.add_data("b", random(4, 8), sparsity_level=0.25)
        sparsifier.step()
        assert [int(sparsifier.get_mask(name).sum()) for name in "ab"] == [16, 24]
        sparsifier.data_groups["a"]["sparsity_level"] = 0.75
        sparsifier.step()
        assert sparsifier.get_mask("a").sum() == 8


class TestMask:
    def test_is_int8_and_the_same_object(self, library: Any) -> None:
        sparsifier = library([("w", random(6, 8))])
        mask = sparsifier.get_mask("w")
        sparsifier.step()
        assert sparsifier.get_mask("w") is mask
        assert mask.dtype == torch.int8 and set(mask.unique().tolist()) == {0, 1}

    def test_is_recomputed_from_scratch(self, library: Any) -> None:
        data = random(16, 8)
        sparsifier = library([("w", data)])
        sparsifier.step()
        first = sparsifier.get_mask("w").clone()
        data.copy_(random(16, 8, seed=1))
        sparsifier.get_mask("w").zero_()
        sparsifier.step()
        assert torch.equal(sparsifier.get_mask("w"), mask_of(library, random(16, 8, seed=1)))
        assert not torch.equal(sparsifier.get_mask("w"), first)

    @pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
    def test_of_embeddings_and_parameters(self, library: Any, kind: Any) -> None:
        module = kind(10, 8)
        with torch.no_grad():
            module.weight.copy_(random(10, 8))
        expected = oracle_mask(random(10, 8), 0.5)
        assert torch.equal(mask_of(library, module), expected)
        assert torch.equal(mask_of(library, nn.Parameter(random(10, 8))), expected)

    @pytest.mark.parametrize("blocks, removed", [(1, 0), (2, 1), (3, 2), (5, 2), (6, 3), (7, 4)])
    def test_halves_round_to_even(self, library: Any, blocks: int, removed: int) -> None:
        mask = mask_of(library, random(blocks, 4), sparsity_level=0.5)
        assert int((mask.sum(1) == 0).sum()) == removed

    @pytest.mark.parametrize(
        "level, kept", [(0.0, 64), (-5.0, 64), (1.0, 0), (3.0, 0), (np.float32(0.5), 32)]
    )
    def test_level_is_clipped(self, library: Any, level: float, kept: int) -> None:
        assert mask_of(library, random(8, 8), sparsity_level=level).sum() == kept

    def test_zero_zeros_per_block_is_dense(self, library: Any) -> None:
        assert mask_of(library, random(8, 8), sparsity_level=0.9, zeros_per_block=0).sum() == 64

    def test_edge_blocks_compete_by_mean(self, library: Any) -> None:
        # Blocks of 4, 4 and 1 elements. Their means are 2, 3 and 2.5: the last has the least sum,
        # the first is removed.
        data = torch.tensor([[2.0, 2, 2, 2, 3, 3, 3, 3, 2.5]])
        mask = mask_of(library, data, sparsity_level=1 / 3)
        assert mask.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1]]
        data[0, 8] = 1.5
        assert mask_of(library, data, sparsity_level=1 / 3).tolist() == [
            [1, 1, 1, 1, 1, 1, 1, 1, 0]
        ]

    def test_edge_blocks_lose_real_elements_first(self, library: Any) -> None:
        # The edge block has two real elements: with two zeros per block it is removed whole.
        data = torch.tensor([[4.0, 1, 3, 2, 0.5, 0.1]])
        assert mask_of(library, data, sparsity_level=1.0, zeros_per_block=2).tolist() == [
            [1, 0, 1, 0, 0, 0]
        ]

    @pytest.mark.parametrize("block", BLOCKS)
    @pytest.mark.parametrize("norm", ["L1", "L2"])
    def test_same_as_the_ancestor_and_the_oracle(self, norm: str, block: tuple[int, int]) -> None:
        zeros = sorted({1, (area(block) + 1) // 2, area(block)})
        for number, (shape, level, zeros_per_block) in enumerate(
            itertools.product(SHAPES, LEVELS, zeros)
        ):
            data = random(*shape, seed=number)
            config: dict[str, Any] = {
                "sparsity_level": level,
                "sparse_block_shape": block,
                "zeros_per_block": zeros_per_block,
            }
            ours = mask_of(DataNormSparsifier, data, norm=norm, **config)
            where = f"{shape=} {norm=} {config}"
            assert torch.equal(ours, oracle_mask(data, level, block, zeros_per_block, norm)), where
            assert torch.equal(ours, mask_of(Ancestor, data, norm=norm, **config)), where

    @pytest.mark.parametrize("block", BLOCKS)
    def test_float64(self, block: tuple[int, int]) -> None:
        data = random(33, 17, dtype=torch.float64)
        config: dict[str, Any] = {"sparsity_level": 0.6, "sparse_block_shape": block, "norm": "L2"}
        ours = mask_of(DataNormSparsifier, data, **config)
        assert torch.equal(ours, oracle_mask(data, 0.6, block, norm="L2"))
        assert torch.equal(ours, mask_of(Ancestor, data, **config))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("block", BLOCKS)
    @pytest.mark.parametrize("norm", ["L1", "L2"])
    def test_half_types_follow_the_float64_rule(
        self, dtype: torch.dtype, block: tuple[int, int], norm: str
    ) -> None:
        for level in LEVELS:
            data = random(33, 17, dtype=dtype)
            ours = mask_of(
                DataNormSparsifier, data, sparsity_level=level, sparse_block_shape=block, norm=norm
            )
            assert torch.equal(ours, oracle_mask(data, level, block, norm=norm))
            assert_count_of_blocks(ours, level, block)

    def test_magnitudes_that_float32_sums_would_lose(self) -> None:
        # 2**24 + 1 + 1 + 1 + 1: summed in float32 the ones vanish.
        data = torch.tensor([[1.0, 1, 1, 1, 2.0**24], [0, 0, 0, 0, 2.0**24 + 2]])
        mask = mask_of(
            DataNormSparsifier,
            data,
            sparsity_level=0.5,
            sparse_block_shape=(1, 5),
            zeros_per_block=5,
        )
        assert mask.sum(1).tolist() == [5, 0]


class TestTies:
    """The ancestor promises counts and whole blocks; here the smaller row-major index is removed
    first."""

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("block", BLOCKS)
    @pytest.mark.parametrize(
        "data",
        [torch.ones(12, 10), torch.zeros(12, 10), -torch.ones(7, 7)],
        ids=["ones", "zeros", "minus"],
    )
    def test_all_equal(self, data: Tensor, block: tuple[int, int], level: float) -> None:
        for library in (DataNormSparsifier, Ancestor):
            assert_count_of_blocks(
                mask_of(library, data, sparsity_level=level, sparse_block_shape=block), level, block
            )
        ours = mask_of(DataNormSparsifier, data, sparsity_level=level, sparse_block_shape=block)
        assert torch.equal(ours, oracle_mask(data, level, block))

    def test_equal_elements_inside_a_block(self) -> None:
        mask = mask_of(DataNormSparsifier, torch.ones(2, 4), sparsity_level=1.0, zeros_per_block=2)
        assert mask.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]

    def test_minus_zero_is_zero(self) -> None:
        data = torch.tensor([[0.0, 0, 0, 0], [-0.0, -0.0, -0.0, -0.0], [1, 1, 1, 1]])
        assert mask_of(DataNormSparsifier, data, sparsity_level=1 / 3).sum(1).tolist() == [0, 4, 4]

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def test_the_oracle_decides(self, draw: st.DataObject) -> None:
        rows, cols = draw.draw(st.integers(1, 12)), draw.draw(st.integers(1, 12))
        block = draw.draw(st.integers(1, 5)), draw.draw(st.integers(1, 5))
        values = draw.draw(
            st.lists(
                st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5]),
                min_size=rows * cols,
                max_size=rows * cols,
            )
        )
        config: dict[str, Any] = {
            "sparsity_level": draw.draw(st.floats(-0.2, 1.2)),
            "sparse_block_shape": block,
            "zeros_per_block": draw.draw(st.integers(0, area(block))),
            "norm": draw.draw(st.sampled_from(["L1", "L2"])),
        }
        data = torch.tensor(values).reshape(rows, cols)
        expected = oracle_mask(
            data, config["sparsity_level"], block, config["zeros_per_block"], config["norm"]
        )
        assert torch.equal(mask_of(DataNormSparsifier, data, **config), expected)


class TestMendedBugs:
    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
        ids=["deepcopy", "pickle"],
    )
    def test_bug_9_copies_know_their_norm(self, copied: Any) -> None:
        data = random(16, 8)
        sparsifier = DataNormSparsifier([("w", data)], sparsity_level=0.3, norm="L2")
        twin = copied(sparsifier)
        twin.step()
        assert twin.norm == "L2" and torch.equal(
            twin.get_mask("w"), oracle_mask(data, 0.3, norm="L2")
        )
        assert sparsifier.get_mask("w").sum() == 128

    @pytest.mark.parametrize("level", [-0.1, -0.5, -0.99, -1.0])
    def test_bug_12_negative_level_is_dense(self, level: float) -> None:
        assert mask_of(DataNormSparsifier, random(16, 8), sparsity_level=level).sum() == 128

    @pytest.mark.parametrize(
        "shape",
        [(12,), (12, 1), (1, 12), (1, 1), (1,), (), (1, 3, 4), (3, 1, 4), (3, 4, 1), (1, 1, 12)],
        ids=str,
    )
    @pytest.mark.parametrize("block", [(1, 1), (1, 4), (4, 1)])
    def test_bugs_13_to_16_mask_has_the_shape_of_the_data(
        self, shape: tuple[int, ...], block: tuple[int, int]
    ) -> None:
        data = random(*shape)
        before = data.clone()
        sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=block)
        sparsifier.add_data("w", data)
        sparsifier.step()
        mask = sparsifier.get_mask("w")
        assert mask.shape == data.shape and mask.dtype == torch.int8
        assert torch.equal(sparsifier.get_data("w", return_original=False), before * mask)
        if block == (1, 1):
            assert int((mask == 0).sum()) == round(0.5 * data.numel())
            assert torch.equal(
                mask.flatten(), oracle_mask(before.reshape(1, -1), 0.5, (1, 1)).flatten()
            )
        sparsifier.squash_mask()
        assert torch.equal(data, before * mask)

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (0, 0)], ids=str)
    def test_mask_of_data_without_elements_is_int8_too(self, shape: tuple[int, ...]) -> None:
        """The ancestor raises a RuntimeError."""
        sparsifier = DataNormSparsifier([("w", torch.zeros(shape))], 0.5)
        mask = sparsifier.get_mask("w")
        sparsifier.step()
        assert sparsifier.get_mask("w") is mask
        assert mask.shape == shape and mask.dtype == torch.int8
        with pytest.raises(RuntimeError):
            mask_of(Ancestor, torch.zeros(shape))

    def test_bug_13_one_dimension_is_a_row(self) -> None:
        data = random(10)
        mask = mask_of(DataNormSparsifier, data, sparse_block_shape=(1, 4))
        assert torch.equal(mask, oracle_mask(data[None], 0.5, (1, 4))[0])

    @pytest.mark.parametrize("block", [(1, 2), (1, 8), (2, 2)])
    def test_bug_17_zeros_per_block_follows_the_entrys_block(self, block: tuple[int, int]) -> None:
        sparsifier = DataNormSparsifier(sparsity_level=0.5)
        data = random(8, 16)
        sparsifier.add_data("w", data, sparse_block_shape=block)
        sparsifier.step()
        assert torch.equal(sparsifier.get_mask("w"), oracle_mask(data, 0.5, block))

    def test_bug_17_but_not_if_it_was_given(self) -> None:
        data = random(8, 16)
        sparsifier = DataNormSparsifier(sparsity_level=0.5, zeros_per_block=3)
        sparsifier.add_data("w", data, sparse_block_shape=(1, 8))
        other = DataNormSparsifier(sparsity_level=0.5)
        other.add_data("w", data, sparse_block_shape=(1, 8), zeros_per_block=3)
        for one in (sparsifier, other):
            one.step()
            assert torch.equal(one.get_mask("w"), oracle_mask(data, 0.5, (1, 8), 3))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_non_finite_scores_are_refused_and_change_nothing(self, value: float) -> None:
        good, bad = random(4, 8), random(4, 8)
        bad[1, 2] = value
        sparsifier = DataNormSparsifier([("good", good), ("bad", bad)])
        with pytest.raises(ValueError, match="bad"):
            sparsifier.step()
        for name in ("good", "bad"):
            assert sparsifier.get_mask(name).sum() == 32


def assert_count_of_blocks(mask: Tensor, level: float, block: tuple[int, int]) -> None:
    """As many whole blocks as the level asks for are removed, and all of the others are kept."""
    rows, cols = mask.shape
    removed = 0
    for top, left in itertools.product(range(0, rows, block[0]), range(0, cols, block[1])):
        piece = mask[top : top + block[0], left : left + block[1]]
        assert piece.unique().numel() == 1
        removed += int(piece[0, 0] == 0)
    total = oracle_blocks((rows, cols), block)
    assert removed == min(max(round(level * total), 0), total)
