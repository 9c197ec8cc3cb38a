"""Bytes to levels: what all tables take in the end is what was asked for, to the row."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import COL, ROW, plan, sparsify
from dist_sparse.checks import parse_budget
from dist_sparse.cli import arguments as command_line
from dist_sparse.planning.candidates import Candidate
from dist_sparse.tables.modules import ModelTables
from dist_sparse.tables.shards import ShardedData
from dist_sparse.training.arguments import (
    SparsifyArgs,
    budget_bytes,
    budget_levels,
)
from tests.keywords import nested


def tables_of(model: nn.Module) -> dict[str, ShardedData]:
    return {data.name: data for data in ModelTables(model).locate()}


@dataclass
class Rotated:
    """A rotation of tables, by its names alone."""

    tables: Any

    def rotate(self, sparsifier: Any) -> None:
        raise NotImplementedError


def arguments(**given: Any) -> SparsifyArgs:
    """Arguments; ``rotate`` is given as groups of tables."""
    if given.get("rotate") is not None:
        given["rotate"] = Rotated(given["rotate"])
    bound = inspect.signature(sparsify).bind(
        None, None, end=1, **nested(**{"scope": "table", **given})
    )
    bound.apply_defaults()
    return SparsifyArgs(**bound.kwargs)


def kept(
    budget: Any, block: Any = (1, ROW), dense: Any = (), floors: Any = None, together: bool = False
) -> list[int]:
    """Blocks that stay of tables of 3200 and of 64 rows, 4 wide, in float32 and float16."""
    model = nn.ModuleDict(
        {"a": nn.EmbeddingBag(3200, 4), "b": nn.EmbeddingBag(64, 4, dtype=torch.float16)}
    )
    located = tables_of(model)
    args = arguments(budget=budget, block=block, scope="global" if together else "table")
    pruned = {name: data for name, data in located.items() if name not in dense}
    levels = budget_levels(args, located, pruned, floors or {})
    blocks = {"a": 3200, "b": 64} if block[0] == 1 else {"a": 1600, "b": 32}
    assert all(
        round(level * blocks[name]) == pytest.approx(level * blocks[name])
        for name, level in levels.items()
    )
    return [blocks[name] - round(level * blocks[name]) for name, level in levels.items()]


def test_counts_weights_index_and_dense_tables() -> None:
    assert kept("50%", dense=["b"]) == [(25856 - 512 - 800) // 16], "of 51,200 + 512 bytes"
    assert kept(25856, dense=["b"]) == kept("50%", dense=["b"])
    assert kept(10_000, block=(2, 4), dense=["b"]) == [(10_000 - 512 - 800) // 32], (
        "rows, two and two"
    )
    both = kept("20%")
    assert (
        both[0] * 16 + both[1] * 8 + 800 + 16
        <= 10342
        < both[0] * 16 + both[1] * 8 + 800 + 16 + 16 + 8
    )


def test_what_a_floor_keeps_others_lose() -> None:
    assert kept("20%", floors={"b": 0.75}) == [(10342 - 48 * 8 - 816) // 16, 48]
    assert kept("20%", floors={"b": 0.75}, together=True) == kept("20%")


@pytest.mark.parametrize("budget", ["60%", "21%"])
@pytest.mark.parametrize(
    ("block", "rotate"),
    [((1, ROW), None), ((COL, 1), [["a", "b"]]), ((COL, 1), "table")],
    ids=["row", "groups", "table"],
)
def test_plans_count_the_same(budget: str, block: Any, rotate: Any) -> None:
    """And a block more of each table is too much."""
    tables = tables_of(nn.ModuleDict({"a": nn.Embedding(330, 24), "b": nn.Embedding(100, 24)}))
    levels = budget_levels(arguments(budget=budget, block=block, rotate=rotate), tables, tables, {})
    groups = () if rotate is None else (("a",), ("b",)) if rotate == "table" else rotate
    step = {(1, ROW): 1 / 100, (COL, 1): 4 / 24}[block]

    def served(more: float) -> int:
        least = {name: max(level - more, 0.0) for name, level in levels.items()}
        if groups:
            return (
                Candidate(columns=1 - least["a"], groups=groups)
                .served_bytes([*tables.values()])
                .total
            )
        return Candidate(levels=least).served_bytes([*tables.values()]).total

    assert served(0.0) <= round(parse_budget(budget) * 430 * 24 * 4) < served(step)


def test_the_least_and_the_most() -> None:
    least = 800 + 16 + 16 + 8  # a row of each
    assert kept(least) == [1, 1]
    with pytest.raises(ValueError, match=rf"{least - 1} bytes: {least} are the least"):
        kept(least - 1)
    with pytest.raises(ValueError, match="nothing would be removed"):
        kept(51_712)
    for wrong in (True, 1.5, float("nan"), "half", "101%", "-1%", "nan%", None):
        with pytest.raises(ValueError, match=r"budget=.* bytes .*, or text such as '20%'"):
            parse_budget(wrong)


def test_a_share_in_each_spelling() -> None:
    assert {parse_budget(share) for share in (0.1, "0.1", "10%", "10 %", "10.0%")} == {0.1}
    # By type: an int is bytes.
    assert (parse_budget(100), parse_budget(1.0), parse_budget(0)) == (100, 1.0, 0)
    assert kept(0.5) == kept("50 %") == kept("50%")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10%", 0.1),
        ("0.05", 0.05),
        ("1.0", 1.0),
        ("4096", 4096),
        ("0", 0),
        ("1.5 KiB", 1536),
        ("2TiB", 2 << 40),
        *((wrong, None) for wrong in ("5.0", "5", "99", "1.5", "101%", "12KB", "nan", "1e9", "")),
        ("9" * 400 + "TiB", None),
    ],
)
def test_text_means_the_same_on_the_command_line(text: str, value: float | None) -> None:
    """Or is refused with the same words."""
    if value is not None:
        assert parse_budget(text) == value == command_line.budget_argument(text)
        assert type(parse_budget(text)) is type(value)
        return
    with pytest.raises(ValueError, match=r"budget|bytes") as refused:
        parse_budget(text)
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(str(refused.value))):
        command_line.budget_argument(text)


@pytest.mark.parametrize("budget", [1, 5, 99])
def test_a_percentage_without_its_sign_is_no_number_of_bytes(budget: int) -> None:
    """One rule in Python and on the command line."""
    question = re.escape(f"No table fits in {budget} bytes. Did you mean {budget}%?")
    model = torch.nn.EmbeddingBag(1000, 16)
    with pytest.raises(ValueError, match=question):
        plan(model, budget)
    with pytest.raises(ValueError, match=question):
        sparsify(model, torch.optim.SGD(model.parameters()), budget=budget, end=0)
    with pytest.raises(argparse.ArgumentTypeError, match=question):
        command_line.budget_argument(str(budget))


@pytest.mark.parametrize("block", [(1, 2), (1, 1), (COL, 1)], ids=str)
def test_blocks_finer_than_rows_are_refused(block: Any) -> None:
    """They are served as zeros: no level reaches fewer bytes."""
    with pytest.raises(
        ValueError, match=r"Table 'a': a budget needs whole rows, .* save no bytes\. Give a level"
    ):
        kept("20%", block=block)


def test_tables_rotated_together_have_one_floor() -> None:
    """Else the widest decides after compact(), and the budget is exceeded."""
    tables = tables_of(nn.ModuleDict({"a": nn.Embedding(330, 24), "b": nn.Embedding(100, 24)}))
    args = arguments(budget="60%", block=(COL, 1), rotate=[["a", "b"]])
    with pytest.raises(ValueError, match=r"rotated together .* not \{'a': 0.9, 'b': 0.0\}"):
        budget_levels(args, tables, tables, {"a": 0.9})
    assert budget_levels(args, tables, tables, {"a": 0.5, "b": 0.5})


def test_a_small_table_keeps_a_row_of_a_common_budget() -> None:
    """At the level of all tables, 0.986, the small one would round up to level 1: without limit."""
    model = nn.ModuleDict({"a": nn.EmbeddingBag(3200, 4), "b": nn.EmbeddingBag(16, 4)})
    located = tables_of(model)
    levels = budget_levels(arguments(budget="3%", scope="global"), located, located, {})
    assert levels["b"] == 15 / 16 and levels["a"] > 0.98


def test_a_share_is_rounded_down() -> None:
    assert [budget_bytes(share, 10) for share in (0.2, 0.19, 0.99, 7, 1.0)] == [2, 1, 9, 7, 10]


def test_a_table_that_keeps_all_rows_needs_no_index() -> None:
    """Its floor keeps all of it: the other one may take the bytes of the index."""
    assert kept(51_200 // 2 + 512, floors={"b": 1.0}) == [(25_600 - 800) // 16, 64]
