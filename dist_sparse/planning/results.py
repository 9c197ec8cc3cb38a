"""What a frontier has found: its table, and the sentence that recommends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dist_sparse.planning.measure import Measured
from dist_sparse.planning.methods import METHODS, Attempt
from dist_sparse.text import count, percent, table_lines

__all__ = ["NOTE", "Frontier", "Point"]

NOTE = (
    "Columns and rows were removed from the trained model, which was not trained on: removed while "
    "it trains, they lose less, rotated columns above all."
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best of a method within a budget.

    Args:
        budget: fraction of the tables' bytes.
        measured: what was tried, its bytes and metrics.
    """

    budget: float
    measured: Measured

    @property
    def method(self) -> str:
        """As in :data:`~dist_sparse.planning.methods.METHODS`."""
        return self.measured.attempt.method


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """What each method is worth within each budget. ``print()``, a REPL and a notebook show the
    table and the recommendation.

    Args:
        table_bytes: of the tables of the model as it is.
        full: its metrics.
        metric: by which methods are compared.
        lower_is_better: metrics of which less is better.
        tolerance: a smaller difference of the metric does not count.
        points: by budget, the largest first, and method, the best first.
        trials: all that was measured.
    """

    table_bytes: int
    full: Mapping[str, float]
    metric: str
    lower_is_better: tuple[str, ...]
    tolerance: float
    points: tuple[Point, ...]
    trials: tuple[Measured, ...]

    def loss(self, measured: Measured) -> float:
        """Return by how much the metric is worse than that of the model as it is."""
        worse = self.full[self.metric] - measured.metrics[self.metric]
        return -worse if self.metric in self.lower_is_better else worse

    @property
    def recommended(self) -> Point | None:
        """The smallest budget within which a method loses no more than ``tolerance``, and the
        simplest method there that is as good as the best but for half of it, in the fewest bytes;
        None if all lose more."""
        good = [point for point in self.points if self.loss(point.measured) <= self.tolerance]
        if not good:
            return None
        smallest = min(point.budget for point in good)
        there = [point for point in good if point.budget == smallest]
        best = min(self.loss(point.measured) for point in there)
        near = [point for point in there if self.loss(point.measured) <= best + self.tolerance / 2]
        return min(near, key=lambda point: ([*METHODS].index(point.method), point.measured.bytes))

    @property
    def recommendation(self) -> str:
        """One sentence."""
        point = self.recommended
        within = f"{self.metric} {self.full[self.metric]:.4f} of the whole model"
        if point is None:
            if not self.points:
                return (
                    "Nothing fits the budgets that can be tried on this model; smaller dense tables"
                    " have to be trained."
                )
            point = min(self.points, key=lambda each: self.loss(each.measured))
            lead = f"Nothing comes within {self.tolerance:g} of the {within}; nearest is this: "
            return lead + _advice(point.measured.attempt) + self._figures(point)
        return (
            _advice(point.measured.attempt)
            + self._figures(point)
            + f", within {self.tolerance:g} of the {within}."
        )

    def _figures(self, point: Point) -> str:
        share = percent(point.measured.bytes / self.table_bytes)
        return f": {share} of the bytes at {self.metric} {point.measured.metrics[self.metric]:.4f}"

    def cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the head and the rows of the table, as text."""
        head = ("budget", "method", "what is left", "as", "bytes", "of full", *self.full)
        rows = [
            (
                "",
                "the model as it is",
                "",
                "",
                count(self.table_bytes),
                "100.0%",
                *_numbers(self.full),
            )
        ]
        before = None
        for point in self.points:
            found = point.measured
            share = percent(found.bytes / self.table_bytes)
            budget = "" if point.budget == before else percent(point.budget)
            before = point.budget
            cells = (METHODS[point.method], _left(found.attempt), found.attempt.candidate.dtype)
            rows.append((budget, *cells, count(found.bytes), share, *(_numbers(found.metrics))))
        return head, rows

    def __repr__(self) -> str:
        head, rows = self.cells()
        lines = table_lines(head, rows, right={0, *range(4, len(head))})
        return "\n".join([*lines, "", self.directions, NOTE, "", self.recommendation])

    @property
    def directions(self) -> str:
        """Which metrics are better when they are larger, and which when smaller."""
        less = [name for name in self.full if name in self.lower_is_better]
        more = [name for name in self.full if name not in self.lower_is_better]
        said = [
            f"{', '.join(names)}: {word} is better"
            for names, word in ((more, "more"), (less, "less"))
            if names
        ]
        return (
            f"{'; '.join(said)}. Methods are compared by {self.metric}, in each budget the best"
            " first."
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-able values; sizes in bytes."""
        return {**asdict(self), "recommendation": self.recommendation}


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    return [f"{value:.4f}" for value in metrics.values()]


def _left(attempt: Attempt) -> str:
    """What is left of the tables, in a few words."""
    candidate, parts = attempt.candidate, []
    if attempt.trained is not None:
        part, share = attempt.trained
        parts.append(f"{percent(share)} of the {part}")
    if candidate.columns < 1:
        parts.append(f"{percent(candidate.columns)} of the columns")
    if attempt.method == "untouched":
        parts.append("the touched rows")
    elif candidate.levels:
        parts.append(f"{percent(1 - max(candidate.levels.values()))} of the rows")
    return ", ".join(parts) or "everything"


def _advice(attempt: Attempt) -> str:
    """What to do, as the beginning of a sentence."""
    candidate, parts = attempt.candidate, []
    served = "" if candidate.dtype == "fp32" else f", and serve it as {candidate.dtype}"
    if attempt.trained is not None:
        part, share = attempt.trained
        how = "a smaller table" if part == "columns" else "hashed ids"
        return f"Use {how}: train with {percent(share)} of the {part}{served}"
    if candidate.columns < 1:
        parts.append(f"{percent(1 - candidate.columns)} of the rotated columns")
    if attempt.method == "untouched":
        return f"Remove the rows that training has never touched{served}"
    if candidate.levels:
        parts.append(f"{percent(max(candidate.levels.values()))} of the rows")
    return (
        f"Remove {' and '.join(parts)} during training{served}"
        if parts
        else f"Use {candidate.dtype}"
    )
