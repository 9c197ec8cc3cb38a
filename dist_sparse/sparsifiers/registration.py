"""May this be registered?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from dist_sparse.tables.shards import ShardedData

__all__ = ["check_new"]


def check_new(located: Iterable[ShardedData], taken: Iterable[str], held: Mapping[str, Iterable[Tensor]]) -> None:
    """Refuses tables that are registered already, under this name or another. Local.

    Args:
        located: what is to be registered.
        taken: the names in use.
        held: the tensors on this rank that are registered already, by name.

    Raises:
        ValueError: names the table, and the name under which it is known.
    """
    located = list(located)
    twice = sorted({data.name for data in located} & set(taken))
    if twice:
        raise ValueError(f"The names {twice} are registered already.")
    known = {_place(tensor): name for name, tensors in held.items() for tensor in tensors if tensor.numel()}
    for data in located:
        for shard in data.shards:
            if _place(shard.tensor) in known:
                raise ValueError(f"Table {data.name!r} is registered already, as {known[_place(shard.tensor)]!r}.")


def _place(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr()
