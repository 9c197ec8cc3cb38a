"""The candidates that a budget leaves: of each kind and dtype the one that keeps the most."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from dist_sparse.planning.candidates import Candidate, ServedBytes, SizedTable
from dist_sparse.serving.manifest import Dtype

__all__ = ["Choice", "Choices", "Kind"]

Kind: TypeAlias = Literal["full", "small", "columns", "rows"]

DTYPES: Final[tuple[Dtype, ...]] = ("fp32", "fp16", "int8", "int4")

_STEPS: Final = 1 << 20
"""Levels of rows are multiples of one part in so many."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate and what it takes.

    Args:
        kind: ``"full"`` keeps all columns; ``"small"`` is a table that was trained with fewer; ``"columns"`` removes
            rotated columns during training; ``"rows"`` removes rows that training has touched.
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
        """Return the candidates: at full width all, otherwise those that fit, the widest of each kind and dtype; with
        rows removed, at several widths, the lowest level that fits."""
        found = [self.full(dtype) for dtype in DTYPES]
        without = [self._choice("full", dtype, 1.0) for dtype in DTYPES]
        found += [choice for choice in without if choice.candidate.levels]
        kinds: tuple[Kind, ...] = ("small", "columns") if self.groups else ("small",)
        found += [each for kind in kinds for dtype in DTYPES if (each := self._widest(kind, dtype)) is not None]
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
        number = bisect_right(fractions, False, key=lambda fraction: not self._choice(kind, dtype, fraction).fits)
        return self._choice(kind, dtype, fractions[number - 1]) if number else None

    def _rows(self) -> Iterator[Choice]:
        """Cold tables without rows, at widths that do not fit with them: the fewer columns, the fewer rows go."""
        kind: Kind = "columns" if self.groups else "small"
        widest = self._widest_table(kind)
        fractions = [min(width / widest, 1.0) for width in (4, 8, 16, widest)]
        for dtype in ("int8", "int4") if self.cold else ():
            for fraction in dict.fromkeys(fractions):
                if not self._choice(kind, dtype, fraction).fits and (choice := self._fewest_rows(dtype, fraction)).fits:
                    yield choice

    def _fewest_rows(self, dtype: Dtype, fraction: float) -> Choice:
        """The lowest level of cold tables that fits; the highest if none does."""
        all_rows = self._choice("rows", dtype, fraction)
        cold = [table for table in self.tables if table.name in self.cold]
        others = all_rows.served.total - all_rows.candidate.served_bytes(cold).total

        def at(step: int) -> Candidate:
            before = all_rows.candidate.levels
            levels = {name: max(step / _STEPS, before.get(name, 0.0)) for name in self.cold}
            return replace(all_rows.candidate, levels={**before, **levels})

        def fits(step: int) -> bool:
            return others + at(step).served_bytes(cold).total <= self.budget

        return self._priced("rows", at(bisect_left(range(_STEPS - 1), True, key=fits)))

    def _fractions(self, kind: Kind) -> list[float]:
        """Multiples of 4 columns, as fractions of the widest table that may be narrower, ascending."""
        widest = self._widest_table(kind)
        return [width / widest for width in range(4, widest, 4)]

    def _widest_table(self, kind: Kind) -> int:
        narrowed = {name for group in self.groups for name in group} if kind == "columns" else None
        return max(table.shape[1] for table in self.tables if narrowed is None or table.name in narrowed)

    def _choice(self, kind: Kind, dtype: Dtype, fraction: float, lossless: bool = True) -> Choice:
        candidate = Candidate(dtype=dtype, columns=fraction)
        if self.groups and fraction < 1 and kind in ("columns", "rows"):
            candidate = replace(candidate, groups=self._worth(dtype, fraction))
        return self._priced(kind, replace(candidate, levels=self._untouched_levels(candidate) if lossless else {}))

    def _priced(self, kind: Kind, candidate: Candidate) -> Choice:
        served = candidate.served_bytes(self.tables)
        return Choice(kind=kind, candidate=candidate, served=served, fits=served.total <= self.budget)

    def _worth(self, dtype: Dtype, fraction: float) -> tuple[tuple[str, ...], ...]:
        """The groups, without tables that are turned back of which the basis takes more than they lose."""
        named = {table.name: table for table in self.tables}

        def bytes_of(name: str, columns: float) -> int:
            alone = Candidate(dtype=dtype, columns=columns, groups=((name,),))
            return alone.served_bytes([named[name]]).total

        found = [g for g in self.groups if len(g) > 1 or bytes_of(g[0], fraction) < bytes_of(g[0], 1.0)]
        return tuple(found) or self.groups

    def _untouched_levels(self, candidate: Candidate) -> dict[str, float]:
        """The levels that remove what training has never touched, where that saves more than the index takes."""
        found: dict[str, float] = {}
        for table in self.tables:
            if (rows := min(self.untouched.get(table.name, 0), table.shape[0] - 1)) > 0:
                less = replace(candidate, levels={table.name: rows / table.shape[0]})
                if less.served_bytes([table]).total < candidate.served_bytes([table]).total:
                    found |= less.levels
        return found
