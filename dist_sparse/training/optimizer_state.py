"""Which optimizer state belongs to what is removed?

State with an element for each weight goes with its element. State with one for each row of a shard (row-wise Adagrad)
goes when the whole row of that shard is removed, and stays while something of the row is kept. Other state (step
counts) belongs to no weight.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dist_sparse.masks import BlockMask

__all__ = ["reset_state"]


def reset_state(mask: BlockMask | Tensor, states: Iterable[Tensor]) -> None:
    """Writes zero, the initial value of all state, to the state of what ``mask`` removes.

    Args:
        mask: of one shard, or a dense one of plain data.
        states: live views; those that fit neither the elements nor the rows are left alone.
    """
    if isinstance(mask, Tensor):
        for state in states:
            if state.shape == mask.shape:
                state.data.masked_fill_(mask == 0, 0)
        return
    if not mask.removes:
        return
    shape = (mask.rect.rows, mask.rect.cols)
    gone: Tensor | None = None
    for state in states:
        if tuple(state.shape) == shape:
            mask.apply_(state)
        elif state.dim() in (1, 2) and state.numel() == state.shape[0] == shape[0]:
            gone = _empty_rows(mask) if gone is None else gone
            state.data.view(-1).masked_fill_(gone, 0)


def _empty_rows(mask: BlockMask) -> Tensor:
    """The rows of which nothing is kept: bool ``(rect.rows,)``."""
    gone = torch.empty(mask.rect.rows, dtype=torch.bool, device=mask.bits.device)
    for rows, kept in mask.element_chunks():
        gone[rows] = ~kept.any(dim=1)
    return gone
