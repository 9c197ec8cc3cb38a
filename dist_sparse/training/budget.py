"""Bytes to levels: how much of each table is removed so that all tables together take no more than a budget.

A budget counts what is served: the kept weights, what finds them (0.25 byte for each original row, or a bit for each
other block), and the tables that stay dense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dist_sparse import checks
from dist_sparse.tables.shards import ROW, Rect, ShardedData, grid_of, resolve_block

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
    if not isinstance(budget, str):
        return checks.integer("budget", budget, least=0)
    try:
        share = float(budget.removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not budget.endswith("%") or not 0 <= share <= 1:
        raise ValueError(f"Invalid {budget=}: must be bytes (an int >= 0), or text such as '20%', from 0% to 100%.")
    return share


def budget_levels(
    budget: Budget,
    located: Sequence[ShardedData],
    left_dense: Mapping[str, str],
    block: tuple[int | str, int | str],
    floors: Mapping[str, float],
    together: bool,
) -> dict[str, float]:
    """Return the lowest common level of the tables that are pruned, by name, each a whole number of blocks.

    Args:
        located: all tables that the budget is for.
        left_dense: those of them that are not pruned.
        block: as in a configuration.
        floors: by name the least fraction that a table keeps.
        together: blocks are removed wherever scores are smallest, so that a table's level need not keep its floor.

    Raises:
        ValueError: the budget is less than can be reached, or holds all tables as they are; or blocks do not divide a
            table.
    """
    pruned = {data.name: data for data in located if data.name not in left_dense}
    shapes = {name: resolve_block(name, block, data.shape) for name, data in pruned.items()}
    for name, data in pruned.items():
        if any(size % side for size, side in zip(data.shape, shapes[name], strict=True)):
            raise ValueError(f"Table {name!r}: a budget needs blocks that divide {data.shape}; {shapes[name]} do not.")
    blocks = {name: grid_of(Rect(0, 0, *data.shape), shapes[name]).blocks for name, data in pruned.items()}
    prices = {name: math.prod(shapes[name]) * data.dtype.itemsize for name, data in pruned.items()}
    most = {name: n - max(math.ceil(floors.get(name, 0.0) * n - 1e-9), min(n, 1)) for name, n in blocks.items()}
    dense = sum(_bytes(data) for data in located if data.name in left_dense)
    total = sum(map(_bytes, located))
    index = sum(_index(data, block, blocks[name]) for name, data in pruned.items())
    room = round(budget * total) if isinstance(budget, float) else budget
    if room >= total:
        raise ValueError(f"Invalid budget of {room} bytes: all tables take {total}, so that nothing would be removed.")
    need = total + index - room
    least = total + index - sum(most[name] * prices[name] for name in blocks)
    if room < least:
        raise ValueError(
            f"Invalid budget of {room} bytes: {least} are the least. Tables that are left dense take {dense} of them, "
            f"{index} find what is kept, and of each other table its floor or one block stays."
        )
    fixed: dict[str, int] = {}
    while True:
        free = [name for name in blocks if name not in fixed]
        rest = need - sum(count * prices[name] for name, count in fixed.items())
        level = rest / sum(blocks[name] * prices[name] for name in free)
        counts = {name: math.ceil(level * blocks[name] - 1e-9) for name in free}
        full = {name: most[name] for name in free if counts[name] > most[name]}
        if together or not full:
            return {name: count / max(blocks[name], 1) for name, count in (counts | fixed).items()}
        fixed |= full


def _bytes(data: ShardedData) -> int:
    return data.shape[0] * data.shape[1] * data.dtype.itemsize


def _index(data: ShardedData, block: tuple[int | str, int | str], blocks: int) -> int:
    """Bytes that find what is kept of a table: of rows a bit each and a count for each 32."""
    return 8 * -(-data.shape[0] // 32) if block == (1, ROW) else -(-blocks // 8)
