"""`quantize()` in one process: against a loop over entries, straight-through gradients, checkpoints,
artifacts and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig

import dist_sparse.extras.codes.coded_training as coded_module
import dist_sparse.extras.codes.learning as books_module
from dist_sparse import (
    DataNormSparsifier,
    MaskEnforcer,
    compact,
    expand,
    export,
    load_served,
    remove_untouched,
    sparsify,
)
from dist_sparse.extras.codes import quantize
from dist_sparse.extras.codes.learning import grid_scales, round_to_grid

HAS_CODES = r"Table 'weight' has codes: call detach\(\) of their handle first"


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_module, "LEAST_ROWS", 1)


def table(rows: int = 40, columns: int = 4, **options: Any) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(rows, columns, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def decoded(handle: Any, name: str = "weight") -> Tensor:
    codes = handle.coded()[name].shards[0].tensor.long()
    books = handle.books[name].float()
    return torch.cat([books[group][codes[:, group]] for group in range(len(books))], 1)


def whole(values: Tensor, scale: Tensor) -> list[int]:
    """Weights of one group on its grid."""
    return [int(each) for each in round_to_grid(values.unsqueeze(0), scale)[0]]


def nearest(row: Tensor, books: Tensor) -> list[int]:
    """The loop: the first entry with the least distance, in whole numbers."""
    found = []
    width = books.shape[2]
    for group, (book, scale) in enumerate(zip(books, grid_scales(books), strict=True)):
        mine = whole(row[group * width : (group + 1) * width], scale)
        distances = []
        for entry in book:
            there = whole(entry, scale)
            distances.append(sum((a - b) ** 2 for a, b in zip(mine, there, strict=True)))
        found.append(distances.index(min(distances)))
    return found


def mean(rows: Tensor, old: Tensor, scale: Tensor) -> Tensor:
    """The loop: the mean of rows in whole numbers; the old entry of none."""
    if not len(rows):
        return old
    sums = [0] * len(old)
    for row in rows:
        sums = [a + b for a, b in zip(sums, whole(row, scale), strict=True)]
    return torch.tensor([each / len(rows) / float(scale) for each in sums]).half()


def test_due_steps_against_a_loop() -> None:
    model = table(rows=300)
    with torch.no_grad():
        model.weight[5] = 0
    handle = quantize(model, sgd(model), codes=2, begin=0, every=1)
    handle.step()
    old = handle.books["weight"].clone()
    codes = handle.coded()["weight"].shards[0].tensor.clone()
    for row in (0, 5, 17, 299):
        assert codes[row].tolist() == nearest(model.weight[row].detach(), old)
    assert not codes[5].any()
    with torch.no_grad():
        model.weight.mul_(1.25)
    # Codes of before, weights of now.
    handle.step()
    for group, scale in enumerate(grid_scales(old)):
        for entry in (1, 2, 77, 255):
            mine = codes[:, group] == entry
            rows = model.weight[mine, 2 * group : 2 * group + 2].detach()
            expected = mean(rows, old[group, entry], scale)
            assert torch.equal(handle.books["weight"][group, entry], expected), (group, entry)
        assert not handle.books["weight"][group, 0].any()


def test_columns_that_were_zero_at_the_first_fit_get_books() -> None:
    """A refit would keep all their entries at zero."""
    model = table(rows=300)
    with torch.no_grad():
        model.weight[:, 2:] = 0
    handle = quantize(model, sgd(model), codes=2, begin=0, every=1)
    handle.step()
    assert not handle.books["weight"][1].any()
    with torch.no_grad():
        model.weight[:, 2:] = torch.randn(300, 2)
    first = handle.books["weight"][0].clone()
    handle.step()
    assert handle.books["weight"][1].any() and torch.equal(handle.books["weight"][0], first)
    ids = torch.arange(300).view(-1, 1)
    torch.testing.assert_close(model(ids), model.weight.detach(), atol=0.5, rtol=0)


@pytest.mark.slow
def test_first_books_against_a_loop() -> None:
    """K-means of rows at even distances in the table, which start from 255 of them."""
    model = table(rows=301)
    with torch.no_grad():
        model.weight[7] = 0
    handle = quantize(model, sgd(model), codes=2, begin=0, end=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(books_module, "_SAMPLED", 290)
        patch.setattr(books_module, "_ROUNDS", 2)
        handle.step()
    sample = torch.stack([model.weight[place * 301 // 290].detach() for place in range(290)])
    for group in (0, 1):
        part = sample[:, 2 * group : 2 * group + 2]
        by_size = sorted((row for row in part if row.any()), key=lambda row: float(row.abs().max()))
        start = [by_size[place * len(by_size) // 256] for place in range(1, 256)]
        book = torch.stack([torch.zeros(2), *start]).half()
        for _ in range(2):
            [scale] = grid_scales(book.unsqueeze(0))
            codes = torch.tensor([nearest(row, book.unsqueeze(0))[0] for row in part])
            means = [mean(part[codes == entry], book[entry], scale) for entry in range(1, 256)]
            book = torch.stack([book[0], *means])
        assert torch.equal(handle.books["weight"][group], book)


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


@pytest.mark.parametrize("how", ["torch.save", "dcp"])
@pytest.mark.parametrize("saved_at", [1, 4, 5])
def test_a_resumed_run_goes_on_as_one_that_was_not_saved(
    how: str, saved_at: int, tmp_path: Path
) -> None:
    """Before the first fit, at a due step and between two: codes are of the last due step."""
    whole = table()
    optimizer = sgd(whole)
    handle = quantize(whole, optimizer, codes=2, begin=1, every=3)
    expected = list(trained(whole, handle, optimizer, range(9)))

    model = table()
    optimizer = sgd(model)
    handle = quantize(model, optimizer, codes=2, begin=1, every=3)
    first = list(trained(model, handle, optimizer, range(saved_at)))
    other = table()
    resumed = quantize(other, sgd(other), codes=2, begin=0, every=9)
    state = {"codes": handle.state_dict(), "model": model.state_dict()}
    if how == "dcp":
        dcp.save(state, checkpoint_id=tmp_path)
        state = {"codes": resumed.state_dict(), "model": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
    else:
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    # In either order.
    resumed.load_state_dict(state["codes"])
    other.load_state_dict(state["model"])
    for steps, run in (
        (range(saved_at, 9), trained(model, handle, optimizer, range(saved_at, 9))),
        (range(saved_at, 9), trained(other, resumed, sgd(other), range(saved_at, 9))),
    ):
        for step, found in zip(steps, run, strict=True):
            assert torch.equal(found, expected[step]), step
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=False))


def test_an_unfitted_state_returns_floats_again() -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0)
    ids = torch.arange(40).view(40, 1)
    before, state = model(ids), handle.state_dict()
    handle.step()
    assert not torch.equal(model(ids), before)
    handle.load_state_dict(state)
    assert torch.equal(model(ids), before)


@pytest.mark.parametrize("kind", ["mean", "weighted", "sequence"])
def test_with_commitment_l2_of_lookups_acts_on_floats(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "sequence":
        model: nn.Module = nn.Embedding(40, 4)
    else:
        model = table(mode="mean" if kind == "mean" else "sum")
    handle = quantize(model, sgd(model), codes=2, begin=0, commitment=0.3)
    ids = torch.randint(40, (6, 3))
    factors = {"per_sample_weights": torch.rand(6, 3)} if kind == "weighted" else {}

    def gradient() -> Tensor:
        weight = model.get_parameter("weight")
        (found,) = torch.autograd.grad(model(ids, **factors).square().sum() * 0.15, weight)
        return found

    floats = gradient()
    handle.step()
    torch.testing.assert_close(gradient(), floats)


def test_served_is_what_the_forward_used(tmp_path: Path) -> None:
    model = nn.ModuleDict({"big": table(), "small": nn.Embedding(3, 4)})
    handle = quantize(model, sgd(model), codes={"big": 2}, begin=0)
    handle.step()
    exported = export(model, handle, tmp_path / "served", dtype="codes")
    big = exported.manifest.tables["big"]
    assert (big.bytes.books, big.layout()["rows"]) == (2 * 256 * 2 * 2, (torch.uint8, (40, 2)))
    assert exported.manifest.tables["small"].dtype == "fp32"
    served = load_served(tmp_path / "served")
    ids = torch.randint(40, (8, 1))
    assert torch.equal(served["big"](ids), model["big"](ids))
    assert torch.equal(served["small"](ids % 3), model["small"](ids % 3))
    others = export(model, handle, tmp_path / "others", dtype="int4").manifest.tables
    assert [others[name].dtype for name in ("big", "small")] == ["codes", "int4"]
    assert torch.equal(load_served(tmp_path / "others")["big"](ids), model["big"](ids))
    with pytest.raises(ValueError, match="with dtype='codes': must be what quantize"):
        export(model, None, tmp_path / "other", dtype="codes")


@pytest.mark.parametrize("moves", [False, True], ids=["in place", "weights move"])
def test_removed_rows_are_zeros_and_not_stored(moves: bool, tmp_path: Path) -> None:
    model = table()
    optimizer = sgd(model)
    sparse = sparsify(model, optimizer, level=0.5, end=1, every=1)
    handle = quantize(model, optimizer, codes=2, begin=0, every=9, sparse=sparse)
    for step in range(3):
        if moves and step == 1:
            # Before the mask update that removes rows.
            moved = parameters_to_vector(model.parameters()).clone()
            vector_to_parameters(moved, model.parameters())
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


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"codes": 3}, "3 does not divide the 4 columns of table 'weight'; [1, 2, 4] do"),
        ({}, {"codes": 0}, "must be an int"),
        ({}, {"codes": {"x": 2}}, "must name some of the tables ['weight']"),
        ({}, {"begin": -1}, "Invalid begin=-1"),
        ({}, {"begin": 3, "end": 2}, "Invalid end=2"),
        ({"mode": "max"}, {}, "Table 'weight': mode='max' can't be served"),
        ({"max_norm": 1.0}, {}, "Table 'weight': max_norm=1.0 changes rows"),
        ({"padding_idx": 0}, {}, "Table 'weight': padding_idx=0 of an EmbeddingBag"),
        ({"dtype": torch.float16}, {}, "in float32 or float64 can use codes"),
        ({"dtype": torch.bfloat16}, {}, "in float32 or float64 can use codes"),
    ],
)
def test_refused_arguments(options: Any, arguments: Any, message: str) -> None:
    model = table(**options)
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(model, sgd(model), **{"codes": 2, "begin": 0, **arguments})
    assert not model._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_what_is_served_has_the_bits_of_the_forward(
    dtype: torch.dtype, mode: str, tmp_path: Path
) -> None:
    model = table(dtype=dtype, mode=mode)
    handle = quantize(model, sgd(model), codes=2, begin=0)
    handle.step()
    ids = torch.arange(40).view(8, 5)
    export(model, handle, tmp_path / "served", dtype="codes")
    assert torch.equal(load_served(tmp_path / "served")(ids).to(dtype), model(ids))


def test_weights_of_float64_lookups() -> None:
    model = table(mode="sum", dtype=torch.float64)
    handle = quantize(model, sgd(model), codes=2, begin=0)
    handle.step()
    ids, weights = torch.arange(40).view(8, 5), torch.rand(8, 5, dtype=torch.float64)
    rows = decoded(handle)[ids].double()
    wanted = (rows * weights.float().unsqueeze(2)).sum(1)
    torch.testing.assert_close(model(ids, per_sample_weights=weights), wanted)


def test_masks_of_a_part_of_the_model_are_refused() -> None:
    """By the names there, no mask would be found here."""
    model = nn.ModuleDict({"t": table()})
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    sparsifier.add_model(model["t"])
    with pytest.raises(ValueError, match=r"Tables \['weight'\] of sparse are not in this model"):
        quantize(model, sgd(model), codes=2, begin=0, sparse=sparsifier)


def test_what_can_not_be_attached_again_stays_attached() -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0)
    handle.step()
    ids = torch.arange(40).view(40, 1)
    out = model(ids)
    model.max_norm = 100.0
    with pytest.raises(ValueError, match="max_norm=100"):
        handle.attach()
    model.max_norm = None
    assert torch.equal(model(ids), out) and len(model._forward_hooks) == 1
    handle.step()


def test_an_error_while_codes_are_assigned_keeps_the_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0)
    handle.step()
    ids = torch.arange(40).view(40, 1)
    before = model(ids)

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(coded_module, "assign", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        handle.attach()
    assert torch.equal(model(ids), before) and len(model._forward_hooks) == 1
    handle.step()


def test_unsharded_collections_of_half_precision_are_refused() -> None:
    """They look tables up by nn.EmbeddingBag, which rounds its sums to 16 bits."""
    config = EmbeddingBagConfig(
        name="t", num_embeddings=40, embedding_dim=4, feature_names=["f"], data_type=DataType.FP16
    )
    model = EmbeddingBagCollection(tables=[config])
    with pytest.raises(ValueError, match="in float32 or float64 can use codes"):
        quantize(model, sgd(model), codes=2, begin=0)


def test_small_tables_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_module, "LEAST_ROWS", 20_000)
    model = table()
    with pytest.raises(ValueError, match=re.escape("40 rows; below")):
        quantize(model, sgd(model), codes=2, begin=0)


def test_masks_of_parts_of_rows_are_refused() -> None:
    model = table()
    optimizer = sgd(model)
    sparse = sparsify(model, optimizer, level=0.0, end=0, every=1, block=(1, 2))
    with pytest.raises(ValueError, match="codes need whole rows"):
        quantize(model, optimizer, codes=2, begin=0, sparse=sparse)


def test_weights_that_are_not_finite_change_nothing() -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0, every=1)
    with torch.no_grad():
        model.weight[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"'weight' has the weight nan in rows .*: entries of"):
        handle.step()
    assert not handle.books["weight"].any()


def test_weights_beyond_float16_change_nothing() -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0)
    with torch.no_grad():
        model.weight[3, 1] = -65505
    with pytest.raises(ValueError, match=r"has the weight -65505.0 in .* at most 65504"):
        handle.step()
    assert not handle.books["weight"].any()


@pytest.mark.parametrize("optimizer", [None, 5, "sgd", [None]])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    model = table()
    with pytest.raises(ValueError, match="Invalid optimizer of type"):
        quantize(model, optimizer, codes=2, begin=0)
    assert not model._forward_hooks


def test_a_table_has_the_codes_of_one_handle() -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0)
    with pytest.raises(ValueError, match=HAS_CODES):
        quantize(model, sgd(model), codes=1, begin=0)
    # Other memory, the same table.
    vector_to_parameters(parameters_to_vector(model.parameters()).clone(), model.parameters())
    with pytest.raises(ValueError, match=HAS_CODES):
        quantize(model, sgd(model), codes=1, begin=0)
    handle.detach()
    with quantize(model, sgd(model), codes=1, begin=0) as other:
        # An attached handle may attach again.
        other.step()
        other.step()


def test_masks_that_the_call_does_not_name_are_refused() -> None:
    model = nn.Sequential(table())
    sparse = sparsify(model, sgd(model), level=0.5, end=0, every=1)
    with pytest.raises(ValueError, match="'0' are already sparsified: pass sparse=, what"):
        quantize(model, sgd(model), codes=2, begin=0)
    quantize(model, sgd(model), codes=2, begin=0, sparse=sparse).detach()


def test_codes_of_another_model_are_not_exported(tmp_path: Path) -> None:
    model, other = table(), table()
    with quantize(model, sgd(model), codes=2, begin=0) as handle:
        handle.step()
        with pytest.raises(ValueError, match="'weight' of this model is not the one that has"):
            export(other, handle, tmp_path / "served", dtype="codes")
    assert not any(tmp_path.iterdir())


def test_compact_and_expand_after_quantize_are_refused() -> None:
    """New modules would have no codes: their lookups would return floats."""
    model = nn.Sequential(table())
    sparse = sparsify(model, sgd(model), level=0.5, end=0, every=1)
    sparse.step()
    handle = quantize(model, sgd(model), codes=2, begin=0, every=1, sparse=sparse)
    handle.step()
    ids = torch.arange(40).view(40, 1)
    before = model(ids)
    with pytest.raises(ValueError, match=r"has codes: call detach\(\)"):
        compact(model, sparse)
    assert sparse.enforcer.attached and torch.equal(model(ids), before)
    handle.step()
    handle.detach()
    made = compact(model, sparse)
    with quantize(made, sgd(made), codes=2, begin=0) as handle:
        handle.step()
        with pytest.raises(ValueError, match=r"has codes: call detach\(\)"):
            expand(made, optimizer=())
    expand(made, optimizer=())


def test_a_table_that_was_replaced_is_named() -> None:
    model = nn.Sequential(table(), nn.Embedding(3, 4))
    handle = quantize(model, sgd(model), codes={"0": 2}, begin=0, every=1)
    model[0] = nn.Identity()
    with pytest.raises(ValueError, match="'0' is gone, and was 40 x 4 when it got codes"):
        handle.step()


def test_rows_of_a_table_with_codes_are_removed_by_its_sparsifier_alone() -> None:
    """The codes of rows that another one removes would not become zeros."""
    model = table()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    handle = quantize(model, optimizer, codes=2, begin=0, end=0)
    model(torch.arange(20).view(10, 2)).sum().backward()
    optimizer.step()
    handle.step()
    before = model.weight.detach().clone()
    other = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    other.add_model(model)
    calls = [
        lambda: sparsify(model, optimizer, level=0.5, end=0),
        lambda: MaskEnforcer(other).attach(optimizer),
        lambda: remove_untouched(model, optimizer, trust_record=True),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=HAS_CODES):
            call()
    assert torch.equal(model.weight, before) and not model._forward_pre_hooks
    handle.detach()
    sparse = sparsify(model, optimizer, level=0.5, end=0)
    with quantize(model, optimizer, codes=2, begin=0, sparse=sparse):
        # Its own enforcer may come back.
        sparse.enforcer.detach()
        sparse.enforcer.attach(optimizer)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "x"),
        ("step", -5),
        ("step", None),
        ("fitted", "no"),
        ("schedule", None),
        ("schedule", {}),
        ("books", None),
        ("codes", None),
        ("codes", {"weight": None, "other": None}),
    ],
)
def test_states_with_a_wrong_value_are_refused(key: str, value: Any) -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0)
    handle.step()
    before = handle.books["weight"].clone()
    with pytest.raises(ValueError, match=key):
        handle.load_state_dict({**handle.state_dict(), key: value})
    assert torch.equal(handle.books["weight"], before)
    handle.step()


@pytest.mark.parametrize("change", ["key", "no table", "books", "entry 0", "codes"])
def test_refused_states(change: str) -> None:
    model = table()
    handle = quantize(model, sgd(model), codes=2, begin=0)
    handle.step()
    state = handle.state_dict()
    if change == "key":
        del state["fitted"]
    elif change == "no table":
        state["books"] = {}
    elif change == "books":
        state["books"]["weight"] = torch.zeros(2, 256, 3).half()
    elif change == "entry 0":
        state["books"]["weight"][:, 0] = 1
    else:
        other = table(rows=41)
        state["codes"] = quantize(other, sgd(other), codes=2, begin=0).state_dict()["codes"]
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
    assert torch.equal(served.apply_delta(tmp_path / "delta")(ids), expected)
