"""The names of the extra, and where their users find them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dist_sparse.extras import optim

PAGE = Path(__file__).parents[3] / "docs" / "api" / "optim.md"


def test_the_reference_has_the_public_names() -> None:
    names = re.findall(r"^::: dist_sparse\.extras\.optim\.(\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(names) == optim.__all__ == ["ExponentDecayLr", "Noamlr", "OptimScheduler"]


@pytest.mark.parametrize("name", optim.__all__)
def test_names_have_docstrings_with_an_example(name: str) -> None:
    public = getattr(optim, name)
    assert ">>> " in public.__doc__
    methods = [each for each in vars(public).values() if callable(each)]
    assert all(each.__doc__ for each in methods if not each.__name__.startswith("_"))
