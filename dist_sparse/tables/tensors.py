"""ShardedTensors and DTensors as registered data.

Both carry the rectangles of all ranks in their metadata, so nothing is communicated. The objects
are held; each ``locate()`` takes their local views again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dist_sparse.tables.shards import Rect, Shard, ShardedData, check_data


def is_sharded(data: object) -> bool:
    """Whether ``data`` is a ShardedTensor or a DTensor. By name, so that their modules are imported
    only by programs that use them."""
    kinds = {(kind.__name__, kind.__module__.partition(".")[0]) for kind in type(data).__mro__}
    return not kinds.isdisjoint({("ShardedTensor", "torch"), ("DTensor", "torch")})


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
        if hasattr(data, "local_shards"):
            return _from_sharded_tensor(self._name, data)
        return _from_dtensor(self._name, data)


def _from_sharded_tensor(name: str, data: Any) -> ShardedData:
    group = data._process_group if data._process_group is not None else dist.group.WORLD
    held: dict[int, list[Rect]] = {rank: [] for rank in dist.get_process_group_ranks(group)}
    for shard in data.metadata().shards_metadata:
        held[shard.placement.rank()].append(_rect(shard))
    local = {_rect(shard.metadata): shard.tensor for shard in data.local_shards()}
    return _located(name, data, "sharded_tensor", held, local)


def _from_dtensor(name: str, data: Any) -> ShardedData:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import (
        _compute_local_shape_and_global_offset as local_shape_and_offset,
    )

    mesh = data.device_mesh.mesh
    if any(not isinstance(placement, (Shard, Replicate)) for placement in data.placements):
        raise ValueError(
            f"Data {name!r} has placements {data.placements}: only Shard and Replicate are"
            " supported."
        )
    held: dict[int, list[Rect]] = {}
    for position in itertools.product(*map(range, mesh.shape)):
        sizes, offsets = local_shape_and_offset(
            data.shape, mesh.shape, list(position), data.placements
        )
        held[int(mesh[position])] = [_rect(ShardMetadata(list(offsets), list(sizes)))]
    local = {rect: data.to_local() for rect in held.get(dist.get_rank(), ())}
    return _located(name, data, "dtensor", held, local)


def _located(
    name: str, data: Any, kind: str, held: dict[int, list[Rect]], local: dict[Rect, Tensor]
) -> ShardedData:
    """Data of the rectangles that each rank holds, and the tensors of this one's."""
    ranks = tuple(sorted(held))  # as process groups have them, whatever the order of a mesh
    if dist.get_rank() not in held:
        raise ValueError(
            f"Data {name!r} is stored on the ranks {ranks}, and this is rank {dist.get_rank()}."
        )
    tiling = tuple(tuple(filter(_numel, held[rank])) for rank in ranks)
    shards = []
    for rect in tiling[ranks.index(dist.get_rank())]:
        tensor = torch.as_tensor(local[rect]).detach()
        shards.append(Shard(rect, tensor.view(rect.rows, rect.cols)))
    return ShardedData(
        name=name,
        shape=(data.shape[0], data.shape[1]) if data.dim() == 2 else (1, data.shape[0]),
        dtype=data.dtype,
        sharding=kind,
        ranks=ranks if len(ranks) > 1 else None,
        tiling=tiling,
        shards=tuple(shards),
    )


def _rect(shard: Any) -> Rect:
    """The rectangle in the metadata of a shard; of one dimension it is a row."""
    *row, col = shard.shard_offsets
    *rows, cols = shard.shard_sizes
    return Rect(int(sum(row)), int(col), int(math.prod(rows)), int(cols))


def _numel(rect: Rect) -> int:
    return rect.numel
