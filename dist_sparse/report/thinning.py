"""Lines of at most 400 points, however long the series: thinned so that peaks stay, or as a running mean.

Time is linear in the points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dist_sparse.report.figures import Line, Point
from dist_sparse.report.run import Series

__all__ = ["smoothed", "thinned"]

_MOST_POINTS = 400
_HUGE = 1e300
"""Larger values are drawn as this, so that differences and sums stay finite."""

_SMOOTHED = 30
"""A line with more points is drawn faintly under its running mean."""


def smoothed(name: str, series: Series, role: str) -> list[Line]:
    """Return a series as a line called ``name``; of more than 30 points as their running mean, over those as logged."""
    if len(series) <= _SMOOTHED:
        return [Line(name=name, role=role, points=thinned(series))]
    return [
        Line(name="as logged", role="raw", points=thinned(series)),
        Line(name=name, role=role, points=_means(series)),
    ]


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return at most 400 points: the smallest and the largest value of each stretch, which keeps peaks, and the last
    point."""
    if len(points) <= _MOST_POINTS:
        return _drawable(points)
    stretch = -(-2 * len(points) // (_MOST_POINTS - 2))
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = [y for _, y in points[start : start + stretch]]
        finite = [y for y in part if y is not None]
        peaks = {part.index(min(finite)), part.index(max(finite))} if finite else {0}
        kept += [points[start + i] for i in sorted(peaks)]
    return _drawable(kept if kept[-1] == points[-1] else [*kept, points[-1]])


def _means(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return a running mean over a fifteenth of the finite points, at 400 of them at most.

    Only the means that are drawn are computed, each from its own window, which is linear in the points. Differences of
    prefix sums would be, too, but one value of 1e20 would cost all later means their digits.
    """
    finite = [point for point in points if point[1] is not None]
    values = [y for _, y in finite if y is not None]
    if values and (max(values) > _HUGE or min(values) < -_HUGE):
        values = [_clamped(y) for y in values]
    half = max(2, len(finite) // 30)
    every = max(1, -(-(len(finite) - 1) // (_MOST_POINTS - 1)))
    places = [*range(0, len(finite) - 1, every), len(finite) - 1] if finite else []
    windows = ((finite[i][0], values[max(0, i - half) : i + half + 1]) for i in places)
    return tuple((float(x), math.fsum(window) / len(window)) for x, window in windows)


def _drawable(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple((float(x), None if y is None else _clamped(y)) for x, y in points)


def _clamped(value: float) -> float:
    return min(max(value, -_HUGE), _HUGE)
