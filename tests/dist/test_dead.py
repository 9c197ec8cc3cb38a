"""Dead rows over ranks are those of the gathered masks, of tables cut by columns too, at a bit a
row and shard."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dist_sparse import ROW, DataNormSparsifier
from dist_sparse.groups import reset_traffic, traffic
from dist_sparse.tables.modules import model_source
from tests.dist.cells import build, cells, set_weights, weights
from tests.dist.plugin import on_ranks

BLOCKS: dict[str, tuple[int, int | str]] = {
    "rows": (1, ROW),
    "small": (1, 4),
    "tall": (3, 4),
    "elements": (1, 1),
}


def turns() -> list[tuple[int, str, str]]:
    """Two blocks of every cell and world, the other two of the cell in the other world."""
    names = list(BLOCKS)
    return [
        (world, name, names[(i + 2 * j + part) % len(names)])
        for j, world in enumerate((2, 4))
        for i, name in enumerate(cells(world))
        for part in range(2)
    ]


@on_ranks()
@pytest.mark.parametrize(("world", "name", "block"), turns())
def test_dead_rows(world: int, name: str, block: str) -> None:
    cell = cells(world)[name]
    model = build(cell)
    sparsifier = DataNormSparsifier(sparsity_level=0.0, sparse_block_shape=BLOCKS[block])
    sparsifier.add_model(model)
    sparsifier.add_data("plain", torch.arange(12.0).view(4, 3))
    for level in (0.0, 0.9, 0.6, 1.0):
        set_weights(model, weights(cell, seed=round(10 * level)))
        for config in sparsifier.data_groups.values():
            config["sparsity_level"] = level
        sparsifier.step()
        found = sparsifier.dead_rows()
        full = {name: sparsifier.full_mask(name) for name in sparsifier.data_groups}
        assert found == {name: int((mask == 0).all(1).sum()) for name, mask in full.items()}
        if level in (0.0, 1.0):
            assert found == {name: round(level) * len(mask) for name, mask in full.items()}


@on_ranks(2, 4)
def test_traffic(world: int) -> None:
    """A bit a row and column shard, in one message beside the status and the sums."""
    cell = cells(world)["column_wise"]
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, ROW))
    model = build(cell)
    sparsifier.add_model(model)
    sparsifier.step()
    reset_traffic()
    sparsifier.dead_rows()
    located = model_source(model).locate()
    mine = [rect for data in located for rect in data.owned(dist.get_rank())]
    assert traffic().collectives == 3
    assert traffic().bytes <= 32 + sum(rect.rows / 8 + world for rect in mine) + 8 * len(located)
