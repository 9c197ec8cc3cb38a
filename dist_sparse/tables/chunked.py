"""Global tensors whose rectangles are on several ranks, as torch.distributed.checkpoint saves and
loads them.

DCP asks a tensor for what this rank writes (``__create_write_items__``) and for what it wants
(``__create_chunk_list__``), both in global coordinates, and brings what was written on any number
of ranks to what is wanted. So a checkpoint of N ranks loads on M. DCP checks when it saves that the
chunks of all ranks cover the tensor and do not overlap; it does not check what it loads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Offset = tuple[int, ...]


class ChunkedTensor(torch.Tensor):
    """A global tensor with some of its elements here. It has no data of its own and can't be
    computed with.

    Args:
        size: global.
        dtype: of all chunks.
        writes: ``(offset, tensor)`` of the chunks that this rank saves; over all ranks they tile
            the tensor.
        wants: ``(offset, size)`` of the chunks that this rank needs when it loads; they may
            overlap.
        kept: what this rank's own copy of the state needs if it is not DCP that saves it; plain
            data and tensors.

    Attributes:
        loaded: the chunks that were wanted, once DCP has asked for them; zero where a checkpoint
            has a hole. None before.
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
        # Without storage: a global tensor of the size of a table would not fit.
        made: ChunkedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(size), dtype=dtype
        )
        made.writes, made.wants, made.kept = list(writes), list(wants), list(kept)
        made.loaded = None
        return made

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), chunk.size()),
                    properties=properties,
                    size=self.size(),
                ),
            )
            for offset, chunk in self.writes
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        # Zero: DCP leaves what no chunk of the checkpoint covers as it is.
        self.loaded = [torch.zeros(size, dtype=self.dtype) for _, size in self.wants]
        return [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            for offset, size in self.wants
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        # The index is that of the chunk list: chunks that overlap may begin together.
        if self.loaded is not None:
            at: int = index.index
            return self.loaded[at]
        return next(chunk for offset, chunk in self.writes if torch.Size(offset) == index.offset)

    def pieces(self) -> dict[Offset, Tensor]:
        """Return the chunks that DCP has loaded, or else those to be saved, by offset."""
        if self.loaded is None:
            return dict(self.writes)
        return dict(zip([offset for offset, _ in self.wants], self.loaded, strict=True))

    def __repr__(self) -> str:  # type: ignore[override]
        chunks = f"writes {len(self.writes)} chunks, wants {len(self.wants)}"
        return f"{type(self).__name__}({list(self.size())}, {self.dtype}, {chunks})"

    def __reduce_ex__(
        self, protocol: Any
    ) -> Any:  # that of a tensor can't be loaded by torch.load(map_location=...)
        return type(self), (self.size(), self.dtype, self.writes, self.wants, self.kept)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What the stagers of ``async_save`` and copies of a state need."""
        aten = torch.ops.aten
        self = args[0]
        # Views share their chunks, as views of a tensor share its storage.
        if func in (aten.detach.default, aten.alias.default):
            return self._with(self.__dict__)
        # In new memory, and whole: a stager copies its contents into what it has made this way.
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
