"""Compact nn.EmbeddingBag and nn.Embedding take what torch takes, and refuse what torch refuses or
misreads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_sparse.compaction.tables import CompactEmbeddingBag
from dist_sparse.ids.row_index import RowIndex

KEPT = torch.arange(20) % 3 != 0
IDS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 19])


def pair(**how: Any) -> tuple[nn.EmbeddingBag, CompactEmbeddingBag]:
    """A table with zeros in its removed rows, and the compact table of the others."""
    whole = nn.EmbeddingBag(20, 4, **how)
    whole.weight.data[~KEPT] = 0
    return whole, CompactEmbeddingBag(whole, whole.weight.data[KEPT], RowIndex.of(KEPT))


def ends(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.parametrize("padding", [None, 1, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_both_kinds(mode: str, padding: int | None, dtype: torch.dtype) -> None:
    for closed, offsets in (
        (False, ends(0, 4, 4, 8, dtype=dtype)),
        (False, ends(0, 12, dtype=dtype)),
        (True, ends(0, 5, 5, 12, dtype=dtype)),
    ):
        whole, compact = pair(mode=mode, include_last_offset=closed, padding_idx=padding)
        torch.testing.assert_close(compact(IDS, offsets), whole(IDS, offsets))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_no_ids(mode: str) -> None:
    """No bags, and bags without ids."""
    for closed, offsets in ((True, ends(0)), (True, ends(0, 0)), (False, ends()), (False, ends(0))):
        whole, compact = pair(mode=mode, include_last_offset=closed)
        assert torch.equal(compact(IDS[:0], offsets), whole(IDS[:0], offsets))
    whole, compact = pair(mode=mode)
    assert torch.equal(compact(IDS.view(3, 4)[:0]), whole(IDS.view(3, 4)[:0]))


REFUSED = {
    "the first is not 0": (False, ends(2, 5)),
    "one beyond the ids": (False, ends(0, 4, 20)),
    "an inner one beyond the ids": (False, ends(0, 20, 12)),
    "falling": (False, ends(0, 8, 4, 12)),
    "negative": (False, ends(0, -2, 5)),
    "none, but ids": (False, ends()),
    "no end": (True, ends()),
    "an end beyond the ids": (True, ends(0, 4, 20)),
    # torch adds these ids to the last bag, drops them, or crashes: each of its kernels differently.
    "ids behind the end": (True, ends(0, 4, 8)),
    "one offset, but ids": (True, ends(0)),
    "int16": (False, ends(0, 4, dtype=torch.int16)),
    "a matrix": (False, ends(0, 4).view(1, 2)),
}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_offsets(name: str, mode: str) -> None:
    """Nothing is read outside of the ids, and none is dropped in silence."""
    closed, offsets = REFUSED[name]
    for padding in (None, 1):
        _, compact = pair(mode=mode, include_last_offset=closed, padding_idx=padding)
        with pytest.raises(ValueError, match="Invalid offsets"):
            compact(IDS, offsets)


def test_refused_weights_and_shapes() -> None:
    _, compact = pair(mode="sum")
    for weights in (torch.ones(4, 3), torch.ones(12, 1), torch.ones(5)):
        with pytest.raises(ValueError, match="Invalid per_sample_weights of shape"):
            compact(IDS.view(3, 4), per_sample_weights=weights)
    # torch's kernel refuses another dtype than the table's.
    with pytest.raises(RuntimeError, match="per_sample_weights"):
        compact(IDS.view(3, 4), per_sample_weights=torch.ones(3, 4).double())
    _, mean = pair(mode="mean")
    with pytest.raises(ValueError, match="mode='mean' takes none"):
        mean(IDS.view(3, 4), per_sample_weights=torch.ones(3, 4))
    for ids in (IDS[:0].view(3, 0), IDS.view(1, 3, 4), IDS):
        with pytest.raises(ValueError, match="Invalid input of shape"):
            compact(ids)
