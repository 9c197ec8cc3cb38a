"""A trained model becomes sparse and 8 bits wide in place, with removed weights exactly 0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from dist_sparse import ROW, BaseDataSparsifier, DataNormSparsifier, ScoreSparsifier, post_training_sparse_quantize
from dist_sparse.quantization.modules import QuantizedEmbedding, QuantizedEmbeddingBag


class Model(nn.Module):
    """torch.ao's own test model."""

    def __init__(self) -> None:
        super().__init__()
        self.emb1 = nn.Embedding(100, 3)
        self.embbag1 = nn.EmbeddingBag(200, 32)
        self.emb_seq = nn.Sequential(nn.Embedding(150, 3), nn.EmbeddingBag(180, 8))
        self.linear = nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        return self.emb1(ids), self.linear(self.embbag1(ids)), self.emb_seq[0](ids), self.emb_seq[1](ids)


class Odd(BaseDataSparsifier):
    """Removes every other column, a mask of no blocks."""

    def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
        self.get_mask(name)[:, 1::2] = 0


class LateRows(ScoreSparsifier):
    """Removes the first rows."""

    def score(self, name: str, data: Tensor, *, offset: tuple[int, int], **config: Any) -> Tensor:
        return (torch.arange(len(data), dtype=torch.float64) + offset[0])[:, None].expand(data.shape)


class Doubled(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * self.mask


def codes(module: Any) -> Tensor:
    return module.rows[:, : module.embedding_dim]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("chosen", [False, True])
def test_upstream_cases(first: bool, chosen: bool) -> None:
    """The ancestor's tests: 80 % of the elements of what is selected, nothing of the rest."""
    torch.manual_seed(0)
    model = Model()
    before, floats = copy.deepcopy(model), dict(model.named_modules())
    select = [model.emb1, model.embbag1] if chosen else None
    assert (
        post_training_sparse_quantize(
            model, DataNormSparsifier, first, select, sparsity_level=0.8, sparse_block_shape=(1, 1)
        )
        is None
    )
    assert type(model.emb1) is QuantizedEmbedding and type(model.embbag1) is QuantizedEmbeddingBag
    for path in ("emb1", "embbag1", *([] if chosen else ["emb_seq.0", "emb_seq.1"])):
        dequantized = torch.dequantize(model.get_submodule(path).weight())  # type: ignore[operator]
        assert abs((dequantized.abs() < 1e-2).float().mean().item() - 0.8) < 0.05
        assert (dequantized == 0).float().mean() >= 0.799
    for path in ("linear", *(["emb_seq.0", "emb_seq.1"] if chosen else [])):
        assert model.get_submodule(path) is floats[path]
    for path, module in floats.items():  # float modules, replaced or not, are as they were
        for name, parameter in module.named_parameters(recurse=False):
            assert torch.equal(parameter, before.get_submodule(path).get_parameter(name))
    assert [result.shape for result in model(torch.randint(100, (5, 2)))] == [(5, 2, 3), (5, 4), (5, 2, 3), (5, 8)]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "sparsifier, config",
    [
        (DataNormSparsifier, {"sparse_block_shape": (1, 1), "sparsity_level": 0.9}),
        (DataNormSparsifier, {"sparse_block_shape": (3, 5), "norm": "L2", "sparsity_level": 0.5}),
        (DataNormSparsifier, {"sparse_block_shape": (1, 4), "zeros_per_block": 2, "sparsity_level": 0.8}),
        (DataNormSparsifier, {"sparse_block_shape": (1, ROW), "sparsity_level": 0.7}),
        (DataNormSparsifier, {"sparsity_level": 1.0}),
        (DataNormSparsifier, {"sparsity_level": 0.0}),
        (LateRows, {"sparsity_level": 0.25}),
        (Odd, {}),
    ],
)
def test_removed_weights_are_zero_and_kept_ones_are_near(
    first: bool, dtype: torch.dtype, sparsifier: Any, config: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(60, 10) + torch.randn(60, 1)).to(dtype)
    weight[:7] = weight[:7].abs()
    dense = nn.ModuleDict({"t": nn.Embedding(60, 10, _weight=weight.clone())})
    post_training_sparse_quantize(dense, DataNormSparsifier, sparsity_level=0.0)
    reference = sparsifier([("t", weight.clone() if first else dense["t"].weight().clone())], **config)
    reference.step()
    kept = reference.get_mask("t") != 0

    model = nn.ModuleDict({"t": nn.Embedding(60, 10, _weight=weight.clone())})
    post_training_sparse_quantize(model, sparsifier, first, **config)
    table: Any = model["t"]
    assert bool((table.weight()[~kept] == 0).all()) and bool((table(torch.arange(60))[~kept] == 0).all())
    masked = torch.where(kept, weight, torch.zeros((), dtype=dtype))
    kept_range = masked if first else weight
    step = (kept_range.amax(1).double().clamp(min=0) - kept_range.amin(1).double().clamp(max=0)) / 255
    error = (table.weight().double() - masked.double()).abs()
    rounded = torch.finfo(dtype).eps * masked.double().abs()
    assert bool((error <= step[:, None] * 0.5001 + rounded).all())
    if not first:  # on the grid of the dense table: kept weights keep their codes, removed ones have the zero point's
        assert torch.equal(table.rows[:, 12:], dense["t"].rows[:, 12:])
        assert torch.equal(codes(table)[kept], codes(dense["t"])[kept])


@pytest.mark.parametrize("first", [True, False])
def test_a_parametrization_of_ones_own_counts(first: bool) -> None:
    model = nn.ModuleDict({"t": nn.Embedding.from_pretrained(torch.tensor([[0.0, 1.0, 3.0, 4.0]]))})
    post_training_sparse_quantize(model, Odd, first, parametrization=Doubled)
    # Quantized first, the grid ends at 4: twice as much as that can't be on it.
    expected = [[0.0, 0.0, 6.0 if first else 4.0, 0.0]]
    torch.testing.assert_close(model["t"].weight(), torch.tensor(expected), rtol=1e-3, atol=0)


def test_the_names_that_a_sparsifier_sees() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    class Noting(Odd):
        def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
            seen[name] = tuple(data.shape)

    model = nn.ModuleDict(
        {
            "a_b": nn.Embedding(2, 4),
            "a": nn.ModuleDict({"b": nn.Embedding(3, 4), "b_2": nn.Embedding(4, 4)}),
            "add": nn.ModuleDict({"module": nn.Embedding(5, 4)}),
            "x": nn.Sequential(nn.Embedding(6, 4)),
        }
    )
    post_training_sparse_quantize(model, Noting)
    assert seen == {"a_b": (2, 4), "a_b_2": (3, 4), "a_b_2_2": (4, 4), "add_module_2": (5, 4), "x_0": (6, 4)}

    shop = nn.Module()
    shop.items = nn.Embedding(7, 4)  # an attribute of the dict in which torch keeps parametrizations
    shop.parametrizations = nn.Embedding(8, 4)
    seen.clear()
    post_training_sparse_quantize(shop, Noting)
    assert seen == {"items_2": (7, 4), "parametrizations_2": (8, 4)}


def test_shared_embeddings_are_quantized_once_and_shared_again() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Embedding(30, 4)
            self.again = self.query
            self.deep = nn.Sequential(nn.Identity(), nn.Sequential(self.query))
            self.bag = nn.EmbeddingBag(30, 4, mode="sum")
            self.bag.weight = self.query.weight

    names: list[str] = []

    class Noting(Odd):
        def update_mask(self, name: str, data: Tensor, **config: Any) -> None:
            names.append(name)
            super().update_mask(name, data, **config)

    model: Any = Tied()
    post_training_sparse_quantize(model, Noting, select_embeddings=[model.bag, model.query, model.query])
    assert names == ["query"]
    assert type(model.query) is QuantizedEmbedding and type(model.bag) is QuantizedEmbeddingBag
    assert model.again is model.query is model.deep[1][0]
    assert model.bag.rows is model.query.rows
    assert torch.equal(model.bag(torch.tensor([[3]])), model.query(torch.tensor([3])))
    copied = copy.deepcopy(model)
    assert copied.bag.rows is copied.query.rows and copied.again is copied.query


def test_hooks_and_training_mode_are_handed_on() -> None:
    model = nn.Sequential(nn.Embedding(9, 4)).eval()
    calls: list[str] = []
    before = model[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[0].register_forward_hook(lambda *_, **__: calls.append("after"), with_kwargs=True)
    post_training_sparse_quantize(model, DataNormSparsifier)
    assert not model[0].training
    model(torch.tensor([1]))
    before.remove()
    model(torch.tensor([1]))
    assert calls == ["before", "after", "after"]


def test_frozen_and_wrapped_models() -> None:
    model = nn.Sequential(nn.Sequential(nn.Embedding.from_pretrained(torch.randn(9, 4)), nn.Linear(4, 2)))
    post_training_sparse_quantize(nn.DataParallel(model), DataNormSparsifier)
    assert type(model[0][0]) is QuantizedEmbedding  # type: ignore[index]


def test_a_model_loads_the_state_of_another() -> None:
    torch.manual_seed(0)
    one, other = Model(), Model()
    for model in (one, other):
        post_training_sparse_quantize(model, DataNormSparsifier)
    other.load_state_dict(one.state_dict())
    ids = torch.randint(100, (5, 2))
    assert all(torch.equal(a, b) for a, b in zip(one(ids), other(ids), strict=True))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_torchrec_collections_go_on_working(first: bool, weighted: bool) -> None:
    bags = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=20 + i, embedding_dim=4 + 4 * i, feature_names=[f"f{i}", "g"][: i + 1]
        )
        for i in range(2)
    ]
    sequences = [EmbeddingConfig(name="s", num_embeddings=20, embedding_dim=8, feature_names=["f0", "f1"])]
    model: Any = nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection(tables=bags, is_weighted=weighted),
            "sequences": EmbeddingCollection(tables=sequences),
        }
    )
    reference = copy.deepcopy(model)
    ids = KeyedJaggedTensor(
        keys=["f0", "f1", "g"],
        values=torch.randint(20, (12,)),
        lengths=torch.tensor([2, 0, 3, 1, 1, 1, 0, 0, 4]),
        weights=torch.rand(12) if weighted else None,
    )
    post_training_sparse_quantize(model, DataNormSparsifier, first, sparsity_level=0.5, sparse_block_shape=(1, 4))
    for path in ("bags.embedding_bags.t0", "bags.embedding_bags.t1", "sequences.embeddings.s"):
        table = model.get_submodule(path).weight()
        assert (table == 0).float().mean() >= 0.5
        with torch.no_grad():
            reference.get_submodule(path).weight.copy_(table)
    ours, theirs = model["bags"](ids), reference["bags"](ids)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours.values(), theirs.values().detach())
    ours, theirs = model["sequences"](ids), reference["sequences"](ids)
    for key in theirs:
        assert torch.equal(ours[key].values(), theirs[key].values())


def test_large_tables_are_done_in_chunks_as_in_one() -> None:
    """Rows of several chunks, the last one short."""
    torch.manual_seed(0)
    weight = torch.randn(3000, 200)
    whole = nn.ModuleDict({"t": nn.Embedding(3000, 200, _weight=weight.clone())})
    post_training_sparse_quantize(whole, DataNormSparsifier, sparsity_level=0.5)
    for rows in (slice(0, 1300), slice(1300, 1312), slice(2990, 3000)):
        part = nn.ModuleDict({"t": nn.Embedding(rows.stop - rows.start, 200, _weight=weight[rows].clone())})
        part["t"].weight.data[whole["t"].weight()[rows] == 0] = 0
        post_training_sparse_quantize(part, DataNormSparsifier, sparsity_level=0.0)
        assert torch.equal(part["t"].rows, whole["t"].rows[rows])
