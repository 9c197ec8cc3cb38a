"""Configs, names and shapes that differ are refused on every rank. One rank is bad, each in turn.
(C6, C7)

Each case starts from a good sparsifier, spoils something on the bad rank, and names the words of
the error; refusals.py checks the rest.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from dist_sparse import DataNormSparsifier
from tests.dist.pieces import by_rows, gathered, sharded, snapshot
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
from tests.oracle import oracle_mask


def other_config(bad: int, key: str, value: Any) -> None:
    scene = Scene()
    good = scene.sparsifier.data_groups["a"][key]
    if is_bad(bad):
        scene.sparsifier.data_groups["a"][key] = value

    def fix() -> None:
        scene.sparsifier.data_groups["a"][key] = good

    message = scene.refused(
        "config of table 'a'", "rank 0", "rank 1", re.escape(str(value).strip("(),")[:3]), fix=fix
    )
    assert "table 'b'" not in message


@on_each_bad_rank
def test_other_level(bad: int) -> None:
    other_config(bad, "sparsity_level", 0.75)


@on_each_bad_rank
def test_other_level_of_numpy(bad: int) -> None:
    """It is compared by its value, not by its type."""
    other_config(bad, "sparsity_level", np.float32(0.75))


@on_each_bad_rank
def test_other_block(bad: int) -> None:
    other_config(bad, "sparse_block_shape", (2, 2))


@on_each_bad_rank
def test_other_zeros(bad: int) -> None:
    other_config(bad, "zeros_per_block", 2)


@on_each_bad_rank
def test_unknown_level(bad: int) -> None:
    scene = Scene()
    if is_bad(bad):
        scene.sparsifier.data_groups["a"]["sparsity_level"] = "half"

    def fix() -> None:
        scene.sparsifier.data_groups["a"]["sparsity_level"] = 0.5

    scene.refused(
        f"rank {bad}: ValueError",
        "sparsity_level='half' of 'a'",
        "must be a finite number",
        fix=fix,
    )


@on_each_bad_rank
def test_other_norm(bad: int) -> None:
    scene = Scene()
    if is_bad(bad):
        scene.sparsifier.norm = "L2"

    def fix() -> None:
        scene.sparsifier.norm = "L1"

    scene.refused("sparsifier.measure", "L1", "L2", "rank 1", fix=fix)


@on_each_bad_rank
def test_other_names(bad: int) -> None:
    """The bad rank gives a table another name. Names can't be fixed afterwards: the good step has
    new sparsifiers."""
    sparsifier = DataNormSparsifier()
    tensors = {
        "a": sharded(weights(0), ROWWISE),
        "typo" if is_bad(bad) else "b": sharded(weights(1), ROWWISE),
    }
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "table 'b'" in message and "table 'typo'" in message and "rank 1" in message, message
    assert snapshot(sparsifier, tensors) == before
    Scene().good()


@on_each_bad_rank
def test_more_names(bad: int) -> None:
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0), ROWWISE)} | (
        {"b": sharded(weights(1), ROWWISE)} if is_bad(bad) else {}
    )
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "table 'b'" in message and "nothing on rank" in message, message
    assert snapshot(sparsifier, tensors) == before
    Scene().good()


@on_each_bad_rank
def test_other_order(bad: int) -> None:
    """Not an error: the order in which tables were added does not matter."""
    sparsifier = DataNormSparsifier()
    names = ["a", "b"] if not is_bad(bad) else ["b", "a"]
    tensors = {name: sharded(weights(ord(name)), ROWWISE) for name in names}
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    full = {name: gathered(tensors[name]) for name in ("a", "b")}
    sparsifier.data_groups["a"]["sparsity_level"] = 0.8
    sparsifier.step()
    counts = {stats.name: stats.removed_blocks for stats in sparsifier.table_stats()}
    for name, level in (("a", 0.8), ("b", 0.5)):
        want = oracle_mask(full[name], level)
        assert torch.equal(sparsifier.full_mask(name), want), name
        assert counts[name] == int((want == 0).sum()) // 4
    sparsifier.audit()


@on_each_bad_rank
def test_other_shape(bad: int) -> None:
    rows = ROWS + 1 if is_bad(bad) else ROWS
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0, rows), by_rows(rows, COLS, 4))}
    sparsifier.add_data("a", tensors["a"])
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "shape of table 'a'" in message and str(ROWS + 1) in message and "rank 1" in message, (
        message
    )
    assert snapshot(sparsifier, tensors) == before


@on_each_bad_rank
def test_other_tiling(bad: int) -> None:
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0), by_rows(ROWS, COLS, 5 if is_bad(bad) else 4))}
    sparsifier.add_data("a", tensors["a"])
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "sharding of table 'a'" in message and "rank 1" in message, message
    assert snapshot(sparsifier, tensors) == before


@on_each_bad_rank
def test_zeros_over_a_column_border(bad: int) -> None:
    scene = Scene(COLWISE)
    for key, value in (("sparse_block_shape", (1, 2)), ("zeros_per_block", 1)):
        scene.sparsifier.data_groups["a"][key] = value

    def fix() -> None:
        scene.sparsifier.data_groups["a"]["sparse_block_shape"] = (2, 1)

    scene.refused(
        "Table 'a'", "zeros_per_block=1", r"column border.* \[5\]", r"fit: \[1\]", fix=fix
    )
