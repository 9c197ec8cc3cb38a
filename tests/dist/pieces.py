"""ShardedTensors of any tiling for tests, their gathered values, and counts of what was sent.

Each rank knows the whole tensor of which it makes its shards, so only :func:`gathered`
communicates.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)

from dist_sparse import BaseDataSparsifier
from dist_sparse.groups import reset_traffic, traffic

__all__ = [
    "Sent",
    "Tiling",
    "by_cols",
    "by_rows",
    "gathered",
    "local_tensors",
    "move",
    "sharded",
    "shared_folder",
    "snapshot",
    "watched",
    "write",
]

Piece = tuple[int, int, int, int]
"""(row, column, rows, columns) of a shard."""

Tiling = Sequence[Sequence[Piece]]
"""The shards of every rank."""


def sharded(
    full: Tensor, tiling: Tiling, process_group: dist.ProcessGroup | None = None
) -> ShardedTensor:
    """A ShardedTensor that holds copies of pieces of ``full``, the same 1-D or 2-D tensor on every
    rank."""
    mine: list[Shard] = []
    known: list[ShardMetadata] = []
    for rank, pieces in enumerate(tiling):
        for row, col, rows, cols in pieces:
            offsets, sizes = ([row, col], [rows, cols]) if full.dim() == 2 else ([col], [cols])
            metadata = ShardMetadata(
                shard_offsets=offsets, shard_sizes=sizes, placement=f"rank:{rank}/cpu"
            )
            known.append(metadata)
            if rank == dist.get_rank():
                part = (
                    full[row : row + rows, col : col + cols]
                    if full.dim() == 2
                    else full[col : col + cols]
                )
                mine.append(Shard(part.clone(memory_format=torch.contiguous_format), metadata))
    metadata = ShardedTensorMetadata(known, full.shape, TensorProperties(dtype=full.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, metadata, process_group=process_group
    )


def move(tensor: ShardedTensor, full: Tensor, tiling: Tiling) -> None:
    """Reshards in place, as DMP.reshard does for tables: the same object holds other pieces, of
    ``full``."""
    other = sharded(full, tiling, tensor._process_group)
    tensor._local_shards, tensor._metadata = other._local_shards, other._metadata


def by_rows(rows: int, cols: int, *ends: int) -> list[list[Piece]]:
    """One piece a rank, cut below the rows ``ends``."""
    borders = [0, *ends, rows]
    return [[(top, 0, bottom - top, cols)] for top, bottom in itertools.pairwise(borders)]


def by_cols(rows: int, cols: int, *ends: int) -> list[list[Piece]]:
    """One piece a rank, cut right of the columns ``ends``."""
    return [[(0, row, cols, rows)] for [(row, _, rows, cols)] in by_rows(cols, rows, *ends)]


def local_tensors(tensor: Any) -> list[tuple[tuple[int, int], Tensor]]:
    """This rank's pieces of a ShardedTensor or DTensor as matrices: ((row, column), live tensor),
    in its own order."""
    if isinstance(tensor, ShardedTensor):
        pieces = [
            (list(shard.metadata.shard_offsets), shard.tensor) for shard in tensor.local_shards()
        ]
    else:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        pieces = [(list(offsets), tensor.to_local())]
    if tensor.dim() == 1:
        return [((0, offsets[0]), local.view(1, -1)) for offsets, local in pieces]
    return [((offsets[0], offsets[1]), local) for offsets, local in pieces]


def gathered(tensor: Any) -> Tensor:
    """The whole as a matrix, on every rank; replicas must be equal. Collective over the world."""
    mine = [(offset, local.clone()) for offset, local in local_tensors(tensor)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    shape = tuple(tensor.shape) if tensor.dim() == 2 else (1, tensor.shape[0])
    full = torch.zeros(shape, dtype=tensor.dtype)
    known = torch.zeros(shape, dtype=torch.bool)
    for (row, col), part in (piece for pieces in everyone for piece in pieces):
        place = slice(row, row + part.shape[0]), slice(col, col + part.shape[1])
        assert torch.equal(torch.where(known[place], full[place], part), part), "replicas differ"
        full[place], known[place] = part, True
    assert bool(known.all())
    return full


def write(tensor: Any, full: Tensor) -> None:
    """Writes the global matrix ``full`` into this rank's pieces."""
    for (row, col), local in local_tensors(tensor):
        local.copy_(full[row : row + local.shape[0], col : col + local.shape[1]])


@dataclass
class Sent:
    """What went through torch.distributed: the name and bytes of each collective, and what the
    library says of it."""

    calls: list[tuple[str, int]] = field(default_factory=list)
    counted: int = 0
    counted_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.calls)


_SENDS = {"all_reduce": 0, "all_gather": 1, "all_to_all_single": 1, "broadcast": 0}
"""Collectives that the library uses, and which argument is sent."""

_OTHERS = (
    *(
        "all_gather_into_tensor",
        "all_gather_object",
        "all_to_all",
        "barrier",
        "broadcast_object_list",
        "gather",
    ),
    *("gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
)


@contextmanager
def watched() -> Iterator[Sent]:
    """Counts the collectives that this rank takes part in, beside the library's own count, which it
    starts again."""
    sent = Sent()

    def spy(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            message = args[_SENDS[name]] if name in _SENDS else torch.empty(0)
            sent.calls.append((name, message.numel() * message.element_size()))
            return real(*args, **kwargs)

        return call

    reset_traffic()
    with mock.patch.multiple(
        dist, **{name: spy(name, getattr(dist, name)) for name in (*_SENDS, *_OTHERS)}
    ):
        yield sent
    sent.counted, sent.counted_bytes = traffic().collectives, traffic().bytes


def snapshot(sparsifier: BaseDataSparsifier, tensors: Mapping[str, Any]) -> Any:
    """This rank's masks, weights and configs, to be compared bit for bit. Sends nothing."""
    masks = {
        name: [(at, mask.tolist()) for at, mask in sparsifier.local_masks(name)]
        for name in sparsifier.data_groups
    }
    weights = {
        name: [_bits(local) for _, local in local_tensors(tensor)]
        for name, tensor in tensors.items()
    }
    return masks, weights, repr(sparsifier.data_groups), repr(sparsifier.defaults)


def _bits(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().view(torch.uint8).flatten().tolist()


def shared_folder() -> Path:
    """A new folder, the same on all ranks. Collective."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return Path(str(box[0]))
