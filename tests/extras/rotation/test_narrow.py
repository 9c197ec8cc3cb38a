"""Compact tables of fewer columns, in one process: what the rotated model gave, trained on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from dist_sparse import Advanced, compact, sparsify
from dist_sparse.extras.rotation import Rotation
from tests.extras.rotation.test_rotate import Towers, batch, train
from tests.keywords import nested


def cut(model: Towers) -> None:
    for table in (model.user, model.item):
        table.weight.data[:, 4:].zero_()


@pytest.mark.parametrize("tables", ["table", [["user", "item"]]], ids=str)
@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam], ids=["SGD", "Adam"])
def test_a_narrow_model_trains_on_as_the_masked_one(tables: Any, optimizer: Any) -> None:
    torch.manual_seed(0)
    model = Towers()
    stepped = optimizer(model.parameters(), lr=0.05)
    options: dict[str, Any] = {
        "level": 0.5,
        "block": "col",
        "begin": 2,
        "end": 2,
        "optimizer_state": "reset",
    }
    sparse = sparsify(model, stepped, **nested(rotate=Rotation(tables), **options))
    train(model, stepped, sparse, 5)
    wanted = model(*batch()).detach()
    twin = copy.deepcopy(model)
    twin_optimizer = optimizer(twin.parameters(), lr=0.05)
    twin_optimizer.load_state_dict(copy.deepcopy(stepped.state_dict()))

    model = compact(model, sparse)
    assert (
        model.user.weight.shape == (50, 4)
        and model.item.weight.shape == (40, 4)
        and model.item.padding_idx == 3
    )
    torch.testing.assert_close(model(*batch()), wanted, rtol=1e-5, atol=1e-6)
    for key in ("exp_avg", "exp_avg_sq") if optimizer is optim.Adam else ():
        assert stepped.state[model.user.weight][key].shape == (50, 4)

    # The masked twin trains its first four columns alone.
    twin_optimizer.register_step_post_hook(lambda *_: cut(twin))
    losses = train(model, stepped, None, 6), train(twin, twin_optimizer, None, 6)
    torch.testing.assert_close(
        torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5
    )

    # It can be narrowed again, and be saved.
    wanted = model(*batch()).detach()
    again = sparsify(
        model,
        stepped,
        level=0.0,
        block="col",
        end=0,
        advanced=Advanced(rotate=Rotation(tables), optimizer_state="reset"),
        schedule="constant",
    )
    again.step()
    torch.testing.assert_close(model(*batch()), wanted, rtol=1e-4, atol=1e-5)
    saved = copy.deepcopy(model.state_dict())
    again.detach()
    train(model, stepped, None, 2)
    model.load_state_dict(saved)
    torch.testing.assert_close(model(*batch()), wanted, rtol=1e-4, atol=1e-5)


def test_a_model_of_one_table() -> None:
    model: Any = nn.EmbeddingBag(30, 12, mode="sum")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    sparse = sparsify(
        model,
        optimizer,
        level=0.8,
        block="col",
        end=0,
        schedule="constant",
        advanced=Advanced(rotate=Rotation("table")),
    )
    sparse.step()
    ids = torch.arange(30).view(10, 3)
    wanted = model(ids).detach()
    model = compact(model, sparse)
    assert model.weight.shape == (30, 4)  # of 2 that are left
    torch.testing.assert_close(model(ids), wanted, rtol=1e-5, atol=1e-6)
    assert list(model.state_dict()) == ["weight", "rotation_of_weight"]


@pytest.mark.parametrize(
    ("level", "width"), [({"user": 0.75, "item": 0.5}, 8), ({"user": 0.75}, 16)]
)
def test_tables_that_meet_get_the_width_of_the_widest(level: dict[str, float], width: int) -> None:
    """Dot products between tables of other widths would raise."""
    model = nn.ModuleDict({"user": nn.Embedding(50, 16), "item": nn.Embedding(40, 16)})
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    sparse = sparsify(
        model,
        optimizer,
        level=level,
        block="col",
        end=0,
        advanced=Advanced(rotate=Rotation([["user", "item"]])),
    )
    sparse.step()
    wanted = model["user"].weight @ model["item"].weight.T
    model = compact(model, sparse)
    assert model["user"].weight.shape == (50, width) and model["item"].weight.shape == (40, width)
    torch.testing.assert_close(
        model["user"].weight @ model["item"].weight.T, wanted, rtol=1e-5, atol=1e-6
    )


def test_columns_that_are_not_rotated_are_refused() -> None:
    model = Towers()
    sparse = sparsify(
        model, optim.SGD(model.parameters(), lr=0.1), level=0.5, block="col", begin=0, end=0
    )
    sparse.step()
    with pytest.raises(ValueError, match="or columns of rotated tables"):
        compact(model, sparse)


def test_groups_that_a_collection_parts_are_refused() -> None:
    """The EmbeddingCollection needs one width: item would get that of doc, and user not."""

    def config(kind: Any, name: str) -> Any:
        return kind(name=name, num_embeddings=40, embedding_dim=16, feature_names=[name])

    bags = [config(EmbeddingBagConfig, name) for name in ("user", "ctx")]
    sequences = [config(EmbeddingConfig, name) for name in ("item", "doc")]
    model = nn.ModuleDict(
        {"bags": EmbeddingBagCollection(bags), "sequences": EmbeddingCollection(sequences)}
    )
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    groups = [["user", "item"], ["ctx", "doc"]]
    level = {"user": 0.5, "item": 0.5, "ctx": 0.25, "doc": 0.25}
    sparse = sparsify(
        model,
        optimizer,
        level=level,
        block="col",
        end=0,
        advanced=Advanced(rotate=Rotation(groups)),
    )
    names = ["user", "ctx", "item", "doc"]
    ids = KeyedJaggedTensor(names, torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    model["bags"](ids)
    model["sequences"](ids)
    sparse.step()
    with pytest.raises(ValueError, match=r"'user': 8, 'item': 12.*all one level"):
        compact(model, sparse)
