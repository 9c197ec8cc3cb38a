"""Mask updates of shards that are flat sequences of equal blocks, by Triton kernels on CUDA.

Blocks are parts of a row that no border cuts, of a width that a kernel can sum in the CPU's order.
The shards of many tables share each launch, and weights are read once.

- If scores take little memory, as of whole rows, they are held: score all blocks, and count their
  leading bits. All further passes read scores.
- Otherwise, count the leading bits of a sample, which tell in which bucket the threshold is. Then
  score all blocks: count the blocks below the bucket and in it, list the blocks in it, and decide
  about all others. All further passes read the list.

Of rows that column borders cut, kernels sum each shard's parts, for the owners of the rows.

Where a sample has misled, or a list has no room for its blocks, passes read the weights again: they
take longer, with the same result.

Elsewhere torch's operations do the same; tests compare the kernels with them.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_sparse.extras.device import kernels
from dist_sparse.masking.device import NO_PLACE, flat_width, on_host, too_large
from dist_sparse.masking.scores import (
    HISTOGRAM,
    NOT_FINITE,
    ByTotals,
    Limits,
    NewBits,
    Prefixes,
    RowTotals,
)
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Grid, Shard, grid_of

# Bytes of a listed block: its score and its place.
_LISTED = 8

# Tables with fewer blocks are counted as a whole.
_SMALL = 1 << 14

# Blocks of a table that are sampled, at most one in _SPARSE. The standard error of a quantile is
# then about a tenth of a percent of the table.
_SAMPLE = 1 << 17
_SPARSE = 4

# Columns of the counts of a sweep; the first is the removed blocks.
_ZEROS, _LOST = 1, 4

# Where an exact histogram counts all blocks above a bucket, and refused scores.
_LAST_FINITE = NOT_FINITE >> LEADING_SHIFT
_FIRST_REFUSED = 1 + _LAST_FINITE


def _fits(listed: int, weights: Tensor) -> bool:
    """Return whether this many blocks of a shard may be listed. The limit is twice the limit of
    held scores: a bucket rarely has that many blocks, and without a list all weights are read two
    more times."""
    return not too_large(_LISTED * listed, 2 * weights.nbytes)


@dataclass(eq=False)
class _Narrowed:
    """A shard whose blocks are decided, except for the listed ones, which score from ``low`` to
    ``high``.

    Args:
        low, high: scores.
        scores: of the listed blocks, int32 ``(programs, capacity)``: a region for each program of
            the launch that has listed them.
        places: of the listed blocks, of the same form.
        lengths: how many blocks each program has listed, int32 ``(programs,)``.
        kept: bits, as words of 32; listed blocks are still kept.
        dirty: bits of the same form.
        removed: number of blocks removed so far.
        zeros: number of blocks that score 0.
    """

    low: int
    high: int
    scores: Tensor
    places: Tensor
    lengths: Tensor
    kept: Tensor
    dirty: Tensor
    removed: int = 0
    zeros: int = 0

    @property
    def job(self) -> Any:
        """The job that reads the list."""
        programs, capacity = self.scores.shape
        return kernels.Job(
            self.scores.data_ptr(),
            programs * capacity,
            places=self.places.data_ptr(),
            lengths=self.lengths.data_ptr(),
            capacity=capacity,
            programs=programs,
        )


def _by_totals(
    scoring: kernels.Scoring,
    measure: ByTotals,
    totals: Sequence[RowTotals],
    grids: Sequence[Grid],
) -> kernels.Scoring:
    """Return how kernels score elements that are multiplied by totals."""
    return scoring._replace(
        weights=measure.squares,
        totals=totals[0].total.dtype,
        of_elements=totals[0].of_elements,
        divides=any(one.share != 1 for one in totals),
        # Rows are found by shifts where all widths are powers of two.
        shifts=all(grid.cols.bit_count() == 1 for grid in grids),
    )


class FlatScores:
    """The scores of several shards of one dtype and block width, which share each launch: a
    :class:`~dist_sparse.masking.scores.Batch`.

    Args:
        shards: on one device that has the kernels.
        blocks: the sparse block of each, within a row.
        measure: how elements are scored, the same in all shards.
        totals: the totals of each shard, if the measure is by them.
        table_blocks: number of blocks of the whole table of each shard.

    Attributes:
        sampled: for each shard, how many blocks its :meth:`first_histograms` stand for, if they
            count a sample; else 0.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        blocks: Sequence[Block],
        measure: ByTotals | str,
        totals: Sequence[RowTotals],
        table_blocks: Sequence[int],
    ) -> None:
        # Kernels index totals by row or element.
        self._totals = [one._replace(total=one.total.contiguous()) for one in totals]
        self._weights = [tensor for _, tensor in shards]
        rects = [rect for rect, _ in shards]
        self._grids = list(map(grid_of, rects, blocks))
        tensor = self._weights[0]
        self._device = tensor.device
        width = flat_width(rects[0], blocks[0], tensor)
        assert width is not None
        self._scoring = kernels.Scoring(tensor.dtype, width, absolute=measure == "L1")
        if isinstance(measure, ByTotals):
            self._scoring = _by_totals(self._scoring, measure, totals, self._grids)
        self._narrowed: dict[int, _Narrowed] = {}
        self._ints = partial(torch.empty, dtype=torch.int32, device=self._device)
        self.held: list[Tensor] = []
        self._holds = not too_large(4, width * tensor.element_size())
        # Every shard of a table by the same stride, so that its parts weigh alike.
        self._strides = [max(_SPARSE, blocks // _SAMPLE) for blocks in table_blocks]
        self.sampled = [0] * len(self._grids)
        for number, whole in enumerate(table_blocks):
            if whole >= _SMALL and not self._holds:
                self.sampled[number] = self._grids[number].blocks

    def add_up(self, parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
        """Write the sums of blocks that are each a part of a wider one. Return the largest score of
        a part, int64 ``(1,)``.

        Args:
            parts: for the sums of each shard, float64.
            widths: of its whole blocks.
        """
        jobs = []
        for number, (part, width) in enumerate(zip(parts, widths, strict=True)):
            jobs.append(self._on_weights(number)._replace(scores=part.data_ptr(), whole=width))
        return kernels.add_up(jobs, self._scoring, self._device)

    def first_histograms(self) -> Tensor:
        if self._holds:
            self.held = [self._ints(grid.blocks) for grid in self._grids]
        exact = [number for number, blocks in enumerate(self.sampled) if not blocks]
        samples = {}
        for number, blocks in enumerate(self.sampled):
            if blocks:
                # At least one, wherever a few blocks of a large table are.
                stride = min(self._strides[number], blocks)
                job = self._on_weights(number)
                samples[number] = job._replace(blocks=blocks // stride, stride=stride)
        if not exact:
            return self._leading([*samples.values()], samples=True)
        counted = self.exact_histograms(exact)
        if not samples:
            return counted
        rows = dict(zip(exact, counted, strict=True))
        rows |= zip(samples, self._leading([*samples.values()], samples=True), strict=True)
        return torch.stack([rows[number] for number in range(len(rows))])

    def exact_histograms(self, numbers: Sequence[int]) -> Tensor:
        jobs = []
        for number in numbers:
            self._narrowed.pop(number, None)
            job = self._on_weights(number)
            if self.held:
                job = job._replace(scores=self.held[number].data_ptr())
            jobs.append(job)
        return self._leading(jobs, holds=bool(self.held))

    def _leading(self, jobs: Sequence[Any], **does: bool) -> Tensor:
        """Return the histograms of zeros and of leading bits, int64 ``(jobs, HISTOGRAM)``."""
        jobs = [job._replace(low=0, high=NO_PLACE, shift=LEADING_SHIFT) for job in jobs]
        swept = kernels.sweep(jobs, self._scoring, self._device, HISTOGRAM - 1, **does)
        assert swept.tally is not None
        return swept.tally

    def around(self, buckets: Mapping[int, int], samples: Mapping[int, Tensor]) -> Tensor:
        expected = {}
        for number, bucket in buckets.items():
            counted = samples[number]
            inside, size = int(counted[bucket]), max(1, int(counted.sum()))
            # The count in a sample varies by its square root.
            most = inside + 4 * math.sqrt(inside + 1)
            expected[number] = math.ceil(self._grids[number].blocks * min(1.0, most / size))
        counts = self._narrow(buckets, expected)
        rows = torch.zeros(len(buckets), HISTOGRAM, dtype=torch.int64)
        for row, number in zip(rows, buckets, strict=True):
            removed, zeros, refused, within, _ = counts[number]
            # From all blocks to the bucket's: none of the others needs a bucket of its own.
            row[_LAST_FINITE] = self._grids[number].blocks - removed - within - refused
            row[_FIRST_REFUSED] = refused
            row[1] += removed - zeros
            row[buckets[number]] += within
            row[0] = zeros
        return rows

    def _narrow(
        self, buckets: Mapping[int, int], expected: Mapping[int, int]
    ) -> dict[int, list[int]]:
        """Decide about all blocks outside of a bucket of leading bits, and list the blocks inside
        where there is room for them. Waits for the device.

        Args:
            buckets: by the number of the shard. Bucket 0 has the zeros, which are not listed.
            expected: how many blocks each list probably has at most.

        Returns:
            ``counts`` of :class:`~dist_sparse.extras.device.kernels.Swept`, in CPU memory.
        """
        blocks = [self._grids[number].blocks for number in buckets]
        programs = kernels.programs_for(blocks, self._scoring.width)
        made: dict[int, _Narrowed] = {}
        jobs = []
        for (number, bucket), shares in zip(buckets.items(), programs, strict=True):
            low = max(1, (bucket - 1) << LEADING_SHIFT)
            high = (bucket << LEADING_SHIFT) - 1
            capacity = self.list_capacity(number, expected[number] if bucket else 0, shares)
            scores, lengths = self._ints(shares, capacity), self._ints(shares)
            kept, dirty = self._words(number), self._words(number)
            one = _Narrowed(low, high, scores, torch.empty_like(scores), lengths, kept, dirty)
            made[number] = one
            job = self._on_weights(number)._replace(
                low=low,
                high=high,
                capacity=capacity,
                **_addresses(
                    scores=scores, places=one.places, lengths=lengths, kept=kept, dirty=dirty
                ),
            )
            jobs.append(job)
        does = {"lists": True, "packs": True, "counts": True}
        swept = kernels.sweep(jobs, self._scoring, self._device, **does)
        assert swept.counts is not None
        [counts] = on_host([swept.counts])
        found = dict(zip(buckets, counts.tolist(), strict=True))
        for number, one in made.items():
            self._narrowed.pop(number, None)
            if not found[number][_LOST]:
                one.removed, one.zeros = found[number][: _ZEROS + 1]
                self._narrowed[number] = one
        return found

    def list_capacity(self, number: int, listed: int, programs: int) -> int:
        """Return how many blocks each of the programs may list."""
        if not listed or not _fits(listed, self._weights[number]):
            return 0
        # Tiles are dealt out in turn, so that programs find about equally many: the largest of them
        # by few standard deviations more than the average.
        average = listed / programs
        deviations = math.sqrt(2 * math.log(1000 * programs))
        return math.ceil(average + deviations * math.sqrt(average)) + 16

    def histograms(self, prefixes: Prefixes, before: int, shift: int, buckets: int) -> list[Tensor]:
        # Shards that were counted as a whole: from here on, the blocks in the bucket suffice.
        if before == LEADING_SHIFT and not self.held:
            wide, expected = {}, {}
            for number, (prefix, counts) in prefixes.items():
                inside = int(counts[1 + prefix])
                if number not in self._narrowed and _fits(inside, self._weights[number]):
                    wide[number], expected[number] = 1 + prefix, inside
            if wide:
                self._narrow(wide, expected)
        tasks = {}
        for number, (prefix, _) in prefixes.items():
            # Zeros have a bucket of their own in the first round.
            low, high = max(1, prefix << before), ((prefix + 1) << before) - 1
            tasks[number] = {"low": low, "high": high, "shift": shift}
        found = self._sweep(tasks, buckets)
        return [found[number][1:] for number in prefixes]

    def ties(self, wanted: Limits) -> Mapping[int, Tensor]:
        # Tables whose list may take too much memory are left out.
        found: dict[int, Tensor] = {}
        few = {
            number: most
            for number, (_, most) in wanted.items()
            if _fits(most, self._weights[number])
        }
        places = self._ints(sum(few.values())).fill_(NO_PLACE)
        lengths = self._ints(len(few))
        tasks: dict[int, dict[str, int]] = {}
        lengths.zero_()
        for i, (number, most) in enumerate(few.items()):
            start = sum(map(len, found.values()))
            score = wanted[number][0]
            found[number] = places[start : start + most]
            tasks[number] = {"low": score, "high": score, "room": most} | _addresses(
                ties=found[number], tied=lengths[i:]
            )
        self._sweep(tasks, ties=True)
        return found

    def masks(self, limits: Limits) -> dict[int, NewBits]:
        words: dict[int, tuple[Tensor, Tensor]] = {}
        tasks: dict[int, dict[str, int]] = {}
        removes: dict[int, bool] = {}
        for number, (score, upto) in limits.items():
            narrowed = self._listed(number, score, score)
            if narrowed is None:
                kept, dirty = self._words(number), self._words(number)
            else:
                kept, dirty = narrowed.kept, narrowed.dirty
                removes[number] = narrowed.removed > 0
            words[number] = kept, dirty
            if score == 0 and upto >= self._grids[number].blocks and number in self._narrowed:
                # All that score 0 are removed, as in each update at a constant level. Other blocks
                # are kept by now, or dirty.
                narrowed = self._narrowed[number]
                words[number] = narrowed.kept.bitwise_or_(narrowed.dirty), narrowed.dirty.zero_()
                removes[number] = narrowed.zeros > 0
                continue
            task = {"low": score, "high": score, "last": min(upto - 1, NO_PLACE)}
            tasks[number] = task | _addresses(kept=kept, dirty=dirty)
        # Known, without a wait, where blocks were removed before a list was read.
        unknown = [number for number in tasks if not removes.get(number)]
        swept = self._sweep(tasks, packs=True, counts=bool(unknown))
        counted = on_host([swept[number][:1] for number in unknown])
        removes |= {number: bool(count) for number, count in zip(unknown, counted, strict=True)}
        made: dict[int, NewBits] = {}
        for number, (kept, dirty) in words.items():
            whole = slice(self._grids[number].bytes)
            kept, dirty = kept.view(torch.uint8)[whole], dirty.view(torch.uint8)[whole]
            made[number] = kept, dirty, removes[number]
        return made

    def _words(self, number: int) -> Tensor:
        """Return memory for a bit of each block: int32, as atomic operations need words."""
        return self._ints(-(-self._grids[number].blocks // 32))

    def _sweep(
        self, tasks: Mapping[int, Mapping[str, int]], buckets: int = 0, **does: bool
    ) -> dict[int, Tensor]:
        """Return the tally or the counts of each shard with a task, from held or listed scores if
        possible. Empty if the launch counts nothing."""
        launches: dict[tuple[bool, Any], dict[int, Any]] = {}
        for number, task in tasks.items():
            how, job = self._source(number, task["low"], task["high"])
            launches.setdefault(how, {})[number] = job._replace(**task)
        found: dict[int, Tensor] = {}
        for (from_list, scoring), jobs in launches.items():
            swept = kernels.sweep(
                [*jobs.values()], scoring, self._device, buckets, from_list=from_list, **does
            )
            counted = swept.tally if buckets else swept.counts
            if counted is not None:
                found |= zip(jobs, counted.unbind(), strict=True)
        return found

    def _on_weights(self, number: int) -> Any:
        """Return a launch's job on the weights of a shard."""
        grid = self._grids[number]
        job = kernels.Job(self._weights[number].data_ptr(), grid.blocks)
        if not self._totals:
            return job
        totals = self._totals[number]
        # All fields of a job are int64: these have the bits of float64.
        numbers = struct.pack("ddd", totals.initial, totals.share, totals.most)
        initial, share, most = struct.unpack("qqq", numbers)
        shifts = self._scoring.shifts
        return job._replace(
            totals=totals.total.data_ptr(),
            per_row=grid.cols.bit_length() - 1 if shifts else grid.cols,
            initial=initial,
            share=share,
            most=most,
        )

    def _listed(self, number: int, low: int, high: int) -> _Narrowed | None:
        """Return the list of a shard if it has all blocks with scores from ``low`` to ``high``."""
        narrowed = self._narrowed.get(number)
        # low - 1 too: a pool may move the threshold just below the list, which removes none of it.
        inside = narrowed and narrowed.low - 1 <= low <= high <= narrowed.high
        return narrowed if inside else None

    def _source(self, number: int, low: int, high: int) -> tuple[tuple[bool, Any], Any]:
        """Return whether a launch reads a list and how it scores, for scores from ``low`` to
        ``high``, and its job on the shard."""
        job, given = kernels.Job, kernels.SCORES
        if self.held:
            scores = self.held[number]
            return (False, given), job(scores.data_ptr(), scores.numel())
        if narrowed := self._listed(number, low, high):
            return (True, given), narrowed.job
        return (False, self._scoring), self._on_weights(number)


def _addresses(**tensors: Tensor) -> dict[str, int]:
    """Return the addresses of tensors, as fields of a job."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
