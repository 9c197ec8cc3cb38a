"""compact() on ranks that differ, or where one fails in the middle: it ends on all, and the model
trains on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding

import dist_sparse.compaction.moving as moving
import dist_sparse.compaction.replacing as replacing
from dist_sparse import Advanced, compact, sparsify
from dist_sparse.compaction.replacing import CollectionSite
from dist_sparse.masking.masks import BlockMask
from dist_sparse.sparsifiers import pieces
from dist_sparse.torchrec import port
from tests.compaction.test_compact_sharded import Run, cell_of
from tests.dist.cells import batch, build
from tests.dist.enforcing import optimizer_of
from tests.dist.plugin import on_ranks


def unchanged(run: Run, other: Run) -> None:
    """A run that was refused trains as one that was not touched."""
    assert run.enforcer.attached and run.sparsifier.data_groups
    for mine, expected in zip(run.train(4), other.train(4), strict=True):
        assert torch.equal(mine, expected)


def two_runs(name: str = "mixed") -> tuple[Run, Run]:
    runs = Run(cell_of(2, name)), Run(cell_of(2, name))
    for run in runs:
        run.train(2)
    return runs


@on_ranks(2)
@pytest.mark.parametrize("argument", ["optimizer", "plan", "removed"])
def test_an_argument_of_one_rank(argument: str) -> None:
    run, other = two_runs("data_parallel")
    odd: dict[str, tuple[dict[str, Any], str]] = {
        "optimizer": ({"optimizer": ()}, r"disagree.*compact\(\).*optimizer"),
        "plan": ({"plan": lambda module: None}, r"disagree.*compact\(\).*plan"),
        "removed": ({"removed": "default_row"}, r"disagree.*compact\(\).*removed"),
    }
    how, words = odd[argument]
    with pytest.raises(ValueError, match=f"(?s){words}"):
        run.compact(**(how if dist.get_rank() == 1 else {}))
    unchanged(run, other)
    run.compact()
    run.train(1)


def failing(real: Any, times: int) -> Any:
    """``real``, which runs out of memory on rank 1 in its call of this number."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == times and dist.get_rank() == 1:
            raise MemoryError("none is left")
        return real(*args, **kwargs)

    return call


PLACES = {
    "counting blocks": (pieces, "removed_blocks", 1),
    "counting rows": (BlockMask, "dead_rows", 1),
    "building": (CollectionSite, "compacted", 1),
    "in place": (replacing, "places_in", 1),
    "sharding": (port, "ShardingPlan", 1),
    "data-parallel lookups": (DpPooledEmbeddingSharding, "create_lookup", 1),
    "dense layers": (DistributedModelParallel, "init_data_parallel", 1),
    "moving": (replacing, "move_tables", 1),
    "what a table holds": (moving, "StoredTables", 1),
    "packing the first chunk": (moving, "_pack_wanted", 1),
    "packing a later chunk": (moving, "_pack_wanted", 3),
    "a chunk has arrived": (moving, "_join_pieces", 2),
    "optimizer state": (moving, "_by_shard", 1),
}


@on_ranks(2)
@pytest.mark.parametrize("place", PLACES)
def test_one_rank_is_out_of_memory(place: str) -> None:
    """The others do not wait for it: they raise its error, and all train on with the masked
    model."""
    cells = {
        "optimizer state": "row_wise_dense_kernel",
        "sharding": "row_wise",
        "data-parallel lookups": "data_parallel",
    }
    run, other = two_runs(cells.get(place, "mixed"))
    weights = {key: value for key, value in run.model.module.named_parameters()}
    module, name, times = PLACES[place]
    with (
        patch.object(module, name, failing(getattr(module, name), times)),
        pytest.raises(ValueError, match=r"rank 1: MemoryError: none is left"),
    ):
        run.compact()
    assert all(parameter is weights[key] for key, parameter in run.model.module.named_parameters())
    unchanged(run, other)
    run.compact()
    run.train(1)


@on_ranks(2)
def test_one_rank_fails_while_old_tables_are_released() -> None:
    """What is released can't be had back: no rank goes on with a model that others lack."""
    run, _ = two_runs()
    with (
        patch.object(replacing, "release_site", failing(replacing.release_site, 1)),
        pytest.raises(
            RuntimeError, match=r"failed on every rank, and no model is left.*rank 1: MemoryError"
        ),
    ):
        run.compact()


@on_ranks(2)
def test_a_warning_that_is_an_error() -> None:
    """Rank 0 alone warns that the schedule has not ended: before anything has changed."""
    model = build(cell_of(2, "row_wise"))
    sparse = sparsify(
        model, optimizer_of(model), level=0.6, end=20, every=2, advanced=Advanced(min_rows=0)
    )
    sparse.step()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Sparse training stopped")
        with pytest.raises(
            ValueError, match="rank 0: UserWarning: Sparse training stopped at step 1"
        ):
            compact(model, sparse)
    sparse.step()
    assert sparse.sparsifier.data_groups


@on_ranks(2)
@pytest.mark.parametrize("held", [False, True])
def test_a_forward_before_whose_backward_never_came(held: bool) -> None:
    """Its hooks wait in the old DDP, which scripts hold: they must not take the next backward for
    theirs."""
    looked, other = two_runs()
    pending = [looked.model(batch(looked.cell))]
    old = looked.model
    if not held:
        pending.clear()
    for run in (looked, other):
        run.compact()
    for mine, expected in zip(looked.train(3), other.train(3), strict=True):
        assert torch.equal(mine, expected)
    assert type(old).__name__ == "Consumed" and len(pending) == held


@on_ranks(2)
@pytest.mark.parametrize("name", ["row_wise", "data_parallel"])
def test_the_old_model_raises(name: str) -> None:
    run = Run(cell_of(2, name))
    old, fused, layers = run.model, run.model.fused_optimizer, run.model._dmp_wrapped_module
    parameters = list(old.parameters())
    run.compact()
    uses: list[Callable[[], object]] = [
        lambda: old(batch(run.cell)),
        lambda: old.state_dict(),
        lambda: old.module,
    ]
    uses.append(lambda: layers(batch(run.cell)))
    if name == "row_wise":
        uses.append(fused.step)
    for use in uses:
        with pytest.raises(
            RuntimeError, match="was compacted, and its memory released: use the model that compact"
        ):
            use()
    assert isinstance(old, nn.Module)
    kept = {id(parameter) for parameter in run.model.parameters()}
    stale = [parameter for parameter in parameters if id(parameter) not in kept]
    assert stale
    for parameter in stale:
        for use in (torch.square, torch.norm, attrgetter("grad"), attrgetter("shape")):
            with pytest.raises(
                RuntimeError, match=r"The table .*weight was compacted, and its memory released"
            ):
                use(parameter)


@on_ranks(2)
def test_many_tables_are_named_by_the_first() -> None:
    run = Run(cell_of(2, "mixed"))
    [collection] = [
        module
        for module in run.model.modules()
        if type(module).__name__.startswith("ShardedEmbedding")
    ]
    collection.forward = lambda ids: None
    with pytest.raises(
        ValueError,
        match=r"user\.weight and \d others can't be compacted: a train pipeline has repl",
    ):
        compact(run.model, run.sparsifier)
