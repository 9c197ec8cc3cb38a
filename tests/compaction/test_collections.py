"""Compact collections, unsharded, against collections whose removed rows are zeros."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

from dist_sparse.compaction import collections
from dist_sparse.compaction.collections import (
    CompactEmbeddingBagCollection,
    CompactEmbeddingCollection,
)
from dist_sparse.ids.row_index import UNKNOWN, RowIndex, RowIndexes

TABLES = (
    EmbeddingBagConfig(
        name="a", num_embeddings=50, embedding_dim=8, feature_names=["f", "g"]
    ),  # several features
    EmbeddingBagConfig(
        name="b", num_embeddings=20, embedding_dim=8, feature_names=["f", "h"]
    ),  # shares f; none left
    EmbeddingBagConfig(name="c", num_embeddings=90, embedding_dim=8, feature_names=["i"]),  # dense
    EmbeddingBagConfig(name="d", num_embeddings=33, embedding_dim=8, feature_names=["j"]),
)
ROWS = {"f": 20, "g": 50, "h": 20, "i": 90, "j": 33, "unused": 7}


def kept() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "a": torch.rand(50, generator=draw) < 0.3,
        "b": torch.zeros(20, dtype=torch.bool),
        "d": torch.rand(33, generator=draw) < 0.6,
    }


def tables_of(collection: Any) -> dict[str, Any]:
    return dict(
        (
            collection.embedding_bags
            if hasattr(collection, "embedding_bags")
            else collection.embeddings
        ).items()
    )


def pair(whole: Any, compact: Any) -> None:
    """The same weights in both, zeros where ``compact`` has no rows."""
    for name, table in tables_of(whole).items():
        flags = kept().get(name)
        if flags is not None:
            table.weight.data[~flags] = 0
        rows = table.weight.data if flags is None else table.weight.data[flags]
        stored = tables_of(compact.inner)[name].weight.data
        stored.zero_()[: len(rows)] = rows


def features(batch: int, seed: int = 0, most: int = 4) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    keys = ["j", "unused", "h", "g", "i", "f"]  # of another order, with one that no table has
    lengths = torch.randint(0, most, (len(keys), batch), generator=draw)
    values = [
        torch.randint(0, ROWS[key], (int(n.sum()),), generator=draw)
        for key, n in zip(keys, lengths, strict=True)
    ]
    weights = torch.rand(int(lengths.sum()), generator=draw)
    return KeyedJaggedTensor(keys, torch.cat(values), weights=weights, lengths=lengths.flatten())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_bags(pooling: PoolingType, weighted: bool) -> None:
    tables = [replace(table, pooling=pooling) for table in TABLES]
    indexes = {name: RowIndex.of(flags) for name, flags in kept().items()}
    if weighted and pooling is PoolingType.MEAN:
        return  # compact() refuses them
    whole = EmbeddingBagCollection([replace(table) for table in tables], is_weighted=weighted)
    compact = CompactEmbeddingBagCollection(tables, indexes, is_weighted=weighted)
    assert [len(tables_of(compact.inner)[n].weight) for n in "abcd"] == [19, 1, 90, 16]
    pair(whole, compact)
    empty = KeyedJaggedTensor(
        list(ROWS), torch.empty(0, dtype=torch.int64), torch.empty(0), lengths=torch.zeros(12).int()
    )
    for given in (features(6), features(1, seed=1), features(40, seed=2, most=9), empty):
        expected, found = whole(given), compact(given)
        assert found.keys() == expected.keys() == ["f@a", "g", "f@b", "h", "i", "j"]
        tolerance = 0.0 if pooling is PoolingType.SUM else 1e-6
        torch.testing.assert_close(
            found.values(), expected.values(), rtol=tolerance, atol=tolerance
        )
        upstream = torch.randn(found.values().shape, generator=torch.Generator().manual_seed(1))
        for collection, given_back in ((whole, expected), (compact, found)):
            collection.zero_grad()
            given_back.values().backward(upstream)
        for name, flags in kept().items():
            mine, other = (tables_of(c)[name].weight.grad for c in (compact.inner, whole))
            rows = int(flags.sum())
            torch.testing.assert_close(mine[:rows], other[flags], rtol=1e-6, atol=1e-6)
            assert not mine[rows:].any()


def test_sequences() -> None:
    tables = [
        EmbeddingConfig(
            name=t.name,
            num_embeddings=t.num_embeddings,
            embedding_dim=8,
            feature_names=t.feature_names,
        )
        for t in TABLES
    ]
    whole = EmbeddingCollection([replace(table) for table in tables])
    compact = CompactEmbeddingCollection(
        tables, {name: RowIndex.of(flags) for name, flags in kept().items()}
    )
    pair(whole, compact)
    for given in (features(6), features(1, seed=1)):
        expected, found = whole(given), compact(given)
        assert list(found) == list(expected)
        for key in expected:
            assert torch.equal(found[key].values(), expected[key].values())
            assert torch.equal(found[key].lengths(), expected[key].lengths())
        sum(each.values().square().sum() for each in found.values()).backward()
        sum(each.values().square().sum() for each in expected.values()).backward()
        grads = [tables_of(c)["a"].weight.grad for c in (compact.inner, whole)]
        torch.testing.assert_close(grads[0], grads[1][kept()["a"]], rtol=1e-6, atol=1e-6)


def test_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the collection of kept rows: no removed id, and no id out of range."""
    compact = CompactEmbeddingBagCollection(
        TABLES, {name: RowIndex.of(flags) for name, flags in kept().items()}
    )
    given = features(6)
    rows = compact.ids(given)
    assert (
        rows.keys() == ["f@a", "g", "f@b", "h", "i", "j"]
        and rows.weights().shape == rows.values().shape
    )
    for key, source, table in zip(
        rows.keys(), ["f", "g", "f", "h", "i", "j"], "aabbcd", strict=True
    ):
        ids = given[source].values()
        flags = kept().get(table, torch.ones(90, dtype=torch.bool))
        assert torch.equal(rows[key].values(), (flags.cumsum(0) - 1)[ids[flags[ids]]])
        assert torch.equal(rows[key].weights(), given[source].weights()[flags[ids]])
    ignoring = SimpleNamespace(bounds_checks=lambda: dict.fromkeys("abcd", "IGNORE"))
    monkeypatch.setattr(collections, "collection_of", lambda _: ignoring)
    for dtype in (torch.int32, torch.int64):
        bad = torch.tensor([-1, 33, 2**31 - 1, 0], dtype=dtype)
        ids = KeyedJaggedTensor(list(ROWS), bad.repeat(6), lengths=torch.full((6,), 4, dtype=dtype))
        rows = compact.ids(ids)
        assert (
            rows["j"].values().tolist() == [0] * int(kept()["d"][0])
            and rows.values().dtype == dtype
        )
    assert compact.ids.unknown == {"a": 8, "b": 12, "c": 4, "d": 6}


MAPPED = pytest.mark.parametrize("mapped", [0, 40, 10**6], ids=["bitmaps", "both", "maps"])


@MAPPED
def test_maps_equal_the_index(monkeypatch: pytest.MonkeyPatch, mapped: int) -> None:
    """Bit for bit what the index of all tables finds, whichever tables are small; int32 and
    int64."""
    monkeypatch.setattr(collections, "MAPPED_ROWS", mapped)
    indexes = {name: RowIndex.of(flags, default_row=name == "a") for name, flags in kept().items()}
    ids = CompactEmbeddingBagCollection(TABLES, indexes).ids
    index = RowIndexes([indexes.get(name) for name in "abcd"], [50, 20, 90, 33], [0, 0, 1, 1, 2, 3])
    before = ids.nbytes
    for given in (features(6), features(40, seed=2, most=9)):
        ordered = ids.ordered(given)
        lengths = torch.tensor(ordered.length_per_key())
        expected, known = index(ordered.values(), lengths)
        expected[~known] = UNKNOWN
        assert (
            torch.equal(ids.rows(ordered), expected)
            and ids.rows(ordered).dtype == expected.dtype == torch.int32
        )
    assert ids.nbytes - before == 4 * {0: 0, 40: 20, 10**6: 103}[mapped]


@MAPPED
def test_lookups_follow_the_index(monkeypatch: pytest.MonkeyPatch, mapped: int) -> None:
    """A state that is loaded, and a module that is copied or moved, look up their own bits; also
    after a first lookup in inference mode."""
    monkeypatch.setattr(collections, "MAPPED_ROWS", mapped)
    flags = kept()
    first = CompactEmbeddingBagCollection(
        TABLES, {name: RowIndex.of(each) for name, each in flags.items()}
    )
    other = CompactEmbeddingBagCollection(
        TABLES, {name: RowIndex.of(each.flip(0)) for name, each in flags.items()}
    )
    given = features(6)
    want = first(given).values()
    with torch.inference_mode():
        other(given)
    copied = copy.deepcopy(other)
    for made in (other, copied):
        made.load_state_dict(first.state_dict())
        assert torch.equal(made(given).values(), want)
    copied.ids.indexes["d"].words = torch.zeros_like(first.ids.indexes["d"].words)
    assert not copied(given)["j"].any()


def test_indexes_in_one_memory_are_copied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collections, "MAPPED_ROWS", 0)
    compact = CompactEmbeddingBagCollection(
        TABLES, {name: RowIndex.of(each) for name, each in kept().items()}
    )
    compact(features(6))
    memory = compact.ids.indexes["a"].words.untyped_storage()
    for index in compact.ids.indexes.values():
        assert index.words.untyped_storage().data_ptr() == memory.data_ptr()
    for index in compact.table_indexes().values():
        assert index.words.untyped_storage().nbytes() == index.words.nbytes < memory.nbytes()
        assert index.counts.untyped_storage().nbytes() == index.counts.nbytes


def test_refused_features() -> None:
    compact = CompactEmbeddingBagCollection(TABLES, {})
    with pytest.raises(ValueError, match=r"Features \['g', 'h', 'i', 'j'\] are not in"):
        compact(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1])))
    varying = KeyedJaggedTensor(
        ["f", "g"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(ValueError, match="Batch sizes that differ between features"):
        compact(varying)


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_operations_do_not_grow_with_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tables without a map."""
    monkeypatch.setattr(collections, "MAPPED_ROWS", 0)
    counted = []
    for features in (2, 26):
        names = [f"f{number}" for number in range(features)]
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=50, embedding_dim=4, feature_names=[name])
            for name in names
        ]
        index = {name: RowIndex.of(kept()["a"]) for name in names}
        ids = CompactEmbeddingBagCollection(tables, index).ids
        lengths = torch.ones(3 * features, dtype=torch.int64)
        given = KeyedJaggedTensor(names, torch.arange(3 * features) % 50, lengths=lengths)
        ids(given)
        with Operations() as operations:
            ids(given)
        counted.append(operations.count)
    assert counted[0] == counted[1]
