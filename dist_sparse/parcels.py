"""One all-to-all of several tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from dist_sparse.groups import Group

# Reads a parcel once it has arrived.
Read = Callable[[], Tensor]


class Parcels:
    """One all-to-all: pack tensors per receiver, read them per sender.

    Call :meth:`send` and :meth:`expect` for all of them, then :meth:`exchange`. What is expected
    from a rank must come in the order in which that rank sends it: both sides loop over the same
    metadata.

    Args:
        group: over which to send.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pieces: list[list[Tensor]] = [[] for _ in group.ranks]
        self._lengths = [0] * group.size
        self._sizes = [0] * group.size
        self._received: Sequence[Tensor] = ()

    def send(self, receiver: int, tensor: Tensor) -> None:
        """Pack a contiguous tensor for group rank ``receiver``. It is released once it is
        copied."""
        self._pieces[receiver].append(tensor.view(-1).view(torch.uint8))
        self._lengths[receiver] += tensor.nbytes

    def expect(self, sender: int, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Read:
        """Return a function that gives the next tensor of group rank ``sender``, of this shape and
        dtype, once :meth:`exchange` has been called. It may be a view of the received bytes."""
        start = self._sizes[sender]
        stop = self._sizes[sender] = start + math.prod(shape) * dtype.itemsize

        def read() -> Tensor:
            part = self._received[sender][start:stop]
            # Tensors of several dtypes follow each other, and a view as a dtype must be aligned.
            aligned = (part.storage_offset() % dtype.itemsize) == 0
            return (part if aligned else part.clone()).view(dtype).view(tuple(shape))

        return read

    def exchange(self, device: torch.device) -> None:
        """Send and receive everything, to tensors on ``device``. Collective over the group."""
        # An empty tensor first, as torch.cat() takes no empty list. It takes one device, too.
        raw = [torch.empty(0, dtype=torch.uint8, device=self._group.device)]
        raw += [piece.to(self._group.device) for piece in chain(*self._pieces)]
        packed = torch.cat(raw)
        # Free the pieces, which may be large, before the result is allocated.
        raw.clear()
        self._pieces.clear()
        received = self._group.all_to_all(packed, self._lengths, self._sizes)
        self._received = torch.split(received.to(device), self._sizes)
