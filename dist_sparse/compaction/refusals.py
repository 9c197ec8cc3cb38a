"""What :func:`~dist_sparse.compact` refuses, before anything changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_sparse.compaction.sites import Site, dmp_port
from dist_sparse.rotation.outputs import is_turned
from dist_sparse.sparsifiers.packed_store import PackedStore
from dist_sparse.tables.shards import ShardedData

__all__ = ["refuse_blocks", "refuse_sites"]


def refuse_blocks(store: PackedStore, tables: Iterable[ShardedData]) -> None:
    """Refuse tables whose masks remove parts of rows."""
    for data in tables:
        height, width = store.block(data.name)
        if height != 1 or width < data.shape[1]:
            raise ValueError(
                f"Table {data.name!r} has masks of blocks ({height}, {width}), and only whole rows"
                " can be compacted, (1, ROW), or columns of rotated tables: what a finer mask"
                " removes inside of kept rows would come back. export() stores such masks."
            )


def refuse_sites(
    model: nn.Module,
    sites: Iterable[Site],
    optimizers_known: bool,
    narrowed: bool,
    default_row: bool,
) -> None:
    """Refuse modules that can't be compacted, or whose optimizers are unknown.

    Args:
        optimizers_known: whether the caller knows all optimizers that are not fused.
        narrowed: whether any table loses columns.
        default_row: whether removed ids share a row.
    """
    # Once: a model has thousands of parameters.
    users = _users_of_parameters(model)
    for site in sites:
        _refuse_wrapper_inside(site, model)
        if is_turned(site.module) and not narrowed:
            raise ValueError(
                f"{site.label} is rotated, and its output is turned back by a hook: it can't be"
                " compacted."
            )
        if reason := site.refusal(model, narrowed):
            raise ValueError(f"{site.label} {reason}")
        for parameter in site.parameters().values():
            _refuse_tied_weight(site, users[parameter])
            if parameter.requires_grad and not optimizers_known:
                raise ValueError(
                    f"{site.label} is stepped by a plain optimizer, which must get the new"
                    " parameters: pass compact(optimizer=...), or optimizer=() if there is none."
                    " An attached enforcer knows them."
                )
        _refuse_default_row(site, default_row)


def _users_of_parameters(model: nn.Module) -> Mapping[nn.Parameter, list[nn.Module]]:
    """Which modules of a model hold each parameter themselves."""
    users: defaultdict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        # named_parameters() of TorchRec's modules has those of their children too.
        for parameter in filter(torch.is_tensor, module._parameters.values()):
            users[parameter].append(module)
    return users


def _refuse_wrapper_inside(site: Site, model: nn.Module) -> None:
    """A wrapper around a part of the model can't be built again, as that of a DMP is."""
    if dmp_port(model) is not None:
        return
    for path, wrapper in model.named_modules():
        wraps = isinstance(wrapper, (DistributedDataParallel, nn.DataParallel))
        if wraps and site.module in wrapper.modules():
            place = f" at {path!r}" if path else ""
            raise ValueError(
                f"{site.label} is inside {type(wrapper).__name__}{place}, which holds on to the old"
                " parameters: compact the module inside, and wrap the result again."
            )


def _refuse_tied_weight(site: Site, users: Iterable[nn.Module]) -> None:
    """A layer that shares a table's weight has a row for each id."""
    # In a collection, an embedding inside of it holds the parameter.
    own = set(site.module.modules())
    others = [type(user).__name__ for user in users if user not in own]
    if others:
        raise ValueError(
            f"{site.label} is the weight of other modules too ({others}): it can't be compacted."
        )


def _refuse_default_row(site: Site, default_row: bool) -> None:
    """Refuse a default row where there is one, or where ids would have it that are padding."""
    indexes = site.indexes().values()
    if any(index.default_row for index in indexes):
        raise ValueError(
            f"{site.label} has default rows, and tables with a default row can't lose rows again."
        )
    if not default_row:
        return
    if site.padding_id is not None:
        raise ValueError(
            f"{site.label} has a padding_idx, whose id would get the default row if its row was"
            " removed."
        )
    # The ids that were removed before would have no row, and the others that of the default.
    if indexes:
        raise ValueError(
            f"{site.label} has already lost rows without a default row; it can't get one now."
        )
