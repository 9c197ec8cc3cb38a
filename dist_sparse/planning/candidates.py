"""A way to make the tables of a model smaller, and the bytes that it leaves: those that `export()` writes.

Nothing here reads weights: names, shapes and dtypes of the tables are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from dist_sparse import checks
from dist_sparse.serving.artifact import file_bytes
from dist_sparse.serving.codes import BITS
from dist_sparse.serving.manifest import Dtype, Table, TableBytes, size_of
from dist_sparse.tables.shards import ROW, Block, Rect, grid_of, resolve_block
from dist_sparse.tables.sizes import index_bytes, narrow_width
from dist_sparse.text import block_shape_text, percent

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
        masks: bitmasks of kept blocks within rows.
        bases: what turns the output of rotated tables back.
    """

    weights: int = 0
    scales: int = 0
    index: int = 0
    masks: int = 0
    bases: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.scales + self.index + self.masks + self.bases


class _Left(NamedTuple):
    """What a table keeps: rows, columns, and of its blocks of a shape, so many of them, so many."""

    rows: int
    columns: int
    block: Block
    blocks: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to make tables smaller: their dtype, columns and rows.

    It says nothing about weights, so that it fits any model with tables of these names. ``dataclasses.asdict()`` of it
    is JSON-able, and ``Candidate(**read)`` takes it back.

    Args:
        dtype: of all tables when they are served, as in :func:`~dist_sparse.export`.
        columns: fraction of its columns that each table of ``groups`` keeps, in (0, 1]. What is left is what
            ``sparsify(level=1 - columns, block="col", rotate=groups)`` and ``compact()`` leave: a multiple of 4.
        groups: tables that are rotated together, as in :func:`~dist_sparse.rotate`: the output of a table that is alone
            is turned back, and other tables keep all columns. With none every table has the fraction ``columns``, not
            by a rotation: a smaller dense table.
        levels: fraction of blocks removed, by the name of the table; others keep all.
        block: of ``levels``, as in :func:`~dist_sparse.sparsify`.

    Raises:
        ValueError: an argument is invalid.

    Example::

        >>> from dist_sparse.planning.candidates import Candidate, TableShape
        >>> tables = [TableShape("user", (1000, 64)), TableShape("item", (4000, 64))]
        >>> narrow = Candidate(dtype="int8", columns=0.25, groups=(("user", "item"),))
        >>> narrow.shape(tables[0]), narrow.served_bytes(tables)
        ((1000, 16), ServedBytes(weights=80000, scales=20000, index=0, masks=0, bases=0))
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
    block: tuple[int | str, int | str] = (1, ROW)

    def __post_init__(self) -> None:
        groups = tuple(tuple(group) for group in self.groups)
        names = [name for group in groups for name in group]
        if not all(groups) or len(set(names)) < len(names):
            raise ValueError(f"Invalid groups={self.groups!r}: must be groups of names, each name in one group only.")
        if checks.level("columns", self.columns) == 0:
            raise ValueError(f"Invalid columns={self.columns!r}: must be in (0, 1].")
        rows, columns = self.block
        resolved: dict[str, Any] = {
            "dtype": checks.choice("dtype", self.dtype, BITS),
            "groups": groups,
            "levels": {name: checks.level(f"levels[{name!r}]", level) for name, level in self.levels.items() if level},
            "block": (rows, columns),
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
        """Return the rows and columns that a table keeps; with blocks smaller than rows, all rows."""
        left = self._left(table)
        return left.rows, left.columns

    def level(self, table: SizedTable) -> float:
        """Return the fraction of its blocks that a table loses; below level 1 one of them stays."""
        left = self._left(table)
        return 1 - left.kept / max(left.blocks, 1)

    def served_bytes(self, tables: Iterable[SizedTable]) -> ServedBytes:
        """Return what tables take in the memory of a server, exactly.

        With ``block`` smaller than rows it is the most that they can take: rows that lose all of their blocks are not
        stored, which only a mask can tell.
        """
        each = [self._bytes(table) for table in tables]
        parts = ("weights", "scales", "index", "masks", "bases")
        return ServedBytes(**{part: sum(getattr(one, part) for one in each) for part in parts})

    def file_bytes(self, tables: Iterable[SizedTable]) -> int:
        """Return the size of the file that :func:`~dist_sparse.export` writes: its header counts, the counts of an
        index are not in it. As :meth:`served_bytes` it is exact, or with small blocks the most."""
        by_name = sorted(tables, key=lambda table: table.name)
        return file_bytes({table.name: self._stored(table) for table in by_name})

    def __str__(self) -> str:
        parts: list[str] = [self.dtype]
        if self.columns < 1:
            how = ", rotated" if self.groups else ", dense from the start"
            parts.append(f"{percent(self.columns)} of the columns{how}")
        what = {"row": "rows"}.get(block := block_shape_text(self.block), f"{block} blocks")
        parts += [f"{name} without {percent(level)} of its {what}" for name, level in self.levels.items()]
        return ", ".join(parts)

    def _left(self, table: SizedTable) -> _Left:
        """What a table keeps."""
        rows, columns = table.shape
        if not self.groups or table.name in self._alone:
            columns = narrow_width(columns - round((1 - self.columns) * columns), columns)
        block = resolve_block(table.name, self.block, (rows, columns))
        blocks = grid_of(Rect(0, 0, rows, columns), block).blocks
        level = self.levels.get(table.name, 0.0)
        most = blocks if level == 1 else max(blocks - 1, 0)
        kept = blocks - min(round(level * blocks), most)
        rows = min(rows, kept * block[0]) if block[1] >= columns else rows
        return _Left(rows, columns, block, blocks, kept)

    def _stored(self, table: SizedTable) -> Table:
        """The table as a manifest describes it."""
        rows, (kept, columns, block, _, kept_blocks) = table.shape[0], self._left(table)
        turned = self.columns < 1 and self._alone.get(table.name, False)

        def stored(values: int | None) -> Table:
            return Table(
                rows=rows,
                kept=kept,
                dim=columns,
                pooling="sum",
                dtype=self.dtype,
                block=block,
                turned=table.shape[1] if turned else None,
                values=values,
                bytes=TableBytes(before=0, after=0, index=0, mask=0, scales=0, dense_int4=0),
            )

        if block[1] >= columns or table.name not in self.levels:
            return stored(None)
        numbers = min(rows * columns, kept_blocks * math.prod(block))
        halves = self.dtype == "int4" and (block[1] % 2 or columns % 2)  # rows begin at bytes
        values = -(-numbers * BITS[self.dtype] // 8) + (-(-rows // 2) if halves else 0)
        return min(stored(None), stored(values), key=lambda each: sum(size_of(*one) for one in each.layout().values()))

    def _bytes(self, table: SizedTable) -> ServedBytes:
        stored = self._stored(table)
        sizes = {name: size_of(*each) for name, each in stored.layout().items()}
        return ServedBytes(
            weights=sizes.get("rows", 0) + sizes.get("values", 0),
            scales=sizes.get("scale_bias", 0),
            index=index_bytes(stored.rows) if "kept" in sizes else 0,
            masks=sizes.get("mask", 0),
            bases=sizes.get("rotation", 0),
        )
