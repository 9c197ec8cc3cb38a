"""The summary of the runs as text. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence

from dist_sparse.text import table_lines
from dlrm.served import Served
from dlrm.train import Result, TableRow

__all__ = ["overhead", "runs_table", "served_table", "tables_table"]


def tables_table(tables: Sequence[TableRow]) -> str:
    """Return one line per table of the sparsified run; dashes for a table that was left dense."""
    head = ("table", "rows x dim", "sharding", "blocks", "level", "sparsity", "mask bytes", "bytes kept")
    lines = []
    for table in tables:
        dense = table.blocks == 0
        lines.append(
            (
                table.name,
                f"{table.shape[0]} x {table.shape[1]}",
                table.sharding,
                "-" if dense else str(table.blocks),
                "-" if dense else f"{table.target:.4f}",
                "-" if dense else f"{table.removed_blocks / table.blocks:.4f}",
                str(table.mask_bytes),
                str(table.kept_bytes),
            )
        )
    return "\n".join(table_lines(head, lines, right=(1, 3, 4, 5, 6, 7)))


def runs_table(results: Sequence[Result]) -> str:
    """Return one line per run."""
    head = ("run", "dim", "AUC", "NE", "table bytes", "ms/step")
    lines = [
        (r.name, str(r.dim), f"{r.auc:.4f}", f"{r.ne:.4f}", str(r.table_bytes), f"{r.ms_per_step:.1f}") for r in results
    ]
    return "\n".join(table_lines(head, lines, right=(1, 2, 3, 4, 5)))


def served_table(dense: Result, artifacts: Sequence[Served]) -> str:
    """Return the dense run and each artifact of the sparsified one: bytes, AUC, and how far its logits are from those
    of the model that was exported."""
    head = ("artifact", "bytes", "of dense", "AUC", "logits differ by")
    lines = [("dense tables", str(dense.table_bytes), "100.0%", f"{dense.auc:.4f}", "-")]
    for a in artifacts:
        share = f"{a.file_bytes / dense.table_bytes:.1%}"
        lines.append((a.dtype, str(a.file_bytes), share, f"{a.auc:.4f}", f"{a.difference:.1g}"))
    return "\n".join(table_lines(head, lines, right=(1, 2, 3, 4)))


def overhead(sparse: Result) -> str:
    """Return the cost of sparsity per step, and the check at the end."""
    return (
        f"Sparsity took {sparse.enforce_ms + sparse.masks_ms:.2f} of {sparse.ms_per_step:.1f} ms a step: "
        f"{sparse.enforce_ms:.2f} ms for enforcement, {sparse.masks_ms:.2f} ms for mask updates.\n"
        f"Checked at the end: all {sparse.removed} removed weights are 0."
    )
