"""Results of a frontier: its table, the sentence that recommends, and its files."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dist_sparse.planning.choices import METHODS, Attempt
from dist_sparse.planning.measure import Measured
from dist_sparse.text import percent, table_lines

NOTE = (
    "Columns and rows were removed from the trained model, which was not trained on: removed while "
    "it trains, they lose less, rotated columns above all."
)

CODES_NOTE = (
    "Codes were fitted to the trained weights: training through them with quantize() usually gains "
    "more."
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best of a method within a budget.

    Args:
        budget: fraction of the tables' bytes.
        measured: the attempt, its bytes and metrics.
    """

    budget: float
    measured: Measured

    @property
    def method(self) -> str:
        """As in :data:`~dist_sparse.planning.choices.METHODS`."""
        return self.measured.attempt.method


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The best of each method within each budget. ``print()``, a REPL and a notebook show the
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
        # Bytes count first: the quality is within tolerance in all of them.
        smallest = min(point.budget for point in good)
        near = self.near_best([point for point in good if point.budget == smallest])
        # Methods are listed from the simplest on.
        simplest = [*METHODS]
        return min(near, key=lambda p: (simplest.index(p.method), p.measured.bytes))

    def near_best(self, points: Sequence[Point]) -> list[Point]:
        """Return the points that lose no more than the best but for half of the tolerance."""
        best = min(self.loss(point.measured) for point in points)
        return [p for p in points if self.loss(p.measured) <= best + self.tolerance / 2]

    @property
    def recommendation(self) -> str:
        """One sentence."""
        if not self.points:
            return (
                "Nothing fits the budgets that can be tried on this model; smaller dense tables"
                " have to be trained."
            )
        whole = f"{self.metric} {self.full[self.metric]:.4f} of the whole model"
        point = self.recommended
        if point is not None:
            return f"Recommended: {self._advice(point)}, within {self.tolerance:g} of the {whole}."
        nearest = min(self.points, key=lambda each: self.loss(each.measured))
        return (
            f"Nothing comes within {self.tolerance:g} of the {whole}; nearest is this: "
            f"{self._advice(nearest)}"
        )

    def _advice(self, point: Point) -> str:
        found = point.measured
        dtype, left = found.attempt.candidate.dtype, _left(found.attempt)
        share, metric = percent(found.bytes / self.table_bytes), found.metrics[self.metric]
        how = f"{METHODS[point.method]} as {dtype} ({left})"
        return f"{how}: {share} of the bytes at {self.metric} {metric:.4f}"

    def __repr__(self) -> str:
        head = ("at", "method", "kept", "as", "bytes", *self.full)
        whole = ("", "the whole model", "everything", "", "100.0%")
        rows = [(*whole, *_numbers(self.full))]
        for point in self.points:
            found = point.measured
            cells = (METHODS[point.method], _left(found.attempt), found.attempt.candidate.dtype)
            share = percent(found.bytes / self.table_bytes)
            rows.append((percent(point.budget), *cells, share, *_numbers(found.metrics)))
        lines = table_lines(head, rows, right={0, *range(4, len(head))})
        order = f"Best first, by {self.metric}: {self._better} is better."
        has_codes = any(point.method == "codes" for point in self.points)
        notes = [order, NOTE, *[CODES_NOTE] * has_codes, self.recommendation]
        return "\n\n".join(["\n".join(lines), *(textwrap.fill(note, 79) for note in notes)])

    @property
    def _better(self) -> str:
        return "less" if self.metric in self.lower_is_better else "more"

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-able values; sizes in bytes."""
        return {**asdict(self), "recommendation": self.recommendation}


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    return [f"{value:.4f}" for value in metrics.values()]


def _left(attempt: Attempt) -> str:
    """Return the kept part of the tables, in a few words."""
    candidate, parts = attempt.candidate, []
    if attempt.trained is not None:
        parts.append(f"{percent(attempt.trained)} of columns")
    if candidate.columns < 1:
        parts.append(f"{percent(candidate.columns)} of columns")
    if attempt.method == "untouched":
        parts.append("rows ever read")
    elif candidate.levels:
        parts.append(f"{percent(1 - max(candidate.levels.values()))} of rows")
    return ", ".join(parts) or "everything"
