"""Dead rows over ranks are those of the gathered masks; of tables cut by columns, whole rows."""

from __future__ import annotations

import pytest
import torch

from dist_sparse import ROW, DataNormSparsifier
from dist_sparse.groups import reset_traffic, traffic
from dist_sparse.tables.modules import ModelTables
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
        reset_traffic()
        found = sparsifier.dead_rows()
        # The status, the sums, and whether all ranks have them.
        assert traffic().collectives <= 3
        cut = set()
        for data in ModelTables(model).locate():
            if block != "rows" and any(rect.cols != data.shape[1] for rect in data.rects):
                cut.add(data.name)
        full = {}
        for table in sparsifier.data_groups:
            mask = sparsifier.full_mask(table)
            if table not in cut:
                full[table] = mask
        assert found == {name: int((mask == 0).all(1).sum()) for name, mask in full.items()}
        if level in (0.0, 1.0):
            assert found == {name: round(level) * len(mask) for name, mask in full.items()}
