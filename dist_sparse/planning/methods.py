"""Attempts of a frontier: for each budget and method, the candidates that use as much of it as they
can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from dist_sparse.planning.candidates import Candidate
from dist_sparse.planning.choices import Choices
from dist_sparse.serving.manifest import Dtype

METHODS: Final = {
    "bits": "bits alone",
    "untouched": "untouched rows removed",
    "small": "small dense",
    "rotated": "rotated columns",
    "rows": "rows",
    "mix": "rotated columns and rows",
    "hashed": "hashed rows",
}
"""Name of each method in tables, the simplest first."""

Part = Literal["columns", "rows"]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Something to measure.

    Args:
        method: of :data:`METHODS`.
        candidate: the form in which the model is served.
        trained: the part of its tables that another model is trained with, and the fraction of it;
            None is the model itself.
    """

    method: str
    candidate: Candidate
    trained: tuple[Part, float] | None = None


def attempts_of(choices: Choices, methods: Sequence[str], dtypes: Sequence[Dtype]) -> list[Attempt]:
    """Return what to try within a budget. Where a dtype alone meets it, nothing else is removed.

    Args:
        choices: the tables and the budget. Of all ``prunable`` tables the same fraction of rows is
            removed; the untouched rows are removed by a method of their own alone.
        methods: of :data:`METHODS`.
        dtypes: dtypes of the stored weights.
    """
    # The gain of the other methods would not be theirs, were the untouched rows removed too.
    all_rows = replace(choices, untouched={})
    found: list[Attempt] = []
    # fp16 costs nothing to try, so it is tried even where dtypes leaves it out.
    for dtype in dict.fromkeys(("fp16", *dtypes)):
        whole = all_rows.choice("full", dtype, 1.0)
        if dtype != "fp32" and whole.fits:
            found.append(Attempt(method="bits", candidate=whole.candidate))
    for choice in choices.without_untouched():
        if choice.fits and choice.candidate.dtype in dtypes:
            found.append(Attempt(method="untouched", candidate=choice.candidate))
    for dtype in dtypes:
        found += _smaller(all_rows, dtype)
    # Hashed rows are stored in the dtype of the fewest bytes, so that the most rows stay.
    smallest = min(
        (all_rows.choice("full", dtype, 1.0) for dtype in dtypes), key=lambda c: c.served.total
    )
    if not smallest.fits:
        share = choices.budget / smallest.served.total
        found.append(
            Attempt(method="hashed", candidate=smallest.candidate, trained=("rows", share))
        )
    return [attempt for attempt in found if attempt.method in methods]


def _smaller(choices: Choices, dtype: Dtype) -> list[Attempt]:
    """Return the attempts in a dtype in which the whole tables are too large."""
    whole = choices.choice("full", dtype, 1.0)
    if whole.fits:
        return []
    found: list[Attempt] = []
    for small in choices.widest("small", dtype):
        # Served whole: another model is trained that narrow.
        trained: tuple[Part, float] = ("columns", small.candidate.columns)
        found.append(Attempt(method="small", candidate=whole.candidate, trained=trained))
    pruned = [("rows", whole.candidate)]
    if choices.groups:
        for rotated in choices.widest("columns", dtype):
            found.append(Attempt(method="rotated", candidate=rotated.candidate))
        # A little wider than fits, and the rest of the bytes out of rows.
        fractions, fitting = choices.widths("columns", dtype)
        for fraction in fractions[fitting : fitting + 2]:
            pruned.append(("mix", choices.choice("columns", dtype, fraction).candidate))
    for method, candidate in pruned:
        least = choices.fewest_rows(candidate)
        if least.fits:
            found.append(Attempt(method=method, candidate=least.candidate))
    return found
