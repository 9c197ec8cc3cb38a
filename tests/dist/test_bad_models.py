"""Bad arguments of add_model() and add_data() are refused on every rank. One rank is bad, each in
turn. (C6, C7)

Each case starts from a good sparsifier, spoils something on the bad rank, and names the words of
the error; refusals.py checks the rest.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import ROW, DataNormSparsifier
from tests.dist.cells import Cell, build, cells
from tests.dist.cells import gathered as gathered_model
from tests.dist.refusals import Scene, is_bad, on_each_bad_rank, raised_by, weights
from tests.oracle import oracle_mask

ARGUMENTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "include_matches_nothing": (
        ["rank {bad}", "include pattern 'itme'", "user"],
        {"include": "itme"},
    ),
    "exclude_matches_nothing": (
        ["rank {bad}", "exclude pattern 'itme'", "user"],
        {"exclude": ["item", "itme"]},
    ),
    "include_and_exclude_leave_nothing": (
        ["rank {bad}", "leave none of the tables"],
        {"exclude": "*"},
    ),
    "unknown_key": (
        ["rank {bad}", r"unknown keys \['sparsity'\]", "known are"],
        {"config": {"sparsity": 0.5}},
    ),
    "unknown_glob": (
        ["rank {bad}", "'itme' matches no table"],
        {"config": {"itme": {"sparsity_level": 0.5}}},
    ),
    "mixed_config": (
        ["rank {bad}", "unknown keys .*item"],
        {"config": {"item": {}, "sparsity_level": 0.5}},
    ),
    "not_a_block": (
        ["rank {bad}", r"sparse_block_shape=\(0, 4\) of 'user'", "two positive ints"],
        {"config": {"sparse_block_shape": (0, 4)}},
    ),
    "row_of_rows": (
        ["rank {bad}", r"'ROW', 4\) of 'user'", "two positive ints"],
        {"config": {"sparse_block_shape": (ROW, 4)}},
    ),
    "too_many_zeros": (
        ["rank {bad}", "zeros_per_block=5 of 'word'"],
        {"config": {"word": {"zeros_per_block": 5}}},
    ),
    "no_level": (
        ["rank {bad}", "sparsity_level=nan of 'tiny'"],
        {"config": {"t*": {"sparsity_level": torch.nan}}},
    ),
    "other_tables": (
        ["table 'item' is nothing on rank|nothing on rank", "rank 1"],
        {"exclude": "item"},
    ),
    "other_level_of_one": (
        ["table 'tiny'", "0.75", "rank 1"],
        {"config": {"tiny": {"sparsity_level": 0.75}}},
    ),
}
"""Words of the error, and the arguments of add_model() on the bad rank."""


def refused_model(
    sparsifier: Any, model: nn.Module, cell: Cell, arguments: Any, words: list[str]
) -> None:
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


@on_each_bad_rank
@pytest.mark.parametrize(("words", "arguments"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_bad_arguments(bad: int, words: list[str], arguments: dict[str, Any]) -> None:
    cell = cells(2)["mixed"]
    model = build(cell)
    sparsifier = DataNormSparsifier()
    sparsifier.add_data("before", weights(7))
    refused_model(
        sparsifier,
        model,
        cell,
        arguments if is_bad(bad) else {},
        [w.format(bad=bad) for w in words],
    )


@on_each_bad_rank
def test_a_name_twice(bad: int) -> None:
    cell = cells(2)["mixed"]
    model = build(cell)
    sparsifier = DataNormSparsifier()
    if is_bad(bad):
        sparsifier.add_data("item", weights(7))
    message = raised_by(lambda: sparsifier.add_model(model))
    assert re.search(
        rf"rank {bad}: ValueError: The names \['item'\] are registered already", message
    ), message
    assert list(sparsifier.data_groups) == (["item"] if is_bad(bad) else [])
    sparsifier = DataNormSparsifier()
    sparsifier.add_model(model)
    # On all ranks: the table is known under this module.
    message = raised_by(lambda: sparsifier.add_model(model))
    assert "registered already" in message


@on_each_bad_rank
def test_a_name_twice_in_add_data(bad: int) -> None:
    """add_data() never communicates: it raises on its rank alone, and the other continues."""
    scene = Scene()
    if is_bad(bad):
        message = raised_by(lambda: scene.sparsifier.add_data("a", scene.tensors["b"]))
        assert "'a' is registered already" in message
        message = raised_by(lambda: scene.sparsifier.add_data("b", weights(1)))
        assert "'b' belongs to a sharded table" in message
        message = raised_by(
            lambda: scene.sparsifier.add_data("c", scene.tensors["b"], sparse_block_shape=(0, 2))
        )
        assert "sparse_block_shape=(0, 2) of 'c'" in message
        message = raised_by(
            lambda: scene.sparsifier.add_data("c", scene.tensors["b"], zeros_per_block=5)
        )
        assert "zeros_per_block=5 of 'c'" in message
    scene.good()


@on_each_bad_rank
def test_a_model_without_tables(bad: int) -> None:
    cell = cells(2)["mixed"]
    model = build(cell)
    sparsifier = DataNormSparsifier()
    arguments = {"model": nn.Linear(2, 2)} if is_bad(bad) else {}
    refused_model(
        sparsifier, model, cell, arguments, [f"rank {bad}: ValueError: Linear holds no tables"]
    )


@on_each_bad_rank
def test_a_local_model(bad: int) -> None:
    """A model that each rank has for itself: arguments must agree all the same."""
    model = nn.ModuleDict({"own": nn.Embedding(8, 4)})
    sparsifier = DataNormSparsifier()
    message = raised_by(
        lambda: sparsifier.add_model(model, include="nope" if is_bad(bad) else None)
    )
    assert f"rank {bad}: ValueError: Invalid include pattern 'nope'" in message, message
    assert sparsifier.add_model(model) == ["own"]
