"""Mask updates of shards that are flat sequences of equal blocks, by Triton kernels on CUDA.

Blocks are parts of a row, as wide as a kernel can add up in the CPU's order, and no border cuts
one. The shards of many tables share each launch. Weights are read once if their scores are held,
and else twice:

1. score all blocks, and count their leading bits;
2. count the blocks in the bucket that holds the threshold. If scores are not held, list these few
   blocks, and decide about all others;
3. count among what is held or listed;
4. decide about all held scores, or about the listed blocks.

Everywhere else torch's own operations do the same, and are the oracle in tests
(:mod:`~dist_sparse.masking.block_masks`, :mod:`~dist_sparse.masking.selection`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_sparse.masking.device import on_host
from dist_sparse.records import LEADING_SHIFT
from dist_sparse.tables.shards import Block, Rect, Shard, grid_of

# Places in a list are int32, and a program looks at some behind the last.
_MOST = (1 << 31) - (1 << 20)

# Behind all places in a list.
NO_PLACE = (1 << 31) - 1

# Elements of a block that kernels add up in torch's order.
_WIDTHS = {1, 2, 4, 8, *range(16, 4097, 16)}

# Bytes of a listed block: its score and its place.
_LISTED = 8


def kernels_on(device: torch.device) -> Any:
    """Return :mod:`~dist_sparse.masking.flat_triton` for a device that can run it, else None."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("dist_sparse.masking.flat_triton")


def flat_width(rect: Rect, block: Block, tensor: Tensor) -> int | None:
    """Return the elements of a block of the shard ``rect`` if the kernels can take it, else
    None."""
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


class Limit(NamedTuple):
    """Blocks that score less than ``bits`` are removed, and those that score as much before the
    flat place ``upto``."""

    bits: int
    upto: int


class FlatMask(NamedTuple):
    """The new mask of a shard.

    Args:
        kept: its bits, uint8, 1 = kept.
        dirty: bits of the removed blocks that do not score 0, uint8.
        removes: whether anything is removed; None if it is not known.
    """

    kept: Tensor
    dirty: Tensor
    removes: bool | None


@dataclass(eq=False)
class _Narrowed:
    """A shard in which all is decided but the listed blocks, which score from ``low`` to ``high``.

    Args:
        scores: of the listed blocks, int32.
        places: of the listed blocks, int32.
        kept: bits, as words of 32; listed blocks are still kept.
        dirty: bits of the same form.
        length: how many are listed, int32.
        removed: number of blocks removed so far, int64 ``()``, once it is launched.
    """

    low: int
    high: int
    scores: Tensor
    places: Tensor
    kept: Tensor
    dirty: Tensor
    length: Tensor = field(init=False)
    removed: Tensor = field(init=False)

    def bits(self) -> dict[str, int]:
        """Return the addresses of the bits, as fields of a job."""
        return {"kept": self.kept.data_ptr(), "dirty": self.dirty.data_ptr()}

    def addresses(self) -> dict[str, int]:
        """Return where all of it is written, as fields of a job."""
        lists = {"scores": self.scores, "places": self.places, "length": self.length}
        return {name: tensor.data_ptr() for name, tensor in lists.items()} | self.bits()


class FlatScores:
    """The scores of several shards of one dtype and block width, which share each launch.

    Args:
        shards: on one device that has the kernels.
        blocks: the sparse block of each, within a row.
        absolute: whether a block scores the mean of absolute values, not of squares.

    Attributes:
        limits: of the shards, by their number. Set them before reading :attr:`masks`.
        held: the scores of each shard, int32 ``(blocks,)``; empty where they are computed again.
        counts: what :meth:`first_histograms` returned, in CPU memory. Set it before calling
            :meth:`histograms`.
    """

    counts: Tensor

    def __init__(self, shards: Sequence[Shard], blocks: Sequence[Block], absolute: bool) -> None:
        self._weights = [tensor for _, tensor in shards]
        rects = [rect for rect, _ in shards]
        self._grids = list(map(grid_of, rects, blocks))
        self.limits: dict[int, Limit] = {}
        tensor = self._weights[0]
        self._device = tensor.device
        self._kernels = kernels_on(self._device)
        width = flat_width(rects[0], blocks[0], tensor)
        assert width is not None
        self._scoring = self._kernels.Scoring(tensor.dtype, width, absolute)
        self._narrowed: dict[int, _Narrowed] = {}
        self.held: list[Tensor] = []
        ints = partial(torch.empty, dtype=torch.int32, device=self._device)
        if too_large(4, width * tensor.element_size()):
            self._lengths = ints(len(shards)).zero_()
        else:
            self.held = [ints(grid.blocks) for grid in self._grids]

    def first_histograms(self) -> Tensor:
        """Score all blocks. Return :func:`~dist_sparse.masking.scores.first_histogram` of each
        shard, int64 ``(shards, HISTOGRAM)``."""
        jobs = [self._on_weights(number) for number in range(len(self._grids))]
        for i, scores in enumerate(self.held):
            jobs[i] = jobs[i]._replace(scores=scores.data_ptr())
        buckets = 1 << 31 - LEADING_SHIFT
        hold = bool(self.held)
        counts: Tensor = self._kernels.score(jobs, self._scoring, self._device, buckets, hold=hold)
        return counts

    def histograms(
        self, prefixes: Mapping[int, int], before: int, shift: int, buckets: int
    ) -> list[Tensor]:
        """As :meth:`~dist_sparse.masking.scores.JointScores.histograms`."""
        to_count: dict[int, dict[str, int]] = {}
        to_narrow: dict[int, dict[str, int]] = {}
        narrows = before == LEADING_SHIFT and not self.held
        for number, prefix in prefixes.items():
            # Zeros have a bucket of their own in the first round.
            low, high = max(1, prefix << before), ((prefix + 1) << before) - 1
            task = {"low": low, "high": high, "shift": shift}
            if narrows and self._narrow(number, low, high, int(self.counts[number, 1 + prefix])):
                to_narrow[number] = task | self._narrowed[number].addresses()
            else:
                to_count[number] = task
        found = {number: counts for number, counts, _ in self._sweep(to_count, buckets)}
        for number, counts, removed in self._sweep(to_narrow, buckets, lists=True, packs=True):
            found[number] = counts
            self._narrowed[number].removed = removed
        return [found[number] for number in prefixes]

    def listed(self, number: int, score: int, most: int) -> Tensor | None:
        """Return the flat places of the blocks that have a score, int32 ``(n,)``, the first
        ``most`` in ascending order, and then NO_PLACE; None where they are not listed."""
        narrowed = self._narrowed.get(number)
        if narrowed is None or not narrowed.low <= score <= narrowed.high:
            return None
        places = narrowed.places.masked_fill(narrowed.scores != score, NO_PLACE)
        return places.sort().values[:most]

    @cached_property
    def masks(self) -> dict[int, FlatMask]:
        """The new masks of shards, by their numbers. One wait for all of them."""
        words: dict[int, tuple[Tensor, Tensor]] = {}
        removed: list[tuple[int, Tensor]] = []
        to_settle: dict[int, Any] = {}
        to_pack: dict[int, dict[str, int]] = {}
        for number, (score, upto) in self.limits.items():
            narrowed = self._narrowed.get(number)
            task = {"low": score, "high": score, "last": upto - 1}
            if narrowed is not None and narrowed.low - 1 <= score <= narrowed.high:
                words[number] = narrowed.kept, narrowed.dirty
                to_settle[number] = self._on_list(narrowed)._replace(**task, **narrowed.bits())
                removed.append((number, narrowed.removed))
            else:
                kept, dirty = words[number] = self._words(number), self._words(number)
                to_pack[number] = task | {"kept": kept.data_ptr(), "dirty": dirty.data_ptr()}
        removed += [(number, count) for number, _, count in self._sweep(to_pack, packs=True)]
        if to_settle:
            counts = self._kernels.settle([*to_settle.values()], self._device)
            removed += zip(to_settle, counts.unbind(), strict=True)
        counted = on_host([count.view(1) for _, count in removed])
        removing = {number for (number, _), count in zip(removed, counted, strict=True) if count}
        made = {}
        for number, (kept, dirty) in words.items():
            whole = slice(self._grids[number].bytes)
            kept, dirty = kept.view(torch.uint8)[whole], dirty.view(torch.uint8)[whole]
            made[number] = FlatMask(kept, dirty, number in removing)
        return made

    def _narrow(self, number: int, low: int, high: int, inside: int) -> bool:
        """Prepare a list of the blocks that score from ``low`` to ``high``, ``inside`` in number.
        False, with nothing done, if it would take too much memory."""
        if too_large(_LISTED * inside, self._weights[number].nbytes):
            return False
        scores = torch.empty(inside, dtype=torch.int32, device=self._device)
        kept, dirty = self._words(number), self._words(number)
        made = _Narrowed(low, high, scores, torch.empty_like(scores), kept, dirty)
        made.length = self._lengths[number:]
        self._narrowed[number] = made
        return True

    def _words(self, number: int) -> Tensor:
        """Return memory for a bit of each block, int32, for atomic operations on words."""
        count = -(-self._grids[number].blocks // 32)
        return torch.empty(count, dtype=torch.int32, device=self._device)

    def _sweep(
        self,
        tasks: Mapping[int, Mapping[str, int]],
        buckets: int = 0,
        *,
        lists: bool = False,
        packs: bool = False,
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return number, counts and removed blocks of each shard with a task, from scores where
        they are known."""
        on_scores: dict[int, Any] = {}
        on_weights: dict[int, Any] = {}
        for number, task in tasks.items():
            # Packing is about all blocks.
            low, high = (-1, -1) if packs else (task["low"], task["high"])
            reads_weights, job = self._source(number, low, high)
            (on_weights if reads_weights else on_scores)[number] = job._replace(**task)
        found: list[tuple[int, Tensor, Tensor]] = []
        for jobs, scoring in ((on_scores, self._kernels.SCORES), (on_weights, self._scoring)):
            if jobs:
                counts, removed = self._kernels.sweep(
                    [*jobs.values()], scoring, self._device, buckets, lists=lists, packs=packs
                )
                found += zip(jobs, counts.unbind(), removed.unbind(), strict=True)
        return found

    def _on_weights(self, number: int) -> Any:
        """Return a launch's job on the weights of a shard."""
        return self._kernels.Job(self._weights[number].data_ptr(), self._grids[number].blocks)

    def _source(self, number: int, low: int, high: int) -> tuple[bool, Any]:
        """Return whether a launch reads weights, for what scores from ``low`` to ``high``, and its
        job on the shard."""
        if self.held:
            scores = self.held[number]
            return False, self._kernels.Job(scores.data_ptr(), scores.numel())
        narrowed = self._narrowed.get(number)
        if narrowed is not None and narrowed.low <= low <= high <= narrowed.high:
            return False, self._on_list(narrowed)
        return True, self._on_weights(number)

    def _on_list(self, narrowed: _Narrowed) -> Any:
        scores, places = narrowed.scores, narrowed.places
        return self._kernels.Job(scores.data_ptr(), scores.numel(), listed=places.data_ptr())


class Pruned(NamedTuple):
    """What is to be zeroed in a shard.

    Args:
        shard: live.
        block: the sparse block.
        kept: bits, uint8.
        changed: bits of the blocks that were kept before, and of those that may not be zero; None
            is all blocks.
    """

    shard: Shard
    block: Block
    kept: Tensor
    changed: tuple[Tensor, Tensor] | None = None


def prune(shards: Sequence[Pruned]) -> list[int]:
    """Write zero to what is removed, in one launch for all shards that are alike. Return the places
    of the shards that the kernels can't take."""
    left: list[int] = []
    launches: dict[tuple[Any, ...], list[Any]] = {}
    for i, (shard, block, kept, changed) in enumerate(shards):
        rect, tensor = shard
        kernels, width = kernels_on(tensor.device), flat_width(rect, block, tensor)
        if kernels is None or width is None:
            left.append(i)
            continue
        addresses = [bits.data_ptr() for bits in changed or ()]
        job = kernels.Pruning(tensor.data_ptr(), grid_of(rect, block).blocks, kept.data_ptr())
        job = job._replace(**dict(zip(("before", "dirty"), addresses, strict=False)))
        alike = kernels, width, tensor.element_size(), tensor.device, changed is None
        launches.setdefault(alike, []).append(job)
    for (kernels, *how, _), jobs in launches.items():
        kernels.prune(jobs, *how)
    return left
