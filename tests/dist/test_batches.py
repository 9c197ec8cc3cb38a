"""Batches of unusual kinds: weights of their own, sizes of their own, ids in no bag, merged ids."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torchrec import KeyedJaggedTensor

from dist_sparse import Advanced, sparsify
from tests.dist.batches import by_hand, model, outputs_of, pruned
from tests.dist.plugin import on_ranks

KEYS = ["bought", "both", "buyer"]
LENGTHS = torch.tensor([2, 0, 3, 1, 4, 2, 0, 2, 1])


def batch(weights: torch.dtype | None = None, loose: int = 0, **how: Any) -> KeyedJaggedTensor:
    """Three samples of three features; another one on each rank.

    Args:
        loose: ids behind the last bag.
    """
    draw = torch.Generator().manual_seed(dist.get_rank())
    count = int(LENGTHS.sum()) + loose
    ids = torch.randint(0, 33, (count,), generator=draw)
    given = None
    if weights is not None:
        given = torch.randint(1, 9, (count,), generator=draw) / 4
        given = given.to(weights)
    return KeyedJaggedTensor(KEYS, ids, weights=given, lengths=LENGTHS, **how)


def check(found: Any, given: KeyedJaggedTensor, pooling: str, by_weight: bool = False) -> None:
    expected = by_hand(given, pooling, by_weight)
    for name, values in outputs_of(found).items():
        torch.testing.assert_close(values.double(), expected[name], rtol=0, atol=5e-6)


@on_ranks(2)
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_weights_of_an_unweighted_collection(sharding: str) -> None:
    """Training weighs by them, in every sharding; means divide differently."""
    for pooling in ("sum", "mean"):
        by_weight = sharding == "row_wise"
        plain, _ = pruned(sharding, pooling, "plain")
        masked, sparse = pruned(sharding, pooling, "masked")
        small, _ = pruned(sharding, pooling, "compact")
        for given in (batch(), batch(torch.float32)):
            check(plain(given), given, pooling, by_weight)
            check(masked(given), given, pooling, by_weight)
        check(small(batch()), batch(), pooling)
        if pooling == "mean":
            with pytest.raises(ValueError, match=r"has weights, and the tables \['user', 'item'\]"):
                small(batch(torch.float32))
            continue
        # FBGEMM's kernels cast weights to float32; TorchRec distributes some dtypes only.
        for dtype in (torch.float32, torch.float64, torch.float16):
            check(small(batch(dtype)), batch(dtype), pooling)
        # TorchRec's, as in training: this permutes features on a GPU only.
        with pytest.raises(NotImplementedError, match="BFloat16"):
            small(batch(torch.bfloat16))
        for dtype in (torch.int64, torch.int32, torch.bool):
            with pytest.raises(ValueError, match=f"has weights, {dtype} .*must be floating"):
                small(batch(dtype))
        sparse.detach()


@on_ranks(2)
def test_batches_that_compact_collections_refuse() -> None:
    """By name, before anything is sent; what to do instead."""
    for pooling in ("sum", None):
        small, _ = pruned("row_wise", pooling, "compact")
        ids, lengths = torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1])
        varying = KeyedJaggedTensor(
            ["bought", "both", "buyer"],
            ids,
            lengths=lengths,
            stride_per_key_per_rank=[[1], [1], [1]],
            inverse_indices=(KEYS, torch.tensor([[0, 0], [0, 0], [0, 0]])),
        )
        inverse = KeyedJaggedTensor(
            KEYS, ids, lengths=lengths, inverse_indices=(KEYS, torch.zeros(3, 2).long())
        )
        for given in (varying, inverse):
            with pytest.raises(ValueError, match="give all features one batch size"):
                small(given)
        with pytest.raises(ValueError, match="Lengths must add up to the number of ids"):
            small(batch(loose=3))
        wrapping = torch.tensor([200_000, 3, -200_000])
        with pytest.raises(ValueError, match="none may be negative"):
            small(KeyedJaggedTensor(KEYS, ids, lengths=wrapping))
        with pytest.raises(ValueError, match=r"Invalid ids of dtype torch\.int16"):
            small(KeyedJaggedTensor(KEYS, ids.short(), lengths=lengths))
        with pytest.raises(ValueError, match=r"has weights, torch\.float32 \(3, 1\): must be"):
            small(KeyedJaggedTensor(KEYS, ids, weights=torch.ones(3, 1), lengths=lengths))
        # Nothing was sent: the ranks still agree.
        small(batch())


@on_ranks(1)
@pytest.mark.parametrize("pooling", ["sum", "mean", None])
def test_ids_in_no_bag(pooling: str | None) -> None:
    """FBGEMM reads and trains them in the last bag. TorchRec refuses them in a first batch alone,
    and sequences of several features never."""
    plain, _ = pruned("table_wise", pooling, "plain", shared=False)
    masked, sparse = pruned("table_wise", pooling, "masked", shared=False)
    ids, lengths = torch.arange(12), torch.tensor([2, 3, 0, 4])
    given = KeyedJaggedTensor(["buyer", "bought"], ids[:9], lengths=lengths)
    loose = KeyedJaggedTensor(["buyer", "bought"], ids, lengths=lengths)
    expected, found = outputs_of(plain(given)), outputs_of(masked(given))
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    negative = KeyedJaggedTensor(
        ["buyer", "bought"], ids[:9], lengths=torch.tensor([2, 7, 70_000, -70_000])
    )
    for wrong in (loose, negative):
        with pytest.raises(
            ValueError, match=r"Tables \['user', 'item'\]: a lookup has .* none may"
        ):
            masked(wrong)
    assert torch.equal(outputs_of(masked(given))["buyer"], expected["buyer"])
    sparse.detach()


def unique_ids(
    cumsum: Tensor, offsets_of_tables: Tensor, offsets: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FBGEMM's operator of index dedup, which it has for GPUs alone."""
    size = (len(offsets) - 1) // (len(cumsum) - 1)
    lengths = torch.zeros(len(offsets) - 1, dtype=torch.int64)
    unique: list[Tensor] = []
    reverse = torch.empty_like(ids)
    count = 0
    # Where each table's features begin: the features of a table share its rows.
    firsts = sorted(set(offsets_of_tables.tolist()))
    for first, last in pairwise(firsts):
        span = slice(int(offsets[first * size]), int(offsets[last * size]))
        found, places = torch.unique(ids[span], return_inverse=True)
        unique.append(found)
        reverse[span] = places + count
        lengths[first * size] = len(found)
        count += len(found)
    return lengths, F.pad(lengths.cumsum(0), (1, 0)), torch.cat(unique), reverse


@on_ranks(1, 2)
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_merged_ids(world: int, sharding: str) -> None:
    """Index dedup changes no output; lookups that it hides are refused, and not sampled."""
    library = torch.library.Library("fbgemm", "IMPL")
    library.impl("jagged_unique_indices", unique_ids, "CPU")
    merging: Any = model(sharding, None, dedup=True)
    with pytest.raises(ValueError, match=r"Table 'user': score='frequency' can't count"):
        sparsify(
            merging, merging.fused_optimizer, advanced=Advanced(score="frequency"), level=0.5, end=0
        )
    found = {}
    for dedup in (False, True):
        for how in ("masked", "compact"):
            made, sparse = pruned(sharding, None, how, dedup=dedup)
            found[dedup, how] = outputs_of(made(batch()))
            if how == "masked":
                unknown = "lookups of removed rows: not known" in sparse.summary()
                assert unknown is dedup
                sparse.detach()
    for name, values in found[False, "masked"].items():
        for other in found.values():
            assert torch.equal(other[name], values)
