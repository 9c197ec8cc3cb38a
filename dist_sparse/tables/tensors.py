"""ShardedTensors and DTensors as registered data.

Both carry the rectangles of all ranks in their metadata, so nothing is communicated. The objects
are held; each ``locate()`` takes their local views again.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse.tables.shards import Rect, Shard, ShardedData, check_data


def is_sharded(data: object) -> bool:
    """Whether ``data`` is a ShardedTensor or a DTensor. By name, so that their modules are imported
    only by programs that use them."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(data).__mro__}
    return bool(
        kinds
        & {
            "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
            "torch.distributed.tensor.DTensor",
        }
    )


def steps_in_backward(parameter: object) -> bool:
    """Whether an optimizer inside the backward updates a parameter: torch's, or a fused one."""
    # Set by torch's apply_optimizer_in_backward(), and by TorchRec on what its kernels update.
    return hasattr(parameter, "_in_backward_optimizers")


class TensorSource:
    """One sharded tensor, registered under a name. A 1-D tensor is a matrix of one column per
    element: ``(1, n)``.

    Raises:
        ValueError: the tensor has more than two dimensions, this rank is not among those that hold
            it, or :func:`~dist_sparse.tables.shards.check_data` refuses it.
    """

    def __init__(self, name: str, data: Any) -> None:
        self._name, self.data = name, data
        check_data(self.locate()[0])

    def locate(self, names: Collection[str] | None = None) -> list[ShardedData]:
        """Return its one entry. Does not communicate; raises ValueError as the class says."""
        return [self.find(self._name)]

    def find(self, name: str) -> ShardedData:
        """Return its one entry."""
        data = self.data
        if data.dim() not in (1, 2):
            raise ValueError(
                f"Data {self._name!r} of shape {tuple(data.shape)}: sharded data must have one or"
                " two dimensions."
            )
        return (
            _from_sharded_tensor(self._name, data)
            if _in_pieces(data)
            else _from_dtensor(self._name, data)
        )


def _in_pieces(data: Any) -> bool:
    return hasattr(data, "local_shards")


def _from_sharded_tensor(name: str, data: Any) -> ShardedData:
    group = data._process_group if data._process_group is not None else dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group))
    tiling: list[list[Rect]] = [[] for _ in ranks]
    for shard in data.metadata().shards_metadata:
        rect = _rect(shard.shard_offsets, shard.shard_sizes)
        tiling[ranks.index(shard.placement.rank())] += [rect] if rect.numel else []
    local = [
        Shard(_rect(s.metadata.shard_offsets, s.metadata.shard_sizes), s.tensor)
        for s in data.local_shards()
    ]
    shards = [shard for shard in local if shard.rect.numel]
    mine = tiling[_here(name, ranks)]
    shards.sort(key=lambda shard: mine.index(shard.rect))
    return _located(name, data, "sharded_tensor", ranks, tiling, shards)


def _from_dtensor(name: str, data: Any) -> ShardedData:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement
    from torch.distributed.tensor._utils import (
        _compute_local_shape_and_global_offset as local_shape_and_offset,
    )

    mesh = data.device_mesh
    if any(not isinstance(p, (ShardPlacement, Replicate)) for p in data.placements):
        raise ValueError(
            f"Data {name!r} has placements {data.placements}: only Shard and Replicate are"
            " supported."
        )
    held: dict[int, list[Rect]] = {}
    positions = itertools.product(*(range(size) for size in mesh.mesh.shape))
    for rank, position in zip(mesh.mesh.flatten().tolist(), positions, strict=True):
        sizes, offsets = local_shape_and_offset(
            data.shape, mesh.mesh.shape, list(position), data.placements
        )
        rect = _rect(offsets, sizes)
        held[rank] = [rect] if rect.numel else []
    ranks = tuple(sorted(held))  # as process groups have them, whatever the order of the mesh
    tiling = [held[rank] for rank in ranks]
    local = data.to_local()
    mine = tiling[_here(name, ranks)]
    return _located(name, data, "dtensor", ranks, tiling, [Shard(rect, local) for rect in mine])


def _here(name: str, ranks: tuple[int, ...]) -> int:
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"Data {name!r} is stored on the ranks {ranks}, and this is rank {dist.get_rank()}."
        )
    return ranks.index(dist.get_rank())


def _located(
    name: str,
    data: Any,
    kind: str,
    ranks: tuple[int, ...],
    tiling: list[list[Rect]],
    shards: list[Shard],
) -> ShardedData:
    shape = (data.shape[0], data.shape[1]) if data.dim() == 2 else (1, data.shape[0])
    views = tuple(Shard(rect, _matrix(tensor, rect)) for rect, tensor in shards)
    return ShardedData(
        name=name,
        shape=shape,
        dtype=data.dtype,
        sharding=kind,
        ranks=ranks if len(ranks) > 1 else None,
        tiling=tuple(tuple(held) for held in tiling),
        shards=views,
    )


def _rect(offsets: Any, sizes: Any) -> Rect:
    if len(sizes) == 1:
        return Rect(0, int(offsets[0]), 1, int(sizes[0]))
    return Rect(int(offsets[0]), int(offsets[1]), int(sizes[0]), int(sizes[1]))


def _matrix(tensor: Tensor, rect: Rect) -> Tensor:
    return torch.as_tensor(tensor).detach().view(rect.rows, rect.cols)
