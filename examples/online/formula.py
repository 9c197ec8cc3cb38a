"""Shared by training and serving: names of folders, and the formula above the tables."""

from __future__ import annotations

from torch import Tensor

__all__ = ["DELTA", "scores"]

DELTA = "day-{:02d}"
"""The folder of a day: of day 0 the base, then deltas."""


def scores(embedded: Tensor) -> Tensor:
    """Return the logits ``(b,)`` of users, movies and crosses, ``(b, 3, DIM)``: the first columns
    are biases, all others factors whose pairs are multiplied (Rendle, Factorization Machines,
    2010, equation 5)."""
    factors = embedded[:, :, 1:]
    pairs = factors.sum(1).square() - factors.square().sum(1)
    return embedded[:, :, 0].sum(1) + pairs.sum(1) / 2
