"""Translating the ids of a compact collection on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from dist_sparse.compaction import collections
from dist_sparse.compaction.collections import CompactEmbeddingBagCollection, CompactIds
from dist_sparse.ids.row_index import RowIndex
from tests.extras.device.simulated.account import Spent
from tests.extras.device.simulated.fake import counting, cuda, inner
from tests.extras.device.simulated.runs import on_device

ROWS = 70


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def translation(features: int) -> CompactIds:
    """Of one table with two features, one that keeps all rows, and one table for each feature
    else."""
    names = [["f0", "f1"], *([f"f{n}"] for n in range(2, features))]
    tables = [
        EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=4, name=each[0], feature_names=each)
        for each in names
    ]
    draw = torch.Generator().manual_seed(0)
    kept = [torch.rand(ROWS, generator=draw) < 0.5 for _ in tables]
    indexes = {
        table.name: RowIndex.of(flags, default_row=table.name == "f3")
        for table, flags in zip(tables, kept, strict=True)
        if table.name != "f2"
    }
    return CompactEmbeddingBagCollection(tables, indexes, is_weighted=True).ids


def batch(features: int, on: Any, unknown: bool) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(-2 if unknown else 0, ROWS, (features * 6,), generator=draw)
    weights = torch.rand(len(ids), generator=draw)
    lengths = torch.tensor([1, 3, 0, 2]).repeat(features)
    keys = [f"f{n}" for n in range(features)]
    return KeyedJaggedTensor(keys, on(ids), on(weights), lengths=on(lengths))


def parts(found: KeyedJaggedTensor) -> list[Tensor]:
    return [inner(each) for each in (found.values(), found.lengths(), found.weights())]


def on_both(features: int, unknown: bool) -> Spent:
    """Check that the rows are the CPU's, and that the index takes no more memory than its parts;
    return what a steady forward costs."""
    ids = translation(features)
    expected = parts(ids(batch(features, as_it_is, unknown)))
    with on_device():
        moved = translation(features)
        for index in moved.indexes.values():
            for name, buffer in list(index.named_buffers()):
                setattr(index, name, cuda(buffer))
        given = batch(features, cuda, unknown)
        moved(given)
        assert (
            len({index.words.untyped_storage().data_ptr() for index in moved.indexes.values()}) == 1
        )
        assert moved.nbytes == sum(index.nbytes for index in moved.indexes.values())
        with counting() as meter:
            found = moved(given)
    assert all(map(torch.equal, expected, parts(found)))
    assert moved.unknown == {name: 2 * count for name, count in ids.unknown.items()}
    return meter.spent


@pytest.mark.parametrize("unknown", [False, True])
def test_cost_does_not_grow_with_the_features(
    unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignoring = SimpleNamespace(bounds_checks=lambda: {f"f{n}": "IGNORE" for n in range(26)})
    monkeypatch.setattr(collections, "collection_of", lambda _: ignoring)
    # For weights, a wait more; for ids out of range, two.
    few, many = on_both(4, unknown), on_both(26, unknown)
    assert (few.waits, few.launches) == (many.waits, many.launches), many.lines
    most = (5, 58) if unknown else (3, 51)
    assert many.waits <= most[0] and many.launches <= most[1], (many, many.lines)
