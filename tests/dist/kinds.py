"""A few models that represent all cells, where a result does not depend on the sharding."""

from __future__ import annotations

from tests.dist.cells import Cell, cells

__all__ = ["names_of", "some_cells"]


def some_cells(world: int) -> dict[str, Cell]:
    """One of each kind: what a user's code sees does not depend on the rest."""
    names = (
        "row_wise_fp16",
        "column_wise",
        "two_shards",
        "data_parallel",
        "mixed",
        "ec_row_wise",
        "grid_shard",
    )
    return {name: cell for name, cell in cells(world).items() if name in names}


def names_of(cell: Cell) -> list[str]:
    return [table.name for table in cell.tables]
