"""What a frontier tries: for each budget and method, the candidates that use as much of it as they
can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dist_sparse.planning.candidates import Candidate, SizedTable
from dist_sparse.planning.choices import Choices, column_fractions, least_removed, worth_rotating
from dist_sparse.rotation.rotate import Rotate, rotation_groups
from dist_sparse.serving.manifest import Dtype

__all__ = ["METHODS", "Attempt", "Part", "attempts"]

METHODS: Final = {
    "bits": "bits alone",
    "untouched": "untouched rows removed",
    "small": "small dense",
    "rotated": "rotated columns",
    "rows": "rows",
    "mix": "rotated columns and rows",
    "hashed": "hashed rows",
}
"""What each method is called, the simplest first."""

Groups = tuple[tuple[str, ...], ...]
Part = Literal["columns", "rows"]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Something to measure.

    Args:
        method: of :data:`METHODS`.
        candidate: what is served of the model.
        trained: of what part of the tables another model is trained, and how much of it that one
            keeps; None is the model itself.
    """

    method: str
    candidate: Candidate
    trained: tuple[Part, float] | None = None


def attempts(
    tables: Sequence[SizedTable],
    budget: int,
    *,
    methods: Sequence[str],
    dtypes: Sequence[Dtype],
    rotate: Rotate,
    pruned: Sequence[str],
    untouched: Mapping[str, int],
) -> Iterator[Attempt]:
    """Yield what a budget of bytes holds, by method and dtype: the most columns, or the lowest
    level.

    Nothing is removed that need not be: where a dtype alone meets the budget, it is tried alone.

    Args:
        tables: of the model.
        budget: bytes of all tables, as :class:`~dist_sparse.planning.candidates.ServedBytes` counts
            them.
        methods: of :data:`METHODS`.
        dtypes: to store what is left in.
        rotate: as in :func:`~dist_sparse.rotate`.
        pruned: names of the tables that may lose rows; all of them have one level. Rotated columns
            are removed from any table.
        untouched: by table, how many rows training has never touched.
    """
    groups = rotation_groups(rotate, [table.name for table in tables])
    search = _Search(tables=tables, budget=budget, pruned=pruned, groups=tuple(map(tuple, groups)))
    if "bits" in methods:
        yield from search.bits(dtypes)
    if "untouched" in methods:
        yield from search.untouched(dtypes, untouched)
    for dtype in dtypes:
        if not search.fits(Candidate(dtype=dtype)):
            yield from search.smaller(dtype, methods)
    if "hashed" in methods:
        yield from search.hashed(dtypes)


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The candidates of one budget."""

    tables: Sequence[SizedTable]
    budget: int
    pruned: Sequence[str]
    groups: Groups

    def size(self, candidate: Candidate) -> int:
        return candidate.served_bytes(self.tables).total

    def fits(self, candidate: Candidate) -> bool:
        return self.size(candidate) <= self.budget

    def bits(self, dtypes: Sequence[Dtype]) -> Iterator[Attempt]:
        """fp16 costs nothing to try, so it is tried even if it was not asked for."""
        for dtype in dict.fromkeys(("fp16", *dtypes)):
            candidate = Candidate(dtype=dtype)
            if dtype != "fp32" and self.fits(candidate):
                yield Attempt(method="bits", candidate=candidate)

    def untouched(self, dtypes: Sequence[Dtype], untouched: Mapping[str, int]) -> Iterator[Attempt]:
        lossless = Choices(
            tables=self.tables, budget=self.budget, groups=(), cold=(), untouched=untouched
        ).all()
        for choice in lossless:
            candidate = choice.candidate
            if choice.kind != "full" or not candidate.levels:
                continue  # of narrower tables, or without an untouched row
            if choice.fits and candidate.dtype in dtypes:
                yield Attempt(method="untouched", candidate=candidate)

    def smaller(self, dtype: Dtype, methods: Sequence[str]) -> Iterator[Attempt]:
        """Yield what fits in a dtype of which the whole tables are too large."""
        if "small" in methods:
            yield from self._small(dtype)
        rotated = self._rotated(dtype)
        # Widths descend, so the first that fits keeps the most columns.
        widest = next((i for i, each in enumerate(rotated) if self.fits(each)), len(rotated))
        if widest < len(rotated) and "rotated" in methods:
            yield Attempt(method="rotated", candidate=rotated[widest])
        if "rows" in methods:
            yield from self._removing("rows", Candidate(dtype=dtype))
        if "mix" in methods:
            # A little wider than fits, and the rest of the bytes out of rows.
            for wider in rotated[max(widest - 2, 0) : widest]:
                yield from self._removing("mix", wider)

    def _small(self, dtype: Dtype) -> Iterator[Attempt]:
        for fraction in column_fractions(self.tables)[::-1]:
            if self.fits(Candidate(dtype=dtype, columns=fraction)):
                whole = Candidate(dtype=dtype)
                yield Attempt(method="small", candidate=whole, trained=("columns", fraction))
                return

    def _rotated(self, dtype: Dtype) -> list[Candidate]:
        """Every width of rotated tables, the widest first, where a rotation saves bytes."""
        found = []
        for fraction in column_fractions(self.tables)[::-1]:
            groups = worth_rotating(self.groups, self.tables, dtype, fraction)
            if groups:
                found.append(Candidate(dtype=dtype, columns=fraction, groups=groups))
        return found

    def _removing(self, method: str, candidate: Candidate) -> Iterator[Attempt]:
        """Yield the candidate with the lowest level that fits, if one does."""
        found = least_removed(candidate, self.pruned, self.tables, self.budget)
        if self.fits(found):
            yield Attempt(method=method, candidate=found)

    def hashed(self, dtypes: Sequence[Dtype]) -> Iterator[Attempt]:
        smallest = min((Candidate(dtype=dtype) for dtype in dtypes), key=self.size)
        share = self.budget / self.size(smallest)
        if share < 1:
            yield Attempt(method="hashed", candidate=smallest, trained=("rows", share))
