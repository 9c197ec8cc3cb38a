"""Few changes in one mask update: removed blocks that must stay removed, chosen before the others are.

Of a table, ``max_change`` of the blocks may change their state, or as many as the level needs if those are more. So of
the blocks that are removed all but some must stay: those with the smallest scores are held, exactly as a threshold
over all ranks has it, and the rest of the level is selected among all other blocks. What comes back is then what scores
highest, and no other masks with so few changes keep more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from dist_sparse.groups import Group
from dist_sparse.masking.block_masks import spread_replicas
from dist_sparse.masking.block_scores import ScoredTable
from dist_sparse.masking.masks import BlockMask
from dist_sparse.masking.segments import KEPT, Segment
from dist_sparse.masking.selection import Candidates, select_smallest

__all__ = ["hold_removed", "most_held"]


def most_held(blocks: int, before: int, after: int, max_change: float) -> int:
    """Return how many of the ``before`` blocks that are removed must stay so, if ``after`` are to be removed and the
    state of at most ``max_change`` of all ``blocks`` changes, or of as many as ``before`` and ``after`` differ by.

    Example::

        >>> from dist_sparse.masking.held import most_held
        >>> most_held(100, before=50, after=54, max_change=0.1)  # 7 are removed, 3 come back
        47
    """
    swaps = max(math.floor(max_change * blocks + 1e-9) - abs(after - before), 0) // 2
    return max(min(before, after) - swaps, 0)


def hold_removed(
    scored: Sequence[ScoredTable], masks: Sequence[Sequence[BlockMask]], max_change: float, group: Group
) -> list[ScoredTable]:
    """Return the tables with the blocks held that must stay removed. Collective over ``group``: one all-reduce, and as
    many as a selection if something is held.

    Args:
        scored: scores are written to.
        masks: of each table, those of this rank's shards.
    """
    removed = torch.zeros(len(scored), dtype=torch.int64)
    others: list[dict[int, Segment]] = []
    for i, (table, held) in enumerate(zip(scored, masks, strict=True)):
        by_rect = {mask.rect: mask for mask in held}
        others.append({})
        for rect, segment in table.segments.items():
            others[i][id(segment)] = only = _removed_ones(segment, by_rect[rect])
            if segment.counts:
                removed[i] += sum(int((bits != KEPT).sum()) for _, bits in only.pieces())
    removed = group.all_reduce(removed)
    wanted = [
        most_held(table.goal.blocks, int(before), table.goal.k, max_change)
        for table, before in zip(scored, removed, strict=True)
    ]
    asked = [i for i, count in enumerate(wanted) if count]
    candidates = [
        Candidates(
            scored[i].goal.data.name,
            wanted[i],
            scored[i].goal.blocks,
            [*others[i].values()],
            spread_replicas(scored[i].goal.data),
        )
        for i in asked
    ]
    found = list(scored)
    for i, threshold in zip(asked, select_smallest(candidates, group), strict=True):
        goal, held_blocks = scored[i].goal, []
        for segment in scored[i].segments.values():
            only = others[i][id(segment)]
            for (start, bits), (_, chosen) in zip(segment.chunks(), only.chunks(), strict=True):
                held_blocks.append((bits, threshold.removes(only, start, chosen)))
                bits[held_blocks[-1][1]] = KEPT
            segment.first_histogram = None
        goal = replace(goal, k=goal.k - wanted[i])
        found[i] = replace(scored[i], goal=goal, held=wanted[i], held_blocks=held_blocks)
    return found


def _removed_ones(segment: Segment, mask: BlockMask) -> Segment:
    """The scores of the blocks that a mask removes; KEPT in the places of the others."""
    only = Segment(segment.first_row, segment.col_ids, segment.grid_cols, counts=segment.counts)
    kept = mask.flags()
    for first, bits in segment.pieces():
        only.add(torch.where(kept[first : first + len(bits)], KEPT, bits))
    return only
