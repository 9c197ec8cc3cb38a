"""Mask updates of shards that are flat sequences of equal blocks, by Triton kernels on CUDA.

Blocks are parts of a row that no border cuts, of a width that a kernel can sum in the CPU's order.
The shards of many tables share each launch. Weights are read once if their scores are held, and
twice otherwise:

1. Score all blocks, and count their leading bits.
2. Count the blocks in the bucket that holds the threshold. If scores are not held, list these few
   blocks, and decide about all others.
3. Count the held scores or listed blocks.
4. Decide about all held scores, or about the listed blocks.

Elsewhere torch's operations do the same; tests compare the kernels with them.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_sparse.extras.device import kernels
from dist_sparse.masking.device import NO_PLACE, flat_width, on_host, too_large
from dist_sparse.masking.scores import ByTotals, Limits, NewBits, Prefixes, RowTotals
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Shard, grid_of

# Bytes of a listed block: its score and its place.
_LISTED = 8


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
        scores: of the listed blocks, int32.
        places: of the listed blocks, int32.
        kept: bits, as words of 32; listed blocks are still kept.
        dirty: bits of the same form.
        removed: number of blocks removed so far, int64 ``()``; set after the launch.
    """

    low: int
    high: int
    scores: Tensor
    places: Tensor
    kept: Tensor
    dirty: Tensor
    removed: Tensor = field(init=False)


class FlatScores:
    """The scores of several shards of one dtype and block width, which share each launch: a
    :class:`~dist_sparse.masking.scores.Batch`.

    Args:
        shards: on one device that has the kernels.
        blocks: the sparse block of each, within a row.
        measure: how elements are scored, the same in all shards.
        totals: the totals of each shard, if the measure is by them.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        blocks: Sequence[Block],
        measure: ByTotals | str,
        totals: Sequence[RowTotals],
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
            self._scoring = self._scoring._replace(
                weights=measure.squares,
                totals=totals[0].total.dtype,
                of_elements=totals[0].of_elements,
            )
        self._narrowed: dict[int, _Narrowed] = {}
        self._ints = partial(torch.empty, dtype=torch.int32, device=self._device)
        self.held: list[Tensor] = []
        if not too_large(4, width * tensor.element_size()):
            self.held = [self._ints(grid.blocks) for grid in self._grids]

    def first_histograms(self) -> Tensor:
        # Zeros, below 1, are counted as removed; the other scores by their leading bits.
        task = {"low": 1, "high": NO_PLACE, "shift": LEADING_SHIFT}
        jobs = [self._on_weights(number)._replace(**task) for number in range(len(self._grids))]
        for i, scores in enumerate(self.held):
            jobs[i] = jobs[i]._replace(scores=scores.data_ptr())
        counts: Tensor = kernels.sweep(
            jobs, self._scoring, self._device, 1 << 31 - LEADING_SHIFT, holds=bool(self.held)
        )
        return counts

    def histograms(self, prefixes: Prefixes, before: int, shift: int, buckets: int) -> list[Tensor]:
        to_count: dict[int, dict[str, int]] = {}
        to_narrow: dict[int, dict[str, int]] = {}
        narrowed: dict[int, _Narrowed] = {}
        lengths = self._ints(len(self._grids))
        for number, (prefix, counts) in prefixes.items():
            # Zeros have a bucket of their own in the first round.
            low, high = max(1, prefix << before), ((prefix + 1) << before) - 1
            task = {"low": low, "high": high, "shift": shift}
            first_round = before == LEADING_SHIFT and not self.held
            if not (first_round and _fits(int(counts[1 + prefix]), self._weights[number])):
                to_count[number] = task
                continue
            inside = int(counts[1 + prefix])
            scores, kept, dirty = self._ints(inside), self._words(number), self._words(number)
            made = _Narrowed(low, high, scores, torch.empty_like(scores), kept, dirty)
            narrowed[number] = made
            to_narrow[number] = task | _addresses(
                scores=scores, places=made.places, length=lengths[number:], kept=kept, dirty=dirty
            )
        found = self._sweep(to_count, buckets)
        if to_narrow:
            lengths.zero_()
            found |= self._sweep(to_narrow, buckets, lists=True, packs=True)
        for number, made in narrowed.items():
            made.removed = found[number][0]
        # Only now: _sweep() reads the lists of self._narrowed.
        self._narrowed |= narrowed
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
        scores, tasks = torch.empty_like(places), {}
        lengths.zero_()
        for i, (number, most) in enumerate(few.items()):
            start = sum(map(len, found.values()))
            score = wanted[number][0]
            found[number] = places[start : start + most]
            tasks[number] = {"low": score, "high": score} | _addresses(
                scores=scores[start:], places=found[number], length=lengths[i:]
            )
        self._sweep(tasks, lists=True)
        return found

    def masks(self, limits: Limits) -> dict[int, NewBits]:
        words: dict[int, tuple[Tensor, Tensor]] = {}
        tasks: dict[int, dict[str, int]] = {}
        removed: list[tuple[int, Tensor]] = []
        for number, (score, upto) in limits.items():
            narrowed = self._listed(number, score, score)
            if narrowed is None:
                kept, dirty = self._words(number), self._words(number)
            else:
                kept, dirty = narrowed.kept, narrowed.dirty
                removed.append((number, narrowed.removed))
            words[number] = kept, dirty
            task = {"low": score, "high": score, "last": upto - 1}
            tasks[number] = task | _addresses(kept=kept, dirty=dirty)
        swept = self._sweep(tasks, packs=True)
        removed += [(number, counts[0]) for number, counts in swept.items()]
        counted = on_host([count.view(1) for _, count in removed])
        removes = dict.fromkeys(limits, False)
        for (number, _), count in zip(removed, counted, strict=True):
            removes[number] |= bool(count)
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
        """Return the counts of each shard with a task, from held or listed scores if possible."""
        launches: dict[tuple[bool, Any], dict[int, Any]] = {}
        for number, task in tasks.items():
            how, job = self._source(number, task["low"], task["high"])
            launches.setdefault(how, {})[number] = job._replace(**task)
        found: dict[int, Tensor] = {}
        for (from_list, scoring), jobs in launches.items():
            counts = kernels.sweep(
                [*jobs.values()], scoring, self._device, buckets, from_list=from_list, **does
            )
            found |= zip(jobs, counts.unbind(), strict=True)
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
        return job._replace(
            totals=totals.total.data_ptr(),
            per_row=grid.cols,
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
            scores, places = narrowed.scores, narrowed.places
            return (True, given), job(scores.data_ptr(), scores.numel(), listed=places.data_ptr())
        return (False, self._scoring), self._on_weights(number)


def _addresses(**tensors: Tensor) -> dict[str, int]:
    """Return the addresses of tensors, as fields of a job."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
