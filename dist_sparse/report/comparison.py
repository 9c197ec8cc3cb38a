"""Runs beside each other: which one is the baseline, what each kept, lost and took, and how their
configs differ.

One denominator for bytes everywhere: all tables of the baseline, or of the run itself where the
baseline's are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dist_sparse.records import MaskChange, TableStats
from dist_sparse.report.artifacts import ArtifactBytes
from dist_sparse.report.run import Run, flat, share_of, total
from dist_sparse.text import percent, printable, shortened, size

TOLERANCE: Final = 0.002
"""Loss of AUC up to which :func:`verdict` takes a smaller run for as good."""

HEAD = ("run", "sparsity", "table bytes", "of all", "AUC", "delta", "ms a step", "changed")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run of a comparison; None where something is unknown.

    ``sparsity``: share of removed blocks. ``bytes``: of the kept weights of all tables, ``share``:
    of the baseline's dense ones. ``auc``: the last test AUC, else the last AUC; ``delta``: less the
    baseline's. ``ms_per_step``: as logged, else of rank 0 while the log was open. ``changed``: what
    its config has otherwise than the baseline's, by dotted keys; None where a key is missing.
    """

    name: str
    sparsity: float | None
    bytes: int | None
    share: float | None
    auc: float | None
    delta: float | None
    ms_per_step: float | None
    changed: Mapping[str, Any]


def baseline(run: Run) -> Run | None:
    """Return the run that the others are compared with: of those without mask updates the one with
    the largest tables, else ``run`` itself. None without others."""
    if not run.compared:
        return None
    # A narrow or hashed model has no mask updates either, but smaller tables.
    dense = [one for one in run.all_runs if not one.due]
    return max(dense, key=lambda one: one.bytes_dense or 0, default=run)


def whole_bytes(run: Run) -> int | None:
    """Return the dense size that all runs are compared with."""
    base = baseline(run)
    # A baseline that was logged without `model=` and without masks has none.
    known = None if base is None else base.bytes_dense
    return run.bytes_dense if known is None else known


def compare(run: Run) -> list[RunRow]:
    """Return ``run`` and its compared runs, in their order."""
    base, whole = baseline(run), whole_bytes(run)
    return [_row(one, base, whole) for one in run.all_runs]


def quality(run: Run) -> tuple[str, float] | None:
    """Return ``("test_auc", value)`` of a run that has it, else ``("auc", value)``; None without an
    AUC."""
    # Of examples that training has not seen, where there are any.
    for key in ("test_auc", "auc"):
        if (value := run.last(key)) is not None:
            return key, value
    return None


def artifacts_of(run: Run) -> Sequence[ArtifactBytes]:
    """Return the artifacts of a run. The kept weights stand for those of a run that has none."""
    kept, auc = run.bytes_kept, quality(run)
    if run.artifacts or kept is None or auc is None:
        return run.artifacts
    return [ArtifactBytes(name="weights", bytes=kept, auc=auc[1])]


def blocks_of(run: Run) -> tuple[int, int]:
    """Return the blocks of all registered tables, and how many of them are removed."""
    tables: Sequence[TableStats | MaskChange] = run.tables or [*run.last_changes.values()]
    return total(tables, "blocks"), total(tables, "removed_blocks")


def headline(run: Run) -> str:
    """Return a sentence about what the run kept, what that cost, and how long it took; "" where
    nothing is known."""
    text = _kept_text(run)
    if not text:
        return ""
    # The delta where there is a baseline, else the value itself.
    if (auc := quality(run)) is not None:
        delta = _delta(run, baseline(run))
        value = f"{auc[1]:.4f}" if delta is None else delta_text(delta)
        text += f" at {value} {'test AUC' if auc[0] == 'test_auc' else 'AUC'}"
    if (share := run.sparsity_share) is not None:
        text += f"; sparsity took {percent(share)} of the time"
    return f"{text}."


def verdict(run: Run) -> str:
    """Return sentences about what is smallest at the baseline's AUC, over all runs and artifacts,
    and about how far seeds alone move an AUC; "" without a baseline that has an AUC."""
    base = baseline(run)
    known = None if base is None else quality(base)
    if base is None or known is None:
        return ""
    close = []
    for one in run.all_runs:
        for each in artifacts_of(one):
            if each.auc is not None and each.auc >= known[1] - TOLERANCE:
                close.append((each.bytes, each.auc, f"{one.name}, {each.name}"))
    text = f"Nothing is within {TOLERANCE} of {base.name}'s AUC ({known[1]:.4f})."
    if close:
        taken, auc, name = min(close)
        text = (
            f"Smallest within {TOLERANCE} of {base.name}'s AUC ({known[1]:.4f}): {name},"
            f" {size(taken)} at {auc:.4f}."
        )
    spread = _spread(run)
    return text if spread is None else f"{text} {spread}"


def _spread(run: Run) -> str | None:
    """Return a sentence about the AUCs of runs that differ in their seed alone; None without such
    runs."""
    # Of two runs with one seed, such as a model before and after, the last counts.
    seeds: dict[str, dict[str, float]] = {}
    for one in run.all_runs:
        if (auc := quality(one)) is not None:
            seeds.setdefault(one.method, {})[str(one.config)] = auc[1]
    # The method that moves most: a smaller difference may be chance for any of them.
    ranges = []
    for found in seeds.values():
        if len(found) > 1:
            ranges.append((max(found.values()) - min(found.values()), len(found)))
    if not ranges:
        return None
    widest, runs = max(ranges)
    return f"Seeds alone move AUC by up to {widest:.4f} ({runs} runs): smaller deltas are noise."


def _kept_text(run: Run) -> str:
    kept, whole = run.bytes_kept, whole_bytes(run)
    # Bytes are logged at the end.
    if kept is None or not whole:
        return ""
    # A dense run: "100.0% of" would suggest that it prunes.
    if kept == whole and not run.tables:
        return f"Keeps all table bytes ({size(kept)})"
    return f"Keeps {percent(kept / whole)} of table bytes ({size(kept)} of {size(whole)})"


def delta_text(delta: float) -> str:
    """Return ``+0.0019``, ``-24.63``."""
    if abs(delta) < 5e-5:  # rounds to 0, and +0.0000 would look like a gain
        return "±0.0000"
    return f"{delta:+.4f}" if abs(delta) < 1 else f"{delta:+.4g}"


def known_text(value: float | None, text: Callable[[Any], str], unknown: str = "-") -> str:
    """Return a number as text, a dash for None."""
    return unknown if value is None else text(value)


def row_cells(row: RunRow) -> list[str]:
    """Return the cells of a row as text, below :data:`HEAD`."""
    return [
        row.name,
        percent(row.sparsity),
        known_text(row.bytes, size),
        percent(row.share),
        known_text(row.auc, "{:.4f}".format),
        # The baseline differs from nothing: no dash, which would read as unknown.
        known_text(row.delta, delta_text, unknown=""),
        known_text(row.ms_per_step, "{:.1f}".format),
        _change_text(row.changed),
    ]


def _change_text(changed: Mapping[str, Any]) -> str:
    """Return ``lr=0.1, level=0.8``; a dash for a key that is missing."""
    shown = [f"{key}={_value_text(value)}" for key, value in changed.items()]
    return printable(", ".join(shown))


def _value_text(value: Any) -> str:
    return "-" if value is None else shortened(value, most=40)


def _row(one: Run, base: Run | None, whole: int | None) -> RunRow:
    blocks, removed = blocks_of(one)
    auc = quality(one)
    return RunRow(
        name=one.name,
        sparsity=share_of(removed, blocks),
        bytes=one.bytes_kept,
        share=share_of(one.bytes_kept, whole),
        auc=None if auc is None else auc[1],
        delta=_delta(one, base),
        ms_per_step=_ms_per_step(one),
        changed={} if base is None else _changed(base.config, one.config),
    )


def _delta(one: Run, base: Run | None) -> float | None:
    """Return the AUC less the baseline's; None for the baseline itself, or where they are not of
    the same kind."""
    if base is None or base is one:
        return None
    auc, other = quality(one), quality(base)
    # AUC during training is of other examples than AUC of the test set.
    if auc is None or other is None or auc[0] != other[0]:
        return None
    return auc[1] - other[1]


def _ms_per_step(one: Run) -> float | None:
    """Return the logged value, else the mean of rank 0 while the log was open."""
    logged = one.last("ms_per_step")
    if logged is not None or one.last_step is None or not one.spent.total:
        return logged
    return 1000 * one.spent.total / (one.last_step + 1)


def _changed(base: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    old, new = flat(base), flat(config)
    return {key: new.get(key) for key in new | old if old.get(key) != new.get(key)}
