"""Runs beside each other: which one is the baseline, what each kept, lost and took, and how their
configs differ.

One denominator for bytes everywhere: all tables of the baseline, or of the run itself where the
baseline's are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dist_sparse.records import FATES, MaskChange, TableStats
from dist_sparse.report.artifacts import ArtifactBytes
from dist_sparse.report.run import Run, flat, share_of, total
from dist_sparse.text import count, number_of, percent, printable, shortened, size

TOLERANCE: Final = 0.002
"""Loss of AUC up to which :func:`verdict` takes a smaller run for as good."""

HEAD = ("run", "of dense", "AUC", "delta", "table bytes", "sparsity", "ms a step", "changed")


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
    base = baseline(run) or run
    # A baseline that was logged without `model=` and without masks has none.
    return base.bytes_dense or run.bytes_dense


def compare(run: Run) -> list[RunRow]:
    """Return ``run`` and its compared runs, in their order."""
    base, whole = baseline(run), whole_bytes(run)
    return [_row(one, base, whole) for one in run.all_runs]


def quality(run: Run) -> tuple[str, float | None]:
    """Return ``test_auc`` and its last value for a run that has it, else ``auc``; None where it is
    unknown."""
    # Of examples that training has not seen, where there are any.
    key = "test_auc" if "test_auc" in run.values else "auc"
    return key, run.last(key)


def difference(run: Run, base: Run | None, key: str) -> float | None:
    """Return the last value of a series less that of the baseline; None for the baseline itself, or
    where one of the two is unknown."""
    if base is None or base is run:
        return None
    value, other = run.last(key), base.last(key)
    return None if value is None or other is None else value - other


def artifacts_of(run: Run) -> Sequence[ArtifactBytes]:
    """Return the artifacts of a run. The kept weights stand for those of a run that has none."""
    kept, (_, auc) = run.bytes_kept, quality(run)
    if run.artifacts or kept is None or auc is None:
        return run.artifacts
    return [ArtifactBytes(name="weights", bytes=kept, auc=auc)]


def headline(run: Run) -> str:
    """Return a sentence about what the run kept, what that cost, and how long it took; "" where
    nothing is known."""
    row, whole = compare(run)[0], whole_bytes(run)
    # Bytes are logged at the end.
    if row.bytes is None or row.share is None or whole is None:
        return ""
    text = (
        f"{run.name} keeps {percent(row.share)} of table bytes ({size(row.bytes)} of {size(whole)})"
    )
    if row.auc is not None:
        # The delta where there is a baseline, else the value itself.
        value = known_text(row.delta, delta_text, unknown=f"{row.auc:.4f}")
        text += f" at {value} {quality(run)[0].replace('_auc', ' AUC').replace('auc', 'AUC')}"
    if run.sparsity_share is not None:
        text += f"; sparsity took {percent(run.sparsity_share)} of a step's time"
    return f"{text}."


def verdict(run: Run) -> str:
    """Return sentences about what to serve: the smallest at the baseline's AUC, over all runs and
    artifacts, first what needs no second training. And about how far seeds alone move an AUC. ""
    without a baseline that has an AUC."""
    base = baseline(run)
    wanted = None if base is None else quality(base)[1]
    if base is None or wanted is None:
        return ""
    whole = whole_bytes(run)
    smallest = _smallest(run.all_runs, wanted - TOLERANCE, whole)
    # What was made of the baseline's own weights: its artifacts, and runs that trained nothing.
    made = [one for one in run.all_runs if one.artifacts and (one is base or not one.trained)]
    at_once = _smallest(made, wanted - TOLERANCE, whole)
    goal = f"within {TOLERANCE} of {base.name}'s AUC ({wanted:.4f})"
    if smallest == "":
        said = f"Nothing is {goal}."
    elif at_once in ("", smallest):
        said = f"Serve {smallest}, the smallest {goal}."
    else:
        said = f"Serve {at_once}, the smallest {goal} without a second training."
        said += f" Smaller, with a second training: {smallest}."
    return f"{said} {_noise(run)}"


def _smallest(runs: Iterable[Run], least: float, whole: int | None) -> str:
    """Return the artifact of the fewest bytes whose AUC is ``least`` or more, with its share of the
    ``whole``; "" if there is none."""
    close = []
    for one in runs:
        for each in artifacts_of(one):
            if each.auc >= least:
                close.append((each.bytes, each.auc, f"{one.name}, {each.name}"))
    if not close:
        return ""
    taken, auc, name = min(close)
    return f"{name} ({size(taken)}, {percent(share_of(taken, whole))} of dense, AUC {auc:.4f})"


def _noise(run: Run) -> str:
    """Return a sentence about the AUCs of runs that differ in their seed alone."""
    # Of two runs with one seed, such as a model before and after, the last counts.
    seeds: dict[str, dict[str, float]] = {}
    for one in run.all_runs:
        auc = quality(one)[1]
        if auc is not None:
            seeds.setdefault(one.method, {})[str(one.config)] = auc
    # The method that moves most: a smaller difference may be chance for any of them.
    ranges = [(max(aucs.values()) - min(aucs.values()), len(aucs)) for aucs in seeds.values()]
    widest, runs = max(ranges)
    if runs < 2:
        return "One seed each: the difference may be chance."
    return f"Seeds alone move AUC by up to {widest:.4f} ({runs} runs): smaller deltas are noise."


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
    changed = [f"{key}={shortened(value, most=40)}" for key, value in row.changed.items()]
    return [
        row.name,
        percent(row.share),
        known_text(row.auc, "{:.4f}".format),
        # The baseline differs from nothing: no dash, which would read as unknown.
        known_text(row.delta, delta_text, unknown=""),
        known_text(row.bytes, size),
        percent(row.sparsity),
        known_text(row.ms_per_step, "{:.1f}".format),
        printable(", ".join(changed)),
    ]


def _row(one: Run, base: Run | None, whole: int | None) -> RunRow:
    tables: Sequence[TableStats | MaskChange] = one.tables or [*one.last_changes.values()]
    key, auc = quality(one)
    old, new = flat((base or one).config), flat(one.config)
    return RunRow(
        name=one.name,
        sparsity=share_of(total(tables, "removed_blocks"), total(tables, "blocks")),
        bytes=one.bytes_kept,
        share=share_of(one.bytes_kept, whole),
        auc=auc,
        # AUC during training is of other examples than AUC of the test set: nothing is compared.
        delta=difference(one, base, key),
        ms_per_step=one.ms_per_step,
        changed={key: new.get(key) for key in new | old if old.get(key) != new.get(key)},
    )


def fates_text(run: Run) -> str:
    """Return a sentence about the lookups of following tables before their last update; empty
    without one."""
    if not run.slots:
        return ""
    changes = run.slots[-1].update.tables
    whole, came, went = (total(changes, name) for name in ("lookups", "came", "went"))
    shares = [f"{percent(share_of(total(changes, f), whole))} {text}" for f, text in FATES.items()]
    return (
        f"Of {number_of(whole, 'lookup')} before the last update {', '.join(shares)};"
        f" {number_of(came, 'row')} came, {count(went)} went."
    )
