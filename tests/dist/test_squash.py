"""Masks that are squashed between a forward and its backward: as right after the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse import sparsify
from tests.dist.cells import batch, build, gathered
from tests.dist.enforcing import optimizer_of, trained_cells
from tests.dist.plugin import on_ranks
from tests.keywords import nested

PLAN: dict[str, Any] = {"level": 0.5, "end": 1, "every": 1, "min_rows": 0}


def trained(kind: str, block: str, names: list[str] | None, when: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: nn.Module = nn.ModuleDict({name: nn.EmbeddingBag(40, 4, mode="sum") for name in "ab"})
    if kind == "plain":
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    else:
        model = build(trained_cells(2)[kind])
        optimizer = optimizer_of(model)
    sparse = sparsify(model, optimizer, **nested(block=block, **PLAN))
    chosen = None if names is None else sorted(sparse.sparsifier.data_groups)[:1]

    def squash(now: str) -> None:
        if now == when:
            if when == "detached":
                sparse.detach()
            sparse.sparsifier.squash_mask(names=chosen)

    for step in range(5):
        optimizer.zero_grad()
        if kind == "plain":
            ids = torch.arange(40).view(4, 10)
            loss = (model["a"](ids) * model["b"](ids)).sum()
        else:
            loss = model(batch(trained_cells(2)[kind], seed=step)).sum()
        if step == 3:
            squash("before")
            squash("detached")
        loss.backward()
        if step == 3:
            squash("after")
        optimizer.step()
        sparse.step()
    if when != "detached":
        sparse.sparsifier.audit()
        sparse.detach()
    return gathered(model) if kind != "plain" else dict(model.state_dict())


@pytest.mark.parametrize("names", [None, ["the first"]], ids=["all", "some"])
@pytest.mark.parametrize("block", ["row", "1x4"])
def test_plain_weights(block: str, names: list[str] | None) -> None:
    expected = trained("plain", block, names, "after")
    found = trained("plain", block, names, "before")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(2)
@pytest.mark.parametrize("names", [None, ["the first"]], ids=["all", "some"])
@pytest.mark.parametrize("block", ["row", "1x4"])
@pytest.mark.parametrize("kind", ["row_wise", "mixed"])
def test_fused_tables(kind: str, block: str, names: list[str] | None) -> None:
    """Their kernels call the hooks of the forward in the backward, which looked for the masks."""
    expected = trained(kind, block, names, "after")
    found = trained(kind, block, names, "before")
    # A backward writes rows that lost only a part in full: squashed before it, they are dense then.
    if block == "row":
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    trained(kind, block, names, "detached")
