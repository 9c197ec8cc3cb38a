"""Are bad arguments of add_model() and add_data() refused on every rank? One rank is bad, each in turn. (C6, C7)

Each case makes a good sparsifier, spoils something on the bad rank, and says which words the error must hold. The frame
(refusals.py) checks that every rank raises them, that masks, weights and configs are the same bit for bit, and that a
good step works once the fault is mended.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import ROW, DataNormSparsifier
from tests.dist.cells import LOCAL, Cell, build, cells
from tests.dist.cells import gathered as gathered_model
from tests.dist.harness import run_ranks
from tests.dist.pieces import check_outcomes
from tests.dist.refusals import Scene, is_bad, raised_by, run_turns, weights
from tests.oracle import oracle_mask

pytestmark = pytest.mark.dist


def model_case(words: list[str], **arguments: Any) -> Callable[[int], None]:
    """add_model() with bad arguments on the bad rank and none on the other."""

    def case(bad: int) -> None:
        cell = cells(2)["mixed"]
        model = build(cell)
        sparsifier = DataNormSparsifier()
        sparsifier.add_data("before", weights(7))
        refused_model(sparsifier, model, cell, arguments if is_bad(bad) else {}, [w.format(bad=bad) for w in words])

    return case


def refused_model(sparsifier: Any, model: nn.Module, cell: Cell, arguments: Any, words: list[str]) -> None:
    full = gathered_model(model)
    before = repr(sparsifier.data_groups), repr(sparsifier.defaults)
    message = raised_by(lambda: sparsifier.add_model(arguments.pop("model", model), **arguments))
    for word in words:
        assert re.search(word, message), f"{word!r} is not in: {message}"
    assert (repr(sparsifier.data_groups), repr(sparsifier.defaults)) == before
    assert all(torch.equal(full[name], weight) for name, weight in gathered_model(model).items())
    sparsifier.step()  # there is nothing sharded yet
    names = sparsifier.add_model(model, config={"sparsity_level": 0.25})
    assert names == [table.name for table in cell.tables]
    sparsifier.step()
    for name in names:
        assert torch.equal(sparsifier.full_mask(name), oracle_mask(full[name], 0.25)), name


def a_name_twice(bad: int) -> None:
    cell = cells(2)["mixed"]
    model = build(cell)
    sparsifier = DataNormSparsifier()
    if is_bad(bad):
        sparsifier.add_data("item", weights(7))
    message = raised_by(lambda: sparsifier.add_model(model))
    assert re.search(rf"rank {bad}: ValueError: The names \['item'\] are registered already", message), message
    assert list(sparsifier.data_groups) == (["item"] if is_bad(bad) else [])
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model)
    message = raised_by(lambda: sparsifier.add_model(model))  # on all ranks: the table is known under this module
    assert "registered already" in message


def a_name_twice_in_add_data(bad: int) -> None:
    """add_data never communicates: it raises where it is called, and the others go on when that rank does."""
    scene = Scene()
    if is_bad(bad):
        message = raised_by(lambda: scene.sparsifier.add_data("a", scene.tensors["b"]))
        assert "'a' is registered already" in message
        message = raised_by(lambda: scene.sparsifier.add_data("b", weights(1)))
        assert "'b' belongs to a sharded table" in message
        message = raised_by(lambda: scene.sparsifier.add_data("c", scene.tensors["b"], sparse_block_shape=(0, 2)))
        assert "sparse_block_shape=(0, 2) of 'c'" in message
        message = raised_by(lambda: scene.sparsifier.add_data("c", scene.tensors["b"], zeros_per_block=5))
        assert "zeros_per_block=5 of 'c'" in message
    scene.good()


def a_model_without_tables(bad: int) -> None:
    cell = cells(2)["mixed"]
    model = build(cell)
    sparsifier = DataNormSparsifier()
    arguments = {"model": nn.Linear(2, 2)} if is_bad(bad) else {}
    refused_model(sparsifier, model, cell, arguments, [f"rank {bad}: ValueError: Linear holds no tables"])


def a_local_model(bad: int) -> None:
    """A model that every rank has for itself: the ranks must agree all the same."""
    model = nn.ModuleDict({"own": nn.Embedding(8, 4)})
    sparsifier = DataNormSparsifier()
    message = raised_by(lambda: sparsifier.add_model(model, include="nope" if is_bad(bad) else None))
    assert f"rank {bad}: ValueError: Invalid include pattern 'nope'" in message, message
    assert sparsifier.add_model(model) == ["own"]


STEP_CASES = (
    a_name_twice,
    a_name_twice_in_add_data,
    a_model_without_tables,
    a_local_model,
)
MODEL_CASES = {
    "include_matches_nothing": model_case(["rank {bad}", "include pattern 'itme'", "user"], include="itme"),
    "exclude_matches_nothing": model_case(["rank {bad}", "exclude pattern 'itme'", "user"], exclude=["item", "itme"]),
    "include_and_exclude_leave_nothing": model_case(["rank {bad}", "leave none of the tables"], exclude="*"),
    "unknown_key": model_case(["rank {bad}", r"unknown keys \['sparsity'\]", "known are"], config={"sparsity": 0.5}),
    "unknown_glob": model_case(["rank {bad}", "'itme' matches no table"], config={"itme": {"sparsity_level": 0.5}}),
    "mixed_config": model_case(["rank {bad}", "not both"], config={"item": {}, "sparsity_level": 0.5}),
    "not_a_block": model_case(
        ["rank {bad}", r"sparse_block_shape=\(0, 4\) of 'user'", "two positive ints"],
        config={"sparse_block_shape": (0, 4)},
    ),
    "row_of_rows": model_case(
        ["rank {bad}", r"'ROW', 4\) of 'user'", "two positive ints"], config={"sparse_block_shape": (ROW, 4)}
    ),
    "too_many_zeros": model_case(
        ["rank {bad}", "zeros_per_block=5 of 'word'"], config={"word": {"zeros_per_block": 5}}
    ),
    "no_level": model_case(
        ["rank {bad}", "sparsity_level=nan of 'tiny'"], config={"t*": {"sparsity_level": torch.nan}}
    ),
    "other_tables": model_case(["table 'item' is nothing on rank|nothing on rank", "rank 1"], exclude="item"),
    "other_level_of_one": model_case(["table 'tiny'", "0.75", "rank 1"], config={"tiny": {"sparsity_level": 0.75}}),
}
CASES: dict[str, Callable[[int], None]] = {case.__name__: case for case in STEP_CASES} | MODEL_CASES


def run_all() -> dict[str, str | None]:
    return run_turns(CASES)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str | None]]:
    return run_ranks(2, run_all, local_world_size=LOCAL[2])


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_refused_on_every_rank(outcomes: list[dict[str, str | None]], case: str, bad: int) -> None:
    check_outcomes(outcomes, f"{case}-{bad}")
