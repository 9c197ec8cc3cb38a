"""The summary of the runs as text. Nothing here communicates."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from dist_sparse.extras.report import Run
from dist_sparse.ids.share import Share
from dist_sparse.text import count, percent, table_lines
from dlrm.served import Served
from dlrm.train import Result, TableRow

WHOLE = (0.6990, 0.6999, 0.7013)
SEEDS: Mapping[str, tuple[float, ...]] = {
    "dense": (0.6990, 0.6997, 0.7013),
    "touched rows": (0.6991, 0.6996, 0.7013),
    "sparsified": (0.7031, 0.7016, 0.7005),
    "dense dim 4": (0.7028, 0.7014, 0.6962),
    "folded rows": (0.7037, 0.7008, 0.7037),
}
"""AUC in int4 with seeds 0, 1 and 2 on two ranks, and of the dense tables in 32 bits: from
docs/dev/log.md."""


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


def noise_of(run: str) -> float | None:
    """Return half the range over three seeds of the difference in AUC to the dense tables in 32
    bits; None of a run that was not measured."""
    if run not in SEEDS:
        return None
    differences = [auc - whole for auc, whole in zip(SEEDS[run], WHOLE, strict=True)]
    return (max(differences) - min(differences)) / 2


def served_table(dense: Served, artifacts: Sequence[Served], noise: bool) -> str:
    """Return one line per artifact: bytes and AUC, both against the dense run's in 32 bits.

    Args:
        noise: whether to add :func:`noise_of` each run, which the default options measured.
    """
    head = ["artifact", "dtype", "bytes", "of dense", "AUC", "delta"]
    if noise:
        head.append("noise")
    lines = []
    for artifact in artifacts:
        share = f"{artifact.file_bytes / dense.file_bytes:.1%}"
        delta = "" if artifact is dense else f"{artifact.auc - dense.auc:+.4f}"
        size = f"{artifact.file_bytes:,}"
        line = [artifact.run, artifact.dtype, size, share, f"{artifact.auc:.4f}", delta]
        if noise:
            known = None if artifact is dense else noise_of(artifact.run)
            line.append("" if known is None else f"±{known:.4f}")
        lines.append(line)
    return "\n".join(table_lines(head, lines, right=range(2, len(head))))


def zeros_text(share: Share) -> str:
    """Return which lookups of the test read rows that training never did."""
    about = (
        "Some of the test's lookups are of rows that training never read. The artifact of touched"
        " rows serves zeros for them; the dense one serves the random values that they began with."
        " If both have the same AUC, zeros are as good as these values."
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
