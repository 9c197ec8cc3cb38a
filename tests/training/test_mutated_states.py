"""No mutated state is half loaded, or accepted and regretted: see tests/mutated_states.py."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

from dist_sparse import Advanced, sparsify
from tests.mutated_states import outcomes

CASES = range(int(os.environ.get("MUTATED_STATES", "120")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse training stopped", "ignore:The names or globs")
def test_mutated_states() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"user": nn.EmbeddingBag(40, 4), "item": nn.EmbeddingBag(30, 4)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    sparse = sparsify(
        model,
        optimizer,
        level=0.6,
        end=9,
        every=3,
        advanced=Advanced(floor={"user": 0.2}),
        block="row",
    )

    def train(steps: int = 2) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (
                model["user"](torch.randint(40, (4, 3))) * model["item"](torch.randint(30, (4, 3)))
            ).sum().backward()
            optimizer.step()
            sparse.step()

    train(5)
    good = copy.deepcopy(sparse.state_dict())
    train(3)
    counts = outcomes(sparse, good, train, CASES)
    assert set(counts) == {"refused", "equivalent", "another valid state"}
