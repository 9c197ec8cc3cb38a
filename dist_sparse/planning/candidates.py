"""A way to make the tables of a model smaller, and its bytes in a server and in a file.

Nothing here reads weights: names, shapes and dtypes of the tables are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Final

import torch

from dist_sparse import checks
from dist_sparse.codes.books import ENTRIES
from dist_sparse.codes.quantize import LEAST_ROWS
from dist_sparse.serving.codes import BITS
from dist_sparse.tables.shards import ShardedData, basis_bytes, index_bytes, narrow_width
from dist_sparse.text import percent

BY_COLUMN: Final = "int4 by column"
"""4 bits on a grid for each column: ``export(dtype="int4", scale="column")``."""

CODED: Final = {"codes of 4": 4, "codes of 8": 8}
"""Columns of a code, by the name of these rows. Tables that can't have codes are in int4."""

DTYPES: Final = (*BITS, BY_COLUMN, *CODED)
"""How rows are stored: as of :func:`~dist_sparse.export`, or as above."""

_BITS: Final = {str(name): bits for name, bits in BITS.items()} | {BY_COLUMN: 4}

_PER_ROW: Final = {"int8": 4, "int4": 4}
"""Bytes of a row's scale and bias, two numbers of 16 bits."""


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

    def __add__(self, other: ServedBytes) -> ServedBytes:
        parts = [part.name for part in fields(self)]
        return ServedBytes(**{name: getattr(self, name) + getattr(other, name) for name in parts})


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

    @property
    def narrowed(self) -> tuple[str, ...]:
        """The tables of ``groups``."""
        return tuple(self._alone)

    @cached_property
    def _alone(self) -> dict[str, bool]:
        """Whether each table of ``groups`` is alone in its group."""
        # Looked up for each table of each candidate that a search prices.
        return {name: len(group) == 1 for group in self.groups for name in group}

    def shape(self, table: TableShape) -> tuple[int, int]:
        """Return the rows and columns that a table keeps; below level 1 one row stays."""
        return kept_rows(table.shape[0], self.levels.get(table.name, 0.0)), self._width(table)

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
        if self.dtype not in CODED:
            return self.dtype
        return "codes" if self.codes(table) else "int4"

    def served_bytes(self, tables: Iterable[TableShape]) -> ServedBytes:
        """Return the bytes of tables in the memory of a server, exactly."""
        total = ServedBytes()
        for table in tables:
            total += self.table_bytes(table, self.levels.get(table.name, 0.0))
        return total

    def table_bytes(self, table: TableShape, level: float) -> ServedBytes:
        """Return the served bytes of a table that loses the fraction ``level`` of its rows."""
        rows, width, dtype = table.shape[0], self._width(table), self.dtype_of(table)
        kept, codes = kept_rows(rows, level), self.codes(table)
        return ServedBytes(
            # Two codes of 4 bits share a byte, within a row.
            weights=kept * (codes or -(-width * _BITS[dtype] // 8)),
            # Numbers of 16 bits, as are the entries of books.
            scales=2 * width if dtype == BY_COLUMN else kept * _PER_ROW.get(dtype, 0),
            books=2 * ENTRIES * width if codes else 0,
            index=index_bytes(rows) if kept < rows else 0,
            bases=basis_bytes(table.shape[1], width) if self._turned_back(table) else 0,
        )

    def _width(self, table: TableShape) -> int:
        columns = table.shape[1]
        if self.groups and table.name not in self._alone:
            # Other tables of a candidate with groups keep all columns.
            return columns
        # As sparsify() rounds a level to whole blocks.
        return narrow_width(columns - round((1 - self.columns) * columns), columns)

    def _turned_back(self, table: TableShape) -> bool:
        # The outputs of tables that are rotated together meet in dot products only.
        return self.columns < 1 and self._alone.get(table.name, False)

    def __str__(self) -> str:
        parts = [self.dtype]
        if self.columns < 1:
            how = ", rotated" if self.groups else ", dense from the start"
            parts.append(f"{percent(self.columns)} of the columns{how}")
        parts += [
            f"{name} without {percent(level)} of its rows" for name, level in self.levels.items()
        ]
        return ", ".join(parts)


def kept_rows(rows: int, level: float) -> int:
    """Return how many of ``rows`` rows stay without a fraction of them; below level 1 one does."""
    most = rows if level == 1 else max(rows - 1, 0)
    return rows - min(round(level * rows), most)
