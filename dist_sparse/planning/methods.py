"""Attempts of a frontier: for each budget and method, the candidates that use as much of it as they
can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dist_sparse.planning.candidates import Candidate, SizedTable
from dist_sparse.planning.choices import Choices, column_fractions, least_removed, worth_rotating
from dist_sparse.serving.manifest import Dtype

__all__ = ["METHODS", "Attempt", "Part", "Search"]

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


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search for the candidates that a budget holds, by method and dtype: the most columns, or the
    lowest level.

    Args:
        tables: of the model.
        budget: bytes of all tables, as :class:`~dist_sparse.planning.candidates.ServedBytes` counts
            them.
        methods: of :data:`METHODS`.
        dtypes: dtypes of the stored weights.
        groups: tables that are rotated together. Rotated columns are removed from any table.
        pruned: names of the tables that may lose rows; all of them have one level.
        untouched: by table, how many rows training has never touched.
    """

    tables: Sequence[SizedTable]
    budget: int
    methods: Sequence[str]
    dtypes: Sequence[Dtype]
    groups: tuple[tuple[str, ...], ...]
    pruned: Sequence[str]
    untouched: Mapping[str, int]

    def attempts(self) -> Iterator[Attempt]:
        """Yield the attempts. Where a dtype alone meets the budget, it is tried alone: nothing is
        removed needlessly."""
        if "bits" in self.methods:
            yield from self._bits()
        if "untouched" in self.methods:
            yield from self._without_untouched()
        for dtype in self.dtypes:
            if not self._fits(Candidate(dtype=dtype)):
                yield from self._smaller(dtype)
        if "hashed" in self.methods:
            yield from self._hashed()

    def _size(self, candidate: Candidate) -> int:
        return candidate.served_bytes(self.tables).total

    def _fits(self, candidate: Candidate) -> bool:
        return self._size(candidate) <= self.budget

    def _bits(self) -> Iterator[Attempt]:
        # fp16 costs nothing to try, so it is tried even where dtypes leaves it out.
        for dtype in dict.fromkeys(("fp16", *self.dtypes)):
            candidate = Candidate(dtype=dtype)
            if dtype != "fp32" and self._fits(candidate):
                yield Attempt(method="bits", candidate=candidate)

    def _without_untouched(self) -> Iterator[Attempt]:
        choices = Choices(
            tables=self.tables, budget=self.budget, groups=(), cold=(), untouched=self.untouched
        )
        for choice in choices.without_untouched():
            if choice.fits and choice.candidate.dtype in self.dtypes:
                yield Attempt(method="untouched", candidate=choice.candidate)

    def _smaller(self, dtype: Dtype) -> Iterator[Attempt]:
        """Yield the attempts in a dtype in which the whole tables are too large."""
        if "small" in self.methods:
            yield from self._small(dtype)
        rotated = self._rotated(dtype)
        # Widths descend, so the first that fits keeps the most columns.
        widest = next((i for i, each in enumerate(rotated) if self._fits(each)), len(rotated))
        if widest < len(rotated) and "rotated" in self.methods:
            yield Attempt(method="rotated", candidate=rotated[widest])
        if "rows" in self.methods:
            yield from self._removing("rows", Candidate(dtype=dtype))
        if "mix" in self.methods:
            # A little wider than fits, and the rest of the bytes out of rows.
            for wider in rotated[max(widest - 2, 0) : widest]:
                yield from self._removing("mix", wider)

    def _small(self, dtype: Dtype) -> Iterator[Attempt]:
        for fraction in column_fractions(self.tables)[::-1]:
            if self._fits(Candidate(dtype=dtype, columns=fraction)):
                whole = Candidate(dtype=dtype)
                yield Attempt(method="small", candidate=whole, trained=("columns", fraction))
                return

    def _rotated(self, dtype: Dtype) -> list[Candidate]:
        """Return every width of rotated tables, the widest first, where a rotation saves bytes."""
        found = []
        for fraction in column_fractions(self.tables)[::-1]:
            groups = worth_rotating(self.groups, self.tables, dtype, fraction)
            if groups:
                found.append(Candidate(dtype=dtype, columns=fraction, groups=groups))
        return found

    def _removing(self, method: str, candidate: Candidate) -> Iterator[Attempt]:
        """Yield the candidate with the lowest level that fits, if one does."""
        found = least_removed(candidate, self.pruned, self.tables, self.budget)
        if self._fits(found):
            yield Attempt(method=method, candidate=found)

    def _hashed(self) -> Iterator[Attempt]:
        # Hashed rows are stored in the dtype of the fewest bytes, so that the most rows stay.
        smallest = min((Candidate(dtype=dtype) for dtype in self.dtypes), key=self._size)
        share = self.budget / self._size(smallest)
        if share < 1:
            yield Attempt(method="hashed", candidate=smallest, trained=("rows", share))
