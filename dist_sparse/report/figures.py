"""Charts as data: names, points, bars.

:mod:`dist_sparse.report.charts` makes them of a run; :mod:`dist_sparse.report.drawing` turns them
into shapes, without the run.
"""

from __future__ import annotations

from dataclasses import dataclass

Point = tuple[float, float | None]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line. ``role``: ``main``, ``target``, ``other`` (of a compared run) or ``raw`` (under its
    means); ``number``: of the compared run, which has one color in all charts;
    ``steps``: constant from each point to the next."""

    name: str
    points: tuple[Point, ...]
    role: str = "main"
    number: int = 0
    steps: bool = False

    @property
    def steps_at(self) -> list[float]:
        """The steps of its points, ascending."""
        return [x for x, _ in self.points]

    @property
    def heights(self) -> list[float]:
        """The finite values."""
        return [y for _, y in self.points if y is not None]


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over steps 0 to ``end``, or further. ``share``: heights are shares, shown in percent;
    ``mark``: a step and a text, drawn as a vertical line."""

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    end: int
    share: bool = False
    mark: tuple[float, str] | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether there is more than zeros to see."""
        return any(any(line.heights) for line in self.lines)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: ``share`` of the full width is filled, in front of the ``whole``; both in [0, 1]."""

    name: str
    share: float
    text: str
    whole: float = 1.0


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Horizontal bars."""

    key: str
    title: str
    note: str
    bars: tuple[Bar, ...]

    @property
    def is_drawn(self) -> bool:
        """Whether there is a bar."""
        return bool(self.bars)


@dataclass(frozen=True, kw_only=True)
class Dots:
    """Dots of one run, joined: label, bytes > 0, height. ``role``, ``number``: as of a
    :class:`Line`."""

    name: str
    role: str
    number: int = 0
    dots: tuple[tuple[str, int, float], ...]


@dataclass(frozen=True, kw_only=True)
class DotChart:
    """AUC over bytes, on a logarithmic axis."""

    key: str
    title: str
    note: str
    runs: tuple[Dots, ...]

    @property
    def dots(self) -> tuple[tuple[str, int, float], ...]:
        """The dots of all runs."""
        return sum((run.dots for run in self.runs), ())

    @property
    def is_drawn(self) -> bool:
        """Whether there are dots to compare."""
        return len(self.dots) > 1


Chart = LineChart | BarChart | DotChart
