"""A way to make the tables of a model smaller, and the bytes that it leaves: those that `export()`
writes.

Nothing here reads weights: names, shapes and dtypes of the tables are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from dist_sparse import checks
from dist_sparse.serving.artifact import file_bytes
from dist_sparse.serving.codes import BITS
from dist_sparse.serving.manifest import Dtype, Table, TableBytes, size_of
from dist_sparse.tables.sizes import index_bytes, narrow_width
from dist_sparse.text import percent

__all__ = ["Candidate", "ServedBytes", "SizedTable", "TableShape", "dense_bytes"]


class SizedTable(Protocol):
    """What is read of a table; :class:`~dist_sparse.tables.shards.ShardedData` is one."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class TableShape:
    """A table by its shape alone: ``(rows, columns)``, and the dtype that it is trained in."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype = torch.float32


def dense_bytes(tables: Iterable[SizedTable]) -> int:
    """Return the bytes of tables as they are trained."""
    return sum(math.prod(table.shape) * table.dtype.itemsize for table in tables)


@dataclass(frozen=True, kw_only=True)
class ServedBytes:
    """What tables take once they are served, by part.

    Args:
        weights: the kept weights, in the dtype that they are stored in.
        scales: scale and bias of each row, of 8 and 4 bits.
        index: what finds kept rows: a bit and a count for each 32, 0.25 byte for each original row.
        bases: what turns the output of rotated tables back.
    """

    weights: int = 0
    scales: int = 0
    index: int = 0
    bases: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.scales + self.index + self.bases


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to make tables smaller: their dtype, columns and rows.

    It says nothing about weights, so that it fits any model with tables of these names.
    ``dataclasses.asdict()`` of it is JSON-able, and ``Candidate(**read)`` takes it back.

    Args:
        dtype: of all tables when they are served, as in :func:`~dist_sparse.export`.
        columns: fraction of its columns that each table of ``groups`` keeps, in (0, 1]. What is
            left is what ``sparsify(level=1 - columns, block="col", rotate=groups)`` and
            ``compact()`` leave: a multiple of 4.
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
        ((1000, 16), ServedBytes(weights=80000, scales=20000, index=0, bases=0))
        >>> print(narrow)
        int8, 25.0% of the columns, rotated
        >>> rows = Candidate(dtype="int4", levels={"item": 0.75})
        >>> rows.shape(tables[1]), rows.served_bytes(tables).index
        ((1000, 64), 1000)
    """

    dtype: Dtype = "fp32"
    columns: float = 1.0
    groups: tuple[tuple[str, ...], ...] = ()
    levels: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        groups = tuple(tuple(group) for group in self.groups)
        names = [name for group in groups for name in group]
        if not all(groups) or len(set(names)) < len(names):
            raise ValueError(
                f"Invalid groups={self.groups!r}: must be groups of names, each name in one group"
                " only."
            )
        if checks.level("columns", self.columns) == 0:
            raise ValueError(f"Invalid columns={self.columns!r}: must be in (0, 1].")
        resolved: dict[str, Any] = {
            "dtype": checks.choice("dtype", self.dtype, BITS),
            "groups": groups,
            "levels": {
                name: checks.level(f"levels[{name!r}]", level)
                for name, level in self.levels.items()
                if level
            },
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    @property
    def narrowed(self) -> tuple[str, ...]:
        """The tables of ``groups``."""
        return tuple(self._alone)

    @cached_property
    def _alone(self) -> dict[str, bool]:
        """Whether each table of ``groups`` is alone in its group."""
        return {name: len(group) == 1 for group in self.groups for name in group}

    def shape(self, table: SizedTable) -> tuple[int, int]:
        """Return the rows and columns that a table keeps; below level 1 one row stays."""
        rows, columns = table.shape
        if not self.groups or table.name in self._alone:
            columns = narrow_width(columns - round((1 - self.columns) * columns), columns)
        level = self.levels.get(table.name, 0.0)
        most = rows if level == 1 else max(rows - 1, 0)
        return rows - min(round(level * rows), most), columns

    def level(self, table: SizedTable) -> float:
        """Return the fraction of its rows that a table loses; below level 1 one of them stays."""
        return 1 - self.shape(table)[0] / max(table.shape[0], 1)

    def served_bytes(self, tables: Iterable[SizedTable]) -> ServedBytes:
        """Return what tables take in the memory of a server, exactly."""
        each = [self._bytes(table) for table in tables]
        parts = ("weights", "scales", "index", "bases")
        return ServedBytes(**{part: sum(getattr(one, part) for one in each) for part in parts})

    def file_bytes(self, tables: Iterable[SizedTable]) -> int:
        """Return the size of the file that :func:`~dist_sparse.export` writes, exactly: its header
        counts, the counts of an index are not in it."""
        by_name = sorted(tables, key=lambda table: table.name)
        return file_bytes({table.name: self._stored(table) for table in by_name})

    def __str__(self) -> str:
        parts: list[str] = [self.dtype]
        if self.columns < 1:
            how = ", rotated" if self.groups else ", dense from the start"
            parts.append(f"{percent(self.columns)} of the columns{how}")
        parts += [
            f"{name} without {percent(level)} of its rows" for name, level in self.levels.items()
        ]
        return ", ".join(parts)

    def _stored(self, table: SizedTable) -> Table:
        """Describe the table as a manifest does."""
        kept, columns = self.shape(table)
        turned = self.columns < 1 and self._alone.get(table.name, False)
        return Table(
            rows=table.shape[0],
            kept=kept,
            dim=columns,
            pooling="sum",
            dtype=self.dtype,
            block=(1, columns),
            turned=table.shape[1] if turned else None,
            bytes=TableBytes(before=0, after=0, index=0, scales=0, dense_int4=0),
        )

    def _bytes(self, table: SizedTable) -> ServedBytes:
        stored = self._stored(table)
        sizes = {name: size_of(*each) for name, each in stored.layout().items()}
        return ServedBytes(
            weights=sizes["rows"],
            scales=sizes.get("scale_bias", 0),
            index=index_bytes(stored.rows) if "kept" in sizes else 0,
            bases=sizes.get("rotation", 0),
        )
