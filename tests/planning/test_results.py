"""The result of plan() as a REPL and a notebook show it."""

from __future__ import annotations

import pytest

from dist_sparse.planning.plan import plan

pretty = pytest.importorskip("IPython.lib.pretty")


def test_a_repl_and_a_notebook_show_the_table() -> None:
    result = plan({"user": (1000, 16), "item": (2000, 16)}, "10%")
    assert repr(result) == str(result) == pretty.pretty(result)
    assert str(result).startswith("budget 18.8 KiB, 10.0% of 188 KiB in 2 tables")
    assert len(str(result).splitlines()) > 5
