"""A way to make the tables of a model smaller, its bytes in a server, and the search for those
that keep the most within a budget.

Nothing here reads weights: names, shapes and dtypes of the tables are enough.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product

import torch

from dist_sparse import checks
from dist_sparse.codes.books import ENTRIES
from dist_sparse.codes.quantize import LEAST_ROWS
from dist_sparse.serving.encodings import BITS
from dist_sparse.tables.shards import ShardedData, basis_bytes, index_bytes, narrow_width
from dist_sparse.text import percent

# 4 bits on a grid for each column: `export(dtype="int4", scale="column")`.
BY_COLUMN = "int4 by column"

# Columns of a code, by the name of these rows. Tables that can't have codes are in int4.
CODED = {"codes of 4": 4, "codes of 8": 8}

_WITHOUT_CODES = dict.fromkeys(CODED, "int4")

# How rows are stored: as of `dist_sparse.export`, or as above.
DTYPES = (*BITS, BY_COLUMN, *CODED)


@dataclass(frozen=True)
class _Form:
    """Bytes that a dtype takes: ``bits`` of an element, and more for each row and each column."""

    bits: int
    row: int = 0
    column: int = 0


# Scale and bias of a row, the scale of a column and entries of a book are numbers of 16 bits.
_FORMS = {str(name): _Form(bits) for name, bits in BITS.items()} | {
    "int8": _Form(8, row=4),
    "int4": _Form(4, row=4),
    BY_COLUMN: _Form(4, column=2),
    # A code takes a byte, whatever the number of its columns.
    "codes": _Form(0),
}


@dataclass(frozen=True)
class TableShape:
    """A table by its shape alone: ``(rows, columns)``, and the dtype that it is trained in."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype = torch.float32


def shape_of(table: ShardedData) -> TableShape:
    """Return the shape of one of a model's tables."""
    return TableShape(table.name, table.shape, table.dtype)


def dense_bytes(tables: Iterable[TableShape]) -> int:
    """Return the bytes of tables as they are trained."""
    return sum(math.prod(table.shape) * table.dtype.itemsize for table in tables)


@dataclass(frozen=True, kw_only=True)
class ServedBytes:
    """Bytes of served tables, by part.

    Args:
        weights: the kept weights, in the dtype that they are stored in.
        scales: scale and bias of each row, of 8 and 4 bits, or the scale of each column.
        books: entries that codes stand for.
        index: index of kept rows: a bit and a count for each 32, 0.25 byte for each original row.
        bases: matrices that turn the outputs of rotated tables back.
    """

    weights: int = 0
    scales: int = 0
    books: int = 0
    index: int = 0
    bases: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to make tables smaller: their dtype, columns and rows.

    It has no weights, so that it fits any model with tables of these names.
    ``dataclasses.asdict()`` of it is JSON-able, and ``Candidate(**read)`` takes it back.

    Args:
        dtype: of all tables when they are served, of :data:`DTYPES`.
        columns: fraction of its columns that each table of ``groups`` keeps, in (0, 1], rounded
            as by ``sparsify(level=1 - columns, block="col", rotate=groups)`` and ``compact()``: to
            a multiple of 4.
        groups: tables that are rotated together, as in :func:`~dist_sparse.rotate`: the output of a
            table that is alone is turned back, and other tables keep all columns. With none every
            table has the fraction ``columns``, not by a rotation: a smaller dense table.
        levels: fraction of rows removed, by the name of the table; others keep all.

    Raises:
        ValueError: an argument is invalid.

    Example::

        >>> from dist_sparse.planning.candidates import Candidate, TableShape
        >>> tables = [TableShape("user", (1000, 64)), TableShape("item", (4000, 64))]
        >>> narrow = Candidate(dtype="int8", columns=0.25, groups=(("user", "item"),))
        >>> narrow.shape(tables[0]), narrow.served_bytes(tables)
        ((1000, 16), ServedBytes(weights=80000, scales=20000, books=0, index=0, bases=0))
        >>> print(narrow)
        int8, 25.0% of the columns, rotated
        >>> rows = Candidate(dtype="int4", levels={"item": 0.75})
        >>> rows.shape(tables[1]), rows.served_bytes(tables).index
        ((1000, 64), 1000)
    """

    dtype: str = "fp32"
    columns: float = 1.0
    groups: tuple[tuple[str, ...], ...] = ()
    levels: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # A table of no columns has no output.
        if checks.level("columns", self.columns) == 0:
            raise ValueError(f"Invalid columns={self.columns!r}: must be in (0, 1].")
        # Tables that lose nothing are left out, so that equal candidates are equal.
        levels = {
            name: checks.level(f"levels[{name!r}]", level)
            for name, level in self.levels.items()
            if level
        }
        # The dataclass is frozen.
        object.__setattr__(self, "dtype", checks.choice("dtype", self.dtype, DTYPES))
        object.__setattr__(self, "groups", tuple(map(tuple, self.groups)))
        object.__setattr__(self, "levels", levels)

    @cached_property
    def alone(self) -> dict[str, bool]:
        """Whether each table of ``groups`` is alone in its group."""
        # Looked up for each table of each candidate that a search prices.
        return {name: len(group) == 1 for group in self.groups for name in group}

    def shape(self, table: TableShape) -> tuple[int, int]:
        """Return the rows and columns that a table keeps; below level 1 one row stays."""
        rows, level = table.shape[0], self.levels.get(table.name, 0.0)
        most = rows if level == 1 else max(rows - 1, 0)
        return rows - min(round(level * rows), most), self._width(table)

    def level(self, table: TableShape) -> float:
        """Return the fraction of its rows that a table loses; below level 1 one of them stays."""
        return 1 - self.shape(table)[0] / max(table.shape[0], 1)

    def codes(self, table: TableShape) -> int:
        """Return the codes of a row of a table; 0 of a table without codes."""
        size, width = CODED.get(self.dtype), self._width(table)
        if size is None or table.shape[0] < LEAST_ROWS or width % size:
            return 0
        return width // size

    def dtype_of(self, table: TableShape) -> str:
        """Return the dtype of a table: ``"codes"``, or as of :data:`DTYPES`."""
        return "codes" if self.codes(table) else _WITHOUT_CODES.get(self.dtype, self.dtype)

    def served_bytes(self, tables: Iterable[TableShape]) -> ServedBytes:
        """Return the bytes of tables in the memory of a server, exactly."""
        total: Counter[str] = Counter()
        for table in tables:
            total.update(vars(self.table_bytes(table)))
        return ServedBytes(**total)

    def table_bytes(self, table: TableShape) -> ServedBytes:
        """Return the served bytes of one table."""
        kept, width = self.shape(table)
        form, codes = _FORMS[self.dtype_of(table)], self.codes(table)
        # The outputs of tables that are rotated together meet in dot products only.
        turned_back = self.columns < 1 and self.alone.get(table.name, False)
        return ServedBytes(
            # Two codes of 4 bits share a byte, within a row.
            weights=kept * (codes + math.ceil(width * form.bits / 8)),
            scales=kept * form.row + width * form.column,
            books=2 * ENTRIES * width if codes else 0,
            index=index_bytes(table.shape[0]) if kept < table.shape[0] else 0,
            bases=basis_bytes(table.shape[1], width) if turned_back else 0,
        )

    def _width(self, table: TableShape) -> int:
        columns = table.shape[1]
        # Other tables of a candidate with groups keep all columns.
        narrow = not self.groups or table.name in self.alone
        # As sparsify() rounds a level to whole blocks.
        removed = round((1 - self.columns) * columns) if narrow else 0
        return narrow_width(columns - removed, columns)

    def __str__(self) -> str:
        parts = [self.dtype]
        if self.columns < 1:
            how = ", rotated" if self.groups else ", dense from the start"
            parts.append(f"{percent(self.columns)} of the columns{how}")
        parts += [
            f"{name} without {percent(level)} of its rows" for name, level in self.levels.items()
        ]
        return ", ".join(parts)


# ------------------------------------------------------------------------------
# The candidates of each kind and dtype that keep the most within a budget.

# Levels are searched in steps of `1 / _STEPS`.
_STEPS = 1 << 20


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

    kind: str
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
        full = [self.choice("full", dtype, 1.0) for dtype in DTYPES]
        found = [self._priced("full", Candidate(dtype=dtype)) for dtype in DTYPES]
        found += [choice for choice in full if choice.candidate.levels]
        for kind, whole in product(("small", "columns"), full):
            dtype = whole.candidate.dtype
            fractions, fitting = self.widths(kind, dtype)
            # Where all columns fit, nothing narrower is needed.
            if fitting and not whole.fits:
                found.append(self.choice(kind, dtype, fractions[fitting - 1]))
        return [*filter(self._is_as_named, found)]

    def choice(self, kind: str, dtype: str, fraction: float) -> Choice:
        """Return tables with a fraction of their columns, without untouched rows."""
        candidate = Candidate(dtype=dtype, columns=fraction)
        if kind == "columns":
            narrow = replace(candidate, groups=self.groups)
            light = _saving(self.tables, narrow, replace(candidate, columns=1.0))
            # Alone, a table is turned back, and its basis may take more than the table loses.
            worth = tuple(group for group in self.groups if group[0] in light)
            # If no rotation saves bytes, the candidate shows that it does not fit.
            candidate = replace(narrow, groups=worth or self.groups)
        return self._priced(kind, replace(candidate, levels=self._untouched_levels(candidate)))

    def widths(self, kind: str, dtype: str) -> tuple[list[float], int]:
        """Return the fractions of columns that a kind may keep, but not all of them, ascending, and
        how many of them fit. Columns are removed only of tables that may be rotated."""
        columns = {table.name: table.shape[1] for table in self.tables}
        names = columns if kind == "small" else chain(*self.groups)
        widest = max(map(columns.__getitem__, names), default=0)
        step = CODED.get(dtype, 4)
        fractions = [width / widest for width in range(step, widest, step)]
        # Bytes grow with the width: all that fit come first.
        fitting = bisect_right(
            fractions, False, key=lambda fraction: not self.choice(kind, dtype, fraction).fits
        )
        return fractions, fitting

    def fewest_rows(self, candidate: Candidate) -> Choice:
        """Return a candidate with its ``prunable`` tables at the lowest common level at which all
        tables fit, or at the highest below 1 if none fits."""
        pruned = [table for table in self.tables if table.name in self.prunable]
        # Priced once: the search below changes pruned tables alone.
        others = candidate.served_bytes(self.tables).total - candidate.served_bytes(pruned).total
        room = self.budget - others

        def at(step: int) -> Candidate:
            return replace(candidate, levels=dict.fromkeys(self.prunable, step / _STEPS))

        # Bytes never grow with the level. The last step stays below level 1: a row is kept.
        lowest = bisect_left(
            range(_STEPS - 1), True, key=lambda step: at(step).served_bytes(pruned).total <= room
        )
        # Rounded to whole rows.
        levels = {table.name: at(lowest).level(table) for table in pruned}
        return self._priced("rows", replace(candidate, levels=levels))

    def _is_as_named(self, choice: Choice) -> bool:
        """Return whether some table has codes, where the candidate is named after them."""
        candidate = choice.candidate
        return candidate.dtype not in CODED or any(map(candidate.codes, self.tables))

    def _priced(self, kind: str, candidate: Candidate) -> Choice:
        served = candidate.served_bytes(self.tables)
        fits = served.total <= self.budget
        return Choice(kind=kind, candidate=candidate, served=served, fits=fits)

    def _untouched_levels(self, candidate: Candidate) -> dict[str, float]:
        """Return the levels that remove untouched rows, where that saves more bytes than the index
        takes."""
        if candidate.dtype in CODED:
            # Books are fitted to all rows.
            return {}
        levels = {}
        for table in self.tables:
            # A table that no batch has read keeps one row.
            most = max(table.shape[0] - 1, 0)
            removed = min(self.untouched.get(table.name, 0), most)
            levels[table.name] = removed / (most + 1)
        light = _saving(self.tables, replace(candidate, levels=levels), candidate)
        return {name: levels[name] for name in light}


def _saving(tables: Iterable[TableShape], new: Candidate, old: Candidate) -> list[str]:
    """Return the names of the tables that take fewer bytes in ``new`` than in ``old``."""
    return [
        table.name
        for table in tables
        if new.table_bytes(table).total < old.table_bytes(table).total
    ]
