"""Device memory that is kept for small messages.

A backend such as NCCL takes tensors of a device only, and most messages are made in CPU memory. If
each took memory of the device, ranks could not agree that one of them has run out of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Bytes of a rank that are sent at a time. Agreements send 32; texts of errors a few thousand.
PIECE = 1 << 13


class KeptBuffers:
    """Memory on a device for one piece of every rank, and in pinned CPU memory for this rank's,
    from the first message on.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._on = torch.device("cpu")
        self._host = self._sent = self._gathered = torch.empty(0)

    def gather(
        self, tensor: Tensor, device: torch.device, send: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        """Return all ranks' tensors, stacked, in CPU memory. Collective. Allocates nothing on the
        device, except in the first message.

        Args:
            tensor: in CPU memory, of one shape on all ranks.
            device: which the backend takes.
            send: is called with one tensor for all ranks' pieces and this rank's piece.
        """
        self._allocate(device)
        raw = tensor.contiguous().flatten().view(torch.uint8)
        pieces = []
        for piece in torch.split(raw, PIECE):
            length = len(piece)
            sent, gathered = self._sent[:length], self._gathered[: self._size * length]
            self._host[:length].copy_(piece)
            sent.copy_(self._host[:length], non_blocking=True)
            send(gathered, sent)
            # This waits for the copy above too, before the next piece is written over it.
            pieces.append(gathered.cpu().view(self._size, length))
        return torch.cat(pieces, 1).view(tensor.dtype).view(self._size, *tensor.shape)

    def _allocate(self, device: torch.device) -> None:
        # The first group may be made before the tables and set_device().
        if device == self._on:
            return
        # From pinned memory, the host does not wait for the copy.
        self._host = torch.empty(PIECE, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._sent = torch.empty(PIECE, dtype=torch.uint8, device=device)
        self._gathered = torch.empty(self._size * PIECE, dtype=torch.uint8, device=device)
        self._on = device
