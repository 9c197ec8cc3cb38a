"""How are a few rows of a table made true to its mask?

What is removed in them is written as zero: 16 to 64 bytes of mask are read for a row, and nothing else of the table.
This is the form for the CPU, and for a device without Triton; :mod:`dist_sparse.training.rows_triton` is the other.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from dist_sparse.masks import BlockMask

__all__ = ["Lookup", "Slot", "TorchLookup", "in_table", "lookup_on", "settle_rows"]

_CHUNK = 1 << 18
"""Elements gathered at a time: 1 MiB of float32 stays in the cache between the passes over it."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Slot:
    """A live shard, ``(rect.rows, rect.cols)``, and its mask."""

    weight: Tensor
    mask: BlockMask


class Lookup(Protocol):
    """Makes the rows true that one lookup is about to read."""

    needed: bool
    """Whether anything at all is removed."""

    def __init__(self, slots: Sequence[Slot | None]) -> None:
        """One slot for each feature, in the order of the ids; None where nothing is masked."""
        ...

    def __call__(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        """Writes the zeros.

        Args:
            ids: int32 or int64 ``(n,)``, feature after feature, local row numbers. Those outside the table are read as
                row 0, which FBGEMM's bounds check makes of them.
            ends: where the ids of each feature begin and, last, where they end: one more than there are features. On
                a device as a tensor, so that nobody waits for it.
        """
        ...


class TorchLookup:
    """A :class:`Lookup` made of torch's own operations."""

    def __init__(self, slots: Sequence[Slot | None]) -> None:
        self._slots = [slot if slot is not None and slot.mask.removes else None for slot in slots]
        self.needed = any(slot is not None for slot in self._slots)

    def __call__(self, ids: Tensor, ends: Sequence[int] | Tensor) -> None:
        if isinstance(ends, Tensor):
            ends = ends.tolist()
        for slot, (start, stop) in zip(self._slots, pairwise(ends), strict=True):
            if slot is None or start == stop:
                continue
            if stop - start >= slot.mask.rect.rows:
                slot.mask.apply_(slot.weight)
            else:
                settle_rows(slot.weight, slot.mask, in_table(ids[start:stop], slot.mask.rect.rows))


def lookup_on(device: torch.device) -> type[Lookup]:
    """The form of :class:`Lookup` for a device: Triton's on CUDA, where it is installed (as it is with torch's CUDA
    builds)."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        form: type[Lookup] = importlib.import_module("dist_sparse.training.rows_triton").TritonLookup
        return form
    return TorchLookup


def in_table(ids: Tensor, rows: int) -> Tensor:
    """``ids`` as int64, with 0 for those outside ``[0, rows)``."""
    ids = ids.long()
    if ids.is_cpu:  # reading two numbers is quicker than three more passes, where that does not wait for a device
        least, most = ids.aminmax()
        if int(least) >= 0 and int(most) < rows:
            return ids
    return torch.where((ids < 0) | (ids >= rows), 0, ids)


def settle_rows(weight: Tensor, mask: BlockMask, rows: Tensor) -> None:
    """Writes zero to the removed elements of some rows of a live shard.

    Args:
        weight: the shard, ``(rect.rows, rect.cols)``; written through ``.data``, which autograd does not see.
        mask: of the shard.
        rows: int64 ``(n,)``, local row numbers within the shard, repeated or not.
    """
    live = weight.data
    block_rows = rows
    if mask.block[0] != 1:
        block_rows = (rows + mask.rect.row) // mask.block[0] - mask.grid.row
    if mask.grid.cols == 1:
        kept = mask.bits.index_select(0, block_rows >> 3) >> (block_rows & 7).to(torch.uint8)
        live.index_fill_(0, rows.masked_select((kept & 1) == 0), 0)
        return
    words = live.view(_WORDS[live.element_size()])
    step = max(1, _CHUNK // mask.rect.cols)
    for some, blocks in zip(torch.split(rows, step), torch.split(block_rows, step), strict=True):
        words.index_copy_(0, some, words.index_select(0, some).bitwise_and_(_words(mask, blocks, words.dtype)))


def _words(mask: BlockMask, block_rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask of some block rows, ``(n, rect.cols)`` words: all bits set where kept, none where removed."""
    width = mask.block[1]
    cols, rect = mask.grid.cols, mask.rect
    device = mask.bits.device
    if cols % 8 == 0 and rect.cols == cols * width:
        per_row = cols // 8
        at = block_rows.unsqueeze(1) * per_row + torch.arange(per_row, device=device)
        bytes_ = mask.bits.index_select(0, at.flatten()).to(torch.int32)
        return _spread(width, dtype, device).index_select(0, bytes_).view(-1, rect.cols)
    columns = torch.arange(rect.col, rect.col_end, device=device) // width - mask.grid.col
    at = (block_rows.unsqueeze(1) * cols + torch.arange(cols, device=device)).flatten()
    kept = (mask.bits.index_select(0, at >> 3) >> (at & 7).to(torch.uint8)) & 1
    kept = kept.to(dtype).neg_().view(-1, cols)
    return kept if cols == rect.cols else kept.index_select(1, columns)


@lru_cache(maxsize=16)
def _spread(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each byte of a mask the words of the ``8 * width`` columns that it stands for: ``(256, 8 * width)``."""
    byte, bit = torch.arange(256, device=device), torch.arange(8, device=device)
    return ((byte.unsqueeze(1) >> bit) & 1).to(dtype).neg_().repeat_interleave(width, dim=1)
