"""Lines of at most 400 points, however long the series: thinned so that peaks stay, or as a running
mean.

Time is linear in the points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dist_sparse.report.figures import Line, Point
from dist_sparse.report.run import Series

_MOST_POINTS = 400

_SMOOTHED = 30
"""A line with more points is drawn faintly under its running mean."""


def smoothed(name: str, series: Series) -> list[Line]:
    """Return a series as a line called ``name``; of more than 30 points as their running mean, over
    those as logged."""
    if len(series) <= _SMOOTHED:
        return [Line(name=name, points=thinned(series))]
    return [
        Line(name="as logged", role="raw", points=thinned(series)),
        Line(name=name, points=_means(series)),
    ]


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return at most 400 points: the smallest and the largest value of each stretch, which keeps
    peaks, and the last point."""
    if len(points) <= _MOST_POINTS:
        return tuple(points)
    # Two points of each stretch are kept, and the last one.
    stretch = -(-2 * len(points) // (_MOST_POINTS - 2))
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        kept += _peaks(points[start : start + stretch])
    return tuple(kept if kept[-1] == points[-1] else [*kept, points[-1]])


def _peaks(part: Sequence[Point]) -> list[Point]:
    """Return the points with the smallest and the largest value, in their order; the first where
    none is finite."""
    values = [y for _, y in part]
    finite = [y for y in values if y is not None]
    if not finite:
        return [part[0]]
    # In their order, and once where one value is both.
    return [part[i] for i in sorted({values.index(min(finite)), values.index(max(finite))})]


def _means(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return a running mean over a fifteenth of the finite points, at 400 of them at most.

    Only the means that are drawn are computed, each from its own window, which is linear in the
    points.
    """
    finite = [(x, y) for x, y in points if y is not None]
    values = [y for _, y in finite]
    # A fifteenth in all: half on each side.
    half = max(2, len(finite) // 30)
    # -(-a // b) rounds up.
    every = max(1, -(-(len(finite) - 1) // (_MOST_POINTS - 1)))
    means: list[Point] = []
    # The last mean is always drawn: it is the value at the end.
    for place in {*range(0, len(finite), every), *range(len(finite))[-1:]}:
        # Differences of prefix sums would be linear too, but one value of 1e20 would cost all later
        # means their digits.
        window = values[max(0, place - half) : place + half + 1]
        means.append((finite[place][0], math.fsum(window) / len(window)))
    return tuple(sorted(means))
