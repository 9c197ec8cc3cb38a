"""An artifact's bytes as text: of each table before and after, what its index costs, and where
dense 4 bits win."""

from __future__ import annotations

from dist_sparse.serving.manifest import Manifest, Table
from dist_sparse.text import count, percent, printable, size, table_lines

__all__ = ["summary"]


def _smaller_if_dense(manifest: Manifest) -> list[str]:
    """Return the tables that were pruned and would be smaller if they were dense, in 4 bits."""

    def pruned(table: Table) -> bool:
        return table.kept < table.rows or (table.block is not None and table.block[1] < table.dim)

    tables = manifest.tables.items()
    return [
        name
        for name, table in tables
        if pruned(table) and table.bytes.dense_int4 < table.bytes.after
    ]


def summary(manifest: Manifest) -> str:
    """Return a table of the tables' bytes, and what to know about them."""
    head = ("table", "rows", "kept", "dim", "dtype", "dense", "served", "", "index", "scales")
    rows = []
    for name, table in manifest.tables.items():
        taken = table.bytes
        share = percent(taken.after / taken.before if taken.before else None)
        sizes = size(taken.before), size(taken.after), share, size(taken.index), size(taken.scales)
        rows.append(
            (name, count(table.rows), count(table.kept), count(table.dim), table.dtype, *sizes)
        )
    before = sum(table.bytes.before for table in manifest.tables.values())
    whole = (
        f"total: {size(manifest.bytes)} on disk, {percent(manifest.bytes / max(before, 1))} of"
        f" {size(before)} dense"
    )
    lines = [*table_lines(head, rows, right={1, 2, 3, 5, 6, 7, 8, 9}), whole]
    if smaller := _smaller_if_dense(manifest):
        lines.append(f"dense rows of 4 bits would be smaller: {', '.join(map(printable, smaller))}")
    return "\n".join(lines)
