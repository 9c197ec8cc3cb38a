"""Bytes to levels: how much of each table is removed so that all tables together take no more than
a budget.

A budget counts what is served in the dtype of training, as
:class:`~dist_sparse.planning.candidates.Candidate` does: the kept weights, what finds them, what
turns rotated tables back, and the tables that stay dense.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from dist_sparse import checks
from dist_sparse.rotation.rotate import Rotate
from dist_sparse.tables.shards import Block, Rect, ShardedData, grid_of, resolve_block
from dist_sparse.tables.sizes import basis_bytes, index_bytes, narrow_width

__all__ = ["Budget", "budget_levels", "parse_budget"]

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
    try:
        if not isinstance(budget, str):
            return checks.integer("budget", budget, least=0)
        share = float(budget.removesuffix("%")) / 100 if budget.endswith("%") else math.nan
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ValueError(
            f"Invalid {budget=}: must be bytes (an int >= 0), or text such as '20%', from 0% to"
            " 100%."
        )
    return share


def budget_levels(
    budget: Budget,
    located: Sequence[ShardedData],
    left_dense: Mapping[str, str],
    block: tuple[int | str, int | str],
    floors: Mapping[str, float],
    together: bool,
    rotate: Rotate | None = None,
) -> dict[str, float]:
    """Return the lowest common level of the tables that are pruned, by name, each a whole number of
    blocks.

    Args:
        located: all tables that the budget is for.
        left_dense: those of them that are not pruned.
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
    pruned = {data.name: data for data in located if data.name not in left_dense}
    shapes = {name: resolve_block(name, block, data.shape) for name, data in pruned.items()}
    for name, data in pruned.items():
        _refuse_unusable_blocks(data, shapes[name], rotate)
    for group in () if rotate is None or isinstance(rotate, str) else rotate:
        of_group = {name: floors.get(name, 0.0) for name in group if name in pruned}
        if len(set(of_group.values())) > 1:
            raise ValueError(
                "Invalid floor for a budget: tables rotated together keep as many columns, not"
                f" {of_group}."
            )
    blocks = {
        name: grid_of(Rect(0, 0, *data.shape), shapes[name]).blocks for name, data in pruned.items()
    }
    most = {
        name: n - max(math.ceil(floors.get(name, 0.0) * n - 1e-9), min(n, 1))
        for name, n in blocks.items()
    }
    dense = sum(_bytes(data) for data in located if data.name in left_dense)
    total = sum(map(_bytes, located))
    room = round(budget * total) if isinstance(budget, float) else budget
    if room >= total:
        raise ValueError(
            f"Invalid budget of {room} bytes: all tables take {total}, so that nothing would be"
            " removed."
        )

    def served(removed: Mapping[str, int]) -> int:
        kept = (
            (pruned[name], shapes[name], blocks[name] - count) for name, count in removed.items()
        )
        return dense + sum(_served(*each, rotate) for each in kept)

    def removed(step: int) -> dict[str, int]:
        counts = {name: math.ceil(step / _STEPS * n) for name, n in blocks.items()}
        return (
            counts if together else {name: min(count, most[name]) for name, count in counts.items()}
        )

    if room < (least := served(most)):
        raise ValueError(
            f"Invalid budget of {room} bytes: {least} are the least. Tables that are left dense"
            f" take {dense} of them, and of each other table its floor or one block stays."
        )
    lowest = bisect_left(range(_STEPS), True, key=lambda step: served(removed(step)) <= room)
    return {name: count / max(blocks[name], 1) for name, count in removed(lowest).items()}


_STEPS = 2**53
"""Levels that are tried are multiples of one part in so many: float64 holds them exactly."""


def _refuse_unusable_blocks(data: ShardedData, block: Block, rotate: Rotate | None) -> None:
    if any(size % side for size, side in zip(data.shape, block, strict=True)):
        raise ValueError(
            f"Table {data.name!r}: a budget needs blocks that divide {data.shape}; {block} do not."
        )
    # An artifact stores zeros within kept rows; only compact() makes a rotated table narrower.
    if block[1] < data.shape[1] and not _is_rotated(data.name, rotate):
        raise ValueError(
            f"Table {data.name!r}: a budget needs whole rows, or columns that are rotated; blocks"
            f" of {block} are served as zeros, and save no bytes. Give a level instead."
        )


def _bytes(data: ShardedData) -> int:
    return math.prod(data.shape) * data.dtype.itemsize


def _served(data: ShardedData, block: Block, kept: int, rotate: Rotate | None) -> int:
    """Bytes of a table that keeps so many blocks."""
    (rows, columns), itemsize = data.shape, data.dtype.itemsize
    if _is_rotated(data.name, rotate):
        groups = () if rotate is None or isinstance(rotate, str) else rotate
        width = narrow_width(kept * block[1], columns)
        alone = not any(len(group) > 1 for group in groups if data.name in group)
        return rows * width * itemsize + (basis_bytes(columns, width) if alone else 0)
    return kept * math.prod(block) * itemsize + index_bytes(rows)


def _is_rotated(name: str, rotate: Rotate | None) -> bool:
    if rotate is None or isinstance(rotate, str):
        return rotate == "table"
    return any(name in group for group in rotate)
