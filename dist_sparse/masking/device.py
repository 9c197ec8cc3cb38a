"""What differs between CPUs and accelerators in a mask update: sizes of pieces, counting, copies.

A CPU works on pieces that stay in its caches, and reads a value for free. On an accelerator each
operation on a piece is a launch, and each value that the host reads is a wait: pieces are large,
and counts stay on the device until one copy brings those of all tables. The integers are the same.
The second half is for accelerators alone: mask updates by Triton's kernels (:class:`FlatScores`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_sparse.masking.totals import ByTotals, RowTotals
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Rect, Shard, grid_of


@dataclass(frozen=True)
class Pieces:
    """How much a mask update does at a time on a device.

    Args:
        elements: most elements scored at a time, as float64.
        least: fewest elements scored at a time, unless the shard has fewer.
        chunks: a shard is scored in so many chunks, within the two limits above.
        scores: fewest scores to check and count at a time, unless the shard has fewer.
        flags: flags of a mask expanded at a time.
        hashed: bytes hashed at a time.
    """

    elements: int
    least: int
    chunks: int
    scores: int
    flags: int
    hashed: int


# 8 MiB of float64 is about what the last-level cache of one core keeps. The first of several chunks
# writes into fresh memory, whose pages are mapped in while it does, which takes longer than
# scoring. Scores are few enough to be in the cache still, and enough to make the calls worth it.
ON_CPU = Pieces(
    elements=1 << 20, least=1 << 18, chunks=8, scores=1 << 18, flags=1 << 20, hashed=1 << 22
)

# Large chunks take the time of their memory, not that of their launches; with 64 of a shard,
# the float64 elements of one take at most 3% of a float32 table. (C4)
ON_ACCELERATOR = Pieces(
    elements=1 << 26, least=1 << 21, chunks=64, scores=1 << 22, flags=1 << 23, hashed=1 << 26
)

# Copies of each counter: additions to one address wait for each other.
_LANES = 256


def pieces_on(device: torch.device) -> Pieces:
    """Return the sizes for a device."""
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR


def count_each(at: Tensor, buckets: int) -> Tensor:
    """Return how often each number below ``buckets`` is in ``at``, int64 ``(buckets,)``, without
    waiting for the device, as torch.bincount does to learn the largest number.

    Args:
        at: int32 ``(n,)``, contiguous; overwritten.
    """
    whole = at.numel() // _LANES * _LANES
    lanes = torch.arange(_LANES, dtype=torch.int32, device=at.device).mul_(buckets)
    at[:whole].view(-1, _LANES).add_(lanes)
    one = torch.ones(1, dtype=torch.int32, device=at.device)
    # Integers: their sum does not depend on the order of the additions.
    counts = torch.zeros(_LANES * buckets, dtype=torch.int32, device=at.device)
    return counts.index_add_(0, at, one.expand(at.numel())).view(_LANES, buckets).sum(0)


def count_within(keys: Tensor, low: int, shift: int, buckets: int) -> Tensor:
    """Return how many of ``keys`` ``(n,)`` fall into each of the buckets of ``2**shift`` numbers
    from ``low`` on, int64 ``(buckets,)``, as :func:`count_each`."""
    at = (keys - low).bitwise_right_shift_(shift)
    # What is outside has a bucket at either end: to leave it out would wait for the device.
    at = at.clamp_(-1, buckets).add_(1).to(torch.int32)
    return count_each(at, buckets + 2)[1:-1]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one dtype in CPU memory; those of an accelerator are copied at once, with
    one wait."""
    found = list(tensors)
    away: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if not tensor.is_cpu:
            away.setdefault(tensor.device, []).append(i)
    for places in away.values():
        copied = torch.cat([tensors[i].flatten() for i in places]).cpu()
        parts = torch.split(copied, [tensors[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            found[i] = part.view(tensors[i].shape)
    return found


# Mask updates of shards that are flat sequences of equal blocks, by Triton kernels on CUDA.
#
# Blocks are parts of a row, as wide as a kernel can add up in the CPU's order, and no border cuts
# one. The shards of many tables share each launch. Weights are read once if their scores are held,
# and else twice:
#
# 1. score all blocks, and count their leading bits;
# 2. count the blocks in the bucket that holds the threshold. If scores are not held, list these few
#    blocks, and decide about all others;
# 3. count among what is held or listed;
# 4. decide about all held scores, or about the listed blocks.
#
# Everywhere else torch's own operations do the same, and are the oracle in tests.

# Places in a list are int32, and a program looks at some behind the last.
_MOST = (1 << 31) - (1 << 20)

# Behind all places in a list, and above all scores.
NO_PLACE = (1 << 31) - 1

# Elements of a block that kernels add up in torch's order.
_WIDTHS = {1, 2, 4, 8, *range(16, 4097, 16)}

# Bytes of a listed block: its score and its place.
_LISTED = 8


def kernels_on(device: torch.device) -> Any:
    """Return :mod:`~dist_sparse.masking.kernels` for a device that can run it, else None."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("dist_sparse.masking.kernels")


def flat_width(rect: Rect, block: Block, tensor: Tensor) -> int | None:
    """Return the elements of a block of the shard ``rect`` if the kernels can take it, else
    None."""
    if kernels_on(tensor.device) is None:
        return None
    grid = grid_of(rect, block)
    width = rect.cols if grid.cols == 1 else block[1]
    equal = block[0] == 1 and rect.cols == grid.cols * width
    uncut = grid.cols == 1 or rect.col % width == 0
    if not (equal and uncut and tensor.is_contiguous() and 0 < grid.blocks < _MOST):
        return None
    # Neighbours are added in pairs, or 16 sums are taken beside each other. Of wider blocks torch
    # adds up parts first.
    return width if width in _WIDTHS else None


def too_large(nbytes: int, weights: int) -> bool:
    """Whether so many bytes may not be held beside ``weights`` bytes of a shard on an accelerator,
    where tables fill the memory."""
    return nbytes * 20 > weights


def _fits(listed: int, weights: Tensor) -> bool:
    """Whether so many blocks of a shard may be listed. Twice as much as is held for sure: rarely
    does a bucket hold as many, and without a list all weights are read twice more."""
    return not too_large(_LISTED * listed, 2 * weights.nbytes)


Prefixes = Mapping[int, tuple[int, Tensor]]
"""By the number of a shard the leading bits of scores that are counted, and its first histogram."""

NewBits = tuple[Tensor, Tensor, bool]
"""The new mask of a shard as bits of kept blocks, and of removed ones that do not score 0; and
whether anything is removed."""


@dataclass(eq=False)
class _Narrowed:
    """A shard in which all is decided but the listed blocks, which score from ``low`` to ``high``.

    Args:
        scores: of the listed blocks, int32.
        places: of the listed blocks, int32.
        kept: bits, as words of 32; listed blocks are still kept.
        dirty: bits of the same form.
        removed: number of blocks removed so far, int64 ``()``, once it is launched.
    """

    low: int
    high: int
    scores: Tensor
    places: Tensor
    kept: Tensor
    dirty: Tensor
    removed: Tensor = field(init=False)


class FlatScores:
    """The scores of several shards of one dtype and block width, which share each launch.

    Args:
        shards: on one device that has the kernels.
        blocks: the sparse block of each, within a row.
        measure: how elements are scored, the same in all shards.
        totals: the totals of each shard, if the measure is by them.

    Attributes:
        held: the scores of each shard, int32 ``(blocks,)``; empty where they are computed again.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        blocks: Sequence[Block],
        measure: ByTotals | str,
        totals: Sequence[RowTotals],
    ) -> None:
        # Kernels read them one after the other.
        self._totals = [known._replace(total=known.total.contiguous()) for known in totals]
        self._weights = [tensor for _, tensor in shards]
        rects = [rect for rect, _ in shards]
        self._grids = list(map(grid_of, rects, blocks))
        tensor = self._weights[0]
        self._device = tensor.device
        self._kernels = kernels_on(self._device)
        width = flat_width(rects[0], blocks[0], tensor)
        assert width is not None
        self._scoring = self._kernels.Scoring(
            tensor.dtype,
            width,
            absolute=measure == "L1",
            weights=not isinstance(measure, ByTotals) or measure.squares,
            totals=next(iter(totals), None),
        )
        self._narrowed: dict[int, _Narrowed] = {}
        self._ints = partial(torch.empty, dtype=torch.int32, device=self._device)
        self.held: list[Tensor] = []
        if not too_large(4, width * tensor.element_size()):
            self.held = [self._ints(grid.blocks) for grid in self._grids]

    def first_histograms(self) -> Tensor:
        """Score all blocks. Return :func:`~dist_sparse.masking.scores.first_histogram` of each
        shard, int64 ``(shards, HISTOGRAM)``."""
        # Zeros are what is below 1.
        task = {"low": 1, "high": NO_PLACE, "shift": LEADING_SHIFT}
        jobs = [self._on_weights(number)._replace(**task) for number in range(len(self._grids))]
        for i, scores in enumerate(self.held):
            jobs[i] = jobs[i]._replace(scores=scores.data_ptr())
        counts: Tensor = self._kernels.sweep(
            jobs, self._scoring, self._device, 1 << 31 - LEADING_SHIFT, holds=bool(self.held)
        )
        return counts

    def histograms(self, prefixes: Prefixes, before: int, shift: int, buckets: int) -> list[Tensor]:
        """As :meth:`~dist_sparse.masking.scores.JointScores.histograms`."""
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
        # Not before: they are read from here on.
        self._narrowed |= narrowed
        return [found[number][1:] for number in prefixes]

    def ties(self, wanted: Mapping[int, tuple[int, int]]) -> dict[int, Tensor]:
        """Return the flat places of the blocks that have a score, int32 in no order, with NO_PLACE
        among them, by the number of the shard; nothing where they may take too much memory.

        Args:
            wanted: by the number of the shard, the score, and how many blocks have it at most.
        """
        found: dict[int, Tensor] = {}
        few = {
            number: most
            for number, (_, most) in wanted.items()
            if _fits(most, self._weights[number])
        }
        places, lengths = self._ints(sum(few.values())).fill_(NO_PLACE), self._ints(len(few))
        scores, tasks = torch.empty_like(places), {}
        lengths.zero_()
        for i, (number, most) in enumerate(few.items()):
            start, score = sum(map(len, found.values())), wanted[number][0]
            found[number] = places[start : start + most]
            tasks[number] = {"low": score, "high": score} | _addresses(
                scores=scores[start:], places=found[number], length=lengths[i:]
            )
        self._sweep(tasks, lists=True)
        return found

    def masks(self, limits: Mapping[int, tuple[int, int]]) -> dict[int, NewBits]:
        """Return the new masks of shards, by their numbers. One wait for all of them.

        Args:
            limits: of each shard a score and a flat place: blocks that score less are removed, and
                those that score as much before that place.
        """
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
        removing = {number for (number, _), count in zip(removed, counted, strict=True) if count}
        made: dict[int, NewBits] = {}
        for number, (kept, dirty) in words.items():
            whole = slice(self._grids[number].bytes)
            kept, dirty = kept.view(torch.uint8)[whole], dirty.view(torch.uint8)[whole]
            made[number] = kept, dirty, number in removing
        return made

    def _words(self, number: int) -> Tensor:
        """Return memory for a bit of each block, int32, for atomic operations on words."""
        return self._ints(-(-self._grids[number].blocks // 32))

    def _sweep(
        self, tasks: Mapping[int, Mapping[str, int]], buckets: int = 0, **does: bool
    ) -> dict[int, Tensor]:
        """Return the counts of each shard with a task, from scores where they are known."""
        launches: dict[tuple[bool, Any], dict[int, Any]] = {}
        for number, task in tasks.items():
            how, job = self._source(number, task["low"], task["high"])
            launches.setdefault(how, {})[number] = job._replace(**task)
        found: dict[int, Tensor] = {}
        for (from_list, scoring), jobs in launches.items():
            counts = self._kernels.sweep(
                [*jobs.values()], scoring, self._device, buckets, from_list=from_list, **does
            )
            found |= zip(jobs, counts.unbind(), strict=True)
        return found

    def _on_weights(self, number: int) -> Any:
        """Return a launch's job on the weights of a shard."""
        grid = self._grids[number]
        job = self._kernels.Job(self._weights[number].data_ptr(), grid.blocks)
        return job.with_totals(self._totals[number], grid.cols) if self._totals else job

    def _listed(self, number: int, low: int, high: int) -> _Narrowed | None:
        """Return the list of a shard if it decides about scores from ``low`` to ``high``."""
        found = self._narrowed.get(number)
        # Of a limit just below the list, nothing in it is removed.
        return found if found and found.low - 1 <= low <= high <= found.high else None

    def _source(self, number: int, low: int, high: int) -> tuple[tuple[bool, Any], Any]:
        """Return whether a launch reads a list and how it scores, for what scores from ``low`` to
        ``high``, and its job on the shard."""
        job, known = self._kernels.Job, self._kernels.SCORES
        if self.held:
            scores = self.held[number]
            return (False, known), job(scores.data_ptr(), scores.numel())
        if narrowed := self._listed(number, low, high):
            scores, places = narrowed.scores, narrowed.places
            return (True, known), job(scores.data_ptr(), scores.numel(), listed=places.data_ptr())
        return (False, self._scoring), self._on_weights(number)


def _addresses(**tensors: Tensor) -> dict[str, int]:
    """Return the addresses of tensors, as fields of a job."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
