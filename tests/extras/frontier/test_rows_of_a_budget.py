"""The rows that the method ``rows`` keeps within a budget are those of ``sparsify(budget=)``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse.checks import parse_budget
from dist_sparse.extras.frontier.measure import fewest_rows
from dist_sparse.planning.candidates import Candidate, Choices, shape_of
from dist_sparse.training.arguments import budget_bytes, budget_levels, dense_bytes
from tests.training.test_budget import arguments, tables_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_candidates_keep_the_same_rows(seed: int, dtype: torch.dtype) -> None:
    """Of tables of any shapes and for any budget, in bytes or as a share, with or without tables
    that stay whole."""
    rng = random.Random(seed)
    stored = {torch.float32: "fp32", torch.float16: "fp16"}[dtype]
    for _ in range(40):
        model = nn.ModuleDict()
        for name in "abcd"[: rng.randint(1, 4)]:
            rows, width = rng.randint(16, 3000), rng.choice([1, 4, 6, 16, 50])
            model[name] = nn.EmbeddingBag(rows, width, dtype=dtype, device="meta")
            model[name].to_empty(device="cpu")
        tables = tables_of(model)
        total = dense_bytes(tables.values())
        budget: Any = rng.choice([rng.uniform(0.05, 0.95), rng.randint(total // 10, total - 1)])
        kept_whole = sorted(tables)[1 : rng.randint(1, 2)]
        pruned = {name: data for name, data in tables.items() if name not in kept_whole}
        choices = Choices(
            tables=[shape_of(data) for data in tables.values()],
            budget=budget_bytes(parse_budget(budget), total),
            groups=(),
            untouched={},
        )
        choice = fewest_rows(choices, Candidate(dtype=stored), [*pruned])
        try:
            levels = budget_levels(arguments(budget=budget), tables, pruned, {})
        except ValueError as error:
            assert "are the least" in str(error) and not choice.fits
            continue
        assert choice.fits
        for name, data in pruned.items():
            rows = data.shape[0]
            assert rows - round(levels[name] * rows) == choice.candidate.shape(shape_of(data))[0]
