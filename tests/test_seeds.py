"""Tests draw from their own names: in this process, in fixtures of a module, and in ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests import seeds
from tests.dist.plugin import on_ranks

Drawn = tuple[float, float, float]


def drawn() -> Drawn:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.nodeid


@pytest.fixture(scope="module")
def of_the_module() -> Drawn:
    return drawn()


def test_by_name(name: str, of_the_module: Drawn) -> None:
    """Whatever a fixture has drawn before."""
    found = drawn()
    seeds.seed_by(name)
    assert found == drawn() != of_the_module


def test_a_fixture_by_its_own(request: pytest.FixtureRequest, of_the_module: Drawn) -> None:
    seeds.seed_by(f"{request.node.parent.nodeid} of_the_module")
    assert of_the_module == drawn()


@on_ranks(2)
def test_in_ranks(name: str) -> None:
    found = drawn()
    seeds.seed_by(name)
    assert found == drawn()


def test_a_shift_changes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds.seed_by("a test")
    before = drawn()
    monkeypatch.setattr(seeds, "SHIFT", seeds.SHIFT + 1)
    seeds.seed_by("a test")
    assert not set(before) & set(drawn())
