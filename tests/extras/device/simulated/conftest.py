"""Where these tests can run."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator

import pytest
import torch

# Triton has wheels for Linux only.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.version.cuda is None:
        return
    # torch's own CUDA code would take these tensors for real ones.
    skip = pytest.mark.skip(
        reason="THE FAKE DEVICE NEEDS A CPU BUILD OF TORCH: dist-sparse selftest"
    )
    for item in items:
        if "tests/extras/device/simulated/" in item.nodeid:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def _no_leftovers() -> Iterator[None]:
    """Free the attached models: the next step of any optimizer would look at their tensors, which
    no longer have a device."""
    yield
    gc.collect()
