"""Local scoring pass: scores of the blocks of many tables, of this rank's shards.

Each shard is read once, in chunks; where scores are kept, only the rows written since the last
update. Nothing is communicated or changed, so an error found here stops all ranks in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.cached.kept_scores import Keeping, KeptScores
from dist_sparse.masking.cuts import CutTable, Partials
from dist_sparse.masking.device import on_host, pieces_on
from dist_sparse.masking.flat import FlatScores, flat_width, kernels_on, too_large
from dist_sparse.masking.scores import (
    BATCH,
    SMALL,
    Measure,
    WeightedSquares,
    block_sums,
    block_widths,
    element_scores,
    score_batch,
    to_scores,
)
from dist_sparse.masking.segments import (
    HISTOGRAM,
    NOT_FINITE,
    JointPart,
    JointScores,
    Segment,
    first_histogram,
)
from dist_sparse.masking.selection import NOTHING, Threshold
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Grid, Rect, Shard, ShardedData, grid_of


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Target of a mask update for one table: its block shape, how many blocks to remove, and how to
    score them.

    Args:
        data: the table as it is stored now.
        block: the sparse block, in elements.
        k: number of blocks to prune; of a pool of tables, on average.
        most: most blocks of this table that a pool may prune.
        zeros: elements removed in a pruned block; the block's area removes all of it, however small
            an edge block is.
        measure: how elements are scored.
        whole_columns: blocks are as high as the table, whatever its height.
        keeping: the scores that are kept from one mask update to the next.
        only_zeros: prune no block that scores more than 0.
    """

    data: ShardedData
    block: Block
    k: int
    most: int
    zeros: int
    measure: Measure
    whole_columns: bool = False
    keeping: Keeping | None = None
    only_zeros: bool = False

    @property
    def grid(self) -> Grid:
        return grid_of(Rect(0, 0, *self.data.shape), self.block)

    @property
    def blocks(self) -> int:
        """Number of blocks in the whole table."""
        return self.grid.blocks

    @property
    def price(self) -> int:
        """Bytes of the weights that a pruned block loses."""
        return min(self.zeros, self.block[0] * self.block[1]) * self.data.dtype.itemsize

    @property
    def shows_zeros(self) -> bool:
        """Whether a block that scores 0 is zero already, if every write to removed weights has been
        masked.

        A norm of 0 means that the block is zero (or that its squares underflow float32: weights
        below 1e-22). Weighted squares underflow sooner, below 4e-8 in rows without gradients. Such
        a block is zero too if it was removed before, as these scores need an enforcer; and newly
        removed blocks are zeroed whatever they score.
        """
        return self.measure in ("L1", "L2") or isinstance(self.measure, WeightedSquares)

    @property
    def mask_block(self) -> Block:
        """What one bit of the masks stands for."""
        return (1, 1) if self.by_element else self.block

    @property
    def by_element(self) -> bool:
        """Whether the masks are not constant on blocks."""
        return self.zeros < self.block[0] * self.block[1]


@dataclass
class ScoredTable:
    """One table between scoring and masks.

    Args:
        cuts: its cut blocks, if there are any.
        owned: the shards whose scores this rank counts.
        segments: the scores of this rank's shards.
        threshold: once it is selected.
    """

    goal: Goal
    cuts: CutTable | None
    owned: Collection[Rect]
    segments: dict[Rect, Segment] = field(default_factory=dict)
    threshold: Threshold = NOTHING

    def kept_scores(self, rect: Rect) -> KeptScores | None:
        """Return the kept scores of a shard, if any; of cut blocks none are kept."""
        keeping = self.goal.keeping if self.cuts is None else None
        return None if keeping is None else keeping.scores.get(rect)


def score_tables(goals: Sequence[Goal], ranks: Sequence[int]) -> list[ScoredTable]:
    """Score this rank's shards of many tables. Local: sends nothing. Tables that are alike share
    launches, and small ones a pass.

    Args:
        goals: the same on every rank, but for the live views in them.
        ranks: this rank in the group of each table.

    Raises:
        ValueError: a score is not finite or is negative, or a block that loses only some elements
            is cut by a column border.
    """
    tables = []
    groups: dict[tuple[Any, ...], list[ScoredTable]] = {}
    for goal, rank in zip(goals, ranks, strict=True):
        table = ScoredTable(goal, cuts_of(goal), goal.data.owned(rank))
        tables.append(table)
        groups.setdefault(_way_to_score(table), []).append(table)
    counted: list[_Counted] = []
    for (score, *_), alike in groups.items():
        counted += score(alike)
    if not _read(counted):
        # One of them raises, with the name of its table.
        for goal in goals:
            _find_refused(goal)
    return tables


class _Counted(NamedTuple):
    """Scores that are counted on their device, where the host has not read the counts yet.

    Args:
        segments: of the scores.
        histograms: int64 ``(segments, HISTOGRAM)``.
        extremes: some least and largest scores, int64 ``(n,)``. Histograms do not show negative
            ones.
        flat: where kernels have counted.
    """

    segments: Sequence[Segment]
    histograms: Tensor
    extremes: Tensor
    flat: FlatScores | None = None


def _read(counted: Sequence[_Counted]) -> bool:
    """Bring the histograms of all segments to the host, with one wait. Return whether all scores
    are finite and not negative."""
    waiting = [each.histograms for each in counted] + [each.extremes for each in counted]
    read = on_host(waiting)
    all_extremes = read[len(counted) :]
    fine = True
    for (segments, *_, flat), counts, extremes in zip(counted, read, all_extremes, strict=False):
        histograms = counts.view(-1, HISTOGRAM)
        too_high = bool(histograms[:, 1 + (NOT_FINITE >> LEADING_SHIFT) :].any())
        fine = fine and not too_high and not _refused(extremes)
        for segment, histogram in zip(segments, histograms, strict=True):
            segment.histogram = histogram
        if flat is not None:
            flat.counts = histograms
    return fine


def _way_to_score(table: ScoredTable) -> tuple[Any, ...]:
    """Return the function that scores a table, and what it has in common with others that the
    function scores together."""
    goal, data = table.goal, table.goal.data
    # Only of one shard, of whole blocks that no border cuts, by a norm.
    if len(data.shards) != 1 or table.cuts is not None or goal.by_element or callable(goal.measure):
        return (_score_alone,)
    [(rect, tensor)] = data.shards
    common = data.ranks, tensor.device, data.dtype
    width = _width_for_kernels(goal, rect, tensor)
    if width is not None:
        return _score_flat, *common, width, goal.measure
    # Single elements are scored without a copy; taller blocks may reach into the next shard.
    if goal.block[0] == 1 != goal.block[1] and 0 < rect.numel <= SMALL:
        measure = WeightedSquares if isinstance(goal.measure, WeightedSquares) else goal.measure
        return _score_small, *common, data.shape[1], rect.col, rect.cols, goal.block, measure
    return (_score_alone,)


def _width_for_kernels(goal: Goal, rect: Rect, tensor: Tensor) -> int | None:
    """Return the block width of a shard that kernels can score, else None."""
    # Products of two float64 are rounded, by kernels and CPUs in different places.
    if goal.measure not in ("L1", "L2") or tensor.dtype == torch.float64:
        return None
    return None if kernels_on(tensor.device) is None else flat_width(rect, goal.block, tensor)


def _score_flat(tables: Sequence[ScoredTable]) -> Iterator[_Counted]:
    """Score tables by kernels."""
    shards = [table.goal.data.shards[0] for table in tables]
    blocks = [table.goal.block for table in tables]
    scores = FlatScores(shards, blocks, tables[0].goal.measure == "L1")
    segments = _joint_segments(tables, scores, scores.held or [None] * len(tables))
    counts = scores.first_histograms()
    yield _Counted(segments, counts, counts.new_empty(0), scores)


def _joint_segments(
    tables: Sequence[ScoredTable],
    scores: FlatScores | JointScores,
    held: Sequence[Tensor | None],
) -> list[Segment]:
    """Return the segments of tables that are scored together, with the scores that are held."""
    segments = []
    for i, (table, bits) in enumerate(zip(tables, held, strict=True)):
        # Scored again for what kernels leave to torch: ties that they have not listed.
        segment = _add_segment(table, table.goal.data.shards[0], reads=bits is None)
        if bits is not None:
            segment.add(bits.view(-1, len(segment.columns)))
        segment.joint = JointPart(scores, i)
        segments.append(segment)
    return segments


def _score_small(tables: Sequence[ScoredTable]) -> Iterator[_Counted]:
    """Score small tables, in as many passes as memory asks for."""
    batch: list[ScoredTable] = []
    elements = 0
    for table in tables:
        numel = table.goal.data.shards[0].rect.numel
        if elements + numel > BATCH:
            yield _score_together(batch)
            batch, elements = [], 0
        batch.append(table)
        elements += numel
    yield _score_together(batch)


def _score_together(tables: Sequence[ScoredTable]) -> _Counted:
    """Score small tables in one pass."""
    goals = [table.goal for table in tables]
    shards = [goal.data.shards[0] for goal in goals]
    width, block = goals[0].data.shape[1], goals[0].block
    scores, rows = score_batch(shards, width, block, [goal.measure for goal in goals])
    bits = scores.view(torch.int32)
    extremes = torch.stack(bits.aminmax())
    cols = bits.shape[1]
    starts, blocks = [row * cols for row in rows], [shard.rect.rows * cols for shard in shards]
    joint = JointScores(bits.view(-1), starts, blocks)
    joint.mark_gaps()
    segments = _joint_segments(tables, joint, joint.parts())
    return _Counted(segments, joint.first_histograms(), extremes.long())


def _score_alone(tables: Sequence[ScoredTable]) -> Iterator[_Counted]:
    """Score each shard of some tables in a pass of its own."""
    for table in tables:
        for shard in table.goal.data.shards:
            # A rank may hold two replicas of a shard.
            if shard.rect not in table.segments:
                yield from _score_shard(table, shard)


def _score_shard(table: ScoredTable, shard: Shard) -> Iterator[_Counted]:
    """Score a shard, and note in ``table`` what is known of its cut blocks."""
    goal, kept = table.goal, table.kept_scores(shard.rect)
    if kept is not None and goal.keeping is not None:
        score_all = partial(_score_all, goal, shard)
        kept.update(shard, goal.data.shape, goal.block, goal.keeping, score_all)
        kept.fill(_add_segment(table, shard))
        return
    again = goal.block == (1, 1) or (table.cuts is None and _takes_much_memory(goal, shard))
    segment = _add_segment(table, shard, reads=again)
    if table.cuts is None:
        histogram, extremes = _score_blocks(goal, shard, None if again else segment.add)
    else:
        cut = table.cuts.add_shard(shard.rect, shard.tensor.device)
        histogram, extremes = _score_blocks(goal, shard, segment.add, cut)
        _score_slabs(goal, shard, cut)
    yield _Counted([segment], histogram, extremes)


def _add_segment(table: ScoredTable, shard: Shard, reads: bool = False) -> Segment:
    """Return the segment for the scores of a shard; with ``reads``, they are computed again in each
    pass."""
    goal, grid = table.goal, grid_of(shard.rect, table.goal.block)
    segment = table.segments[shard.rect] = Segment(
        grid.row,
        range(grid.col, grid.col + grid.cols),
        goal.grid.cols,
        shard.tensor.device,
        read=partial(_bits_again, goal, shard) if reads else None,
        counts=shard.rect in table.owned,
    )
    return segment


def cuts_of(goal: Goal) -> CutTable | None:
    """Return the goal's cut blocks, or None if every block is within one shard.

    Raises:
        ValueError: a column border cuts blocks that are to lose only some of their elements.
    """
    data, block = goal.data, goal.block
    rows = {rect.row // block[0] for rect in data.rects if rect.row % block[0]}
    cols = {rect.col // block[1] for rect in data.rects if rect.col % block[1]}
    if goal.whole_columns and rows:
        # One block row, the whole table: its blocks are exchanged as partial sums, however cut.
        rows, cols = set(), set(range(goal.grid.cols))
    if goal.by_element and cols:
        raise ValueError(_cut_by_columns(goal))
    if not rows and not cols:
        return None
    return CutTable(data, block, tuple(sorted(rows)), tuple(sorted(cols)), goal.by_element)


def _cut_by_columns(goal: Goal) -> str:
    borders = sorted({rect.col for rect in goal.data.rects if rect.col})
    common = math.gcd(*borders)
    # Longer lists would not be read.
    fits = [width for width in range(1, min(goal.block[1], 64)) if common % width == 0]
    return (
        f"Table {goal.data.name!r}: zeros_per_block={goal.zeros} is smaller than the block"
        f" {goal.block}, so a column border may not cut blocks, but borders are at columns"
        f" {borders}; block widths that fit: {fits or [1]}."
    )


def _score_blocks(
    goal: Goal, shard: Shard, hold: Callable[[Tensor], None] | None, cut: Partials | None = None
) -> tuple[Tensor, Tensor]:
    """Return the histogram and the extremes of the scores of a shard's whole blocks, and fill
    ``cut`` with the partial sums of others.

    Args:
        hold: takes pieces of the scores, with KEPT in the place of cut blocks.
    """
    device = shard.tensor.device
    histogram = torch.zeros(HISTOGRAM, dtype=torch.int64, device=device)
    extremes = [torch.empty(0, dtype=torch.int32, device=device)]
    # Memory to work in: tensors between those that are kept would leave holes in the heap.
    scratch = torch.empty(0, dtype=torch.int32)
    for first, bits in _score_pieces(goal, shard, cut):
        extremes.append(torch.stack(bits.aminmax()))
        if bits.is_cpu and _refused(extremes[-1]):
            _find_refused(goal)  # negative numbers can't be counted
        if cut is not None:
            if cut.cuts_all:
                continue  # nothing is held until the decision
            cut.mark(bits, first)
        histogram += first_histogram(bits.view(-1), scratch)
        if hold is not None:
            hold(bits)
    if cut is not None:
        histogram[-1].zero_()  # of KEPT
    return histogram, torch.cat(extremes).long()


def _score_slabs(goal: Goal, shard: Shard, cut: Partials) -> None:
    """Score the elements of cut block rows, which their owner puts together."""
    rect = shard.rect
    for i in cut.rows:
        inner = rect.intersect(Rect(i * goal.block[0], rect.col, goal.block[0], rect.cols))
        assert inner is not None
        rows = shard.tensor[inner.row - rect.row : inner.row_end - rect.row]
        cut.elements[i] = element_scores(rows, goal.measure, (inner.row, inner.col))


def _score_pieces(
    goal: Goal, shard: Shard, cut: Partials | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first block row, counted from the shard's own first, and the scores of pieces that
    are worth the calls on them; int32 ``(block rows, block columns)``."""
    grid, shape, device = grid_of(shard.rect, goal.block), goal.data.shape, shard.tensor.device
    columns = torch.arange(grid.col, grid.col + grid.cols, device=device)
    widths = block_widths(shape, goal.block, columns)
    waiting: list[Tensor] = []
    least = pieces_on(device).scores
    start = 0
    for first, sums in block_sums(shard.tensor, shard.rect, goal.block, goal.measure):
        last = first + sums.shape[0]
        if cut is not None:
            cut.note(first, sums)
        waiting.append(to_scores(sums, grid.row + first, widths, shape, goal.block))
        if (last - start) * grid.cols >= least or last == grid.rows:
            scores = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            yield start, scores.view(torch.int32)
            waiting, start = [], last


def _score_all(goal: Goal, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return the scores of a shard that no border cuts, in one piece, and their histogram."""
    pieces: list[Tensor] = []
    histogram, _ = _score_blocks(goal, shard, pieces.append)
    return torch.cat(pieces), histogram


def _takes_much_memory(goal: Goal, shard: Shard) -> bool:
    """Whether the scores of a shard are too large to be held."""
    if shard.tensor.is_cpu or goal.by_element:
        return False
    return too_large(4 * grid_of(shard.rect, goal.block).blocks, shard.tensor.nbytes)


def _bits_again(goal: Goal, shard: Shard) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(start, scores)`` of a shard that no border cuts, int32, flat."""
    for first, bits in _score_pieces(goal, shard):
        yield first * bits.shape[1], bits.view(-1)


def _refused(extremes: Tensor) -> bool:
    """Return whether a score is negative or not finite, from the least and the largest."""
    return bool(((extremes < 0) | (extremes >= NOT_FINITE)).any())


def _find_refused(goal: Goal) -> None:
    """Score a table again, to name the first score that is refused."""
    for shard in goal.data.shards:
        grid = grid_of(shard.rect, goal.block)
        for first, bits in _score_pieces(goal, shard):
            found = ((bits < 0) | (bits >= NOT_FINITE)).nonzero().tolist()
            if not found:
                continue
            i, j = found[0]
            row, col = (grid.row + first + i) * goal.block[0], (grid.col + j) * goal.block[1]
            raise ValueError(
                f"Table {goal.data.name!r}: the block at row {row}, column {col} scores"
                f" {float(bits.view(torch.float32)[i, j])}; scores must be finite and not negative,"
                " so no mask was changed."
            )
