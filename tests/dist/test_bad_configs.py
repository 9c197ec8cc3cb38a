"""Are configs, names and shapes that differ refused on every rank? One rank is bad, each in turn. (C6, C7)

Each case makes a good sparsifier, spoils something on the bad rank, and says which words the error must hold. The frame
(refusals.py) checks that every rank raises them, that masks, weights and configs are the same bit for bit, and that a
good step works once the fault is mended.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dist_sparse import DataNormSparsifier
from tests.dist.cells import LOCAL
from tests.dist.harness import run_ranks
from tests.dist.pieces import by_rows, check_outcomes, gathered, sharded, snapshot
from tests.dist.refusals import COLS, COLWISE, ROWS, ROWWISE, Scene, is_bad, raised_by, replica, run_turns, weights
from tests.oracle import oracle_mask

pytestmark = pytest.mark.dist


def other_config(bad: int, key: str, value: Any) -> None:
    scene = Scene()
    good = scene.sparsifier.data_groups["a"][key]
    if is_bad(bad):
        scene.sparsifier.data_groups["a"][key] = value

    def mend() -> None:
        scene.sparsifier.data_groups["a"][key] = good

    message = scene.refused(
        "config of table 'a'", "rank 0", "rank 1", re.escape(str(value).strip("(),")[:3]), mend=mend
    )
    assert "table 'b'" not in message


def other_level(bad: int) -> None:
    other_config(bad, "sparsity_level", 0.75)


def other_level_of_numpy(bad: int) -> None:
    """It is compared by its value, not by its type."""
    other_config(bad, "sparsity_level", np.float32(0.75))


def other_block(bad: int) -> None:
    other_config(bad, "sparse_block_shape", (2, 2))


def other_zeros(bad: int) -> None:
    other_config(bad, "zeros_per_block", 2)


def unknown_level(bad: int) -> None:
    scene = Scene()
    if is_bad(bad):
        scene.sparsifier.data_groups["a"]["sparsity_level"] = "half"

    def mend() -> None:
        scene.sparsifier.data_groups["a"]["sparsity_level"] = 0.5

    scene.refused(f"rank {bad}: ValueError", "sparsity_level='half' of 'a'", "must be a number", mend=mend)


def other_norm(bad: int) -> None:
    scene = Scene()
    if is_bad(bad):
        scene.sparsifier.norm = "L2"

    def mend() -> None:
        scene.sparsifier.norm = "L1"

    scene.refused("config of table 'a'", "L1", "L2", "rank 1", mend=mend)


def other_repair(bad: int) -> None:
    """With drifted replicas, a rank that raised would leave one that repairs waiting."""
    scene = Scene(extra={"twin": replica()})
    if is_bad(bad):
        scene.sparsifier.repair = "broadcast"
        scene.tensors["twin"].to_local().add_(1.0)

    def mend() -> None:
        scene.sparsifier.repair = "raise"

    scene.refused("sparsifier.repair is", "broadcast", "rank 1", mend=mend)


def other_names(bad: int) -> None:
    """The bad rank calls one table otherwise. Once they have other names, ranks can't be mended: they start anew."""
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0), ROWWISE), "typo" if is_bad(bad) else "b": sharded(weights(1), ROWWISE)}
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "table 'b'" in message and "table 'typo'" in message and "rank 1" in message, message
    assert snapshot(sparsifier, tensors) == before
    Scene().good()


def more_names(bad: int) -> None:
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0), ROWWISE)} | ({"b": sharded(weights(1), ROWWISE)} if is_bad(bad) else {})
    for name, tensor in tensors.items():
        sparsifier.add_data(name, tensor)
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "table 'b'" in message and "nothing on rank" in message, message
    assert snapshot(sparsifier, tensors) == before
    Scene().good()


def other_order(bad: int) -> None:
    """No fault: the order in which tables were added does not matter."""
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


def other_shape(bad: int) -> None:
    rows = ROWS + 1 if is_bad(bad) else ROWS
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0, rows), by_rows(rows, COLS, 4))}
    sparsifier.add_data("a", tensors["a"])
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "shape of table 'a'" in message and str(ROWS + 1) in message and "rank 1" in message, message
    assert snapshot(sparsifier, tensors) == before


def other_tiling(bad: int) -> None:
    sparsifier = DataNormSparsifier()
    tensors = {"a": sharded(weights(0), by_rows(ROWS, COLS, 5 if is_bad(bad) else 4))}
    sparsifier.add_data("a", tensors["a"])
    before = snapshot(sparsifier, tensors)
    message = raised_by(sparsifier.step)
    assert "sharding of table 'a'" in message and "rank 1" in message, message
    assert snapshot(sparsifier, tensors) == before


def zeros_over_a_column_border(bad: int) -> None:
    scene = Scene(COLWISE)
    for key, value in (("sparse_block_shape", (1, 2)), ("zeros_per_block", 1)):
        scene.sparsifier.data_groups["a"][key] = value

    def mend() -> None:
        scene.sparsifier.data_groups["a"]["sparse_block_shape"] = (2, 1)

    scene.refused("Table 'a'", "zeros_per_block=1", r"column border.* \[5\]", r"fit: \[1\]", mend=mend)


CASES: dict[str, Callable[[int], None]] = {
    case.__name__: case
    for case in (
        other_level,
        other_level_of_numpy,
        other_block,
        other_zeros,
        unknown_level,
        other_norm,
        other_repair,
        other_names,
        more_names,
        other_order,
        other_shape,
        other_tiling,
        zeros_over_a_column_border,
    )
}


def run_all() -> dict[str, str | None]:
    return run_turns(CASES)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str | None]]:
    return run_ranks(2, run_all, local_world_size=LOCAL[2])


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_refused_on_every_rank(outcomes: list[dict[str, str | None]], case: str, bad: int) -> None:
    check_outcomes(outcomes, f"{case}-{bad}")
