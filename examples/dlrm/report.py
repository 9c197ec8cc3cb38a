"""The summary of the runs as text. Nothing here communicates."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from dist_sparse.extras.report import Run
from dist_sparse.ids.share import Share
from dist_sparse.text import count, percent, table_lines
from dlrm.served import Served
from dlrm.train import Result, TableRow


def tables_table(tables: Sequence[TableRow]) -> str:
    """Return one line per table of the sparsified run; dashes for a table that was left dense."""
    head = (
        "table",
        "rows x dim",
        "sharding",
        "blocks",
        "sparsity",
        "mask bytes",
        "bytes kept",
    )
    lines = []
    for table in tables:
        sparsity = ["-", "-"]
        if table.blocks:
            share = table.removed_blocks / table.blocks
            sparsity = [count(table.blocks), f"{share:.4f}"]
        name = [table.name, f"{count(table.shape[0])} x {table.shape[1]}", table.sharding]
        lines.append([*name, *sparsity, count(table.mask_bytes), count(table.kept_bytes)])
    return "\n".join(table_lines(head, lines, right=(1, 3, 4, 5, 6)))


def runs_table(results: Sequence[Result]) -> str:
    """Return one line per run."""
    head = ("run", "dim", "AUC", "NE", "ms/step")
    lines = [(r.name, str(r.dim), f"{r.auc:.4f}", f"{r.ne:.4f}", _ms(r)) for r in results]
    return "\n".join(table_lines(head, lines, right=(1, 2, 3, 4)))


def served_table(dense: Served, artifacts: Sequence[Served]) -> str:
    """Return one line per artifact: bytes and AUC, both against the dense run's in 32 bits."""
    head = ("artifact", "dtype", "bytes", "of dense", "AUC", "delta")
    lines = []
    for artifact in artifacts:
        share = f"{artifact.file_bytes / dense.file_bytes:.1%}"
        delta = "" if artifact is dense else f"{artifact.auc - dense.auc:+.4f}"
        size = f"{artifact.file_bytes:,}"
        lines.append((artifact.run, artifact.dtype, size, share, f"{artifact.auc:.4f}", delta))
    return "\n".join(table_lines(head, lines, right=(2, 3, 4, 5)))


def zeros_text(share: Share) -> str:
    """Return which lookups of the test read rows that training never did."""
    about = (
        "What the test reads of the rows that training never read: zeros from touched rows, and"
        " from dense the random values that these rows began with. If both have the same AUC,"
        " zeros are as good as these."
    )
    return "\n".join([*textwrap.wrap(about, 79), "", repr(share)])


def overhead(run: Run, removed: int) -> str:
    """Return the cost of sparsity per step, as the report has it, and the check of the weights at
    the end."""
    checked = f"Checked at the end: all {count(removed)} removed weights are 0."
    if run.sparsity_share is None or run.ms_per_step is None:
        return checked
    share, ms = percent(run.sparsity_share), run.ms_per_step
    return f"Sparsity took {share} of a step's time ({ms:.1f} ms).\n{checked}"


def _ms(result: Result) -> str:
    return "-" if result.ms_per_step is None else f"{result.ms_per_step:.1f}"
