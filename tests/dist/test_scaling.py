"""The counts that simulate() predicts are those of a mask update on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

from benchmarks.simulate import simulate
from dist_sparse import DataNormSparsifier
from dist_sparse.groups import reset_traffic, traffic
from tests.dist.cells import Cell, TableSpec, build, set_weights, weights
from tests.dist.plugin import on_ranks

TABLES = (TableSpec("user", 4096, 8, ("user_id",)), TableSpec("item", 1000, 16, ("item_id",)))
BLOCKS: dict[str, Any] = {"row": (1, "ROW"), "1x4": (1, 4), "col": ("COL", 1)}
PLANS: dict[str, Any] = {
    "row_wise": lambda world: {table.name: row_wise() for table in TABLES},
    "column_wise": lambda world: {
        table.name: column_wise(ranks=list(range(min(world, table.dim // 4)))) for table in TABLES
    },
    "table_wise": lambda world: {
        table.name: table_wise(rank=i % world) for i, table in enumerate(TABLES)
    },
}
CASES = [
    ("row_wise", "row"),
    ("row_wise", "col"),
    ("column_wise", "row"),
    ("column_wise", "1x4"),
    ("table_wise", "row"),
]


@pytest.fixture
def predicted(world: int, sharding: str, block: str) -> tuple[int, int, int, int]:
    """Of a world that this process is not part of."""
    tables = {table.name: (table.rows, table.dim) for table in TABLES}
    found = simulate(
        tables, [world], latency=0, bandwidth=1, sharding=sharding, block=block, level=0.45
    )  # type: ignore[arg-type]
    [of] = found.predictions
    return of.collectives, of.sent, of.weights, of.masks


@on_ranks()
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("sharding", "block"), CASES)
def test_counts_are_those_of_real_ranks(
    world: int, sharding: str, block: str, predicted: tuple[int, int, int, int]
) -> None:
    """Equal where each search takes all its rounds; random scores save a few of the small
    histograms."""
    cell = Cell(sharding, world, PLANS[sharding](world), TABLES)
    model = build(cell)
    sparsifier = DataNormSparsifier(
        sparsity_level=0.45, sparse_block_shape=BLOCKS[block], norm="L1"
    )
    sparsifier.add_model(model)
    full = {}
    for table in TABLES:
        near = torch.arange(table.rows * table.dim).view(table.rows, table.dim)
        place = (
            near // table.dim
            if block == "row"
            else near // 4
            if block == "1x4"
            else near % table.dim
        )
        full[table.name] = 1 + place * 2.0**-23  # no two blocks score the same, and all nearly
    collectives, sent, held, masks = predicted
    for values, spare in ((full, 0), (weights(cell), 16_384 * len(TABLES))):
        set_weights(model, values)
        reset_traffic()
        sparsifier.step()
        of = torch.tensor([traffic().collectives, traffic().bytes])
        every = [torch.empty_like(of) for _ in range(world)]
        dist.all_gather(every, of)
        most = max(every, key=lambda counts: int(counts[1])).tolist()
        assert collectives - 2 * bool(spare) <= most[0] <= collectives, (most, collectives)
        assert sent - spare <= most[1] <= sent, (most, predicted)
    located = sparsifier.masks.tables.locate()
    mine = sum(shard.tensor.nbytes for data in located.values() for shard in data.shards)
    bits = sum(mask.bits.nbytes for name in located for mask in sparsifier.masks.tables.masks(name))
    assert mine <= held and bits <= masks
