"""Where these tests can run."""

from __future__ import annotations

import importlib.util

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
        if "tests/device/" in item.nodeid:
            item.add_marker(skip)
