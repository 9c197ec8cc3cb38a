"""Deltas of codes: base and deltas are the full export of the same moment."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

import dist_sparse.extras.codes.coded_training as coded_module
from dist_sparse.extras.codes import quantize
from tests.serving.test_delta import CHANGES, Days, check_changes


class CodedDays(Days):
    """Days of a table with codes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "codes")
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with mock.patch.object(coded_module, "LEAST_ROWS", 1):
            self.sparse = quantize(
                self.model, optimizer, codes=2, begin=0, every=1, sparse=self.sparsifier
            )


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(changes=CHANGES)
def test_any_changes(changes: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        check_changes(CodedDays(Path(name)), Path(name), changes)
