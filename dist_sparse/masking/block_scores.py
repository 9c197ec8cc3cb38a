"""Local scoring pass: scores of the blocks of many tables, of this rank's shards.

Each shard is read once, in chunks; where scores are kept, only the rows written since the last
update. Nothing is communicated or changed, so an error found here stops all ranks in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dist_sparse.masking.cached.kept_scores import Keeping, KeptScores
from dist_sparse.masking.cuts import CutTable, Partials
from dist_sparse.masking.device import on_host, pieces_on
from dist_sparse.masking.flat import FlatScores, FlatShard, flat_width, kernels_on, too_large
from dist_sparse.masking.scores import (
    BATCH,
    SMALL,
    Batch,
    Measure,
    WeightedSquares,
    block_sums,
    block_widths,
    element_scores,
    to_scores,
)
from dist_sparse.masking.segments import (
    HISTOGRAM,
    KEPT,
    NOT_FINITE,
    JointPart,
    JointScores,
    Segment,
    first_histogram,
)
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
    def by_element(self) -> bool:
        """Whether the masks are not constant on blocks."""
        return self.zeros < self.block[0] * self.block[1]


@dataclass
class ScoredTable:
    """One table between scoring and masks: scores by shard, and what this rank knows of cut
    blocks."""

    goal: Goal
    cuts: CutTable | None
    segments: dict[Rect, Segment] = field(default_factory=dict)
    partials: dict[Rect, Partials] = field(default_factory=dict)

    def kept_scores(self, rect: Rect) -> KeptScores | None:
        """Return the kept scores of a shard, if any; of cut blocks none are kept."""
        if self.goal.keeping is None or self.cuts is not None:
            return None
        return self.goal.keeping.scores.get(rect)


def score_tables(goals: Sequence[Goal], ranks: Sequence[int]) -> list[ScoredTable]:
    """:func:`score_table` of many tables, each with this rank in its group; small ones are scored
    together."""
    scored: dict[int, ScoredTable] = {}
    unread: list[_Unread] = []
    for places in _flat_groups(goals):
        flat = _score_flat([goals[i] for i in places], [ranks[i] for i in places], unread)
        scored.update(zip(places, flat, strict=True))
    for places in _batches(goals, scored):
        if len(places) == 1:
            continue  # nothing to share a pass with
        tables = _score_together([goals[i] for i in places], [ranks[i] for i in places], unread)
        scored.update(zip(places, tables, strict=True))
    for i, goal in enumerate(goals):
        # In the order of the tables, as an error names the first.
        if i not in scored:
            scored[i] = _score_table(goal, ranks[i], unread)
    # One wait for the scores of all tables on an accelerator.
    for each, counts in zip(unread, on_host([each.counts for each in unread]), strict=True):
        each.read(counts)
    return [scored[i] for i in range(len(goals))]


def score_table(goal: Goal, rank: int) -> ScoredTable:
    """Score this rank's shards of one table. Local: sends nothing.

    Args:
        goal: the same on every rank, but for the live views in it.
        rank: this rank in the table's group.

    Raises:
        ValueError: a score is not finite or is negative, or a block that loses only some elements
            is cut by a column border.
    """
    [table] = score_tables([goal], [rank])
    return table


@dataclass(frozen=True, eq=False)
class _Unread:
    """Counts of scores that the host has not read yet.

    Args:
        counts: int64, of any shape, on any device.
        read: takes them once they are in CPU memory; raises for scores that are refused.
    """

    counts: Tensor
    read: Callable[[Tensor], None]


def _score_table(goal: Goal, rank: int, unread: list[_Unread]) -> ScoredTable:
    table = ScoredTable(goal, cuts_of(goal))
    mine = set(goal.data.owned(rank))
    for shard in goal.data.shards:
        # A rank may hold two replicas of a shard.
        if shard.rect not in table.segments:
            counts = shard.rect in mine
            table.segments[shard.rect] = _score_shard(table, shard, counts, unread)
    return table


def _score_shard(table: ScoredTable, shard: Shard, counts: bool, unread: list[_Unread]) -> Segment:
    """Return the scores of a shard, and note in ``table`` what is known of its cut blocks."""
    goal, cuts = table.goal, table.cuts
    if goal.block == (1, 1) or (cuts is None and _takes_much_memory(goal, shard)):
        # Scored again in each pass.
        segment = _segment(goal, shard, counts, partial(_bits_again, goal, shard))
        _count_again(goal, shard, segment, unread)
        return segment
    segment = _segment(goal, shard, counts)
    kept = table.kept_scores(shard.rect)
    if kept is not None and goal.keeping is not None:
        score_all = partial(_score_all, goal, shard)
        kept.update(shard, goal.data.shape, goal.block, goal.keeping, score_all)
        kept.fill(segment)
    elif cuts is None:
        _score_blocks(goal, shard, segment, None, unread)
    else:
        known = cuts.partials(shard.rect, shard.tensor.device)
        table.partials[shard.rect] = known
        _score_blocks(goal, shard, segment, known, unread)
        _score_slabs(goal, shard, known)
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


def _segment(
    goal: Goal,
    shard: Shard,
    counts: bool,
    read: Callable[[], Iterator[tuple[int, Tensor]]] | None = None,
) -> Segment:
    """Return an empty segment for the scores of a shard."""
    grid = grid_of(shard.rect, goal.block)
    columns = torch.arange(grid.col, grid.col + grid.cols, device=shard.tensor.device)
    return Segment(grid.row, columns, goal.grid.cols, read=read, counts=counts)


def _flat_groups(goals: Sequence[Goal]) -> list[list[int]]:
    """Return the places of tables that kernels can score, by what their shards have in common."""
    groups: dict[Hashable, list[int]] = {}
    for i, goal in enumerate(goals):
        width = _flat_width(goal)
        if width is not None:
            tensor = goal.data.shards[0].tensor
            key = (goal.data.ranks, tensor.device, tensor.dtype, width, goal.measure)
            groups.setdefault(key, []).append(i)
    return [*groups.values()]


def _flat_width(goal: Goal) -> int | None:
    """Return the block width of a table that kernels can score: it has one shard here, whose blocks
    no border cuts, and a norm for a score. None for other tables."""
    data = goal.data
    if len(data.shards) != 1 or goal.measure not in ("L1", "L2") or goal.by_element:
        return None
    [(rect, tensor)] = data.shards
    # Products of two float64 are rounded, by kernels and CPUs in different places.
    if tensor.is_cpu or tensor.dtype == torch.float64 or kernels_on(tensor.device) is None:
        return None
    if cuts_of(goal) is not None:
        return None
    return flat_width(rect, goal.block, tensor)


def _score_flat(
    goals: Sequence[Goal], ranks: Sequence[int], unread: list[_Unread]
) -> list[ScoredTable]:
    """Score tables that :func:`_flat_groups` found alike."""
    shards = [goal.data.shards[0] for goal in goals]
    flat = [
        FlatShard(shard, goal.block, goal.grid.cols)
        for goal, shard in zip(goals, shards, strict=True)
    ]
    scores = FlatScores(flat, goals[0].measure == "L1")
    tables: list[ScoredTable] = []
    columns: dict[tuple[int, int], Tensor] = {}
    for i, (goal, shard) in enumerate(zip(goals, shards, strict=True)):
        grid = flat[i].grid
        if (grid.col, grid.cols) not in columns:
            columns[grid.col, grid.cols] = _segment(goal, shard, True).col_ids
        segment = Segment(
            grid.row,
            columns[grid.col, grid.cols],
            goal.grid.cols,
            # For what kernels leave to torch: ties in great numbers.
            read=None if scores.held else partial(_bits_again, goal, shard),
            counts=shard.rect in goal.data.owned(ranks[i]),
        )
        if scores.held:
            segment.add(scores.held[i].view(grid.rows, grid.cols))
        segment.joint = JointPart(scores, i)
        tables.append(ScoredTable(goal, None, {shard.rect: segment}))

    def read(counts: Tensor) -> None:
        if bool(counts[:, 1 + (NOT_FINITE >> LEADING_SHIFT) :].any()):
            for goal, shard in zip(goals, shards, strict=True):
                _find_refused(goal, shard)
        scores.counts = counts
        for table, histogram in zip(tables, counts, strict=True):
            [segment] = table.segments.values()
            segment.first_histogram = histogram

    unread.append(_Unread(scores.first_histograms(), read))
    return tables


def _batches(goals: Sequence[Goal], scored: Collection[int]) -> Iterator[list[int]]:
    """Yield the places of other tables that can be scored together."""
    groups: dict[Hashable, list[int]] = {}
    for i, goal in enumerate(goals):
        if i not in scored and _fits_batch(goal):
            groups.setdefault(_batch_key(goal), []).append(i)
    for group in groups.values():
        batch: list[int] = []
        elements = 0
        for i in group:
            numel = goals[i].data.shards[0].rect.numel
            if elements + numel > BATCH:
                yield batch
                batch, elements = [], 0
            batch.append(i)
            elements += numel
        yield batch


def _fits_batch(goal: Goal) -> bool:
    """Whether a table has one small shard here, of blocks that know nothing of their neighbours."""
    if len(goal.data.shards) != 1 or goal.by_element or callable(goal.measure):
        return False
    # Single elements are scored without a copy; taller blocks may reach into the next shard.
    if goal.block[0] != 1 or goal.block[1] == 1:
        return False
    return 0 < goal.data.shards[0].rect.numel <= SMALL and cuts_of(goal) is None


def _batch_key(goal: Goal) -> Hashable:
    """What the tables of a batch have in common."""
    data, [shard] = goal.data, goal.data.shards
    weighted = isinstance(goal.measure, WeightedSquares)
    return (
        data.ranks,
        data.shape[1],
        shard.rect.col,
        shard.rect.cols,
        shard.tensor.device,
        data.dtype,
        goal.block,
        "weighted" if weighted else goal.measure,
    )


def _score_together(
    goals: Sequence[Goal], ranks: Sequence[int], unread: list[_Unread]
) -> list[ScoredTable]:
    shards = [goal.data.shards[0] for goal in goals]
    width, block = goals[0].data.shape[1], goals[0].block
    batch = Batch.of(shards, width, block, [goal.measure for goal in goals])
    bits = batch.scores.view(torch.int32)
    extremes = _extremes(bits)
    # Rows between the shards are no blocks of any table.
    bits.index_fill_(0, batch.gaps, KEPT)
    joint = JointScores(bits.view(-1), [start * bits.shape[1] for start in batch.starts])
    # The same for all: they are on the same columns.
    columns = _segment(goals[0], shards[0], True).col_ids
    tables = []
    for i, (goal, shard) in enumerate(zip(goals, shards, strict=True)):
        counts = shard.rect in goal.data.owned(ranks[i])
        segment = Segment(shard.rect.row, columns, goal.grid.cols, counts=counts)
        segment.add(bits[batch.starts[i] : batch.starts[i] + batch.rows[i]])
        segment.joint = JointPart(joint, i)
        tables.append(ScoredTable(goal, None, {shard.rect: segment}))

    def read(counts: Tensor) -> None:
        if _refused(extremes=counts[-2:]):
            # One of them raises, with the name of its table.
            for goal, shard in zip(goals, shards, strict=True):
                _find_refused(goal, shard)
        histograms = counts[:-2].view(-1, HISTOGRAM)
        for table, histogram in zip(tables, histograms, strict=True):
            [segment] = table.segments.values()
            segment.first_histogram = histogram

    unread.append(_Unread(torch.cat([joint.first_histograms().flatten(), extremes]), read))
    return tables


class _CounterOnCpu:
    """Checks and counts the scores of a shard while they are in the cache."""

    def __init__(self, goal: Goal, shard: Shard) -> None:
        self._goal, self._shard = goal, shard
        self._histogram = torch.zeros(HISTOGRAM, dtype=torch.int64)
        self._scratch = torch.empty(0, dtype=torch.int32)

    def check(self, scores: Tensor, first: int) -> None:
        """Refuse scores that are not finite or negative, float32 ``(block rows, block columns)``
        from the shard's block row ``first`` on."""
        _check(self._goal, self._shard, scores, first)

    def count(self, bits: Tensor) -> None:
        """Count scores, int32 ``(n,)``."""
        # Reused: most pieces are as large as the first.
        if self._scratch.numel() < bits.numel():
            self._scratch = torch.empty_like(bits)
        self._histogram += first_histogram(bits, self._scratch)

    def close(self, segment: Segment, unread: list[_Unread]) -> None:
        """Note what was counted."""
        segment.first_histogram = self._histogram


class _CounterOnAccelerator:
    """A :class:`_CounterOnCpu` that does not wait for the device: what it finds is left unread."""

    def __init__(self, goal: Goal, shard: Shard) -> None:
        self._goal, self._shard = goal, shard
        device = shard.tensor.device
        self._histogram = torch.zeros(HISTOGRAM, dtype=torch.int64, device=device)
        self._extremes: list[Tensor] = []

    def check(self, scores: Tensor, first: int) -> None:
        self._extremes.append(_extremes(scores.view(torch.int32)))

    def count(self, bits: Tensor) -> None:
        self._histogram += first_histogram(bits)

    def close(self, segment: Segment, unread: list[_Unread]) -> None:
        def read(counts: Tensor) -> None:
            if _refused(extremes=counts[HISTOGRAM:]):
                _find_refused(self._goal, self._shard)
            segment.first_histogram = counts[:HISTOGRAM]

        unread.append(_Unread(torch.cat([self._histogram, *self._extremes]), read))


def _counter(goal: Goal, shard: Shard) -> _CounterOnCpu | _CounterOnAccelerator:
    return (_CounterOnCpu if shard.tensor.is_cpu else _CounterOnAccelerator)(goal, shard)


def _score_blocks(
    goal: Goal, shard: Shard, segment: Segment, cut: Partials | None, unread: list[_Unread]
) -> None:
    """Fill ``segment`` with the scores of whole blocks, KEPT in the place of cut ones, and ``cut``
    with the partial sums of those."""
    counter = _counter(goal, shard)
    for first, piece in _score_pieces(goal, shard, segment.col_ids, cut):
        counter.check(piece, first)
        bits = piece.view(torch.int32)
        if cut is not None:
            if cut.cuts_all:
                continue  # the segment stays empty until the decision
            cut.mark(bits, first)
        counter.count(bits.view(-1))
        segment.add(bits)
    counter.close(segment, unread)


def _score_slabs(goal: Goal, shard: Shard, cut: Partials) -> None:
    """Score the elements of cut block rows, which their owner puts together."""
    rect = shard.rect
    for i in cut.rows:
        inner = rect.intersect(Rect(i * goal.block[0], rect.col, goal.block[0], rect.cols))
        assert inner is not None
        rows = shard.tensor[inner.row - rect.row : inner.row_end - rect.row]
        cut.elements[i] = element_scores(rows, goal.measure, (inner.row, inner.col))


def _score_pieces(
    goal: Goal, shard: Shard, columns: Tensor, cut: Partials | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first block row, counted from the shard's own first, and the scores of pieces that
    are worth the calls on them; float32 ``(block rows, block columns)``."""
    grid, shape = grid_of(shard.rect, goal.block), goal.data.shape
    widths = block_widths(shape, goal.block, columns)
    waiting: list[Tensor] = []
    least = pieces_on(shard.tensor.device).scores
    start = 0
    for first, sums in block_sums(shard.tensor, shard.rect, goal.block, goal.measure):
        last = first + sums.shape[0]
        if cut is not None:
            cut.note(first, sums)
        waiting.append(to_scores(sums, grid.row + first, widths, shape, goal.block))
        if (last - start) * grid.cols >= least or last == grid.rows:
            yield start, waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            waiting, start = [], last


def _score_all(goal: Goal, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return the scores of a shard that no border cuts, in one piece, and their histogram."""
    segment = _segment(goal, shard, True)
    _score_blocks(goal, shard, segment, None, [])  # on a CPU, where nothing is left to be read
    return torch.cat([bits for _, bits in segment.pieces()]), segment.histogram()


def _takes_much_memory(goal: Goal, shard: Shard) -> bool:
    """Whether the scores of a shard are too large to be held."""
    if shard.tensor.is_cpu or goal.by_element:
        return False
    return too_large(4 * grid_of(shard.rect, goal.block).blocks, shard.tensor.nbytes)


def _bits_again(goal: Goal, shard: Shard) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(start, scores)`` of a shard that no border cuts, int32, flat."""
    if goal.block == (1, 1):
        # An element is its own mean.
        for first, sums in block_sums(shard.tensor, shard.rect, (1, 1), goal.measure):
            yield first * shard.rect.cols, sums.to(torch.float32).view(torch.int32).flatten()
        return
    columns = _segment(goal, shard, True).col_ids
    for first, scores in _score_pieces(goal, shard, columns, None):
        yield first * columns.numel(), scores.view(torch.int32).view(-1)


def _count_again(goal: Goal, shard: Shard, segment: Segment, unread: list[_Unread]) -> None:
    """Check and count scores that are computed again in each pass."""
    counter = _counter(goal, shard)
    cols = segment.col_ids.numel()
    for start, bits in segment.chunks():
        counter.check(bits.view(torch.float32).view(-1, cols), start // cols)
        counter.count(bits)
    counter.close(segment, unread)


def _extremes(bits: Tensor) -> Tensor:
    """Return the least and the largest of some scores as integers, int64 ``(2,)``."""
    return torch.stack(bits.aminmax()).to(torch.int64)


def _refused(extremes: Tensor) -> bool:
    """Return whether a score is negative or not finite."""
    return bool(((extremes < 0) | (extremes >= NOT_FINITE)).any())


def _find_refused(goal: Goal, shard: Shard) -> None:
    """Score a shard again, to name the first score that is refused."""
    columns = _segment(goal, shard, True).col_ids
    for first, scores in _score_pieces(goal, shard, columns, None):
        _check(goal, shard, scores, first)


def _check(goal: Goal, shard: Shard, scores: Tensor, first: int) -> None:
    """Refuse scores that are not finite or negative; ``scores`` ``(block rows, block columns)``
    from the shard's block row ``first`` on."""
    if _fine(scores):
        return
    i, j = (~((scores >= 0) & (scores < torch.inf))).nonzero()[0].tolist()
    grid = grid_of(shard.rect, goal.block)
    row, col = (grid.row + first + i) * goal.block[0], (grid.col + j) * goal.block[1]
    raise ValueError(
        f"Table {goal.data.name!r}: the block at row {row}, column {col} scores"
        f" {float(scores[i, j])}; scores must be finite and not negative, so no mask was changed."
    )


def _fine(scores: Tensor) -> bool:
    low, high = torch.aminmax(scores)  # NaN passes through to both
    return bool((low >= 0) & (high < torch.inf))
