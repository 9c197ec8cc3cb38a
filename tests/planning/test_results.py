"""Results of plan() and frontier() as a REPL and a notebook show them."""

from __future__ import annotations

import pytest
from torch import nn

from dist_sparse.planning.frontier import frontier
from dist_sparse.planning.plan import plan

pretty = pytest.importorskip("IPython.lib.pretty")


def test_a_repl_and_a_notebook_show_the_table() -> None:
    budget = plan({"user": (1000, 16), "item": (2000, 16)}, "10%")
    model = nn.EmbeddingBag(50, 8)
    measured = frontier(
        model, lambda model: {"auc": float(model.weight.detach().mean())}, budgets=[0.5]
    )
    for result, head in (
        (budget, "budget 18.8 KiB, 10.0% of 188 KiB in 2 tables"),
        (measured, "   at  method "),
    ):
        assert repr(result) == str(result) == pretty.pretty(result)
        assert str(result).startswith(head) and len(str(result).splitlines()) > 5
