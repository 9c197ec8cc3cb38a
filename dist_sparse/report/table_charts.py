"""Charts of tables: bytes kept, rows by traffic, and the scores of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable

from dist_sparse.records import MaskChange
from dist_sparse.report.figures import Bar, BarChart, Bin, Chart, ScoreChart
from dist_sparse.report.histograms import Scored, edge_of, much
from dist_sparse.report.run import Run, Traffic
from dist_sparse.report.summary import numbers
from dist_sparse.text import amount, count, number_of, percent, size

__all__ = ["MOST_TABLES", "table_charts"]

MOST_TABLES = 30
"""Per chart: the largest."""

_MOST_TRAFFIC = _MOST_SCORES = 6
"""Charts of rows, and of scores: of the largest tables."""

_MOST_BINS = 64
"""Of a histogram of scores."""

Kept = tuple[str, int, int]
"""Name of a table, what is kept of it, and all of it."""


def table_charts(run: Run) -> list[Chart]:
    """Return the charts for which the run has data, in the order of the page."""
    return [*_kept_charts(run), *_traffic_charts(run), *_score_charts(run)]


def _kept_charts(run: Run) -> list[Chart]:
    """Return bytes kept per table for a run with an end, else blocks kept."""
    if run.tables:
        tables: list[Kept] = [(t.name, t.kept_bytes, t.table_bytes) for t in run.tables]
        tables += [(name, taken, taken) for name, taken in run.other_tables.items()]
        unit, note = "Bytes", "Per table, as long as its bytes; full: what is kept."
    elif run.due:
        rows = numbers(run)["tables"]
        tables = [(row["name"], row["blocks"] - row["removed_blocks"], row["blocks"]) for row in rows]
        unit, note = "Blocks", "Per table, as long as its blocks; full: what is kept. Bytes are logged at the end."
    else:
        return []
    tables.sort(key=lambda table: (-table[2], table[0]))
    largest = max(tables[0][2], 1)

    def text(kept: int, whole: int) -> str:
        of = f"{size(kept)} of {size(whole)}" if unit == "Bytes" else f"{count(kept)} of {count(whole)}"
        return f"{of}, {percent(kept / whole if whole else 0.0)}"

    bars = [
        Bar(name=name, share=kept / largest, whole=whole / largest, text=text(kept, whole))
        for name, kept, whole in tables[:MOST_TABLES]
    ]
    title = f"{unit} kept"
    if len(tables) <= MOST_TABLES:
        return [BarChart(key="bytes", title=title, note=note, bars=tuple(bars))]
    note += f" The first {MOST_TABLES} of {len(tables):,}; the table below has all."
    return [_distribution(tables, title, text), BarChart(key="bytes", title=title, note=note, bars=tuple(bars))]


def _distribution(tables: list[Kept], title: str, text: Callable[[int, int], str]) -> BarChart:
    """Return how many tables keep how much, in tenths."""
    groups: dict[int, list[Kept]] = {}
    for table in tables:
        groups.setdefault(min(10 * table[1] // max(table[2], 1), 9), []).append(table)
    most = max(map(len, groups.values()))
    bars = []
    for tenth in range(10):
        of = groups.get(tenth, [])
        kept, whole = sum(t[1] for t in of), sum(t[2] for t in of)
        name = f"{10 * tenth}% to {10 * tenth + 10}%"
        said = f"{number_of(len(of), 'table')}: {text(kept, whole)}" if of else "none"
        bars.append(Bar(name=name, share=len(of) / most, whole=0.0, text=said))
    note = f"All {len(tables):,} tables by the share that is kept of them."
    return BarChart(key="bytes_distribution", title=f"{title}, distribution", note=note, bars=tuple(bars))


def _traffic_charts(run: Run) -> list[BarChart]:
    """Return the rows by their lookups of the largest tables that are known."""
    sizes = {table.name: table.table_bytes for table in run.tables}
    known = [name for name, of in run.traffic.items() if of.share is not None and any(of.removed)]
    shown = sorted(known, key=lambda name: (-sizes.get(name, 0), name))[:_MOST_TRAFFIC]
    return [_traffic_chart(f"traffic_{place}", name, run.traffic[name]) for place, name in enumerate(shown, start=1)]


def _traffic_chart(key: str, name: str, of: Traffic) -> BarChart:
    rows = sum(of.kept) + sum(of.removed)
    note = (
        f"Rows by how often training looked them up; full: kept. {percent(sum(of.kept) / rows)} of {count(rows)} rows "
        f"are kept, which had {percent(of.share)} of the lookups."
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
    shown = [one for one in run.scores.values() if sum(one.counts) > 0]  # else all scores are 0
    shown = sorted(shown, key=lambda one: (-one.blocks, one.name))[:_MOST_SCORES]
    later: dict[str, list[MaskChange]] = {one.name: [] for one in shown}
    steps = {one.name: one.step for one in shown}
    for due in run.due:
        for change in due.record.tables:
            if change.name in steps and due.step > steps[change.name]:
                later[change.name].append(change)
    return [_score_chart(f"scores_{place}", one, later[one.name]) for place, one in enumerate(shown, start=1)]


def _score_chart(key: str, one: Scored, later: list[MaskChange]) -> ScoreChart:
    blocks = one.zeros + sum(one.counts)
    note = f"{count(blocks)} blocks before the mask update at step {count(one.step)}; {percent(one.zeros / blocks)}"
    note += f" scored 0. Threshold: {amount(one.threshold)}; blocks not above it are pruned."
    if any(much((change.flipped_blocks or 0) - (change.regrown_blocks or 0), change.blocks) for change in later):
        note += " The histograms of later mask updates were not written."
    elif later:
        note += " Later mask updates pruned less than 1% more each."
    return ScoreChart(
        key=key,
        title=f"Block scores of {one.name}",
        note=note,
        bins=_bins(one),
        zeros=one.zeros / blocks,
        threshold=one.threshold,
    )


def _bins(one: Scored) -> tuple[Bin, ...]:
    """Merge buckets into at most 65 bins: 2, 4 or 8 to a bin, then whole octaves."""
    numbers = range(one.first, one.first + len(one.counts))
    together = 1
    while numbers and (numbers[-1] - numbers[0]) // together >= _MOST_BINS:
        together *= 2
    summed: dict[int, int] = {}
    for number, blocks in zip(numbers, one.counts, strict=True):
        if blocks:
            summed[number // together] = summed.get(number // together, 0) + blocks
    bins = []
    for number, blocks in summed.items():
        low, high = edge_of(number * together), edge_of((number + 1) * together)
        bins.append(Bin(low=low, high=high, blocks=blocks, density=blocks / math.log2(high / low)))
    return tuple(bins)
