"""No mutated state is half loaded on some rank, or accepted and regretted: see
tests/mutated_states.py."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest

from dist_sparse import sparsify
from tests.dist.cells import batch, build, cells
from tests.dist.enforcing import optimizer_of
from tests.dist.plugin import on_ranks
from tests.keywords import nested
from tests.mutated_states import outcomes

CASES = range(int(os.environ.get("MUTATED_STATES", "60")))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(
    ("cell", "plan"),
    [
        ("mixed", {"level": 0.6, "floor": {"user": 0.2}}),
        ("row_wise", {"level": 0.5, "score": "frequency", "scope": "global", "floor": 0.1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mutated_states(cell: str, plan: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore", "The names or globs")
    model = build(cells(2)[cell])
    optimizer = optimizer_of(model)
    sparse = sparsify(model, optimizer, **nested(end=9, every=3, min_rows=0, **plan))
    steps = 0

    def train(count: int = 2) -> None:
        nonlocal steps
        for _ in range(count):
            steps += 1
            optimizer.zero_grad()
            model(batch(cells(2)[cell], seed=steps)).sum().backward()
            optimizer.step()
            sparse.step()

    train(5)
    good = copy.deepcopy(sparse.state_dict())
    train(3)
    counts = outcomes(sparse, good, train, CASES)
    # outcomes() refuses any other outcome. Few are accepted: every key must be there.
    assert {"refused"} < set(counts), counts
