"""New masks of many tables over many ranks: score, select, mask.

:func:`score_tables` is the local half. It rescores each shard once, in chunks; of a shard with kept
scores, it rescores only the rows written since the last update. It communicates and changes
nothing, so all ranks can still stop on an error. :func:`new_masks` is the collective half, in three
steps. Neither writes to weights or to old masks.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dist_sparse.groups import Group, rank_in
from dist_sparse.masking import scores as scoring
from dist_sparse.masking.cuts import (
    CutTable,
    Decision,
    Owned,
    Partials,
    cut_by_columns,
    cut_indices,
    exchange_partials,
    return_decisions,
    sum_parts,
)
from dist_sparse.masking.device import (
    flat_width,
    kernels_on,
    on_host,
    pieces_on,
    too_large,
    warn_of_torch,
)
from dist_sparse.masking.goal import Goal
from dist_sparse.masking.kept_scores import ScoreCache
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
    Threshold,
    mask_of_blocks,
    select_smallest,
)
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Rect, Shard, grid_of

# Most elements of a shard that shares a pass with others. Below it, the overhead of the calls of
# torch is a good part of the time.
SMALL = 1 << 14

# Elements of small tables that one pass scores, rounded up to a whole table.
_BATCH = 1 << 20


@dataclass
class ScoredTable:
    """One table between scoring and masks.

    Attributes:
        cuts: its cut blocks; None if every block is within one shard.
        owned: the shards whose scores this rank counts.
        segments: the scores of this rank's shards.
        threshold: set once it is selected.
    """

    goal: Goal
    cuts: CutTable | None
    owned: Collection[Rect]
    segments: dict[Rect, Segment] = field(default_factory=dict)
    threshold: Threshold = NOTHING

    def score_cache(self, rect: Rect) -> ScoreCache | None:
        """Return the kept scores of a shard, if any. A table with cut blocks has none."""
        caches = self.goal.caches
        return caches[rect].cache if rect in caches and self.cuts is None else None


class NewMasks(NamedTuple):
    """The new masks of a table.

    Args:
        masks: of this rank's shards, in their order.
        block: the (rows, columns) that one bit of them covers.
        threshold: of the scores; NOTHING if a user's ``update_mask`` decides instead.
        removed: number of removed blocks over all ranks; None if unknown.
    """

    masks: list[NewMask]
    block: Block
    threshold: Threshold = NOTHING
    removed: int | None = None


class _Pass(NamedTuple):
    """A scoring pass: tables with equal ones are scored together.

    Args:
        score: scores the tables, and returns their least and largest scores, int64.
        common: what tables must have in common to share the pass.
    """

    score: Callable[[Sequence[ScoredTable]], Iterable[Tensor]]
    common: tuple[object, ...] = ()


def score_tables(goals: Iterable[Goal]) -> list[ScoredTable]:
    """Score this rank's shards of many tables. Local: sends nothing.

    Args:
        goals: the same on every rank, except for the live views in them.

    Raises:
        ValueError: a score is not finite or is negative, or a column border cuts a block that loses
            only some elements.
    """
    tables = []
    passes: dict[_Pass, list[ScoredTable]] = {}
    for goal in goals:
        table = ScoredTable(goal, find_cuts(goal), goal.data.owned(rank_in(goal.data.ranks)))
        tables.append(table)
        passes.setdefault(_pass_of(table), []).append(table)
    extremes: list[Tensor] = []
    for scoring_pass, together in passes.items():
        extremes += scoring_pass.score(together)
    _read_histograms(tables, extremes)
    return tables


def new_masks(scored: Sequence[ScoredTable], group: Group, pooled: bool = False) -> list[NewMasks]:
    """:func:`select`, and return :func:`masks_of`. Collective over ``group``."""
    select(scored, group, pooled)
    return masks_of(scored)


def select(scored: Sequence[ScoredTable], group: Group, pooled: bool = False) -> None:
    """Find the threshold of every table, and the decisions on its cut blocks. Collective over
    ``group``.

    If ``pooled``, the tables lose the bytes of all their ``k`` together, wherever scores are
    smallest.

    At most three all-reduces, two all-to-alls if a block is cut, and at most three more all-reduces
    if scores tie at a threshold.
    """
    cut = {table.cuts: table for table in scored if table.cuts is not None}
    devices = (shard.tensor.device for table in scored for shard in table.goal.data.shards)
    device = next(devices, torch.device("cpu"))

    # 1. Score the blocks that shard borders cut. Each has one owner, which gets the parts of all
    # holders. score_tables() has scored all other blocks.
    if cut:
        exchange_partials([*cut], group, device)

    # 2. Select: the exact threshold of every table.
    _find_thresholds(scored, group, pooled)

    # 3. The owners of cut blocks return their decisions.
    for cuts, table in cut.items():
        cuts.decision = _decide(table.goal, table.threshold, cuts.owned)
    if cut:
        return_decisions([*cut], group, device)


def masks_of(scored: Sequence[ScoredTable]) -> list[NewMasks]:
    """Return the new masks of this rank's shards, after :func:`select`. Local."""
    batch_masks = _masks_of_batches(scored)
    return [_masks_of_table(table, batch_masks) for table in scored]


def _find_thresholds(scored: Sequence[ScoredTable], group: Group, pooled: bool) -> None:
    """Set the threshold of every table. Collective over ``group``."""
    # Nothing to remove, no pool: each ``k`` is 0, but ``max_blocks`` is not.
    need = sum(table.goal.k * table.goal.bytes_per_block for table in scored) if pooled else 0
    candidates = []
    for table in scored:
        goal = table.goal
        segments = [*table.segments.values()]
        if table.cuts is not None:
            segments += table.cuts.owned.segments
        k = goal.max_blocks if need else goal.k
        blocks, price = goal.grid.blocks, goal.bytes_per_block
        table_blocks = Candidates(goal.data.name, k, blocks, segments, goal.only_zeros, price)
        candidates.append(table_blocks)
    thresholds = select_smallest(candidates, group, need)
    for table, threshold in zip(scored, thresholds, strict=True):
        table.threshold = threshold


def _read_histograms(tables: Sequence[ScoredTable], extremes: Sequence[Tensor]) -> None:
    """Bring the histograms of all segments to the host, with one wait for each device.

    Args:
        extremes: least and largest scores of the passes that return them, int64 ``(n,)``.

    Raises:
        ValueError: a score is negative or not finite.
    """
    segments = [segment for table in tables for segment in table.segments.values()]
    # All are copied together: each wait would cost more than the copy.
    read = on_host([*(segment.histogram for segment in segments), *extremes])
    # The zeros come first: a rank may hold no shard, and torch.stack() takes no empty list.
    histograms = [torch.zeros(HISTOGRAM, dtype=torch.int64), *read[: len(segments)]]
    scores = torch.cat([torch.zeros(1, dtype=torch.int64), *read[len(segments) :]])
    for segment, histogram in zip(segments, histograms[1:], strict=True):
        segment.histogram = histogram
    # Kernels return no extremes: they count what is refused as NaN.
    counts = torch.stack(histograms)
    counted = bool(counts[:, 1 + (NOT_FINITE >> LEADING_SHIFT) :].any())
    if counted or scoring.refused(scores).any():
        # Nothing tells yet which table it is: the first one with such a score raises.
        for table in tables:
            _find_refused(table.goal)


def _pass_of(table: ScoredTable) -> _Pass:
    """Return the scoring pass of a table."""
    goal, data = table.goal, table.goal.data
    if not data.shards:
        return _Pass(_score_alone)
    rect, tensor = data.shards[0]
    # A shared pass reads whole blocks, or equal parts. A user's own measure knows one table.
    reason = _why_alone(table)
    if not reason:
        measure: tuple[object, ...] = (goal.measure,)
        if isinstance(goal.measure, ByTotals):
            totals = _totals(_shards([table]))[0]
            measure = goal.measure.squares, totals.total.dtype, totals.of_elements
        common = data.ranks, tensor.device, data.dtype, *measure
        if table.cuts is not None:
            return _Pass(_score_parts, common)
        width = _common_width(goal)
        if width is not None:
            return _Pass(_score_flat, (*common, width))
        # Tables are stacked: a block of one row never reaches into the next table. Blocks of one
        # element are scored alone, without a copy of their scores.
        part_of_row = goal.block[0] == 1 and goal.block[1] != 1 and len(data.shards) == 1
        if tensor.is_cpu and part_of_row and rect.numel <= SMALL:
            return _Pass(_score_small, (*common, data.shape[1], rect.col, rect.cols, goal.block))
        reason = f"blocks of {goal.block} of {data.dtype} have no kernel"
    if kernels_on(tensor.device) is not None:
        warn_of_torch(data.name, reason)
    return _Pass(_score_alone)


def _common_width(goal: Goal) -> int | None:
    """Return the width by which kernels read all shards of a table; None if they don't."""
    # Kernels read weights as float32, which is not exact for float64.
    if goal.data.dtype == torch.float64:
        return None
    rect, tensor = goal.data.shards[0]
    width = flat_width(rect, goal.block, tensor)
    for rect, tensor in goal.data.shards[1:]:
        if flat_width(rect, goal.block, tensor) != width:
            return None
    return width


def _why_alone(table: ScoredTable) -> str:
    """Return why a table shares no pass with others; "" if it may."""
    on_cpu = table.goal.data.shards[0].tensor.is_cpu
    if table.cuts is not None and (on_cpu or not table.cuts.is_parts_of_rows()):
        return "the borders of its shards cut blocks"
    if table.goal.by_element:
        return "its blocks lose only some of their elements"
    return "its score is a function" if callable(table.goal.measure) else ""


# A shard of a table.
HeldShard = tuple[ScoredTable, Shard]


def _shards(tables: Sequence[ScoredTable]) -> list[HeldShard]:
    """Return the shards of some tables, in their order. A rank may hold replicas: one of them."""
    found = []
    for table in tables:
        rects = set()
        for shard in table.goal.data.shards:
            if shard.rect not in rects:
                rects.add(shard.rect)
                found.append((table, shard))
    return found


def _score_flat(tables: Sequence[ScoredTable]) -> list[Tensor]:
    """Score tables by kernels. Return no extremes."""
    held = _shards(tables)
    shards = [shard for _, shard in held]
    blocks = [table.goal.block for table, _ in held]
    measure = tables[0].goal.measure
    kernels = kernels_on(shards[0].tensor.device)
    assert kernels is not None and not callable(measure)
    all_blocks = [table.goal.grid.blocks for table, _ in held]
    _add_batch(tables, kernels.FlatScores(shards, blocks, measure, _totals(held), all_blocks))
    return []


def _score_parts(tables: Sequence[ScoredTable]) -> list[Tensor]:
    """Have kernels sum the parts of rows that the shards of some tables have. Return their largest
    scores."""
    held = _shards(tables)
    # The owners of the rows count them.
    none = torch.zeros(HISTOGRAM, dtype=torch.int64, device=held[0][1].tensor.device)
    parts = []
    for table, shard in held:
        _add_segment(table, shard).histogram = none
        assert table.cuts is not None
        parts.append((table.cuts, shard))
    return sum_parts(parts, tables[0].goal.measure, _totals(held))


def _add_batch(tables: Sequence[ScoredTable], batch: Batch) -> None:
    """Give the scores of a batch to the shards of its tables, in their order."""
    counts = batch.first_histograms()
    for i, (table, shard) in enumerate(_shards(tables)):
        # Scores that the batch does not hold are computed again, for ties that kernels do not list.
        segment = _add_segment(table, shard, rescores=not batch.held)
        if batch.held:
            segment.add(batch.held[i].view(-1, len(segment.columns)))
        segment.batch, segment.number, segment.histogram = batch, i, counts[i]
        segment.sampled, segment.find_refused = batch.sampled[i], partial(_find_refused, table.goal)


def _score_small(tables: Sequence[ScoredTable]) -> Iterator[Tensor]:
    """Score small tables in passes of about ``_BATCH`` elements."""
    batches: dict[int, list[ScoredTable]] = {}
    elements = 0
    for table in tables:
        elements += table.goal.data.shards[0].rect.numel
        batches.setdefault(elements // _BATCH, []).append(table)
    for batch in batches.values():
        yield _score_stacked(batch)


def _score_stacked(tables: Sequence[ScoredTable]) -> Tensor:
    """Score small tables in one pass, stacked into one table: they differ only in their number of
    rows, and no block has two rows. Return the least and the largest score."""
    goal = tables[0].goal
    shards = [table.goal.data.shards[0] for table in tables]
    weights = torch.cat([tensor for _, tensor in shards])
    rows = len(weights)
    rect = Rect(0, shards[0].rect.col, rows, weights.shape[1])
    data = replace(goal.data, shape=(rows, goal.data.shape[1]))
    stacked = replace(goal, data=data, measure=_stacked_measure(tables))
    pieces = _score_pieces(stacked, Shard(rect, weights))
    bits = torch.cat([piece for _, piece in pieces])
    sizes = [shard.rect.rows * bits.shape[1] for shard in shards]
    _add_batch(tables, JointScores(bits.view(-1), sizes))
    return torch.stack(bits.aminmax()).long()


def _stacked_measure(tables: Sequence[ScoredTable]) -> scoring.Measure:
    """Return the measure of stacked tables, with the totals of all their rows."""
    measure = tables[0].goal.measure
    if not isinstance(measure, ByTotals):
        return measure
    values = [totals.of_rows(slice(None)) for totals in _totals(_shards(tables))]
    # All tables have one total per row, or all have one per element: see _pass_of().
    total = torch.cat(values)
    stacked = RowTotals(Rect(0, 0, *total.shape), total)
    return ByTotals(lambda offset: stacked, measure.squares)


def _totals(held: Sequence[HeldShard]) -> list[RowTotals]:
    """Return the totals of shards; none if they are scored by norms."""
    totals = []
    for table, shard in held:
        measure = table.goal.measure
        if isinstance(measure, ByTotals):
            totals.append(measure.find(shard.rect[:2]))
    return totals


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
    """Score a shard, and store in ``table.cuts`` what the owners of its cut blocks need."""
    goal = table.goal
    cache = table.score_cache(shard.rect)
    if cache is not None:
        cache.update(shard, goal.caches[shard.rect], partial(_score_all, goal, shard))
        cache.fill(_add_segment(table, shard))
        return []
    if table.cuts is not None:
        segment = _add_segment(table, shard)
        cut = table.cuts.add_shard(shard.rect, shard.tensor.device)
        segment.histogram, extremes = _score_blocks(goal, shard, segment.add, cut)
        _score_slabs(goal, shard, table.cuts)
        return [extremes]
    again = _scores_again(goal, shard)
    segment = _add_segment(table, shard, rescores=again)
    segment.histogram, extremes = _score_blocks(goal, shard, None if again else segment.add)
    return [extremes]


def _scores_again(goal: Goal, shard: Shard) -> bool:
    """Return whether each pass over the scores of a shard computes them again, to save memory."""
    # The scores would be as large as the weights.
    if goal.block == (1, 1):
        return True
    if shard.tensor.is_cpu or goal.by_element:
        return False
    return too_large(4 * grid_of(shard.rect, goal.block).blocks, shard.tensor.nbytes)


def _add_segment(table: ScoredTable, shard: Shard, rescores: bool = False) -> Segment:
    """Return the segment for the scores of a shard; with ``rescores``, each pass computes them
    again."""
    goal, grid = table.goal, grid_of(shard.rect, table.goal.block)
    segment = table.segments[shard.rect] = Segment(
        grid.row,
        range(grid.col, grid.col_end),
        goal.grid.cols,
        shard.tensor.device,
        read=partial(_rescore, goal, shard) if rescores else None,
        counts=shard.rect in table.owned,
    )
    return segment


def find_cuts(goal: Goal) -> CutTable | None:
    """Return the goal's cut blocks, or None if every block is within one shard.

    Raises:
        ValueError: a column border cuts blocks that are to lose only some of their elements.
    """
    data, block = goal.data, goal.block
    rows = cut_indices([rect.row for rect in data.rects], block[0])
    cols = cut_indices([rect.col for rect in data.rects], block[1])
    if goal.whole_columns and rows:
        # The only block row is the whole table. As a cut row, its owner would need all element
        # scores. As cut columns, it needs one partial sum of each block, however the table is cut.
        rows, cols = (), tuple(range(goal.grid.cols))
    if goal.by_element and cols:
        raise ValueError(cut_by_columns(data, block, goal.zeros_per_block))
    return CutTable(data, block, rows, cols, goal.by_element) if rows or cols else None


def _score_blocks(
    goal: Goal,
    shard: Shard,
    on_scores: Callable[[Tensor], None] | None,
    cut: Partials | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the histogram of the scores of a shard's whole blocks, and the least and largest
    scores of its pieces. Fill ``cut`` with the partial sums of the other blocks.

    Args:
        on_scores: called with each piece of the scores, KEPT for cut blocks.
    """
    device = shard.tensor.device
    histogram = torch.zeros(HISTOGRAM, dtype=torch.int64, device=device)
    extremes = [torch.empty(0, dtype=torch.int32, device=device)]
    # One working buffer: short-lived tensors between held ones would leave holes in the heap.
    scratch = torch.empty(0, dtype=torch.int32)
    for first, bits in _score_pieces(goal, shard, cut):
        extremes.append(torch.stack(bits.aminmax()))
        if bits.is_cpu and scoring.refused(extremes[-1]).any():
            # Now: bincount() takes no negative numbers.
            _find_refused(goal)
        if cut is not None:
            # Nothing to hold: _note_decision() adds the decision itself.
            if cut.cuts_all:
                continue
            cut.mark(bits, first)
        histogram += scoring.first_histogram(bits.view(-1), scratch)
        if on_scores is not None:
            on_scores(bits)
    if cut is not None:
        # The blocks marked KEPT. Their owner counts them. A NaN, counted here too, is in extremes.
        histogram[-1].zero_()
    return histogram, torch.cat(extremes).long()


def _score_slabs(goal: Goal, shard: Shard, cuts: CutTable) -> None:
    """Score the elements of cut block rows, which their owner scores as whole blocks."""
    rect = shard.rect
    cut = cuts.partials[rect]
    for i in cut.rows:
        inner = cuts.inside(rect, i)
        rows = shard.tensor[inner.row - rect.row : inner.row_end - rect.row]
        cut.elements[i] = scoring.element_scores(rows, goal.measure, (inner.row, inner.col))


def _score_pieces(
    goal: Goal, shard: Shard, cut: Partials | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the scores of a shard in pieces: the first block row, counted from the shard's first,
    and int32 ``(block rows, block columns)``. Partial sums of cut blocks are stored in ``cut``."""
    grid = grid_of(shard.rect, goal.block)
    shape = goal.data.shape
    device = shard.tensor.device
    columns = torch.arange(grid.col, grid.col_end, device=device)
    widths = scoring.block_widths(shape, goal.block, columns)
    # Chunks are as large as their float64 elements allow. If blocks are tall or wide, chunks hold
    # few scores: then several make a piece, to save calls.
    waiting: list[Tensor] = []
    least = pieces_on(device).scores
    start = 0
    for first, sums in scoring.block_sums(shard.tensor, shard.rect, goal.block, goal.measure):
        last = first + sums.shape[0]
        if cut is not None:
            cut.note(first, sums)
        waiting.append(scoring.to_scores(sums, grid.row + first, widths, shape, goal.block))
        if (last - start) * grid.cols >= least or last == grid.rows:
            # torch.cat() would copy a single chunk too.
            scores = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            yield start, scores.view(torch.int32)
            waiting, start = [], last


def _score_all(goal: Goal, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return the scores of a shard without cut blocks, in one piece, and their histogram."""
    pieces: list[Tensor] = []
    histogram, _ = _score_blocks(goal, shard, pieces.append)
    return torch.cat(pieces), histogram


def _rescore(goal: Goal, shard: Shard) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(start, scores)`` of a shard without cut blocks, int32, flat."""
    for first, bits in _score_pieces(goal, shard):
        yield first * bits.shape[1], bits.view(-1)


def _find_refused(goal: Goal) -> None:
    """Score a table again. Raise a ValueError for the first score that is negative or not
    finite."""
    for shard in goal.data.shards:
        grid = grid_of(shard.rect, goal.block)
        for first, bits in _score_pieces(goal, shard):
            found = scoring.refused(bits).nonzero().tolist()
            if not found:
                continue
            i, j = found[0]
            row, col = (grid.row + first + i) * goal.block[0], (grid.col + j) * goal.block[1]
            raise ValueError(
                f"Table {goal.data.name!r}: the block at row {row}, column {col} scores"
                f" {float(bits.view(torch.float32)[i, j])}; scores must be finite and not negative."
            )


def _decide(goal: Goal, threshold: Threshold, own: Owned) -> Decision:
    """Return the removed flags of the cut blocks that this rank owns."""
    slabs: dict[int, Tensor] = {}
    for i, (segment, elements) in own.slabs.items():
        removed = _removed(threshold, segment)
        if goal.by_element:
            slabs[i] = scoring.smallest_in_blocks(
                elements.float(), removed, goal.block, goal.zeros_per_block
            )
        else:
            slabs[i] = removed.flatten()
    return Decision(_removed(threshold, own.columns), slabs)


def _removed(threshold: Threshold, segment: Segment) -> Tensor:
    """Return the removed flags of a segment of one piece, bool ``(rows, cols)``."""
    [(_, bits)] = segment.pieces
    return threshold.removes(segment, 0, bits.view(-1)).view_as(bits)


# The new masks of the shards that batches score, by batch and number in it.
BatchMasks = dict[tuple[Batch | None, int], NewBits]


def _masks_of_batches(scored: Sequence[ScoredTable]) -> BatchMasks:
    """Return the new masks of the shards that batches score."""
    limits: dict[Batch, dict[int, tuple[int, int]]] = {}
    for table in scored:
        threshold = table.threshold
        for segment in table.segments.values():
            if segment.batch is not None:
                limit = threshold.bits, segment.places_upto(threshold.last)
                limits.setdefault(segment.batch, {})[segment.number] = limit
    masks: BatchMasks = {}
    for batch, of_tables in limits.items():
        for number, bits in batch.masks(of_tables).items():
            masks[batch, number] = bits
    return masks


def _masks_of_table(table: ScoredTable, batch_masks: BatchMasks) -> NewMasks:
    """Return the new masks of a table's shards."""
    goal, threshold = table.goal, table.threshold
    masks = [_new_mask(table, shard, batch_masks) for shard in goal.data.shards]
    if goal.by_element:
        # Blocks do not give the number of removed elements: edge blocks are smaller.
        return NewMasks(masks, (1, 1), threshold)
    return NewMasks(masks, goal.block, threshold, threshold.removed)


def _new_mask(table: ScoredTable, shard: Shard, batch_masks: BatchMasks) -> NewMask:
    """Return the new mask of one shard."""
    goal, rect, threshold = table.goal, shard.rect, table.threshold
    segment = table.segments[rect]
    if (bits := batch_masks.get((segment.batch, segment.number))) is not None:
        kept, dirty, removes = bits
        mask = BlockMask(rect, goal.block, kept)
        mask.learn_removes(removes)
        # If a score of 0 does not mean zero weights, all that is removed is written.
        return NewMask(mask, dirty if goal.scores_show_zeros else ~kept)
    slabs: dict[int, Tensor] = {}
    if table.cuts is not None:
        slabs = table.cuts.decisions[rect].slabs
        _note_decision(table.cuts, segment, rect)
    if goal.by_element:
        return _mask_of_elements(table, shard, slabs)
    dirty_blocks: Dirty = "nonzero" if goal.scores_show_zeros else "removed"
    # An accelerator writes all that is removed, in one pass, without a list. And with a threshold
    # of 0, all that is removed scores 0, so it is zero already.
    if not shard.tensor.is_cpu or (goal.scores_show_zeros and threshold.bits == 0):
        dirty_blocks = None
    cache = table.score_cache(rect)
    if cache is not None:
        return cache.new_mask(rect, goal.block, segment, threshold, dirty_blocks)
    return mask_of_blocks(rect, goal.block, segment, threshold, dirty_blocks)


def _note_decision(cuts: CutTable, segment: Segment, rect: Rect) -> None:
    """Replace the scores of cut blocks with the decision of their owners."""
    partials, decision = cuts.partials[rect], cuts.decisions[rect]
    # Cut columns. The part of a removed block in this shard may be zero although the block is not.
    # It gets the score 0 instead of REMOVED: removed with the block, but not dirty.
    marks = torch.where(partials.clean, 0, REMOVED).to(torch.int32)
    columns = torch.where(decision.columns, marks, KEPT)
    if partials.cuts_all:
        # A second attempt finds what the first has added.
        if not segment.pieces:
            segment.add(columns)
    else:
        for first, bits in segment.pieces:
            bits[:, partials.cols] = columns[first : first + len(bits)]
    # Masks by element take the slabs as they are.
    if not cuts.by_element:
        for i, flags in decision.slabs.items():
            at = i - partials.grid.row
            segment.rows(at, at + 1).copy_(torch.where(flags, REMOVED, KEPT))


def _mask_of_elements(table: ScoredTable, shard: Shard, slabs: Mapping[int, Tensor]) -> NewMask:
    """Return the new mask of a shard whose blocks lose only their smallest elements.

    Args:
        slabs: removed flags in cut block rows, decided by the ranks that own them.
    """
    goal = table.goal
    rect = shard.rect
    segment = table.segments[rect]
    height = goal.block[0]
    grid = grid_of(rect, goal.block)
    kept = BitWriter(rect.numel, shard.tensor.device)
    for start, stop in scoring.row_chunks(rect, goal.block, shard.tensor.device):
        first = (rect.row + start) // height - grid.row
        bits = segment.rows(first, first + math.ceil((stop - start) / height))
        chosen = table.threshold.removes(segment, first * grid.cols, bits.flatten()).view_as(bits)
        offset = rect.row + start, rect.col
        scores = scoring.element_scores(shard.tensor[start:stop], goal.measure, offset)
        removed = scoring.smallest_in_blocks(
            scores.float(), chosen, goal.block, goal.zeros_per_block
        )
        for i, flags in slabs.items():
            # The first row of the slab in this shard, counted from the chunk.
            top = max(i * height, rect.row) - rect.row - start
            if 0 <= top < stop - start:
                removed[top : top + flags.shape[0]] = flags
        kept.add(~removed.flatten())
    mask = BlockMask(rect, (1, 1), kept.close())
    # A score belongs to a block: it does not tell which of the removed elements are zero.
    return NewMask(mask, ~mask.bits)
