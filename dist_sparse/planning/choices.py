"""The candidates that a budget leaves: of each kind and dtype the one that keeps the most."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from dist_sparse.planning.candidates import Candidate, ServedBytes, SizedTable
from dist_sparse.serving.manifest import Dtype

__all__ = ["Choice", "Choices", "Kind", "column_fractions", "least_removed", "worth_rotating"]

Kind: TypeAlias = Literal["full", "small", "columns", "rows"]

DTYPES: Final[tuple[Dtype, ...]] = ("fp32", "fp16", "int8", "int4")

_STEPS: Final = 1 << 20
"""Levels that are tried are multiples of one part in so many."""


def least_removed(
    candidate: Candidate, names: Sequence[str], tables: Sequence[SizedTable], budget: int
) -> Candidate:
    """Return a candidate with the lowest common level of the tables ``names`` at which ``tables``
    take no more than ``budget`` bytes; the highest level below 1 if none is low enough.

    Args:
        candidate: its levels are the least.
    """
    some = [table for table in tables if table.name in names]
    others = candidate.served_bytes([table for table in tables if table.name not in names]).total

    def at(step: int) -> Candidate:
        levels = {name: max(step / _STEPS, candidate.levels.get(name, 0.0)) for name in names}
        return replace(candidate, levels={**candidate.levels, **levels})

    def fits(step: int) -> bool:
        return others + at(step).served_bytes(some).total <= budget

    found = at(bisect_left(range(_STEPS - 1), True, key=fits))
    return replace(
        found, levels={**found.levels, **{table.name: found.level(table) for table in some}}
    )


def column_fractions(tables: Sequence[SizedTable]) -> list[float]:
    """Return the fractions of columns that leave a multiple of 4 of the widest table, but not all
    of it, ascending."""
    widest = max(table.shape[1] for table in tables)
    return [width / widest for width in range(4, widest, 4)]


def worth_rotating(
    groups: Sequence[Sequence[str]], tables: Sequence[SizedTable], dtype: Dtype, columns: float
) -> tuple[tuple[str, ...], ...]:
    """Return the groups without tables that are turned back of which the basis takes more than they
    lose."""
    named = {table.name: table for table in tables}

    def saves(name: str) -> bool:
        alone = Candidate(dtype=dtype, columns=columns, groups=((name,),))
        whole = replace(alone, columns=1.0)
        return alone.served_bytes([named[name]]).total < whole.served_bytes([named[name]]).total

    return tuple(tuple(group) for group in groups if len(group) > 1 or saves(group[0]))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate and what it takes.

    Args:
        kind: ``"full"`` keeps all columns; ``"small"`` is a table that was trained with fewer;
            ``"columns"`` removes rotated columns during training; ``"rows"`` removes rows that
            training has touched.
        served: its bytes.
        fits: whether they are within the budget.
    """

    kind: Kind
    candidate: Candidate
    served: ServedBytes
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What may be done to some tables.

    Args:
        tables: all that are served.
        budget: bytes.
        groups: what may be rotated, as in :class:`Candidate`.
        cold: names of tables that may lose rows that training has touched.
        untouched: by name how many rows training has never touched, where that is known.
    """

    tables: Sequence[SizedTable]
    budget: int
    groups: tuple[tuple[str, ...], ...]
    cold: tuple[str, ...]
    untouched: Mapping[str, int]

    def all(self) -> list[Choice]:
        """Return the candidates: at full width all, otherwise those that fit, the widest of each
        kind and dtype; with rows removed, at several widths, the lowest level that fits."""
        found = [self.full(dtype) for dtype in DTYPES]
        without = [self._choice("full", dtype, 1.0) for dtype in DTYPES]
        found += [choice for choice in without if choice.candidate.levels]
        kinds: tuple[Kind, ...] = ("small", "columns") if self.groups else ("small",)
        found += [
            each
            for kind in kinds
            for dtype in DTYPES
            if (each := self._widest(kind, dtype)) is not None
        ]
        return found + list(self._rows())

    def full(self, dtype: Dtype) -> Choice:
        """Return tables of all rows and columns in ``dtype``."""
        return self._choice("full", dtype, 1.0, lossless=False)

    @property
    def least(self) -> Choice:
        """Small dense tables of 4 columns in int4, without what training has never touched."""
        return self._choice("small", "int4", min([*self._fractions("small"), 1.0]))

    def _widest(self, kind: Kind, dtype: Dtype) -> Choice | None:
        """The widest tables that fit; None if none do, or if all columns fit."""
        if self._choice(kind, dtype, 1.0).fits:
            return None
        fractions = self._fractions(kind)
        number = bisect_right(
            fractions, False, key=lambda fraction: not self._choice(kind, dtype, fraction).fits
        )
        return self._choice(kind, dtype, fractions[number - 1]) if number else None

    def _rows(self) -> Iterator[Choice]:
        """Cold tables without rows, at widths that do not fit with them: the fewer columns, the
        fewer rows go."""
        kind: Kind = "columns" if self.groups else "small"
        widest = max(table.shape[1] for table in self._narrowed(kind))
        fractions = [min(width / widest, 1.0) for width in (4, 8, 16, widest)]
        for dtype in ("int8", "int4") if self.cold else ():
            for fraction in dict.fromkeys(fractions):
                if not self._choice(kind, dtype, fraction).fits:
                    all_rows = self._choice("rows", dtype, fraction).candidate
                    fewest = self._priced(
                        "rows", least_removed(all_rows, self.cold, self.tables, self.budget)
                    )
                    if fewest.fits:
                        yield fewest

    def _fractions(self, kind: Kind) -> list[float]:
        return column_fractions(self._narrowed(kind))

    def _narrowed(self, kind: Kind) -> list[SizedTable]:
        """The tables that may be narrower."""
        names = {name for group in self.groups for name in group}
        return [table for table in self.tables if kind != "columns" or table.name in names]

    def _choice(self, kind: Kind, dtype: Dtype, fraction: float, lossless: bool = True) -> Choice:
        candidate = Candidate(dtype=dtype, columns=fraction)
        if self.groups and fraction < 1 and kind in ("columns", "rows"):
            candidate = replace(
                candidate,
                groups=worth_rotating(self.groups, self.tables, dtype, fraction) or self.groups,
            )
        return self._priced(
            kind, replace(candidate, levels=self._untouched_levels(candidate) if lossless else {})
        )

    def _priced(self, kind: Kind, candidate: Candidate) -> Choice:
        served = candidate.served_bytes(self.tables)
        return Choice(
            kind=kind, candidate=candidate, served=served, fits=served.total <= self.budget
        )

    def _untouched_levels(self, candidate: Candidate) -> dict[str, float]:
        """The levels that remove what training has never touched, where that saves more than the
        index takes."""
        found: dict[str, float] = {}
        for table in self.tables:
            if (rows := min(self.untouched.get(table.name, 0), table.shape[0] - 1)) > 0:
                less = replace(candidate, levels={table.name: rows / table.shape[0]})
                if less.served_bytes([table]).total < candidate.served_bytes([table]).total:
                    found |= less.levels
        return found
