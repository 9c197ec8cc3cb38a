"""How do the scores of a table's blocks lie, and where does the threshold cut them?

Scores come in buckets, eight an octave, as :class:`~dist_sparse.sparsifiers.record.MaskChange` has them. They are not
equally wide on a logarithmic axis, so a bar's height is blocks per octave: its area, not its height, counts blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dist_sparse.report.run import Run
from dist_sparse.report.words import amount, count, percent
from dist_sparse.segments import LEADING_SHIFT
from dist_sparse.sparsifiers.record import MaskChange

__all__ = ["Bin", "ScoreChart", "score_charts"]

_MOST_CHARTS = 6
"""The tables with the most blocks."""

_MOST_BINS = 64

_MUCH = 0.01
"""The share of blocks that a due step must have removed, which had a score until then, to be worth looking at."""

_LARGEST = 0x7F7FFFFF
"""The bits of the largest finite float32."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Scores in [low, high), the blocks that have them, and those per octave."""

    low: float
    high: float
    blocks: int
    density: float


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
    """A histogram for each of the tables with the most blocks: of the last due step that removed at least 1 % of the
    blocks, those that scored 0 anyway not counted; else of the last one that removed any such; else of the last."""
    latest: dict[str, tuple[int, MaskChange]] = {}
    weight: dict[str, int] = {}
    last: dict[str, int] = {}
    for due in run.due:
        for change in due.record.tables:
            last[change.name] = due.step
            if change.threshold is None or not change.scores:
                continue
            scored = change.removed_blocks - _zeros(change)
            heavy = 2 if scored >= _MUCH * change.blocks else 1 if change.threshold > 0 else 0
            if heavy >= weight.get(change.name, 0):
                weight[change.name], latest[change.name] = heavy, (due.step, change)
    names = sorted(latest, key=lambda name: (-latest[name][1].blocks, name))[:_MOST_CHARTS]
    return [_chart(f"scores_{place}", *latest[name], last[name]) for place, name in enumerate(names, start=1)]


def _chart(key: str, step: int, change: MaskChange, last: int) -> ScoreChart:
    blocks = sum(number for _, number in change.scores)
    zeros = _zeros(change)
    threshold = change.threshold or 0.0
    note = f"{count(blocks)} blocks before the masks moved at step {count(step)}; {percent(zeros / blocks)} scored 0."
    note += f" Threshold: {amount(threshold)}; what is not above it goes."
    if step < last:
        note += " Later due steps removed less than 1 % more."
    return ScoreChart(
        key=key,
        title=f"Block scores of {change.name}",
        note=note,
        bins=_bins([(edge, number) for edge, number in change.scores if edge > 0]),
        zeros=zeros / blocks,
        threshold=threshold,
    )


def _zeros(change: MaskChange) -> int:
    return sum(number for edge, number in change.scores if edge == 0)


def _bins(scores: list[tuple[float, int]]) -> tuple[Bin, ...]:
    """Neighbouring buckets together where there are too many: 2, 4 or 8 to a bin, then whole octaves."""
    if not scores:
        return ()
    numbers = [_bucket(edge) for edge, _ in scores]
    together = 1
    while (numbers[-1] - numbers[0]) // together >= _MOST_BINS:
        together *= 2
    summed: dict[int, int] = {}
    for number, (_, blocks) in zip(numbers, scores, strict=True):
        summed[number // together] = summed.get(number // together, 0) + blocks
    bins = []
    for number, blocks in summed.items():
        low, high = _edge(number * together), _edge((number + 1) * together)
        bins.append(Bin(low=low, high=high, blocks=blocks, density=blocks / math.log2(high / low)))
    return tuple(bins)


def _bucket(edge: float) -> int:
    """The leading bits of a float32."""
    return int(torch.tensor(edge, dtype=torch.float32).view(torch.int32)) >> LEADING_SHIFT


def _edge(bucket: int) -> float:
    """The smallest score of a bucket; neither 0 nor infinite, so that it has a logarithm."""
    bits = min(max(bucket << LEADING_SHIFT, 1), _LARGEST)
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
