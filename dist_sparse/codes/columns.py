"""The order of a table's columns before they are cut into groups: each group gets the same product
of variances, as far as that is possible.

After a rotation the first columns hold the most. A book of the first four would have more to tell
apart than one of the last four, with as many entries. This is the eigenvalue allocation of
optimized product quantization (Ge et al., 2013), on integers: the same order on every sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.codes.fitting import exponents_of
from dist_sparse.enforcer.fused import collections_of
from dist_sparse.enforcer.optimizers import leaves
from dist_sparse.groups import Group, group_over
from dist_sparse.rotation.lookups import Lookup, find_lookup
from dist_sparse.rotation.outputs import follow, turn_back
from dist_sparse.rotation.rotate import check_group, rotation_groups
from dist_sparse.rotation.turning import change_rows_
from dist_sparse.tables.port import collection_of
from dist_sparse.tables.shards import ShardedData

# Bits of a weight, so that the squares of 2**32 rows add up in int64.
_BITS = 15
_ROWS = 1 << 14


@dataclass
class ColumnOrder:
    """Tables whose columns may change places: their readers do not tell columns apart.

    Args:
        together: names of tables with one order.
        alone: the lookup of each table in a group of one; its outputs are turned back.
        model: with the tables.
        optimizers: of the model.
    """

    together: list[list[str]] = field(default_factory=list)
    alone: dict[str, Lookup] = field(default_factory=dict)
    model: nn.Module | None = None
    optimizers: Sequence[Any] = ()

    @staticmethod
    def checked(
        order: Any,
        model: nn.Module,
        located: Mapping[str, ShardedData],
        groups: Mapping[str, int],
        optimizers: Sequence[Any],
    ) -> ColumnOrder:
        """Check the argument. Local; changes nothing.

        Raises:
            ValueError: as :func:`~dist_sparse.rotate`, or tables in a group have other codes.
        """
        if order is None:
            return ColumnOrder()
        together = rotation_groups(order, located, "order")
        found = ColumnOrder(together, model=model, optimizers=optimizers)
        for names in found.together:
            check_group([located[name] for name in names])
            if len({groups[name] for name in names}) > 1:
                raise ValueError(f"Invalid order={order!r}: {names} have other numbers of codes.")
            for name in names:
                lookup = find_lookup([model], located[name], len(names) == 1)
                if len(names) == 1:
                    found.alone[name] = lookup
        return found

    def turn_outputs(self, located: Mapping[str, ShardedData]) -> None:
        """Have the outputs of tables by themselves turned back from now on. Local."""
        for name, lookup in self.alone.items():
            turn_back(*lookup, located[name])

    def refuse_element_state(self, located: Mapping[str, ShardedData]) -> None:
        """Refuse to move columns away from their optimizer state. Local.

        Raises:
            ValueError: an optimizer keeps state for each element.
        """
        if self.model is None:
            return  # no column moves
        shapes = {}
        for name in (name for names in self.together for name in names):
            for _, weight in located[name].shards:
                shapes[weight.data_ptr()] = name, weight.shape
        for address, state in self._states():
            name, shape = shapes.get(address, ("", None))
            if state.shape == shape:
                raise ValueError(
                    f"Table {name!r}: its optimizer keeps state for each element, which does not"
                    " follow columns that change places. Use SGD or a row-wise optimizer, or leave"
                    " it out of order."
                )

    def _states(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the optimizer state of tables, with the address of the weights."""
        assert self.model is not None
        for collection in collections_of(self.model.modules()):
            for batch in collection_of(collection).batches():
                for weight, states in zip(batch.weights(), batch.states(), strict=True):
                    yield from ((weight.data_ptr(), state) for state in states)
        for optimizer in self.optimizers:
            for leaf in leaves(optimizer):
                for parameter, named in leaf.state.items():
                    for state in filter(torch.is_tensor, named.values()):
                        yield parameter.data_ptr(), state

    def apply(self, located: Mapping[str, ShardedData], groups: Mapping[str, int]) -> None:
        """Put the columns of the tables in order, in place. Collective over the ranks of the
        tables."""
        for names in self.together:
            tables = [located[name] for name in names]
            over = group_over(tables[0].ranks)
            spread = _common(spreads(tables, exponents_of(tables, over), over))
            order = torch.tensor(balanced_order(spread, groups[names[0]]))
            for data in tables:
                change_rows_(data, partial(torch.index_select, dim=1, index=order), over)
                if data.name in self.alone:
                    moved = torch.eye(len(order), dtype=torch.float64)[:, order]
                    follow(self.alone[data.name].root, data.name, moved)


def balanced_order(spread: Sequence[int], groups: int) -> list[int]:
    """Return the columns, group after group, so that the products of a group's values are close.

    Columns are taken in descending order, and each goes to the group with the smallest product that
    has room; of equals to the first.

    Args:
        spread: of each column, a whole number.
        groups: a divisor of the number of columns.

    Example::

        >>> from dist_sparse.codes.columns import balanced_order
        >>> balanced_order([64, 16, 8, 2], groups=2)
        [0, 3, 1, 2]
    """
    width = len(spread) // groups
    members: list[list[int]] = [[] for _ in range(groups)]
    products = [1] * groups
    for column in sorted(range(len(spread)), key=lambda each: -spread[each]):
        open_groups = [group for group in range(groups) if len(members[group]) < width]
        chosen = min(open_groups, key=lambda group: products[group])
        members[chosen].append(column)
        products[chosen] *= max(spread[column], 1)
    return [column for group in members for column in group]


def spreads(
    tables: Sequence[ShardedData], exponents: Mapping[str, int], group: Group
) -> list[list[int]]:
    """Return a multiple of the variance of each column, by table, as whole numbers. Collective over
    ``group``: one all-reduce.

    Args:
        exponents: by table, the magnitudes are below ``2 ** exponent``.
    """
    parts = [_moments(data, exponents[data.name], group.rank) for data in tables]
    sums = group.all_reduce(torch.cat([part.flatten() for part in parts]))
    found = []
    sizes = [part.numel() for part in parts]
    for data, both in zip(tables, torch.split(sums, sizes), strict=True):
        first, second = both.view(2, -1).tolist()
        rows = data.shape[0]
        # Python's integers: these products are longer than 64 bits.
        found.append([rows * b - a * a for a, b in zip(first, second, strict=True)])
    return found


def _common(of_tables: Sequence[Sequence[int]]) -> list[int]:
    """Return one value for each column of tables that share an order: the product of theirs."""
    products = [1] * len(of_tables[0])
    for values in of_tables:
        products = [product * max(each, 1) for product, each in zip(products, values, strict=True)]
    return products


def _moments(data: ShardedData, exponent: int, rank: int) -> Tensor:
    """Return the sums of the columns and of their squares over the rows that a rank owns, in units
    of the table's grid: int64 ``(2, columns)``."""
    sums = torch.zeros(2, data.shape[1], dtype=torch.int64)
    owned = set(data.owned(rank))
    for rect, weight in data.shards:
        if rect not in owned:
            continue
        for rows in torch.split(weight, _ROWS):
            whole = (rows.double() * 2.0 ** (_BITS - exponent)).round_().long()
            sums[0, rect.col : rect.col_end] += whole.sum(0).cpu()
            sums[1, rect.col : rect.col_end] += whole.square_().sum(0).cpu()
    return sums
