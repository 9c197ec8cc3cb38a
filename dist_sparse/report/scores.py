"""How do the scores of a table's blocks lie, and where does the threshold cut them?

Scores come in buckets, eight an octave, as :class:`~dist_sparse.report.histograms.Scored` has them. They are not
equally wide on a logarithmic axis, so a bar's height is blocks per octave: its area, not its height, counts blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dist_sparse.report.histograms import Scored, edge_of, much
from dist_sparse.report.run import Run
from dist_sparse.report.words import amount, count, percent
from dist_sparse.sparsifiers.recorder import MaskChange

__all__ = ["Bin", "ScoreChart", "score_charts"]

_MOST_CHARTS = 6
"""The tables with the most blocks."""

_MOST_BINS = 64


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Scores in [low, high), the blocks that have them, and those per octave."""

    low: float
    high: float
    blocks: int
    density: float

    def kind(self, threshold: float) -> str:
        """Whether its blocks are ``gone``, ``kept``, or ``both``: some of each."""
        return "gone" if self.high <= threshold else "kept" if self.low > threshold else "both"


@dataclass(frozen=True, kw_only=True)
class ScoreChart:
    """The histogram of one table. ``zeros``: the share of blocks that score 0, which have no place on the axis."""

    key: str
    title: str
    note: str
    bins: tuple[Bin, ...]
    zeros: float
    threshold: float


def score_charts(run: Run) -> list[ScoreChart]:
    """A histogram for each of the tables with the most blocks, as :class:`~dist_sparse.report.histograms.Latest` chose
    it."""
    shown = [one for one in run.scores.values() if one.zeros + sum(one.counts) > 0]
    shown = sorted(shown, key=lambda one: (-one.blocks, one.name))[:_MOST_CHARTS]
    later: dict[str, list[MaskChange]] = {one.name: [] for one in shown}
    steps = {one.name: one.step for one in shown}
    for due in run.due:
        for change in due.record.tables:
            if change.name in steps and due.step > steps[change.name]:
                later[change.name].append(change)
    return [_chart(f"scores_{place}", one, later[one.name]) for place, one in enumerate(shown, start=1)]


def _chart(key: str, one: Scored, later: list[MaskChange]) -> ScoreChart:
    blocks = one.zeros + sum(one.counts)
    note = f"{count(blocks)} blocks before the masks moved at step {count(one.step)}; {percent(one.zeros / blocks)}"
    note += f" scored 0. Threshold: {amount(one.threshold)}; what is not above it goes."
    if any(much((change.flipped_blocks or 0) - (change.regrown_blocks or 0), change.blocks) for change in later):
        note += " The histograms of later due steps were not written."
    elif later:
        note += " Later due steps removed less than 1 % more each."
    return ScoreChart(
        key=key,
        title=f"Block scores of {one.name}",
        note=note,
        bins=_bins(one),
        zeros=one.zeros / blocks,
        threshold=one.threshold,
    )


def _bins(one: Scored) -> tuple[Bin, ...]:
    """Neighbouring buckets together where there are too many: 2, 4 or 8 to a bin, then whole octaves."""
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
