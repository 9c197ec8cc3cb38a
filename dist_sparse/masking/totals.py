"""What training has summed up for rows, as a score: their lookups, or their squared gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dist_sparse.tables.shards import Rect

TINY = 2.0**-100
"""Added to a total before it is multiplied by squares, so that rows that were never touched are
ordered by norm, and after those that are removed already."""


class RowTotals(NamedTuple):
    """Lookups or summed gradients of a shard's rows.

    Args:
        rect: of the shard.
        total: ``(rows,)``, ``(rows, 1)`` or ``(rows, columns)``; live.
        initial: where it counts from.
        share: the elements that share a total: each scores ``1 / share`` of it.
        most: where it stops to count.
    """

    rect: Rect
    total: Tensor
    initial: float = 0.0
    share: int = 1
    most: float = math.inf

    @property
    def of_elements(self) -> bool:
        """Whether each element has a total of its own."""
        return self.total.numel() > self.rect.rows

    def of_rows(self, rows: slice | Tensor) -> Tensor:
        """Return the value of an element of these rows, float64 ``(rows, 1)`` or
        ``(rows, columns)``."""
        # Copied: the total is live, and the caller computes in place.
        known = self.total.reshape(self.rect.rows, -1)[rows].to(torch.float64, copy=True)
        # The shards of a row are clamped at different times, but must score alike.
        return known.clamp_(max=self.most).sub_(self.initial).div_(self.share)


@dataclass(frozen=True, eq=False)
class ByTotals:
    """Score an element by its total, alone or times its own square.

    A measure of its own, rather than a callable: it needs no memory besides the scores.

    Args:
        find: returns the totals of the shard that holds a global (row, column).
        squares: score an element ``x`` as ``x * x * (total + 2**-100)``.
    """

    find: Callable[[tuple[int, int]], RowTotals]
    squares: bool

    def score(self, chunk: Tensor, offset: tuple[int, int], out: Tensor) -> Tensor:
        """Return the scores of some rows of a shard in ``out``, float64; arguments as of
        :func:`~dist_sparse.masking.scores.element_scores`."""
        known = self.find(offset)
        first = offset[0] - known.rect.row
        value = known.of_rows(slice(first, first + len(chunk)))
        if not self.squares:
            return out.copy_(value.expand_as(out))
        return squares_times(out.copy_(chunk), value)


def squares_times(elements: Tensor, value: Tensor) -> Tensor:
    """Return the scores of elements by their squares and the value of their totals, both float64;
    both are overwritten."""
    return elements.mul_(elements).mul_(value.add_(TINY))
