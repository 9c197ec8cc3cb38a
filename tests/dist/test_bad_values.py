"""Weights and scores that are not finite are refused on every rank. One rank is bad, each in turn.
(C6, C7)

Each case starts from a good sparsifier, spoils something on the bad rank, and names the words of
the error; refusals.py checks the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse import ROW, BaseDataSparsifier, DataNormSparsifier
from dist_sparse.extend import ScoreSparsifier
from tests.dist.pieces import gathered, sharded, snapshot
from tests.dist.refusals import (
    COLS,
    COLWISE,
    ROWS,
    ROWWISE,
    Scene,
    is_bad,
    on_each_bad_rank,
    raised_by,
    weights,
)

# -- weights
# -----------------------------------------------------------------------------------------------------------


def not_finite(bad: int, value: float, row: int, col: int, scene: Scene) -> None:
    """``(row, col)`` is on rank 0; its mirror, counted from the last row and column, on rank 1."""
    row, col = (row, col) if bad == 0 else (ROWS - 1 - row, COLS - 1 - col)
    scene.put("a", row, col, value)
    scene.refused(
        f"rank {bad}: ValueError: Table 'a'",
        "row [0-9]+, column [0-9]+",
        "must be finite",
        fix=lambda: None,
    )


@on_each_bad_rank
def test_nan_row_wise(bad: int) -> None:
    not_finite(bad, torch.nan, 1, 2, Scene())


@on_each_bad_rank
def test_nan_in_a_whole_row(bad: int) -> None:
    not_finite(bad, torch.nan, 1, 2, Scene(config={"sparse_block_shape": (1, ROW)}))


@on_each_bad_rank
def test_inf_row_wise(bad: int) -> None:
    not_finite(bad, -torch.inf, 2, 2, Scene(config={"norm": "L2"}))


@on_each_bad_rank
def test_inf_by_element(bad: int) -> None:
    not_finite(bad, torch.inf, 2, 2, Scene(config={"sparse_block_shape": (1, 1)}))


@on_each_bad_rank
def test_inf_fp16(bad: int) -> None:
    not_finite(bad, torch.inf, 2, 2, Scene(dtype=torch.float16))


@on_each_bad_rank
def test_nan_column_wise(bad: int) -> None:
    """In a block that is cut by a column border: the partial sums are NaN."""
    not_finite(bad, torch.nan, 3, 4, Scene(COLWISE, {"sparse_block_shape": (1, ROW)}))


@on_each_bad_rank
def test_nan_in_a_slab(bad: int) -> None:
    """In a block cut by a row border, of which only some elements are pruned: element scores cross
    ranks."""
    not_finite(
        bad, torch.nan, 3, 1, Scene(ROWWISE, {"sparse_block_shape": (6, 4), "zeros_per_block": 5})
    )


@on_each_bad_rank
def test_overflow_of_the_whole(bad: int) -> None:
    """Each part of a cut row fits float32, their sum does not. No rank is at fault, so none is
    named."""
    scene = Scene(COLWISE, {"sparse_block_shape": (1, ROW), "norm": "L2"})
    for col in (1, COLS - 2):
        scene.put("a", 4, col, (2.5e38 * COLS) ** 0.5)
    scene.refused("Table 'a'", "float32", "must be finite", fix=lambda: None)


@on_each_bad_rank
def test_no_overflow_alone(bad: int) -> None:
    """The control: one part of that size is fine."""
    scene = Scene(COLWISE, {"sparse_block_shape": (1, ROW), "norm": "L2"})
    scene.put("a", 4, 1, (2.5e38 * COLS) ** 0.5)
    scene.sparsifier.step()
    scene.good()


@on_each_bad_rank
def test_nan_in_plain_data(bad: int) -> None:
    """Plain data of one rank fails: new plain masks of the other rank are rolled back too."""
    scene = Scene()
    plain = weights(5)
    scene.sparsifier.add_data("mine", plain)
    scene.sparsifier.step()
    scene.sparsifier.data_groups["mine"]["sparsity_level"] = 0.9
    mask = scene.sparsifier.get_mask("mine")
    kept = mask.clone()
    if is_bad(bad):
        plain[0, 0] = torch.nan
    before = snapshot(scene.sparsifier, scene.tensors)
    message = raised_by(scene.sparsifier.step)
    assert f"rank {bad}: ValueError: Table 'mine'" in message, message
    assert snapshot(scene.sparsifier, scene.tensors) == before
    assert scene.sparsifier.get_mask("mine") is mask and torch.equal(mask, kept)
    plain[0, 0] = 1.0
    scene.good()
    assert int((mask == 0).sum()) != int((kept == 0).sum())


@on_each_bad_rank
def test_nan_in_a_local_table(bad: int) -> None:
    """A table that each rank has for itself, registered before a sharded one."""
    sparsifier = DataNormSparsifier()
    local = nn.ModuleDict({"own": nn.Embedding(8, 4)})
    sparsifier.add_model(local)
    tensors = {"a": sharded(weights(0), ROWWISE)}
    sparsifier.add_data("a", tensors["a"])
    sparsifier.step()
    if is_bad(bad):
        local["own"].weight.data[1, 1] = torch.nan
    masks = sparsifier.get_mask("own")
    before = gathered(tensors["a"]), sparsifier.local_masks("a")[0][1]
    message = raised_by(sparsifier.step)
    assert f"rank {bad}: ValueError: Table 'own'" in message, message
    assert torch.equal(gathered(tensors["a"]), before[0])
    assert torch.equal(sparsifier.local_masks("a")[0][1], before[1])
    assert torch.equal(sparsifier.get_mask("own"), masks)
    local["own"].weight.data[1, 1] = 1.0
    sparsifier.step()


# -- what users write
# --------------------------------------------------------------------------------------------------


class Moody(BaseDataSparsifier):
    """Prune negative weights; with ``mood`` set, raise after the mask was edited."""

    mood = ""

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        self.get_mask(name).copy_(data >= 0)
        if self.mood and name == "b":
            raise KeyError(self.mood)


class MoodyScore(ScoreSparsifier):
    mood = ""

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        if self.mood == "negative":
            return data
        if self.mood == "shape":
            return data[:, :1].abs()
        if self.mood:
            raise OSError(self.mood)
        return data.abs()


def moody(bad: int, kind: type[Any], mood: str, *words: str) -> None:
    scene = Scene(kind=kind)
    if is_bad(bad):
        scene.sparsifier.mood = mood

    def fix() -> None:
        scene.sparsifier.mood = ""

    scene.refused(f"rank {bad}: ", *words, fix=fix)


@on_each_bad_rank
def test_raises_in_update_mask(bad: int) -> None:
    moody(bad, Moody, "not today", "KeyError", "not today")


@on_each_bad_rank
def test_raises_in_score(bad: int) -> None:
    moody(bad, MoodyScore, "disk is full", "OSError", "disk is full")


@on_each_bad_rank
def test_negative_scores(bad: int) -> None:
    moody(bad, MoodyScore, "negative", "Table 'a'", "not negative")


@on_each_bad_rank
def test_scores_of_another_shape(bad: int) -> None:
    moody(bad, MoodyScore, "shape", "score", "shape")
