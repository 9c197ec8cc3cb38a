"""Records that are lookup counts, over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dist_sparse import LookupCounts, remove_untouched
from tests.dist.plugin import on_ranks


@on_ranks(2)
class TestRecords:
    """On every rank, although one alone is wrong."""

    def test_of_other_rows_are_told_apart(self) -> None:
        """As many rows, whose numbers have the same sum: 0 and 5, or 2 and 3."""
        counts = torch.zeros(8, dtype=torch.int64)
        counts[[2, 3] if dist.get_rank() else [0, 5]] = 1
        model = nn.EmbeddingBag(8, 4)
        before = model.weight.detach().clone()
        with pytest.raises(ValueError, match="rows read by the record"):
            remove_untouched(model, record={"weight": counts}, trust_record=True)
        assert torch.equal(model.weight, before)

    def test_a_folder_that_one_rank_lacks(self, tmp_path: Path) -> None:
        folder = tmp_path / f"counts-{dist.get_rank()}"
        if not dist.get_rank():
            LookupCounts({"weight": torch.ones(8, dtype=torch.int64)}, batches=1).save(folder)
        with pytest.raises(ValueError, match=r"rank 1.*counts-1 holds no lookup counts"):
            remove_untouched(nn.EmbeddingBag(8, 4), record=folder)
