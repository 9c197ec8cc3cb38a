"""Numbers of a run: as JSON (:func:`numbers`), as a few lines of text, and as the tables of
``dist-sparse inspect``.

For a run without an end, tables are as the last logged mask update left them, and bytes are None.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from dist_sparse.records import FATES, MaskChange, SlotUpdate, TableStats
from dist_sparse.report.run import ArtifactBytes, Run, flat, share_of, target_of, total
from dist_sparse.text import (
    block_shape_text,
    count,
    mib,
    number_of,
    percent,
    printable,
    shape_text,
    shortened,
    size,
    table_lines,
    wrapped,
)

# ------------------------------------------------------------------------------
# Runs beside each other: which one is the baseline, what each kept, lost and took, and how their
# configs differ.
#
# One denominator for bytes everywhere: all tables of the baseline, or of the run itself where the
# baseline's are unknown.

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
        said += f" Smaller, but trained anew: {smallest}."
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
        return "One seed each: what trainings differ by may be chance."
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
    _, update = run.slots[-1]
    whole, came, went = (total(update.tables, name) for name in ("lookups", "came", "went"))
    shares = [f"{percent(fate_share(update, fate))} {text}" for fate, text in FATES.items()]
    return (
        f"Of {number_of(whole, 'lookup')} before the last update {', '.join(shares)};"
        f" {number_of(came, 'row')} came, {count(went)} went."
    )


def fate_share(update: SlotUpdate, fate: str) -> float | None:
    """Return the share of the lookups before an update that had a fate."""
    return share_of(total(update.tables, fate), total(update.tables, "lookups"))


_HEAD = ("table", "shape", "block", "target", "sparsity", "dead rows", "MiB", "kept MiB")
_SIZES = {"dense": "table_bytes", "kept": "kept_bytes", "masks": "mask_bytes"}

TABLE_FIELDS = (
    *("name", "shape", "dtype", "sharding", "sparse_block_shape", "target", "sparsity", "blocks"),
    *("removed_blocks", "bytes_dense", "bytes_kept", "bytes_masks"),
    *("threshold", "churn", "dead_rows"),
)
"""Fields of a table in :func:`numbers`."""


_SHOWN = (
    *("name", "started", "command", "world", "versions", "config"),
    *("finished", "sessions", "last_step", "bytes_dense", "bytes_kept"),
)


def numbers(run: Run) -> dict[str, Any]:
    """Return the numbers of a run as JSON-able values.

    Returns:
        ``name``, ``started``, ``command``, ``world``, ``versions``, ``config`` as in ``run.json``;
        ``folder``, ``headline``, ``verdict``, ``finished``, ``sessions``, ``last_step``;
        ``sparsity`` and ``target`` (shares of all blocks), ``blocks``, ``removed_blocks``;
        ``bytes_dense`` and ``bytes_kept`` of all tables of the model, if ``RunLog`` was given it,
        else of the registered ones; ``bytes_masks``; ``dead_rows`` of all tables, None where one is
        unknown; ``last``, the last value of each series; ``seconds``: ``total``, ``masks``,
        ``enforcement``, and ``share``, of a step's time in the latter two; ``due_steps`` (mask
        updates), ``collectives`` and ``bytes_sent`` of rank 0; ``tables``, the registered ones, and
        ``other_tables``, bytes of others by name; ``artifacts``; ``baseline``, the name of the run
        that others are compared with, and ``runs``, a row of each
        (:class:`~dist_sparse.report.summary.RunRow`); ``compared``, the ``last`` of each
        compared run.

    Example::

        >>> import tempfile
        >>> from dist_sparse import RunLog
        >>> from dist_sparse.report import numbers, read_run
        >>> folder = tempfile.mkdtemp()
        >>> with RunLog(folder) as log:
        ...     log.step(0, loss=0.5, auc=0.75)
        >>> numbers(read_run(folder))["last"]
        {'loss': 0.5, 'auc': 0.75}
    """
    # Public: keys are only added.
    tables, base = _tables(run), baseline(run)
    records = [record for _, record in run.due]
    blocks, removed = _sum(tables, "blocks"), _sum(tables, "removed_blocks")
    return {
        **{name: getattr(run, name) for name in _SHOWN},
        "folder": str(run.folder),
        "headline": headline(run),
        "verdict": verdict(run),
        "sparsity": share_of(removed, blocks),
        "target": target_of(run.tables or run.last_changes.values()),
        "blocks": blocks or 0,
        "removed_blocks": removed or 0,
        "bytes_masks": _sum(tables, "bytes_masks"),
        "dead_rows": _sum(tables, "dead_rows"),
        "last": _last(run),
        "seconds": {**dataclasses.asdict(run.spent), "share": run.sparsity_share},
        "due_steps": len(records),
        "collectives": total(records, "collectives"),
        "bytes_sent": total(records, "bytes"),
        "tables": tables,
        "other_tables": run.other_tables,
        "artifacts": [*map(dataclasses.asdict, run.artifacts)],
        "baseline": base and base.name,
        "runs": [*map(dataclasses.asdict, compare(run))],
        "compared": {name: {"last": _last(other)} for name, other in run.compared.items()},
    }


def table_json(stats: TableStats) -> dict[str, Any]:
    """Return the fields of a table's statistics and its ``sparsity`` as JSON-able values."""
    dtype = str(stats.dtype).removeprefix("torch.")
    # Lists, as JSON has them.
    block = stats.sparse_block_shape and list(stats.sparse_block_shape)
    known = dataclasses.asdict(stats) | {"shape": list(stats.shape), "sparse_block_shape": block}
    return known | {"dtype": dtype, "sparsity": stats.sparsity}


def status(run: Run) -> str:
    """Return a sentence about how far the run went."""
    where = known_text(run.last_step, "at step {:,}".format, unknown="before its first line")
    text = f"The run ended {where}."
    if not run.finished:
        text = (
            f"The log stops {where} without an end: the run failed or still runs. What is known is"
            " shown."
        )
    return text if run.sessions == 1 else f"{text} It was resumed: {run.sessions} sessions."


def summary(run: Run, report: Path) -> str:
    """Return the sentences on top of a report, the compared runs and the report's address."""
    lines = _wrapped([verdict(run), headline(run), status(run)])
    lines += [*_comparison_lines(run), *_wrapped([f"report: {report.as_uri()}"])]
    return "\n".join(lines)


def _comparison_lines(run: Run) -> list[str]:
    if not run.compared:
        return []
    cells = [*map(row_cells, compare(run))]
    # Below the table: a config can be longer than a line.
    changed = [f"{name}, changed: {changes}" for name, *_, changes in cells if changes]
    table = table_lines(HEAD[:-1], [row[:-1] for row in cells], right=range(1, 7))
    return [*table, *_wrapped(changed)]


def _wrapped(texts: Sequence[str], indent: str = "  ") -> list[str]:
    """Return the lines of texts, without empty ones."""
    return [*chain(*(wrapped(printable(text), indent) for text in texts if text))]


def inspect_text(run: Run) -> str:
    """Return tables, totals and config of a run as text that fits the terminal."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    where = f"on {number_of(run.world, 'rank')}; {versions}"
    head = _wrapped([f"{run.folder}: started {run.started}", where, status(run)])
    values = ", ".join(f"{name} {value:.4g}" for name, value in _last(run).items())
    facts = [
        f"last: {values}" if values else "",
        f"mask updates: {len(run.due)}",
        f"lookups of removed rows: {_lookups_text(run)}",
        f"following tables: {fates_text(run)}" if run.slots else "",
        "config:" if run.config else "",
    ]
    config = [f"  {key}: {json.dumps(value)}" for key, value in run.config.items()]
    lines = [*head, "", *_table_text(run), *_wrapped(facts), *_wrapped(config, indent="    ")]
    return "\n".join(lines)


def _table_text(run: Run) -> list[str]:
    """Return the lines of all tables, of those without a sparsifier together, and their sum."""
    known = numbers(run)
    if not known["tables"]:
        return []
    rows = [_cells(table) for table in known["tables"]]
    # Tables without a sparsifier have nothing to show but their bytes: one line for all.
    if run.other_tables:
        taken = mib(sum(run.other_tables.values()))
        name = f"{number_of(len(run.other_tables), 'other')}, dense"
        rows.append([name, "", "", "", "", "", taken, taken])
    sums = _cells(known | {"name": "all", "shape": None, "sparse_block_shape": None})
    return [*table_lines(_HEAD, rows, right=range(3, len(_HEAD)), total=sums), ""]


def _cells(table: Mapping[str, Any]) -> list[str]:
    """Return the cells of one table, or of all, below :data:`_HEAD`."""
    return [
        table["name"],
        shape_text(table["shape"]),
        block_shape_text(table["sparse_block_shape"]),
        percent(table["target"]),
        percent(table["sparsity"]),
        known_text(table["dead_rows"], count),
        known_text(table["bytes_dense"], mib),
        known_text(table["bytes_kept"], mib),
    ]


def _lookups_text(run: Run) -> str:
    """Return the share of the lookups that hit removed rows, known at the end of a run."""
    lookups = sum(counted for counted, _ in run.lookups.values())
    removed = sum(of_removed for _, of_removed in run.lookups.values())
    return percent(removed / lookups) if lookups else "not known"


def _tables(run: Run) -> list[dict[str, Any]]:
    """Return a row per table: its last change, and what the end of the run knows of it."""
    changes, rows = run.last_changes, []
    # The end knows all tables, in the order of the model; before it, mask updates name them.
    for one in run.tables or changes.values():
        change = changes.get(one.name)
        row = {name: getattr(change, name, None) for name in TABLE_FIELDS}
        if isinstance(one, TableStats):
            # Newer than the last mask update.
            known = table_json(one)
            row |= {name: known[name] for name in TABLE_FIELDS if name in known}
            row |= {f"bytes_{kind}": known[name] for kind, name in _SIZES.items()}
            row["dead_rows"] = run.dead_rows[one.name]
        rows.append(row)
    return rows


def _sum(tables: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """Return the sum over tables; None where one is unknown, or without any."""
    # A sum without one of the tables would pass for the whole.
    counts = [table[name] for table in tables]
    return sum(counts) if counts and None not in counts else None


def _last(run: Run) -> dict[str, float]:
    return {name: value for name in run.values if (value := run.last(name)) is not None}
