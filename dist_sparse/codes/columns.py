"""The order of a rotated table's columns before they are cut into groups: each group gets about the
same product of variances.

After a rotation the first columns hold the most. A book of the first four would have more to tell
apart than one of the last four, with as many entries. This is the eigenvalue allocation of
optimized product quantization (Ge et al., 2013), by rank in the place of value: the same order on
every sharding, without a look at the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dist_sparse.enforcer.fused import collections_of
from dist_sparse.enforcer.optimizers import keeps_elements, leaves
from dist_sparse.groups import group_over
from dist_sparse.rotation.lookups import Lookup, find_lookup
from dist_sparse.rotation.outputs import follow
from dist_sparse.rotation.rotate import check_group, rotation_groups
from dist_sparse.rotation.turning import change_rows_
from dist_sparse.tables.modules import collection_of
from dist_sparse.tables.shards import ShardedData


def dealt(columns: int, groups: int) -> Tensor:
    """Return the columns, group after group: dealt out to the groups in turn, in every second round
    backwards.

    Args:
        groups: a divisor of the number of columns.

    Example::

        >>> from dist_sparse.codes.columns import dealt
        >>> dealt(6, groups=2).tolist()
        [0, 3, 4, 1, 2, 5]
    """
    rounds = torch.arange(columns).view(-1, groups)
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.T.flatten()


def tables_to_order(
    order: Any,
    model: nn.Module,
    optimizers: list[Any],
    located: Mapping[str, ShardedData],
    groups: Mapping[str, int],
) -> dict[str, Lookup | None]:
    """Return the tables that the argument ``order`` of :func:`~dist_sparse.quantize` names. Those
    by themselves have the lookup whose output is turned back; only dot products read others. Local.

    Raises:
        ValueError: as :func:`~dist_sparse.rotate`; tables in a group have other codes; or an
            optimizer keeps state for each element.
    """
    if order is None:
        return {}
    found: dict[str, Lookup | None] = {}
    for names in rotation_groups(order, located, "order"):
        check_group([located[name] for name in names])
        if len({groups[name] for name in names}) > 1:
            raise ValueError(f"Invalid order={order!r}: {names} have other numbers of codes.")
        alone = len(names) == 1
        for name in names:
            lookup = find_lookup([model], located[name], alone)
            found[name] = lookup if alone else None
    with_state = set(_with_element_state(model, optimizers))
    for name in found:
        if with_state & {weight.data_ptr() for _, weight in located[name].shards}:
            raise ValueError(
                f"Table {name!r}: its optimizer keeps state for each element, which does not follow"
                " columns that change places. Use SGD or a row-wise optimizer, or leave it out of"
                " order."
            )
    return found


def put_in_order(data: ShardedData, groups: int, lookup: Lookup | None) -> None:
    """Deal the columns of a table out to its groups, in place. Collective over its ranks."""
    order = dealt(data.shape[1], groups)
    change = partial(torch.index_select, dim=1, index=order)
    change_rows_(data, change, group_over(data.ranks))
    if lookup is not None:
        follow(lookup.root, data.name, torch.eye(len(order), dtype=torch.float64)[:, order])


def _with_element_state(model: nn.Module, optimizers: list[Any]) -> Iterator[int]:
    """Yield the addresses of weights whose optimizers keep state for each element."""
    for collection in collections_of(model.modules()):
        for batch in collection_of(collection).batches():
            for weight, states in zip(batch.weights(), batch.states(), strict=True):
                if any(state.shape == weight.shape for state in states):
                    yield weight.data_ptr()
    for optimizer in optimizers:
        for leaf in filter(keeps_elements, leaves(optimizer)):
            for param_group in leaf.param_groups:
                yield from (parameter.data_ptr() for parameter in param_group["params"])
