"""Bytes to levels: how much of each table is removed so that all tables together take no more than
a budget.

A budget counts what is served in the dtype of training, as
:class:`~dist_sparse.planning.candidates.Candidate` does: the kept weights, what finds them, what
turns rotated tables back, and the tables that stay dense.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dist_sparse.rotation.rotate import Rotate, rotation_groups
from dist_sparse.tables.shards import (
    Block,
    Rect,
    ShardedData,
    basis_bytes,
    grid_of,
    index_bytes,
    narrow_width,
    resolve_block,
)

Budget = int | float
"""Bytes, or, as a float, a fraction of the tables' bytes."""


def parse_budget(budget: object) -> Budget:
    """Return ``budget``, a number of bytes or text such as ``"20%"``, as bytes or as a fraction.

    Raises:
        ValueError: it is neither.

    Example::

        >>> from dist_sparse.training.budget import parse_budget
        >>> parse_budget("20%"), parse_budget(1 << 20)
        (0.2, 1048576)
    """
    # An int is bytes, so that a fraction must be text: 1 could be either.
    if type(budget) is int and budget >= 0:
        return budget
    percent = re.fullmatch(r"(\d+(?:\.\d*)?)%", str(budget), re.ASCII)
    if percent is None or float(percent[1]) > 100:
        raise ValueError(
            f"Invalid {budget=}: must be bytes (an int >= 0), or text such as '20%', up to 100%."
        )
    return float(percent[1]) / 100


def budget_levels(
    budget: Budget,
    located: Sequence[ShardedData],
    left_dense: Collection[str],
    block: tuple[int | str, int | str],
    floors: Mapping[str, float],
    together: bool,
    rotate: Rotate | None = None,
) -> dict[str, float]:
    """Return the lowest common level of the tables that are pruned, by name, each a whole number of
    blocks.

    Args:
        located: all tables that the budget is for.
        left_dense: names of tables that are not pruned.
        block: as in a configuration.
        floors: by name the least fraction that a table keeps.
        together: blocks are removed wherever scores are smallest, so that a table's level need not
            keep its floor.
        rotate: as in :func:`~dist_sparse.rotate`: columns of rotated tables are removed for good.

    Raises:
        ValueError: the budget is less than can be reached, or holds all tables as they are; blocks
            do not divide a table, or are finer than rows of a table that is not rotated, which
            saves no bytes; or tables of one group of ``rotate``, which are as wide as the widest,
            have different floors.
    """
    groups = [] if rotate is None else rotation_groups(rotate, [data.name for data in located])
    # Size of the group that each rotated table is in.
    sizes = {name: len(group) for group in groups for name in group}
    pruned, dense = [], 0
    for data in located:
        if data.name in left_dense:
            dense += _dense_bytes(data)
            continue
        shape, floor = resolve_block(data.name, block, data.shape), floors.get(data.name, 0.0)
        table = _PrunedTable(data, shape, floor, sizes.get(data.name, 0))
        table.refuse_unusable_blocks()
        pruned.append(table)
    _refuse_unequal_floors(pruned, groups)
    total = sum(map(_dense_bytes, located))
    room = round(budget * total) if isinstance(budget, float) else budget
    if room >= total:
        raise ValueError(
            f"Invalid budget of {room} bytes: all tables take {total}, so that nothing would be"
            " removed."
        )
    least = dense + sum(t.served_bytes(t.most_removed) for t in pruned)
    if room < least:
        raise ValueError(
            f"Invalid budget of {room} bytes: {least} are the least. Tables that are left dense"
            f" take {dense} of them, and of each other table its floor or one block stays."
        )

    def fits(step: int) -> bool:
        return dense + sum(t.served_bytes(t.removed_at(step, together)) for t in pruned) <= room

    # Bytes never grow with the level, so the first level that fits is the lowest.
    lowest = bisect_left(range(_STEPS), True, key=fits)
    return {t.data.name: t.removed_at(lowest, together) / max(t.blocks, 1) for t in pruned}


def blocks_of(data: ShardedData, block: tuple[int | str, int | str]) -> int:
    """Return the number of blocks of a table."""
    shape = resolve_block(data.name, block, data.shape)
    return grid_of(Rect(0, 0, *data.shape), shape).blocks


_STEPS = 2**53
"""Levels that are tried are multiples of one part in so many: float64 holds them exactly."""


@dataclass(frozen=True)
class _PrunedTable:
    """A table that loses blocks.

    Args:
        floor: least fraction of blocks that it keeps.
        group: number of tables that are rotated together with it, itself counted; 0 if it is not
            rotated.
    """

    data: ShardedData
    block: Block
    floor: float
    group: int

    @cached_property
    def blocks(self) -> int:
        return blocks_of(self.data, self.block)

    @property
    def most_removed(self) -> int:
        """The most blocks that it may lose: its floor stays, and one block of any table."""
        # Products such as 0.1 * 30 lie a little above an integer.
        floor = math.ceil(self.floor * self.blocks - 1e-9)
        return self.blocks - max(floor, min(self.blocks, 1))

    def removed_at(self, step: int, together: bool) -> int:
        """Blocks removed at the level ``step / _STEPS``."""
        removed = math.ceil(step / _STEPS * self.blocks)
        # Over all tables together, the sparsifier itself moves what a floor keeps to other tables.
        return removed if together else min(removed, self.most_removed)

    def served_bytes(self, removed: int) -> int:
        """Bytes of the table without so many blocks."""
        (rows, columns), itemsize = self.data.shape, self.data.dtype.itemsize
        kept = self.blocks - removed
        # Whole rows: the kept ones are stored one after another, and found through the index.
        if not self.group:
            return kept * math.prod(self.block) * itemsize + index_bytes(rows)
        width = narrow_width(kept * self.block[1], columns)
        # Only a table that is rotated alone is turned back, by a basis that is served too.
        basis = basis_bytes(columns, width) if self.group == 1 else 0
        return rows * width * itemsize + basis

    def refuse_unusable_blocks(self) -> None:
        """Raise a ValueError if blocks do not divide the table, or save no bytes."""
        name, shape, block = self.data.name, self.data.shape, self.block
        if shape[0] % block[0] or shape[1] % block[1]:
            raise ValueError(
                f"Table {name!r}: a budget needs blocks that divide {shape}; {block} do not."
            )
        # An artifact stores zeros within kept rows; only compact() makes a rotated table narrower.
        if block[1] < shape[1] and not self.group:
            raise ValueError(
                f"Table {name!r}: a budget needs whole rows, or columns that are rotated; blocks"
                f" of {block} are served as zeros, and save no bytes. Give a level instead."
            )


def _refuse_unequal_floors(pruned: Sequence[_PrunedTable], groups: Sequence[Sequence[str]]) -> None:
    for group in groups:
        floors = {table.data.name: table.floor for table in pruned if table.data.name in group}
        if len(set(floors.values())) > 1:
            raise ValueError(
                "Invalid floor for a budget: tables rotated together keep as many columns, not"
                f" {floors}."
            )


def _dense_bytes(data: ShardedData) -> int:
    return math.prod(data.shape) * data.dtype.itemsize
