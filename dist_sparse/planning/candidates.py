"""Candidates: smaller forms of a model's tables, their bytes in a server, and the search for the
ones that keep the most within a budget.

Nothing here reads weights: names, shapes and dtypes of the tables are enough.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product

import torch

from dist_sparse import checks
from dist_sparse.serving.books import ENTRIES, LEAST_ROWS
from dist_sparse.serving.encodings import UNCODED
from dist_sparse.tables.shards import ShardedData, basis_bytes, index_bytes, narrow_width
from dist_sparse.text import percent

# 4 bits and a scale for each column: `export(dtype="int4", scale="column")`.
BY_COLUMN = "int4 by column"

# Dtypes of codes, and the columns that a code stands for. Tables that can't have codes are in int4.
CODED = {"codes of 2": 2, "codes of 4": 4, "codes of 8": 8}
_WITHOUT_CODES = dict.fromkeys(CODED, "int4")

# Names of tables that are rotated together, by group.
Groups = tuple[tuple[str, ...], ...]

# Dtypes of a candidate: the dtypes of `dist_sparse.export`, and the ones above.
DTYPES = (*UNCODED, BY_COLUMN, *CODED)


@dataclass(frozen=True)
class _Cost:
    """Bits of an element of a dtype, and further bytes for each row and each column."""

    bits: int
    row: int = 0
    column: int = 0


# Scale and bias of a row, the scale of a column and entries of a book are numbers of 16 bits.
_COSTS = {
    "fp32": _Cost(32),
    "fp16": _Cost(16),
    "int8": _Cost(8, row=4),
    "int4": _Cost(4, row=4),
    BY_COLUMN: _Cost(4, column=2),
    # The bytes of codes do not depend on the columns: table_bytes() adds them.
    "codes": _Cost(0),
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


@dataclass(frozen=True, kw_only=True)
class ServedBytes:
    """Bytes of served tables, by part.

    Args:
        weights: the kept weights, in the dtype that they are stored in.
        scales: scale and bias of each row, for 8 and 4 bits, or the scale of each column.
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
        """Sum of the parts."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to make tables smaller: their dtype, columns and rows.

    It has no weights, so that it fits any model with tables of these names.
    ``dataclasses.asdict()`` of it is JSON-able, and ``Candidate(**read)`` takes it back.

    Args:
        dtype: the dtype of all served tables, one of :data:`DTYPES`.
        columns: fraction of its columns that each table of ``groups`` keeps, in (0, 1], rounded
            as by ``sparsify(level=1 - columns, block="col")`` with ``Rotation(groups)``, and by
            ``compact()``: to a multiple of 4.
        groups: tables that are rotated together (``dist_sparse.extras.rotation``). If a table is
            alone in its group, its output is rotated back; tables in no group keep all columns.
            Without groups, every table has the fraction ``columns`` without a rotation: it is a
            smaller dense table.
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
    groups: Groups = ()
    levels: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # A table without columns has no output.
        if checks.level("columns", self.columns) == 0:
            raise ValueError(f"Invalid columns={self.columns!r}: must be in (0, 1].")
        # Tables that lose nothing are left out, so that equal candidates compare as equal.
        levels = {
            name: checks.level(f"levels[{name!r}]", level)
            for name, level in self.levels.items()
            if level
        }
        # The usual way to set fields of a frozen dataclass.
        object.__setattr__(self, "dtype", checks.choice("dtype", self.dtype, DTYPES))
        object.__setattr__(self, "groups", tuple(map(tuple, self.groups)))
        object.__setattr__(self, "levels", levels)

    @cached_property
    def alone(self) -> dict[str, bool]:
        """Whether each table of ``groups`` is alone in its group."""
        # Cached: a search asks it for each table of thousands of candidates.
        return {name: len(group) == 1 for group in self.groups for name in group}

    def shape(self, table: TableShape) -> tuple[int, int]:
        """Return the rows and columns that a table keeps; below level 1 one row stays."""
        rows = table.shape[0]
        level = self.levels.get(table.name, 0.0)
        most = rows if level == 1 else max(rows - 1, 0)
        return rows - min(round(level * rows), most), self._width(table)

    def level(self, table: TableShape) -> float:
        """Return the fraction of its rows that a table loses, in whole rows."""
        return 1 - self.shape(table)[0] / max(table.shape[0], 1)

    def codes(self, table: TableShape) -> int:
        """Return the number of codes in a row of a table; 0 if it has none."""
        size = CODED.get(self.dtype)
        width = self._width(table)
        # Small tables, and rows that codes do not divide, have none.
        if size is None or table.shape[0] < LEAST_ROWS or width % size:
            return 0
        return width // size

    def dtype_of(self, table: TableShape) -> str:
        """Return the dtype of a table: ``"codes"``, or one of :data:`DTYPES` without codes."""
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
        cost = _COSTS[self.dtype_of(table)]
        codes = self.codes(table)
        # Tables that are rotated together need no basis: dot products of outputs stay the same.
        turned_back = self.columns < 1 and self.alone.get(table.name, False)
        return ServedBytes(
            # A code is a byte. Two elements of 4 bits share a byte within a row.
            weights=kept * (codes + math.ceil(width * cost.bits / 8)),
            scales=kept * cost.row + width * cost.column,
            books=2 * ENTRIES * width if codes else 0,
            index=index_bytes(table.shape[0], kept),
            bases=basis_bytes(table.shape[1], width) if turned_back else 0,
        )

    def _width(self, table: TableShape) -> int:
        columns = table.shape[1]
        # With groups, only the tables in them lose columns.
        if self.groups and table.name not in self.alone:
            return columns
        # As sparsify() rounds a level to whole blocks.
        removed = round((1 - self.columns) * columns)
        return narrow_width(columns - removed, columns)

    def __str__(self) -> str:
        parts = [self.dtype]
        if self.columns < 1:
            form = "rotated" if self.groups else "dense from the start"
            parts.append(f"{percent(self.columns)} of the columns, {form}")
        for name, level in self.levels.items():
            parts.append(f"{name} without {percent(level)} of its rows")
        return ", ".join(parts)


# ------------------------------------------------------------------------------
# The candidates of each kind and dtype that keep the most within a budget.


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate and its bytes.

    Args:
        kind: ``"full"`` keeps all columns; ``"small"`` is a table that was trained with fewer;
            ``"columns"`` removes rotated columns during training; ``"rows"`` removes rows that
            training has read, which ``frontier()`` alone tries.
        served: bytes in a server.
        fits: whether ``served`` is within the budget.
    """

    kind: str
    candidate: Candidate
    served: ServedBytes
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The search: tables, a budget, and the ways in which the tables may be made smaller.

    Args:
        tables: all that are served.
        budget: bytes.
        groups: tables that may be rotated, as in :class:`Candidate`.
        untouched: number of rows that training has never touched, by table, where it is known.
    """

    tables: Sequence[TableShape]
    budget: int
    groups: Groups
    untouched: Mapping[str, int]

    def all(self) -> list[Choice]:
        """Return the candidates: with all columns in each dtype, fitting or not, and for each kind
        and dtype the widest that fits."""
        # First with the untouched rows, then without them where that saves bytes.
        choices = [self.priced("full", Candidate(dtype=dtype)) for dtype in DTYPES]
        full = [self.choice("full", dtype, 1.0) for dtype in DTYPES]
        choices += [choice for choice in full if choice.candidate.levels]
        for kind, whole in product(("small", "columns"), full):
            dtype = whole.candidate.dtype
            fractions, fitting = self.widths(kind, dtype)
            # If all columns fit, nothing narrower is needed.
            if fitting and not whole.fits:
                choices.append(self.choice(kind, dtype, fractions[fitting - 1]))
        return list(filter(self._has_its_dtype, choices))

    def choice(self, kind: str, dtype: str, fraction: float) -> Choice:
        """Return tables with a fraction of their columns, without untouched rows."""
        candidate = Candidate(dtype=dtype, columns=fraction)
        if kind == "columns":
            narrow = replace(candidate, groups=self.groups)
            lighter = _saving(self.tables, narrow, replace(candidate, columns=1.0))
            # The basis that rotates a lone table back may take more bytes than its columns did.
            worth = tuple(group for group in self.groups if group[0] in lighter)
            # If no rotation saves bytes, keep all groups: the candidate is shown as too large.
            candidate = replace(narrow, groups=worth or self.groups)
        return self.priced(kind, replace(candidate, levels=self._untouched_levels(candidate)))

    def widths(self, kind: str, dtype: str) -> tuple[list[float], int]:
        """Return the fractions of columns below 1 that a kind may keep, ascending, and how many of
        them fit. The kind ``"columns"`` narrows only tables that may be rotated."""
        columns = {table.name: table.shape[1] for table in self.tables}
        names = columns if kind == "small" else chain(*self.groups)
        widest = max(map(columns.__getitem__, names), default=0)
        step = CODED.get(dtype, 4)
        fractions = [width / widest for width in range(step, widest, step)]
        # Bytes grow with the width: the ones that fit come first, and a binary search counts them.
        fitting = bisect_right(
            fractions, False, key=lambda fraction: not self.choice(kind, dtype, fraction).fits
        )
        return fractions, fitting

    def priced(self, kind: str, candidate: Candidate) -> Choice:
        """Return a candidate of a kind with its bytes."""
        served = candidate.served_bytes(self.tables)
        fits = served.total <= self.budget
        return Choice(kind=kind, candidate=candidate, served=served, fits=fits)

    def _has_its_dtype(self, choice: Choice) -> bool:
        """Return False for codes that no table can have: all would be int4."""
        candidate = choice.candidate
        return candidate.dtype not in CODED or any(map(candidate.codes, self.tables))

    def _untouched_levels(self, candidate: Candidate) -> dict[str, float]:
        """Return the levels that remove untouched rows, for tables where that saves more bytes than
        the index takes."""
        if candidate.dtype in CODED:
            # Books are fitted to all rows.
            return {}
        levels = {}
        for table in self.tables:
            # A table keeps one row, even if no batch has read any.
            most = max(table.shape[0] - 1, 0)
            removed = min(self.untouched.get(table.name, 0), most)
            levels[table.name] = removed / (most + 1)
        lighter = _saving(self.tables, replace(candidate, levels=levels), candidate)
        return {name: levels[name] for name in lighter}


def _saving(tables: Iterable[TableShape], new: Candidate, old: Candidate) -> list[str]:
    """Return the names of the tables that take fewer bytes in ``new`` than in ``old``."""
    return [
        table.name
        for table in tables
        if new.table_bytes(table).total < old.table_bytes(table).total
    ]
