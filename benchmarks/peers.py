"""Alternatives to a mask update of the library, and a lower bound for its time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.ao.pruning._experimental.data_sparsifier import DataNormSparsifier as AncestorSparsifier

from dist_sparse.masking.scores import block_sums, block_widths, to_scores
from dist_sparse.tables.shards import Block, Rect, grid_of

__all__ = ["ancestor", "by_hand", "gather_and_select", "norm_pass"]


def norm_pass(weight: Tensor, rows: int = 16384) -> Tensor:
    """The floor: one read of the weights, row sums of squares in float64, in chunks."""
    out = torch.empty(weight.shape[0])
    buffer = torch.empty(rows, weight.shape[1], dtype=torch.float64)
    for start in range(0, weight.shape[0], rows):
        part = buffer[: min(rows, weight.shape[0] - start)]
        part.copy_(weight[start : start + rows])
        torch.mul(part, part, out=part)
        out[start : start + rows] = part.sum(1)
    return out


def ancestor(weight: Tensor, block: Block, norm: str) -> AncestorSparsifier:
    """torch.ao's sparsifier over one process's table; ``step()`` is what is timed."""
    return AncestorSparsifier(
        [("table", weight)], sparsity_level=0.5, sparse_block_shape=block, norm=norm
    )


def by_hand(weights: list[Tensor], width: int, level: float) -> None:
    """A mask update in a few lines, in one process: mean squares of ``(1, width)`` blocks,
    ``topk``, multiply."""
    for weight in weights:
        scores = (weight * weight).view(-1, width).mean(1)
        kept = torch.ones_like(scores)
        kept[scores.topk(round(level * scores.numel()), largest=False).indices] = 0
        weight.view(-1, width).mul_(kept.unsqueeze(1))


def gather_and_select(
    tensor: Tensor, rect: Rect, shape: tuple[int, int], block: Block, norm: str, k: int, *, by: str
) -> Tensor:
    """The obvious distributed way: the library's own scores, gathered whole by every rank, then
    ``topk`` or ``kthvalue``.

    Args:
        tensor: this rank's shard, at ``rect`` of a table of ``shape``; shards of all ranks have one
            size.
        by: ``"topk"`` (exactly k) or ``"kthvalue"`` (a threshold: quicker, but ties are not
            broken).

    Returns:
        Removed flags of this rank's blocks, bool ``(block rows, block columns)``. Collective over
        the world.
    """
    grid = grid_of(rect, block)
    by_columns = rect.cols < shape[1]
    whole_rows = block[1] == shape[1]
    if by_columns and whole_rows:  # every rank has a part of every row
        sums = torch.cat([part.clone() for _, part in block_sums(tensor, rect, block, norm)])  # type: ignore[arg-type]
        parts = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, sums)
        scores = torch.stack(parts).sum(0).div_(shape[1]).float().flatten()
        return _select(scores, k, by).view(-1, 1)
    widths = block_widths(shape, block, torch.arange(grid.col, grid.col + grid.cols))
    local = torch.empty(grid.rows, grid.cols)
    for first, part in block_sums(tensor, rect, block, norm):  # type: ignore[arg-type]
        local[first : first + part.shape[0]] = to_scores(
            part, grid.row + first, widths, shape, block
        )
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    removed = _select(torch.cat([g.flatten() for g in gathered]), k, by)
    mine = dist.get_rank() * local.numel()
    return removed[mine : mine + local.numel()].view_as(local)


def _select(scores: Tensor, k: int, by: str) -> Tensor:
    if by == "kthvalue":
        return scores <= scores.kthvalue(k).values
    removed = torch.zeros(scores.numel(), dtype=torch.bool)
    removed[scores.topk(k, largest=False, sorted=False).indices] = True
    return removed
