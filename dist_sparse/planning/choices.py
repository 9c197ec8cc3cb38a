"""The candidates of each kind and dtype that keep the most within a budget, which to use, and which
to measure.

The rules come from measurements at equal bytes, against int8 and small dense tables: two-tower
models on three data sets, and a DLRM on a small one (docs/planning.md). Where the data sets
disagree there is no rule: several candidates are recommended, to be measured.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Final, Literal, TypeAlias

from dist_sparse.planning.candidates import (
    BY_COLUMN,
    CODED,
    DTYPES,
    Candidate,
    ServedBytes,
    TableShape,
    dense_bytes,
    kept_rows,
)

Kind: TypeAlias = Literal["full", "small", "columns", "rows"]

_FEW_BITS: Final = ("int8", "int4")

_STEPS: Final = 1 << 20
"""Levels are searched in steps of ``1 / _STEPS``."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate and its bytes.

    Args:
        kind: ``"full"`` keeps all columns; ``"small"`` is a table that was trained with fewer;
            ``"columns"`` removes rotated columns during training; ``"rows"`` removes rows that
            training has touched.
        served: bytes in a server.
        fits: whether ``served`` is within the budget.
    """

    kind: Kind
    candidate: Candidate
    served: ServedBytes
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Tables, and the ways in which they may be made smaller.

    Args:
        tables: all that are served.
        budget: bytes.
        groups: tables that may be rotated, as in :class:`Candidate`.
        prunable: names of tables that may lose rows that training has touched.
        untouched: number of rows that training has never touched, by table, where it is known.
    """

    tables: Sequence[TableShape]
    budget: int
    groups: tuple[tuple[str, ...], ...]
    untouched: Mapping[str, int]
    prunable: tuple[str, ...] = ()

    def all(self) -> list[Choice]:
        """Return the candidates: with all columns in each dtype, fitting or not, and the widest
        that fits of each kind and dtype."""
        whole = [self._priced("full", Candidate(dtype=dtype)) for dtype in DTYPES]
        found = [choice for choice in whole if self.is_as_named(choice)]
        found += self.without_untouched()
        # Columns are removed only where tables may be rotated.
        kinds: tuple[Kind, ...] = ("small", "columns") if self.groups else ("small",)
        for kind in kinds:
            for dtype in DTYPES:
                # Where all columns fit, nothing narrower is needed.
                if not self.choice("full", dtype, 1.0).fits:
                    found += self.widest(kind, dtype)
        return found

    def is_as_named(self, choice: Choice) -> bool:
        """Return whether some table has codes, where the candidate is named after them."""
        candidate = choice.candidate
        return candidate.dtype not in CODED or any(map(candidate.codes, self.tables))

    @property
    def only_dots(self) -> bool:
        """Whether only dot products read the tables that may be rotated: where a single table is
        turned back, no gain was measured."""
        return bool(self.groups) and all(len(group) > 1 for group in self.groups)

    def without_untouched(self) -> list[Choice]:
        """Return tables of all columns without untouched rows, in each dtype where removing these
        saves bytes."""
        found = [self.choice("full", dtype, 1.0) for dtype in DTYPES]
        return [choice for choice in found if choice.candidate.levels]

    def choice(self, kind: Kind, dtype: str, fraction: float) -> Choice:
        """Return tables with a fraction of their columns, without untouched rows."""
        candidate = Candidate(dtype=dtype, columns=fraction)
        if fraction < 1 and kind == "columns":
            # If no rotation saves bytes, the candidate shows that it does not fit.
            worth = tuple(group for group in self.groups if self._saves_bytes(candidate, group))
            candidate = replace(candidate, groups=worth or self.groups)
        return self._priced(kind, replace(candidate, levels=self._untouched_levels(candidate)))

    def widths(self, kind: Kind, dtype: str) -> tuple[list[float], int]:
        """Return the fractions of columns that a kind may keep, ascending, and how many of them
        fit."""
        fractions = column_fractions(self._tables_of(kind), CODED.get(dtype, 4))
        # Bytes grow with the width: all that fit come first.
        fitting = bisect_right(
            fractions, False, key=lambda fraction: not self.choice(kind, dtype, fraction).fits
        )
        return fractions, fitting

    def widest(self, kind: Kind, dtype: str) -> list[Choice]:
        """Return the widest tables that fit, with fewer than all columns; none if none fit."""
        fractions, fitting = self.widths(kind, dtype)
        found = [self.choice(kind, dtype, each) for each in fractions[:fitting][-1:]]
        return [choice for choice in found if self.is_as_named(choice)]

    def fewest_rows(self, candidate: Candidate) -> Choice:
        """Return a candidate with its ``prunable`` tables at the lowest common level at which all
        tables fit, or at the highest below 1 if none fits."""
        pruned = [table for table in self.tables if table.name in self.prunable]
        others = [table for table in self.tables if table.name not in self.prunable]
        # Priced once: the search below changes pruned tables alone.
        room = self.budget - candidate.served_bytes(others).total

        def fits(step: int) -> bool:
            taken = [candidate.table_bytes(table, step / _STEPS).total for table in pruned]
            return sum(taken) <= room

        # Bytes never grow with the level. The last step stays below level 1: a row is kept.
        lowest = bisect_left(range(_STEPS - 1), True, key=fits) / _STEPS
        levels = {}
        for table in pruned:
            rows = table.shape[0]
            # Rounded to whole rows.
            levels[table.name] = 1 - kept_rows(rows, lowest) / max(rows, 1)
        return self._priced("rows", replace(candidate, levels=levels))

    def _tables_of(self, kind: Kind) -> Sequence[TableShape]:
        """Return the tables that a kind may make narrower."""
        if kind != "columns":
            return self.tables
        names = {name for group in self.groups for name in group}
        return [table for table in self.tables if table.name in names]

    @cached_property
    def _by_name(self) -> dict[str, TableShape]:
        return {table.name: table for table in self.tables}

    def _saves_bytes(self, candidate: Candidate, group: tuple[str, ...]) -> bool:
        """Return whether narrow tables of a group, with their basis, take fewer bytes."""
        if len(group) > 1:
            # Tables that are rotated together are not turned back, and need no basis.
            return True
        table = self._by_name[group[0]]
        narrow = replace(candidate, groups=(group,)).table_bytes(table, 0.0)
        whole = replace(candidate, columns=1.0).table_bytes(table, 0.0)
        return narrow.total < whole.total

    def _priced(self, kind: Kind, candidate: Candidate) -> Choice:
        served = candidate.served_bytes(self.tables)
        fits = served.total <= self.budget
        return Choice(kind=kind, candidate=candidate, served=served, fits=fits)

    def _untouched_levels(self, candidate: Candidate) -> dict[str, float]:
        """Return the levels that remove untouched rows, where that saves more bytes than the index
        takes."""
        found: dict[str, float] = {}
        if candidate.dtype in CODED:
            # Books are fitted to all rows.
            return found
        for table in self.tables:
            # A table that no batch has read keeps one row.
            rows = min(self.untouched.get(table.name, 0), table.shape[0] - 1)
            if rows > 0:
                level = rows / table.shape[0]
                whole = candidate.table_bytes(table, 0.0)
                if candidate.table_bytes(table, level).total < whole.total:
                    found[table.name] = level
        return found


def column_fractions(tables: Sequence[TableShape], step: int = 4) -> list[float]:
    """Return the fractions of columns that leave a multiple of ``step`` of the widest table, but
    not all of it, ascending."""
    widest = max(table.shape[1] for table in tables)
    return [width / widest for width in range(step, widest, step)]


_COLUMNS_OR_SMALL: Final = (
    "Rotated columns that are removed during training, or smaller dense tables: which is better "
    "depends on the interactions per item, the passes over the data and the compute "
    "(docs/planning.md). Measure both, in int8 and int4."
)
_SMALL: Final = (
    "Train smaller dense tables: removing weights afterwards was no better, "
    "except rotated columns of tables that only dot products read. "
    'If yours are, name them, as in rotate=[["user", "item"]].'
)


_NO_GAIN_FROM: Final = 40
"""Columns of int4 rows that were as good as codes of the same bytes, on Gowalla."""

_HEADERS: Final = (
    "Of such short rows 4 bytes of scale and bias are a large part; int4 by column and codes have "
    "none. They gained on Gowalla, and on data that over-fits fewer columns win: measure them too."
)


def recommend(choices: Choices, found: Sequence[Choice]) -> tuple[tuple[Choice, ...], str]:
    """Return which candidates in ``found`` to use, and why in a few sentences. Several are to be
    measured; none means that the tables fit as they are, or that nothing fits."""
    if dense_bytes(choices.tables) <= choices.budget:
        return (), "The tables fit as they are."
    int8, int4 = (_fitting(found, "full", dtype)[:1] for dtype in _FEW_BITS)
    if int8:
        return int8, _why_int8(int8[0])
    kind: Kind = "columns" if choices.only_dots else "small"
    columns = _fitting(found, "columns", *_FEW_BITS) if choices.only_dots else ()
    small = _fitting(found, "small", *_FEW_BITS)
    if int4:
        # Narrower tables are in int8 alone: in int4 all columns fit.
        return int4 + (columns or small), _why_int4(int4[0], rotated=bool(columns))
    more = _without_headers(choices, found, kind)
    reasons = {_HEADERS: more, _COLUMNS_OR_SMALL if columns else _SMALL: columns + small}
    why = " ".join(text for text, some in reversed(reasons.items()) if some)
    nothing = "Nothing fits: even the narrowest tables take more."
    return columns + small + more, why or nothing


def _without_headers(choices: Choices, found: Sequence[Choice], kind: Kind) -> tuple[Choice, ...]:
    """Return the candidates by column and of codes that are worth a measurement beside int4 rows:
    none where these have at least 24 bytes, which were as good."""
    widest = max(choices.tables, key=lambda table: table.shape[1])
    for narrow in _fitting(found, kind, "int4"):
        if narrow.candidate.shape(widest)[1] >= _NO_GAIN_FROM:
            return ()
    by_column, *coded = (
        (_fitting(found, "full", dtype) + _fitting(found, kind, dtype))[:1]
        for dtype in (BY_COLUMN, *CODED)
    )
    # The finest codes that leave half of the columns.
    wide = [
        choice
        for choice in chain.from_iterable(coded)
        if 2 * choice.candidate.shape(widest)[1] >= widest.shape[1]
    ]
    return (*by_column, *wide[:1])


def _fitting(found: Sequence[Choice], kind: Kind, *dtypes: str) -> tuple[Choice, ...]:
    """Return the candidates of a kind that fit, in the order of ``dtypes``."""
    fitting = []
    for dtype in dtypes:
        for each in found:
            if each.fits and (each.kind, each.candidate.dtype) == (kind, dtype):
                fitting.append(each)
    return tuple(fitting)


def _why_int8(whole: Choice) -> str:
    why = "int8 changed AUC by less than 0.0001 wherever it was measured"
    if whole.candidate.levels:
        return (
            f"{why}, and fits without the rows that training has never touched. "
            "Remove no others: that can only lose."
        )
    return f"{why}. Remove no weights: that can only lose."


def _why_int4(whole: Choice, *, rotated: bool) -> str:
    other = "fewer, rotated columns" if rotated else "a smaller dense table"
    without = (
        ", without the rows that training has never touched," if whole.candidate.levels else ""
    )
    return (
        f"int4 of all columns{without} or {other} in int8: "
        "which is better depends on the data. Measure both."
    )


METHODS: Final = {
    "bits": "bits alone",
    "untouched": "touched rows",
    "small": "small dense",
    "rotated": "rotated columns",
    "rows": "rows",
    "mix": "rotated columns and rows",
    "column": "int4 by column",
    "codes": "codes",
}
"""Name of each method in tables, the simplest first."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Something to measure.

    Args:
        method: of :data:`METHODS`.
        candidate: the form in which the model is served.
        trained: fraction of the columns that another model is trained with; None is the model
            itself.
    """

    method: str
    candidate: Candidate
    trained: float | None = None


def attempts_of(
    choices: Choices, methods: Sequence[str], dtypes: Sequence[str], *, trains: bool = True
) -> list[Attempt]:
    """Return what to try within a budget. Where a dtype alone meets it, nothing else is removed.

    Args:
        choices: the tables and the budget. Of all ``prunable`` tables the same fraction of rows is
            removed; the untouched rows are removed by a method of their own alone.
        methods: of :data:`METHODS`.
        dtypes: dtypes of the stored weights, of methods that are not named after theirs.
        trains: whether models with fewer columns can be trained.
    """
    # The gain of the other methods would not be theirs, were the untouched rows removed too.
    all_rows = replace(choices, untouched={})
    found: list[Attempt] = []
    for dtype in (*dtypes, *_OWN_METHOD):
        found += _of_dtype(all_rows, dtype)
    if "fp16" not in dtypes:
        # It costs nothing to try.
        found += [each for each in _of_dtype(all_rows, "fp16") if each.method == "bits"]
    for choice in choices.without_untouched():
        if choice.fits and choice.candidate.dtype in dtypes:
            found.append(Attempt(method="untouched", candidate=choice.candidate))
    if not trains:
        found = [attempt for attempt in found if attempt.trained is None]
    return [attempt for attempt in found if attempt.method in methods]


_OWN_METHOD: Final = {BY_COLUMN: "column", **dict.fromkeys(CODED, "codes")}
"""The method of all attempts in a dtype, of any columns."""


def _of_dtype(choices: Choices, dtype: str) -> list[Attempt]:
    """Return the attempts in a dtype: with fewer columns or rows only where it is too large."""
    own = _OWN_METHOD.get(dtype)
    whole = choices.choice("full", dtype, 1.0)
    if whole.fits:
        # The model as it is has been measured.
        is_new = dtype != "fp32" and choices.is_as_named(whole)
        return [Attempt(method=own or "bits", candidate=whole.candidate)] if is_new else []
    found: list[Attempt] = []
    for choice in choices.widest("small", dtype):
        # Served whole: another model is trained that narrow.
        trained = choice.candidate.columns
        found.append(Attempt(method=own or "small", candidate=whole.candidate, trained=trained))
    for choice in choices.widest("columns", dtype) if choices.groups else []:
        found.append(Attempt(method=own or "rotated", candidate=choice.candidate))
    return found if own else found + _pruned(choices, dtype)


def _pruned(choices: Choices, dtype: str) -> list[Attempt]:
    """Return the attempts with fewer rows."""
    found: list[Attempt] = []
    pruned = [("rows", choices.choice("full", dtype, 1.0).candidate)]
    if choices.groups:
        # A little wider than fits, and the rest of the bytes out of rows.
        fractions, fitting = choices.widths("columns", dtype)
        for fraction in fractions[fitting : fitting + 2]:
            pruned.append(("mix", choices.choice("columns", dtype, fraction).candidate))
    for method, candidate in pruned:
        least = choices.fewest_rows(candidate)
        if least.fits:
            found.append(Attempt(method=method, candidate=least.candidate))
    return found
