"""`quantize()` in one process: against a loop over entries, straight-through gradients, checkpoints,
artifacts and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dist_sparse.codes.quantize as quantize_module
from dist_sparse import compact, export, load_served, quantize, sparsify
from dist_sparse.codes.books import Books
from dist_sparse.codes.columns import balanced_order


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_module, "LEAST_ROWS", 1)


def table(rows: int = 40, columns: int = 4, **options: Any) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(rows, columns, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def decoded(handle: Any, name: str = "weight") -> Tensor:
    codes = handle.coded()[name].shards[0].tensor.long()
    books = handle.books[name].float()
    return torch.cat([books[group][codes[:, group]] for group in range(len(books))], 1)


def nearest(row: Tensor, books: Tensor, grid: Books) -> list[int]:
    """The loop: the first entry with the least distance, in whole numbers."""
    found = []
    width = books.shape[2]
    for group, book in enumerate(books):
        mine = [int(x) for x in grid.integers(row[group * width : (group + 1) * width])]
        distances = []
        for entry in book:
            whole = [int(x) for x in grid.integers(entry)]
            distances.append(sum((a - b) ** 2 for a, b in zip(mine, whole, strict=True)))
        found.append(distances.index(min(distances)))
    return found


def test_due_steps_against_a_loop() -> None:
    model = table(rows=300)
    with torch.no_grad():
        model.weight[5] = 0
    handle = quantize(model, sgd(model), codes=2, begin=0, every=1)
    handle.step()
    old = {name: books.clone() for name, books in handle.books.items()}["weight"]
    grid = Books(old, handle.state_dict()["books"]["weight"]["exponent"])
    codes = handle.coded()["weight"].shards[0].tensor.clone()
    for row in (0, 5, 17, 299):
        assert codes[row].tolist() == nearest(model.weight[row].detach(), old, grid)
    assert not codes[5].any()
    with torch.no_grad():
        model.weight.mul_(1.25)
    # Codes of before, weights of now: as a due step after training sees them.
    handle.stale = False
    handle.step()
    for group in (0, 1):
        for entry in (0, 1, 77, 255):
            mine = (codes[:, group] == entry).nonzero().flatten()
            expected = old[group, entry].double()
            if len(mine) and entry:
                sums = [0, 0]
                for row in mine.tolist():
                    whole = grid.integers(model.weight[row, 2 * group : 2 * group + 2].detach())
                    sums = [a + int(b) for a, b in zip(sums, whole, strict=True)]
                scale = 2.0 ** (grid.exponent - grid.bits)
                expected = torch.tensor([each / len(mine) * scale for each in sums])
            assert torch.equal(handle.books["weight"][group, entry], expected.half()), (
                group,
                entry,
            )


@pytest.mark.parametrize("kind", ["sum", "mean", "weighted", "sequence"])
def test_lookups_decode_and_gradients_go_straight_through(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "sequence":
        model: nn.Module = nn.Embedding(40, 4)
    else:
        model = table(mode="mean" if kind == "mean" else "sum")
    handle = quantize(model, sgd(model), codes=2, begin=0)
    ids = torch.randint(40, (6, 3))
    factors = {"per_sample_weights": torch.rand(6, 3)} if kind == "weighted" else {}
    before = model(ids, **factors)
    handle.step()
    out = model(ids, **factors)
    rows = decoded(handle)[ids]
    weight = factors.get("per_sample_weights", torch.ones(6, 3)).unsqueeze(2)
    expected = rows if kind == "sequence" else (rows * weight).sum(1) / (3 if kind == "mean" else 1)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    (straight,) = torch.autograd.grad((out * direction).sum(), model.get_parameter("weight"))
    (plain,) = torch.autograd.grad((before * direction).sum(), model.get_parameter("weight"))
    assert torch.equal(straight, plain)
    handle.detach()
    assert torch.equal(model(ids, **factors), before)


def trained(model: nn.Module, handle: Any, optimizer: Any, steps: range) -> Iterator[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        out = model(torch.arange(step, step + 30).view(10, 3))
        out.square().sum().backward()
        optimizer.step()
        handle.step()
        yield out.detach()


def test_a_resumed_run_goes_on_as_the_one_that_was_saved() -> None:
    model = table()
    optimizer = sgd(model)
    handle = quantize(model, optimizer, codes=2, begin=1, every=2)
    list(trained(model, handle, optimizer, range(5)))
    state, weights = handle.state_dict(), model.weight.detach().clone()
    other = table()
    resumed = quantize(other, sgd(other), codes=2, begin=0, every=9)
    # In either order: the next lookup assigns the codes.
    resumed.load_state_dict(state)
    other.load_state_dict({"weight": weights})
    mine = list(trained(model, handle, optimizer, range(5, 9)))
    others = list(trained(other, resumed, sgd(other), range(5, 9)))
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
    assert torch.equal(handle.books["weight"], resumed.books["weight"])


def test_served_is_what_the_forward_used(tmp_path: Path) -> None:
    model = nn.ModuleDict({"big": table(), "small": nn.Embedding(3, 4)})
    handle = quantize(model, sgd(model), codes=2, begin=0, include="big")
    handle.step()
    exported = export(model, handle, tmp_path / "served", dtype="codes")
    big = exported.manifest.tables["big"]
    assert (big.bytes.books, big.layout()["rows"]) == (2 * 256 * 2 * 2, (torch.uint8, (40, 2)))
    assert exported.manifest.tables["small"].dtype == "fp32"
    served = load_served(tmp_path / "served")
    ids = torch.randint(40, (8, 1))
    assert torch.equal(served["big"](ids), model["big"](ids))
    assert torch.equal(served["small"](ids % 3), model["small"](ids % 3))
    with pytest.raises(ValueError, match="and nothing else is"):
        export(model, None, tmp_path / "other", dtype="codes")


def test_removed_rows_are_zeros_and_not_stored(tmp_path: Path) -> None:
    model = table()
    optimizer = sgd(model)
    sparse = sparsify(model, optimizer, level=0.5, end=1, every=1)
    handle = quantize(model, optimizer, codes=2, begin=0, every=9, sparse=sparse)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(40).view(20, 2)).sum().backward()
        optimizer.step()
        sparse.step()
        handle.step()
    removed = (model.weight == 0).all(1)
    assert int(removed.sum()) == 20
    out = model(torch.arange(40).view(40, 1))
    assert not out[removed].any() and out[~removed].any(1).all()
    exported = export(model, handle, tmp_path / "served", dtype="codes")
    assert exported.manifest.tables["weight"].kept == 20
    assert torch.equal(load_served(tmp_path / "served")(torch.arange(40).view(40, 1)), out)


def test_compact_tables_have_codes(tmp_path: Path) -> None:
    model = nn.Sequential(table())
    sparse = sparsify(model, sgd(model), level=0.5, end=0, every=1)
    model(torch.arange(40).view(20, 2)).sum().backward()
    sparse.step()
    made = compact(model, sparse)
    handle = quantize(made, sgd(made), codes=2, begin=0)
    handle.step()
    ids = torch.arange(40).view(40, 1)
    out = made(ids)
    assert int(out.any(1).sum()) == 20
    export(made, handle, tmp_path / "served", dtype="codes")
    assert torch.equal(load_served(tmp_path / "served")(ids), out)


def test_columns_in_order_leave_the_output_as_it_is() -> None:
    model = table(rows=600, columns=8)
    with torch.no_grad():
        model.weight.mul_(torch.tensor([64.0, 32, 16, 8, 4, 2, 1, 0.5]))
    before = model.weight.detach().clone()
    handle = quantize(model, sgd(model), codes=2, begin=0, order="table")
    handle.step()
    order = balanced_order([4096, 1024, 256, 64, 16, 4, 1, 0], 2)
    assert torch.equal(model.weight, before[:, order])
    ids = torch.arange(600).view(600, 1)
    back = torch.empty(8, dtype=torch.long).index_copy(0, torch.tensor(order), torch.arange(8))
    assert torch.equal(model(ids), decoded(handle)[:, back])
    handle.detach()
    assert torch.equal(model(ids), before)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"codes": 3}, "3 does not divide the 4 columns of table 'weight'; [1, 2, 4] do"),
        ({}, {"codes": 0}, "must be an int"),
        ({}, {"codes": {"x*": 2}}, "nothing matches table 'weight'"),
        ({}, {"begin": -1}, "Invalid begin=-1"),
        ({}, {"begin": 3, "end": 2}, "Invalid end=2"),
        ({"mode": "max"}, {}, "pooled by their maximum"),
        ({"max_norm": 1.0}, {}, "max_norm changes rows"),
        ({"padding_idx": 0}, {}, "padding_idx leaves ids out"),
    ],
)
def test_refused_arguments(options: Any, arguments: Any, message: str) -> None:
    model = table(**options)
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(model, sgd(model), **{"codes": 2, "begin": 0, **arguments})
    assert not model._forward_hooks


def test_small_tables_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_module, "LEAST_ROWS", 20_000)
    model = table()
    with pytest.raises(
        ValueError, match=re.escape("40 rows, and codes are for tables of at least")
    ):
        quantize(model, sgd(model), codes=2, begin=0)


def test_masks_of_parts_of_rows_are_refused() -> None:
    model = table()
    optimizer = sgd(model)
    sparse = sparsify(model, optimizer, level=0.0, end=0, every=1, block=(1, 2))
    with pytest.raises(ValueError, match="parts of rows"):
        quantize(model, optimizer, codes=2, begin=0, sparse=sparse)


def test_weights_that_are_not_finite_change_nothing() -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0, every=1)
    with torch.no_grad():
        model.weight[3, 1] = torch.nan
    with pytest.raises(ValueError, match="has the value nan in rows"):
        handle.step()
    assert not handle.books


@pytest.mark.parametrize("change", ["groups", "books", "version", "entry 0"])
def test_refused_states(change: str) -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0)
    handle.step()
    state = handle.state_dict()
    if change == "groups":
        state["groups"] = {"weight": 4}
    elif change == "books":
        state["books"]["weight"]["entries"] = torch.zeros(2, 256, 3).half()
    elif change == "version":
        state["version"] = 9
    else:
        state["books"]["weight"]["entries"][:, 0] = 1
    before = handle.books["weight"].clone()
    with pytest.raises(ValueError):
        handle.load_state_dict(state)
    assert torch.equal(handle.books["weight"], before)


def test_a_delta_of_codes_serves_what_a_whole_export_does(tmp_path: Path) -> None:
    """Its books change with every fit."""
    model = nn.Sequential(table(rows=500, columns=8))
    optimizer = sgd(model)
    handle = quantize(model, optimizer, codes=2, begin=0, every=1)

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randint(500, (16, 4))).square().sum().backward()
            optimizer.step()
            handle.step()

    train()
    export(model, handle, tmp_path / "base", dtype="codes")
    train()
    export(model, handle, tmp_path / "delta", dtype="codes", since=tmp_path / "base")
    ids = torch.arange(500).view(-1, 1)
    expected = model(ids)
    assert torch.equal(load_served([tmp_path / "base", tmp_path / "delta"])(ids), expected)
    served = load_served(tmp_path / "base")
    assert not torch.equal(served(ids), expected)
    assert torch.equal(served.apply(tmp_path / "delta")(ids), expected)
