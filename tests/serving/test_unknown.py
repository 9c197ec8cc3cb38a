"""Ids out of range in compact collections: what FBGEMM's mode says, and no row is read or
trained."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
)
from torchrec.distributed.types import BoundsCheckMode, ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dist_sparse import Advanced, compact, sparsify
from dist_sparse.compaction import collections
from dist_sparse.compaction.collections import (
    CompactEmbeddingBagCollection,
    CompactEmbeddingCollection,
)
from dist_sparse.ids.row_index import RowIndex
from tests.dist.cells import gathered
from tests.dist.plugin import on_ranks

ROWS = 40
INTEGERS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])


class Tables(nn.Module):
    """Two tables, of which one will keep all rows."""

    def __init__(self, pooling: PoolingType) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": 4, "pooling": pooling}
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=name, feature_names=[f"{name}_id"], **shared)
                for name in ("small", "whole")
            ]
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found: Tensor = self.bags(features).values()
        return found


def compacted(mode: BoundsCheckMode, pooling: PoolingType = PoolingType.SUM) -> Any:
    """A sharded model with fused tables, one of them compact."""
    model = Tables(pooling)
    apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.3})
    sharder = EmbeddingBagCollectionSharder(fused_params={"bounds_check_mode": mode})
    ways = {"small": row_wise(), "whole": row_wise()}
    plan = construct_module_sharding_plan(model.bags, ways, sharder=sharder, device_type="cpu")
    cpu = torch.device("cpu")
    sharded = DistributedModelParallel(
        model, device=cpu, plan=ShardingPlan({"bags": plan}), sharders=[sharder]
    )
    sparse = sparsify(
        sharded,
        sharded.fused_optimizer,
        level={"small": 0.5},
        block="row",
        end=0,
        advanced=Advanced(min_rows=1),
    )
    sparse.step()
    return compact(sharded, sparse)


def of_both(ids: list[int], dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """A bag of the same ids of both tables."""
    values = torch.tensor(ids + ids, dtype=dtype)
    return KeyedJaggedTensor(["small_id", "whole_id"], values, lengths=torch.tensor([len(ids)] * 2))


class Log(logging.Handler):
    """Lines that were logged; pytest's caplog does not cross to ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


@on_ranks(2)
@pytest.mark.parametrize(
    "mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE, BoundsCheckMode.V2_IGNORE]
)
def test_no_row_is_read_or_trained(mode: BoundsCheckMode) -> None:
    model, log = compacted(mode), Log()
    logging.getLogger(collections.__name__).addHandler(log)
    before = {name: weight.clone() for name, weight in gathered(model).items()}
    for dtype in (torch.int32, torch.int64):
        found = model(of_both([ROWS, -1, 5000, -7, 2**31 - 1], dtype))
        assert not found.any()
        found.sum().backward()
        model.fused_optimizer.step()
    for name, weight in gathered(model).items():
        assert torch.equal(weight, before[name])
    assert model.module.bags.ids.unknown == {"small": 10, "whole": 10}
    known, some = model(of_both([1, 2, 3, 9])), model(of_both([1, 2, ROWS, 3, -1, 9]))
    assert torch.equal(known, some)
    logging.getLogger(collections.__name__).removeHandler(log)
    # One for each table and batch.
    assert len(log.lines) == (6 if mode is BoundsCheckMode.WARNING else 0)
    for line in log.lines[:1]:
        assert line.startswith(
            "WARNING: Out of bounds access: id 40 of table 'small', which has 40 rows (5 such"
        )


@on_ranks(2)
def test_fatal_raises() -> None:
    model = compacted(BoundsCheckMode.FATAL)
    for bad in (ROWS, -1):
        with pytest.raises(
            RuntimeError,
            match=rf"Out of bounds access: id {bad} of table 'small', which has 40 rows",
        ):
            model(of_both([1, bad]))
    assert model(of_both([1, 2])).shape == (1, 8)


@on_ranks(2)
def test_a_variable_overrules_the_mode() -> None:
    """As in FBGEMM."""
    fatal = {"FBGEMM_TBE_BOUNDS_CHECK_MODE": str(BoundsCheckMode.FATAL.value)}
    model = compacted(BoundsCheckMode.IGNORE)
    with (
        mock.patch.dict(os.environ, fatal),
        pytest.raises(RuntimeError, match="Out of bounds access"),
    ):
        model(of_both([5000]))


@on_ranks(2)
def test_means_divide_by_all_ids() -> None:
    model = compacted(BoundsCheckMode.IGNORE, PoolingType.MEAN)
    torch.testing.assert_close(model(of_both([1, 2, 5000, -1])), model(of_both([1, 2])) / 2)


@on_ranks(2)
def test_data_parallel_tables_raise() -> None:
    """As they do before: their kernel checks ids in no mode."""
    model = Tables(PoolingType.SUM)
    sharder = EmbeddingBagCollectionSharder()
    ways = {"small": data_parallel(), "whole": data_parallel()}
    plan = construct_module_sharding_plan(model.bags, ways, sharder=sharder, device_type="cpu")
    cpu = torch.device("cpu")
    sharded: Any = DistributedModelParallel(
        model, device=cpu, plan=ShardingPlan({"bags": plan}), sharders=[sharder]
    )
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sparse = sparsify(
        sharded, optimizer, level={"small": 0.5}, block="row", end=0, advanced=Advanced(min_rows=1)
    )
    sparse.step()
    with pytest.raises(RuntimeError):
        sharded(of_both([5000]))
    sharded = compact(sharded, sparse)
    with pytest.raises(RuntimeError, match="id 5000 of table 'small'"):
        sharded(of_both([5000]))
    dist.barrier()


@INTEGERS
def test_unsharded_collections_raise(dtype: torch.dtype) -> None:
    """As torch's lookups do; a table that keeps all rows too."""
    index = {"small": RowIndex.of(torch.arange(ROWS) % 2 == 0)}
    bags = [
        EmbeddingBagConfig(name=n, num_embeddings=ROWS, embedding_dim=4, feature_names=[f"{n}_id"])
        for n in NAMES
    ]
    words = [
        EmbeddingConfig(name=n, num_embeddings=ROWS, embedding_dim=4, feature_names=[f"{n}_id"])
        for n in NAMES
    ]
    for whole, made in (
        (EmbeddingBagCollection(bags), CompactEmbeddingBagCollection(bags, index)),
        (EmbeddingCollection(words), CompactEmbeddingCollection(words, index)),
    ):
        for bad in (ROWS, -1, -7):
            with pytest.raises((IndexError, RuntimeError)):
                whole(of_both([0, bad], dtype))
            with pytest.raises(RuntimeError, match=f"id {bad} of table 'small'"):
                made(of_both([0, bad], dtype))


NAMES = ("small", "whole")


@INTEGERS
@pytest.mark.parametrize("default_row", [False, True])
@pytest.mark.parametrize("mapped", [0, 1, 1000], ids=["bitmap", "both", "map"])
def test_sequences(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, default_row: bool, mapped: int
) -> None:
    """Zero vectors, for which no row is looked up: not the default row either."""
    ignoring = SimpleNamespace(bounds_checks=lambda: dict.fromkeys(("small", "whole"), "IGNORE"))
    monkeypatch.setattr(collections, "collection_of", lambda _: ignoring)
    monkeypatch.setattr(collections, "MAPPED_ROWS", ROWS * mapped)
    tables = [
        EmbeddingConfig(name=n, num_embeddings=ROWS, embedding_dim=4, feature_names=[f"{n}_id"])
        for n in NAMES
    ]
    made = CompactEmbeddingCollection(
        tables, {"small": RowIndex.of(torch.arange(ROWS) >= 3, default_row)}
    )
    found = made(of_both([0, ROWS, 3, -1, 2], dtype))
    small, whole = found["small_id"].values(), found["whole_id"].values()
    rows = made.inner.embeddings
    nothing = torch.zeros(4)
    removed = rows["small"].weight[-1] if default_row else nothing
    assert torch.equal(
        small, torch.stack([removed, nothing, rows["small"].weight[0], nothing, removed])
    )
    own = rows["whole"].weight
    assert torch.equal(whole, torch.stack([own[0], nothing, own[3], nothing, own[2]]))
    assert made.ids.unknown == {"small": 2, "whole": 2}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@INTEGERS
def test_modules_of_torch_raise_as_before(mode: str, dtype: torch.dtype) -> None:
    model: Any = nn.ModuleDict(
        {"bags": nn.EmbeddingBag(ROWS, 4, mode=mode), "one": nn.Embedding(ROWS, 4)}
    )
    bad = [torch.tensor([[0, id]], dtype=dtype) for id in (ROWS, -1, -7, 2**31 - 1)]

    def raised() -> list[type[BaseException]]:
        found = []
        for name in ("bags", "one"):
            for ids in bad:
                with pytest.raises((IndexError, RuntimeError)) as caught:
                    model[name](ids)
                found.append(caught.type)
        return found

    before = raised()
    sparse = sparsify(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        level=0.5,
        block="row",
        end=0,
        advanced=Advanced(min_rows=1),
    )
    sparse.step()
    model = compact(model, sparse)
    assert raised() == before
