"""Charts of tables: bytes kept, rows by traffic, and the scores of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dist_sparse.report.figures import Bar, BarChart, Bin, ScoreChart
from dist_sparse.report.histograms import Scored
from dist_sparse.report.run import RowTraffic, Run, share_of, total
from dist_sparse.text import amount, count, number_of, percent, size

MOST_TABLES = 30
"""Per chart: the largest."""

_MOST_TRAFFIC = _MOST_SCORES = 6
"""Charts of rows, and of scores: of the largest tables."""

_MOST_BINS = 64
"""Of a histogram of scores."""


class KeptTable(NamedTuple):
    """A table, and how much of it is kept, in bytes."""

    name: str
    kept: int
    whole: int


def table_charts(run: Run) -> list[BarChart | ScoreChart]:
    """Return the charts for which the run has data, in the order of the page."""
    return [*_kept_charts(run), *_traffic_charts(run), *_score_charts(run)]


def _kept_charts(run: Run) -> list[BarChart]:
    """Return bytes kept per table, for a run that has ended."""
    tables = [KeptTable(t.name, t.kept_bytes, t.table_bytes) for t in run.tables]
    # Bytes are logged at the end: before, those of sparsified tables are unknown.
    if not run.finished and not tables:
        return []
    # Tables without a sparsifier are kept whole.
    tables += [KeptTable(name, taken, taken) for name, taken in run.other_tables.items()]
    if not tables:
        return []
    # Bars are on the scale of the largest.
    tables.sort(key=lambda table: (-table.whole, table.name))
    note = "Per table, as long as its bytes; full: what is kept."
    found = []
    if len(tables) > MOST_TABLES:
        note += f" The first {MOST_TABLES} of {count(len(tables))}; the table below has all."
        found.append(_distribution(tables))
    largest = max(tables[0].whole, 1)
    bars = []
    for table in tables[:MOST_TABLES]:
        share, whole = table.kept / largest, table.whole / largest
        bars.append(Bar(name=table.name, share=share, whole=whole, text=_kept_text([table])))
    return [*found, BarChart(key="bytes", title="Bytes kept", note=note, bars=tuple(bars))]


def _kept_text(tables: Sequence[KeptTable]) -> str:
    kept, whole = total(tables, "kept"), total(tables, "whole")
    return f"{size(kept)} of {size(whole)}, {percent(share_of(kept, whole) or 0.0)}"


def _distribution(tables: Sequence[KeptTable]) -> BarChart:
    """Return how many tables keep how much, in tenths."""
    groups: list[list[KeptTable]] = [[] for _ in range(10)]
    for table in tables:
        # A table that is kept whole is in the last tenth.
        groups[min(10 * table.kept // max(table.whole, 1), 9)].append(table)
    most = max(map(len, groups))
    bars = []
    for tenth, group in enumerate(groups):
        name = f"{10 * tenth}% to {10 * tenth + 10}%"
        said = f"{number_of(len(group), 'table')}: {_kept_text(group)}" if group else "none"
        bars.append(Bar(name=name, share=len(group) / most, whole=0.0, text=said))
    note = f"All {count(len(tables))} tables by the share that is kept of them."
    return BarChart(
        key="bytes_distribution", title="Bytes kept, distribution", note=note, bars=tuple(bars)
    )


def _traffic_charts(run: Run) -> list[BarChart]:
    """Return the rows by their lookups of the largest tables that are known."""
    sizes = {table.name: table.table_bytes for table in run.tables}
    known = [name for name, of in run.traffic.items() if of.share is not None and any(of.removed)]
    # Sorted by bytes: large tables decide what serving takes.
    shown = sorted(known, key=lambda name: (-sizes.get(name, 0), name))[:_MOST_TRAFFIC]
    return [
        _traffic_chart(f"traffic_{place}", name, run.traffic[name])
        for place, name in enumerate(shown, start=1)
    ]


def _traffic_chart(key: str, name: str, of: RowTraffic) -> BarChart:
    rows = sum(of.kept) + sum(of.removed)
    note = (
        f"Rows by how often training looked them up; full: kept. {percent(sum(of.kept) / rows)} of"
        f" {count(rows)} rows are kept, which had {percent(of.share)} of the lookups."
    )
    bars = []
    for octave, (kept, removed) in enumerate(zip(of.kept, of.removed, strict=True)):
        if kept + removed:
            share = kept / (kept + removed)
            text = f"{count(kept)} of {number_of(kept + removed, 'row')}, {percent(share)}"
            bars.append(Bar(name=_lookups(octave), share=share, text=text))
    return BarChart(key=key, title=f"Kept rows of {name} by traffic", note=note, bars=tuple(bars))


def _lookups(octave: int) -> str:
    """Return ``no lookup``, ``1 lookup``, ``2 to 3 lookups``, ..."""
    if octave < 2:
        return "1 lookup" if octave else "no lookup"
    return f"{count(1 << octave - 1)} to {count((1 << octave) - 1)} lookups"


def _score_charts(run: Run) -> list[ScoreChart]:
    """Return the histograms of the tables with the most blocks."""
    # All others score 0.
    shown = [one for one in run.scores.values() if one.change.scores[-1][0] > 0]
    shown.sort(key=lambda one: (-one.change.blocks, one.change.name))
    return [
        _score_chart(f"scores_{place}", one)
        for place, one in enumerate(shown[:_MOST_SCORES], start=1)
    ]


def _score_chart(key: str, one: Scored) -> ScoreChart:
    # A histogram was logged because it has a threshold.
    threshold = one.change.threshold or 0.0
    blocks = sum(number for _, number in one.change.scores)
    note = (
        f"{count(blocks)} blocks before the mask update at step {count(one.step)};"
        f" {percent(one.zeros / blocks)} scored 0, which the axis can't show. Threshold:"
        f" {amount(threshold)}; blocks not above it are pruned."
    )
    title, bins = f"Block scores of {one.change.name}", _bins(one)
    return ScoreChart(key=key, title=title, note=note, bins=bins, threshold=threshold)


def _bins(one: Scored) -> tuple[Bin, ...]:
    """Return the buckets as bins, of scores above 0; more than 64 as whole octaves."""
    fine = [(score, blocks) for score, blocks in one.change.scores if score > 0]
    parts = 8 if len(fine) <= _MOST_BINS else 1
    summed: dict[float, int] = {}
    for score, blocks in fine:
        # The octave of a score begins at 2 ** (exponent - 1).
        octave = 2.0 ** (math.frexp(score)[1] - 1)
        low = octave * (1 + math.floor(parts * (score / octave - 1)) / parts)
        summed[low] = summed.get(low, 0) + blocks
    bins = []
    for low, blocks in summed.items():
        high = low + 2.0 ** (math.frexp(low)[1] - 1) / parts
        # Bins differ in width on the logarithmic axis, so heights are per octave.
        bins.append(Bin(low=low, high=high, blocks=blocks, density=blocks / math.log2(high / low)))
    return tuple(bins)
