"""Compact tables that follow their traffic from then on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dist_sparse import FollowingTables, compact, following, sparsify
from dist_sparse.slots.tables import FollowingCollection
from tests.compaction.test_compact_sharded import Run, cell_of, check_equal
from tests.dist.cells import batch, gathered
from tests.dist.plugin import on_ranks

EVERY = [
    (1, "ec_row_wise"),
    (2, "mixed"),
    (2, "data_parallel"),
    (4, "row_wise"),
    (4, "ec_column_wise"),
]


@on_ranks()
@pytest.mark.parametrize(("world", "name"), EVERY)
def test_kept_rows_become_slots(world: int, name: str) -> None:
    """The same rows, state and outputs; then ids that were removed come back."""
    cell = cell_of(world, name)
    small, live = Run(cell), Run(cell)
    for run in (small, live):
        run.train(3)
        run.compact()
    rows = gathered(small.model)
    live.model = following(live.model)
    assert all(torch.equal(found, rows[key]) for key, found in gathered(live.model).items())
    slots = FollowingTables(live.model, live.optimizer, every=4, admit_after=2)
    features = batch(cell, seed=dist.get_rank())
    check_equal(live.model(features), small.model(features), True)
    for mine, other in zip(live.train(3), small.train(3), strict=True):
        check_equal(mine, other, True)
    [collection] = [each for each in live.model.modules() if isinstance(each, FollowingCollection)]
    before = {key: index.kept() for key, index in collection.table_indexes().items()}
    for _ in range(12):
        live.train(1)
        slots.step()
    after = {key: index.kept() for key, index in collection.table_indexes().items()}
    assert any(bool((after[key] & ~before[key]).any()) for key in before)
    for key, index in collection.following_ids.slots.items():
        assert int(before[key].sum()) <= int(after[key].sum()) <= index.stored


@on_ranks(1)
def test_refused() -> None:
    run = Run(cell_of(1, "row_wise"))
    with pytest.raises(ValueError, match=r"no compact collection with removed rows"):
        following(run.model)
    run.compact(removed="default_row")
    with pytest.raises(ValueError, match=r"default row, which can't be a slot"):
        following(run.model)
    run = Run(cell_of(1, "row_wise"))
    run.compact()
    sparse = sparsify(run.model, run.optimizer, level=0.5, end=4, min_rows=1)
    with pytest.raises(ValueError, match=r"already sparsified: call detach\(\) first"):
        following(run.model)
    sparse.detach()
    table = nn.EmbeddingBag(32, 4)
    plain = sparsify(table, torch.optim.SGD(table.parameters()), level=0.5, begin=0, end=0)
    plain.step()
    with pytest.raises(ValueError, match=r"no compact collection"):
        following(compact(table, plain))
