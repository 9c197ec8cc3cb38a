"""Which elements of a chosen block go, when only some of them do (``zeros_per_block`` smaller than the block)?"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_sparse.tables.shards import Block

__all__ = ["smallest_in_blocks"]


def smallest_in_blocks(scores: Tensor, chosen: Tensor, block: Block, zeros: int) -> Tensor:
    """The ``zeros`` smallest elements of each chosen block; among equal scores those first in the block's row-major
    order.

    Args:
        scores: element scores, float32 ``(rows, cols)``, starting at the corner of a block. Blocks at the right and
            lower edge may be smaller; one with no more than ``zeros`` elements goes as a whole.
        chosen: bool ``(block rows, block columns)``.
        zeros: at least 1, at most the block's area.

    Returns:
        Removed flags, bool ``(rows, cols)``.
    """
    height, width = block
    rows, cols = scores.shape
    down, across = chosen.shape
    padded = scores.new_full((down * height, across * width), torch.inf)  # padding ranks behind every (finite) element
    padded[:rows, :cols] = scores
    blocks = padded.view(down, height, across, width).transpose(1, 2).reshape(down, across, height * width)
    smallest = blocks.argsort(dim=-1, stable=True)[..., :zeros]
    gone = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, smallest, True) & chosen.unsqueeze(-1)
    flat = gone.view(down, across, height, width).transpose(1, 2).reshape(down * height, across * width)
    return flat[:rows, :cols]
