"""Global tensors whose rectangles are on several ranks, as torch.distributed.checkpoint saves and
loads them.

DCP asks a tensor for the chunks that this rank writes (``__create_write_items__``) and needs
(``__create_chunk_list__``), both in global coordinates, and fills the needed chunks from chunks
that any number of ranks have written. So a checkpoint of N ranks loads on M. When DCP saves, it
checks that the chunks of all ranks tile the tensor; when it loads, it checks nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Offset = tuple[int, ...]


class ChunkedTensor(torch.Tensor):
    """A global tensor, some of whose elements are here. It has no storage of its own and supports
    no computation.

    Args:
        size: global.
        dtype: the dtype of all chunks.
        writes: ``(offset, tensor)`` of the chunks that this rank saves; over all ranks they tile
            the tensor.
        wants: ``(offset, size)`` of the chunks that this rank needs when it loads; they may
            overlap.
        kept: plain data and tensors that this rank's copy of the state needs in addition, if
            torch.save and not DCP saves it.

    Attributes:
        loaded: the wanted chunks, once DCP has asked for them; zero where the checkpoint has a
            hole. None before.
    """

    writes: list[tuple[Offset, Tensor]]
    wants: list[tuple[Offset, Offset]]
    kept: list[dict[str, Any]]
    loaded: list[Tensor] | None

    @staticmethod
    def __new__(
        cls,
        size: Sequence[int],
        dtype: torch.dtype,
        writes: Sequence[tuple[Offset, Tensor]],
        wants: Sequence[tuple[Offset, Offset]],
        kept: Sequence[dict[str, Any]] = (),
    ) -> ChunkedTensor:
        # Without storage: memory for the whole table may not exist on one rank.
        tensor: ChunkedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(size), dtype=dtype
        )
        tensor.writes = list(writes)
        tensor.wants = list(wants)
        tensor.kept = list(kept)
        tensor.loaded = None
        return tensor

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint import metadata, planner

        properties = metadata.TensorProperties(dtype=self.dtype)
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, offset),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=metadata.ChunkStorageMetadata(torch.Size(offset), chunk.size()),
                    properties=properties,
                    size=self.size(),
                ),
            )
            for offset, chunk in self.writes
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint import metadata

        # Zeros: DCP writes only elements that a chunk of the checkpoint covers.
        self.loaded = [torch.zeros(size, dtype=self.dtype) for _, size in self.wants]
        return [
            metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            for offset, size in self.wants
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        # When loading, by number: chunks that overlap may have one offset.
        if self.loaded is not None:
            number: int = index.index
            return self.loaded[number]
        return next(chunk for offset, chunk in self.writes if torch.Size(offset) == index.offset)

    def pieces(self) -> dict[Offset, Tensor]:
        """Return by offset the chunks that DCP has loaded, or the chunks to save before that."""
        if self.loaded is None:
            return dict(self.writes)
        return dict(zip([offset for offset, _ in self.wants], self.loaded, strict=True))

    def __repr__(self) -> str:  # type: ignore[override]
        chunks = f"writes {len(self.writes)} chunks, wants {len(self.wants)}"
        return f"{type(self).__name__}({list(self.size())}, {self.dtype}, {chunks})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch.load(map_location=...) can't load what Tensor.__reduce_ex__() returns here.
        return type(self), (self.size(), self.dtype, self.writes, self.wants, self.kept)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Support only the operations that copies of a state and DCP's stagers use."""
        aten = torch.ops.aten
        self = args[0]
        # Views share their chunks, as views of a tensor share its storage.
        if func in (aten.detach.default, aten.alias.default):
            return self._with(self.__dict__)
        # New memory with the same contents, even for new_empty(): a stager copies into it later.
        if func in (
            aten.clone.default,
            aten._to_copy.default,
            aten.new_empty.default,
            aten.zeros_like.default,
        ):
            return self._with(copy.deepcopy(self.__dict__))
        if func is aten.copy_.default:
            self.__dict__.update(copy.deepcopy(args[1].__dict__))
            return self
        raise NotImplementedError(f"{cls.__name__} is for checkpoints and has no {func}.")

    def _with(self, attributes: Mapping[str, Any]) -> ChunkedTensor:
        other = ChunkedTensor(self.size(), self.dtype, (), ())
        other.__dict__.update(attributes)
        return other


# So that torch.load(weights_only=True) reads a saved state.
torch.serialization.add_safe_globals([ChunkedTensor])
