"""Following tables have a fixed capacity."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from dist_sparse import plan
from dist_sparse.extras.following import following


def test_following_tables_have_a_fixed_capacity() -> None:
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=64, feature_names=[name])
        for name in ("user", "item")
    ]
    # Ids of all tables take no memory on the meta device.
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    model = nn.ModuleDict({"bags": following(bags, {"item": 16}, nursery=0)}).to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"fixed capacity.*: \['item'\]\. Leave"):
        plan(model, "50%")
    assert [table.name for table in plan(model, "50%", exclude="item").tables] == ["user"]
