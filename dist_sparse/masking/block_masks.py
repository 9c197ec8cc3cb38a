"""New masks of many tables over many ranks: score, select, mask.

:func:`score_tables` is the local half: each shard is read once, in chunks; where scores are kept,
only the rows written since the last update. Nothing is communicated or changed, so an error found
there stops all ranks in time. :func:`new_masks` is the collective half: its three steps are in
order, what they call is below. Neither writes to weights or to old masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_sparse.groups import Group
from dist_sparse.masking import scores as scoring
from dist_sparse.masking.cuts import (
    CutTable,
    Decision,
    Owned,
    Partials,
    exchange_partials,
    return_decisions,
)
from dist_sparse.masking.device import flat_width, on_host, pieces_on, too_large
from dist_sparse.masking.flat_scores import FlatScores
from dist_sparse.masking.kept_scores import Keeping, KeptScores
from dist_sparse.masking.masks import BitWriter, BlockMask
from dist_sparse.masking.scores import (
    HISTOGRAM,
    KEPT,
    NOT_FINITE,
    REMOVED,
    Batch,
    ByTotals,
    JointScores,
    NewBits,
    RowTotals,
    Segment,
)
from dist_sparse.masking.selection import (
    NOTHING,
    Candidates,
    Dirty,
    NewMask,
    Pool,
    Threshold,
    mask_of_blocks,
    select_smallest,
)
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Grid, Rect, Shard, ShardedData, grid_of

# Most elements of a shard that is scored together with others: a call of torch costs as much as the
# work on a few kilobytes.
SMALL = 1 << 14

# Elements of small tables that one pass scores, give or take a table.
_BATCH = 1 << 20


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
    measure: scoring.Measure
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
        by_norm = isinstance(self.measure, str)
        return by_norm or (isinstance(self.measure, ByTotals) and self.measure.squares)

    @property
    def by_element(self) -> bool:
        """Whether the masks are not constant on blocks."""
        return self.zeros < self.block[0] * self.block[1]


@dataclass
class ScoredTable:
    """One table between scoring and masks.

    Attributes:
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
        keeping = self.goal.keeping
        return None if keeping is None or self.cuts else keeping.scores.get(rect)


class MadeMasks(NamedTuple):
    """The new masks of a table.

    Args:
        masks: of this rank's shards, in their order.
        block: what one of their bits stands for.
        threshold: of the scores, if they decide.
        removed: number of removed blocks over all ranks; None if it is not known.
    """

    masks: list[NewMask]
    block: Block
    threshold: Threshold = NOTHING
    removed: int | None = None


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
    extremes: list[Tensor] = []
    for (score, *_), alike in groups.items():
        extremes += score(alike)
    _read(tables, extremes)
    return tables


def new_masks(scored: Sequence[ScoredTable], group: Group, pooled: bool = False) -> list[MadeMasks]:
    """Return the new masks of this rank's shards, per table in the order of its shards. Collective
    over ``group``.

    If ``pooled``, the bytes that the tables' ``k`` remove together are removed wherever scores are
    smallest.

    At most three all-reduces, two all-to-alls if a block is cut, and at most three more all-reduces
    if scores tie at a threshold.
    """
    # 1. Score: done by score_tables(), but for blocks that shard borders cut. Each of these has one
    # rank that owns it.
    cut = [table.cuts for table in scored if table.cuts is not None]
    devices = (shard.tensor.device for table in scored for shard in table.goal.data.shards)
    device = next(devices, torch.device("cpu"))
    if cut:
        exchange_partials(cut, group, device)

    # 2. Select: the exact threshold of every table.
    _select(scored, group, pooled)

    # 3. Mask: the owners of cut blocks return their decisions; all else follows from scores and
    # threshold.
    for table in scored:
        if table.cuts is not None:
            table.cuts.decision = _decide(table.goal, table.threshold, table.cuts.owned)
    if cut:
        return_decisions(cut, group, device)
    known = _bits_of_batches(scored)
    made = []
    for table in scored:
        goal, threshold = table.goal, table.threshold
        masks = [_new_mask(table, shard, known) for shard in goal.data.shards]
        if goal.by_element:
            made.append(MadeMasks(masks, (1, 1), threshold))
        else:
            made.append(MadeMasks(masks, goal.block, threshold, threshold.removed))
    return made


def _select(scored: Sequence[ScoredTable], group: Group, pooled: bool) -> None:
    """Find the threshold of every table. Collective over ``group``."""
    # Without anything to remove there is no pool.
    need = sum(table.goal.k * table.goal.price for table in scored) if pooled else 0
    pool = Pool(need, [table.goal.price for table in scored if table.goal.most]) if need else None
    candidates = []
    for table in scored:
        goal, segments = table.goal, [*table.segments.values()]
        if table.cuts is not None:
            segments += table.cuts.owned.segments
        k = goal.most if need else goal.k
        candidates.append(Candidates(goal.data.name, k, goal.blocks, segments, goal.only_zeros))
    thresholds = select_smallest(candidates, group, pool)
    for table, threshold in zip(scored, thresholds, strict=True):
        table.threshold = threshold


def _read(tables: Sequence[ScoredTable], extremes: Sequence[Tensor]) -> None:
    """Bring the histograms of all segments to the host, with one wait.

    Args:
        extremes: some least and largest scores, int64 ``(n,)``. Histograms do not show negative
            ones.

    Raises:
        ValueError: a score is negative or not finite.
    """
    segments = [segment for table in tables for segment in table.segments.values()]
    read = on_host([*(segment.histogram for segment in segments), *extremes])
    for segment, histogram in zip(segments, read, strict=False):
        segment.histogram = histogram
    refused = any(map(_refused, read[len(segments) :]))
    # With zeros, as a rank may hold no shard.
    counts = torch.stack([torch.zeros(HISTOGRAM, dtype=torch.int64), *read[: len(segments)]])
    refused |= bool(counts[:, 1 + (NOT_FINITE >> LEADING_SHIFT) :].any())
    if refused:
        # One of them raises, with the name of its table.
        for table in tables:
            _find_refused(table.goal)


def _way_to_score(table: ScoredTable) -> tuple[Any, ...]:
    """Return the function that scores a table, and what it has in common with others that the
    function scores together."""
    goal, data = table.goal, table.goal.data
    measure = _shared_measure(table)
    if measure is None:
        return (_score_alone,)
    [(rect, tensor)] = data.shards
    common = data.ranks, tensor.device, data.dtype, measure
    # The square of a float64 is rounded, by kernels and CPUs in different places.
    width = None if data.dtype == torch.float64 else flat_width(rect, goal.block, tensor)
    if width is not None:
        return _score_flat, *common, width
    # Single elements are scored without a copy; taller blocks may reach into the next shard.
    if tensor.is_cpu and goal.block[0] == 1 != goal.block[1] and rect.numel <= SMALL:
        return _score_small, *common, data.shape[1], rect.col, rect.cols, goal.block
    return (_score_alone,)


def _shared_measure(table: ScoredTable) -> tuple[object, ...] | None:
    """Return how a table is scored, equal for tables that may be scored in one pass; None if it
    needs passes of its own."""
    goal, shards = table.goal, table.goal.data.shards
    # Only of one shard that is not empty, of whole blocks that no border cuts.
    if len(shards) != 1 or table.cuts or goal.by_element or not shards[0].rect.numel:
        return None
    if isinstance(goal.measure, ByTotals):
        [known] = _totals([table])
        return goal.measure.squares, known.total.dtype, known.of_elements
    # A user's own knows one table.
    return (goal.measure,) if isinstance(goal.measure, str) else None


def _score_flat(tables: Sequence[ScoredTable]) -> list[Tensor]:
    """Score tables by kernels."""
    shards = [table.goal.data.shards[0] for table in tables]
    blocks = [table.goal.block for table in tables]
    measure = tables[0].goal.measure
    assert not callable(measure)
    _add_batch(tables, FlatScores(shards, blocks, measure, _totals(tables)))
    return []


def _add_batch(tables: Sequence[ScoredTable], batch: Batch) -> None:
    """Give the scores of a batch to its tables, in their order."""
    counts = batch.first_histograms()
    for i, (table, histogram) in enumerate(zip(tables, counts, strict=True)):
        # Scored again for what kernels leave to torch: ties that they have not listed.
        segment = _add_segment(table, table.goal.data.shards[0], reads=not batch.held)
        if batch.held:
            segment.add(batch.held[i].view(-1, len(segment.columns)))
        segment.batch, segment.number, segment.histogram = batch, i, histogram


def _score_small(tables: Sequence[ScoredTable]) -> Iterator[Tensor]:
    """Score small tables, in as many passes as memory asks for."""
    elements = accumulate(table.goal.data.shards[0].rect.numel for table in tables)
    numbered = zip((upto // _BATCH for upto in elements), tables, strict=True)
    for _, batch in groupby(numbered, key=itemgetter(0)):
        yield _score_together([table for _, table in batch])


def _score_together(tables: Sequence[ScoredTable]) -> Tensor:
    """Score small tables in one pass: alike in all but their rows, one below the other. Blocks of
    one row know nothing of their neighbours."""
    goal = tables[0].goal
    shards = [table.goal.data.shards[0] for table in tables]
    weights = torch.cat([tensor for _, tensor in shards])
    rows, first = len(weights), shards[0].rect
    rect = Rect(0, first.col, rows, first.cols)
    data = replace(goal.data, shape=(rows, goal.data.shape[1]))
    joint = replace(goal, data=data, measure=_measure_of_all(tables))
    pieces = _score_pieces(joint, Shard(rect, weights))
    bits = torch.cat([piece for _, piece in pieces])
    sizes = [rect.rows * bits.shape[1] for rect, _ in shards]
    _add_batch(tables, JointScores(bits.view(-1), sizes))
    return torch.stack(bits.aminmax()).long()


def _measure_of_all(tables: Sequence[ScoredTable]) -> scoring.Measure:
    """Return the measure of tables one below the other, with the totals of all their rows."""
    measure = tables[0].goal.measure
    if not isinstance(measure, ByTotals):
        return measure
    found = [known.of_rows(slice(None)) for known in _totals(tables)]
    # Totals of a row, or of each element: expanded where the tables differ.
    columns = max(each.shape[1] for each in found)
    total = torch.cat([each.expand(-1, columns) for each in found])
    joint = RowTotals(Rect(0, 0, *total.shape), total)
    return ByTotals(lambda offset: joint, measure.squares)


def _totals(tables: Sequence[ScoredTable]) -> list[RowTotals]:
    """Return the totals by which tables of one shard each are scored; none if it is by norms."""
    found = []
    for table in tables:
        measure = table.goal.measure
        [(rect, _)] = table.goal.data.shards
        if isinstance(measure, ByTotals):
            found.append(measure.find((rect.row, rect.col)))
    return found


def _score_alone(tables: Sequence[ScoredTable]) -> list[Tensor]:
    """Score each shard of some tables in a pass of its own."""
    extremes: list[Tensor] = []
    for table in tables:
        for shard in table.goal.data.shards:
            # A rank may hold two replicas of a shard.
            if shard.rect not in table.segments:
                extremes += _score_shard(table, shard)
    return extremes


def _score_shard(table: ScoredTable, shard: Shard) -> list[Tensor]:
    """Score a shard, and note in ``table`` what is known of its cut blocks."""
    goal, kept = table.goal, table.kept_scores(shard.rect)
    if kept is not None and goal.keeping is not None:
        score_all = partial(_score_all, goal, shard)
        kept.update(shard, goal.data.shape, goal.block, goal.keeping, score_all)
        kept.fill(_add_segment(table, shard))
        return []
    # Where scores are too large to be held, or as large as the weights, they are computed again.
    scores = 4 * grid_of(shard.rect, goal.block).blocks
    large = not (shard.tensor.is_cpu or goal.by_element) and too_large(scores, shard.tensor.nbytes)
    again = goal.block == (1, 1) or (table.cuts is None and large)
    segment = _add_segment(table, shard, reads=again)
    if table.cuts is None:
        segment.histogram, extremes = _score_blocks(goal, shard, None if again else segment.add)
    else:
        cut = table.cuts.add_shard(shard.rect, shard.tensor.device)
        segment.histogram, extremes = _score_blocks(goal, shard, segment.add, cut)
        _score_slabs(goal, shard, cut)
    return [extremes]


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
        histogram += scoring.first_histogram(bits.view(-1), scratch)
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
        cut.elements[i] = scoring.element_scores(rows, goal.measure, (inner.row, inner.col))


def _score_pieces(
    goal: Goal, shard: Shard, cut: Partials | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first block row, counted from the shard's own first, and the scores of pieces that
    are worth the calls on them; int32 ``(block rows, block columns)``."""
    grid = grid_of(shard.rect, goal.block)
    shape = goal.data.shape
    device = shard.tensor.device
    columns = torch.arange(grid.col, grid.col + grid.cols, device=device)
    widths = scoring.block_widths(shape, goal.block, columns)
    waiting: list[Tensor] = []
    least = pieces_on(device).scores
    start = 0
    for first, sums in scoring.block_sums(shard.tensor, shard.rect, goal.block, goal.measure):
        last = first + sums.shape[0]
        if cut is not None:
            cut.note(first, sums)
        waiting.append(scoring.to_scores(sums, grid.row + first, widths, shape, goal.block))
        if (last - start) * grid.cols >= least or last == grid.rows:
            # One piece is not copied.
            scores = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            yield start, scores.view(torch.int32)
            waiting, start = [], last


def _score_all(goal: Goal, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return the scores of a shard that no border cuts, in one piece, and their histogram."""
    pieces: list[Tensor] = []
    histogram, _ = _score_blocks(goal, shard, pieces.append)
    return torch.cat(pieces), histogram


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


def _decide(goal: Goal, threshold: Threshold, own: Owned) -> Decision:
    """Return the removed flags of the cut blocks that this rank owns."""
    slabs: dict[int, Tensor] = {}
    for i, (segment, elements) in own.slabs.items():
        gone = _removed(threshold, segment)
        if goal.by_element:
            slabs[i] = scoring.smallest_in_blocks(elements.float(), gone, goal.block, goal.zeros)
        else:
            slabs[i] = gone.flatten()
    return Decision(_removed(threshold, own.columns), slabs)


def _removed(threshold: Threshold, segment: Segment) -> Tensor:
    """Return the removed flags of a segment of one piece, bool ``(rows, cols)``."""
    [(_, bits)] = segment.pieces()
    return threshold.removes(segment, 0, bits.view(-1)).view_as(bits)


def _bits_of_batches(scored: Sequence[ScoredTable]) -> dict[tuple[object, int], NewBits]:
    """Return the new masks of shards whose scores are stored with those of others, by the place of
    their segments."""
    limits: dict[Batch, dict[int, tuple[int, int]]] = {}
    for table in scored:
        threshold = table.threshold
        for segment in table.segments.values():
            if segment.batch is not None:
                limit = threshold.bits, segment.places_upto(threshold.last)
                limits.setdefault(segment.batch, {})[segment.number] = limit
    made: dict[tuple[object, int], NewBits] = {}
    for batch, of_tables in limits.items():
        for number, bits in batch.masks(of_tables).items():
            made[batch, number] = bits
    return made


def _new_mask(
    table: ScoredTable, shard: Shard, known: Mapping[tuple[object, int], NewBits]
) -> NewMask:
    """Return the new mask of one shard, from its scores and the decision on its cut blocks, unless
    it is ``known``."""
    goal, rect, threshold = table.goal, shard.rect, table.threshold
    segment = table.segments[rect]
    if (bits := known.get((segment.batch, segment.number))) is not None:
        kept, dirty, removes = bits
        mask = BlockMask(rect, goal.block, kept)
        mask.learn_removes(removes)
        # Without squares a score tells nothing of zeros: all that is removed is written.
        return NewMask(mask, dirty if goal.shows_zeros else ~kept)
    slabs: dict[int, Tensor] = {}
    if table.cuts is not None:
        slabs = table.cuts.decisions[rect].slabs
        _note_decision(table.cuts, segment, rect)
    if goal.by_element:
        return _mask_of_elements(table, shard, slabs)
    dirty_blocks: Dirty = "nonzero" if goal.shows_zeros else "removed"
    # On a device all that is removed is written, in one pass. At a threshold of 0 all that is
    # removed scores 0.
    if not shard.tensor.is_cpu or (goal.shows_zeros and threshold.bits == 0):
        dirty_blocks = None
    scores = table.kept_scores(rect)
    if scores is not None:
        return scores.new_mask(rect, goal.block, segment, threshold, dirty_blocks)
    return mask_of_blocks(rect, goal.block, segment, threshold, dirty_blocks)


def _note_decision(cuts: CutTable, segment: Segment, rect: Rect) -> None:
    """Put the decision on cut blocks in the place of their scores."""
    known, decision = cuts.partials[rect], cuts.decisions[rect]
    # Cut columns. What this shard has of a block may be zero although others have more: as a score
    # of 0, which is always removed too.
    marks = torch.where(known.clean, 0, REMOVED).to(torch.int32)
    columns = torch.where(decision.columns, marks, KEPT)
    if known.cuts_all:
        segment.add(columns)
    else:
        for first, bits in segment.pieces():
            bits[:, known.cols] = columns[first : first + len(bits)]
    # Masks by element take the slabs as they are.
    if not cuts.by_element:
        for i, flags in decision.slabs.items():
            at = i - known.grid.row
            segment.rows(at, at + 1).copy_(torch.where(flags, REMOVED, KEPT))


def _mask_of_elements(table: ScoredTable, shard: Shard, slabs: Mapping[int, Tensor]) -> NewMask:
    """Return the new mask of a shard whose blocks lose only their smallest elements.

    Args:
        slabs: removed flags in cut block rows, decided by the ranks that own them.
    """
    goal = table.goal
    segment = table.segments[shard.rect]
    rect = shard.rect
    height, grid = goal.block[0], grid_of(shard.rect, goal.block)
    kept = BitWriter(rect.numel, shard.tensor.device)
    for start, stop in scoring.row_chunks(rect, goal.block, shard.tensor.device):
        first = (rect.row + start) // height - grid.row
        bits = segment.rows(first, first - (start - stop) // height)
        chosen = table.threshold.removes(segment, first * grid.cols, bits.flatten()).view_as(bits)
        offset = rect.row + start, rect.col
        scores = scoring.element_scores(shard.tensor[start:stop], goal.measure, offset)
        gone = scoring.smallest_in_blocks(scores.float(), chosen, goal.block, goal.zeros)
        for i, flags in slabs.items():
            top = max(i * height, rect.row) - rect.row - start
            if 0 <= top < stop - start:
                gone[top : top + flags.shape[0]] = flags
        kept.add(~gone.flatten())
    mask = BlockMask(rect, (1, 1), kept.close())
    # Scores are of blocks: nothing tells which of the removed elements are zero.
    return NewMask(mask, ~mask.bits)
