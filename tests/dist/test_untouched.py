"""``level="untouched"`` removes exactly the rows without a lookup, on every sharding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_sparse import Advanced, plan, sparsify
from tests.dist.cells import Cell, TableSpec, batch, build, gathered
from tests.dist.enforcing import optimizer_of, trained_cells
from tests.dist.plugin import on_ranks
from tests.dist.test_importance import RowWiseAdagrad, learn, totals
from tests.keywords import nested

pytestmark = [pytest.mark.dist, pytest.mark.whole]


def outputs(model: nn.Module, cell: Cell) -> Tensor:
    """Of all batches that this rank has trained on."""
    with torch.no_grad():
        given = [model(batch(cell, seed=100 * step + dist.get_rank(), size=2)) for step in range(3)]
    return torch.cat([each.flatten() for each in given])


def looked_up(cell: Cell, table: TableSpec, batches: int) -> Tensor:
    """Which rows the batches of all ranks have read, by a slow loop."""
    read = torch.zeros(table.rows, dtype=torch.bool)
    for step in range(batches):
        for rank in range(dist.get_world_size()):
            features = batch(cell, seed=100 * step + rank, size=2)
            for key in table.features:
                read[features[key].values().long()] = True
    return read


@on_ranks()
@pytest.mark.parametrize("score", ["accumulator", "frequency"])
@pytest.mark.parametrize(
    ("world", "name"),
    [
        *((1, "two_shards"), (1, "data_parallel"), (2, "column_wise"), (2, "mixed")),
        *((2, "ec_row_wise"), (4, "row_wise"), (4, "grid_shard")),
    ],
)
def test_removed_are_the_rows_of_an_oracle(world: int, name: str, score: str) -> None:
    cell = trained_cells(world)[name]
    model = build(cell)
    optimizer = optimizer_of(model, tables=lambda params: RowWiseAdagrad(params, lr=0.1))
    tables = cell.tables
    replicated = [table.name for table in tables if "parallel" in name or table.name == "tiny"]
    if score == "frequency" and name != "ec_row_wise":
        # Lookups are counted of fused tables alone.
        tables = tuple(table for table in tables if table.name not in replicated)
        if not tables:
            return
    include = [table.name for table in tables]
    level = {"level": "untouched", "end": 2, "min_rows": 0, "include": include, "score": score}
    # The weights of cells are not drawn as TorchRec draws them.
    level["trust_record"] = True
    with sparsify(model, optimizer, **nested(**level)) as sparse:
        for step in range(3):
            assert sparse.sparsity == 0
            learn(model, optimizer, cell, step)
            before = outputs(model, cell)
            sparse.step()
        assert torch.equal(outputs(model, cell), before), "lossless on what was trained"
        shapes = {name: weight.shape for name, weight in gathered(model).items()}
        sums = totals(model, optimizer, shapes)
        for table in tables:
            read = looked_up(cell, table, batches=3)
            assert torch.equal(read, (sums[table.name] > 0).any(1)), "what Adagrad knows"
            kept = sparse.sparsifier.full_mask(table.name)
            assert torch.equal(kept != 0, read.unsqueeze(1).expand(kept.shape)), table.name
        sparse.sparsifier.audit()
        # As plan() counts them.
        untouched = plan(model, "90%", optimizer=optimizer).untouched
        for stats in sparse.sparsifier.table_stats():
            assert stats.target is None
            assert untouched.get(stats.name, stats.removed_blocks) == stats.removed_blocks


@on_ranks(2)
def test_a_table_without_a_record_stays_whole() -> None:
    """Its rows were trained before the record began, or never: no row is told from another."""
    cell = trained_cells(2)["row_wise"]
    model = build(cell)
    sparse = sparsify(
        model,
        model.fused_optimizer,
        level="untouched",
        end=0,
        advanced=Advanced(min_rows=0, trust_record=True),
    )
    sparse.step()
    assert sparse.sparsity == 0
    sparse.detach()


@on_ranks(2)
def test_a_level_of_one_rank_is_refused() -> None:
    cell = trained_cells(2)["row_wise"]
    model = build(cell)
    with pytest.raises(ValueError, match=r"level is untouched on rank 1 and 0\.5 on rank 0"):
        level = "untouched" if dist.get_rank() else 0.5
        sparsify(model, model.fused_optimizer, level=level, end=3, advanced=Advanced(min_rows=0))
